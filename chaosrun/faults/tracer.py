"""The tracer: a process next to a rank that uses strace to follow the file operations of the script's save, and strikes between
two of them. `python -m chaosrun.faults.tracer ORDER` (a TraceOrder as JSON): prints "ready" once strace is attached, and ends
when its standard input does, or the rank.

strace stops the rank (SIGSTOP) in every call that could be an operation; the tracer counts it and continues the rank. So no
other operation is under way at the strike, and the record of the earlier ones is written before any harm is done.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import IO, Literal

import msgspec

from chaosrun.faults.observed import Disproof
from chaosrun.faults.strace import CALLS, WRITES, Reader, command
from chaosrun.processes import ProcessIdentity, send_signal
from chaosrun.records.codec import Record, encode
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import Note, write_note
from chaosrun.records.operations import FileOperation

ATTACH_LIMIT_S = 10.0
DEAD_WITHIN_S = 5.0
"""When to kill strace after the rank's SIGKILL: once it was seen to wait on, for a thread that was killed as it began."""
MOST_NAMED = 6
"""Files of a save that a message lists."""
Act = Literal["watch", "kill", "cut", "fail", "slow"]


class SaveNote(Note, frozen=True, kw_only=True):
    """The observation of a save before it was struck."""

    save: int = 0
    done: int = 0
    """Operations done before the strike; for a fault with a file, those on that file."""
    last: str | None = None
    struck_s: float | None = None
    failed: int = 0
    """Calls that were made to fail."""
    waits: int = 0
    """Syncs that were delayed."""


class TraceOrder(Record, frozen=True, kw_only=True):
    pid: int
    start_ticks: int
    outputs: tuple[str, ...]
    save: int
    operations: str
    """The file to which each operation is appended."""
    act: Act = "watch"
    leg: str = ""
    fault: str = ""
    before: int | None = None
    """Strike before the operation with this number; None: right after the first write (act fail: the first file created)."""
    file: str | None = None
    """Count only operations on files below the outputs that match this pattern."""
    error: str = ""
    wait_s: float = 0.0


