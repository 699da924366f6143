"""A driver for a test of many drills on one cluster: nodes of 2 and of 5 CPUs, two raylets of this machine.

`python -m tests.integration.drive_free_nodes [sum]`; with `sum` as if all CPUs were on one node.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from chaosrun.campaign.scheduler import PlacementPool, Scheduler, Shape, Task, one_ray
from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.errors import ResourcesError
from chaosrun.supervise.interrupts import Interrupts
from tests.integration.raylets import add, raylets

SHAPES = {"wide": Shape(1, 3.0, 0), "narrow": Shape(1, 2.0, 0), "whole": Shape(1, 5.0, 0), "both": Shape(3, 2.0, 0)}
SCENES = {("wide", "wide"): 8.0, ("narrow", "whole"): 60.0, ("both",): 0.0}


def main() -> None:
    with raylets(num_cpus=2) as cluster:
        add(cluster, num_cpus=5)
        with Interrupts() as interrupts, one_ray(cluster.address, [*SHAPES.values()], interrupts) as pool:
            # On the 7 CPUs there is room for two of 3, on the nodes for one. A narrow one leaves the large node to a whole one.
            told = {" ".join(names): carried_out(pool, names, hold_s) for names, hold_s in SCENES.items()}
        print(json.dumps(told), flush=True)


def carried_out(pool: PlacementPool, names: Sequence[str], hold_s: float) -> dict[str, Any]:
    """Most drills at once, and how many CPUs the nodes have on which each had its workers, or why it had none. Each holds them
    until all do, or for `hold_s`."""
    where: dict[str, list[float] | str] = {}
    holding: set[str] = set()
    most = 0

    def carry(name: str, cluster: RayCluster | None, *_: object) -> tuple[None, bool]:
        nonlocal most
        assert cluster is not None
        try:
            placed = cluster.acquire(6).nodes
        except ResourcesError as error:
            where[name] = error.message
            return None, False
        cpus = {node["NodeID"]: node["Resources"]["CPU"] for node in ray.nodes()}
        where[name] = [cpus[node] for node, place in placed.items() for _ in place.ranks]
        holding.add(name)
        most = max(most, len(holding))
        until_s = time.monotonic() + hold_s
        while most < len(names) and time.monotonic() < until_s:
            time.sleep(0.05)
        holding.discard(name)
        return None, True

    tasks = [Task(f"{name} {number}", f"{name} {number}", SHAPES[name]) for number, name in enumerate(names)]
    told = {"tell": lambda record: None, "on_result": lambda drill, result: True}
    Scheduler(carry=carry, pool=pool, at_once=None, **told).run(tasks)
    pool.clear()
    return {"most": most, "where": where}


def summed(self: RayCluster, free: Mapping[str, Mapping[str, float]]) -> dict[str, int] | None:
    """`places_within` as if all CPUs were on one node."""
    (first, *_), cpus = free, sum(amounts["CPU"] for amounts in free.values())
    return {first: 1} if cpus >= self.bundle["CPU"] else None


if __name__ == "__main__":
    if "sum" in sys.argv:
        RayCluster.places_within = summed
    main()
