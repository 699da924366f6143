"""Checkpoints that are saved beside the training: the same bytes, of the step at which they were taken, or none."""

import io
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from fresh import forget_accelerate

from chaosrun.errors import ChaosrunError, MisuseError, ResourcesError, RestoreMismatchError
from chaosrun.faults.fault import Fault
from chaosrun.faults.points import FaultPoints
from chaosrun.observe.contents import tensors_in
from chaosrun.observe.fingerprint import digests
from chaosrun.protocol import background, checkpointing, snapshot
from chaosrun.protocol.background import Writer
from chaosrun.protocol.checkpointing import Checkpointer
from chaosrun.protocol.context import WorkerContext
from chaosrun.protocol.snapshot import Arena, Taken, read
from chaosrun.protocol.state import TrainingState
from chaosrun.records.filesystem import Filesystem, Operation
from chaosrun.records.heartbeat import Heart
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import ASYNC_FROM_BYTES, WorkerOrder
from chaosrun.records.position import Position
from tests.unit.test_protocol_restore import order

POSITION = Position(epoch=0, batches=3, step=3)
LIMIT_S = 30.0


class Average:
    """Registered state: a tensor of its own, and one that is the model's."""

    def __init__(self, model: torch.nn.Module, device: Any) -> None:
        self.mean = torch.arange(4.0, device=device)
        self.tied = next(model.parameters()).detach()

    def state_dict(self) -> Any:
        return {"mean": self.mean, "tied": self.tied, "best": (0.5, None)}

    def load_state_dict(self, state: Any) -> None:
        self.mean = state["mean"]


class Job:
    """A training of two models that share a tensor, with all that accelerate saves."""

    def __init__(self, folder: Path, mode: Any, width: int = 8, device: str = "cpu", **about: Any) -> None:
        """`about`: of its order."""
        forget_accelerate()
        leg, told = LegLayout(folder / "leg", None), self.told(folder, mode, **about)
        self.writer = Writer(told, leg) if mode != "sync" else None
        set_seed(0)
        self.accelerator = Accelerator(cpu=device == "cpu")
        self.device = self.accelerator.device
        self.accelerator.scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=2)  # pyright: ignore[reportPrivateImportUsage]
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width))
        model[2].weight = model[0].weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loader = torch.utils.data.DataLoader([0.5] * 8, batch_size=2)  # pyright: ignore[reportArgumentType]
        self.model, self.optimizer, self.schedule, _ = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.accelerator.register_for_checkpointing(Average(model, self.device))
        self.state = TrainingState(self.accelerator)
        self.average = Average(model, self.device)
        self.state.register("average", self.average)
        self.faults = FaultPoints(told, leg)
        self.checkpointer = Checkpointer(self.accelerator, self.state, told, leg, self.faults, Heart(), self.writer)
        self.leg, self.width = leg, width

    @staticmethod
    def told(folder: Path, mode: Any, **about: Any) -> WorkerOrder:
        return replace(order(folder / "leg"), mode=mode, from_memory=True, **about)

    def learn(self, steps: int = 1) -> "Job":
        for _ in range(steps):
            self.accelerator.backward(self.model(torch.randn(4, self.width, device=self.device)).square().mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return self

    def files(self, name: str) -> dict[str, bytes]:
        folder = self.leg.checkpoints / name
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "MANIFEST.json"}


def values(data: bytes) -> Any:
    """What torch.save has saved, by name, and where it lies; of anything else the bytes."""
    if not data.startswith(b"PK"):
        return data
    held = torch.load(io.BytesIO(data), weights_only=False)
    return digests({"": held}), [str(tensor.device) for tensor in tensors_in(held)]


EVERYWHERE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@EVERYWHERE
def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path: Path, device: str) -> None:
    files: dict[str, dict[str, bytes]] = {}
    Job(tmp_path / "first", "sync", device=device).learn(3)  # what libraries do once in a process
    for mode in ("sync", "async"):
        job = Job(tmp_path / mode, mode, device=device).learn(3)
        name = job.checkpointer.save(POSITION, {})
        assert job.checkpointer.pending == (mode == "async")
        job.learn(2)  # goes on at once
        job.checkpointer.wait()
        assert [done.step for done in job.checkpointer.look()] == ([3] if mode == "async" else [])
        files[mode] = job.files(name)
    if device == "cpu":
        assert files["async"] == files["sync"]
    # On a GPU two files that hold random streams have other bytes for the same values.
    held = {mode: {name: values(data) for name, data in saved.items()} for mode, saved in files.items()}
    assert held["async"] == held["sync"]
    known = {"model.safetensors", "optimizer.bin", "scheduler.bin", "scaler.pt", "custom_checkpoint_0.pkl"}
    assert known <= files["sync"].keys()


