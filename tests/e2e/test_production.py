"""`chaosrun run`: real failures from outside, each recovery judged; and what is judged to be wrong is told, with its place."""

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from chaosrun.processes import identify, is_alive
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.supervise.deaths import last_step
from tests.e2e.drills import STEPS, Shell, events, eventually, finish, journal, reached, write_job
from tests.e2e.test_resume import parent_of

pytestmark = pytest.mark.ray

HELD = """\
while (order.attempt, step) in {(1, 5), (2, 8)} and not (Path(order.leg_path).parent / f"go-{order.attempt}").exists():
    time.sleep(0.01)
"""
"""At these steps it waits for a file."""
HOLD = "recovery: {hang_timeout: 300s}"
FORGETS_RNG = """\
if order.attempt == 2 and step == 4 and rank == 1:
    torch.manual_seed(99)
"""
"""Rank 1 goes on, after the first step of the second attempt, with other random numbers than it had before."""


def leg_of(shell: Shell, by: subprocess.Popen[str]) -> tuple[RunLayout, LegLayout]:
    run = shell.run_begun(by)
    return run, run.leg("run")


def pids_of(leg: LegLayout) -> dict[str, int]:
    """Of the first attempt, by rank."""
    return eventually(lambda: events(leg, "attempt.started"))[0]["pids"]


def at_five(shell: Shell, *arguments: str | Path) -> tuple[subprocess.Popen[str], RunLayout]:
    """Start a run, and wait until it has made five steps; step 3 is saved."""
    process = shell.start("run", *arguments)
    run, leg = leg_of(shell, process)
    # On every rank: what one has not recorded, its second attempt is not held against.
    eventually(lambda: all(last_step(leg, 1, int(each)) >= 5 for each in pids_of(leg)), what=process.poll)
    return process, run


def killed_at_five(shell: Shell, *arguments: str | Path, rank: int = 1) -> tuple[subprocess.Popen[str], RunLayout]:
    """Start a run and SIGKILL one of its ranks, from here, when it has made five steps."""
    process, run = at_five(shell, *arguments)
    kill(run, rank)
    return process, run


def kill(run: RunLayout, rank: int) -> None:
    os.kill(pids_of(run.leg("run"))[str(rank)], signal.SIGKILL)


def verdict_of(run: RunLayout) -> dict[str, Any]:
    return json.loads(run.verdict_json.read_bytes())


@pytest.mark.nightly
def test_a_rank_that_is_killed_from_outside_comes_back_and_is_judged(shell: Shell) -> None:
    """And while the job is being run, it is not run twice and takes no faults."""
    job = write_job(shell.folder, HELD, HOLD, "faults: {schedule: [{rank: 0, at_step: 2}]}")
    process, run = at_five(shell, job)
    again, injected = shell.call("run", job), shell.call("inject", run.run_id, "--rank", "1")
    assert (again.returncode, injected.returncode) == (2, 2)
    assert f"is being run already as run {run.run_id}" in again.stderr
    assert shell.only_run().run_id == run.run_id, "nothing is left of the other"
    assert "allow_inject" in injected.stderr
    kill(run, 1)
    (run.path / "go-2").touch()
    done = finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict, leg = verdict_of(run), run.leg("run")
    assert (verdict["status"], verdict["code"], verdict["steps"]) == ("PASS", "recoveries_agree", STEPS)
    (judged,) = events(leg, "recovery.agreed")
    assert (judged["attempt"], judged["steps"], judged["last"], judged["states"]) == (2, 2, 5, 2)
    order = [record["event"] for record in journal(leg)]
    assert order.index("recovery.agreed") < order.index("leg.finished")
    assert [fault["id"] for fault in verdict["faults"]] == [], "what the job file plans is not struck"
    assert "faults that the job file plans are not struck" in done.stderr
    assert "2 steps done twice, up to step 5, equal" in done.stderr
    assert shell.call("verify", run.run_id).returncode == 0
    assert "as first done" in run.report_html.read_text()
    assert not {word for word in ("undisturbed", "fault-free", "reference run") if word in run.report_md.read_text()}


