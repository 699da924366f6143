"""Runs a preflight: decides which checks run on which nodes and which nodes are left out, and makes the result. Runs probes
through the pool, lets checks judge, and compares with peers and a baseline. Must not know any single check, nor Ray.
"""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from chaosrun.cluster.probing import Call, Node, ProbeOutcome
from chaosrun.preflight.model import BAD, Answers, Check, F, Finding, Rows, Setting, Status, read_answers
from chaosrun.preflight.peers import BASELINE, Baseline, against_peers
from chaosrun.preflight.result import ANSWERS, CheckRun, Result
from chaosrun.supervise.run import Listener

EVERY_NODE_ANSWERS = "every node answers"
LOOK_THERE = "see that chaosrun is installed there for the Python that Ray runs, and that the machine answers"
LOST_REMEDY = "look at the machine and at Ray's logs there"
REMEDIES = {
    "limit": "look at what keeps the node busy, or what hangs there",
    "late": "give it more time: a higher --level, or a longer --duration",
    "died": "look at the node's kernel messages: was it out of memory?",
    "lost": LOST_REMEDY,
}
"""Remedies for a node that gave no answer, by how its call ended."""


class Agents(Protocol):
    """The engine's interface to the pool of probe agents."""

    @property
    def nodes(self) -> Sequence[Node]:
        """Nodes that answer."""
        ...

    @property
    def everyone(self) -> Sequence[Node]:
        """All nodes, answering or not."""
        ...

    @property
    def lost(self) -> Mapping[str, str]:
        """By silent node, the reason."""
        ...

    def probe(self, calls: Mapping[str, Call]) -> dict[str, ProbeOutcome]:
        """Run calls, by node name, at the same time; returns when every one has ended."""
        ...

    def check_agents(self) -> None:
        """Call every node's agent; one that does not answer is lost."""
        ...


@dataclass(frozen=True, slots=True)
class Participants:
    """Implements `model.Pool`: the nodes that take part in a check."""

    agents: Agents
    names: frozenset[str]
    answered: set[str] = field(default_factory=set)
    """Nodes that have answered one of its calls."""

    @property
    def nodes(self) -> Sequence[Node]:
        return [node for node in self.agents.nodes if node.name in self.names]

    def ask(self, calls: Mapping[str, Call], facts: type[F]) -> Answers[F]:
        began_s = time.time()
        outcomes = self.agents.probe(calls)
        told = read_answers(outcomes, facts, (began_s, time.time()))
        self.answered.update(told.answered)
        return told


