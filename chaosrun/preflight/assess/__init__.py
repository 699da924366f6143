"""Assessments: facts → findings. Pure."""
