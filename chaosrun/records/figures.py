"""Numbers in a script's files: in JSON, in the last lines of JSON Lines and CSV, and next to the tensors of a checkpoint."""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
"""Larger files are not read."""
MOST_FIGURES = 1000
"""The most numbers taken from one file."""
SUFFIXES = (".json", ".jsonl", ".csv")
_OF_THE_PROCESS = re.compile(
    r"(run|wall|time)?times?|(time)?stamp|date|clock|wall|elapsed|dur(ation)?|eta|began|created|updated|started?|launch|"
    r"m?s|secs?|seconds?|min|minutes|hours|per|speed|throughput|fps|flop?s|mem(ory)?|bytes|[mg]b|[cg]pu|device|"
    r"p?id|uuid|port|host|node|seed|version|session|attempts?|restarts?|resume[ds]?"
)
"""Words in the names of numbers that differ from process to process."""
_OF_A_PLACE = re.compile(
    r"(data)?loaders?|data|(\w*)samplers?|iter|iterator|shards?|streams?|shuffle|generators?|rng|random|loops?|progress|"
    r"args|config|hparams"
)
"""Words in the names of positions in the data or in a random stream, where other numbers may be right, too."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
Figures = Mapping[str, str]
"""By name (keys and indices, joined by slashes), as Python writes a number."""


def figures(path: Path) -> Figures:
    """The numbers in a file, without times and others that differ in each process; none if the file does not match its suffix.
    Raises OSError."""
    if path.stat().st_size > MOST_BYTES:
        return {}
    text = path.read_text(errors="replace")
    try:
        found = list(islice(_numbers(_content(path.suffix, text), ""), MOST_FIGURES))
    except (ValueError, RecursionError, csv.Error):
        return {}
    return {name: repr(value) for name, value in found if not _has_word(name, _OF_THE_PROCESS)}


def figures_beside_tensors(numbers: Mapping[str, float]) -> Figures:
    """The plain numbers of a checkpoint that each run without faults saves after the same step."""
    own = {name: value for name, value in numbers.items() if not _has_word(name, _OF_THE_PROCESS)}
    # The step count of a scheduler is for its warnings only.
    kept = (name for name in own if not name.endswith("_step_count") and not _has_word(name, _OF_A_PLACE))
    return {name: repr(own[name]) for name in islice(kept, MOST_FIGURES)}


def _has_word(name: str, kind: re.Pattern[str]) -> bool:
    return any(kind.fullmatch(word.lower()) for word in _WORD.findall(name))


def _content(suffix: str, text: str) -> Any:
    if suffix == ".json":
        return json.loads(text)
    lines = text.strip().splitlines()
    if suffix == ".jsonl":
        return json.loads(lines[-1]) if lines else None
    rows = list(csv.reader([lines[0], lines[-1]])) if len(lines) > 1 else []
    return dict(zip(*rows, strict=False)) if rows else None


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    match value:
        case dict():
            for key, each in value.items():
                yield from _numbers(each, f"{name}/{key}" if name else str(key))
        case list():
            for index, each in enumerate(value):
                yield from _numbers(each, f"{name}/{index}" if name else str(index))
        case bool():
            return
        case int() | float():
            yield name, value
        case str():  # of CSV
            try:
                yield name, float(value)
            except ValueError:
                return
        case _:
            return
