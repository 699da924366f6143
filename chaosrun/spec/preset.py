"""Fault presets: which there are by name, and how `faults.preset: spot` becomes what the file of that name says.

Puts the file's tree in the place of its name, before anything is validated: what is wrong in it is shown in that file.
"""

from pathlib import Path

from chaosrun.errors import SpecError, UsageError
from chaosrun.spec.diagnosis import nearest
from chaosrun.spec.files import read_source
from chaosrun.spec.problems import Problem, Source
from chaosrun.spec.tree import Entry, Mapping, Scalar, find, read_tree

FOLDER = Path(__file__).parent / "presets"
PATH = ("faults", "preset")


def named_presets() -> dict[str, Path]:
    """Those that come with chaosrun."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def with_preset(root: Mapping, directory: Path) -> tuple[Mapping, list[Problem]]:
    """The tree of a job with the preset that it names written out, and what is wrong with the name or the file.

    A file's path is relative to the file that names it; that of an override to `directory`.
    """
    _, faults = find(root, PATH[:1])
    if not isinstance(faults, Mapping) or PATH[1] not in faults.entries:
        return root, []
    entry = faults.entries[PATH[1]]
    node = entry.value
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        return root, []  # written out, or nothing; the validation tells whatever is wrong
    found, problems = _read(node, directory)
    if found is None:
        # The name has been told to be wrong; that it is no mapping need not be.
        found = Scalar(place=node.place, value=None, text="")
    return root.having(PATH[0], root.entries[PATH[0]].key, faults.having(PATH[1], entry.key, found)), problems


def _read(node: Scalar, directory: Path) -> tuple[Mapping | None, list[Problem]]:
    name = str(node.value)
    known = named_presets()
    path = known.get(name)
    if path is None:
        if "/" not in name and not name.endswith((".yaml", ".yml")):
            guess = nearest(name, known)
            message = f"no fault preset is called {name!r}" + (f", did you mean {guess!r}?" if guess else "")
            hint = f"presets: {', '.join(known)}; or the path of a file, such as ./mine.yaml"
            return None, [Problem(place=node.place, message=message, hint=hint)]
        near = node.place.source
        path = (Path(near.label).parent if near.is_file else directory) / name
    try:
        source = read_source(path, "fault preset")
    except SpecError:
        raise  # the place is the preset's own
    except UsageError as error:
        return None, [Problem(place=node.place, message=error.message, hint=error.hint)]
    return _tree(source, path.stem, node)


def _tree(source: Source, name: str, node: Scalar) -> tuple[Mapping | None, list[Problem]]:
    root, problems = read_tree(source)
    if problems or not isinstance(root, Mapping):
        message = f"the preset {source.label} holds no keys and values"
        hint = "the least a preset holds: faults: [{kind: kill, mean: 20%}]"
        return None, problems or [Problem(place=node.place, message=message, hint=hint)]
    if "name" in root.entries:
        return root, []
    named = Entry(key=node.place, value=Scalar(place=node.place, value=name, text=name))
    return Mapping(place=root.place, entries={"name": named, **root.entries}), []
