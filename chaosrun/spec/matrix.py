"""A matrix: from the values of each key to the combinations of them, with names that stay the same. Pure.

Values are nodes of the suite's tree, so that an error in one is shown at its place.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass
from itertools import product

from chaosrun.spec.places import Place, Problem
from chaosrun.spec.tree import Mapping, MappingEntry, Node, Scalar, flow, plain
from chaosrun.spec.tree import Sequence as List

LONGEST_LABEL = 24
LONGEST_OWN_LABEL = 40
MOST_DRILLS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    key: Place
    label: str
    """Its part of the drill's name."""
    value: Node


Combination = AnyMapping[str, Choice]
"""A choice for each key, in the order in which the suite has the keys."""


def axes_of(matrix: Node | None) -> dict[str, tuple[Choice, ...]]:
    """The choices of each key: the items of a list, or the values of a mapping with its keys as labels."""
    if not isinstance(matrix, Mapping):
        return {}
    return {key: tuple(_choices(entry)) for key, entry in matrix.entries.items()}


def matrix_problem(matrix: Node | None) -> Problem | None:
    """The problem with the keys, values, labels or number of combinations; checked before any is made."""
    if not isinstance(matrix, Mapping):
        return None
    for key, axis in matrix.entries.items():
        if not list(_choices(axis)):
            return Problem(place=axis.key, message=f"{key} has no values", hint=f"list some, such as {key}: [1, 2]")
        for label, entry in axis.value.entries.items() if isinstance(axis.value, Mapping) else ():
            if not 1 <= len(label) <= LONGEST_OWN_LABEL or not label.isprintable():
                message = f"a value of {key} has a label that cannot be part of a drill's name"
                hint = f"call it by 1 to {LONGEST_OWN_LABEL} printable characters"
                return Problem(place=entry.key, message=message, hint=hint)
        if (again := _twice(tuple(_choices(axis)))) is not None:
            hint = "keep one of the two, or label them"
            return Problem(place=again.value.place, message=f"{again.label} is there twice", hint=hint)
    number = math.prod(len(list(_choices(axis))) for axis in matrix.entries.values())
    if number > MOST_DRILLS:
        message = f"the matrix comes to {number} combinations, at most {MOST_DRILLS} drills can be done"
        return Problem(place=matrix.place, message=message, hint="leave out values, or split the suite")
    return None


def _choices(axis: MappingEntry) -> Iterator[Choice]:
    if isinstance(axis.value, List):
        for item in axis.value.items:
            yield Choice(key=axis.key, label=_label(item), value=item)
    elif isinstance(axis.value, Mapping):
        for label, entry in axis.value.entries.items():
            yield Choice(key=entry.key, label=label, value=entry.value)


def combination_of(entry: Node, axes: AnyMapping[str, Sequence[Choice]]) -> Combination:
    """One entry of `include`: a value for each of its keys, or the label of one that the matrix has."""
    if not isinstance(entry, Mapping):
        return {}
    chosen = {}
    for key, inner in entry.entries.items():
        known = [choice for choice in axes.get(key, ()) if _is_choice(choice, inner.value)]
        chosen[key] = known[0] if known else Choice(key=inner.key, label=_label(inner.value), value=inner.value)
    return chosen


def combinations(
    axes: AnyMapping[str, Sequence[Choice]], exclude: Sequence[Node] = (), include: Sequence[Node] = ()
) -> list[Combination]:
    """Every choice of each key with every choice of the others, without those that an entry of `exclude` matches; then those of
    `include`. Without keys and `include`: one combination without changes."""
    alone = not axes and len(include) > 0
    crossed = [dict(zip(axes, choices, strict=True)) for choices in product(*axes.values()) if not alone]
    kept = [each for each in crossed if not any(matches(entry, each) for entry in exclude)]
    return [*kept, *(combination_of(entry, axes) for entry in include)]


def matches(entry: Node, combination: Combination) -> bool:
    """Whether the combination has every value of `entry`, a mapping of keys to values or labels."""
    if not isinstance(entry, Mapping):
        return False
    return all(key in combination and _is_choice(combination[key], inner.value) for key, inner in entry.entries.items())


def named(name: str, combination: Combination) -> str:
    """`digits[workers=2,faults=spot]`."""
    if not combination:
        return name
    said = [f"{key.lstrip('-')}={choice.label}" for key, choice in combination.items()]
    return f"{name}[{','.join(said)}]"


def _twice(choices: Sequence[Choice]) -> Choice | None:
    """A choice with the label of an earlier one."""
    labels = [choice.label for choice in choices]
    return next((choice for place, choice in enumerate(choices) if choice.label in labels[:place]), None)


def _is_choice(choice: Choice, value: Node) -> bool:
    return plain(choice.value) == plain(value) or (isinstance(value, Scalar) and value.text == choice.label)


def _label(node: Node) -> str:
    text = node.text if isinstance(node, Scalar) else flow(node).replace('"', "")
    if len(text) <= LONGEST_LABEL and text.isprintable():
        return text or "null"
    return hashlib.sha256(flow(node).encode(errors="surrogatepass")).hexdigest()[:8]
