"""How a trace's records become bytes: the format of `rank-R.trace`, documented for other languages in docs/traces.md.

A sequence of frames: a size with its own checksum, a MessagePack value, and the value's CRC-16. The value is an array for a
step and a map for any other record. Behind each block comes its footer: an array that begins with "block". Knows no files.
"""

import math
import struct
import zlib
from binascii import crc_hqx
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import xxhash

from chaosrun.records.codec import Count, DamagedRecordError, Record, as_utf8, changed, convert
from chaosrun.records.traces import TRACE_VERSION, AtLeastOne, Block, Line, StartRecord, StepRecord, expect_words

MARK = b"\x92\xa5block"
"""First bytes of a block's footer."""
HEAD_BYTES = 3
"""Bytes of a frame before its content."""
TICKS = 10_000
"""Ticks a second: times of steps are rounded down to ticks."""
_MOST = 0xFFFF
"""Most bytes of a frame's content. If it is exactly that long, the next frame continues it."""
_DIGITS = 16
_packed = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.decode
Texts = bytes | list[str]
"""8 bytes for each digest, or a list of texts if one of them is not 16 hex digits."""
Ids = bytes | list[Any] | None
"""Sample ids of one micro-batch. As bytes: the size of an integer, then the integers, little-endian."""


def framed(content: bytes) -> bytes:
    parts = [content[at : at + _MOST] for at in range(0, len(content) + 1, _MOST)]
    return b"".join(struct.pack(">HB", len(part), _check(len(part))) + part + _crc(part) for part in parts)


def _check(size: int) -> int:
    return (size ^ size >> 8 ^ 0xA5) & 0xFF


def _crc(part: bytes) -> bytes:
    return crc_hqx(part, 0).to_bytes(2, "big")


def frames(data: bytes | memoryview, at: int = 0) -> Iterator[tuple[int, bytes]]:
    """The frames from offset `at` on: the offset behind each, and its content. Raises DamagedRecordError."""
    parts: list[bytes] = []
    while at + HEAD_BYTES <= len(data):
        size, check = struct.unpack_from(">HB", data, at)
        if check != _check(size):
            raise DamagedRecordError(f"no record at byte {at}")
        begin, at = at + HEAD_BYTES, at + HEAD_BYTES + size + 2
        if at > len(data):
            return
        part = bytes(data[begin : at - 2])
        if _crc(part) != data[at - 2 : at]:
            raise DamagedRecordError(f"the record at byte {begin} is not what was written")
        parts.append(part)
        if size < _MOST:
            yield at, b"".join(parts)
            parts = []


def is_footer(content: bytes) -> bool:
    return content.startswith(MARK)


def is_step(content: bytes) -> bool:
    # MessagePack: 9x begins an array of up to 15 entries, dc a longer one.
    return content[:1].hex().startswith(("9", "dc")) and not is_footer(content)


_FOOTERS = msgspec.msgpack.Decoder(tuple[str, Block])


def summed(block: Block, before: bytes, region: bytes | bytearray | memoryview) -> Block:
    """The block with the running digest over its bytes. `before`: the running digest of the block before."""
    hasher = xxhash.xxh3_64(before)
    hasher.update(_pack(changed(block, running=b"")))
    hasher.update(region)
    return changed(block, running=hasher.digest())


def packed_footer(block: Block) -> bytes:
    return _pack(("block", block))


def unpacked_footer(content: bytes) -> Block:
    """The block that a footer describes. Raises ValueError."""
    return _FOOTERS.decode(content)[1]


class _Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A step. A field that is nil has the value that `_expected` derives from the step before it in the block."""

    step: AtLeastOne
    """The step's number for the first of a block; for others, how many steps after the first."""
    ticks: int
    """Time since the step before; for the first of a block, since 1970."""
    digests: Texts
    """Digests of the random streams, gradients, parameters and each micro-batch, in this order."""
    loss: bytes | list[float]
    """Little-endian float32 if that represents all losses exactly."""
    ids: Ids
    """A list of the ids of each micro-batch; if there is only one, its bytes."""
    lr: list[float] | None = None
    state: Texts | None = None
    settings: Texts | None = None
    began: Texts | None = None
    epoch: Count | None = None
    batches: Count | None = None
    items: Count | None = None
    """0: not counted."""
    grads: bytes | None = None
    params: bytes | None = None
    fetched: list[Any] | None = None
    stepped: list[str] | None = None


_ROWS = msgspec.msgpack.Decoder(_Row)
_Change = Callable[[Any], Any]


def _numbers(texts: Sequence[str]) -> list[float]:
    return list(map(float.fromhex, texts))


def _hex(values: Sequence[float]) -> tuple[str, ...]:
    return tuple(map(float.hex, values))


