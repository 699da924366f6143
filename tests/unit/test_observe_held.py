"""What a value holds: a change anywhere in it is seen, or the value is refused. Nothing is left out in silence."""

import array
import collections
import contextvars
import copy
import ctypes
import enum
import functools
import importlib.util
import io
import itertools
import logging
import math
import operator
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from chaosrun.observe import own
from chaosrun.observe.held import _of_sgd, added, held, is_of_the_job


class Holder:
    total = 0
    take: Any = None


class Slotted:
    __slots__ = ("count",)


class Kind(enum.Enum):
    ONE = 1


class Numbered(enum.IntEnum):
    ONE = 1


class Listing(list[int], enum.Enum):
    ONE = ()


class Valued(enum.Enum):
    ONE = [1]  # noqa: RUF012


class Flagged(enum.Flag, boundary=enum.KEEP):
    ONE = 1


class Native(bytearray):
    pass


class Drawing(random.Random):
    pass


class Lossy:
    def __init__(self) -> None:
        self.count = 0

    def __getstate__(self) -> None:
        raise AssertionError("an object of the script was asked to tell of itself")


class Telling(bytearray):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return bytes, (b"always the same",)


class Loads(Mapping[str, int]):
    """A library's lazy object: looking at an item would load it."""

    def __init__(self) -> None:
        self.loaded = 0

    def __getitem__(self, key: str) -> int:
        raise AssertionError("an item was loaded")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("it was gone through")

    def __len__(self) -> int:
        raise AssertionError("it was counted")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was made up")


def looked(value: Any, known: Mapping[int, str] | None = None) -> tuple[str, list[str]]:
    look = own._Look(dict(known or {}))
    look.at("it", value)
    return look.digest(), look.unseen


def setting(name: str, to: Any = 1) -> Callable[[Any], None]:
    return lambda value: setattr(value, name, to)


def counting() -> Callable[[], int]:
    count = 0

    def more() -> int:
        nonlocal count
        count += 1
        return count

    return more


def with_attribute(value: Any) -> Any:
    value.count = 0
    return value


def loops(over: Any) -> Iterator[None]:
    for _ in over:
        yield


def cached() -> Callable[[int], list[int]]:
    remembered = functools.lru_cache(lambda number: [number])
    remembered(0)
    remembered(0)
    return remembered


def executed() -> Callable[[], None]:
    names: dict[str, Any] = {}
    exec("n = 0\ndef more():\n    global n\n    n += 1", names)
    return names["more"]


def two() -> list[Holder]:
    return [Holder(), Holder()]


def swapped(pair: list[Any]) -> None:
    pair[0].reverse() if isinstance(pair[0], list) else pair[0].rotate()


def weakly() -> list[Any]:
    one, other = two()
    other.total = 5
    return [one, other, weakref.ref(one)]


def steps() -> Iterator[int]:
    count = 0
    while True:
        count += 1
        yield count


