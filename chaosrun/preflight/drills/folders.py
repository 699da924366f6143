"""What the check "drill" does under the root for runs, besides drills: a file that nodes look for, no empty folders left."""

import random
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def shuffled(names: Iterable[str]) -> list[str]:
    ordered = sorted(names)
    return random.sample(ordered, len(ordered))


@contextmanager
def no_empty_folders(root: Path) -> Iterator[None]:
    """Whatever was not there before is not left there empty."""
    absent = [path for path in (root / "runs", root) if not path.exists()]
    try:
        yield
    finally:
        for path in absent:
            with suppress(OSError):  # kept runs
                path.rmdir()


@contextmanager
def marked_file(root: Path) -> Iterator[tuple[Path, str]]:
    """A file under the root that nobody else can have written, and what it holds."""
    root.mkdir(parents=True, exist_ok=True)
    text = uuid.uuid4().hex
    path = root / f".preflight-{text}"
    path.write_text(text)
    try:
        yield path, text
    finally:
        path.unlink()
