"""What chaosrun must never do, read from its source: signal a process it cannot be sure of, run code that lies in a file."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.sources import parsed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "chaosrun"

SIGNALLING = {"kill", "killpg", "pidfd_send_signal", "pthread_kill", "raise_signal", "send_signal", "terminate", "tgkill"}
ALLOWED_SIGNALS = {
    "cluster/agent.py:_close_server": "its own child; asyncio signals none that it has reaped",
    "cluster/agent_client.py:abandon": "an actor, by Ray's handle",
    "cluster/agent_client.py:close": "an actor, by Ray's handle",
    "cluster/probe_pool.py:_lose": "an actor, by Ray's handle",
    "cluster/probe_pool.py:close": "an actor, by Ray's handle",
    "cluster/attempts.py:kill_group": "a child that has not been reaped, and the group it leads",
    "cluster/command.py:main": "itself",
    "cluster/command.py:kill_ranks": "through a pidfd, taken from the process that announced itself",
    "cluster/probe_guard.py:_kill_everything": "a child that has not been reaped",
    "cluster/probe_guard.py:remove_announced": "a child that has not been reaped",
    "cluster/probe_agent.py:_run": "its own child; subprocess signals none that it has reaped",
    "processes.py:send_signal": "through a pidfd, after a look at its start time",
    "supervise/process.py:_interrupt": "a thread of its own",
    "faults/process.py:loader_worker": "a child that has not been reaped, after a look at its start time",
    "faults/stalls.py:pause": "itself",
    "supervise/watchdog.py:_ended": "itself, and a child that has not been reaped",
    "faults/process.py:preempt": "itself",
    "faults/stalls.py:stop": "itself",
    "faults/strike.py:die": "itself",
    "faults/tracer.py:_fail": "its own child; subprocess signals none that it has reaped",
    "faults/tracer.py:_lines": "its own child; subprocess signals none that it has reaped",
    "faults/tracer.py:_go_on": "SIGCONT, which does nothing to a process that runs, to one that it had stopped",
    "supervise/interrupts.py:request": "a thread of its own",
    "supervise/process.py:__exit__": "its own child; subprocess signals none that it has reaped",
    "preflight/probes/storage.py:kill_writers": "a child that has not been reaped",
    "preflight/probes/devices.py:_compute": "its own child; subprocess signals none that it has reaped",
    "preflight/probes/allreduce.py:probe": "a child that has not been reaped",
    "preflight/probes/kill.py:_kill": "a child that has not been reaped, and the group it leads",
    "observe/probe.py:_ask": "through a pidfd, its own child",
}
"""Where a signal may be sent other than by `processes.send_signal`, and why nobody else can be hit."""

LOADERS = {
    "cloudpickle",
    "code",
    "codeop",
    "dbm",
    "dill",
    "imp",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "runpy",
    "shelve",
    "yaml",
}
"""Modules that make code or objects out of bytes."""
ALLOWED_LOADERS = {
    "protocol/plain_values.py imports pickle": "for the name of its error",
    "protocol/sharded.py imports pickle": "to refuse an index of DCP that names anything but its own types, first",
    "records/tensor_files.py imports pickle": "each class that a file names is an inert one: nothing is executed",
    "protocol/snapshot.py imports pickle": "a rank's own memory, read by its own child: no file, no network",
    "protocol/worker.py imports runpy": "the user's module",
}
RUNNING = {"compile", "eval", "exec", "system", "popen", "__import__"}
ALLOWED_RUNNING = {
    "protocol/worker.py:_run_script exec": "the user's script",
    "protocol/worker.py:_run_script compile": "the user's script",
    "spec/launch.py:_syntax_problems compile": "the user's script, which is not run",
    "protocol/startup/sitecustomize.py:import_hidden __import__": "the sitecustomize that Python would have imported itself",
}


@dataclass(frozen=True, slots=True)
class Call:
    path: str
    function: str
    """The innermost function around it."""
    name: str
    """Of what is called: the last part of it."""
    text: str
    keywords: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.path}:{self.function}"


def calls(path: Path, root: Path = PACKAGE) -> Iterator[Call]:
    def visit(node: ast.AST, function: str) -> Iterator[Call]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if isinstance(child, ast.Call):
                called = ast.unparse(child.func)
                keywords = {keyword.arg or "**": ast.unparse(keyword.value) for keyword in child.keywords}
                name = called.rpartition(".")[2]
                yield Call(path.relative_to(root).as_posix(), function, name, called, keywords)
            yield from visit(child, inside)

    yield from visit(parsed(path.read_text()), "")


@cache
def every_call() -> list[Call]:
    return [call for path in sorted(PACKAGE.rglob("*.py")) for call in calls(path)]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def raw_signals(found: list[Call]) -> set[str]:
    """Places that send a signal by anything but our own `send_signal`, which insists on the identity."""
    return {call.place for call in found if call.name in SIGNALLING and call.text != "send_signal"}


def test_every_signal_goes_to_a_process_that_is_known_for_good() -> None:
    places = raw_signals(every_call())
    assert places - ALLOWED_SIGNALS.keys() == set(), "use processes.send_signal, or say here why it can hit nobody else"
    assert ALLOWED_SIGNALS.keys() - places == set(), "no longer there"


def test_a_raw_signal_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import os, signal\nfrom os import kill as strike, killpg\n"
        "def one(pid):\n    os.kill(pid, 9)\n"
        "def two(pid):\n    killpg(pid, 9)\n"
        "class Three:\n    def three(self):\n        psutil.Process(1).terminate()\n"
        "def safe(identity):\n    send_signal(identity, 9)\n"
        "def four(process):\n    process.send_signal(9)\n"
    )
    assert raw_signals(list(calls(path, tmp_path))) == {f"module.py:{name}" for name in ("one", "two", "three", "four")}


def test_signalling_functions_keep_their_names() -> None:
    """An alias would slip through the rule above."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ImportFrom | ast.Import):
                renamed = [alias.name for alias in node.names if alias.asname and alias.name in SIGNALLING]
                assert not renamed, f"{path}: {renamed}"


def test_nothing_makes_objects_out_of_bytes() -> None:
    found = {
        f"{path.relative_to(PACKAGE).as_posix()} imports {module}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for module in imported(path)
        if module in LOADERS
    }
    assert found == set(ALLOWED_LOADERS)


def test_nothing_runs_a_text() -> None:
    found = {f"{call.place} {call.name}" for call in every_call() if call.name in RUNNING and call.text != "re.compile"}
    assert found == set(ALLOWED_RUNNING)
    # The completion of a shell is printed or written, not run.
    named = [call for call in every_call() if call.keywords.get("shell") not in (None, "False")]
    assert {f"{call.place} {call.name}" for call in named} == {
        "cli/housekeeping.py:completion install_completion",
        "cli/housekeeping.py:completion generate_completion",
    }


@pytest.mark.parametrize(
    ("call", "keyword", "value"),
    [("torch.load", "weights_only", "True"), ("YAML", "typ", "'safe'"), ("numpy.load", "allow_pickle", "False")],
)
def test_loaders_that_can_be_told_are_told(call: str, keyword: str, value: str) -> None:
    wrong = [
        f"{found.place}: {found.text}" for found in every_call() if found.text == call and found.keywords.get(keyword) != value
    ]
    assert not wrong


def test_the_rules_see_the_code() -> None:
    assert {"torch.load", "YAML", "json.loads"} <= {call.text for call in every_call()}
