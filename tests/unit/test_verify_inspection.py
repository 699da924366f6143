"""The first quantity that differs between two inspected replays: in time, then in the order of diagnosis."""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from chaosrun.errors import UsageError
from chaosrun.records.inspection import QUANTITIES
from chaosrun.records.layout import LegLayout
from chaosrun.verify.diagnosis import candidates_of
from chaosrun.verify.inspection import QuantityDifference, compare_inspections

Values = Mapping[tuple[str, int, str], Any]
"""By quantity, micro-batch and name: floats for a float32 tensor, a text, or (dtype, floats)."""

BASE: Values = {
    **{("sample ids", number, ""): f"[{number}]" for number in range(2)},
    **{("batch", number, "x"): [1.0, 2.0] for number in range(2)},
    **{("rng", number, "torch"): [3.0] for number in range(2)},
    **{("loss", number, ""): [0.5] for number in range(2)},
    **{("local gradients", number, name): [0.25] for number in range(2) for name in ("b", "a")},
    ("parameters before", 0, "a"): [1.0, 2.0, 3.0],
    ("parameters before", 0, "b"): [4.0],
    ("buffers", 0, "mean"): [0.0],
    ("optimizer state", 0, "0/state/a/exp_avg"): [0.125],
    ("scheduler state", 0, "0/last_epoch"): [7.0],
    ("registered state", 0, "ema/a"): [1.5],
    ("reduced gradients", 0, "a"): [0.75, 1.0, 2.0],
    ("reduced gradients", 0, "b"): [0.5],
    ("learning rate", 0, "group 0"): [0.1],
    ("parameters after", 0, "a"): [1.25, 2.25, 3.25],
}
ONE_MORE_ULP = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", 1.0))[0] + 1))[0]


def script(legs: "Legs", name: str, **sides: dict[str, str]) -> None:
    """What the script of each leg kept when this step began."""
    for side, values in sides.items():
        leg, attempt = (legs.reference, 1) if side == "reference" else (legs.chaos, 2)
        for rank in (0, 1):
            path = leg.attempt(attempt).inspection(rank) / name
            path.write_text(json.dumps({**json.loads(path.read_text()), "script": values}))


def write(leg: LegLayout, attempt: int, rank: int, name: str, step: int, values: Values) -> None:
    entries = []
    for (quantity, micro_batch, entry), value in values.items():
        place = {"quantity": quantity, "micro_batch": micro_batch, "name": entry}
        if isinstance(value, str):
            entries.append({**place, "text": value})
            continue
        dtype, floats = value if isinstance(value, tuple) else ("float32", value)
        raw = struct.pack(f"<{len(floats)}{'d' if dtype == 'float64' else 'f'}", *floats)
        digest = hashlib.sha256(raw).hexdigest()[:32]
        leg.tensors.mkdir(parents=True, exist_ok=True)
        (leg.tensors / digest).write_bytes(raw)
        entries.append({**place, "bytes": digest, "dtype": dtype, "shape": [len(floats)]})
    folder = leg.attempt(attempt).inspection(rank)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"v": 1, "step": step, "entries": entries}))


class Legs:
    """Two ranks, steps 5 and 6 and the end; the chaos leg's second attempt may have `changes` by (rank, moment)."""

    def __init__(self, root: Path) -> None:
        self.reference, self.chaos = LegLayout(root / "reference"), LegLayout(root / "chaos")

    def find(self, changes: Mapping[tuple[int, str], Values], gone: tuple[str, ...] = ()) -> QuantityDifference | None:
        for rank in range(2):
            for name, step in (("step-00000005.json", 5), ("step-00000006.json", 6), ("end.json", 6)):
                write(self.reference, 1, rank, name, step, BASE)
                if step == 5:
                    write(self.chaos, 1, rank, name, step, BASE)
                values = {key: value for key, value in {**BASE, **changes.get((rank, name), {})}.items() if key[2] not in gone}
                write(self.chaos, 2, rank, name, step, values)
        self.comparison = compare_inspections(self.reference, self.chaos, range(2))
        return self.comparison.finding


@pytest.fixture
def legs(tmp_path: Path) -> Legs:
    return Legs(tmp_path)


def test_equal_replays_have_no_finding(legs: Legs) -> None:
    assert legs.find({}) is None
    assert legs.comparison.moments == 4


