"""Carrying a drill out: starting and watching attempts, striking, restarting, cancelling; all of it journalled."""
