"""Known bugs of the libraries that a script trains with: a difference that looks like one is reported with the link to its
issue. Pure.

A library is named only if its version has the bug and the observations fit it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from chaosrun.records.events import FaultObserved, OutputsReplaced
from chaosrun.records.traces import RankTrace, SaveRecord, StepRecord
from chaosrun.verify.alignment import AttemptStart, attempt_start, scheduled
from chaosrun.verify.check import Divergence, Drill
from chaosrun.verify.code_differences import QUANTITIES
from chaosrun.verify.code_resume import OF_RATES
from chaosrun.verify.codes import TABLE, Cause, Params
from chaosrun.verify.draws import past_the_order
from chaosrun.verify.ledger import SHIFTED
from chaosrun.verify.suspects import saved_beside, saved_last
from chaosrun.wording import listed, rank_list


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    library: str
    codes: tuple[str, ...]
    what: str
    thread: str
    """The issue, as REPOSITORY#NUMBER."""
    before: str | None = None
    """The first fixed release; None if none is known."""
    since: str = "0"
    beside: tuple[str, ...] = ()
    """Other libraries that must be in use."""
    fits: Callable[[Drill, Divergence], bool] = lambda drill, found: True


def _expected(drill: Drill, found: Divergence) -> StepRecord:
    """The reference run's step."""
    record = drill.reference_lineage.at(found.rank, found.step)
    assert record is not None, "a difference of data is one from it"
    return record


def _began(drill: Drill, found: Divergence) -> AttemptStart | None:
    return next((attempt_start(drill, each) for each in drill.chaos.attempts if each.number == found.attempt), None)


def _lost_streams(drill: Drill, found: Divergence) -> Params:
    """A parameter if the order may be drawn from random streams that are not where they should be."""
    began = _began(drill, found)
    lost = began is not None and "rng" in began.wrong and not past_the_order(drill, began, found.rank, found.reason)
    return {"lost_streams": True} if lost else {}


def _started_over(drill: Drill, found: Divergence) -> bool:
    """Whether the attempt began with the first data of the training."""
    began = _began(drill, found)
    return began is not None and 0 in began.held["data"]


def _stream(drill: Drill, found: Divergence) -> bool:
    """Whether the data is a stream: its loader records no sample ids, unlike that of a dataset with indices."""
    return not _expected(drill, found).knows_ids


def _skips_at_once(drill: Drill, found: Divergence) -> bool:
    """Whether a stream skips batches when it resumes; skips only in later passes have another reason."""
    return _stream(drill, found) and found.reason.because != "each_pass"


def _later_pass_of_a_stream(drill: Drill, found: Divergence) -> bool:
    return _expected(drill, found).epoch > 0 and _stream(drill, found) and _started_over(drill, found)


def _resumed_twice(drill: Drill, found: Divergence) -> bool:
    resumed = any(each.went_on for each in drill.chaos.attempts if each.number < found.attempt)
    return resumed and _stream(drill, found) and _started_over(drill, found)


def _within_a_later_pass(drill: Drill, found: Divergence) -> bool:
    """Whether batches of a later pass had to be skipped, and the first pass's batches were seen instead."""
    record = _expected(drill, found)
    return record.epoch > 0 and record.batches > len(record.batch) and found.reason.params.get("epoch", 0) == 0


def _before_accelerate_1_15(drill: Drill, found: Divergence) -> bool:
    """Whether accelerate is older than 1.15, which fixed its errors under Trainer."""
    return _within_a_later_pass(drill, found) and _numbers(libraries(drill)["accelerate"]) < (1, 15)


_FILES = {"optimizer_state_not_restored": "optimizer", "rng_not_restored": "rng_state"}
"""The beginning of the names of Trainer's files that hold this state."""
_RANDOM_STATES = "random_states"
"""That of accelerate's, by `save_state`."""


def _saves(called: str, traces: Iterable[RankTrace], *ranks: int) -> list[SaveRecord]:
    """The saves in these traces, or only those of these ranks, to the files whose names begin so."""
    saves = (save for trace in traces if not ranks or trace.rank in ranks for save in trace.saves)
    return [save for save in saves if PurePath(save.path).name.startswith(called)]


