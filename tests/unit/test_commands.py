"""What holds for every command there is, and the README's table of them.

`python -m tests.unit.test_commands` writes the table into the README anew.
"""

import inspect
import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from cyclopts import App

from chaosrun import cli
from chaosrun.cli import app

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- commands: begin -->\n", "<!-- commands: end -->\n"
LONGEST_SENTENCE = 100
COMMANDS = [name for name in app if not name.startswith("-")]
SHOWS_PROGRESS = re.compile(r"\b(progress|ticking|follow|_tied)\(")
COLOUR = re.compile(rb"\x1b\[([0-9]+;)*([349][0-7]|[34]8;[0-9;]+|10[0-7])m")
HEAVY = ("torch", "ray", "accelerate", "numpy", "pydantic", "ruamel.yaml")


def function_of(name: str) -> FunctionType:
    function = app[name].default_command
    assert isinstance(function, FunctionType)
    return function


def arguments_of(name: str) -> dict[str, Any]:
    """Arguments of a command by every name of theirs."""
    return {alias: argument for argument in app[name].assemble_argument_collection() for alias in argument.names}


def usage_of(name: str) -> str:
    """`chaosrun resume RUN`: without the options, which every command has."""
    written = app[name].usage or usage_that_cyclopts_makes(app[name], name)
    return " ".join(written.removeprefix("Usage: ").replace("[OPTIONS]", "").replace("...", "…").split())


def usage_that_cyclopts_makes(command: App, name: str) -> str:
    positional = [argument for argument in command.assemble_argument_collection() if argument.names[0][0] not in "-*"]
    words = [argument.names[0] if argument.required else f"[{argument.names[0]}]" for argument in positional]
    return " ".join(["chaosrun", name, *words])


def sentence_of(name: str) -> str:
    """The first sentence of its help, but for what it says of exit codes."""
    text = " ".join((inspect.getdoc(function_of(name)) or "").split())
    return text.partition(": exit code")[0].partition(". ")[0].rstrip(".")


def table() -> str:
    usage = {name: usage_of(name).replace("|", "\\|") for name in COMMANDS}
    rows = [f"| `{usage[name]}` | {sentence_of(name)} |\n" for name in COMMANDS]
    return "".join(["| command | what it does |\n", "|---|---|\n", *rows])


def with_table(readme: str) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"the README has no {BEGIN.strip()} … {END.strip()}"
    return before + begin + table() + end + after


def test_the_readme_has_them_all() -> None:
    readme = README.read_text()
    assert with_table(readme) == readme, "python -m tests.unit.test_commands writes the table anew"


@pytest.mark.parametrize("name", COMMANDS)
class TestEveryCommand:
    def test_says_in_a_sentence_what_it_does(self, name: str) -> None:
        assert 0 < len(sentence_of(name)) <= LONGEST_SENTENCE

    def test_prints_text_or_json(self, name: str) -> None:
        arguments = arguments_of(name)
        assert arguments["-o"] is arguments["--output"]
        assert set(arguments["--output"].hint.__args__) >= {"text", "json"}

    def test_explains_every_argument(self, name: str) -> None:
        unexplained = [alias for alias, argument in arguments_of(name).items() if not argument.parameter.help]
        assert not unexplained

    def test_can_be_quiet(self, name: str) -> None:
        arguments = arguments_of(name)
        assert arguments["-q"] is arguments["--quiet"]
        # Where it would show progress, it also listens.
        source = inspect.getsource(function_of(name))
        assert (SHOWS_PROGRESS.search(source) is not None) <= (source.count("quiet") > 1)

    def test_finds_runs_under_another_root(self, name: str) -> None:
        assert ("RUN" in arguments_of(name)) <= ("--root" in arguments_of(name))

    def test_refuses_a_wrong_option_with_a_hint(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main([name, "--no-such-option", "-o", "json"]) == 2
        out, err = capsys.readouterr()
        told = json.loads(out)
        assert (told["v"], told["error"]["kind"], told["error"]["exit_code"]) == (1, "UsageError", 2)
        assert err.splitlines()[-1] == f"hint: see `chaosrun {name} --help`"


@pytest.mark.parametrize(("word", "guess"), [("submt", "submit"), ("lgos", "logs"), ("zzz", None)])
def test_only_what_is_near_is_guessed(word: str, guess: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 2
    told = capsys.readouterr().err.splitlines()[0]
    assert told.startswith(f'error: Unknown command "{word}". ') and "Available commands: submit, " in told
    assert ("Did you mean" in told) == (guess is not None)
    assert guess is None or f'Did you mean "{guess}"?' in told


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_leaves_out_what_to_type_next(
    quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["init", "x", "--ci", "none"], ["export", "github", "x/job.yaml", "--to", "workflow.yml"]):
        assert cli.main([*command, *(["-q"] if quiet else [])]) == 0
        out = capsys.readouterr().out
        assert out.startswith("wrote     ")
        assert ("next      " in out) == (not quiet)


def test_the_rules_see_the_commands() -> None:
    # Without this, an app that lists nothing would pass every rule above.
    assert {"submit", "list", "logs", "init", "env", "clean"} <= {*COMMANDS}
    assert "--watch" in arguments_of("status") and "--watch" not in arguments_of("plan")
    assert SHOWS_PROGRESS.search(inspect.getsource(function_of("submit")))


def test_help_imports_nothing_heavy() -> None:
    question = (
        "import sys; from chaosrun.cli import app, main\n"
        "for tokens in [[], ['--version'], *([name] for name in app if not name.startswith('-'))]:\n"
        "    assert main([*tokens, '--help'] if '--version' not in tokens else tokens) == 0, tokens\n"
        f"print('LOADED', *[name for name in {HEAVY} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1].split() == ["LOADED"]
    for name in COMMANDS:
        assert f"Usage: chaosrun {name}" in answer.stdout


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_is_obeyed(no_color: str, tmp_path: Path) -> None:
    """At a terminal: an error of every command, and its help. Bold is no colour."""
    program = (
        "from chaosrun.cli import app, main\n"
        "for name in app:\n"
        "    if not name.startswith('-'):\n"
        "        main([name, '--help']); main([name, '--no-such-option'])\n"
        "main(['list']); main(['status', 'nothing']); main(['clean'])\n"
    )
    shown = at_a_terminal(program, {"NO_COLOR": no_color, "TERM": "xterm-256color", "CHAOSRUN_ROOT": str(tmp_path)})
    assert shown.count(b"--no-such-option") >= len(COMMANDS)
    assert bool(COLOUR.search(shown)) == (no_color == "")


def at_a_terminal(program: str, variables: dict[str, str]) -> bytes:
    """What a program shows at a terminal of its own."""
    ours, its = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=its, stdout=its, stderr=its, env={**environment, **variables}, close_fds=True
    )
    os.close(its)
    shown = b""
    try:
        while select.select([ours], [], [], 300)[0]:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            shown += part
            if not part:
                break
        assert process.wait(timeout=300) == 0, shown.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
