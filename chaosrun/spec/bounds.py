"""Finds ranks, steps and workers that exceed the job's size or the machine's: sentences for the planner, and places in the job
file."""

import math
from collections.abc import Iterator

from chaosrun.spec.places import Place, Problem
from chaosrun.spec.tree import Mapping, Node, Scalar, Sequence, child
from chaosrun.wording import count

MOST_PER_CORE = 16
"""How many CPUs the workers of a private Ray may ask for, per core of the machine: more workers would start, and never
train."""


def no_such_rank(rank: int, workers: int) -> str:
    return f"rank {rank} does not exist: the last of {count(workers, 'worker')} is rank {workers - 1}"


def never_reached(step: int, last: int) -> str:
    return f"step {step} is never reached, max_steps is {last}"


def crowded(workers: int, cpu: float, cores: int) -> tuple[str, str] | None:
    """Why this many workers of `cpu` CPUs each must not start on one machine, and what to do; None where they may."""
    if workers * cpu <= MOST_PER_CORE * cores:
        return None
    most = max(1, int(MOST_PER_CORE * cores / cpu))
    share = math.floor(MOST_PER_CORE * cores / workers * 1000) / 1000
    asked = f"{count(workers, 'worker')} of {cpu:g} CPU on {count(cores, 'core')}: at most {most} are started here"
    anyway = f"; to start them all the same, set per_worker.cpu={share:g}" if share > 0 else ""
    return asked, f"lower workers, or join a larger cluster with --address{anyway}"


def out_of_reach(root: Mapping) -> Iterator[Problem]:
    """Ranks and steps of faults that the job does not have, in a file that has other errors as well (else the planner reports
    them)."""
    workers, last = _number(root, "workers"), _number(root, "max_steps")
    schedule = child(root, "faults", "schedule")
    for entry in (*(schedule.items if isinstance(schedule, Sequence) else ()), child(root, "faults", "random")):
        rank, step = _number(entry, "rank"), _number(entry, "at_step")
        if workers and rank and rank[0] >= workers[0]:
            yield Problem(place=rank[1], message=no_such_rank(rank[0], workers[0]))
        if last and step and step[0] > last[0]:
            yield Problem(place=step[1], message=never_reached(step[0], last[0]))


def _number(section: Node | None, key: str) -> tuple[int, Place] | None:
    """The whole number at this key, and its node."""
    node = child(section, key)
    return (node.value, node.place) if isinstance(node, Scalar) and type(node.value) is int else None
