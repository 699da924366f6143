"""The check "cluster": are there enough resources, do the clocks agree, and are all nodes equal where it matters? Pure.

A clock is known only between two bounds: the times at which the question was sent and the answer came (Cristian, Probabilistic
clock synchronization, 1989). A difference that the uncertainty could explain is not a FAIL, and a clock whose difference it
could hide is not a PASS.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from msgspec import Struct

from chaosrun.cluster.probing import Node
from chaosrun.preflight import placement
from chaosrun.preflight.checks.cluster_software import script, variables, versions
from chaosrun.preflight.model import Answers, Check, Finding, Pool, Rows, Setting, Status, ask
from chaosrun.preflight.probes.clock import Clock
from chaosrun.preflight.probes.software import SoftwareFacts

ROWS = Rows(check="cluster")
LIMIT_S = 10.0
UNCERTAIN_S = 0.2
"""Clocks known less well than this are not judged: processes take a moment to start."""
WARN_S = 0.1
"""Events of different nodes can no longer be put in order."""
FAIL_S = 1.0
"""A clock that NTP sets is never so far off: nothing sets this one."""

Bounds = tuple[float, float]
"""How far a node's clock is ahead of the one that asked, in seconds: at least and at most."""


class ClusterFacts(Struct, frozen=True, kw_only=True):
    software: Answers[SoftwareFacts]
    clocks: dict[str, Bounds]


def gather(setting: Setting, pool: Pool) -> ClusterFacts:
    job = setting.job
    # Where the job's own environment looks up imports.
    path = [part for part in setting.env.get("PYTHONPATH", "").split(":") if part]
    call = ask("software", LIMIT_S, script=job and str(job.script_path), path=path)
    told = pool.ask({node.name: call for node in pool.nodes}, SoftwareFacts)
    # A separate process that does nothing else: the shorter it runs, the better its clock is known.
    asked = pool.ask({name: ask("clock", LIMIT_S) for name in told.answered}, Clock)
    clocks = {name: _bounds(clock, asked.asked_s) for name, clock in asked.answered.items()}
    return ClusterFacts(software=told, clocks=clocks)


def _bounds(clock: Clock, asked_s: tuple[float, float]) -> Bounds:
    """Bounds of a node's clock, whose process ran between the two readings here."""
    began_s, ended_s = asked_s
    return clock.now_s - ended_s, clock.began_s - began_s


def judge(setting: Setting, nodes: Sequence[Node], facts: ClusterFacts) -> list[Finding]:
    answered = facts.software.answered
    # If no node has room yet, all nodes are judged: room may be made on any.
    workers = [node for node in nodes if placement.workers_on(setting, node, nodes)] or nodes
    on_gpus = [node.name for node in workers if node.gpus and placement.gpus_per_worker(setting, nodes)]
    names = [node.name for node in workers]
    found = [
        *_nodes(nodes, facts.software),
        _resources(setting, nodes, answered),
        *versions(answered, names, on_gpus),
        *variables(answered, names, frozenset(setting.env)),
        *_clocks(facts.clocks),
        _token(nodes, answered),
    ]
    return found if setting.job is None else [*found, *script(answered, setting.job.script_path, names)]


def _nodes(nodes: Sequence[Node], told: Answers[SoftwareFacts]) -> Iterator[Finding]:
    for node in nodes:
        if node.name not in told.answered:
            silence = told.unanswered.get(node.name)
            why = (silence and silence.error) or "chaosrun's process there gave no answer"
            yield ROWS.error(why, "look at what keeps it busy, and at Ray's logs there", name="node answers", node=node.name)
    if len(told.answered) == len(nodes):
        yield ROWS.passed(f"{len(nodes)} of {len(nodes)} answer", "every node that Ray has", name="nodes")


