"""Processes as the Linux kernel sees them: their identities and children, and how to be sure that they are gone; also, how a
process that is started finds this package.

Owns prctl, identities (a pid alone is not one: it is reused), killing of trees and of marked processes, and the entries
that killed processes leave in /dev/shm. Standard library only, so that processes that import it start quickly; knows
nothing of attempts, orders or Ray.
"""

import ctypes
import faulthandler
import functools
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds this chaosrun, so that processes it starts import the same one."""
MARK_VARIABLE = "CHAOSRUN_SESSION"
"""Environment variable with a mark, by which the processes that an agent starts are found again."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STACKS_SIGNAL = signal.SIGRTMIN + 11
"""A real-time signal, so that a script's SIGUSR1 and SIGUSR2 stay its own; glibc, NCCL and profilers use lower ones."""
SHARED_MEMORY = Path("/dev/shm")
# Written by torch's and Python's shared memory, Python's and loky's semaphores, NCCL.
SHARED_MEMORY_PREFIXES = ("torch_", "psm_", "sem.mp-", "sem.loky-", "loky-", "nccl-")

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies a process uniquely until the next boot: a pid can be reused, a pid with its start time cannot."""

    pid: int
    start_ticks: int


def answer_with_stacks(descriptor: int) -> None:
    """Have this process, and its children, write the stacks of all threads to `descriptor` at each STACKS_SIGNAL."""
    faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)


leave_at_once = os._exit
"""os._exit itself, whatever `before_os_exit` has put in its place."""


def before_os_exit(told: Callable[[int], None]) -> None:
    """Have `told` called with the exit code before this process, not a child of it, leaves by os._exit, which runs no exit
    handler."""
    pid = os.getpid()

    @functools.wraps(leave_at_once)
    def leaving(status: int) -> None:
        try:
            if os.getpid() == pid:
                told(status)
        finally:
            leave_at_once(status)

    os._exit = leaving  # pyright: ignore[reportAttributeAccessIssue]


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def become_subreaper() -> None:
    """Have orphaned descendants of this process become its children rather than init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to SIGKILL this process when the *thread* that forked it ends; exit now if that has happened already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def outlive_parent() -> None:
    """Undo `die_with_parent`."""
    _prctl(PR_SET_PDEATHSIG, 0)


THREADS_FIELD, START_FIELD, EXIT_STATUS_FIELD = 17, 19, 49
"""Indices of fields of /proc/PID/stat, counted from the third field on, as in `stat_fields`."""


def stat_fields(pid: int) -> list[bytes] | None:
    """Fields of /proc/<pid>/stat from the third (state) on; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return line[line.rindex(b")") + 2 :].split()


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of a live or zombie process, None when there is none of that pid."""
    fields = stat_fields(pid)
    return None if fields is None else ProcessIdentity(pid, int(fields[START_FIELD]))


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone."""
    identity = identify(pid)
    return identity and identity.start_ticks


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether this very process still runs. A zombie does not, as it holds nothing but its exit status, unless it has threads:
    one that waits in the kernel for a disk or a device outlives a SIGKILL, with all that the process has open."""
    fields = stat_fields(identity.pid)
    if fields is None or int(fields[START_FIELD]) != identity.start_ticks:
        return False
    return fields[0] not in (b"Z", b"X") or int(fields[THREADS_FIELD]) > 1


def is_dying(pid: int) -> bool:
    """Whether a process is dead, or about to end after a SIGKILL (which its exit status tells from Linux 6.7 on)."""
    fields = stat_fields(pid)
    return fields is None or fields[0] in (b"Z", b"X") or int(fields[EXIT_STATUS_FIELD]) == signal.SIGKILL


def state_of(identity: ProcessIdentity) -> str | None:
    """The letter of its state in /proc/PID/stat: R, S, D, T (stopped), Z, …; None when it is gone."""
    fields = stat_fields(identity.pid)
    return fields[0].decode() if fields is not None and int(fields[START_FIELD]) == identity.start_ticks else None


def cpu_and_state(pid: int) -> tuple[float, str | None]:
    """Processor seconds that a process has used, user and system, and the letter of its state; (0, None) when it is gone."""
    fields = stat_fields(pid)
    if fields is None:
        return 0.0, None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0].decode()


def where_stopped(pid: int) -> str | None:
    """What to do about a process that is stopped (Ctrl-Z, SIGSTOP); None for one that is not."""
    return f"its process is stopped: `kill -CONT {pid}` lets it go on" if cpu_and_state(pid)[1] == "T" else None


