"""Compare a script's files of tensors at the end of the training with the reference's: shows state that the script saves in any
way and that a restart did not restore. Pure. The confirming leg decides: entries that differ there, too, do not count.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import PurePath

from chaosrun.records.figures import SUFFIXES
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.tensor_files import Entry, unnumbered
from chaosrun.records.traces import RankTrace
from chaosrun.verify.check import Divergence, Drill
from chaosrun.verify.codes import Cause
from chaosrun.verify.kept import saved_otherwise
from chaosrun.verify.own_saves import REMOVED
from chaosrun.verify.rhythm import FileSaves, is_of_its_start

_TICK_S = 0.01
"""How far a file's modification time may lie before the moment at which it was written."""
Entries = Mapping[str, Entry]
"""By name."""
_Compared = tuple[str, Entries, Entries, Entries]
"""A file that the chaos leg left: its entries there, in the reference, and in the confirming leg (again in the reference, if
none has been run)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file that was left; with `by_kind`, all files with the same name apart from digits."""

    path: str
    by_kind: bool = False

    def savers(self, leg: LegHistory, attempt: Attempt) -> Mapping[int, Mapping[int, float]]:
        """The ranks that saved it in an attempt, and when, by step. A folder may have been renamed as a whole."""
        if self.path in leg.left.saves and not self.by_kind:
            return {leg.left.ranks[self.path]: dict(leg.left.saves[self.path])} if attempt is leg.attempts[-1] else {}
        return self._seen_in(attempt) if self.was_seen(leg) else self._saved_by_time(leg, attempt)

    def was_seen(self, leg: LegHistory) -> bool:
        return (self.path in leg.left.saves and not self.by_kind) or any(self._seen_in(attempt) for attempt in leg.attempts)

    def _seen_in(self, attempt: Attempt) -> Mapping[int, Mapping[int, float]]:
        sought = PurePath(self._called(self.path))
        found = {
            rank: {
                save.step: save.time_s
                for save in trace.saves
                if save.how != REMOVED and sought.is_relative_to(self._called(save.path))
            }
            for rank, trace in sorted(attempt.traces.items())
        }
        return {rank: times for rank, times in found.items() if times}

    def _saved_by_time(self, leg: LegHistory, attempt: Attempt) -> Mapping[int, Mapping[int, float]]:
        """The last save of a file that another process or native code wrote, of any rank."""
        sought = self._called(self.path)
        times = [changed_s for path, changed_s in leg.left.changed.items() if self._called(path) == sought]
        rank, begun = next(iter(attempt.starts.items()), (0, None))
        if attempt is not leg.attempts[-1] or begun is None or not times or max(times) < begun.time_s:
            return {}
        done = [record.step for record in attempt.traces[rank].steps.values() if record.time_s <= max(times) + _TICK_S]
        return {rank: {max(done, default=begun.position.step): max(times)}}

    def _called(self, path: str) -> str:
        return unnumbered(path) if self.by_kind else path


def left_difference(drill: Drill) -> Divergence | None:
    """The first entry that differs in a file which a restarted attempt wrote, or the first file that only one leg has; None if
    there is none, or if it cannot be decided."""
    if not _is_judged(drill):
        return None
    by_name = _of_contents(drill, _by_path(drill)) or (_of_names(drill) if drill.by_script else None)
    return by_name or _of_contents(drill, _of_other_names(drill), by_kind=True)


def compared(drill: Drill) -> list[str]:
    """The files that the last attempt wrote and that both legs must leave, and do leave."""
    files = _by_path(drill) if _is_judged(drill) else ()
    alike = [(path, held) for path, held, expected, _ in files if held.items() <= expected.items()]
    return [path for path, held in alike if _comparable(drill, _File(path=path), held) is not None]


def _of_contents(drill: Drill, files: Iterable[_Compared], *, by_kind: bool = False) -> Divergence | None:
    for path, held, expected, confirmed in files:
        # An entry of another size is collected while the script runs (losses, samples): not compared.
        differing = [
            name
            for name, seen in held.items()
            if seen != expected.get(name, seen) and confirmed.get(name) == expected[name] and seen[0] == expected[name][0]
        ]
        if differing and (rank := _comparable(drill, _File(path=path, by_kind=by_kind), held)) is not None:
            name = _named(path, differing[0])
            values = {"expected": expected[differing[0]][1], "seen": held[differing[0]][1]}
            where = f"at the end, {name} differs from what every fault-free run leaves there"
            return _left_difference(drill, rank, path, where, differing, name=name, **values)
    return None


