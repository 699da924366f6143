"""Writes every quantity of an inspected step to disk. Used only in a replay for `chaosrun diagnose`.

It only reads and copies: it draws no random number and changes no tensor, so a replay computes what the run computed. The
format is `records.inspection`; values that are equal on several ranks or in several steps are stored once, by digest.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
import xxhash

from chaosrun.observe.fingerprint import local_part, part_of
from chaosrun.observe.rng import capture_rng
from chaosrun.records.codec import changed, encode
from chaosrun.records.inspection import InspectedMoment, InspectedValue, Quantity
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.records.position import Position

if TYPE_CHECKING:
    from chaosrun.observe.trace import State

Named = Sequence[tuple[str, torch.nn.Parameter]]
INT64 = range(-(2**63), 2**63)


class Inspector:
    """Writes the quantities of one rank of one attempt in the steps that its order names."""

    def __init__(self, state: "State", order: WorkerOrder, leg: LegLayout, device: torch.device) -> None:
        self._state = state
        self._device = device
        self._steps = frozenset(order.inspect)
        self._folder = leg.attempt(order.attempt).inspection(order.rank)
        self._tensors = leg.tensors
        self._parameters: Named = ()
        self._step = 1
        self._batches = 0
        self._losses = 0
        """Number of losses of this step so far."""
        self._entries: dict[tuple[Quantity, int, str], InspectedValue] = {}
        self._script: dict[str, str] = {}
        """The script's other state (`observe.script_state`) when the step began."""
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def _inspected(self) -> bool:
        return self._step in self._steps

    def begin(self, position: Position, parameters: Named) -> None:
        """The attempt resumes here."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tensors.mkdir(parents=True, exist_ok=True)
        self._step = position.step + 1
        self._parameters = parameters

    def batch(self, batch: Any, ids: list[Any] | None) -> None:
        """A micro-batch is about to be computed."""
        if not self._inspected:
            return
        if self._batches == 0:
            self._open()
        self._note("sample ids", "", None if ids is None else json.dumps(ids), micro_batch=self._batches)
        self._note_all("batch", batch, micro_batch=self._batches)
        self._note_rng(self._batches)
        self._batches += 1

    def losses(self, losses: Sequence[torch.Tensor]) -> None:
        if self._inspected:
            for loss in losses:
                self._note("loss", "", loss, micro_batch=self._losses)
                self._losses += 1

    def before_optimizer_step(self, rates: Sequence[float]) -> None:
        if self._inspected:
            for name, parameter in self._parameters:
                self._note("reduced gradients", name, parameter.grad)
            for number, rate in enumerate(rates):
                self._note("learning rate", f"group {number}", rate)

    def step(self) -> None:
        """The step is complete: its moment has been written when this returns."""
        if self._inspected:
            self._close()
            self._note_parameters("parameters after")
            self._write(f"step-{self._step:08d}.json", self._step)
        self._step += 1
        self._batches = self._losses = 0

    def end(self) -> None:
        """The training is over: write its final state, including what the script did after the last step."""
        self._close()
        self._entries.clear()
        self._note_rng(0)
        self._note_state()
        self._write("end.json", self._step - 1)

    def _open(self) -> None:
        self._note_state()
        self._script = self._state.of_script()
        for name, parameter in self._parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(self._arrival(name)))

    def _arrival(self, name: str) -> Any:
        def arrive(gradient: torch.Tensor) -> None:
            # The first arrival counts: reentrant checkpoints have several.
            number = self._batches - 1
            if ("local gradients", number, name) not in self._entries:
                self._note("local gradients", name, gradient, micro_batch=number)

        return arrive

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note_state(self) -> None:
        self._note_parameters("parameters before")
        components = self._state.components()
        self._note_all("buffers", components["buffers"])
        self._note_all("optimizer state", components["optimizer"])
        self._note_all("scheduler state", components["scheduler"])
        self._note_all("registered state", components["registered"])

    def _note_parameters(self, quantity: Quantity) -> None:
        for name, parameter in self._parameters:
            self._note(quantity, name, parameter)

    def _note_rng(self, micro_batch: int) -> None:
        streams = capture_rng(self._device)
        version, internal, gauss = streams["python"]
        # One array instead of 625 numbers.
        streams["python"] = (version, numpy.array(internal, dtype=numpy.uint32), gauss)
        self._note_all("rng", streams, micro_batch=micro_batch)

    def _note_all(self, quantity: Quantity, value: Any, *, micro_batch: int = 0) -> None:
        for name, leaf in _leaves("", value):
            self._note(quantity, name, leaf, micro_batch=micro_batch)

    def _note(self, quantity: Quantity, name: str, value: Any, *, micro_batch: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            name, value = name + part_of(value), local_part(value)
        entry = InspectedValue(quantity=quantity, micro_batch=micro_batch, name=name)
        self._entries[quantity, micro_batch, name] = self._with(entry, value)

    def _with(self, entry: InspectedValue, value: Any) -> InspectedValue:
        match value:
            case torch.Tensor():
                return self._stored(entry, _raw(value), str(value.dtype).removeprefix("torch."), tuple(value.shape))
            case numpy.ndarray() | numpy.generic() if not value.dtype.hasobject:
                plain = numpy.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<"))
                return self._stored(entry, plain.reshape(-1).view(numpy.uint8), value.dtype.name, value.shape)
            case bool() | None | str():
                return changed(entry, text=str(value))
            case float():
                return self._stored(entry, numpy.array([value], "<f8").view(numpy.uint8), "float64", ())
            case int() if value in INT64:
                return self._stored(entry, numpy.array([value], "<i8").view(numpy.uint8), "int64", ())
            case _:
                return changed(entry, text=repr(value))

    def _stored(self, entry: InspectedValue, raw: Any, dtype: str, shape: tuple[int, ...]) -> InspectedValue:
        digest = xxhash.xxh3_128_hexdigest(raw)
        if not (self._tensors / digest).exists():
            _put(self._tensors / digest, raw)
        return changed(entry, bytes=digest, dtype=dtype, shape=list(shape))

    def _write(self, name: str, step: int) -> None:
        moment = InspectedMoment(step=step, entries=list(self._entries.values()), script=self._script)
        _put(self._folder / name, encode(moment))
        self._entries.clear()
        self._script = {}


def _put(path: Path, data: Any) -> None:
    """Write a whole file: other ranks may write the same at the same time, and a kill may come in between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def _raw(tensor: torch.Tensor) -> Any:
    """The tensor's elements in order, as bytes."""
    with torch.no_grad():
        dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        dense = dense.cpu().resolve_conj().resolve_neg().contiguous()
        if dense.is_complex():
            dense = torch.view_as_real(dense).contiguous()
        return dense.reshape(-1).view(torch.uint8).numpy()


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value inside containers and objects with its path ("0/state/weight/exp_avg"), in their own order."""
    match value:
        case torch.Tensor() | numpy.ndarray() | numpy.generic() | str() | bytes() | int() | float() | complex() | None:
            yield path, value
        case Mapping():
            for key, child in value.items():
                yield from _leaves(_join(path, key), child)
        case list() | tuple():
            for number, child in enumerate(value):
                yield from _leaves(_join(path, number), child)
        case _:
            # An object without attributes has only its type: its repr may hold an address.
            yield path, type(value).__qualname__
            for key, child in getattr(value, "__dict__", {}).items():
                yield from _leaves(_join(path, key), child)


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)
