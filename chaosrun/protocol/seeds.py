"""Detects whether the script itself has seeded torch, or restored its random stream. Imports nothing but torch: under a command
it runs from the import of torch on, in processes that may never train."""

import functools
from collections.abc import Callable
from typing import Any

import torch

_NAMES = ("manual_seed", "set_rng_state")


class _Seen:
    def __init__(self) -> None:
        self.watched = False
        self.begun = False
        self.seeded = False


_seen = _Seen()


def watch() -> None:
    """Watch this process from now on; earlier observations (a script that seeds before it joins its group) still count."""
    if _seen.watched:
        return
    _seen.watched = True
    for name in _NAMES:
        inner = getattr(torch, name)

        @functools.wraps(inner)
        def seed(*args: Any, inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
            _seen.seeded = True
            return inner(*args, **kwargs)

        setattr(torch, name, seed)
        setattr(torch.random, name, seed)


def begin() -> None:
    """Note that a training begins; all earlier observations count for it, unless this process already had a training."""
    watch()
    if _seen.begun:
        _seen.seeded = False
    _seen.begun = True


def seeded() -> bool:
    return _seen.seeded
