"""The agent that runs probes: real processes, without a Ray."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chaosrun.cluster.probe_agent import ProbeAgent
from chaosrun.cluster.probing import Call, ProbeOutcome
from chaosrun.processes import children, identify, is_alive, marked
from tests.conftest import REPOSITORY

STRANGE_PROBE = "chaosrun.preflight.probes.strange"
STRANGE = {"PYTHONPATH": str(REPOSITORY / "tests" / "integration" / "faulty" / "strange_probes")}
LONG_S = 300.0


def strange(limit_s: float = LONG_S, **parameters: Any) -> Call:
    return Call(probe=STRANGE_PROBE, parameters=parameters, limit_s=limit_s, env=STRANGE)


def run(limit_s: float = LONG_S, **parameters: Any) -> ProbeOutcome:
    told = asyncio.run(ProbeAgent("test-of-the-agent").probe(strange(limit_s, **parameters)))
    assert not marked("test-of-the-agent")
    return told


def gone(path: Path) -> bool:
    identity = identify(int(path.read_text()))
    return identity is None or not is_alive(identity)


def test_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TEST", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    told = run(do="answer", leave=str(tmp_path / "pid"), bytes=1 << 20, variable="CHAOSRUN_SESSION")
    assert (told.ended, told.error) == ("done", "")
    assert len((told.facts or {})["filler"]) == 1 << 20
    assert sorted((told.facts or {})["environment"]) == ["CHAOSRUN_SESSION", "RAY_AUTH_MODE"]
    assert gone(tmp_path / "pid")


@pytest.mark.parametrize(
    ("do", "ended", "error"),
    [
        ("raise", "raised", "OSError: it went wrong"),
        ("die", "died", "its process was killed by SIGSEGV: about to die"),
        ("leave", "died", "its process ended with exit code 3 and no answer: printed by a library"),
    ],
)
def test_no_answer(do: str, ended: str, error: str, tmp_path: Path) -> None:
    told = run(do=do, leave=str(tmp_path / "pid"))
    assert (told.facts, told.ended, told.error) == (None, ended, error)
    assert gone(tmp_path / "pid")


def test_a_limit(tmp_path: Path) -> None:
    told = run(3.0, do="hang", leave=str(tmp_path / "pid"))
    assert (told.ended, told.error) == ("limit", "no answer within 3 s: printed by a library")
    assert gone(tmp_path / "pid")


def test_a_probe_that_there_is_none_of() -> None:
    told = asyncio.run(ProbeAgent("x").probe(Call(probe="chaosrun.preflight.probes.no_such_probe", limit_s=LONG_S)))
    assert told.ended == "raised" and "no_such_probe" in told.error


def until(path: Path) -> None:
    while not path.exists() or not path.read_text():
        time.sleep(0.01)


@pytest.mark.parametrize("victim", ["agent stops", "guard is killed"])
def test_what_ends_a_probe_before_its_time(victim: str, tmp_path: Path) -> None:
    path, agent = tmp_path / "pid", ProbeAgent("test-of-the-agent")

    async def both() -> ProbeOutcome:
        task = asyncio.create_task(agent.probe(strange(do="hang", leave=str(path))))
        await asyncio.to_thread(until, path)
        if victim == "agent stops":
            await agent.stop()
        else:
            (guard,) = [
                pid for pid in children(os.getpid()) if b"cluster.probe_guard" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            os.kill(guard, 9)
        return await task

    told = asyncio.run(both())
    assert told.ended == "died" and told.facts is None
    assert not marked("test-of-the-agent") and (victim != "agent stops" or gone(path))
    if not gone(path):
        # Alone it is beyond reach: `env={}` took the mark from it, and the guard that would have found it is dead.
        os.kill(int(path.read_text()), 9)


def test_an_agent_that_is_killed_takes_its_probes_along(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    program = (
        "import asyncio; from chaosrun.cluster.probe_agent import Call, ProbeAgent\n"
        f"asyncio.run(ProbeAgent('x').probe({strange(do='hang', leave=str(path))!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    until(path)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 120
    while not gone(path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(path)


def test_an_agent_that_has_stopped_begins_nothing() -> None:
    async def late() -> ProbeOutcome:
        agent = ProbeAgent("x")
        await agent.stop()
        return await agent.probe(strange(do="answer"))

    assert asyncio.run(late()).ended == "died"