def _file_lost(drill: Drill, found: Divergence, called: str) -> bool:
    """The library was asked to resume (the position in the data was restored), but a file that it saves, on any rank that saves
    one, was not whole: a kill or a fault inside the save had prevented it, or damaged it since."""
    began, earlier = _began(drill, found), drill.before(found.attempt)
    savers = [rank for rank in drill.ranks if _saves(called, (*drill.reference.traces, *earlier), rank)]
    if began is None or "data" in began.wrong or not savers:
        return False
    done = {save.path: save.done for save in _saves(called, earlier)}
    at_step = {rank: [save for save in _saves(called, earlier, rank) if save.step == began.step] for rank in savers}
    whole = all(any(save.done and done[save.path] for save in saves) for saves in at_step.values())
    return not whole or any(PurePath(name).name.startswith(called) for name in _damaged(drill, found))


def _damaged(drill: Drill, found: Divergence) -> Iterator[str]:
    """The files that faults damaged or removed before this attempt."""
    for note in (seen.found for seen in drill.chaos.events(FaultObserved) if seen.attempt < found.attempt):
        if isinstance(note, Mapping) and isinstance(name := note.get("file"), str):
            yield name
    for cut in drill.chaos.events(OutputsReplaced):
        if cut.attempt < found.attempt:
            yield from (*cut.gone, *cut.torn)


def _states_refused(drill: Drill, found: Divergence) -> bool:
    """Whether torch.load refuses, by default, the random states that accelerate saved, and nothing else was lost."""
    began, torch = _began(drill, found), str((drill.chaos.environment or {}).get("torch", "0"))
    saved = _saves(_RANDOM_STATES, drill.before(found.attempt))
    return _numbers(torch) >= (2, 6) and began is not None and began.wrong == ("rng",) and bool(saved)


def _average_of_weights(drill: Drill, found: Divergence) -> bool:
    """Whether the entry is of a model that diffusers saved, which this is only of an average: weights would be told as such."""
    return PurePath(str(found.reason.params.get("path", ""))).name.startswith("diffusion_pytorch_model")


def _saved_later_weights(drill: Drill, found: Divergence) -> bool:
    """Whether another thread than the training's saved later weights."""
    step, base = found.reason.params.get("step"), found.reason.params.get("base")
    aside = any(save.aside for trace in drill.chaos.traces for save in trace.saves)
    return aside and isinstance(step, int) and isinstance(base, int) and step > base


