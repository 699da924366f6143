"""What the digest of a batch sees, and what it can be given."""

import argparse
import copy
import functools
import logging
import random
from collections import UserDict
from collections.abc import ItemsView, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from chaosrun.observe.contents import MOST_ENTRIES, address_of, content_digest, contents, input_digest


def test_tensors_among_other_inputs_have_a_digest_of_their_own() -> None:
    tensor, other = torch.arange(3.0), torch.arange(3.0) + 1
    named: dict[str, Any] = {}
    alone = input_digest([(tensor,), named])
    assert alone == content_digest([(tensor,), named]) and "/" not in alone
    told = [input_digest([(tensor, log), named]) for log in ([], [0.5], [0.25], "a text", None)]
    assert len(set(told)) == len(told) and len({each.partition("/")[2] for each in told}) == 1
    assert input_digest([(other, [0.5]), named]).partition("/")[2] != told[1].partition("/")[2] != ""
    assert "/" not in input_digest([(["some", "texts"],), named])


class Slotted:
    __slots__ = ("image", "label")

    def __init__(self, image: torch.Tensor, label: int) -> None:
        self.image, self.label = image, label


class Plain:
    def __init__(self, image: torch.Tensor) -> None:
        self.image = image


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2), torch.ones(2)),
        (Slotted(torch.zeros(2), 1), Slotted(torch.zeros(2), 2)),
        (Slotted(torch.zeros(2), 1), Slotted(torch.ones(2), 1)),
        (Plain(torch.zeros(2)), Plain(torch.ones(2))),
        ({1, 2}, {1, 3}),
        (frozenset({"a"}), frozenset({"b"})),
        (numpy.array(["a", None], dtype=object), numpy.array(["b", None], dtype=object)),
        ([[1], [2]], [[1, 2]]),
        ({"a": 1}, {"a": 2}),
    ],
)
def test_other_contents_have_another_digest(one: Any, other: Any) -> None:
    assert content_digest(one) != content_digest(other)
    assert content_digest(one) == content_digest(one)


class OfRows(UserDict[str, torch.Tensor]):
    """As tensordict's: its own iteration gives rows, and fails for a single one."""

    def __iter__(self) -> Iterator[str]:
        raise TypeError("iteration over a 0-d tensordict")

    def items(self) -> ItemsView[str, torch.Tensor]:
        return self.data.items()


def test_a_mapping_that_iterates_over_its_rows_counts_by_its_items() -> None:
    one, other = ({"a": torch.full((2,), number)} for number in (0.0, 1.0))
    assert input_digest([(OfRows(one),), {}]) == input_digest([(one,), {}]) != input_digest([(OfRows(other),), {}])
    assert contents({"state": OfRows(one)}) == contents({"state": one})


def test_the_order_of_a_set_does_not_count() -> None:
    words = [f"word-{number}" for number in range(50)]
    assert content_digest(set(words)) == content_digest(set(reversed(words)))


def test_a_batch_that_refers_to_itself() -> None:
    one, other = Plain(torch.zeros(2)), Plain(torch.ones(2))
    for batch in (one, other):
        batch.itself = batch  # type: ignore[attr-defined]
    assert content_digest(one) != content_digest(other)
    # The same object twice is no cycle.
    assert content_digest([one.image, one.image]) == content_digest([torch.zeros(2), torch.zeros(2)])


def test_what_a_saved_state_holds_is_told_by_path() -> None:
    state = {"step": 3, "best": torch.tensor(0.5), "path": "a/b", "model": {"w": torch.zeros(2)}, "on": True, "seen": [1, 2]}
    held = contents(state)
    assert held == {"step": "3", "best": "0.5", "model/w": content_digest(torch.zeros(2)), "on": "True", "seen": held["seen"]}
    assert held["step"] == contents({"step": torch.tensor(3.0)})["step"]
    changed = contents({**state, "seen": [1, 3], "model": {"w": torch.ones(2)}})
    assert {name for name in held if held[name] != changed[name]} == {"model/w", "seen"}


def test_what_a_restart_is_told_and_counts_is_no_state() -> None:
    told = {"args": {"resume": True, "lr": 0.1}, "resumed": True, "n_restarts": 2, "config": {"a": 1}, "elapsed_s": 3.5}
    assert contents(told) == {}
    assert contents({"config": {"scale": torch.ones(2)}, "kept": 1}).keys() == {"kept"}
    parsed = argparse.Namespace(resume=True, start_step=12)
    assert contents({"opt": parsed, "settings": parsed, "nested": {"cfg": vars(parsed)}, "cfg": vars(parsed)}) == {}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "peak": 3}
    assert contents({"opt": optimizer}).keys() == {"opt/state/0/exp_avg", "opt/peak"}


def test_three_values_in_a_row_are_told_whatever_they_are() -> None:
    streams = (torch.get_rng_state(), random.getstate(), numpy.random.get_state())
    held = contents(
        {"average": [torch.ones(2), torch.ones(3), torch.ones(4)], "rng": streams, "all": (numpy.ones(2), [1], None)}
    )
    assert {"average/0", "average/1", "average/2", "all/0"} <= held.keys()
    assert "rng" not in held and not [name for name in held if name.startswith("rng/")]


