"""The software installed on a node, the environment of its processes, and what a training script needs there, read from its
source. Nothing is imported or executed: torch alone would take seconds.
"""

import ast
import ctypes
import hashlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import packages_distributions
from pathlib import Path

import psutil
from msgspec import Struct

import chaosrun
from chaosrun.housekeeping.environment import installed_version, listed_variables
from chaosrun.observe.limits import read

PACKAGES = ("ray", "accelerate", "numpy")
DRIVERS = (Path("/sys/module/nvidia/version"), Path("/sys/module/amdgpu/version"))
PARAMETER = re.compile(r"^(__version__|cuda|hip)\b[^=]*= *'([^']*)'", re.MULTILINE)
"""Of torch/version.py."""
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


class SoftwareFacts(Struct, frozen=True, kw_only=True):
    versions: dict[str, str | None]
    variables: dict[str, str]
    auth: str | None
    cpus: int
    own_ray: bool
    """Whether chaosrun has started this Ray."""
    script: ScriptFacts | None


def probe(*, script: str | None, path: list[str]) -> SoftwareFacts:
    """`path`: additional directories of the script's imports."""
    torch = _torch()
    return SoftwareFacts(
        versions={
            "python": platform.python_version(),
            "chaosrun": chaosrun.__version__,
            **{name: installed_version(name) for name in PACKAGES},
            "torch": torch.get("__version__") or installed_version("torch"),
            "driver": next(filter(None, map(read, DRIVERS)), None),
            "NCCL": _nccl() if "cuda" in torch else None,
        },
        variables=listed_variables(os.environ),
        auth=os.environ.get("RAY_AUTH_MODE"),
        cpus=os.cpu_count() or 1,
        own_ray="chaosrun-ray-" in raylet_options().get("temp_dir", ""),
        # It puts the script's directory on the path.
        script=None if script is None else script_facts(script, path),
    )


def _torch() -> dict[str, str]:
    """The version in torch/version.py of the torch that would be imported, which the package's metadata may not match."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        return dict(PARAMETER.findall((Path(spec.origin).parent / "version.py").read_text()))
    except FileNotFoundError:
        return {}


def _nccl() -> str | None:
    """The version reported by the library itself: torch's own, else the system's."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    bundled = [os.path.join(folder, "nccl", "lib", "libnccl.so.2") for folder in folders]
    for name in (*bundled, "libnccl.so.2"):
        number = ctypes.c_int()
        with suppress(OSError, AttributeError):
            if ctypes.CDLL(name).ncclGetVersion(ctypes.byref(number)) == 0:
                return _dotted(number.value)
    return None


def _dotted(number: int) -> str:
    """NCCL encodes 2.8.4 as 2804, and from 2.9 on 2.9.6 as 20906."""
    major, rest = divmod(number, 10000 if number >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def raylet_options() -> dict[str, str]:
    """Options of the raylet above this process, by name without dashes; empty without one, or if it is another user's."""
    try:
        raylet = next((parent for parent in psutil.Process().parents() if parent.name() == "raylet"), None)
        words = [] if raylet is None else raylet.cmdline()
    except psutil.Error:
        return {}
    return dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)


def script_facts(script: str, path: Sequence[str]) -> ScriptFacts:
    """Follows imports through the modules next to the script. An import at the top level of a module is required; one inside a
    block, such as a try, an if or a function, is not."""
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
