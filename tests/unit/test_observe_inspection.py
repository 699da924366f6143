"""What an inspected step leaves on disk, and that looking at a training does not change it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from fresh import forget_accelerate

from chaosrun.observe.inspection import Inspector
from chaosrun.protocol.state import TrainingState
from chaosrun.records.inspection import QUANTITIES
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.records.position import Position
from chaosrun.verify.inspection import compare_inspections
from tests.integration.ranks import make_orders

CPU = torch.device("cpu")


def order(leg: LegLayout, inspect: tuple[int, ...]) -> WorkerOrder:
    return replace(make_orders(leg.path, "", workers=1)[0], args=(), inspect=inspect)


def train(leg: LegLayout | None, *, steps: int = 3, inspect: tuple[int, ...] = (2,), nudge_at: int | None = None) -> str:
    """Train a model in bfloat16 with dropout and BatchNorm, two micro-batches a step; returns digests of what came of it.
    `nudge_at`: flip the lowest bit of a weight before this step."""
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, _ = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    state = TrainingState(accelerator)
    meter = SimpleNamespace(state_dict=lambda: {"best": 0.5, "seen": 3, "name": "loss", "none": None}, load_state_dict=id)
    state.register("meter", meter)
    inspector = Inspector(state, order(leg, inspect), leg, CPU) if leg else None
    if inspector:
        inspector.begin(Position(), state.parameters())
    for step in range(1, steps + 1):
        if step == nudge_at:
            next(model.parameters()).detach().view(torch.int16).view(-1)[5] ^= 1
        for micro_batch in range(2):
            batch = {"x": torch.full((6, 4), step + micro_batch / 2, dtype=torch.bfloat16), "note": numpy.arange(3), "k": "v"}
            if inspector:
                inspector.batch(batch, [step, micro_batch])
            loss = model(batch["x"] + torch.rand(6, 4).to(torch.bfloat16)).square().mean()
            accelerator.backward(loss)
            if inspector:
                inspector.losses([loss])
        if inspector:
            inspector.before_optimizer_step([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        optimizer.zero_grad()
        if inspector:
            inspector.step()
    if inspector:
        inspector.end()
    digests = json.dumps(state.digests())
    forget_accelerate()
    return digests


def moment(leg: LegLayout, name: str) -> dict[str, Any]:
    return json.loads((leg.attempt(1).inspection(0) / name).read_text())


def test_looking_changes_no_number(tmp_path: Path) -> None:
    assert train(LegLayout(tmp_path), inspect=(1, 2, 3)) == train(None)


def test_the_ordered_steps_and_the_end_are_written(tmp_path: Path) -> None:
    train(leg := LegLayout(tmp_path), inspect=(2, 3, 9))
    names = sorted(path.name for path in leg.attempt(1).inspection(0).iterdir())
    assert names == ["end.json", "step-00000002.json", "step-00000003.json"]
    assert moment(leg, "end.json")["step"] == 3
    assert not list(leg.tensors.glob(".*"))


def test_every_quantity_is_there(tmp_path: Path) -> None:
    train(leg := LegLayout(tmp_path))
    entries = moment(leg, "step-00000002.json")["entries"]
    found = {(entry["quantity"], entry["micro_batch"]) for entry in entries}
    twice = {"sample ids", "batch", "rng", "loss", "local gradients"}
    assert found == {(quantity, number) for quantity in QUANTITIES for number in ((0, 1) if quantity in twice else (0,))}
    named = {(entry["quantity"], entry["name"]): entry for entry in entries}
    assert named["batch", "x"]["dtype"] == "bfloat16"
    assert named["batch", "x"]["shape"] == [6, 4]
    assert named["batch", "note"]["dtype"] == "int64"
    assert named["batch", "k"]["text"] == "v"
    assert named["sample ids", ""]["text"] == "[2, 1]"
    assert named["registered state", "meter/none"]["text"] == "None"
    assert named["registered state", "meter/best"]["dtype"] == "float64"
    assert {"0.weight", "3.bias"} <= {name for quantity, name in named if quantity == "local gradients"}
    assert {"1.running_mean"} <= {name for quantity, name in named if quantity == "buffers"}
    assert {name for quantity, name in named if quantity == "rng"} >= {"torch", "python/1", "numpy/1"}


def test_bytes_are_the_tensors_own_and_are_stored_once(tmp_path: Path) -> None:
    train(leg := LegLayout(tmp_path), inspect=(2, 3))
    second, third = (moment(leg, f"step-0000000{step}.json")["entries"] for step in (2, 3))
    after = {entry["name"]: entry for entry in second if entry["quantity"] == "parameters after"}
    before = {entry["name"]: entry for entry in third if entry["quantity"] == "parameters before"}
    assert {name: entry["bytes"] for name, entry in after.items()} == {name: entry["bytes"] for name, entry in before.items()}
    batch = next(entry for entry in second if entry["quantity"] == "batch" and entry["name"] == "x")
    assert (leg.tensors / batch["bytes"]).read_bytes() == bytes.fromhex("0040") * 24


def test_the_gradient_of_a_priming_pass_is_told_once(tmp_path: Path) -> None:
    leg = LegLayout(tmp_path)
    accelerator = Accelerator(cpu=True)
    model, _ = accelerator.prepare(torch.nn.Linear(1, 1), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    inspector = Inspector(TrainingState(accelerator), order(leg, (1,)), leg, CPU)
    weight = model.weight
    inspector.begin(Position(), [("weight", weight)])
    inspector.batch(torch.ones(1, 1), None)
    for gradient in (2.0, 7.0):
        torch.autograd.backward([weight], [torch.full((1, 1), gradient)])
    inspector.before_optimizer_step([0.1])
    inspector.step()
    entries = {entry["quantity"]: entry for entry in moment(leg, "step-00000001.json")["entries"]}
    raw = {name: (leg.tensors / entries[name]["bytes"]).read_bytes() for name in ("local gradients", "reduced gradients")}
    assert {name: numpy.frombuffer(data, "<f4").item() for name, data in raw.items()} == {
        "local gradients": 2.0,
        "reduced gradients": 9.0,
    }
    # After the step nobody listens any more.
    assert not weight._backward_hooks


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([0.0, 2.0, 0.0]).to_sparse(),
        torch.zeros(0, 3),
        torch.tensor(True),
        torch.tensor([1.0]).to(torch.float8_e5m2),
    ],
    ids=["transposed", "conjugate", "sparse", "empty", "bool", "float8"],
)
def test_tensors_of_every_kind(tmp_path: Path, tensor: torch.Tensor) -> None:
    leg = LegLayout(tmp_path)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    inspector = Inspector(TrainingState(accelerator), order(leg, (1,)), leg, CPU)
    inspector.begin(Position(), [])
    inspector.batch(tensor, None)
    inspector.step()
    (entry,) = [entry for entry in moment(leg, "step-00000001.json")["entries"] if entry["quantity"] == "batch"]
    dense = tensor.to_dense() if tensor.layout is torch.sparse_coo else tensor.resolve_conj().contiguous()
    expected = dense.view(torch.uint8).numpy().tobytes() if not dense.is_complex() and dense.dim() else dense.numpy().tobytes()
    assert (leg.tensors / entry["bytes"]).read_bytes() == expected
    assert entry["shape"] == list(tensor.shape)


def test_one_flipped_bit_is_found_where_it_was_flipped(tmp_path: Path) -> None:
    legs = [LegLayout(tmp_path / name) for name in ("reference", "chaos")]
    train(legs[0], inspect=(1, 2, 3))
    train(legs[1], inspect=(1, 2, 3), nudge_at=2)
    comparison = compare_inspections(legs[0], legs[1], range(1))
    found = comparison.finding
    assert found is not None and found.difference is not None
    assert (found.quantity, found.step, found.rank, found.tensor) == ("parameters before", 2, 0, "0.weight")
    assert (found.difference.dtype, found.difference.differing, found.difference.index) == ("bfloat16", 1, (1, 1))
    assert (found.difference.ulp, found.worst_ulp) == (1, 1)


def test_the_same_training_twice_has_nothing_to_find(tmp_path: Path) -> None:
    legs = [LegLayout(tmp_path / name) for name in ("reference", "chaos")]
    for leg in legs:
        train(leg, inspect=(1, 2, 3))
    comparison = compare_inspections(legs[0], legs[1], range(1))
    assert (comparison.finding, comparison.moments) == (None, 4)
