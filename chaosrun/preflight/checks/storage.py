"""The check "storage": does a node's storage keep what recovery depends on, is it fast enough, is there room? Pure."""

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaosrun.checkpoint.storage import hint_of
from chaosrun.cluster.guard import PREFIX
from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.checks.storage_saves import SAMPLE_BYTES, saves
from chaosrun.preflight.model import PROBES, Answers, Check, Facts, Finding, Level, Measure, Rows, Setting, Status
from chaosrun.wording import duration, listed, size

ROWS = Rows(check="storage")

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


def _call(setting: Setting, node: Node) -> Call:
    effort = _EFFORT[setting.level]
    if setting.level is Level.DEEP and setting.seconds:
        kills_s = DEEP_SHARE * setting.seconds
        effort = {**effort, "kills_s": kills_s, "kills": max(8, int(20 * kills_s))}
    limit_s = _LIMIT_S[setting.level] + (effort["kills_s"] if setting.level is Level.DEEP else 0.0)
    about = {"storage": str(setting.storage), "patience_s": _PATIENCE_S[setting.level], "limit_s": limit_s}
    return Call(probe=f"{PROBES}.storage", parameters={**about, **effort}, limit_s=limit_s + MARGIN_S)


IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
UNSAFE_OPTIONS = frozenset({"nobarrier", "barrier=0", "volatile"})
"""Under which a file system says that something is on the disk before the disk has said so."""
UNTOLD_OPTIONS = frozenset({"data=journal"})
"""Under which pages count as dirty though they are on the disk, in its journal."""
FASTEST_BYTES_S = 1e12
"""More than any memory, let alone a disk, takes."""
LARGEST_OFFSET_S = 5.0
WARN_SHARE, FAIL_SHARE = 0.25, 0.05
"""Of the peers' median speed: what several write to one disk differs by a lot, and of a short look only a WARN is made."""

_ROWS = {
    "place": ("file system",),
    "sequence": ("write, fsync, rename", "file times"),
    "exclusive": ("exclusive create",),
    "lock": ("lock",),
    "kills": ("killed writer",),
    "speed": ("write speed", "read speed", "fsync"),
}
_ELSEWHERE = "put checkpoints on a disk or on shared storage, with checkpoint.storage"
_ATOMIC = (
    "put checkpoints on storage whose renames are atomic and that keeps what it was told to sync; look at what lies between: "
    "a FUSE mount, a cache, a preloaded library"
)
_POWER = "a killed process leaves the kernel's cache as it is: what a power cut would leave cannot be seen from here"
_HUNG = "see whether its server and the network to it are up (`mount`, and `dmesg` on the node), then mount it again"
_SLOW = "see how busy its server, the network to it and the disk are"
_SYNC = "mount it so that fsync waits for the disk, and run without libraries that disable it"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    name: str
    path: str
    """Of the storage that is asked for."""
    default: bool
    """Whether it is below the root, where the locks of runs are too."""
    level: Level
    steps: Mapping[str, Any]
    missing: str = ""
    """That the storage is not there, though it is on other nodes: on which."""

    @property
    def base(self) -> str:
        """Where it was looked at."""
        return self.steps.get("place", {}).get("found", {}).get("base", self.path)

    def row(self, name: str, status: Status, measured: str = "", **fields: Any) -> Finding:
        return ROWS.row(status, measured, name=name, node=self.name, device=self.path, **fields)


def judge(setting: Setting, nodes: Sequence[Node], facts: Answers[Facts]) -> list[Finding]:
    answered: Mapping[str, Facts] = facts.answered
    there = _nodes_that_have_it(setting, answered)
    found: list[Finding] = []
    for node in nodes:
        if node.name not in answered:
            continue
        said = answered[node.name]
        found += _promises(setting, node, said, there)
        if all("found" in said["steps"].get(step, {}) for step in ("place", "speed")):
            found += saves(setting, node, said["steps"]["place"]["found"], said["steps"]["speed"]["found"])
    return found


def _nodes_that_have_it(setting: Setting, answered: Mapping[str, Facts]) -> list[str]:
    """Where the storage that a job names is there already. What nobody named is made where a run wants it."""
    if setting.job is None or setting.job.spec.checkpoint.storage is None:
        return []
    path = str(setting.storage)
    return [name for name, said in answered.items() if said["steps"].get("place", {}).get("found", {}).get("base") == path]