@pytest.mark.parametrize("place", range(len(QUANTITIES)))
def test_an_earlier_quantity_explains_the_later_ones(legs: Legs, place: int) -> None:
    first = QUANTITIES[place]
    changed = {key: ("[9]" if isinstance(value, str) else [9.0, *value[1:]]) for key, value in BASE.items()}
    later = {key: value for key, value in changed.items() if QUANTITIES.index(key[0]) >= place}
    found = legs.find({(1, "step-00000006.json"): later})
    assert found is not None
    assert (found.quantity, found.step, found.attempt, found.rank, found.ranks) == (first, 6, 2, 1, (1,))
    statuses = {entry.quantity: entry.finding is not None for entry in legs.comparison.quantities}
    assert statuses == {quantity: QUANTITIES.index(quantity) >= place for quantity in QUANTITIES}


def test_an_earlier_step_comes_before_an_earlier_quantity(legs: Legs) -> None:
    found = legs.find(
        {
            (0, "step-00000006.json"): {("sample ids", 0, ""): "[9]"},
            (1, "step-00000005.json"): {("learning rate", 0, "group 0"): [0.2]},
        }
    )
    assert found is not None and (found.quantity, found.step, found.ranks) == ("learning rate", 5, (1,))


def test_the_end_comes_last(legs: Legs) -> None:
    end = {(0, "end.json"): {("parameters before", 0, "b"): [5.0]}}
    found = legs.find(end)
    assert found is not None and (found.quantity, found.at_end, found.step) == ("parameters before", True, 6)
    found = legs.find({**end, (0, "step-00000006.json"): {("parameters after", 0, "a"): [1.0, 1.0, 1.0]}})
    assert found is not None and (found.quantity, found.at_end) == ("parameters after", False)


def test_a_loss_comes_before_the_next_micro_batch(legs: Legs) -> None:
    found = legs.find({(0, "step-00000005.json"): {("loss", 0, ""): [0.6], ("rng", 1, "torch"): [4.0]}})
    assert found is not None and (found.quantity, found.micro_batch) == ("loss", 0)
    found = legs.find({(0, "step-00000005.json"): {("loss", 1, ""): [0.6], ("rng", 1, "torch"): [4.0]}})
    assert found is not None and (found.quantity, found.micro_batch) == ("rng", 1)


def test_what_is_told_of_a_tensor(legs: Legs) -> None:
    changes = {("reduced gradients", 0, "a"): [0.75, ONE_MORE_ULP, 2.5], ("reduced gradients", 0, "b"): [0.75]}
    found = legs.find({(rank, "step-00000005.json"): changes for rank in (0, 1)})
    assert found is not None and found.difference is not None
    assert (found.rank, found.ranks, found.tensor, found.tensors, found.of) == (0, (0, 1), "a", 2, 2)
    difference = found.difference
    assert (difference.differing, difference.elements, difference.index, difference.ulp) == (2, 3, (1,), 1)
    assert (float.fromhex(difference.expected), float.fromhex(difference.seen)) == (1.0, ONE_MORE_ULP)
    assert (found.worst, found.worst_ulp, difference.max_ulp) == ("b", 1 << 22, 1 << 21)
    assert found.micro_batch is None


def test_of_local_gradients_the_first_to_arrive_is_named(legs: Legs) -> None:
    changes = {("local gradients", 1, name): [0.5] for name in ("a", "b")}
    found = legs.find({(0, "step-00000005.json"): changes})
    assert found is not None and (found.tensor, found.micro_batch, found.problem) == ("b", 1, None)


def test_texts_are_shown_as_they_are(legs: Legs) -> None:
    found = legs.find({(0, "step-00000005.json"): {("sample ids", 1, ""): "[4]"}})
    assert found is not None
    assert (found.micro_batch, found.expected, found.seen, found.difference) == (1, "[1]", "[4]", None)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (("float64", [0.125]), "dtype float32 in the reference, float64 in the chaos leg"),
        ([0.125, 0.125], r"shape [1] in the reference, [2] in the chaos leg"),
        ("None", "float32 (1,) in the reference, None in the chaos leg"),
    ],
)
def test_what_cannot_be_measured_is_a_problem(legs: Legs, value: Any, problem: str) -> None:
    found = legs.find({(0, "step-00000005.json"): {("optimizer state", 0, "0/state/a/exp_avg"): value}})
    assert found is not None
    assert (found.quantity, found.problem, found.difference) == ("optimizer state", problem, None)


