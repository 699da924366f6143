"""The check "cluster": are there enough resources, and is every node the same where it matters? Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chaosrun.cluster.probing import Node
from chaosrun.preflight import placement
from chaosrun.preflight.checks.cluster_clocks import clocks
from chaosrun.preflight.checks.cluster_script import script
from chaosrun.preflight.checks.cluster_versions import variables, versions
from chaosrun.preflight.model import Check, Facts, Finding, Level, Pool, Rows, Setting, Status, ask
from chaosrun.spec.model import JobSpec

ROWS = Rows(check="cluster")

LIMIT_S = 10.0
UNCERTAIN_S = 0.2
"""Clocks known less well than this are asked once more, on their own: starting a process costs less than that where nothing
holds it up."""


def gather(setting: Setting, pool: Pool) -> Facts:
    job = setting.job
    asked = {
        "script": None if job is None else str(job.script_path),
        "path": [] if job is None else _own_path(job.spec),
    }
    told = pool.ask({node.name: ask("software", LIMIT_S, **asked) for node in pool.nodes}, dict)
    clocks = {name: _offset(facts["clock"], told.asked_s) for name, facts in told.answered.items()}
    doubtful = [name for name, (low, high) in clocks.items() if high - low > UNCERTAIN_S]
    if doubtful and len(clocks) > 1:
        again = pool.ask({name: ask("clock", LIMIT_S) for name in doubtful}, dict)
        for name, facts in again.answered.items():
            later = _offset(facts["clock"], again.asked_s)
            clocks[name] = min(clocks[name], later, key=lambda bounds: bounds[1] - bounds[0])
    return {**told.raw(), "clocks": clocks}


def _offset(clock: Facts, asked_s: tuple[float, float]) -> tuple[float, float]:
    """Bounds of how far a node's clock is ahead of this one: its process ran between the two readings here."""
    began_s, ended_s = asked_s
    return clock["now_s"] - ended_s, clock["began_s"] - began_s


def _own_path(spec: JobSpec) -> list[str]:
    """Directories that the job's own environment adds."""
    return [part for part in spec.env.get("PYTHONPATH", "").split(":") if part]


def judge(setting: Setting, nodes: Sequence[Node], facts: Facts) -> list[Finding]:
    answered: Mapping[str, Facts] = facts["answered"]
    # Where there is room nowhere, they have to be right for the room that will be made.
    workers = [node for node in nodes if placement.workers_on(setting, node, nodes)] or nodes
    on_gpus = [node.name for node in workers if node.gpus and placement.gpus_per_worker(setting, nodes)]
    names = [node.name for node in workers]
    found = [
        *_nodes(nodes, facts),
        _resources(setting, nodes, answered),
        *versions(answered, names, on_gpus),
        *variables(answered, names, frozenset(setting.job.spec.env) if setting.job else frozenset()),
        *clocks(facts["clocks"]),
        *_token(nodes, answered),
    ]
    if setting.job is not None:
        found += script(answered, setting.job.script_path, names)
    return found


def _nodes(nodes: Sequence[Node], facts: Facts) -> Iterator[Finding]:
    answered = facts["answered"]
    for node in nodes:
        if node.name not in answered:
            why = facts["unanswered"].get(node.name, {}).get("error") or "chaosrun's process there gave no answer"
            remedy = "look at what keeps the node busy, and at Ray's logs there"
            yield ROWS.error(why, remedy, name="node answers", node=node.name)
    if len(answered) == len(nodes):
        yield ROWS.passed(f"{len(answered)} of {len(nodes)} answer", "every node that Ray has", name="nodes")


def _resources(setting: Setting, nodes: Sequence[Node], answered: Mapping[str, Facts]) -> Finding:
    # A Ray of chaosrun's own counts as many CPUs as the job asks for, whatever the machine has.
    own = {name: of_node["cpus"] for name, of_node in answered.items() if of_node["own_ray"]}
    nodes = [replace(node, cpus=min(node.cpus, own.get(node.name, node.cpus))) for node in nodes]
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    has = f"{cpus:g} CPUs, {gpus} GPUs" if gpus else f"{cpus:g} CPUs"
    row: dict[str, Any] = {"check": "cluster", "name": "resources", "measured": has}
    if not cpus:
        return ROWS.row(
            Status.FAIL,
            threshold="at least one node with a CPU",
            reason="no worker can be placed anywhere",
            remedy="start Ray with CPUs; a cluster that grows by itself needs its workers before the preflight: set their "
            "smallest number, or ask for them (ray.autoscaler.sdk.request_resources)",
            **row,
        )
    if setting.job is None:
        return ROWS.passed(threshold="at least one CPU", **row)
    spec = setting.job.spec
    cpu, gpu = spec.per_worker.cpu, placement.gpus_per_worker(setting, nodes)
    room = sum(placement.room_on(node, cpu=cpu, gpu=gpu) for node in nodes)
    row |= {
        "measured": f"{has}: room for {room}",
        "threshold": f"room for at least {spec.workers}, each with {cpu:g} CPU" + (f", {gpu} GPU" if gpu else ""),
    }
    if room >= spec.workers:
        return ROWS.passed(**row)
    if own and gpus >= spec.workers * gpu:
        return ROWS.row(
            Status.WARN,
            reason="Ray would be told that there are more CPUs, and the workers would share these",
            remedy="lower workers or per_worker.cpu, or join a larger cluster with --address",
            **row,
        )
    return ROWS.row(
        Status.FAIL,
        reason="the job would wait for a place, and give up",
        remedy="lower workers or per_worker, or add nodes",
        **row,
    )


def _token(nodes: Sequence[Node], answered: Mapping[str, Facts]) -> Iterator[Finding]:
    name = "authentication"
    if len(nodes) < 2:
        why = "one node: nothing of this Ray crosses the network"
        yield ROWS.skip(why, name=name)
        return
    open_ = sorted(node for node, facts in answered.items() if facts["auth"] != "token")
    if not open_:
        yield ROWS.passed("token", "Ray asks for a token", name=name)
        return
    yield ROWS.warn(
        f"none on {len(open_)} of {len(answered)} nodes",
        "Ray asks for a token",
        "start Ray with RAY_AUTH_MODE=token on every node (from Ray 2.52 on; `ray get-auth-token --generate` makes the "
        "token), or see that nobody else reaches its network",
        name=name,
        reason="whoever reaches Ray's ports can run programs on every node",
    )


CHECK = Check(
    name="cluster",
    about="nodes, resources, versions, variables, clocks",
    order=10,
    level=Level.QUICK,
    judge=judge,
    gather=gather,
)
