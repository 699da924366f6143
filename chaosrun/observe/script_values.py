"""The plain values of a script (numbers, texts, lists of them, random generators) at the steps from which a restart may go on:
the variables of its running functions and of its modules, and what its objects keep. Changes nothing."""

import os
import sys
import time
import types
from collections.abc import Callable
from itertools import islice
from typing import Any

import xxhash

from chaosrun.observe.held import is_of_the_job, locals_of
from chaosrun.observe.script_state import PLAIN
from chaosrun.observe.unsaved_values import generator_of, plain_values
from chaosrun.observe.untrained import untrained
from chaosrun.wording import SECRET

MOST_LOOKS = 1000
"""In an attempt."""
MOST_VALUES = 400
"""Of functions, and of modules."""
NEWEST = 300
"""So many modules, those imported last, may be the job's: to look at all that a process was forked with has each page of memory
copied that holds one, while a restart waits."""
LONGEST = 24
"""Characters of a text that is told as it is."""
SLOW_S = 0.05
"""A script that takes longer to look through is not looked at again."""


class ScriptValues:
    """What is told of them. `known`: what is compared elsewhere: models, optimizers."""

    def __init__(self, known: Callable[[], list[Any]]) -> None:
        self._known = known
        self._told: dict[str, str] = {}
        self._looks = MOST_LOOKS

    def changed(self) -> dict[str, str]:
        """Those that are not what they were when this was last asked, by path; empty once it has been asked too often."""
        if self._looks == 0:
            return {}
        began_s, before = time.thread_time(), self._told
        try:
            compared = self._known()
            known = {id(each) for each in compared}
            functions, modules = _of_functions(), _of_modules()
            found = [plain_values(each, known, MOST_VALUES, numbers=True).items() for each in (modules, functions)]
            told = dict(_readable(name, text) for some in found for name, text in some)
            self._told = told | untrained({**functions, **modules}, compared)
        except Exception:  # an object of the script may raise anything, which must not reach the training
            self._looks = 1
        self._looks = 0 if time.thread_time() - began_s > SLOW_S else self._looks - 1
        return {name: text for name, text in self._told.items() if before.get(name) != text}


def _of_functions() -> dict[str, Any]:
    """The variables of the script itself and of its running functions, of equal names the innermost's."""
    found = _of_module("", sys.modules["__main__"])
    frames, frame = [], sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    for frame in reversed(frames):
        if is_of_the_job(frame.f_code.co_filename):
            found |= {_named(key, value): value for key, value in locals_of(frame).items() if _counts(key, value)}
    return found


def _named(key: str, value: object) -> str:
    """Of methods that call each other, each has a `self`, which is called after its class."""
    return f"{type(value).__name__}.self" if key == "self" else key


def _of_modules() -> dict[str, Any]:
    """The variables of modules that lie in the job's folder."""
    folders = tuple(os.path.join(os.path.abspath(folder), "") for folder in (os.curdir, *sys.path[:1]))
    found: dict[str, Any] = {}
    for name in [*islice(reversed(sys.modules), NEWEST)]:
        module = sys.modules.get(name)
        # Not by getattr: a module may import something when it is asked for what it has not.
        file = (module.__dict__.get("__file__") if isinstance(module, types.ModuleType) else None) or ""
        if module and name not in ("__main__", "__mp_main__") and file.startswith(folders) and is_of_the_job(file):
            found |= _of_module(f"{name}.", module)
    return found


def _of_module(prefix: str, module: types.ModuleType) -> dict[str, Any]:
    return {prefix + key: value for key, value in vars(module).items() if _counts(key, value)}


def _counts(name: str, value: object) -> bool:
    """Modules do not, nor functions that keep nothing that can change: there may be hundreds."""
    if name.startswith("__"):
        return False
    if type(value) is types.FunctionType:
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return bool(value.__closure__ or vars(value)) or not all(type(each) in PLAIN for each in defaults)
    return not issubclass(type(value), types.ModuleType)


def _readable(name: str, text: str) -> tuple[str, str]:
    """Texts of the script's may be private: of longer ones, and of what is called like a secret, a digest is told."""
    quoted = "'" in text or '"' in text
    if quoted and (len(text) > LONGEST or SECRET.search(name.upper())):
        text = f"text {xxhash.xxh3_64_hexdigest(text.encode(errors='replace'))}"
    generator = generator_of(name)
    return (f"{generator} (generator)", f"at {text}") if generator else (name, text)
