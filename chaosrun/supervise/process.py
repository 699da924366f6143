"""A separate process that supervises a run for the process that started it: both ends of the pipes between them, the messages,
and its program, `python -m chaosrun.supervise.process`.

Its task says in which of two ways it is started. *Tied*: it takes the run's lock itself and reports when it has it; if its
starter ends in any way, the kernel closes the pipe to it and the drill is cancelled cleanly; detached, it goes on alone.
*Held*: its starter keeps the lock, receives every record, and may start another such process when a planned fault kills this
one; it dies with its starter. Each message is one line on the pipe to it or from it. The drill's progress is in the run's
files; a cancel is a SIGINT to this process, handled by `chaosrun.supervise.interrupts`.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from chaosrun.cluster import joining
from chaosrun.errors import ChaosrunError, InterruptedRunError, RecoveryError
from chaosrun.processes import die_with_parent, with_package
from chaosrun.records.events import EventRecord
from chaosrun.records.layout import RunLayout
from chaosrun.records.locks import open_own_file
from chaosrun.records.naming import run_argument
from chaosrun.records.supervision import ToldError
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.watchdog import Watchdog

if TYPE_CHECKING:
    from chaosrun.supervise.run import Listener
    from chaosrun.verify.verdict import Verdict

PROGRAM = "chaosrun.supervise.process"
IN_ORDER_S = 3.0
"""From the run's timeout on, for the processes of the drill to be ended in order."""
CANCELLED_S = 10.0
"""The same from a cancel on; it may come while Ray is starting, which should not be left half done."""


class SupervisorTask(msgspec.Struct, frozen=True, kw_only=True, tag="task", tag_field="say"):
    """The first message: which run to supervise."""

    run: str
    root: str
    address: str | None
    lock: int | None = None
    """For a held process: the inherited descriptor of the run's lock."""
    parent: int | None = None
    """Likewise: the pid of the process with which it dies."""
    deadline_s: float | None = None
    """Likewise: when the run's timeout expires, CLOCK_MONOTONIC."""


class CancelDrill(msgspec.Struct, frozen=True, tag="cancel", tag_field="say"):
    """End the drill cleanly; a second one ends it at once."""


class Detach(msgspec.Struct, frozen=True, tag="detach", tag_field="say"):
    """Go on alone."""