@pytest.mark.nightly
def test_a_restart_that_is_not_what_was_recorded_is_an_alarm(shell: Shell) -> None:
    """As `integration/test_production.py` has it, in processes of its own, and going on."""
    job = write_job(
        shell.folder, f"{HELD}{FORGETS_RNG}time.sleep(0.5)\n", "recovery: {hang_timeout: 300s, on_divergence: warn}"
    )
    process, run = killed_at_five(shell, job)
    (run.path / "go-2").touch()
    done = finish(process)
    leg, verdict = run.leg("run"), verdict_of(run)
    assert done.returncode == 3, done.stdout + done.stderr
    (alarm,) = events(leg, "recovery.diverged")
    assert (alarm["attempt"], alarm["step"], alarm["rank"], alarm["quantity"]) == (2, 5, 1, "rng")
    assert "ALARM: attempt 2" in done.stderr
    assert events(leg, "leg.finished")[0]["outcome"] == verdict["outcome"] == "completed"
    assert (verdict["status"], verdict["steps"]) == ("FAIL", STEPS)


@pytest.mark.nightly
def test_a_killed_supervisor_is_followed_by_another_and_the_recovery_still_judged(shell: Shell) -> None:
    job = write_job(shell.folder, HELD, HOLD)
    process = shell.start("run", job)
    run, leg = leg_of(shell, process)
    eventually(lambda: reached(leg, 1, 5), what=process.poll)
    supervisor = events(leg, "leg.started")[0]["supervisor_pid"]
    ranks = [identify(pid) for pid in events(leg, "attempt.started")[0]["pids"].values()]
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, filter(None, ranks))))
    (run.path / "go-1").touch()
    eventually(lambda: reached(leg, 2, 8), what=process.poll)
    # Now everything, the process that would start another supervisor included.
    process.kill()
    finish(process)
    eventually(lambda: not shell.left_behind(), what=shell.left_behind)
    (run.path / "go-2").touch()
    done = shell.run("resume", run.run_id)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {record["attempt"] for record in events(leg, "recovery.agreed")} == {2, 3}
    assert len(events(leg, "supervisor.resumed")) == 2


@contextmanager
def joined(nodes: int) -> Iterator[str]:
    """The address of a Ray that is not the run's own, of so many nodes with two CPUs each beside its head."""
    from tests.integration.drive_lost_nodes import QUICK
    from tests.integration.raylets import add, raylets

    # What the raylets need of the environment is this process's own only as long as they are there.
    patience = patch.dict(os.environ, {"RAY_raylet_start_wait_time_s": "300"})
    with patience, raylets(num_cpus=0, _system_config=QUICK) as cluster:
        for _ in range(nodes):
            add(cluster, num_cpus=2)
        yield str(cluster.address)


@pytest.mark.nightly
def test_on_a_joined_ray_a_notice_and_a_lost_node_are_survived_and_judged(shell: Shell) -> None:
    job = write_job(shell.folder, HELD, HOLD)
    with joined(2) as address:
        process = shell.start("run", job, "--address", address)
        run, leg = leg_of(shell, process)
        pids = pids_of(leg)
        eventually(lambda: all(last_step(leg, 1, int(each)) >= 5 for each in pids), what=process.poll)
        os.kill(pids["0"], signal.SIGTERM)
        (run.path / "go-1").touch()
        eventually(lambda: reached(leg, 2, 8), what=process.poll)
        # Fork server, agent, and the raylet of their node.
        above = events(leg, "attempt.started")[1]["pids"]["0"]
        for _ in range(3):
            above = parent_of(above)
        os.kill(above, signal.SIGKILL)
        done = finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = verdict_of(run)
    assert (verdict["status"], verdict["code"], verdict["steps"]) == ("PASS", "recoveries_agree", STEPS)
    first, second = events(leg, "recovery.agreed")
    assert (first["attempt"], first["steps"], first["states"]) == (2, 0, 2), (
        "all left with a checkpoint: no step was done twice"
    )
    assert (second["attempt"], second["steps"], second["last"]) == (3, 2, 8)
    before, after = ({*record["nodes"]} for record in events(leg, "placement.acquired"))
    assert not before & after
    assert [record["ray"] for record in events(leg, "placement.acquired")] == ["joined"] * 2
    assert all(attempt["recovery_s"] is not None for attempt in verdict["attempts"][1:])


@pytest.mark.nightly
def test_a_run_that_is_cancelled_was_interrupted(shell: Shell) -> None:
    process, run = at_five(shell, write_job(shell.folder, HELD, HOLD))
    assert shell.run("cancel", run.run_id).returncode == 0
    assert finish(process).returncode == 130
    assert shell.run("list").stdout.count("interrupted") == 1


