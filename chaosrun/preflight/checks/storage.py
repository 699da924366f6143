"""The check "storage": does a node's storage give the guarantees that recovery needs, is it fast enough, is there space?
Pure."""

import errno
from collections.abc import Iterator, Sequence

from chaosrun.checkpoint.storage_errors import hint_of
from chaosrun.cluster.probing import Call, Node, ProbeOutcome
from chaosrun.preflight.earlier_run import EarlierRun
from chaosrun.preflight.model import Answers, Check, Finding, Level, Measure, Rows, Setting, Status, ask
from chaosrun.preflight.probes.storage import KilledSaves, ObjectFacts, Speed, StorageFacts
from chaosrun.preflight.probes.storage_place import Mount
from chaosrun.records.object_urls import is_url
from chaosrun.spec.model import JobSpec
from chaosrun.wording import duration, listed, size

_EFFORT = {
    Level.QUICK: {"kills": 8, "kills_s": 0.25, "speed_s": 0.25, "speed_bytes": 64 << 20},
    Level.STANDARD: {"kills": 60, "kills_s": 3.0, "speed_s": 1.5, "speed_bytes": 1 << 30},
    Level.DEEP: {"kills": 2000, "kills_s": 20.0, "speed_s": 10.0, "speed_bytes": 4 << 30},
}
LIMIT_S = {Level.QUICK: 45.0, Level.STANDARD: 90.0, Level.DEEP: 300.0}
"""Storage that takes as long for what takes seconds is taken for dead."""
DEEP_SHARE = 0.1
"""Of the time that a deep preflight may take, writers are killed for this share."""

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
UNSAFE_OPTIONS = frozenset({"nobarrier", "barrier=0", "volatile"})
"""Mount options with which fsync returns before the data is on the disk."""
QUICKEST_S = 10e-6
"""No disk syncs faster than this."""
WARN_SHARE, FAIL_SHARE = 0.25, 0.05
"""Shares of the peers' median speed: concurrent writes to one disk differ much, and a short measurement gives only a WARN."""
LARGEST_SHARE = 0.1
"""Of the time between two checkpoints: a larger share costs more than most failures would."""
SHORT_S = 1.0
"""A shorter save gets no WARN, however often the job saves: tests save all the time."""
SAMPLE_BYTES = 64 << 20
"""With less data, one wait of the disk would outweigh its speed."""
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
_LISTS = "name a store whose listings are consistent, as those of S3 and GCS are, or live with it"
_SYNC = "mount it so that fsync waits for the disk, and run without libraries that disable it"


def call(setting: Setting, node: Node) -> Call:
    effort, limit_s = _EFFORT[setting.level], LIMIT_S[setting.level]
    if setting.level is Level.DEEP:
        kills_s = DEEP_SHARE * setting.seconds if setting.seconds else effort["kills_s"]
        effort, limit_s = {**effort, "kills_s": kills_s, "kills": max(8, int(20 * kills_s))}, limit_s + kills_s
    objects = _url(setting)
    return ask("storage", limit_s, setting.env if objects else None, storage=str(setting.storage), objects=objects, **effort)


def _url(setting: Setting) -> str:
    """The URL of the job's object store; empty: none."""
    storage = (setting.job and setting.job.spec.checkpoint.storage) or ""
    return storage.rstrip("/") if is_url(storage) else ""


def judge(setting: Setting, nodes: Sequence[Node], told: Answers[StorageFacts]) -> Iterator[Finding]:
    path = str(setting.storage)
    # An unnamed storage is made where a run needs it.
    named = setting.job is not None and setting.job.spec.checkpoint.storage is not None and not _url(setting)
    there = [name for name, facts in told.answered.items() if named and facts.mount and facts.mount.base == path]
    for node in nodes:
        row = Rows(check="storage", node=node.name, device=path)
        if facts := told.answered.get(node.name):
            if facts.objects is not None:
                yield _objects(row.of(name="object store", device=_url(setting)), facts.objects)
            yield from _promises(row, setting, facts, listed(there, 1) if there and node.name not in there else "")
            if facts.mount is not None and facts.speed is not None:
                yield from _for_the_job(row, setting, facts.mount.free_bytes, facts.speed)
        elif hung := no_answer(row.of(name="answers"), told.unanswered[node.name]):
            yield hung


