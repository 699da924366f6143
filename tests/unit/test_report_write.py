"""Which reports a drill gets, what `chaosrun report` writes where, and that no report that fails takes the verdict with it."""

import errno
import json
import os
import re
import shlex
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, copy_run, drop, edit_journal, only, write_run

from chaosrun import cli
from chaosrun.errors import ResourcesError
from chaosrun.records.filesystem import Filesystem
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.report import write
from chaosrun.report.facts import RunFacts
from chaosrun.report.next_commands import repeat_command
from chaosrun.report.view import RunView
from chaosrun.report.write import make_report, write_reports
from chaosrun.verify.verdict import judge

ALWAYS = ["junit.xml", "report.html", "report.md"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return write_run(tmp_path_factory.mktemp("failed"), bugs=Bugs(keep_rng=False), reference_bugs=Bugs())


@pytest.fixture
def run(made: RunLayout, tmp_path: Path) -> RunLayout:
    return copy_run(made, tmp_path / "runs")


def reports(run: RunLayout) -> list[str]:
    known = {"run.json", "plan.json", "reference", "chaos"}
    return sorted(path.name for path in run.path.iterdir() if path.name not in known)


def breaking(monkeypatch: pytest.MonkeyPatch, format: str, error: Exception) -> None:
    def render(view: RunView) -> str:
        raise error

    rendered = write._rendered
    monkeypatch.setattr(write, "_rendered", lambda name, view: (render if name == format else partial(rendered, name))(view))


class TestEveryDrill:
    def test_has_three_of_them(self, run: RunLayout) -> None:
        assert write_reports(run, judge(run)) == []
        assert reports(run) == ALWAYS
        assert "<html" in run.report_html.read_text()[:200]
        assert run.report_md.read_text().startswith("## ❌ FAIL")
        assert run.junit_xml.read_text().startswith("<?xml")

    def test_a_renderer_that_crashes_is_told_as_our_bug(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        breaking(monkeypatch, "markdown", ZeroDivisionError("division by zero"))
        verdict = judge(run)
        assert write_reports(run, verdict) == [
            "report.md was not written; this is a bug in chaosrun: ZeroDivisionError: division by zero; the verdict stands, "
            f"`chaosrun report {run_argument(run)} --format markdown` says where"
        ]
        assert reports(run) == ["junit.xml", "report.html"]
        assert judge(run) == verdict
        monkeypatch.undo()
        assert write_reports(run, verdict) == []
        assert reports(run) == ALWAYS

    def test_every_report_names_what_is_damaged(self, run: RunLayout) -> None:
        verdict = judge(run)
        run.run_json.write_text("{")
        assert write_reports(run, verdict) == []
        assert reports(run) == ALWAYS
        assert "run.json is damaged" in run.junit_xml.read_text() and "run.json is damaged" in run.report_html.read_text()
        assert "run.json is damaged" in run.report_md.read_text()

    def test_records_that_are_damaged_are_reported_on(self, run: RunLayout) -> None:
        run.leg("chaos").environment.write_text("{")
        for leg, attempt in (("chaos", 2), ("reference", 1)):
            trace = run.leg(leg).attempt(attempt).trace(1)
            trace.write_bytes(trace.read_bytes()[:3000])
        run.leg("chaos").journal.write_bytes(run.leg("chaos").journal.read_bytes()[:-40] + b"\0" * 9 + b"\n{}\n")
        verdict = judge(run)
        assert verdict.status == "INCONCLUSIVE"
        assert write_reports(run, verdict) == []
        assert reports(run) == ALWAYS

    @pytest.mark.parametrize(
        ("code", "words"), [(errno.ENOSPC, "No space left on device"), (errno.EACCES, "Permission denied")]
    )
    def test_a_disk_that_takes_no_more(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> None:
        def full(self: Filesystem, path: Path, descriptor: int, data: bytes) -> None:
            raise OSError(code, words, str(path))

        verdict = judge(run)
        monkeypatch.setattr(Filesystem, "write", full)
        said = write_reports(run, verdict)
        assert [sentence.partition(" ")[0] for sentence in said] == ["report.html", "report.md", "junit.xml"]
        assert all(words in sentence and "this is a bug" not in sentence for sentence in said)
        # Nothing half-written is left.
        assert reports(run) == []

    def test_the_command_goes_on_with_the_verdict(
        self, run: RunLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from chaosrun import api

        breaking(monkeypatch, "html", KeyError("colour"))
        run.verdict_json.write_text(json.dumps(judge(run).to_json()))
        assert cli.main(["resume", str(run.path), "--quiet"]) == 3
        out, err = capsys.readouterr()
        assert re.fullmatch(rf"FAIL  {run.run_id}: RNG not restored.*\n", out)
        assert "warning: report.html was not written; this is a bug in chaosrun: KeyError: 'colour'; the verdict" in err
        assert api.resume(run).unwritten[0] in err


WRITTEN: dict[str, Callable[[RunLayout], Path]] = {
    "html": lambda run: run.report_html,
    "junit": lambda run: run.junit_xml,
    "markdown": lambda run: run.report_md,
    "text": lambda run: run.report_txt,
    "tensorboard": lambda run: run.tensorboard / "chaos",
}


class TestTheCommand:
    @pytest.mark.parametrize("format", WRITTEN)
    def test_writes_into_the_run_and_prints_where(
        self, run: RunLayout, capsys: pytest.CaptureFixture[str], format: str
    ) -> None:
        for _ in range(2):
            # 0, although the verdict is FAIL: that is the business of verify.
            assert cli.main(["report", str(run.path), "--format", format]) == 0
            (line,) = capsys.readouterr().out.splitlines()
            assert Path(line) in (WRITTEN[format](run), WRITTEN[format](run).parent)
            assert WRITTEN[format](run).exists()

    def test_json(self, run: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        place = tmp_path / "summary.md"
        assert cli.main(["report", str(run.path), "--format", "markdown", "--to", str(place), "-o", "json"]) == 0
        told = {"v": 1, "run": "run", "format": "markdown", "path": str(place), "verdict": "FAIL"}
        assert json.loads(capsys.readouterr().out) == told
        assert place.read_text().startswith("## ❌ FAIL")

    @pytest.mark.parametrize(("format", "begins"), [("markdown", "## ❌"), ("junit", "<?xml"), ("text", "run run  toy")])
    def test_to_stdout(self, run: RunLayout, capsys: pytest.CaptureFixture[str], format: str, begins: str) -> None:
        assert cli.main(["report", str(run.path), "--format", format, "--to", "-"]) == 0
        assert capsys.readouterr().out.startswith(begins)
        assert reports(run) == []

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--to", "-", "-o", "json"], "both go to stdout"),
            (["--to", "-", "--format", "tensorboard"], "a directory, not text"),
            (["--to", "--root"], "--to --root: not a path"),
            (["--to", "{run}"], "is a directory"),
            (["--to", "{run}", "--format", "tensorboard"], "is not empty"),
            (["--to", "{run}/run.json/x"], "run.json cannot be written: there is no such directory"),
            (["--to", "{run}/new/x"], "new cannot be written: there is no such directory"),
            (["--to", "{run}/new/x", "--format", "tensorboard"], "new cannot be written: there is no such directory"),
            (["--format", "pdf"], "Choose from"),
        ],
    )
    def test_wrong_usage(self, run: RunLayout, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
        before = reports(run)
        assert cli.main(["report", str(run.path), *(part.format(run=run.path) for part in arguments)]) == 2
        err = capsys.readouterr().err
        assert said in err and "\nhint: " in err and ".tmp" not in err
        assert reports(run) == before

    def test_a_pipe_is_written_into(self, run: RunLayout, tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # a pipe holds 64 KiB, more than this report is
        try:
            assert cli.main(["report", str(run.path), "--format", "markdown", "--to", str(pipe)]) == 0
            assert os.read(reader, 1 << 16).startswith("## ❌ FAIL".encode())
        finally:
            os.close(reader)
        assert stat.S_ISFIFO(pipe.lstat().st_mode)
        assert list(tmp_path.glob(".*.tmp")) == []

    @pytest.mark.parametrize("there", [True, False])
    def test_a_link_is_followed(self, run: RunLayout, tmp_path: Path, there: bool) -> None:
        link, file = tmp_path / "link.md", tmp_path / "elsewhere" / "file.md"
        file.parent.mkdir()
        link.symlink_to(file)
        if there:
            file.write_text("older, and longer than nothing")
        assert cli.main(["report", str(run.path), "--format", "markdown", "--to", str(link)]) == 0
        assert link.is_symlink()
        assert file.read_text().startswith("## ❌ FAIL")

    def test_a_link_to_an_empty_directory_is_followed(self, run: RunLayout, tmp_path: Path) -> None:
        link, folder = tmp_path / "link", tmp_path / "folder"
        folder.mkdir()
        link.symlink_to(folder)
        assert cli.main(["report", str(run.path), "--format", "tensorboard", "--to", str(link)]) == 0
        assert link.is_symlink() and (folder / "chaos").is_dir()

    def test_links_in_a_circle(self, run: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a").symlink_to(tmp_path / "b")
        (tmp_path / "b").symlink_to(tmp_path / "a")
        assert cli.main(["report", str(run.path), "--to", str(tmp_path / "a")]) == 2
        assert "a cannot be written: Too many levels of symbolic links" in capsys.readouterr().err
        assert (tmp_path / "a").is_symlink()

    def test_a_full_disk(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(self: Filesystem, path: Path, descriptor: int, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

        monkeypatch.setattr(Filesystem, "write", full)
        with pytest.raises(ResourcesError, match=r"report\.md: No space left on device"):
            make_report(run, judge(run), "markdown", None)

    @pytest.mark.parametrize("format", WRITTEN)
    def test_a_run_that_has_not_ended_or_only_begun(self, run: RunLayout, format: Any) -> None:
        edit_journal(run, "chaos", only("leg.finished", drop))
        assert make_report(run, judge(run), format, None).verdict.cause == "the chaos leg has not finished"
        assert WRITTEN[format](run).exists()
        for leg in ("reference", "chaos"):
            run.leg(leg).path.rename(run.path.parent / leg)
        assert make_report(run, judge(run), format, None).verdict.status == "INCONCLUSIVE"

    def test_what_is_no_run(self, run: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
        run.plan_json.unlink()
        assert cli.main(["report", str(run.path)]) == 2
        assert "plan.json is missing" in capsys.readouterr().err
        run.run_json.write_text("{")
        assert cli.main(["report", str(run.path)]) == 2
        assert "run.json is damaged: not JSON" in capsys.readouterr().err

    def test_text_is_what_verify_prints(self, run: RunLayout) -> None:
        text = make_report(run, judge(run), "text", "-").text or ""
        assert "blame     chaosrun's, most likely: RNG not restored" in text
        root = run.path.parent.parent
        assert text.endswith(f"repeat    chaosrun submit /job.yaml --root {root}\n") and "Checks: " in text
        assert write_reports(run, judge(run)) == []
        assert f"\nreport    {run.report_html}\n" in (make_report(run, judge(run), "text", "-").text or "")


TEXTS = ("text", "markdown", "html", "junit")


def told(run: RunLayout) -> dict[str, str]:
    verdict = judge(run)
    return {format: " ".join((make_report(run, verdict, format, "-").text or "").split()) for format in TEXTS}


def test_a_job_file_that_is_not_what_it_was_is_told_beside_the_command(run: RunLayout, tmp_path: Path) -> None:
    job, info = tmp_path / "toy.yaml", json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**info, "job": str(job)}))
    job.write_bytes(b"\xef\xbb\xbfname: toy\n")
    run.job_yaml.write_text("name: toy\n")
    assert all("own copy" not in text for text in told(run).values())
    job.write_text("name: other\n")
    for format, text in told(run).items():
        assert f"toy.yaml has changed since: the run's own copy is {run.job_yaml}" in text.replace("&#39;", "'"), format
    job.unlink()
    for format, text in told(run).items():
        assert f"toy.yaml is gone: the run's own copy is {run.job_yaml}" in text.replace("&#39;", "'"), format
    # Of a typed command line there is none, but the run's own, which a moved run names at its old place.
    run.run_json.write_text(json.dumps({**info, "job": str(job), "typed": ["train.py"]}))
    assert all("own copy" not in text and "submit train.py" in text for text in told(run).values())


def test_the_command_that_repeats_a_run_names_its_schedule_once(run: RunLayout) -> None:
    """What was injected replaces the schedule that the command named."""
    overrides, injected = ("workers=3", "faults.schedule=[{rank: 1}]"), ("faults.schedule=[{rank: 2}]",)
    command = repeat_command(run, RunFacts(job="job.yaml", overrides=overrides, injected=injected))
    assert command is not None
    assert shlex.split(command.line)[3:5] == ["workers=3", "faults.schedule=[{rank: 2}]"]


def test_injected_faults_are_not_called_planned(run: RunLayout) -> None:
    plan = json.loads(run.plan_json.read_text())
    plan["faults"][-1] |= {"source": "inject", "phase": None, "at_step": None, "after_s": 10.895}
    run.plan_json.write_text(json.dumps(plan))
    texts = told(run)
    for format in ("text", "markdown"):
        assert "Faults: 2 of 3 landed (2 planned, 1 injected)" in texts[format]
    assert "once with its faults (2, seed 0, 1 more injected)" in texts["html"]
    for format, text in texts.items():
        assert "what was injected strikes at its time after the start again, not at its step" in text, format
    found = next(check for check in judge(run).checks if check.name == "faults_landed")
    assert "1 of 3 faults (2 planned, 1 injected) cannot be shown" in found.summary
