"""What a training script needs on a node, read from its source: nothing of it is executed.

Followed through the modules that lie beside the script; a package's parts are looked for without importing the package.
"""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

from msgspec import Struct

from chaosrun.housekeeping.environment import installed_version

MOST_FILES = 500


class Package(Struct, frozen=True, kw_only=True):
    """What the script imports, and does not lie beside it."""

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
    trees: list[ast.Module] = []
    left = [top]
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
        trees.append(tree)
        for found in imports_of(tree):
            if found.level:
                left += [place for place in _relative(found, file) if place.is_relative_to(top.parent)]
                continue
            beside = [place for name in found.names for part in _parts(name) if (place := _beside(part, top.parent))]
            left += beside
            name = found.names[0].partition(".")[0]
            if not beside and name not in sys.stdlib_module_names:
                optional[name] = found.optional and optional.get(name, True)
    distributions = packages_distributions()
    versions = {name: installed_version(distributions[name][0]) if name in distributions else None for name in optional}
    return ScriptFacts(
        files={str(file.relative_to(top.parent)): digest for file, digest in sorted(files.items())},
        imports={
            name: Package(found=_is_there(name), optional=optional[name], version=versions[name]) for name in sorted(optional)
        },
        own_path=any(_changes_path(tree) for tree in trees),
    )


class Import(Struct, frozen=True, kw_only=True):
    names: list[str]
    """Modules: of `from a import b` both a and a.b, which may be one."""
    level: int = 0
    """Dots of a relative import."""
    optional: bool = False
    """Under a try that minds an ImportError, or an if."""


def imports_of(tree: ast.Module) -> Iterator[Import]:
    """Imports that running the module executes, or may: not those inside functions."""
    yield from _imports(tree.body, optional=False)


def _imports(body: Sequence[ast.stmt], *, optional: bool) -> Iterator[Import]:
    for node in body:
        match node:
            case ast.Import():
                yield from (Import(names=[alias.name], optional=optional) for alias in node.names)
            case ast.ImportFrom():
                module = node.module or ""
                parts = [".".join(filter(None, (module, alias.name))) for alias in node.names if alias.name != "*"]
                yield Import(names=[*filter(None, [module]), *parts], level=node.level, optional=optional)
            case ast.If():
                # `__name__ == "__main__"` holds when a script is run; of any other condition nothing is known.
                either = optional or not (isinstance(node.test, ast.Compare) and "__main__" in ast.unparse(node.test))
                if not _type_checking(node.test):
                    yield from _imports(node.body, optional=either)
                yield from _imports(node.orelse, optional=either)
            case ast.Try() | ast.TryStar():
                yield from _imports(node.body, optional=optional or bool(node.handlers))
                for handler in node.handlers:
                    yield from _imports(handler.body, optional=True)
                yield from _imports([*node.orelse, *node.finalbody], optional=optional)
            case ast.With() | ast.AsyncWith():
                yield from _imports(node.body, optional=optional)
            case ast.For() | ast.While():
                yield from _imports([*node.body, *node.orelse], optional=True)
            case ast.ClassDef():
                yield from _imports(node.body, optional=optional)


def _type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _changes_path(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path" for node in ast.walk(tree))


def _parts(name: str) -> list[str]:
    """A module and the packages around it: all of them run when it is imported."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _beside(name: str, folder: Path) -> Path | None:
    """The file of a module that lies in the script's directory or below it, installed packages excluded."""
    spec = _spec(name)
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    origin = Path(spec.origin)
    inside = origin.is_relative_to(folder) and "site-packages" not in origin.parts and origin.suffix == ".py"
    return origin if inside else None


def _spec(name: str) -> ModuleSpec | None:
    """Part by part: importlib's own find_spec imports the packages around a module."""
    folders: Sequence[str] | None = None
    spec = None
    for part in _parts(name):
        if folders is not None and not folders:
            return None
        spec = PathFinder.find_spec(part, folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    return spec


def _relative(found: Import, file: Path) -> list[Path]:
    around = file.parents[found.level - 1] if found.level <= len(file.parents) else file.parent
    places = [around.joinpath(*name.split(".")) for name in found.names]
    candidates = [path for place in places for path in (place.with_suffix(".py"), place / "__init__.py")]
    return [path for path in candidates if path.is_file()]


def _is_there(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
