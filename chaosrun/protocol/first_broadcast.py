"""Spares DDP its first broadcast where that would change nothing.

A model that is wrapped is sent from rank 0 to all others, at every restart: by gloo that takes many times as long as to copy
it. Ranks that are seeded alike hold the same bits already. So each digests its own, and where all digests are the same nothing
is sent; where one differs the model is sent as ever.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import distributed

from chaosrun.observe.fingerprint import fingerprint


def spare_equal_models() -> None:
    """For every model that DDP wraps from here on in this process."""
    distributed._sync_module_states = partial(_sync, distributed._sync_module_states)  # pyright: ignore[reportPrivateImportUsage]


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
