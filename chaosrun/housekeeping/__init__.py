"""Looks after an installation: describes its machine for bug reports, and removes old runs."""
