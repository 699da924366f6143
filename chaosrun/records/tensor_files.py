"""Entries of a script's files of tensors and arrays: files of torch.save (its older format, too), torch.jit,
torch.distributed.checkpoint, safetensors and numpy, and pickles, also compressed ones. They are read without torch and nothing
in them is executed: each class that a pickle names becomes an inert one. Texts and states of random generators are left out.
A file of ONNX, HDF5 or raw numbers is one entry."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

LEAST_BYTES = 17
"""Smallest entry; fewer bytes are a numpy scalar."""
STREAMS = (16, 2496, 5056)
"""Bytes of the states of random generators: torch's on a GPU, numpy's, torch's on the CPU."""
NO_STATE = re.compile(
    r"(^|[^a-z])(hist\w*|loss(es)?|metrics?|curves?|times?|timings?|durations?|logs?|rng|random|\w*sampler|loaders?)([^a-z]|$)"
)
"""Names of metrics, times, and positions in the data: they may differ after a correct restart."""
WHOLE = (".onnx", ".h5", ".hdf5", ".bin", ".raw", ".dat")
"""Suffixes of files that count as one entry."""
_DRAWN = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?=[A-Za-z0-9]{6})(?:[A-Za-z]*\d+[A-Za-z]+\d|[A-Za-z]+\d+[A-Za-z])[A-Za-z0-9]*"
)
"""A word that each process draws anew: a UUID, or letters and digits mixed (3f9c12ab)."""
_ENDS, _END_BYTES = b"PK\x05\x06", 22
"""End of a zip archive; torch.distributed.checkpoint writes several archives into one file."""
_COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}
"""Openers of compressed files, by their first bytes."""
_MOST_EXPANDED = 1 << 29
_BYTES_EACH = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2, "ComplexFloat": 8}
"""Bytes of a number, by the kind of storage; others have one."""
_FORMATS = {"Double": "<d", "Float": "<f", "Half": "<e", "Long": "<q", "Int": "<i"} | dict(f8="<d", f4="<f", i8="<q", i4="<i")
"""How a single number is packed, by torch's kind of storage or numpy's."""
_OLD_FORM = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)
"""First bytes of a file in torch.save's older format."""
_DEEPEST = 40
_LONGEST = 100
"""The numbers of longer lists are left out: a history."""
Entry = tuple[int, str]
_Leaf = tuple[tuple[str, ...], bytes | float]


class _Inert:
    """Stands for any class or function, and keeps its arguments."""

    def __new__(cls, *given: Any, **options: Any) -> "_Inert":
        made = super().__new__(cls)
        made.given = [*given, options]
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        self.given: list[Any]

    def append(self, item: Any) -> None:
        self.given.append(item)

    add = extend = __setstate__ = append

    def __setitem__(self, key: Any, value: Any) -> None:
        self.given.append({key if isinstance(key, str | int) else "": value})

    def __call__(self, *given: Any) -> "_Inert":
        return _Inert(self, *given)


class _Storage(bytes):
    """Bytes of a tensor, which is never taken for a random generator's state by its size."""


