"""The score: which mutants were caught with the right cause, and what was said of each family of scripts, printed at the end.

A plugin of pytest, registered in tests/conftest.py: under pytest-xdist the process that prints collects no tests, and is told.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

OUTPUT = "mutation outcomes"
SCORE = pytest.StashKey["Score"]()


@dataclass(slots=True)
class Outcome:
    name: str
    by: str
    """Whose eyes were to catch it."""
    missed: str | None = "its drill did not end"
    """What was not seen as it should be; None for a mutant that was caught."""
    said: str = ""
    """Status, code and culprit, where a table is made of them."""


@dataclass(slots=True)
class Score:
    outcomes: list[Outcome] = field(default_factory=list)

    @contextmanager
    def of(self, name: str, by: str) -> Iterator[Outcome]:
        """Enter one mutant's outcome, and fail the test when it was missed."""
        outcome = Outcome(name, by)
        self.outcomes.append(outcome)
        yield outcome
        assert outcome.missed is None, outcome.missed

    @property
    def survivors(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.missed is not None]

    def lines(self) -> Iterator[str]:
        """A line for each class of mutants, a row of the confusion table for each family of scripts, and what was missed."""
        classes: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            classes.setdefault(outcome.by, []).append(outcome)
        for by, outcomes in classes.items():
            right = f"{sum(outcome.missed is None for outcome in outcomes)} of {len(outcomes)}"
            said = Counter(outcome.said for outcome in outcomes if outcome.said).most_common()
            if said:
                yield f"{by}: {right} right; said: {', '.join(f'{what} ({times})' for what, times in said)}"
            else:
                yield f"mutation score: {right} mutants caught {by}, with the right cause"
        for outcome in self.survivors:
            yield f"  {outcome.name} survived: not caught {outcome.by}: {outcome.missed}"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SCORE] = Score()


@pytest.fixture(scope="session")
def score(pytestconfig: pytest.Config) -> Score:
    return pytestconfig.stash[SCORE]


def pytest_sessionfinish(session: pytest.Session) -> None:
    told: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if told is not None:
        told[OUTPUT] = [asdict(outcome) for outcome in session.config.stash[SCORE].outcomes]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {}).get(OUTPUT, ())
    node.config.stash[SCORE].outcomes.extend(Outcome(**outcome) for outcome in told)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = list(config.stash[SCORE].lines()) if SCORE in config.stash else []
    if lines:
        terminalreporter.section("oracle")
        terminalreporter.write("\n".join([*lines, ""]))
