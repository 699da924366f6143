"""The cache of references: what it finds, and what it does on a full disk."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from legs import Bugs, edit_journal, only, put, write_run

from chaosrun.errors import ResourcesError, UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.codec import changed
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.run_file import RunInfo
from chaosrun.records.run_file import write_run as write_run_json
from chaosrun.records.supervision import supervision
from chaosrun.report.sentences import EventText
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.drill import DrillExecution, LegRunner, _expect_reached, run_files
from chaosrun.supervise.reference import ReferenceCache, copy_leg, final_step, reference_key
from chaosrun.verify.verdict import judge, spec_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    run = write_run(tmp_path_factory.mktemp("reference"))
    (run.reference.path / "inputs.json").write_text("{}")
    return run


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full once the traces are copied, in the middle of the checkpoint."""
    copy = shutil.copy2

    def copy2(source: Any, target: Any, **options: Any) -> Any:
        if "checkpoints" in Path(target).parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return copy(source, target, **options)

    monkeypatch.setattr(shutil, "copy2", copy2)


def drill(run: RunLayout, root: Path, events: list[dict[str, Any]]) -> DrillExecution:
    nobody: Any = None
    return DrillExecution(run=run, root=root, legs=LegRunner(workers=nobody, on_record=events.append))


def test_one_that_is_kept_is_found(made: RunLayout, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    drill(made, tmp_path, events)._cache("key", made.reference, final_step(made.reference))
    found = ReferenceCache(tmp_path).find("key")
    assert events == [] and found is not None
    copied = {path.relative_to(found.path) for path in found.path.rglob("*") if path.is_file()}
    kept = {path.relative_to(made.reference.path) for path in made.reference.path.rglob("*") if path.is_file()}
    assert copied <= kept and {path for path in kept - copied if path.parts[0] != "checkpoints"} == set()


def test_a_step_beyond_a_reference_of_an_earlier_drill_may_be_one_of_a_job_that_has_grown(made: RunLayout) -> None:
    plan = FaultPlan.read(made.plan_json)
    late = replace(plan, faults=tuple(replace(fault, at_step=99) for fault in plan.faults))
    for source, is_told in ((None, False), ("/runs/references/key", True)):
        with pytest.raises(UsageError, match="step 99 is never reached") as refused:
            _expect_reached(late, 12, source)
        assert ("--reference fresh" in (refused.value.hint or "")) == is_told


def test_a_leg_that_ended_where_it_differed_from_a_stale_reference_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = {"mode": "auto", "source": "/runs/references/key", "key": "key"}
    run = write_run(tmp_path, bugs=Bugs(keep_rng=False), reference_bugs=Bugs(), reference=stale)
    shutil.copytree(run.reference.path, run.leg("confirm").path)
    edit_journal(run, "chaos", only("leg.finished", put(outcome="differed")))
    done: list[str] = []

    def replaced(_: object, info: RunInfo, difference: str) -> None:
        done.append("replaced the reference")
        write_run_json(run, changed(info, reference=changed(info.reference, source=None, replaced=difference)))

    monkeypatch.setattr("chaosrun.supervise.drill.fault_free_difference", lambda *_: ("loss at step 3, rank 0", "loss"))
    monkeypatch.setattr(DrillExecution, "_replace_reference", replaced)
    monkeypatch.setattr(DrillExecution, "_remove", lambda _, leg: done.append(f"removed {leg.path.name}"))
    monkeypatch.setattr(DrillExecution, "_run_chaos", lambda *_: done.append("ran"))
    drill(run, tmp_path, [])._confirm(spec_of(run), judge(run))
    assert done == ["removed chaos", "replaced the reference", "ran"]


def test_none_is_found_once_any_package_has_another_version(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").touch()
    spec = JobSpec(name="job", script="train.py", workers=1, env={"PYTHONPATH": str(tmp_path)})
    keys: list[str] = []
    for version in ("0.31.0", "0.32.2", "0.32.2"):
        shutil.rmtree(tmp_path / "diffusers-0.31.0.dist-info", ignore_errors=True)
        (tmp_path / f"diffusers-{version}.dist-info").mkdir(exist_ok=True)
        keys.append(reference_key(spec, script, "cpu"))
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.usefixtures("full")
def test_a_full_disk_costs_the_place_in_the_cache_alone(made: RunLayout, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    drill(made, tmp_path, events)._cache("key", made.reference, final_step(made.reference))
    assert ReferenceCache(tmp_path).find("key") is None
    assert [path.name for path in (tmp_path / "references").iterdir()] == [".lock"]
    (event,) = events
    assert event["event"] == "reference.uncached"
    said = EventText.notice(event).sentence
    assert said.startswith("not kept in the cache for other drills: ") and said.endswith(": No space left on device")


@pytest.mark.parametrize("error", [FileNotFoundError(2, "No such file"), UsageError("is not a run", hint="")])
def test_a_run_whose_folder_is_removed_while_it_goes_on_is_told_so(made: RunLayout, tmp_path: Path, error: Exception) -> None:
    run = RunLayout(shutil.copytree(made.path, tmp_path / "root" / "run"))
    with pytest.raises(type(error)), run_files(run, "resume"):
        raise error
    with pytest.raises(ResourcesError, match="gone, unmounted or removed") as told, supervision(run), run_files(run, "resume"):
        (tmp_path / "root").rename(tmp_path / "away")
        raise error
    assert told.value.hint is not None and "chaosrun resume" in told.value.hint and "start again" in told.value.hint
    assert not (tmp_path / "root").exists(), "nothing is written where it was"
    (tmp_path / "away").rename(tmp_path / "root")
    shutil.rmtree(run.path)
    with pytest.raises(ResourcesError, match="were removed while it ran") as told, run_files(run, "resume"):
        raise error
    assert told.value.hint is not None and "chaosrun cancel" in told.value.hint


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_storage_that_answers_with_an_error_is_gone(
    made: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("CHAOSRUN_ROOT", raising=False)
    with (
        pytest.raises(ResourcesError, match="gone, unmounted or removed") as told,
        monkeypatch.context() as patched,
        run_files(made, "resume"),
    ):
        (tmp_path / "here").rmdir()

        def stat(path: Path, **_: Any) -> Any:
            raise OSError(number, os.strerror(number), str(path))

        patched.setattr(Path, "stat", stat)
        raise OSError(number, os.strerror(number))
    assert told.value.hint is not None and "chaosrun resume" in told.value.hint


@pytest.mark.parametrize(
    ("number", "inodes", "hint"),
    [
        (errno.ENOSPC, 1000, "free some space there and "),
        (errno.ENOSPC, 3, "free some inodes there (`df -i`"),
        (errno.ENOSPC, -1, "free some space there "),
        (errno.EROFS, 1000, "make it writable again "),
        (errno.EIO, 1000, "have the disk looked at "),
    ],
)
def test_what_cannot_be_written_is_named_and_not_what_a_link_leads_to(
    made: RunLayout, monkeypatch: pytest.MonkeyPatch, number: int, inodes: int, hint: str
) -> None:
    """Of a link that cannot be made, the kernel's error names both; a file system without inodes says that it has no space."""
    status = SimpleNamespace(f_bavail=1 << 30, f_frsize=4096, f_files=1000, f_favail=inodes)
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    place = made.path / "work" / "data"
    with pytest.raises(ResourcesError) as told, run_files(made, "resume"):
        raise OSError(number, os.strerror(number), "/elsewhere/data", None, str(place))
    assert told.value.message == f"the run's own files cannot be written: {place}: {os.strerror(number)}"
    assert told.value.hint is not None and told.value.hint.startswith(hint) and "chaosrun resume" in told.value.hint


@pytest.mark.usefixtures("full")
def test_one_that_does_not_fit_into_the_run_is_a_lack_of_resources(made: RunLayout, tmp_path: Path) -> None:
    with pytest.raises(ResourcesError, match=r"cannot be written: .*: No space left on device"), run_files(made, "resume"):
        copy_leg(made.reference, LegLayout(tmp_path / "leg"), final_step(made.reference))
