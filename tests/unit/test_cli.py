"""The command line: what it calls, what it prints where, and the exit code it ends with."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from legs import write_run
from verdicts import PASSED

import chaosrun
from chaosrun import cli, errors
from chaosrun.api import RunResult, RunSummary
from chaosrun.errors import ResourcesError, UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.filesystem import Filesystem
from chaosrun.records.layout import RunLayout
from chaosrun.records.supervision import supervision
from chaosrun.report.landings import Landed
from chaosrun.spec.model import JobSpec

RUN_ID = "bytelm-20260102-030405"


@dataclass
class Calls:
    """A stand-in for `chaosrun.api` that answers what a test tells it to and keeps what it was asked."""

    made: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    answers: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def answer(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.made.append((name, {"args": args, **kwargs}))
            return self.answers[name](*args, **kwargs)

        return call


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path / "runs" / RUN_ID)
    layout.path.mkdir(parents=True)
    return layout


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, run: RunLayout) -> Calls:
    calls = Calls(answers={"find_run": lambda ref, root: run})
    module = ModuleType("chaosrun.api")
    names = ("submit", "resume", "verify", "plan", "list_runs", "find_run", "diagnose", "sweep", "shrink", "report")
    for name in (*names, "wait", "cancel", "inject", "landings", "wait_until"):
        setattr(module, name, calls.answer(name))
    for commands in (cli.campaigns, cli.drills, cli.runs):
        monkeypatch.setattr(commands, "api", module)
    return calls


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error

    return call


@pytest.fixture
def in_a_removed_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()


class TestErrors:
    def test_ours(self, api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
        api.answers["plan"] = raising(errors.UsageError("job.yaml does not exist", hint="give the path of a job file"))
        assert cli.main(["plan", "job.yaml"]) == 2
        out, err = capsys.readouterr()
        assert (out, err) == ("", "error: job.yaml does not exist\nhint: give the path of a job file\n")

    @pytest.mark.parametrize(
        ("kind", "code"),
        [
            (errors.UsageError, 2),
            (errors.SpecError, 2),
            (errors.RestoreMismatchError, 3),
            (errors.UserScriptError, 4),
            (errors.MisuseError, 4),
            (errors.RecoveryError, 5),
            (errors.ResourcesError, 7),
            (errors.RunTimeoutError, 124),
            (errors.InterruptedRunError, 130),
        ],
    )
    def test_exit_codes(self, api: Calls, kind: type[errors.ChaosrunError], code: int) -> None:
        api.answers["submit"] = raising(kind("no"))
        assert cli.main(["submit", "job.yaml"]) == code

    def test_the_caret_stays_where_it_is(self, api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
        message = "job.yaml:3:1: unknown key 'wrokers'\n  wrokers: 3" + " " * 90 + "#\n  ^^^^^^^"
        api.answers["plan"] = raising(errors.SpecError(message, hint="did you mean workers?"))
        cli.main(["validate", "job.yaml"])
        assert capsys.readouterr().err == f"error: {message}\nhint: did you mean workers?\n"

    @pytest.mark.parametrize("option", [["-o", "json"], ["--output", "json"], ["--output=json"], ["-ojson"]])
    def test_json(self, api: Calls, capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
        api.answers["submit"] = raising(errors.ResourcesError("no room for 3 workers", hint="ask for less"))
        assert cli.main(["submit", "job.yaml", *option]) == 7
        out, err = capsys.readouterr()
        wanted = {"kind": "ResourcesError", "message": "no room for 3 workers", "hint": "ask for less", "exit_code": 7}
        assert json.loads(out) == {"v": 1, "error": wanted}
        assert "error: no room for 3 workers" in err

    def test_a_bug(self, api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
        api.answers["verify"] = raising(ZeroDivisionError("division by zero"))
        assert cli.main(["verify", "latest", "-o", "json"]) == 1
        out, err = capsys.readouterr()
        assert "Traceback (most recent call last)" in err
        assert "this is a bug in chaosrun" in err
        assert json.loads(out)["error"]["exit_code"] == 1

    def test_a_full_disk_is_no_bug(self, api: Calls, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(OSError, match="No space left") as caught:
            Filesystem().write(tmp_path / "run.json", full.fileno(), b"{}")
        api.answers["submit"] = raising(caught.value)
        assert cli.main(["submit", "job.yaml", "--quiet"]) == 7
        assert capsys.readouterr().err.startswith(
            f"error: {tmp_path / 'run.json'} cannot be written: No space left on device\n"
        )

    @pytest.mark.parametrize("command", [["list"], ["status", "latest"], ["submit", "../train.py"], ["suite", "s.yaml"]])
    def test_a_working_directory_that_was_removed_is_no_bug(
        self, capsys: pytest.CaptureFixture[str], in_a_removed_directory: None, command: list[str]
    ) -> None:
        assert cli.main(command) == 2
        assert capsys.readouterr().err.startswith("error: the current directory no longer exists\nhint: ")

    @pytest.mark.parametrize("command", [[], ["--help"], ["--version"], ["submit", "--help"]])
    def test_help_needs_no_working_directory(
        self, capsys: pytest.CaptureFixture[str], in_a_removed_directory: None, command: list[str]
    ) -> None:
        assert cli.main(command) == 0
        assert capsys.readouterr().out

    def test_an_error_without_any_word_on_the_command_line_is_told(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cli, "app", raising(UsageError("wrong")))
        assert cli.main([]) == 2
        assert capsys.readouterr() == ("", "error: wrong\n")

    def test_interrupted(self, api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
        api.answers["submit"] = raising(KeyboardInterrupt())
        assert cli.main(["submit", "job.yaml", "--quiet"]) == 130
        assert capsys.readouterr() == ("", "error: interrupted\n")

    @pytest.mark.parametrize(
        ("tokens", "said"),
        [
            (["submit"], "nothing to drill"),
            (["submit", "job.yaml", "--rooot", "x"], "Did you mean --root?"),
            (["sumbit", "job.yaml"], 'Did you mean "submit"?'),
            (["submit", "job.yaml", "-o", "xml"], 'Choose from: "text", "json"'),
            (["logs", "latest", "--rank", "one"], "--rank"),
            (["logs", "latest", "--leg", "third"], "--leg"),
            (["verify", "latest", "surplus"], "surplus"),
            (["list", "--root"], "--root requires an argument"),
        ],
    )
    def test_wrong_usage(self, api: Calls, capsys: pytest.CaptureFixture[str], tokens: list[str], said: str) -> None:
        assert cli.main(tokens) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert said in err
        assert "--help`" in err.splitlines()[-1]
        assert api.made == []


VERDICT = replace(PASSED, status="FAIL", exit_code=3, headline="RNG not restored", lost_steps=2)


class TestCommands:
    def test_submit(self, api: Calls, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        def submit(*args: Any, on_event: Callable[[dict[str, Any]], None], **kwargs: Any) -> RunResult:
            on_event({"leg": None, "event": "run.created", "run": RUN_ID, "path": str(run.path)})
            on_event({"leg": "reference", "event": "reference.uncached", "message": "no room", "time_s": 0.0})
            return RunResult(run, VERDICT)

        api.answers["submit"] = submit
        tokens = "submit job.yaml workers=2 faults.seed=7 --root runs --address auto --reference fresh"
        assert cli.main(tokens.split()) == 3
        ((name, asked),) = api.made
        asked.pop("on_event")
        told = {"overrides": ("workers=2", "faults.seed=7"), "root": Path("runs"), "address": "auto", "reference": "fresh"}
        told |= {"early": "long"}
        assert (name, asked) == ("submit", {"args": (Path("job.yaml"),), **told})
        out, err = capsys.readouterr()
        assert out.startswith(f"run {RUN_ID}\n")
        assert "FAIL      RNG not restored\n" in out
        assert err.splitlines()[-1] == "[0:00] reference: not kept in the cache for other drills: no room"

    def test_quiet(self, api: Calls, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        """No progress; a warning all the same."""
        api.answers["submit"] = lambda *args, **kwargs: RunResult(run, VERDICT, ("report.html was not written: full",))
        assert cli.main(["submit", "job.yaml", "-q", "-o", "json"]) == 3
        assert api.made[0][1]["on_event"] is None
        out, err = capsys.readouterr()
        assert err == "warning: report.html was not written: full\n"
        assert json.loads(out) == {"v": 1, "run": RUN_ID, "path": str(run.path), "verdict": VERDICT.to_json()}

    @pytest.mark.parametrize("code", [0, 3, 4, 5, 6, 7, 124, 130])
    @pytest.mark.parametrize("command", ["resume", "verify"])
    def test_the_verdict_decides_the_exit_code(self, api: Calls, run: RunLayout, command: str, code: int) -> None:
        verdict = replace(VERDICT, exit_code=code)
        api.answers |= {"resume": lambda *args, **kwargs: RunResult(run, verdict), "verify": lambda layout: verdict}
        assert cli.main([command, "latest"]) == code
        assert api.made[0] == ("find_run", {"args": ("latest", None)})
        assert api.made[1][1]["args"] == (run,)

    @pytest.mark.parametrize("code", [0, 3, 6])
    @pytest.mark.parametrize(
        ("tokens", "asked"),
        [
            ("diagnose latest --address auto", {"address": "auto"}),
            ("shrink latest --max-drills 9", {"max_drills": 9, "early": "always", "overrides": (), "address": None}),
            (
                "shrink latest --to-the-end --from-the-beginning",
                {"max_drills": None, "early": "never", "overrides": ("verify.begin=beginning",), "address": None},
            ),
            (
                "sweep job.yaml workers=2 --steps 1,27 --only reduce --only x* --at-once 2 --keep --saves --resume x --root r",
                {
                    **{"overrides": ("workers=2",), "steps": (1, 27), "only": ["reduce", "x*"], "at_once": 2},
                    **{"keep": True, "saves": True, "resume": "x", "early": "always", "root": Path("r"), "address": None},
                },
            ),
        ],
    )
    def test_is_asked_for_and_answers_in_json(
        self, api: Calls, run: RunLayout, capsys: pytest.CaptureFixture[str], tokens: str, asked: dict[str, Any], code: int
    ) -> None:
        name = tokens.split()[0]
        api.answers[name] = lambda of, **_: SimpleNamespace(exit_code=code, to_json=lambda: {"v": 1, "exit_code": code})
        api.answers["verify"] = lambda run: VERDICT
        assert cli.main([*tokens.split(), "-q", "-o", "json"]) == code
        assert json.loads(capsys.readouterr().out) == {"v": 1, "exit_code": code}
        of = Path("job.yaml") if name == "sweep" else run
        assert (name, {"args": (of,), "on_event": None, **asked}) in api.made
        # What a diagnosis has found is in the report from then on.
        assert run.report_html.exists() == (name == "diagnose")

    def test_report(self, api: Calls, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        made = SimpleNamespace(run_id=RUN_ID, path=run.junit_xml, text=None, verdict=VERDICT)
        api.answers["report"] = lambda run, **_: made
        assert cli.main(["report", "latest", "--format", "junit", "--to", "x.xml"]) == 0
        assert capsys.readouterr().out == f"{run.junit_xml}\n"
        assert api.made[-1] == ("report", {"args": (run,), "format": "junit", "to": "x.xml"})

    @pytest.mark.parametrize(
        ("tokens", "said"),
        [
            (["sweep", "job.yaml", "--steps", "1,x"], "--steps '1,x' is not a list of steps"),
            (["sweep", "job.yaml", "--steps", "0"], "steps count from 1"),
            (["sweep", "job.yaml", "--at-once", "0"], "--at-once 0"),
            (["shrink", "latest", "--max-drills", "0"], "--max-drills 0"),
            (["wait", "latest", "--timeout", "soon"], "--timeout 'soon' must be a time"),
            (["wait", "latest", "--until", "soon"], "--until 'soon' is not a moment of a drill"),
            (["wait", "latest", "--until", "step=0"], "--until 'step=0' is not a moment"),
            (["inject", "latest", "--rank", "1", "--when", "attempt"], "--when 'attempt' is not a moment"),
            (["cancel", "latest", "--timeout", "soon"], "--timeout 'soon' must be a time"),
            (["inject", "latest", "--rank", "1", "--timeout", "soon"], "--timeout 'soon' must be a time"),
        ],
    )
    def test_numbers_that_are_none(self, api: Calls, capsys: pytest.CaptureFixture[str], tokens: list[str], said: str) -> None:
        assert cli.main(tokens) == 2
        assert said in capsys.readouterr().err
        assert {name for name, _ in api.made} <= {"find_run"}

    def test_plan_and_validate(self, api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
        spec = JobSpec.model_validate({"name": "bytelm", "script": "train.py", "workers": 3, "max_steps": 90})
        plan = FaultPlan(seed=7, faults=(Fault(id="F1", rank=1, at_step=17, source="faults.schedule[0]"),))
        api.answers["plan"] = lambda job, overrides: (SimpleNamespace(spec=spec, masked=()), plan)
        assert cli.main(["plan", "job.yaml", "workers=3"]) == 0
        assert "F1     SIGKILL rank 1 after step 17  faults.schedule[0]" in capsys.readouterr().out
        assert api.made == [("plan", {"args": (Path("job.yaml"), ("workers=3",))})]
        assert cli.main(["plan", "job.yaml", "-o", "json"]) == 0
        assert FaultPlan.from_json(json.loads(capsys.readouterr().out)["plan"]) == plan
        assert cli.main(["validate", "job.yaml"]) == 0
        said = "bytelm: 3 workers, 90 steps, a checkpoint every 50 steps, 1 fault (seed 7)"
        assert capsys.readouterr().out == f"job.yaml: valid. {said}\n"
        assert cli.main(["validate", "job.yaml", "-o", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["spec"]["workers"] == 3

    def test_list(self, api: Calls, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        summary = RunSummary(run_id=RUN_ID, name="bytelm", status="PASS", created_s=time.time(), path=run.path)
        api.answers["list_runs"] = lambda root: [summary]
        assert cli.main(["list", "--root", "x"]) == 0
        assert api.made == [("list_runs", {"args": (Path("x"),)})]
        assert RUN_ID in capsys.readouterr().out
        assert cli.main(["list", "-o", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["runs"][0]["status"] == "PASS"


class TestControl:
    ASKED: ClassVar = {
        "seed": 5,
        "faults": [{"id": name, "kind": "kill", "rank": rank, "what": "SIGKILL"} for rank, name in enumerate(("F1", "F2"))],
    }

    def test_wait_is_as_submit(self, api: Calls, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        api.answers["wait"] = lambda run, timeout_s: RunResult(run, VERDICT, ("report.html was not written",))
        assert cli.main(["wait", "latest"]) == 3
        out, err = capsys.readouterr()
        assert "RNG not restored" in out and err == "warning: report.html was not written\n"
        assert cli.main(["wait", "latest", "--timeout", "10m", "-o", "json"]) == 3
        assert json.loads(capsys.readouterr().out)["verdict"]["status"] == "FAIL"
        assert [call[1]["timeout_s"] for call in api.made if call[0] == "wait"] == [None, 600.0]

    def test_ctrl_c_ends_the_waiting_alone(self, api: Calls, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        def interrupted(run: RunLayout, **about: Any) -> RunResult:
            raise KeyboardInterrupt

        api.answers |= {"wait": interrupted, "wait_until": interrupted}
        for more in ([], ["--until", "step=4"]):
            assert cli.main(["wait", "latest", *more]) == 130
            assert f"hint: run {RUN_ID} continues; `chaosrun cancel {RUN_ID} --root " in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "asked"), [("chaos", {"attempt": 1}), ("attempt=2", {"attempt": 2}), ("step=40", {"step": 40})]
    )
    def test_wait_for_a_moment(
        self, api: Calls, run: RunLayout, text: str, asked: dict[str, int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        api.answers |= {"wait_until": lambda run, **asked: None, "inject": lambda run, **asked: self.ASKED}
        assert cli.main(["wait", "latest", "--until", text, "--timeout", "9m"]) == 0
        assert api.made[-1] == ("wait_until", {"args": (run,), **asked, "timeout_s": 540.0})
        assert cli.main(["inject", "latest", "--rank", "all", "--no-wait"]) == 0
        assert "wait_until" not in [name for name, _ in api.made[2:]]
        assert cli.main(["inject", "latest", "--rank", "all", "--no-wait", "--when", text]) == 0
        assert [name for name, _ in api.made[-2:]] == ["wait_until", "inject"] and api.made[-2][1] == {"args": (run,), **asked}

    @pytest.mark.parametrize(("text", "timeout_s"), [("0.5", 0.5), ("90", 90.0), ("500ms", 0.5)])
    def test_a_timeout_as_a_job_file_may_say_it(self, api: Calls, run: RunLayout, text: str, timeout_s: float) -> None:
        api.answers["cancel"] = lambda run, timeout_s: None
        assert cli.main(["cancel", "latest", "--timeout", text]) == 0
        assert next(about for name, about in api.made if name == "cancel")["timeout_s"] == timeout_s

    def test_cancel(self, api: Calls, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        api.answers["cancel"] = lambda run, timeout_s: None

        def cancelled() -> tuple[str, bool]:
            assert cli.main(["cancel", "latest"]) == 0
            out = capsys.readouterr().out
            assert cli.main(["cancel", "latest", "-o", "json"]) == 0
            return out, json.loads(capsys.readouterr().out)["cancelled"]

        run.run_json.write_text("{}")
        for verdict in (None, '{"outcome": "interrupted"}'):
            if verdict is not None:
                run.verdict_json.write_text(verdict)
            out, well = cancelled()
            assert well and "is cancelled" in out and f"chaosrun resume {RUN_ID}" in out
        with suppress(ResourcesError), supervision(run):
            raise ResourcesError("no space is left")
        out, well = cancelled()
        assert not well and f"run {RUN_ID} ended before it could be cancelled: no space is left\n" in out
        with supervision(run):
            run.verdict_json.write_text('{"outcome": "completed"}')
        out, well = cancelled()
        assert not well and "came to its end" in out

    @pytest.mark.parametrize(
        ("seen", "code"),
        [
            ((Landed(fault="F1", landed=True, attempt=1, rank=0), Landed(fault="F2", landed=True, attempt=1, rank=1)), 0),
            ((Landed(fault="F1", landed=True, attempt=1, rank=0), Landed(fault="F2")), 124),
            ((Landed(fault="F1", problem="the leg ended before it came"), Landed(fault="F2")), 6),
        ],
    )
    def test_inject(self, api: Calls, seen: tuple[Landed, ...], code: int, capsys: pytest.CaptureFixture[str]) -> None:
        api.answers |= {"inject": lambda run, **asked: self.ASKED, "landings": lambda run, faults, timeout_s: seen}
        arguments = ["inject", "latest", "--kind", "preempt", "--rank", "random", "--set", "grace=5s"]
        assert cli.main(arguments) == code
        out = capsys.readouterr().out
        assert "(drawn with --seed 5)" in out and all(each.sentence in out for each in seen)
        asked = next(about for name, about in api.made if name == "inject")
        assert (asked["kind"], asked["rank"], list(asked["settings"])) == ("preempt", "random", ["grace=5s"])
        assert cli.main([*arguments, "-o", "json"]) == code
        told = json.loads(capsys.readouterr().out)
        assert [(fault["id"], fault["landed"]) for fault in told["faults"]] == [(each.fault, each.landed) for each in seen]

    def test_inject_without_waiting(self, api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
        api.answers["inject"] = lambda run, **asked: self.ASKED
        assert cli.main(["inject", "latest", "--rank", "all", "--no-wait"]) == 0
        assert capsys.readouterr().out == "F1  SIGKILL\nF2  SIGKILL\n"


class TestLogs:
    @pytest.fixture(autouse=True)
    def logs(self, run: RunLayout) -> None:
        for leg, attempt, ranks in (("reference", 1, 2), ("chaos", 1, 2), ("chaos", 2, 2)):
            for rank in range(ranks):
                path = run.leg(leg).attempt(attempt).log(rank)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(f"{leg} {attempt} {rank}\n".encode())

    def test_the_last_attempt_of_the_chaos_leg_or_what_is_asked_for(
        self, api: Calls, capsys: pytest.CaptureFixture[str]
    ) -> None:
        both = "==> chaos, attempt 2, rank 0 <==\nchaos 2 0\n==> chaos, attempt 2, rank 1 <==\nchaos 2 1\n"
        for options, told in (("", both), ("--leg reference --attempt 1 --rank 1", "reference 1 1\n")):
            assert cli.main(["logs", "latest", *options.split()]) == 0
            assert capsys.readouterr().out == told
        assert cli.main(["logs", "latest", "--rank", "0", "-o", "json"]) == 0
        (log,) = json.loads(capsys.readouterr().out)["logs"]
        assert (log["leg"], log["attempt"], log["rank"], log["text"]) == ("chaos", 2, 0, "chaos 2 0\n")

    @pytest.mark.parametrize(
        ("options", "error", "hint"),
        [
            (["--attempt", "9"], "the chaos leg has no attempt 9", "it has 1, 2"),
            (["--rank", "5"], "attempt 2 of the chaos leg has no rank 5", "it has 0, 1"),
            (["--leg", "reference", "--attempt", "2"], "the reference leg has no attempt 2", "it has 1"),
        ],
    )
    def test_what_is_not_there(
        self, api: Calls, capsys: pytest.CaptureFixture[str], options: list[str], error: str, hint: str
    ) -> None:
        assert cli.main(["logs", "latest", *options]) == 2
        assert capsys.readouterr().err == f"error: {error}\nhint: {hint}\n"

    def test_bytes_that_are_no_text(self, api: Calls, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        run.leg("chaos").attempt(2).log(0).write_bytes(b"a\xffb")
        assert cli.main(["logs", "latest", "--rank", "0"]) == 0
        assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}b\n"


@pytest.mark.parametrize("arguments", [(), ("status", "-o", "json")])
def test_a_ctrl_c_while_the_command_line_is_imported_is_told_in_one_line(arguments: tuple[str, ...]) -> None:
    program = """