_TEXT: tuple[_Change, _Change] = (lambda text: _short([text]), lambda packed: _long(packed)[0])
_PLAIN: tuple[_Change, _Change] = (lambda value: value, lambda value: value)
_REST: dict[str, tuple[_Change, _Change]] = {
    "lr": (_numbers, _hex),
    **dict.fromkeys(("state", "settings", "began"), _TEXT),
    **dict.fromkeys(("epoch", "batches"), _PLAIN),
    "items": (lambda items: items or 0, lambda items: items or None),
    **dict.fromkeys(("grads", "params"), _PLAIN),
    "fetched": (lambda batches: list(map(_packed_ids, batches)), lambda packed: tuple(map(_unpacked_ids, packed))),
    "stepped": (list, tuple),
}
"""Fields that may be nil, in the order of `_Row`: how they are packed and unpacked."""
_FIRST: dict[str, Any] = {
    **{"lr": (), "stepped": (), "items": None},
    **{"state": "", "settings": "", "began": "", "epoch": 0, "batches": 0},
}


def _expected(before: StepRecord | None) -> dict[str, Any]:
    """Fields of a step that is like the one before it."""
    held = {name: getattr(before, name) for name in _FIRST} if before else dict(_FIRST)
    return held | {
        "batches": held["batches"] + (len(before.batch) if before else 1),
        "grads": b"",
        "params": b"",
        "fetched": None,
    }


class Scribe:
    """Packs the steps of one block, and computes the block's digests."""

    def __init__(self) -> None:
        self.first = self.last = 0
        self._knows_ids = True
        self._param, self._digest = xxhash.xxh3_64(), xxhash.xxh3_64()
        self._before: StepRecord | None = None

    def packed(self, record: StepRecord) -> bytes:
        before, expected = self._before, _expected(self._before)
        ids = None if record.ids is None else list(map(_packed_ids, record.ids))
        row = [
            record.step - self.first,
            _ticks(record) - (_ticks(before) if before else 0),
            _short([record.rng, record.grad, record.param, *record.batch]),
            _floats(_numbers(record.loss)),
            ids[0] if ids and len(ids) == 1 and isinstance(ids[0], bytes) else ids,
        ]
        values = {name: getattr(record, name) for name in _REST}
        row += [None if values[name] == expected[name] else pack(values[name]) for name, (pack, _) in _REST.items()]
        while row[-1] is None and len(row) > 5:
            row.pop()
        self.take(record)
        return _pack(row)

    def take(self, record: StepRecord) -> None:
        """Add a step to the block's digests."""
        self.first, self.last = self.first or record.step, record.step
        self._knows_ids = self._knows_ids and record.knows_ids
        self._param.update(f"{record.param} ".encode())
        texts = (record.rng, record.grad, record.param, record.state, record.settings, record.began)
        place = (record.step, record.epoch, record.batches)
        words = (record.grads, record.params)
        self._digest.update(_pack((place, record.ids, record.batch, record.loss, record.lr, texts, words)))
        self._before = record

    def block(self, at: int, size: int, others: Sequence[int] = ()) -> Block:
        """The block of the steps taken so far, `size` bytes at offset `at`."""
        about = (tuple(others), self._knows_ids, self._param.digest(), self._digest.digest())
        return Block(self.first, self.last - self.first + 1, at, size, *about)


class Reading:
    """Unpacks the records of a trace in order, from the beginning of a block on."""

    def __init__(self, attempt: int, rank: int, tensors: Sequence[str] = (), names: "Names | None" = None) -> None:
        self._attempt, self._rank, self._tensors, self._names = attempt, rank, tensors, names
        self._before: StepRecord | None = None
        self._first = 0

    def record(self, content: bytes) -> Line | None:
        """The record in a frame; None for a footer. Raises ValueError."""
        if is_step(content):
            return self.step(content)
        if is_footer(content):
            self._before = None
            return None
        found = unpacked_record(content, self._names)
        if isinstance(found, StartRecord):
            self._tensors = found.tensors
        return found

    def step(self, content: bytes) -> StepRecord:
        """The step in a frame. Raises ValueError."""
        row, before = _ROWS.decode(content), self._before
        fields = _expected(before)
        for name, (_, unpack) in _REST.items():
            if (packed := getattr(row, name)) is not None:
                fields[name] = unpack(packed)
        rng, grad, param, *batch = _long(row.digests)
        losses = struct.unpack(f"<{len(row.loss) // 4}f", row.loss) if isinstance(row.loss, bytes) else row.loss
        ids = [row.ids] if isinstance(row.ids, bytes) else row.ids
        found = StepRecord(
            step=row.step + (self._first if before else 0),
            time_s=(row.ticks + (_ticks(before) if before else 0)) / TICKS,
            rng=rng,
            grad=grad,
            param=param,
            batch=tuple(batch),
            loss=_hex(losses),
            ids=None if ids is None else tuple(map(_unpacked_ids, ids)),
            attempt=self._attempt,
            rank=self._rank,
            **fields,
        )
        _expect_sound(found, self._tensors)
        self._before, self._first = found, self._first if before else found.step
        return found


