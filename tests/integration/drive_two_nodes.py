"""A driver for a test of the cluster: three ranks on two raylets of this machine.

`python -m tests.integration.drive_two_nodes <leg folder>`
"""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from chaosrun.cluster import command
from chaosrun.cluster.messages import Announced, Exited, LauncherFailed, RanksStopped
from chaosrun.cluster.ray_cluster import RayCluster
from tests.integration.ranks import TARGET, make_orders, notes_of
from tests.integration.raylets import add, raylets

TRAIN = str(Path(__file__).parent / "commanded" / "train.py")


def main(leg: Path) -> None:
    with raylets(num_cpus=2) as nodes:
        add(nodes, num_cpus=1)
        with RayCluster(nodes.address, workers=3, gpu=0) as cluster:
            assert cluster.kind == "joined"
            placement = cluster.acquire(300)
            cluster.start_servers({}, preload=(), target=TARGET)
            orders = [replace(order, master_addr=placement.master_addr) for order in make_orders(leg, "rendezvous")]
            started = cluster.start_attempt(1, orders)
            for rank in range(3):
                notes_of(leg, rank)
            stopped: list[str] = []
            for pid in started.pids.values():
                os.kill(pid, signal.SIGKILL)
            while len(stopped) < 2:
                node_id, event = cluster.events.get(timeout=120)
                if isinstance(event, RanksStopped):
                    stopped.append(node_id)
            told = {
                "nodes": list(placement.nodes),
                "ranks": [list(place.ranks) for place in placement.nodes.values()],
                "address": next(iter(placement.nodes.values())).address,
                "master_addr": placement.master_addr,
                "port": started.port,
                "stopped": stopped,
            }
            commanded = run_command(cluster, leg)
            cluster.release()
            print(json.dumps({**told, "commanded": commanded, **placed(list(placement.nodes))}), flush=True)
        assert not ray.is_initialized()


def run_command(cluster: RayCluster, leg: Path) -> dict[str, Any]:
    """torchrun once on each node: where its ranks were when they announced themselves, and how they ended."""
    placement = cluster.placement
    assert placement is not None
    cluster.start_servers({}, preload=(), target=command.TARGET)
    launcher = [str(Path(sys.executable).with_name("torchrun")), "--nnodes", "{nodes}", "--node-rank", "{node_rank}"]
    launcher += ["--nproc-per-node", "{workers_per_node}", "--master-addr", "{master_addr}", "--master-port", "{master_port}"]
    orders = []
    for order in make_orders(leg, "", attempt=2):
        number, place = next((n, place) for n, place in enumerate(placement.nodes.values()) if order.rank in place.ranks)
        about = {"node_rank": number, "nodes": 2, "local_world_size": len(place.ranks), "master_addr": placement.master_addr}
        orders.append(replace(order, args=(), by="script", command=(*launcher, TRAIN, "3"), **about))
    assert cluster.start_attempt(2, orders).pids == {}
    where: dict[int, str] = {}
    completed: dict[int, bool] = {}
    stopped: set[str] = set()
    failed: list[str] = []
    while len(stopped) < 2:
        node_id, event = cluster.events.get(timeout=120)
        match event:
            case Announced():
                where[event.rank] = node_id
            case Exited():
                completed[event.rank] = event.completed
            case LauncherFailed():
                failed.append(f"{event.code}: {event.said}")
            case RanksStopped() if event.attempt == 2:
                stopped.add(node_id)
    return {"where": [where.get(rank) for rank in range(3)], "completed": completed, "failed": failed}


def placed(nodes: list[str]) -> dict[str, Any]:
    """Where one worker goes that is bound to a node, and two that may not share one."""
    bound: list[str] = []
    for node in nodes:
        with RayCluster(None, workers=1, gpu=0, only_on=[node]) as cluster:
            bound += list(cluster.acquire(300).nodes)
    with RayCluster(None, workers=2, gpu=0, cpu=0.5, spread=True) as cluster:
        spread = list(cluster.acquire(300).nodes)
    return {"bound": bound, "spread": sorted(spread)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
