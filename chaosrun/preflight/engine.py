"""The order of a preflight: which checks on which nodes, who is left out of what, and what it all comes to.

Asks the crew, lets assessments judge, and compares with peers and with a baseline. Knows no check and no Ray.
"""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

from chaosrun.preflight.assess.peers import BASELINE, Baseline, against_peers
from chaosrun.preflight.model import Call, Check, Crew, Facts, Finding, Node, Outcome, Setting, Status, answers
from chaosrun.preflight.result import ANSWERS, LEFT_OUT, CheckRun, Result

Listener = Callable[[Mapping[str, Any]], None]
EVERY_NODE_ANSWERS = "every node answers"
LOOK_THERE = "see that chaosrun is installed there for the Python that Ray runs, and that the machine answers"
JUDGE = "judge what was found"
LOST_REMEDY = "look at the machine and at Ray's logs there"
BAD = (Status.FAIL, Status.ERROR)


class Agents(Crew, Protocol):
    """A crew, as the engine sees it."""

    @property
    def everyone(self) -> Sequence[Node]:
        """Those that answer and those that do not."""
        ...

    @property
    def lost(self) -> Mapping[str, str]:
        """Why, by the name of a node that does not answer any more."""
        ...

    def relay(self, chains: Mapping[str, Sequence[Call]], on_outcome: Callable[[str, int, Outcome], None]) -> None:
        """Run each node's calls one after the other, nodes beside each other, and tell (node, index, outcome) as they end. A
        chain ends with a node that is lost."""
        ...

    def check_agents(self) -> None:
        """Hear of every node; who does not answer is lost."""
        ...


@dataclass(frozen=True, slots=True)
class Chosen:
    """The part of a crew that a check may ask."""

    crew: Agents
    names: frozenset[str]
    answered: set[str] = field(default_factory=set)
    """Nodes that have answered a call of it."""

    @property
    def nodes(self) -> Sequence[Node]:
        return [node for node in self.crew.nodes if node.name in self.names]

    def probe(self, calls: Mapping[str, Call]) -> dict[str, Outcome]:
        outcomes = self.crew.probe(calls)
        self.answered.update(name for name, outcome in outcomes.items() if outcome.facts is not None)
        return outcomes


