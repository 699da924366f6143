"""How commands in hints name a run: so that they find it from where the user is."""

import shlex
from pathlib import Path

import pytest

from chaosrun.errors import InterruptedRunError, UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import root_arguments, run_argument
from chaosrun.report.logs import select_logs
from chaosrun.supervise.drill import lock_run
from chaosrun.supervise.find_runs import find_run
from chaosrun.supervise.interrupts import Interrupts


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CHAOSRUN_ROOT", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("root", "named"),
    [
        (".chaosrun", "x-1"),
        ("elsewhere", "x-1 --root elsewhere"),
        ("else where", "x-1 --root 'else where'"),
        ("/data/runs", "x-1 --root /data/runs"),
    ],
)
def test_the_root_is_named_where_it_is_not_the_usual_one(root: str, named: str, here: Path) -> None:
    assert run_argument(RunLayout(Path(root) / "runs" / "x-1")) == named
    assert run_argument(RunLayout(here / root / "runs" / "x-1")) == named


def test_the_usual_root_is_that_of_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAOSRUN_ROOT", str(here / "mine"))
    assert root_arguments(Path("mine")) == ()
    assert root_arguments(Path(".chaosrun")) == ("--root", ".chaosrun")


def test_a_run_under_no_root_is_named_by_its_path() -> None:
    assert run_argument(RunLayout(Path("copied/x 1"))) == "'copied/x 1'"


def test_the_named_run_is_the_one_that_is_found(here: Path) -> None:
    run = RunLayout(here / "elsewhere" / "runs" / "x-1")
    run.path.mkdir(parents=True)
    run.run_json.write_text("{}")
    name, option, root = shlex.split(run_argument(run))
    assert option == "--root"
    assert find_run(name, Path(root)).path.resolve() == run.path


def test_hints_say_it(here: Path) -> None:
    run = RunLayout(here / "elsewhere" / "runs" / "x-1")
    run.path.mkdir(parents=True)
    with pytest.raises(UsageError) as told:
        find_run("y", here / "elsewhere")
    assert "`chaosrun list --root elsewhere`" in (told.value.hint or "")
    with pytest.raises(UsageError) as told:
        select_logs(run, leg="chaos", attempt=None, rank=None)
    assert "`chaosrun status x-1 --root elsewhere`" in (told.value.hint or "")
    with pytest.raises(UsageError) as told, lock_run(run), lock_run(run):
        pass
    assert told.value.hint == "chaosrun status x-1 --root elsewhere"
    with pytest.raises(InterruptedRunError) as interrupted, Interrupts() as interrupts:
        interrupts.check(run)
        raise KeyboardInterrupt
    assert "`chaosrun resume x-1 --root elsewhere`" in (interrupted.value.hint or "")


def test_no_hint_leaves_the_root_out() -> None:
    """The control over the code: a command about a run is spelled with `run_argument`, nowhere with its id alone."""
    import re

    package = Path(__file__).parents[2] / "chaosrun"
    bare = re.compile(
        r"chaosrun (resume|status|logs|verify|diagnose|shrink|cancel|wait|inject|report) \{[^}]*run(\.run_id|_id)\}"
    )
    found = [f"{path.name}: {match[0]}" for path in package.rglob("*.py") for match in bare.finditer(path.read_text())]
    assert not found
