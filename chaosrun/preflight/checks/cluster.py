"""The check "cluster": are there enough resources, do the clocks agree, and are all nodes equal where it matters? Pure.

A clock is known only between two bounds: the times at which the question was sent and the answer came (Cristian, Probabilistic
clock synchronization, 1989). A difference that the uncertainty could explain is not a FAIL, and a clock whose difference it
could hide is not a PASS.

A node on which no worker is ever placed, such as a head without CPUs, needs neither torch nor the script, and its variables do
not matter.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from msgspec import Struct

from chaosrun.cluster.probing import Node
from chaosrun.preflight import placement
from chaosrun.preflight.model import Answers, Check, Finding, Pool, Rows, Setting, Status, ask
from chaosrun.preflight.probes.clock import ClockFacts
from chaosrun.preflight.probes.software import ScriptFacts, SoftwareFacts
from chaosrun.records.grouping import grouped
from chaosrun.wording import count, listed

ROWS = Rows(check="cluster")
LIMIT_S = 10.0
UNCERTAIN_S = 0.2
"""Clocks known less well than this are not judged: processes take a moment to start."""
WARN_S = 0.1
"""Events of different nodes can no longer be put in order."""
FAIL_S = 1.0
"""A clock that NTP sets is never so far off: nothing sets this one."""
EVERYWHERE = ("python", "chaosrun", "ray")
NEEDED = (*EVERYWHERE, "torch", "accelerate")
COMPARED = (*NEEDED, "numpy")
OF_GPUS = ("driver", "NCCL")
MATTERS = re.compile(r"(NCCL|OMP|MKL|OPENBLAS|CUBLAS|CUDA|TORCH|PYTORCH|GLOO)_.*|PYTHONHASHSEED|LD_PRELOAD")
DIFFERS_BY_NATURE = re.compile(r"CUDA_VISIBLE_DEVICES|.*_(FILE|DIR|PATH|HOME)")
"""Variables that name devices or places, and so differ between nodes by right."""
NOT_SET, ABSENT = "not set", "not there"
NO_WORKER = "no worker is placed there"
UNKNOWN = {"driver": "no kernel module there tells the driver's version", "NCCL": "no NCCL library is found there"}

Answered = Mapping[str, SoftwareFacts]

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
    asked = pool.ask({name: ask("clock", LIMIT_S) for name in told.answered}, ClockFacts)
    clocks = {name: _bounds(clock, asked.asked_s) for name, clock in asked.answered.items()}
    return ClusterFacts(software=told, clocks=clocks)


def _bounds(clock: ClockFacts, asked_s: tuple[float, float]) -> Bounds:
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


def _resources(setting: Setting, nodes: Sequence[Node], answered: Answered) -> Finding:
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


def _token(nodes: Sequence[Node], answered: Answered) -> Finding:
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
        reason="anyone who reaches Ray's ports can run programs on every node",
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


# Whether every node has the same software and variables, and the job's script with all its imports.


@dataclass(frozen=True, slots=True, kw_only=True)
class Majority:
    value: str
    """The value of most nodes; empty in a tie."""
    share: str
    """How many nodes have it, for people."""
    odd: Mapping[str, str]
    """The value of each node that differs; in a tie, of every node."""
    groups: Mapping[str, Sequence[str]]
    """The nodes by value."""

    @property
    def tied(self) -> bool:
        """Whether they differ without a majority (of two differing nodes neither is the odd one)."""
        return not self.share

    def __str__(self) -> str:
        return "; ".join(f"{value} on {listed(nodes)}" for value, nodes in self.groups.items())


def majority(values: Mapping[str, str]) -> Majority:
    """`values` by node, at least one."""
    groups = grouped(values, lambda node: values[node])
    most = max(len(nodes) for nodes in groups.values())
    value, *rivals = [value for value, nodes in groups.items() if len(nodes) == most]
    if rivals:
        return Majority(value="", share="", odd=values, groups=groups)
    odd = {node: other for node, other in values.items() if other != value}
    return Majority(value=value, share=f"{most} of {len(values)} nodes", odd=odd, groups=groups)


def differing(
    rows: Rows, has: Mapping[str, str], status: Status | Callable[[Iterable[str]], Status], reason: str, remedy: str
) -> Iterator[Finding]:
    """A row for each node that differs from most; without a majority, one row for all nodes."""
    if not has:
        return
    most = majority(has)
    grade = status if callable(status) else lambda values: status
    if most.tied:
        why = f"they differ, and nothing says which is right; {reason}"
        level, same = grade(most.groups), "the same on every node"
        yield rows.row(level, str(most), same, reason=why, remedy=remedy, blames=tuple(most.odd))
        return
    for node, value in most.odd.items():
        threshold = f"{most.value}, as on {most.share}"
        yield rows.row(grade((value, most.value)), value, threshold, node=node, reason=reason, remedy=remedy)


def _spoken_of(found: Iterable[Finding]) -> set[str]:
    """Nodes that are the subject of a finding other than a SKIP, or blamed by one."""
    bad = [finding for finding in found if finding.status is not Status.SKIP]
    return {name for finding in bad for name in (finding.node, *finding.blames) if name}


def versions(answered: Answered, workers: Collection[str], with_gpus: Collection[str]) -> Iterator[Finding]:
    """`workers`: nodes that can get one; `with_gpus`: those whose GPUs may be used."""

    def matters(what: str, node: str) -> bool:
        return what in EVERYWHERE or node in (with_gpus if what in OF_GPUS else workers)

    found: list[Finding] = []
    for what in (*COMPARED, *OF_GPUS):
        rows = ROWS.of(name=f"{what} version")
        has = {node: facts.versions[what] for node, facts in answered.items() if matters(what, node)}
        there = {node: version for node, version in has.items() if version is not None}
        for node in has.keys() - there.keys():
            if what in NEEDED:
                remedy = f"install {what} there, for the Python that Ray runs"
                found.append(rows.fail("not installed", "installed", remedy, node=node))
            elif what in OF_GPUS:
                found.append(rows.skip(UNKNOWN[what], node=node))
        found += _torch(rows, there, with_gpus) if what == "torch" else _versions(rows, what, there)
    yield from found
    odd = _spoken_of(found)
    for node, facts in answered.items():
        if node not in odd:
            told = {what: facts.versions[what] for what in (*COMPARED, *OF_GPUS) if matters(what, node)}
            yield ROWS.passed(
                ", ".join(f"{what} {version}" for what, version in told.items() if version is not None),
                "installed, and the same on every node",
                name="versions",
                node=node,
                reason="" if node in workers else f"{NO_WORKER}: it needs nothing else",
            )


def _torch(rows: Rows, there: Mapping[str, str], with_gpus: Collection[str]) -> Iterator[Finding]:
    """The build (+cpu, +cu130) must be the same only among nodes with GPUs, and among those without."""
    found = list(_versions(rows, "torch", {node: version.partition("+")[0] for node, version in there.items()}))
    yield from found
    alike = there.keys() - _spoken_of(found)
    for gpus in (True, False):
        builds = {node: there[node] for node in there if node in alike and (node in with_gpus) is gpus}
        yield from _versions(rows, "torch", builds)


def _versions(rows: Rows, what: str, there: Mapping[str, str]) -> Iterator[Finding]:
    # Versions that agree in this many parts differ little.
    parts = {"python": 2, "driver": 1, "numpy": 0}.get(what)

    def grade(values: Iterable[str]) -> Status:
        return Status.WARN if len({".".join(version.split(".")[:parts]) for version in values}) == 1 else Status.FAIL

    remedy = f"install the same {what} there" + (" and reboot" if what == "driver" else "")
    yield from differing(rows, there, grade, "the same job may give other numbers there, or not start", remedy)


def variables(answered: Answered, workers: Collection[str], of_job: frozenset[str]) -> Iterator[Finding]:
    """`of_job`: variables that the job's own environment sets equally on every node."""
    rows = ROWS.of(name="environment variables")
    has = {node: facts.variables for node, facts in answered.items() if node in workers}
    alone = "one node: nothing to compare with" if len(answered) < 2 else "no other node gets a worker: nothing to compare with"
    for node in answered:
        if node not in has or len(has) < 2:
            yield rows.skip(alone if node in has else NO_WORKER, node=node)
    if len(has) < 2:
        return
    names = {name for own in has.values() for name in own if MATTERS.fullmatch(name) and not DIFFERS_BY_NATURE.fullmatch(name)}
    why = "it changes how the node computes or talks to the others"
    remedy = "start Ray with the same environment on every node, or set it in the job's env"
    found: list[Finding] = []
    for name in sorted(names - of_job):
        values = {node: own.get(name, NOT_SET) for node, own in has.items()}
        found += differing(ROWS.of(name=f"variable {name}"), values, Status.WARN, why, remedy)
    yield from found
    number = len(names - of_job)
    same = f"{number} that matter to training are set" if number else "none that matters to training is set"
    for node in has.keys() - _spoken_of(found):
        yield rows.passed(same, "the same on every node", node=node)