def catches(identity: ProcessIdentity, number: int) -> bool:
    """Whether this process has a handler for a signal."""
    try:
        lines = Path(f"/proc/{identity.pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    return identify(identity.pid) == identity and bool(caught >> (number - 1) & 1)


def send_signal(identity: ProcessIdentity, number: int) -> bool:
    """Signal this very process, never another that took over its pid. False when it is gone."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor holds the process that has the pid now: only then can its start time be trusted.
        if identify(identity.pid) != identity:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def pids() -> Iterator[int]:
    """The pids of all processes that this one can see."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def children(pid: int) -> list[int]:
    """Direct children of a process, zombies included."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(int(child) for child in file.read().split())
    except FileNotFoundError:
        # The process is gone, or the kernel was built without CONFIG_PROC_CHILDREN.
        found = [other for other in pids() if (fields := stat_fields(other)) is not None and int(fields[1]) == pid]
    return found


def child_called(name: str, pid: int) -> ProcessIdentity | None:
    """A direct child of a process, by the name of its program, of which the kernel keeps 15 characters."""
    for child in children(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if name[:15] in Path(f"/proc/{child}/comm").read_text():
                return identify(child)
    return None


def kill_all(find: Callable[[], Iterable[ProcessIdentity]], *, timeout_s: float) -> list[ProcessIdentity]:
    """SIGKILL what `find` finds, again and again, until it finds nothing alive; returns what outlived `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        alive = [identity for identity in find() if is_alive(identity)]
        if not alive or time.monotonic() >= deadline:
            return alive
        for identity in alive:
            send_signal(identity, signal.SIGKILL)
        wait_gone(alive, timeout_s=min(1.0, deadline - time.monotonic()))


def wait_gone(identities: Iterable[ProcessIdentity], *, timeout_s: float) -> list[ProcessIdentity]:
    """Wait, on pidfds, until these processes have ended; returns those that had not by `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left: list[ProcessIdentity] = []
    for identity in identities:
        try:
            descriptor = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            continue
        try:
            if is_alive(identity):
                poller = select.poll()
                poller.register(descriptor, select.POLLIN)
                poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
                if is_alive(identity):
                    left.append(identity)
        finally:
            os.close(descriptor)
    return left


def marked(mark: str, *, titles: tuple[bytes, ...] = ()) -> list[ProcessIdentity]:
    """Processes of this user, other than the caller, that have `mark` in their command line or environment.

    A process that rewrites its title may overwrite its environment in doing so (Ray's do): one whose command line starts with
    one of `titles` is also known by its open files.
    """
    needle = mark.encode()
    found: list[ProcessIdentity] = []
    for pid in pids():
        if pid == os.getpid():
            continue
        identity = identify(pid)
        # A process that ended meanwhile, or that belongs to somebody else, is not ours to kill.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if identity is not None and _mentions(pid, needle, titles):
                found.append(identity)
    return found


def _mentions(pid: int, needle: bytes, titles: tuple[bytes, ...]) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read()
    if needle in command:
        return True
    with open(f"/proc/{pid}/environ", "rb") as file:
        if needle in file.read():
            return True
    if not command.startswith(titles):
        return False
    folder = f"/proc/{pid}/fd"
    for descriptor in os.listdir(folder):
        with suppress(FileNotFoundError):
            if needle in os.readlink(f"{folder}/{descriptor}".encode()):
                return True
    return False


def kill_marked(mark: str, *, titles: tuple[bytes, ...] = (), timeout_s: float = 10.0) -> list[ProcessIdentity]:
    """SIGKILL every process that `marked` finds until there is none; returns what outlived `timeout_s`."""
    return kill_all(lambda: marked(mark, titles=titles), timeout_s=timeout_s)


def shared_memory_entries() -> frozenset[str]:
    """Names in /dev/shm that belong to this user and look like a training process's; taken before an attempt as a baseline."""
    try:
        entries = list(os.scandir(SHARED_MEMORY))
    except FileNotFoundError:
        return frozenset()
    found: set[str] = set()
    for entry in entries:
        with suppress(FileNotFoundError):
            if entry.name.startswith(SHARED_MEMORY_PREFIXES) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                found.add(entry.name)
    return frozenset(found)


def remove_shared_memory_leftovers(before: frozenset[str]) -> list[str]:
    """Unlink what came into /dev/shm since the baseline and what no process maps or holds open any more; returns the names."""
    removed: list[str] = []
    for name in unused_shared_memory(shared_memory_entries() - before):
        with suppress(FileNotFoundError):
            (SHARED_MEMORY / name).unlink()
            removed.append(name)
    return removed


def unused_shared_memory(names: Collection[str]) -> list[str]:
    """The entries of /dev/shm among `names`, sorted, that no process maps or holds open, as far as this user can see."""
    used = _shared_memory_in_use() if names else set[int]()
    unused: list[str] = []
    for name in sorted(names):
        with suppress(FileNotFoundError):
            if (SHARED_MEMORY / name).stat(follow_symlinks=False).st_ino not in used:
                unused.append(name)
    return unused


def _shared_memory_in_use() -> set[int]:
    """Inodes of /dev/shm in use. Not names: in maps, a semaphore keeps the temporary name under which glibc made it."""
    root = f"{SHARED_MEMORY}/".encode()
    used: set[int] = set()
    for pid in pids():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            with open(f"/proc/{pid}/maps", "rb") as file:
                # address, permissions, offset, device, inode, path
                used.update(int(line.split(maxsplit=5)[4]) for line in file if root in line)
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(FileNotFoundError):
                    link = f"/proc/{pid}/fd/{descriptor}".encode()
                    if os.readlink(link).startswith(root):
                        used.add(os.stat(link).st_ino)
    return used


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, as reported by the kernel."""
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with this package appended to PYTHONPATH. Not in front: site-packages, where an installed chaosrun lies
    among all other packages, must not hide the releases that a job puts first."""
    path = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), str(PACKAGE_ROOT))))
    return {**environment, "PYTHONPATH": path}


def set_variables(values: Mapping[str, str | None]) -> None:
    """Set variables of this process's environment; None removes one."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
