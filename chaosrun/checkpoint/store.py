"""The checkpoint store of one leg: stage, seal, manifest, commit; retention; choosing the newest valid one.

A checkpoint is written in `staging/`. All its bytes and directory entries are on the disk before its manifest is, and one
rename makes it a checkpoint. So every entry of `checkpoints/` was once complete, and a kill at any instant leaves the earlier
ones untouched. Must not know the contents of the files, nor its callers.

Ranks of one attempt share a staging directory: each seals its own files, one of them writes the manifest and commits.
"""

import ctypes
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from chaosrun.checkpoint.audit import audit_directory, hash_member, list_members, signature_of
from chaosrun.checkpoint.object_storage import ObjectStorage
from chaosrun.checkpoint.retention import to_delete
from chaosrun.checkpoint.storage_errors import storage_errors
from chaosrun.errors import InvalidCheckpointError
from chaosrun.records.events import CheckpointQuarantined
from chaosrun.records.filesystem import Filesystem
from chaosrun.records.layout import CHECKPOINT_NAME, MANIFEST_NAME, LegLayout, checkpoint_name, checkpoint_step
from chaosrun.records.manifest import FileEntry, Manifest, check_member_name

STAGED_NAME = re.compile(CHECKPOINT_NAME.pattern + r"\.(attempt|deleted)-\d+")
ASIDE_NAME = re.compile(CHECKPOINT_NAME.pattern + r"\.(invalid|unwanted)-\d+")
SUPERSEDED_NAME = re.compile(CHECKPOINT_NAME.pattern + r"\.superseded-(\d+)")

WRITE_BACK_EVERY_S = 0.02
_SYNC_FILE_RANGE_WRITE = 2
_OWN_LEVELS = 2
"""How many directories above `checkpoints` belong to the run: the leg's and the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The checkpoint to restore (None: start from the beginning) and the damaged ones found before it."""

    name: str | None
    manifest: Manifest | None
    quarantined: tuple[CheckpointQuarantined, ...] = ()
    signature: str = ""
    """Signature of its files from before they were hashed."""