def script(answered: Answered, path: Path, workers: Collection[str]) -> Iterator[Finding]:
    """The script's files and imports on every node that can get a worker."""
    rows = ROWS.of(name="script")
    readable: dict[str, ScriptFacts] = {}
    for node, facts in answered.items():
        if node not in workers:
            yield rows.skip(NO_WORKER, node=node)
        elif facts.script is None or facts.script.error:
            remedy = "put the job's directory at the same path on every node, or on a shared file system"
            yield rows.fail(facts.script.error if facts.script else ABSENT, f"{path} on every node", remedy, node=node)
        else:
            readable[node] = facts.script
    if readable:
        yield from _files(rows, readable)
        yield from _imports(ROWS.of(name="script's imports"), readable)


def _files(rows: Rows, readable: Mapping[str, ScriptFacts]) -> Iterator[Finding]:
    names = sorted({file for facts in readable.values() for file in facts.files})
    found = {file: majority({node: facts.files.get(file, ABSENT) for node, facts in readable.items()}) for file in names}
    tied = [file for file in names if found[file].tied]
    why, remedy = "its ranks would run another program than the others", "put the same files on every node, or use a shared one"
    if tied:
        most = found[tied[0]]
        measured = f"{listed(tied)} not the same on {' as on '.join(map(listed, most.groups.values()))}"
        reason = f"nothing says which is right; {why}"
        yield rows.fail(measured, "the same on every node", remedy, blames=tuple(most.odd), reason=reason)
    for node, facts in readable.items():
        if odd := [file for file in names if file not in tied and node in found[file].odd]:
            yield rows.fail(f"{listed(odd)} not the same", "the files that most nodes have", remedy, node=node, reason=why)
        elif not tied:
            yield rows.passed(f"there, {count(len(facts.files), 'file')}", "the same on every node", node=node)


