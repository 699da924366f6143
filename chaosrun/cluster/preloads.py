"""Whether the modules that a job preloads are the same whenever they are imported.

All attempts of a drill share the one import of a preloaded module. One that draws from entropy, clock or process while it is
imported would come back alike only here: no drill could see what a restart makes of it. So the job's own modules are imported
again in child processes, and what they then hold is compared. Installed packages (torch, transformers) are taken as they are.

The global random streams are seeded before: what is drawn from them is the same in every drill.
"""

import datetime
import functools
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaosrun.cluster.standby import Target

IMPORTS = 4
"""Children: a value of one bit is the same in all of them once in eight times."""
IMPORTS_IF_SLOW = 2
SLOW_S = 1.0
PATIENCE_S = 300
LATER_S = 40_000_003.25
"""How far the clock of every other child is put forward: a date must differ, too."""
MOST_VALUES = 1 << 20
FRESH = "import sys; from chaosrun.cluster.preloads import tell_of_fresh; tell_of_fresh(sys.argv[1:])"


def import_all(usual: Sequence[str], own: Sequence[str], target: str) -> tuple[Target, str | None]:
    """Import what every drill preloads, the job's own preloads, and the target; and say what keeps them from being forked."""
    module, _, function = target.partition(":")
    for name in (*usual, module):
        importlib.import_module(name)
    differing = _import_and_compare(own)
    return getattr(sys.modules[module], function), _why_unsafe_to_fork() or _why_unfit_to_share(differing)


def _why_unsafe_to_fork() -> str | None:
    """After the imports; None when a fork loses nothing."""
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        names = sorted({Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in threads})
        return f"the preloaded modules started {len(threads) - 1} thread(s) ({', '.join(names)}); a fork would lose them"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "the preloaded modules initialised CUDA; a forked process could not use it"
    return None


def _why_unfit_to_share(differing: Sequence[str]) -> str | None:
    if not differing:
        return None
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return (
        f"recovery.preload: {differing[0]}{more} is another one after every import: it comes from entropy, clock or process. "
        "All attempts would share one import, and no drill would see what a restart makes of it. Leave the module out of "
        "recovery.preload, or derive the value from the job's seed after the import"
    )


def _import_and_compare(preload: Sequence[str]) -> list[str]:
    """Names of what the job's own modules hold that another import has otherwise."""
    before = frozenset(sys.modules)
    _seed()
    began = time.monotonic()
    for name in preload:
        importlib.import_module(name)
    took_s = time.monotonic() - began
    own = _own_since(before)
    if not own or _why_unsafe_to_fork():
        return []
    children = [_fork(own, before, number) for number in range(IMPORTS_IF_SLOW if took_s > SLOW_S else IMPORTS)]
    held = [json.loads(told) if (told := _read_all(child)) else None for child in children]
    if None in held:
        # Some modules cannot be imported twice by one process: they register operators, or types.
        held = [_in_fresh_process(preload) for _ in range(IMPORTS_IF_SLOW)]
    return sorted({name for other in held[1:] for name in _differing(held[0], other)})


def tell_of_fresh(preload: Sequence[str]) -> None:
    """In a process of its own: import, and print what is held."""
    from chaosrun.cluster.forkserver import PRELOAD

    for name in PRELOAD:
        importlib.import_module(name)
    before = frozenset(sys.modules)
    _seed()
    with open(os.devnull, "w") as nowhere:
        output, sys.stdout = sys.stdout, nowhere
        for name in preload:
            importlib.import_module(name)
        sys.stdout = output
    # Of installed modules nothing: two processes may hold other addresses and times in them.
    print(json.dumps(_held(_own_since(before), frozenset())))


def _seed() -> None:
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = [*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, str(Path(__file__).parents[1])]
    return tuple({os.path.join(os.path.realpath(path), "") for path in paths})


def _own_since(before: frozenset[str]) -> list[str]:
    return [name for name, module in list(sys.modules.items()) if name not in before and _is_own(module)]


def _is_own(module: object) -> bool:
    file = getattr(module, "__dict__", {}).get("__file__")  # asking a lazy module for it would import more
    return isinstance(file, str) and not os.path.realpath(file).startswith(_installed())


def _differing(first: Mapping[str, str] | None, other: Mapping[str, str] | None) -> set[str]:
    """What holds the values that differ."""
    if first is None or other is None:
        return set()
    return {path.partition("/")[0] for path in first.keys() | other.keys() if first.get(path) != other.get(path)}


def _fork(own: Sequence[str], before: frozenset[str], number: int) -> int:
    """A child that imports these modules once more and writes into the pipe, whose end this returns, what they hold."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return reading
    with suppress(BaseException):  # whatever a module raises: it tells nothing then
        signal.alarm(PATIENCE_S)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        # Other addresses, too: the children would make the same objects in the same places.
        ballast = [(object(), bytearray(64 + size % 509)) for size in range(50_021 * number)]
        if number % 2:
            _put_clock_forward()
        for name in own:
            del sys.modules[name]
        _seed()
        for name in own:
            importlib.import_module(name)
        told = json.dumps(_held(own, before)).encode()
        del ballast
        while told:
            told = told[os.write(writing, told) :]
    os._exit(0)


def _read_all(reading: int) -> bytes:
    """And reap a child: nobody else has any yet."""
    with open(reading, "rb") as file:
        told = file.read()
    os.wait()
    return told


def _in_fresh_process(preload: Sequence[str]) -> Mapping[str, str] | None:
    command = [sys.executable, "-c", FRESH, *preload]
    ended = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    return None if ended.returncode else json.loads(ended.stdout.splitlines()[-1])


def _put_clock_forward() -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + LATER_S
    time.time_ns = lambda: now_ns() + int(LATER_S * 1e9)
    later = datetime.timedelta(seconds=LATER_S)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Later":
            return super().now(tz) + later

        @classmethod
        def utcnow(cls) -> "Later":
            return cls.now()

        @classmethod
        def today(cls) -> "Later":
            return cls.now()

    class LaterDate(datetime.date):
        @classmethod
        def today(cls) -> "LaterDate":
            return super().today() + later

    datetime.datetime, datetime.date = Later, LaterDate  # pyright: ignore[reportAttributeAccessIssue]


# What a module holds


def _held(own: Sequence[str], before: frozenset[str]) -> dict[str, str]:
    """By name, everything in the job's own modules and plain values in the others and in the environment."""
    from chaosrun.observe.script_state import script_state

    roots: dict[str, Any] = {f"environment variable {name}": value for name, value in os.environ.items()}
    for name in own:
        roots |= {f"{name}.{key}": value for key, value in vars(sys.modules[name]).items() if key[:2] != "__"}
    for name in before & sys.modules.keys():
        values = list(getattr(sys.modules[name], "__dict__", {}).items())
        plain = [entry for entry in values if type(entry[1]) in (int, float, str, bytes) and entry[0][:2] != "__"]
        roots[f"a value that was put into {name}"] = str(zlib.crc32(repr(plain).encode()))
    return script_state(roots, most=MOST_VALUES, whole=True)
