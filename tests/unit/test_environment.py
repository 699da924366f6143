"""`chaosrun env`: every fact is there, no secret is, and what is broken is said to be."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaosrun import cli
from chaosrun.cli.housekeeping import environment_lines
from chaosrun.housekeeping import environment as env
from chaosrun.housekeeping.environment import environment, listed_variables
from chaosrun.observe.limits import cpu_limit, memory_limit

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return environment(tmp_path_factory.mktemp("root") / "not" / "there")


def test_text_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, facts: Facts
) -> None:
    monkeypatch.setattr(env, "_torch", lambda: facts["torch"])
    assert cli.main(["env", "--root", str(tmp_path), "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["v"], told["root"]["path"], told["root"]["exists"]) == (1, str(tmp_path), True)
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "chaosrun:",
        "python:",
        "torch:",
        "system:",
        "cpu:",
        "memory:",
        "root:",
        f"  version: {facts['torch']['version']}",
    ):
        assert line in lines, line


def test_torch_says_what_it_is(facts: Facts) -> None:
    import torch

    assert facts["torch"]["version"] == torch.__version__
    assert facts["torch"]["is_cuda_available"] == str(torch.cuda.is_available())


def test_a_root_that_is_not_there_yet(facts: Facts) -> None:
    assert facts["root"]["exists"] is False and facts["root"]["writable"] is True and facts["root"]["free_bytes"] > 0
    assert "  exists: False" in environment_lines(facts)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ImportError('libcudart.so.12: cannot open shared object file')", "ImportError: libcudart.so.12: cannot open"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended the process by signal 11"),
        ("import time; time.sleep(60)", "took more than"),
        ("raise SystemExit(3)", "exit code 3"),
        ("print('no JSON')", "exit code 0"),
    ],
)
def test_a_broken_torch_is_reported(program: str, said: str, facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "TORCH_FACTS", program)
    monkeypatch.setattr(env, "TORCH_TIMEOUT_S", 0.5 if "sleep" in program else 60.0)
    broken = env._torch()
    assert said in str(broken["error"])
    assert f"  error: {broken['error']}" in environment_lines({"torch": broken})


def test_no_torch_at_all(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "installed_version", lambda package: None)
    assert "  error: not installed" in environment_lines({"torch": env._torch()})


def test_it_imports_neither_torch_nor_ray() -> None:
    question = (
        "import sys, chaosrun.housekeeping.environment as env; env._torch = dict; env.environment()\n"
        "print(*[name for name in ('torch', 'ray', 'accelerate') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True).stdout.split() == []


def test_variables_that_matter_without_secrets() -> None:
    environ = {
        "CHAOSRUN_ROOT": "/data",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "RAY_ADDRESS": "ray://somebody:hunter2@head:10001",
        "RAY_REDIS_PASSWORD": "hunter2",
        "HF_TOKEN": "hunter2",
        "HF_HUB_API_KEY": "hunter2",
        "RAY_AUTH_MODE": "hunter2",
        "CHAOSRUN_SECRET_THING": "hunter2",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "HOME": "/home/somebody",
    }
    listed = listed_variables(environ)
    assert "hunter2" not in json.dumps(listed)
    assert {"HOME", "AWS_SECRET_ACCESS_KEY"}.isdisjoint(listed)
    assert listed["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert listed["RAY_ADDRESS"] == "ray://head:10001"
    assert listed["HF_TOKEN"] == "(left out)"


class TestLimits:
    """Made-up control groups: what a container of either version looks like."""

    def write(self, folder: Path, **files: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text + "\n")

    def test_version_2(self, tmp_path: Path) -> None:
        mount, membership = tmp_path / "cgroup", tmp_path / "membership"
        membership.write_text("0::/jobs/mine\n")
        self.write(mount / "jobs", cpu__max="150000 100000", memory__max="max")
        self.write(mount / "jobs" / "mine", cpu__max="max 100000", memory__max="1073741824")
        assert cpu_limit(mount, membership) == 1.5
        assert memory_limit(mount, membership) == 1 << 30

    def test_version_2_within_a_namespace(self, tmp_path: Path) -> None:
        mount, membership = tmp_path / "cgroup", tmp_path / "membership"
        membership.write_text("0::/\n")
        self.write(mount, cpu__max="50000 100000", memory__max="2048")
        assert (cpu_limit(mount, membership), memory_limit(mount, membership)) == (0.5, 2048)

    def test_version_1(self, tmp_path: Path) -> None:
        mount, membership = tmp_path / "cgroup", tmp_path / "membership"
        membership.write_text("4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n")
        self.write(mount / "cpu,cpuacct", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
        self.write(mount / "memory" / "docker" / "x", memory__limit_in_bytes="4096")
        self.write(mount / "memory", memory__limit_in_bytes="9223372036854771712")
        assert (cpu_limit(mount, membership), memory_limit(mount, membership)) == (2.0, 4096)

    def test_none(self, tmp_path: Path) -> None:
        mount, membership = tmp_path / "cgroup", tmp_path / "membership"
        assert (cpu_limit(mount, membership), memory_limit(mount, membership)) == (None, None)
        membership.write_text("1:cpu:/\n")
        self.write(mount / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
        assert cpu_limit(mount, membership) is None
