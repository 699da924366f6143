"""What a user can get wrong, and what a machine can do to a run: each ends with its exit code, a sentence, and nothing left."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaosrun import cli
from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.records.layout import LegLayout
from tests.conftest import WarmDrills
from tests.e2e.drills import STEPS, Shell, events, finish, kills, write_job


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


# Refused before anything starts


def test_wrong_yaml_is_shown_with_its_place_and_the_nearest_name(shell: Shell) -> None:
    (shell.folder / "job.yaml").write_text("name: x\nscript: train.py\nworkers: two\nseeed: 3\n")
    (shell.folder / "train.py").touch()
    done = shell.run("submit", "job.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    told = ("job.yaml:3:10", "job.yaml:4:1", "workers: two", "^", "'seed'")
    assert [part for part in told if part not in done.stderr] == []
    assert not shell.root.exists()


def test_a_script_that_does_not_exist_is_refused(shell: Shell) -> None:
    (shell.folder / "job.yaml").write_text("name: x\nscript: train.py\nworkers: 2\n")
    done = shell.call("submit", "job.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert str(shell.folder / "train.py") in done.stderr
    assert not shell.root.exists()


@pytest.mark.parametrize(("storage", "why"), [("a-file/below", "Not a directory"), ("/proc/below", "No such file")])
def test_a_storage_that_cannot_be_written_is_refused(shell: Shell, storage: str, why: str) -> None:
    (shell.folder / "a-file").touch()
    job = write_job(shell.folder, "")
    done = shell.call("submit", job, f"checkpoint.storage={storage}")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"checkpoint.storage {shell.folder / storage} cannot be written: " in done.stderr and why in done.stderr
    assert shell.call("validate", job, f"checkpoint.storage={storage}").stderr == done.stderr
    assert not shell.root.exists(), "a run that never began leaves no run"


def test_a_root_that_cannot_be_written_is_refused(shell: Shell) -> None:
    (shell.folder / "a-file").touch()
    done = shell.call("submit", write_job(shell.folder, ""), "--root", "a-file/root")
    assert (done.returncode, done.stdout) == (2, "")
    assert "a-file/root/runs: Not a directory" in done.stderr
    done = shell.call("validate", "job.yaml", "--root", "a-file/root")
    assert done.returncode == 2 and "runs cannot be kept in a-file/root: " in done.stderr


# The script's own errors


@pytest.mark.ray
def test_an_error_at_step_7_shows_the_first_failing_ranks_traceback_and_stops(
    warm_drills: WarmDrills, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trouble = "if rank == 1 and step == 7:\n    raise ValueError('no such label')"
    run = warm_drills(write_job(tmp_path, trouble, kills(9)), root=tmp_path / "root").run
    capsys.readouterr()
    assert cli.main(["verify", str(run.path)]) == 4
    said = capsys.readouterr().out
    assert "Traceback of rank 1" in said
    assert f'File "{tmp_path / "train.py"}", line' in said
    assert "raise ValueError('no such label')" in said
    assert "ValueError: no such label" in said
    assert "worker.py" not in said, "the traceback begins in the script"
    assert "rank 1 raised ValueError at step 7" in " ".join(said.split())
    assert [record["attempt"] for record in events(run.reference, "attempt.starting")] == [1, 2]
    assert not run.leg("chaos").journal.exists(), "a job that fails undisturbed is not disturbed"


@pytest.mark.ray
@pytest.mark.parametrize(
    ("trouble", "said", "attempts"),
    [
        ("if step == 7: sys.exit(0)", "sys.exit(0) at step 7", 2),
        ("if step == 7: os._exit(0)", "exit code 0 at step 7", 2),
        (None, "without a step of any optimizer", 1),
    ],
    ids=["sys.exit(0)", "os._exit(0)", "never trains"],
)
def test_a_script_that_ends_before_its_training_is_the_users_error(
    warm_drills: WarmDrills, tmp_path: Path, trouble: str | None, said: str, attempts: int
) -> None:
    job = write_job(tmp_path, trouble or "", kills(9))
    if trouble is None:
        (tmp_path / "train.py").write_text("print('nothing to train')\n")
        job.write_text(job.read_text().replace("checkpoint: {every_steps: 3}\n", ""))  # it saves by itself, if at all
    result = warm_drills(job, root=tmp_path / "root")
    assert result.verdict.exit_code == 4
    assert said in result.verdict.cause
    made = len(events(result.run.reference, "attempt.starting"))
    assert made == attempts, "once more to be sure where it had begun to train, and no restart loop"


@pytest.mark.nightly
def test_a_script_whose_arguments_are_wrong_says_so(warm_drills: WarmDrills, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import argparse\nargparse.ArgumentParser(prog='mine').parse_args()\n")
    job = tmp_path / "job.yaml"
    job.write_text("name: small\nscript: train.py\nargs: [--epochs]\nworkers: 1\n")
    verdict = warm_drills(job, root=tmp_path / "root").verdict
    assert verdict.exit_code == 4 and "sys.exit(2) without a step in this attempt" in verdict.cause
    assert verdict.hint == "its log says why it did; last: mine: error: unrecognized arguments: --epochs"


@pytest.mark.nightly
@pytest.mark.ray
def test_a_script_that_hangs_at_the_same_place_again_is_not_tried_a_third_time(warm_drills: WarmDrills, tmp_path: Path) -> None:
    job = write_job(tmp_path, "if step == 5: time.sleep(1000)", kills(9), "recovery: {max_restarts: 5, hang_timeout: 5s}")
    result = warm_drills(job, root=tmp_path / "root")
    assert result.verdict.exit_code == 5
    line = 1 + (tmp_path / "train.py").read_text().splitlines().index("    if step == 5: time.sleep(1000)")
    assert "attempt 2 hangs: no progress for" in result.verdict.cause
    assert result.verdict.cause.endswith("; attempt 1 hung there, too")
    assert f"ranks 0 and 1 stopped together, in the script, after step 5 (train.py:{line})" in result.verdict.cause
    deaths = events(result.run.reference, "death.unplanned")
    assert [(death["attempt"], death["step"], death["code"]) for death in deaths] == [(1, 5, "hung"), (2, 5, "hung")]
    log = result.run.reference.attempt(1).log(0).read_text()
    assert f'train.py", line {line} in <module>' in log, "where it hangs is in its log"


@pytest.mark.ray
def test_the_timeout_ends_a_run(warm_drills: WarmDrills, tmp_path: Path) -> None:
    result = warm_drills(write_job(tmp_path, "time.sleep(1)", kills(9), "timeout: 2s"), root=tmp_path / "root")
    assert result.verdict.exit_code == 124
    assert "timeout" in result.verdict.cause
    assert result.run.verdict_json.is_file()


# Resources


@pytest.mark.nightly
def test_more_workers_than_the_joined_cluster_holds_are_told_in_time(shell: Shell) -> None:
    code = (
        "import logging, os, sys, ray\n"
        "os.environ['RAY_AUTH_MODE'] = 'disabled'\n"
        "context = ray.init(address='local', num_cpus=1, include_dashboard=False, logging_level=logging.CRITICAL,"
        " object_store_memory=80 << 20, _temp_dir=sys.argv[1])\n"
        "print(context.address_info['gcs_address'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with tempfile.TemporaryDirectory(prefix="e2e-ray-", dir="/tmp") as folder:
        command = [sys.executable, "-c", code, folder]
        cluster = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert cluster.stdout is not None
        try:
            address = cluster.stdout.readline().strip()
            assert address
            job = write_job(shell.folder, "", kills(9), "recovery: {acquire_timeout: 2s}")
            done = shell.run("submit", job, "workers=3", "--address", address, timeout_s=300)
        finally:
            cluster.communicate(timeout=120)
    assert done.returncode == 7, done.stderr
    said = " ".join(done.stdout.split())
    assert "no place for 3 workers with CPU 1 each within 2 s: the cluster has CPU 1 (1 free) on 1 node" in said
    assert "--address" in said


@pytest.mark.ray
def test_a_full_disk_ends_the_run_and_older_checkpoints_stay_valid(
    warm_drills: WarmDrills, tmp_path: Path, small_disk: Path
) -> None:
    # Three of these checkpoints do not fit, and two are kept.
    job = write_job(tmp_path, "", kills(9), width=10_000)
    limits = ["checkpoint.keep=2", f"checkpoint.storage={small_disk}"]
    result = warm_drills(job, root=tmp_path / "root", overrides=limits)
    assert result.verdict.exit_code == 7
    assert "No space left on device" in result.verdict.cause
    assert str(small_disk) in result.verdict.cause
    assert result.verdict.hint is not None
    assert len(events(result.run.reference, "attempt.starting")) == 1, "another attempt would not make room"
    leg = LegLayout(result.run.reference.path, small_disk / result.run.run_id / "reference")
    names = sorted(os.listdir(leg.checkpoints))
    assert names == ["step-00000003", "step-00000006"]
    store = CheckpointStore(leg, keep=2)
    assert [store.audit(name).step for name in names] == [3, 6]


@pytest.mark.nightly
def test_a_run_on_a_full_disk_goes_on_when_there_is_room(shell: Shell, small_disk: Path) -> None:
    """Traces, logs and the journal share the disk with the checkpoints, as they do by default."""
    job = write_job(shell.folder, "", kills(7), width=10_000)
    full = shell.run("submit", job, "--root", small_disk)
    assert full.returncode == 7, full.stdout + full.stderr
    assert "No space left on device" in full.stdout + full.stderr
    assert "bug in chaosrun" not in full.stderr
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    done = shell.run("resume", "latest", "--root", small_disk, "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)["verdict"]
    assert verdict["status"] == "PASS"
    assert [fault["landed"] for fault in verdict["faults"]] == [True]


# Two at once, and damage


@pytest.mark.nightly
def test_two_submits_at_the_same_time_both_reach_their_verdict(shell: Shell) -> None:
    job = write_job(shell.folder, "", kills(7), loader_workers=2)
    running = [shell.start("submit", job, "-o", "json") for _ in range(2)]
    done = [finish(process) for process in running]
    assert [each.returncode for each in done] == [0, 0], [each.stderr for each in done]
    said = [json.loads(each.stdout) for each in done]
    assert len({value["run"] for value in said}) == 2
    assert [value["verdict"]["status"] for value in said] == ["PASS", "PASS"]


DAMAGE = """\
at = {1: 5, 2: 7, 3: 9}.get(order.attempt)
if order.leg == "chaos" and rank == 1 and step == at:  # by the rank that is killed after that
    checkpoints = sorted((Path(order.leg_path) / "checkpoints").iterdir())
    if order.attempt == 1:  # truncated
        file = checkpoints[-1] / "model.safetensors"
        os.truncate(file, file.stat().st_size - 1)
    if order.attempt == 2:  # one bit
        with (checkpoints[-1] / "optimizer.bin").open("r+b") as file:
            file.seek(1000)
            (byte,) = file.read(1)
            file.seek(1000)
            file.write(bytes([byte ^ 1]))
    if order.attempt == 3:  # all of them
        for checkpoint in checkpoints:
            (checkpoint / "MANIFEST.json").unlink()
"""


@pytest.mark.ray
def test_damaged_checkpoints_are_quarantined_and_older_ones_or_none_are_as_exact(
    warm_drills: WarmDrills, tmp_path: Path
) -> None:
    job = write_job(tmp_path, DAMAGE, kills(5, 7, 9))
    result = warm_drills(job, root=tmp_path / "root", overrides=["checkpoint.every_steps=2"])
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert [fault.landed for fault in verdict.faults] == [True] * 3
    assert verdict.steps == STEPS
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, 2, 4, 0]
    chaos = result.run.leg("chaos")
    quarantined = events(chaos, "checkpoint.quarantined")
    assert [record["name"] for record in quarantined] == [f"step-{step:08}" for step in (4, 6, 8, 6, 4)]
    assert all(Path(record["moved_to"]).is_dir() for record in quarantined)
    reasons = [record["reason"] for record in quarantined]
    assert "model.safetensors has" in reasons[0] and "bytes instead of" in reasons[0]
    assert "optimizer.bin has the right size but other contents" in reasons[1]
    assert all("MANIFEST.json is missing" in reason for reason in reasons[2:])
