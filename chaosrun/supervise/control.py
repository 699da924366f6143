"""The control socket of a live run: who may send commands to its supervisor, and how. Owns both ends of the protocol.

`<run>/control/`, mode 0700, holds `socket` and `token`, both 0600; it exists as long as the run is supervised. A client
connects, sends one command and gets one answer, each a line of JSON, and the connection is closed. Before reading anything, the
server asks the kernel which user is calling and serves only the run's own user. The token keeps out processes that run as that
user but cannot read the run's directory, such as a container that shares the socket.

The server runs in its own thread: it neither waits for the supervisor nor blocks it.
"""

import hmac
import os
import secrets
import select
import socket
import stat
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import msgspec

from chaosrun.checkpoint.storage_errors import place_of
from chaosrun.errors import ChaosrunError, ResourcesError, UsageError, error_named, name_of, of_the_machine
from chaosrun.processes import peer, where_stopped
from chaosrun.records.codec import encode
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.supervision import read_supervision

MESSAGE_LIMIT_BYTES = 64 * 1024
PATIENCE_S = 5.0
"""For one client, from its connection to its answer."""
BACKLOG = 16


class Said(msgspec.Struct, frozen=True, kw_only=True, tag_field="command"):
    token: str = ""


class Ping(Said, frozen=True, tag="ping"):
    """Ask for the run's id and the supervisor's pid."""


class Cancel(Said, frozen=True, tag="cancel"):
    """End the run cleanly, as a SIGINT would."""


class Inject(Said, frozen=True, kw_only=True, tag="inject"):
    """Strike a fault as soon as its ranks run."""

    kind: str
    rank: str
    """A number, "all" or "random"."""
    settings: tuple[str, ...] = ()
    """Each key=value."""
    seed: int | None = None


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    kind: str
    rank: int
    what: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    error: str | None = None
    """The command was refused, or failed."""
    kind: str | None = None
    """See `errors.name_of`; None for what is no command at all."""
    hint: str | None = None
    run: str | None = None
    pid: int | None = None
    """This and `run`: the answer to a ping."""
    faults: tuple[InjectedFault, ...] = ()
    seed: int | None = None
    """This and `faults`: the answer to an injection."""


Command = Ping | Cancel | Inject
Obey = Callable[[Command], Answer]
"""Does what a command says. Must not wait for the supervisor; raises UsageError for what cannot be done."""
decode_command = msgspec.json.Decoder(Command).decode
decode_answer = msgspec.json.Decoder(Answer).decode


class NobodyListensError(UsageError):
    """The command was not delivered: there is no supervisor, or it has not opened its socket yet."""


def control_directory(run: RunLayout) -> Path:
    return run.path / "control"


