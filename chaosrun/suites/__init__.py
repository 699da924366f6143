"""Suites: many drills, what is expected of each, which of them run tonight, and what they did over the nights."""
