"""Wraps functions that open files in native code, bypassing Python's audit hooks, so that an observer is called for each."""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

WRITERS = (
    ("torch", "save", 1, "torch.save"),
    ("torch.jit", "save", 1, "torch.jit.save"),
    ("pickle", "dump", 1, "pickle"),
    ("safetensors.torch", "save_file", 1, "safetensors"),
    ("safetensors.torch", "save_model", 1, "safetensors"),
    ("safetensors.numpy", "save_file", 1, "safetensors"),
)
"""Module, function, position of the path among its arguments, and the writer's name in a record."""
NATIVE_WRITERS = (
    ("torch.serialization", "_open_zipfile_writer_file"),
    ("torch.jit", "save"),
    ("safetensors.torch", "serialize_file"),
    ("safetensors.numpy", "serialize_file"),
    ("safetensors", "serialize_file"),
)
"""What writes files in native code, by module and function: as deep as possible, as a script may have imported the functions
that call them by name before they are wrapped. The last is for modules that are imported later."""

Around = Callable[[Any, str, Any, Callable[[], Any]], Any]
"""Makes a call: (path, or a file without one, the writer's name, what is to be written, the call) → what the call returned."""


def path_of(target: Any) -> str | None:
    """The absolute path that a call was given; None for a descriptor, whose file was reported when it was opened."""
    return os.path.abspath(os.fsdecode(target)) if isinstance(target, str | bytes | os.PathLike) else None


def wrap_writers(around: Around) -> None:
    """Wrap those writers that are installed."""
    for module, name, place, how in WRITERS:
        with suppress(ImportError):
            _wrap(importlib.import_module(module), name, place, how, around)


def _wrap(module: Any, name: str, place: int, how: str, around: Around) -> None:
    writer = getattr(module, name)

    @functools.wraps(writer)
    def watched(*arguments: Any, **options: Any) -> Any:
        named = (options[name] for name in ("f", "file", "filename") if name in options)
        target = next(named, arguments[place] if len(arguments) > place else None)
        if not isinstance(target, os.PathLike):
            target = getattr(target, "name", target)  # of an open file
        given = next(iter(arguments), options.get("obj", options.get("tensors")))
        return around(target, how, given, lambda: writer(*arguments, **options))

    setattr(module, name, watched)


def wrap_imported(functions: Iterable[tuple[str, str]], tell: Callable[[Any], None]) -> None:
    """Wrap those functions, by module and name, whose modules are imported: `tell` is called with their path arguments, once
    however often this is called with it."""
    for module, name in functions:
        function = getattr(sys.modules.get(module), name, None)
        if function is not None and tell not in (told := getattr(function, "chaosrun_tells", ())):
            watched = _telling(function, tell)
            watched.chaosrun_tells = (*told, tell)
            setattr(sys.modules[module], name, watched)


def _telling(function: Callable[..., Any], tell: Callable[[Any], None]) -> Any:
    @functools.wraps(function, updated=())
    def watched(*arguments: Any, **options: Any) -> Any:
        for path in [*arguments, *options.values()]:
            if isinstance(path, str | os.PathLike):  # bytes are the data
                tell(path)
        return function(*arguments, **options)

    return watched
