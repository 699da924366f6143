"""What a process does to files is seen operation by operation, it dies between the two that were named, and what a power cut
leaves is what was synced: with a real strace, attached to processes that save with torch (C++), safetensors (Rust), Python.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from chaosrun.errors import ResourcesError
from chaosrun.faults import tracer
from chaosrun.faults.power_cut import rebuild, take
from chaosrun.faults.strace import Reader, expect_strace
from chaosrun.faults.tracer import SaveNote, TraceOrder
from chaosrun.processes import identify
from chaosrun.records.codec import encode
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import read_note
from chaosrun.records.operations import FileOperation, read_operations

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed here")
STATE = {"weight": torch.arange(20_000.0)}
OLD, NEW = b"old" * 1000, b"new" * 1000


def save_as_people_do(folder: Path) -> None:
    """A folder made by Python, its files by C++ and by Rust, then a rename and a rotation."""
    (folder / "staged").mkdir()
    torch.save(STATE, folder / "staged" / "model.pt")
    save_file(STATE, folder / "staged" / "model.safetensors")
    os.replace(folder / "staged", folder / "step-2")
    shutil.rmtree(folder / "step-1", ignore_errors=True)


class Traced:
    """One save in a process of its own, beside a tracer."""

    def __init__(self, place: Path, save: Callable[[Path], None], **order: Any) -> None:
        self.folder, self.leg = place / "out", LegLayout(place / "leg")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.leg.notes.mkdir(parents=True, exist_ok=True)
        operations = place / "operations.jsonl"
        operations.unlink(missing_ok=True)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            self._save(save, operations, order)
        _, self.status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        self.operations = read_operations(operations)
        self.note = read_note(self.leg, "F1", SaveNote)

    def _save(self, save: Callable[[Path], None], operations: Path, order: dict[str, Any]) -> None:
        own = identify(os.getpid())
        assert own is not None
        where = {"outputs": (str(self.folder),), "operations": str(operations), "leg": str(self.leg.path), "fault": "F1"}
        told = TraceOrder(pid=own.pid, start_ticks=own.start_ticks, save=2, **where, **order)
        command = [sys.executable, "-m", "chaosrun.faults.tracer", encode(told).decode()]
        code = 1
        try:
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
                assert tracer.stdout is not None and tracer.stdout.readline() == b"ready\n"
                save(self.folder)
            code = 0
        finally:
            os._exit(code)

    @property
    def kinds(self) -> list[str]:
        return [each.kind for each in self.operations]

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}


@needs_strace
def test_every_operation_of_a_save_is_seen_whoever_makes_it(tmp_path: Path) -> None:
    seen = Traced(tmp_path, save_as_people_do)
    assert seen.status == 0
    assert seen.kinds[:2] == ["mkdir", "create"] and seen.kinds[-1] == "rename"
    assert [each.number for each in seen.operations] == list(range(1, len(seen.operations) + 1))
    written = sum(each.size for each in seen.operations if each.kind == "write" and "model.pt" in each.path)
    assert written == (seen.folder / "step-2" / "model.pt").stat().st_size
    # Rust writes under a name that is different each time.
    assert any(each.kind == "rename" and str(each.target).endswith("model.safetensors") for each in seen.operations)


@needs_strace
def test_it_dies_between_the_operations_named(tmp_path: Path) -> None:
    undisturbed = Traced(tmp_path, save_as_people_do).operations
    for before in (1, 4, len(undisturbed), len(undisturbed) + 1):
        struck = Traced(tmp_path / str(before), save_as_people_do, act="kill", before=before)
        assert os.WIFSIGNALED(struck.status) and os.WTERMSIG(struck.status) == signal.SIGKILL
        assert struck.note is not None and struck.note.done == before - 1 and struck.note.problem is None
        assert struck.kinds == [each.kind for each in undisturbed][: before - 1]
        # Nothing of what would have come next was done.
        assert ("step-2" in struck.files()) == (before == len(undisturbed) + 1)
    late = Traced(tmp_path / "4", lambda folder: None, act="kill", before=3)
    assert late.status == 0 and late.note is not None and "never came to operation 3" in str(late.note.problem)
    assert late.note.problem_code == "fewer_operations"
    nothing = Traced(tmp_path / "4", lambda folder: None, act="slow")
    assert nothing.note is not None and nothing.note.problem_code == "nothing_to_strike"
    assert "nothing was synced" in str(nothing.note.problem)
    elsewhere = Traced(tmp_path / "elsewhere", save_as_people_do, act="kill", file="*/sampler.bin")
    assert elsewhere.status == 0 and elsewhere.note is not None and elsewhere.note.problem_code == "no_such_file"
    assert "matches */sampler.bin; its files: staged/model.pt" in str(elsewhere.note.problem)


def in_the_background(folder: Path) -> None:
    """By a thread, and by a process that it waits for."""
    thread = threading.Thread(target=lambda: (folder / "by_thread").write_bytes(NEW))
    thread.start()
    thread.join()
    subprocess.run(["cp", folder / "by_thread", folder / "by_process"], check=True)


def test_strace_that_never_ends_is_ended_once_the_rank_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen of a rank that was killed while it began a thread: strace waits for that thread for ever."""
    monkeypatch.setattr(tracer, "DEAD_WITHIN_S", 0.05)
    (nothing, silent), (said, saying) = os.pipe(), os.pipe()
    order = TraceOrder(pid=0, start_ticks=0, outputs=(), save=1, operations=str(tmp_path / "operations"))
    tracing = tracer.Tracer(order)
    with open(nothing) as stdin, open(silent, "w"), open(said) as lines, open(saying, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        with subprocess.Popen(["sleep", "300"], text=True) as strace:
            tracing._strace, tracing._note = strace, SaveNote(final=True)
            assert list(tracing._lines(lines)) == []
            assert strace.wait(60) == -signal.SIGKILL


@needs_strace
def test_a_save_in_the_background_is_struck_like_any_other(tmp_path: Path) -> None:
    seen = Traced(tmp_path, in_the_background)
    assert seen.status == 0 and seen.files() == {"by_thread", "by_process"}
    assert len({each.process for each in seen.operations}) == 2
    for number, file in enumerate(("by_thread", "by_process")):
        struck = Traced(tmp_path / str(number), in_the_background, act="kill", before=2, file=file)
        assert os.WIFSIGNALED(struck.status) and struck.note is not None and struck.note.last == f"create {file}"
        assert (struck.folder / file).read_bytes() == b""


@needs_strace
def test_a_file_that_is_full_or_broken_fails_its_writes_and_no_others(tmp_path: Path) -> None:
    def save(folder: Path) -> None:
        (folder / "log.txt").write_bytes(b"saving")
        with open(folder / "model.bin", "wb", buffering=0) as file:
            try:
                file.write(NEW)
            except OSError as error:
                Path(tmp_path / "errno").write_text(str(error.errno))
        (folder / "after.txt").write_bytes(b"went on")

    failed = Traced(tmp_path, save, act="fail", file="model.bin", error="ENOSPC")
    assert failed.status == 0 and failed.note is not None and failed.note.failed == 1
    assert (tmp_path / "errno").read_text() == "28"
    assert (failed.folder / "log.txt").read_bytes() == b"saving" and (failed.folder / "after.txt").read_bytes() == b"went on"
    assert (failed.folder / "model.bin").read_bytes() == b""


@needs_strace
def test_a_slow_sync_is_slow(tmp_path: Path) -> None:
    def save(folder: Path) -> None:
        with open(folder / "model.bin", "wb") as file:
            began = time.monotonic()
            os.fsync(file.fileno())
        (tmp_path / "took").write_text(str(time.monotonic() - began))

    slow = Traced(tmp_path, save, act="slow", wait_s=0.2)
    assert float((tmp_path / "took").read_text()) >= 0.2 and slow.note is not None and slow.note.waits == 1


def carefully(folder: Path) -> None:
    """As a database would: no name before its bytes are there."""
    with open(folder / "new.tmp", "wb") as file:
        file.write(NEW)
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / "new.tmp", folder / "checkpoint")
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)


