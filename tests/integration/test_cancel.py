"""Another process of the same user ends a live run through its control socket: in order, and to be gone on with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaosrun import api
from chaosrun.campaign.drill import drill_on, new_run
from chaosrun.errors import InterruptedRunError, UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.processes import ProcessIdentity, identify
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import read_object
from chaosrun.supervise.supervisor import Supervisor
from tests.conftest import WarmDrills
from tests.integration.ranks import alive, eventually
from tests.records import read_lines

PROBE = Path(__file__).parents[2] / "jobs" / "probe" / "job.yaml"


@pytest.mark.ray
def test_a_live_run_is_pinged_and_cancelled(submit: Callable[..., Any], tmp_path: Path) -> None:
    runs: list[RunLayout] = []
    answers: list[dict[str, Any]] = []
    ranks: list[ProcessIdentity] = []

    def on_event(record: dict[str, Any]) -> None:
        if record["event"] == "run.created":
            runs.append(RunLayout(Path(record["path"])))
        if record["event"] == "attempt.started" and not answers:
            ranks.extend(filter(None, map(identify, record["pids"].values())))
            # From the supervisor's own thread: nothing of it is waited for.
            answers.append(api.ping(runs[0]))
            api.cancel(runs[0])

    overrides = (
        "args=[--steps, 400, --step-seconds, 0.05, --cpu]",
        "per_worker.gpu=0",
        "faults.schedule=[{rank: 1, at_step: 300}]",
    )
    with pytest.raises(InterruptedRunError) as interrupted:
        submit(PROBE, *overrides, on_event=on_event)
    run = runs[0]
    assert interrupted.value.hint is not None and f"chaosrun resume {run.run_id}" in interrupted.value.hint
    assert answers[0]["run"] == run.run_id
    assert list(read_lines(run.reference.journal))[-1]["outcome"] == "interrupted"
    assert len(ranks) == 2
    eventually(lambda: not alive(ranks))
    assert not (run.path / "control").exists()
    with pytest.raises(UsageError, match="is not being supervised"):
        api.cancel(run)


@pytest.mark.ray
def test_what_is_said_to_a_leg_that_is_over_reaches_no_other(warm_drills: WarmDrills, tmp_path: Path) -> None:
    """What comes as a leg ends lies among the events of its place, where the next drill reads on."""
    overrides = ("args=[--steps, 6, --cpu]", "checkpoint.every_steps=2", "per_worker.gpu=0")
    kill = "faults.schedule=[{rank: 1, at_step: 3}]"
    supervisors: list[Supervisor] = []

    def watch(supervisor: Supervisor | None) -> None:
        supervisors.extend(filter(None, [supervisor]))

    cluster = warm_drills._cluster(2)
    first = new_run(tmp_path, PROBE, [*overrides, kill], reference="auto")
    assert drill_on(cluster, first, tmp_path, watch=watch).status == "PASS"
    assert [supervisor.name for supervisor in supervisors] == ["reference", "chaos"]
    for supervisor in supervisors:
        supervisor.interrupt()
        supervisor.inject(FaultPlan.from_json(read_object(first.plan_json)).faults)
    second = new_run(tmp_path, PROBE, [*overrides, kill.replace("3", "5")], reference="auto")
    verdict = drill_on(cluster, second, tmp_path, watch=watch)
    assert (verdict.status, len(verdict.faults), len(verdict.attempts)) == ("PASS", 1, 2)
