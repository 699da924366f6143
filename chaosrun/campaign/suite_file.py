"""What a suite is going to do and has done, in a folder of its own: `<root>/suites/<suite id>/`.

suite.json is written durably before anything starts; journal.jsonl gets a line when a drill starts and one when it has ended.
Runs nothing.
"""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from chaosrun.campaign import json_file
from chaosrun.campaign.events import SUITE_EVENTS, DrillEnded, DrillStarted, SuiteBegan
from chaosrun.campaign.planned_drill import PlannedDrill
from chaosrun.campaign.results import DrillResult
from chaosrun.errors import UsageError
from chaosrun.records.codec import DamagedRecordError, read_records
from chaosrun.records.folders import find_folder, new_folder
from chaosrun.records.journal import Journal
from chaosrun.records.locks import locked
from chaosrun.records.naming import root_arguments, shortest
from chaosrun.spec.suite import Comparison

PLAN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """What a suite was asked to do, all of it planned."""

    suite_id: str
    name: str
    path: str
    """Absolute path of the suite's file."""
    created_s: float
    night: str
    seed: int | None
    shard: str | None
    fail_fast: bool
    by_hand: bool
    """A choice of its drills by name, which stands for no night."""
    history: str
    drills: tuple[PlannedDrill, ...]
    """In the order in which they are begun."""
    notes: tuple[str, ...] = ()
    comparison: Comparison | None = None
    """Of the drills' losses, its first drill named; None: there is none to make."""
    files: Mapping[str, str | None] = field(default_factory=dict)
    """Digests of what it was planned from, beside the job files, by absolute path."""

    def __post_init__(self) -> None:
        """Raises ValueError when drills share a name, by which their results are told apart."""
        if len({drill.name for drill in self.drills}) < len(self.drills):
            raise ValueError("two drills have one name")

    def to_json(self) -> dict[str, Any]:
        return {"v": PLAN_VERSION, **json_file.plain(self)}

    def resume_command(self, root: Path) -> str:
        where = root_arguments(root)
        return shlex.join(["chaosrun", "suite", shortest(Path(self.path)), "--resume", self.suite_id, *where])


@dataclass(slots=True)
class Progress:
    """What the journal says."""

    started: dict[str, str] = field(default_factory=dict)
    """Run directory by drill, of the latest start."""
    results: dict[str, DrillResult] = field(default_factory=dict)
    """Without those that were cancelled: they are still to be carried out."""
    took_s: float = 0.0
    """While a process carried the suite out, all of them together."""


@dataclass(frozen=True, slots=True)
class SuiteFolder:
    path: Path

    @property
    def file(self) -> Path:
        return self.path / "suite.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def index_html(self) -> Path:
        return self.path / "index.html"

    @property
    def junit_xml(self) -> Path:
        return self.path / "suite.junit.xml"

    @property
    def summary_md(self) -> Path:
        return self.path / "summary.md"

    def save(self, plan: SuitePlan) -> None:
        json_file.save(self.file, plan, PLAN_VERSION)

    def load(self) -> SuitePlan:
        """Raises UsageError when it holds no suite that this version can go on with."""
        return json_file.load(self.file, SuitePlan, version=PLAN_VERSION, what="suite")

    def progress(self) -> Progress:
        """Raises UsageError when the journal is damaged other than at its end."""
        done = Progress()
        try:
            events = list(read_records(self.journal, SUITE_EVENTS)) if self.journal.is_file() else []
            for former, event in pairwise(events):
                # Before one begins, nobody was at it.
                done.took_s += 0.0 if isinstance(event, SuiteBegan) else max(0.0, event.time_s - former.time_s)
            for event in events:
                if isinstance(event, DrillStarted):
                    done.started[event.name] = event.run
                elif isinstance(event, DrillEnded):
                    result = json_file.checked(DrillResult, event.result)
                    if not result.cancelled:
                        done.results[result.name] = result
        except (DamagedRecordError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{self.journal} is damaged: {error}", hint="begin the suite anew") from error
        return done

    @contextmanager
    def locked(self) -> Iterator[Journal]:
        """Hold the suite for this process, with its journal. Raises UsageError while another one does."""
        with locked(self.path / "lock", f"suite {self.path.name} is being carried out"):
            journal = Journal(self.journal)
            try:
                yield journal
            finally:
                journal.close()


def new_suite(root: Path, name: str) -> SuiteFolder:
    """A folder of its own. Raises UsageError when none can be made."""
    return SuiteFolder(new_folder(root / "suites", name))


def find_suite(root: Path, ref: str, suite: Path) -> SuiteFolder:
    """The run of this suite's file called `ref`: an id, a unique prefix of one, or "latest". Raises UsageError."""

    def began(path: Path) -> tuple[str, float]:
        plan = SuiteFolder(path).load()
        return plan.path, plan.created_s

    otherwise = "without --resume the suite begins anew"
    return SuiteFolder(find_folder(root / "suites", ref, began, of=suite, otherwise=otherwise))