def _promises(setting: Setting, node: Node, said: Facts, there: Sequence[str]) -> Iterator[Finding]:
    here = _Node(
        name=node.name,
        path=str(setting.storage),
        default=setting.storage.is_relative_to(setting.root),
        level=setting.level,
        steps=said["steps"],
        missing="" if node.name in there else listed(there, 1),
    )
    for step, names in _ROWS.items():
        told = here.steps.get(step)
        if told is not None and "failed" in told:
            yield _failed(here, names[0], told["failed"])
        elif told is not None:
            yield from _JUDGES[step](here, told["found"])
        elif said["hung"] == step:
            measured = f"no answer within {duration(said['patience_s'])} ({names[0]})"
            yield here.row(names[0], Status.FAIL, measured, threshold="storage that answers", remedy=_HUNG)
        elif said["slow"] == step:
            measured = f"not done when {duration(said['limit_s'])} had passed, though it goes on ({names[0]})"
            yield here.row(names[0], Status.WARN, measured, threshold=f"at most {duration(said['limit_s'])}", remedy=_SLOW)
        else:
            why = "what comes before it failed"
            if said["hung"] or said["slow"]:
                why = "the storage does not answer" if said["hung"] else "the storage is too slow"
            yield from (here.row(name, Status.SKIP, reason=f"not tried: {why}") for name in names)


def failure(failed: Facts, base: str) -> str:
    """An error of the operating system and where; of a file of the probe's own folder, where that folder was."""
    path = (failed["path"] or base).partition(f"/{PREFIX}")[0]
    return f"{path}: {failed['error']}"


def _failed(here: _Node, name: str, failed: Facts) -> Finding:
    """A step that ended with an error of the operating system."""
    number = failed["errno"]
    status = Status.WARN if name == "lock" and not here.default else Status.FAIL
    known = "give this node the storage, or leave the node out" if number == errno.ENOENT else hint_of(number)
    remedy = known or "see what the node's kernel log says of it (dmesg), or put checkpoints elsewhere"
    return here.row(name, status, failure(failed, here.base), threshold="no error", remedy=remedy)


def _place(here: _Node, found: Facts) -> Iterator[Finding]:
    measured = f"{found['type']} of {found['source'] or '?'}"
    if found["base"] != here.path:
        measured += f", at {found['base']}: the storage itself is not there yet"
    options = set(found["options"].split(","))
    if here.missing:
        remedy = "mount or make it on this node, or leave the node out"
        yield here.row("file system", Status.FAIL, measured, threshold=f"there, as on {here.missing}", remedy=remedy)
        return
    if found["type"] in IN_MEMORY:
        why = "checkpoints there are gone when the node restarts"
        threshold = "a disk"
    elif found["type"] == "overlay":
        why = "checkpoints there are gone with the container"
        threshold = "what outlives the container"
    elif unsafe := sorted(options & UNSAFE_OPTIONS):
        why = "what was synced may be lost in a power cut"
        measured += f", mounted with {','.join(unsafe)}"
        threshold = "a mount that waits for the disk"
    else:
        yield here.row("file system", Status.PASS, measured)
        return
    yield here.row("file system", Status.WARN, measured, threshold=threshold, reason=why, remedy=_ELSEWHERE)


def _sequence(here: _Node, found: Facts) -> Iterator[Finding]:
    name = "write, fsync, rename"
    if found["wrong"]:
        measured = f"afterwards there was not: {', '.join(found['wrong'])}"
        yield here.row(name, Status.FAIL, measured, threshold="what was written, under its new name", remedy=_ATOMIC)
    else:
        links = "" if found["links"] else "; hard links are not supported, and not needed"
        yield here.row(name, Status.PASS, f"files and directories, synced{links}")
    off = f"{duration(abs(found['off_s']))} {'behind' if found['off_s'] < 0 else 'ahead of'} the node's clock"
    most = f"at most {duration(LARGEST_OFFSET_S)}, behind or ahead"
    if abs(found["off_s"]) > LARGEST_OFFSET_S:
        remedy = "set the clocks of the node and of the storage's server by NTP"
        yield here.row("file times", Status.WARN, off, threshold=most, remedy=remedy)
    else:
        yield here.row("file times", Status.PASS, off, threshold=most)


def _exclusive(here: _Node, found: Facts) -> Iterator[Finding]:
    name, what = "exclusive create", f"{found['names']} names, {found['processes']} processes"
    wrong = [f"{len(found[key])} {words}" for key, words in (("twice", "created twice"), ("nobody", "by nobody")) if found[key]]
    if wrong:
        remedy = "two runs could take one folder: use storage that honours O_EXCL"
        measured = f"of {what}: {', '.join(wrong)}"
        yield here.row(name, Status.FAIL, measured, threshold="each created by exactly one", remedy=remedy)
    else:
        yield here.row(name, Status.PASS, f"{what}: one each")