@dataclass(slots=True, kw_only=True)
class Flight:
    """One preflight. `run` returns its result; a KeyboardInterrupt goes through."""

    setting: Setting
    crew: Agents
    checks: Sequence[Check]
    """In the order they are made."""
    on_event: Listener
    baseline: Baseline | None = None
    clock: Callable[[], float] = time.monotonic
    _findings: list[Finding] = field(default_factory=list)
    _facts: dict[str, Facts] = field(default_factory=dict)
    _runs: list[CheckRun] = field(default_factory=list)
    _out: dict[str, str] = field(default_factory=dict)
    """Why a node takes no part in what several do together, by name."""

    def run(self, started_s: float) -> Result:
        began = self.clock()
        self._report_lost(LOOK_THERE)
        for by_node, group in groupby(self.checks, key=lambda check: check.call is not None):
            if by_node:
                self._every_node_by_itself(list(group))
            else:
                for check in group:
                    self._together(check)
        self.crew.check_agents()
        self._report_lost(LOST_REMEDY)
        if self.baseline is not None:
            self._runs.append(CheckRun(name=BASELINE, about="what there was to compare"))
            self._findings += self.baseline.missed(self._findings, self.crew.everyone)
        return Result(
            level=self.setting.level,
            started_s=started_s,
            seconds=self.clock() - began,
            nodes=tuple(self.crew.everyone),
            checks=tuple(self._runs),
            findings=tuple(self._findings),
            facts=self._facts,
        )

    def _report_lost(self, remedy: str) -> None:
        """Nodes that do not answer, and of which no row says so."""
        told = {finding.node for finding in self._findings if finding.status in BAD}
        silent = [node.name for node in self.crew.everyone if node.name in self.crew.lost and node.name not in told]
        if silent and all(run.name != ANSWERS for run in self._runs):
            self._runs.append(CheckRun(name=ANSWERS, about=EVERY_NODE_ANSWERS))
        for name in silent:
            why = self.crew.lost[name]
            self._findings.append(
                Finding(check=ANSWERS, name=EVERY_NODE_ANSWERS, status=Status.ERROR, node=name, reason=why, remedy=remedy)
            )
            self._leave_out(name, ANSWERS, why)

    # Checks that each node makes for itself

    def _every_node_by_itself(self, checks: Sequence[Check]) -> None:
        """One node does not wait for another; a check is judged as soon as the last node has made it."""
        asked = list(self.crew.nodes)
        here = self._setting()
        chains: dict[str, list[Call]] = {}
        for node in asked:
            chains[node.name] = [check.call(here, node) for check in checks if check.call is not None]
        waiting = [{node.name for node in asked} for _ in checks]
        outcomes: list[dict[str, Outcome]] = [{} for _ in checks]
        began = [self.clock()] * len(checks)
        told = judged = 0

        def begin_up_to(index: int) -> None:
            nonlocal told
            for check in checks[told : index + 1]:
                began[told] = self.clock()
                told += 1
                self._began(check, len(asked))

        def judge_complete() -> None:
            nonlocal judged
            while judged < len(checks) and not waiting[judged]:
                begin_up_to(judged)
                check, index = checks[judged], judged
                judged += 1
                self._judge_answers(check, asked, chains, outcomes[index], index, self.clock() - began[index])

        def on_outcome(name: str, index: int, outcome: Outcome) -> None:
            begin_up_to(min(index + 1, len(checks) - 1))
            outcomes[index][name] = outcome
            for later in waiting[index : None if outcome.ended == "lost" else index + 1]:
                later.discard(name)
            done = len(outcomes[index])
            self.on_event({"event": "node.done", "check": checks[index].name, "node": name, "done": done, "of": len(asked)})
            judge_complete()

        begin_up_to(0)
        self.crew.relay(chains, on_outcome)
        judge_complete()

    def _judge_answers(
        self,
        check: Check,
        asked: Sequence[Node],
        chains: Mapping[str, Sequence[Call]],
        outcomes: Mapping[str, Outcome],
        index: int,
        seconds: float,
    ) -> None:
        answered = {node.name: outcomes[node.name] for node in asked if node.name in outcomes}
        facts = answers(answered, {name: chains[name][index] for name in answered})
        found = self._judged(check, [node for node in asked if node.name in answered], facts)
        spoken_of = {finding.node for finding in found}
        for name, outcome in answered.items():
            if outcome.facts is None and name not in spoken_of:
                found.append(_unanswered(check, name, outcome))
        found += [self._left_out(check, node.name) for node in self.crew.everyone if node.name not in answered]
        self._take(check, found, facts, seconds)

    # Checks that take several nodes

    def _together(self, check: Check) -> None:
        assert check.gather is not None
        began = self.clock()
        crew = Chosen(self.crew, frozenset(node.name for node in self.crew.nodes) - self._out.keys())
        nodes = list(crew.nodes)
        self._began(check, len(nodes))
        facts: Facts | None = None
        if not nodes:
            found = [_of(check, Status.SKIP, "no node is left to make it on")]
        else:
            lost = set(self.crew.lost)
            facts, found = self._gathered(check, crew, nodes)
            self.crew.check_agents()
            told = {finding.node for finding in found if finding.status in BAD}
            for name in [node.name for node in nodes if node.name in self.crew.lost.keys() - lost - told]:
                found.append(_unanswered(check, name, Outcome(ended="lost", error=self.crew.lost[name])))
        found += [self._left_out(check, node.name) for node in self.crew.everyone if node not in nodes]
        self._take(check, found, facts, self.clock() - began)

    def _gathered(self, check: Check, crew: Chosen, nodes: Sequence[Node]) -> tuple[Facts | None, list[Finding]]:
        """What raises speaks against all that were asked: nothing is known of them. The other checks are worth making."""
        assert check.gather is not None
        names = [node.name for node in nodes]
        try:
            facts = check.gather(self._setting(), crew)
        except Exception as error:
            return None, [_broken(check, "make this check", error, blames=names)]
        try:
            found = list(check.assess(self._setting(), nodes, facts))
        except Exception as error:
            return facts, [_broken(check, JUDGE, error, blames=names)]
        covers = [name for name in names if name in crew.answered]
        return facts, [_covering(finding, covers) for finding in found]

    def _left_out(self, check: Check, name: str) -> Finding:
        why = self._out.get(name) or self.crew.lost.get(name, "it does not answer")
        return _of(check, Status.SKIP, f"{LEFT_OUT}{why}", node=name)

    # All of them

    def _setting(self) -> Setting:
        return replace(self.setting, earlier=dict(self._facts))

    def _judged(self, check: Check, nodes: Sequence[Node], facts: Facts) -> list[Finding]:
        """Facts of one node that cannot be judged do not keep the others from it."""
        try:
            return list(check.assess(self._setting(), nodes, facts))
        except Exception as error:
            together = error
        alone: list[Finding] = []
        odd: dict[str, Finding] = {}
        for node in nodes:
            try:
                own = check.assess(self._setting(), [node], _only(facts, {node.name}))
                alone += [finding for finding in own if finding.node == node.name]
            except Exception as error:
                odd[node.name] = _broken(check, JUDGE, error, node=node.name)
        names = {node.name for node in nodes} - odd.keys()
        if not odd:
            return [*alone, _broken(check, JUDGE, together, blames=sorted(names))]
        rest = [node for node in nodes if node.name in names]
        return [*odd.values(), *(self._judged(check, rest, _only(facts, names)) if rest else [])]

    def _began(self, check: Check, nodes: int) -> None:
        self.on_event({"event": "check.began", "check": check.name, "about": check.about, "nodes": nodes})

    def _take(self, check: Check, found: Iterable[Finding], facts: Facts | None, seconds: float) -> None:
        if facts is not None:
            self._facts[check.name] = facts
        position = {node.name: place for place, node in enumerate(self.crew.everyone)}
        found = against_peers([_with_remedy(finding) for finding in found], self.crew.everyone)
        if self.baseline is not None:
            found = self.baseline.compare(found, self.crew.everyone)
        found = sorted(found, key=lambda finding: position.get(finding.node or "", -1))
        self._findings += found
        self._runs.append(CheckRun(name=check.name, about=check.about, seconds=seconds))
        statuses = Counter(finding.status.value for finding in found)
        self.on_event({"event": "check.ended", "check": check.name, "seconds": seconds, "statuses": dict(statuses)})
        for finding in found:
            if finding.status in BAD:
                # Of what could not be made on the whole cluster nobody knows whose fault it is.
                blamed = finding.blames if finding.status is Status.FAIL else ()
                for name in sorted({finding.node or "", *blamed} & position.keys()):
                    self._leave_out(name, check.name, f"{finding.status} of {check.name}: {finding.name}")

    def _leave_out(self, name: str, check: str, why: str) -> None:
        if name not in self._out:
            self._out[name] = why
            self.on_event({"event": "node.out", "node": name, "check": check, "why": why})


