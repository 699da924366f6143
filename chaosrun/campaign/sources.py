"""The files that a suite was planned from, beside its job files: whether they are what they were. Reads, and writes nothing."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from chaosrun.spec.suite import Suite, SuiteDrill
from chaosrun.spec.tree import find


def digests(suite: Suite, drills: Iterable[SuiteDrill]) -> dict[str, str | None]:
    """Of the suite's file, and of the script, fault preset and trace of each drill, by absolute path."""
    paths = {suite.path}
    for drill in drills:
        written = [find(drill.job.tree, ("faults", "preset"))[1].place.source, drill.job.trace]
        paths |= {drill.job.script_path, *(Path(source.label) for source in written if source is not None and source.is_file)}
    return {str(path): _digest(path) for path in sorted({path.resolve() for path in paths})}


def changed(files: Mapping[str, str | None]) -> list[str]:
    """Those that are not what they were."""
    return [path for path, digest in files.items() if _digest(Path(path)) != digest]


def _digest(path: Path) -> str | None:
    """None for a file that cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
