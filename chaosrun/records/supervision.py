"""supervisor.json: which process last supervised a run, and how that ended, also with an error that left no verdict behind.

Without an end, and with nobody holding the run's lock, it was killed. Written by the holder of the lock alone.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from chaosrun import errors
from chaosrun.errors import ChaosrunError, InterruptedRunError, UsageError
from chaosrun.records.codec import Record, changed
from chaosrun.records.layout import RunLayout
from chaosrun.records.locks import is_locked
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import read_record, write_record

RUN = "{run}"
"""In a hint: the run, named in the way that it is found from wherever the hint is read."""


class ToldError(Record, frozen=True, kw_only=True, omit_defaults=False):
    """An error of chaosrun's own, for another process."""

    kind: str
    message: str
    hint: str | None
    exit_code: int

    @classmethod
    def of(cls, error: BaseException, run: RunLayout) -> "ToldError":
        """What is none of ours is a bug, or an interrupt that has not been given its words yet."""
        if isinstance(error, KeyboardInterrupt):
            error = InterruptedRunError("interrupted", hint=f"`chaosrun resume {run_argument(run)}` goes on with the run")
        if not isinstance(error, ChaosrunError):
            error = ChaosrunError(
                f"this is a bug in chaosrun: {type(error).__name__}: {error}",
                hint=f"please report it; of a detached run the traceback is in {run.supervisor_log}",
            )
        hint = error.hint and error.hint.replace(run_argument(run), RUN)
        return cls(kind=type(error).__name__, message=error.message, hint=hint, exit_code=error.exit_code)

    def again(self, run: RunLayout) -> ChaosrunError:
        kind = getattr(errors, self.kind, None)
        of = kind if isinstance(kind, type) and issubclass(kind, ChaosrunError) else ChaosrunError
        return of(self.message, hint=self.hint and self.hint.replace(RUN, run_argument(run)))


class Supervision(Record, frozen=True, kw_only=True, omit_defaults=False):
    v: Literal[1] = 1
    pid: int
    began_s: float
    ended_s: float | None
    """None while it lasts, and for good when the process was killed."""
    error: ToldError | None
    """What it ended with; None when it came to a verdict."""
    warnings: tuple[str, ...]
    """What there is to say beside the verdict: reports that could not be written."""


def read_supervision(run: RunLayout, *, judged: bool = False) -> Supervision | None:
    """None for a run that nobody ever supervised. Raises UsageError when the file is damaged, but of a run that is `judged`."""
    try:
        return read_record(run.supervisor_json, Supervision) if run.supervisor_json.exists() else None
    except UsageError:
        if judged:
            return None
        raise


def is_supervised(run: RunLayout) -> bool:
    """Some process holds the run's lock."""
    return is_locked(run.lock)


@contextmanager
def supervision(run: RunLayout) -> Iterator[list[str]]:
    """Write down that this process supervises the run, and at the end how that ended, with the warnings put into the list."""
    warnings: list[str] = []
    begun = Supervision(pid=os.getpid(), began_s=time.time(), ended_s=None, error=None, warnings=())
    write_record(run.supervisor_json, begun)

    def end(error: ToldError | None) -> None:
        # A full disk, perhaps the very error: it is worth more than the record of it.
        with suppress(OSError):
            write_record(run.supervisor_json, changed(begun, ended_s=time.time(), error=error, warnings=tuple(warnings)))

    try:
        yield warnings
    except BaseException as error:
        end(ToldError.of(error, run))
        raise
    end(None)
