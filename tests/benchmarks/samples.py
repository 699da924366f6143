"""Measured values of one thing, and the runs that gave none."""

import statistics
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Samples"]


@dataclass(slots=True, kw_only=True)
class Samples:
    values: list[float] = field(default_factory=list)
    """Seconds, in the order of measurement."""
    failures: list[str] = field(default_factory=list)
    limit_s: float | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    def to_json(self) -> dict[str, Any]:
        return {
            "median_s": self.median,
            "min_s": min(self.values, default=None),
            "max_s": max(self.values, default=None),
            "values_s": self.values,
            "failures": self.failures,
            "limit_s": self.limit_s,
        }
