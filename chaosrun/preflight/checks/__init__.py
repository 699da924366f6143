"""Checks, a module each with its `CHECK`: what each asks of the nodes, and who judges it."""
