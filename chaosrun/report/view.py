"""One view of a run, from its files and verdict: the rows and sentences of every report, ready to be shown.

A damaged file is named in `damage`, and everything that depends on it is left out.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chaosrun.faults.fault import FaultPlan
from chaosrun.records.events import CONCLUSIVE, DeathUnplanned
from chaosrun.records.history import LegHistory, read_leg
from chaosrun.records.layout import RUN, RunLayout
from chaosrun.records.naming import shortest
from chaosrun.records.run_file import readable
from chaosrun.report.facts import RunFacts, read_facts, read_versions
from chaosrun.report.next_commands import NextCommand, next_commands, repeat_command
from chaosrun.report.page import as_float, shown
from chaosrun.report.sentences import raised
from chaosrun.wording import count, span

if TYPE_CHECKING:
    from chaosrun.records.events import Outcome
    from chaosrun.spec.model import JobSpec
    from chaosrun.verify.check import CheckResult, Divergence
    from chaosrun.verify.ruling import VerdictStatus
    from chaosrun.verify.summaries import AttemptSummary, FaultOutcome
    from chaosrun.verify.verdict import Verdict

OUTCOME_WORDS: "dict[Outcome, str]" = {
    "user_error": "the script failed",
    "recovery_failed": "recovery failed",
    "fault_missed": "a planned fault was missed",
    "resources": "no resources",
    "timeout": "timed out",
    "interrupted": "interrupted",
}
"""Of a leg that did not complete: what tells one INCONCLUSIVE from another."""
ENDED_BY_DEATH = ("user_error", "recovery_failed")
"""Outcomes of a leg whose last attempt's unplanned death says why. Of an inexact restore the verdict says more than it."""
MOST_DEATHS = 8
MOST_FAULTS = 3
CHECK_WORDS = {"fail": "failed", "inconclusive": "inconclusive", "pass": "passed", "skip": "skipped"}
"""In the order of interest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    number: int
    resumed_from: str
    steps: str
    ended_by: str
    """Planned faults by their ids and by what they do; `ended_by_id` by their ids alone."""
    ended_by_id: str
    lost: str
    recovery: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathRow:
    leg: str
    attempt: int
    rank: int | None
    step: int | None
    reason: str
    traceback: str | None
    fatal: bool

    @property
    def title(self) -> str:
        return f"Traceback of {'the attempt' if self.rank is None else f'rank {self.rank}'}, attempt {self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    run: RunLayout
    verdict: "Verdict"
    facts: RunFacts
    versions: Mapping[str, str]
    """Versions of chaosrun, Python and the libraries."""
    spec: "JobSpec | None"
    damage: tuple[str, ...]
    why: str | None
    """Which kind of INCONCLUSIVE it is."""
    tried: str
    killed: str
    attempts: tuple[AttemptRow, ...]
    checks: tuple["CheckResult", ...]
    """In the order of interest."""
    divergence: tuple[tuple[str, str], ...]
    """The first divergence: names and values; the verdict's hint says what to do about it."""
    deaths: tuple[DeathRow, ...]
    """Sorted: deaths that ended a leg come first; at most MOST_DEATHS."""
    unplanned: int
    """How many deaths of the leg that is judged are not explained by a fault."""
    repeat: NextCommand | None
    """The command that reproduces it, where its job file is known."""
    commands: tuple[NextCommand, ...]
    """The next commands, including `repeat` where appropriate."""

    @property
    def name(self) -> str:
        return self.facts.name or self.run.run_id

    @property
    def faults(self) -> "tuple[FaultOutcome, ...]":
        return self.verdict.faults

    @property
    def status(self) -> "VerdictStatus":
        return self.verdict.status

    @property
    def status_words(self) -> str:
        """ "INCONCLUSIVE: the script failed", "PASS (settled at step 63 …)"; the status alone where that is all."""
        settled = self.verdict.settled
        return f"{self.status} ({settled})" if settled else self.status if self.why is None else f"{self.status}: {self.why}"

    @property
    def decided(self) -> bool:
        """Whether both legs reached their ends, so that the checks could be decided."""
        return self.verdict.outcome in CONCLUSIVE

    @property
    def consequences(self) -> tuple["CheckResult", ...]:
        """Failed checks that only repeat what the first divergence says."""
        from chaosrun.verify.checks import consequences

        found = self.verdict.divergence
        return consequences(self.verdict.checks, found.kind) if self.decided and found is not None else ()

    @property
    def following(self) -> str:
        """ "12 further checks differ as a consequence"; empty where none does."""
        number = len(self.consequences)
        return f"{number} further check{'s differ' if number > 1 else ' differs'} as a consequence" if number else ""

    @property
    def further_checks(self) -> tuple["CheckResult", ...]:
        """Checks that did not pass, and add something to the verdict and the first divergence."""
        from chaosrun.verify.checks import FOLLOWING

        told = {self.verdict.code, *(FOLLOWING if self.divergence else ())}
        open_ = (check for check in self.checks if check.status in ("fail", "inconclusive"))
        return tuple(check for check in open_ if check.code not in told) if self.decided else ()

    @property
    def fatal(self) -> DeathRow | None:
        """The death that ended the leg on which the verdict rests."""
        if self.verdict.outcome not in ENDED_BY_DEATH:
            return None
        return next((death for death in self.deaths if death.fatal), None)

    @property
    def faults_title(self) -> str:
        landed = sum(fault.landed for fault in self.faults)
        return f"{landed} of {len(self.faults)} landed{self.facts.whose}" if self.faults else "none planned"

    @property
    def faults_sentence(self) -> str:
        counted = Counter(fault.kind for fault in self.faults)
        kinds = ", ".join(f"{number} × {kind}" if len(counted) > 1 else kind for kind, number in counted.items())
        told = f"{self.faults_title}{f' ({kinds})' if kinds else ''}"
        # In addition to the drill's planned faults: a restart that crashed once, before another one resumed exactly.
        others = [count(self.unplanned, "unplanned death")] if self.unplanned and self.faults else []
        costs = [*others, *_costs(self.verdict, "done again")]
        return f"{told}; {', '.join(costs)}" if len(self.attempts) > 1 else told

    @property
    def attempts_title(self) -> str:
        return ", ".join([str(len(self.attempts)), *_costs(self.verdict, "lost and done again")])

    @property
    def checks_title(self) -> str:
        counted = Counter(check.status for check in self.checks)
        return ", ".join(f"{counted[status]} {word}" for status, word in CHECK_WORDS.items() if counted[status]) or "none made"

    @property
    def page(self) -> str | None:
        return shortest(self.run.report_html.absolute()) if self.run.report_html.is_file() else None

    @property
    def files(self) -> str | None:
        """The working folder of a run in production, if its script left files there: what links lead to is the job's."""
        work = self.run.leg(RUN).work
        found = [each for each in work.iterdir() if not each.is_symlink()] if self.facts.in_production and work.is_dir() else []
        return shortest(work.absolute()) if any(each.is_file() or any(each.iterdir()) for each in found) else None


