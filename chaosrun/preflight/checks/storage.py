"""The check "storage": does a node's storage keep what recovery depends on, is it fast enough, is there room? Pure."""

import errno
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from chaosrun.checkpoint.storage import hint_of
from chaosrun.cluster.guard import PREFIX
from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.earlier_run import EarlierRun
from chaosrun.preflight.model import PROBES, Answers, Check, Finding, Level, Measure, Rows, Setting, Status
from chaosrun.preflight.probes.forked import Failed, Watched
from chaosrun.preflight.probes.storage import Speed, StorageFacts
from chaosrun.preflight.probes.storage_kills import Saves
from chaosrun.preflight.probes.storage_place import Mount
from chaosrun.spec.model import JobSpec
from chaosrun.wording import duration, listed, size

_EFFORT = {
    Level.QUICK: {"kills": 8, "kills_s": 0.25, "names": 20, "speed_s": 0.25, "speed_bytes": 64 << 20},
    Level.STANDARD: {"kills": 60, "kills_s": 3.0, "names": 100, "speed_s": 1.5, "speed_bytes": 1 << 30},
    Level.DEEP: {"kills": 2000, "kills_s": 20.0, "names": 1000, "speed_s": 10.0, "speed_bytes": 4 << 30},
}
_PATIENCE_S = {Level.QUICK: 8.0, Level.STANDARD: 25.0, Level.DEEP: 65.0}
"""Storage that gives no sign for so long is taken for dead."""
_LIMIT_S = {Level.QUICK: 20.0, Level.STANDARD: 60.0, Level.DEEP: 300.0}
"""And one that takes as long for all, though it goes on, for slow."""
DEEP_SHARE = 0.1
"""Of the time that a deep preflight may take, writers are killed for this share."""
MARGIN_S = 7.0
"""For the process to start and to say that the storage does not answer."""

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
UNSAFE_OPTIONS = frozenset({"nobarrier", "barrier=0", "volatile"})
"""Under which a file system says that something is on the disk before the disk has said so."""
UNTOLD_OPTION = "data=journal"
"""Under which pages count as dirty though they are on the disk, in its journal."""
FASTEST_BYTES_S = 1e12
"""More than any memory, let alone a disk, takes."""
WARN_SHARE, FAIL_SHARE = 0.25, 0.05
"""Of the peers' median speed: what several write to one disk differs by a lot, and of a short look only a WARN is made."""
LARGEST_SHARE = 0.1
"""Of the time between two checkpoints: more goes into saving than most failures would cost."""
SHORT_S = 1.0
"""A save that is shorter hurts nobody, however often it comes: tests save all the time."""
SAMPLE_BYTES = 64 << 20
"""Of less, one wait of a disk says more than its speed."""
MORE = 2
"""Beside those that are kept: the one being saved, and the one that retention has not taken yet."""

SAVE, ROOM = "a save of the job", "room for checkpoints"
_ELSEWHERE = "put checkpoints on a disk or on shared storage, with checkpoint.storage"
_ATOMIC = (
    "put checkpoints on storage whose renames are atomic and that keeps what it was told to sync; look at what lies between: "
    "a FUSE mount, a cache, a preloaded library"
)
_POWER = "a killed process leaves the kernel's cache as it is: what a power cut would leave cannot be seen from here"
_HUNG = "see whether its server and the network to it are up (`mount`, and `dmesg` on the node), then mount it again"
_SLOW = "see how busy its server, the network to it and the disk are"
_SYNC = "mount it so that fsync waits for the disk, and run without libraries that disable it"


def call(setting: Setting, node: Node) -> Call:
    effort = _EFFORT[setting.level]
    if setting.level is Level.DEEP and setting.seconds:
        kills_s = DEEP_SHARE * setting.seconds
        effort = {**effort, "kills_s": kills_s, "kills": max(8, int(20 * kills_s))}
    limit_s = _LIMIT_S[setting.level] + (effort["kills_s"] if setting.level is Level.DEEP else 0.0)
    about = {"storage": str(setting.storage), "patience_s": _PATIENCE_S[setting.level], "limit_s": limit_s}
    return Call(probe=f"{PROBES}.storage", parameters={**about, **effort}, limit_s=limit_s + MARGIN_S)


def judge(setting: Setting, nodes: Sequence[Node], told: Answers[StorageFacts]) -> list[Finding]:
    path, found = str(setting.storage), list[Finding]()
    # What nobody named is made where a run wants it.
    named = setting.job is not None and setting.job.spec.checkpoint.storage is not None
    there = [name for name, facts in told.answered.items() if named and facts.mount and facts.mount.base == path]
    for node in nodes:
        if (facts := told.answered.get(node.name)) is None:
            continue
        row = Rows(check="storage", node=node.name, device=path)
        found += _promises(row, setting, facts, listed(there, 1) if there and node.name not in there else "")
        if facts.mount is not None and facts.speed is not None:
            found += _for_the_job(row, setting, facts.mount.free_bytes, facts.speed)
    return found


