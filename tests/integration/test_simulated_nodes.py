"""Drills on simulated nodes: the real supervisor, its journal and stores, and the verdict, with ranks that only write files."""

from pathlib import Path
from typing import Any

import pytest

from chaosrun.records.events import FaultObserved, PlacementAcquired, WorkerExited
from chaosrun.records.history import LegHistory, read_leg
from chaosrun.verify.verdict import Verdict
from tests.benchmarks.control_plane import measure_control_plane
from tests.simulated_nodes.cluster import SimulatedCluster
from tests.simulated_nodes.drill import carry_out_drill, write_job
from tests.simulated_nodes.fork_server import Pace

NODES, RANKS_PER_NODE = 4, 4
KILL = {"kind": "kill", "rank": 1, "at_step": 6}
TOGETHER = {"kind": "kill", "rank": "random", "at_once": 5, "at_step": 6}
NODE = {"kind": "node", "rank": 9, "at_step": 6}


def drill(folder: Path, *faults: dict[str, Any], **how: Any) -> tuple[Verdict, LegHistory, LegHistory, list[str]]:
    """The verdict, the reference and the leg under faults, and the nodes that were given an agent."""
    pace = Pace(steps=12, **{"step_s": 0.02, **how})
    job = write_job(folder, workers=NODES * RANKS_PER_NODE, pace=pace, faults=faults, every_steps=4)
    with SimulatedCluster(nodes=NODES, ranks_per_node=RANKS_PER_NODE, pace=pace) as cluster:
        run, verdict = carry_out_drill(folder, cluster, job)
        agents = [event["node"] for event in cluster.happened("agent")]
    return verdict, read_leg(run.leg("reference")), read_leg(run.leg("chaos")), agents


@pytest.mark.parametrize("peers_raise", [False, True], ids=["peers wait", "peers raise"])
@pytest.mark.parametrize("fault", [KILL, TOGETHER, NODE], ids=["kill", "five at once", "node"])
def test_ranks_lost_are_started_again_and_the_legs_are_equal(tmp_path: Path, fault: dict[str, Any], peers_raise: bool) -> None:
    verdict, reference, chaos, agents = drill(tmp_path, fault, peers_raise=peers_raise)
    assert verdict.status == "PASS", verdict.hint
    assert len(reference.attempts) == 1
    assert [attempt.resume for attempt in chaos.attempts] == [None, "step-00000004"]
    struck = len(chaos.events(FaultObserved))
    assert struck == fault.get("at_once", 1)
    ended = [exited for exited in chaos.events(WorkerExited) if exited.attempt == 1]
    # Of a node that is gone nobody tells how its ranks ended.
    assert len(ended) == NODES * RANKS_PER_NODE - (RANKS_PER_NODE if fault is NODE else 0)
    placed = chaos.events(PlacementAcquired)
    assert len(placed) == (2 if fault is NODE else 1)
    if fault is NODE:
        assert "node-002" in placed[0].nodes and "node-002" not in placed[1].nodes
    # Those of the nodes that are left go on, with their fork servers.
    assert sorted(agents) == sorted({node for each in placed for node in each.nodes})


def test_no_death_waits_for_a_node_that_says_nothing(tmp_path: Path) -> None:
    """Were it waited for, nobody would tell it to stop, and it would never answer."""
    verdict, _, chaos, _ = drill(tmp_path, KILL, slow="node-003", step_s=0.15)
    assert verdict.status == "PASS", verdict.hint
    assert len(chaos.attempts) == 2


def test_a_rank_that_comes_back_wrong_is_a_difference(tmp_path: Path) -> None:
    """The negative control: after the restart one rank trains on other batches."""
    verdict, *_ = drill(tmp_path, KILL, wrong=7)
    assert (verdict.status, verdict.code) == ("FAIL", "batch_contents"), verdict.hint


@pytest.mark.nightly
def test_a_thousand_ranks_cost_the_supervisor_no_more_a_rank_than_sixty_four() -> None:
    by_ranks = measure_control_plane(1, print)
    assert not [failure for each in by_ranks for failure in each.failures]
    _, some, many = by_ranks
    assert (some.ranks, many.ranks) == (64, 1000)
    for loss, cpu in many.recovery_cpu.items():
        fewer = some.per_rank(some.recovery_cpu[loss]).median
        more = many.per_rank(cpu).median
        assert fewer and more and more < 1.5 * fewer, loss