_ORDER = ("sampler_epoch_not_set", "data_order_not_restored")
_BACK = ("batches_repeated", *_ORDER)
KNOWN: tuple[Known, ...] = (
    Known(
        library="transformers",
        before="5.0.0",
        beside=("accelerate",),
        codes=_ORDER,
        fits=_before_accelerate_1_15,
        what="Trainer, resumed within a later epoch, reads another epoch's data (with accelerate < 1.15)",
        thread="transformers#40690",
    ),
    Known(
        library="transformers",
        codes=_BACK,
        fits=_later_pass_of_a_stream,
        what="Trainer, resumed in a later pass over a stream, starts at the stream's beginning",
        thread="transformers#26413",
    ),
    Known(
        library="transformers",
        codes=tuple(_FILES),
        fits=lambda drill, found: _file_lost(drill, found, _FILES[found.code]),
        what="Trainer continues silently if optimizer.pt or rng_state.pth is missing",
        thread="transformers#35782",
    ),
    Known(
        library="accelerate",
        before="1.13.0",
        beside=("torchdata",),
        codes=("batches_repeated",),
        fits=lambda drill, found: drill.spec.workers > 1 and not _started_over(drill, found),
        what="a stateful loader's state is taken ahead of the batches that were trained on, and then moved back",
        thread="accelerate#3952",
    ),
    Known(
        library="accelerate",
        before="1.15.0",
        codes=_ORDER,
        fits=_within_a_later_pass,
        what="set_epoch before skip_first_batches is lost: the loader replays epoch 0",
        thread="accelerate#4071",
    ),
    Known(
        library="accelerate",
        before="1.1.0",
        codes=("rng_not_restored",),
        fits=_states_refused,
        what="load_state passes silently over random states that torch 2.6 and newer refuse to load",
        thread="accelerate#4283",
    ),
    Known(
        library="accelerate",
        codes=("rng_not_restored",),
        fits=lambda drill, found: _file_lost(drill, found, _RANDOM_STATES),
        what="load_state passes silently over random states that are missing",
        thread="accelerate#4283",
    ),
    Known(
        library="diffusers",
        before="0.32.0",
        codes=("kept_state_not_restored",),
        fits=_average_of_weights,
        what="EMAModel.from_pretrained brings back weights alone: decay and count of updates begin anew",
        thread="diffusers#9764",
    ),
    Known(
        library="datasets",
        since="5.0.0",
        before="5.0.1",
        codes=_BACK,
        fits=_resumed_twice,
        what="a resumed stream returns a state that resumes at its beginning",
        thread="datasets#8295",
    ),
    Known(
        library="datasets",
        before="4.8.5",
        codes=("batches_skipped", "data_order_not_restored"),
        fits=_skips_at_once,
        what="a stream resumed behind map() skips rows",
        thread="datasets#8145",
    ),
    Known(
        library="datasets",
        before="5.0.1",
        codes=("batches_skipped", "data_order_not_restored"),
        fits=_skips_at_once,
        what="a stream resumed behind a formatted filter() loses rows",
        thread="datasets#8360",
    ),
    Known(
        library="datasets",
        before="3.4.0",
        beside=("torchdata",),
        codes=("batches_skipped",),
        fits=lambda drill, found: _stream(drill, found) and found.reason.because == "each_pass",
        what="a stream whose state a persistent loader worker has loaded starts there in each later pass, too",
        thread="datasets#7447",
    ),
    Known(
        library="pytorch-lightning",
        before="2.5.4",
        codes=("saved_while_training", "weights_of_another_step", "optimizer_state_of_another_step"),
        fits=_saved_later_weights,
        what="AsyncCheckpointIO saves tensors while training changes them",
        thread="Lightning#20953",
    ),
    Known(
        library="lightning-fabric",
        codes=("sampler_epoch_not_set",),
        fits=lambda drill, found: drill.spec.workers > 1 and found.reason.params["epoch"] == 0,
        what="Fabric's loader overwrites the script's sampler epoch with its own count of passes, which is 0 after a restart",
        thread="Lightning#16101",
    ),
)
"""If several fit, the first is reported."""


def libraries(drill: Drill) -> Mapping[str, str]:
    """Versions, by name, of the libraries that the script had imported when it began to train."""
    found = (drill.chaos.environment or {}).get("libraries")
    return found if isinstance(found, Mapping) else {}


def known_of(divergence: Divergence, drill: Drill) -> Known | None:
    """The library bug that this difference looks like."""
    imported = libraries(drill)
    for bug in KNOWN:
        if divergence.reason.code not in bug.codes or any(name not in imported for name in (bug.library, *bug.beside)):
            continue
        version = _numbers(imported[bug.library])
        affected = _numbers(bug.since) <= version and (bug.before is None or version < _numbers(bug.before))
        if affected and bug.fits(drill, divergence):
            return bug
    return None


def for_own_resume(reason: Cause) -> Cause:
    """The cause with the row for a script that resumes by itself."""
    nowhere = reason.code == "data_order_not_restored" and "step" not in reason.params
    return replace(
        reason,
        params={"scope": "", **reason.params, "by": "script"},
        because=reason.because or ("of_none" if nowhere else None),
    )