def _expect_sound(step: StepRecord, tensors: Sequence[str]) -> None:
    where = f"step {step.step}: "
    stepped = bool(step.grad or step.grads or step.lr)
    if step.params or step.grads:
        expect_words(step.params, tensors, where, "parameters")
        if stepped:
            expect_words(step.grads, tensors, where, "gradients")
    if not all((step.rng, step.param, step.batch, *step.batch)):
        raise ValueError(f"{where}digests are missing")
    # Losses are observed at backward passes, which a script that resumes by itself (its steps have `state`) may not make.
    expected = ("grad", "lr") if step.state else ("grad", "lr", "loss")
    if stepped and (missing := [name for name in expected if not getattr(step, name)]):
        raise ValueError(f"{where}gradients without {missing[0]}")


def _pack(value: Any) -> bytes:
    try:
        return _packed(value)
    except UnicodeEncodeError:
        return _packed(as_utf8(msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=True)))


Names = dict[str, tuple[list[str], Texts]]
"""By component, the names and values of a state as they were last written: unchanged ones are not written again."""


def packed_record(record: Record, names: Names) -> bytes:
    """The bytes of any record but a step."""
    plain: dict[str, Any] = msgspec.to_builtins(record, builtin_types=(bytes,), str_keys=True)
    digests: dict[str, Any] = plain.get("digests") or {}
    for component, held in digests.items():
        before, now = names.get(component, (None, None)), (list(held), _short(list(held.values())))
        digests[component] = tuple(None if each == known else each for each, known in zip(now, before, strict=True))
        names[component] = now
    # Digests cannot be compressed, names of tensors can.
    return min(packed := _pack(plain), _pack(zlib.compress(packed)), key=len)


def unpacked_record(content: bytes, names: Names | None) -> Line:
    """Any record but a step; without digests if `names` is None (what was written before is unknown). Raises ValueError."""
    plain = _unpack(content)
    if isinstance(plain, bytes):
        try:
            plain = _unpack(zlib.decompress(plain))
        except zlib.error as error:
            raise DamagedRecordError(str(error)) from error
    if not isinstance(plain, dict):
        raise ValueError("a record is a map")
    if plain.get("kind") == "start" and plain.get("v") != TRACE_VERSION:
        raise DamagedRecordError(f"version {plain.get('v')!r:.20}, this chaosrun reads version {TRACE_VERSION}")
    digests = plain.pop("digests", None)
    try:
        found: Line = convert({**plain, "digests": {}} if plain.get("kind") == "end" else plain, Line)
        if digests is None or names is None:
            return found
        if "digests" not in found.__struct_fields__:
            raise ValueError("digests of nothing")
        told = convert(digests, dict[str, tuple[list[str] | None, Texts | None]])
        return changed(found, digests={component: _component(names, component, *each) for component, each in told.items()})
    except (ValueError, LookupError) as error:
        raise DamagedRecordError(str(error).replace(" - at `$.", " at `")) from error


def _component(names: Names, component: str, own: list[str] | None, values: Texts | None) -> Mapping[str, str]:
    if own is None or values is None:
        before = names[component]
        own, values = before[0] if own is None else own, before[1] if values is None else values
    names[component] = own, values
    return _by_name(tuple(own), values if isinstance(values, bytes) else tuple(values))


@lru_cache(maxsize=4096)
def _by_name(names: tuple[str, ...], values: bytes | tuple[str, ...]) -> Mapping[str, str]:
    """Digests by name; cached, as replicas and legs hold the same ones at the same step."""
    return dict(zip(names, _long(values), strict=True))


def _ticks(record: StepRecord) -> int:
    return math.floor(record.time_s * TICKS + 1e-3)


def _short(texts: Sequence[str]) -> Texts:
    joined = "".join(texts)
    try:
        packed = bytes.fromhex(joined)
    except ValueError:
        return list(texts)
    return packed if packed.hex() == joined and all(len(text) == _DIGITS for text in texts) else list(texts)


def _long(packed: bytes | Sequence[str]) -> Sequence[str]:
    if not isinstance(packed, bytes):
        return packed
    text = packed.hex()
    return [text[at : at + _DIGITS] for at in range(0, len(text), _DIGITS)]


def _floats(values: list[float]) -> bytes | list[float]:
    form = f"<{len(values)}f"
    try:
        packed = struct.pack(form, *values)
    except OverflowError:
        return values
    return packed if list(struct.unpack(form, packed)) == values else values


def _packed_ids(ids: Sequence[Any] | None) -> Ids:
    if ids is None:
        return None
    if any(type(sample) is not int or sample < 0 for sample in ids):
        return list(ids)
    width = max([1, *((sample.bit_length() + 7) // 8 for sample in ids)])
    return bytes([width]) + b"".join(sample.to_bytes(width, "little") for sample in ids)


def _unpacked_ids(ids: Ids) -> tuple[Any, ...] | None:
    if ids is None or isinstance(ids, list):
        return None if ids is None else tuple(ids)
    if not isinstance(ids, bytes) or not ids or not ids[0] or (len(ids) - 1) % ids[0]:
        raise ValueError("no sample ids")
    width, data = ids[0], ids[1:]
    return tuple([int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)])