def test_the_disk_sees_the_operations_of_a_save_that_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a power cut leaves after each of them (test_checkpoint_crash) holds for both."""
    do, seen = Filesystem._do, {}
    for mode in ("sync", "async"):
        told = tmp_path / f"{mode}.operations"

        def tell(self: Filesystem, operation: Operation, act: Callable[[], Any], told: Path = told) -> Any:
            with told.open("a") as file:
                done = f"{operation.kind} {operation.path.name} {operation.target and operation.target.name}\n"
                file.write(done.replace(str(os.getpid()), "PID"))
            return do(self, operation, act)

        monkeypatch.setattr(Filesystem, "_do", tell)
        (tmp_path / mode).mkdir()
        job = Job(tmp_path / mode, mode).learn(3)
        for step in (3, 4, 5):  # retention, too
            job.checkpointer.save(Position(epoch=0, batches=step, step=step), {})
        job.checkpointer.wait()
        seen[mode] = told.read_text().replace(f" {mode} ", " folder ")
    assert "rename step-00000005.attempt-1 step-00000005" in seen["sync"] and "unlink" in seen["sync"]
    assert seen["async"] == seen["sync"]


@EVERYWHERE
def test_what_comes_back_is_the_step_it_was_taken_at(tmp_path: Path, device: str) -> None:
    job = Job(tmp_path, "async", device=device, width=256).learn(3)
    at = job.state.digests()
    name = job.checkpointer.save(POSITION, {})
    job.learn(5).checkpointer.wait()
    assert job.state.digests() != at
    again = Job(tmp_path, "async", device=device, width=256)
    assert again.checkpointer.restore(name, {}) == POSITION
    assert again.state.digests() == at
    assert again.average.mean.device.type == device


def test_one_save_at_a_time_and_each_of_its_own_step(tmp_path: Path) -> None:
    job, names = Job(tmp_path, "async").learn(3), []
    states = []
    for step in (3, 4, 5):
        states.append(job.state.digests()["model"])
        names.append(job.checkpointer.save(Position(epoch=0, batches=step, step=step), {}))
        job.learn()
    job.checkpointer.wait()
    assert [done.step for done in job.checkpointer.look()] == [3, 4, 5]
    # Retention keeps two.
    for name, state in list(zip(names, states, strict=True))[1:]:
        again = Job(tmp_path, "sync")
        again.checkpointer.restore(name, {})
        assert again.state.digests()["model"] == state


def live(self: Taken, arena: Arena) -> None:
    """The mutant: what is written is the live memory, not a copy of it (Lightning #20953)."""
    copy(self, arena)
    memory = arena.memory()
    for offset, storage in self._storages:
        shared = snapshot._bytes_of(memory, offset, storage.nbytes())
        for tensor in LIVE:
            if tensor.untyped_storage()._cdata == storage._cdata:
                tensor.data = torch.empty(0, dtype=tensor.dtype).set_(shared, 0, tensor.shape)  # pyright: ignore[reportCallIssue]


copy = Taken.copy
LIVE: list[torch.Tensor] = []


def mutant(folder: Path, monkeypatch: pytest.MonkeyPatch, width: int = 8) -> Job:
    """Its writer begins when there is a file "go"."""
    monkeypatch.setattr(background.StorePeers, "begin", lambda self: until((folder / "go").exists))
    job = Job(folder, "async", width=width).learn(3)
    LIVE[:] = job.model.parameters()
    monkeypatch.setattr(Taken, "copy", live)
    return job


@pytest.mark.parametrize("width", [8, 256])
def test_a_writer_that_reads_live_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Also where the rank has looked at spots of its tensors alone."""
    job = mutant(tmp_path, monkeypatch, width)
    job.checkpointer.save(POSITION, {})
    job.learn(5)
    (tmp_path / "go").touch()
    with pytest.raises(MisuseError, match=r"rank 0: model '.*' changed while the state of step 3 was copied"):
        job.checkpointer.wait()
    assert not job.leg.checkpoints.exists()


def test_and_where_the_writer_does_not_look_the_restore_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background._Copied, "seen", lambda self: (self._copied["digests"], self._copied["names"]))
    job = mutant(tmp_path, monkeypatch)
    name = job.checkpointer.save(POSITION, {})
    job.learn(5)
    (tmp_path / "go").touch()
    job.checkpointer.wait()
    with pytest.raises(RestoreMismatchError, match="model is not what checkpoint"):
        Job(tmp_path, "sync").checkpointer.restore(name, {})


@pytest.mark.parametrize("settle", ["", "stop"])
def test_the_digests_are_those_of_the_state_that_was_copied(tmp_path: Path, settle: Any) -> None:
    """At once where ranks compare them at once, else when the writer has taken them."""
    job = Job(tmp_path, "async", settle=settle, width=256).learn(3)
    at = job.state.digests()
    job.checkpointer.save(POSITION, {})
    assert job.checkpointer.digests == (at if settle else None)
    job.learn().checkpointer.wait()
    [done] = job.checkpointer.look()
    assert done.digests == (None if settle else at)


@pytest.mark.parametrize("small", [True, False])
def test_a_small_state_is_waited_for_unless_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], small: bool
) -> None:
    monkeypatch.setattr(checkpointing, "ASYNC_FROM_BYTES", 1 << 30 if small else 1)
    job = Job(tmp_path, "auto").learn(3)
    assert job.writer is not None
    job.checkpointer.save(POSITION, {})
    assert job.checkpointer.pending != small
    assert not job.checkpointer.because
    job.checkpointer.wait()
    assert "waits for its checkpoints" not in capfd.readouterr().out
    with pytest.raises(ChildProcessError) if small else nullcontext():
        os.kill(job.writer._pid, signal.SIGKILL) if not small else None
        os.waitpid(job.writer._pid, 0)


def test_no_writer_is_begun_for_an_attempt_that_goes_on_from_a_small_checkpoint(tmp_path: Path) -> None:
    leg = LegLayout(tmp_path / "leg", None)
    (leg.checkpoints / "step-00000004").mkdir(parents=True)
    with (leg.checkpoints / "step-00000004" / "optimizer.bin").open("wb") as file:
        for size, begun in ((ASYNC_FROM_BYTES - 1, False), (ASYNC_FROM_BYTES, True)):
            file.truncate(size)
            context = WorkerContext(replace(order(leg.path), mode="auto", resume="step-00000004"))
            context.begin_a_writer(None)
            assert (context.writer is not None) == begun
    assert context.writer is not None
    context.writer.leave()


def fault(kind: Any, phase: Any, **options: Any) -> Any:
    return Fault(id="F1", kind=kind, rank=0, phase=phase, at_step=3, options=options, source="schedule").to_json()


def test_a_full_disk_is_told_in_the_rank(tmp_path: Path) -> None:
    job = Job(tmp_path, "async", faults=(fault("no_space", "checkpoint.file"),)).learn(3)
    job.checkpointer.save(POSITION, {})
    with pytest.raises(ResourcesError, match="No space left on device") as raised:
        until(lambda: job.checkpointer.look() or False)
    assert isinstance(raised.value.__cause__, OSError)
    assert not job.leg.checkpoints.exists()


def test_a_writer_that_is_gone_is_told(tmp_path: Path) -> None:
    job = Job(tmp_path, "async").learn(3)
    [pid] = [int(each) for each in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()][-1:]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with pytest.raises(ResourcesError, match="the process that saves rank 0's checkpoints is gone"):
        job.checkpointer.save(POSITION, {})


@pytest.mark.parametrize("spoil", ["memory", "hook"])
def test_the_training_waits_where_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str) -> None:
    if spoil == "memory":
        monkeypatch.setattr(snapshot, "free_memory", lambda: snapshot.SPARE_BYTES)
    job = Job(tmp_path, "async").learn(3)
    if spoil == "hook":
        job.accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    name = job.checkpointer.save(POSITION, {})
    assert not job.checkpointer.pending
    assert {"memory": "MiB are free", "hook": "hooks on saving"}[spoil] in job.checkpointer.because
    assert job.files(name)


@EVERYWHERE
def test_state_that_a_state_dict_changes_is_refused(tmp_path: Path, device: str) -> None:
    job = Job(tmp_path, "async", device=device).learn(3)
    count = torch.zeros(1, device=device)
    job.average.state_dict = lambda: {"count": count.add_(1)}  # type: ignore[method-assign]
    with pytest.raises(MisuseError, match="registered 'average/count' changed while"):
        job.checkpointer.save(POSITION, {})
        job.checkpointer.wait()
    assert not job.leg.checkpoints.exists()


def test_a_shared_storage_stays_shared() -> None:
    whole = torch.arange(6.0)
    arena = Arena()
    arena.reserve(0)
    taken = Taken({"whole": whole, "part": whole[2:].reshape(2, 2).T, "none": torch.empty(0)})
    arena.reserve(taken.layout.size)
    taken.copy(arena)
    whole.zero_()
    copied = read(arena, taken.layout).state
    assert copied["part"].tolist() == [[2.0, 4.0], [3.0, 5.0]]
    assert copied["part"].untyped_storage().data_ptr() == copied["whole"].untyped_storage().data_ptr()


def until(done: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_errors_of_every_kind_cross(tmp_path: Path) -> None:
    class Own(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} {two}")

    assert str(background._sendable(Own(1, 2)).error) == "Own: 1 2"
    hinted = background._sendable(ChaosrunError("what", hint="how")).error
    assert isinstance(hinted, ChaosrunError)
    assert hinted.hint == "how"
