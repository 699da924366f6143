"""run.json and plan.json of a run for tests: what a test says nothing about is filled in."""

import json
from typing import Any

from chaosrun.faults.fault import FaultPlan
from chaosrun.records.layout import LEGS, RunLayout
from chaosrun.records.run_file import Reference, RunInfo, write_run


def write_info(
    run: RunLayout, plan: FaultPlan | None = None, *, reference: str = "auto", source: str | None = None, **facts: Any
) -> None:
    """`reference`: its mode; `facts`: of run.json; of its spec only what is said."""
    about: dict[str, Any] = {"run_id": run.run_id, "created_s": 1000.0, "job": "/job.yaml", "directory": "/"}
    about |= {"script": "/train.py", "overrides": (), "storage": dict.fromkeys(LEGS), "irreproducible": None, **facts}
    about["spec"] = {"name": "toy", "script": "train.py", **facts.get("spec", {})}
    write_run(run, RunInfo(reference=Reference(mode=reference, source=source), **about))
    if plan is not None:
        run.plan_json.write_text(json.dumps(plan.to_json()))
