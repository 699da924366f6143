"""Runs one measured command to its end, in a folder of its own, and leaves none of its processes behind."""

import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from chaosrun.processes import kill_marked, remove_shared_memory_leftovers, shared_memory_entries

__all__ = ["LIMIT_S", "ON_GPU", "REPOSITORY", "LaunchError", "chaosrun_command", "launch", "on_gpu", "scratch"]

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 60.0
"""A run that takes longer has failed."""
OUTPUT_SHOWN = 2000
ON_GPU = "BENCH_ON_GPU"
"""Set where one rank trains on a GPU, not two on CPUs; inherited by what is measured."""


class LaunchError(Exception):
    """A run that did not end well, or whose records do not show what was to be measured."""


def on_gpu() -> bool:
    return ON_GPU in os.environ


def chaosrun_command() -> str:
    """The installed command, as a user would call it."""
    return str(Path(sysconfig.get_path("scripts")) / "chaosrun")


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder; afterwards it is gone, with every process that was started in it by `launch`."""
    # Short: Ray puts sockets below it, and the path of a socket has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    shared_memory_before = shared_memory_entries()
    try:
        yield folder
    finally:
        kill_marked(str(folder), titles=(b"ray::",))
        shutil.rmtree(folder, ignore_errors=True)
        remove_shared_memory_leftovers(shared_memory_before)


def launch(
    command: Sequence[str], folder: Path, *, variables: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> str:
    """Run to the end and return what it wrote to stdout. Raises LaunchError when it fails or takes longer than `limit_s`."""
    environment = {
        **os.environ,
        "BENCH_FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **(variables or {}),
    }
    out, err = folder / "stdout", folder / "stderr"
    began = time.monotonic()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, env=environment, cwd=folder, start_new_session=True
        )
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"took longer than {limit_s:.0f} s{_last_output(err)}") from error
    finally:
        # Whatever happened, nothing of it may be running during the next measurement.
        process.kill()
        process.wait()
        kill_marked(str(folder), titles=(b"ray::",))
    if code != 0:
        raise LaunchError(f"ended with {code} after {time.monotonic() - began:.1f} s{_last_output(err) or _last_output(out)}")
    return out.read_text()


def _last_output(output: Path) -> str:
    said = output.read_text(errors="replace").strip()[-OUTPUT_SHOWN:]
    return f":\n{said}" if said else ""