def test_what_is_gone_is_named_before_what_stands_in_its_place(legs: Legs) -> None:
    found = legs.find({(0, "step-00000005.json"): {("optimizer state", 0, "0/state"): "empty"}}, gone=("0/state/a/exp_avg",))
    assert found is not None
    assert (found.tensor, found.problem, found.tensors) == ("0/state/a/exp_avg", "the chaos leg does not have it", 2)
    found = legs.find({(0, "step-00000005.json"): {("optimizer state", 0, "0/new"): "x"}})
    assert found is not None and (found.tensor, found.problem) == ("0/new", "only the chaos leg has it")


def test_a_reference_that_was_killed_counts_by_its_last_attempt(legs: Legs) -> None:
    assert legs.find({}) is None
    write(legs.reference, 2, 0, "step-00000005.json", 5, {**BASE, ("loss", 0, ""): [0.75]})
    found = compare_inspections(legs.reference, legs.chaos, range(2)).finding
    assert found is not None and (found.quantity, found.attempt) == ("loss", 1)


def test_ends_of_different_steps_are_not_compared(legs: Legs) -> None:
    legs.find({})
    for rank in range(2):
        write(legs.chaos, 2, rank, "end.json", 7, {**BASE, ("loss", 0, ""): [0.75]})
    comparison = compare_inspections(legs.reference, legs.chaos, range(2))
    assert (comparison.finding, comparison.moments) == (None, 3)


@pytest.mark.parametrize("content", ["{", '{"v": 1, "entries": []}', '{"v": 2, "step": 5, "entries": []}', "[]"])
def test_a_damaged_moment_is_an_error(legs: Legs, content: str) -> None:
    legs.find({})
    path = legs.chaos.attempt(2).inspection(1) / "step-00000005.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"rank-1\.inspection"):
        compare_inspections(legs.reference, legs.chaos, range(2))


def compared(legs: Legs) -> list[str]:
    legs.comparison = compare_inspections(legs.reference, legs.chaos, range(2))
    return [candidate.words for candidate in candidates_of(legs.comparison)]


LOST = {"scale": "8.0", "good": "0", "replay": "deque of 0: ", "model 0/calls": "1", "same": "1"}
KEPT = {"scale": "27.0", "good": "10", "replay/0": "float32 1", "replay/1": "float32 2", "model 0/calls": "9", "same": "1"}


def test_what_the_script_kept_otherwise_is_a_candidate(legs: Legs) -> None:
    legs.find({(1, "step-00000005.json"): {("loss", 0, ""): [9.0]}})
    # What is not set yet on one side will be set before it is read.
    script(legs, "step-00000005.json", reference={**KEPT, "loss": "0.5", "x": "float32[4] 1"}, chaos=LOST)
    assert compared(legs) == [
        "scale (8.0, reference: 27.0)",
        "good (0, reference: 10)",
        "replay (absent, reference: float32 1)",
        "model 0/calls (1, reference: 9)",
    ]


def test_what_differed_from_the_restore_on_comes_before_what_has_come_to_differ(legs: Legs) -> None:
    legs.find({(1, "step-00000006.json"): {("loss", 0, ""): [9.0]}})
    script(legs, "step-00000005.json", reference={"scale": "27.0", "last": "1"}, chaos={"scale": "8.0", "last": "1"})
    script(legs, "step-00000006.json", reference={"scale": "27.0", "last": "2"}, chaos={"scale": "12.0", "last": "3"})
    assert compared(legs) == ["scale (12.0, reference: 27.0)"]


def test_candidates_are_told_where_no_quantity_differs_and_not_where_saved_state_does(legs: Legs) -> None:
    legs.find({})
    script(legs, "step-00000005.json", reference={"bad": "15"}, chaos={"bad": "2"})
    assert compared(legs) == ["bad (2, reference: 15)"]
    legs.find({(1, "step-00000005.json"): {("parameters before", 0, "a"): [9.0]}})
    script(legs, "step-00000005.json", reference={"bad": "15"}, chaos={"bad": "2"})
    assert compared(legs) == []
