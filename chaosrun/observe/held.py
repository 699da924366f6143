"""All parts of a script's value by name, or an error if some cannot be read. `script_state` may leave parts out; this module
may not.

An object of a Python class holds its attributes and slots. For a type written in C, the garbage collector gives the parts that
are objects. If it may have others, `object.__reduce_ex__` is called, as `copy` and `pickle` do: it refuses rather than leave
anything out. Changes nothing.
"""

import abc
import contextlib
import dis
import enum
import functools
import gc
import importlib.util
import inspect
import itertools
import logging
import os
import re
import sys
import sysconfig
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import numpy
import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel

Held = Iterator[tuple[str, Any]]
PACKAGE = f"{Path(__file__).parent.parent}/"
INSTALLED = (*(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")), PACKAGE, "<frozen")
FOLDERS_OF_PACKAGES = ("/site-packages/", "/dist-packages/")
"""Also a user's own, those of the Python that a virtual environment is made from, and the system's."""
OWN_FILES = (PACKAGE, f"{Path(accelerate.__file__).parent}/")
OURS = ("chaosrun", "accelerate", "logging", "ray")
"""Packages whose objects are examined elsewhere, or change no training: only what a script adds to them counts."""
PICKLED = ("pandas",)
"""Packages whose own `__reduce__` leaves out caches alone, which pickle cannot read."""
OF_PANDAS = frozenset({"_cache", "_id", "_name", "_data", "_references", "_no_setting_name"})
"""Attributes of an index of pandas that are caches, or in what its `__reduce__` gives; a table names its own."""
OF_TEXT = (torch.device, torch.dtype, torch.layout, torch.memory_format, numpy.ufunc)
"""Types whose values are told apart by their text."""
LAZY: Any = vars(importlib.util)["_LazyModule"]
"""The type of a module that is loaded when it is asked for any attribute, also by `isinstance`."""
STATELESS = (
    *(types.CodeType, types.EllipsisType, types.NotImplementedType, type(threading.RLock()), type(vars(abc.ABC)["_abc_impl"])),
    *(torch.distributed.ProcessGroup, LAZY, object, *OF_TEXT),
)
"""Types that keep nothing beyond what `known_as` says; `object` itself, none of its subclasses."""
CODE = {types.FunctionType: "__code__", types.GeneratorType: "gi_code", types.CoroutineType: "cr_code"}
"""The attribute that holds the code, by type."""
NAMED = (
    *(type, types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
)
"""Types whose values are told apart by their name."""
OF_PYTHON = frozenset(
    [
        *vars(types.ModuleType("")),
        *vars(type("", (), {})),
        *(
            "__annotations__",
            "__builtins__",
            "__cached__",
            "__file__",
            "__path__",
            "__warningregistry__",
            "__dataclass_fields__",
        ),
    ]
)
"""Variables of a module or a class that Python sets."""
OF_OBJECTS = (
    *(list, tuple, set, frozenset, deque, dict, defaultdict, OrderedDict, types.MappingProxyType, types.SimpleNamespace),
    *(types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, types.CellType, functools.partial),
    *(property, staticmethod, classmethod, types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType),
)
"""C types whose parts are all objects, in a fixed order."""
SETTINGS = (bool, int, float, str)
"""Types of what a script may set in a library's module or class."""
ADDRESSES = frozenset({"_torchdynamo_wrapper_id"})
"""Attributes in which a library keeps the address of an object."""
OF_MEMBERS = (object, int, str, float, bytes)
"""C types from which a member of an enum gets nothing that may change."""
OF_PYTHONS_MEMBERS = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"})
"""Attributes of a member of an enum that Python sets; the last only when it is first needed."""
HEAP_TYPE = 1 << 9
MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))
COUNTING = (enumerate, zip, map, filter, reversed, *(kind for kind in vars(itertools).values() if isinstance(kind, type)))
"""Iterators that a loop may use; they live on the stack of the running function."""
HELD_BY_ITS_FRAME = 3
"""References to the variables of a function that nobody else has asked for, as `sys.getrefcount` counts here."""
SETS = re.compile(r"\bself\.(\w+)(?=(?:, self\.\w+)*(?:: [^=\n]+)? [-+*/|&]?= )|\bsetattr\(self, \"(\w+)\"")
"""Matches the statements by which a Python class sets its attributes."""


def held(value: Any) -> list[tuple[str, Any]]:
    """The parts of a value, by name. Raises TypeError for a value that may have more, and any error of reading it."""
    kind = type(value)
    if kind in STATELESS or kind.__module__ == "typing":
        return []
    if isinstance(value, DistributedDataParallel):
        return [("module", value.module), *added(value)]
    ours = kind.__module__.partition(".")[0] in OURS and not issubclass(kind, logging.LoggerAdapter)
    return list(added(value) if ours else _parts(value, kind))


def _parts(value: Any, kind: type) -> Held:
    match value:
        case types.ModuleType():
            if is_of_the_job(file_of_module(value)) or (value.__spec__ is None and not hasattr(value, "__file__")):
                yield from variables(value)
            else:  # a library's: the settings that it offers
                yield from ((key, child) for key, child in vars(value).items() if key[:1] != "_" and type(child) in SETTINGS)
        case types.FunctionType():
            yield from _of_function(value)
        case types.GeneratorType():
            if (frame := value.gi_frame) is not None and not is_our_generator(value):
                yield "line", frame.f_lasti
                views = {id(frame), id(frame.f_locals)}  # which exist only after their first use
                yield from (each for each in _referents(value) if id(each[1]) not in views)
        case type():
            # For a library's class, only what a script may have put into it: the class itself has no state.
            own = is_of_the_job(file_of(value))
            yield from ((key, child) for key, child in variables(value) if own or type(child) in SETTINGS)
            yield "bases", value.__bases__
        case weakref.ref():
            yield "to", value()
        case enum.Enum():  # whose class makes it once, and `copy` gives back as it is
            native = _native(kind)
            if native not in (*OF_OBJECTS, *OF_MEMBERS):
                raise TypeError(f"is a member of an enum of {native.__name__}")
            yield from _referents(value) if native in OF_OBJECTS else ()
            yield from attributes(value)
        case _ if hasattr(kind, "cache_info") and hasattr(kind, "cache_clear"):
            yield from (("cache", str(value.cache_info())), *_referents(value))
        case _ if kind.__module__.partition(".")[0] in PICKLED:
            yield from _reduced(value)
            known = OF_PANDAS | getattr(kind, "_internal_names_set", frozenset())
            yield from ((key, child) for key, child in getattr(value, "__dict__", {}).items() if key not in known)
        case _:
            yield from _of_object(value, kind)


def text_of_member(member: enum.Enum) -> str | None:
    """What tells it from other members; None if something in it may change."""
    kind, about = type(member), vars(member)
    plain = type(about.get("_value_")) in (*SETTINGS, bytes, type(None)) and _native(kind) in OF_MEMBERS
    return (
        f"{kind.__qualname__}.{member.name} {about.get('_value_')!r}" if plain and about.keys() <= OF_PYTHONS_MEMBERS else None
    )


def known_as(value: Any) -> str:
    """What tells a value from another that holds the same parts: its class, and the name or the code by which it is known."""
    kind = type(value)
    own = ""
    if issubclass(kind, types.ModuleType):
        own = object.__getattribute__(value, "__dict__").get("__name__", "")  # one may make what it is asked for
    elif kind in OF_TEXT or kind.__module__ == "typing":
        own = repr(getattr(value, "__origin__", value) if hasattr(value, "__metadata__") else value)
    elif code := value if kind is types.CodeType else getattr(value, CODE[kind]) if kind in CODE else None:
        own = _code_digest(code)
    elif isinstance(value, NAMED):
        own = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', None) or value.__name__}"
    return f"{kind.__module__}.{kind.__qualname__} {own}"


@functools.lru_cache(maxsize=1 << 14)
def _code_digest(code: types.CodeType) -> str:
    """The same in each process. Two lambdas of one line differ in the columns, those of `eval` in their constants."""
    parts = [_code_digest(each) if isinstance(each, types.CodeType) else each for each in code.co_consts]
    constants = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in parts]
    about = code.co_qualname, code.co_firstlineno, code.co_code, code.co_linetable, code.co_names, code.co_varnames, constants
    return xxhash.xxh3_64_hexdigest(repr(about).encode(errors="replace"))


