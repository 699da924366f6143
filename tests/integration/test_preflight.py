"""Preflight on a real Ray: bad nodes are named, a silent one costs no more than its time, an interrupt leaves nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from chaosrun.cluster.connection import Connection
from chaosrun.cluster.probe_pool import ProbePool
from chaosrun.cluster.probing import Call
from chaosrun.integrations.schemas import schema
from chaosrun.preflight.report.text import render_text
from chaosrun.preflight.result import from_json, to_json
from chaosrun.processes import identify, is_alive, marked
from tests.conftest import REPOSITORY
from tests.e2e.drills import eventually

INTERRUPTED = """
import sys
from pathlib import Path
from chaosrun import cli
from chaosrun.preflight import conduct
from tests.integration.drive_preflight import waiting
conduct.CHECKS = (waiting(Path(sys.argv[1]), 600.0),)
sys.exit(cli.main(["preflight"]))
"""


@pytest.mark.ray
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_an_interrupt_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    folder = Path(tempfile.mkdtemp(prefix="pf-", dir="/tmp"))
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(folder)},
            stderr=subprocess.PIPE,
            text=True,
        )
        eventually(lambda: any(path.read_text() for path in tmp_path.iterdir()))
        (probed,) = tmp_path.iterdir()
        grandchild = identify(int(probed.read_text()))
        assert grandchild is not None
        process.send_signal(number)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 130 and "error: interrupted" in err and "Traceback" not in err, err
        assert not is_alive(grandchild)
        assert not marked(str(folder))
        assert list(folder.iterdir()) == []
    finally:
        shutil.rmtree(folder)


def test_nothing_is_begun_after_the_time_for_all_and_on_a_node_that_is_lost() -> None:
    pool = ProbePool(Connection(kind="borrowed", address=None, mark=""))
    pool.until = time.monotonic()
    pool.lost["b"] = "no answer"
    call = Call(probe="clock", limit_s=1.0)
    assert {name: outcome.ended for name, outcome in pool.probe({"a": call, "b": call}).items()} == {"a": "late", "b": "lost"}


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver tells: see there."""
    root = tmp_path_factory.mktemp("root")
    command = [sys.executable, "-m", "tests.integration.drive_preflight", str(root)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_bad_nodes_are_named_and_left_out(driven: dict[str, Any]) -> None:
    told = driven["bad"]
    good, skewed, flipped = told["nodes"]
    assert told["good"] == told["file"] == [good], told["lines"]
    assert told["exit_code"] == 8 and told["against"] == {skewed: ["cluster"], flipped: ["bits"]}
    assert any(line.startswith(f"cluster: FAIL clock {skewed}") for line in told["lines"])
    assert any(line.startswith(f"bits: FAIL product {flipped}") for line in told["lines"])
    # Together with others they do nothing any more, so that nobody waits for them.
    left_out = [line for line in told["lines"] if line.startswith("network: SKIP") and "left out: FAIL of" in line]
    assert [line.rpartition(" left out: ")[2] for line in sorted(left_out)] == [
        f"FAIL of {check}" for _, check in sorted([(skewed, "cluster: clock"), (flipped, "bits: product")])
    ]


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_an_agent_that_hangs_and_a_raylet_that_dies_cost_no_more_than_their_time(driven: dict[str, Any]) -> None:
    told = driven["silent"]
    good, hanging, dying, late = told["nodes"]
    assert told["good"] == told["file"] == [good], told["lines"]
    assert {name: sorted(asked) for name, asked in told["asked"].items()} == {"together": sorted([good, late]), "last": [good]}
    assert told["exit_code"] == 8 and told["against"] == {hanging: ["waiting"], dying: ["waiting"], late: ["together"]}
    why = {line.split()[3]: line for line in told["lines"] if line.split()[1] == "ERROR"}
    assert "the node has not answered for" in why[hanging]
    assert "the node itself, is gone" in why[dying] and "the node itself, is gone" in why[late]
    # One silent node is waited for once, and no later check waits for it.
    assert told["seconds"]["waiting"] < 3 * told["waiting_s"] and told["seconds"]["last"] < told["waiting_s"]
    assert told["left"] == []


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["bad", "silent"])
def test_real_results_are_what_the_schema_says_and_are_read_back(driven: dict[str, Any], which: str) -> None:
    saved = driven[which]["saved"]
    jsonschema.Draft202012Validator(schema("preflight")).validate(saved)
    result = from_json(saved)
    assert to_json(result) == saved and result.exit_code == 8
    text = render_text(result, width=80, colour=False)
    assert text.startswith("NOT FIT") and max(map(len, text.split("\nNext\n")[0].splitlines())) <= 80
    assert all(name in text for name in driven[which]["against"])
