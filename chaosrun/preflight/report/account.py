"""What a preflight's account consists of, for terminal and page alike: equal things of many nodes told once.

Values made from a Result: problems, groups of nodes, what does not apply. Knows no layout.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Finding, Status, worst
from chaosrun.preflight.peers import BASELINE
from chaosrun.preflight.report.names import brief, in_order
from chaosrun.preflight.report.numbers import is_whole_value
from chaosrun.preflight.result import ANSWERS, LEFT_OUT, Result
from chaosrun.wording import count

Commands = Sequence[tuple[str, str]]
"""What to type next, each with its label."""
WHOLE = "the whole cluster"
Standing = Literal["bad", "unchecked", "good"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Nodes on which the same devices show the same thing; no nodes: the whole cluster."""

    nodes: tuple[str, ...]
    devices: tuple[str, ...]
    measured: tuple[str, ...]
    """One value for all, or the different ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Findings of one status that differ in nothing but where they are and what was measured."""

    status: Status
    titles: tuple[tuple[str, tuple[str, ...]], ...]
    """Checks, and what each looked at; nothing where it is the whole check."""
    where: tuple[Whereabouts, ...]
    threshold: str
    reason: str
    remedy: str

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(in_order(node for place in self.where for node in place.nodes))

    @property
    def title(self) -> str:
        return titled(self.titles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes that came out of every check in the same way."""

    nodes: tuple[str, ...]
    statuses: tuple[Status | None, ...]
    """By check, in the order of `Result.checks`; None: it found nothing about these nodes."""
    standing: Standing
    """unchecked: it has nothing that could be looked at."""


def headline(result: Result) -> str:
    """What it comes to, in a sentence."""
    nodes, good, unchecked = len(result.nodes), len(result.good), len(result.unchecked)
    statuses = {finding.status for finding in result.findings}
    if Status.PASS not in statuses:
        return "nothing was shown to be right"
    those = _all(nodes) if nodes == good else f"{good} of {count(nodes, 'node')}"
    share = f"{those} can be used" + (f", {unchecked} not checked" if unchecked else "")
    if result.fit:
        return share
    if not statuses & {Status.FAIL, Status.ERROR}:
        return f"{share}, and a warning counts (--strict)"
    if result.bad():
        return share
    return f"{those} without a fault of {'its' if good == 1 else 'their'} own, but not the cluster"


def about(result: Result) -> str:
    """What was looked at, in a line."""
    cpus, gpus = sum(node.cpus for node in result.nodes), sum(node.gpus for node in result.nodes)
    where = "a private Ray" if result.address is None else f"Ray at {result.address}"
    job = "" if result.job is None else f", for {result.job}"
    baseline = "" if result.baseline is None else f", beside {result.baseline}"
    return f"{count(len(result.nodes), 'node')}, {cpus:g} CPUs, {count(gpus, 'GPU')}, {where}{job}{baseline}"


def counted(result: Result) -> str:
    """How many findings there are of each status, bad ones first."""
    found = [(status, sum(finding.status is status for finding in result.findings)) for status in reversed(Status)]
    return ", ".join(f"{number} {status}" for status, number in found if number)


def problems(result: Result, *statuses: Status) -> list[Problem]:
    """The findings of these statuses, equal ones folded; those on most nodes first within a status."""
    whose = {node.name: _own_words(node) for node in result.nodes}
    whole = {(run.name, run.about) for run in result.checks}
    folded: dict[tuple[str, ...], list[Finding]] = {}
    for finding in result.findings:
        if finding.status in statuses:
            words = _words(finding, whose.get(finding.node or ""), finding.device)
            folded.setdefault((finding.status, finding.check, finding.name, *words), []).append(finding)
    found: dict[Problem, Problem] = {}
    for (_, check, name, *_), findings in folded.items():
        several = len({each.node for each in findings}) > 1, len({each.device for each in findings}) > 1
        first = findings[0]
        words = _words(first, whose.get(first.node or "") if several[0] else None, first.device if several[1] else None)
        one = Problem(
            status=first.status, titles=(), where=_where(findings), threshold=words[0], reason=words[1], remedy=words[2]
        )
        titles = dict(found[one].titles if one in found else ())
        titles[check] = (*titles.get(check, ()), *(() if (check, name) in whole else (name,)))
        found[one] = replace(one, titles=tuple(titles.items()))
    return sorted(found.values(), key=lambda problem: (statuses.index(problem.status), -len(problem.nodes)))


def skips(result: Result) -> list[Problem]:
    """What was not looked at, equal reasons folded; but for what a value stands for."""
    found = tuple(finding for finding in result.findings if not is_whole_value(finding))
    return problems(replace(result, findings=found), Status.SKIP)


def skips_by_reason(result: Result) -> list[tuple[str, list[Problem]]]:
    """Those whose reasons begin in the same way together, by that beginning: "one node: nothing to compare with" and "one node:
    it takes two". A reason that stands alone is whole."""
    alike: dict[str, list[Problem]] = {}
    for problem in skips(result):
        alike.setdefault(problem.reason.partition(": ")[0], []).append(problem)
    return [(start if len({each.reason for each in them}) > 1 else them[0].reason, them) for start, them in alike.items()]


def groups(result: Result) -> list[Group]:
    """Bad ones first, then those with nothing to look at, those with a warning, the rest; large ones before small ones."""
    known: dict[tuple[str, str], list[Status]] = {}
    for finding in result.findings:
        for node in {finding.node, *finding.blames} - {None}:
            known.setdefault((str(node), finding.check), []).append(finding.status)
    standing: dict[str, Standing] = dict.fromkeys(result.good, "good")
    standing |= dict.fromkeys(result.unchecked, "unchecked")
    same: dict[tuple[Standing, tuple[Status | None, ...]], list[str]] = {}
    for node in result.nodes:
        found = [known.get((node.name, run.name)) for run in result.checks]
        statuses = tuple(worst(each) if each else None for each in found)
        same.setdefault((standing.get(node.name, "bad"), statuses), []).append(node.name)
    found = [Group(nodes=tuple(in_order(nodes)), statuses=key, standing=how) for (how, key), nodes in same.items()]
    order = get_args(Standing)
    return sorted(found, key=lambda group: (order.index(group.standing), -_rank(group), -len(group.nodes)))


def cluster_statuses(result: Result) -> tuple[Status | None, ...] | None:
    """By check, what was found about the cluster as a whole; None when nothing was."""
    whole = [[each.status for each in result.findings if each.check == run.name and each.node is None] for run in result.checks]
    return tuple(worst(each) if each else None for each in whole) if any(whole) else None


def commands(result: Result, good_file: str | None) -> Commands:
    """Of the preflight that was made, with all that was said of it. `good_file`: where the names of the good nodes were
    written; None: nowhere yet."""
    same = ["chaosrun", "preflight", *result.arguments, *result.options]
    same += [] if result.baseline is None else ["--baseline", result.baseline]
    same += ["--strict"] if result.strict else []
    whole = [*same, *result.choice]
    found: list[tuple[str, list[str]]] = []
    odd = {each.check for each in result.findings if each.status in (Status.FAIL, Status.ERROR)} - {BASELINE}
    if odd and ANSWERS not in odd:
        found.append(("again", [*same, *(part for check in sorted(odd) for part in ("--only", check))]))
    if good_file is None and result.good and len(result.good) < len(result.nodes):
        found.append(("good nodes", [*whole, "--write-good-nodes", "good-nodes.txt"]))
    if result.fit and result.baseline is None:
        found.append(("keep", [*whole, "-o", "json", "--to", "baseline.json"]))
    if result.fit and result.job is not None:
        found.append(("go", ["chaosrun", "submit", *result.arguments]))
    return [(label, shlex.join(command)) for label, command in found]


def short(place: Whereabouts, nodes: int, longest: int) -> str:
    """Where it is, in about so many characters. `nodes`: how many there are in all."""
    named = nodes_named(place.nodes, nodes, longest)
    if not place.devices:
        return named
    devices = brief(place.devices, longest)
    return f"{named}{', ' if len(place.nodes) > 1 else ' '}{devices}" if place.nodes else devices


def whole_title(result: Result, finding: Finding) -> str:
    """Its status, its check, and what was looked at where that is not the whole check."""
    whole = any((run.name, run.about) == (finding.check, finding.name) for run in result.checks)
    return f"{finding.status} {finding.check}{'' if whole else f': {finding.name}'}"


def titled(checks: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Checks, and what each looked at; nothing where it is the whole check."""
    told = [(check, ", ".join(names)) for check, names in checks]
    between = "; " if any(names for _, names in told) else ", "
    return between.join(f"{check}: {names}" if names else check for check, names in told)


def nodes_named(names: Sequence[str], nodes: int, longest: int) -> str:
    if not names:
        return WHOLE
    if len(names) == nodes > 1:
        return f"all {nodes} nodes"
    return f"{brief(names, longest)} ({len(names)})" if len(names) > 3 else brief(names, longest)


def groups_named(found: Sequence[Group], nodes: int, longest: int) -> list[str]:
    """The last, where it is most of them, is the others: which they are the ones before it tell."""
    named = [nodes_named(group.nodes, nodes, longest) for group in found]
    if len(found) > 1 and len(found[-1].nodes) > max(3, nodes / 2):
        named[-1] = f"the other {len(found[-1].nodes)} nodes"
    both = zip(named, found, strict=True)
    return [f"{title}, not checked" if group.standing == "unchecked" else title for title, group in both]


def wheres(problem: Problem, nodes: int, longest: int) -> list[str]:
    """Where it is and what was measured there."""
    told = [(short(place, nodes, longest), ranged(place.measured)) for place in problem.where]
    return [f"{place}: {measured}" if measured else place for place, measured in told]


def ranged(values: Sequence[str]) -> str:
    """Of different values the first two, and how many more there are."""
    return "; ".join(values[:2]) + (f"; and {len(values) - 2} other values" if len(values) > 2 else "")


def _where(findings: Sequence[Finding]) -> tuple[Whereabouts, ...]:
    """Nodes with the same devices and the same values together; if that leaves too many, nodes with the same devices."""
    nodes: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        for names in [(finding.node,)] if finding.node is not None else [tuple(in_order(finding.blames))]:
            nodes.setdefault(names, []).append(finding)
    by_value: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    by_device: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for names, own in nodes.items():
        devices = tuple(in_order(each.device for each in own if each.device is not None))
        measured = tuple(dict.fromkeys(each.measured for each in own if each.measured))
        by_value.setdefault((devices, measured), []).extend(names)
        known, values = by_device.setdefault(devices, ([], []))
        known.extend(names)
        values.extend(value for value in measured if value not in values)
    if len(by_value) <= 4:
        return tuple(Whereabouts(nodes=tuple(in_order(n)), devices=d, measured=m) for (d, m), n in by_value.items())
    return tuple(Whereabouts(nodes=tuple(in_order(n)), devices=d, measured=tuple(m)) for d, (n, m) in by_device.items())


def _words(finding: Finding, names: re.Pattern[str] | None, device: str | None) -> list[str]:
    """With NODE for the node's own names and DEVICE for the device's, so that the same words about two are the same."""
    # Why it is left out is told where that is told.
    reason = "left out, for what is wrong there" if finding.reason.startswith(LEFT_OUT) else finding.reason
    words = [finding.threshold, reason, finding.remedy]
    if device:
        words = [_named([device]).sub("DEVICE", text) for text in words]
    return words if names is None else [names.sub("NODE", text) for text in words]


def _own_words(node: Node) -> re.Pattern[str]:
    return _named({node.name, node.node_id, node.address, node.hostname} - {""})


def _named(names: Iterable[str]) -> re.Pattern[str]:
    """Any of them, where it is not a part of a longer name."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w-])")


def _rank(group: Group) -> int:
    return list(Status).index(worst([status for status in group.statuses if status is not None]))


def _all(nodes: int) -> str:
    return "the node" if nodes == 1 else f"all {nodes} nodes"
