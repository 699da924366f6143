"""Lock files and the log beside them: held by one process, looked at by all, and never what a link leads to."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from chaosrun.campaign.files import SuiteFolder, SweepFolder
from chaosrun.errors import ResourcesError, UsageError
from chaosrun.records import locks
from chaosrun.records.layout import RunLayout
from chaosrun.records.locks import is_locked, locked, open_own_file
from chaosrun.records.supervision import is_supervised
from chaosrun.supervise import remote
from chaosrun.supervise.drill import lock_run
from chaosrun.supervise.process import SupervisorProcess
from chaosrun.supervise.reference import ReferenceCache

HOLDERS: list[Callable[[Path], AbstractContextManager[Any]]] = [
    lambda path: lock_run(RunLayout(path)),
    lambda path: SweepFolder(path).locked(),
    lambda path: SuiteFolder(path).locked(),
]


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    run = RunLayout(tmp_path / "runs" / "small-1")
    run.path.mkdir(parents=True)
    return run


@pytest.mark.parametrize("hold", HOLDERS)
def test_one_holds_it(run: RunLayout, hold: Callable[[Path], AbstractContextManager[Any]]) -> None:
    with hold(run.path):
        assert run.lock.read_text() == str(os.getpid()) and is_locked(run.lock)
        with pytest.raises(UsageError, match=rf"by process {os.getpid()}\b"), hold(run.path):
            pass
    assert not is_locked(run.lock)
    with hold(run.path):
        pass


@pytest.mark.parametrize("hold", HOLDERS)
@pytest.mark.parametrize("there", [True, False])
def test_no_link_is_followed(
    run: RunLayout, tmp_path: Path, hold: Callable[[Path], AbstractContextManager[Any]], there: bool
) -> None:
    precious = tmp_path / "precious"
    if there:
        precious.write_text("precious")
    run.lock.symlink_to(precious)
    with pytest.raises(UsageError, match="is a link"), hold(run.path):
        pass
    assert not is_supervised(run) and remote.unsupervised(run, 0.0)
    assert precious.read_text() == "precious" if there else not precious.exists()


def test_nor_by_the_cache_of_references(tmp_path: Path) -> None:
    (tmp_path / "references").mkdir()
    (tmp_path / "references" / ".lock").symlink_to(tmp_path / "made")
    with pytest.raises(UsageError, match="is a link"), ReferenceCache(tmp_path).locked():
        pass
    assert not (tmp_path / "made").exists()


def test_nor_for_what_a_supervisor_says(run: RunLayout, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    run.supervisor_log.symlink_to(tmp_path / "precious")
    with pytest.raises(UsageError, match="is a link"):
        SupervisorProcess.tied(run, None, program="chaosrun.cli.supervisor")
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file(run: RunLayout, make: Callable[[Path], None]) -> None:
    make(run.lock)
    with pytest.raises(UsageError, match="no regular file"), lock_run(run):
        pass
    assert not is_supervised(run)


def test_a_run_that_is_removed_meanwhile(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is opened while the run is there, and got when it is not: nobody goes on with a ghost."""

    def late(path: Path, flags: int) -> int:
        descriptor = open_own_file(path, flags)
        run.path.rename(run.path.with_name("gone"))
        return descriptor

    with monkeypatch.context() as patched:
        patched.setattr(locks, "open_own_file", late)
        with pytest.raises(UsageError, match="no longer exists"), lock_run(run):
            pass
    with pytest.raises(UsageError, match="no longer exists"), lock_run(run):
        pass
    assert not run.path.exists()


def test_a_full_disk(run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(locks.os, "pwrite", full)
        with lock_run(run):
            assert is_supervised(run)
    monkeypatch.setattr(locks.os, "open", full)
    with pytest.raises(ResourcesError, match="No space left"), lock_run(run):
        pass


LOOK = """\
import os, sys
from pathlib import Path
from chaosrun.records.layout import RunLayout
from chaosrun.records.supervision import is_supervised
from chaosrun.supervise.drill import lock_run
from chaosrun.errors import UsageError
from chaosrun.supervise import remote
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
run = RunLayout(Path(sys.argv[1]))
print(is_supervised(run), remote.unsupervised(run, 0.05))
try:
    lock_run(run).__enter__()
except UsageError as error:
    print(error.message)
"""


@pytest.fixture
def anothers() -> Iterator[RunLayout]:
    """A run that another process may read but not write, as another user."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunLayout(Path(folder) / "runs" / "small-1")
        run.path.mkdir(parents=True)
        run.lock.touch()
        os.chmod(folder, 0o755)
        for path in (run.lock, run.path, run.path.parent):
            path.chmod(0o555)
        yield run
        for path in (run.path.parent, run.path, run.lock):
            path.chmod(0o755)


def look(run: RunLayout) -> list[str]:
    command = [sys.executable, "-c", LOOK, str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("mode", [0o444, 0])
def test_to_look_needs_no_permission_to_write(anothers: RunLayout, mode: int) -> None:
    anothers.lock.chmod(mode)
    assert look(anothers) == ["False True", f"{anothers.lock} cannot be written: Permission denied"]


def test_it_is_seen_that_another_user_holds_it(anothers: RunLayout) -> None:
    anothers.lock.chmod(0o644)
    with locked(anothers.lock, "held"):
        assert look(anothers)[0] == "True False"
