"""At which step each attempt of a script that resumes by itself resumed, by comparing its state with the reference's. Pure."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from chaosrun.records.history import Attempt
from chaosrun.records.traces import NEAREST, UNNAMED, Found, SaveRecord, StartRecord, StepRecord
from chaosrun.verify.check import CheckResult, Drill, failed, inconclusive, passed
from chaosrun.verify.codes import Cause, Params
from chaosrun.verify.compare import Kind, comes_to_the_same, differing_keys, ends_alike, same_batches
from chaosrun.verify.own_saves import OF_ONE_CALL, REMOVED, WRITERS, Saved, named_since, renames_in, saves, without_digits
from chaosrun.verify.restored import lost_optimizers
from chaosrun.wording import count, listed, rank_list

QUANTITIES: Mapping[str, tuple[str, str, Kind]] = {
    "weights": ("weights", "weights", "weights"),
    "optimizer": ("the optimizer", "optimizer_state", "optimizer"),
    "data": ("the data", "data_order", "data order"),
    "rates": ("learning rates", "lr_scheduler", "learning rate"),
    "rng": ("RNG", "rng", "rng"),
}
"""The initial state of an attempt: each quantity in words, in codes of causes, and as the kind of a divergence. In the order in
which differences are reported: an earlier one most likely explains later ones."""
_OF_DDP = " (DDP hands on rank 0's weights alone, where it wraps the model), behind a barrier if one rank has to write it first"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """The state that an attempt began with, on all ranks that began."""

    step: int
    """The reference's step that most of the state belongs to; the attempt's steps are numbered from it."""
    held: Mapping[str, tuple[int, ...]]
    """By quantity, the steps of the reference with which all of `ranks` agree, or the first of them."""
    ranks: Mapping[str, tuple[int, ...]]
    """By quantity, the ranks that do not hold that of `step`."""
    began: frozenset[int]

    @property
    def wrong(self) -> tuple[str, ...]:
        """Quantities that are not those of `step` on every rank."""
        return tuple(quantity for quantity in QUANTITIES if self.ranks[quantity])

    def nearest(self, quantity: str) -> int | None:
        """The step nearest to `step` that has this value of the quantity; None: no step has it. If a single step has the values
        of all wrong quantities, that step: a batch recurs in each epoch, and a rate stays for many steps."""
        held = {*self.held[quantity]}
        if quantity in self.wrong:
            if quantity == "optimizer" and 0 in held:
                return 0  # a new one, though an attempt before may have begun with a new one, too
            held &= set.intersection(*({*self.held[each]} or held for each in self.wrong)) or held
        return min(held, key=lambda step: abs(step - self.step), default=None)

    @property
    def words(self) -> str:
        """ "weights of step 10, the optimizer of step 0, the data of step 12"."""
        return ", ".join(f"{name} of {self._which(quantity)}" for quantity, (name, *_) in QUANTITIES.items())

    def _which(self, quantity: str) -> str:
        wrong = self.ranks[quantity]
        step = self.step if not wrong else self.nearest(quantity)
        where = "" if len(wrong) in (0, len(self.began)) else f" on {listed([f'rank {rank}' for rank in wrong])}"
        return ("no step" if step is None else f"step {step}") + where

    def also_wrong(self, told: str) -> str:
        """The other wrong quantities: the end of a hint."""
        others = [f"{QUANTITIES[each][0]} of {self._which(each)}" for each in self.wrong if each != told]
        return f"; also wrong: {', '.join(others)}" if others else ""


def attempt_start(drill: Drill, attempt: Attempt) -> AttemptStart | None:
    """The state that an attempt began with; None if no rank recorded it: at the very first start, and if no rank began to
    train."""
    found = {rank: start.found for rank, start in attempt.starts.items() if start.found}
    if not found:
        return None
    agreeing = {quantity: {rank: _steps(each, quantity) for rank, each in found.items()} for quantity in QUANTITIES}
    step = attempt.resume_step
    # Quantities that equal step 0's do not count, as they may be newly built instead of restored. Neither do learning rates:
    # a script may set them for every step, so that the initial ones may be any step's.
    voting = (steps for name, by_rank in agreeing.items() if name != "rates" for steps in by_rank.values())
    votes = Counter(of for steps in voting if 0 not in steps for of in steps)
    chosen = [of for of, cast in votes.items() if cast == max(votes.values())]
    step = step if step in chosen else max(chosen, default=step)
    ranks = {
        quantity: tuple(sorted(rank for rank, steps in by_rank.items() if step not in steps))
        for quantity, by_rank in agreeing.items()
    }
    shown = set.intersection(*(_right_in_first_step(drill, attempt, rank, step + 1) for rank in found))
    ranks |= dict.fromkeys(shown, ())
    ranks["rng"] = tuple(rank for rank in ranks["rng"] if not _streams_rest(drill, attempt.starts[rank], step + 1))
    held = {
        quantity: tuple(sorted(set.intersection(*(by_rank[rank] for rank in ranks[quantity] or by_rank)) or by_rank[of]))
        for quantity, by_rank in agreeing.items()
        for of in [next(iter(ranks[quantity]), min(by_rank))]
    }
    return AttemptStart(step=step, held=held, ranks=ranks, began=frozenset(found))


def _streams_rest(drill: Drill, start: StartRecord, step: int) -> bool:
    """Whether a rank began with the streams of `step`, though only steps nearer to its own are recorded of all that agree."""
    due = drill.reference_lineage.at(start.rank, step)
    return bool(start.found and len(start.found.rng) == NEAREST and due and due.rng == start.rng)


def _right_in_first_step(drill: Drill, attempt: Attempt, rank: int, step: int) -> set[str]:
    """Quantities that seemed wrong at the start of an attempt, but that a rank's first step shows to be the reference's. The
    script first passed other data through its model and dropped the gradients; or it replaces its optimizer (each epoch, say),
    after which the optimizer's state and the weights are the reference's; or it sets learning rates after a forward pass. Also
    the optimizer, if the only wrong state belongs to optimizers that make no more steps."""
    own, other = attempt.traces[rank].steps.get(step), _done_before(drill, attempt, rank, step)
    idle = {"optimizer"} if (attempt.number, rank) in drill.retired else set[str]()
    if own is None or other is None:
        return idle
    alike = same_batches(other, own) or ends_alike(other, own)
    shown = {name for name, right in (("data", alike), ("rates", own.lr and own.lr == other.lr)) if right}
    following = _done_before(drill, attempt, rank, step + 1), attempt.traces[rank].steps.get(step + 1)
    if comes_to_the_same(other, own, *following):
        shown |= {"data", "rng"}
    if own.state and (own.state, own.param, own.lr, own.settings) == (other.state, other.param, other.lr, other.settings):
        shown |= {"optimizer"}
    return shown | idle


def _done_before(drill: Drill, attempt: Attempt, rank: int, step: int) -> StepRecord | None:
    """The reference's record of a step; in a run without a reference, that of the earlier attempts."""
    if drill.reference.attempts:
        return drill.reference_lineage.at(rank, step)
    earlier = reversed(drill.before(attempt.number, rank))
    return next(filter(None, (trace.steps.get(step) for trace in earlier)), None)


