"""Checkpoints in an object store: drills whose only whole checkpoints are on a server, and what of it is refused beforehand."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from chaosrun import api
from chaosrun.checkpoint.object_storage import S3_TRIES, WAITS_S, ObjectStorage
from chaosrun.errors import ChaosrunError, ResourcesError, UsageError
from chaosrun.preflight.probes.storage import try_objects
from chaosrun.records.layout import RunLayout
from chaosrun.records.object_urls import ObjectPlace
from chaosrun.records.trace_reader import read_trace
from chaosrun.supervise.find_runs import remove_run
from chaosrun.supervise.objects import claim_objects
from tests.conftest import WarmDrills, job_file
from tests.integration.object_server import ObjectServer, answering, dropping_conditions, object_server
from tests.records import read_lines

PROBE = Path(__file__).parents[2] / "jobs" / "probe" / "train.py"
JOB = """\
name: objects
script: {script}
args: [--steps, "20"]
workers: 2
seed: 1
max_steps: 20
env: {env}
checkpoint: {{every_steps: 2, keep: 2, storage: "{storage}"}}
faults:
  schedule:
{faults}
timeout: 300s
"""
KILLS = (
    "rank: 1, at_step: 5",
    "rank: 0, at_step: 8, phase: checkpoint.rename.before",
    "rank: 0, at_step: 12, phase: checkpoint.rename.after",
    "kind: failed_rename, at_step: 14",
    "kind: flip_file_bit, rank: 0, at_step: 16, file: model.safetensors",
    "rank: 0, at_step: 17",
)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as server:
        server.files().call_s3("create_bucket", Bucket="bucket")
        yield server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all drills here: where checkpoints are is nothing that a reference depends on."""
    return tmp_path_factory.mktemp("root")


def job_text(storage: str, env: dict[str, str], faults: tuple[str, ...]) -> str:
    return JOB.format(script=PROBE, storage=storage, env=env, faults="\n".join(f"    - {{{fault}}}" for fault in faults))


def expect_exact(result: Any, resumed: list[int]) -> None:
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert [(fault.id, fault.landed) for fault in verdict.faults] == [(fault.id, True) for fault in verdict.faults]
    assert [attempt.resumed_step for attempt in verdict.attempts] == resumed
    journal = read_lines(result.run.leg("chaos").journal)
    assert [record for record in journal if record["event"] == "death.unplanned"] == []


@pytest.mark.ray
@pytest.mark.parametrize(
    ("scheme", "copies"),
    [
        ("file", "kept"),
        pytest.param("s3", "lost", marks=pytest.mark.nightly),
        pytest.param("s3", "kept", marks=pytest.mark.nightly),
        pytest.param("file", "lost", marks=pytest.mark.nightly),
    ],
)
def test_a_drill_comes_back_from_the_store(
    warm_drills: WarmDrills, server: ObjectServer, root: Path, tmp_path: Path, scheme: str, copies: str
) -> None:
    storage = "s3://bucket/drills" if scheme == "s3" else f"file://{tmp_path}/bucket"
    before, lost = set(root.glob("runs/*")), []

    def lose(record: dict[str, Any]) -> None:
        if copies == "lost" and record["event"] == "attempt.stopped" and record["reason"] != "all ranks ended":
            (run,) = set(root.glob("runs/*")) - before
            if (folder := RunLayout(run).leg("chaos").checkpoints).exists():
                lost.append(folder)
                shutil.rmtree(folder)

    # Damage of a local copy shows only where the copy is still there at the next start.
    faults = KILLS if copies == "kept" else KILLS[:4]
    job = job_file(job_text(storage, server.env, faults), tmp_path)
    result = warm_drills(job, root=root, on_event=lose)
    expect_exact(result, [0, 4, 6, 12, 12, 16][: len(faults) + 1] if copies == "kept" else [0, 4, 6, 12, 12])
    assert copies == "kept" or len(lost) >= 4
    place = ObjectPlace(f"{storage}/{result.run.run_id}", tuple(server.env.items()))
    # Retention keeps two of each leg, and nothing of what was not committed.
    listed = ObjectStorage(place).listed("chaos")
    assert {key.split("/")[2].split(".")[0] for key in listed} == {"step-00000018", "step-00000020"}
    remove_run(result.run)
    assert ObjectStorage(ObjectPlace(storage, place.env)).listed(result.run.run_id) == []