def _imports(rows: Rows, readable: Mapping[str, ScriptFacts]) -> Iterator[Finding]:
    somewhere = {name for facts in readable.values() for name, about in facts.imports.items() if about.found}
    for node, facts in readable.items():
        missing = {name: about.optional for name, about in facts.imports.items() if not about.found}
        needed = [name for name, optional in missing.items() if not optional]
        # A script may run without an optional module, but then behaves differently from nodes that have it.
        names = needed or [name for name in missing if name in somewhere]
        if not names:
            told = f"{count(len(facts.imports), 'package')}, {'all that it needs' if missing else 'none missing'}"
            yield rows.passed(told, "all can be imported", node=node)
            continue
        perhaps = facts.own_path and not somewhere & {*needed}
        doubt = "the script changes sys.path, so that they may still be found" if perhaps else ""
        other = "" if needed else "the script can do without, but would go another way than on the other nodes"
        yield rows.row(
            Status.FAIL if needed and not perhaps else Status.WARN,
            f"no {listed(names)}",
            "all can be imported",
            node=node,
            reason=doubt or other,
            remedy=f"install {listed(names)} there, for the Python that Ray runs, or set PYTHONPATH in the job's env",
        )
    for name in sorted(somewhere - {*COMPARED}):
        has = {node: about.version for node, facts in readable.items() if (about := facts.imports.get(name))}
        there = {node: version for node, version in has.items() if version is not None}
        why = "the script imports it, and may compute something else there"
        yield from differing(ROWS.of(name=f"{name} version"), there, Status.WARN, why, f"install the same {name} there")


CHECK = Check(name="cluster", about="nodes, resources, versions, variables, clocks", order=10, judge=judge, gather=gather)
