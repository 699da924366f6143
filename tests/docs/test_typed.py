"""What the documents have one type is typed: every command is parsed, what costs nothing is run, and at night everything is,
page by page, each in a copy of the repository. ELSEWHERE says what is not, and why.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from chaosrun import cli
from chaosrun.cli import app
from tests.docs.pages import PAGES, ROOT, Line, blocks, commands, spans, typed

RAY = "needs a Ray cluster; tests/integration/test_preflight.py looks at one of three raylets"
SEVERAL = "needs several machines; tests/unit/test_joining.py joins a Ray that asks for a token"
ELSEWHERE = {
    "git clone <this repository> chaosrun && cd chaosrun": "the copy that everything runs in stands for it",
    "sbatch drill.sh": "needs Slurm; tests/e2e/test_export.py runs such a script where a shell stands in for srun",
    "kubectl apply -f rayjob.yaml": "needs Kubernetes with KubeRay; tests/unit/test_export.py checks the file",
    "CHAOSRUN_ROOT=/shared/runs sh ray-drill.sh": "needs a Ray cluster; tests/e2e/test_export.py submits one to a real Ray",
    "chaosrun preflight job.yaml --address 10.0.0.1:6379 --write-good-nodes good.txt": RAY,
    "chaosrun preflight --address 10.0.0.1:6379 -o json --to good.json": RAY,
    "chaosrun preflight --address 10.0.0.1:6379 --level deep --duration 2h --baseline good.json -o junit --to night.xml": RAY,
    "ray start --head --port 6379 --num-cpus 2": SEVERAL,
    "chaosrun submit jobs/probe/job.yaml --address HEAD:6379 --root /shared/runs": SEVERAL,
    "RAY_AUTH_MODE=token ray start --address HEAD:6379": SEVERAL,
    "docker build -t chaosrun .": "needs Docker",
    "docker run --rm --shm-size 1g chaosrun submit jobs/bytelm/job.yaml": "needs Docker",
}
"""Lines that are only parsed, and why."""
MEANWHILE = {"chaosrun status latest -w", "chaosrun logs latest -f"}
"""Typed in another window: they go on beside the lines below, and end by themselves."""
INSTEAD = {"chaosrun suite configs/nightly.yaml --seed today": "--shard 1/12"}
"""Too long to be run as it is: what is added to it."""
CHEAP = {"plan", "validate", "schema", "export", "init", "list"}
CHEAP_WITH = {"suite": "--list", "clean": "--dry-run"}
PLACEHOLDERS = {"COMMAND", "…"}
OTHERS_OPTIONS = {"--build-arg", "--working-dir", "--chaos-seed", "--chaos-root", "--chaos-address", "--loader-workers", "--"}
"""Within sentences: of Docker, Ray, pytest, and of a script."""
LONGEST_S = 900
TYPED = [line for page in PAGES for line in typed(page)]
COMMANDS = [name for name in app if not name.startswith("-")]


def of_chaosrun(text: str) -> list[list[str]]:
    """The arguments of each `chaosrun` in a line."""
    return [words[1:] for words in commands(text) if words[0] == "chaosrun"]


def parse(arguments: list[str]) -> None:
    app.parse_args(arguments, exit_on_error=False, print_error=False)


def choices(span: str) -> Iterator[list[str]]:
    """`schema job|suite` is two commands; RUN… is RUN."""
    words = [word.rstrip("…") for word in span.split() if word not in PLACEHOLDERS]
    several = next((place for place, word in enumerate(words) if "|" in word.strip("|")), None)
    for choice in words[several].split("|") if several is not None else [""]:
        yield [choice if place == several else word.strip("'\"") for place, word in enumerate(words)]


@cache
def options_of(name: str) -> set[str]:
    return {alias for argument in app[name].assemble_argument_collection() for alias in argument.names}


@pytest.mark.parametrize("line", TYPED, ids=str)
def test_what_is_to_be_typed_is_understood(line: Line) -> None:
    for arguments in of_chaosrun(line.text) if line.text not in ELSEWHERE else ():
        parse(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_are_understood(page: Path) -> None:
    for span in spans(page):
        if span.startswith("chaosrun ") and not any(each in span for each in ("COMMAND", "NAME", "[", "chaosrun …")):
            for words in choices(span):
                parse(words[1:]) if len(words) > 2 else app[words[1]]
        elif (words := span.split())[0] in COMMANDS and len(words) > 1:
            ours = takewhile(lambda word: word != "--", words)  # what follows is the script's
            assert {word for word in ours if word.startswith("-")} <= options_of(words[0]), span
        elif words[0].startswith("--"):
            known = set().union(*map(options_of, COMMANDS)) | OTHERS_OPTIONS
            assert words[0].partition("=")[0] in known, span


def test_a_command_that_is_not_understood_is_noticed() -> None:
    for wrong in ("chaosrun submit job.yaml --no-such-option", "chaosrun schema nothing", "chaosrun nothing", "chaosrun wait"):
        with pytest.raises(CycloptsError):
            parse(of_chaosrun(wrong)[0])
    assert of_chaosrun("true && chaosrun plan 'a b' x=1 > out | chaosrun list") == [["plan", "a b", "x=1"], ["list"]]


def test_the_exceptions_are_lines_of_the_documents() -> None:
    texts = [line.text for line in TYPED]
    assert {*ELSEWHERE, *MEANWHILE, *INSTEAD} <= {*texts}
    assert len(texts) > 40


def is_cheap(line: Line) -> bool:
    def cheap(words: list[str]) -> bool:
        return words[0] in ("printf", "mkdir") or (
            words[0] == "chaosrun" and (words[1] in CHEAP or CHEAP_WITH.get(words[1], "?") in words)
        )

    return line.text not in ELSEWHERE and all(map(cheap, commands(line.text)))


@pytest.mark.parametrize("page", [page for page in PAGES if any(map(is_cheap, typed(page)))], ids=lambda page: page.name)
def test_what_costs_nothing_works(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, without the time that a start takes."""
    for name in ("jobs", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CHAOSRUN_ROOT", raising=False)
    for line in filter(is_cheap, typed(page)):
        if "--template lightning" in line.text and find_spec("pytorch_lightning") is None:
            continue  # of the extra `frameworks`, which the nightly tests have
        for words in commands(line.text):
            if words[0] == "chaosrun":
                assert cli.main(words[1:]) == line.exit_code, f"{line}\n{capfd.readouterr().err}"
            else:
                subprocess.run(["bash", "-c", line.text], check=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository as somebody has it who has just cloned it, but for what `make demo` installs: that is ours."""
    folder = tmp_path / "chaosrun"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.pyc"))
    (folder / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if not entry.name.startswith(".installed"):
            (folder / ".venv" / entry.name).symlink_to(entry)
    (folder / ".venv" / ".installed-examples").touch()
    return folder


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [page for page in PAGES if typed(page)], ids=lambda page: page.name)
def test_what_is_to_be_typed_works(page: Path, copy: Path) -> None:
    """Line by line, in order. Python blocks with tests are run by pytest."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CHAOSRUN_", "RAY_", "PYTEST_"))}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        "HOME": str(copy.parent),
        "GITHUB_STEP_SUMMARY": str(copy.parent / "summary.md"),
    }

    def start(text: str, to: Path) -> "subprocess.Popen[bytes]":
        with open(to, "wb") as file:
            return subprocess.Popen(
                ["bash", "-c", text], cwd=copy, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )

    def run(text: str) -> tuple[int, str]:
        process = start(text, copy.parent / "output")
        try:
            code = process.wait(timeout=LONGEST_S)
        finally:
            _end(process)
        return code, (copy.parent / "output").read_text()

    for number, block in enumerate(blocks(page)):
        if block.language == "python" and "def test_" in block.text:
            (copy / f"test_block_{number}.py").write_text(block.text)
            code, output = run(f"python -m pytest -q -p no:cacheprovider test_block_{number}.py")
            assert code == 0, f"{block}\n{output}"
    beside: list[tuple[Line, subprocess.Popen[bytes]]] = []
    for line in typed(page):
        if line.text in ELSEWHERE:
            continue
        if line.text in MEANWHILE:
            beside.append((line, start(line.text, copy.parent / f"beside-{len(beside)}")))
            continue
        began = time.monotonic()
        code, output = run(f"{line.text} {INSTEAD.get(line.text, '')}")
        print(f"{time.monotonic() - began:6.1f} s  {line}")
        assert code == line.exit_code, f"{line}: ended with {code}, not {line.exit_code}\n{output}"
    for line, process in beside:
        try:
            assert process.wait(timeout=60) == 0, str(line)
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
