"""Skips DDP's first broadcast where it would change nothing.

DDP sends a wrapped model from rank 0 to all others at every restart; over gloo that takes many times as long as a copy. Ranks
with the same seed hold the same bits already. So each rank digests its model: if all digests agree nothing is sent, otherwise
the model is sent as usual.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import distributed

from chaosrun.observe.fingerprint import fingerprint


def spare_equal_models() -> None:
    """Install this for every model that DDP wraps from here on in this process."""
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