class ControlServer:
    """Answers on the run's socket until it is closed."""

    def __init__(self, run: RunLayout, obey: Obey) -> None:
        """Raises OSError where the file system does not support sockets."""
        self._run = run
        self._directory = control_directory(run)
        self._obey = obey
        self._token = secrets.token_hex(32)
        _clear(self._directory)
        self._directory.mkdir(mode=0o700)
        # Not by the mode of mkdir alone: a run's directory may have a default ACL.
        self._directory.chmod(0o700)
        descriptor = os.open(self._directory / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w") as file:
            file.write(self._token)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _short(self._directory) as directory:
                self._listener.bind(f"{directory}/socket")
            (self._directory / "socket").chmod(0o600)
            self._listener.listen(BACKLOG)
        except OSError:
            self._listener.close()
            _clear(self._directory)
            raise
        self._client: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="chaosrun-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting commands; the directory is removed when this returns, where its file system takes writes."""
        # This wakes the thread from `accept`, or from a client that is slow to send; closing alone would not.
        self._listener.shutdown(socket.SHUT_RDWR)
        client = self._client
        if client is not None:
            with suppress(OSError):  # it has been closed
                client.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with suppress(OSError):  # the next server removes it; why this one ends must not be lost
            _clear(self._directory)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._client = connection
            with connection, suppress(OSError):  # a client that has gone away has no use for an answer
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        if peer(connection)[1] != os.geteuid():
            return
        try:
            command = decode_command(_read_line(connection))
            if _has_left(connection):
                return  # it was told that nothing was done
            if not hmac.compare_digest(command.token.encode(errors="replace"), self._token.encode()):
                raise ValueError("wrong token")
            answer = self._done(command)
        except (ValueError, RecursionError) as error:
            answer = Answer(error=f"the supervisor refused: {error}")
        connection.sendall(encode(answer) + b"\n")

    def _done(self, command: Command) -> Answer:
        """Whatever it raises ends neither this thread nor the run, and is told to the client."""
        try:
            return self._obey(command)
        except ChaosrunError as error:
            told = error
        except OSError as error:
            message = f"{place_of(error, self._run.path)}: {error.strerror or error}"
            told = of_the_machine(error) or ResourcesError(message, hint="the run goes on: say it again once that is put right")
        except Exception as error:
            with suppress(OSError, ValueError):  # stderr is full, or closed
                traceback.print_exc()
            told = ChaosrunError(
                f"this is a bug in chaosrun: {type(error).__name__}: {error}",
                hint="please report it; the run goes on. Its supervisor has printed the traceback, where it is detached to "
                f"{self._run.supervisor_log}",
            )
        return Answer(error=told.message, kind=name_of(told), hint=told.hint)


@contextmanager
def serve(run: RunLayout, obey: Obey, *, on_failure: Callable[[str], None]) -> Iterator[None]:
    """Answer on the run's socket within this context. On a file system without sockets the run has none: calls `on_failure`."""
    with ExitStack() as stack:
        try:
            stack.enter_context(closing(ControlServer(run, obey)))
        except OSError as error:
            on_failure(f"no control socket in {control_directory(run)}: {error.strerror}")
        yield


def request(run: RunLayout, command: Command) -> Answer:
    """Send a command to the run's supervisor and return its answer.

    Raises NobodyListensError when there is no socket or nothing listens on it, UsageError when it belongs to another user or
    when the command is refused, and what the command failed with.
    """
    directory = control_directory(run)
    try:
        _insist_on_private(directory)
        token = _read_token(directory)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE_S)
            with _short(directory) as short:
                connection.connect(f"{short}/socket")
            if peer(connection)[1] != os.geteuid():
                raise UsageError(f"{directory}/socket is served by another user", hint="do not trust this run's directory")
            answer = _exchange(run, connection, msgspec.structs.replace(command, token=token))
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NobodyListensError(
            f"run {run.run_id} is not being supervised", hint=f"chaosrun status {run_argument(run)}"
        ) from error
    except BlockingIOError as error:
        seen = read_supervision(run, judged=True)
        stopped = where_stopped(seen.pid) if seen else None
        raise UsageError(
            f"the supervisor of run {run.run_id} cannot be reached: too many commands wait for it already",
            hint=f"{stopped}; then say it again" if stopped else f"chaosrun status {run_argument(run)}",
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"the supervisor of run {run.run_id} cannot be reached: {error}", hint=f"chaosrun status {run_argument(run)}"
        ) from error
    if answer.error is not None:
        raise error_named(answer.kind or "UsageError")(answer.error, hint=answer.hint)
    return answer


def _exchange(run: RunLayout, connection: socket.socket, command: Command) -> Answer:
    """Send a command and wait for its answer. Raises UsageError when none comes in time."""
    try:
        connection.sendall(encode(command) + b"\n")
        return decode_answer(_read_line(connection))
    except TimeoutError as error:
        pid = peer(connection)[0]  # 0: of another pid namespace
        stopped = where_stopped(pid) if pid else None
        first = f"{stopped}; then, " if stopped else ""
        kill = f"; if it hangs, `kill -9 {pid}` ends it, and the run can be resumed" if pid and not stopped else ""
        raise UsageError(
            f"the supervisor of run {run.run_id} has not answered within {PATIENCE_S:g} s: "
            "the command was taken back, unless it had begun",
            hint=f"{first}unless `chaosrun status {run_argument(run)}` shows that it was done, say it again{kill}",
        ) from error


def _has_left(connection: socket.socket) -> bool:
    """Whether the other end is closed; one that only has nothing more to say still waits."""
    waiting = select.poll()
    waiting.register(connection, 0)  # POLLHUP is always told
    return any(event & select.POLLHUP for _, event in waiting.poll(0))


def _read_line(connection: socket.socket) -> bytes:
    """Raises ValueError, OSError (a timeout is one)."""
    deadline = time.monotonic() + PATIENCE_S
    data = b""
    while not data.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(MESSAGE_LIMIT_BYTES)
        data += part
        if len(data) > MESSAGE_LIMIT_BYTES:
            raise ValueError(f"a message is longer than {MESSAGE_LIMIT_BYTES} bytes")
        if not part:
            raise ValueError("the message has no end")
    return data


def _insist_on_private(directory: Path) -> None:
    """Raises UsageError when another user could have written to `directory`."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UsageError(f"{directory} is not a directory of this user alone", hint="do not trust what lies in it")


def _read_token(directory: Path) -> str:
    descriptor = os.open(directory / "token", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor) as file:
        return file.read(MESSAGE_LIMIT_BYTES // 2)


@contextmanager
def _short(directory: Path) -> Iterator[str]:
    """A short path of a directory, however long its own: the address of a Unix socket holds 107 bytes."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _clear(directory: Path) -> None:
    """Remove the files of a former server, even a killed one. Links are not followed: files elsewhere are left alone."""
    if directory.is_symlink():
        directory.unlink()
    for name in ("socket", "token"):
        (directory / name).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        directory.rmdir()
