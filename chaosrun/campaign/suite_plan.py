"""From a suite's file, and what is asked of it, to the plan of all its drills. Starts and writes nothing."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from chaosrun.campaign.kept_plans import KeptPlans, reruns
from chaosrun.campaign.planned_drill import plan_drills
from chaosrun.campaign.suite_file import SuitePlan
from chaosrun.campaign.suite_request import SuiteRequest, chosen, night_of, sharded
from chaosrun.spec.suite import Comparison, Suite, SuiteDrill, load_suite
from chaosrun.spec.tree import find
from chaosrun.wording import listed

MOST_NAMED = 12


def plan_suite(request: SuiteRequest, root: Path, now_s: float) -> SuitePlan:
    """Raises SpecError for whatever is wrong in any file, and UsageError when nothing of what was asked for exists."""
    suite = load_suite(request.path)
    drills = chosen(suite.drills, request.only, request.without)
    if request.shard is not None:
        # What is compared must be in one place.
        drills = sharded(drills, request.shard, together=None if suite.spec.comparison is None else suite.spec.name)
    planned = plan_drills(drills, request.seed)
    comparison, notes_on_losses = comparison_of(suite, drills)
    if request.shard is not None and suite.spec.comparison is not None:
        shards = f"one of the {request.shard.of} shards"
        notes_on_losses.append(f"all drills belong to {shards}: their losses are compared with each other")
    history = (request.history or root / "suites" / "history" / f"{suite.spec.name}.jsonl").absolute()
    kept_plans = KeptPlans.beside(history)
    plans, notes = kept_plans.read()
    again, more = reruns(plans, suite.drills, planned)
    if more:
        more.append(f"kept plans are in {kept_plans.folder}: without its file one is given up")
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
        # What failed before comes first: if it fails again, that is known soonest.
        drills=(*again, *sorted(planned, key=lambda drill: drill.plan not in kept)),
        notes=(*notes, *more, *notes_on_losses),
        comparison=comparison,
        files=file_digests(suite, drills),
    )


def comparison_of(suite: Suite, tonight: Sequence[SuiteDrill]) -> tuple[Comparison | None, list[str]]:
    """The suite's comparison as far as tonight's drills go, its first drill named whatever else runs; and what is to be told
    of those that it leaves out."""
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
    notes = (
        [f"the losses are compared of {listed(here, MOST_NAMED)} alone: {listed(elsewhere, MOST_NAMED)} left out"]
        if elsewhere
        else []
    )
    return asked.model_copy(update={"first": first, "beyond": tuple(name for name in asked.beyond if name in here)}), notes


def file_digests(suite: Suite, drills: Iterable[SuiteDrill]) -> dict[str, str | None]:
    """Of the suite's file, and of the script, fault preset and trace of each drill, by absolute path."""
    paths = {suite.path}
    for drill in drills:
        written = [find(drill.job.tree, ("faults", "preset"))[1].place.source, drill.job.trace]
        paths |= {drill.job.script_path, *(Path(source.label) for source in written if source is not None and source.is_file)}
    return {str(path): _digest(path) for path in sorted({path.resolve() for path in paths})}


def changed_files(files: Mapping[str, str | None]) -> list[str]:
    """Of the files that a suite was planned from, those that are not what they were."""
    return [path for path, digest in files.items() if _digest(Path(path)) != digest]


def _digest(path: Path) -> str | None:
    """None for a file that cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
