"""A driver for a test of drills on several nodes: raylets of this machine, the first one sound.

`python -m tests.integration.drive_preflight_drills <root> <layer or "sound"> …`; a layer is a folder in `faulty`.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from chaosrun.cluster.probe_pool import ProbePool
from chaosrun.preflight.checks.drill import CHECK as DRILL
from chaosrun.preflight.drills.on_ray import run_drills
from chaosrun.preflight.engine import Participants
from chaosrun.preflight.model import Level, Setting
from chaosrun.records.codec import changed, to_plain
from tests.integration.raylets import add, raylets

FAULTY = Path(__file__).parent / "faulty"


def main(root: Path, layers: list[str]) -> None:
    with raylets(num_cpus=2) as cluster:
        assert cluster.head_node is not None
        order = [cluster.head_node.node_id]
        for layer in layers:
            env = {} if layer == "sound" else {"PYTHONPATH": str(FAULTY / layer)}
            order.append(add(cluster, num_cpus=2, env_vars=env).node_id)
        pool = ProbePool.connect(cluster.address)
        try:
            pool.start_agents()
            nodes = sorted(pool.nodes, key=lambda node: order.index(node.node_id))
            setting = Setting(level=Level.STANDARD, root=root, storage=root, drills=run_drills)
            assert DRILL.gather is not None
            facts = DRILL.gather(setting, Participants(pool, frozenset(node.name for node in pool.nodes)))
            facts = changed(facts, nodes={node.name: facts.nodes[node.name] for node in nodes})
            rows = DRILL.judge(setting, pool.nodes, facts)
        finally:
            pool.close()
        print(json.dumps({"facts": to_plain(facts), "rows": [asdict(row) for row in rows]}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
