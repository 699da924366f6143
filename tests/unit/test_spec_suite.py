"""Suites: what a file may say, where what is wrong in it is shown, and what becomes of a drill's changes."""

from pathlib import Path

import pytest

from chaosrun.errors import SpecError, UsageError
from chaosrun.spec.source import load_job
from chaosrun.spec.suite import Expectation, load_suite, select

JOB = "name: probe\nscript: train.py\nworkers: 2\nargs: [--epochs, 3]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "suite.yaml"
    path.write_text(text)
    return path


def wrong(folder: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_suite(write(folder, text))
    return str(caught.value)


def test_changes_reach_the_job_and_can_be_said_on_the_command_line(folder: Path) -> None:
    suite = load_suite(
        write(
            folder,
            "name: all\njob: job.yaml\ndrills:\n"
            '  - {name: a, set: {workers: 3, data.resume: plain, args: [--lr, 0.10, "on", --name, "a b"], faults: {seed: 7}}}\n'
            "  - {name: b, expect: {verdict: FAIL, kind: data order}}\n",
        )
    )
    first, second = suite.drills
    assert (first.job.spec.workers, first.job.spec.data.resume, first.job.spec.faults.seed) == (3, "plain", 7)
    assert first.job.spec.args == ("--lr", "0.10", "on", "--name", "a b")
    assert load_job(first.job.path, first.overrides).spec == first.job.spec
    assert first.spec.expect == Expectation(verdict="PASS")
    assert second.overrides == () and second.job.spec.workers == 2
    assert second.spec.expect == Expectation(verdict="FAIL", kind="data order")
    assert [drill.spec.name for drill in select(suite, ["b"]).drills] == ["b"]
    with pytest.raises(UsageError, match="no drill 'c'"):
        select(suite, ["c"])


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("name: all\ndrils: []\n", "2:1", "unknown key 'drils', did you mean 'drills'?"),
        ("name: all\ndrills: []\n", "2:9", "drills"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, expct: PASS}]\n", "3:20", "did you mean 'expect'?"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, expect: PAS}]\n", "3:28", "one of PASS, FAIL, INCONCLUSIVE"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, set: {workrs: 3}}]\n", "3:26", "did you mean 'workers'?"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, set: {faults.sed: 3}}]\n", "3:33", "did you mean 'seed'?"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, set: {workers: many}}]\n", "3:35", "a whole number"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, set: [1]}]\n", "3:25", "a mapping"),
        ("name: all\ndrills: [{name: a}]\n", "2:10", "has no job file"),
        ("name: all\njob: other.yaml\ndrills: [{name: a}]\n", "2:1", "no such job file"),
        ("name: all\njob: job.yaml\ndrills: [{name: a}, {name: a}]\n", "3:1", "two drills are called 'a'"),
        ("name: all\njob: job.yaml\ndrills: [{name: a}]\ncomparison: {beyond: [b]}\n", "4:1", "'b', which is no drill"),
        ("name: all\nname: all\n", "2:1", "duplicate key"),
        ("- a\n", "1:1", "a suite holds keys and values"),
    ],
)
def test_what_is_wrong_is_shown_where_it_stands(folder: Path, text: str, place: str, message: str) -> None:
    shown = wrong(folder, text)
    assert f"suite.yaml:{place}: " in shown, shown
    assert message in shown, shown


def test_what_is_wrong_in_a_job_file_is_shown_there(folder: Path) -> None:
    (folder / "job.yaml").write_text("name: probe\nscript: train.py\nworkers: none\n")
    assert "job.yaml:3:10: " in wrong(folder, "name: all\njob: job.yaml\ndrills: [{name: a}]\n")


def test_a_suite_that_is_not_there(folder: Path) -> None:
    with pytest.raises(UsageError, match="no such suite"):
        load_suite(folder / "suit.yaml")
    with pytest.raises(UsageError, match="is a directory, not a suite"):
        load_suite(folder)
