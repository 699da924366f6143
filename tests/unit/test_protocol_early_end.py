"""When the ranks of a chaos leg leave because it is decided: each at its checkpoints, against records of a reference."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from legs import KILLS, edit_trace, only, put, write_run
from msgspec import structs

from chaosrun.observe.own import OwnState
from chaosrun.protocol.early_end import EarlyEnd, StateOrLost
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.order import Settle, WorkerOrder
from chaosrun.records.run_file import read_run
from chaosrun.records.trace_reader import read_trace
from chaosrun.records.traces import CheckpointRecord, StateRecord
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.workers import order_template

RANK, LAST, STEPS = 1, 2, 16
SAVED = (8, 12, 16)
"""After the kill at step 6."""


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    written = write_run(tmp_path, kills=KILLS[:1], steps=STEPS)
    for leg, attempt in (("reference", 1), ("chaos", LAST)):
        edit_trace(written, leg, attempt, RANK, only("checkpoint", lambda line: {**line, "own": f"of step {line['step']}"}))
    return written


class Team(EarlyEnd):
    """This rank, and what the others say."""

    others: tuple[StateOrLost, ...] = ("equal", "equal")

    def _gather(self, state: StateOrLost) -> list[StateOrLost]:
        return [state, *self.others]


def order_of(run: RunLayout, settle: Settle) -> WorkerOrder:
    info = read_run(run)
    template = order_template(
        "chaos", run.leg("chaos"), JobSpec.model_validate(info.spec), info, reference=run.leg("reference").path
    )
    return replace(template, rank=RANK, attempt=LAST, settle=settle, looks_after=0)


def left_at(
    run: RunLayout, settle: Settle, *, differs: Sequence[int] = (), others: tuple[StateOrLost, ...] = Team.others
) -> tuple[int | None, str | None]:
    """The step at which this rank leaves, and how; `differs`: steps at which its weights are others."""
    settling = Team(order_of(run, settle), run.leg("chaos"))
    settling.others = others
    problems: list[str] = []
    saved = {each.step: each for each in _checkpoints(run, problems)}
    assert not problems and set(SAVED) <= saved.keys()
    for step in SAVED:
        record = saved[step]
        assert record.digests
        if step in differs:
            record = replace_digests(record)
        if settling.look(step, record, never, never):
            return step, settling.left
    return None, settling.left


def never() -> StateRecord:
    raise AssertionError("it has a checkpoint")


def _checkpoints(run: RunLayout, problems: list[str]) -> Sequence[CheckpointRecord]:
    return read_trace(run.leg("chaos").attempt(LAST).trace(RANK), LAST, RANK, problems).checkpoints


def replace_digests(record: CheckpointRecord) -> CheckpointRecord:
    return structs.replace(record, digests={**(record.digests or {}), "buffers": {"mean": "other"}})


@pytest.mark.parametrize(
    ("settle", "differs", "left"),
    [
        ("stop", (), (8, "settled")),
        ("go_on", (), (8, "settled")),
        ("watch", (), (None, None)),
        ("", (), (None, None)),
        ("stop", SAVED, (12, "differed")),
        ("go_on", SAVED, (None, None)),
        ("watch", SAVED, (None, None)),
        # What differed once may have been read meanwhile: equal again, it is not settled, and not yet different for good.
        ("stop", (8,), (None, None)),
        ("stop", (8, 16), (16, "differed")),
        ("go_on", (8,), (None, None)),
    ],
)
def test_it_leaves_where_that_is_decided(
    run: RunLayout, settle: Settle, differs: tuple[int, ...], left: tuple[int | None, str | None]
) -> None:
    assert left_at(run, settle, differs=differs) == left


@pytest.mark.parametrize(
    ("others", "left"),
    [
        (("equal", "unknown"), (None, None)),
        (("equal", "differs"), (12, "differed")),
        # Another rank has done this step before, in an attempt that came further: nothing is decided by it.
        (("equal", "lost"), (None, None)),
        (("differs", "lost"), (None, None)),
    ],
)
def test_all_ranks_leave_or_none(run: RunLayout, others: tuple[StateOrLost, ...], left: tuple[int | None, str | None]) -> None:
    assert left_at(run, "stop", others=others) == left


@pytest.mark.parametrize(("every_steps", "due"), [(50, (10, 20, 30, 40)), (12, (2, 4, 6, 8, 10)), (9, ())])
def test_between_checkpoints_the_state_is_due_a_few_times(run: RunLayout, every_steps: int, due: tuple[int, ...]) -> None:
    order = replace(order_of(run, "stop"), every_steps=every_steps)
    assert due_of(order) == due
    assert due_of(replace(order, looks_after=15)) == tuple(step for step in due if step > 15)
    reference = replace(order, leg="reference", settle="")
    assert due_of(reference) == due
    # A chaos leg whose faults are not over, and a reference that no early end rests on.
    assert due_of(replace(order, settle="")) == due_of(replace(reference, looks_after=None)) == ()


def due_of(order: WorkerOrder) -> tuple[int, ...]:
    settling = EarlyEnd(order, LegLayout(Path(order.leg_path)))
    return tuple(step for step in range(1, order.every_steps) if settling.is_due(step))


@pytest.mark.parametrize(
    ("settle", "equal", "left"),
    [
        ("stop", True, (8, "settled")),
        ("go_on", True, (8, "settled")),
        ("watch", True, (None, None)),
        # One more checkpoint, at which it differs: the report has its curves.
        ("stop", False, (12, "differed")),
        ("go_on", False, (None, None)),
    ],
)
def test_a_leg_settles_between_checkpoints(
    run: RunLayout, settle: Settle, equal: bool, left: tuple[int | None, str | None]
) -> None:
    """At step 8 neither leg takes a checkpoint by itself; who leaves there does."""
    saved = {each.step: each for each in _checkpoints(run, [])}
    edit_trace(run, "reference", 1, RANK, only("checkpoint", as_state, step=8))
    settling, taken = Team(replace(order_of(run, settle), every_steps=40), run.leg("chaos")), list[int]()
    here, later = (saved[step] if equal else replace_digests(saved[step]) for step in (8, 12))
    state = StateRecord(step=8, time_s=0.0, digests=here.digests, own=here.own)
    leaves = settling.look(8, None, lambda: state, lambda: taken.append(8)) or settling.look(12, later, never, never)
    assert ((8 if taken else 12) if leaves else None, settling.left) == left
    # What was equal once needs no further look, and at what differs the next checkpoint decides.
    assert settling.is_due(16) is not equal


def as_state(line: dict[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in line.items() if key in StateRecord.__struct_fields__}, "kind": "state"}


def test_a_step_that_an_attempt_before_had_come_to_decides_nothing(run: RunLayout) -> None:
    edit_trace(run, "chaos", 1, RANK, only("step", put(step=9), step=6))
    assert left_at(run, "stop") == (12, "settled")
    run.leg("chaos").attempt(1).trace(RANK).unlink()  # it died before it began
    assert left_at(run, "stop") == (8, "settled")


def test_nothing_is_left_out_after_the_last_step(run: RunLayout) -> None:
    edit_trace(run, "chaos", 1, RANK, only("step", put(step=13), step=6))
    assert left_at(run, "stop") == (None, None)


def test_what_this_attempt_did_is_not_lost(run: RunLayout) -> None:
    settling = Team(order_of(run, "stop"), run.leg("chaos"))
    assert settling._came_to == 6


def test_nobody_looks_where_nothing_is_asked(run: RunLayout) -> None:
    quiet = Team(replace(order_of(run, ""), looks_after=None), run.leg("chaos"))
    assert quiet._effects is None
    assert quiet.own(None, 8) == OwnState("", ())  # pyright: ignore[reportArgumentType]
    earlier = Team(order_of(run, ""), run.leg("chaos"))
    assert earlier._effects is not None, "an attempt before the last fault listens, and does not look"
    assert earlier.own(None, 8) == OwnState("", ())  # pyright: ignore[reportArgumentType]
