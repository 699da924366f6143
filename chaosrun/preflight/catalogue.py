"""Every check there is: each module of `preflight.checks` that has a CHECK, in the order that the checks declare."""

import importlib
import pkgutil
from typing import Any

from chaosrun.preflight import checks
from chaosrun.preflight.model import Check


def _found() -> tuple[Check[Any], ...]:
    modules = [importlib.import_module(f"{checks.__name__}.{each.name}") for each in pkgutil.iter_modules(checks.__path__)]
    found = [check for module in modules if isinstance(check := getattr(module, "CHECK", None), Check)]
    return tuple(sorted(found, key=lambda check: check.order))


CHECKS = _found()
