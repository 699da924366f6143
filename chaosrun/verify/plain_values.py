"""Compare a script's plain values at a restart with the reference run's. Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from chaosrun.records.history import Attempt
from chaosrun.records.traces import RankTrace
from chaosrun.verify.alignment import AttemptStart, attempt_start
from chaosrun.verify.check import Divergence, Drill
from chaosrun.verify.code_differences import PARTS, QUANTITIES
from chaosrun.verify.codes import Cause, Params
from chaosrun.wording import listed

_OF_OTHER_SAMPLES = (
    *("batches_repeated", "batches_skipped", "data_of_another_rank", "sampler_epoch_not_set", "sampler_epoch_ahead"),
    "data_order_not_restored",
)
_OF_VALUES = (
    *(*QUANTITIES, "learning_rate", "lr_scheduler_not_restored", "optimizer_settings_not_restored", "other_optimizer_stepped"),
    *_OF_OTHER_SAMPLES,
    *("batch_contents", "batch_size_not_restored", "accumulation_window", "more_batches"),
    *("kept_state_not_restored", "grad_scaler_not_restored", *(f"{part}_drifted" for part in PARTS)),
    "source_keeps_its_place",
)
"""Codes of differences that may come of a script's plain values."""
_OF_ALL_RANKS = ("gradient", "optimizer_update", "weights_drifted")
"""Of these: where a rank's difference may come of another rank's values, as gradients are averaged."""
_WITHOUT_VALUES = (
    *(("accumulation_window", "within"), ("batch_contents", "unrepeatable"), ("batch_contents", "held")),
    *(("source_keeps_its_place", because) for because in (None, "unseen")),
)
"""Of these with a variant: where the values are those of another micro-batch of the step, and where what was lost is known."""
_ByStep = Mapping[int, Mapping[str, str]]
"""Texts by path, by step."""
_NOT_THERE = "not there"
_OF_NO_EFFECT = "/_step_count"
"""What a scheduler counts for its warnings alone."""
_OF_A_COUNT = ("/_last_lr", "/last_epoch")
"""What a scheduler computes anew at its next step, which a state dict of its own may leave out; and from what."""
_ARRAY = re.compile(r"(\w+\[[\d, ]*\]) [0-9a-f]{16}")
"""The text of an array: its type and shape, and a digest."""
_CONTAINER = re.compile(r"\w+ of \d+(: .*)?", re.DOTALL)
"""The text of a list or a mapping, which may have its first elements."""
_TEXTS = re.compile(r"(\w+ of \d+): text [0-9a-f]{16}")
"""The text of a list of the script's texts: how many, and a digest."""
_ROUNDS = ("_", "i", "j", "idx", "index", "batch_idx", "batch_index", "iteration")
_COUNTS = {"last_epoch": "_last_lr", "_growth_tracker": "_growth_factor"}
"""Names of counts in a learning rate scheduler, and in a gradient scaler; each with another name that is stored with it."""


def with_values(drill: Drill, found: Divergence) -> Divergence:
    """Add the script's plain values that differed from the reference run's when the restart resumed."""
    attempt, reason = drill.chaos.attempt(found.attempt), found.reason
    if attempt.number < 2 or not (reason.code in _OF_VALUES or _draws_otherwise(drill, attempt, reason)):
        return found
    if (reason.code, reason.because) in _WITHOUT_VALUES:
        return found
    right = attempt.traces.keys() - {*found.ranks} if reason.code not in _OF_ALL_RANKS else ()
    # Beside streams that were not restored, private lists, mostly a library's (of a logger, of a loader), explain nothing.
    began = attempt_start(drill, attempt)
    own = began is not None and "rng" in began.wrong and (0 in began.held["rng"] or reason.code == "rng_not_restored")
    # A source's own state may be made of any other.
    arrays, anew = reason.code in (*QUANTITIES, "source_keeps_its_place"), _has_strange_data(began)
    other = reason.code in _OF_OTHER_SAMPLES
    apart = _differing_values(drill, attempt, found.rank, arrays=arrays, anew=anew, own=own, right=right, other_samples=other)
    others = sorted(attempt.traces.keys() - {found.rank}) if reason.code in _OF_ALL_RANKS and not apart else ()
    told = ((rank, _differing_values(drill, attempt, rank)) for rank in others)
    apart = apart or next(({**each, "of_rank": f" on rank {rank}"} for rank, each in told if each), {})
    return replace(found, reason=reason.explained(reason.because, **apart))


