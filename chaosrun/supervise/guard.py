"""The process guard: a process of its own that supervises a run for this one, and what the two say to each other.

One program, `chaosrun.supervise.process`, in two ways, which its task tells. *Tied*: it takes the run's lock itself and tells
when it has it; should this process go, in whatever way, the drill is cancelled in order, for the kernel closes the pipe to it;
detached, it goes on alone. *Held*: the lock stays this process's, which hears every record, and may start another when a
planned fault kills that one; it dies with this process. Each message is one line on the pipe to it, or on the pipe from it.
What the drill does is in the run's files.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from chaosrun.errors import InterruptedRunError, RecoveryError
from chaosrun.processes import with_package
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.own_files import open_own_file
from chaosrun.records.supervision import raised_again

if TYPE_CHECKING:
    from chaosrun.verify.verdict import Verdict

PROGRAM = "chaosrun.supervise.process"


class Task(msgspec.Struct, frozen=True, kw_only=True, tag="task", tag_field="say"):
    """The first thing said: which run."""

    run: str
    root: str
    address: str | None
    lock: int | None = None
    """Of a process that is held: the inherited descriptor of the run's lock."""
    parent: int | None = None
    """Likewise, with whom it dies."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel", tag_field="say"):
    """End the drill in order; a second time at once."""


class Detach(msgspec.Struct, frozen=True, tag="detach", tag_field="say"):
    """Go on alone."""


class Supervising(msgspec.Struct, frozen=True, kw_only=True, tag="supervising", tag_field="say"):
    """The run's lock is held, and the drill goes on."""

    pid: int


class Recorded(msgspec.Struct, frozen=True, kw_only=True, tag="recorded", tag_field="say"):
    """A record of the drill, of a process that is held."""

    record: dict[str, Any]


class Detached(msgspec.Struct, frozen=True, tag="detached", tag_field="say"):
    """From now on nobody holds it."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended", tag_field="say"):
    """The last thing told."""

    error: dict[str, Any] | None = None
    """As `records.supervision.described` has it; None when the drill came to its end."""


Command = Task | Cancel | Detach
Answer = Supervising | Recorded | Detached | Ended
encode = msgspec.json.Encoder().encode
decode_command = msgspec.json.Decoder(Command).decode
decode_answer = msgspec.json.Decoder(Answer).decode


class SupervisorProcess:
    """This end of the pipes. Use as a context manager: at its end the process is detached, or gone."""

    is_waiting_for_places = False

    def __init__(self, task: Task, *, program: str = PROGRAM, stderr: int | None = None) -> None:
        self.run = RunLayout(Path(task.run))
        self._held = task.lock is not None
        self._detached = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            env=with_package(os.environ),
            # A terminal's Ctrl-C, or its closing, reaches no session of its own; what this process is told is passed on, once.
            start_new_session=True,
            pass_fds=() if task.lock is None else (task.lock,),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = self._process.stdin
        self._answers: BinaryIO = os.fdopen(os.dup(self._process.stdout.fileno()), "rb")
        self._process.stdout.close()
        self._say(task)

    @classmethod
    def tied(cls, run: RunLayout, address: str | None, *, program: str) -> "SupervisorProcess":
        """Start a process that is tied to this one and wait until it supervises the run. Raises what kept it from that."""
        task = Task(run=str(run.path.absolute()), root=str(run.path.parent.parent.absolute()), address=address)
        with os.fdopen(open_own_file(run.supervisor_log, os.O_WRONLY | os.O_APPEND), "ab") as log:
            process = cls(task, program=program, stderr=log.fileno())
        process.run = run
        try:
            first = process._hear()
            if isinstance(first, Ended) and first.error is not None:
                raise raised_again(first.error, run)
            if not isinstance(first, Supervising):
                log_hint = f"{run.supervisor_log} says why; `chaosrun resume {run_argument(run)}` begins again"
                raise RecoveryError(f"the process that was to supervise run {run.run_id} ended at once", hint=log_hint)
        except KeyboardInterrupt as error:
            process.__exit__()
            hint = f"`chaosrun resume {run_argument(run)}` goes on with the run"
            raise InterruptedRunError("interrupted", hint=hint) from error
        except BaseException:
            process.__exit__()
            raise
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Can be read from, at the latest, when the process has ended: for `select`."""
        return self._answers.fileno()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        self._process.wait()

    def how_it_ended(self) -> str:
        code = self._process.returncode
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    def cancel(self) -> None:
        """End the drill in order; does not wait. May be called from a signal handler."""
        self._say(Cancel())

    interrupt = cancel
    """As the supervisor of a leg is told by `supervise.interrupts`."""

    def detach(self) -> bool:
        """From here on the drill needs nobody. False when it had ended before."""
        self._say(Detach())
        self._detached = isinstance(self._hear(), Detached)
        return self._detached

    def result(self) -> "tuple[Verdict, tuple[str, ...]]":
        """The verdict on the drill and the warnings, once the process has ended. Raises what it ended with."""
        from chaosrun.supervise.remote import outcome

        self.wait()
        last = self._hear()
        if isinstance(last, Ended) and last.error is not None:
            raise raised_again(last.error, self.run)
        return outcome(self.run)

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> Ended | None:
        """Pass the records on until it ends; returns the last thing it told, None when it could not tell."""
        last: Ended | None = None
        while (answer := self._hear()) is not None:
            if isinstance(answer, Recorded):
                listener(answer.record)
            elif isinstance(answer, Ended):
                last = answer
        self.wait()
        return last

    def __enter__(self) -> "SupervisorProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        if self._held:
            self._process.kill()
        if not self._detached:
            self._process.wait()
        self._answers.close()

    def _say(self, command: Command) -> None:
        with suppress(BrokenPipeError, ValueError):  # it has ended; it is not spoken to any more
            self._pipe.write(encode(command) + b"\n")

    def _hear(self) -> Answer | None:
        """None when it has nothing more to tell, or was killed while it wrote."""
        line = self._answers.readline()
        return decode_answer(line) if line.endswith(b"\n") else None
