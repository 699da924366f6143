"""Python imports this when it starts, in every process below a command of a drill: this folder comes first on its PYTHONPATH.

Launchers, resource trackers and pip also run this, so it imports only the standard library, and as little of it as possible. It
imports the sitecustomize that it hides, and calls `protocol.commanded` when the process has imported torch. A process that must
be observed but cannot be is ended at once: training unobserved, it would look like a missing rank or a hang.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VARIABLE = "CHAOSRUN_STARTUP"
FOLDER = os.path.dirname(os.path.abspath(__file__))
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(FOLDER)))
FAILED_EXIT_CODE = 70


class Watch:
    """An import hook that finds torch as Python would, and calls chaosrun once torch is imported."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name != "torch":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: "Any") -> None:
                execute(module)
                torch_imported()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def torch_imported() -> None:
    try:
        try:
            import chaosrun.protocol.commanded as commanded
        except ModuleNotFoundError as error:
            if error.name != "chaosrun":
                raise
            # Last: the interpreter's own packages come before those next to chaosrun.
            sys.path.append(PACKAGE_ROOT)
            import chaosrun.protocol.commanded as commanded
        commanded.torch_imported()
    except Exception as error:
        hint = f"the command of the drill runs {sys.executable}, which needs chaosrun and what it depends on"
        print(f"chaosrun cannot observe this process: {type(error).__name__}: {error}; {hint}", file=sys.stderr, flush=True)
        os._exit(FAILED_EXIT_CODE)


def import_hidden() -> None:
    """Import the sitecustomize that this one hides."""
    own = sys.modules.pop("sitecustomize", None)
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != FOLDER]
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if own is not None:
            sys.modules["sitecustomize"] = own


if os.environ.get(VARIABLE):
    sys.meta_path.insert(0, Watch())  # type: ignore[arg-type]
import_hidden()
