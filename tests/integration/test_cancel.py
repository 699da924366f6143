"""Another process of the same user ends a live run through its control socket: in order, and to be gone on with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaosrun import api
from chaosrun.cluster.processes import ProcessIdentity, identify
from chaosrun.errors import InterruptedRunError, UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.records.trace import read_lines
from tests.integration.ranks import alive, eventually

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
    eventually(lambda: not alive(ranks), timeout_s=10)
    assert not (run.path / "control").exists()
    with pytest.raises(UsageError, match="is not being supervised"):
        api.cancel(run)
