"""What the end-to-end tests share: the `chaosrun` command in an environment of its own, small jobs, what must be gone after.

The command's TMPDIR is its mark: whatever it starts inherits it, so processes and folders that it left can be told from those
of others on this machine.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from textwrap import indent
from typing import Any
from unittest.mock import patch

from chaosrun.cli import main
from chaosrun.processes import ProcessIdentity, child_called, children, marked, unused_shared_memory
from chaosrun.records.layout import LegLayout, RunLayout
from tests.records import read_lines

COMMAND = Path(sys.executable).with_name("chaosrun")
RAY_TITLES = (b"ray::",)

SCRIPT = """\
import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import chaosrun
from chaosrun.protocol.context import current

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3))
set_seed(3)
data = TensorDataset(torch.randn(48, 8), torch.randint(4, (48,)))
loader = DataLoader(data, batch_size=4, shuffle=True, num_workers={loader_workers})
model = torch.nn.Sequential(torch.nn.Linear(8, {width}), torch.nn.Dropout(0.1), torch.nn.Linear({width}, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
order, rank = current().order, accelerator.process_index

run = chaosrun.attach(accelerator)
for features, classes in run.batches(loader, epochs=2):
    loss = torch.nn.functional.cross_entropy(model(features), classes)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss)
    step = run.position.step
{trouble}
accelerator.end_training()
"""
STEPS = 12
"""Of SCRIPT with two workers."""

JOB = """\
name: small
script: train.py
workers: 2
seed: 1
checkpoint: {every_steps: 3}
"""


def write_job(folder: Path, trouble: str, *more: str, width: int = 16, loader_workers: int = 0) -> Path:
    """A job whose script does `trouble` (statements; step, rank, order, run are there) in each of its twelve steps, after
    `run.step`: the checkpoint and the faults of that step are still to come.

    `more`: lines of the job file.
    """
    script = SCRIPT.format(width=width, loader_workers=loader_workers, trouble=indent(trouble or "pass", "    "))
    (folder / "train.py").write_text(script)
    job = folder / "job.yaml"
    job.write_text(JOB + "".join(f"{line}\n" for line in more))
    return job


def kills(*steps: int, rank: int = 1) -> str:
    return "faults: {schedule: [" + ", ".join(f"{{rank: {rank}, at_step: {step}}}" for step in steps) + "]}"


@dataclass(frozen=True, slots=True)
class Shell:
    """Where commands run: a working directory, a root for runs and a TMPDIR."""

    folder: Path
    temporary: Path

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start a command in a process group of its own, as a terminal would."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CHAOSRUN_"))}
        return self.begin([str(COMMAND), *map(str, arguments)], {**environment, "CHAOSRUN_ROOT": str(self.root)})

    def begin(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """In a session of its own, as a terminal would start it."""
        heard: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        env = {**environment, "TMPDIR": str(self.temporary)}
        return subprocess.Popen(command, cwd=self.folder, env=env, start_new_session=True, **heard)

    def run(self, *arguments: str | Path, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        return finish(self.start(*arguments), timeout_s=timeout_s)

    def call(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """In this process: a command that starts none takes as long for its imports as for all else."""
        tokens = [*map(str, arguments)]
        environment = {"TMPDIR": str(self.temporary), "CHAOSRUN_ROOT": str(self.root)}
        out, err = StringIO(), StringIO()
        with patch.dict(os.environ, environment), chdir(self.folder), redirect_stdout(out), redirect_stderr(err):
            code = main(tokens)
        return subprocess.CompletedProcess(tokens, code, out.getvalue(), err.getvalue())

    def runs(self) -> list[RunLayout]:
        """Those begun; none as long as a command has not come that far."""
        folder = self.root / "runs"
        return [RunLayout(path) for path in folder.iterdir()] if folder.is_dir() else []

    def only_run(self) -> RunLayout:
        (run,) = self.runs()
        return run

    def run_begun(self, by: subprocess.Popen[str] | None = None) -> RunLayout:
        """The only one, as soon as it is there; a failure says what the command that was to begin it has printed."""
        eventually(self.runs, what=by and (lambda: (by.kill(), by.communicate())))
        return self.only_run()

    def left_behind(self) -> list[str]:
        """Processes and temporary files of commands run here."""
        processes = []
        for identity in marked(str(self.temporary), titles=RAY_TITLES):
            with suppress(FileNotFoundError, ProcessLookupError):  # gone meanwhile
                processes.append(Path(f"/proc/{identity.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        # The cache of torch's compiler is one directory for all programs and is meant to last.
        files = [str(path) for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]
        return [*processes, *files]


def shared_memory_left(before: set[str]) -> list[str]:
    """Entries of /dev/shm that came since and that nobody holds; what others on this machine work with is theirs."""
    return unused_shared_memory(set(os.listdir("/dev/shm")) - before)


@contextmanager
def open_shell(folder: Path) -> Iterator[Shell]:
    # Short, because Ray's socket paths have to fit below it.
    temporary = Path(tempfile.mkdtemp(prefix="e2e-", dir="/tmp"))
    shared_memory = set(os.listdir("/dev/shm"))
    try:
        shell = Shell(folder, temporary)
        yield shell
        eventually(lambda: not shell.left_behind(), what=shell.left_behind)
        eventually(lambda: not shared_memory_left(shared_memory), what=lambda: shared_memory_left(shared_memory))
    finally:
        shutil.rmtree(temporary)


def head_below(pid: int) -> ProcessIdentity | None:
    """Of the Ray that this process, or one below it, has started."""
    return child_called("gcs_server", pid) or next(filter(None, map(head_below, children(pid))), None)


def finish(process: subprocess.Popen[str], *, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        # Without effect when it has ended; its cleanup process removes what is left.
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def eventually(condition: Callable[[], Any], *, timeout_s: float = 120.0, what: Callable[[], Any] | None = None) -> Any:
    """The first true value of `condition`; fails, saying `what`, when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not in time: {what() if what else condition}"
        time.sleep(0.01)


def journal(leg: LegLayout) -> list[dict[str, Any]]:
    return list(read_lines(leg.journal)) if leg.journal.exists() else []


def events(leg: LegLayout, name: str) -> list[dict[str, Any]]:
    return [record for record in journal(leg) if record["event"] == name]


def reached(leg: LegLayout, attempt: int, step: int) -> bool:
    """Rank 0 has recorded this step in this attempt."""
    trace = leg.attempt(attempt).trace(0)
    return trace.exists() and any(line["kind"] == "step" and line["step"] >= step for line in read_lines(trace))
