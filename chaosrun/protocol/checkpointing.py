"""Saves and restores checkpoints from inside a training loop, all ranks together. The store knows files, this knows ranks.

A save, in order: every rank writes its files into the staging directory and hashes them; the hashes meet on every rank; rank 0
writes the manifest; everybody passes `precommit`; rank 0 renames. A rank that dies anywhere before the rename leaves no
checkpoint, a rank that dies after it leaves a whole one.
"""

import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from chaosrun.checkpoint.audit import list_members
from chaosrun.checkpoint.object_store import checkpoint_store
from chaosrun.checkpoint.storage import is_full, storage_errors
from chaosrun.errors import HookedStateError, MisuseError, ParameterOrderError, RegisteredStateError, RestoreMismatchError
from chaosrun.faults.disk_points import DiskPoints
from chaosrun.faults.points import FaultPoints
from chaosrun.protocol.state import TrainingState
from chaosrun.records.codec import to_plain
from chaosrun.records.filesystem import Filesystem
from chaosrun.records.heartbeat import Heart
from chaosrun.records.layout import LegLayout, checkpoint_name
from chaosrun.records.manifest import FileEntry, Manifest
from chaosrun.records.manifest import Position as StoredPosition
from chaosrun.records.order import WorkerOrder
from chaosrun.records.position import Position
from chaosrun.wording import listed


def rank_file(rank: int) -> str:
    return f"chaosrun-rank-{rank}.pt"


