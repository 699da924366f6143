"""Five bugs that are put into the real code on purpose: what does the simulation need to find each?"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from chaosrun.checkpoint.audit import hash_member
from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.cluster.messages import Exited
from chaosrun.cluster.workers import ClusterWorkers
from chaosrun.records.manifest import FileEntry, Manifest
from chaosrun.supervise import lifecycle
from chaosrun.supervise.supervisor import Supervisor


def lost_stop() -> Any:
    """One node is not told that its attempt is over."""

    def stop(self: ClusterWorkers, attempt: int) -> None:
        for node, agent in list(self._cluster.agents.items())[:-1]:
            if node not in self._lost | self._leaving:
                agent.submit("stop", attempt)

    return patch.object(ClusterWorkers, "stop", stop)


def double_start() -> Any:
    """The next attempt starts when the first node of this one has stopped."""
    real = Supervisor._node_stopped

    def node_stopped(self: Supervisor, node: str, killed: Sequence[int]) -> Iterator[lifecycle.LegEvent]:
        if self._is_open:
            self._stopped_nodes.update(self._workers.nodes)
        return real(self, node, killed)

    return patch.object(Supervisor, "_node_stopped", node_stopped)


@contextmanager
def early_commit() -> Iterator[None]:
    """A checkpoint gets its name before its manifest is written."""
    waiting: dict[Path, Manifest] = {}
    write_manifest, commit = CheckpointStore.write_manifest, CheckpointStore.commit

    def write_later(self: CheckpointStore, staging: Path, manifest: Manifest) -> None:
        waiting[staging] = manifest
        (staging / "MANIFEST.json").touch()

    def commit_first(self: CheckpointStore, staging: Path, step: int) -> Path:
        target = commit(self, staging, step)
        (target / "MANIFEST.json").unlink()
        write_manifest(self, target, waiting.pop(staging))
        return target

    with patch.object(CheckpointStore, "write_manifest", write_later), patch.object(CheckpointStore, "commit", commit_first):
        yield


def ignored_late_death() -> Any:
    """Once an attempt is being stopped, nobody looks at who else dies."""
    real = Supervisor._as_lifecycle_event

    def understand(self: Supervisor, node: str, event: Any) -> lifecycle.LegEvent | None:
        late = isinstance(event, Exited) and self._stop_reason.startswith("planned fault")
        return None if late else real(self, node, event)

    return patch.object(Supervisor, "_as_lifecycle_event", understand)


def skipped_fsync() -> Any:
    """What ranks write into a checkpoint is never brought to the disk."""

    def seal(self: CheckpointStore, staging: Path, names: Iterable[str]) -> dict[str, FileEntry]:
        return {name: hash_member(staging, name) for name in names}

    return patch.object(CheckpointStore, "seal", seal)


BUGS: dict[str, Callable[[], Any]] = {
    bug.__name__: bug for bug in (lost_stop, double_start, early_commit, ignored_late_death, skipped_fsync)
}