class Supervising(msgspec.Struct, frozen=True, tag="supervising", tag_field="say"):
    """This process holds the run's lock, and the drill is under way."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True, tag="recorded", tag_field="say"):
    """A record of the drill; sent by a held process."""

    record: EventRecord


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag="joined", tag_field="say"):
    """An existing Ray was joined; sent by a held process."""

    head: str
    """The address of its head."""


class Detached(msgspec.Struct, frozen=True, tag="detached", tag_field="say"):
    """Confirms that it is detached and goes on alone."""


class SupervisorEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended", tag_field="say"):
    """The last message."""

    error: ToldError | None = None
    """None when the drill came to its end."""


Command = SupervisorTask | CancelDrill | Detach
Answer = Supervising | Recorded | Joined | Detached | SupervisorEnded
encode = msgspec.json.Encoder().encode
decode_command = msgspec.json.Decoder(Command).decode
decode_answer = msgspec.json.Decoder(Answer).decode


class SupervisorProcess:
    """This end of the pipes. Use as a context manager: at its end the process is detached, or gone."""

    is_waiting_for_places = False

    def __init__(self, task: SupervisorTask, *, program: str = PROGRAM, stderr: int | None = None) -> None:
        self.run = RunLayout(Path(task.run))
        limit_s = None if task.deadline_s is None else task.deadline_s + IN_ORDER_S
        self._held = task.lock is not None
        self._detached = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
            env=with_package(os.environ),
            # In a new session it gets no Ctrl-C or SIGHUP from the terminal; the signals of this process are passed on, once.
            start_new_session=True,
            pass_fds=() if task.lock is None else (task.lock,),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe = self._process.stdin
        self._answers: BinaryIO = os.fdopen(os.dup(self._process.stdout.fileno()), "rb")
        self._process.stdout.close()
        self.watchdog = Watchdog(self.pid, limit_s)
        """For a process that is held: kills it if it has to be killed, and says why."""
        self._say(task)

    @classmethod
    def tied(cls, run: RunLayout, address: str | None, *, program: str) -> "SupervisorProcess":
        """Start a process that is tied to this one and wait until it supervises the run. Raises the error that prevented
        that."""
        task = SupervisorTask(run=str(run.path.absolute()), root=str(run.path.parent.parent.absolute()), address=address)
        with os.fdopen(open_own_file(run.supervisor_log, os.O_WRONLY | os.O_APPEND), "ab") as log:
            process = cls(task, program=program, stderr=log.fileno())
        process.run = run
        try:
            first = process._hear()
            if isinstance(first, SupervisorEnded) and first.error is not None:
                raise first.error.again(run)
            if not isinstance(first, Supervising):
                log_hint = f"{run.supervisor_log} says why; `chaosrun resume {run_argument(run)}` begins again"
                raise RecoveryError(f"the process that was to supervise run {run.run_id} ended at once", hint=log_hint)
        except KeyboardInterrupt as error:
            process.__exit__()
            hint = f"`chaosrun resume {run_argument(run)}` continues the run"
            raise InterruptedRunError("interrupted", hint=hint) from error
        except BaseException:
            process.__exit__()
            raise
        return process

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """For `select`: becomes readable at the latest when the process has ended."""
        return self._answers.fileno()

    def wait(self) -> None:
        self._process.wait()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        code = self._process.returncode
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    def interrupt(self) -> None:
        """End the drill cleanly; does not wait. May be called from a signal handler."""
        self._say(CancelDrill())
        self.watchdog.limit_s = time.monotonic() + CANCELLED_S

    def detach(self) -> bool:
        """Let the drill go on without this process. False when it had already ended."""
        self._say(Detach())
        self._detached = isinstance(self._hear(), Detached)
        return self._detached

    def result(self) -> "tuple[Verdict, tuple[str, ...]]":
        """The verdict on the drill and the warnings, once the process has ended. Raises the error that ended it."""
        from chaosrun.supervise.remote import outcome

        self.wait()
        last = self._hear()
        if isinstance(last, SupervisorEnded) and last.error is not None:
            raise last.error.again(self.run)
        return outcome(self.run)

    def listen(self, listener: "Listener") -> SupervisorEnded | None:
        """Pass the records on until the process ends or is killed by the `watchdog`. Returns its last message, None when it
        sent none."""
        last: SupervisorEnded | None = None
        with self.watchdog:
            while (answer := self._hear()) is not None:
                match answer:
                    case Recorded():
                        listener(answer.record)
                    case Joined():
                        self.watchdog.joined(answer.head)
                    case SupervisorEnded():
                        last = answer
                    case _:
                        pass  # of a process that is tied
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
        with suppress(BrokenPipeError, ValueError):  # it has ended; nothing more is sent to it
            self._pipe.write(encode(command) + b"\n")

    def _hear(self) -> Answer | None:
        """None when it has nothing more to send, or was killed while it wrote."""
        line = self._answers.readline()
        return decode_answer(line) if line.endswith(b"\n") else None


Supervise = Callable[[RunLayout, str | None, "Listener"], int]
"""(run, address, listener for every record) → exit code."""


class SupervisorPipes:
    """The supervising process's ends of the pipes."""

    def __init__(self) -> None:
        # Moved away from stdin and stdout, so that no process started here uses the pipes.
        self.commands: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._telling = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._over = False
        self._interrupted = False

    def tell(self, answer: Answer) -> None:
        with suppress(BrokenPipeError):  # the follower is gone
            os.write(self._telling, encode(answer) + b"\n")

    def follow_commands(self) -> None:
        """Act on the messages, until detached or `ignore_commands`."""
        for line in self.commands:
            if isinstance(decode_command(line), Detach):
                self.tell(Detached())
                return
            self._interrupt()
        if not self._interrupted:
            self._interrupt()

    def ignore_commands(self) -> None:
        """The drill is over: nothing is interrupted from now on."""
        with self._lock:
            self._over = True

    def _interrupt(self) -> None:
        """The second time, does not wait for a cluster that is being started: see `Interrupts.postponed`."""
        with self._lock:
            if not self._over:
                self._interrupted = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def main(supervise: Supervise | None = None) -> int:
    """`supervise`: the work of a tied process; a held one always does the same."""
    # Replaces an inherited disposition. A handler, as the workers would inherit SIG_IGN.
    signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pipes = SupervisorPipes()
    first = pipes.commands.readline()
    if not first.endswith(b"\n"):
        return 130  # its starter was gone before it sent its task
    task = decode_command(first)
    assert isinstance(task, SupervisorTask)
    run = RunLayout(Path(task.run))
    try:
        if task.parent is not None:
            die_with_parent(task.parent)
        threading.Thread(target=pipes.follow_commands, name="chaosrun-pipes", daemon=True).start()
        exit_code = _held(run, task, pipes) if supervise is None else _tied(run, task, pipes, supervise)
    except BaseException as error:
        pipes.ignore_commands()
        if not isinstance(error, ChaosrunError | KeyboardInterrupt):
            traceback.print_exc()
        about = ToldError.of(error, run)
        if task.lock is None:
            print(f"error: {about.message}", file=sys.stderr)
        pipes.tell(SupervisorEnded(error=about))
        return about.exit_code
    pipes.ignore_commands()
    pipes.tell(SupervisorEnded())
    return exit_code


def _tied(run: RunLayout, task: SupervisorTask, pipes: SupervisorPipes, supervise: Supervise) -> int:
    def on_record(record: EventRecord) -> None:
        if record["event"] == "run.created":
            pipes.tell(Supervising())

    return supervise(run, task.address, on_record)


def _held(run: RunLayout, task: SupervisorTask, pipes: SupervisorPipes) -> int:
    from chaosrun.supervise.run import execute

    assert task.lock is not None
    # Held until this process ends; no process that it starts may hold it longer.
    os.set_inheritable(task.lock, False)
    joining.on_joined.append(lambda head: pipes.tell(Joined(head=head)))
    with Interrupts() as interrupts:
        execute(
            run,
            Path(task.root),
            task.address,
            lambda record: pipes.tell(Recorded(record=record)),
            interrupts,
            has_successor=True,
            deadline_s=task.deadline_s,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