def _objects(row: Rows, objects: ObjectFacts) -> Finding:
    if objects.failed is not None:
        return row.fail(
            objects.failed.error, "objects put, read, listed, deleted, none put over another", objects.failed.remedy
        )
    measured = f"an object was put, read, listed, deleted and not overwritten in {duration(objects.took_s)}"
    if objects.late:
        why = "commits are looked up by their keys, so none is lost; what killed attempts left may stay there for longer"
        return row.warn("a listing did not show an object that was there", "listings of what is there", _LISTS, reason=why)
    return row.passed(measured)


def no_answer(row: Rows, silence: ProbeOutcome) -> Finding | None:
    """The finding on storage that blocked a probe; None if the answer is missing for another reason."""
    return row.fail(silence.error, "storage that answers", _HUNG) if silence.ended == "limit" else None


def _promises(row: Rows, setting: Setting, facts: StorageFacts, elsewhere: str) -> Iterator[Finding]:
    """`elsewhere`: the nodes that have the storage, if it is missing on this one. Results after an error are not judged."""
    if facts.mount is not None:
        yield _mount(row.of(name="file system"), facts.mount, elsewhere)
    if facts.saves is not None:
        yield _saves(row.of(name="saves"), facts.saves)
    if facts.mount is not None and facts.speed is not None:
        yield from _speed(row, facts.mount, facts.speed, setting.level)
    if facts.failed is not None:
        step = "file system" if facts.mount is None else "saves" if facts.saves is None else "write speed"
        yield row.fail(facts.failed.error, "no error", facts.failed.remedy, name=step)


def _mount(row: Rows, mount: Mount, elsewhere: str) -> Finding:
    measured = f"{mount.type} of {mount.source or '?'}"
    if mount.base != row.device:
        measured += f", at {mount.base}: the storage itself is not there yet"
    unsafe = ",".join(sorted(UNSAFE_OPTIONS & {*mount.options.split(",")}))
    if elsewhere:
        return row.fail(measured, f"there, as on {elsewhere}", "mount or make it on this node, or leave the node out")
    if mount.type in IN_MEMORY:
        return row.warn(measured, "a disk", _ELSEWHERE, reason="checkpoints there are gone when the node restarts")
    if mount.type == "overlay":
        why = "checkpoints there are gone with the container"
        return row.warn(measured, "what outlives the container", _ELSEWHERE, reason=why)
    if unsafe:
        measured, why = f"{measured}, mounted with {unsafe}", "what was synced may be lost in a power cut"
        return row.warn(measured, "a mount that waits for the disk", _ELSEWHERE, reason=why)
    return row.passed(measured)


def _saves(row: Rows, saves: KilledSaves) -> Finding:
    what = f"{saves.saves}, their writer killed {saves.kills}×"
    if not saves.wrong:
        return row.passed(f"{what}: nothing torn, nothing lost", reason=_POWER)
    more = f" (and {len(saves.wrong) - 1} more)" if len(saves.wrong) > 1 else ""
    return row.fail(f"{what}: {saves.wrong[0]}{more}", "whole files, all that had been reported as saved", _ATOMIC)


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
    took = f"{size(speed.bytes)} in {duration(speed.fsync_s)}"
    if speed.changed:
        measured = f"{size(speed.changed)} of {size(speed.read_bytes)} read back are not what was written"
        return row.fail(measured, "the same bytes", hint_of(errno.EIO) or "")
    if mount.type in IN_MEMORY:
        return row.skip("this file system lies in memory: there is no disk to wait for", measured=took)
    if speed.fsync_s < QUICKEST_S and "sync" not in mount.options.split(","):
        why = "nothing that stores data is that quick: something may answer in its stead"
        return row.warn(took, "the time that a disk takes", _SYNC, reason=why)
    return row.passed(took, reason="whether the device keeps it in a power cut cannot be seen from here")


# The needs of the job's checkpoints: time in each interval, and space. Known from an earlier run of the job.


def _for_the_job(row: Rows, setting: Setting, free_bytes: int, speed: Speed) -> Iterator[Finding]:
    last, free = setting.last_run, f"{size(free_bytes)} free"
    if setting.job is None or last is None or last.bytes is None:
        why = "no job was named"
        if setting.job is not None:
            why = f"no earlier run of {setting.job.spec.name} under {setting.root} has a checkpoint to know its size from"
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
    # The earlier run's time includes a save's work besides writing.
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
    call=call,
    facts=StorageFacts,
    judge=judge,
)
