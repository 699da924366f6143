"""The network check's findings: names, connections, sums. Pure."""

from collections.abc import Sequence

from chaosrun.cluster.probing import Node
from chaosrun.preflight.assess.connections import assess_connections
from chaosrun.preflight.assess.names import assess_names
from chaosrun.preflight.assess.sums import assess_sums
from chaosrun.preflight.model import Facts, Finding, Setting


def assess_network(setting: Setting, nodes: Sequence[Node], facts: Facts) -> list[Finding]:
    return [found for assess in (assess_names, assess_connections, assess_sums) for found in assess(setting, nodes, facts)]