class _Number(NamedTuple):
    value: float


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, storages: Mapping[str, bytes]) -> None:
        super().__init__(file)
        self._storages = storages
        self.sizes: dict[str, int] = {}
        """Sizes in bytes of the storages, by name."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if name == "OrderedDict" else type(name, (_Inert,), {})

    def persistent_load(self, pid: Any) -> bytes | _Number:
        _, kind, key, _, elements, *_ = pid
        name = kind.__name__.removesuffix("Storage")
        self.sizes[str(key)] = elements * _BYTES_EACH.get(name, 1)
        held = self._storages.get(str(key), b"")
        if elements == 1:
            return _Number(struct.unpack(_FORMATS[name], held)[0]) if held and name in _FORMATS else b""
        return b"" if name == "Byte" and len(held) in STREAMS else _Storage(held)


class Contents(NamedTuple):
    """The contents of a file, by name (keys and indices, joined by slashes)."""

    entries: dict[str, Entry]
    """Size and digest of each tensor or array."""
    numbers: dict[str, float]
    """Plain numbers of a pickle."""


def contents(path: Path) -> Contents:
    """What a file holds; both parts are empty for a file of another kind or an incomplete one. Raises OSError."""
    found: dict[str, tuple[int, xxhash.xxh3_64]] = {}
    numbers: dict[str, float] = {}
    try:
        content = path.read_bytes()
        whole = path.suffix in WHOLE and not is_one(content[:8], "")
        named = [((path.stem,), content)] if whole else _leaves(content, path.suffix)
        for names, leaf in named:
            if not isinstance(leaf, bytes):
                numbers["/".join(names)] = leaf
            elif len(leaf) >= LEAST_BYTES and not NO_STATE.search((names or ("",))[-1].lower()):
                size, hasher = found.get("/".join(names), (0, xxhash.xxh3_64()))
                hasher.update(leaf)
                found["/".join(names)] = size + len(leaf), hasher
    except OSError:
        raise
    except Exception:  # torn, of another format, or a pickle that does more than a state needs: it is not compared
        return Contents({}, {})
    return Contents({"" if whole else name: (size, hasher.hexdigest()) for name, (size, hasher) in found.items()}, numbers)


def is_one(head: bytes, suffix: str) -> bool:
    """Whether a file with these first bytes may hold tensors or arrays."""
    packed = head[:2] in _COMPRESSED
    return packed or suffix in (".safetensors", *WHOLE) or head[:4] in (b"PK\x03\x04", b"\x93NUM") or head[:1] == b"\x80"


def _leaves(content: bytes, suffix: str) -> Iterator[_Leaf]:
    if (opened := _COMPRESSED.get(content[:2])) is not None:
        with opened(io.BytesIO(content)) as file:
            head = file.read(8)
            content = head + file.read(_MOST_EXPANDED) if is_one(head, "") else b""
    if suffix == ".safetensors":
        start = 8 + struct.unpack("<Q", content[:8])[0]
        for name, about in json.loads(content[8:start]).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                yield (name,), content[start + first : start + last]
    elif content.startswith(b"PK\x03\x04"):
        begin = end = number = 0
        while (at := content.find(_ENDS, end)) >= 0:
            end = at + _END_BYTES
            with zipfile.ZipFile(io.BytesIO(content[begin:end])) as archive:
                yield from _of_zip(archive, () if end - begin == len(content) else (f"part {number}",))
            begin, number = end, number + 1
    elif content.startswith(b"\x80"):
        file = io.BytesIO(content)
        yield from _of_pickle(file, _old_storages(file) if content.startswith(_OLD_FORM) else {})
    elif content:
        yield from _of_array((), content)


def _of_zip(archive: zipfile.ZipFile, within: tuple[str, ...]) -> Iterator[_Leaf]:
    """Entries of a zip archive of torch.save or numpy."""
    for name in archive.namelist():
        if name.endswith(".npy"):
            yield from _of_array((*within, name.removesuffix(".npy")), archive.read(name))
        elif name.endswith("/data.pkl"):
            place = name.removesuffix("data.pkl") + "data/"
            storages = {each.removeprefix(place): archive.read(each) for each in archive.namelist() if each.startswith(place)}
            for names, leaf in _of_pickle(io.BytesIO(archive.read(name)), storages):
                if isinstance(leaf, bytes) or not within:  # a number in one of several archives has no name
                    yield (*within, *names), leaf


def _of_array(names: tuple[str, ...], content: bytes) -> Iterator[_Leaf]:
    head = content[:256]
    if b"'shape': ()" not in head and b"'|O'" not in head and len(content) - 128 not in STREAMS:
        yield names, content


def _old_storages(file: io.BytesIO) -> Mapping[str, bytes]:
    """Storages of a file in torch.save's older format; leaves `file` where the state begins, behind three pickles by torch.
    After the state come the names of its storages, then each storage preceded by its number of elements."""
    for _ in range(3):
        _Unpickler(file, {}).load()
    begin, state = file.tell(), _Unpickler(file, {})
    state.load()
    storages: dict[str, bytes] = {}
    for key in _Unpickler(file, {}).load():
        file.seek(8, io.SEEK_CUR)
        storages[str(key)] = file.read(state.sizes[str(key)])
    file.seek(begin)
    return storages


def _of_pickle(file: io.BytesIO, storages: Mapping[str, bytes]) -> Iterator[_Leaf]:
    inside: set[int] = set()

    def visit(value: Any, names: tuple[str, ...]) -> Iterator[_Leaf]:
        if isinstance(value, bytes | bytearray):
            if isinstance(value, _Storage) or len(value) not in STREAMS:
                yield names, bytes(value)
            return
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield names, value
            return
        if id(value) in inside or len(names) > _DEEPEST:
            return
        inside.add(id(value))
        match value:
            case ["MT19937", *_] | [3, [*_], _] | {"bit_generator": _}:  # states of numpy's generators, and of Python's
                pass
            case dict():
                for key, each in value.items():
                    yield from visit(each, (*names, str(key)) if isinstance(key, str | int) else names)
            case list() | tuple():
                for number, each in enumerate(value):
                    if len(value) <= _LONGEST or not isinstance(each, int | float):
                        yield from visit(each, (*names, str(number)))
            case _Inert(given=[bytes() as saved, *_]) if type(value).__name__ == "_load_from_bytes":
                yield from visit(_storage(saved), names)
            case _Inert(given=[str(), str(), *_]) if type(value).__name__ == "encode":
                yield from visit(_bytes(value), names)
            case _Inert(given=[_Number(value=number), *_]):
                yield names, number
            case _Inert(given=[_Inert(given=[str() as kind, *_]), packed, *_]) if type(value).__name__ == "scalar":
                if kind in _FORMATS:
                    yield names, struct.unpack(_FORMATS[kind], _bytes(packed))[0]
            case _Inert():
                parts = (part for each in value.given for part in (each if isinstance(each, tuple) else (each,)))
                for part in parts:
                    # Numbers next to an object's own state are sizes and the like.
                    own = isinstance(part, dict | _Inert)
                    yield from (leaf for leaf in visit(part, names) if own or isinstance(leaf[1], bytes))
            case _:
                pass
        inside.discard(id(value))

    yield from visit(_Unpickler(file, storages).load(), ())


def _bytes(value: Any) -> bytes:
    """The bytes of a pickled value; protocol 2 stores them as a text to be encoded."""
    return value if isinstance(value, bytes) else value.given[0].encode(value.given[1])


def _storage(saved: bytes) -> bytes:
    """The bytes of a storage that was pickled by itself: they follow torch's five pickles and a number of 8 bytes."""
    file = io.BytesIO(saved)
    for _ in range(5):
        _Unpickler(file, {}).load()
    return file.read()[8:]


def unnumbered(path: str) -> str:
    """The path without digits, and without the random parts of folder names: equal for files numbered by their steps, and in
    folders that each run names anew."""
    folder, _, name = path.rpartition("/")
    return "".join(each for each in f"{_DRAWN.sub('', folder)}/{name}" if not each.isdigit())
