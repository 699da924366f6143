"""The cache of references: one uninterrupted leg serves every drill of the same job on the same kind of machine.

Key: what the supervisor knows before anything runs (spec, script, installed packages, processor, GPUs, chaosrun's own code). A
hit counts only if every local file that the cached run imported is unchanged. Data files that a script reads are not covered:
a stale hit then looks like an irreproducible job, so the drill runs a fresh reference before it says so.

And what a reference must show before its job is killed: steps, and a save (`expect_resumable`).
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import chaosrun
from chaosrun.errors import UsageError
from chaosrun.records.codec import DamagedRecordError, read_records
from chaosrun.records.events import EVENTS, LegFinished
from chaosrun.records.inputs import read_inputs
from chaosrun.records.layout import LegLayout, checkpoint_name
from chaosrun.records.locks import awaited
from chaosrun.records.markers import read_end
from chaosrun.records.trace_reader import read_trace
from chaosrun.spec.model import JobSpec
from chaosrun.verify.own_saves import WRITERS
from chaosrun.wording import count, hiding

IRRELEVANT = {"name", "faults", "recovery", "verify", "timeout"}
"""Parts of a spec that do not change what an uninterrupted run computes."""
OF_A_CHECKPOINT = {"script", "args", "env", "workers", "seed", "deterministic", "data"}


def job_fingerprint(spec: JobSpec) -> str:
    """The part of the spec that must match for a run to resume from a checkpoint."""
    values = spec.model_dump(mode="json", include=OF_A_CHECKPOINT)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def reference_key(spec: JobSpec, script: Path, devices: str) -> str:
    """`devices`: the GPU models of the placement, or "cpu"."""
    checkpoints = {"checkpoint": {"every_steps": spec.checkpoint.every_steps}}
    facts = {
        "spec": spec.model_dump(mode="json", exclude=IRRELEVANT) | checkpoints,
        "script": [str(script), _sha256(script)],
        "packages": _installed([*sys.path, *spec.env.get("PYTHONPATH", "").split(os.pathsep)]),
        "processor": _processor(),
        "devices": devices,
        "chaosrun": _own_code(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class ReferenceCache:
    """`<root>/references/<key>/`, one reference leg each, reduced to what verification needs."""

    root: Path

    def find(self, key: str) -> LegLayout | None:
        """The cached leg of this key, None when there is none or one of its input files has changed."""
        path = self.root / "references" / key
        inputs = LegLayout(path).inputs
        if not inputs.is_file() or leg_end(LegLayout(path)) is None:
            return None
        if changed_inputs(inputs):
            return None
        os.utime(path)  # marks it as recently used, for `housekeeping.inventory`
        return LegLayout(path)

    def put(self, key: str, leg: LegLayout, final_step: int) -> None:
        """Keep a completed leg, replacing an older one. Raises OSError, and then leaves nothing behind."""
        with self.locked():
            folder = self.root / "references"
            for leftover in folder.glob(".incoming-*"):
                shutil.rmtree(leftover)
            incoming = folder / f".incoming-{key}"
            try:
                copy_leg(leg, LegLayout(incoming), final_step)
                _link_checkpoints(leg, LegLayout(incoming))
                if (folder / key).exists():
                    shutil.rmtree(folder / key)
                os.rename(incoming, folder / key)
            except OSError:
                shutil.rmtree(incoming, ignore_errors=True)
                raise

    def note_repeated(self, key: str, leg: LegLayout) -> None:
        """Record in the cache that the job was shown to be reproducible, if `leg` is the cached reference or a copy of it."""
        cached = LegLayout(self.root / "references" / key)
        with self.locked():
            if key and cached.journal.is_file() and cached.journal.read_bytes() == leg.journal.read_bytes():
                shutil.copy2(leg.repeats, cached.repeats)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from replacing a cached leg while it is copied."""
        folder = self.root / "references"
        folder.mkdir(parents=True, exist_ok=True)
        with awaited(folder / ".lock"):
            yield


def changed_inputs(path: Path) -> tuple[str, ...]:
    """Input files that differ from the digests in a leg's inputs.json."""
    known = read_inputs(path)
    if known is None:
        return (str(path),)
    return tuple(name for name, digest in known.items() if not Path(name).is_file() or _sha256(Path(name)) != digest)


