"""Compare a script's own checkpoints after a restart with the reference's of the same steps. Pure.

Only entries that a run without faults saves with the reference's values are compared, so that clocks and paths do not count:
those that the first attempt saved, and for saves that it did not reach, those of the confirming leg.
"""

from collections.abc import Iterable, Iterator, Mapping

from chaosrun.records.grouping import grouped
from chaosrun.records.history import Attempt
from chaosrun.records.tensor_files import unnumbered
from chaosrun.records.traces import ALIVE, RankTrace, SaveRecord
from chaosrun.verify.check import CheckResult, Divergence, Drill, failed, passed, skipped
from chaosrun.verify.codes import Cause
from chaosrun.verify.compare import differing_keys
from chaosrun.verify.own_saves import named_since, renames_in
from chaosrun.verify.restored import buffers_came_back, buffers_lost_at_start
from chaosrun.wording import count

_BY_NAME: Mapping[str, tuple[str, frozenset[str]]] = {
    "scale": ("grad_scaler", frozenset({"_growth_tracker"})),
    "_growth_tracker": ("grad_scaler", frozenset({"scale"})),
    "last_epoch": ("lr_scheduler", frozenset({"base_lrs", "_step_count", "_last_lr"})),
}
"""Whose state an entry is, by its name in torch's state dicts, which also hold one of the other names."""
_OF_NO_EFFECT = frozenset({"_step_count", "_get_lr_called_within_step", "_is_initial"})
"""Entries that a scheduler keeps only for its warnings: a scheduler newly built at the right step computes the same."""
_DIGITS = 12
"""The most digits of a number that counts something; digests are longer."""
_UNKNOWN = "kept_state_not_restored"
_OF_A_PROCESS = frozenset({"session", "process", "launch"})
_OF_A_START = _OF_A_PROCESS | {"start", "started", "begin", "began", "init", "initial", "first", "scratch", "fresh"}
_STEPS = frozenset({"step", "steps", "iter", "iters", "iteration", "iterations", "update", "updates"})
_UNITS = _STEPS | {"global", "num", "n", "count", "since", "at", "from", "of", "in", "the"}
_FOLDERS = frozenset({"meta", "metadata", "info", "log", "logs", "extra", "state"})
"""Words in names. A name with another word (`window_start`, `num_ema_updates`) may be of state that a script has lost and
started anew: its values then look like those of a process start."""


def own_checkpoints(drill: Drill) -> CheckResult:
    """A script's own checkpoints after a restart equal those of the same steps in runs without faults."""
    among, saves, held = comparable(drill), 0, 0
    if found := first_kept_difference(drill, drill.chaos.attempts[1:], among):
        return failed(found.code, because=found.reason.because, **found.reason.params)
    for attempt in drill.chaos.attempts[1:]:
        for rank in sorted(attempt.traces):
            for expected, seen in _pairs(drill, attempt, rank):
                compared = among & {(_kind(seen), name) for name in expected.held.keys() & seen.held.keys()}
                saves, held = saves + bool(compared), held + len(compared)
    if not saves:
        return skipped("no save after a restart has a counterpart in a fault-free run")
    told = (
        f"{count(held, 'value')} in {count(saves, 'save')} after restarts equal what fault-free runs save after the same steps"
    )
    return passed(told, saves=saves, values=held)


def comparable(drill: Drill) -> frozenset[tuple[str, str]]:
    """The entries that can be compared, each with its file's path without digits."""
    alike: set[tuple[str, str]] = set()
    apart: set[tuple[str, str]] = set()
    if not drill.chaos.attempts or not drill.exact_weights:
        return frozenset()
    fault_free = [drill.chaos.attempts[0], *(drill.confirming.attempts if drill.confirming else ())]
    for rank in drill.ranks:
        for expected, seen in (pair for attempt in fault_free for pair in _pairs(drill, attempt, rank)):
            differing = set(_differing(expected.held, seen.held))
            apart |= {(_kind(seen), name) for name in differing}
            alike |= {(_kind(seen), name) for name in seen.held.keys() - differing if name.split("/")[-1] not in _OF_NO_EFFECT}
    if drill.spec.verify.confirm and not drill.confirmed:
        # Saves that come later, or only at the end: if one differs, a confirming leg shows whether a restart is the reason.
        alike |= _saved(drill.reference.traces) - _saved(drill.chaos.attempts[0].traces.values())
    return frozenset(alike - apart)


