"""Connecting this process to a Ray: joining one that runs, or starting a private one that leaves nothing behind.

Knows Ray's settings, signal handlers, folder and cleanup process; nothing of workers or placement.
"""

import logging
import math
import os
import secrets
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ray
import ray._raylet
from ray._private import services, worker
from ray._private.node import Node

from chaosrun.cluster import joining
from chaosrun.cluster.cleanup import CleanupProcess, clean_up
from chaosrun.errors import ChaosrunError, ResourcesError, UsageError
from chaosrun.processes import set_variables, shared_memory_entries

_raylet: Any = ray._raylet
# Ray's minimum is 75 MiB; no training data goes through it.
OBJECT_STORE_BYTES = 80 << 20
# Ray's socket paths are <folder>/session_<date>_<pid>/sockets/<name>; a Unix socket's path has at most 107 bytes.
LONGEST_FOLDER = 40
UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's Node that start processes which a private Ray does not need."""
DEATHS = ("Raylet is terminated.", "A worker died or was killed", "The node with node id")
"""How Ray's messages about deaths begin, which chaosrun reports itself, planned ones, too; the first holds the end of a log."""
# One per driver process: Ray reads the token once and keeps it.
AUTH_TOKEN = secrets.token_hex(32)
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Keeps Ray from writing a token into the user's home directory, and others on this machine out of this Ray.
    "RAY_AUTH_TOKEN": AUTH_TOKEN,
    # Leaves CUDA_VISIBLE_DEVICES alone in processes that ask Ray for no GPU.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's workers, and so everything that the agents start, would run at niceness 15.
    "RAY_worker_niceness": "0",
    # Ray would start an idle worker for each processor, which no agent ever uses.
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    kind: Literal["private", "joined", "borrowed"]
    address: str | None
    """None for a private Ray."""
    mark: str
    """A unique text in the environment of every process below agents."""
    close: Callable[[], None] = lambda: None
    """Leave the Ray, and end it if it is private. One that this process had joined before is left connected."""


def connect(address: str | None, *, cpus: float) -> Connection:
    """Join the Ray at `address` or $RAY_ADDRESS, else start a private one here; an already initialised Ray is used unchanged.

    `cpus`: a private one counts at least this many CPUs, and never fewer than the machine has. Call it from the main thread:
    Ray's processes die with the thread that starts them. Raises ResourcesError if the address does not answer, or there is no
    room for Ray's files; UsageError for an address of Ray's client, and in a directory that was removed.
    """
    unique = uuid.uuid4().hex
    if ray.is_initialized():
        return Connection(kind="borrowed", address=ray.get_runtime_context().gcs_address, mark=f"chaosrun#{unique}")
    try:
        os.getcwd()
    except FileNotFoundError as error:
        # Ray's driver needs the current directory.
        raise UsageError("the current directory no longer exists", hint="change to one that exists") from error
    address = address or os.environ.get("RAY_ADDRESS") or None
    with ExitStack() as stack:
        stack.enter_context(_errors_off_stdout())
        if address is not None:
            _join(address)
            stack.callback(ray.shutdown)
            for tell in joining.on_joined:
                tell(ray.get_runtime_context().gcs_address)
            return Connection(kind="joined", address=address, mark=f"chaosrun#{unique}", close=stack.pop_all().close)
        folder, close = _start_private(max(cpu_count(), math.ceil(cpus)))
        stack.callback(close)
        return Connection(kind="private", address=None, mark=f"{folder}#{unique}", close=stack.pop_all().close)


def _start_private(cpus: int) -> tuple[Path, Callable[[], None]]:
    """Start a private Ray. Returns its folder, and a function that ends its processes and removes its folder, its files in
    /dev/shm and its settings."""
    if sys.flags.optimize > 1:
        hint = "unset PYTHONOPTIMIZE, or set it to 1, with which Ray starts"
        raise ResourcesError("Ray does not start under PYTHONOPTIMIZE=2, as its processes need their docstrings", hint=hint)
    shared_memory_before = shared_memory_entries()
    folder = _make_folder()
    with ExitStack() as stack:
        cleanup = CleanupProcess(folder, shared_memory_before)
        stack.callback(cleanup.goodbye)
        # RAY_AUTH_MODE is set by Ray itself.
        stack.callback(set_variables, {name: os.environ.get(name) for name in (*SETTINGS, "RAY_AUTH_MODE")})
        stack.callback(clean_up, folder, shared_memory_before)
        stack.callback(ray.shutdown)
        os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
        try:
            with _own_signal_handlers(), started_for_one_driver():
                ray.init(
                    address="local",
                    num_cpus=cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=str(folder),
                )
        except OSError as error:
            raise no_room_for_ray(folder.parent, error) from error
        except ChaosrunError:
            raise
        except Exception as error:  # Ray names no type of its own for what keeps it from starting
            hint = "is the machine overloaded, or short of memory, processes or open files? Try again when it is not"
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ResourcesError(f"Ray does not start here: {reason}", hint=hint) from error
        return folder, stack.pop_all().close


