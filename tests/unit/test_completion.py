"""What `chaosrun completion` prints works in the shells it is for, as far as these are here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chaosrun import cli

BIN = Path(sys.executable).parent
CASES = [
    ("chaosrun sub", {"submit"}, set()),
    ("chaosrun cle", {"clean"}, set()),
    ("chaosrun clean --ol", {"--older-than"}, set()),
    ("chaosrun init --template ", {"accelerate", "trainer", "lightning", "torch"}, set()),
    ("chaosrun schema ", {"job", "suite", "verdict"}, set()),
    ("chaosrun status ", {"latest", "probe-1", "probe-2", "order-1"}, set()),
    ("chaosrun status pro", {"probe-1", "probe-2"}, {"order-1"}),
    ("chaosrun logs --root other e", {"elsewhere-1"}, {"probe-1"}),
]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("root/runs/probe-1", "root/runs/probe-2", "root/runs/order-1", "root/runs/.trash", "other/runs/elsewhere-1"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


def ran(folder: Path, command: list[str], program: str) -> list[str]:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "CHAOSRUN_ROOT": str(folder / "root")}
    done = subprocess.run(
        [*command, program], capture_output=True, text=True, cwd=folder, env={**environment, "HOME": str(folder)}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "completion").write_text(script("bash", capsys))
    for line, offered, not_offered in CASES:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        program = f'source completion; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _chaosrun; echo "${{COMPREPLY[@]}}"'
        seen = set(ran(runs, ["bash", "-c"], program))
        assert offered <= seen and seen.isdisjoint(not_offered | {".trash"}), (line, seen)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here")
def test_zsh_takes_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # zsh loads a function from the file of its name.
    (runs / "_cyclopts_chaosrun").write_text(script("zsh", capsys))
    assert ran(runs, ["zsh", "-n"], "_cyclopts_chaosrun") == []
    program = "source ./_cyclopts_chaosrun; whence -w _cyclopts_chaosrun"
    assert ran(runs, ["zsh", "-fc"], program) == ["_cyclopts_chaosrun:", "function"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here")
def test_fish(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "completion").write_text(script("fish", capsys))
    for line, offered, not_offered in CASES:
        seen = {word.split("\t")[0] for word in ran(runs, ["fish", "-c"], f"source completion; complete -C '{line}' | cut -f1")}
        assert offered <= seen and seen.isdisjoint(not_offered), (line, seen)


def test_the_shell_is_found_or_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from cyclopts import completion

    def undetected() -> str:
        raise completion.ShellDetectionError

    monkeypatch.setattr(completion, "detect_shell", lambda: "fish")
    assert cli.main(["completion"]) == 0
    assert "complete -c chaosrun" in capsys.readouterr().out
    monkeypatch.setattr(completion, "detect_shell", undetected)
    assert cli.main(["completion"]) == 2
    assert "name it: bash, zsh or fish" in capsys.readouterr().err


def test_it_is_put_in_place(runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(runs))
    assert cli.main(["completion", "bash", "--install"]) == 0
    written = Path(capsys.readouterr().out.splitlines()[0].removeprefix("wrote").strip())
    assert written.is_relative_to(runs) and "_chaosrun" in written.read_text()
    assert str(written) in (runs / ".bashrc").read_text()
