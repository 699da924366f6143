"""supervisor.json: which process last supervised a run, and how that ended, also with an error that left no verdict.

If there is no end, and no process holds the run's lock, the supervisor was killed. Only the holder of the lock writes it.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from chaosrun.errors import ChaosrunError, InterruptedRunError, ResourcesError, UsageError, error_named, name_of, of_the_machine
from chaosrun.records.codec import Record, changed
from chaosrun.records.layout import RunLayout
from chaosrun.records.locks import is_locked
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import read_record, write_record

LOOK_EVERY_S = 0.1
RUN = "{run}"
"""Placeholder in a hint: replaced by the run's name, as it is found from where the hint is read."""


class ToldError(Record, frozen=True, kw_only=True, omit_defaults=False):
    """An error of chaosrun, recorded for another process."""

    kind: str
    """See `errors.name_of`."""
    message: str
    hint: str | None
    exit_code: int

    @classmethod
    def of(cls, error: BaseException, run: RunLayout) -> "ToldError":
        """An error of another type is a bug, or an interrupt, which has no message yet."""
        again = f"`chaosrun resume {run_argument(run)}` continues the run"
        if isinstance(error, KeyboardInterrupt):
            error = InterruptedRunError("interrupted", hint=again)
        if (machine := of_the_machine(error)) is not None:
            error = ResourcesError(machine.message, hint=f"{machine.hint}; then {again}")
        if not isinstance(error, ChaosrunError):
            error = ChaosrunError(
                f"this is a bug in chaosrun: {type(error).__name__}: {error}",
                hint=f"please report it; of a detached run the traceback is in {run.supervisor_log}",
            )
        hint = error.hint and error.hint.replace(run_argument(run), RUN)
        return cls(kind=name_of(error), message=error.message, hint=hint, exit_code=error.exit_code)

    def again(self, run: RunLayout) -> ChaosrunError:
        return error_named(self.kind)(self.message, hint=self.hint and self.hint.replace(RUN, run_argument(run)))


class Supervision(Record, frozen=True, kw_only=True, omit_defaults=False):
    v: Literal[1] = 1
    pid: int
    began_s: float
    ended_s: float | None
    """None while the supervisor runs, and if it was killed."""
    error: ToldError | None
    """The error that ended it; None if it came to a verdict."""
    warnings: tuple[str, ...]
    """Warnings in addition to the verdict, such as reports that could not be written."""


def read_supervision(run: RunLayout, *, judged: bool = False) -> Supervision | None:
    """Read supervisor.json; None for a run that was never supervised. Raises UsageError if it is damaged, unless the run is
    `judged`."""
    try:
        return read_record(run.supervisor_json, Supervision) if run.supervisor_json.exists() else None
    except UsageError:
        if judged:
            return None
        raise


def is_supervised(run: RunLayout) -> bool:
    """Whether some process holds the run's lock."""
    return is_locked(run.lock)


def looks(run: RunLayout, timeout_s: float | None) -> Iterator[Literal["over", "late"] | None]:
    """The moments at which to read a run's files again. The last one says "over" when the run is no longer supervised: all that
    was written can then be read; or "late" when `timeout_s` has passed."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        end = "over" if not is_supervised(run) else "late" if deadline is not None and time.monotonic() > deadline else None
        yield end
        if end:
            return
        time.sleep(LOOK_EVERY_S)


@contextmanager
def supervision(run: RunLayout) -> Iterator[list[str]]:
    """Record that this process supervises the run, and finally how that ended, with the warnings put into the list."""
    warnings: list[str] = []
    begun = Supervision(pid=os.getpid(), began_s=time.time(), ended_s=None, error=None, warnings=())
    write_record(run.supervisor_json, begun)

    def end(error: ToldError | None) -> None:
        # A full disk, which may be the very error: raising it matters more than recording it.
        with suppress(OSError):
            if run.path.exists():  # if its storage was unmounted, no folder is made at the empty mount point
                write_record(run.supervisor_json, changed(begun, ended_s=time.time(), error=error, warnings=tuple(warnings)))

    try:
        yield warnings
    except BaseException as error:
        end(ToldError.of(error, run))
        raise
    end(None)
