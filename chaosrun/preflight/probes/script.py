"""A training script's needs on a node, read from its source, without executing it.

Follows imports through the modules next to the script. An import at the top level of a module is required; one inside a block,
such as a try, an if or a function, is not.
"""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

from msgspec import Struct

from chaosrun.housekeeping.environment import installed_version

MOST_FILES = 500


class Package(Struct, frozen=True, kw_only=True):
    """A package that the script imports and that is not next to it."""

    found: bool
    optional: bool
    version: str | None = None


class ScriptFacts(Struct, frozen=True, kw_only=True):
    error: str = ""
    """Why it cannot be read; then nothing else is known."""
    files: dict[str, str] = {}
    """Digests, by path."""
    imports: dict[str, Package] = {}
    own_path: bool = False
    """It changes sys.path itself."""


def script_facts(script: str, path: Sequence[str]) -> ScriptFacts:
    top = Path(script)
    sys.path[:0] = [str(top.parent), *path]
    importlib.invalidate_caches()
    files: dict[Path, str] = {}
    optional: dict[str, bool] = {}
    own_path, left = False, [top]
    while left and len(files) < MOST_FILES:
        file = left.pop()
        if file in files:
            continue
        try:
            source = file.read_bytes()
            tree = ast.parse(source, filename=str(file))
        except OSError as error:
            return ScriptFacts(error=f"{file}: {error.strerror}")
        except (SyntaxError, ValueError) as error:
            return ScriptFacts(error=f"{file}: Python cannot read it: {error}")
        files[file] = hashlib.sha256(source).hexdigest()[:16]
        own_path |= b"sys.path" in source
        for node in ast.walk(tree):
            for folder, name in _imported(node, file, top.parent):
                beside = _beside(folder, name) if folder.is_relative_to(top.parent) else []
                left += beside
                package = name.partition(".")[0]
                if folder == top.parent and not beside and package not in sys.stdlib_module_names:
                    optional[package] = node not in tree.body and optional.get(package, True)
    distributions = packages_distributions()
    versions = {name: installed_version(distributions[name][0]) if name in distributions else None for name in optional}
    return ScriptFacts(
        files={str(file.relative_to(top.parent)): digest for file, digest in sorted(files.items())},
        imports={
            name: Package(found=_is_there(name), optional=optional[name], version=versions[name]) for name in sorted(optional)
        },
        own_path=own_path,
    )


def _imported(node: ast.AST, file: Path, top: Path) -> Iterator[tuple[Path, str]]:
    """Modules, each with the folder to search first; for `from a import b` also a.b, which may be one."""
    if isinstance(node, ast.Import):
        yield from ((top, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        folder = file.parents[node.level - 1] if node.level else top
        yield from ((folder, ".".join(filter(None, (node.module, alias.name)))) for alias in node.names)


def _beside(folder: Path, name: str) -> list[Path]:
    """The files below a folder of a module and of its parent packages, which all run when it is imported."""
    parts = name.split(".")
    places = [folder.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
    return [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()]


def _is_there(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
