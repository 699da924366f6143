"""What the simulation found in the real code, each with as few faults and troubles as it took."""

import pytest

from chaosrun.faults.fault import Fault
from tests.simulation.drill import run
from tests.simulation.scenario import Scenario, Trouble


def scenario(seed: int, *troubles: Trouble, faults: tuple[Fault, ...] = (), **more: object) -> Scenario:
    about = {"workers": 2, "nodes": 2, "spares": 0, "steps": 6, "every": 3, "keep": 2, "max_restarts": 1, "hang_timeout_s": 4.0}
    return Scenario(seed=seed, faults=faults, troubles=troubles, **{**about, **more})  # type: ignore[arg-type]


def fault(name: str, rank: int, **more: object) -> Fault:
    return Fault(id=name, rank=rank, source="simulation", **more)  # type: ignore[arg-type]


def at_once(step: int, *ranks: int) -> tuple[Fault, ...]:
    group = f"g{step}/{len(ranks)}"
    return tuple(fault(f"F{rank + 1}", rank, at_step=step, group=group) for rank in ranks)


FOUND = {
    "an agent that was never asked to start says that the attempt is over there": (
        scenario(
            270,
            Trouble(kind="agent_dies", record=18, number=2),
            faults=(
                fault("F2", 1, phase="reduce", at_step=6, group="g6/2"),
                fault("F5", 0, phase=None, after_s=0.11372295103176273, required=False),
            ),
            steps=9,
            max_restarts=2,
        ),
        "completed",
    ),
    "a fork server that dies while places are had is replaced": (
        scenario(178, Trouble(kind="server_dies", at_s=0.009, record=1), workers=4, nodes=1, spares=2, steps=5, every=2),
        "completed",
    ),
    "a node that dies while places are had is replaced": (
        scenario(240, Trouble(kind="node_dies", at_s=0.0186, record=1, amount=0.8), workers=4, nodes=3, steps=5, every=2),
        "completed",
    ),
    "ranks are not unkillable because somebody sets the time": (
        scenario(
            0,
            Trouble(kind="clock_jumps", at_s=0.004, record=5, amount=90.0),
            faults=(fault("F1", 1, kind="stop", at_step=5),),
            workers=4,
            keep=3,
        ),
        "completed",
    ),
    "a stop that is lost with its connection is said again": (
        scenario(
            0,
            Trouble(kind="connection_breaks", record=5),
            faults=(fault("F1", 1, kind="exit", phase="checkpoint.precommit", at_step=2),),
            steps=4,
            every=2,
        ),
        "completed",
    ),
    "a checkpoint that a training goes on from survives a power cut, whoever committed it was killed": (
        scenario(
            11445,
            Trouble(kind="reply_lost", at_s=1.818196565342562, number=2),
            Trouble(kind="killed_at_disk", number=61),
            Trouble(kind="supervisor_killed", record=22, number=6),
            Trouble(kind="power_cut", number=102),
            faults=(fault("F1", 2, phase="forward", at_step=4),),
            workers=4,
            nodes=1,
            steps=7,
            max_restarts=3,
        ),
        "completed",
    ),
    "a strike whose answer is lost has struck": (
        scenario(
            547,
            Trouble(kind="strike_reply_lost"),
            faults=(fault("F1", 2, phase=None, after_s=0.19156849233580858, required=False),),
            workers=3,
            steps=7,
            every=2,
        ),
        "completed",
    ),
    "what a supervisor set aside that was killed before it could say so, the next one says": (
        scenario(
            937,
            Trouble(kind="checkpoint_damaged", at_s=1.8320893537656917, number=1),
            Trouble(kind="killed_at_quarantine"),
            faults=(fault("F1", 0, kind="stop", phase="record", at_step=8),),
            workers=3,
            nodes=3,
            spares=1,
            steps=8,
            keep=1,
            hang_timeout_s=None,
        ),
        "completed",
    ),
    "no rank waits for others that have been seen to strike before": (
        scenario(155, Trouble(kind="supervisor_killed", number=13), faults=at_once(5, 0, 1, 2), workers=3, hang_timeout_s=None),
        "fault_missed",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    about, outcome = FOUND[name]
    ended = run(about)
    assert (ended.violation, ended.outcome) == (None, outcome), "\n".join([about.words(), *ended.story])
