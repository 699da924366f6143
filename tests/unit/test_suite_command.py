"""`chaosrun suite` as far as it needs no Ray: what it would run, and what it refuses before anything starts."""

import io
import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from suites import write_suite

from chaosrun import cli
from chaosrun.campaign.results import DrillResult
from chaosrun.campaign.suite_run import SuiteRun
from chaosrun.errors import InterruptedRunError
from chaosrun.report.ticker import DrillsTicker
from tests.terminal import Grid

SUITE = "name: toys\njob: job.yaml\nmatrix: {workers: [1, 2], faults: [spot, torture]}\ndrills:\n  - {name: a}\n  - {name: b}\n"


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_suite(tmp_path, SUITE)


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(["suite", "toys.yaml", "--list", "-o", "json", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    told = json.loads(out)
    assert told["v"] == 1
    return [drill["name"] for drill in told["drills"]]


def test_what_would_run(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["suite", "toys.yaml", "--list", "--seed", "20261121"]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("suite toys: 8 drills, ") and "seed 20261121" in out and "a[workers=" in out
    everything = listed(capsys)
    assert len(everything) == 8
    assert listed(capsys, "--only", "b", "--except", "*faults=spot]") == [
        "b[workers=1,faults=torture]",
        "b[workers=2,faults=torture]",
    ]
    parts = [name for number in (1, 2, 3) for name in listed(capsys, "--shard", f"{number}/3")]
    assert sorted(parts) == sorted(everything)
    assert not (suite.parent / ".chaosrun").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "c"], "--only: no drill 'c'"),
        (["--shard", "3/2"], "--shard '3/2' is not a shard"),
        (["--seed", "yesterday"], "--seed 'yesterday' is not a seed"),
        (["--at-once", "0"], "--at-once 0 is not a number of drills"),
        (["--fail-fast", "--keep-going"], "exclude each other"),
        (["--junit", "new/x.xml"], "--junit new/x.xml: there is no directory new"),
        (["--markdown", "new/x.md"], "--markdown new/x.md: there is no directory new"),
        (["--history", "new/x.jsonl"], "--history new/x.jsonl: there is no directory new"),
        (["--junit", "."], "--junit . cannot be written"),
        (["--markdown", "."], "--markdown . cannot be written"),
        (["--history", "."], "--history . cannot be written"),
        (["--resume", "latest"], "no suite 'latest'"),
        (["--resume", "x", "--seed", "3"], "continues as it began"),
    ],
)
def test_what_is_refused(suite: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert cli.main(["suite", "toys.yaml", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and "hint: " in err
    assert not (suite.parent / ".chaosrun").exists()


def test_a_drill_that_cannot_be_planned_stops_everything(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite.write_text(SUITE + "  - {name: c, set: {max_steps: null}}\n")
    assert cli.main(["suite", "toys.yaml"]) == 2
    err = capsys.readouterr().err
    assert "toys.yaml:7:5: drill 'c[workers=1,faults=spot]' cannot be planned" in err
    assert not (suite.parent / ".chaosrun" / "suites").exists()


def test_progress_is_a_line_a_drill(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    ticker = DrillsTicker(stream, terminal=False)
    about = {"leg": None, "of": 2}
    ticker.on_event({**about, "event": "suite.started", "suite": "toys-1", "seed": 7})
    ticker.on_event({**about, "event": "drill.began", "drill": "a"})
    ticker.on_event({**about, "event": "drill.at", "drill": "a", "of_leg": "chaos", "attempt": 2})
    ticker.on_event({**about, "event": "drill.began", "drill": "b"})
    ticker.on_event({**about, "event": "drill.began", "drill": "c"})
    ticker.on_event({**about, "event": "drill.left", "drill": "a"})
    ticker.on_event({**about, "event": "suite.ended", "name": "a", "number": 1, "status": "FAIL", "ok": True, "cause": ""})
    ticker.on_event(
        {**about, "event": "suite.ended", "name": "b", "number": 2, "status": None, "ok": False, "cause": "no room"}
    )
    ended = {**about, "event": "suite.ended", "name": "c", "number": 3, "status": None, "ok": False}
    ticker.on_event({**ended, "cancelled": True, "cause": "it was cancelled"})
    lines = [line.partition("] ")[2] for line in stream.getvalue().splitlines()]
    assert lines == [
        "suite toys-1: 2 drills, seed 7",
        "a begins",
        "b begins, beside a",
        "c begins, beside a, b",
        "1/2 a: FAIL",
        "2/2 b: not run, not as expected: no room",
        "3/2 c: cancelled, not as expected: it was cancelled",
    ]


def test_a_terminal_shows_the_drills_under_way_below_what_ended() -> None:
    stream, now_s = io.StringIO(), 0.0

    def grid() -> list[str]:
        text = Grid(40, 6).feed(stream.getvalue().replace("\n", "\r\n")).text
        return [line for line in text.split("\n") if line]

    def shown() -> list[str]:
        assert ticker.live is not None
        ticker.live.refresh()
        return grid()

    with DrillsTicker(stream, terminal=True, now_s=lambda: now_s, size=lambda _: (40, 6)) as ticker:
        for drill in ("forward@7/rank0", "a"):
            ticker.on_event({"event": "drill.began", "drill": drill})
        ticker.on_event({"event": "drill.at", "drill": "a", "of_leg": "chaos", "attempt": 2})
        now_s = 4.2
        assert shown() == ["2 drills under way", "forward@7/rank0   4.2 s  begins", "a                 4.2 s  chaos, attemp…"]
        ticker.on_event({"event": "drill.left", "drill": "forward@7/rank0"})
        ticker.on_event({"event": "sweep.tried", "number": 1, "of": 9, "point": "forward@7/rank0", "status": "PASS"})
        assert shown() == ["[0:04] 1/9 forward@7/rank0: PASS", "1 drill under way", "a   4.2 s  chaos, attempt 2"]
        for number in range(9):  # more than the terminal has rows
            ticker.on_event({"event": "drill.began", "drill": str(number)})
        assert shown()[1:3] == ["10 drills under way", "a   4.2 s  chaos, attempt 2"] and len(shown()) == 6
    # What is under way is gone from the terminal, what ended stays.
    assert grid() == ["[0:04] 1/9 forward@7/rank0: PASS"]


def test_a_suite_that_is_cut_short_hands_out_what_had_ended(
    suite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def carry_out(run: SuiteRun, *_: object, **__: object) -> None:
        drill = run.plan.drills[0]
        run.keep(drill, DrillResult(name=drill.name, run=None, status="PASS", expected="PASS"))
        raise InterruptedRunError("interrupted, 1 of 8 drills done", hint="go on")

    monkeypatch.setattr("chaosrun.campaign.suite_run.one_ray", lambda *_: nullcontext())
    monkeypatch.setattr(SuiteRun, "carry_out", carry_out)
    arguments = ["suite", "toys.yaml", "--quiet", "--junit", "j.xml", "--markdown", "s.md"]
    assert cli.main(arguments) == 130
    out, err = capsys.readouterr()
    assert (
        re.fullmatch(r"CUT SHORT  toys \S+: 1 drill, 7 not ended, .*\n", out)
        and err == "error: interrupted, 1 of 8 drills done\nhint: go on\n"
    )
    assert 'type="cut short"' in Path("j.xml").read_text() and "cut short" in Path("s.md").read_text()
    (folder,) = Path(".chaosrun/suites").glob("toys-*")
    assert {"index.html", "suite.junit.xml", "summary.md"} <= {path.name for path in folder.iterdir()}
    # For programs the error is the only value.
    assert cli.main([*arguments, "-o", "json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 130