def test_a_large_state_is_told_in_fewer_words() -> None:
    state = {
        "model": {f"layer {n}": {"w": torch.full((1,), 0.5), "b": torch.ones(1)} for n in range(MOST_ENTRIES - 9)},
        "step": 3,
    }
    held = contents(state)
    assert len(held) < MOST_ENTRIES and held["step"] == "3"
    state["model"]["layer 7"]["b"] = torch.zeros(1)
    assert {name for name, value in contents(state).items() if value != held[name]} == {"model/layer 7"}


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self) -> None: ...


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "held",
    [
        torch.nn.functional.relu,
        torch.relu,
        functools.partial(torch.nn.functional.relu, inplace=True),
        Holder(1).method,
        logging.getLogger("training"),
        torch,
        argparse.Namespace(act=lambda x: x),
        torch.utils.data.DataLoader([1, 2, 3]),  # pyright: ignore[reportArgumentType]
        Holder(functools.lru_cache(lambda: 1)),
    ],
    ids=["function", "builtin", "partial", "method", "logger", "module", "lambda", "loader", "cached"],
)
def test_what_leads_to_all_of_a_program_counts_by_its_name(held: Any) -> None:
    """Every attribute of every module was looked into, each once for each way there: a save of it never came to an end."""
    assert content_digest(Holder(held)) == content_digest(Holder(held)) != content_digest(Holder(print))
    assert contents({"model": {"act": held}})


def test_each_object_is_looked_into_once_and_a_deep_one_not_to_its_end() -> None:
    shared: Any = Holder(torch.ones(2))
    for _ in range(60):
        shared = Holder([shared, shared])
    assert content_digest(shared)
    deep: Any = None
    for _ in range(5000):
        deep = Holder(deep)
    assert content_digest(deep)


def test_what_is_shared_is_equal_to_two_of_its_kind() -> None:
    """Saved and loaded, two names of one object may be two objects."""
    one = Holder(torch.ones(2))
    assert content_digest([one, one]) == content_digest([one, Holder(torch.ones(2))]) != content_digest([one, Holder(1)])


def test_optimizers_and_schedules_that_are_saved_whole_are_told_by_their_state() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    (weight * 2).sum().backward()
    optimizer.step()
    scheduler.step()
    found = contents({"optimizer": optimizer, "scheduler": scheduler})
    assert found == contents({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    assert "optimizer/state/0/exp_avg" in found and found["scheduler/last_epoch"] == "1"
    assert content_digest(Holder(optimizer)) == content_digest(Holder(copy.deepcopy(optimizer)))


def _jagged(*rows: list[float]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def _nested(*rows: list[float]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.tensor(row) for row in rows])


def _quantized(value: float, scale: float = 0.1) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor([value, 1.0]), scale, 0, torch.qint8)


def _by_channel(first: float) -> torch.Tensor:
    scales, zeros = torch.tensor([first, 0.2]), torch.tensor([0, 1])
    return torch.quantize_per_channel(torch.tensor([[first], [0.2]]), scales, zeros, 0, torch.qint8)


def _masked(value: float, *, shown: bool) -> torch.Tensor:
    return torch.masked.masked_tensor(torch.tensor([value, 2.0]), torch.tensor([shown, True]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: _jagged([1.0, 2.0], [3.0]), lambda: _jagged([1.0, 2.0], [4.0])),
        (lambda: _jagged([1.0, 2.0], [3.0]), lambda: _jagged([1.0], [2.0, 3.0])),
        (lambda: _nested([1.0, 2.0], [3.0]), lambda: _nested([1.0], [2.0, 3.0])),
        (lambda: _quantized(0.5), lambda: _quantized(0.7)),
        (lambda: _quantized(0.0, 0.1), lambda: _quantized(0.0, 0.2)),
        (lambda: _by_channel(0.1), lambda: _by_channel(0.3)),
        (lambda: torch.eye(3).to_sparse_csr(), lambda: (2 * torch.eye(3)).to_sparse_csr()),
        (lambda: torch.eye(3).to_sparse_csc(), lambda: torch.eye(3).flip(0).to_sparse_csc()),
        (lambda: _masked(1.0, shown=True), lambda: _masked(3.0, shown=True)),
        (lambda: _masked(1.0, shown=True), lambda: _masked(1.0, shown=False)),
        (lambda: torch.ones(2, device="meta"), lambda: torch.ones(3, device="meta")),
    ],
)
def test_a_tensor_without_plain_memory_counts_by_its_parts(make: Any, other: Any) -> None:
    assert content_digest({"x": make()}) == content_digest({"x": make()})
    assert content_digest({"x": make()}) != content_digest({"x": other()})


def test_a_path_below_the_folder_of_the_leg_is_the_same_in_each_leg(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(leg: str, name: str) -> str:
        monkeypatch.setenv("CHAOSRUN_OUTPUT", f"/runs/one/{leg}/output")
        path = f"/runs/one/{leg}/folders/above/work/{name}"
        return content_digest({"path": path, "as_path": Path(path), "raw": path.encode(), "x": torch.ones(2)})

    assert digest("reference", "imgs/001.txt") == digest("chaos", "imgs/001.txt")
    assert digest("reference", "imgs/001.txt") != digest("reference", "imgs/002.txt")
    elsewhere = ["/data/one/001.txt", "/data/other/001.txt"]
    assert content_digest(elsewhere[0]) != content_digest(elsewhere[1])


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_around_others_has_no_memory_of_its_own() -> None:
    assert address_of(_masked(1.0, shown=True)) == 0
    assert address_of(torch.zeros(2)) != 0
