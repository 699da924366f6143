"""The check "cluster": are there enough resources, and is every node the same where it matters? Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from chaosrun.cluster.probing import Node
from chaosrun.preflight import placement
from chaosrun.preflight.assess.clocks import clocks
from chaosrun.preflight.assess.script import script
from chaosrun.preflight.assess.versions import variables, versions
from chaosrun.preflight.model import Facts, Finding, Setting, Status

CHECK = "cluster"


def assess(setting: Setting, nodes: Sequence[Node], facts: Facts) -> list[Finding]:
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
            yield Finding(check=CHECK, name="node answers", status=Status.ERROR, node=node.name, reason=why, remedy=remedy)
    if len(answered) == len(nodes):
        yield Finding(
            check=CHECK,
            name="nodes",
            status=Status.PASS,
            measured=f"{len(answered)} of {len(nodes)} answer",
            threshold="every node that Ray has",
        )


def _resources(setting: Setting, nodes: Sequence[Node], answered: Mapping[str, Facts]) -> Finding:
    # A Ray of chaosrun's own counts as many CPUs as the job asks for, whatever the machine has.
    own = {name: of_node["cpus"] for name, of_node in answered.items() if of_node["own_ray"]}
    nodes = [replace(node, cpus=min(node.cpus, own.get(node.name, node.cpus))) for node in nodes]
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    has = f"{cpus:g} CPUs, {gpus} GPUs" if gpus else f"{cpus:g} CPUs"
    row: dict[str, Any] = {"check": CHECK, "name": "resources", "measured": has}
    if not cpus:
        return Finding(
            **row,
            status=Status.FAIL,
            threshold="at least one node with a CPU",
            reason="no worker can be placed anywhere",
            remedy="start Ray with CPUs; a cluster that grows by itself needs its workers before the preflight: set their "
            "smallest number, or ask for them (ray.autoscaler.sdk.request_resources)",
        )
    if setting.job is None:
        return Finding(**row, status=Status.PASS, threshold="at least one CPU")
    spec = setting.job.spec
    cpu, gpu = spec.per_worker.cpu, placement.gpus_per_worker(setting, nodes)
    room = sum(placement.room_on(node, cpu=cpu, gpu=gpu) for node in nodes)
    row |= {
        "measured": f"{has}: room for {room}",
        "threshold": f"room for at least {spec.workers}, each with {cpu:g} CPU" + (f", {gpu} GPU" if gpu else ""),
    }
    if room >= spec.workers:
        return Finding(**row, status=Status.PASS)
    if own and gpus >= spec.workers * gpu:
        return Finding(
            **row,
            status=Status.WARN,
            reason="Ray would be told that there are more CPUs, and the workers would share these",
            remedy="lower workers or per_worker.cpu, or join a larger cluster with --address",
        )
    return Finding(
        **row,
        status=Status.FAIL,
        reason="the job would wait for a place, and give up",
        remedy="lower workers or per_worker, or add nodes",
    )


def _token(nodes: Sequence[Node], answered: Mapping[str, Facts]) -> Iterator[Finding]:
    name = "authentication"
    if len(nodes) < 2:
        why = "one node: nothing of this Ray crosses the network"
        yield Finding(check=CHECK, name=name, status=Status.SKIP, reason=why)
        return
    open_ = sorted(node for node, facts in answered.items() if facts["auth"] != "token")
    if not open_:
        yield Finding(check=CHECK, name=name, status=Status.PASS, measured="token", threshold="Ray asks for a token")
        return
    yield Finding(
        check=CHECK,
        name=name,
        status=Status.WARN,
        measured=f"none on {len(open_)} of {len(answered)} nodes",
        threshold="Ray asks for a token",
        reason="whoever reaches Ray's ports can run programs on every node",
        remedy="start Ray with RAY_AUTH_MODE=token on every node (from Ray 2.52 on; `ray get-auth-token --generate` makes the "
        "token), or see that nobody else reaches its network",
    )
