"""The five resume protocols on ten samples: which of them each rank sees, killed after the second batch of the second epoch.

`resume_orders.json` holds the orders by protocol, rank and epoch, as measured with accelerate 1.15 under torchrun, without
chaosrun: the undisturbed run's, and those of a second process that loads the state and goes on ("plain" lists its one pass,
"seedable" the whole second epoch). A drill has to see the very same samples, and only seedable may pass.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from chaosrun.api import RunResult
from chaosrun.records.layout import MANIFEST_NAME, LegLayout
from chaosrun.records.manifest import Manifest
from tests.conftest import REPOSITORY, WarmDrills
from tests.records import read_lines

pytestmark = pytest.mark.ray

JOB = REPOSITORY / "jobs" / "order" / "job.yaml"
SCRIPT = JOB.with_name("train.py")
ORDERS = json.loads((Path(__file__).parent / "resume_orders.json").read_text())
KILLED_AT = 7
"""Where the checkpoint is, too: with five steps in each of three epochs, after two batches of the second."""
RANKS = (0, 1)


Drills = Callable[..., RunResult]


@pytest.fixture(scope="module")
def drill(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    """`drill(protocol, *overrides)`; each is run once for all tests.

    The seed of the job, which the fork server has, is that of other tests' jobs; that of the order stays.
    """
    usual = ["seed=1", "args=[--epochs, 3, --seed, 42, --data-seed, 42]", "verify.confirm=false"]
    root = tmp_path_factory.mktemp("protocols")

    @cache
    def run(protocol: str, *overrides: str) -> RunResult:
        return warm_drills(JOB, root=root, overrides=[f"data.resume={protocol}", *usual, *overrides])

    return run


def steps(leg: LegLayout, attempt: int, rank: int) -> list[dict[str, Any]]:
    return [line for line in read_lines(leg.attempt(attempt).trace(rank)) if line["kind"] == "step"]


def order(leg: LegLayout, attempt: int) -> dict[str, dict[str, list[int]]]:
    """Sample ids by rank and epoch, named and counted as in ORDERS."""
    seen: dict[str, dict[str, list[int]]] = {}
    for rank in RANKS:
        epochs = seen.setdefault(f"rank{rank}", {})
        for step in steps(leg, attempt, rank):
            epochs.setdefault(f"epoch{step['epoch'] + 1}", []).extend(sample for ids in step["ids"] for sample in ids)
    return seen


def places(leg: LegLayout, attempt: int) -> list[list[tuple[int, int]]]:
    """By rank, the epoch (from 0) and the batches done in it at each step."""
    return [[(step["epoch"], step["batches"]) for step in steps(leg, attempt, rank)] for rank in RANKS]


@pytest.mark.parametrize(
    ("protocol", "seen"),
    # What rank 0 sees in step 8, where it should see sample 5.
    [("plain", 4), ("skip", 1), ("stateful", 1), ("stateful_skip", 1)],
)
def test_what_scripts_do_is_reproduced_and_fails(drill: Drills, protocol: str, seen: int) -> None:
    result = drill(protocol)
    verdict, chaos = result.verdict, result.run.leg("chaos")

    expected = ORDERS[protocol]
    assert order(result.run.leg("reference"), 1) == expected["uninterrupted"]
    resumed = order(chaos, 2)
    if protocol == "plain":
        first_pass = {rank: epochs["epoch2"] for rank, epochs in resumed.items()}
        assert first_pass == {rank: epochs["epoch1"] for rank, epochs in expected["resumed"].items()}
        # And then it goes on with the order that the second epoch should have had.
        assert {rank: epochs["epoch3"] for rank, epochs in resumed.items()} == {
            rank: epochs["epoch2"] for rank, epochs in expected["uninterrupted"].items()
        }
    else:
        assert resumed == expected["resumed"]

    assert (verdict.status, verdict.exit_code) == ("FAIL", 3)
    assert verdict.divergence is not None
    assert verdict.divergence.kind == "data order"
    assert (verdict.divergence.step, verdict.divergence.rank, verdict.divergence.ranks) == (KILLED_AT + 1, 0, RANKS)
    assert (list(verdict.divergence.expected), list(verdict.divergence.seen)) == ([5], [seen])
    assert f"data order: step 8, rank 0, attempt 2: samples [5] expected, [{seen}] seen" in verdict.cause
    assert verdict.hint is not None and f"data.resume is {protocol}" in verdict.hint


@pytest.mark.parametrize(
    ("protocol", "last", "first_epoch", "second_epoch"),
    [
        ("plain", 17, range(1, 6), range(1, 6)),
        ("skip", 15, range(3, 6), range(1, 6)),
        ("stateful", 15, range(3, 6), range(1, 6)),
        # The loaded state cuts the later epoch short.
        ("stateful_skip", 13, range(3, 6), range(1, 4)),
    ],
)
def test_positions_say_what_each_protocol_did(
    drill: Drills, protocol: str, last: int, first_epoch: range, second_epoch: range
) -> None:
    result = drill(protocol)
    chaos = result.run.leg("chaos")
    assert places(chaos, 2) == [[*((1, batch) for batch in first_epoch), *((2, batch) for batch in second_epoch)]] * 2
    assert [step["step"] for step in steps(chaos, 2, 0)] == list(range(KILLED_AT + 1, last + 1))
    assert result.verdict.steps == last


def test_seedable_goes_on_in_the_middle_of_the_epoch(drill: Drills) -> None:
    result = drill("seedable")
    expected = ORDERS["seedable"]["uninterrupted"]
    assert result.verdict.status == "PASS", result.verdict.cause
    assert [attempt.resumed_step for attempt in result.verdict.attempts] == [0, KILLED_AT]
    assert order(result.run.leg("reference"), 1) == expected
    rest = {rank: {**epochs, "epoch2": epochs["epoch2"][2:]} for rank, epochs in expected.items()}
    assert order(result.run.leg("chaos"), 2) == {
        rank: {epoch: ids for epoch, ids in epochs.items() if epoch != "epoch1"} for rank, epochs in rest.items()
    }


def test_seedable_goes_on_at_the_beginning_of_an_epoch(drill: Drills) -> None:
    result = drill("seedable", "checkpoint.every_steps=5", "faults.schedule[0].at_step=5")
    assert result.verdict.status == "PASS", result.verdict.cause
    assert [attempt.resumed_step for attempt in result.verdict.attempts] == [0, 5]
    assert order(result.run.leg("reference"), 1) == ORDERS["seedable"]["uninterrupted"]
    assert order(result.run.leg("chaos"), 2) == ORDERS["seedable"]["resumed"]


def test_a_stateful_loaders_state_is_in_the_checkpoint_once(drill: Drills) -> None:
    for protocol, held in [("stateful", True), ("skip", False)]:
        result = drill(protocol)
        (first, *_) = sorted(path for path in result.run.leg("chaos").checkpoints.iterdir() if path.is_dir())
        manifest = Manifest.from_bytes((first / MANIFEST_NAME).read_bytes())
        assert ("dl_state_dict.bin" in manifest.files) == held


@pytest.mark.nightly
def test_alone_the_script_has_the_seedable_order() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    done = subprocess.run([*command, "--cpu"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^rank (\d) epoch (\d): (.*)$", done.stdout, re.MULTILINE)
    expected = ORDERS["seedable"]["uninterrupted"]
    assert {(rank, epoch): json.loads(ids) for rank, epoch, ids in printed} == {
        (rank, epoch): expected[f"rank{rank}"][f"epoch{epoch}"] for rank in "01" for epoch in "123"
    }
