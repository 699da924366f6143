"""Progress of a preflight on stderr: on a terminal one line that changes, and lines that stay for what is wrong; elsewhere a
line for each check. A terminal that goes away ends the display, not the preflight."""

import time
from collections.abc import Callable
from typing import TextIO

from chaosrun.preflight.engine import EventRecord
from chaosrun.preflight.model import Status
from chaosrun.report.ticker import TickingLine
from chaosrun.wording import clock, count

PASSING = ("node.done", "check.began")
"""Events that only a terminal is told of."""


class PreflightTicker:
    """Events are mappings with a key `event`:

    cluster.joined  nodes: how many
    check.began     check, about, nodes: how many are asked
    node.done       check, node, done, of
    check.ended     check, seconds, statuses: number of findings by status
    node.out        node, check, why: left out of what takes several nodes
    """

    def __init__(self, stream: TextIO, *, terminal: bool, now_s: Callable[[], float] = time.monotonic) -> None:
        self._line = TickingLine(stream, terminal=terminal, now_s=now_s)
        self._running: dict[str, str] = {}

    def on_event(self, record: EventRecord) -> None:
        self._take_in(record)
        if _lasts(record) if self._line.terminal else record["event"] not in PASSING:
            self._line.stay(_sentence(record))
        self._line.change(" · ".join(self._running.values()) or _sentence(record))

    def close(self) -> None:
        self._line.close()

    def _take_in(self, record: EventRecord) -> None:
        match record["event"]:
            case "check.began":
                self._running[record["check"]] = f"{record['check']}: {record['about']}"
            case "node.done":
                self._running[record["check"]] = f"{record['check']} {record['done']}/{record['of']}"
            case "check.ended":
                self._running.pop(record["check"], None)


def _sentence(record: EventRecord) -> str:
    match record["event"]:
        case "cluster.joined":
            return f"{count(record['nodes'], 'node')} in the cluster"
        case "check.ended":
            found = {Status(status): number for status, number in record["statuses"].items()}
            parts = [f"{found[status]} {status}" for status in reversed(Status) if found.get(status)]
            return f"{record['check']}: {', '.join(parts) or 'nothing found'}, {clock(record['seconds'])}"
        case "node.out":
            return f"{record['node']} is left out from now on: {record['why']} ({record['check']})"
    return str(record.get("check", record["event"]))


def _lasts(record: EventRecord) -> bool:
    bad = record["event"] == "check.ended" and {Status.FAIL, Status.ERROR} & set(record["statuses"])
    return bool(bad) or record["event"] == "node.out"
