"""Where runs are kept, and what a list of them says of each."""

import os
from dataclasses import dataclass
from pathlib import Path


def default_root() -> Path:
    """Where runs are kept: $CHAOSRUN_ROOT, else .chaosrun in the working directory."""
    return Path(os.environ.get("CHAOSRUN_ROOT") or ".chaosrun")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    run_id: str
    name: str
    status: str
    """PASS, FAIL, INCONCLUSIVE, "running", "interrupted" when nobody supervises it and it has no verdict, or "damaged"."""
    created_s: float
    path: Path
    outcome: str | None = None
    """How the leg that says it ended: what tells one INCONCLUSIVE from another; None without a verdict."""
    exit_code: int | None = None
    """That of the verdict, or of what ended its last supervisor without one."""
