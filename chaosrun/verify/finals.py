"""Checks of the final state of the two legs; one for each part, since equal weights can hide other state that drifts (hazard
X4).

Digests decide; only a tolerance on weights makes this module read tensors (and import torch).
"""

from pathlib import Path
from typing import Any

from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.errors import InvalidCheckpointError
from chaosrun.records.history import LegHistory
from chaosrun.records.manifest import Manifest
from chaosrun.spec.model import Tolerance
from chaosrun.verify.check import CheckResult, Drill, excuse_unused_streams, failed, inconclusive, passed, skipped
from chaosrun.verify.compare import differing_keys
from chaosrun.verify.left import compared, left_difference
from chaosrun.verify.restored import buffers_came_back, buffers_lost_at_start
from chaosrun.wording import count, listed

TOLERANCE_GIVEN = "tolerance given: digests say nothing about nearly equal"


def final_weights(drill: Drill) -> CheckResult:
    """Final parameters and buffers of every rank are equal; with a tolerance, tensors of chaosrun's final checkpoints are
    within it."""
    verify = drill.spec.verify
    if not drill.exact_weights and (verify.weights.exact or drill.by_script):
        return skipped(f"{TOLERANCE_GIVEN}; losses decide")
    if not drill.exact_weights:
        return _numeric_weights(drill, verify.weights)
    return _required(_digests(drill, ("model", "buffers"), "tensors"), "weights")


def final_optimizer(drill: Drill) -> CheckResult:
    return _digests(drill, ("optimizer",), "optimizer entries")


def final_scheduler(drill: Drill) -> CheckResult:
    return _digests(drill, ("scheduler",), "scheduler entries")


def final_rng(drill: Drill) -> CheckResult:
    check = excuse_unused_streams(_digests(drill, ("rng",), "random streams"), drill)
    return _required(check, "random stream")


def final_registered(drill: Drill) -> CheckResult:
    return _digests(drill, ("registered",), "registered objects")


def final_position(drill: Drill) -> CheckResult:
    for rank in drill.ranks:
        expected, seen = drill.reference.ends.get(rank), drill.chaos.ends.get(rank)
        if expected is None or seen is None:
            return inconclusive("final_record_missing", rank=rank)
        last = drill.reference_lineage.final_step
        if not expected.step == expected.position.step == last:
            return inconclusive("final_reference_differs", rank=rank, step=expected.step, last=last)
        if expected.position != seen.position or expected.step != seen.step:
            words = [
                f"epoch {end.position.epoch} batch {end.position.batches} step {end.position.step}" for end in (expected, seen)
            ]
            return failed("final_position_differs", rank=rank, expected=words[0], seen=words[1])
    position = drill.reference.ends[0].position
    summary = f"epoch {position.epoch}, batch {position.batches}, step {position.step} on {len(drill.ranks)} ranks"
    return passed(summary)


def final_files(drill: Drill) -> CheckResult:
    """Files of tensors that the script left, if every run without faults leaves them equal; skipped if there are none."""
    if found := left_difference(drill):
        return failed(found.code, because=found.reason.because, **found.reason.params)
    if not (paths := compared(drill)):
        return skipped("no file of tensors that both legs must leave alike")
    return passed(f"{listed(paths, 3)} as every fault-free run leaves {'it' if len(paths) == 1 else 'them'}", files=paths)


def final_checkpoint(drill: Drill) -> CheckResult:
    """Both legs' final checkpoints match their manifests, and the manifests list the same state."""
    if drill.ended_early is not None:
        found = _audited(drill.chaos, drill)
        told = "files as the manifest promises; of the reference's checkpoint of this step the digests are kept, and compared"
        return found if isinstance(found, CheckResult) else passed(f"{len(found.files)} {told}", files=len(found.files))
    manifests: list[Manifest] = []
    for leg in (drill.reference, drill.chaos):
        found = _audited(leg, drill)
        if isinstance(found, CheckResult):
            return found
        manifests.append(found)
    expected, seen = manifests
    for name in ("step", "position", "world_size"):
        if getattr(expected, name) != getattr(seen, name):
            how = f"the final checkpoint says {name} {getattr(seen, name)}, the reference's {getattr(expected, name)}"
            return failed("final_checkpoint_differs", how=how)
    if not drill.exact_weights:
        return passed(f"{len(seen.files)} files as the manifest promises; {TOLERANCE_GIVEN}", files=len(seen.files))
    if not expected.digests or not seen.digests:
        return inconclusive("final_checkpoint_not_digested")
    keys = differing_keys(expected.digests, seen.digests)
    if keys:
        return failed("final_checkpoint_differs", how=f"the final checkpoints differ in {', '.join(keys)}", differing=keys)
    weights = [name for name in expected.files if Path(name).suffix == ".safetensors"]
    other = [name for name in weights if name not in seen.files or seen.files[name] != expected.files[name]]
    if other:
        return failed("final_checkpoint_differs", how=f"{other[0]} of the final checkpoints differs", differing=other)
    return passed(f"{len(seen.files)} files as the manifest promises, same digests", files=len(seen.files))


