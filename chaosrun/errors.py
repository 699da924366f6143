"""Every error that chaosrun raises on purpose, in one tree.

    ChaosrunError
    ├── UsageError                    exit 2    wrong YAML, wrong flag, impossible plan, unknown run
    │   └── SpecError                           a place in a job file: file:line:col, the line, a caret
    ├── UserScriptError               exit 4    the training script failed outside a fault
    │   └── MisuseError                         the script calls chaosrun in an order that cannot be exact
    ├── RecoveryError                 exit 5    budget spent, no valid checkpoint, hang
    │   ├── InvalidCheckpointError              a checkpoint that its manifest does not vouch for
    │   └── RestoreMismatchError      exit 3    the restored state is not the saved state
    ├── ResourcesError                exit 7    no placement in time, storage full
    │   ├── NoClusterError                      no Ray to be joined at the address that was given
    │   └── UnreachableStoreError               an object store that gives no answer
    ├── RunTimeoutError               exit 124  `timeout` passed
    └── InterruptedRunError           exit 130  Ctrl-C, SIGTERM

Each carries a message (what happened, where) and a hint (what to do). Any other exception is a bug in chaosrun: exit 1.
"""

import builtins
import errno
import os

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a disk, or of a user's share of it, that is full."""
WRITES_REFUSED = (*DISK_FULL, errno.EROFS)
"""Those of a disk that takes no more: full, or read-only, as it becomes after an error."""
DISK_FAILS = (*WRITES_REFUSED, errno.EIO)
"""Those of a disk that takes no more, or is failing."""
LIMITS = {
    errno.EFBIG: "raise the limit on the size of files (`ulimit -f`)",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
    errno.ENFILE: "the machine has too many open files: end what holds them, or raise fs.file-max",
}
"""What to do about errors of a process that may do no more."""


class ChaosrunError(Exception):
    """Base of all; `exit_code` is what the command line ends with."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(ChaosrunError):
    exit_code = 2


class SpecError(UsageError):
    """A wrong place in a job file. `message` already holds the place, the source line and the caret."""


class UserScriptError(ChaosrunError):
    exit_code = 4


class MisuseError(UserScriptError):
    pass


class RecoveryError(ChaosrunError):
    exit_code = 5


class InvalidCheckpointError(RecoveryError):
    """A checkpoint directory that does not hold what its manifest promises."""


class UnsafeCheckpointError(InvalidCheckpointError):
    """A checkpoint that holds more than tensors and plain values."""


class LeftApartError(RecoveryError):
    """Ranks that were told to leave did not leave after the same step."""


class RestoreMismatchError(RecoveryError):
    """State digests after a restore differ from those taken at the save: the job did not come back exactly."""

    exit_code = 3


class RegisteredStateError(RestoreMismatchError):
    """The state that differs belongs to an object that the script registered."""


class ParameterOrderError(RestoreMismatchError):
    """The optimizers hold their parameters in another order than when the checkpoint was saved (hazard O5)."""


class HookedStateError(RestoreMismatchError):
    """The state differs, and the script has hooks that run on saving or loading."""


class OptimizerCastError(RestoreMismatchError):
    """The state that differs was cast by torch to the type of its parameter when it was loaded (hazard O3)."""


class ResourcesError(ChaosrunError):
    exit_code = 7


class NoClusterError(ResourcesError):
    """No Ray can be joined at the address that was given."""


class UnreachableStoreError(ResourcesError):
    """No answer came from an object store, after its library's own retries, which take long."""


class RunTimeoutError(ChaosrunError):
    exit_code = 124


class InterruptedRunError(ChaosrunError):
    exit_code = 130


def of_the_machine(error: BaseException) -> ResourcesError | None:
    """An error of the operating system that is no bug of chaosrun's: a full disk, or a limit; None for any other."""
    if not isinstance(error, OSError):
        return None
    if error.errno in LIMITS:
        named = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes | os.PathLike) else ""
        return ResourcesError(f"{named}{error.strerror}", hint=LIMITS[error.errno])
    if error.errno in DISK_FULL and isinstance(error.filename, str | bytes | os.PathLike):
        return ResourcesError(
            f"{os.fsdecode(error.filename)} cannot be written: {error.strerror}",
            hint="free some space; --root, or $CHAOSRUN_ROOT, names another place for runs",
        )
    return None


def name_of(error: ChaosrunError) -> str:
    """By which another process is told its type: its class, or the nearest above it that is defined here."""
    return next(of.__name__ for of in type(error).__mro__ if globals().get(of.__name__) is of)


def error_named(kind: str) -> type[ChaosrunError]:
    """The type of error that `name_of` named; of an unknown name, the base of all."""
    of = globals().get(kind)
    return of if isinstance(of, type) and issubclass(of, ChaosrunError) else ChaosrunError


def error_of(outcome: str) -> type[ChaosrunError]:
    """The type of error to raise for a leg that ended with this outcome instead of completing."""
    return {"user_error": UserScriptError, "resources": ResourcesError, "timeout": RunTimeoutError}.get(outcome, RecoveryError)


EACH_TIME = (
    *(SyntaxError, ImportError, NameError, AttributeError, TypeError, ValueError, LookupError, AssertionError),
    *(ArithmeticError, NotImplementedError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError),
)
"""Not among them: what a network, a device, a peer or a lack of memory raises (OSError, RuntimeError). A bare Exception,
which only code of someone's own raises, is one."""


def comes_each_time(name: str) -> bool:
    """Whether a built-in exception of this name is a mistake of the code, which would raise it again."""
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and (kind is Exception or issubclass(kind, EACH_TIME))
