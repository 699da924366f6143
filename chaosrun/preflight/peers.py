"""Compares numbers with peers' and a baseline's: one that is far worse becomes a WARN or a FAIL."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Finding, Measure, Rows, Status, worst
from chaosrun.preflight.result import Result
from chaosrun.wording import with_unit

BASELINE = "baseline"
"""The name of the row that says whether there was anything to compare."""
ROWS = Rows(check=BASELINE)
MIN_PEERS = 3
"""With two it cannot be said which is the odd one."""
_NUMBERED = re.compile(r"([a-z]+):\d+")
_PEERS_REMEDY = "look for what sets this node apart: other load, a slower clock, a worse cable or disk; or leave it out"
_BASELINE_REMEDY = "look for what has changed there since the baseline: load, driver, cables, disks; or leave it out"

Kind = tuple[str, str, str, str, bool, bool]


class Kinds:
    """Groups of findings that can be compared: see `against_peers`."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._has = {node.name: (node.cpus > 0, node.gpus > 0) for node in nodes}

    def of(self, finding: Finding, measure: Measure) -> Kind:
        """The kind of a finding: `cuda:0` and `cuda:1` are of one kind, a CPU and a GPU are not."""
        device = finding.device or ""
        numbered = _NUMBERED.fullmatch(device)
        of_device = numbered[1] if numbered else "cpu" if device == "cpu" else ""
        return finding.check, finding.name, of_device, measure.unit, *self._has.get(finding.node or "", (False, False))

    def medians(self, findings: Iterable[Finding], least: int = 1) -> dict[Kind, tuple[float, int]]:
        """The median and the count of each kind's numbers, for kinds with at least `least` of them."""
        found: dict[Kind, list[float]] = {}
        for finding in findings:
            if finding.measure is not None and math.isfinite(finding.measure.number):
                found.setdefault(self.of(finding, finding.measure), []).append(finding.measure.number)
        return {kind: (median(numbers), len(numbers)) for kind, numbers in found.items() if len(numbers) >= least}


def against_peers(findings: Sequence[Finding], nodes: Sequence[Node]) -> list[Finding]:
    """The findings, where one whose number is far worse than the median of its peers is a WARN or a FAIL.

    Peers are findings of one check, name, unit and kind of device, on nodes that both have or both lack CPUs and GPUs: a head
    that trains nothing may have a smaller network card or disk.
    """
    kinds = Kinds(nodes)
    peers = kinds.medians(findings, MIN_PEERS)
    return [
        _compared(finding, typical[0], f"the median of {typical[1]}", _PEERS_REMEDY)
        if finding.measure is not None and (typical := peers.get(kinds.of(finding, finding.measure)))
        else finding
        for finding in findings
    ]


class Baseline:
    """An earlier preflight to compare with: the same device of the same node, else the median of its kind then."""

    def __init__(self, earlier: Result) -> None:
        kinds = Kinds(earlier.nodes)
        self._own = {
            (kinds.of(finding, finding.measure), finding.node, finding.device): finding.measure.number
            for finding in earlier.findings
            if finding.measure is not None and math.isfinite(finding.measure.number)
        }
        self._medians = kinds.medians(earlier.findings)

    def compare(self, findings: Sequence[Finding], nodes: Sequence[Node]) -> list[Finding]:
        """The findings, where one whose number is far worse than then is a WARN or a FAIL."""
        kinds = Kinds(nodes)
        return [
            _compared(finding, *known, _BASELINE_REMEDY) if (known := self._then(kinds, finding)) else finding
            for finding in findings
        ]

    def compared(self, findings: Sequence[Finding], nodes: Sequence[Node]) -> Finding:
        """A row of the whole cluster: how many of all numbers could be compared."""
        kinds = Kinds(nodes)
        bounded = [self._then(kinds, finding) for finding in findings if _bounded(finding)]
        known, rows = sum(then is not None and then[0] > 0 for then in bounded), ROWS.of(name="numbers compared")
        if not bounded:
            return rows.skip("these checks measured nothing that is compared")
        if known:
            return rows.passed(f"{known} of {len(bounded)}", "one or more")
        why = f"the baseline has none of the {len(bounded)} numbers that were measured: made with other checks or elsewhere"
        return rows.error(why, "save a baseline with the same checks on this cluster: -o json --to FILE")

    def _then(self, kinds: Kinds, finding: Finding) -> tuple[float, str] | None:
        if finding.measure is None:
            return None
        kind = kinds.of(finding, finding.measure)
        if (own := self._own.get((kind, finding.node, finding.device))) is not None:
            return own, "the baseline"
        return (self._medians[kind][0], "the baseline's median") if kind in self._medians else None


def _bounded(finding: Finding) -> bool:
    measure = finding.measure
    if measure is None or (measure.warn, measure.fail) == (None, None) or finding.status in (Status.SKIP, Status.ERROR):
        return False
    return math.isfinite(measure.number) and measure.number >= 0


def _compared(finding: Finding, typical: float, of: str, remedy: str) -> Finding:
    measure = finding.measure
    if measure is None or not _bounded(finding) or typical <= 0:
        return finding
    # 1 is as good as typical, less is worse.
    share = measure.number / typical
    if measure.better == "lower":
        share = typical / measure.number if measure.number else math.inf
    crossed = ((Status.FAIL, measure.fail), (Status.WARN, measure.warn))
    for status, least in crossed:
        if least is not None and share < least:
            bound = f"at least {least:.0%} of" if measure.better == "higher" else f"at most {1 / least:.3g} times"
            threshold = f"{bound} {of}, {with_unit(typical, measure.unit)}"
            return replace(
                finding,
                status=worst([finding.status, status]),
                measured=finding.measured or with_unit(measure.number, measure.unit),
                threshold="; ".join(filter(None, (finding.threshold, threshold))),
                remedy=finding.remedy or remedy,
            )
    return finding