def read_view(run: RunLayout, verdict: "Verdict") -> RunView:
    """Never fails on a file's content. Raises OSError when a file of the run cannot be read at all."""
    from chaosrun.verify.verdict import spec_of

    damage: list[str] = []
    facts = readable(lambda: read_facts(run), damage) or RunFacts()
    spec, plan = readable(lambda: spec_of(run), damage), readable(lambda: FaultPlan.read(run.plan_json), damage)
    legs = {leg: read_leg(run.leg(leg), traces=None) for leg in ("reference", run.main)}
    repeat = repeat_command(run, facts)
    commands, found = next_commands(verdict, run, facts, repeat), verdict.divergence
    diagnosed = any(each.label == "diagnose" for each in commands)
    deaths = _deaths(legs.values())
    return RunView(
        run=run,
        verdict=verdict,
        facts=facts,
        versions={**({"chaosrun": facts.chaosrun} if facts.chaosrun else {}), **read_versions(run)},
        spec=spec,
        damage=tuple(dict.fromkeys(damage)),
        why=OUTCOME_WORDS.get(verdict.outcome) if verdict.status == "INCONCLUSIVE" and verdict.outcome else None,
        tried=_tried(facts, spec, plan),
        killed=_killed(verdict, facts, legs[run.main]),
        attempts=tuple(_attempt_row(attempt) for attempt in verdict.attempts),
        checks=tuple(sorted(verdict.checks, key=lambda check: list(CHECK_WORDS).index(check.status))),
        divergence=() if found is None else tuple(divergence_rows(found, verdict.hint, diagnosed=diagnosed)),
        deaths=tuple(deaths[:MOST_DEATHS]),
        unplanned=sum(death.leg == run.main for death in deaths),
        repeat=repeat,
        commands=commands,
    )


def _tried(facts: RunFacts, spec: "JobSpec | None", plan: FaultPlan | None) -> str:
    name = facts.name or "a job whose file cannot be read"
    workers = "" if facts.workers is None else f" on {count(facts.workers, 'worker')}"
    every = "" if spec is None else f", a checkpoint every {count(spec.checkpoint.every_steps, 'step')}"
    every = ", with its own checkpoints" if spec is not None and spec.by == "script" else every
    if facts.in_production:
        return f"{name}{workers}{every}: run in production, each restart held against what was recorded before"
    if plan is None:
        again = "once with its faults"
    elif not plan.faults:
        again = "once again with no fault planned"
    else:
        injected = facts.injected_faults
        more = f", {injected} more injected" if injected else ""
        again = f"once with its faults ({len(plan.faults) - injected}, seed {plan.seed}{more})"
    exact = spec is None or (spec.verify.weights.exact and spec.verify.losses.exact)
    compared = "bit for bit" if exact else "within the job file's tolerances"
    return f"{name}{workers}{every}: once without faults, {again}, and the two compared {compared}"


