"""A driver for a test of drills on several nodes: raylets of this machine, the first one sound.

`python -m tests.integration.drive_preflight_drills <root> <layer or "sound"> …`; a layer is a folder in `faulty`.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from ray.cluster_utils import Cluster

from chaosrun.cluster.probe_pool import ProbePool
from chaosrun.preflight.checks.drill import CHECK as DRILL
from chaosrun.preflight.drills.on_ray import RayDrills
from chaosrun.preflight.engine import Participants
from chaosrun.preflight.model import Level, Setting
from chaosrun.records.codec import changed, to_plain

FAULTY = Path(__file__).parent / "faulty"


def main(root: Path, layers: list[str], folder: str) -> None:
    raylets = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "temp_dir": folder})
    try:
        assert raylets.head_node is not None
        order = [raylets.head_node.node_id]
        for layer in layers:
            env = {} if layer == "sound" else {"PYTHONPATH": str(FAULTY / layer)}
            order.append(raylets.add_node(num_cpus=2, env_vars=env).node_id)
        pool = ProbePool.connect(raylets.address)
        try:
            pool.start_agents()
            nodes = sorted(pool.nodes, key=lambda node: order.index(node.node_id))
            setting = Setting(level=Level.STANDARD, root=root, storage=root, drills=RayDrills())
            assert DRILL.gather is not None
            facts = DRILL.gather(setting, Participants(pool, frozenset(node.name for node in pool.nodes)))
            facts = changed(facts, nodes={node.name: facts.nodes[node.name] for node in nodes})
            rows = DRILL.judge(setting, pool.nodes, facts)
        finally:
            pool.close()
        print(json.dumps({"facts": to_plain(facts), "rows": [asdict(row) for row in rows]}), flush=True)
    finally:
        raylets.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        # Ray's test cluster writes its address below RAY_TMPDIR, into a folder that it does not make.
        os.environ["RAY_TMPDIR"] = folder
        Path(folder, "ray").mkdir()
        main(Path(sys.argv[1]), sys.argv[2:], folder)
