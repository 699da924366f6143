"""What was measured: numbers of many nodes, those of one kind in a row, and values of the whole cluster. Knows no layout."""

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass

from chaosrun.preflight.model import Finding, Status
from chaosrun.preflight.peers import Kinds
from chaosrun.preflight.result import Result
from chaosrun.wording import with_unit

Kind = tuple[str, str, str, str, bool, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRow:
    """One number on many nodes."""

    title: str
    number: int
    """How many of them there are."""
    median: str
    worst: str
    worst_at: str
    """Nowhere when all are the same."""
    numbers: tuple[float, ...]
    """All of them, from bad to good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeValue:
    """What was found of the whole cluster and is no number."""

    title: str
    value: str
    reason: str


def measures(result: Result) -> list[MeasureRow]:
    """The numbers that can be compared, those that are compared first. Who is like whom is as it is for the comparison."""
    known = Kinds(result.nodes)
    kinds: dict[Kind, list[Finding]] = {}
    for finding in result.findings:
        if finding.measure is not None and math.isfinite(finding.measure.number):
            kinds.setdefault(known.of(finding, finding.measure), []).append(finding)
    rows: list[tuple[bool, MeasureRow]] = []
    for kind, findings in kinds.items():
        lower = any(each.measure and each.measure.better == "lower" for each in findings)
        order = sorted(findings, key=_number, reverse=lower)
        numbers = tuple(map(_number, order))
        alike = len(numbers) > len(set(numbers)) == 1
        row = MeasureRow(
            title=_title(kind, kinds),
            number=len(numbers),
            median=with_unit(statistics.median(numbers), kind[3]),
            worst=with_unit(numbers[0], kind[3]),
            worst_at="" if alike else " ".join(filter(None, (order[0].node, order[0].device))),
            numbers=numbers,
        )
        compared = any(each.measure and (each.measure.warn or each.measure.fail) for each in findings)
        rows.append((not compared, row))
    return [row for _, row in sorted(rows, key=lambda entry: entry[0])]


def whole_values(result: Result) -> list[WholeValue]:
    """Of what is wrong with the whole cluster the values stand where that is told."""
    return [
        WholeValue(
            title=f"{each.check}: {each.name}{f' ({each.device})' if each.device else ''}",
            value=each.measured,
            reason=each.reason,
        )
        for each in result.findings
        if is_whole_value(each)
    ]


def is_whole_value(finding: Finding) -> bool:
    whole = finding.node is None and finding.status in (Status.PASS, Status.SKIP)
    return whole and bool(finding.measured) and finding.measure is None


def _title(kind: Kind, kinds: Collection[Kind]) -> str:
    """With what sets it apart from others of that name."""
    check, name, device, _, cpus, gpus = kind
    others = [other for other in kinds if other[:2] == kind[:2]]
    apart = [device] if len({other[2] for other in others}) > 1 else []
    if len({other[4:] for other in others if other[2] == device}) > 1:
        apart.append("nodes with GPUs" if gpus else "nodes without GPUs" if cpus else "nodes without CPUs")
    told = ", ".join(filter(None, apart))
    return f"{check}: {name}{f' ({told})' if told else ''}"


def _number(finding: Finding) -> float:
    assert finding.measure is not None
    return finding.measure.number