def _steps(found: Found, quantity: str) -> set[int]:
    """The steps that agree in this quantity, and the step that agrees in all quantities that could be judged, even if this one
    could not."""
    return {*getattr(found, quantity), *(() if found.step is None else (found.step,))}


def cause_of(drill: Drill, attempt: Attempt, begun: AttemptStart, quantity: str) -> Cause:
    """The cause, as a code, of a wrong quantity in the state that an attempt began with."""
    by_hand = quantity == "rates" and not scheduled(drill)
    # A scheduler that starts anew gives the rates of the first steps; a later step with the same rate may be nearer.
    nearest = 0 if by_hand and 0 in begun.held[quantity] else begun.nearest(quantity)
    about = {"step": nearest, "base": begun.step, "scope": begun.also_wrong(quantity), "stood": begun.words}
    wrong = begun.ranks[quantity]
    common = set.intersection(*(set(begun.held[each]) for each in begun.wrong))
    if {"optimizer", "data"} <= {*begun.wrong} and common and begun.began - {*wrong}:
        # The weights may be equal nevertheless: DDP broadcasts those of rank 0.
        about |= {"rank": min(begun.began - {*wrong}), "step": begun.step, "other": wrong[0], "there": max(common)}
        return Cause("ranks_resume_apart", {**about, "attempt": attempt.number})
    about |= {"rank": wrong[0], "attempt": attempt.number, "by": "script", "streams": "random streams"}
    if quantity == "rng" and (start := attempt.traces[about["rank"]].start):
        about |= _of_streams(drill, attempt, start, begun.step)
        if "other" in about:
            return Cause("rng_of_another_rank", about)
        about |= {"seeded_again": start.seeded_again} if start.seeded_again else {}
    code = QUANTITIES[quantity][1]
    if quantity == "optimizer" and (lost := lost_optimizers(drill, attempt, wrong)):
        return Cause(f"{code}_not_restored", {**about, "which": lost}, "of_some")
    if nearest is None and quantity == "weights" and (why := _why_of_no_step(drill, attempt, wrong[0], begun.step)):
        return Cause(f"{code}_not_restored", {**about, "name": why[1]}, why[0])
    if nearest is None and (other := _held_by(drill, attempt, wrong[0], begun.step, quantity)) is not None:
        return Cause(f"{code}_of_another_rank", {**about, "other": other})
    if quantity == "rng" and nearest in (None, 0) and (right := sorted(begun.began - {*wrong})):
        return Cause(f"{code}_not_restored", {**about, "right": rank_list(right), "others": rank_list(wrong)}, "on_some_ranks")
    if nearest in (None, 0) and (right := sorted(begun.began - {*wrong})):
        of_ddp = _OF_DDP if quantity in ("weights", "optimizer") else ""
        about["scope"] = f"; {rank_list(right)} began with the right one: load it on every rank{of_ddp}{about['scope']}"
    if nearest is None:
        return Cause(f"{code}_not_restored", about, "of_none")
    if nearest == 0 or quantity == "data":
        return Cause(f"{code}_not_restored", about, "of_the_beginning" if nearest == 0 else None)
    return Cause(f"{code}_of_another_step", about)