@dataclass(slots=True, kw_only=True)
class Engine:
    """One preflight. `run` returns its result; a KeyboardInterrupt passes through."""

    setting: Setting
    pool: Agents
    checks: Sequence[Check[Any]]
    on_event: Listener
    """Of events as `preflight.report.ticker.PreflightTicker` has them."""
    baseline: Baseline | None = None
    clock: Callable[[], float] = time.monotonic
    _findings: list[Finding] = field(default_factory=list)
    _facts: dict[str, object] = field(default_factory=dict)
    _runs: list[CheckRun] = field(default_factory=list)
    _out: dict[str, str] = field(default_factory=dict)
    """By node, why it is left out of checks over several nodes."""

    def run(self, started_s: float) -> Result:
        began = self.clock()
        self._report_lost(LOOK_THERE)
        for check in self.checks:
            self._make(check)
        self.pool.check_agents()
        self._report_lost(LOST_REMEDY)
        if self.baseline is not None:
            self._runs.append(CheckRun(name=BASELINE, about="what there was to compare"))
            self._findings.append(self.baseline.compared(self._findings, self.pool.everyone))
        return Result(
            level=self.setting.level,
            started_s=started_s,
            seconds=self.clock() - began,
            nodes=tuple(self.pool.everyone),
            checks=tuple(self._runs),
            findings=tuple(self._findings),
            facts=self._facts,
        )

    def _report_lost(self, remedy: str) -> None:
        """Add rows for lost nodes that have none yet."""
        told = {finding.node for finding in self._findings if finding.status in BAD}
        silent = [name for name in self.pool.lost if name not in told]
        if silent and all(run.name != ANSWERS for run in self._runs):
            self._runs.append(CheckRun(name=ANSWERS, about=EVERY_NODE_ANSWERS))
        for name in silent:
            why = self.pool.lost[name]
            self._findings.append(Rows(check=ANSWERS, name=EVERY_NODE_ANSWERS).error(why, remedy, node=name))
            self._leave_out(name, ANSWERS, why)

    def _make(self, check: Check[Any]) -> None:
        """Make one check. Checks of single nodes continue even on a node with a fault, as there may be more to repair."""
        began = self.clock()
        names = frozenset(node.name for node in self.pool.nodes) - (self._out.keys() if check.call is None else set())
        pool = Participants(self.pool, names)
        nodes = list(pool.nodes)
        self.on_event({"event": "check.began", "check": check.name, "about": check.about, "nodes": len(nodes)})
        facts: Any = None
        found = [_rows(check).skip("no node is left to make it on")]
        if nodes:
            lost = set(self.pool.lost)
            facts, found = self._gathered(check, pool, nodes)
            if check.call is None:
                self.pool.check_agents()
            told = {finding.node for finding in found if finding.status in BAD}
            for name in [node.name for node in nodes if node.name in self.pool.lost.keys() - lost - told]:
                found.append(_rows(check).error(self.pool.lost[name], LOST_REMEDY, node=name))
        for name in [node.name for node in self.pool.everyone if node.name not in names]:
            why = self._out.get(name) or self.pool.lost.get(name, "it does not answer")
            found.append(_rows(check).skip(f"left out: {why}", node=name))
        self._take(check, found, facts, self.clock() - began)

    def _gathered(self, check: Check[Any], pool: Participants, nodes: Sequence[Node]) -> tuple[Any, list[Finding]]:
        """Run a check over several nodes. An exception becomes an ERROR row, as nothing is known about the nodes then; the
        other checks continue."""
        try:
            here = replace(self.setting, earlier=dict(self._facts))
            if check.gather is not None:
                facts = check.gather(here, pool)
            else:
                assert check.call is not None
                facts = pool.ask({node.name: check.call(here, node) for node in nodes}, check.facts)
        except Exception as error:
            return None, [_broken(check, "make this check", error, nodes)]
        answered = tuple(node.name for node in nodes if node.name in pool.answered)
        found = [
            replace(each, covers=each.covers or answered) if each.node is None and each.status is Status.PASS else each
            for each in self._judged(check, here, nodes, facts)
        ]
        if check.call is not None:
            spoken_of = {finding.node for finding in found}
            for name, silence in facts.unanswered.items():
                if name not in spoken_of:
                    remedy = REMEDIES.get(silence.ended, "")
                    found.append(_rows(check).error(silence.error or silence.ended, remedy, node=name))
        return facts, found

    def _judged(self, check: Check[Any], here: Setting, nodes: Sequence[Node], facts: Any) -> list[Finding]:
        try:
            return list(check.judge(here, nodes, facts))
        except Exception as error:
            return [_broken(check, "judge what was found", error, nodes)]

    def _take(self, check: Check[Any], found: Iterable[Finding], facts: Any, seconds: float) -> None:
        if facts is not None:
            self._facts[check.name] = facts
        position = {node.name: place for place, node in enumerate(self.pool.everyone)}
        found = against_peers([_with_remedy(finding) for finding in found], self.pool.everyone)
        if self.baseline is not None:
            found = self.baseline.compare(found, self.pool.everyone)
        found = sorted(found, key=lambda finding: position.get(finding.node or "", -1))
        self._findings += found
        self._runs.append(CheckRun(name=check.name, about=check.about, seconds=seconds))
        statuses = Counter(finding.status.value for finding in found)
        self.on_event({"event": "check.ended", "check": check.name, "seconds": seconds, "statuses": dict(statuses)})
        for finding in [finding for finding in found if finding.status in BAD]:
            # If a check of the whole cluster could not run, no node can be blamed.
            blamed = finding.blames if finding.status is Status.FAIL else ()
            for name in sorted({finding.node or "", *blamed} & position.keys()):
                self._leave_out(name, check.name, f"{finding.status} of {check.name}: {finding.name}")

    def _leave_out(self, name: str, check: str, why: str) -> None:
        if name not in self._out:
            self._out[name] = why
            self.on_event({"event": "node.out", "node": name, "check": check, "why": why})


def _rows(check: Check[Any]) -> Rows:
    return Rows(check=check.name, name=check.about)


def _broken(check: Check[Any], what: str, error: Exception, nodes: Sequence[Node]) -> Finding:
    reason = f"chaosrun could not {what}: {type(error).__name__}: {error}"
    return _rows(check).error(reason, blames=tuple(node.name for node in nodes))


def _with_remedy(finding: Finding) -> Finding:
    if finding.status is not Status.ERROR or finding.remedy:
        return finding
    again = f"try again with --only {shlex.quote(finding.check)}"
    return replace(finding, remedy=f"{again}; if it comes again, report it with the file of -o json")
