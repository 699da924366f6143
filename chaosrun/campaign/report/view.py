"""One view of a suite: the rows and sentences that its text, its Markdown and its page show."""

from dataclasses import dataclass

from chaosrun.campaign.results import DrillResult, SuiteResult
from chaosrun.records.naming import run_arguments
from chaosrun.report.facts import read_facts
from chaosrun.report.next_commands import NextCommand, command, repeat_command
from chaosrun.verify.trajectory import LossDifference
from chaosrun.wording import count, span

LOOKED_AT = 8
"""Up to this many drills, each is shown with its command; of more, only those that are not as expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRow:
    name: str
    ok: bool
    status: str
    """Its verdict, or a word instead ("cancelled", "not run")."""
    expected: str
    told: str
    """The first difference, else why it did not pass; empty where there is nothing to report."""
    faults: str
    restarts: str
    recovery: str
    time: str
    label: str | None
    rerun: str | None
    look: NextCommand | None
    repeat: NextCommand | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossesRow:
    name: str
    steps: str
    largest: str
    mean: str
    beyond: str
    ok: bool
    surprise: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteView:
    result: SuiteResult
    drills: tuple[DrillRow, ...]
    losses: tuple[LossesRow, ...]

    @property
    def not_done(self) -> str:
        return "not begun" if self.result.cut_short is None else "not ended"

    @property
    def words(self) -> str:
        result = self.result
        if result.empty:
            return "nothing to do"
        if result.as_expected:
            return "as expected"
        # A drill that is not as expected matters more than drills that were not run.
        return "not as expected" if result.cut_short is None or any(not drill.ok for drill in result.drills) else "cut short"

    @property
    def headline(self) -> str:
        result = self.result
        if result.empty:
            return f"no drill belongs to {'this part' if result.shard is None else f'shard {result.shard}'} of the suite"
        labels = [drill.label for drill in result.drills]
        counted = (
            (sum(not drill.ok for drill in result.drills), "not as expected"),
            (sum(drill.cancelled and not drill.ok for drill in result.drills), "cancelled"),
            (sum(not entry.as_expected for entry in result.compared), "with losses not as expected"),
        )
        more = (
            *((labels.count(label), label) for label in ("new", "fixed", "flaky")),
            (sum(drill.rerun is not None for drill in result.drills), "that failed before"),
            (len(result.left), self.not_done),
        )
        cached, made = result.cached
        return ", ".join(
            [
                count(len(result.drills), "drill"),
                *(f"{number} {words}" for number, words in counted if number),
                *(["losses not compared"] if result.not_compared is not None else []),
                *(f"{number} {words}" for number, words in more if number),
                f"{cached} of {count(cached + made, 'reference')} from the cache",
                span(result.took_s),
            ]
        )

    @property
    def unexpected(self) -> list[str]:
        result = self.result
        lines = [f"{drill.name}: {surprise}" for drill in result.drills for surprise in drill.surprises]
        lines += [row.surprise for row in self.losses if not row.ok]
        if result.not_compared is not None:
            lines.append(f"the losses could not be compared: {result.not_compared}")
        if result.cut_short is not None:
            lines.append(f"cut short: {result.cut_short}")
        if result.left:
            lines.append(f"{self.not_done}: {', '.join(result.left)}")
        return lines

    @property
    def odd(self) -> tuple[DrillRow, ...]:
        return tuple(row for row in self.drills if not row.ok)

    @property
    def by_interest(self) -> list[DrillRow]:
        return sorted(self.drills, key=lambda row: row.ok)


def suite_view(result: SuiteResult) -> SuiteView:
    return SuiteView(
        result=result,
        drills=tuple(_drill_row(drill, few=len(result.drills) <= LOOKED_AT) for drill in result.drills),
        losses=tuple(_losses_row(each.name, each.difference, each.control, each.as_expected) for each in result.compared),
    )


def _drill_row(drill: DrillResult, *, few: bool) -> DrillRow:
    run, told = drill.run, drill.difference or ("" if drill.status == "PASS" else drill.cause)
    return DrillRow(
        name=drill.name,
        ok=drill.ok,
        status=drill.word,
        expected="yes" if drill.ok else f"no, {drill.expected}",
        told=(drill.error if drill.status is None else told) or "",
        faults=f"{drill.landed}/{drill.faults}",
        restarts=str(drill.restarts),
        recovery="-" if drill.recovery_s is None else span(drill.recovery_s),
        time=span(drill.took_s),
        label=drill.label,
        rerun=drill.rerun,
        look=command("inspect", "verify", *run_arguments(run)) if run is not None and (few or not drill.ok) else None,
        repeat=None if run is None or drill.ok else repeat_command(run, read_facts(run)),
    )


def _losses_row(name: str, found: LossDifference, control: bool, ok: bool) -> LossesRow:
    return LossesRow(
        name=f"{name} (control)" if control else name,
        steps=str(found.steps),
        largest=f"{found.largest:.3g}",
        mean=f"{found.mean:.3g}",
        beyond="no" if found.first_beyond is None else f"from step {found.first_beyond} on",
        ok=ok,
        surprise=f"{name}: losses {'within the tolerance, a control must not be' if control else 'beyond the tolerance'}",
    )
