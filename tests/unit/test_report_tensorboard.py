"""TensorBoard's event files, read back with TensorBoard's own reader."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, edit_trace, only, put, write_run
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from chaosrun.errors import UsageError
from chaosrun.records.layout import RUN, RunLayout
from chaosrun.report.tensorboard import write_tensorboard
from chaosrun.verify.trajectory import trajectory
from chaosrun.verify.ulp import float_distance
from chaosrun.verify.verdict import judge


def written(run: RunLayout, directory: Path) -> EventMultiplexer:
    write_tensorboard(run, judge(run), directory)
    reader = EventMultiplexer(size_guidance={"scalars": 0, "tensors": 0})
    reader.AddRunsFromDirectory(str(directory))
    return reader.Reload()


def scalars(reader: EventMultiplexer, run: str, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in reader.Scalars(run, tag)]


@pytest.fixture(scope="module")
def reader(exact: RunLayout, tmp_path_factory: pytest.TempPathFactory) -> EventMultiplexer:
    return written(exact, tmp_path_factory.mktemp("events") / "new" / "board")


def test_runs(reader: EventMultiplexer) -> None:
    tails = [f"chaos/replayed-attempt-{attempt}" for attempt in (1, 2, 3)]
    assert sorted(reader.Runs()) == ["chaos", *tails, "reference"]


def test_every_step_once(reader: EventMultiplexer, exact: RunLayout) -> None:
    expected = [(step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(trajectory(exact).losses, start=1)]
    assert scalars(reader, "reference", "loss") == expected
    assert scalars(reader, "chaos", "loss") == expected
    rates = [(step, pytest.approx(0.1 * min(1.0, step / 8))) for step in range(1, 13)]
    assert scalars(reader, "chaos", "lr") == scalars(reader, "reference", "lr") == rates
    # By whom the step was done that counts: attempt 1 to step 4, then from one checkpoint to the next.
    assert [attempt for _, attempt in scalars(reader, "chaos", "attempt")] == [1] * 4 + [2] * 4 + [4] * 4


def test_what_was_done_in_vain_is_told_apart(reader: EventMultiplexer) -> None:
    # Killed after step 6 with a checkpoint of step 4, and so on.
    assert [step for step, _ in scalars(reader, "chaos/replayed-attempt-1", "loss")] == [5, 6]
    assert [step for step, _ in scalars(reader, "chaos/replayed-attempt-2", "loss")] == [9]
    assert [step for step, _ in scalars(reader, "chaos/replayed-attempt-3", "loss")] == [9, 10, 11, 12]


def test_saves_and_recoveries(reader: EventMultiplexer) -> None:
    assert [step for step, _ in scalars(reader, "chaos", "checkpoint_s")] == [4, 8, 12]
    assert len(scalars(reader, "chaos", "recovery_s")) == 3


def test_no_difference_is_zero(reader: EventMultiplexer) -> None:
    for run in ("chaos", "chaos/replayed-attempt-1"):
        assert {value for _, value in scalars(reader, run, "loss_difference_ulp")} == {0.0}


def test_differences_in_ulp(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    one_off = math.nextafter(0.1, 1.0)

    def first(line: dict[str, Any], value: float) -> dict[str, Any]:
        return {**line, "loss": [value.hex(), *line["loss"][1:]]}

    edit_trace(run, "reference", 1, 1, only("step", lambda line: first(line, 0.1), step=3))
    edit_trace(run, "chaos", 1, 1, only("step", lambda line: first(line, one_off), step=3))
    edit_trace(run, "chaos", 1, 0, only("step", put(loss=["nan", "inf"]), step=4))
    found = dict(scalars(written(run, tmp_path / "board"), "chaos", "loss_difference_ulp"))
    assert (found[2], found[3]) == (0.0, 1.0)
    assert math.isnan(found[4])


def test_unfinished_runs_have_what_there_is(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(keep_rng=False))
    journal = run.leg("chaos").journal
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:6]))
    found = written(run, tmp_path / "board")
    assert [step for step, _ in scalars(found, "chaos", "loss")] == [1, 2, 3, 4, 5, 6]
    for path in (run.leg("chaos").path, run.reference.path):
        path.rename(path.with_name(f"no-{path.name}"))
    assert written(run, tmp_path / "empty").Runs().keys() <= {"chaos", "reference"}


def test_old_event_files_are_not_mixed_in(exact: RunLayout, tmp_path: Path) -> None:
    directory = tmp_path / "board"
    verdict = judge(exact)
    write_tensorboard(exact, verdict, directory)
    with pytest.raises(UsageError, match="is not empty"):
        write_tensorboard(exact, verdict, directory)
    write_tensorboard(exact, replace(verdict, status="FAIL"), directory, replace=True)
    assert len(list((directory / "chaos").glob("events*"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["board"]


def test_without_the_package(exact: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(UsageError, match="tensorboard") as caught:
        write_tensorboard(exact, judge(exact), tmp_path / "board")
    assert caught.value.hint == "pip install 'chaosrun[tensorboard]'"
    assert not (tmp_path / "board").exists()


def test_torch_is_not_needed(exact: RunLayout, tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys; from pathlib import Path; from chaosrun.records.layout import RunLayout; "
        "from chaosrun.verify.verdict import judge; from chaosrun.report.tensorboard import write_tensorboard; "
        f"run = RunLayout(Path({str(exact.path)!r})); write_tensorboard(run, judge(run), Path({str(tmp_path / 'board')!r})); "
        "print(*[name for name in ('torch', 'tensorflow', 'ray') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []


@pytest.mark.parametrize(
    ("left", "right", "ulp"),
    [
        (1.0, 1.0, 0),
        (0.0, -0.0, 0),
        (1.0, 1.0 + 2**-23, 1),  # float32 numbers
        (0.1, math.nextafter(0.1, 1.0), 1),  # float64 numbers
        (1.0, 1.0 + 2**-52, 1),
        (1.0, -1.0, 2 * 0x3F800000),
        (math.nan, math.nan, 0),
        (1.0, math.nan, None),
        (1.0, math.inf, None),
        (math.inf, math.inf, 0),
        (2.0**200, math.nextafter(2.0**200, math.inf), 1),  # beyond float32
    ],
)
def test_distance_of_two_numbers(left: float, right: float, ulp: int | None) -> None:
    assert float_distance(left, right) == ulp


def test_a_run_in_production_has_one_leg(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run.path / "chaos").rename(run.path / RUN)
    run.run_json.write_text(json.dumps({**json.loads(run.run_json.read_bytes()), "kind": "run"}))
    shutil.rmtree(run.path / "reference")
    found = written(run, tmp_path / "board")
    assert sorted(found.Runs()) == [RUN, *(f"{RUN}/replayed-attempt-{attempt}" for attempt in (1, 2, 3))]
    assert len(scalars(found, RUN, "loss")) == 12
