"""Which drills of a suite run: by name, and as one of several shards. Pure."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from chaosrun.errors import UsageError

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
