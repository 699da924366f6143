"""Overrides of the command line, `faults.seed=7`, and of a suite, `set: {faults.seed: 7}`: applied to the tree of a job file as
if they had been written there.

Must not know which keys exist: an unknown one is reported, at its place in the override, like one in the file.
"""

import re
from collections.abc import Mapping as AnyMapping
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass

from chaosrun.spec.places import Place, Problem, SourceText
from chaosrun.spec.tree import Mapping, MappingEntry, Node, Scalar, Sequence, read_tree

PART = re.compile(r"(?P<name>[^.\[\]\s]+)|\[(?P<index>[0-9]{1,9})?\]")
EXAMPLE = "write key=value, such as workers=4, faults.seed=7 or faults.schedule[0].rank=1"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One part of an override's path: a key, a list index, or (None) a new entry at a list's end."""

    part: str | int | None
    place: Place
    path: str
    """The path up to and including it."""


class _Rejected(Exception):
    def __init__(self, place: Place, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.problem = Problem(place=place, message=message, hint=hint)


def apply_overrides(root: Mapping, overrides: AnySequence[str]) -> tuple[Mapping, list[Problem]]:
    """The tree with every override applied, later ones winning, and the problems of those left out."""
    problems: list[Problem] = []
    for order, override in enumerate(overrides, start=1):
        source = SourceText(label=f"override {override!r}", text=override, is_file=False, order=order)
        try:
            path, equals, _ = override.partition("=")
            if not equals or not path.strip():
                whole = Place(source=source, line=0, column=0, end=len(override))
                raise _Rejected(whole, "not of the form key=value", hint=EXAMPLE)
            steps = _parse_path(path, Place(source=source, line=0, column=0, end=len(path)))
            padding = len(path) + 1
            value, found = read_tree(source, padding=padding)
            problems += found
            if not found:
                end = Place(source=source, line=0, column=padding, end=padding)
                root = _put_key(root, steps, value or Scalar(place=end, value=None, text=""))
        except _Rejected as rejected:
            problems.append(rejected.problem)
    return root, problems


def apply_changes(root: Mapping, changes: AnyMapping[str, MappingEntry]) -> tuple[Mapping, list[Problem]]:
    """As `apply_overrides`, for keys and values from a suite: `{"faults.seed": …}`; arguments of the script, `{"--lr": …}`, are
    applied last."""
    problems: list[Problem] = []
    for path, entry in sorted(changes.items(), key=lambda change: change[0].startswith("-")):
        try:
            dashed = path.startswith("-")
            root = _put_argument(root, path, entry) if dashed else _put_key(root, _parse_path(path, entry.key), entry.value)
        except _Rejected as rejected:
            problems.append(rejected.problem)
    return root, problems


def _put_argument(root: Mapping, flag: str, entry: MappingEntry) -> Mapping:
    """Set the value of an argument in `args`, or append it; true stands for the flag alone, false removes it."""
    value = entry.value
    args = root.entries.get("args")
    given = args.value if args is not None else Sequence(place=entry.key, items=())
    if not isinstance(value, Scalar) or not isinstance(given, Sequence):
        message = f"{flag} is no list or mapping" if not isinstance(value, Scalar) else "args is not a list in the job file"
        raise _Rejected(entry.key, message, hint="an argument's value is text, a number, true or false")
    name = Scalar(place=entry.key, value=flag, text=flag)
    words = [item.text if isinstance(item, Scalar) else "" for item in given.items]
    before, after = list(given.items), list[Node]()
    if flag in words:
        at = words.index(flag)
        alone = isinstance(value.value, bool) or at + 1 == len(words)
        before, after = before[:at], before[at + (1 if alone else 2) :]
    middle = [name, value] if not isinstance(value.value, bool) else [name] * value.value
    items = (*before, *middle, *after)
    return root.having("args", args.key if args else entry.key, Sequence(place=given.place, items=items))


def _parse_path(path: str, written_at: Place) -> list[_Step]:
    steps: list[_Step] = []
    position = 0

    def place(start: int, end: int) -> Place:
        first = written_at.column
        return Place(source=written_at.source, line=written_at.line, column=first + start, end=first + end)

    while position < len(path) or not steps:
        match = PART.match(path, position)
        if match is None or (match["name"] is None and not steps):
            message = f"{path!r} does not name a key"
            raise _Rejected(place(position, position + 1), message, hint=EXAMPLE)
        part = match["name"] if match["name"] is not None else int(match["index"]) if match["index"] else None
        steps.append(_Step(part=part, place=place(match.start(), match.end()), path=path[: match.end()]))
        position = match.end()
        if path[position : position + 1] == "." and position + 1 < len(path):
            position += 1
        elif position < len(path) and path[position] != "[":
            message = f"{path!r} does not name a key"
            raise _Rejected(place(position, position + 1), message, hint=EXAMPLE)
    return steps


def _put_key(node: Mapping, steps: list[_Step], value: Node) -> Mapping:
    step, rest = steps[0], steps[1:]
    name = str(step.part)
    old = node.entries.get(name)
    if not rest:
        return node.having(name, step.place, value)
    return node.having(name, old.key if old else step.place, _put(old.value if old else None, steps, value))


def _put(node: Node | None, steps: list[_Step], value: Node) -> Node:
    """`node`, reached by `steps[0]`, with `value` set at the rest of the steps. Missing mappings are made."""
    here, rest = steps[0], steps[1:]
    if not rest:
        return value
    path = here.path
    if rest[0].part is None and (node is None or (isinstance(node, Scalar) and node.value is None)):
        node = Sequence(place=here.place, items=())
    if not isinstance(rest[0].part, str):
        if not isinstance(node, Sequence):
            hint = f"set the whole list: {path}=[…]"
            raise _Rejected(rest[0].place, f"{path} is not a list in the job file", hint=hint)
        length = len(node.items)
        if rest[0].part is None:
            return Sequence(place=node.place, items=(*node.items, _put(None, rest, value)))
        index = rest[0].part
        if index >= length:
            message = f"{path} has {length} {'entry' if length == 1 else 'entries'}, there is no [{index}]"
            hint = f"entries count from 0; {path}[]=… adds one"
            raise _Rejected(rest[0].place, message, hint=hint)
        item = _put(node.items[index], rest, value)
        return Sequence(place=node.place, items=(*node.items[:index], item, *node.items[index + 1 :]))
    if node is None or (isinstance(node, Scalar) and node.value is None):
        node = Mapping(place=here.place, entries={})
    if not isinstance(node, Mapping):
        if isinstance(node, Sequence):
            what, hint = "a list", f"name one of its entries, counted from 0: {path}[0]"
        else:
            what, hint = "a single value", f"set it whole: {path}=…"
        message = f"{path} is {what} in the job file, it has no keys"
        raise _Rejected(rest[0].place, message, hint=hint)
    return _put_key(node, rest, value)
