"""The check "forecast": what the drills just made, and the last run of the job itself, say of what is to be expected."""

from pathlib import Path
from typing import Any

from chaosrun.preflight.assess.forecast import assess_forecast
from chaosrun.preflight.costs import costs_of, together
from chaosrun.preflight.model import Check, Facts, Level, Pool, Setting
from chaosrun.records.history import LegHistory, read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import read_run, recorded_leg


def gather(setting: Setting, pool: Pool) -> Facts:
    """{"drill": costs, "job": costs, "run": its id}; None of what there is not."""
    run = None if setting.former is None else RunLayout(Path(setting.former["folder"]))
    return {
        "drill": _of_drills(setting.earlier.get("drill")),
        "job": None if run is None else costs_of(_legs(run)),
        "run": None if run is None else run.run_id,
    }


def _of_drills(facts: Facts | None) -> Facts | None:
    """Of the drill over all nodes, where there was one: a job meets what that met."""
    if facts is None:
        return None
    passed = [told["costs"] for told in facts["nodes"].values() if told and told.get("status") == "PASS"]
    whole = facts["all"]
    if whole and whole.get("status") == "PASS":
        return whole["costs"]
    return together(passed) if passed else None


def _legs(run: RunLayout) -> list[LegHistory]:
    info: dict[str, Any] = read_run(run)
    return [read_leg(recorded_leg(run, info, name)) for name in ("reference", "chaos")]


CHECK = Check(
    name="forecast",
    about="goodput and the best checkpoint interval when nodes fail",
    order=100,
    level=Level.STANDARD,
    judge=assess_forecast,
    gather=gather,
)
