"""Many names on one line: gpu-001 … gpu-004 and gpu-017 are `gpu-[001-004,017]`. Pure text, no nodes."""

import re
from collections.abc import Iterable, Sequence

_NUMBER = re.compile("([0-9]{1,18})")


def in_order(names: Iterable[str]) -> list[str]:
    """Each once, as people count: node-9 before node-10."""
    return sorted(set(names), key=lambda name: ([(int(part), part) for part in _NUMBER.findall(name)], name))


def folded(names: Iterable[str]) -> list[str]:
    """As few terms as one number in brackets allows. `x[9-11]` are x9, x10, x11; `x[09-11]` are x09, x10, x11."""
    shapes: dict[tuple[str, ...], list[list[str]]] = {}
    for name in in_order(names):
        parts = _NUMBER.split(name)
        shapes.setdefault(tuple(parts[::2]), []).append(parts)
    return [term for shape in shapes.values() for term in _fewest(shape)]


def brief(names: Sequence[str], longest: int) -> str:
    """All of them in so many characters, or as many as fit and how many more; at least one."""
    whole, ordered = ", ".join(folded(names)), in_order(names)
    if len(whole) <= longest or len(ordered) == 1:
        return whole
    few, many = 1, len(ordered)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if len(_some(ordered, middle)) <= longest else (few, middle)
    return _some(ordered, few)


def _some(ordered: Sequence[str], number: int) -> str:
    return f"{', '.join(folded(ordered[:number]))} and {len(ordered) - number} more"


def _fewest(names: Sequence[list[str]]) -> list[str]:
    """Of names that differ in their numbers alone: the number whose folding leaves the fewest terms goes into the brackets."""
    whole = ["".join(parts) for parts in names]
    choices = [_terms(names, place) for place in range(len(names[0]) - 2, 0, -2)]
    return min([whole, *choices], key=len) if len(whole) > 1 else whole


def _terms(names: Sequence[list[str]], place: int) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for parts in names:
        groups.setdefault(("".join(parts[:place]), "".join(parts[place + 1 :])), []).append(parts[place])
    return [f"{before}{_bracketed(numbers)}{after}" for (before, after), numbers in groups.items()]


def _bracketed(numbers: Sequence[str]) -> str:
    if len(numbers) == 1:
        return numbers[0]
    left, ranges = dict.fromkeys(numbers), []
    for first in numbers:
        if first not in left:
            continue
        last = first
        while True:
            del left[last]
            following = str(int(last) + 1).zfill(len(first))
            if following not in left:
                break
            last = following
        ranges.append(first if first == last else f"{first}-{last}")
    return f"[{','.join(ranges)}]"