def without_syncing(folder: Path) -> None:
    (folder / "new.tmp").write_bytes(NEW)
    os.replace(folder / "new.tmp", folder / "checkpoint")


@needs_strace
@pytest.mark.parametrize(
    ("save", "unsynced", "left"),
    [
        (carefully, "lost", NEW),
        (carefully, "empty", NEW),
        (carefully, "torn", NEW),
        (without_syncing, "lost", OLD),
        (without_syncing, "empty", b""),
        (without_syncing, "torn", NEW[:1500] + bytes(1500)),
    ],
)
def test_a_power_cut_leaves_what_was_synced(tmp_path: Path, save: Callable[[Path], None], unsynced: str, left: bytes) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "checkpoint").write_bytes(OLD)
    (folder / "other").write_bytes(OLD)
    (folder / "latest").symlink_to("checkpoint")
    take([str(folder)], tmp_path / "before")
    taken_s = time.time()
    seen = Traced(tmp_path, save)
    assert (folder / "checkpoint").read_bytes() == NEW
    scratch = tmp_path / "scratch"
    changes = rebuild([str(folder)], tmp_path / "before", seen.operations, unsynced, taken_s=taken_s, scratch=scratch)
    assert (folder / "checkpoint").read_bytes() == left
    assert (folder / "other").read_bytes() == OLD and (folder / "latest").readlink() == Path("checkpoint")
    assert changes.torn == (() if left == NEW else (str(folder / "checkpoint"),))
    assert not changes.gone and not changes.back


