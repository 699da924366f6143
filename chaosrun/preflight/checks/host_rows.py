"""Rows of the check "host": how a value is graded, and what is said of it. Pure."""

from typing import Any

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Finding, Rows, Status

ROWS = Rows(check="host")


def graded(value: float | None, least: float, small: float) -> Status:
    """A FAIL below `least`, a WARN below `small`; None is no limit."""
    if value is None or value >= max(least, small):
        return Status.PASS
    return Status.FAIL if value < least else Status.WARN


def row(node: Node, name: str, status: Status, *, reason: str = "", remedy: str = "", **more: Any) -> Finding:
    """Why, and what to do, only where something is wrong."""
    told = {} if status is Status.PASS else {"reason": reason, "remedy": remedy}
    return ROWS.row(status, name=name, node=node.name, **told, **more)
