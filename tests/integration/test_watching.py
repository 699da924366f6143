"""A real drill, watched from other processes while it runs: each sees what happened, and none disturbs it."""

import io
import json
import re
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chaosrun.records.layout import RunLayout
from chaosrun.report.follow import RunFollower
from chaosrun.report.live import Display, LiveProgress
from chaosrun.supervise.drill import lock_run
from chaosrun.verify.verdict import Verdict
from tests.conftest import WarmDrills
from tests.e2e.drills import COMMAND, eventually, kills, write_job
from tests.terminal import Terminal

# In the middle of the reference, before the fault and after the restart it waits until the followers have shown that. Whom the
# fault spares waits for nobody when it strikes: it cannot hear of the other's death, and raise, before it is stopped.
STEP = """\
print('step', step, flush=True)
while (order.leg, order.attempt, step) in {{("reference", 1, 6), ("chaos", 1, 5), ("chaos", 2, 9)}}:
    if Path({folder!r}, f"shown-{{order.leg}}-{{order.attempt}}").exists():
        break
    time.sleep(0.01)
while (order.leg, order.attempt, step, rank) == ("chaos", 1, 8, 0):
    time.sleep(0.01)
"""
SHOWN = {
    "reference-1": (r"▶ reference", r"then chaos, 1 fault"),
    "chaos-1": (r"✓ reference 12 steps   ▶ chaos", r"F1          ○ planned"),
    "chaos-2": (r"chaos, attempt 2 ", r"rank 1      step \d+ training"),
}
"""What the picture has shown before the training goes on."""
STATES = {"reference-1": [(0, 0)], "chaos-1": [(0, 0), (0, 0)], "chaos-2": [(0, 0), (1, 2)]}
"""Restarts and lost steps of the legs, as the newest state then has them."""


class Watchers:
    """Commands that follow the run from its first record on, while this process holds its lock."""

    def __init__(self, stack: ExitStack, root: Path, live: LiveProgress) -> None:
        self._stack, self._root, self._live = stack, root, live
        self._states = root.parent / "states.jsonl"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.terminal: Terminal | None = None

    def states(self) -> list[dict[str, Any]]:
        whole, _, _ = self._states.read_text().rpartition("\n") if self._states.exists() else ("", "", "")
        return [json.loads(line) for line in whole.splitlines()]

    def shown(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.terminal.output) if self.terminal else ""

    def let_go_on(self) -> None:
        """Of another thread: until the training has been let go on everywhere."""
        for where, parts in SHOWN.items():
            try:
                eventually(lambda parts=parts: all(re.search(part, self.shown()) for part in parts))
                eventually(lambda legs=STATES[where]: (states := self.states()) and costs(states[-1]) == legs)
            finally:
                (self._root.parent / f"shown-{where}").touch()

    def on_event(self, record: dict[str, Any]) -> None:
        if not self.processes:
            (path,) = (self._root / "runs").iterdir()
            self._live.on_event({"leg": None, "event": "run.created", "run": path.name, "path": str(path)})
            self._stack.enter_context(lock_run(RunLayout(path)))
            self.terminal = Terminal(COMMAND, "status", "latest", "-w", "--root", self._root)
            for name, command in {
                "lines": ["status", "latest", "-w"],
                "json": ["status", "latest", "-w", "-o", "json"],
                "logs": ["logs", "latest", "-f"],
                "events": ["logs", "latest", "-f", "--events"],
            }.items():
                stdout = self._stack.enter_context(self._states.open("w")) if name == "json" else subprocess.PIPE
                self.processes[name] = subprocess.Popen(
                    [COMMAND, *command, "--root", self._root], stdout=stdout, stderr=subprocess.PIPE, text=True
                )
        self._live.on_event(record)


def costs(state: dict[str, Any]) -> list[tuple[int, int]]:
    return [(leg["restarts"], leg["lost_steps"]) for leg in state["legs"]]