def _draws_otherwise(drill: Drill, attempt: Attempt, reason: Cause) -> bool:
    """Whether the streams may have been restored, and drawn from otherwise to get data that no step had: the number of samples
    in a buffer, for instance, decides which are drawn, and how many numbers that takes."""
    strange = reason.code == "rng_of_another_step" or (reason.code, reason.because) == ("rng_not_restored", "of_none")
    return strange and _has_strange_data(attempt_start(drill, attempt))


def _has_strange_data(began: AttemptStart | None) -> bool:
    """Whether it began with data of no step."""
    return began is not None and "data" in began.wrong and not began.held["data"]


def with_values_at_end(drill: Drill, reason: Cause) -> Cause:
    """Add to an end at another step the plain values of the first restart that had different ones."""
    begun = ((attempt, rank) for attempt in drill.chaos.attempts[1:] for rank in sorted(attempt.traces))
    about = next(filter(None, (_differing_values(drill, attempt, rank, other_samples=True) for attempt, rank in begun)), {})
    return reason.explained(reason.because, **about)


def values_restored(drill: Drill, attempt: Attempt) -> bool:
    """Whether plain values of a restart are known, at least of a rank that saves, and all these are the reference run's."""

    def is_known(rank: int, trace: RankTrace) -> bool:
        step = attempt.start_of(rank) + 1
        return step in _values_by_step(trace) and step in _fault_free(drill, rank)[0]

    known = [rank for rank, trace in attempt.traces.items() if is_known(rank, trace)]
    return bool(known) and not any(_differing_values(drill, attempt, rank) for rank in known)


def _differing_values(
    drill: Drill,
    attempt: Attempt,
    rank: int,
    *,
    arrays: bool = False,
    anew: bool = False,
    own: bool = False,
    right: Iterable[int] = (),
    other_samples: bool = False,
) -> Params:
    """Values that differ; those that differ on ranks that are `right` nevertheless come last. `arrays`: with NumPy's, which
    differ if the samples do; `anew`: with those that have the reference's first values, although the batch is not its first.
    `own`: without private lists and mappings. `other_samples`: without lists of texts, and with lists of tensors last, which
    may be the batch's own."""
    names, expected, seen, step = _differing_names(drill, attempt, rank)
    if own:
        names = [name for name in names if not (_is_private(name) and _CONTAINER.fullmatch(seen[name]))]
    known = _fault_free(drill, rank)[0] if other_samples or anew else {}
    if other_samples:
        names = [name for name in names if not _are_new_texts(name, known)]
    first = next(iter(known.values()), {}) if anew else {}
    names = [name for name in names if arrays or seen[name] == first.get(name) or not _ARRAY.fullmatch(expected[name])]
    harmless = {name for other in right for name in _differing_names(drill, attempt, other)[0]} if names else set[str]()
    names.sort(key=lambda name: (name in harmless, other_samples and _are_weights(seen[name]), _order(name, seen[name])))
    saved = _saved_before(drill, attempt, rank)
    as_saved = [name for name in names if (name.rpartition("/")[2], seen[name]) in saved]
    had = [name for name in names if name not in as_saved]
    told = {"had": _described_once(had, expected, seen), "as_saved": _described_once(as_saved, expected, seen)}
    return {**{name: what for name, what in told.items() if what}, "at": step} if names else {}


def _differing_names(drill: Drill, attempt: Attempt, rank: int) -> tuple[list[str], Mapping[str, str], Mapping[str, str], int]:
    """Names of values that differ at the step that the restart resumed at, without those that never change in the reference
    run, and those that differ between any two runs; the values there in both legs; and that step."""
    trace, step = attempt.traces.get(rank), attempt.start_of(rank) + 1
    known, *again = _fault_free(drill, rank)
    here = _values_by_step(trace) if trace else {}
    # After a save on notice, of which the reference knows nothing, what the script had as it left.
    expected = next((held[step] for held in (known, *again) if step in held), {})
    seen = here.get(step, {})
    changing = {name for held in known.values() for name in _differing(expected, held)}
    after = {at: held for at, held in here.items() if at > step}
    apart = _differing(expected, seen) & changing or _made_otherwise(known, expected, seen, after, step)
    apart = (apart or _other_constants(expected, seen)) - _flaky(known, again)
    seen = {**dict.fromkeys(apart, _NOT_THERE), **seen}
    later = [*after.values()]
    later = [held for at, held in known.items() if at >= step] + later if later else []
    rate, count = _OF_A_COUNT
    schedules = {name.removesuffix(count) for name in expected if name.endswith(count) and name not in apart}
    apart -= {f"{schedule}{rate}" for schedule in schedules}
    names = [name for name in apart if not (_found_out_later(known, name, seen[name]) or name.endswith(_OF_NO_EFFECT))]
    return [name for name in names if seen[name] != "None" or not _made_again(name, later)], expected, seen, step