def _differing(expected: Mapping[str, str], seen: Mapping[str, str]) -> list[str]:
    """Names of entries that differ. If several live objects share a name, one leg may have more of them: objects loaded from a
    checkpoint may still be alive."""

    def nested(name: str) -> bool:
        one, other = ({*held.get(name, "").split()} for held in (expected, seen))
        return bool(one and other) and (one <= other or other <= one)

    return [name for name in differing_keys(expected, seen) if not (ALIVE in name and nested(name))]


def _saved(traces: Iterable[RankTrace]) -> set[tuple[str, str]]:
    saves = (saved for trace in traces for saved in trace.saves)
    return {(_kind(saved), name) for saved in saves for name in saved.held if name.split("/")[-1] not in _OF_NO_EFFECT}


def _counts_starts(drill: Drill, kind: str, name: str) -> bool:
    """Whether an entry counts starts: an integer that is constant within an attempt, and exceeds the reference's by no more
    than the restarts so far."""

    def values(traces: Iterable[RankTrace]) -> list[str]:
        return [saved.held[name] for trace in traces for saved in trace.saves if _kind(saved) == kind and name in saved.held]

    known = values(drill.reference.traces)
    if len(known) < 2 or not known[0].isdecimal() or len(known[0]) > _DIGITS:
        return False
    allowed = {str(int(known[0]) + restarts): restarts for restarts in range(len(drill.chaos.attempts))}
    of_attempts = [(attempt.number, set(values(attempt.traces.values()))) for attempt in drill.chaos.attempts]
    alike = all(len(own) < 2 and all(allowed.get(each, number) < number for each in own) for number, own in of_attempts)
    return alike and len(set(known)) == 1


def _words(name: str) -> set[str]:
    return set("".join(each if each.isalpha() else " " for each in name.lower()).split())


def _tells_its_start(drill: Drill, kind: str, name: str) -> bool:
    """Whether an entry depends on where its process began, by its name and all its values: the step that the attempt resumed
    at, the steps since, or one text in attempts that started from scratch and another in those that resumed."""
    *folders, last = (_words(part) for part in name.split("/"))
    if not last & _OF_A_START or not last <= _OF_A_START | _UNITS or not all(each <= _FOLDERS for each in folders):
        return False
    legs = [drill.reference, drill.chaos, *([drill.confirming] if drill.confirming else [])]
    told = [
        (attempt.start_of(rank), saved.step, saved.held[name])
        for leg in legs
        for attempt in leg.attempts
        for rank, trace in attempt.traces.items()
        for saved in trace.saves
        if _kind(saved) == kind and name in saved.held
    ]
    if len({start for start, *_ in told}) < 2:
        return False
    if not all(value.isdecimal() and len(value) <= _DIGITS for *_, value in told):
        anew, went_on = ({value for start, _, value in told if (start > 0) is later} for later in (False, True))
        return len(anew) == len(went_on) == 1 and anew != went_on
    offsets = [{int(value) - start for start, _, value in told}]
    if last & _OF_A_PROCESS or {"since", "start"} <= last:
        offsets.append({int(value) - (step - start) for start, step, value in told})
    return any(len(each) == 1 and each <= {-1, 0, 1} for each in offsets)


def first_kept_difference(drill: Drill, attempts: Iterable[Attempt], among: frozenset[tuple[str, str]]) -> Divergence | None:
    """In the first of these attempts, and after its first step, after which it saved one of these entries differently. Reads no
    step records."""
    for attempt in attempts:
        saved = {save.step for trace in attempt.traces.values() for save in trace.saves if save.held}
        for step in sorted(saved & attempt.steps.keys()):
            if found := _kept_difference(drill, attempt, step, among):
                return found
    return None


def _kept_difference(drill: Drill, attempt: Attempt, step: int, among: frozenset[tuple[str, str]]) -> Divergence | None:
    """The first of these entries that differs in this attempt's save after `step`; entries whose part of the state is known
    come first."""
    saved_before = {kind for kind, _ in _saved(drill.chaos.attempts[0].traces.values())}
    earlier = _saved(drill.before(attempt.number))
    differences = [
        _difference(drill, trace, names, expected, seen, earlier)
        for rank, trace in sorted(attempt.traces.items())
        for expected, seen in _pairs(drill, attempt, rank)
        if seen.step == step
        and (expected.step == step or _kind(seen) in saved_before)
        and (names := [name for name in _differing(expected.held, seen.held) if (_kind(seen), name) in among])
        and (names := [name for name in names if not _counts_starts(drill, _kind(seen), name)])
        and (names := [name for name in names if not _tells_its_start(drill, _kind(seen), name)])
    ]
    return min(differences, key=lambda each: (each.code == _UNKNOWN, ALIVE in str(each.tensor)), default=None)


