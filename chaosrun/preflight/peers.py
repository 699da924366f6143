"""Numbers beside those of peers and those of a baseline: what is far worse than its like is named."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Finding, Measure, Rows, Status, worst
from chaosrun.preflight.result import Result
from chaosrun.wording import listed, with_unit

BASELINE = "baseline"
"""What stands for the check whether there was anything to compare."""
ROWS = Rows(check=BASELINE)
MIN_PEERS = 3
"""Of two nobody can say which is the odd one."""
MOST_NAMED = 10
_NUMBERED = re.compile(r"([a-z]+):\d+")
_PEERS_REMEDY = "look for what sets this node apart: other load, a slower clock, a worse cable or disk; or leave it out"
_BASELINE_REMEDY = "look for what has changed there since the baseline: load, driver, cables, disks; or leave it out"

Kind = tuple[str, str, str, str, bool, bool]


def against_peers(findings: Sequence[Finding], nodes: Sequence[Node]) -> list[Finding]:
    """The same findings; one whose number is far worse than the median of its peers is a WARN or a FAIL.

    Peers are findings of one check, name, unit and kind of device, on nodes that are alike in having CPUs and GPUs or none: a
    head that trains nothing may have a smaller network card or disk.
    """
    kinds = Kinds(nodes)
    peers = {kind: numbers for kind, numbers in kinds.numbers(findings).items() if len(numbers) >= MIN_PEERS}
    return [
        _compared(finding, median(numbers), f"the median of {len(numbers)}", _PEERS_REMEDY)
        if finding.measure is not None and (numbers := peers.get(kinds.of(finding, finding.measure)))
        else finding
        for finding in findings
    ]


class Baseline:
    """An earlier preflight, to compare with: the same device of the same node, else the median of its kind then."""

    def __init__(self, earlier: Result) -> None:
        self._nodes = earlier.nodes
        kinds = Kinds(earlier.nodes)
        self._own = {
            (kinds.of(finding, finding.measure), finding.node, finding.device): finding.measure.number
            for finding in earlier.findings
            if finding.measure is not None and math.isfinite(finding.measure.number)
        }
        self._medians = {kind: median(numbers) for kind, numbers in kinds.numbers(earlier.findings).items()}

    def compare(self, findings: Sequence[Finding], nodes: Sequence[Node]) -> list[Finding]:
        """The same findings; one whose number is far worse than then is a WARN or a FAIL."""
        kinds = Kinds(nodes)
        return [
            finding if then is None else _compared(finding, *then, _BASELINE_REMEDY)
            for finding in findings
            for then in [self._then(kinds, finding)]
        ]

    def missed(self, findings: Sequence[Finding], nodes: Sequence[Node]) -> list[Finding]:
        """Rows of the whole cluster: how many of all numbers had something to be compared with, and what is there no more."""
        kinds = Kinds(nodes)
        bounded = [finding for finding in findings if _is_compared(finding)]
        known = sum(then is not None and then[0] > 0 for then in (self._then(kinds, finding) for finding in bounded))
        return [_share_compared(known, len(bounded)), *self._gone(nodes)]

    def _then(self, kinds: "Kinds", finding: Finding) -> tuple[float, str] | None:
        if finding.measure is None:
            return None
        kind = kinds.of(finding, finding.measure)
        if (own := self._own.get((kind, finding.node, finding.device))) is not None:
            return own, "the baseline"
        return (self._medians[kind], "the baseline's median") if kind in self._medians else None

    def _gone(self, nodes: Sequence[Node]) -> Iterator[Finding]:
        """By hostname: where a host has several nodes, their names are new each time that Ray is started."""
        then, now = _hosts(self._nodes), _hosts(nodes)
        gone = [
            host if now.nodes[host] == 0 else f"{number - now.nodes[host]} of {number} nodes of {host}"
            for host, number in then.nodes.items()
            if number > now.nodes[host]
        ]
        gone += [
            f"{number - now.gpus[host]} of {number} GPUs of {host}"
            for host, number in then.gpus.items()
            if now.nodes[host] and number > now.gpus[host]
        ]
        if gone:
            yield ROWS.warn(
                f"not there: {listed(gone, MOST_NAMED)}",
                "what the baseline had",
                "start Ray there with all its GPUs again; if they are to be gone, save a new baseline",
                name="nodes and GPUs",
            )


@dataclass(frozen=True, slots=True)
class _Hosts:
    nodes: Counter[str]
    gpus: Counter[str]


def _hosts(nodes: Iterable[Node]) -> _Hosts:
    found = _Hosts(Counter(), Counter())
    for node in nodes:
        found.nodes[node.hostname] += 1
        found.gpus[node.hostname] += node.gpus
    return found


def _share_compared(known: int, all_: int) -> Finding:
    name = "numbers compared"
    if not all_:
        reason = "these checks measured nothing that is compared"
        return ROWS.skip(reason, name=name)
    if not known:
        reason = f"the baseline has none of the {all_} numbers that were measured: it was made with other checks or elsewhere"
        remedy = "save a baseline with the same checks on this cluster: -o json --to FILE"
        return ROWS.error(reason, remedy, name=name)
    return ROWS.passed(f"{known} of {all_}", "one or more", name=name)


class Kinds:
    """Who is like whom: see `against_peers`."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._has = {node.name: (node.cpus > 0, node.gpus > 0) for node in nodes}

    def of(self, finding: Finding, measure: Measure) -> Kind:
        """`cuda:0` and `cuda:1` are of one kind, a processor and a GPU are not."""
        device = finding.device or ""
        numbered = _NUMBERED.fullmatch(device)
        of_device = numbered[1] if numbered else "cpu" if device == "cpu" else ""
        return finding.check, finding.name, of_device, measure.unit, *self._has.get(finding.node or "", (False, False))

    def numbers(self, findings: Sequence[Finding]) -> Mapping[Kind, list[float]]:
        found: dict[Kind, list[float]] = {}
        for finding in findings:
            if finding.measure is not None and math.isfinite(finding.measure.number):
                found.setdefault(self.of(finding, finding.measure), []).append(finding.measure.number)
        return found


def _is_compared(finding: Finding) -> bool:
    """Whether it has a number that bounds are set for."""
    measure = finding.measure
    return (
        measure is not None
        and (measure.warn, measure.fail) != (None, None)
        and finding.status not in (Status.SKIP, Status.ERROR)
        and math.isfinite(measure.number)
        and measure.number >= 0
    )


def _compared(finding: Finding, typical: float, of: str, remedy: str) -> Finding:
    measure = finding.measure
    if measure is None or not _is_compared(finding) or typical <= 0:
        return finding
    share = _share(measure, typical)
    crossed = ((Status.FAIL, measure.fail), (Status.WARN, measure.warn))
    status, least = next(((status, least) for status, least in crossed if least is not None and share < least), (None, 0.0))
    if status is None:
        return finding
    bound = f"at least {least:.0%} of" if measure.better == "higher" else f"at most {1 / least:.3g} times"
    threshold = f"{bound} {of}, {with_unit(typical, measure.unit)}"
    return replace(
        finding,
        status=worst([finding.status, status]),
        measured=finding.measured or with_unit(measure.number, measure.unit),
        threshold="; ".join(filter(None, (finding.threshold, threshold))),
        remedy=finding.remedy or remedy,
    )


def _share(measure: Measure, typical: float) -> float:
    """1 is as good as typical, less is worse."""
    if measure.better == "higher":
        return measure.number / typical
    return typical / measure.number if measure.number else math.inf
