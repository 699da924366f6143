"""What a script's files of tensors held when it had come to its end, against the reference's: state that it keeps and saves in
whatever way, and that a restart has not brought back. Pure.

A second undisturbed leg decides: what differs there, too, tells nothing.
"""

from itertools import pairwise
from pathlib import PurePath

from chaosrun.records.history import LegHistory
from chaosrun.verify.alignment import REMOVED
from chaosrun.verify.check import Drill
from chaosrun.verify.codes import Cause
from chaosrun.verify.kept import KeptDifference


def left_difference(drill: Drill) -> KeptDifference | None:
    """The first entry that was otherwise in a file which a restarted attempt wrote; None: there is none, or nobody can tell."""
    restarted = len(drill.chaos.attempts) > 1 and drill.ended_early is None and not drill.given
    if not drill.spec.verify.confirm or not drill.exact_weights or not restarted:
        return None
    ranks = drill.chaos.left.ranks
    for path, held in sorted(drill.chaos.left.files.items()):
        expected = drill.reference.left.files.get(path, {})
        again = drill.confirmed.left.files.get(path, {}) if drill.confirmed else expected
        # Of another size is what is gathered while a script runs: losses, samples.
        differing = [
            name
            for name, seen in held.items()
            if seen != expected.get(name, seen) and again.get(name) == expected[name] and seen[0] == expected[name][0]
        ]
        if differing and (rank := ranks[path] if path in ranks else _saved_alike(drill, path)) is not None:
            name = f"{path}: {differing[0]}" if differing[0] else path
            where = f"at the end, {name} is not what every undisturbed run leaves there"
            step = drill.chaos_lineage.final_step
            about = {"name": name, "path": path, "step": step, "rank": rank, "where": where, "differing": differing}
            values = {"expected": expected[differing[0]][1], "seen": held[differing[0]][1]}
            if drill.by_script:
                return KeptDifference(rank=rank, name=name, **values, cause=Cause("kept_state_not_restored", about))
            cause = Cause("result_differs", {**about, "what": drill.outside}, "outside" if drill.outside else None)
            return KeptDifference(rank=rank, name=name, **values, cause=cause)
    return None


def _saved_alike(drill: Drill, path: str) -> int | None:
    """The rank that saved a file, where its last attempt did so: after the step after which the reference did, or one after
    which that saved something else (of the best weights another attempt may think otherwise), or anywhere if the reference had
    ceased to save it. Else it may be saved by the clock, on a notice, or so many steps after a start."""
    seen, expected = _saved(drill.chaos, path), _saved(drill.reference, path)
    if not seen or not expected or max(seen)[1] != drill.chaos.attempts[-1].number:
        return None
    step, _, rank, _ = max(seen)
    steps = {save.step for trace in drill.reference.traces for save in trace.saves if save.how != REMOVED}
    since_start = step - drill.chaos.attempts[-1].start_of(rank)
    ceased = since_start not in {0, *(each for each, *_ in expected)} and _ceased(drill, expected)
    return rank if step == max(expected)[0] or step in steps or ceased else None


def _ceased(drill: Drill, saved: list[tuple[int, int, int, float]]) -> bool:
    """The reference went on, by steps and by the clock, for longer than it ever had between two of these saves: no rhythm says
    when the file is saved, but something that the script has learnt."""
    traces = [trace for trace in drill.reference.traces if trace.start and trace.steps]
    if len(drill.reference.attempts) != 1 or not traces:
        return False
    whens = (
        ([0, *(step for step, *_ in saved)], drill.reference_lineage.final_step),
        (
            [min(trace.start.time_s for trace in traces if trace.start), *(time_s for *_, time_s in saved)],
            max(trace.steps[trace.steps.last].time_s for trace in traces),
        ),
    )
    return all(end - max(when) > max(later - earlier for earlier, later in pairwise(sorted(when))) for when, end in whens)


def _saved(leg: LegHistory, path: str) -> list[tuple[int, int, int, float]]:
    """When: step, attempt, rank, time. A folder may have been renamed as a whole."""
    return [
        (save.step, trace.attempt, trace.rank, save.time_s)
        for trace in leg.traces
        for save in trace.saves
        if save.how != REMOVED and PurePath(path).is_relative_to(save.path)
    ]