def _of_names(drill: Drill) -> Divergence | None:
    """A missing file or, if names contain steps (best-00036.pt), extra ones. Older files that a restart which saved at the same
    steps has not removed (see `left_over`) do not count."""
    for expected, seen in _by_kind(drill):
        extra = {path for path in seen - expected if _saved_on_leaving(drill, path)}
        if seen - extra <= expected and len(expected - seen) <= len(extra):
            continue  # each of those may have replaced an older one
        path = min(seen ^ expected)
        held = drill.chaos.left.files.get(path) or drill.reference.left.files[path]
        rank = _comparable(drill, _File(path=path, by_kind=True), held, same_saves=bool(expected - seen))
        if rank is not None:
            there = ("there", "not there") if path in expected else ("not there", "there")
            where = f"at the end, {path} is {there[1]}, but {there[0]} after every fault-free run"
            values = {"name": path, "expected": there[0], "seen": there[1]}
            return _left_difference(drill, rank, path, where, sorted(seen ^ expected), because="when", **values)
    return None


def left_over(drill: Drill) -> list[str]:
    """Files with a step in their names that every run without faults removes, and the restarted one did not."""
    kinds = _by_kind(drill) if drill.by_script and _has_restarted(drill) else ()
    over = (path for expected, seen in kinds if seen > expected for path in seen - expected)
    return sorted(path for path in over if not _saved_apart(drill, path))


def _saved_apart(drill: Drill, path: str) -> bool:
    """Whether it was saved, as on a notice, only after steps at which the reference run saves none of its kind, and so had none
    to remove."""
    named = ((drill.reference, _File(path=path, by_kind=True)), (drill.chaos, _File(path=path)))
    usual, own = (
        {step for attempt in leg.attempts for steps in file.savers(leg, attempt).values() for step in steps}
        for leg, file in named
    )
    return bool(own) and own.isdisjoint(usual)


def _saved_on_leaving(drill: Drill, path: str) -> bool:
    """Whether it was saved when an attempt was told to leave, after steps at which the reference run saves none of its kind."""
    savers = [(attempt, _File(path=path).savers(drill.chaos, attempt)) for attempt in drill.chaos.attempts]
    last = [attempt.traces[rank].steps.last == max(times) for attempt, ranks in savers for rank, times in ranks.items()]
    return all(last) and not savers[-1][1] and _saved_apart(drill, path)


def fewer_bytes(drill: Drill) -> Iterator[tuple[str, int, int]]:
    """Entries that grow while a script trains, and are smaller than after any run without faults: name, bytes there, bytes
    here."""
    if not _has_restarted(drill):
        return
    for path, held, expected, confirmed in _by_path(drill):
        shorter = [name for name, seen in held.items() if seen[0] < expected.get(name, seen)[0] == confirmed.get(name, seen)[0]]
        if shorter and _comparable(drill, _File(path=path), held) is not None:
            yield _named(path, shorter[0]), expected[shorter[0]][0], held[shorter[0]][0]


def other_figures(drill: Drill) -> Iterator[tuple[str, str, str]]:
    """Numbers in text files, and next to the tensors of checkpoints, that differ from those of every run without faults: name,
    value there, value here."""
    if not _has_restarted(drill):
        return
    fault_free, again = drill.reference.left.figures, (drill.confirmed or drill.reference).left.figures
    for path, held in sorted(drill.chaos.left.figures.items()):
        expected, confirmed = fault_free.get(path, {}), again.get(path, {})
        alike = [name for name in held if name in expected and confirmed.get(name) == expected[name]]
        other = [name for name in alike if held[name] != expected[name]]
        file, entries = _File(path=path), drill.chaos.left.files.get(path, ())
        told = _is_of_last_attempt(drill, path) if path.endswith(SUFFIXES) else _comparable(drill, file, entries) is not None
        if other and told:
            yield from ((_named(path, name), expected[name], held[name]) for name in other)


def _is_of_last_attempt(drill: Drill, path: str) -> bool:
    """Not of a killed attempt, whose file the next attempt keeps while it writes another (`version_1`)."""
    begun = [start.time_s for start in drill.chaos.attempts[-1].starts.values()]
    return drill.chaos.left.changed.get(path, math.inf) >= min(begun, default=0.0)


def _is_judged(drill: Drill) -> bool:
    """Whether a confirming leg can show which differences are due to the restart."""
    return bool(drill.spec.verify.confirm) and drill.exact_weights and _has_restarted(drill)


def _has_restarted(drill: Drill) -> bool:
    """A leg that did not complete has not left its final files."""
    completed = drill.chaos.outcome == "completed"
    return completed and len(drill.chaos.attempts) > 1 and drill.ended_early is None and not drill.given


def _by_path(drill: Drill) -> Iterator[_Compared]:
    fault_free, again = drill.reference.left, (drill.confirmed or drill.reference).left
    for path, held in sorted(drill.chaos.left.files.items()):
        yield path, held, fault_free.files.get(path, {}), again.files.get(path, {})


