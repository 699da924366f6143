"""Checks that a job's preloaded modules have the same contents at every import.

All attempts of a drill share one import of a preloaded module. If the import depends on entropy, clock or process, attempts
agree only here, and no drill can show the effect of a real restart. So the job's own modules are imported again in child
processes, and their contents are compared. Installed packages (torch, transformers) are not checked.

The global random streams are seeded before, so draws from them are the same in every drill.

A module that starts a thread, or CUDA, cannot be shared at all, as a fork would lose it. The ranks import it themselves.
"""

import datetime
import functools
import hashlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import types
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from chaosrun.cluster.standby import Target
from chaosrun.records.events import NotPreloaded
from chaosrun.records.filesystem import write_all
from chaosrun.records.order import WorkerOrder

IMPORTS = 4
"""Number of children: a random bit is the same in all of them once in eight times."""
IMPORTS_IF_SLOW = 2
SLOW_S = 1.0
PATIENCE_S = 300
LATER_S = 40_000_003.25
"""How far the clock of every other child is put forward, so that dates differ, too."""
DEPTH = 8
BYTES = 1 << 20
"""Bytes of a large array that are looked at, in pieces spread over all of it."""
PACKAGES = {"site-packages", "dist-packages"}
"""Names of folders for installed packages."""
FRESH = "import sys; from chaosrun.cluster.preloads import print_fresh_contents; print_fresh_contents(sys.argv[1:])"


class Imported(NamedTuple):
    target: Target
    unsafe: tuple[NotPreloaded, ...]
    """Modules that have started something (a thread, CUDA) that a fork of this process would lose."""
    unfit: str | None
    """Why the job's own preloads must not be shared; None if they may."""


def import_all(usual: Sequence[str], own: Sequence[str], target: str, *, without: Container[str]) -> Imported:
    """Import what every drill preloads, the target, and the job's own preloads; all except the modules `without`, which ranks
    import themselves."""
    module, _, function = target.partition(":")
    imports = _Imports()
    imports.import_each(name for name in (*usual, module) if name not in without)
    differing = _import_and_compare([name for name in own if name not in without], imports)

    def run(order: WorkerOrder, listen_fd: int | None) -> int:
        return getattr(importlib.import_module(module), function)(order, listen_fd)

    return Imported(run, tuple(imports.unsafe), _why_not_shareable(differing))


class _Imports:
    """Imports modules one by one, and notes which of them are unsafe to fork."""

    def __init__(self) -> None:
        self.unsafe: list[NotPreloaded] = []
        self._threads = set(os.listdir("/proc/self/task"))
        self._has_cuda = False

    def import_each(self, names: Iterable[str]) -> None:
        for name in names:
            began_s = time.monotonic()
            importlib.import_module(name)
            threads = set(os.listdir("/proc/self/task")) - self._threads
            torch = sys.modules.get("torch")
            has_cuda = torch is not None and torch.cuda.is_initialized()
            if threads or has_cuda > self._has_cuda:
                took_s = time.monotonic() - began_s
                self.unsafe.append(NotPreloaded(module=name, threads=_names(threads), cuda=has_cuda, import_s=took_s))
            self._threads |= threads
            self._has_cuda = has_cuda