def _killed(verdict: "Verdict", facts: RunFacts, chaos: LegHistory) -> str:
    faults = verdict.faults
    unplanned = f" {count(deaths, 'unplanned death')}." if (deaths := len(chaos.events(DeathUnplanned))) else ""
    if not chaos.journal:
        return f"Nothing: the {'' if facts.in_production else 'chaos '}run never began."
    if not faults:
        return f"Nothing was planned.{unplanned}"
    if len(faults) <= MOST_FAULTS:
        doubt = " (NOT SHOWN to have happened)"
        return (
            "; ".join(f"{fault.id}: {fault.description}{'' if fault.landed else doubt}" for fault in faults) + f".{unplanned}"
        )
    kinds = ", ".join(f"{number} × {kind}" for kind, number in Counter(fault.kind for fault in faults).most_common())
    ends = f"the first {faults[0].description}, the last {faults[-1].description}"
    of = "faults" if facts.injected_faults else "planned faults"
    landed = sum(fault.landed for fault in faults)
    return f"{landed} of {len(faults)} {of} landed{facts.whose} ({kinds}): {ends}.{unplanned}"


def _attempt_row(attempt: "AttemptSummary") -> AttemptRow:
    named = attempt.faults
    # The outcome of a leg is one word; a script's error is kept unchanged.
    whole = attempt.ended_by if " " in attempt.ended_by else attempt.ended_by.replace("_", " ")
    return AttemptRow(
        number=attempt.attempt,
        resumed_from=(attempt.resumed_from or "the beginning") + (" (in memory)" if attempt.source == "memory" else ""),
        steps="none" if attempt.first_step is None else f"{attempt.first_step}-{attempt.last_step}",
        ended_by=whole,
        ended_by_id=f"{'fault' if len(named) == 1 else 'faults'} {', '.join(named)}" if named else whole,
        lost=str(attempt.lost_steps or "-"),
        recovery="-" if attempt.recovery_s is None else span(attempt.recovery_s),
    )


def _costs(verdict: "Verdict", what: str) -> list[str]:
    times_s = sorted(attempt.recovery_s for attempt in verdict.attempts if attempt.recovery_s is not None)
    recovery = [f"recovery {' to '.join(dict.fromkeys((span(times_s[0]), span(times_s[-1]))))}"] if times_s else []
    return [f"{count(verdict.lost_steps, 'step')} {what}", *recovery]


def divergence_rows(found: "Divergence", hint: str | None, *, diagnosed: bool) -> "Iterator[tuple[str, str]]":
    """`hint`: the verdict's, so as not to repeat it; `diagnosed`: `chaosrun diagnose` can show more."""
    ranks = f"rank {found.rank}" if len(found.ranks) <= 1 else f"ranks {', '.join(map(str, found.ranks))}"
    micro = "" if found.micro_batch is None else f", micro-batch {found.micro_batch}"
    yield "where", f"step {found.step}, {ranks}, attempt {found.attempt}{micro}"
    yield "kind", found.kind
    if found.tensor is not None:
        yield "tensor", found.tensor
    elif found.kind in ("gradient", "optimizer"):
        yield "tensor", "not recorded at this step" + (": `chaosrun diagnose` names it" if diagnosed else "")
    if (found.expected, found.seen) != (None, None):
        yield "expected", shown(found.expected)
        yield "seen", shown(found.seen)
    if (distance := _distance(found.expected, found.seen)) is not None:
        yield "distance", distance
    yield "cause", found.cause
    if found.hint and found.hint != hint:
        yield "in detail", found.hint


def _deaths(legs: Iterable[LegHistory]) -> list[DeathRow]:
    found = [
        DeathRow(
            leg=leg.name,
            attempt=death.attempt,
            rank=death.rank,
            step=death.step,
            reason=raised(death.error) or death.reason,
            traceback=death.error and death.error.traceback,
            fatal=leg.outcome in ENDED_BY_DEATH and leg.attempts[-1:] != () and death.attempt == leg.attempts[-1].number,
        )
        for leg in legs
        for death in leg.events(DeathUnplanned)
    ]
    return sorted(found, key=lambda death: not death.fatal)


def _distance(expected: Any, seen: Any) -> str | None:
    """The distance of two recorded floats, or of the first differing pair in two lists."""
    if isinstance(expected, list | tuple) and isinstance(seen, list | tuple):
        pair = next(((a, b) for a, b in zip(expected, seen, strict=False) if a != b), (None, None))
        return None if any(isinstance(value, list | tuple) for value in pair) else _distance(*pair)
    floats = [number for value in (expected, seen) if (number := as_float(value)) is not None]
    if len(floats) < 2:
        return None
    from chaosrun.verify.ulp import float_distance

    ulp = float_distance(floats[0], floats[1])
    return "no number on one side" if ulp is None else f"{ulp} ULP"
