"""Where the job's workers can be placed: whether they take GPUs, and how many a node has room for. Pure.

Follows `RayCluster`: `per_worker.gpu: auto` is one GPU each when the whole cluster has one for every worker, else none; a node
is filled before the next one is used.
"""

from collections.abc import Sequence

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Setting


def may_take_gpus(setting: Setting) -> bool:
    """Whether workers may take GPUs, when only one of the cluster's nodes is known. Without a job: yes."""
    return setting.job is None or setting.job.spec.per_worker.gpu != 0


def gpus_per_worker(setting: Setting, nodes: Sequence[Node]) -> int:
    """0 or 1, on these nodes together. Without a job: 1 where there is any."""
    gpus = sum(node.gpus for node in nodes)
    if setting.job is None:
        return int(gpus > 0)
    asked = setting.job.spec.per_worker.gpu
    return int(gpus >= setting.job.spec.workers) if asked == "auto" else asked


def room_on(node: Node, *, cpu: float, gpu: int) -> int:
    """How many workers of this size the node has resources for."""
    # Ray counts CPUs in ten-thousandths, so 0.1 fits into 0.3 three times.
    room = int(node.cpus / cpu + 1e-9)
    return min(room, node.gpus // gpu) if gpu else room


def workers_on(setting: Setting, node: Node, nodes: Sequence[Node]) -> int:
    """How many of the job's workers this node may get; 0: none is ever placed there. Without a job the size of a worker is
    unknown: one, where there is any CPU."""
    if setting.job is None:
        return int(node.cpus > 0)
    spec = setting.job.spec
    return min(spec.workers, room_on(node, cpu=spec.per_worker.cpu, gpu=gpus_per_worker(setting, nodes)))


def nodes_used(setting: Setting, nodes: Sequence[Node]) -> int:
    """How many of the nodes the job's workers fill, placed as densely as possible. Without a job: all of them."""
    if setting.job is None:
        return len(nodes)
    left, used = setting.job.spec.workers, 0
    for workers in sorted((workers_on(setting, node, nodes) for node in nodes), reverse=True):
        if left <= 0 or not workers:
            break
        left, used = left - workers, used + 1
    return used
