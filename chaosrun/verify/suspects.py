"""Suspects: entries of a script's checkpoint other than its model and its optimizer, state that no checkpoint holds, and files
that are ahead of the checkpoint. Pure."""

import re
from dataclasses import replace
from pathlib import PurePath

from chaosrun.records.history import Attempt, changed_settings
from chaosrun.records.layout import LegLayout
from chaosrun.records.traces import ALIVE, CHANGES_OFTEN, RankTrace, SaveRecord
from chaosrun.verify.check import Divergence, Drill
from chaosrun.verify.code_data import DATA
from chaosrun.verify.code_differences import QUANTITIES
from chaosrun.verify.codes import Params
from chaosrun.verify.own_saves import named_since, renames_in
from chaosrun.verify.restored import restored_difference

_RIGHT = ("first_after_restore", "restored_right", "streams_at_rest", "restored")
"""Variants of rows that only say that everything was restored."""
_OF_STREAMS = ("rng_not_restored", "rng_of_another_step")
_READ_FROM_FILES = (*QUANTITIES, *DATA, "learning_rate", "registered_state_not_restored")
"""Codes of differences that may come from data that a script reads in one of its own files."""
_OF_OPTIMIZER = re.compile(r"(.*/)?state/[^/]+/")


def saved_beside(drill: Drill, found: Divergence) -> dict[tuple[int, str], list[str]]:
    """Entries, by rank and saved file, of the checkpoint that the attempt resumed from, if they are neither a model's nor an
    optimizer's, and were not saved again as in the reference run. If only ranks that saved nothing differ, what others saved
    again says nothing of them: all entries that change count. Entries that differ without a restart (clocks) do not count."""
    attempt = drill.chaos.attempt(found.attempt)
    suspects: dict[tuple[int, str], list[str]] = {}
    saving = {trace.rank for each in drill.chaos.attempts for trace in each.traces.values() if trace.saves}
    for rank, trace in sorted(attempt.traces.items()):
        earlier = drill.before(attempt.number, rank)
        saves = ((before, save) for before in earlier for save in before.saves if save.step == attempt.start_of(rank))
        for before, save in saves:
            later = next((each for each in trace.saves if each.held.keys() == save.held.keys()), None)
            again = _as_in_reference(drill, rank, later) if later else set[str]()
            again = _still(drill, rank, save) if saving.isdisjoint(found.ranks) else again
            names = _beside(save, trace) & _as_in_reference(drill, rank, save) - again
            if names:
                suspects[rank, named_since(save, renames_in(before.saves))] = sorted({name.partition("/")[0] for name in names})
    return suspects


def saved_last(drill: Drill, found: Divergence) -> Params | None:
    """The file of its own that a rank which differs had saved last, if not after the step that the attempt resumed at."""
    attempt = drill.chaos.attempt(found.attempt)
    for rank in found.ranks:
        base = attempt.start_of(rank)
        earlier = [trace.saves for trace in drill.before(attempt.number, rank)]
        saves = [save for each in earlier for save in each if save.held and save.step <= base]
        last = max(saves, key=lambda save: save.step, default=None)
        if last and last.step < base:
            path = named_since(last, renames_in(next(each for each in earlier if last in each)))
            return {"other": rank, "path": path, "older": last.step, "base": base}
    return None


def with_outside_state(drill: Drill, found: Divergence) -> Divergence:
    """Add the state that the training changes in the reference run and no checkpoint holds, if all else was restored."""
    attempt, reason = drill.chaos.attempt(found.attempt), found.reason
    generic = reason.code in QUANTITIES and reason.because in (*_RIGHT, "drew_before")
    counts = generic or (reason.code == "data_order_not_restored" and reason.because is None)
    right = counts and attempt.by == "chaosrun" and attempt.went_on and restored_difference(drill, attempt) is None
    if not right or not drill.outside:
        return found
    return replace(found, reason=reason.explained(reason.because, outside=drill.outside))


def with_settings(drill: Drill, found: Divergence) -> Divergence:
    """Add the settings, of the script's modules and of torch, that differ from the reference run's, if the script restored all
    else, or all but random streams, which nothing may draw from."""
    generic = found.reason.code in QUANTITIES and found.reason.because in (*_RIGHT, "drew_before", None)
    if not (generic or found.reason.code in _OF_STREAMS) or found.attempt < 2:
        return found
    what = [*_of_modules(drill, found), *_of_torch(drill, found)]
    return replace(found, reason=found.reason.explained(found.reason.because, set=what)) if what else found


def _of_modules(drill: Drill, found: Divergence) -> list[str]:
    reference = next((trace for trace in drill.reference.traces if trace.rank == found.rank and trace.holdings), None)
    trace = drill.chaos.attempt(found.attempt).traces.get(found.rank)
    if reference is None or trace is None or not trace.holdings:
        return []
    expected, seen, after = (
        _modules_at(each, step) for each, step in ((reference, found.step), (trace, found.step), (trace, found.step + 1))
    )
    apart = {name: (expected.get(name), seen.get(name)) for name in sorted({*expected, *seen})}
    return [
        f"{name} is {_setting(name, there)} (reference: {_setting(name, was)})"
        for name, (was, there) in apart.items()
        # Settings made by an attempt's first pass did not exist before it.
        if was != there and CHANGES_OFTEN not in (was, there) and not (there is None and after.get(name) == was)
    ]


