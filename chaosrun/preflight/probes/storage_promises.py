"""What chaosrun relies on, one at a time: the sequence that makes a checkpoint, exclusive creation, the lock of a run."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chaosrun.preflight.model import Facts
from chaosrun.preflight.probes.forked import forked
from chaosrun.records.filesystem import Filesystem, Operation
from chaosrun.records.layout import checkpoint_name
from chaosrun.records.locks import is_locked, locked

CONTESTANTS = 4
START_S = 0.02
EACH_S = 0.001
FREE_AFTER_S = 1.0
LONGEST_JOB_NAME = "J" + "o-b_." * 12 + "name"[:3]
RUN_FOLDER = LONGEST_JOB_NAME + "-20991231-235959-99"
"""As long a name as a run has, of all the characters that there can be in one."""
MEMBER = "pytorch_model_fsdp_0/__0_0.distcp"


def make_checkpoint(folder: Path, goes_on: Callable[[], None]) -> Facts:
    """The whole sequence once, in the longest names that a run has: {wrong: what was not there afterwards, off_s: how far the
    files' times are from this node's clock, links: whether there are hard ones}.

    An operation that fails raises OSError with the path that it was done to; after each of the others `goes_on` is called.
    """
    disk = Filesystem()
    last: list[Operation] = []

    def listen(operation: Operation, moment: str) -> None:
        last.append(operation)
        if moment == "after":
            goes_on()

    disk.listeners.append(listen)
    try:
        return _make_checkpoint(disk, folder)
    except OSError as error:
        operation = last[-1] if last else None
        where = error.filename or (operation and str(operation.path)) or str(folder)
        doing = operation.kind if operation else "open"
        raise OSError(error.errno, f"{doing}: {error.strerror}", os.fsdecode(where)) from error


def _make_checkpoint(disk: Filesystem, folder: Path) -> Facts:
    wrong: list[str] = []

    def expect(what: str, sound: bool) -> None:
        if not sound:
            wrong.append(what)

    leg = folder / RUN_FOLDER / "reference"
    staging, checkpoints = leg / "staging", leg / "checkpoints"
    disk.make_directories_durably(checkpoints, above=2)
    staged, committed = staging / f"{checkpoint_name(50)}.attempt-1", checkpoints / checkpoint_name(50)
    disk.make_directories(staged / Path(MEMBER).parent)
    descriptor = disk.open(staged / MEMBER)
    try:
        disk.write(staged / MEMBER, descriptor, b"first, ")
        disk.write(staged / MEMBER, descriptor, b"second")
        disk.sync(staged / MEMBER, descriptor)
    finally:
        os.close(descriptor)
    before_s = time.time()
    disk.sync_directory(staged / Path(MEMBER).parent)
    disk.sync_directory(staged)
    for data in (b"the first manifest", b"manifest"):
        disk.write_durably(staged / "MANIFEST.json", data)
        expect("a file that was renamed over another", (staged / "MANIFEST.json").read_bytes() == data)
    off_s = (staged / "MANIFEST.json").stat().st_mtime - (before_s + time.time()) / 2
    expect("nothing of a temporary file", sorted(os.listdir(staged)) == ["MANIFEST.json", MEMBER.partition("/")[0]])
    disk.rename(staged, committed)
    disk.sync_directory(checkpoints)
    disk.sync_directory(staging)
    expect("a directory that was renamed", os.listdir(checkpoints) == [committed.name] and not os.listdir(staging))
    expect("what had been written", (committed / MEMBER).read_bytes() == b"first, second")
    disk.truncate(committed / MEMBER, 5)
    expect("a file cut off", (committed / MEMBER).read_bytes() == b"first")
    links = True
    try:
        os.link(committed / MEMBER, checkpoints / "link")
        os.unlink(checkpoints / "link")
    except OSError:
        links = False
    disk.remove(committed)
    expect("an empty directory after a removal", not os.listdir(checkpoints))
    return {"wrong": wrong, "off_s": off_s, "links": links}


def race_for_names(folder: Path, names: int) -> Facts:
    """Processes of this node create the same names at the same moments: {names, processes, twice: by two of them, or once more
    afterwards, nobody}."""
    begin_s = time.monotonic() + START_S

    def compete(say: Callable[[Any], None]) -> None:
        won: list[int] = []
        for number in range(names):
            while time.monotonic() < begin_s + number * EACH_S:
                pass
            if created(folder / f"name-{number}"):
                won.append(number)
        say(won)

    wins = [number for answer in _gathered(compete) for number in answer]
    wins += [number for number in range(names) if number in wins and created(folder / f"name-{number}")]
    return {
        "names": names,
        "processes": CONTESTANTS,
        "twice": [number for number in range(names) if wins.count(number) > 1],
        "nobody": [number for number in range(names) if number not in wins],
    }


def created(path: Path) -> bool:
    """Make a file; False when it is there already."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
    except FileExistsError:
        return False
    return True


def _gathered(act: Callable[[Callable[[Any], None]], None]) -> Sequence[Any]:
    """What CONTESTANTS children told. Raises what ended one of them without a word."""

    def guarded(say: Callable[[Any], None]) -> None:
        try:
            act(say)
        except OSError as error:
            say({"errno": error.errno, "error": error.strerror, "path": os.fsdecode(error.filename or "")})

    children = [forked(guarded) for _ in range(CONTESTANTS)]
    answers: list[Any] = []
    for child, reading in children:
        with open(reading, "rb") as file:
            said = file.read()
        os.waitpid(child, 0)
        if not said:
            raise RuntimeError("a process that created files was killed")
        answers.append(json.loads(said))
    for answer in answers:
        if isinstance(answer, dict):
            raise OSError(answer["errno"], answer["error"], answer["path"])
    return answers


def try_lock(folder: Path) -> Facts:
    """A process holds the lock as a run's supervisor does, and is killed: {refused: whether another one saw it held, free_s:
    until it was free, None: not within FREE_AFTER_S}."""
    path = folder / "lock"

    def hold(say: Callable[[Any], None]) -> None:
        try:
            with locked(path, "taken"):
                say(None)
                signal.pause()
        except OSError as error:
            say({"errno": error.errno, "error": error.strerror})

    child, reading = forked(hold)
    with open(reading, "rb") as file:
        said = json.loads(file.readline())
        if said is not None:
            os.waitpid(child, 0)
            raise OSError(said["errno"], f"flock: {said['error']}", str(path))
        refused = is_locked(path)
        os.kill(child, signal.SIGKILL)
        killed_s = time.monotonic()
        os.waitpid(child, 0)
    while is_locked(path):
        if time.monotonic() - killed_s > FREE_AFTER_S:
            return {"refused": refused, "free_s": None}
        time.sleep(0.001)
    return {"refused": refused, "free_s": time.monotonic() - killed_s}
