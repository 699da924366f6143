"""A suite's request, and the plan of all its drills. Starts and writes nothing."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from chaosrun.campaign.files import SuitePlan
from chaosrun.campaign.kept_plans import KeptPlans, reruns
from chaosrun.campaign.planned_drill import plan_drills
from chaosrun.campaign.results import expect_possible
from chaosrun.errors import UsageError
from chaosrun.spec.suite import Comparison, Suite, SuiteDrill, load_suite
from chaosrun.spec.tree import find
from chaosrun.wording import listed

MOST_NAMED = 12
SEED = re.compile(r"[0-9]{1,18}")
SHARD = re.compile(r"(?P<number>[0-9]{1,6})/(?P<of>[0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class Shard:
    number: int
    """From 1."""
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRequest:
    path: Path
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    shard: Shard | None = None
    seed: int | None = None
    fail_fast: bool = False
    history: Path | None = None
    """None: under the root."""
    asked_s: float | None = field(default=None, compare=False)
    """The time of the request, for names with the date; None: when the suite is opened."""


def night_of(now_s: float) -> str:
    """The date, in UTC: `2026-11-21`."""
    return datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d")


def parse_seed(text: str, now_s: float) -> int:
    """`today`, the date in UTC as a number (20261121), or a number. Raises UsageError."""
    if text == "today":
        return int(night_of(now_s).replace("-", ""))
    if not SEED.fullmatch(text):
        raise UsageError(f"--seed {text!r} is not a seed", hint="write today, or a number such as 20261121")
    return int(text)


def parse_shard(text: str) -> Shard:
    """`2/5`. Raises UsageError."""
    match = SHARD.fullmatch(text.strip())
    shard = Shard(int(match["number"]), int(match["of"])) if match else None
    if shard is None or not 1 <= shard.number <= shard.of:
        raise UsageError(f"--shard {text!r} is not a shard", hint="write which of how many, from 1, such as --shard 2/5")
    return shard


def chosen(drills: Sequence[SuiteDrill], only: Sequence[str] = (), without: Sequence[str] = ()) -> list[SuiteDrill]:
    """The drills named by `only` (all if empty) except those named by `without`; a name is a drill, a drill with all its
    combinations, or a pattern with * and ?. Raises UsageError for a name of no drill, and when none is left."""
    for option, names in (("--only", only), ("--except", without)):
        for name in names:
            if not any(_is_called(drill, name) for drill in drills):
                known = listed(list(dict.fromkeys(drill.base for drill in drills)), MOST_NAMED)
                raise UsageError(f"{option}: no drill {name!r}", hint=f"drills: {known}; --list shows every combination")
    kept = [
        drill
        for drill in drills
        if (not only or any(_is_called(drill, name) for name in only)) and not any(_is_called(drill, name) for name in without)
    ]
    if not kept:
        raise UsageError("no drill is left to run", hint="change --only and --except")
    return kept


def sharded(drills: Sequence[SuiteDrill], shard: Shard, *, together: str | None = None) -> list[SuiteDrill]:
    """The part of the drills that belongs to a shard, by each drill's name alone, so that machines agree without a history;
    shards are only roughly equal in size. `together`: a name that decides the shard of all drills instead."""

    def belongs(name: str) -> bool:
        return int.from_bytes(hashlib.sha256(name.encode()).digest()) % shard.of == shard.number - 1

    return [drill for drill in drills if belongs(together or drill.name)]


def _is_called(drill: SuiteDrill, name: str) -> bool:
    # Names contain brackets.
    pattern = name.replace("[", "[[]")
    return name in (drill.name, drill.base) or fnmatchcase(drill.name, pattern) or fnmatchcase(drill.base, pattern)


def plan_suite(request: SuiteRequest, root: Path, now_s: float) -> SuitePlan:
    """Plan a suite. Raises SpecError for all errors in any file, and UsageError when none of the requested drills exists."""
    suite = load_suite(request.path)
    expect_possible(suite.drills)
    drills = chosen(suite.drills, request.only, request.without)
    if request.shard is not None:
        # Compared drills must be in one shard.
        drills = sharded(drills, request.shard, together=None if suite.spec.comparison is None else suite.spec.name)
    planned = plan_drills(drills, request.seed)
    comparison, notes_on_losses = comparison_of(suite, drills)
    if request.shard is not None and suite.spec.comparison is not None:
        shards = f"one of the {request.shard.of} shards"
        notes_on_losses.append(f"all drills belong to {shards}: their losses are compared with each other")
    history = (request.history or root / "suites" / "history" / f"{suite.spec.name}.jsonl").absolute()
    kept_plans = KeptPlans.next_to(history)
    plans, notes = kept_plans.read()
    again, more = reruns(plans, suite.drills, planned)
    if more:
        more.append(f"kept plans are in {kept_plans.folder}: remove a file to give its plan up")
    more += [f"{drill.name}: no fault is planned, so nothing about recovery is tested" for drill in planned if not drill.faults]
    kept = {each.plan for each in plans}
    return SuitePlan(
        suite_id="",
        name=suite.spec.name,
        path=str(request.path.resolve()),
        created_s=now_s,
        night=night_of(now_s),
        seed=request.seed,
        shard=None if request.shard is None else str(request.shard),
        fail_fast=request.fail_fast,
        by_hand=bool(request.only),
        history=str(history),
        # Drills that failed before come first, so that a repeated failure is known soonest.
        drills=(*again, *sorted(planned, key=lambda drill: drill.plan not in kept)),
        notes=(*notes, *more, *notes_on_losses),
        comparison=comparison,
        files=file_digests(suite, drills),
    )


def comparison_of(suite: Suite, tonight: Sequence[SuiteDrill]) -> tuple[Comparison | None, list[str]]:
    """The suite's comparison for tonight's drills, and notes on drills left out."""
    asked = suite.spec.comparison
    if asked is None:
        return None, []
    first = asked.first or suite.drills[0].name
    here = [drill.name for drill in tonight]
    elsewhere = [drill.name for drill in suite.drills if drill.name not in here]
    if not here:
        return None, []
    if first not in here:
        return None, [f"the losses are not compared: drill {first} is not in this part of the suite"]
    if here == [first] and elsewhere:
        return None, [f"the losses are not compared: of the drills with losses {first} alone is in this part of the suite"]
    left_out = f"the losses are compared of {listed(here, MOST_NAMED)} alone: {listed(elsewhere, MOST_NAMED)} left out"
    asked = asked.model_copy(update={"first": first, "beyond": tuple(name for name in asked.beyond if name in here)})
    return asked, [left_out] if elsewhere else []


def file_digests(suite: Suite, drills: Iterable[SuiteDrill]) -> dict[str, str | None]:
    """Digests of the suite's file, and of the job file, script, fault preset and trace of each drill, by absolute path."""
    paths = {suite.path}
    for drill in drills:
        written = [find(drill.job.tree, ("faults", "preset"))[1].place.source, drill.job.trace]
        paths |= {drill.job.path, drill.job.script_path}
        paths |= {Path(source.label) for source in written if source is not None and source.is_file}
    return {str(path): _digest(path) for path in sorted({path.resolve() for path in paths})}


def changed_files(files: Mapping[str, str | None]) -> list[str]:
    return [path for path, digest in files.items() if _digest(Path(path)) != digest]


def _digest(path: Path) -> str | None:
    """None for a file that cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
