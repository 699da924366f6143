"""A forked child that does one thing, reports in JSON lines, and dies with this process."""

import os
from collections.abc import Callable
from typing import Any

import msgspec

from chaosrun.processes import die_with_parent
from chaosrun.records.filesystem import write_all

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
        act(lambda said: write_all(writing, msgspec.json.encode(said) + b"\n"))
        code = 0
    finally:
        os._exit(code)
