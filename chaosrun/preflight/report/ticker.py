"""Progress of a preflight on stderr: on a terminal one line that changes, and lines that stay for what is wrong; elsewhere a
line for each check."""

from chaosrun.preflight.model import Status
from chaosrun.records.events import EventRecord
from chaosrun.report.ticker import Ticker
from chaosrun.wording import clock, count

PASSING = ("node.done", "check.began")
"""Events that only a terminal is told of."""
ALONE = "; only this machine is looked at: --address, or $RAY_ADDRESS, names a cluster"


class PreflightTicker(Ticker):
    """Events are mappings with a key `event`:

    cluster.joined  nodes: how many; address: null for a private Ray
    check.began     check, about, nodes: how many are asked
    node.done       check, node, done, of
    check.ended     check, seconds, statuses: number of findings by status
    node.out        node, check, why: left out of what takes several nodes
    """

    def on_event(self, record: EventRecord) -> None:
        event, check = record["event"], record.get("check", "")
        if event in PASSING:
            self._running[check] = (
                f"{check} {record['done']}/{record['of']}" if "done" in record else f"{check}: {record['about']}"
            )
        elif event == "check.ended":
            self._running.pop(check, None)
        words = _sentence(record)
        if _lasts(record) if self._line.terminal else event not in PASSING:
            self._line.stay(words)
        self._line.change(" · ".join(self._running.values()) or words)


def _sentence(record: EventRecord) -> str:
    match record["event"]:
        case "cluster.joined":
            return f"{count(record['nodes'], 'node')} in the cluster{ALONE if record['address'] is None else ''}"
        case "check.ended":
            found = {Status(status): number for status, number in record["statuses"].items()}
            parts = [f"{found[status]} {status}" for status in reversed(Status) if found.get(status)]
            return f"{record['check']}: {', '.join(parts) or 'nothing found'}, {clock(record['seconds'])}"
        case "node.out":
            return f"{record['node']} is left out from now on: {record['why']} ({record['check']})"
    return str(record["check"])


def _lasts(record: EventRecord) -> bool:
    alone = record["event"] == "cluster.joined" and record["address"] is None
    return alone or record["event"] == "node.out" or bool({Status.FAIL, Status.ERROR} & {*record.get("statuses", ())})
