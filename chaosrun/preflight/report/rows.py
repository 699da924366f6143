"""The rows of a preflight's report, with equal findings of many nodes merged, for text and page. Must not know the layout;
lists only as many node names as fit.
"""

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median

from chaosrun.preflight.model import BAD, Finding, Status, worst
from chaosrun.preflight.peers import BASELINE, Kind, Kinds
from chaosrun.preflight.result import ANSWERS, Result
from chaosrun.records.grouping import grouped
from chaosrun.wording import count, listed, span, with_unit

WHOLE = "the whole cluster"
MOST_NAMES = 6
MOST_PLACES = 4
_NUMBER = re.compile("([0-9]{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemRow:
    """Findings of one status that differ only in their place and measured value."""

    status: Status
    title: str
    """Checks, and the subjects of each; none where it is the whole check."""
    nodes: tuple[str, ...]
    found: tuple[str, ...]
    threshold: str
    reason: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes with the same status in every check, or the whole cluster."""

    title: str
    nodes: tuple[str, ...] = ()
    statuses: tuple[Status | None, ...]
    """By check, in the order of `Result.checks`; None: no finding about these nodes."""
    bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureRow:
    title: str
    number: int
    median: str
    worst: str
    where: str
    """Place of the worst; none when all are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport:
    result: Result
    words: str
    headline: str
    about: str
    counted: str
    wrong: Sequence[ProblemRow]
    warnings: Sequence[ProblemRow]
    groups: Sequence[Group]
    costs: str
    skips: Sequence[tuple[str, str]]
    measures: Sequence[MeasureRow]
    values: Sequence[tuple[str, str, str]]
    """For the whole cluster, without numbers: title, value, reason."""
    commands: Sequence[tuple[str, str]]
    good_file: str | None
    """Where the names of the good nodes were written; None: nowhere yet."""


def report_of(result: Result, good_file: str | None = None) -> PreflightReport:
    found, nodes = result.findings, len(result.nodes)
    # Findings on the whole cluster, without numbers; bad ones are listed as problems.
    whole = [each for each in found if each.node is None and each.status in (Status.PASS, Status.SKIP)]
    values = [each for each in whole if each.measured and each.measure is None]
    skipped = [finding for finding in found if finding.status is Status.SKIP and finding not in values]
    return PreflightReport(
        result=result,
        words="FIT" if result.fit else "NOT FIT",
        headline=headline(result),
        about=_about(result),
        counted=counted(Counter(each.status for each in found)),
        wrong=problems(result, [each for each in found if each.status in BAD]),
        warnings=problems(result, [each for each in found if each.status is Status.WARN]),
        groups=groups(result),
        costs=", ".join(f"{run.name} {span(run.seconds)}" for run in result.checks),
        skips=_skips(problems(result, skipped), nodes),
        measures=measures(result),
        values=[(each.title, each.measured, each.reason) for each in values],
        commands=commands(result, good_file),
        good_file=good_file,
    )


def headline(result: Result) -> str:
    nodes, good, unchecked = len(result.nodes), len(result.good), len(result.unchecked)
    statuses = {finding.status for finding in result.findings}
    if Status.PASS not in statuses:
        return "nothing was shown to be right"
    everyone = "the node" if nodes == 1 else f"all {nodes} nodes"
    those = everyone if nodes == good else f"{good} of {count(nodes, 'node')}"
    share = f"{those} can be used" + (f", {unchecked} not checked" if unchecked else "")
    if not result.fit and not statuses & {*BAD}:
        return f"{share}, and a warning counts (--strict)"
    if result.fit or result.bad():
        return share
    return f"{those} without a fault of {'its' if good == 1 else 'their'} own, but not the cluster"


def _about(result: Result) -> str:
    cpus, gpus = sum(node.cpus for node in result.nodes), sum(node.gpus for node in result.nodes)
    where = "a private Ray" if result.address is None else f"Ray at {result.address}"
    job = "" if result.job is None else f", for {result.job}"
    baseline = "" if result.baseline is None else f", beside {result.baseline}"
    return f"{count(len(result.nodes), 'node')}, {cpus:g} CPUs, {count(gpus, 'GPU')}, {where}{job}{baseline}"


def counted(found: Mapping[Status, int]) -> str:
    """How many findings there are of each status, bad ones first."""
    return ", ".join(f"{found[status]} {status}" for status in reversed(Status) if found.get(status))


def commands(result: Result, good_file: str | None) -> list[tuple[str, str]]:
    same = ["chaosrun", "preflight", *result.arguments, *result.options]
    same += [] if result.baseline is None else ["--baseline", result.baseline]
    same += ["--strict"] if result.strict else []
    whole = [*same, *result.choice]
    found: list[tuple[str, list[str]]] = []
    odd = {each.check for each in result.findings if each.status in BAD} - {BASELINE}
    if odd and ANSWERS not in odd:
        found.append(("again", [*same, *(part for check in sorted(odd) for part in ("--only", check))]))
    if good_file is None and result.good and len(result.good) < len(result.nodes):
        found.append(("good nodes", [*whole, "--write-good-nodes", "good-nodes.txt"]))
    if result.fit and result.baseline is None:
        found.append(("keep", [*whole, "-o", "json", "--to", "baseline.json"]))
    if result.fit and result.job is not None:
        found.append(("go", ["chaosrun", "submit", *result.arguments]))
    return [(label, shlex.join(command)) for label, command in found]


def problems(result: Result, findings: Iterable[Finding]) -> list[ProblemRow]:
    """Problems, equal ones merged; bad ones before warnings, and for one status those on most nodes first."""
    same = grouped(findings, attrgetter("status", "check", "name", "threshold", "reason", "remedy"))
    whole = {(run.name, run.about) for run in result.checks}
    titles: dict[tuple[Status, str, str, str, tuple[str, ...], tuple[str, ...]], dict[str, list[str]]] = {}
    for (status, check, name, *words), those in same.items():
        nodes, found = _places(those, len(result.nodes))
        told = titles.setdefault((status, words[0], words[1], words[2], nodes, found), {}).setdefault(check, [])
        told += [] if (check, name) in whole else [name]
    rows = [
        ProblemRow(
            status=status, title=_joined(told), nodes=nodes, found=found, threshold=threshold, reason=reason, remedy=remedy
        )
        for (status, threshold, reason, remedy, nodes, found), told in titles.items()
    ]
    order = list(Status)
    return sorted(rows, key=lambda row: (-order.index(row.status), -len(row.nodes)))


def _joined(titles: Mapping[str, Sequence[str]]) -> str:
    told = [f"{check}: {', '.join(names)}" if names else check for check, names in titles.items()]
    return ("; " if any(titles.values()) else ", ").join(told)


def _places(findings: Sequence[Finding], nodes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The nodes, and a line for those with the same devices and values."""
    own = grouped(findings, lambda each: (each.node,) if each.node is not None else tuple(in_order(each.blames)))
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for names, those in own.items():
        devices = tuple(in_order(each.device for each in those if each.device is not None))
        values = tuple(dict.fromkeys(each.measured for each in those if each.measured))
        alike.setdefault((devices, values), []).extend(names)
    lines = [_line(names, devices, values, nodes) for (devices, values), names in alike.items()]
    if len(lines) > MOST_PLACES:
        lines[MOST_PLACES:] = [f"and {len(lines) - MOST_PLACES} more, with other values"]
    return tuple(in_order(name for names in alike.values() for name in names)), tuple(lines)


def _line(names: Sequence[str], devices: Sequence[str], values: Sequence[str], nodes: int) -> str:
    place = _named(names, nodes) if names or not devices else ""
    if devices:
        place += f"{', ' if len(names) > 1 else ' ' if names else ''}{listed(devices, MOST_NAMES)}"
    told = "; ".join(values[:2]) + (f"; and {len(values) - 2} other values" if len(values) > 2 else "")
    return f"{place}: {told}" if told else place


def _named(names: Sequence[str], nodes: int) -> str:
    if not names:
        return WHOLE
    if len(names) == nodes > 1:
        return f"all {nodes} nodes"
    return listed(in_order(names), MOST_NAMES)


def in_order(names: Iterable[str]) -> list[str]:
    """Each once, in natural order: node-9 before node-10."""
    return sorted(set(names), key=lambda name: ([(int(part), part) for part in _NUMBER.findall(name)], name))


def _skips(found: Sequence[ProblemRow], nodes: int) -> list[tuple[str, str]]:
    """Skips by reason, with the nodes unless it is all of them."""
    told: dict[str, list[str]] = {}
    for each in found:
        where = f" ({_named(each.nodes, nodes)})" if 0 < len(each.nodes) < nodes else ""
        told.setdefault(each.reason, []).append(f"{each.title}{where}")
    return [("; ".join(titles), reason) for reason, titles in told.items()]


def groups(result: Result) -> list[Group]:
    """Bad ones first, then those not checked, those with a warning, the rest; large before small; last the whole cluster."""
    known: dict[tuple[str | None, str], list[Status]] = {}
    for finding in result.findings:
        for node in {finding.node, *finding.blames}:
            known.setdefault((node, finding.check), []).append(finding.status)

    def statuses(node: str | None) -> tuple[Status | None, ...]:
        found = [known.get((node, run.name)) for run in result.checks]
        return tuple(worst(each) if each else None for each in found)

    same: dict[tuple[int, tuple[Status | None, ...]], list[str]] = {}
    good, unchecked = {*result.good}, {*result.unchecked}
    for node in result.nodes:
        standing = 2 if node.name in good else 1 if node.name in unchecked else 0
        same.setdefault((standing, statuses(node.name)), []).append(node.name)
    order = sorted(same.items(), key=lambda entry: (entry[0][0], -_rank(entry[0][1]), -len(entry[1])))
    rows = [
        Group(
            title=_named(names, len(result.nodes)) + (", not checked" if standing == 1 else ""),
            nodes=tuple(in_order(names)),
            statuses=of,
            bad=standing == 0,
        )
        for (standing, of), names in order
    ]
    if len(rows) > 1 and len(rows[-1].nodes) > max(3, len(result.nodes) / 2):
        # The earlier rows name all the others.
        rows[-1] = replace(rows[-1], title=f"the other {len(rows[-1].nodes)} nodes")
    cluster = statuses(None)
    return [*rows, Group(title=WHOLE, statuses=cluster)] if any(cluster) else rows


def _rank(statuses: Iterable[Status | None]) -> int:
    return list(Status).index(worst([status for status in statuses if status is not None]))


def measures(result: Result) -> list[MeasureRow]:
    """Rows of numbers, those with bounds first, grouped as they are for the comparison with peers."""
    known = Kinds(result.nodes)
    kinds: dict[Kind, list[tuple[float, Finding]]] = {}
    compared: set[Kind] = set()
    for finding in result.findings:
        measure = finding.measure
        if measure is not None and math.isfinite(measure.number):
            kind = known.of(finding, measure)
            # The worst first.
            kinds.setdefault(kind, []).append((measure.number if measure.better == "higher" else -measure.number, finding))
            compared |= {kind} if measure.warn or measure.fail else set()
    rows: list[tuple[bool, MeasureRow]] = []
    for kind, found in kinds.items():
        (most, odd), numbers = min(found, key=lambda entry: entry[0]), [number for number, _ in found]
        alike = len(found) > 1 and len(set(numbers)) == 1
        row = MeasureRow(
            title=_measure_title(kind, kinds),
            number=len(found),
            median=with_unit(abs(median(numbers)), kind[3]),
            worst=with_unit(abs(most), kind[3]) if len(found) > 1 else "",
            where="" if alike else " ".join(filter(None, (odd.node, odd.device))),
        )
        rows.append((kind not in compared, row))
    return [row for _, row in sorted(rows, key=lambda entry: entry[0])]


def _measure_title(kind: Kind, kinds: Iterable[Kind]) -> str:
    """The title, with what distinguishes it from others of that name."""
    check, name, device, _, cpus, gpus = kind
    others = [other for other in kinds if other[:2] == kind[:2]]
    apart = [device] if device and len({other[2] for other in others}) > 1 else []
    if len({other[4:] for other in others if other[2] == device}) > 1:
        apart.append("nodes with GPUs" if gpus else "nodes without GPUs" if cpus else "nodes without CPUs")
    told = f" ({', '.join(apart)})" if apart else ""
    return f"{check}: {name}{told}"
