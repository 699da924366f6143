"""The GitHub Action of this repository: a valid one, and its shell steps do what they say, in order, on a real drill."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.drills import Shell, kills, write_job
from tests.unit.test_export import parsed, shellcheck, stand_ins, told, valid_workflows

ACTION = Path(__file__).parents[2] / "action.yml"
STEPS: list[dict[str, Any]] = parsed(ACTION.read_text())["runs"]["steps"]


def step(name: str) -> dict[str, Any]:
    return next(step for step in STEPS if step["name"] == name)


def run(name: str, folder: Path, inputs: dict[str, str], **more: str) -> subprocess.CompletedProcess[str]:
    """As a runner does: the inputs put in their places, the script by `bash -eo pipefail`."""
    values = {"requirement": "", "extras": "", "command": "submit", "working-directory": ".", **inputs}

    def filled(text: str) -> str:
        for key, value in values.items():
            text = text.replace("${{ inputs." + key + " }}", value)
        assert "${{" not in text
        return text

    environment = {key: value for key, value in os.environ.items() if not key.startswith(("CHAOSRUN_", "RAY_", "GITHUB_"))}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "GITHUB_ACTION_PATH": str(ACTION.parent)}
    environment |= {key: filled(value) for key, value in step(name).get("env", {}).items()}
    environment |= {f"GITHUB_{page}": str(folder / page.lower()) for page in ("STEP_SUMMARY", "OUTPUT")} | more
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", filled(step(name)["run"])]
    at = folder / filled(step(name).get("working-directory", "."))
    return subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_is_an_action_with_sound_commands(tmp_path: Path) -> None:
    assert valid_workflows(ACTION, kind="actions") == ""
    (wrong := tmp_path / "action.yml").write_text(ACTION.read_text().replace("using: composite", "using: nothing"))
    assert "nothing" in valid_workflows(wrong, kind="actions"), "the control was not seen"
    for each in STEPS:
        # Values that come from elsewhere reach a shell as variables alone.
        assert shellcheck(each.get("run", ":"), "--shell=bash") == "" and "${{" not in each.get("run", "")


@pytest.mark.parametrize(
    ("inputs", "installed"),
    [
        ({}, f"chaosrun @ file://{ACTION.parent}"),
        ({"extras": "test,ray-jobs"}, f"chaosrun[test,ray-jobs] @ file://{ACTION.parent}"),
        ({"requirement": "chaosrun==0.1.0"}, "chaosrun==0.1.0"),
    ],
)
def test_installs_its_own_version_or_what_is_asked_for(tmp_path: Path, inputs: dict[str, str], installed: str) -> None:
    environment = stand_ins(tmp_path / "bin", {"python": ""})
    assert run("Install chaosrun", tmp_path, inputs, **environment).returncode == 0
    assert told(environment) == [["python", "-m", "pip", "install", installed]]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("trouble", "verdict", "exit_code"), [("", "PASS", 0), ("loader.dataset.tensors[0].mul_(1.5)", "FAIL", 3)]
)
def test_drills_and_tells_the_verdict(shell: Shell, trouble: str, verdict: str, exit_code: int) -> None:
    work = shell.folder / "my job"
    work.mkdir()
    write_job(work, trouble, kills(5))
    inputs = {"drill": "job.yaml 'name=a-name'", "working-directory": work.name}
    more = {"TMPDIR": str(shell.temporary)}
    done = run("Drill", shell.folder, inputs, **more)
    assert done.returncode == exit_code, done.stdout + done.stderr
    done = run("Account of it", shell.folder, inputs, **more)
    assert done.returncode == 0, done.stderr
    output = (shell.folder / "output").read_text()
    assert f"verdict={verdict}\n" in output and "run=a-name-" in output
    assert verdict in (shell.folder / "step_summary").read_text()


@pytest.mark.nightly
def test_a_drill_that_never_began_has_no_verdict(shell: Shell) -> None:
    assert run("Drill", shell.folder, {"drill": "nothing.yaml"}, TMPDIR=str(shell.temporary)).returncode == 2
    done = run("Account of it", shell.folder, {})
    assert done.returncode == 0, done.stderr
    assert (shell.folder / "output").read_text() == ""
