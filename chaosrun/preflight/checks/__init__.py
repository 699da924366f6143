"""Checks as the catalogue has them: what each asks of the nodes, and who judges it."""