def _of_other_names(drill: Drill) -> Iterator[_Compared]:
    """Of files whose names differ in every leg (a folder named by the time), the one written last, if the reference has none
    with the same contents."""
    lefts = [leg.left for leg in (drill.chaos, drill.reference, drill.confirmed) if leg]
    for kind in sorted({unnumbered(path) for path in drill.chaos.left.files}):
        # Newest first.
        named = [
            sorted((path for path in left.files if unnumbered(path) == kind), key=lambda path: -left.changed.get(path, 0.0))
            for left in lefts
        ]
        if not all(named) or len(set(chain(*named))) < sum(map(len, named)):
            continue
        seen, expected, *confirmed = (left.files[paths[0]] for left, paths in zip(lefts, named, strict=True))
        if seen not in [lefts[1].files[path] for path in named[1]]:
            yield named[0][0], seen, expected, (confirmed or [expected])[0]


def _named(path: str, name: str) -> str:
    return f"{path}: {name}" if name else path


def _by_kind(drill: Drill) -> Iterator[tuple[set[str], set[str]]]:
    """Files with similar names that runs without faults leave, and those of the chaos leg, if they are not the same."""
    legs = [drill.reference, drill.chaos, *([drill.confirmed] if drill.confirmed else [])]
    if any(leg.left.left_out for leg in legs):
        return
    for kind in sorted({unnumbered(path) for path in drill.reference.left.files}):
        expected, seen, *confirmed = ({path for path in leg.left.files if unnumbered(path) == kind} for leg in legs)
        if seen != expected and confirmed in ([], [expected]):
            yield expected, seen


def _left_difference(
    drill: Drill, rank: int, path: str, where: str, differing: list[str], *, because: str = "left", **values: str
) -> Divergence:
    step = drill.chaos_lineage.final_step
    about = {"name": values["name"], "path": path, "step": step, "rank": rank, "where": where, "differing": differing}
    cause = Cause("kept_state_not_restored", about, because)
    if not drill.by_script:
        cause = Cause("result_differs", {**about, "what": drill.outside}, "outside" if drill.outside else None)
    return saved_otherwise(drill.chaos.attempts[-1].number, cause, **values)


def _comparable(drill: Drill, file: _File, entries: Iterable[str], *, same_saves: bool = True) -> int | None:
    """The rank that saved a file which both legs must leave equal; None if its contents depend on when it is saved.

    They must be equal if it is written when training is complete, or if the last attempt saved it after the same steps as the
    reference, or last after the same step. Otherwise, too, unless the start time of an attempt explains the other steps (see
    `rhythm`), or runs without faults save it at varying steps, too: by the clock.
    `same_saves`: False excludes files that were saved at the same steps.
    """
    left, reference = drill.chaos.left, drill.reference.attempts[-1]
    if file.path in left.ranks and file.path not in left.saves:
        return left.ranks[file.path]
    savers = file.savers(drill.reference, reference)
    rank = next((rank for rank in savers if rank in drill.chaos.attempts[-1].starts), None)
    if rank is None or len(drill.reference.attempts) > 1:
        return None
    again: Mapping[int, float] = savers[rank]
    if drill.confirmed:
        again = file.savers(drill.confirmed, drill.confirmed.attempts[-1]).get(rank, {})
    weights = any(name.endswith(start.tensors) for name in entries for start in reference.starts.values())
    unlike: list[tuple[RankTrace, dict[int, float], int]] = []
    alike = False
    # With chaosrun.attach only the last attempt counts, because a killed rank's saves are not known; so, too, if no save was
    # seen and only the file's modification time shows the last.
    known = drill.by_script and file.was_seen(drill.chaos)
    for attempt in drill.chaos.attempts[1 if known else -1 :]:
        own = attempt.traces.get(rank)
        if own is None or not own.start or not own.steps:
            continue
        begun, last = attempt.start_of(rank), attempt is drill.chaos.attempts[-1]
        saved = file.savers(drill.chaos, attempt).get(rank, {})
        seen = {step: time_s for step, time_s in saved.items() if step >= begun}
        # A save at the step at which the rank was killed may be missing.
        final = own.steps.last if last or own.steps.last in seen else own.steps.last - 1
        due = {step for step in savers[rank] if begun < step <= final or step in seen}
        alike = last and bool(seen) and (seen.keys() == due or (max(seen) == max(savers[rank]) and not file.by_kind))
        if seen.keys() != due and not alike:
            unlike.append((own, seen, final))
    if unlike and again.keys() == savers[rank].keys():
        whole = _of(reference.traces[rank], savers[rank], reference.traces[rank].steps.last)
        if not all(is_of_its_start(whole, _of(*each), holds_weights=weights) for each in unlike):
            return rank
    return rank if alike and same_saves else None


def _of(trace: RankTrace, times: Mapping[int, float], final: int) -> FileSaves:
    """`trace` has begun, and has steps."""
    assert trace.start
    steps = [record.time_s for record in trace.steps.values()]
    return FileSaves(
        times=dict(sorted(times.items())),
        begun=trace.start.position.step,
        final=final,
        began_s=trace.start.time_s,
        ended_s=steps[-1],
        longest_step_s=max((b - a for a, b in pairwise(steps)), default=0.0),
    )
