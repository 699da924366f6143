"""Files named by a command line or a job: reads their text, or says what they are if they are of the wrong kind."""

import difflib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from chaosrun.errors import SpecError, UsageError
from chaosrun.spec.places import Problem, SourceText, refusal
from chaosrun.spec.tree import Mapping, Node, place_at
from chaosrun.spec.tree import Sequence as ListNode

YAML = (".yaml", ".yml", ".json")
JOB, SUITE = "job file", "suite"
_OTHERS = {
    ".py": ("a Python script", "`chaosrun submit {path}` drills a script without a job file"),
    ".sh": ("a shell script", "a command comes after two dashes: chaosrun submit -- bash {path}"),
    ".ipynb": ("a notebook", "chaosrun starts scripts: export it as a Python file"),
}
"""By suffix: what such a file is, and how to use it."""
_KEYS = {JOB: ("script", "module", "command"), SUITE: ("drills",)}
"""By kind of file: every file of the kind has one of these keys, and none of the other kind's."""
_HINTS = {
    JOB: "`chaosrun submit {path}` runs it; a suite names it: job: {path}",
    SUITE: "`chaosrun suite {path}` runs it, `--list` shows its drills",
}
_LOOKED_AT = 200
"""At most so many files of a folder are read to find those of a kind."""
LARGEST_BYTES = 4 << 20
"""Of a job file or a suite: some 50,000 faults. A larger file is no such thing, and would take minutes to read."""
NEAR = 0.65
"""How similar an existing name has to be to be suggested for a missing one, from 0 to 1."""


def read_source(path: Path, what: str) -> SourceText:
    """The text of a file, `what` in words. Raises UsageError, or SpecError for one that is not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1 if what in _KEYS else -1)
    except FileNotFoundError as error:
        raise UsageError(f"no such {what}: {path}", hint=files_like(path, what)) from error
    except IsADirectoryError as error:
        inside = path / "job.yaml"
        hint = f"did you mean {inside}?" if os.path.isfile(inside) else "name the YAML file itself"
        raise UsageError(f"{path} is a directory, not a {what}", hint=hint) from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from error
    except ValueError as error:
        raise UsageError(f"{str(path)!r} cannot be the path of a {what}", hint="no path holds such characters") from error
    if what in _KEYS and len(data) > LARGEST_BYTES:
        raise UsageError(f"{path} is not a {what}: it has more than {LARGEST_BYTES >> 20} MiB", hint=f"a {what} is YAML")
    if what in _KEYS and path.suffix in _OTHERS:
        found, then = _OTHERS[path.suffix]
        raise UsageError(f"{path} is {found}, not a {what}", hint=then.format(path=path))
    try:
        return SourceText(label=str(path), text=data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        if path.suffix not in YAML and b"\0" in data:
            raise UsageError(f"{path} is not a {what}: it holds no text", hint=f"a {what} is YAML") from error
        source = SourceText(label=str(path), text=data.decode("utf-8", errors="replace"))
        place = place_at(source, len(error.object[: error.start].decode("utf-8")))
        message = f"not UTF-8: byte 0x{error.object[error.start]:02x}"
        raise refusal(place, message, "save the file as UTF-8 text") from error


def read_named(node: Node, path: Path, what: str) -> tuple[SourceText | None, list[Problem]]:
    """The file that a node names, or its problem."""
    try:
        return read_source(path, what), []
    except SpecError:
        raise  # the place is the file's own
    except UsageError as error:
        return None, [Problem(place=node.place, message=error.message, hint=error.hint)]


def expect_kind(path: Path, what: str, root: Node | None, problems: Sequence[Problem]) -> None:
    """Raises UsageError if the file's keys show that it is not of the kind `what` (JOB or SUITE)."""
    keys = root.entries if isinstance(root, Mapping) else {}
    for kind, own in _KEYS.items():
        if kind != what and any(key in keys for key in own) and not any(key in keys for key in _KEYS[what]):
            raise UsageError(f"{path} is a {kind}, not a {what}", hint=_HINTS[kind].format(path=path))
    if "faults" in keys and isinstance(keys["faults"].value, ListNode) and not any(key in keys for key in _KEYS[what]):
        hint = f"a job takes it: `chaosrun submit job.yaml faults.preset={path.absolute()}`"
        raise UsageError(f"{path} is a preset of faults, not a {what}", hint=hint)
    if path.suffix not in YAML and (problems or not keys):
        hint = f"a {what} holds YAML keys and values, and its name ends in .yaml; a training script's in .py"
        raise UsageError(f"{path} is not a {what}: it does not hold YAML keys and values", hint=hint)


def files_like(path: Path, what: str = "") -> str:
    """The file next to `path` that its name probably stands for, or all files there; for a JOB or SUITE only such files."""
    if not os.path.isdir(path.parent):
        return f"the directory {path.parent} does not exist"
    names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file() and entry.suffix == path.suffix)
    if what in _KEYS:
        names = [name for name in names[:_LOOKED_AT] if _is_of_kind(path.parent / name, what)]
    files = f"{what}s" if what in _KEYS else f"{path.suffix} files"
    # A typing error is seldom in the first letter, and `storage` does not mean `nostorage`.
    like = {Path(name).stem: name for name in names if name[:1].lower() == path.name[:1].lower()}
    if close := difflib.get_close_matches(path.stem, list(like), n=1, cutoff=NEAR):
        return f"did you mean {like[close[0]]}?"
    return f"{files} there: {', '.join(names[:5])}" if names else f"there are no {files} in {path.parent}"


def why_unwritable(folder: Path) -> str | None:
    """Why this directory, which may not exist yet, cannot be written to; None when it can. Tries it, and leaves nothing
    behind."""
    above = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".chaosrun-", dir=above))
    except OSError as error:
        return f"nothing can be made in {above} ({error.strerror})"
    return None


def _is_of_kind(path: Path, what: str) -> bool:
    try:
        text = path.read_bytes()
    except OSError:
        return False
    return any(re.search(rb"^[\"']?%s[\"']?\s*:" % key.encode(), text, re.MULTILINE) for key in _KEYS[what])
