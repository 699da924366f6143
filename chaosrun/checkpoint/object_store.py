"""The checkpoint store of a leg that commits to an object store; the leg's own directory holds copies.

Below the leg's URL are `data/step-N.attempt-A/FILE`, which no other attempt writes, and the manifest,
`checkpoints/step-N.attempt-A.json`. A conditional put of the manifest, once all files are there, is the commit. The rename of
the local copy follows it. A restart goes by the manifests in the store alone, whatever the local directory contains. As a
listing may be out of date, each name from the listing, the local files or the traces is looked up by key before it counts.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from chaosrun.checkpoint.audit import HINT
from chaosrun.checkpoint.object_storage import ObjectStorage
from chaosrun.checkpoint.retention import to_delete
from chaosrun.checkpoint.store import STAGED_NAME, CheckpointStore, Selection
from chaosrun.errors import InvalidCheckpointError
from chaosrun.records.events import CheckpointQuarantined
from chaosrun.records.filesystem import Filesystem, Moment, Operation
from chaosrun.records.layout import MANIFEST_NAME, LegLayout, checkpoint_name
from chaosrun.records.manifest import FileEntry, Manifest
from chaosrun.records.trace_reader import read_trace


def checkpoint_store(layout: LegLayout, keep: int, disk: Filesystem | None = None) -> CheckpointStore:
    """The store of a leg, local or in an object store."""
    if layout.objects is None:
        return CheckpointStore(layout, keep, disk)
    return ObjectCheckpointStore(layout, keep, disk)


class ObjectCheckpointStore(CheckpointStore):
    """Every method raises ResourcesError, with URL and hint, if the object store cannot be reached or refuses."""

    def __init__(self, layout: LegLayout, keep: int, disk: Filesystem | None = None) -> None:
        super().__init__(layout, keep, disk)
        assert layout.objects is not None
        self.objects: ObjectStorage = ObjectStorage(layout.objects)  # pyright: ignore[reportIncompatibleVariableOverride]
        self._disk.listeners.append(self._commit_before_rename)
        self._known: set[str] = set()
        """Names (`step-N.attempt-A`) that a killed attempt may have committed."""
        self._seen: set[int] = set()
        """Steps whose checkpoint this process committed, or found in the store."""

    def seal(self, staging: Path, names: Iterable[str]) -> dict[str, FileEntry]:
        sealed = super().seal(staging, names)
        for name, entry in sealed.items():
            self.objects.put_file(staging / name, _data(staging.name, name), entry)
        return sealed

    def commit(self, staging: Path, step: int) -> Path:
        target = super().commit(staging, step)
        self._seen.add(step)
        return target

    def _commit_before_rename(self, operation: Operation, moment: Moment) -> None:
        """The last listener before the rename, so that a fault that prevents the rename also prevents the put."""
        path, target = operation.path, operation.target
        if moment == "after" or operation.kind != "rename" or target is None or path.parent != self._layout.staging:
            return
        if target.parent == self._layout.checkpoints:
            self.objects.put_new(_manifest(path.name), (path / MANIFEST_NAME).read_bytes())

    def adopt(self, name: str) -> None:
        """Commit to the store a complete checkpoint that was copied into the local directory."""
        manifest = self.audit(name)
        stem = _stem(manifest)
        for file, entry in manifest.files.items():
            self.objects.put_file(self._layout.checkpoints / name / file, _data(stem, file), entry)
        self.objects.put_new(_manifest(stem), manifest.to_bytes())

    def retain(self) -> list[str]:
        """As in the base class; in the store each manifest is deleted before its files."""
        stems = self._listed()
        doomed = {checkpoint_name(step) for step in to_delete(map(_step, stems), self._keep, self._is_valid)}
        for stem in stems:
            if checkpoint_name(_step(stem)) in doomed:
                self.objects.delete(_manifest(stem))
                self._delete_data(stem)
        return sorted(doomed.union(super().retain()))

    def newest_valid(self) -> Selection:
        """The newest checkpoint whose manifest the store has: its local copy, or one that is fetched now.

        A local copy that is damaged, or without a manifest in the store, is quarantined. If the store returns a checkpoint
        damaged, a record of the reason is put into quarantine and its manifest is removed. Call between attempts only.
        """
        quarantined: list[CheckpointQuarantined] = []
        stems = self._candidates()
        for step in sorted({*map(_step, stems), *self.steps()}, reverse=True):
            for stem in sorted((each for each in stems if _step(each) == step), key=_attempt, reverse=True):
                if (data := self.objects.read(_manifest(stem))) is None:
                    continue
                try:
                    manifest = _of(stem, data)
                    self._expect_local(manifest, quarantined)
                except InvalidCheckpointError as error:
                    quarantined.append(self._refuse(stem, data, error.message))
                    continue
                self._disk.sync_directory(self._layout.checkpoints)
                about = {"quarantined": tuple(quarantined), "signature": self._vouched[step]}
                return Selection(name=checkpoint_name(step), manifest=manifest, **about)
            if step in self.steps():
                why = f"{checkpoint_name(step)}: was never committed: {self.objects.url('checkpoints')} has no manifest of it"
                quarantined.append(self._quarantine(step, "invalid", why))
        return Selection(name=None, manifest=None, quarantined=tuple(quarantined))

    def set_aside(self, step: int, reason: str) -> CheckpointQuarantined | None:
        aside = None
        for stem in (each for each in self._candidates() if _step(each) == step):
            if (data := self.objects.read(_manifest(stem))) is not None:
                aside = self._refuse(stem, data, reason)
        return super().set_aside(step, reason) or aside

    def clear_staging(self) -> list[str]:
        """Remove what killed attempts left locally and in the store."""
        names = super().clear_staging()
        self._known.update(name for name in names if ".attempt-" in name)
        left = sorted({key.split("/")[1] for key in self.objects.listed("data")})
        # Looked up by key: a manifest may exist that is not listed yet.
        gone = [stem for stem in left if all(self.objects.size(key) is None for key in (_manifest(stem), _aside(stem)))]
        for stem in gone:
            self._delete_data(stem)
        return [*names, *(self.objects.url(f"data/{stem}") for stem in gone)]

    def clear(self) -> None:
        """Remove everything of this leg from the store."""
        for folder in ("checkpoints", "data", "quarantine"):
            for key in self.objects.listed(folder):
                self.objects.delete(key)

    def _is_valid(self, step: int) -> bool:
        """Whether the store has the checkpoint: looks up its manifest and every file's size by key."""
        if step not in self._seen and any(self._is_there(stem) for stem in self._listed() if _step(stem) == step):
            self._seen.add(step)
        return step in self._seen

    def _is_there(self, stem: str) -> bool:
        data = self.objects.read(_manifest(stem))
        if data is None:
            return False
        try:
            files = _of(stem, data).files
        except InvalidCheckpointError:
            return False  # `newest_valid` will quarantine it
        return all(self.objects.size(_data(stem, name)) == entry.size for name, entry in files.items())

    def _listed(self) -> list[str]:
        keys = [key.removesuffix(".json").split("/")[-1] for key in self.objects.listed("checkpoints")]
        return [stem for stem in keys if STAGED_NAME.fullmatch(stem)]

    def _candidates(self) -> set[str]:
        """Names under which there may be a commit."""
        data = {key.split("/")[1] for key in self.objects.listed("data")}
        return {*self._listed(), *self._known, *(self._local() or self._traced()), *filter(STAGED_NAME.fullmatch, data)}

    def _local(self) -> list[str]:
        found: list[str] = []
        for step in self.steps():
            path = self._layout.checkpoints / checkpoint_name(step) / MANIFEST_NAME
            with suppress(OSError, ValueError):  # damaged: the store's manifest decides, and the audit reports it
                found.append(_stem(Manifest.from_bytes(path.read_bytes())))
        return found

    def _traced(self) -> list[str]:
        """Names in rank 0's traces, back to the latest attempt that is known to have committed a checkpoint."""
        found: list[str] = []
        for number in reversed(self._layout.attempts()):
            trace = read_trace(self._layout.attempt(number).trace(0), number, 0, [])
            found += [f"{record.name}.attempt-{number}" for record in trace.checkpoints]
            if trace.committed:
                break
        return found

    def _expect_local(self, manifest: Manifest, quarantined: list[CheckpointQuarantined]) -> None:
        """Check that the local copy matches the manifest, else fetch it. Raises InvalidCheckpointError if the store does not
        have it either."""
        step, name = manifest.step, checkpoint_name(manifest.step)
        if os.path.lexists(self._layout.checkpoints / name):
            try:
                if self.audit(name) == manifest:
                    return
                reason = f"{name}: is not what {self.objects.url(_manifest(_stem(manifest)))} says"
            except InvalidCheckpointError as error:
                reason = error.message
            quarantined.append(self._quarantine(step, "invalid", reason))
        staging = self.stage(step, manifest.attempt)
        for file in manifest.files:
            (staging / file).parent.mkdir(parents=True, exist_ok=True)
            if not self.objects.fetch(_data(staging.name, file), staging / file):
                raise InvalidCheckpointError(f"{name}: {file} is missing in {self.objects.url('data')}", hint=HINT)
        fetched = super().seal(staging, manifest.files)
        if wrong := next((file for file, entry in manifest.files.items() if fetched[file] != entry), None):
            raise InvalidCheckpointError(f"{name}: {self.objects.url(_data(staging.name, wrong))} is damaged", hint=HINT)
        self.write_manifest(staging, manifest)
        self._is_durable = False  # the directory may have been removed with the copies
        self.commit(staging, step)

    def _refuse(self, stem: str, data: bytes, reason: str) -> CheckpointQuarantined:
        key, step = _aside(stem), _step(stem)
        told = CheckpointQuarantined(name=checkpoint_name(step), step=step, reason=reason, moved_to=self.objects.url(key))
        self.objects.delete(key)
        self.objects.put_new(key, json.dumps({"reason": reason, "manifest": data.decode(errors="replace")}, indent=1).encode())
        self.objects.delete(_manifest(stem))
        self._seen.discard(step)
        return told

    def _delete_data(self, stem: str) -> None:
        for key in self.objects.listed(f"data/{stem}"):
            self.objects.delete(key)


def _of(stem: str, data: bytes) -> Manifest:
    """The manifest in `data`. Raises InvalidCheckpointError."""
    try:
        manifest = Manifest.from_bytes(data)
    except ValueError as error:
        raise InvalidCheckpointError(f"{stem}: its manifest is damaged: {error}", hint=HINT) from error
    if _stem(manifest) != stem:
        raise InvalidCheckpointError(f"{stem}: its manifest is that of {_stem(manifest)}", hint=HINT)
    return manifest


def _stem(manifest: Manifest) -> str:
    return f"{checkpoint_name(manifest.step)}.attempt-{manifest.attempt}"


def _step(stem: str) -> int:
    return int(stem.split(".")[0].removeprefix("step-"))


def _attempt(stem: str) -> int:
    return int(stem.rpartition("-")[2])


def _data(stem: str, file: str) -> str:
    return f"data/{stem}/{file}"


def _manifest(stem: str) -> str:
    return f"checkpoints/{stem}.json"


def _aside(stem: str) -> str:
    return f"quarantine/{stem}.json"
