"""Loads files of a checkpoint as data, without running code from them, and refuses files that need it.

A pickle can name any function and have it called. So files are scanned before anything is loaded, and then loaded with
`weights_only`, which calls only what builds tensors and plain values; users may also declare classes of their own state
harmless (`checkpoint.classes`).
"""

import io
import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import torch

from chaosrun.errors import InvalidCheckpointError, MisuseError, UnsafeCheckpointError
from chaosrun.wording import listed

PICKLED = frozenset({".bin", ".pkl", ".pt", ".pth"})
NUMPY_VALUES: list[Any] = [
    numpy.ndarray,
    numpy.dtype,
    # What builds them again; its modules were renamed in numpy 2.
    numpy.float64().__reduce__()[0],
    numpy.zeros(1).__reduce__()[0],
    *(type(numpy.dtype(code)) for code in numpy.typecodes["All"]),
]
"""What numpy numbers and arrays in a state dict are pickled with: plain values, so that loading them runs no foreign code."""

_HINT = (
    "loading it could run code: nothing of it was loaded. If it is state of your own, return plain values from state_dict(), "
    "or name its classes in checkpoint.classes"
)


def plain_values(classes: Sequence[str]) -> AbstractContextManager[None]:
    """Treat numpy's values and the user's `classes` ("package.module.Class") as harmless inside the block."""
    return torch.serialization.safe_globals([*NUMPY_VALUES, *map(_class_of, classes)])


def refuse_code(directory: Path) -> None:
    """Raise InvalidCheckpointError naming the first file of `directory` that needs more than plain values.

    Call it within `plain_values`.
    """
    for path in sorted(directory.iterdir()):
        if path.suffix not in PICKLED:
            continue
        try:
            found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            # Not torch.save's format: loading it would unpickle it the legacy way.
            raise InvalidCheckpointError(f"{path}: not a file of tensors and plain values ({error})", hint=_HINT) from error
        if found:
            raise UnsafeCheckpointError(
                f"{path}: holds more than tensors and plain values: {listed(sorted(found))}", hint=_HINT
            )


def load_values(path: Path, *, map_location: Any) -> Any:
    """The tensors and plain values of a file. Raises InvalidCheckpointError when it holds anything else."""
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(f"{path}: holds more than tensors and plain values ({error})", hint=_HINT) from error


def unpicklable(payload: bytes) -> list[str]:
    """Names in the bytes of a `torch.save` file that `load_values` would refuse. Call it within `plain_values`."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(payload)))
    except pickle.UnpicklingError as error:
        return [str(error)]


def _class_of(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise MisuseError(f"checkpoint.classes: there is no {name} ({error})", hint="write package.module.Class") from error
    if not isinstance(found, type):
        raise MisuseError(f"checkpoint.classes: {name} is not a class", hint="functions are never called by a restore")
    return found
