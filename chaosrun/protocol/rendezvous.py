"""How the ranks of an attempt meet and part: the environment that torch reads, the store and the process group.

The port is chosen on the node of rank 0, by its fork server.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.nn.parallel import distributed

from chaosrun.observe.fingerprint import fingerprint
from chaosrun.protocol.context import WorkerContext
from chaosrun.protocol.preemption import unsignalled
from chaosrun.records.order import WorkerOrder

LEAVE_LIMIT_S = 30.0
"""How long a rank whose script is over waits for the others to come as far."""


def announce(order: WorkerOrder) -> None:
    """Set the environment that torch and accelerate read, as torchrun does. A single worker has a process group only if its
    script makes one; a script that saves its own checkpoints then runs as with `python train.py`."""
    variables: dict[str, object] = {
        "RANK": order.rank,
        "WORLD_SIZE": order.world_size,
        "LOCAL_WORLD_SIZE": order.local_world_size,
        "GROUP_RANK": order.node_rank,
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": order.master_port,
        # With this set, every rank is a client of the store that already listens.
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    if order.world_size > 1:
        variables["LOCAL_RANK"] = order.local_rank
    if order.by == "script":
        launched = {"TORCHELASTIC_RUN_ID": "chaosrun", "TORCHELASTIC_RESTART_COUNT": order.attempt - 1}
        variables = {**variables, **launched} if order.world_size > 1 else {}
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order.gpus))
    if not order.gpus:
        os.environ["ACCELERATE_USE_CPU"] = "true"


def name_parameters_in_errors() -> None:
    """Make DDP name parameters in its errors (DETAIL). Call before the process group is made; torch has read its environment
    already.

    DETAIL would also check every collective in a wrapper around the process group. That is left out: this attempt would then
    communicate differently from the others, and DDP over gloo crashes with it (torch 2.13, SIGSEGV in the constructor). DDP's
    messages and behaviour are the same without it.
    """
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch.distributed.set_debug_level_from_env()
    torch.distributed.distributed_c10d._create_process_group_wrapper = lambda wrapped_pg, *_, **__: wrapped_pg


def host_store(order: WorkerOrder, listen_fd: int | None) -> object:
    """The rendezvous store of this attempt, which the caller keeps alive. None on every rank but 0."""
    if listen_fd is None:
        return None
    with unsignalled():
        about = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listen_fd}
        return torch.distributed.TCPStore("127.0.0.1", order.master_port, None, **about)


def watch_rendezvous(context: WorkerContext) -> None:
    """Send a heartbeat when the script, or accelerate for it, makes the process group: from there on the rank waits for others.
    When it destroys the group, the callback of `before_group_ends` runs first.

    The group is kept alive as long as the process. A DDP model freed after `destroy_process_group()` would free it with the GIL
    held and wait for gloo's threads, which may need the GIL to free a gathered tensor: the rank would hang forever (torch
    2.13), most easily in an attempt with nothing left to train.
    """
    join = torch.distributed.init_process_group
    kept: list[object] = []

    @functools.wraps(join)
    def joining(*args: Any, **kwargs: Any) -> None:
        first = context.session is None and not (context.script and context.script.begun)
        if first:
            context.heart.beat("rendezvous", 0)
        join(*args, **kwargs)
        kept.append(torch.distributed.group.WORLD)
        if first:
            context.heart.beat("joined", 0)

    leave = torch.distributed.destroy_process_group

    @functools.wraps(leave)
    def leaving(group: Any = None) -> None:
        # An error in flight may be this rank's alone: the others would not come.
        if group in (None, torch.distributed.group.WORLD) and sys.exc_info()[0] is None:
            while _before_the_end:
                _before_the_end.pop()()
        leave(group)

    torch.distributed.init_process_group = joining
    torch.distributed.destroy_process_group = leaving


_before_the_end: list[Callable[[], None]] = []


def before_group_ends(action: Callable[[], None]) -> None:
    """Register a callback that needs all ranks, to run before the script destroys the process group, if it does."""
    _before_the_end.append(action)


def leave_process_group() -> None:
    """Wait for all ranks before this one closes its sockets (hazard P8)."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and all_ranks_arrive():
        # The training is complete and recorded: it does not matter if a peer is already gone.
        with contextlib.suppress(RuntimeError):
            torch.distributed.destroy_process_group()


def all_ranks_arrive() -> bool:
    """Whether all ranks reach this point within LEAVE_LIMIT_S. A rank that still waits for a message from this one, whose
    script is over, would wait forever; once this rank is gone, it sees a closed connection."""
    try:
        if torch.distributed.is_initialized() and (barrier := torch.distributed.barrier(async_op=True)) is not None:
            barrier.wait(timedelta(seconds=LEAVE_LIMIT_S))
    except RuntimeError:
        return False
    return True


def skip_equal_broadcasts() -> None:
    """Skip DDP's first broadcast of every model that it wraps from here on, where it would change nothing.

    DDP sends a wrapped model from rank 0 to all others at every restart; over gloo that takes many times as long as a copy.
    Ranks with the same seed hold the same bits already. So each rank digests its model; it is sent unless all digests agree.
    """
    distributed._sync_module_states = functools.partial(_sync, distributed._sync_module_states)  # pyright: ignore[reportPrivateImportUsage]


def _sync(send: Callable[..., None], *args: Any, **named: Any) -> None:
    """Replaces torch's `_sync_module_states`. A collective."""
    group = named.get("process_group")
    if args or group is None or torch.distributed.get_backend(group) != "gloo":
        send(*args, **named)
        return
    everybody: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everybody, _digest(named["module"]), group=group)
    if None in everybody or len(set(everybody)) > 1:
        send(**named)


def _digest(module: torch.nn.Module) -> str | None:
    """None for a model that is not wholly on the CPU, or that holds a tensor without comparable bits."""
    states = [*module.parameters(), *module.buffers()]
    if any(state.device.type != "cpu" for state in states):
        return None
    try:
        return fingerprint(states).value
    except TypeError:
        return None