def scheduled(drill: Drill) -> bool:
    """Whether a scheduler of torch's sets the learning rates of a script that resumes by itself."""
    firsts = [attempt for leg in (drill.reference, drill.chaos) for attempt in leg.attempts[:1]]
    return any(start.scheduled for attempt in firsts for start in attempt.starts.values())


def _why_of_no_step(drill: Drill, attempt: Attempt, rank: int, step: int) -> tuple[str, list[str]] | None:
    """Why weights may match no step, as the variant of a row, and the tensors that it names."""
    begun, start, record = drill.reference_start(rank), attempt.starts.get(rank), drill.reference_lineage.at(rank, step)
    before, here = (any(each.startswith(UNNAMED) for each in found.tensors) if found else False for found in (begun, start))
    if here and not before:  # an optimizer updates tensors that belonged to a model in the reference
        return "of_no_model", []
    if begun and start and {*begun.tensors} < {*start.tensors}:
        return "of_more", [name for name in start.tensors if name not in begun.tensors]
    if begun is None or start is None or record is None or begun.tensors != start.tensors:
        return None
    words = [memoryview(params).cast("I") for params in (begun.params, record.params, start.params)]
    if not words[1] or len({*map(len, words)}) > 1:
        return None
    each = list(zip(start.tensors, *words, strict=False))
    left = [name for name, first, due, seen in each if seen == first != due]
    others_right = all(seen == due for name, _, due, seen in each if name not in left)
    return ("in_part", left) if left and len(left) < len(each) and others_right else None


def _held_by(drill: Drill, attempt: Attempt, rank: int, step: int, quantity: str) -> int | None:
    """Another rank that had, after this step of the reference, the weights or the optimizer's state that it began with."""
    start = attempt.starts.get(rank)
    records = {other: drill.reference_lineage.at(other, step) for other in drill.ranks if other != rank}
    held = {other: {"weights": record.param, "optimizer": record.state} for other, record in records.items() if record}
    began = {"weights": start.param, "optimizer": start.state} if start else {}
    return next((other for other, values in held.items() if quantity in began and values[quantity] == began[quantity]), None)


