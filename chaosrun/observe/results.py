"""Which files this process writes from some point on: what a script leaves when its training is complete.

Python tells of each file that it opens (`sys.addaudithook`); the native writers of tensors are wrapped. Others are not seen.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from chaosrun.observe.writers import wrap_imported

_NATIVE_WRITERS = (
    ("torch", "save"),
    ("safetensors.torch", "save_file"),
    ("safetensors.torch", "save_model"),
    ("safetensors.numpy", "save_file"),
    # As they have imported it.
    ("accelerate.utils.other", "safe_save_file"),
    ("transformers.modeling_utils", "safe_save_file"),
)
_WRITING = os.O_WRONLY | os.O_RDWR
_NO_FILES = ("/dev/", "/proc/", "/sys/")
MOST = 1000
"""So many paths are told: an export of more is compared as far as that."""


def watch_results(found: Callable[[str], None]) -> None:
    """To the end of the process: `found` hears of each absolute path once, before anything is written there."""
    pid, told = os.getpid(), set[str]()

    def tell(target: Any) -> None:
        if not isinstance(target, str | bytes | os.PathLike) or os.getpid() != pid or len(told) >= MOST:
            return
        path = os.path.abspath(os.fsdecode(target))
        if path not in told and not path.startswith(_NO_FILES):
            told.add(path)
            found(path)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
            tell(arguments[0])
        elif event == "os.rename":
            tell(arguments[1])

    wrap_imported(_NATIVE_WRITERS, tell)
    sys.addaudithook(hear)
