"""Damage to a tensor's memory: the bit that was asked for and no other, whatever the type, and a note that tells it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from chaosrun.faults.fault import Fault
from chaosrun.faults.memory import MemoryNote
from chaosrun.faults.strike import Pace, Strike
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import read_note
from tests.integration.ranks import make_orders

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@dataclass
class Training:
    """A linear layer and AdamW, on one device and of one type."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    model: torch.nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(5, 3).to(device=self.device, dtype=self.dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self) -> "Training":
        self.backward()
        self.optimizer.step()
        return self

    def backward(self) -> "Training":
        inputs = torch.ones(2, 5, device=self.device, dtype=self.dtype)
        self.model(inputs).square().sum().backward()
        return self

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.model.named_parameters())

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def loader_workers(self) -> list[tuple[int, int]]:
        return []


def strike(tmp_path: Path, training: Training | None, kind: str, *, fault: str = "F1", **options: Any) -> Any:
    """Let the arm strike, and return its note."""
    struck = Strike(
        fault=Fault(id=fault, kind=kind, rank=1, phase="step", at_step=4, options=options, source="test"),  # type: ignore[arg-type]
        step=4,
        order=make_orders(tmp_path, "")[1],
        leg=LegLayout(tmp_path),
        training=training,
        pace=Pace(),
        at={},
    )
    assert struck.fault.facts.inside is not None
    struck.fault.facts.inside(struck)
    return read_note(struck.leg, fault, MemoryNote)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).clone()


def values(training: Training) -> list[torch.Tensor]:
    state = [value for entries in training.optimizer.state.values() for value in entries.values()]
    parameters = [parameter for _, parameter in training.parameters()]
    return [*parameters, *(p.grad for p in parameters if p.grad is not None), *state]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state", ["parameter", "gradient", "moment"])
def test_one_bit_of_everything_there_is(tmp_path: Path, device: str, dtype: torch.dtype, state: str) -> None:
    training = Training(device=device, dtype=dtype).step()
    before = [bits(value) for value in values(training)]
    note = strike(tmp_path, training, "flip_bit", state=state)
    changed = [(old, bits(new)) for old, new in zip(before, values(training), strict=True) if not torch.equal(old, bits(new))]
    assert len(changed) == 1
    flipped = changed[0][0] ^ changed[0][1]
    where = int(flipped.nonzero())
    size = dtype.itemsize
    assert int(flipped[where]).bit_count() == 1
    assert where // size == note.element
    assert int(flipped[where]) == 1 << note.bit % 8 and where % size == note.bit // 8
    assert int(note.before, 16) ^ int(note.after, 16) == 1 << note.bit
    assert note.dtype == str(dtype).removeprefix("torch.")
    assert len(note.before) == 2 * size and note.problem is None


def test_what_is_given_is_what_is_struck(tmp_path: Path) -> None:
    training = Training().step()
    bias = dict(training.parameters())["bias"]
    before = bias.detach().clone()
    note = strike(tmp_path, training, "flip_bit", state="parameter", tensor="bias", bit=31)
    assert (note.tensor, note.bit) == ("bias", 31)
    assert float(bias[note.element]) == -float(before[note.element])
    assert (float(note.value_before), float(note.value_after)) == (float(before[note.element]), float(bias[note.element]))


def test_the_draw_follows_the_fault_and_leaves_other_streams_alone(tmp_path: Path) -> None:
    training = Training()
    before = torch.get_rng_state()
    drawn = [strike(tmp_path, training, "flip_bit", fault=name) for name in ("F1", "F2", "F3", "F1")]
    places = [(note.tensor, note.element, note.bit) for note in drawn]
    assert places[0] == places[3]
    assert len(set(places)) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_a_column_of_a_larger_tensor_is_damaged_in_place(tmp_path: Path) -> None:
    training = Training()
    wide = torch.arange(12.0).reshape(3, 4)
    column = wide.t()[1:3]
    assert not column.is_contiguous()
    training.model.weight = torch.nn.Parameter(column)  # type: ignore[assignment]
    old = wide.clone()
    note = strike(tmp_path, training, "flip_bit", tensor="weight", bit=31)
    assert int((old != wide).sum()) <= 1
    row, at = divmod(note.element, 3)
    assert float(note.value_before) == float(old[at, row + 1])
    assert str(float(wide[at, row + 1])) == note.value_after


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_one_element(tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    training = Training(device=device, dtype=dtype).backward()
    note = strike(tmp_path, training, "nan")
    assert note.state == "gradient" and note.value_after == "nan" and note.before != note.after
    gradients = [parameter.grad for _, parameter in training.parameters()]
    assert sum(int(gradient.isnan().sum()) for gradient in gradients if gradient is not None) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2])
def test_a_replica_is_moved_away(tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    training = Training()
    training.model.weight = torch.nn.Parameter(torch.randn(40, device=device).to(dtype), requires_grad=False)  # type: ignore[assignment]
    old = bits(training.model.weight)  # type: ignore[arg-type]
    note = strike(tmp_path, training, "diverge", tensor="weight")
    assert note.problem is None and note.before != note.after
    assert not torch.equal(old, bits(training.model.weight))  # type: ignore[arg-type]
    training.model.weight = torch.nn.Parameter(torch.zeros(4, device=device))  # type: ignore[assignment]
    assert strike(tmp_path, training, "diverge", tensor="weight").problem is None


@pytest.mark.parametrize(
    ("trained", "options", "words"),
    [
        (False, {"state": "moment"}, "held no moment at phase step of step 4"),
        (False, {"state": "gradient"}, "no parameter had a gradient at phase step of step 4"),
        (True, {"tensor": "weigth"}, "no parameter of a tensor called 'weigth': did you mean weight?"),
        (True, {"bit": 32}, "bit 32 of a float32: it has 32 bits, 0 to 31"),
    ],
)
def test_what_cannot_be_struck_is_left_alone_and_told(
    tmp_path: Path, trained: bool, options: dict[str, Any], words: str
) -> None:
    training = Training().step() if trained else Training()
    before = [bits(value) for value in values(training)]
    note = strike(tmp_path, training, "flip_bit", **options)
    assert words in note.problem
    assert all(torch.equal(old, bits(new)) for old, new in zip(before, values(training), strict=True))


def test_before_the_script_has_attached(tmp_path: Path) -> None:
    for kind in ("flip_bit", "nan", "diverge"):
        assert "had not attached" in (strike(tmp_path / kind, None, kind).problem or "")


def test_a_nan_over_the_same_nan_is_no_damage(tmp_path: Path) -> None:
    training = Training()
    training.model.weight = torch.nn.Parameter(torch.tensor([float("nan")]))  # type: ignore[assignment]
    assert "same as before" in (strike(tmp_path, training, "nan", state="parameter", tensor="weight").problem or "")