def _promises(row: Rows, setting: Setting, facts: StorageFacts, elsewhere: str) -> Iterator[Finding]:
    """`elsewhere`: on which nodes the storage is, where it is missing on this one."""
    stopped = facts.stopped
    why = {"hung": "the storage does not answer", "slow": "the storage is too slow"}.get(stopped, "what comes before it failed")
    base = facts.mount.base if facts.mount else str(setting.storage)
    steps: dict[str, tuple[tuple[str, ...], Callable[[Any], Iterator[Finding]]]] = {
        "mount": (("file system",), lambda mount: _mount(row.of(name="file system"), mount, elsewhere)),
        "saves": (("saves",), lambda saves: _saves(row.of(name="saves"), saves)),
        "twice": (("exclusive create",), lambda twice: _names(row.of(name="exclusive create"), twice)),
        "speed": (
            ("write speed", "read speed", "fsync"),
            lambda speed: _speed(row, facts.mount or Mount(base=base), speed, setting.level),
        ),
    }
    for step, (names, judged) in steps.items():
        here = row.of(name=names[0])
        if (failed := facts.failed.get(step)) is not None:
            remedy = hint_of(failed.errno) or "see what the node's kernel log says of it (dmesg), or put checkpoints elsewhere"
            if failed.errno == errno.ENOENT:
                remedy = "give this node the storage, or leave the node out"
            yield here.fail(failure(failed, base), "no error", remedy)
        elif (value := getattr(facts, step)) is not None:
            yield from judged(value)
        elif stopped:
            yield from no_answer(here, facts)
            stopped = ""
        else:
            yield from (row.skip(f"not tried: {why}", name=name) for name in names)
    if stopped:
        yield from no_answer(row.of(name="removal"), facts)


def no_answer(row: Rows, facts: Watched) -> Iterator[Finding]:
    """Of the step in which the storage hung, or was too slow."""
    if facts.stopped == "hung":
        yield row.fail(f"no answer within {duration(facts.patience_s)}", "storage that answers", _HUNG)
    elif facts.stopped == "slow":
        limit = duration(facts.limit_s)
        yield row.warn(f"not done when {limit} had passed, though it goes on", f"at most {limit}", _SLOW)


def failure(failed: Failed, base: str) -> str:
    """An error of the operating system and where; of a file of the probe's own folder, where that folder was."""
    return f"{(failed.path or base).partition(f'/{PREFIX}')[0]}: {failed.error}"


def _mount(row: Rows, mount: Mount, elsewhere: str) -> Iterator[Finding]:
    measured = f"{mount.type} of {mount.source or '?'}"
    if mount.base != row.device:
        measured += f", at {mount.base}: the storage itself is not there yet"
    unsafe = ",".join(sorted(UNSAFE_OPTIONS & {*mount.options.split(",")}))
    if elsewhere:
        yield row.fail(measured, f"there, as on {elsewhere}", "mount or make it on this node, or leave the node out")
    elif mount.type in IN_MEMORY:
        yield row.warn(measured, "a disk", _ELSEWHERE, reason="checkpoints there are gone when the node restarts")
    elif mount.type == "overlay":
        why = "checkpoints there are gone with the container"
        yield row.warn(measured, "what outlives the container", _ELSEWHERE, reason=why)
    elif unsafe:
        measured, why = f"{measured}, mounted with {unsafe}", "what was synced may be lost in a power cut"
        yield row.warn(measured, "a mount that waits for the disk", _ELSEWHERE, reason=why)
    else:
        yield row.passed(measured)


def _saves(row: Rows, saves: Saves) -> Iterator[Finding]:
    what = f"{saves.saves}, their writer killed {saves.kills}×"
    if saves.wrong:
        more = f" (and {len(saves.wrong) - 1} more)" if len(saves.wrong) > 1 else ""
        threshold = "whole files, all that had been reported as saved"
        yield row.fail(f"{what}: {saves.wrong[0]}{more}", threshold, _ATOMIC)
    else:
        yield row.passed(f"{what}: nothing torn, nothing lost", reason=_POWER)


def _names(row: Rows, twice: int) -> Iterator[Finding]:
    remedy = "two runs could take one folder: use storage that honours O_EXCL"
    status = Status.FAIL if twice else Status.PASS
    yield row.judged(status, f"{twice} names created twice", "each created once", remedy)


def _speed(row: Rows, mount: Mount, speed: Speed, level: Level) -> Iterator[Finding]:
    def measure(rate: float, sample: int) -> Measure:
        fail = FAIL_SHARE if level is not Level.QUICK and sample >= SAMPLE_BYTES else None
        return Measure(number=rate, unit="B/s", better="higher", warn=WARN_SHARE, fail=fail)

    rate = speed.bytes / speed.write_s
    yield row.passed(f"{size(rate)}/s, {size(speed.bytes)} synced", name="write speed", measure=measure(rate, speed.bytes))
    if speed.read_bytes:
        rate = speed.read_bytes / speed.read_s
        yield row.passed(f"{size(rate)}/s", name="read speed", measure=measure(rate, speed.read_bytes))
    else:
        yield row.skip("this file system gives back nothing past the kernel's cache", name="read speed")
    yield _fsync(row.of(name="fsync"), mount, speed)


