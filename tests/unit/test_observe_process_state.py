"""What a script has set in its process: looking changes nothing, and equal states look equal in any process."""

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch

from chaosrun.observe import process_state
from chaosrun.observe.held import known_as, variables

SAME = """
import decimal, os, sys
from typing import Annotated
from pydantic import BaseModel
from chaosrun.observe import process_state
from chaosrun.observe.held import known_as, variables
class Marker: ...
class Settings(BaseModel):
    rate: float = 0.1
__main__ = sys.modules["__main__"]
if sys.argv[1] == "again":
    decimal.Decimal(1) / 3
folder = os.getcwd()
sys.path[:] = [folder, os.path.dirname(folder), "/usr"]
del sys.argv[1:]
print(known_as(Annotated[int, Marker()]), [key for key, _ in variables(Settings)], [*process_state.settings()])
print([*process_state.of_the_process(os.environ, folder, process_state.waiting_bytes())])
"""


def test_equal_states_look_equal_in_each_process_and_leg(tmp_path: Path) -> None:
    told: list[str] = []
    for leg, how in (("reference", "first"), ("chaos", "again")):
        folder = tmp_path / "runs" / leg / "work"
        folder.mkdir(parents=True)
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        asked = subprocess.run([sys.executable, "-c", SAME, how], cwd=folder, env=environment, capture_output=True, text=True)
        assert asked.returncode == 0, asked.stderr
        told.append(asked.stdout)
    assert told[0] == told[1] and "__pydantic_" not in told[0] and "model_config" in told[0]


def test_to_look_at_what_waits_leaves_sockets_as_they_are() -> None:
    one, other = socket.socketpair()
    try:
        one.send(b"hello")
        flags = [fcntl.fcntl(each.fileno(), fcntl.F_GETFL) for each in (one, other)]
        socket.setdefaulttimeout(10)
        found = [*process_state.unread((), process_state.waiting_bytes())]
        assert [fcntl.fcntl(each.fileno(), fcntl.F_GETFL) for each in (one, other)] == flags
        assert "data that wait in a pipe" in found and other.recv(5) == b"hello"
    finally:
        socket.setdefaulttimeout(None)
        one.close()
        other.close()


def test_what_was_printed_and_not_yet_read_is_not_looked_at() -> None:
    code = "from chaosrun.observe.process_state import waiting_bytes; print(5); print(1 in waiting_bytes())"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    asked = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=False, env=environment)
    assert asked.stdout is not None and os.read(asked.stdout.fileno(), 1) == b"5"
    assert asked.communicate()[0] == b"\nFalse\n" and asked.returncode == 0
    reader, writer = os.pipe()
    try:
        os.write(writer, b"x")
        found = process_state.waiting_bytes()
        assert found[reader] == 1 and writer not in found
    finally:
        os.close(reader)
        os.close(writer)


def test_settings_are_told_after_newer_ones_were_used() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    first = str([*process_state.settings()])
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert str([*process_state.settings()]) != first
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert str([*process_state.settings()]) == first


def test_a_module_that_makes_what_it_is_asked_for_is_known_by_its_name() -> None:
    assert known_as(torch.classes).endswith(" torch.classes") and known_as(torch.ops).endswith(" torch.ops")
    assert "__qualname__" not in vars(torch.ops)
    assert known_as(Annotated[int, object()]).endswith("<class 'int'>") and not [*variables(type("Empty", (), {}))]
