"""Where this chaosrun lies, so that a process that it starts finds the same one."""

import os
from collections.abc import Mapping
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[1]


def with_package(environment: Mapping[str, str]) -> dict[str, str]:
    """The same, with this package first on Python's path, before what PYTHONPATH it may have of its own."""
    path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), environment.get("PYTHONPATH"))))
    return {**environment, "PYTHONPATH": path}
