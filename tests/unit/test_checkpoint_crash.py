"""Nothing is lost: the store and the journal are cut short at every single operation, and by SIGKILL at random microseconds.

Three ways of dying: a model of a disk that loses what was not synced (`powercut`), the system calls of a real process (strace),
and SIGKILL out of the blue. After each the newest committed checkpoint loads and is never torn, what a commit returned from is
there, and there is a valid one at all times after the first.
"""

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.errors import InvalidCheckpointError
from chaosrun.records.filesystem import Filesystem, Operation
from chaosrun.records.journal import Journal
from chaosrun.records.layout import LegLayout, checkpoint_name
from tests.records import manifest_of, read_lines
from tests.unit.events import event
from tests.unit.powercut import RecordingDisk, after_power_cut, build

KEEP = 2


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """Where a sync costs next to nothing, so that a kill falls as often between any two operations as into one."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="chaosrun-test-") as folder:
        yield Path(folder)


def files_of(step: int) -> dict[str, bytes]:
    return {"model.safetensors": bytes([step % 251]) * 700, "rng/rank-0.bin": b"dice %d" % step, "empty.bin": b""}


def write_plainly(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def save(store: CheckpointStore, step: int, attempt: int = 1, put: Callable[[Path, bytes], None] = write_plainly) -> None:
    staging = store.stage(step, attempt)
    for name, data in files_of(step).items():
        put(staging / name, data)
    sealed = store.seal(staging, files_of(step))
    store.write_manifest(staging, manifest_of(step, attempt=attempt, files=sealed))
    store.commit(staging, step)


class NotSynced(Filesystem):
    """For what is not to survive anything."""

    def sync(self, path: Path, descriptor: int) -> None:
        pass


def expect_sound(layout: LegLayout, promised: int, damaged: tuple[int, ...] = ()) -> int:
    """What every crash has to leave: step `promised` or a newer one, whole; none torn but those that were `damaged`; and a
    store that goes on. Returns the step that a restart would go on from, 0 for the beginning."""
    store = CheckpointStore(layout, KEEP, NotSynced())
    store.clear_staging()
    selection = store.newest_valid()
    torn = [item for item in selection.quarantined if item.step not in damaged]
    assert not torn, f"torn: {torn}"
    step = selection.manifest.step if selection.manifest else 0
    assert step >= promised, f"the checkpoint of step {promised} had been committed, step {step} is the newest now"
    for name in os.listdir(layout.checkpoints) if layout.checkpoints.exists() else []:
        try:
            found = store.audit(name)
        except InvalidCheckpointError as error:
            pytest.fail(f"torn: {error.message}")
        assert (layout.checkpoints / name / "model.safetensors").read_bytes() == files_of(found.step)["model.safetensors"]
    save(store, step + 1, attempt=99)
    store.retain()
    assert store.newest_valid().name == checkpoint_name(step + 1)
    assert os.listdir(layout.staging) == []
    return step


# A disk that loses what was not synced


class History:
    """What a scenario does, and what it may rely on after each operation."""

    def __init__(self, root: Path, disk: type[RecordingDisk] = RecordingDisk) -> None:
        self.layout = LegLayout(root / "run" / "leg")
        self.disk = disk(root)
        self.promised = 0
        self.damaged: tuple[int, ...] = ()
        self.restart()

    def restart(self) -> None:
        """A new process, which knows nothing of what the one before it did."""
        self.store = CheckpointStore(self.layout, KEEP, self.disk)

    def save(self, *steps: int, attempt: int = 1) -> None:
        for step in steps:
            save(self.store, step, attempt, self.disk.put)
            self.promised = max(self.promised, step)
            self.store.retain()

    def damage(self, step: int) -> None:
        """Cut a file of a committed checkpoint off, for good."""
        path = self.layout.checkpoints / checkpoint_name(step) / "model.safetensors"
        self.damaged = (*self.damaged, step)
        self.promised = 0
        os.truncate(path, 3)
        self.disk.truncate(path, 3)
        with path.open("rb") as file:
            self.disk.sync(path, file.fileno())


def first_ones(history: History) -> None:
    history.save(10, 20)


def retention(history: History) -> None:
    history.save(10, 20, 30, 40)


def superseding(history: History) -> None:
    history.save(10)
    history.save(10, attempt=2)


def superseding_the_newest_of_three(history: History) -> None:
    history.save(10, 20, 30)
    history.restart()
    history.save(30, attempt=2)


def damage_found(history: History) -> None:
    history.save(10, 20)
    history.damage(20)
    history.promised = 10
    history.restart()
    assert history.store.newest_valid().name == checkpoint_name(10)
    history.save(20, attempt=2)


def a_damaged_successor(history: History) -> None:
    history.save(10)
    history.save(10, attempt=2)
    history.damage(10)
    # The superseded one comes back.
    history.restart()
    selection = history.store.newest_valid()
    assert selection.manifest is not None and selection.manifest.attempt == 1
    history.promised = 10
    history.save(20, attempt=3)


def a_folder_left_half_written(history: History) -> None:
    history.save(10)
    history.disk.put(history.store.stage(20, 1) / "model.safetensors", b"half")
    history.restart()
    history.store.clear_staging()
    history.save(20, attempt=2)


SCENARIOS = [
    *(first_ones, retention, superseding, superseding_the_newest_of_three),
    *(damage_found, a_damaged_successor, a_folder_left_half_written),
]


def power_cuts(scenario: Callable[[History], None], folder: Path, disk: type[RecordingDisk], fates: int) -> tuple[int, int]:
    """Cut the power after each operation of a scenario: so that nothing is lost, all that was not synced, and any part of it,
    `fates` times. Returns the number of operations, and in how many states the disk was found."""
    history = History(folder / "live", disk)
    history.disk.root.mkdir()
    found: set[Hashable] = set()
    random, operations = Random(scenario.__name__), itertools.count()

    def cut() -> None:
        next(operations)
        for fate in (True, False, *[random] * fates):
            state = after_power_cut(history.disk.model, fate)
            key = (frozenset(state.items()), history.promised, history.damaged)
            if key not in found:
                found.add(key)
                into = folder / f"cut-{len(found)}"
                build(state, into)
                expect_sound(LegLayout(into / "run" / "leg"), history.promised, history.damaged)
                shutil.rmtree(into)

    history.disk.on_operation = cut
    scenario(history)
    expect_sound(history.layout, history.promised, history.damaged)
    return next(operations), len(found)


@pytest.mark.parametrize(("fates", "more"), [(16, 1), pytest.param(300, 4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_power_cut_after_any_operation_loses_nothing_committed(
    quick_disk: Path, scenario: Callable[[History], None], fates: int, more: int
) -> None:
    operations, states = power_cuts(scenario, quick_disk, RecordingDisk, fates)
    assert operations > 40 and states > more * operations


class NeverSyncsFiles(RecordingDisk):
    def sync(self, path: Path, descriptor: int) -> None:
        if path.is_dir():
            super().sync(path, descriptor)


class NeverSyncsDirectories(RecordingDisk):
    def sync(self, path: Path, descriptor: int) -> None:
        if not path.is_dir():
            super().sync(path, descriptor)


class NeverSyncsTheCheckpointsItself(RecordingDisk):
    def sync(self, path: Path, descriptor: int) -> None:
        if path.parent.name != "staging":
            super().sync(path, descriptor)


class DeletesBeforeItRenames(RecordingDisk):
    """Retention that takes the files of a checkpoint while it stands in its place."""

    def rename(self, path: Path, target: Path) -> None:
        if ".deleted-" in target.name:
            for file in sorted(path.iterdir()):
                self.remove(file)
        super().rename(path, target)


@pytest.mark.parametrize(
    ("disk", "scenario"),
    [
        (NeverSyncsFiles, first_ones),
        (NeverSyncsDirectories, first_ones),
        (NeverSyncsTheCheckpointsItself, first_ones),
        (DeletesBeforeItRenames, retention),
    ],
)
def test_a_store_that_is_less_careful_is_caught(
    quick_disk: Path, disk: type[RecordingDisk], scenario: Callable[[History], None]
) -> None:
    with pytest.raises(
        (AssertionError, pytest.fail.Exception), match=r"^(torn: |the checkpoint of step \d+ had been committed)"
    ):
        power_cuts(scenario, quick_disk, disk, fates=2)


class KilledError(Exception):
    pass


def test_a_process_killed_anywhere_leaves_no_directory_that_a_power_cut_takes_later(quick_disk: Path) -> None:
    """Whoever made a directory may be gone before it was synced: the next one must not take its entry for granted."""
    for last in itertools.count():
        history = History(quick_disk / f"live-{last}")
        history.disk.root.mkdir()
        left = itertools.count(last, -1)

        def kill(left: Iterator[int] = left) -> None:
            if next(left) == 0:
                raise KilledError

        history.disk.on_operation = kill
        killed = False
        try:
            history.save(10)
        except KilledError:
            killed = True
        history.disk.on_operation = lambda: None
        history.restart()
        history.store.clear_staging()
        history.store.newest_valid()
        history.save(20, attempt=2)
        into = quick_disk / f"cut-{last}"
        build(after_power_cut(history.disk.model, False), into)
        assert expect_sound(LegLayout(into / "run" / "leg"), promised=20) == 20
        if not killed:
            assert last > 15
            return


# The journal


def journal_problems(path: Path, promised: int) -> str | None:
    records = list(read_lines(path)) if path.exists() else []
    numbers = [record["seq"] for record in records]
    if numbers != list(range(1, len(numbers) + 1)):
        return f"seq goes {numbers}"
    return None if len(numbers) >= promised else f"{promised} records were durable, {len(numbers)} are there"


def journal_cuts(folder: Path, disk: type[RecordingDisk], fates: int) -> int:
    cuts, random = itertools.count(), Random(1)
    root = folder / "live"
    root.mkdir()
    recording = disk(root)
    promised = 0

    def cut() -> None:
        for fate in (True, False, *[random] * fates):
            into = folder / f"cut-{next(cuts)}"
            build(after_power_cut(recording.model, fate), into)
            again = Journal(into / "run" / "leg" / "journal.jsonl", disk=NotSynced())
            again.append(event("supervisor.resumed", supervisor_pid=2))
            again.close()
            assert (problem := journal_problems(into / "run" / "leg" / "journal.jsonl", promised + 1)) is None, problem
            shutil.rmtree(into)

    recording.on_operation = cut
    written = 0
    for part in range(3):
        journal = Journal(root / "run" / "leg" / "journal.jsonl", disk=recording)
        for number in range(6):
            durable = number % 3 == 2
            journal.append(event("attempt.stopped", attempt=number + 1, reason="x" * 40 * part), durable=durable)
            written += 1
            promised = written if durable else promised
        journal.close()
    return next(cuts)


def test_the_journal_survives_a_power_cut_after_any_operation(quick_disk: Path) -> None:
    assert journal_cuts(quick_disk, RecordingDisk, fates=16) > 300


@pytest.mark.parametrize("disk", [NeverSyncsFiles, NeverSyncsDirectories])
def test_a_journal_that_is_less_careful_is_caught(quick_disk: Path, disk: type[RecordingDisk]) -> None:
    with pytest.raises(AssertionError, match="records were durable"):
        journal_cuts(quick_disk, disk, fates=2)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel takes part of a write that crosses the limit, and refuses the next one: as a disk does that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [100, 333, 1000])
def test_a_disk_that_fills_up_takes_no_part_of_a_record(tmp_path: Path, size: int) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    with file_size_limit(size), pytest.raises(OSError, match="File too large"):
        for number in itertools.count():
            journal.append(event("worker.exited", rank=number))
    said = len(list(read_lines(path)))
    assert path.read_bytes().endswith(b"\n") or said == 0
    journal.append(event("attempt.stopped", attempt=1))
    journal.close()
    assert journal_problems(path, said + 1) is None
    assert said + 1 == len(path.read_bytes().splitlines())


def test_a_small_file_is_whole_or_absent_after_a_power_cut(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    disk = RecordingDisk(tmp_path / "live")
    written: set[bytes] = set()
    random = Random(1)

    def cut() -> None:
        for fate in (True, False, *[random] * 10):
            assert after_power_cut(disk.model, fate).get(Path("verdict.json"), b"") in {newest, *written}

    disk.on_operation = cut
    newest = b""
    for number in range(3):
        newest, before = json.dumps({"number": number, "filler": "x" * 300}).encode(), newest
        written = {before}
        disk.write_durably(tmp_path / "live" / "verdict.json", newest)
        # It has returned: the former one does not come back.
        written = set()
        cut()


# Real processes


def keep_saving(layout: LegLayout, journal_path: Path, told: int) -> None:
    """What a supervisor and a worker do between them, over and over; each commit is told once it has returned."""
    journal = Journal(journal_path)
    store = CheckpointStore(layout, KEEP)
    store.clear_staging()
    selection = store.newest_valid()
    assert selection.quarantined == (), selection.quarantined
    step = selection.manifest.step if selection.manifest else 0
    journal.append(event("attempt.starting", resume_step=step))
    os.write(told, b"started\n")
    while True:
        step += 1
        save(store, step)
        os.write(told, b"%d\n" % step)
        store.retain()
        journal.append(event("worker.exited", rank=step), durable=step % 2 == 0)


def killed_at(words: int, delay_s: float, layout: LegLayout, journal_path: Path) -> list[bytes]:
    """Let it tell so many words, then go on for `delay_s`, and kill it; returns what it had told until then."""
    hearing, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            keep_saving(layout, journal_path, told)
        finally:
            os._exit(1)  # only reached by an error: it goes on until it is killed
    os.close(told)
    with open(hearing, "rb") as heard:
        said = [heard.readline() for _ in range(words)]
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        said += heard.readlines()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    return [word.strip() for word in said]


def survive(kills: int, folder: Path, seed: int) -> tuple[int, int]:
    """Kill that often; returns how many kills left something in staging, and the step that was reached."""
    layout, journal_path = LegLayout(folder / "leg"), folder / "leg" / "journal.jsonl"
    random, committed, interrupted = Random(seed), 0, 0
    for number in itertools.count():
        # On a busy machine it may not have had its turn yet when it is killed: then some more, and a little later.
        if number >= kills and (interrupted > kills // 10 or number == 20 * kills):
            break
        longest_s = 0.002 * (1 + number // kills)
        said = killed_at(random.randrange(4), random.uniform(0, longest_s), layout, journal_path)
        committed = max([committed, *(int(word) for word in said if word.isdigit())])
        interrupted += bool(layout.staging.exists() and os.listdir(layout.staging))
        where = f"kill {number} of seed {seed}, {said}"
        store = CheckpointStore(layout, KEEP)
        selection = store.newest_valid()
        assert selection.quarantined == (), where
        newest = selection.manifest.step if selection.manifest else 0
        # It may have been committed and not told.
        assert newest in (committed, committed + 1), where
        committed = newest
        if newest > 1:
            assert len([name for name in os.listdir(layout.checkpoints) if store.audit(name)]) >= KEEP, where
        lines = journal_path.read_bytes() if journal_path.exists() else b""
        assert lines.count(b"\n") >= len(lines.splitlines()) - 1, where
        assert (problem := journal_problems(journal_path, 0)) is None, f"{problem}: {where}"
    return interrupted, committed


@pytest.mark.parametrize(
    ("kills", "seed", "least"), [(40, 1, (4, 5)), pytest.param(500, 2, (50, 50), marks=pytest.mark.nightly)]
)
def test_sigkill_at_random_microseconds(quick_disk: Path, kills: int, seed: int, least: tuple[int, int]) -> None:
    interrupted, reached = survive(kills, quick_disk, seed)
    assert interrupted > least[0] and reached > least[1]


CHANGING = "openat,open,creat,write,pwrite64,fsync,fdatasync,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir"


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_sigkill_at_every_system_call_that_changes_the_disk(tmp_path: Path) -> None:
    """The kernel's view of the same: nothing that the store does goes past its layer."""
    program = tmp_path / "save.py"
    program.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from chaosrun.checkpoint.store import CheckpointStore\n"
        "from chaosrun.records.layout import LegLayout\n"
        "from tests.unit.test_checkpoint_crash import KEEP, save\n"
        "store = CheckpointStore(LegLayout(Path(sys.argv[1])), KEEP)\n"
        "os.mkdir(sys.argv[1] + '.begun')\n"
        "save(store, 40)\n"
        "store.retain()\n"
    )
    before = LegLayout(tmp_path / "before")
    store = CheckpointStore(before, KEEP)
    for step in (10, 20, 30):
        save(store, step)
    calls, cut = calls_of(program, tmp_path), 0
    for call, numbers in calls.items():
        for number in numbers:
            layout = LegLayout(tmp_path / f"{call}-{number}")
            shutil.copytree(before.path, layout.path)
            tracing = ["strace", "-f", "-o", "/dev/null", "-e", f"trace={call}"]
            tracing += ["-e", f"inject={call}:signal=SIGKILL:when={number}"]
            done = subprocess.run([*tracing, sys.executable, program, layout.path], capture_output=True, text=True, check=False)
            assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), (call, number, done.stderr)
            assert expect_sound(layout, promised=30) in (30, 40), (call, number)
            shutil.rmtree(layout.path)
            cut += 1
    assert cut > 30