def _of_torch(drill: Drill, found: Divergence) -> list[str]:
    """Settings of torch that the reference run changed, and the last attempt left as the reference run had begun."""
    before, seen = drill.reference.environment or {}, drill.chaos.environment or {}
    if found.attempt != drill.chaos.attempts[-1].number:
        return []
    since = [name for name in changed_settings(before) if name in seen and name not in changed_settings(seen)]
    left = [name for name in since if seen[name] == before.get(name)]
    return [f"torch's {name} is {seen[name]} (the reference run changed it)" for name in left]


def with_later_files(drill: Drill, found: Divergence) -> Divergence:
    """Add the files that the script had written after the step that the attempt resumed at, and has read since."""
    attempt = drill.chaos.attempt(found.attempt)
    if found.reason.code not in _READ_FROM_FILES or attempt.number < 2:
        return found
    done_s = _done_s(drill, attempt)
    ahead = [file for file in drill.chaos.read_again if file.attempt == attempt.number and file.changed_s > done_s]
    names = sorted({_called(file.path, drill.chaos.layout) for file in ahead} - _named_by_the_save(drill, attempt))
    told = {"ahead": names, "base": attempt.resume_step}
    return replace(found, reason=found.reason.explained(found.reason.because, **told)) if names else found


def _done_s(drill: Drill, attempt: Attempt) -> float:
    """When the step that an attempt resumed at, and its save, were done."""
    step = attempt.resume_step
    for earlier in reversed(drill.chaos.attempts[: attempt.number - 1]):
        traces = [trace for trace in earlier.traces.values() if step in trace.steps]
        if traces:
            lines = (line for trace in traces for line in (*trace.checkpoints, *trace.saves, *trace.saved))
            saves = [line.time_s for line in lines if line.step == step]
            return max([*saves, *(trace.steps[step].time_s for trace in traces)])
    return max((start.time_s for start in drill.chaos.attempts[0].starts.values()), default=0.0)


def _named_by_the_save(drill: Drill, attempt: Attempt) -> set[str]:
    """Files that were renamed last in the save that the attempt resumed from. Python reports a rename before it is made: such a
    file has changed after everything recorded of that save."""
    saves = (save for trace in drill.before(attempt.number) for save in trace.saves)
    written = sorted(saves, key=lambda save: save.time_s)
    last = {save.path: save for save in written}
    return {path for path, save in last.items() if save.how in ("rename", "link") and save.step == attempt.resume_step}


def _called(path: str, layout: LegLayout) -> str:
    """A path as the script knows it: below its folder of outputs or its working folder."""
    within = (folder.absolute() for folder in (layout.output, layout.work))
    return next((str(PurePath(path).relative_to(folder)) for folder in within if PurePath(path).is_relative_to(folder)), path)


def _modules_at(trace: RankTrace, step: int) -> dict[str, str]:
    held = {name: value for record in trace.holdings if record.step <= step for name, value in record.modules.items()}
    return {name: value for name, value in held.items() if value}


def _setting(name: str, told: str | None) -> str:
    """A module's setting; if it is not recorded, it is the usual one."""
    return told or {"training": "True", "requires_grad": "True", "hooks": "0"}.get(name.rpartition(".")[2], "not set")


def _beside(save: SaveRecord, trace: RankTrace) -> set[str]:
    """Entries of a save that are neither a trained model's nor an optimizer's; if its values do not show whose a state dict is,
    a name in it does."""
    tensors = trace.start.tensors if trace.start else ()
    folders = {*save.trained} or {name.rpartition("/")[0] for name in save.held if name.endswith(tensors)}
    folders |= {(match[1] or "").rstrip("/") for name in save.held if (match := _OF_OPTIMIZER.match(name))}
    states = tuple(f"{folder}/" if folder else "" for folder in folders)
    return {name for name in save.held if name and not name.startswith((ALIVE, *states))}


def _still(drill: Drill, rank: int, save: SaveRecord) -> set[str]:
    """Entries of a save that every such save of the reference has with one value, and those that say its step."""
    saves = [each.held for trace in drill.reference.traces if trace.rank == rank for each in trace.saves]
    alike = [held for held in saves if held.keys() == save.held.keys()]
    alone = {name for name in save.held if len({held[name] for held in alike}) == 1} if alike[1:] else set[str]()
    return alone | {name for name, value in save.held.items() if value == str(save.step)}


def _as_in_reference(drill: Drill, rank: int, save: SaveRecord) -> set[str]:
    """Entries of a save that the reference saved with the same values after the same step."""
    saves = (each for trace in drill.reference.traces if trace.rank == rank for each in trace.saves)
    alike = next((each.held for each in saves if (each.step, each.held.keys()) == (save.step, save.held.keys())), {})
    return {name for name, value in alike.items() if save.held[name] == value}