def _fsync(row: Rows, mount: Mount, speed: Speed) -> Finding:
    before, after, fsync_s = speed.dirty_before, speed.dirty_after, speed.fsync_s
    options = {*mount.options.split(",")}
    took = f"{size(speed.bytes)} in {duration(fsync_s)}"
    on_disk = "everything on the disk when fsync returns"
    if mount.preload:
        measured = f"{', '.join(mount.preload)} is loaded, which makes it do nothing"
        return row.fail(measured, on_disk, "unset LD_PRELOAD where Ray is started")
    if speed.changed:
        measured = f"{size(speed.changed)} of {size(speed.read_bytes)} read back are not what was written"
        return row.fail(measured, "the same bytes", hint_of(errno.EIO) or "")
    if mount.type in IN_MEMORY:
        return row.skip("this file system lies in memory: there is no disk to wait for", measured=took)
    if after and UNTOLD_OPTION not in options:
        measured = f"{after} of {before} pages are not written when it returns, after {duration(fsync_s)}"
        return row.fail(measured, on_disk, _SYNC)
    if fsync_s * FASTEST_BYTES_S < speed.bytes and before != 0 and "sync" not in options:
        why = "nothing that stores data is that quick: something may answer in its stead"
        return row.warn(took, "the time that a disk takes", _SYNC, reason=why)
    if not before or UNTOLD_OPTION in options:
        why = "the kernel does not tell here what it holds back" if before is None else "the kernel holds nothing back here"
        return row.skip(f"{why}: whether fsync keeps its word cannot be seen", measured=took)
    why = "the kernel has handed all to the device; whether that keeps it in a power cut cannot be seen from here"
    return row.passed(f"{took}: {before} pages waiting before, none after", reason=why)


# What the job's checkpoints ask of it: time of each interval, and room. Known from an earlier run of it.


def _for_the_job(row: Rows, setting: Setting, free_bytes: int, speed: Speed) -> Iterator[Finding]:
    last, free = setting.last_run, f"{size(free_bytes)} free"
    if setting.job is None or last is None or last.bytes is None:
        why = "no job was named"
        if setting.job is not None:
            name = setting.job.spec.name
            why = f"no earlier run of {name} under {setting.root} went through, and its checkpoints' size is not known"
            if last is not None:
                why = f"{last.run} has no checkpoint any more to know its size from"
        yield row.skip(why, name=SAVE)
        yield row.skip(why, name=ROOM, measured=free)
        return
    spec = setting.job.spec
    yield _save(row.of(name=SAVE), spec, last, last.bytes, speed)
    keep = spec.checkpoint.keep
    need = (keep + MORE) * last.bytes
    yield row.judged(
        Status.PASS if free_bytes >= need else Status.FAIL,
        free,
        f"at least {size(need)}: {keep} that are kept and {MORE} more, of {size(last.bytes)} as in {last.run}",
        "free some space there, lower checkpoint.keep, or put checkpoints elsewhere",
        name=ROOM,
    )


def _save(row: Rows, spec: JobSpec, last: EarlierRun, size_bytes: int, speed: Speed) -> Finding:
    write_s = size_bytes * speed.write_s / speed.bytes
    # What a save does besides writing, it did in the earlier run too.
    took_s = max(write_s, last.costs.save_s or 0.0)
    measured = f"{duration(write_s)} to write {size(size_bytes)}"
    if took_s > write_s:
        measured = f"{duration(took_s)} as in {last.run}, {measured}"
    patience_s = spec.recovery.hang_timeout or spec.recovery.start_timeout
    patience = f"at most {duration(patience_s)}, after which a rank that saves counts as hung"
    interval_s = (last.costs.step_s or 0.0) * spec.checkpoint.every_steps
    share = f"at most {LARGEST_SHARE:.0%} of the interval, or {duration(SHORT_S)}"
    if interval_s:
        measured += f": {took_s / interval_s:.0%} of the interval of {duration(interval_s)}"
    if write_s > patience_s:
        remedy = "put checkpoints on faster storage, or raise recovery.hang_timeout"
        if speed.bytes >= SAMPLE_BYTES:
            return row.fail(measured, patience, remedy)
        return row.warn(measured, patience, remedy, reason=f"only {size(speed.bytes)} were written to know it by")
    if interval_s and took_s > SHORT_S and took_s > LARGEST_SHARE * interval_s:
        remedy = f"save less often (checkpoint.every_steps, now {spec.checkpoint.every_steps}), or to faster storage"
        return row.warn(measured, share, remedy)
    return row.passed(measured, share if interval_s else patience)


CHECK = Check(
    name="storage",
    about="storage keeps its promises, is fast enough and has room",
    order=50,
    level=Level.QUICK,
    call=call,
    facts=StorageFacts,
    judge=judge,
)
