"""Saves one rank's part of a checkpoint, from the first byte to the commit, from live state or a snapshot.

In order: every rank writes its files into the staging directory and hashes them; rank 0 gathers the hashes and writes the
manifest; all ranks pass `precommit`; rank 0 renames. A rank that dies before the rename leaves no checkpoint, one that dies
after it leaves a whole one. The store handles files, this module the ranks.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from chaosrun.checkpoint.audit import list_members
from chaosrun.checkpoint.object_store import checkpoint_store
from chaosrun.checkpoint.storage_errors import refusal, storage_errors
from chaosrun.checkpoint.store import written_back
from chaosrun.faults.points import DiskPoints, FaultPoints
from chaosrun.records.codec import to_plain
from chaosrun.records.filesystem import Filesystem
from chaosrun.records.heartbeat import Heart
from chaosrun.records.layout import LegLayout, checkpoint_name
from chaosrun.records.manifest import FileEntry, Manifest, ManifestPosition
from chaosrun.records.order import WorkerOrder
from chaosrun.records.position import Position

_T = TypeVar("_T")
_FOR_EVER = timedelta(days=365)
Digests = Mapping[str, Mapping[str, str]]


def state_of(manifest: Manifest, rank: int) -> dict[str, dict[str, str]]:
    """Digests of a rank's part of a checkpoint."""
    saved = manifest.digests
    return {**{key: saved[key] for key in ("model", "optimizer", "scheduler")}, **saved["ranks"][rank]}


def rank_file(rank: int) -> str:
    return f"chaosrun-rank-{rank}.pt"


class Content(Protocol):
    """The state that one rank saves."""

    position: Position
    job: Mapping[str, object]
    own_components: Sequence[str]
    """Components of the state that differ by rank."""

    def write(self, staging: Path) -> list[str]:
        """Write all files but the rank's own file. Returns the names of those that no other rank writes."""
        ...

    def payload(self) -> bytes:
        """The bytes of the rank's own file."""
        ...

    def seen(self) -> tuple[Digests, list[str]]:
        """Digests of the written state, and the parameters' names in the optimizers' order. Raises MisuseError if the written
        state is unreliable."""
        ...


class RankFiles(NamedTuple):
    """The files that one rank has saved of a checkpoint, and the digests of the state that only it has."""

    files: Mapping[str, FileEntry]
    digests: Digests


