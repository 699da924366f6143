"""The variables of a script: of its running functions, and of the modules in or below its folder."""

import os
import sys
import types
from collections.abc import Iterable
from typing import Any

from chaosrun.observe.held import is_of_the_job, locals_of

PLAIN = (bool, int, float, str, bytes, type(None))


def of_functions() -> dict[str, Any]:
    """The variables of the script itself and of its running functions; for equal names the innermost one."""
    found = _of_module("", sys.modules["__main__"])
    frames, frame = [], sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    for frame in reversed(frames):
        if is_of_the_job(frame.f_code.co_filename):
            found |= {_named(key, value): value for key, value in locals_of(frame).items() if _counts(key, value)}
    return found


def of_modules(names: Iterable[str]) -> dict[str, Any]:
    """The variables of these modules of the job, each called `module.variable`."""
    return {key: value for name in names for key, value in _of_module(f"{name}.", sys.modules[name]).items()}


def of_the_job(names: Iterable[str]) -> list[str]:
    """Those of these modules that are in the job's folder, without the script itself."""
    folders = tuple(os.path.join(os.path.abspath(folder), "") for folder in (os.curdir, *sys.path[:1]))
    found: dict[str, None] = {}
    for name in names:
        module = sys.modules.get(name)
        # Not by getattr: a module may import something when asked for a missing attribute.
        file = (module.__dict__.get("__file__") if isinstance(module, types.ModuleType) else None) or ""
        if name not in ("__main__", "__mp_main__") and file.startswith(folders) and is_of_the_job(file):
            found[name] = None
    return [*found]


def _named(key: str, value: object) -> str:
    """Name variables; each `self` of methods that call each other is named after its class."""
    return f"{type(value).__name__}.self" if key == "self" else key


def _of_module(prefix: str, module: types.ModuleType) -> dict[str, Any]:
    return {prefix + key: value for key, value in vars(module).items() if _counts(key, value)}


def _counts(name: str, value: object) -> bool:
    """Whether a variable counts: not modules, nor functions without mutable state, of which there may be hundreds."""
    if name.startswith("__"):
        return False
    if type(value) is types.FunctionType:
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return bool(value.__closure__ or vars(value)) or not all(type(each) in PLAIN for each in defaults)
    return not issubclass(type(value), types.ModuleType)
