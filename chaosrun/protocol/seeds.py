"""Whether the script itself has seeded torch, or restored its random stream. Imports nothing but torch: under a command it is
watched from the import of torch on, in processes that may never train."""

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
    """From now on, in this process; what was seen before, when a script seeds before it joins its group, counts too."""
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
    """A training begins, of which all counts that was seen so far, unless there was one before in this process."""
    watch()
    if _seen.begun:
        _seen.seeded = False
    _seen.begun = True


def seeded() -> bool:
    return _seen.seeded