@pytest.fixture(scope="module")
def watched(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("watched")
    job = write_job(folder, STEP.format(folder=str(folder)), kills(8))
    root, stream = folder / "root", io.StringIO()
    with ExitStack() as stack, LiveProgress(Display(stream, terminal=False, began_s=time.time())) as live:
        watchers = Watchers(stack, root, live)
        letting_go = threading.Thread(target=watchers.let_go_on, daemon=True)
        letting_go.start()
        result = warm_drills(job, root=root, on_event=watchers.on_event)
        letting_go.join()
    outcomes = {name: (*process.communicate(timeout=300), process.returncode) for name, process in watchers.processes.items()}
    assert watchers.terminal is not None
    code = watchers.terminal.wait()
    watchers.terminal.close()
    return {
        "result": result,
        "own": stream.getvalue(),
        "terminal": (code, watchers.shown(), watchers.terminal.grid),
        "states": watchers.states(),
        **outcomes,
    }


def said(lines: str) -> list[str]:
    return [re.sub(r"^(\d\d:\d\d:\d\d )?\[\d+:\d\d\] ", "", line) for line in lines.splitlines() if ": created in " not in line]


def test_the_drill_passes(watched: dict[str, Any]) -> None:
    verdict: Verdict = watched["result"].verdict
    assert (verdict.status, len(verdict.attempts)) == ("PASS", 2)


def test_every_follower_tells_the_same(watched: dict[str, Any]) -> None:
    own = said(watched["own"])
    assert "chaos: F1 fired: rank 1, step 8" in own
    out, err, code = watched["lines"]
    assert (said(err), code) == (own, 0)
    assert "restarts    1, 2 steps lost" in out
    # The other one had no fault, and is not told as killed: the line of its attempt names it, an event has each.
    stopped = "chaos: attempt 1: rank 0 was stopped with its attempt"
    assert any(line.endswith("; stopped rank 0") for line in own) and "chaos: attempt 1: rank 0 died of SIGKILL" not in own
    out, err, code = watched["events"]
    assert ([line for line in said(out) if line != stopped], err, code) == (own, "", 0) and stopped in said(out)


def test_a_fault_fires_before_its_rank_dies(watched: dict[str, Any]) -> None:
    own = said(watched["own"])
    assert own.index("chaos: F1 fired: rank 1, step 8") < own.index("chaos: attempt 1: rank 1 died of SIGKILL")


def test_the_picture(watched: dict[str, Any]) -> None:
    code, plain, grid = watched["terminal"]
    assert code == 0
    for part in [*(part for parts in SHOWN.values() for part in parts), "● landed"]:
        assert re.search(part, plain), part
    assert "restarts    1, 2 steps lost" in plain
    assert grid.text.startswith(f"run {watched['result'].run.run_id}  small, 2 workers\n")
    assert not grid.is_cursor_hidden


def test_json(watched: dict[str, Any]) -> None:
    _, err, code = watched["json"]
    states = watched["states"]
    assert (err, code) == ("", 0)
    assert len(states) > len(STATES)
    assert {state["state"] for state in states[:-1]} == {"running"}
    assert states[-1]["schedule"][0]["state"] == "landed"
    assert costs(states[-1]) == [(0, 0), (1, 2)]


def test_logs(watched: dict[str, Any]) -> None:
    out, err, code = watched["logs"]
    assert (err, code) == ("", 0)
    for origin, steps in (("reference/1/0", range(1, 13)), ("chaos/1/1", range(1, 9)), ("chaos/2/1", range(7, 13))):
        lines = [line.partition(" | ")[2] for line in out.splitlines() if line.startswith(f"{origin} | ")]
        assert lines == [f"step {step}" for step in steps], origin


def test_the_picture_agrees_with_the_verdict(watched: dict[str, Any]) -> None:
    run, verdict = watched["result"].run, watched["result"].verdict
    follower = RunFollower(run)
    follower.poll()
    leg = follower.picture.legs["chaos"]
    assert leg.lost_steps == sum(attempt.lost_steps for attempt in verdict.attempts)
    assert (leg.step, leg.damage, follower.picture.legs["reference"].damage) == (12, (), ())
