"""Whatever lies in a file, chaosrun says a sentence about it: never a traceback of ours."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fuzzing import (
    AMOUNTS,
    changed_as,
    changed_bytes,
    changed_file,
    changed_lines,
    changed_trace,
    changed_value,
    dumped,
    odd_values,
    tried,
)
from hypothesis import strategies as st
from legs import KILLS, write_run

from chaosrun import api
from chaosrun.checkpoint.audit import audit_directory
from chaosrun.cluster.messages import Exited
from chaosrun.errors import ChaosrunError, InvalidCheckpointError, UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.faults.memory import MemoryNote
from chaosrun.records.codec import encode
from chaosrun.records.history import journal_events
from chaosrun.records.journal import Journal
from chaosrun.records.layout import MANIFEST_NAME, LegLayout, RunLayout, checkpoint_step
from chaosrun.records.manifest import Manifest
from chaosrun.records.markers import read_end, read_markers, read_note, write_marker, write_note
from chaosrun.report.draw import draw
from chaosrun.report.follow import RunFollower
from chaosrun.report.status import read_status, status_lines
from chaosrun.report.text import render_text
from chaosrun.report.view import read_view
from chaosrun.spec.job_file import load_job
from chaosrun.spec.suite import load_suite
from chaosrun.supervise.deaths import failure_of, last_step
from chaosrun.supervise.drill import has_ended, leg_of
from chaosrun.supervise.observations import Observations
from chaosrun.supervise.reference import final_step, leg_end
from chaosrun.verify.verdict import judge
from tests.unit.events import event

pytestmark = pytest.mark.parametrize("examples", AMOUNTS)

JOB: dict[str, Any] = {
    "name": "probe",
    "script": "train.py",
    "args": ["--epochs", 3],
    "env": {"SOME": "value"},
    "workers": 2,
    "per_worker": {"cpu": 1, "gpu": 0},
    "seed": 1,
    "max_steps": 30,
    "checkpoint": {"every_steps": 10, "keep": 2, "classes": ["collections.OrderedDict"]},
    "faults": {
        "seed": 3,
        "schedule": [
            {"rank": 1, "at_step": 7},
            {"kind": "flip_bit", "rank": 0, "at_step": 9, "state": "gradient", "bit": 3},
            {"kind": "slow", "rank": "random", "every_steps": 5, "until_step": 20, "factor": 2.0},
            {"rank": "all", "phase": "restore.begin", "occurrence": 1},
            {"kind": "preempt", "rank": 0, "after": "5s", "grace": "1s"},
        ],
        "random": {"count": 2, "rank": "random", "between": [1, 20]},
    },
    "recovery": {"max_restarts": 2, "acquire_timeout": "10s", "preload": ["math"]},
    "verify": {"losses": {"atol": 0.0, "rtol": 0.0}, "confirm": True},
    "timeout": "5m",
}


@pytest.fixture
def run(sound: RunLayout, tmp_path: Path) -> RunLayout:
    return RunLayout(Path(shutil.copytree(sound.path, tmp_path / "runs" / "run")))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """A run as `create_run` and a drill leave it."""
    run = write_run(tmp_path_factory.mktemp("sound") / "runs", workers=2, steps=6, every_steps=2, kills=(KILLS[0],))
    run.verdict_json.write_bytes(dumped(judge(run).to_json()))
    return run


def test_job_files(examples: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import chaosrun\n")
    path = tmp_path / "job.yaml"
    read = 0

    def check(data: bytes) -> None:
        nonlocal read
        path.write_bytes(data)
        with contextlib.suppress(ChaosrunError):
            load_job(path)
            read += 1

    path.write_bytes(dumped(JOB))
    load_job(path)
    texts = st.one_of(st.text().map(lambda text: text.encode(errors="surrogatepass")), st.binary())
    sound = st.integers(1, 99).map(lambda seed: dumped({**JOB, "seed": seed}))
    tried(examples, st.one_of(changed_file(dumped(JOB)), changed_bytes(YAML), texts, sound), check)
    assert read > examples / 20, "some of the inputs are job files"


YAML = b"""# A job.
name: probe
script: "train.py"
workers: &two 2
args: [--epochs, 3, 0.10, off]
checkpoint:
  every_steps: *two   # aliases are read
  keep: 0x3
faults:
  schedule:
    - {rank: 1, at_step: 7}
    - rank: all
      kind: kill
      at_step: 0o17
  random: {count: 1, mean_steps: ~}