def saved_otherwise(attempt: int, reason: Cause, name: str, expected: str, seen: str) -> Divergence:
    """A difference that only a file of the script shows; `reason` says after which step, and on which rank."""
    where = {"step": reason.params["step"], "ranks": (reason.params["rank"],), "attempt": attempt}
    return Divergence(**where, kind="saved state", reason=reason, tensor=name, expected=expected, seen=seen)


def _difference(
    drill: Drill, trace: RankTrace, names: list[str], expected: SaveRecord, seen: SaveRecord, earlier: set[tuple[str, str]]
) -> Divergence:
    """`earlier`: the saves of the attempts before, which a restart could load."""
    rank = trace.rank
    buffers = drill.reference.ends[rank].digests.get("buffers", {}) if rank in drill.reference.ends else {}
    split = {each: each.split("/") for each in names}
    own = {each for each, (*_, last) in split.items() if last in buffers}
    if seen.trained:  # an average of the model has buffers of the same names
        own = {each for each in own if "/".join(split[each][:-1]) in seen.trained}
    parts = {each: "buffers" if each in own else _part(each, seen.held) for each in names}
    name = next((each for each in names if parts[each]), names[0])
    lost = "drifted" if parts[name] == "buffers" and buffers_came_back(drill, rank) else "not_restored"
    code = f"{parts[name]}_{lost}" if parts[name] else _UNKNOWN
    values = [each.held.get(name, "not there") for each in (expected, seen)]
    path = named_since(seen, renames_in(trace.saves))
    where = f"{name} is {values[1]} when {path} is saved after step {seen.step} (reference: {values[0]})"
    because = "made" if code == _UNKNOWN and (_kind(seen), name) not in earlier else None
    if expected.step != seen.step:
        name, code, values = "when it is saved", _UNKNOWN, [f"step {each.step}" for each in (expected, seen)]
        where, because = f"{path} is saved after {values[1]} (reference: after {values[0]})", "when"
    named = path if because == "when" else f"{path}: {name}"
    about = {"name": named, "path": path, "step": seen.step, "rank": rank, "where": where, "differing": names}
    reason = Cause(code, about, because)
    if code == "buffers_not_restored":
        reason = reason.explained(**{"because": None, **buffers_lost_at_start(drill, rank)})
    return saved_otherwise(trace.attempt, reason, name, *values)


def _part(name: str, held: Iterable[str]) -> str | None:
    """The part of the state that an entry belongs to; None for the script's own values."""
    *folder, last = name.split("/")
    part, siblings = _BY_NAME.get(last, (None, ()))
    paths = [each.split("/") for each in held]
    beside = {path[len(folder)] for path in paths if len(path) > len(folder) and path[: len(folder)] == folder}
    return part if beside.intersection(siblings) else None


def _pairs(drill: Drill, attempt: Attempt, rank: int) -> Iterator[tuple[SaveRecord, SaveRecord]]:
    """Saves of this attempt, each with the reference's of the same step and path, else with the only one of that step or
    name."""
    reference = [trace for each in drill.reference.attempts if (trace := each.traces.get(rank))]
    if rank not in attempt.traces or not reference:
        return
    known = _by_place(reference[0])
    for (step, path), saved in _by_place(attempt.traces[rank]).items():
        alike = [others for (at, _), others in known.items() if at == step and _kind(others[0]) == _kind(saved[0])]
        named = [others for (_, name), others in known.items() if name == path != _kind(saved[0])]
        expected = known.get((step, path)) or next((each[0] for each in (alike, named) if len(each) == 1), [])
        yield from zip(expected, saved, strict=False)


def _by_place(trace: RankTrace) -> Mapping[tuple[int, str], list[SaveRecord]]:
    return grouped((saved for saved in trace.saves if saved.held), lambda saved: (saved.step, saved.path))


def _kind(saved: SaveRecord) -> str:
    return unnumbered(saved.path)