def test_on_a_game_day_it_takes_faults_and_prometheus_can_scrape_it_while_it_runs(shell: Shell) -> None:
    job = write_job(shell.folder, HELD, HOLD, "faults: {allow_inject: true}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = shell.call("run", job, "--metrics", str(port))
    assert refused.returncode == 2
    assert f"metrics cannot be served on {port}: Address already in use" in refused.stderr
    unknown = shell.call("run", job, "--metrics", "localhost:http")
    assert unknown.returncode == 2
    assert "metrics cannot be served on localhost:http" in unknown.stderr
    assert not any((shell.root / "runs").iterdir()), "nothing is left of it"
    process, run = at_five(shell, job, "--metrics", str(port))
    leg = run.leg("run")
    struck = shell.call("inject", run.run_id, "--rank", "1", "--no-wait")
    assert struck.returncode == 0, struck.stderr
    eventually(lambda: reached(leg, 2, 8) and events(leg, "recovery.agreed"), what=process.poll)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    label = f'{{run="{run.run_id}"}}'
    told = {name: float(value) for name, _, value in (line.partition(f"{label} ") for line in text.splitlines()) if value}
    expected = {
        "steps": 8,
        "restarts_total": 1,
        "lost_steps_total": 2,
        "recoveries_judged_total": 1,
        "recoveries_diverged_total": 0,
    }
    assert {name: told[f"chaosrun_{name}"] for name in expected} == expected
    assert 0 < told["chaosrun_goodput_ratio"] < 1
    assert 0 <= told["chaosrun_checkpoint_age_seconds"] < 300
    (run.path / "go-2").touch()
    done = finish(process)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = verdict_of(run)
    assert [fault["landed"] for fault in verdict["faults"]] == [True]
    assert len(events(leg, "recovery.agreed")) == 1


OWN = """\
import os
import time
from pathlib import Path

import torch

torch.manual_seed(3)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
saved, step = Path("out/checkpoint.pt"), 0
saved.parent.mkdir(exist_ok=True)
if saved.exists():
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
    if not os.environ.get("FORGETS"):
        torch.set_rng_state(state["rng"])
while step < 12:
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step == 4:
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "rng": torch.get_rng_state()}
        torch.save(parts, "out/new.pt")
        os.replace("out/new.pt", saved)
        if os.environ.get("DIES") and os.environ["CHAOSRUN_ATTEMPT"] == "1":
            time.sleep(0.5)
            os.kill(os.getpid(), 9)
    time.sleep(0.4)
"""


@pytest.mark.parametrize(
    "forgets",
    [
        pytest.param("", marks=pytest.mark.nightly, id="right"),
        pytest.param("1", marks=pytest.mark.nightly, id="forgets its random streams"),
    ],
)
def test_a_script_that_resumes_by_itself_is_held_against_its_own_steps(shell: Shell, forgets: str) -> None:
    (shell.folder / "train.py").write_text(OWN)
    job = shell.folder / "job.yaml"
    job.write_text(f'name: small\nscript: train.py\nworkers: 1\noutputs: [out]\nenv: {{FORGETS: "{forgets}"}}\n')
    process, run = killed_at_five(shell, job, rank=0)
    done = finish(process)
    assert done.returncode == (3 if forgets else 0), done.stdout + done.stderr
    if forgets:
        (alarm,) = events(run.leg("run"), "recovery.diverged")
        assert (alarm["attempt"], alarm["step"], alarm["rank"]) == (2, 5, 0)
    else:
        (judged,) = events(run.leg("run"), "recovery.agreed")
        assert judged["steps"] >= 1 and judged["last"] == judged["steps"] + 4


@pytest.mark.nightly
def test_one_that_is_killed_right_after_its_save_is_judged_by_what_it_restored(shell: Shell) -> None:
    (shell.folder / "train.py").write_text(OWN)
    job = shell.folder / "job.yaml"
    job.write_text('name: small\nscript: train.py\nworkers: 1\noutputs: [out]\nenv: {DIES: "1"}\n')
    done = shell.call("run", job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no step was done twice, so only what was restored could be compared" in " ".join(done.stdout.split())
    assert "so only the weights and the optimizer that it began with could be compared" in " ".join(done.stderr.split())
