"""Every check there is, in the order they are made: first what each node does for itself, then what takes several."""

from chaosrun.preflight.model import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = ()
