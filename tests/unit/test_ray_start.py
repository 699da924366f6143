"""A private Ray that does not start is the machine's trouble, and is told as such."""

import os
import subprocess
import sys

import pytest

CONNECT = """\
import ray
from chaosrun.cluster import connection
from chaosrun.errors import ResourcesError

def start(**_):
    raise Exception("The current node timed out during startup.\\nmore")

ray.init = start
try:
    connection.connect(None, cpus=1)
except ResourcesError as error:
    print(error.message)
"""


@pytest.mark.parametrize(
    ("option", "reason"),
    [("-B", "Ray does not start here: The current node timed out during startup."), ("-OO", "under PYTHONOPTIMIZE=2")],
)
def test_what_keeps_ray_from_starting_is_no_bug_of_chaosrun(option: str, reason: str) -> None:
    """In a process of its own: others may have joined a Ray."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    answer = subprocess.run(
        [sys.executable, option, "-c", CONNECT], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert reason in answer.stdout, answer.stderr


def test_the_log_of_a_dead_raylet_is_not_printed_and_other_errors_are_on_stderr_while_it_is_connected() -> None:
    program = """
import ray
from ray._private import worker
from chaosrun.cluster import connection
def error(line):
    worker.print_to_stdstream({"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False)
def start(**_):
    error("Raylet is terminated. Termination is unexpected.")
    error("A worker died or was killed while executing a task by an unexpected system error.")
    error("No node has room.")
ray.init = start
connection.connect(None, cpus=1).close()
error("The user's own.")
def fail(**_):
    raise RuntimeError
ray.init = fail
for address in (None, "127.0.0.1:1"):
    try:
        connection.connect(address, cpus=1)
    except connection.ResourcesError:
        error(f"Again, {address}.")
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    err, out = ([line.partition(" ")[2] for line in text.splitlines()] for text in (done.stderr, done.stdout))
    assert (done.returncode, err) == (0, ["No node has room."]), done.stderr
    assert out == ["The user's own.", "Again, None.", "Again, 127.0.0.1:1."]