class Tracer:
    def __init__(self, order: TraceOrder) -> None:
        self._order = order
        self._reader = Reader(order.outputs, order.save)
        self._file = os.open(order.operations, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._strace: subprocess.Popen[str] | None = None
        self._note = SaveNote(save=order.save, final=False)
        self._others: dict[str, None] = {}
        """Files of the save that the pattern does not match, as they were met."""
        self._writing: str | None = None
        """The file that was created or written last."""
        self._is_due = order.before == 1 and order.act == "kill"

    def run(self, told: Callable[[], None]) -> None:
        order = self._order
        stops = order.act in ("kill", "fail")
        more = [f"inject={CALLS}:signal=SIGSTOP"] if stops else []
        if order.act == "slow":
            more = [f"inject=fsync,fdatasync:delay_enter={round(order.wait_s * 1e6)}"]
        lines = self._attach(*(part for each in more for part in ("-e", each)))
        if self._is_due:
            self._kill()
        told()
        try:
            while lines is not None:
                lines = self._follow(lines)
        finally:
            _go_on(order.pid)  # after any error here, the rank must not stay stopped
        self._conclude()

    def _follow(self, lines: Iterator[str]) -> Iterator[str] | None:
        """Read strace's lines to their end. Returns the lines of the strace that replaced it, None if none did."""
        for line in lines:
            if (operation := self._reader.read(line)) is not None:
                os.write(self._file, encode(operation) + b"\n")
                self._count(operation)
            if (thread := self._reader.stopped) is None:
                continue
            if self._is_due and self._order.act == "kill":
                self._kill()
            elif self._is_due and self._writing is not None and not self._note.struck_s:
                return self._fail(thread, lines)
            else:
                _go_on(thread)
        return None

    def _count(self, operation: FileOperation) -> None:
        order, note = self._order, self._note
        if operation.failed is not None:
            self._note = msgspec.structs.replace(note, failed=note.failed + 1)
            self._write(self._note)
            return
        waits = note.waits + (order.act == "slow" and operation.kind == "sync")
        if order.file is not None and not self._concerns(operation):
            self._note = msgspec.structs.replace(note, waits=waits)
            if operation.kind in ("write", "rename"):
                self._others[self._relative(operation.target or operation.path)] = None
            return
        if operation.kind in ("create", "write"):
            self._writing = operation.path
        last = f"{operation.kind} {self._relative(operation.path)}"
        self._note = msgspec.structs.replace(note, waits=waits, done=note.done + 1, last=last)
        first = operation.kind == ("create" if order.act == "fail" else "write")
        self._is_due = self._is_due or (first if order.before is None else self._note.done >= order.before - 1)

    def _kill(self) -> None:
        if self._note.struck_s:
            return
        order = self._order
        self._note = msgspec.structs.replace(self._note, final=True, struck_s=time.time())
        self._write(self._note)
        send_signal(ProcessIdentity(order.pid, order.start_ticks), signal.SIGKILL)

    def _fail(self, thread: int, lines: Iterator[str]) -> Iterator[str]:
        """Make further writes to the current file fail. The rank stays stopped while strace is replaced."""
        assert self._strace is not None and self._writing is not None
        self._strace.terminate()
        for line in lines:
            self._reader.read(line)
        calls = ",".join((*WRITES, "fsync", "fdatasync") if self._order.error == "EIO" else WRITES)
        self._note = msgspec.structs.replace(self._note, struck_s=time.time())
        after = self._attach("-P", self._writing, "-e", f"inject={calls}:error={self._order.error}:signal=SIGSTOP")
        _go_on(thread)
        return after

    def _conclude(self) -> None:
        note, order = self._note, self._order
        if order.fault and not (order.act == "kill" and note.struck_s):
            missed = self._missed()
            told = {"problem": missed.words, "problem_code": missed.code} if missed else {}
            self._write(msgspec.structs.replace(note, final=True, **told))

    def _missed(self) -> Disproof | None:
        """Why the save was not struck; None when it was."""
        note, order = self._note, self._order
        struck = {"kill": note.struck_s, "fail": note.failed, "slow": note.waits}
        if order.act not in struck or struck[order.act]:
            return None
        if order.file is not None and not note.done:
            there = ", ".join([*self._others][:MOST_NAMED]) or "none"
            return Disproof("no_such_file", f"no file of the save of step {note.save} matches {order.file}; its files: {there}")
        if order.act == "slow":
            return Disproof("nothing_to_strike", f"nothing was synced in the save of step {note.save}")
        if order.act == "fail":
            return Disproof(
                "nothing_to_strike",
                f"nothing was written any more after {note.done} operations of the save of step {note.save}",
            )
        wanted = "its first write" if order.before is None else f"operation {order.before}"
        code = "nothing_to_strike" if order.before is None else "fewer_operations"
        return Disproof(code, f"the save of step {note.save} had {note.done} operations and never came to {wanted}")

    def _write(self, note: SaveNote) -> None:
        write_note(LegLayout(Path(self._order.leg)), self._order.fault, note)

    def _attach(self, *more: str) -> Iterator[str]:
        """Attach strace; returns its lines. Raises RuntimeError, with strace's message, when that fails."""
        reading, writing = os.pipe()
        line = command(self._order.pid, f"/dev/fd/{writing}", *more)
        strace = subprocess.Popen(line, pass_fds=[writing], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        os.close(writing)
        assert strace.stderr is not None
        ready, _, _ = select.select([strace.stderr], [], [], ATTACH_LIMIT_S)
        said = strace.stderr.readline() if ready else "it said nothing"
        if "attached" not in said:
            raise RuntimeError(f"strace could not attach: {said.strip()}")
        self._strace = strace
        return self._lines(open(reading, encoding="utf-8", errors="surrogateescape"))

    def _lines(self, pipe: IO[str]) -> Iterator[str]:
        """strace's output until it ends; it is terminated when the rank closes our standard input."""
        assert self._strace is not None
        strace, wanted = self._strace, True
        buffered = ""
        with pipe:
            while True:
                patience_s = DEAD_WITHIN_S if self._note.final else None
                ready, _, _ = select.select([pipe, sys.stdin] if wanted else [pipe], [], [], patience_s)
                if not ready:
                    strace.kill()
                    break
                if wanted and sys.stdin in ready:
                    wanted = False
                    if self._order.act == "cut":
                        self._kill()
                    strace.terminate()
                if pipe not in ready:
                    continue
                more = os.read(pipe.fileno(), 1 << 16)
                if not more:
                    break
                *whole, buffered = (buffered + more.decode("utf-8", "surrogateescape")).split("\n")
                yield from whole
        strace.wait()

    def _concerns(self, operation: FileOperation) -> bool:
        return any(
            fnmatchcase(self._relative(path), self._order.file or "*") for path in (operation.path, operation.target) if path
        )

    def _relative(self, path: str) -> str:
        inside = (os.path.relpath(path, output) for output in self._order.outputs if path.startswith(output + "/"))
        return next(inside, path)


def _go_on(thread: int) -> None:
    """Continue the whole process of this thread; it may be a child of the rank."""
    with suppress(ProcessLookupError):  # it was killed with its attempt
        os.kill(thread, signal.SIGCONT)


if __name__ == "__main__":
    Tracer(msgspec.json.decode(sys.argv[1], type=TraceOrder)).run(lambda: print("ready", flush=True))
