"""What the job's checkpoints ask of a storage: time of each interval, and room. Known from an earlier run of it. Pure."""

from collections.abc import Callable, Iterator
from functools import partial

from chaosrun.cluster.probing import Node
from chaosrun.preflight.earlier_run import EarlierRun
from chaosrun.preflight.model import Facts, Finding, Setting, Status
from chaosrun.spec.model import JobSpec
from chaosrun.wording import duration, size

SAVE, ROOM = "a save of the job", "room for checkpoints"
LARGEST_SHARE = 0.1
"""Of the time between two checkpoints: more goes into saving than most failures would cost."""
SHORT_S = 1.0
"""A save that is shorter hurts nobody, however often it comes: tests save all the time."""
SAMPLE_BYTES = 64 << 20
"""Of less, one wait of a disk says more than its speed."""
MORE = 2
"""Beside those that are kept: the one being saved, and the one that retention has not taken yet."""


def saves(setting: Setting, node: Node, place: Facts, speed: Facts) -> Iterator[Finding]:
    last = setting.last_run
    row = partial(Finding, check="storage", node=node.name, device=str(setting.storage))
    free = f"{size(place['free_bytes'])} free"
    if setting.job is None or last is None or last.bytes is None:
        why = "no job was named"
        if setting.job is not None:
            name = setting.job.spec.name
            why = f"no earlier run of {name} under {setting.root} went through, and its checkpoints' size is not known"
            if last is not None:
                why = f"{last.run} has no checkpoint any more to know its size from"
        yield row(name=SAVE, status=Status.SKIP, reason=why)
        yield row(name=ROOM, status=Status.SKIP, measured=free, reason=why)
        return
    spec = setting.job.spec
    yield _save(partial(row, name=SAVE), spec, last, last.bytes, speed)
    keep = spec.checkpoint.keep
    need = (keep + MORE) * last.bytes
    enough = place["free_bytes"] >= need
    each = f"{size(last.bytes)} as in {last.run}"
    yield row(
        name=ROOM,
        status=Status.PASS if enough else Status.FAIL,
        measured=free,
        threshold=f"at least {size(need)}: {keep} that are kept and {MORE} more, of {each}",
        remedy="" if enough else "free some space there, lower checkpoint.keep, or put checkpoints elsewhere",
    )


def _save(row: Callable[..., Finding], spec: JobSpec, last: EarlierRun, size_bytes: int, speed: Facts) -> Finding:
    write_s = size_bytes * speed["write_s"] / speed["bytes"] + last.files * speed["small_s"]
    # What a save does besides writing, it did in the earlier run too.
    took_s = max(write_s, last.costs.save_s or 0.0)
    measured = f"{duration(write_s)} to write {size(size_bytes)}"
    if took_s > write_s:
        measured = f"{duration(took_s)} as in {last.run}, {measured}"
    patience_s = spec.recovery.hang_timeout or spec.recovery.start_timeout
    patience = f"at most {duration(patience_s)}, after which a rank that saves counts as hung"
    interval_s = last.costs.step_s and last.costs.step_s * spec.checkpoint.every_steps
    share = f"at most {LARGEST_SHARE:.0%} of the interval, or {duration(SHORT_S)}"
    if interval_s:
        measured += f": {took_s / interval_s:.0%} of the interval of {duration(interval_s)}"
    if write_s > patience_s:
        remedy = "put checkpoints on faster storage, or raise recovery.hang_timeout"
        if speed["bytes"] >= SAMPLE_BYTES:
            return row(status=Status.FAIL, measured=measured, threshold=patience, remedy=remedy)
        why = f"only {size(speed['bytes'])} were written to know it by"
        return row(status=Status.WARN, measured=measured, threshold=patience, reason=why, remedy=remedy)
    if interval_s and took_s > SHORT_S and took_s > LARGEST_SHARE * interval_s:
        remedy = f"save less often (checkpoint.every_steps, now {spec.checkpoint.every_steps}), or to faster storage"
        return row(status=Status.WARN, measured=measured, threshold=share, remedy=remedy)
    return row(status=Status.PASS, measured=measured, threshold=share if interval_s else patience)
