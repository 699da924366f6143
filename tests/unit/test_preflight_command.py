"""`chaosrun preflight` on the command line: what it asks for, what it prints where, and the exit code."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from chaosrun import api, cli
from chaosrun.cluster.probing import Node
from chaosrun.preflight.conduct import Request
from chaosrun.preflight.model import Finding, Level, Status
from chaosrun.preflight.result import CheckRun, Result

NODE = Node(name="node-1", node_id="1", address="10.0.0.1", hostname="node-1", cpus=2.0, gpus=0)


def result(status: Status) -> Result:
    row = Finding(check="host", name="swap", status=status, node="node-1", measured="1", threshold="0", remedy="x", reason="y")
    run = CheckRun(name="host", about="the host", seconds=1.0)
    return Result(
        level=Level.QUICK, started_s=0.0, seconds=1.0, nodes=(NODE,), checks=(run,), findings=(row,), facts={"host": {}}
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `api.preflight` was asked; its answer is that all is well."""
    seen: list[dict[str, Any]] = []

    def preflight(request: Request, *, on_event: Any, **more: Any) -> Result:
        seen.append({"request": request, "on_event": on_event, **more})
        if on_event is not None:
            on_event({"event": "cluster.joined", "nodes": 1, "address": None})
        return result(Status.PASS)

    monkeypatch.setattr(api, "preflight", preflight)
    return seen


def test_what_is_asked_for(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    options = "--level deep --duration 2h --only bits --only=drill,host --skip network --strict --mtbf 5000h --nodes 64,512"
    files = f"--write-good-nodes {tmp_path}/good --baseline {tmp_path}/old.json --root {tmp_path} --address auto"
    assert cli.main(["preflight", "job.yaml", "workers=4", *options.split(), *files.split(), "-q"]) == 0
    (call,) = asked
    assert call["request"] == Request(
        job=Path("job.yaml"),
        overrides=("workers=4",),
        level=Level.DEEP,
        only=("bits", "drill", "host"),
        skip=("network",),
        baseline=tmp_path / "old.json",
        good_nodes=tmp_path / "good",
        strict=True,
        seconds=7200.0,
        mtbf_s=18_000_000.0,
        forecast_nodes=(64, 512),
    )
    assert (call["root"], call["address"], call["on_event"]) == (tmp_path, "auto", None)


@pytest.mark.parametrize(("output", "begins"), [("text", "FIT"), ("json", "{"), ("junit", "<?xml"), ("html", "<!")])
def test_what_is_printed(
    asked: list[dict[str, Any]], output: str, begins: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["preflight", "-o", output]) == 0
    out, err = capsys.readouterr()
    assert out.lstrip().lower().startswith(begins.lower())
    assert "only this machine is looked at" in err
    path = tmp_path / "file"
    assert cli.main(["preflight", "-o", output, "--to", str(path), "--quiet"]) == 0
    shown, err = capsys.readouterr()
    assert shown.startswith("FIT") and err == ""
    assert path.read_text() == out if output == "json" else path.read_text().lstrip().lower().startswith(begins.lower())
    if output == "json":
        assert json.loads(out)["v"] == 2


@pytest.mark.parametrize(
    ("status", "code"), [(Status.PASS, 0), (Status.WARN, 8), (Status.FAIL, 8), (Status.ERROR, 8), (Status.SKIP, 8)]
)
def test_exit_codes(status: Status, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # A warning alone shows nothing to be right; beside a PASS it does no harm (see test_preflight_engine).
    monkeypatch.setattr(api, "preflight", lambda request, **more: result(status))
    assert cli.main(["preflight", "-o", "json"]) == code
    assert json.loads(capsys.readouterr().out)["v"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["workers=4"], "workers=4 is a change to no job file"),
        (["--duration", "3h"], "--duration 3h goes with --level deep"),
        (["--nodes", "3,x"], "--nodes '3,x' is not a list of nodes"),
        (["--nodes", "0"], "--nodes '0': nodes count from 1"),
        (["--mtbf", "never"], "--mtbf 'never' must be a time"),
        (["--to", "/no/such/file"], "--to /no/such/file: there is no directory"),
        (["--only", "hots"], "--only hots: there is no such check"),
        (["--only", "cluster,hots"], "--only hots: there is no such check"),
        (["--skip", "shared storage, hots"], "--skip hots: there is no such check"),
        (["--baseline", "/no/such"], "--baseline /no/such cannot be read"),
        (["--write-good-nodes", "/no/such/file"], "--write-good-nodes /no/such/file: there is no directory"),
        (["no-such-job.yaml"], "no such job file: no-such-job.yaml"),
    ],
)
def test_wrong_usage_starts_nothing(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(*whatever: Any) -> Any:
        raise AssertionError("a Ray was started")

    monkeypatch.setattr("chaosrun.cluster.probe_pool.ProbePool.connect", connect)
    assert cli.main(["preflight", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_cluster_there(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text("of yesterday\n")
    # In a process of its own: one that is connected to a Ray goes on with that.
    chaosrun = str(Path(sys.executable).with_name("chaosrun"))
    command = [chaosrun, "preflight", "--address", "127.0.0.1:1", "--write-good-nodes", str(good)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 7 and "no Ray cluster at 127.0.0.1:1" in done.stderr
    assert not good.exists(), "nobody must take an older list for this one"


def test_a_job_gives_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import chaosrun\n")
    job = tmp_path / "job.yaml"
    job.write_text("name: x\nscript: train.py\nworkers: 1\ncheckpoint:\n  storage: there\nper_worker:\n  cpu: 2.5\n")
    settings: list[Mapping[str, Any]] = []
    connected: list[tuple[str | None, float]] = []

    class Crew:
        address = None
        nodes = everyone = ()
        lost: Mapping[str, str] = {}

        def start_agents(self) -> None: ...
        def close(self) -> None: ...

    def connect(address: str | None, *, cpus: float) -> Crew:
        connected.append((address, cpus))
        return Crew()

    def fly(engine: Any, started_s: float) -> Result:
        settings.append({"job": engine.setting.job, "storage": engine.setting.storage, "root": engine.setting.root})
        return result(Status.PASS)

    monkeypatch.setattr("chaosrun.cluster.probe_pool.ProbePool.connect", connect)
    monkeypatch.setattr("chaosrun.preflight.engine.Engine.run", fly)
    request = Request(
        job=job, overrides=["workers=3"], strict=True, level=Level.DEEP, seconds=90.0, mtbf_s=7200.0, forecast_nodes=[4]
    )
    made = api.preflight(request, root=tmp_path, address="auto")
    alone = api.preflight(root=tmp_path)
    assert (settings[0]["storage"], settings[0]["root"]) == (tmp_path / "there", tmp_path)
    assert settings[0]["job"].spec.workers == 3
    # As many CPUs as `chaosrun submit` would tell a private Ray of.
    assert connected == [("auto", 7.5), (None, 0.0)]
    assert made.arguments == (str(job), "workers=3", "--root", str(tmp_path), "--address", "auto")
    assert made.options == ("--level", "deep", "--duration", "90s", "--mtbf", "2h", "--nodes", "4")
    assert (alone.arguments, alone.options) == (("--root", str(tmp_path)), ())
    assert settings[1] == {"job": None, "storage": tmp_path, "root": tmp_path}
    assert (made.job, made.strict) == (str(job), True)