def _names(threads: Iterable[str]) -> tuple[str, ...]:
    """Names of threads: of Python's own by threading.Thread, of others by the kernel."""
    pythons = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    names: list[str] = []
    for thread in threads:
        with suppress(OSError):  # the thread has ended
            names.append(pythons.get(thread) or Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return tuple(sorted(names))


def _why_not_shareable(differing: Sequence[str]) -> str | None:
    if not differing:
        return None
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return (
        f"recovery.preload: {differing[0]}{more} differs after every import: it comes from entropy, clock or process. "
        "All attempts would share one import, and no drill would see what a restart does to it. Leave the module out of "
        "recovery.preload, or derive the value from the job's seed after the import"
    )


def _import_and_compare(preload: Sequence[str], imports: _Imports) -> list[str]:
    """Names of values in the job's own modules that differ after another import."""
    before = frozenset(sys.modules)
    _seed()
    began = time.monotonic()
    imports.import_each(preload)
    took_s = time.monotonic() - began
    own = _own_since(before)
    if not own or imports.unsafe:
        return []
    children = [_fork(own, before, number) for number in range(IMPORTS_IF_SLOW if took_s > SLOW_S else IMPORTS)]
    held = [json.loads(told) if (told := _read_all(child)) else None for child in children]
    if None in held:
        # Some modules cannot be imported twice by one process: they register operators, or types.
        held = [_in_fresh_process(preload) for _ in range(IMPORTS_IF_SLOW)]
    first, *others = held
    pairs = [(first, other) for other in others if first is not None and other is not None]
    return sorted({name for one, other in pairs for name in one.keys() | other.keys() if one.get(name) != other.get(name)})


def print_fresh_contents(preload: Sequence[str]) -> None:
    """Run in a separate process: import the modules, and print their contents."""
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
    # Nothing of installed modules: addresses and times in them may differ between processes.
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
    if not isinstance(file, str) or os.path.realpath(file).startswith(_installed()):
        return False
    # Those of other environments, which a .pth file or PYTHONPATH names, are installed as well.
    return PACKAGES.isdisjoint(Path(file).parts)


def _fork(own: Sequence[str], before: frozenset[str], number: int) -> int:
    """Fork a child that imports these modules again and writes their contents into a pipe; returns the pipe's reading end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return reading
    with suppress(BaseException):  # on any error of a module the child writes nothing
        signal.alarm(PATIENCE_S)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        # Change addresses as well: otherwise the children would make the same objects at the same addresses.
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
        write_all(writing, told)
    os._exit(0)


def _read_all(reading: int) -> bytes:
    """Read a child's pipe to its end, and reap the child: this process has no other children yet."""
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


def _held(own: Sequence[str], before: frozenset[str]) -> dict[str, str]:
    """A digest by name, of everything in the job's own modules and of plain values in the others and in the environment."""
    seen: dict[int, Any] = {}
    found = {f"environment variable {name}": _digest(value, seen) for name, value in os.environ.items()}
    for name in own:
        for attribute, value in vars(sys.modules[name]).items():
            if not (attribute.startswith("__") and attribute.endswith("__")):
                found[f"{name}.{attribute}"] = _digest(value, seen)
    for name in before & sys.modules.keys():
        values = list(getattr(sys.modules[name], "__dict__", {}).items())
        plain = [entry for entry in values if type(entry[1]) in (int, float, str, bytes) and entry[0][:2] != "__"]
        found[f"a value that was put into {name}"] = str(zlib.crc32(repr(plain).encode()))
    return found


def _digest(value: object, seen: dict[int, Any]) -> str:
    digest = hashlib.sha256()
    for part in _parts(value, DEPTH, seen):
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def _parts(value: Any, depth: int, seen: dict[int, Any]) -> Iterator[str | bytes]:
    """Texts and bytes that identify a value, independent of its address."""
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}"
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | datetime.date | datetime.timedelta):
        yield repr(value)
        return
    if depth == 0 or id(value) in seen or isinstance(value, types.ModuleType):
        return
    seen[id(value)] = value  # kept alive, so that nothing else gets its address
    for part in _inside(value):
        if isinstance(part, bytes):
            yield part
        else:
            yield from _parts(part, depth - 1, seen)


def _inside(value: Any) -> Iterator[Any]:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    match value:
        case dict() | types.MappingProxyType():
            for key, item in list(value.items()):
                yield key
                yield item
        case list() | tuple():
            yield from value
        case set() | frozenset():
            yield from sorted(value, key=repr)
        case types.FunctionType():
            yield from (value.__defaults__, value.__kwdefaults__, value.__dict__, value.__code__.co_code)
            yield [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        case types.MethodType():
            yield from (value.__func__, value.__self__)
        case type():
            yield dict(vars(value)) if _is_own(sys.modules.get(value.__module__)) else value.__qualname__
        case _ if torch and isinstance(value, torch.Tensor):
            yield from _array(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()) if value.numel() else ()
            yield list(value.shape)
        case _ if torch and isinstance(value, torch.Generator):
            yield bytes(value.get_state().numpy())
        case _ if numpy and isinstance(value, numpy.ndarray) and value.dtype != object:
            yield from _array(numpy.ascontiguousarray(value).reshape(-1).view(numpy.uint8)) if value.size else ()
            yield list(value.shape)
        case _:
            with suppress(Exception):  # any class of the script; one that holds a lock or a file has no value
                yield from (list(part) if isinstance(part, Iterator) else part for part in value.__reduce_ex__(4)[1:])


def _array(raw: Any) -> Iterator[bytes]:
    pieces = 16
    whole = len(raw) <= BYTES
    length = len(raw) if whole else BYTES // pieces
    for start in (0,) if whole else range(0, len(raw) - length, max(1, (len(raw) - length) // pieces)):
        yield bytes(raw[start : start + length])


def _is_filled(cell: types.CellType) -> bool:
    with suppress(ValueError):
        return cell.cell_contents is not cell
    return False
