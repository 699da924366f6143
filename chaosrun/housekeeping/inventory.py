"""Lists what a root holds (runs, cached references, sweeps, suites), and chooses by age, number and outcome what to remove.

`choose` is pure, and gives a reason for all that it keeps. This module only reads.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chaosrun.campaign.files import SuiteFolder, SweepFolder
from chaosrun.errors import UsageError
from chaosrun.records.grouping import grouped
from chaosrun.records.layout import LEGS, RunLayout
from chaosrun.records.run_file import RunInfo, is_owner, own_leg, read_object, read_run
from chaosrun.records.supervision import is_supervised
from chaosrun.supervise.reference import leg_end

Kind = Literal["run", "reference", "sweep", "suite"]
FOLDERS: dict[Kind, str] = {"run": "runs", "reference": "references", "sweep": "sweeps", "suite": "suites"}
FILES: dict[Kind, str] = {"run": "run.json", "reference": "inputs.json", "sweep": "sweep.json", "suite": "suite.json"}
"""The file that each kind has from its beginning on."""
FILED = {"sweep": SweepFolder, "suite": SuiteFolder}
PASSED = "PASS"
PARTS = ("checkpoints", "staging", "quarantine")
STARTING_S = 600.0
"""Time that a process has, after it has made a run's folder, to take the run's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What a run has put outside its own directory, as far as that can be shown."""

    own: tuple[Path, ...] = ()
    """Directories that this very run made for its checkpoints."""
    around: tuple[Path, ...] = ()
    """Directories that it made around them."""
    doubtful: tuple[Path, ...] = ()
    """Directories that its run.json names, but that may belong to another run: a copied run names those of the original."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlace:
    kind: Kind
    path: Path
    used_s: float
    """When a run was begun, a reference was last used, the file of a sweep or suite was last written."""
    status: str
    """A verdict, "interrupted" or "damaged"; for a reference "cached"."""
    supervised: bool = False
    needs: frozenset[Path] = frozenset()
    """Runs whose reference it still has to copy."""
    storage: Storage = Storage()
    starting: bool = False
    """It was made recently, and has had no supervisor yet."""

    @property
    def name(self) -> str:
        return self.path.name

    def to_json(self) -> dict[str, object]:
        same = {"kind": self.kind, "name": self.name, "status": self.status, "used_s": self.used_s}
        return {**same, "path": str(self.path)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    found: KeptPlace
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CleaningChoice:
    removed: tuple[KeptPlace, ...]
    kept: tuple[Kept, ...]


def choose(found: Sequence[KeptPlace], *, now_s: float, older_than_s: float, keep: int, failed: bool) -> CleaningChoice:
    """Remove what is older, not of the newest `keep` of its kind, not supervised, passed (unless `failed`), needed by none."""
    newest = grouped(sorted(found, key=lambda entry: (-entry.used_s, entry.name)), lambda entry: entry.kind)
    removed: list[KeptPlace] = []
    kept: list[Kept] = []
    for entry in found:
        why = None
        if entry.supervised:
            why = "being supervised"
        elif entry.starting and now_s - entry.used_s < STARTING_S:
            why = "just begun"
        elif now_s - entry.used_s < older_than_s:
            why = "not old enough"
        elif entry in newest[entry.kind][:keep]:
            why = f"among the newest {keep}"
        elif entry.kind != "reference" and entry.status != PASSED and not failed:
            why = f"{entry.status}: removed with --failed only"
        if why is None:
            removed.append(entry)
        else:
            kept.append(Kept(found=entry, why=why))
    while needed := [
        entry for entry in removed if any(need.is_relative_to(entry.path) for other in kept for need in other.found.needs)
    ]:
        removed = [entry for entry in removed if entry not in needed]
        kept += [Kept(found=entry, why="a run that is kept needs the reference") for entry in needed]
    return CleaningChoice(removed=tuple(removed), kept=tuple(kept))


def inventory_of(root: Path) -> list[KeptPlace]:
    """What chaosrun keeps under `root`, without links and other things that it did not make."""
    root = root.resolve()  # like the paths in `needs`
    return [found for kind, folder in FOLDERS.items() for found in _all(kind, root / folder)]


def _all(kind: Kind, folder: Path) -> list[KeptPlace]:
    """All of a kind, sorted by name, without links, which lead out of the root, and names that begin with a dot."""
    if not is_real(folder):
        return []
    places = [path for path in sorted(folder.iterdir()) if is_real(path) and not path.name.startswith(".")]
    return [found for path in places if (found := look(kind, path)) is not None]


def look(kind: Kind, path: Path, *, held: bool = False) -> KeptPlace | None:
    """What lies at `path`; None if it is still being made, or not ours. `held`: this very process holds its lock."""
    if not (path / FILES[kind]).is_file():
        return None
    match kind:
        case "run":
            return _run(RunLayout(path), held)
        case "reference":
            return KeptPlace(kind="reference", path=path, used_s=_changed_s(path), status="cached")
        case "sweep" | "suite":
            return _folder(kind, path, held)


def storage_of(run: RunLayout, home: Path) -> Storage:
    """What the run has put elsewhere. `home`: where the run lay before it was moved to the trash."""
    named: list[Path] = []
    try:
        info = _own_info(run)
        for name in LEGS:
            storage = own_leg(run, info, name).storage
            named += [] if storage is None else [storage, storage.with_name("diagnosis")]
    except UsageError:
        return Storage()
    there = [place for place in dict.fromkeys(named) if is_real(place)]
    around = tuple(place for place in dict.fromkeys(place.parent for place in named) if is_owner(place, home, info))
    own = tuple(place for place in there if place.parent in around and _is_ours(place))
    return Storage(own=own, around=around, doubtful=tuple(place for place in there if place not in own))


def _is_ours(place: Path) -> bool:
    """Whether the place holds nothing but what a leg, or a replay of one, puts there."""
    names = {entry.name for entry in place.iterdir()}
    return names <= {*PARTS} or (
        place.name == "diagnosis" and names <= {*LEGS} and all(_is_ours(place / name) for name in names)
    )


def _run(run: RunLayout, held: bool) -> KeptPlace:
    supervised = not held and is_supervised(run)
    try:
        info = _own_info(run)
        mode = info.reference.mode
        copied = mode in ("auto", "fresh") or leg_end(run.reference) is not None
        ended = read_object(run.verdict_json) if run.verdict_json.is_file() else None
    except UsageError:
        return KeptPlace(kind="run", path=run.path, used_s=_changed_s(run.run_json), status="damaged", supervised=supervised)
    return KeptPlace(
        kind="run",
        path=run.path,
        used_s=info.created_s,
        status="interrupted" if ended is None else str(ended.get("status", "damaged")),
        supervised=supervised,
        needs=frozenset() if copied else frozenset({Path(mode)}),
        storage=storage_of(run, run.path),
        starting=ended is None and not run.supervisor_json.exists(),
    )


def _own_info(run: RunLayout) -> RunInfo:
    """Read run.json. Raises UsageError when it cannot be read, or belongs to another run."""
    info = read_run(run)
    if info.run_id != run.run_id:
        raise UsageError(f"{run.run_json} is of another run")
    return info


def _folder(kind: Kind, path: Path, held: bool) -> KeptPlace:
    """A sweep or a suite, which is a folder with runs of its own."""
    inside = _all("run", path / "runs")
    return KeptPlace(
        kind=kind,
        path=path,
        used_s=_changed_s(path / FILES[kind]),
        status=_outcome(path, kind),
        supervised=any(run.supervised for run in inside) or (not held and is_supervised(RunLayout(path))),
        needs=frozenset().union(*(run.needs for run in inside)),
        storage=Storage(
            own=tuple(place for run in inside for place in run.storage.own),
            doubtful=tuple(place for run in inside for place in run.storage.doubtful),
        ),
    )


def _outcome(path: Path, kind: Kind) -> str:
    """The worst outcome of its drills."""
    try:
        if kind == "sweep":
            sweep = SweepFolder(path).load()
            return "interrupted" if sweep.left else sweep.status
        suite = SuiteFolder(path)
        planned, results = {drill.name for drill in suite.load().drills}, suite.progress().results
    except UsageError:
        return "damaged"
    if not planned <= results.keys():
        return "interrupted"
    return PASSED if all(result.ok for result in results.values()) else "FAIL"


def is_real(folder: Path) -> bool:
    return folder.is_dir() and not folder.is_symlink()


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return time.time()