class CheckpointStore:
    """Every method raises ResourcesError, with path and hint, when the storage is full, read-only or not writable."""

    def __init__(self, layout: LegLayout, keep: int, disk: Filesystem | None = None) -> None:
        """`disk`: the layer through which all changes go; it may have listeners."""
        self._layout = layout
        self._keep = keep
        self._disk = disk or Filesystem()
        self.objects: ObjectStorage | None = None
        """The object store that checkpoints are committed to, if any."""
        self._is_durable = False
        """Whether this process has made or synced the directory that checkpoints are committed to."""
        self._vouched: dict[int, str] = {}
        """By step, signatures of checkpoints that have been hashed completely."""

    def stage(self, step: int, attempt: int) -> Path:
        """The directory to fill with the checkpoint of `step`; any rank may call this, in any order."""
        name = checkpoint_name(step)
        assert checkpoint_step(name) == step, f"step {step} has no checkpoint name"
        staging = self._layout.staging / f"{name}.attempt-{attempt}"
        with storage_errors(staging):
            # Not synced: nothing in it needs to survive a power cut.
            self._disk.make_directories(self._layout.staging)
            self._disk.mkdir(staging)
        return staging

    def seal(self, staging: Path, names: Iterable[str]) -> dict[str, FileEntry]:
        """Sync these files of `staging` (relative paths) and return their entries for the manifest.

        Raises InvalidCheckpointError when one is missing or is not a plain file.
        """
        with storage_errors(staging):
            return {name: hash_member(staging, check_member_name(name), sync=self._disk.sync) for name in names}

    def write_manifest(self, staging: Path, manifest: Manifest) -> None:
        """Write the manifest for the sealed files; then the checkpoint is complete, though not committed.

        Raises InvalidCheckpointError if the files in `staging` do not match the manifest: such a checkpoint could never be
        restored, so it must not replace one that can.
        """
        with storage_errors(staging):
            found = {name: status.st_size for name, status in list_members(staging).items() if name != MANIFEST_NAME}
            promised = {name: entry.size for name, entry in manifest.files.items()}
            if found != promised:
                odd = sorted({name for name, _ in found.items() ^ promised.items()})
                raise InvalidCheckpointError(
                    f"{staging.name}: not what was sealed: {', '.join(odd)}",
                    hint="something writes into the checkpoint while it is saved: finish it before the step ends",
                )
            for folder, _, _ in os.walk(staging, topdown=False):
                self._disk.sync_directory(Path(folder))
            self._disk.write_durably(staging / MANIFEST_NAME, manifest.to_bytes())

    def commit(self, staging: Path, step: int) -> Path:
        """Make the staged checkpoint the checkpoint of `step`, durably. An older one of the same step is quarantined."""
        assert (staging / MANIFEST_NAME).is_file(), f"{staging} has no manifest"
        target = self._layout.checkpoints / checkpoint_name(step)
        with storage_errors(target):
            if not self._is_durable:
                self._disk.make_directories_durably(self._layout.checkpoints, above=_OWN_LEVELS)
                self._is_durable = True
            if os.path.lexists(target):
                self._to_quarantine(target.name, "superseded")
            self._disk.rename(staging, target)
            # The new entry first: after a power cut in between, the directory exists twice rather than not at all.
            self._disk.sync_directory(self._layout.checkpoints)
            self._disk.sync_directory(self._layout.staging)
            # Its files were hashed when they were sealed: retention need not read them again.
            self._vouched[step] = signature_of(target)
        return target

    def retain(self) -> list[str]:
        """Delete the checkpoints that retention no longer keeps, and return their names. Call it after a commit.

        The remaining ones count as valid after a full audit, which is repeated only when size, time or inode of a file changes,
        and is not needed for checkpoints that this process committed.
        """
        doomed = [checkpoint_name(step) for step in to_delete(self.steps(), self._keep, self._is_valid)]
        if not doomed:
            return []
        with storage_errors(self._layout.checkpoints):
            self._disk.make_directories(self._layout.staging)
            moved = [_free_path(self._layout.staging, f"{name}.deleted") for name in doomed]
            for name, target in zip(doomed, moved, strict=True):
                self._disk.rename(self._layout.checkpoints / name, target)
            # Before the contents are deleted: a half-deleted checkpoint must not reappear under its name after a power cut.
            self._disk.sync_directory(self._layout.checkpoints)
            for target in moved:
                self._disk.remove(target)
        return doomed

    def audit(self, name: str, *, hashed: Collection[str] | None = None, vouched: str = "") -> Manifest:
        """The manifest of a committed checkpoint, with every file hashed (or only those in `hashed`, if others check the
        rest; or none, if its signature is `vouched`). Raises InvalidCheckpointError naming file and reason."""
        step = checkpoint_step(name)
        if step is None:
            raise InvalidCheckpointError(f"{name!r} is not the name of a checkpoint", hint="they are called step-00000050")
        directory = self._layout.checkpoints / name
        signature = ""
        if hashed is None or vouched:
            with storage_errors(directory):
                signature = signature_of(directory)
        manifest = audit_directory(directory, step, hashed=() if signature and signature == vouched else hashed)
        if hashed is None:
            self._vouched[step] = signature
        return manifest

    def newest_valid(self) -> Selection:
        """Audit from the newest checkpoint down to the first valid one; move invalid ones on the way to quarantine.

        Call between attempts only. Older checkpoints are not audited.
        """
        quarantined: list[CheckpointQuarantined] = []
        while True:
            self._finish_interrupted_commit()
            step = max(self.steps(), default=None)
            if step is None:
                return Selection(name=None, manifest=None, quarantined=tuple(quarantined))
            name = checkpoint_name(step)
            try:
                manifest = self.audit(name)
            except InvalidCheckpointError as error:
                quarantined.append(self._quarantine(step, "invalid", error.message))
            else:
                # Its committer may have been killed before the name was durable, and now a training depends on it.
                with storage_errors(self._layout.checkpoints):
                    self._disk.sync_directory(self._layout.checkpoints)
                about = {"quarantined": tuple(quarantined), "signature": self._vouched[step]}
                return Selection(name=name, manifest=manifest, **about)

    def set_aside(self, step: int, reason: str) -> CheckpointQuarantined | None:
        """Move a checkpoint that must not be resumed from to quarantine; None if there is none of this step.

        Call between attempts only.
        """
        return self._quarantine(step, "unwanted", reason) if step in self.steps() else None

    def quarantined(self) -> Iterator[CheckpointQuarantined]:
        """Checkpoints already in quarantine: a supervisor may have been killed before it could report them."""
        with storage_errors(self._layout.quarantine):
            found = [match for name in sorted(_listed(self._layout.quarantine)) if (match := ASIDE_NAME.fullmatch(name))]
        for match in found:
            step, moved_to = int(match[1]), str(self._layout.quarantine / match[0])
            reason = f"set aside as {match[2]} by a supervisor that ended before it could say why"
            yield CheckpointQuarantined(name=checkpoint_name(step), step=step, reason=reason, moved_to=moved_to)

    def clear_staging(self) -> list[str]:
        """Remove what killed attempts left in staging, and return its names; other entries stay. Call between
        attempts only."""
        with storage_errors(self._layout.staging):
            names = sorted(name for name in _listed(self._layout.staging) if STAGED_NAME.fullmatch(name))
            for name in names:
                self._disk.remove(self._layout.staging / name)
        return names

    def steps(self) -> list[int]:
        """Steps of all committed checkpoints."""
        with storage_errors(self._layout.checkpoints):
            names = _listed(self._layout.checkpoints)
        return [step for name in names if (step := checkpoint_step(name)) is not None]

    def _is_valid(self, step: int) -> bool:
        directory = self._layout.checkpoints / checkpoint_name(step)
        try:
            if self._vouched.get(step) != signature_of(directory):
                self.audit(directory.name)
        except InvalidCheckpointError:
            # Not counted and not deleted: `newest_valid` will quarantine it if it finds it.
            return False
        return True

    def _quarantine(self, step: int, why: str, reason: str) -> CheckpointQuarantined:
        with storage_errors(self._layout.quarantine):
            moved_to = self._to_quarantine(checkpoint_name(step), why)
        return CheckpointQuarantined(name=checkpoint_name(step), step=step, reason=reason, moved_to=str(moved_to))

    def _to_quarantine(self, name: str, why: str) -> Path:
        self._disk.make_directories_durably(self._layout.quarantine)
        target = _free_path(self._layout.quarantine, f"{name}.{why}")
        self._disk.rename(self._layout.checkpoints / name, target)
        self._disk.sync_directory(self._layout.quarantine)
        self._disk.sync_directory(self._layout.checkpoints)
        return target

    def _finish_interrupted_commit(self) -> None:
        """Restore the newest superseded checkpoint if a kill came before its successor replaced it."""
        with storage_errors(self._layout.quarantine):
            superseded = [match for name in _listed(self._layout.quarantine) if (match := SUPERSEDED_NAME.fullmatch(name))]
            if not superseded:
                return
            last = max(superseded, key=lambda match: (int(match[1]), int(match[2])))
            step = int(last[1])
            # Older than another checkpoint: its successor was committed, and retention has deleted it since.
            if step > max(self.steps(), default=-1):
                self._disk.rename(self._layout.quarantine / last[0], self._layout.checkpoints / checkpoint_name(step))
                self._disk.sync_directory(self._layout.checkpoints)


def _listed(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _free_path(directory: Path, stem: str) -> Path:
    number = 1
    while os.path.lexists(path := directory / f"{stem}-{number}"):
        number += 1
    return path


@contextmanager
def written_back(folder: Path) -> Iterator[None]:
    """Make the kernel write files in `folder` to the disk at once. By default it waits for seconds, and a later sync would wait
    for all of it. Guarantees nothing, and leaves reporting errors to that sync, which an fsync here would take them from.

    Source: sync_file_range(2).
    """
    ended, libc, whole = threading.Event(), ctypes.CDLL(None), ctypes.c_int64(0)

    def begin() -> None:
        while not ended.wait(WRITE_BACK_EVERY_S):
            with suppress(OSError):  # files appear and vanish meanwhile
                for name in os.listdir(folder):
                    with suppress(OSError):
                        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                        try:
                            libc.sync_file_range(descriptor, whole, whole, _SYNC_FILE_RANGE_WRITE)
                        finally:
                            os.close(descriptor)

    thread = threading.Thread(target=begin, name="chaosrun-write-back", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