def with_library_bug(divergence: Divergence, drill: Drill) -> Divergence:
    """The divergence in these words, with the library bug that it looks like, advice for the library's users, and the entries
    that are suspects."""
    reason, bug = for_own_resume(divergence.reason), known_of(divergence, drill)
    began = drill.chaos.attempt(divergence.attempt).starts.keys()
    # The hint for constant rates fits both: a scheduler of an optimizer that wraps another is not recorded.
    if f"{reason.code}.by_hand" in TABLE and reason.because != "still" and not scheduled(drill):
        seen, _ = OF_RATES.get(reason.because or "", (reason.params.get("where"), ""))
        reason = reason.explained("by_hand", seen=seen)
    used = [bug.library] if bug else [name for name in ("transformers", "accelerate") if name in libraries(drill)]
    if bug:
        version = libraries(drill)[bug.library]
        fixed = f", not so since {bug.before}" if bug.before else ""
        known = f"{bug.library} {version}: {bug.what} ({bug.thread}{fixed})"
        reason = replace(reason, params={**reason.params, "known": known})
    if used and f"{reason.code}.{used[0]}" in TABLE and _advisable(divergence, drill):
        reason = reason.explained(used[0], **(_lost_streams(drill, divergence) if used[0] == "accelerate" else {}))
    elif reason.code == "sampler_epoch_not_set" and reason.because is None:
        reason = reason.explained("either", **_lost_streams(drill, divergence))
    elif reason.code == "data_order_not_restored" and reason.because == "of_none" and (held := _beside_data(drill, divergence)):
        reason = reason.explained("of_none", also_saved=held)
    elif reason.because in (None, "rest_of_epoch") and _saved_before_update(drill, divergence):
        reason = replace(reason, because="before_update")
    elif reason.code in SHIFTED and reason.because is None and (right := sorted(began - {*divergence.ranks})):
        about = {"others": rank_list(divergence.ranks), "right": rank_list(right)}
        reason = reason.explained("on_some_ranks", **about)
    elif (
        reason.code in QUANTITIES
        and reason.because != "drew_before"
        and "set" not in reason.params
        and (found := saved_beside(drill, divergence))
    ):
        # If the ranks that saved it are right, it was loaded.
        if {rank for rank, _ in found}.isdisjoint(divergence.ranks):
            about = {"beside": _holding(found), "saver": min(found)[0], "others": rank_list(divergence.ranks)}
            older = saved_last(drill, divergence)
            about |= {**_returned(drill, divergence), **(older or {})}
            reason = reason.explained("of_older_file" if older else "of_one_rank", **about)
        else:
            reason = reason.explained(reason.because, also_saved=_holding(found))
    return replace(divergence, reason=reason)


def _holding(held: Mapping[tuple[int, str], list[str]]) -> str:
    files: dict[str, list[str]] = {}
    for (_, path), names in held.items():
        paths = files.setdefault(listed(names), [])
        paths += [] if path in paths else [path]
    return ", ".join(f"{' and '.join(paths)} {'hold' if paths[1:] else 'holds'} {names}" for names, paths in files.items())


def _beside_data(drill: Drill, found: Divergence) -> str:
    """The checkpoint's other entries, if only the data was wrong on the rank that saved it."""
    began = _began(drill, found)
    held = saved_beside(drill, found) if began is not None and {*began.wrong} <= {"data"} else {}
    return _holding({place: names for place, names in held.items() if place[0] in found.ranks})


def _saved_before_update(drill: Drill, found: Divergence) -> bool:
    """Whether data and random streams are one step ahead of weights and optimizer, on every rank."""
    began = _began(drill, found)
    if found.reason.code != "batches_skipped" or began is None or began.wrong != ("data", "rng"):
        return False
    return all(began.step + 1 in began.held[quantity] for quantity in began.wrong)


def _returned(drill: Drill, found: Divergence) -> Params:
    """In words, what was restored, and what differs nevertheless."""
    began = _began(drill, found)
    returned = "model, optimizer and data" if began and "rng" in began.wrong else "model, optimizer, data and random streams"
    passes = found.reason.because == "passes"
    return {"returned": returned, "quantity": "number of forward passes" if passes else QUANTITIES[found.code]}


def _advisable(divergence: Divergence, drill: Drill) -> bool:
    """Whether the table's advice for users of a library also fits this difference."""
    reason = divergence.reason
    match reason.code:
        case "batches_repeated":
            return reason.params["index"] == 0
        case "optimizer_state_not_restored":
            traces = (*drill.reference.traces, *drill.chaos.traces)
            return reason.because == "of_the_beginning" and not _saves(_FILES[reason.code], traces)
        case _:
            return reason.because is None


def _numbers(version: str) -> tuple[int, ...]:
    """ "1.14.0rc1" as (1, 14, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0].split("rc")[0].split(".dev")[0])[:3])
