"""Finds and reads the file of a job's fault preset, and replaces the name by its faults."""

from pathlib import Path

from chaosrun.spec.files import read_named
from chaosrun.spec.places import Problem, SourceText
from chaosrun.spec.tree import Mapping, MappingEntry, Scalar, child, read_tree
from chaosrun.spec.validation import nearest

PRESETS = Path(__file__).parent / "presets"


def named_presets() -> dict[str, Path]:
    """Presets that come with chaosrun."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def with_preset(root: Mapping, directory: Path) -> tuple[Mapping, list[Problem]]:
    """The tree of a job with its named preset expanded, and the problems of the name or the file.

    It is expanded before validation, so that its errors are shown in its own file. A file's path is relative to the file that
    names it; that of an override to `directory`.
    """
    faults, node = child(root, "faults"), child(root, "faults", "preset")
    if not isinstance(faults, Mapping) or not isinstance(node, Scalar) or not isinstance(node.value, str):
        return root, []  # already expanded, or none; the validation reports errors
    found, problems = _preset(node, directory)
    if found is None:
        # The name was reported as wrong; that it is not a mapping need not be reported as well.
        found = Scalar(place=node.place, value=None, text="")
    written = faults.having("preset", faults.entries["preset"].key, found)
    return root.having("faults", root.entries["faults"].key, written), problems


def _preset(node: Scalar, directory: Path) -> tuple[Mapping | None, list[Problem]]:
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
    source, problems = read_named(node, path, "fault preset")
    return (None, problems) if source is None else _preset_tree(source, path.stem, node)


def _preset_tree(source: SourceText, name: str, node: Scalar) -> tuple[Mapping | None, list[Problem]]:
    root, problems = read_tree(source)
    if problems or not isinstance(root, Mapping):
        message = f"the preset {source.label} holds no keys and values"
        hint = "the least a preset holds: faults: [{kind: kill, mean: 20%}]"
        return None, problems or [Problem(place=node.place, message=message, hint=hint)]
    if "name" in root.entries:
        return root, []
    named = MappingEntry(key=node.place, value=Scalar(place=node.place, value=name, text=name))
    return Mapping(place=root.place, entries={"name": named, **root.entries}), []
