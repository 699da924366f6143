"""A script's plain values where a restart went on, held against the undisturbed run's. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from chaosrun.records.history import Attempt
from chaosrun.records.traces import RankTrace
from chaosrun.verify.check import Drill
from chaosrun.verify.code_differences import QUANTITIES
from chaosrun.verify.codes import Cause, Params

if TYPE_CHECKING:
    from chaosrun.verify.divergence import Divergence

_OF_VALUES = (
    *(*QUANTITIES, "learning_rate", "lr_scheduler_not_restored", "optimizer_settings_not_restored", "other_optimizer_stepped"),
    *("data_order_not_restored", "batch_contents", "batch_size_not_restored", "accumulation_window", "more_batches"),
)
"""Codes of differences that may come of a script's plain values."""
_ByStep = Mapping[int, Mapping[str, str]]
"""Texts by path, by step."""
_Wanted = Callable[[str], bool]
_OF_NO_EFFECT = "/_step_count"
"""What a scheduler counts for its warnings alone."""
_ARRAY = re.compile(r"(\w+\[[\d, ]*\]) [0-9a-f]{16}")
"""How an array is told: its type and shape, and a digest."""
_ROUNDS = ("i", "j", "idx", "index", "batch_idx", "batch_index", "iteration")
_COUNTS = {"last_epoch": "_last_lr", "_growth_tracker": "_growth_factor"}
"""Names in what a scheduler of learning rates, and a gradient scaler, count; each with another that lies beside it."""


def told_of_values(drill: Drill, found: "Divergence") -> "Divergence":
    """With the script's plain values that were not the undisturbed run's as the restart went on."""
    attempt, reason = drill.chaos.attempt(found.attempt), found.reason
    if reason.code not in _OF_VALUES or attempt.number < 2:
        return found
    apart = _values_apart(drill, attempt, found.rank, arrays=reason.code in QUANTITIES)
    return replace(found, reason=reason.explained(reason.because, **apart))


def told_of_end(drill: Drill, reason: Cause) -> Cause:
    """An end at another step, with the plain values of the first restart that had others."""
    begun = ((attempt, rank) for attempt in drill.chaos.attempts[1:] for rank in sorted(attempt.traces))
    about = next(filter(None, (_values_apart(drill, attempt, rank) for attempt, rank in begun)), {})
    return reason.explained(reason.because, **about)


def _values_apart(drill: Drill, attempt: Attempt, rank: int, *, arrays: bool = False) -> Params:
    """Left out are values that never change undisturbed (the step that it went on from), and those that no two runs have
    alike. `arrays`: with NumPy's, which are other ones of other samples."""
    trace, step = attempt.traces.get(rank), attempt.start_of(rank) + 1
    known, *again = _undisturbed(drill, rank)
    expected, seen = known.get(step, {}), _values_by_step(trace).get(step, {}) if trace else {}
    changing = {name for held in known.values() for name in _apart(expected, held)}
    apart = _apart(expected, seen) & changing - _wandering(known, again)
    names = [name for name in apart if not (_found_out_later(known, name, seen[name]) or name.endswith(_OF_NO_EFFECT))]
    names = [name for name in names if arrays or not _ARRAY.fullmatch(expected[name])]
    what = [_told(name, expected[name], seen[name]) for name in sorted(names, key=lambda name: _order(name, seen[name]))]
    return {"had": what, "at": step} if what else {}


def _told(name: str, expected: str, seen: str) -> str:
    was, there = (_ARRAY.fullmatch(each) for each in (expected, seen))
    if was and there:
        return f"other contents of {name} ({there[1]}" + (f", undisturbed {was[1]})" if was[1] != there[1] else ")")
    return f"{name} = {seen} (undisturbed {expected})"


def _undisturbed(drill: Drill, rank: int, wanted: _Wanted = lambda _: True) -> list[_ByStep]:
    """Those of the reference, and of the first attempt under faults."""
    legs = (drill.reference.attempts, drill.chaos.attempts)
    return [*(_values_by_step(leg[0].traces[rank], wanted) for leg in legs if leg and rank in leg[0].traces), {}]


def _wandering(known: _ByStep, again: Iterable[_ByStep]) -> set[str]:
    return {name for other in again for at in known.keys() & other.keys() for name in _apart(known[at], other[at])}


def _values_by_step(trace: RankTrace, wanted: _Wanted = lambda _: True) -> _ByStep:
    """The values of wanted paths at each step at which any was told."""
    held: dict[str, str] = {}
    found: dict[int, dict[str, str]] = {}
    for record in trace.holdings:
        if record.values:
            values = {path: text for path, text in record.values.items() if wanted(path)}
            held = {**held, **values} if values else held
            found[record.step] = held
    return found


def _found_out_later(known: _ByStep, name: str, seen: str) -> bool:
    """It was None, and becomes a yes or a no once somebody has looked: again after each start."""
    return seen == "None" and {held[name] for held in known.values() if name in held} <= {"None", "True", "False"}


def _order(path: str, seen: str) -> tuple[bool, bool, int, bool, str]:
    """In which they are told: weights count for more than a number; what counts the rounds of a loop, most often of no
    consequence, comes last."""
    *above, name = path.split("/")
    return not seen.startswith("weights "), path in _ROUNDS, len(above), name.startswith("_"), path


def _apart(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    return {name for name in one.keys() & other.keys() if one[name] != other[name] and not _is_to_come(name, one, other)}


def _is_to_come(path: str, *held: Mapping[str, str]) -> bool:
    """A gradient scaler takes in what was loaded when it is first used."""
    name = path.rpartition("/")[2]
    return name in ("_scale", "_growth_tracker") and any(each[path] == "None" for each in held)


def counts_left_behind(drill: Drill) -> Iterator[str]:
    """Of schedulers and gradient scalers that stand otherwise to the end, where no step of the drill followed from it."""
    later = drill.chaos.attempts[1:]
    # Once for each rank, of the few that count: there may be hundreds of attempts.
    undisturbed = {rank: _undisturbed(drill, rank, _is_of_a_count) for rank in {rank for each in later for rank in each.traces}}
    for attempt in later:
        for rank, trace in sorted(attempt.traces.items()):
            known, *again = undisturbed[rank]
            seen = _values_by_step(trace, _is_of_a_count)
            last = max(known.keys() & seen.keys(), default=0)
            counts = (path for path in _apart(known.get(last, {}), seen.get(last, {})) if _is_count(path, seen[last]))
            for path in sorted({*counts} - _wandering(known, again))[:1]:
                remedy = "save and load its state with the optimizer's" if drill.by_script else "prepare or register it"
                yield (
                    f"a scheduler or gradient scaler did not come back: {path} = {seen[last][path]} at step {last} of attempt "
                    f"{attempt.number} (undisturbed {known[last][path]}). No step of this drill followed from it, later ones "
                    f"may ({remedy}; nothing is wrong if it counts on from the restart in another way)"
                )
                return


def _is_of_a_count(path: str) -> bool:
    """It counts, or lies beside what does."""
    name = path.rpartition("/")[2]
    return name in _COUNTS or name in _COUNTS.values()


def _is_count(path: str, held: Mapping[str, str]) -> bool:
    above, _, name = path.rpartition("/")
    return name in _COUNTS and f"{above}/{_COUNTS[name]}" in held