def _of(check: Check, status: Status, reason: str, *, node: str | None = None) -> Finding:
    return Finding(check=check.name, name=check.about, status=status, node=node, reason=reason)


def _broken(check: Check, what: str, error: Exception, *, node: str | None = None, blames: Sequence[str] = ()) -> Finding:
    reason = f"chaosrun could not {what}: {type(error).__name__}: {error}"
    return replace(_of(check, Status.ERROR, reason, node=node), blames=tuple(blames))


def _covering(finding: Finding, names: Sequence[str]) -> Finding:
    if finding.node is not None or finding.status is not Status.PASS or finding.covers:
        return finding
    return replace(finding, covers=tuple(names))


def _with_remedy(finding: Finding) -> Finding:
    if finding.status is not Status.ERROR or finding.remedy:
        return finding
    again = f"try again with --only {shlex.quote(finding.check)}"
    return replace(finding, remedy=f"{again}; if it comes again, report it with the file of -o json")


def _only(facts: Facts, names: Collection[str]) -> Facts:
    """Of what `answers` made."""
    return {part: {name: told for name, told in of.items() if name in names} for part, of in facts.items()}


def _unanswered(check: Check, name: str, outcome: Outcome) -> Finding:
    remedy = {
        "limit": "look at what keeps the node busy, or what hangs there",
        "died": "look at the node's kernel messages: was it out of memory?",
        "lost": LOST_REMEDY,
    }.get(outcome.ended, "")
    return Finding(
        check=check.name, name=check.about, status=Status.ERROR, node=name, reason=outcome.error or outcome.ended, remedy=remedy
    )
