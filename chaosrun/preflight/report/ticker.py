"""Progress of a preflight on stderr: a line for each check that begins or ends, and for each node that is left out."""

from chaosrun.preflight.model import Status
from chaosrun.preflight.report.rows import counted
from chaosrun.records.events import EventRecord
from chaosrun.report.ticker import Ticker
from chaosrun.wording import count, span

ALONE = "; only this machine is looked at: --address, or $RAY_ADDRESS, names a cluster"


class PreflightTicker(Ticker):
    """Events are mappings with a key `event`:

    cluster.joined  nodes: how many; address: null for a private Ray
    check.began     check, about, nodes: how many are probed
    check.ended     check, seconds, statuses: number of findings by status
    node.out        node, check, why: left out of checks over several nodes
    """

    def on_event(self, record: EventRecord) -> None:
        self.tell(_sentence(record))


def _sentence(record: EventRecord) -> str:
    match record["event"]:
        case "cluster.joined":
            return f"{count(record['nodes'], 'node')} in the cluster{ALONE if record['address'] is None else ''}"
        case "check.began":
            return f"{record['check']}: {record['about']}"
        case "check.ended":
            found = counted({Status(status): number for status, number in record["statuses"].items()})
            return f"{record['check']}: {found or 'nothing found'}, {span(record['seconds'])}"
        case _:
            return f"{record['node']} is left out from now on: {record['why']} ({record['check']})"
