"""Faults that damage stored files: damage to a committed checkpoint, a folder left half-written.

Only the newest checkpoint of this leg is damaged: a path that leads out of it, by a link, a hard link or "..", is refused, and
the note says so. The damage takes effect when the checkpoint is read.
"""

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from chaosrun.faults.kind import Kind
from chaosrun.faults.observed import Disproof, Observation
from chaosrun.faults.strike import Strike
from chaosrun.records.codec import Record
from chaosrun.records.events import AttemptStarting, FaultRequested, StagingCleared
from chaosrun.records.history import LegHistory
from chaosrun.records.layout import MANIFEST_NAME, checkpoint_name, checkpoint_step
from chaosrun.records.markers import Note

TAIL_BYTES = 4096


class NoFileToDamageError(Exception):
    """No file may be damaged here; the message says why."""


class Look(Record, frozen=True, kw_only=True):
    """A file's size and hash."""

    size: int
    sha256: str


class DamageNote(Note, frozen=True, kw_only=True):
    checkpoint: str | None = None
    file: str | None = None
    path: str | None = None
    """Relative to the run's own folder."""
    before: Look | None = None
    after: Look | None = None


class StagedNote(Note, frozen=True, kw_only=True):
    staged: str | None = None
    path: str | None = None


def stale_staging(strike: Strike) -> None:
    """Leave a folder like an attempt killed while writing: one file complete, one cut off, no manifest."""
    folder = strike.leg.staging / f"{checkpoint_name(strike.step)}.attempt-{strike.order.attempt - 1}"
    try:
        _expect_own(strike, folder.parent)
        folder.mkdir()
    except (NoFileToDamageError, OSError) as error:
        strike.note(StagedNote(problem=f"no folder was left behind: {error}"))
        return
    (folder / "model.safetensors").write_bytes(bytes(4096))
    (folder / "chaosrun-rank-0.pt").write_bytes(bytes(100))
    strike.note(StagedNote(staged=folder.name, path=_relative(strike, folder)))


def damage(choose: Callable[[Strike, Path], str], spoil: Callable[[Path], object]) -> Callable[[Strike], None]:
    """Damage a file of the newest checkpoint: the planned one, else the one that `choose` returns."""

    def inside(strike: Strike) -> None:
        committed = [] if "checkpoint" in strike.at else _checkpoints(strike.leg.checkpoints)
        checkpoint: Path | None = strike.at.get("checkpoint", committed[-1] if committed else None)
        if checkpoint is None:
            strike.note(DamageNote(problem="there was no checkpoint to damage yet"))
            return
        try:
            name = str(strike.fault.options.get("file") or choose(strike, checkpoint))
            path = checkpoint / name
            _expect_own(strike, checkpoint)
            _expect_inside(checkpoint, path)
            if look(path) is None:
                held = ", ".join(sorted(entry.name for entry in checkpoint.iterdir()))
                raise NoFileToDamageError(f"{checkpoint.name} has no file {name}, it holds {held}")
            note = spoiled(path, spoil, checkpoint=checkpoint.name, file=name, shown=_relative(strike, path))
        except NoFileToDamageError as error:
            note = DamageNote(checkpoint=checkpoint.name, problem=f"nothing was damaged: {error}")
        strike.note(note)

    return inside


def spoiled(path: Path, spoil: Callable[[Path], object], *, checkpoint: str, file: str, shown: str) -> DamageNote:
    """Damage a file, and return its state before and after."""
    before = look(path)
    spoil(path)
    after = look(path)
    problem = f"{file} is what it was before" if before == after else None
    return DamageNote(checkpoint=checkpoint, file=file, path=shown, before=before, after=after, problem=problem)


def _largest_file(strike: Strike, checkpoint: Path) -> str:
    sizes = {path.relative_to(checkpoint).as_posix(): path.lstat().st_size for path in checkpoint.rglob("*") if path.is_file()}
    sizes.pop(MANIFEST_NAME, None)
    if not sizes:
        raise NoFileToDamageError(f"{checkpoint.name} is empty")
    return min(sizes, key=lambda name: (-sizes[name], name))


def _own_file(strike: Strike, checkpoint: Path) -> str:
    return f"chaosrun-rank-{strike.fault.rank}.pt"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zero_tail(path: Path) -> None:
    """Zero the last page, as if a power cut had lost it; the size stays. Zero more if that page is zero already."""
    size = path.stat().st_size
    tail = min(TAIL_BYTES, size)
    with path.open("r+b") as file:
        while True:
            file.seek(size - tail)
            if tail == size or any(file.read()):
                break
            tail = min(2 * tail, size)
        file.seek(size - tail)
        file.write(bytes(tail))


def flip_bit(path: Path) -> None:
    middle = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)
        if byte:
            file.seek(middle)
            file.write(bytes([byte[0] ^ 1]))


def _replace_manifest(path: Path) -> None:
    """Replace it by the previous checkpoint's manifest; for the first checkpoint, by its own with the previous step."""
    from chaosrun.records.manifest import Manifest

    older = [place for place in _checkpoints(path.parents[1]) if place < path.parent]
    if older:
        foreign = (older[-1] / MANIFEST_NAME).read_bytes()
    else:
        manifest = Manifest.from_bytes(path.read_bytes())
        step = manifest.step - 1
        position = manifest.position.model_copy(update={"step": step})
        foreign = manifest.model_copy(update={"step": step, "position": position}).to_bytes()
    path.write_bytes(foreign)


