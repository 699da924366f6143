"""What a list of runs says of each of them."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["RunSummary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    run_id: str
    name: str
    status: str
    """PASS, FAIL, INCONCLUSIVE, "running", "interrupted" when nobody supervises it and it has no verdict, or "damaged"."""
    created_s: float
    path: Path