import runpy, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "cyclopts":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
runpy.run_module("chaosrun", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
    told = {"kind": "InterruptedRunError", "message": "interrupted", "hint": None, "exit_code": 130}
    assert (done.stdout and json.loads(done.stdout)) == ({"v": 1, "error": told} if arguments else "")


def test_status(api: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "byte"]) == 0
    assert capsys.readouterr().out == f"run {RUN_ID}\nstate       not started\n"
    assert api.made == [("find_run", {"args": ("byte", None)})]
    assert cli.main(["status", "byte", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "not started"


ENVIRON = {**os.environ, "PYTHONPATH": str(Path(chaosrun.__file__).parents[1]), "COLUMNS": "80", "PYTHONDONTWRITEBYTECODE": "1"}


def python(program: str, *arguments: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=ENVIRON, timeout=300, check=False)


def calls_of(statement: str) -> int:
    """How many functions of Python a process calls for it: on a busy machine no more than on a quiet one."""
    program = (
        "import sys\ncalls = 0\n"
        "def count(frame, event, argument):\n    global calls\n    calls += event == 'call'\n"
        f"sys.setprofile(count)\n{statement}\nsys.setprofile(None)\nprint(calls, file=sys.stderr)"
    )
    return int(python(program).stderr.splitlines()[-1])


class TestProcess:
    """What only a real process shows."""

    def test_nobody_need_listen(self, tmp_path: Path) -> None:
        command = Path(sys.executable).with_name("chaosrun")
        for arguments, code in ((f"list --root {tmp_path}", 0), (f"wait latest --root {tmp_path}", 2)):
            done = subprocess.run(f"{command} {arguments} <&- >&- 2>&-", shell=True, check=False)
            assert done.returncode == code

    def test_who_listens_to_errors_may_go(self, tmp_path: Path) -> None:
        command = [str(Path(sys.executable).with_name("chaosrun")), "wait", "latest", "--root", str(tmp_path)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(timeout=300) == 2

    @pytest.mark.parametrize("arguments", ["wait latest", "init job --template torch"])
    def test_a_disk_that_is_full_below_stderr_ends_nothing(self, tmp_path: Path, arguments: str) -> None:
        command = [str(Path(sys.executable).with_name("chaosrun")), *arguments.split()]
        with Path("/dev/full").open("wb") as full:
            ended = subprocess.run(command, cwd=tmp_path, stderr=full, timeout=300, check=False).returncode
        # `init` warns that its workflow is in no repository.
        assert ended == (2 if "wait" in arguments else 0)

    def start(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "chaosrun", *arguments]
        environ = {**ENVIRON, **environ}
        return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)

    def test_help_is_quick_and_names_every_command(self) -> None:
        done = self.start("--help")
        assert done.returncode == 0
        commands = ["submit", "resume", "plan", "validate", "verify", "list", "status", "logs", "diagnose", "sweep", "shrink"]
        assert [command for command in commands if command not in done.stdout] == []
        assert max(map(len, done.stdout.splitlines())) <= 80
        # The command line's own library, and four times that for the commands and the page.
        assert calls_of("from chaosrun import cli; cli.main(['--help'])") <= 5 * calls_of("import cyclopts")

    def test_a_terminal_without_the_character_is_no_error(self, tmp_path: Path) -> None:
        job = tmp_path / "caf\N{LATIN SMALL LETTER E WITH ACUTE}-\N{GREEK SMALL LETTER OMEGA}.yaml"
        (tmp_path / "train.py").write_text("from chaosrun import attach\n")
        job.write_text("name: x\nscript: train.py\nworkers: 1\n")
        done = self.start("validate", str(job), PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stderr) == (0, "")
        assert "caf?-?.yaml: valid" in done.stdout

    def test_version(self) -> None:
        done = self.start("--version")
        assert (done.returncode, done.stdout) == (0, f"{chaosrun.__version__}\n")

    def test_a_reader_that_leaves_is_no_error(self, tmp_path: Path) -> None:
        run = RunLayout(tmp_path / "runs" / RUN_ID)
        log = run.leg("chaos").attempt(1).log(0)
        log.parent.mkdir(parents=True)
        log.write_text("line\n" * 200_000)
        reader, writer = os.pipe()
        os.close(reader)
        program = (
            "import sys, pathlib; from chaosrun import api, cli; from chaosrun.records.layout import RunLayout;"
            "api.find_run = lambda ref, root: RunLayout(pathlib.Path(sys.argv[1]));"
            "sys.exit(cli.main(['logs', 'latest']))"
        )
        done = python(program, str(run.path), stdout=writer)
        for asked in ("--help", "--version"):
            program = f"import sys; from chaosrun import cli; sys.exit(cli.main(['{asked}']))"
            told = python(program, stdout=writer)
            assert (told.returncode, told.stderr) == (0, "")
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.parametrize(
        ("raised", "told"),
        [
            ("OSError(errno.ENOSPC, 'No space left', 'a/file')", "error: a/file cannot be written: No space left\nhint: free"),
            ("OSError(errno.EFBIG, 'File too large', 'a/file')", "error: a/file: File too large\nhint: raise the limit on"),
            ("OSError(errno.EMFILE, 'Too many open files')", "error: Too many open files\nhint: raise the limit on open"),
        ],
    )
    def test_a_full_disk_or_a_limit_is_no_bug(self, raised: str, told: str) -> None:
        program = (
            f"import errno, sys; from chaosrun import api, cli\ndef fail(*_, **__): raise {raised}\n"
            "api.list_runs = fail; sys.exit(cli.main(['list']))"
        )
        done = python(program)
        assert done.returncode == 7
        assert done.stderr.startswith(told)

    @pytest.mark.parametrize(
        "arguments",
        [
            ("validate", "{job}"),
            ("validate", "{job}", "-o", "json"),
            ("validate", "nope.yaml", "-o", "json"),
            ("schema", "suite"),
            ("export", "slurm", "{job}"),
            ("plan", "{job}", "-o", "json"),
            ("env",),
            ("completion", "bash"),
            ("list", "--root", "{root}"),
            ("status", "{run}"),
            ("status", "{run}", "-w", "-o", "json"),
            ("trace", "{run}"),
            ("logs", "{run}", "--events"),
            ("logs", "{run}", "--events", "-o", "json"),
        ],
    )
    def test_a_disk_that_takes_no_output_is_told_once(self, tmp_path: Path, arguments: tuple[str, ...]) -> None:
        job = tmp_path / "job.yaml"
        (tmp_path / "train.py").write_text("from chaosrun import attach\n")
        job.write_text("name: x\nscript: train.py\nworkers: 1\n")
        run = write_run(tmp_path).path if "{run}" in arguments else None
        program = (
            "import resource, sys; from chaosrun import cli; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
            "sys.exit(cli.main(sys.argv[1:]))"
        )
        with (tmp_path / "out").open("w") as out:
            done = python(program, *(part.format(job=job, root=tmp_path, run=run) for part in arguments), stdout=out)
        # What does nothing but print has not done it: a script would go on with the half of it.
        expected = 0 if arguments[0] == "validate" else 7
        assert done.returncode == (2 if "nope.yaml" in arguments else expected)
        assert done.stderr.count("error: stdout cannot be written: File too large\n") == 1
        assert "Traceback" not in done.stderr and "a bug" not in done.stderr