FAULTS = (
    "kind: failed_put, rank: 1, at_step: 4",
    "kind: lost_reply, at_step: 6",
    "kind: throttled_store, rank: 0, at_step: 8, duration: 400ms",
    "rank: 0, at_step: 9",
    "kind: late_listing, at_step: 10",
    "kind: failed_put, rank: 0, at_step: 12",
    "kind: lost_reply, at_step: 14",
    "rank: 1, at_step: 14, phase: checkpoint.postcommit",
)


@pytest.mark.ray
def test_a_store_that_fails_refuses_and_does_not_answer(
    warm_drills: WarmDrills, server: ObjectServer, root: Path, tmp_path: Path
) -> None:
    job = job_file(job_text("s3://bucket/faults", server.env, FAULTS), tmp_path)
    result = warm_drills(job, root=root)
    expect_exact(result, [0, 2, 8, 10, 14])


@pytest.mark.ray
@pytest.mark.nightly
def test_so_it_does_while_it_is_saved_to_beside_the_training(
    warm_drills: WarmDrills, server: ObjectServer, root: Path, tmp_path: Path
) -> None:
    faults = (
        "kind: failed_put, rank: 1, at_step: 4",
        "kind: lost_reply, at_step: 6",
        "kind: throttled_store, rank: 1, at_step: 8, duration: 400ms",
        "rank: 0, at_step: 8, phase: checkpoint.postcommit",
        "kind: late_listing, at_step: 10",
        "kind: failed_put, rank: 0, at_step: 12",
    )
    job = job_file(job_text("s3://bucket/beside", server.env, faults), tmp_path)
    result = warm_drills(job, root=root, overrides=["checkpoint.mode=async"])
    expect_exact(result, [0, 2, 8, 10])
    leg = result.run.leg("chaos")
    traces = [read_trace(leg.attempt(number).trace(rank), number, rank, []) for number in (1, 2, 3, 4) for rank in (0, 1)]
    assert all(saved.pending for trace in traces for saved in trace.checkpoints)


def refused(tmp_path: Path, storage: str, env: dict[str, str]) -> ChaosrunError:
    """What `submit` says, before anything starts."""
    job = job_file(job_text(storage, env, KILLS[:1]), tmp_path)
    with pytest.raises((UsageError, ResourcesError)) as error:
        api.submit(job, root=tmp_path / "root")
    assert not any((tmp_path / "root").glob("runs/*/*"))
    return error.value