class Checkpointer:
    """The checkpoints of one leg, as one rank of one attempt sees them."""

    def __init__(
        self,
        accelerator: Accelerator,
        state: TrainingState,
        order: WorkerOrder,
        leg: LegLayout,
        faults: FaultPoints,
        heart: Heart | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._state = state
        self._order = order
        self._faults = faults
        self._heart = heart or Heart()
        self._leg = leg
        self._disk = Filesystem()
        self._points = DiskPoints(faults, leg)
        self._disk.listeners.append(self._points)
        self._store = checkpoint_store(leg, order.keep, self._disk)
        self.newest_step: int | None = None
        """Step of the newest checkpoint that this attempt restored or committed."""
        self.digests: dict[str, dict[str, str]] | None = None
        """Of this rank's state as the latest save or restore left it."""
        self.changed: dict[str, str] = {}
        """What the latest save changed of the live state: a hook of the script's, or a state_dict() with a side effect."""

    def save(self, position: Position, job: dict[str, object]) -> str:
        """Commit a checkpoint of this position and return its name. A collective: every rank calls it at the same step.

        Raises ResourcesError when the storage is full or cannot be written; older checkpoints stay as they are.
        """
        step = position.step
        self._heart.beat("checkpoint.write", step)
        with self._points.saving(step) as until_saved:
            self._faults.reach("checkpoint.begin", step, disk=self._disk, objects=self._store.objects, until_saved=until_saved)
            return self._save(position, job)

    def _save(self, position: Position, job: dict[str, object]) -> str:
        rank, step = self._order.rank, position.step
        staging = self._store.stage(step, self._order.attempt)
        before = {**self._state.digests(), "mode": self._state.modes()}
        with storage_errors(staging), _full_disk(staging), self._shared_files_by_rank_zero():
            self._state.save(staging)
            self._write_rank_file(staging / rank_file(rank), step)
        sealed = self._store.seal(staging, [rank_file(rank), *self._state.own_files(staging, rank)])
        digests = self._state.digests()
        self.changed = _differing(before, {**digests, "mode": self._state.modes()})
        self._heart.beat("checkpoint.gather", step)
        everybody = self._gather(_Saved(sealed, {key: digests[key] for key in self._state.own_components}))
        self._heart.beat("checkpoint.manifest", step)
        if rank == 0:
            files = {name: entry for part in everybody for name, entry in part.files.items()}
            # Only now has every rank's hook of saving, which may write files of its own, come to its end.
            rest = sorted(name for name in list_members(staging) if name not in files)
            manifest = Manifest(
                step=step,
                position=StoredPosition(**to_plain(position)),
                world_size=self._order.world_size,
                attempt=self._order.attempt,
                time_s=time.time(),
                job_fingerprint=self._order.job_fingerprint,
                files={**files, **self._store.seal(staging, rest)},
                digests={
                    **{key: digests[key] for key in ("model", "optimizer", "scheduler")},
                    "ranks": [part.digests for part in everybody],
                    "job": job,
                    "order": self._state.parameter_names(),
                },
            )
            self._store.write_manifest(staging, manifest)
        self._faults.reach("checkpoint.precommit", step)
        self._heart.beat("checkpoint.precommit", step)
        self._accelerator.wait_for_everyone()
        self._heart.beat("checkpoint.commit", step)
        if rank == 0:
            self._store.commit(staging, step)
        self._heart.beat("checkpoint.postcommit", step)
        self._accelerator.wait_for_everyone()
        self._heart.beat("checkpoint.retention", step)
        self._faults.reach("checkpoint.postcommit", step, checkpoint=self._leg.checkpoints / checkpoint_name(step))
        if rank == 0:
            self._store.retain()
        self._faults.reach("checkpoint.retention", step)
        self.newest_step, self.digests = step, digests
        return checkpoint_name(step)

    def position_of(self, name: str) -> Position:
        """The position that a checkpoint was taken at, by its manifest alone. Raises InvalidCheckpointError."""
        return Position(**self._store.audit(name, hashed=()).position.model_dump())

    def restore(self, name: str, job: dict[str, object]) -> Position:
        """Load a checkpoint into the prepared objects and prove that it is what was saved.

        The supervisor has hashed every file; this rank validates the manifest and all sizes once more before the model is
        touched, and hashes its own file if anybody has written into the checkpoint since. Afterwards the digests of the live
        state are compared with those taken at the save. Raises InvalidCheckpointError, MisuseError (another job's checkpoint)
        or RestoreMismatchError naming the component and the tensor; of those a ParameterOrderError when the optimizers hold
        their parameters in another order: they are restored by number.
        """
        directory = self._leg.checkpoints / name
        rank = self._order.rank
        manifest = self._store.audit(name, hashed=[rank_file(rank)], vouched=self._order.audited)
        _check_same_job(name, manifest, self._order, job)
        if not self._order.inspect:
            _check_order(name, manifest.digests.get("order"), self._state.parameter_names(), rank)
        self._state.load(directory, directory / rank_file(rank))
        live = self._state.digests()
        saved = manifest.digests
        expected = {**{key: saved[key] for key in ("model", "optimizer", "scheduler")}, **saved["ranks"][rank]}
        # A replay for `chaosrun diagnose` goes on with what came back, to show what becomes of it.
        for component, values in expected.items() if not self._order.inspect else ():
            _compare(component, values, live[component], name, rank, self._state.hooks())
        self.newest_step, self.digests = manifest.step, live
        return Position(**manifest.position.model_dump())

    def _write_rank_file(self, path: Path, step: int) -> None:
        payload = self._state.rank_payload()
        half = len(payload) // 2
        with path.open("wb") as file:
            file.write(payload[:half])
            file.flush()
            self._faults.reach("checkpoint.file", step, path=path, descriptor=file.fileno())
            file.write(payload[half:])

    @contextmanager
    def _shared_files_by_rank_zero(self) -> Iterator[None]:
        """Of a stateful dataloader and of the gradient scaler accelerate has every rank write the same file, the last one wins
        (hazards D18, O7): let it be rank 0's, or its hash might be taken while another rank still writes."""
        loaders, scaler = self._accelerator._dataloaders, self._accelerator.scaler
        if self._order.rank:
            self._accelerator._dataloaders, self._accelerator.scaler = [], None
        try:
            yield
        finally:
            self._accelerator._dataloaders, self._accelerator.scaler = loaders, scaler

    def _gather(self, value: "_Saved") -> "list[_Saved]":
        if self._order.world_size == 1:
            return [value]
        values: list[Any] = [None] * self._order.world_size
        torch.distributed.all_gather_object(values, value)
        return values


class _Saved(NamedTuple):
    """What one rank has saved of a checkpoint, and the digests of what only it has."""

    files: Mapping[str, FileEntry]
    digests: Mapping[str, Mapping[str, str]]


@contextmanager
def _full_disk(staging: Path) -> Iterator[None]:
    """torch and safetensors report a full disk as errors of their own, without errno: look, and say it as the kernel would."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        if not is_full(staging):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(staging)) from error


def _check_same_job(name: str, manifest: Manifest, order: WorkerOrder, job: dict[str, object]) -> None:
    """Refuse a checkpoint whose continuation would be another training (hazards D14, G4, C4)."""
    saved = {**manifest.digests["job"], "world size": manifest.world_size, "spec": manifest.job_fingerprint}
    now = {**job, "world size": order.world_size, "spec": order.job_fingerprint}
    changed = [
        f"{key}: {saved.get(key)} then, {now.get(key)} now"
        for key in sorted(saved.keys() | now.keys())
        if saved.get(key) != now.get(key)
    ]
    if changed:
        raise MisuseError(
            f"checkpoint {name} belongs to another configuration of this job ({'; '.join(changed)})", hint="start a new run"
        )


def _check_order(name: str, saved: list[str] | None, now: list[str], rank: int) -> None:
    if saved is None or saved == now or sorted(saved) != sorted(now):
        return
    index = next(number for number, pair in enumerate(zip(saved, now, strict=True)) if pair[0] != pair[1])
    raise ParameterOrderError(
        f"rank {rank}: the optimizer's parameter {index} is {now[index]}, in checkpoint {name} it is {saved[index]}"
    )


def _differing(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> dict[str, str]:
    """By component that changed its first value that did, and how many more."""
    found: dict[str, str] = {}
    for component, values in before.items():
        names = [name for name in {**values, **after[component]} if values.get(name) != after[component].get(name)]
        if names:
            found[component] = listed(names, 1)
    return found


def _compare(
    component: str, expected: dict[str, str], live: dict[str, str], name: str, rank: int, hooks: Sequence[str] = ()
) -> None:
    if expected == live:
        return
    differing = [key for key in sorted(expected.keys() | live.keys()) if expected.get(key) != live.get(key)]
    # What was saved and is gone says more than the empty container that stands in its place.
    first = next((key for key in differing if key in expected), differing[0])
    kind = RegisteredStateError if component == "registered" else HookedStateError if hooks else RestoreMismatchError
    beside = f"; the script's hooks on saving and loading: {', '.join(hooks)}" if kind is HookedStateError else ""
    raise kind(
        f"rank {rank}: {component} is not what checkpoint {name} holds: {first!r} "
        f"was {expected.get(first, 'absent')} when saved and is {live.get(first, 'absent')} after the restore{beside}",
        hint="something between the save and the first batch changed it, or it was never restored",
    )
