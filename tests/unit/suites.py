"""Suites for tests: a small one on disk, its run as it is carried out, a drill of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chaosrun.campaign.history import NightResult
from chaosrun.campaign.planned_drill import PlannedDrill
from chaosrun.campaign.suite_plan import SuiteRequest
from chaosrun.campaign.suite_run import SuiteRun, opened
from chaosrun.spec.suite import Expectation

JOB = "name: toy\nscript: train.py\nworkers: 2\nmax_steps: 40\ncheckpoint: {every_steps: 5}\n"
DRAWN = JOB + "faults: {random: {count: 2}}\n"
DRILL = PlannedDrill(
    **{"name": "a", "drill": "a", "base": "a", "job": "/job.yaml", "overrides": (), "workers": 1, "cpu": 1.0, "gpu": 0},
    **{"faults": 1, "kinds": ("kill",), "seed": 0, "plan": "", "reference": "", "expect": Expectation(verdict="PASS")},
)
NIGHT = NightResult(
    **{
        "suite": "nightly-1",
        "night": "2026-11-01",
        "time_s": 1.0,
        "drill": "a",
        "ok": True,
        "status": "PASS",
        "expected": "PASS",
    },
    **{"cause": "bit-identical", "run": "a-1", "seed": 20261101, "faults": 2, "landed": 2, "restarts": 2, "recovery_s": 0.25},
    took_s=3.5,
)


def write_suite(folder: Path, suite: str, job: str = JOB) -> Path:
    (folder / "train.py").write_text("import chaosrun\n")
    (folder / "job.yaml").write_text(job)
    path = folder / "toys.yaml"
    path.write_text(suite)
    return path


@contextmanager
def night_of(suite: Path, root: Path, request: SuiteRequest | None = None) -> Iterator[SuiteRun]:
    """A run of the suite, of which nothing has been carried out yet."""
    with opened(root, request or SuiteRequest(path=suite), None) as (folder, plan, journal):
        yield SuiteRun(folder, plan, journal, root, None, "always", lambda record: None)
