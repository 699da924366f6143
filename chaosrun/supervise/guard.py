"""A process of its own that supervises a run, tied to this one: should this one go, in whatever way, the drill is cancelled in
order. Once it is detached it goes on alone.

Holds this end: what is said to the process (`chaosrun.supervise.process`) and heard of it, one JSON line each. The tie is
the pipe to its standard input, which the kernel closes when nobody holds this end any more.
What the drill does is in the run's files.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from chaosrun.errors import InterruptedRunError, RecoveryError
from chaosrun.processes import with_package
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.own_files import open_own_file
from chaosrun.records.supervision import raised_again

if TYPE_CHECKING:
    from chaosrun.verify.verdict import Verdict


class SupervisorProcess:
    """Use as a context manager: at its end the process is detached, or gone."""

    def __init__(self, run: RunLayout, address: str | None) -> None:
        """Start the process and wait until it supervises the run: its lock is held then. Raises what kept it from that."""
        self.run = run
        self._detached = False
        with os.fdopen(open_own_file(run.supervisor_log, os.O_WRONLY | os.O_APPEND), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "chaosrun.supervise.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                env=with_package(os.environ),
                # No terminal's Ctrl-C, and no closing of it, reaches a session of its own.
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._pipe, self._told = self._process.stdin, os.fdopen(os.dup(self._process.stdout.fileno()), "rb")
        self._process.stdout.close()
        try:
            self._say(run=str(run.path.absolute()), address=address)
            told = self._hear()
            if "error" in told:
                raise raised_again(told["error"], self.run)
            if "supervises" not in told:
                log_hint = f"{run.supervisor_log} says why; `chaosrun resume {run_argument(run)}` begins again"
                raise RecoveryError(f"the process that was to supervise run {run.run_id} ended at once", hint=log_hint)
        except KeyboardInterrupt as error:
            self.__exit__()
            hint = f"`chaosrun resume {run_argument(run)}` goes on with the run"
            raise InterruptedRunError("interrupted", hint=hint) from error
        except BaseException:
            self.__exit__()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Can be read from, at the latest, when the process has ended: for `select`."""
        return self._told.fileno()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        self._process.wait()

    def cancel(self) -> None:
        """End the drill in order; does not wait. May be called from a signal handler."""
        self._say(say="cancel")

    def detach(self) -> bool:
        """From here on the drill needs nobody. False when it had ended before."""
        self._say(say="detach")
        self._detached = self._hear().get("detached", False)
        return self._detached

    def result(self) -> "tuple[Verdict, tuple[str, ...]]":
        """The verdict on the drill and the warnings, once the process has ended. Raises what it ended with."""
        from chaosrun.supervise.remote import outcome

        self.wait()
        if "error" in (told := self._hear()):
            raise raised_again(told["error"], self.run)
        return outcome(self.run)

    def __enter__(self) -> "SupervisorProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        if not self._detached:
            self._process.wait()
        self._told.close()

    def _say(self, **what: Any) -> None:
        with suppress(BrokenPipeError, ValueError):  # it has ended; it is not spoken to any more
            self._pipe.write(json.dumps(what).encode() + b"\n")

    def _hear(self) -> dict[str, Any]:
        line = self._told.readline()
        return json.loads(line) if line.endswith(b"\n") else {}
