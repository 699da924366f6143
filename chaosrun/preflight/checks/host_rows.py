"""Rows of the check "host": why, and what to do, only where something is wrong. Pure."""

from typing import Any

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Finding, Rows, Status


def row(node: Node, name: str, status: Status, **words: Any) -> Finding:
    told = {word: text for word, text in words.items() if status is not Status.PASS or word not in ("reason", "remedy")}
    return Rows(check="host", name=name, node=node.name).row(status, **told)
