"""What `chaosrun export` writes, carried out on a real Ray: a Slurm script, where a shell stands in for srun, and a Ray job."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from chaosrun.records.layout import RunLayout
from tests.e2e.drills import Shell, eventually, finish, kills, reached, write_job

BIN = Path(sys.executable).parent


def start(shell: Shell, script: Path, **more: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CHAOSRUN_", "SLURM"))}
    environment |= {"PATH": f"{shell.folder / 'bin'}:{BIN}:{environment['PATH']}", "CHAOSRUN_ROOT": str(shell.root)}
    return shell.begin(["bash", str(script)], {**environment, **more})


def exported(shell: Shell, *arguments: str | Path) -> Path:
    path = shell.folder / "exported.sh"
    done = shell.run("export", *arguments, "--to", path)
    assert done.returncode == 0, done.stderr
    return path


def status_of(run: Path) -> str:
    return json.loads(RunLayout(run).verdict_json.read_bytes())["status"]


@pytest.mark.nightly
def test_a_slurm_script_goes_on_after_its_time_is_up(shell: Shell) -> None:
    job = write_job(shell.folder, "time.sleep(0.15)", kills(5))
    stand_ins = {"srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"', "scontrol": 'echo "$@" > requeued'}
    (shell.folder / "bin").mkdir()
    for name, body in stand_ins.items():
        path = shell.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    script = exported(shell, "slurm", job)
    slurm = {"JOB_ID": str(os.getpid() % 10_000), "CPUS_PER_TASK": "2", "JOB_NUM_NODES": "1"}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()} | {"SLURMD_NODENAME": "n1"}
    runs = shell.root / f"slurm-{slurm['JOB_ID']}" / "runs"
    process = start(shell, script, **environment)
    try:
        eventually(lambda: runs.is_dir() and any(reached(RunLayout(run).leg("chaos"), 1, 3) for run in runs.iterdir()))
        process.send_signal(signal.SIGUSR1)
        done = finish(process)
        assert done.returncode == 130, done.stderr
        assert (shell.folder / "requeued").read_text() == f"requeue {slurm['JOB_ID']}\n"
        done = finish(start(shell, script, SLURM_RESTART_COUNT="1", **environment))
    finally:
        process.kill()
    assert done.returncode == 0, done.stderr
    (run,) = runs.iterdir()
    assert status_of(run) == "PASS"


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in held]


@pytest.fixture
def ray_with_jobs(shell: Shell) -> Iterator[str]:
    """The address of a Ray that takes jobs."""
    if find_spec("aiohttp_cors") is None:
        pytest.skip("ray[default] is not installed, so there is no server for jobs")
    folder = tempfile.mkdtemp(prefix="ray-", dir=shell.temporary)
    head_port, dashboard_port = free_ports(2)
    ports = ["--port", str(head_port), "--dashboard-port", str(dashboard_port)]
    options = [*ports, "--include-dashboard", "true", "--num-cpus", "2", "--temp-dir", folder, "--disable-usage-stats"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *options]
    path = f"{BIN}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "RAY_AUTH_MODE": "disabled", "TMPDIR": folder}
    head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{dashboard_port}"
    finally:
        head.terminate()
        head.wait(60)
        shutil.rmtree(folder)


@pytest.mark.nightly
def test_a_ray_job(shell: Shell, ray_with_jobs: str) -> None:
    script = exported(shell, "ray", write_job(shell.folder, "", kills(5)))
    version = [sys.executable, "-c", f"import urllib.request as r; r.urlopen('{ray_with_jobs}/api/version')"]
    eventually(lambda: subprocess.run(version, capture_output=True, check=False).returncode == 0)
    done = finish(start(shell, script, RAY_API_SERVER_ADDRESS=ray_with_jobs, RAY_AUTH_MODE="disabled"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert status_of(shell.only_run().path) == "PASS"