def test_strace_says_what_it_saw() -> None:
    reader = Reader(("/out",), save=7)

    def read(line: str) -> FileOperation | None:
        return reader.read(f"17 1.5 {line}\n")

    assert read('openat(AT_FDCWD</work>, "/out/a", O_RDONLY|O_CLOEXEC) = 3</out/a>') is None
    assert read('openat(AT_FDCWD</work>, "/elsewhere/a", O_WRONLY|O_CREAT, 0666) = 3</elsewhere/a>') is None
    assert read('mkdir("/out/a", 0777) = -1 EEXIST (File exists)') is None
    assert read('openat(AT_FDCWD</out>, "b \\303\\244.pt", O_WRONLY|O_CREAT|O_TRUNC, 0666 <unfinished ...>') is None
    made = read("<... openat resumed>) = 4</out/b \\303\\244.pt>")
    assert made is not None and (made.kind, made.path, made.number) == ("create", "/out/b ä.pt", 1)
    failed = read('write(4</out/b>, ""..., 9) = -1 ENOSPC (No space left on device) (INJECTED)')
    assert failed is not None and (failed.failed, failed.number) == ("ENOSPC", 0)
    moved = read('renameat(5</out>, "b", AT_FDCWD</work>, "/out/c") = 0')
    assert moved is not None and (moved.path, moved.target, moved.number) == ("/out/b", "/out/c", 2)
    removed = read('unlinkat(5</out>, "d", AT_REMOVEDIR) = 0')
    assert removed is not None and (removed.kind, removed.path) == ("rmdir", "/out/d")
    linked = read('symlink("step-2", "/out/latest") = 0')
    assert linked is not None and (linked.kind, linked.path) == ("symlink", "/out/latest")


def test_strace_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourcesError, match="strace, which is not installed") as raised:
        expect_strace()
    assert raised.value.hint and "apt-get install strace" in raised.value.hint
    refused = tmp_path / "strace"
    refused.write_text("#!/bin/sh\necho 'strace: PTRACE_TRACEME: Operation not permitted' >&2\nexit 1\n")
    refused.chmod(0o755)
    with pytest.raises(ResourcesError, match="Operation not permitted"):
        expect_strace()


def test_a_trace_order_is_read_back() -> None:
    order = TraceOrder(pid=1, start_ticks=2, outputs=("/out",), save=3, operations="/o", file="*.pt")
    assert msgspec.json.decode(encode(order), type=TraceOrder) == order
