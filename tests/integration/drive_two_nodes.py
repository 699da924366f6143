"""A driver for a test of the cluster: three ranks on two raylets of this machine.

`python -m tests.integration.drive_two_nodes <leg folder>`
"""

import json
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from chaosrun.cluster.messages import Stopped
from chaosrun.cluster.ray_cluster import RayCluster
from tests.integration.ranks import TARGET, make_orders, notes_of


def main(leg: Path, folder: str) -> None:
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "temp_dir": folder})
    nodes.add_node(num_cpus=1)
    try:
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
                if isinstance(event, Stopped):
                    stopped.append(node_id)
            told = {
                "nodes": list(placement.nodes),
                "ranks": [list(place.ranks) for place in placement.nodes.values()],
                "address": next(iter(placement.nodes.values())).address,
                "master_addr": placement.master_addr,
                "port": started.port,
                "stopped": stopped,
            }
            cluster.release()
            print(json.dumps({**told, **placed(list(placement.nodes))}), flush=True)
        assert not ray.is_initialized()
    finally:
        nodes.shutdown()


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
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        # Ray's test cluster writes its address below RAY_TMPDIR, into a folder that it does not make.
        os.environ["RAY_TMPDIR"] = folder
        Path(folder, "ray").mkdir()
        main(Path(sys.argv[1]), folder)