def calls_of(program: Path, folder: Path) -> dict[str, range]:
    """How often each call is made by the program after it has begun, as the numbers it has in the whole of its run."""
    layout, log = folder / "counted", folder / "calls"
    shutil.copytree(folder / "before", layout)
    tracing = ["strace", "-f", "-o", str(log), "-e", f"trace={CHANGING}"]
    subprocess.run([*tracing, sys.executable, program, layout], capture_output=True, check=True)
    lines = [line for line in log.read_text().splitlines() if "(" in line]
    names = [line.split(maxsplit=1)[1].partition("(")[0] for line in lines]
    begun = next(number for number, line in enumerate(lines) if "counted.begun" in line)
    first = {name: names[: begun + 1].count(name) + 1 for name in set(names[begun + 1 :])}
    return {name: range(first[name], names.count(name) + 1) for name in sorted(first)}


# The layer


def test_listeners_are_told_before_and_after_and_may_refuse(tmp_path: Path) -> None:
    disk, told = Filesystem(), []
    disk.listeners.append(lambda operation, moment: told.append((operation.kind, moment, operation.path.name)))
    disk.mkdir(tmp_path / "a")
    assert told == [("mkdir", "before", "a"), ("mkdir", "after", "a")]

    def refuse(operation: Operation, moment: str) -> None:
        raise OSError("no")

    disk.listeners.insert(0, refuse)
    with pytest.raises(OSError, match="no"):
        disk.rename(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert len(told) == 2