def _lock(here: _Node, found: Facts) -> Iterator[Finding]:
    if found["refused"] and found["free_s"] is not None:
        yield here.row("lock", Status.PASS, f"held, and free {duration(found['free_s'])} after its holder was killed")
        return
    yield here.row(
        "lock",
        Status.FAIL if here.default else Status.WARN,
        "still held after its holder was killed" if found["refused"] else "taken by two processes at once",
        threshold="held by one, and free when that one is dead",
        reason="" if here.default else "the locks of runs lie below the root, not here",
        remedy="keep runs (--root) on a file system with flock(2)",
    )


def _kills(here: _Node, found: Facts) -> Iterator[Finding]:
    name, what = "killed writer", f"killed {found['kills']}× in {found['saves']} saves"
    if found["wrong"]:
        more = found["wrong_count"] - 1
        measured = f"{what}: {found['wrong'][0]}" + (f" (and {more} more)" if more else "")
        threshold = "whole files, all that had been reported as saved"
        yield here.row(name, Status.FAIL, measured, threshold=threshold, remedy=_ATOMIC)
    else:
        yield here.row(name, Status.PASS, f"{what}: nothing torn, nothing lost", reason=_POWER)


def _speed(here: _Node, found: Facts) -> Iterator[Finding]:
    written = found["bytes"] / found["write_s"]
    yield here.row(
        "write speed",
        Status.PASS,
        f"{size(written)}/s, {size(found['bytes'])} synced; a small file {duration(found['small_s'])}",
        measure=_rate(here, written, found["bytes"]),
    )
    read = found["read_bytes"] / found["read_s"]
    where = "past the kernel's cache" if found["past_cache"] else "perhaps out of the kernel's cache"
    yield here.row("read speed", Status.PASS, f"{size(read)}/s, {where}", measure=_rate(here, read, found["read_bytes"]))
    yield _fsync(here, found)


def _rate(here: _Node, number: float, sample: int) -> Measure:
    long = here.level is not Level.QUICK and sample >= SAMPLE_BYTES
    return Measure(number=number, unit="B/s", better="higher", warn=WARN_SHARE, fail=FAIL_SHARE if long else None)


def _fsync(here: _Node, found: Facts) -> Finding:
    place = here.steps["place"]["found"]
    before, after = found["dirty_before"], found["dirty_after"]
    options = set(place["options"].split(","))
    took = f"{size(found['bytes'])} in {duration(found['fsync_s'])}"
    on_disk = "everything on the disk when fsync returns"
    if place["preload"]:
        measured = f"{', '.join(place['preload'])} is loaded, which makes it do nothing"
        return here.row("fsync", Status.FAIL, measured, threshold=on_disk, remedy="unset LD_PRELOAD where Ray is started")
    if found["changed"]:
        measured = f"{size(found['changed'])} of {size(found['read_bytes'])} read back are not what was written"
        return here.row("fsync", Status.FAIL, measured, threshold="the same bytes", remedy=hint_of(errno.EIO) or "")
    if place["type"] in IN_MEMORY:
        return here.row("fsync", Status.SKIP, took, reason="this file system lies in memory: there is no disk to wait for")
    if after and not options & UNTOLD_OPTIONS:
        measured = f"{after} of {before} pages are not written when it returns, after {duration(found['fsync_s'])}"
        return here.row("fsync", Status.FAIL, measured, threshold=on_disk, remedy=_SYNC)
    if found["fsync_s"] * FASTEST_BYTES_S < found["bytes"] and before != 0 and "sync" not in options:
        why = "nothing that stores data is that quick: something may answer in its stead"
        return here.row("fsync", Status.WARN, took, threshold="the time that a disk takes", reason=why, remedy=_SYNC)
    if not before or options & UNTOLD_OPTIONS:
        why = "the kernel does not tell here what it holds back" if before is None else "the kernel holds nothing back here"
        return here.row("fsync", Status.SKIP, took, reason=f"{why}: whether fsync keeps its word cannot be seen")
    why = "the kernel has handed all to the device; whether that keeps it in a power cut cannot be seen from here"
    return here.row("fsync", Status.PASS, f"{took}: {before} pages waiting before, none after", reason=why)


_JUDGES: Mapping[str, Callable[[_Node, Any], Iterator[Finding]]] = {
    "place": _place,
    "sequence": _sequence,
    "exclusive": _exclusive,
    "lock": _lock,
    "kills": _kills,
    "speed": _speed,
}


CHECK = Check(
    name="storage",
    about="storage keeps its promises, is fast enough and has room",
    order=50,
    level=Level.QUICK,
    call=_call,
    judge=judge,
)
