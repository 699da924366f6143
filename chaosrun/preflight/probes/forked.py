"""A forked child that does one thing, reports in JSON lines, and dies with this process."""

import json
import os
from collections.abc import Callable
from typing import Any

import msgspec

from chaosrun.processes import die_with_parent

Say = Callable[[Any], None]


def forked(act: Callable[[Say], None]) -> tuple[int, int]:
    """(pid, descriptor to read from) of a child that does this and ends."""
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 1
    try:
        os.close(reading)
        die_with_parent(parent)
        act(lambda said: _write(writing, said))
        code = 0
    finally:
        os._exit(code)


def _write(writing: int, said: Any) -> None:
    rest = memoryview(json.dumps(msgspec.to_builtins(said)).encode() + b"\n")
    while rest:
        rest = rest[os.write(writing, rest) :]