class Saver:
    """Saves the checkpoints of one rank of one attempt."""

    def __init__(self, order: WorkerOrder, leg: LegLayout, faults: FaultPoints, heart: Heart) -> None:
        self._order = order
        self._faults = faults
        self._heart = heart
        self._leg = leg
        self._disk = Filesystem()
        self._points = DiskPoints(faults, leg)
        self._disk.listeners.append(self._points)
        self.store = checkpoint_store(leg, order.keep, self._disk)

    def save(self, content: Content, peers: "Peers", *, before_commit: Callable[[], None] = lambda: None) -> None:
        """Commit a checkpoint. A collective: every rank calls it. `before_commit` is called on each rank when all files are
        written; the checkpoint is committed only after every rank has returned from it.

        Raises ResourcesError when the storage is full or cannot be written; older checkpoints stay as they are.
        """
        step = content.position.step
        self._heart.beat("checkpoint.write", step)
        with self._points.saving(step) as until_saved:
            self._faults.reach("checkpoint.begin", step, disk=self._disk, objects=self.store.objects, until_saved=until_saved)
            self._save(content, peers, before_commit)

    def _save(self, content: Content, peers: "Peers", before_commit: Callable[[], None]) -> None:
        rank, step = self._order.rank, content.position.step
        staging = self.store.stage(step, self._order.attempt)
        with storage_errors(staging), _full_disk(staging), written_back(staging):
            own = content.write(staging)
            self._write_rank_file(staging / rank_file(rank), content.payload(), step)
        sealed = self.store.seal(staging, [rank_file(rank), *own])
        digests, names = content.seen()
        self._heart.beat("checkpoint.gather", step)
        everybody = peers.gather(RankFiles(sealed, {key: digests[key] for key in content.own_components}))
        self._heart.beat("checkpoint.manifest", step)
        if rank == 0:
            self.store.write_manifest(staging, self._manifest(staging, content, digests, names, everybody))
        self._faults.reach("checkpoint.precommit", step)
        before_commit()
        self._heart.beat("checkpoint.precommit", step)
        peers.wait("precommit")
        self._heart.beat("checkpoint.commit", step)
        if rank == 0:
            self.store.commit(staging, step)
        self._heart.beat("checkpoint.postcommit", step)
        peers.wait("postcommit")
        self._heart.beat("checkpoint.retention", step)
        self._faults.reach("checkpoint.postcommit", step, checkpoint=self._leg.checkpoints / checkpoint_name(step))
        if rank == 0:
            self.store.retain()
        self._faults.reach("checkpoint.retention", step)

    def _manifest(
        self, staging: Path, content: Content, digests: Digests, names: list[str], everybody: list[RankFiles]
    ) -> Manifest:
        files = {name: entry for part in everybody for name, entry in part.files.items()}
        # Only now has every rank's save hook, which may write its own files, finished.
        rest = sorted(name for name in list_members(staging) if name not in files)
        return Manifest(
            step=content.position.step,
            position=ManifestPosition(**to_plain(content.position)),
            world_size=self._order.world_size,
            attempt=self._order.attempt,
            time_s=time.time(),
            job_fingerprint=self._order.job_fingerprint,
            files={**files, **self.store.seal(staging, rest)},
            digests={
                **{key: digests[key] for key in ("model", "optimizer", "scheduler")},
                "ranks": [part.digests for part in everybody],
                "job": content.job,
                "order": names,
            },
        )

    def _write_rank_file(self, path: Path, payload: bytes, step: int) -> None:
        half = len(payload) // 2
        with path.open("wb") as file:
            file.write(payload[:half])
            file.flush()
            self._faults.reach("checkpoint.file", step, path=path, descriptor=file.fileno())
            file.write(payload[half:])


class GroupPeers:
    """How the ranks of one save exchange values and wait for each other: through the training's process group."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def gather(self, value: _T) -> list[_T]:
        values = [value] * self._accelerator.num_processes
        if len(values) > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def wait(self, what: str) -> None:
        self._accelerator.wait_for_everyone()


class StorePeers:
    """As GroupPeers, for the writers of the ranks (`protocol.background`): through the rendezvous store. If a rank dies, the
    others do not wait long: the attempt is over, and all are killed."""

    def __init__(self, order: WorkerOrder) -> None:
        self._rank, self._size = order.rank, order.world_size
        self._connect = partial(torch.distributed.TCPStore, order.master_addr, order.master_port, is_master=False)
        self._store: torch.distributed.Store | None = None
        self._number = 0

    def begin(self) -> None:
        self._number += 1
        if self._size > 1 and self._store is None:
            self._store = torch.distributed.PrefixStore("chaosrun/saves", self._connect(timeout=_FOR_EVER))

    def gather(self, value: RankFiles) -> list[RankFiles]:
        """The values of all ranks, in rank order; on other ranks than 0 only the rank's own."""
        if self._store is None:
            return [value]
        if self._rank:
            self._store.set(f"{self._number}/{self._rank}", _packed(value))
            return [value]
        keys = [f"{self._number}/{rank}" for rank in range(1, self._size)]
        others = [_unpacked(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return [value, *others]

    def wait(self, what: str) -> None:
        if self._store is not None:
            key = f"{self._number}/{what}"
            if self._store.add(key, 1) == self._size:
                self._store.set(f"{key}/all", "1")
            self._store.wait([f"{key}/all"], _FOR_EVER)


Peers = GroupPeers | StorePeers


def _packed(sealed: RankFiles) -> str:
    return json.dumps([{name: entry.model_dump() for name, entry in sealed.files.items()}, sealed.digests])


def _unpacked(packed: bytes) -> RankFiles:
    files, own = json.loads(packed)
    return RankFiles({name: FileEntry(**entry) for name, entry in files.items()}, own)


@contextmanager
def _full_disk(staging: Path) -> Iterator[None]:
    """torch and safetensors report a disk that takes no more with their own errors, without errno: check the disk, and raise
    the kernel's error."""
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        if (refused := refusal(staging)) is None:
            raise
        raise refused from error
