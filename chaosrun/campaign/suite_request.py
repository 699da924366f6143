"""What is asked of a suite: which of its drills run, by name and as one of several shards, and from which seed. Pure."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol, TypeVar

from chaosrun.errors import UsageError

SEED = re.compile(r"[0-9]{1,18}")
SHARD = re.compile(r"(?P<number>[0-9]{1,6})/(?P<of>[0-9]{1,6})")


class Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def base(self) -> str:
        """The name without the combination."""
        ...


_Drill = TypeVar("_Drill", bound=Named)


@dataclass(frozen=True, slots=True)
class Shard:
    number: int
    """From 1."""
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRequest:
    path: Path
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    shard: Shard | None = None
    seed: int | None = None
    fail_fast: bool = False
    history: Path | None = None
    """None: under the root."""
    asked_s: float | None = field(default=None, compare=False)
    """When, for what is named by the date; None: when the suite is opened."""

    @property
    def is_plain(self) -> bool:
        """Nothing but the suite itself."""
        return self == SuiteRequest(path=self.path, history=self.history)


def night_of(now_s: float) -> str:
    """The date, in UTC: `2026-11-21`."""
    return datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d")


def parse_seed(text: str, now_s: float) -> int:
    """`today`, the date in UTC as a number (20261121), or a number. Raises UsageError."""
    if text == "today":
        return int(night_of(now_s).replace("-", ""))
    if not SEED.fullmatch(text):
        raise UsageError(f"--seed {text!r} is no seed", hint="write today, or a number such as 20261121")
    return int(text)


def parse_shard(text: str) -> Shard:
    """`2/5`. Raises UsageError."""
    match = SHARD.fullmatch(text.strip())
    shard = Shard(int(match["number"]), int(match["of"])) if match else None
    if shard is None or not 1 <= shard.number <= shard.of:
        raise UsageError(f"--shard {text!r} is no shard", hint="write which of how many, counted from 1, such as --shard 2/5")
    return shard


def chosen(drills: Sequence[_Drill], only: Sequence[str] = (), without: Sequence[str] = ()) -> list[_Drill]:
    """Those that one of `only` names, all if there is none, but for those that `without` names. A name is that of one drill, of
    all its combinations, or a pattern with * and ?.

    Raises UsageError for one that names no drill, and when none is left.
    """
    for option, names in (("--only", only), ("--except", without)):
        for name in names:
            if not any(_is_called(drill, name) for drill in drills):
                known = list(dict.fromkeys(drill.base for drill in drills))
                listed = f"{', '.join(known[:12])}{'…' * (len(known) > 12)}"
                raise UsageError(f"{option}: no drill {name!r}", hint=f"drills: {listed}; --list shows every combination")
    kept = [
        drill
        for drill in drills
        if (not only or any(_is_called(drill, name) for name in only)) and not any(_is_called(drill, name) for name in without)
    ]
    if not kept:
        raise UsageError("no drill is left to run", hint="change --only and --except")
    return kept


def sharded(drills: Sequence[_Drill], shard: Shard, *, together: str | None = None) -> list[_Drill]:
    """The part of the drills that belongs to a shard: of all shards together, each drill belongs to one. `together`: a name,
    by which all of them belong to the same.

    By the drill's own name and nothing else: machines that do not share a history agree, and a drill stays with its history
    and kept plans when others come or go. So shards are only about even, and one of a small suite may be empty.
    """
    if together is not None:
        return list(drills) if _belongs(together, shard) else []
    return [drill for drill in drills if _belongs(drill.name, shard)]


def _belongs(name: str, shard: Shard) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()) % shard.of == shard.number - 1


def _is_called(drill: Named, name: str) -> bool:
    # A name has brackets of its own.
    pattern = name.replace("[", "[[]")
    return name in (drill.name, drill.base) or fnmatchcase(drill.name, pattern) or fnmatchcase(drill.base, pattern)
