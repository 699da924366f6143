"""What a drill's records show that is no question of exactness, and that its owner wants to know all the same: warnings.

A warning changes no verdict. Add one as a function `(Drill) -> Iterator[str]` to WARNINGS; each sentence names what was seen
and what to do. Pure.
"""

from collections.abc import Callable, Iterator

from chaosrun.verify.check import Drill

__all__ = ["WARNINGS", "warnings"]

WARNINGS: tuple[Callable[[Drill], Iterator[str]], ...] = ()


def warnings(drill: Drill) -> tuple[str, ...]:
    return tuple(sentence for warning in WARNINGS for sentence in warning(drill))
