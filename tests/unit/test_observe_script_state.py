"""What a script keeps beside a checkpoint: every value it can reach, and nothing of it touched."""

import array
import ctypes
import functools
import itertools
import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy
import pytest
import torch
from accelerate.utils import is_xpu_available

from chaosrun.observe.hooks import uncompiled
from chaosrun.observe.script_state import LARGEST_BYTES, script_state


class Meter:
    shared = 0

    def __init__(self) -> None:
        self.total = 0.0

    @property
    def trap(self) -> float:
        raise AssertionError("a property was run")


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Settings(dict[str, float]):
    def items(self) -> Any:
        raise AssertionError("a method was run")


def of_this_thread() -> threading.local:
    local = threading.local()
    local.rate = 1.0
    return local


def counting() -> Callable[[], None]:
    count = 0

    def hook() -> None:
        nonlocal count
        count += 1

    return hook


def cycle() -> Iterator[int]:
    while True:
        yield from (1, 2, 3)


def add(meter: Any, name: str, value: float) -> None:
    setattr(meter, name, getattr(meter, name) + value)


@functools.lru_cache
def cached(value: int) -> int:
    return value


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.weight = torch.nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("make", "change", "path"),
    [
        (lambda: {"scale": 8.0}, lambda held: held.update(scale=12.0), "it/scale"),
        (Meter, lambda meter: add(meter, "total", 1.0), "it/total"),
        (Slotted, lambda slotted: add(slotted, "count", 1), "it/count"),
        (lambda: deque([torch.zeros(2)]), lambda replay: replay[0].add_(1), "it/0"),
        (lambda: [1, 2], lambda history: history.append(3), "it"),
        (lambda: {"seen": {1, 2}}, lambda held: held["seen"].add(3), "it/seen"),
        (counting, lambda hook: hook(), "it/count"),
        (cycle, next, "it/line"),
        (itertools.count, next, "it/at/0"),
        (lambda: iter([1, 2, 3]), next, "it/at/1"),
        (lambda: itertools.permutations(range(3)), next, "it/at/1/1"),
        (lambda: iter({"a": 1.0, "b": 0.5}.values()), next, "it/at/0/0"),
        (lambda: iter("abc"), next, "it/at/1"),
        (lambda: Settings(rate=1.0), lambda held: held.update(rate=0.5), "it/rate"),
        (lambda: ContextVar("rate", default=1.0), lambda variable: variable.set(0.5), "it/value"),
        (of_this_thread, lambda local: add(local, "rate", 1.0), "it/rate"),
        (lambda: array.array("d", [1.0]), lambda norms: norms.append(2.0), "it"),
        (lambda: bytearray(2), lambda held: held.__setitem__(0, 1), "it"),
        (lambda: ctypes.c_double(2.0), lambda number: add(number, "value", 1.0), "it"),
        (lambda: deque([numpy.float32(1)]), lambda norms: norms.append(numpy.float32(2)), "it"),
        (lambda: numpy.random.PCG64(0), lambda bits: bits.advance(1), "it"),
        (torch.Generator, lambda generator: torch.rand(1, generator=generator), "it"),
        (lambda: numpy.random.default_rng(0), lambda generator: generator.random(), "it"),
        (lambda: random.Random(0), lambda generator: generator.random(), "it"),
        (lambda: functools.partial(counting()), lambda partial: partial(), "it/func/count"),
        (Layer, lambda layer: add(layer, "calls", 1), "it/calls"),
        (lambda: torch.nn.Sequential(Layer()), lambda model: add(model[0], "calls", 1), "it/0/calls"),
        (lambda: torch.nn.Sequential(Layer()), lambda model: model.eval(), "it/training"),
        (lambda: Meter().__init__, lambda bound: add(bound.__self__, "total", 1.0), "it/self/total"),
        (lambda: cached, lambda function: function(random.random()), "it/cache"),
    ],
)
def test_a_change_is_seen_where_it_is(make: Callable[[], Any], change: Callable[[Any], Any], path: str) -> None:
    it = make()
    before = script_state({"it": it})
    assert script_state({"it": it}) == before
    change(it)
    after = script_state({"it": it})
    assert path in {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_the_default_of_a_context_variable_is_its_value() -> None:
    told = script_state({"set": ContextVar("set", default=2.0), "unset": ContextVar[float]("unset")})
    assert (told["set/value"], told["unset/value"]) == ("2.0", "None")


def test_a_class_attribute_is_seen() -> None:
    meter = Meter()
    before = script_state({"it": meter})
    try:
        Meter.shared = 1
        assert script_state({"it": meter}) == {**before, "it/class/shared": "1"}
    finally:
        Meter.shared = 0


def test_what_is_saved_and_what_is_large_is_left_alone() -> None:
    layer = Layer()
    before = script_state({"it": layer, "data": torch.zeros(LARGEST_BYTES), "known": (known := Meter())}, known=[id(known)])
    assert not [name for name in before if name.startswith("known")] and before["data"] == "large"
    with torch.no_grad():
        layer.weight.add_(1)
    saved = [id(tensor) for tensor in (*layer.parameters(), *layer.buffers())]
    assert script_state({"it": layer})["it/weight"] != before["it/weight"]
    assert script_state({"it": layer}, known=saved)["it/calls"] == "0" and "it/weight" not in script_state(
        {"it": layer}, known=saved
    )


def test_the_cache_of_a_library_s_function_is_none_of_the_script_s_values() -> None:
    library, own = is_xpu_available, cached
    assert "it/cache" not in script_state({"it": library}), "accelerate's, which the script has imported"
    assert "it/cache" in script_state({"it": own})


def test_how_often_a_cache_was_asked_is_no_state() -> None:
    cached(0.5)
    before = script_state({"it": cached})
    cached(0.5)
    assert script_state({"it": cached}) == before


class Touchy:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("do not look")


class Draining(list[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a container of the script's was iterated")


def test_what_must_not_be_touched_is_left_out() -> None:
    held = script_state({"touchy": Touchy(), "draining": Draining([1]), "long": list(range(10**6)), "after": 1})
    assert held == {"draining": "a container", "long": "large", "after": "1"}


def test_hooks_of_chaosrun_are_no_state_of_the_script() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    before = script_state({"optimizer": optimizer})
    optimizer.register_step_pre_hook(uncompiled(functools.partial(print, end="")))
    assert script_state({"optimizer": optimizer}) == before


def test_a_cycle_and_a_flood_come_to_an_end() -> None:
    ring: list[Any] = [{}]
    ring[0]["ring"] = ring
    assert script_state({"ring": ring}) == {}
    assert len(script_state({"flood": {number: number for number in range(10**4)}}, most=50)) == 50


def test_a_sparse_tensor_is_told_like_any_other() -> None:
    assert script_state({"x": torch.eye(3).to_sparse()}) != {}


def test_the_order_of_an_ordered_dict_is_its_own() -> None:
    """A cache by age, which a restart rebuilds in that order: keys that are no names are told by their number."""
    moved = OrderedDict([((0, 1), "a"), ((2, 3), "b")])
    moved.move_to_end((0, 1))
    rebuilt = OrderedDict([((2, 3), "b"), ((0, 1), "a")])
    assert script_state({"cache": moved}) == script_state({"cache": rebuilt})
