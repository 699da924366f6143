"""A driver for the tests of the cluster: starts ranks on a private Ray, says who they are, and then does as it is told.

`python -m tests.integration.drive_cluster <leg folder> wait|close|raise`
"""

import json
import os
import sys
import time
from pathlib import Path

from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.processes import children
from tests.integration.ranks import TARGET, make_orders


def main(leg: Path, then: str) -> None:
    with RayCluster(None, workers=2, gpu=0) as cluster:
        cluster.acquire(300)
        cluster.start_servers({}, preload=(), target=TARGET)
        started = cluster.start_attempt(1, make_orders(leg, "loader", workers=2))
        (agent,) = cluster.agents.values()
        (server,) = children(pid := agent.call("hello"))
        told = {"pids": list(started.pids.values()), "agent": pid, "server": server, "mark": cluster.mark}
        print(json.dumps(told), flush=True)
        match then:
            case "wait":
                time.sleep(600)
            case "raise":
                raise KeyboardInterrupt
            case _:
                assert then == "close"
    print(json.dumps({"environment": [name for name in os.environ if name.startswith("RAY_")]}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
