"""YAML text as a tree of values with their places. The only module that imports a YAML library.

Owns syntax: text that is not YAML, or YAML that a job file may not use (duplicate keys, tags, merge keys, several documents).
Must not know which keys exist.
"""

import json
import re
from collections.abc import Collection
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from chaosrun.spec.places import LINE_BREAK, Place, Problem, SourceText

MAX_DEPTH = 24
MAX_VALUES = 20_000  # an alias can make a few lines expand to billions of values
TAG = "tag:yaml.org,2002:"
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")
SCALAR_TAGS = frozenset(TAG + name for name in ("str", "int", "float", "bool", "null", "timestamp"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    place: Place
    value: Any
    text: str
    """As written, without quotes: "0.10" where `value` is 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    place: Place
    items: tuple["Node", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingEntry:
    key: Place
    value: "Node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    place: Place
    entries: AnyMapping[str, MappingEntry]

    def having(self, name: str, key: Place, value: "Node") -> "Mapping":
        """The same mapping with this entry, replacing the one of that name."""
        return Mapping(place=self.place, entries={**self.entries, name: MappingEntry(key=key, value=value)})


Node = Scalar | Sequence | Mapping


def read_tree(source: SourceText, *, padding: int = 0) -> tuple[Node | None, list[Problem]]:
    """Parse one YAML document; None for a text without a readable value.

    `padding` blanks that many characters at the start, so that places count from the start of the whole text.
    """
    root, problems = _parsed(source, padding)
    return root, [*problems]


@lru_cache(maxsize=32)
def _parsed(source: SourceText, padding: int) -> tuple[Node | None, tuple[Problem, ...]]:
    """Cached: parsing is most of the cost of reading a suite, and its drills name the same few files again and again."""
    text = " " * padding + source.text[padding:]
    try:
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        return None, (_syntax_problem(source, error),)
    except ReaderError as error:
        place = place_at(source, int(error.position))
        message = f"not a text file: it holds the character U+{ord(source.text[error.position]):04X}"
        return None, (Problem(place=place, message=message, hint="a job file is YAML text in UTF-8"),)
    except YAMLError as error:
        return None, (Problem(place=place_at(source, 0), message=f"not valid YAML: {error}"),)
    except RecursionError:
        return None, (_too_deep(place_at(source, 0)),)
    if root is None:
        return None, ()
    reader = _Reader(source)
    return reader.read(root, depth=0), tuple(reader.problems)


def place_at(source: SourceText, index: int) -> Place:
    lines = LINE_BREAK.split(source.text[:index])
    return Place(source=source, line=len(lines) - 1, column=len(lines[-1]), end=len(lines[-1]) + 1)


def plain(node: Node, *, verbatim: Collection[str] = (), path: str = "", as_text: bool = False) -> Any:
    """As dicts, lists and scalars; scalars inside the values of the keys `verbatim` ("args", "resume.args") are their text."""

    def inside(value: Node, path: str) -> Any:
        if isinstance(value, Scalar) and as_text:
            return value.text
        return plain(value, verbatim=verbatim, path=path, as_text=as_text or path in verbatim)

    match node:
        case Scalar():
            return node.value
        case Sequence():
            return [inside(item, f"{path}[]") for item in node.items]
        case Mapping():
            return {key: inside(entry.value, f"{path}.{key}" if path else key) for key, entry in node.entries.items()}


def quoted(value: object) -> str:
    """As JSON, which YAML reads, with the characters escaped that YAML does not accept: control characters, its other line
    breaks."""
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def flow(node: Node) -> str:
    """The node as YAML on one line: the form of an override on the command line."""
    match node:
        case Scalar():
            return quoted(node.text) if isinstance(node.value, str) else node.text or "null"
        case Sequence():
            return f"[{', '.join(map(flow, node.items))}]"
        case Mapping():
            pairs = (f"{quoted(key)}: {flow(entry.value)}" for key, entry in node.entries.items())
            return f"{{{', '.join(pairs)}}}"


def find(root: Node, path: tuple[str | int, ...]) -> tuple[Place | None, Node]:
    """The key's place (None for list items and the root) and the node at `path`, or at its longest existing prefix."""
    key: Place | None = None
    node = root
    for part in path:
        if isinstance(node, Mapping) and part in node.entries:
            entry = node.entries[str(part)]
            key, node = entry.key, entry.value
        elif isinstance(node, Sequence) and isinstance(part, int) and part < len(node.items):
            key, node = None, node.items[part]
        else:
            break
    return key, node


def child(node: Node | None, *keys: str) -> Node | None:
    """The value below these keys; None where there is none."""
    for key in keys:
        entry = node.entries.get(key) if isinstance(node, Mapping) else None
        node = entry and entry.value
    return node


def name_in(node: Node | None) -> str:
    """Text that may name a file or a module; empty if the value is not a text, which the validation reports."""
    if isinstance(node, Scalar) and isinstance(node.value, str) and "\0" not in node.value:
        return node.value
    return ""


class _Reader:
    def __init__(self, source: SourceText) -> None:
        self.problems: list[Problem] = []
        self._source = source
        self._constructor = YAML(typ="safe", pure=True).constructor
        self._values = 0

    def read(self, node: Any, *, depth: int) -> Node:
        place = self._place(node)
        self._values += 1
        if depth > MAX_DEPTH or self._values > MAX_VALUES:
            if not any(problem.message == _too_deep(place).message for problem in self.problems):
                self.problems.append(_too_deep(place))
            return Scalar(place=place, value=None, text="")
        if isinstance(node, MappingNode) and node.tag == TAG + "map":
            return self._mapping(node, place, depth)
        if isinstance(node, SequenceNode) and node.tag == TAG + "seq":
            items = tuple(self.read(item, depth=depth + 1) for item in node.value)
            return Sequence(place=place, items=items)
        if isinstance(node, ScalarNode) and node.tag in SCALAR_TAGS:
            return Scalar(place=place, value=self._value(node, place), text=node.value)
        self._complain(place, f"the tag {str(node.tag).replace(TAG, '!!')} has no meaning here", "remove the tag")
        return Scalar(place=place, value=None, text="")

    def _mapping(self, node: Any, place: Place, depth: int) -> Mapping:
        entries: dict[str, MappingEntry] = {}
        for key_node, value_node in node.value:
            key = self._place(key_node)
            if not isinstance(key_node, ScalarNode):
                self._complain(key, "a key must be text, not a list or a mapping", "put a name before the colon")
                continue
            name = str(key_node.value)
            if key_node.tag == TAG + "merge":
                self._complain(key, "merge keys (<<) have no meaning here", "write the keys out")
            elif name in entries:
                first = entries[name].key.line + 1
                self._complain(key, f"duplicate key {name!r}, first given on line {first}", "keep one of the two")
            else:
                entries[name] = MappingEntry(key=key, value=self.read(value_node, depth=depth + 1))
        return Mapping(place=place, entries=entries)

    def _value(self, node: Any, place: Place) -> Any:
        try:
            return self._constructor.construct_object(node)
        except (ValueError, YAMLError):
            self._complain(
                place, f"{node.value!r} is not what its tag {str(node.tag).replace(TAG, '!!')} says", "remove the tag"
            )
            return None

    def _complain(self, place: Place, message: str, hint: str) -> None:
        self.problems.append(Problem(place=place, message=message, hint=hint))

    def _place(self, node: Any) -> Place:
        start, end = node.start_mark, node.end_mark
        last = end.column if end.line == start.line else len(self._source.line(start.line).rstrip())
        return Place(source=self._source, line=start.line, column=start.column, end=last)


def _too_deep(place: Place) -> Problem:
    return Problem(place=place, message="the values nest too deep, or expand to too many", hint="look for an alias (*name)")


def _syntax_problem(source: SourceText, error: MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    place = Place(source=source, line=line, column=column, end=column + 1)
    indentation = source.line(line)[: column + 1]
    if not indentation.strip() and "\t" in indentation:
        return Problem(place=place, message="a tab in the indentation", hint="YAML indents with spaces only")
    problem = str(error.problem or error)
    for token, words in (("'<stream end>'", "the end of the text"), ("<block end>", "the end of the block")):
        problem = problem.replace(token, words)
    if "another document" in problem:
        return Problem(place=place, message="a second document begins here", hint="a job file holds one job: remove the ---")
    began = error.context_mark
    where = f" ({error.context}, begun on line {began.line + 1})" if error.context and began and began.line != line else ""
    hint = (
        "quote the value if the colon belongs to it"
        if "mapping values" in problem
        else "check brackets, quotes and indentation"
    )
    return Problem(place=place, message=f"not valid YAML: {problem}{where}", hint=hint)