def saved_while_training(drill: Drill, attempt: Attempt, begun: AttemptStart) -> Cause | None:
    """Whether another thread wrote the checkpoint that the attempt resumed from while training changed the tensors, so that
    they are of a later step than the file's name says; or, if it names none, than both the data and the random streams."""
    told = begun.nearest("data")
    held = max(begun.nearest(quantity) or 0 for quantity in ("weights", "optimizer"))
    if not told or held <= told:  # data of step 0: an order that began anew
        return None
    streams = begun.held["rng"] if begun.nearest("rng") == told else ()
    # The reference saves in the same way; a killed rank may not have recorded the end of its own save.
    traces = (trace.saves for trace in (*drill.before(attempt.number), *drill.reference.traces))
    within = ((each, renames_in(each)) for each in traces if any(save.aside for save in each))
    aside = ((save, renames) for each, renames in within for save in each if save.aside and save.how != REMOVED)
    for save, path in ((save, named_since(save, renames)) for save, renames in aside):
        named = {int(number) for number in re.findall(r"\d+", path)}
        unnamed = not named and save.step == held and told in streams and held not in streams
        if unnamed or (told in named and held not in named):
            return Cause("saved_while_training", {"path": path, "base": told, "step": held, "stood": begun.words})
    return None


def _of_streams(drill: Drill, attempt: Attempt, start: StartRecord, step: int) -> Params:
    """The other rank whose random streams this rank began with; if there is none, the names of its streams that are wrong."""
    rank = start.rank
    for other in drill.ranks:
        record = drill.reference_lineage.at(other, step + 1)
        if record and other != rank and record.rng == start.rng:
            return {"other": other}
    # A stream that is not restored differs to the end, unless a later restart restores it.
    ends = [leg.ends[rank] for leg in (drill.reference, drill.chaos) if rank in leg.ends]
    last = drill.chaos.attempts[-1]
    again = attempt is last or ((found := attempt_start(drill, last)) is not None and "rng" in found.wrong)
    apart = differing_keys(*(end.digests.get("rng", {}) for end in ends)) if again and len(ends) == 2 else []
    return {"streams": f"random streams ({', '.join(apart)})"} if apart else {}


def passed_over(drill: Drill, attempt: Attempt) -> Saved | None:
    """The newest complete checkpoint of earlier attempts, if newer than the step at which this one resumed. An export is not a
    checkpoint."""
    earlier = [saved for saved in saves(drill.chaos) if saved.attempt < attempt.number]
    known = [each for saved in earlier if saved.step == attempt.resume_step for each in saved.enough] or _repeated(drill)
    newer = [saved for saved in earlier if saved.step > attempt.resume_step and any(saved.kinds >= each for each in known)]
    newer = [saved for saved in newer if _published(drill, saved)]
    if attempt.went_on and all(saved.step != attempt.resume_step for saved in earlier):
        # Saved in the background during training: the first save that was complete after that step holds its state.
        behind = min((saved.step for saved in newer), default=0)
        newer = [saved for saved in newer if saved.step > behind]
    return max(newer, key=lambda saved: (saved.step, saved.attempt), default=None)


def newer_elsewhere(drill: Drill, attempt: Attempt) -> tuple[Saved, Saved] | None:
    """The checkpoint that the attempt resumed from, and a newer save to other files that holds all of its entries: whether the
    script should have resumed from the newer one is unknown."""
    earlier = [saved for saved in saves(drill.chaos) if saved.attempt < attempt.number and _published(drill, saved)]
    base = next((saved for saved in reversed(earlier) if saved.step == attempt.resume_step and saved.entries), None)
    newer = [saved for saved in earlier if base and saved.step > base.step and saved.entries >= base.entries]
    return (base, max(newer, key=lambda saved: (saved.step, saved.attempt))) if base and newer else None


def _published(drill: Drill, saved: Saved) -> bool:
    """Whether the script has already named a background save in a file. Only if it names each one there in the reference run
    once the save is complete: the first not before the first save has ended; the last may be missing."""
    if saved.behind_s is None:
        return True
    every = list(_by_kind(drill.reference.attempts))
    written = [(rank, kind, each) for rank, kind, each in every if each.aside and each.how in WRITERS]
    begun = Counter((rank, kind) for rank, kind, each in written if not each.done or each.how == "file")
    first_s = min((each.time_s for *_, each in every if each.aside and each.done), default=0.0)
    noted: dict[tuple[int, str], list[float]] = {}
    for rank, kind, each in every:
        if not each.aside and each.how not in (*WRITERS, REMOVED):
            noted.setdefault((rank, kind), []).append(each.time_s)
    times = max(begun.values(), default=0)
    names = {kind for (_, kind), at in noted.items() if times - 1 <= len(at) <= times and times > 2 and min(at) > first_s}
    since = _by_kind([drill.chaos.attempt(saved.attempt)])
    return names <= {kind for _, kind, each in since if not each.aside and each.time_s > saved.behind_s}