def copy_leg(source: LegLayout, target: LegLayout, final_step: int) -> None:
    """Copy journal, traces, environment and the final checkpoint: all that verification reads. Logs are copied as well. Raises
    the OSError of the first file that cannot be copied."""
    target.path.mkdir(parents=True)
    _copy_folder(source.path / "attempts", target.path / "attempts")
    name = checkpoint_name(final_step)
    if source.checkpoints.exists():  # a script that saves its own checkpoints has none here
        _copy_folder(source.checkpoints / name, target.checkpoints / name)
    # The journal last: a leg with a journal that says "completed" is whole.
    more = [file for file in (source.repeats, source.left) if file.is_file()]
    for file in (source.inputs, source.environment, *more, source.journal):
        shutil.copy2(file, target.path / file.name)


def _link_checkpoints(source: LegLayout, target: LegLayout) -> None:
    """Link all checkpoints of the leg, for other drills to begin at (`supervise.beginning`)."""
    for entry in source.checkpoints.iterdir() if source.checkpoints.exists() else ():
        if not (target.checkpoints / entry.name).exists():
            shutil.copytree(entry, target.checkpoints / entry.name, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder up to its first error: `shutil.copytree` would continue with the other files and hide which error it
    was."""
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.is_dir():
            _copy_folder(entry, target / entry.name)
        else:
            shutil.copy2(entry, target / entry.name)


def leg_end(leg: LegLayout) -> LegFinished | None:
    """The journal's leg.finished; None while the leg runs (even if it was resumed after a finish), and for a damaged
    journal."""
    try:
        events = list(read_records(leg.journal, EVENTS)) if leg.journal.is_file() else []
    except DamagedRecordError:
        return None  # resuming the leg finds out how far the journal is sound
    return events[-1] if events and isinstance(events[-1], LegFinished) else None


def final_step(leg: LegLayout) -> int:
    """The last step of a completed leg, from its journal. Raises UsageError for a leg that did not complete."""
    end = leg_end(leg)
    if end is not None and end.outcome == "completed":
        return end.final_step
    raise UsageError(f"{leg.path} holds no completed leg", hint="name a run that ended with PASS or FAIL")


def expect_resumable(leg: LegLayout, ranks: int, steps: int, *, on_notice: bool = False) -> None:
    """Check a finished reference. Raises UsageError if it made no step or saved nothing that a restart could find; `on_notice`:
    the plan has a preemption notice, on which a script may save that saves nothing in the reference run."""
    end = read_end(leg.attempt(leg.attempts()[-1]), 0)
    earlier = hiding(end and end.began_with)
    if not steps:
        raise UsageError(
            "the script ended without a step of an optimizer",
            hint="name the script that trains (a step is seen by its backward pass; gradients by torch.autograd.grad alone are "
            f"none); {earlier}",
        )
    if not on_notice and not _has_left(leg) and not _has_saved(leg, ranks):
        made = count(steps, "step")
        raise UsageError(
            f"the script saved nothing that chaosrun can see in its {made}: a restart has nothing to resume from",
            hint="have it save, more often than at its end, below its working directory or {output}; elsewhere is not seen; "
            + earlier,
        )


def _has_saved(leg: LegLayout, ranks: int) -> bool:
    """Whether the script has saved in the leg's folders, even if it removed the files at its end."""
    last = leg.attempts()[-1]
    traces = (read_trace(leg.attempt(last).trace(rank), last, rank, []) for rank in range(ranks))
    return any(save.done and save.how in WRITERS and not os.path.isabs(save.path) for trace in traces for save in trace.saves)


def _has_left(leg: LegLayout) -> bool:
    """Whether the script has left a file in the leg's folders."""
    for top in (leg.work, leg.output):
        for folder, _, names in os.walk(top):
            paths = [os.path.join(folder, name) for name in names]
            if any(not os.path.islink(path) and os.path.getsize(path) for path in paths):
                return True
    return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _installed(folders: Iterable[str]) -> list[str]:
    """Packages that a script may import from these folders, with their versions: the names of their folders of metadata."""
    return sorted({entry.stem for folder in folders for entry in Path(folder).glob("*.dist-info")})


def _processor() -> dict[str, str]:
    """Model and instruction set of this machine's processor (hazard K2: AVX2 and AVX-512 differ in bits)."""
    facts = {"machine": os.uname().machine}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "flags", "Features"):
            facts.setdefault(name.strip(), value.strip())
    return facts


def _own_code() -> str:
    """A digest of chaosrun itself: another version may prime or seed differently."""
    folder = Path(chaosrun.__file__).parent
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        whole.update(path.relative_to(folder).as_posix().encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]