def _resources(setting: Setting, nodes: Sequence[Node], answered: Mapping[str, SoftwareFacts]) -> Finding:
    # A private Ray counts as many CPUs as the job requests, independent of the machine.
    own = {name: facts.cpus for name, facts in answered.items() if facts.own_ray}
    nodes = [replace(node, cpus=min(node.cpus, own.get(node.name, node.cpus))) for node in nodes]
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    has = f"{cpus:g} CPUs, {gpus} GPUs" if gpus else f"{cpus:g} CPUs"
    rows = ROWS.of(name="resources")
    if not cpus:
        remedy = (
            "start Ray with CPUs; a cluster that grows by itself needs its workers before the preflight: set their "
            "smallest number, or ask for them (ray.autoscaler.sdk.request_resources)"
        )
        return rows.fail(has, "at least one node with a CPU", remedy, reason="no worker can be placed anywhere")
    if setting.job is None:
        return rows.passed(has, "at least one CPU")
    spec = setting.job.spec
    cpu, gpu = spec.per_worker.cpu, placement.gpus_per_worker(setting, nodes)
    room = sum(placement.room_on(node, cpu=cpu, gpu=gpu) for node in nodes)
    measured = f"{has}: room for {room}"
    threshold = f"room for at least {spec.workers}, each with {cpu:g} CPU" + (f", {gpu} GPU" if gpu else "")
    if room >= spec.workers:
        return rows.passed(measured, threshold)
    if own and gpus >= spec.workers * gpu:
        why = "Ray would be told that there are more CPUs, and the workers would share these"
        remedy = "lower workers or per_worker.cpu, or join a larger cluster with --address"
        return rows.warn(measured, threshold, remedy, reason=why)
    why = "the job would wait for a place, and give up"
    return rows.fail(measured, threshold, "lower workers or per_worker, or add nodes", reason=why)


def _token(nodes: Sequence[Node], answered: Mapping[str, SoftwareFacts]) -> Finding:
    rows = ROWS.of(name="authentication")
    if len(nodes) < 2:
        return rows.skip("one node: nothing of this Ray crosses the network")
    without = sum(facts.auth != "token" for facts in answered.values())
    if not without:
        return rows.passed("token", "Ray asks for a token")
    return rows.warn(
        f"none on {without} of {len(answered)} nodes",
        "Ray asks for a token",
        "start Ray with RAY_AUTH_MODE=token on every node (from Ray 2.52 on; `ray get-auth-token --generate` makes the "
        "token), or make sure that no one else can reach its network",
        reason="whoever reaches Ray's ports can run programs on every node",
    )


def _clocks(bounds: Mapping[str, Bounds]) -> Iterator[Finding]:
    rows = ROWS.of(name="clock")
    for node, (low, high) in bounds.items():
        # Two nodes are compared with each other: it is unknown which is right.
        beside = {other: pair for other, pair in bounds.items() if len(bounds) > 2 or other != node}
        if not beside:
            yield rows.skip("one node: nothing to compare with", node=node)
            return
        # The true median lies between the medians of all lower and of all upper bounds.
        least, most = (median(pair[index] for pair in beside.values()) for index in (0, 1))
        of = "the median of all nodes" if len(bounds) > 2 else f"{next(iter(beside))}: nothing says which of the two is right"
        yield _clock(rows.of(node=node), low - most, high - least, of)


def _clock(rows: Rows, low_s: float, high_s: float, of: str) -> Finding:
    offset_s, bound_s = (low_s + high_s) / 2, (high_s - low_s) / 2
    surely_s = abs(offset_s) - bound_s
    status = Status.FAIL if surely_s > FAIL_S else Status.WARN if surely_s > WARN_S else Status.PASS
    if status is Status.PASS and abs(offset_s) + bound_s > UNCERTAIN_S:
        known = f"its clock is known to ± {bound_s:.2g} s only ({abs(offset_s):.2g} s from {of})"
        return rows.skip(f"{known}: the node was slow to answer")
    measured = f"{abs(offset_s):.3g} s {'ahead' if offset_s > 0 else 'behind'} (± {bound_s:.2g} s)"
    remedy = "have chrony or another NTP client set the clock there, then try again"
    return rows.judged(status, measured, f"at most {WARN_S:g} s from {of}", remedy)


CHECK = Check(name="cluster", about="nodes, resources, versions, variables, clocks", order=10, judge=judge, gather=gather)