def steps_of_two() -> Callable[[], int]:
    def more() -> int:
        return 1

    return more


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "attribute": (Holder, setting("total")),
    "slot": (lambda: with_attribute(Slotted()), setting("count")),
    "class": (lambda: Holder, setting("total", 9)),
    "namespace": (lambda: types.SimpleNamespace(count=0), setting("count")),
    "order of keys": (lambda: collections.OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "order of a set": (lambda: {0, 8}, lambda value: (value.clear(), value.update((8,)), value.update((0,)))),
    "default factory": (lambda: collections.defaultdict(counting()), lambda value: value.default_factory()),
    "attribute of a counter": (lambda: with_attribute(collections.Counter()), setting("count")),
    "rotation": (lambda: [deque(pair := two()), *pair], swapped),
    "alias": (lambda: [zero := torch.zeros(3), zero], lambda value: value.__setitem__(1, torch.zeros(3))),
    "closure": (counting, lambda value: value()),
    "generator": (steps, next),
    "iterator": (itertools.count, next),
    "bound method of a list": (lambda: [1, 2, 3].pop, lambda value: value()),
    "next of an iterator": (lambda: iter([1, 2, 3]).__next__, lambda value: value()),
    "partial": (lambda: with_attribute(functools.partial(print)), setting("count")),
    "library's wrapper": (lambda: torch.no_grad()(counting()), lambda value: value()),
    "order in which a generator goes": (lambda: loops(deque(range(9))), next),
    "what a cache holds": (cached, lambda value: value(0).append(1)),
    "gradient": (lambda: torch.zeros(3, requires_grad=True), setting("grad", torch.ones(3))),
    "gradient of a number": (lambda: torch.zeros((), requires_grad=True), setting("grad", torch.ones(()))),
    "alias of a plain list": (lambda: [numbers := [1], numbers], lambda value: value.__setitem__(1, [1])),
    "cache": (lambda: functools.lru_cache(abs), lambda value: value(1)),
    "enum's attribute": (lambda: with_attribute(Kind.ONE), setting("count")),
    "enum's private attribute": (lambda: Kind.ONE, setting("_count")),
    "items of an enum's member": (lambda: Listing.ONE, lambda value: value.append(3)),
    "items of an enum's value": (lambda: Valued.ONE, lambda value: value.value.append(3)),
    "flags without a name": (lambda: [Flagged(4)], lambda value: value.__setitem__(0, Flagged(8))),
    "number of an enum's attribute": (lambda: with_attribute(Numbered.ONE), setting("count")),
    "module": (lambda: with_attribute(types.ModuleType("settings")), setting("count")),
    "executed code": (executed, lambda value: value()),
    "semaphore": (lambda: threading.Semaphore(4), lambda value: value.acquire()),
    "event": (threading.Event, lambda value: value.set()),
    "lock": (threading.Lock, lambda value: value.acquire()),
    "logging": (lambda: logging.LoggerAdapter(logging.getLogger(), {"n": 0}), lambda value: value.extra.update(n=1)),
    "written in C": (lambda: array.array("i", [0]), lambda value: value.append(1)),
    "of a type in C": (lambda: Native(b"ab"), lambda value: value.append(1)),
    "weights nobody saves": (lambda: torch.nn.Linear(2, 2), lambda value: value.bias.data.add_(1)),
    "mode of a module": (lambda: torch.nn.Linear(2, 2), lambda value: value.eval()),
    "library's class": (lambda: torch.nn.Identity(), lambda value: setattr(torch.nn.Identity, "count_of_calls", 1)),
    "weak reference": (weakly, lambda value: value.__setitem__(2, weakref.ref(value[1]))),
    "state that it would not tell": (Lossy, setting("count")),
    "generator of numbers": (lambda: random.Random(1), lambda value: value.random()),
    "children of a generator": (lambda: numpy.random.default_rng(1), lambda value: value.spawn(1)),
    "name with underscores": (lambda: with_attribute(type("Own", (Holder,), {"__count__": 0})), setting("__count__")),
    "code of a function": (steps_of_two, lambda value: setattr(value, "__code__", (lambda: 2).__code__)),
    "strides of an array": (lambda: [numpy.ones((3, 3))], lambda value: value.__setitem__(0, numpy.ones((3, 3), order="F"))),
    "array made read-only": (lambda: numpy.ones(3), lambda value: value.setflags(write=False)),
    "longest a deque may be": (lambda: [deque([1], maxlen=3)], lambda value: value.__setitem__(0, deque([1], maxlen=4))),
    "memory shared by tensors": (
        lambda: [zero := torch.zeros(3), zero.detach()],
        lambda value: value.__setitem__(1, torch.zeros(3)),
    ),
    "memory shared by arrays": (lambda: [zero := numpy.zeros(3), zero[:]], lambda value: value.__setitem__(1, numpy.zeros(3))),
    "graph of a tensor": (lambda: [torch.ones(2, requires_grad=True) * 1], lambda value: value[0].detach_().requires_grad_()),
    **{
        f"which of two: {one!r:.20}": (lambda one=one: [one], lambda value, other=other: value.__setitem__(0, other))
        for one, other in (
            *((torch.float32, torch.bfloat16), (torch.strided, torch.sparse_coo), (torch.device("cpu"), torch.device("meta"))),
            *((torch.add, torch.mul), (math.sin, math.cos), (str.upper, str.lower), (torch.Tensor.add, torch.Tensor.mul)),
            *((numpy.sin, numpy.cos), (math, operator), (torch.nn.L1Loss, torch.nn.MSELoss), (list[int], list[str])),
            *((lambda: 1, lambda: 2), (eval("lambda: 1"), eval("lambda: 2")), (steps(), loops(()))),
        )
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    make, change = CHANGES[name]
    value = make()
    before = looked(value)
    assert before[1] == [] and looked(value) == before, "looking changes nothing, and says the same again"
    change(value)
    assert looked(value)[0] != before[0]
    if name == "library's class":
        del torch.nn.Identity.count_of_calls  # pyright: ignore[reportAttributeAccessIssue]


REFUSED: dict[str, Callable[[], Any]] = {
    "an open file": lambda: io.StringIO("abc"),
    "a context variable": lambda: contextvars.ContextVar("count"),
    "of a thread": threading.local,
    "a pointer": lambda: ctypes.pointer(ctypes.c_int(1)),
    "attributes beside what is compared as a whole": lambda: with_attribute(Drawing(1)),
    "a __reduce__ of its own": lambda: Telling(b"ab"),
    "a view of memory": lambda: memoryview(b"ab"),
    "a list that is too long": lambda: [0] * 70_000,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_looked_into_is_named(name: str) -> None:
    _, unseen = looked([REFUSED[name]()])
    assert len(unseen) == 1 and unseen[0].startswith("it"), unseen


def test_what_a_script_puts_in_place_of_a_standard_stream_is_no_standard_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what was printed."""
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert looked([sys.stdout])[1] == ["it/0 (StringIO: ValueError)"]


def test_a_lazy_object_is_not_made_to_load() -> None:
    value = Loads()
    before = looked(value)
    assert before[1] == []
    value.loaded = 1
    assert looked(value)[0] != before[0]


def test_circles_end_and_many_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    circle: list[Any] = [Holder()]
    circle.append(circle)
    assert looked(circle)[1] == []
    monkeypatch.setattr(own, "MOST_OBJECTS", 100)
    assert looked([Holder() for _ in range(101)])[1] == ["more than 100 objects"]


def test_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "MOST_BYTES", 100)
    assert looked([torch.zeros(20)])[1] == []
    assert looked([torch.zeros(20), torch.zeros(20)])[1] == ["it/1 (Tensor: ValueError)"]


def test_which_parameter_it_is_counts_where_their_values_are_known() -> None:
    model = torch.nn.Linear(2, 2)
    known = {id(model.weight): "weight", id(model.bias): "bias"}
    assert looked(deque([model.weight, model.bias]), known) != looked(deque([model.bias, model.weight]), known)
    weights = looked(model, known)
    model.weight.data.add_(1)
    assert looked(model, known) == weights, "what a checkpoint holds is compared there"


def test_of_a_librarys_wrapper_only_what_was_added_counts() -> None:
    model: Any = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(model)
    model.module = torch.nn.Linear(2, 2)
    model.reducer = object()
    assert list(added(model)) == []
    model.calls_so_far = 1
    assert list(added(model)) == [("calls_so_far", 1)]
    assert ("calls_so_far", 1) in held(model)


def test_what_the_scripts_own_class_adds_to_a_librarys_counts() -> None:
    class Counting(torch.nn.parallel.DistributedDataParallel):
        def count(self) -> None:
            self.calls = 1

    model: Any = Counting.__new__(Counting)
    torch.nn.Module.__init__(model)
    model.count()
    assert list(added(model)) == [("calls", 1)]


def test_copies_made_in_another_order_are_equal() -> None:
    """The negative control of all above: what is equal looks equal, whenever and however it was made."""
    one = {"holder": Holder(), "weights": torch.nn.Linear(2, 2), "numbers": [1, 2], "next": itertools.count(5)}
    assert looked(copy.deepcopy(one)) == looked(one)


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 2), counting])
def test_the_address_that_torch_compile_keeps_is_no_value(make: Callable[[], Any]) -> None:
    value = make()
    value._torchdynamo_wrapper_id = 139803123579920
    before = looked(value)
    value._torchdynamo_wrapper_id = 139803131111248
    assert looked(value) == before and before[1] == []


def test_a_table_of_pandas_is_looked_into_and_what_reads_remember_is_no_part_of_it() -> None:
    """No leg of a script that keeps one ever ended early: pickle cannot read its caches."""
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    days = pandas.date_range("2024-01-01", periods=6)
    table = pandas.DataFrame({"number": range(6), "text": list("aabbcc"), "day": days}, index=list("uvwxyz"))
    before = looked(table)
    assert table.loc["x", "number"] == 3 and list(table["text"].unique()) == ["a", "b", "c"] and table.describe() is not None
    assert looked(table) == before and before[1] == []
    digests = [before[0]]
    for change in (
        lambda: table.__setitem__("number", table["number"] + 1),
        lambda: table.loc.__setitem__(("x", "text"), "c"),
        lambda: table.loc.__setitem__(("x", "day"), days[0]),
        lambda: table.attrs.update(step=1),
        lambda: object.__setattr__(table, "step", 1),
        lambda: object.__setattr__(table, "_count", 1),
        lambda: setattr(table.index, "_count", 1),
        lambda: setattr(table.index, "_count", 2),
    ):
        change()
        digests.append(looked(table)[0])
    assert len(set(digests)) == 9


def test_what_is_of_the_job(tmp_path: Path) -> None:
    """What a user installs for himself, or a virtual environment finds in its system, is none of it."""
    for folder in ("src", "site-packages", "dist-packages"):
        (tmp_path / folder / "a_library").mkdir(parents=True)
        (tmp_path / folder / "a_library" / "loss.py").touch()
        assert is_of_the_job(str(tmp_path / folder / "a_library" / "loss.py")) is (folder == "src")
    assert is_of_the_job(__file__)
    assert not any(map(is_of_the_job, (None, "<string>", "<frozen importlib>", own.__file__, torch.__file__, "_ops.py")))


@pytest.mark.parametrize("run_as_a_module", [False, True])
def test_a_script_in_a_folder_of_packages_is_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_as_a_module: bool
) -> None:
    packages = tmp_path / "dist-packages"
    script, beside, library = packages / "job" / "train.py", packages / "job" / "model.py", packages / "a_library" / "loss.py"
    environment = packages / "job" / ".venv" / "lib" / "site-packages" / "loss.py"
    for file in (script, beside, library, environment):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "work").symlink_to(packages / "job")
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "work" / "train.py")
    main.__spec__ = importlib.util.spec_from_loader("job.train", None) if run_as_a_module else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    of_the_job = [file.parent.name for file in (script, beside, library, environment) if is_of_the_job(str(file))]
    assert of_the_job == ([] if run_as_a_module else ["job", "job"])


@pytest.mark.parametrize(("folder", "refused"), [(sysconfig.get_path("purelib"), True), ("/srv/job", False)])
def test_a_loop_of_an_installed_package_is_refused(folder: str, refused: bool) -> None:
    """Whose variables, classes and modules nobody looks at."""
    text = "def loop(look, accelerator):\n    return list(look(accelerator))"
    names: dict[str, Any] = {"__name__": "trainers.loop"}
    exec(compile(text, f"{folder}/trainers/loop.py", "exec"), names)
    said = names["loop"](own._elsewhere, types.SimpleNamespace(_dataloaders=[]))
    assert said == (["the training loop is in an installed package (trainers.loop)"] if refused else [])


def test_asking_what_an_optimizer_holds_puts_no_hooks_on_a_class_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    step: Any = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step)
    _of_sgd.__wrapped__()
    assert not hasattr(torch.optim.SGD.step, "hooked")