def _checkpoints(folder: Path) -> list[Path]:
    """The committed checkpoints, the newest last."""
    return sorted(path for path in folder.glob("*") if checkpoint_step(path.name) is not None)


def look(path: Path) -> Look | None:
    """The file's size and hash, None when there is no file."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return Look(size=os.fstat(file.fileno()).st_size, sha256=digest)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _expect_own(strike: Strike, path: Path) -> None:
    """Raises NoFileToDamageError unless `path` is in this leg's own folders."""
    resolved = path.resolve()
    if not any(resolved.is_relative_to(folder.resolve()) for folder in _run_folders(strike)):
        raise NoFileToDamageError(f"{path} leads to {resolved}, outside the run's own folder")


def _expect_inside(checkpoint: Path, path: Path) -> None:
    """Raises NoFileToDamageError unless `path` is in the checkpoint, by every name it has."""
    resolved = path.resolve()
    if not resolved.is_relative_to(checkpoint.resolve()):
        raise NoFileToDamageError(f"{path} leads to {resolved}, outside the checkpoint")
    if resolved.is_file() and resolved.stat().st_nlink > 1:
        raise NoFileToDamageError(f"{path} has another name elsewhere (a hard link): its contents are not this run's alone")


def _relative(strike: Strike, path: Path) -> str:
    own = next((folder for folder in _run_folders(strike) if path.is_relative_to(folder)), None)
    return str(path.relative_to(own) if own else path)


def _run_folders(strike: Strike) -> tuple[Path, ...]:
    return (strike.leg.path, strike.leg.checkpoints.parent)


def _unmet(seen: Observation, asked: FaultRequested, leg: LegHistory) -> Disproof | None:
    """Why no later attempt read and quarantined the damaged checkpoint; None when one did."""
    name, later = seen.note.checkpoint, [each for each in leg.attempts if each.number > seen.attempt]
    if any(name in attempt.quarantined for attempt in later):
        return None
    if any(attempt.resume == name for attempt in later):
        return Disproof("used", f"{name} was damaged, and an attempt resumed from it")
    why = "no attempt started after that"
    if later:
        why = "the attempts after that resumed from newer checkpoints"
    return Disproof("unread", f"{name} was damaged, but {why}, so it was not read")


def _uncleared(seen: Observation, asked: FaultRequested, leg: LegHistory) -> Disproof | None:
    name = seen.note.staged
    started = next(event.seq for event in leg.events(AttemptStarting) if event.attempt == seen.attempt)
    if any(name in event.names for event in leg.events(StagingCleared) if event.seq > started):
        return None
    later = any(attempt.number > seen.attempt for attempt in leg.attempts)
    why = "it was not there at the next start" if later else "no attempt came after it"
    return Disproof("unread", f"{name} was not cleared away: {why}")


def _describe_damage(seen: Observation) -> str:
    change = "another step's" if seen.fault.kind == "foreign_manifest" else change_of(seen.note)
    return f"{seen.note.file} of {seen.note.checkpoint}: {change}; quarantined"


def change_of(note: DamageNote) -> str:
    """The change of the file in a few words."""
    if note.before is None or note.after is None:
        return "removed"
    if note.before.size != note.after.size:
        return f"{note.before.size} bytes, now {note.after.size}"
    return f"sha256 {note.before.sha256[:8]}…, now {note.after.sha256[:8]}…"


_when_committed = partial(
    Kind,
    family="storage",
    phases=frozenset({"checkpoint.postcommit", "step"}),
    default_phase="checkpoint.postcommit",
    evidence="note",
)
_damage = partial(
    _when_committed,
    proof="the file was looked at before and after, and the checkpoint went to quarantine",
    damages="checkpoint",
    note=DamageNote,
    aftermath=_unmet,
    tell=_describe_damage,
)

KINDS = (
    *(
        _damage(name=name, words=words, inside=damage(choose, spoil), options={"file": None})
        for name, words, choose, spoil in (
            ("truncate", "truncate a file of the newest checkpoint", _largest_file, truncate),
            ("zero_tail", "zero the tail of a file of the newest checkpoint", _largest_file, zero_tail),
            ("flip_file_bit", "flip one bit in a file of the newest checkpoint", _largest_file, flip_bit),
            ("missing_file", "remove a file of {rank} from the newest checkpoint", _own_file, Path.unlink),
        )
    ),
    *(
        _damage(name=name, words=words, inside=damage(lambda *_: MANIFEST_NAME, spoil))
        for name, words, spoil in (
            ("missing_manifest", "remove the manifest of the newest checkpoint", Path.unlink),
            ("foreign_manifest", "give the newest checkpoint the manifest of another step", _replace_manifest),
        )
    ),
    _when_committed(
        name="stale_staging",
        words="leave a half-written staging folder behind",
        proof="the folder was there, and it was gone after the next start",
        inside=stale_staging,
        damages="staging",
        note=StagedNote,
        aftermath=_uncleared,
        tell=lambda seen: f"{seen.note.staged}: left behind, cleared away at the next start",
    ),
)