def test_what_is_wrong_with_a_store_is_told_before_anything_starts(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(tmp_path, "s3://nowhere/prefix", server.env)
    assert "s3://nowhere/prefix" in error.message and "bucket does not exist" in error.message
    assert error.hint == "make the bucket, or name another one with checkpoint.storage"
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # the library asks five times by itself, and sleeps between
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # held, so that no other process listens there, and nobody does
        closed = {**server.env, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        error = refused(tmp_path, "s3://bucket/prefix", closed)
    assert "Could not connect to the endpoint" in error.message and "AWS_ENDPOINT_URL" in str(error.hint)
    job = job_file(job_text("checkpoints", {}, FAULTS[1:2]), tmp_path)
    with pytest.raises(UsageError, match="strikes requests to an object store"):
        api.plan(job)
    error = refused(tmp_path, "hdfs://bucket/prefix", {})
    assert "conditional put" in error.message and "job.yaml:8" in error.message


def test_without_credentials(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    error = refused(tmp_path, "s3://bucket/prefix", {"AWS_ENDPOINT_URL": server.env["AWS_ENDPOINT_URL"]})
    assert "Unable to locate credentials" in error.message and "AWS_ACCESS_KEY_ID" in str(error.hint)


def test_what_the_store_does_not_permit_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    """403 over HTTP: of a stranger, of a wrong secret, and of one who may read and list, but not put."""
    with object_server(open_requests=4) as server:
        about: dict[str, Any] = {"region_name": "us-east-1", "endpoint_url": server.env["AWS_ENDPOINT_URL"]}
        about |= {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        s3, iam = (botocore.session.Session().create_client(name, **about) for name in ("s3", "iam"))
        s3.create_bucket(Bucket="bucket")
        iam.create_user(UserName="reader")
        made = iam.create_access_key(UserName="reader")["AccessKey"]
        may = [{"Effect": "Allow", "Action": ["s3:ListBucket", "s3:GetObject"], "Resource": "*"}]
        policy = json.dumps({"Version": "2012-10-17", "Statement": may})
        iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=policy)
        for key, secret in (
            ("nobody", "wrong"),
            (made["AccessKeyId"], "wrong"),
            (made["AccessKeyId"], made["SecretAccessKey"]),
        ):
            env = {**server.env, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
            error = refused(tmp_path, "s3://bucket/prefix", env)
            assert isinstance(error, ResourcesError) and error.message.startswith(
                "checkpoint storage failed at s3://bucket/prefix"
            )
            assert "Forbidden" in error.message or "Access Denied" in error.message
            assert error.hint == "the credentials must be valid, and allow to list, read, put and delete objects there"
            assert secret not in f"{error.message} {error.hint}"


def test_a_store_that_puts_over_what_is_there_is_refused(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything starts, and by preflight's storage check."""
    with dropping_conditions(server.port) as port:
        env = {**server.env, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
        error = refused(tmp_path, "s3://bucket/careless", env)
        assert isinstance(error, UsageError) and "s3://bucket/careless ignores conditional puts" in error.message
        assert "If-None-Match" in str(error.hint)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        failed = try_objects("s3://bucket/careless").failed
        assert failed is not None and "s3://bucket/careless ignores conditional puts" in failed.error
    assert server.files().find("bucket/careless") == []
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.env["AWS_ENDPOINT_URL"])
    assert try_objects("s3://bucket/careless").failed is None


@pytest.mark.parametrize("status", [500, 503])
def test_a_store_that_refuses_for_long_is_told_before_its_rank_counts_as_hung(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """By default s3fs repeats what botocore repeats: a hundred requests, for minutes."""
    monkeypatch.setattr("chaosrun.checkpoint.object_storage.WAITS_S", (0.0,) * len(WAITS_S))
    with answering(status) as (server, asked):
        storage = ObjectStorage(ObjectPlace("s3://bucket/x", tuple(server.env.items())))
        with pytest.raises(ResourcesError, match="Service Unavailable" if status == 503 else "Internal Server Error"):
            storage.read("nothing")
    assert len(WAITS_S) < len(asked) <= S3_TRIES * (1 + len(WAITS_S))


def test_two_runs_on_one_prefix(server: ObjectServer, tmp_path: Path) -> None:
    """The second one is refused before it puts anything; what the first one has stays, and goes with it alone."""
    place = ObjectPlace("s3://bucket/shared/run-1", tuple(server.env.items()))
    claim_objects(place, RunLayout(tmp_path / "here" / "run-1"))
    owner = ObjectStorage(place).read("owner.json")
    with pytest.raises(ResourcesError, match="exists already and belongs to another run: nothing was overwritten") as error:
        claim_objects(place, RunLayout(tmp_path / "there" / "run-1"))
    assert "name another prefix with checkpoint.storage" in str(error.value.hint)
    assert ObjectStorage(place).read("owner.json") == owner


def test_large_files_and_checksums(server: ObjectServer, tmp_path: Path) -> None:
    from chaosrun.checkpoint.object_store import ObjectCheckpointStore
    from chaosrun.records.layout import LegLayout
    from tests.unit.test_checkpoint_store import save

    layout = LegLayout(tmp_path / "leg", objects=ObjectPlace("s3://bucket/large", tuple(server.env.items())))
    large = {"model.safetensors": bytes(range(256)) * (430 << 10), "empty.bin": b""}  # in several parts
    save(ObjectCheckpointStore(layout, 3), 10, files=large)
    shutil.rmtree(layout.path)
    assert ObjectCheckpointStore(layout, 3).newest_valid().name == "step-00000010"
    assert (layout.checkpoints / "step-00000010/model.safetensors").read_bytes() == large["model.safetensors"]
