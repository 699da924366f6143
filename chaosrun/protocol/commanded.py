"""A process started by a drill's command: what is pinned in it, when it becomes a rank, and how its end is recorded.

The start-up hook calls `torch_imported`. Every process that imports torch is seeded as a rank is; it becomes a rank when it
begins to train: joins a process group, makes an optimizer or runs a model in training mode. It then gets the order of its rank
from the fork server above its launcher, and from there on is treated as `worker.main` treats a script. Until then chaosrun
imports next to nothing, so that launchers and loader workers are unaffected.
"""

import atexit
import functools
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from chaosrun.processes import answer_with_stacks
from chaosrun.protocol.determinism import pin_algorithms, pin_process, seeds
from chaosrun.records.announcements import VARIABLE, Announcement, Startup, decode_answer, decode_startup
from chaosrun.records.codec import encode
from chaosrun.records.order import WorkerOrder

if TYPE_CHECKING:
    from chaosrun.protocol.context import WorkerContext

ANSWER_LIMIT_S = 60.0
REFUSED_EXIT_CODE = 71
RAY_WORKER = "default_worker.py"
"""The program of Ray's workers, which Ray kills when they have done their work."""
FORCED_EXIT_CODE = 1
"""Of such a worker."""
GROUP_MODULES = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")
"""Where torch keeps `init_process_group` under a name of its own."""
_WORLD_SIZE, _RANK = 3, 4
"""Places of these among the arguments of `init_process_group`."""


def torch_imported() -> None:
    """Seed this process, and watch for it to begin to train. Called once, when torch has been imported."""
    startup = decode_startup(os.environ[VARIABLE])
    # A loader worker is seeded by its loader after this; other processes that multiprocessing spawns are seeded by nobody else.
    pin_process(seed=startup.seed, deterministic=startup.deterministic, threads=startup.threads)
    seeds.watch()
    _Waiting(startup)


class _Waiting:
    """Detects when a process begins to train."""

    def __init__(self, startup: Startup) -> None:
        self._startup = startup
        self._begun = False
        self._groups = [sys.modules[name] for name in GROUP_MODULES if name in sys.modules]
        self._join = join = torch.distributed.init_process_group
        self._make = make = torch.optim.Optimizer.__init__

        @functools.wraps(join)
        def joining(*args: Any, **kwargs: Any) -> Any:
            rank = kwargs.get("rank", args[_RANK] if len(args) > _RANK else -1)
            size = kwargs.get("world_size", args[_WORLD_SIZE] if len(args) > _WORLD_SIZE else -1)
            self._begin(_variable("RANK", 0) if rank < 0 else rank, _variable("WORLD_SIZE", 1) if size < 0 else size)
            return torch.distributed.init_process_group(*args, **kwargs)

        @functools.wraps(make)
        def making(*args: Any, **kwargs: Any) -> None:
            # With several workers, a process without a rank may get one later.
            if "RANK" in os.environ or startup.world_size == 1:
                self._begin(_variable("RANK", 0), _variable("WORLD_SIZE", 1))
                return torch.optim.Optimizer.__init__(*args, **kwargs)
            return make(*args, **kwargs)

        for module in self._groups:
            module.__dict__["init_process_group"] = joining
        torch.optim.Optimizer.__init__ = making
        self._forward = torch.nn.modules.module.register_module_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: torch.nn.Module, _inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._begin(_variable("RANK", 0), _variable("WORLD_SIZE", 1))

    def _begin(self, rank: int, world_size: int) -> None:
        if self._begun:
            return
        self._begun = True
        for module in self._groups:
            module.__dict__["init_process_group"] = self._join
        torch.optim.Optimizer.__init__ = self._make
        self._forward.remove()
        order = ask_for_order(self._startup, rank, world_size)
        become_rank(order)


def ask_for_order(startup: Startup, rank: int, world_size: int) -> WorkerOrder:
    """Announce this process as a rank. Ends the process if it must not be one."""
    announcement = Announcement(
        rank=rank,
        world_size=world_size,
        restarts=_variable("TORCHELASTIC_RESTART_COUNT", 0),
        ignores_sigterm=signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
    )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.settimeout(ANSWER_LIMIT_S)
            channel.connect(f"\0{startup.socket}")
            channel.sendall(encode(announcement) + b"\n")
            with channel.makefile("rb") as lines:
                answer = decode_answer(lines.readline())
    except (OSError, ValueError) as error:
        _leave(f"the attempt that started this process is over ({error})")
    if answer.order is None:
        _leave(f"this process may not train as rank {rank} of {world_size}: {answer.refused}")
    return answer.order


def _leave(why: str) -> NoReturn:
    print(f"chaosrun: {why}", file=sys.stderr, flush=True)
    os._exit(REFUSED_EXIT_CODE)


def _variable(name: str, otherwise: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise


def become_rank(order: WorkerOrder) -> None:
    """Make this process a rank: its output goes to its log, it is observed, and its end is recorded."""
    from chaosrun.protocol import worker
    from chaosrun.protocol.context import WorkerContext, enter

    context = WorkerContext(order)
    enter(context)
    output = os.open(context.leg.attempt(order.attempt).log(order.rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(output, descriptor)
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    os.set_inheritable(output, False)
    answer_with_stacks(output)
    context.heart.open(context.leg.attempt(order.attempt).heartbeat(order.rank))
    context.heart.beat("started", 0)
    # atexit calls it after the script's own exit handlers.
    atexit.register(_end, context, os.getpid())
    if multiprocessing.parent_process() is not None and "--multiprocessing-fork" not in sys.orig_argv:
        # A process that multiprocessing forked leaves by os._exit without exit handlers. Runs last of its finalizers.
        multiprocessing.util.Finalize(None, _end, (context, os.getpid()), exitpriority=-1000)
    if Path(sys.argv[0]).name == RAY_WORKER:
        _end_with_its_thread(context)
    pin_algorithms(order.deterministic)
    worker.begin(context)
    context.heart.beat("script", 0)


def _end(context: "WorkerContext", pid: int) -> None:
    """Record that the script has ended, normally or by an error. The fork server sees the exit code."""
    from chaosrun.protocol import worker

    if os.getpid() == pid:
        # Set by Python for an uncaught error other than sys.exit. multiprocessing is still handling its own.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or sys.exc_info()[1]
        worker.end(context, None if isinstance(error, SystemExit) else error)


def _end_with_its_thread(context: "WorkerContext") -> None:
    """For a worker of Ray Train, which trains in a thread and is killed after it: take that thread's end as the script's. Its
    launcher reports an error that ended it."""
    from chaosrun.protocol import rendezvous, worker

    forget = threading.Thread._delete  # pyright: ignore[reportAttributeAccessIssue]

    def forgetting(thread: threading.Thread) -> None:
        if context.script is not None and context.script.thread is thread and rendezvous.all_ranks_arrive():
            worker.end(context, None, exit_code=FORCED_EXIT_CODE)
        forget(thread)

    threading.Thread._delete = forgetting  # pyright: ignore[reportAttributeAccessIssue]