timeout: |
  5m
"""


def test_overrides(examples: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import chaosrun\n")
    path = tmp_path / "job.yaml"
    path.write_bytes(dumped(JOB))
    names = ["workers", "faults.schedule[0].rank", "env", "args", "faults", "x", "faults.schedule[9]", "a.b.c", ""]
    keys = st.sampled_from([*names, "args[" + "9" * 5000 + "]"])
    known = st.tuples(keys, st.one_of(st.text(), odd_values.map(json.dumps))).map("=".join)

    def check(override: str) -> None:
        with contextlib.suppress(ChaosrunError):
            load_job(path, [override])

    tried(examples, st.one_of(known, st.text()), check)


def test_suite_files(examples: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import chaosrun\n")
    (tmp_path / "job.yaml").write_bytes(dumped(JOB))
    drill = {"name": "one", "set": {"workers": 2, "faults.seed": 7}, "expect": {"verdict": "PASS", "exit_code": 0}}
    crossed = {
        "name": "three",
        "faults": "job",
        "matrix": {"workers": [1, 2], "--lr": {"low": 0.1, "high": 1}},
        "exclude": [{"workers": 1, "--lr": "high"}],
        "include": [{"seed": 3}],
        "cases": [{"when": {"workers": 2}, "set": {"seed": 4}, "expect": "FAIL"}],
    }
    drills = [drill, {"name": "two"}, crossed]
    suite = {"name": "all", "job": "job.yaml", "drills": drills, "comparison": {"first": "one", "atol": 0.1}}
    path = tmp_path / "suite.yaml"
    path.write_bytes(dumped(suite))
    load_suite(path)

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(ChaosrunError):
            load_suite(path)

    tried(examples, changed_file(dumped(suite)), check)


@pytest.mark.parametrize("name", ["run.json", "plan.json", "chaos/journal.jsonl", "chaos/attempts/002/rank-1.trace"])
def test_the_files_that_a_verdict_is_made_of(examples: int, run: RunLayout, name: str) -> None:
    """Judged, or refused in a sentence; what cannot be right is no PASS, and no check crashes over it."""
    path = run.path / name
    whole = path.read_bytes()
    exact = judge(run).to_json()
    assert exact["status"] == "PASS"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(ChaosrunError):
            verdict = judge(run)
            crashed = [entry for entry in verdict.checks if entry.evidence.get("crashed")]
            assert not crashed, crashed[0].summary
            json.dumps(verdict.to_json())
            render_text(read_view(run, verdict))

    tried(examples, changed_as(name, whole), check)


@pytest.mark.parametrize(
    "name", ["run.json", "verdict.json", "plan.json", "chaos/journal.jsonl", "chaos/attempts/002/rank-1.trace"]
)
def test_the_files_that_a_status_is_made_of(examples: int, run: RunLayout, tmp_path: Path, name: str) -> None:
    path = run.path / name
    whole = path.read_bytes()
    assert [summary.status for summary in api.list_runs(tmp_path)] == ["PASS"]

    def check(data: bytes) -> None:
        path.write_bytes(data)
        # One damaged run takes no others along.
        assert [summary.run_id for summary in api.list_runs(tmp_path)] == ["run"]
        with contextlib.suppress(ChaosrunError):
            status_lines(read_status(run, supervised=False), now_s=2.0)
        with contextlib.suppress(ChaosrunError):
            has_ended(run)
        with contextlib.suppress(ChaosrunError):
            leg_end(leg_of(run, "chaos"))
            final_step(leg_of(run, "chaos"))

    tried(examples, changed_as(name, whole), check)


@pytest.mark.parametrize("name", ["chaos/journal.jsonl", "chaos/attempts/001/rank-1.trace", "chaos/faults/F1.json"])
def test_the_files_that_a_picture_is_made_of(examples: int, run: RunLayout, name: str) -> None:
    """While a drill runs, its display reads whatever is there: it shows less then, and never fails."""
    path = run.path / name
    path.parent.mkdir(exist_ok=True)
    if not path.exists():
        write_marker(run.leg("chaos"), "F1", rank=1, attempt=1, pid=1, phase="step", step=3, ticks=1)
    whole = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        follower = RunFollower(run)
        for told in follower.poll():
            assert told.line(1.0).isprintable() and json.dumps(told.to_json())
        for line in draw(follower.picture, now_s=2.0, width=70, height=20):
            assert line.plain.isprintable()

    tried(examples, changed_as(name, whole), check)


def test_journals_that_are_gone_on_with(examples: int, sound: RunLayout, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            Journal(path).close()
            records = journal_events(path)
        except ChaosrunError:
            return
        journal = Journal(path)
        assert journal.append(event("leg.finished")).seq == len(records) + 1
        journal.close()

    tried(examples, changed_lines(sound.leg("chaos").journal.read_bytes()), check)


def test_plans(examples: int) -> None:
    plan = FaultPlan(seed=0, faults=KILLS).to_json()

    def check(value: Any) -> None:
        with contextlib.suppress(UsageError):
            again = FaultPlan.from_json(value)
            assert FaultPlan.from_json(json.loads(json.dumps(again.to_json()))) == again
            [fault.describe() for fault in again.faults]

    tried(examples, st.one_of(changed_value(json.loads(json.dumps(plan))), odd_values), check)


def test_manifests(examples: int, sound: RunLayout, tmp_path: Path) -> None:
    source = sound.leg("chaos").checkpoints / "step-00000006"
    checkpoint = Path(shutil.copytree(source, tmp_path / source.name))
    whole = (checkpoint / MANIFEST_NAME).read_bytes()
    audit_directory(checkpoint, 6)

    def check(data: bytes) -> None:
        (checkpoint / MANIFEST_NAME).write_bytes(data)
        if data != whole:
            with pytest.raises(InvalidCheckpointError):
                audit_directory(checkpoint, 6)
        with contextlib.suppress(ValueError):
            assert Manifest.from_bytes(data).to_bytes() == data

    tried(examples, changed_file(whole), check)


def test_names_of_checkpoints(examples: int) -> None:
    def check(name: str) -> None:
        assert checkpoint_step(name) is None or name == f"step-{checkpoint_step(name):08d}"

    tried(examples, st.one_of(st.text(), st.from_regex(r"step-\d*", fullmatch=True)), check)


def test_markers_and_notes(examples: int, tmp_path: Path) -> None:
    leg, fault = LegLayout(tmp_path), KILLS[0]
    write_marker(leg, fault.id, rank=1, attempt=1, pid=1, phase="step", step=6)
    write_note(leg, fault.id, MemoryNote(tensor="weight"))
    marker, note = (leg.faults / f"{fault.id}.json").read_bytes(), (leg.notes / f"{fault.id}.json").read_bytes()

    def check(files: tuple[bytes, bytes]) -> None:
        (leg.faults / f"{fault.id}.json").write_bytes(files[0])
        (leg.notes / f"{fault.id}.json").write_bytes(files[1])
        assert fault.id in read_markers(leg), "a marker that cannot be read still claims its fault"
        read_note(leg, fault.id, MemoryNote)
        journal: list[Any] = []
        seen = Observations(leg, FaultPlan(seed=0, faults=(fault,)), lambda event, durable=True: journal.append(event))
        seen.of_notes(at_last=True)
        seen.of_death(Exited(attempt=1, rank=1, pid=1, signal=9, died_s=2.0))
        [encode(event) for event in journal]

    both = st.one_of(st.tuples(changed_file(marker), st.just(note)), st.tuples(st.just(marker), changed_file(note)))
    tried(examples, both, check)


def test_what_a_dead_worker_left(examples: int, sound: RunLayout, tmp_path: Path) -> None:
    leg = LegLayout(Path(shutil.copytree(sound.leg("chaos").path, tmp_path / "leg")))
    error = {"type": "ValueError", "message": "no", "hint": None, "exit_code": 4, "traceback": "…"}
    about = {"v": 1, "rank": 0, "attempt": 1, "pid": 1, "completed": False, "step": 3, "status": "raised", "exit_code": 4}
    end, trace = dumped({**about, "error": error, "time_s": 1.0}), leg.attempt(1).trace(0).read_bytes()

    def check(files: tuple[bytes, bytes]) -> None:
        leg.attempt(1).end(0).write_bytes(files[0])
        leg.attempt(1).trace(0).write_bytes(files[1])
        read_end(leg.attempt(1), 0)
        assert last_step(leg, 1, 0) >= 0 or files[1] != trace
        failure = failure_of(leg, Exited(attempt=1, rank=0, pid=1, exit_code=4, died_s=0.0))
        assert failure is None or failure.message

    one_of_them = st.one_of(st.tuples(changed_file(end), st.just(trace)), st.tuples(st.just(end), changed_trace(trace)))
    tried(examples, one_of_them, check)