def _made_otherwise(
    known: _ByStep, expected: Mapping[str, str], seen: Mapping[str, str], after: _ByStep, step: int
) -> set[str]:
    """What is made at its first use, so that a restart lacks it at its first `step`, and was then made once and otherwise, or
    takes the values that it had from step 1 on. A variable that is not there is set before it is read."""
    found: set[str] = set()
    for name in [each for each in expected.keys() - seen.keys() if "/" in each]:
        first, again = ({at: held[name] for at, held in leg.items() if name in held} for leg in (known, after))
        differs = any(first[at] != again[at] for at in first.keys() & again.keys())
        once = len({*first.values()}) == 1 == len({*again.values()})
        anew = all(first.get(at - step + 1) == text for at, text in again.items())
        if differs and (once or anew):
            found.add(name)
    return found


def _other_constants(expected: Mapping[str, str], seen: Mapping[str, str]) -> set[str]:
    """Numbers with a fraction that differ: a restart has drawn or computed them otherwise."""
    return {name for name in _differing(expected, seen) if _has_a_fraction(expected[name]) and _has_a_fraction(seen[name])}


def _has_a_fraction(text: str) -> bool:
    try:
        return not float(text.removeprefix("tensor ")).is_integer()
    except (ValueError, OverflowError):  # of inf, which has no integer
        return False


def _saved_before(drill: Drill, attempt: Attempt, rank: int) -> set[tuple[str, str]]:
    """The names and values of what this rank had saved after the step that the attempt resumed at."""
    earlier = drill.before(attempt.number, rank)
    saves = (save for trace in earlier for save in trace.saves if save.step == attempt.start_of(rank))
    return {(name.rpartition("/")[2], value) for save in saves for name, value in save.held.items()}


def _described_once(names: Iterable[str], expected: Mapping[str, str], seen: Mapping[str, str]) -> list[str]:
    """Values without duplicates: one that several variables refer to, or hold a copy of, appears under the first of the
    `names`."""
    first: dict[tuple[str, ...], str] = {}
    for name in names:
        first.setdefault((name.rpartition("/")[2], expected[name], seen[name]), name)
    return [_described(name, expected[name], seen[name]) for name in first.values()]


def _described(name: str, expected: str, seen: str) -> str:
    was, there = (_ARRAY.fullmatch(each) for each in (expected, seen))
    if was and there:
        return f"other contents of {name} ({there[1]}" + (f", reference: {was[1]})" if was[1] != there[1] else ")")
    return f"{name} = {seen} (reference: {expected})"


def _fault_free(drill: Drill, rank: int) -> list[_ByStep]:
    """Values of the reference, and of the first attempt under faults."""
    legs = (drill.reference.attempts, drill.chaos.attempts)
    return [*(_values_by_step(leg[0].traces[rank]) for leg in legs if leg and rank in leg[0].traces), {}]


def _flaky(known: _ByStep, again: Iterable[_ByStep]) -> set[str]:
    return {name for other in again for at in known.keys() & other.keys() for name in _differing(known[at], other[at])}


def _values_by_step(trace: RankTrace) -> _ByStep:
    """All values at each step at which any change was recorded."""
    held: dict[str, str] = {}
    found: dict[int, dict[str, str]] = {}
    for record in trace.holdings:
        if record.values:
            held = {name: text for name, text in {**held, **record.values}.items() if text}
            found[record.step] = held
    return found


def _found_out_later(known: _ByStep, name: str, seen: str) -> bool:
    """Whether it was None and becomes True or False when first determined: again after each start."""
    return seen == "None" and {held[name] for held in known.values() if name in held} <= {"None", "True", "False"}


def _made_again(name: str, later: Sequence[Mapping[str, str]]) -> bool:
    """Whether it is the same from here on in both legs, as a table that is computed at its first use."""
    return len({held.get(name) for held in later}) == 1