def _by_kind(attempts: Iterable[Attempt]) -> Iterator[tuple[int, str, SaveRecord]]:
    """The files that each rank wrote and renamed, by path without digits."""
    for rank, trace in (ranked for attempt in attempts for ranked in attempt.traces.items()):
        for saved in trace.saves:
            yield rank, without_digits(saved.path), saved


def _repeated(drill: Drill) -> list[frozenset[str]]:
    """The files that the script repeatedly saves together; of several such sets, the largest."""
    counted = Counter(saved.needed for saved in saves(drill.reference if drill.reference.attempts else drill.chaos))
    often = [needed for needed, times in counted.items() if times > 1] or list(counted)
    return [max(often, key=len)] if often else []


def never_saves(drill: Drill) -> bool:
    """The script was not seen to save a checkpoint, and every attempt started from scratch."""
    seen = any(True for leg in (drill.reference, drill.chaos) for _ in saves(leg))
    return drill.by_script and not seen and not any(attempt.went_on for attempt in drill.chaos.attempts)


def resume_evidence(drill: Drill) -> CheckResult:
    """Every attempt resumed from the newest complete checkpoint, on every rank at the same step, with all of its state."""
    if not drill.chaos.attempts:
        return inconclusive("no_attempt")
    told: list[str] = []
    for attempt in drill.chaos.attempts:
        if wrong := wrong_resume(drill, attempt):
            return failed(wrong.code, because=wrong.because, **wrong.params)
        if attempt.starts and attempt.number > 1:
            point = f"step {attempt.resume_step}" if attempt.went_on else "the beginning"
            told.append(f"attempt {attempt.number} from {point}")
    if not told:
        return passed("no restarted attempt began to train", restarts=0)
    summary = f"{count(len(told), 'restart')} resumed with all state of one step: {', '.join(told)}"
    return passed(summary, restarts=len(told))


def wrong_resume(drill: Drill, attempt: Attempt) -> Cause | None:
    """The error in the step or state that this attempt resumed with; None if there is none, or if no rank began to train."""
    began = {rank: start.position.step for rank, start in attempt.starts.items()}
    if not began:
        return None
    if len({*began.values()}) > 1:
        low, high = min(began, key=lambda rank: began[rank]), max(began, key=lambda rank: began[rank])
        apart = {"attempt": attempt.number, "rank": low, "step": began[low], "other": high, "there": began[high]}
        return Cause("ranks_resume_apart", apart)
    found = attempt_start(drill, attempt)
    wrong = [quantity for quantity in found.wrong if quantity != "rng" or drill.streams_count] if found else []
    if found and wrong:
        return Cause.of("resumed_state_differs", attempt=attempt.number, stood=found.words, wrong=wrong)
    if (newer := passed_over(drill, attempt)) is None:
        return None
    about = {"attempt": attempt.number, "step": attempt.resume_step, "newer": newer.step, "path": newer.path}
    removed = (saved for rank in drill.chaos.attempt(newer.attempt).traces.values() for saved in rank.saves)
    if any(saved.how == REMOVED and PurePath(newer.path).is_relative_to(saved.path) for saved in removed):
        return Cause("newest_removed", about)
    read = [f"{file.path}/" for file in drill.chaos.read_again if file.attempt == attempt.number]
    if attempt.went_on:
        return Cause("checkpoint_passed_over", about)

    def was_read(path: str) -> bool:
        """Whether it was, or, if it is a folder, a file in it."""
        return any(f"/{path.strip('/')}/" in file for file in read)

    if cut_off := next(filter(was_read, _cut_off(drill, attempt)), None):
        return Cause("began_again", {**about, "cut_off": cut_off}, "cut_off")
    return Cause("began_again", about, "read" if was_read(newer.path) else None)


def _cut_off(drill: Drill, attempt: Attempt) -> Iterator[str]:
    """Files whose last save before this attempt began and was not completed, the newest first."""
    last: dict[str, SaveRecord] = {}
    for saved in (each for trace in drill.before(attempt.number) for each in trace.saves if each.how in OF_ONE_CALL):
        last.pop(saved.path, None)
        last[saved.path] = saved
    yield from (path for path, saved in reversed(last.items()) if not saved.done)