def _audited(leg: LegHistory, drill: Drill) -> Manifest | CheckResult:
    """The manifest of the leg's final checkpoint, or a check that says why no valid one exists."""
    report = failed if leg is drill.chaos else inconclusive
    because = "since" if drill.found_whole else None
    names = {leg.ends[rank].checkpoint for rank in drill.ranks if rank in leg.ends}
    name = next(iter(names)) if len(names) == 1 else None
    if name is None:
        found = sorted(map(str, names)) or "no end record"
        return inconclusive("final_checkpoint_not_common", leg=leg.name, found=found)

    def invalid(problem: str) -> CheckResult:
        return report("final_checkpoint_invalid", because=because, leg=leg.name, checkpoint=name, problem=problem)

    try:
        manifest = CheckpointStore(leg.layout, drill.spec.checkpoint.keep).audit(name)
    except InvalidCheckpointError as error:
        return invalid(error.message)
    if manifest.step != leg.ends[0].step:
        return invalid(f"{name} is of step {manifest.step}, the leg ended at {leg.ends[0].step}")
    if manifest.world_size != drill.spec.workers or not manifest.files:
        return invalid(f"{name} holds {len(manifest.files)} files of {manifest.world_size} ranks")
    return manifest


def _required(check: CheckResult, what: str) -> CheckResult:
    """Check state that every job has: if the records hold none of it, the check is inconclusive instead of skipped."""
    return inconclusive("final_state_not_digested", what=what) if check.status == "skip" else check


def _digests(drill: Drill, groups: tuple[str, ...], what: str) -> CheckResult:
    """Compare these groups of the end records, rank by rank. Skipped with a tolerance, and if the first is empty."""
    if not drill.exact_weights and groups != ("rng",):
        return skipped(TOLERANCE_GIVEN)
    compared = 0
    empty: list[int] = []
    for rank in drill.ranks:
        expected, seen = drill.reference.ends.get(rank), drill.chaos.ends.get(rank)
        if expected is None or seen is None:
            return inconclusive("final_record_missing", rank=rank)
        for group in groups:
            if group not in expected.digests or group not in seen.digests:
                return inconclusive("final_digests_missing", rank=rank, group=group)
            keys = differing_keys(expected.digests[group], seen.digests[group])
            if group == "optimizer" and (drill.chaos.attempts[-1].number, rank) in drill.retired:
                keys = []  # all others are known to be equal
            if keys:
                if group == "buffers" and drill.by_script:
                    code = "buffers_drifted" if buffers_came_back(drill, rank) else "buffers_not_restored"
                    where = f" on rank {rank}" if drill.ranks[1:] else ""
                    about = {"name": listed(keys, 1) + where, **buffers_lost_at_start(drill, rank)}
                    return failed(code, step=seen.step, rank=rank, differing=keys, scope=where, **about)
                held = [end.digests[group].get(keys[0]) for end in (expected, seen)]
                first = {"rank": rank, "name": keys[0], "expected": held[0], "seen": held[1]}
                return failed("final_state_differs", group=group, rank=rank, first=first, differing=keys)
        if not expected.digests[groups[0]]:
            empty.append(rank)
        compared += sum(len(expected.digests[group]) for group in groups)
    if len(empty) == len(drill.ranks):
        return skipped(f"the job has no {what}")
    if empty and groups != ("registered",):  # which a script may do on some ranks only: on the same ones in both legs
        return inconclusive("final_ranks_differ", ranks=empty, what=what)
    with_any = count(len(drill.ranks) - len(empty), "rank")
    return passed(f"{compared} digests of {what} on {with_any} are equal", compared=compared)


def _numeric_weights(drill: Drill, tolerance: Tolerance) -> CheckResult:
    legs = (drill.reference, drill.chaos)
    for found in (_audited(leg, drill) for leg in legs):
        if isinstance(found, CheckResult):
            return inconclusive("final_weights_missing", problem=found.summary)
    expected, seen = (_tensors(leg.layout.checkpoints / str(leg.ends[0].checkpoint)) for leg in legs)
    if not expected:
        problem = "the final checkpoint of the reference has no model*.safetensors"
        return inconclusive("final_weights_missing", problem=problem)
    if expected.keys() != seen.keys():
        return failed("final_weights_renamed", tensor=sorted(expected.keys() ^ seen.keys())[0])
    worst = 0.0
    for name, tensor in expected.items():
        apart = _distance(tensor, seen[name], tolerance)
        if isinstance(apart, str):
            return failed("final_weights_differ", tensor=name, how=apart)
        worst = max(worst, apart)
    summary = f"{len(expected)} tensors within atol {tolerance.atol:g}, rtol {tolerance.rtol:g}; largest difference {worst:.3g}"
    return passed(summary, tensors=len(expected), largest_difference=worst)


def _tensors(directory: Path) -> dict[str, object]:
    from safetensors.torch import load_file  # torch only when tensors must be read

    found: dict[str, object] = {}
    for path in sorted(directory.rglob("model*.safetensors")):
        for name, tensor in load_file(path).items():
            found[f"{path.relative_to(directory)}:{name}"] = tensor
    return found


def _distance(expected: Any, seen: Any, tolerance: Tolerance) -> float | str:
    """Largest absolute difference of two tensors, or how they exceed the tolerance. NaN equals NaN."""
    import torch

    if (expected.dtype, expected.shape) != (seen.dtype, seen.shape):
        return f"{tuple(seen.shape)} {seen.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    left, right = expected.double(), seen.double()
    close = torch.isclose(right, left, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    difference = (right - left).abs().nan_to_num(nan=0.0)
    largest = float(difference.max()) if difference.numel() else 0.0
    if not bool(close.all()):
        return f"{int((~close).sum())} of {close.numel()} elements are out of tolerance; largest difference {largest:.3g}"
    return largest