def _order(path: str, seen: str) -> tuple[bool, bool, bool, bool, int, str]:
    """The order in which values are reported: weights before numbers, and these before arrays, which may be computed from them,
    and what is not there; private names, and what they hold, after the others; counts of a loop's rounds, mostly harmless, come
    last."""
    harmless, array = path in _ROUNDS, seen == _NOT_THERE or _ARRAY.fullmatch(seen) is not None
    return not _are_weights(seen), harmless, array, _is_private(path), path.count("/"), path


def _are_weights(text: str) -> bool:
    return text.startswith("weights ")


def _are_new_texts(name: str, known: _ByStep) -> bool:
    """Whether it is a list of as many texts at each step, others at each: those of a batch."""
    told = {held.get(name, "") for held in known.values()}
    found = [_TEXTS.fullmatch(each) for each in told]
    return len(told) == len(known) > 1 and len({each and each[1] for each in found}) == 1 and None not in found


def _is_private(path: str) -> bool:
    return any(part.startswith("_") for part in path.split("/"))


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    return {name for name in one.keys() & other.keys() if one[name] != other[name] and not _is_to_come(name, one, other)}


def _is_to_come(path: str, *held: Mapping[str, str]) -> bool:
    """Whether a gradient scaler, which applies its loaded state at its first use, has not yet done so."""
    name = path.rpartition("/")[2]
    return name in ("_scale", "_growth_tracker") and any(each[path] == "None" for each in held)


def values_never_restored(drill: Drill) -> Iterator[str]:
    """Values that the last restart did not restore and that differ to the end, although no step of the drill depended on
    them."""
    restarts = drill.chaos.attempts[1:]
    for rank in sorted(restarts[-1].traces) if restarts else ():
        seen = (_values_by_step(attempt.traces[rank]) for attempt in reversed(restarts) if rank in attempt.traces)
        what, last = _never_restored(_fault_free(drill, rank), next(seen), seen, str(restarts[-1].start_of(rank)))
        if what:
            remedy = "save and load it with the checkpoint" if drill.by_script else "prepare or register what holds it"
            yield (
                f"not restored by the restart: {listed(what)} at step {last} of attempt {restarts[-1].number} on rank {rank}. "
                "No step of this drill depended on it, but later steps, logs or the choice of a best checkpoint may "
                f"({remedy}; nothing is wrong if it is meant to start anew at a restart)"
            )
            return


def _never_restored(
    fault_free: Sequence[_ByStep], seen: _ByStep, earlier: Iterable[_ByStep], resumed_at: str
) -> tuple[list[str], int]:
    """Values that differ at the last step at which both legs were observed, schedules first; and that step. `earlier`: those of
    the restarts before, which are read only if something differs. The step that the restart resumed at does not count."""
    known, *again = fault_free
    if not (steps := known.keys() & seen.keys()):
        return [], 0
    last = max(steps)
    changing = {name for held in known.values() for name in _differing(known[min(steps)], held)} - _flaky(known, again)
    apart = _differing(known[last], seen[last]) & changing
    counts = {path for path in apart if _is_count(path, seen[last])}
    others = {
        path
        for path in apart - counts
        # Not what counts the rounds of a loop, or has no effect.
        if path.rpartition("/")[2] not in _ROUNDS
        and not path.endswith(_OF_NO_EFFECT)
        and {each[path] for each in seen.values() if path in each} != {resumed_at}
    }
    # Without a second run a clock cannot be distinguished.
    others &= {path for each in (seen, *earlier) for path in _lasting(known, each)} if others and any(again) else set[str]()
    ordered = [*sorted(counts), *sorted(others, key=lambda path: _order(path, seen[last][path]))]
    return _described_once(ordered, known[last], seen[last]), last


def _lasting(known: _ByStep, seen: _ByStep) -> set[str]:
    """Values that differ in the first and in the last snapshot of a restart: a single one may be older than its loop's first
    value."""
    steps = known.keys() & seen.keys()
    if len(steps) < 2:
        return set()
    return _differing(known[min(steps)], seen[min(steps)]) & _differing(known[max(steps)], seen[max(steps)])


def _is_count(path: str, held: Mapping[str, str]) -> bool:
    above, _, name = path.rpartition("/")
    return name in _COUNTS and f"{above}/{_COUNTS[name]}" in held