def _referents(value: Any) -> Held:
    return ((str(number), part) for number, part in enumerate(gc.get_referents(value)))


def _of_object(value: Any, kind: type) -> Held:
    native = _native(kind)
    if native in OF_OBJECTS or kind.__name__ == "_lru_list_elem":  # an entry of functools.lru_cache
        yield from _referents(value)
    elif native is object:
        pass
    elif any(isinstance(getattr(kind, name), types.FunctionType) for name in ("__reduce__", "__reduce_ex__")):
        raise TypeError("has a __reduce__ of its own, which may leave parts out")
    elif native is type(threading.Lock()):
        yield "locked", value.locked()
    else:
        yield from _reduced(value)
    if kind is not native:
        yield "class", kind
        yield from attributes(value)


def _reduced(value: Any) -> Held:
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):
        raise TypeError(f"is known by its name, {reduced}")
    for number, part in enumerate(reduced[1:], 1):  # the items to add come as iterators
        yield f"at/{number}", list(part) if number > 2 and isinstance(part, Iterator) else part


def _of_function(value: types.FunctionType) -> Held:
    """The function's variables. A library's function also counts: it may wrap one of the script's."""
    if value.__code__.co_filename.startswith(OWN_FILES):
        return
    yield from (("closure", value.__closure__), ("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__))
    yield from ((key, child) for key, child in vars(value).items() if key not in ADDRESSES)
    if value.__code__.co_filename.startswith("<"):
        # Made by exec: its globals may be reachable from nowhere else.
        yield from ((name, value.__globals__[name]) for name in value.__code__.co_names if name in value.__globals__)


def variables(value: Any) -> Held:
    """The variables of a module or class. Of those with underscores on both sides only plain ones: Python, and libraries that
    make classes, keep much in them."""
    known = vars(value).items()
    return ((key, child) for key, child in known if key[:2] != "__" or key[-2:] != "__" or _is_own(key, child))


def _is_own(key: str, child: Any) -> bool:
    """Whether a script may have made this variable with underscores on both sides."""
    plain = type(child) in (bool, int, float, str, bytes, list, dict, set)
    return plain and key not in OF_PYTHON and not key.startswith("__pydantic_")  # which holds addresses


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """The variables of a running function; empty for one that reads its own `locals()`, which would change them up to Python
    3.12. Clears the copy that Python keeps with the frame: it would keep alive what the function drops later (a loaded
    checkpoint, a loss with its graph)."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED or _asks(frame.f_code):
        return {}
    kept = frame.f_locals
    found = dict(kept)
    if type(kept) is dict and sys.gettrace() is None and sys.getrefcount(kept) <= HELD_BY_ITS_FRAME:
        kept.clear()
    return found


@functools.lru_cache(maxsize=1 << 12)
def _asks(code: types.CodeType) -> bool:
    """Whether a function calls `locals`, `eval`, `exec`, or `vars` without an argument."""
    if {"locals", "eval", "exec", "vars"}.isdisjoint(code.co_names):
        return False
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
    named = ((each, after) for each, after in itertools.pairwise(steps) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return any(
        each.argval in ("locals", "eval", "exec") or (each.argval == "vars" and after.opname == "CALL" and not after.arg)
        for each, after in named
    )


def attributes(value: Any) -> Held:
    """The contents of its dictionary and slots, without state that checkpoints hold and the empty internals of torch
    modules."""
    saved = ADDRESSES | (_of_sgd() if isinstance(value, torch.optim.Optimizer) else frozenset())
    empty = MODULE_INTERNALS if isinstance(value, torch.nn.Module) else ()
    with contextlib.suppress(AttributeError):
        own = object.__getattribute__(value, "__dict__").items()
        yield from ((key, child) for key, child in own if key not in saved and (key not in empty or child))
    for name, slot in _slots(type(value)):
        with contextlib.suppress(AttributeError):  # one that has no value yet
            yield name, slot.__get__(value)


@functools.cache
def _of_sgd() -> frozenset[str]:
    """Attributes of an optimizer whose state checkpoints hold. Computed late: making a first optimizer turns a command's
    process into a rank.

    torch wraps a class's `step` permanently at the class's first optimizer, so this uses its own subclass: a script's subclass
    of SGD must find `step` unchanged.
    """
    probe = type("Probe", (torch.optim.SGD,), {})
    return frozenset(vars(probe([torch.zeros(())]))) - {"defaults", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}


def added(value: Any) -> Held:
    """Attributes that no library code sets."""
    known = _set_by_libraries(type(value))
    return ((key, child) for key, child in getattr(value, "__dict__", {}).items() if key not in known)


@functools.lru_cache(maxsize=1 << 12)
def _set_by_libraries(kind: type) -> frozenset[str]:
    files = {file_of_module(sys.modules.get(base.__module__)) or "" for base in kind.__mro__}
    texts = (Path(file).read_text() for file in files if file.endswith(".py") and not is_of_the_job(file))
    return MODULE_INTERNALS.union(*(name for names in map(SETS.findall, texts) for name in names))


@functools.lru_cache(maxsize=1 << 14)
def _slots(kind: type) -> tuple[tuple[str, Any], ...]:
    found = ((name, slot) for base in kind.__mro__ for name, slot in vars(base).items())
    return tuple((name, slot) for name, slot in found if isinstance(slot, types.MemberDescriptorType) and name != "__dict__")


@functools.lru_cache(maxsize=1 << 14)
def _native(kind: type) -> type:
    """The nearest base class that is written in C."""
    return next(base for base in kind.__mro__ if not _is_in_python(base))


def _is_in_python(kind: type) -> bool:
    """Whether a class statement made it: its instances gain only attributes and slots, and it has no constructor in C."""
    own = vars(kind)
    adds = kind.__base__ is not None and kind.__basicsize__ != kind.__base__.__basicsize__
    if not kind.__flags__ & HEAP_TYPE or (adds and own.keys().isdisjoint(("__dict__", "__weakref__", "__slots__"))):
        return False
    new = own.get("__new__")
    return not isinstance(new, types.BuiltinFunctionType) or new.__self__ is not kind


def is_our_generator(value: Any) -> bool:
    """Whether it is the protocol's own generator over the loader, whose progress is in the position."""
    return type(value) is types.GeneratorType and value.gi_code.co_filename.startswith(PACKAGE)


@functools.lru_cache(maxsize=1 << 14)
def file_of(kind: type) -> str | None:
    """The file that defines a class, from its functions, since a module may have taken the name of another."""
    if kind.__module__ in ("builtins", "itertools", "types", "functools", "collections"):
        return None
    functions = (value for value in vars(kind).values() if isinstance(value, types.FunctionType))
    own = (each.__code__.co_filename for each in functions if each.__qualname__.startswith(f"{kind.__qualname__}."))
    return next(filter(os.path.exists, own), file_of_module(sys.modules.get(kind.__module__)))


def file_of_module(module: object) -> str | None:
    """None also for one that `importlib.util.LazyLoader` has yet to load. Does not ask the module: it may import something when
    asked for any attribute, or raise any error."""
    try:  # for thousands of modules, `contextlib.suppress` would take ten times as long
        file = None if type(module) is LAZY else object.__getattribute__(module, "__dict__").get("__file__")
    except Exception:
        return None
    return file if isinstance(file, str) else None


@functools.lru_cache(maxsize=1 << 14)
def is_of_the_job(file: str | None) -> bool:
    """Whether it is neither an installed file, nor Python's, nor chaosrun's."""
    return file is not None and os.path.exists(file) and not is_installed(real_path(file))


def is_installed(path: str) -> bool:
    """The folder of the script is not, wherever it lies, but a folder of packages within it is."""
    main = sys.modules.get("__main__")
    own = _folder_of_the_script(None if getattr(main, "__spec__", None) else file_of_module(main))
    if own and path.startswith(own):
        within = tuple(each for each in INSTALLED if each.startswith(own))
        return path.startswith(within) or any(folder in path[len(own) - 1 :] for folder in FOLDERS_OF_PACKAGES)
    return path.startswith(INSTALLED) or any(folder in path for folder in FOLDERS_OF_PACKAGES)


@functools.lru_cache(maxsize=1 << 4)
def _folder_of_the_script(file: str | None) -> str:
    """Empty without one, as for `python -m`; and if it is itself a folder of packages."""
    own = os.path.join(os.path.dirname(os.path.realpath(file)), "") if file else ""
    return "" if own.endswith(FOLDERS_OF_PACKAGES) else own


@functools.lru_cache(maxsize=1 << 14)
def real_path(file: str) -> str:
    """`os.path.realpath`, for thousands of modules in hundreds of folders: follows the links of each once."""
    folder, name = os.path.split(file)
    return os.path.realpath(file) if os.path.islink(file) else os.path.join(_real_folder(folder), name)


_real_folder = functools.lru_cache(maxsize=1 << 12)(os.path.realpath)


def know_files() -> None:
    """Follow the links of what is imported so far, in a process that is to be forked: in each rank it would take 50 ms."""
    for module in list(sys.modules.values()):
        if file := file_of_module(module):
            real_path(file)