@contextmanager
def _errors_off_stdout() -> Iterator[None]:
    """Print on stderr the errors that Ray's driver prints on stdout, which no setting of Ray's prevents; drop those
    about a death."""
    printed: Any = getattr(worker, "print_to_stdstream", None)

    def told(data: Any, *about: Any, **more: Any) -> None:
        if not any(str(line).startswith(DEATHS) for line in data["lines"]):
            printed({**data, "is_err": True}, *about, **more)

    if printed is not None:
        worker.print_to_stdstream = told
    try:
        yield
    finally:
        if printed is not None:
            worker.print_to_stdstream = printed


def cpu_count() -> int:
    return os.cpu_count() or 1


def _join(address: str) -> None:
    """Join the Ray at an address. Raises NoClusterError if none answers there, or it does not accept this process."""
    if address.startswith("ray://"):
        raise UsageError(
            f"{address}: chaosrun does not go through Ray's client", hint="run on a node of the cluster with --address auto"
        )
    if joining.expect_joinable(address) is not None:
        # With an address, Ray uses a token only if this variable says so.
        os.environ["RAY_AUTH_MODE"] = "token"
        _raylet.Config.initialize("")
    try:
        with _own_signal_handlers():
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (OSError, RuntimeError, ValueError) as error:
        ray.shutdown()
        raise joining.no_cluster(address, str(error)) from error


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep the caller's SIGTERM handler, which ray.init replaces: a SIGTERM while Ray starts would end in sys.exit(15), or in
    an abort because Ray's processes are killed under the driver."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    install, ours = signal.signal, signal.getsignal(signal.SIGTERM)

    def install_others(number: int, handler: Any) -> Any:
        return ours if number == signal.SIGTERM else install(number, handler)

    signal.signal = install_others
    try:
        yield
    finally:
        signal.signal = install
        # Ray's C++ side may have installed its own handler below Python's.
        signal.signal(signal.SIGTERM, ours)


@contextmanager
def started_for_one_driver() -> Iterator[None]:
    """Start Ray without processes that a private one does not need: the autoscaler's monitor, the dashboard's server (of which
    include_dashboard=False leaves out only the pages), and the reader of logs. On two cores, these three Python processes take
    half of the time of Ray's start, and a second of its end. ray.init has no arguments for it; a version of Ray with other
    method names starts them. The raylet needs the agents of the dashboard and of runtime environments; each uses a
    two-thousandth of a processor.

    Ray's processes are not in the driver's process group: a signal to it (`timeout`, Slurm) would kill Ray under the driver.
    """
    methods = {name: vars(Node)[name] for name in UNUSED if name in vars(Node)}
    for name in methods:
        setattr(Node, name, lambda *_, **__: None)
    start = services.ConsolePopen
    services.ConsolePopen = partial(start, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = start
        for name, method in methods.items():
            setattr(Node, name, method)


def _make_folder() -> Path:
    """Make a folder for Ray's files. Raises ResourcesError."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="chaosrun-ray-"))
        if len(str(folder)) > LONGEST_FOLDER:
            folder.rmdir()
            folder = Path(tempfile.mkdtemp(prefix="chaosrun-ray-", dir="/tmp"))
    except OSError as error:
        raise no_room_for_ray(Path(os.environ.get("TMPDIR", "/tmp")), error) from error
    return folder


def no_room_for_ray(place: Path, error: OSError) -> ResourcesError:
    return ResourcesError(
        f"Ray cannot be started with its files below {place}: {error.strerror or error}",
        hint=f"make room there (`df {place}` shows what is left), or name another directory with TMPDIR",
    )
