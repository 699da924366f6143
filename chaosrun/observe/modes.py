"""The modes of torch that a script has entered: they see each call of torch, chaosrun's own among them."""

import contextlib
from collections.abc import Iterator

from torch import _C
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Keep what is called here from the script's modes: a count of operations, torch.device(…), one that adds noise."""
    functions = [_C._pop_torch_function_stack() for _ in range(_C._len_torch_function_stack())]
    try:
        with _disable_current_modes() if _C._len_torch_dispatch_stack() else contextlib.nullcontext():
            yield
    finally:
        for mode in reversed(functions):
            _C._push_on_torch_function_stack(mode)
