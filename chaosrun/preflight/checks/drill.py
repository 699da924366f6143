"""The check "drill": a small real drill on each node, and one over all nodes that passed.

A `Drills` runs the drills; `preflight.drills.on_ray` does on Ray.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from msgspec import Struct

from chaosrun.cluster.probing import Node
from chaosrun.preflight.earlier_run import Costs
from chaosrun.preflight.model import Check, Finding, Level, Measure, Pool, Rows, Setting, Status, ask
from chaosrun.preflight.placement import gpus_per_worker, room_on
from chaosrun.preflight.probes.seen import SeenFiles
from chaosrun.records.codec import changed
from chaosrun.records.object_urls import is_url
from chaosrun.spec.job_file import Job
from chaosrun.wording import listed

ROWS = Rows(check="drill", name="drill")
MOST_WORKERS = 2
BEGIN_WITHIN_S = 40.0
"""No drill of a single node begins later, unless the preflight is deep."""
LIMIT_S = 120.0
SEEN_WITHIN_S = 5.0
DEEP_SHARE = 0.3
"""Of the time that a deep preflight may take, drills of single nodes are repeated for this share."""
LEAST_FAULTS = 2
EXACT = f"bit-identical to the reference run after at least {LEAST_FAULTS} faults"
ENDED = {"recovery_failed": "it did not come back", "inexact_restore": "it did not come back exactly"}
SHARE_ROOT = "name a folder that all nodes share: --root"
LEAVE_OUT = "leave the node out until its memory, processor or GPU, and driver have been tested"
SHARED = "look for what the nodes share: the driver, the versions of torch and accelerate, the job's env"
BETWEEN = "each node alone came back: look at what is between them, the network and the storage"
AGAIN = "see what the node has said of it in Ray's logs, and make the preflight again: --only drill"
SLOW = 0.2
"""A restart that takes five times as long as on the other nodes is a WARN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRequest:
    """Where to run a drill, its size, and the overrides of its job file."""

    nodes: tuple[Node, ...]
    workers: int
    cpu: float
    gpu: int
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    root: Path
    begin_within_s: float | None
    """Drills that have not begun by then are left out; None: all are made."""
    limit_s: float
    repeat_s: float = 0.0
    """A passing drill is repeated until this much time is over."""


class DrillOutcome(Struct, frozen=True, kw_only=True):
    """The outcome of the first round that did not pass, else of the last round."""

    status: Literal["PASS", "FAIL", "INCONCLUSIVE", "ERROR", "LATE"]
    """Status of its verdict; ERROR: it could not be run; LATE: no time was left to begin it."""
    outcome: str | None = None
    cause: str = ""
    hint: str | None = None
    irreproducible: bool = False
    difference: str = ""
    """The first difference between the chaos leg and its reference, and where."""
    why: str = ""
    differing: tuple[int, ...] = ()
    """All ranks that differ there."""
    landed: int = 0
    planned: int = 0
    rounds: int = 1
    ranks: dict[int, str] = {}
    costs: Costs = Costs()
    seconds: float = 0.0
    run: str = ""
    """Path of the run, if it is kept."""
    run_argument: str = ""
    workers: int = 0
    gpu: int = 0
    on: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Nodes that passed alone but were left out of the drill over all nodes."""


class DrillFacts(Struct, frozen=True, kw_only=True):
    nodes: dict[str, DrillOutcome] = {}
    all: DrillOutcome | None = None
    """The drill over the nodes that passed."""
    unplaced: dict[str, str] = {}
    """Why there can be no drill, by node."""
    unseen: dict[str, str] = {}
    """Why the folder for runs is not visible, by node."""
    unwritable: str = ""
    strict: bool = True
    """Whether the drill's job forbids nondeterministic operations."""


Drills = Callable[[Sequence[DrillRequest], Terms], list[DrillOutcome]]
"""Returns the outcome of each request. A KeyboardInterrupt is raised again once no drill runs any more."""


def gather(setting: Setting, pool: Pool) -> DrillFacts:
    strict = setting.job is None or setting.job.spec.deterministic == "strict"
    if setting.drills is None:
        return DrillFacts(unplaced={node.name: "there is no Ray to place it on" for node in pool.nodes}, strict=strict)
    with _no_empty_folders(setting.root):
        try:
            unseen = _nodes_without_the_root(setting, pool)
        except OSError as error:
            return DrillFacts(unwritable=f"{error.filename or setting.root}: {error.strerror}", strict=strict)
        nodes = list(pool.nodes)
        requests = {node.name: request_on(setting, node, nodes) for node in nodes if node.name not in unseen}
        wanted = {name: request for name, request in requests.items() if isinstance(request, DrillRequest)}
        told = _each(setting, setting.drills, wanted)
        return DrillFacts(
            nodes=told,
            all=_together(setting, setting.drills, {name: wanted[name] for name in wanted if told[name].status in SOUND}),
            unplaced={name: request for name, request in requests.items() if isinstance(request, str)},
            unseen=unseen,
            strict=strict,
        )


SOUND = ("PASS", "LATE")


def _each(setting: Setting, drills: Drills, wanted: dict[str, DrillRequest]) -> dict[str, DrillOutcome]:
    deep = setting.level is Level.DEEP
    terms = Terms(
        root=setting.root,
        begin_within_s=None if deep else BEGIN_WITHIN_S,
        limit_s=LIMIT_S,
        repeat_s=DEEP_SHARE * setting.seconds if deep and setting.seconds else 0.0,
    )
    told = zip(wanted.items(), drills(list(wanted.values()), terms), strict=True)
    return {name: _placed(outcome, request) for (name, request), outcome in told}


def _together(setting: Setting, drills: Drills, sound: dict[str, DrillRequest]) -> DrillOutcome | None:
    if len(sound) < 2:
        return None
    request = request_over(list(sound.values()), setting.job)
    (told,) = drills([request], Terms(root=setting.root, begin_within_s=None, limit_s=LIMIT_S))
    on = {node.name for node in request.nodes}
    return changed(_placed(told, request), left_out=tuple(name for name in sound if name not in on))


def _placed(told: DrillOutcome, request: DrillRequest) -> DrillOutcome:
    return changed(told, workers=request.workers, gpu=request.gpu, on=tuple(node.name for node in request.nodes))


def request_on(setting: Setting, node: Node, nodes: Sequence[Node]) -> DrillRequest | str:
    """The drill of one node: two workers, or one where there is no room for more; or why there can be none."""
    job = setting.job
    gpu = gpus_per_worker(setting, [node] if job is None else nodes)
    if gpu and not node.gpus:
        return "a worker of the job needs a GPU, and Ray counts none there"
    most = min(MOST_WORKERS, node.gpus) if gpu else MOST_WORKERS
    cpu = min(1.0, node.cpus / most) if job is None else job.spec.per_worker.cpu
    workers = min(most, room_on(node, cpu=cpu, gpu=gpu)) if cpu else 0
    if not workers:
        need = "a CPU" if job is None or cpu == 1 else f"{cpu:g} CPUs"
        return f"a worker needs {need}, and Ray counts {node.cpus:g} there"
    return _request([node], workers, cpu, gpu, job)


def request_over(alone: Sequence[DrillRequest], job: Job | None) -> DrillRequest:
    """The drill over the nodes of these drills, one worker on each; if several have GPUs, only over those."""
    on_gpus = [request for request in alone if request.gpu]
    chosen = on_gpus if len(on_gpus) > 1 else alone
    nodes = [node for request in chosen for node in request.nodes]
    cpu = min(1.0, *(node.cpus for node in nodes)) if job is None else job.spec.per_worker.cpu
    return _request(nodes, len(nodes), cpu, int(all(request.gpu for request in chosen)), job)


def _request(nodes: Sequence[Node], workers: int, cpu: float, gpu: int, job: Job | None) -> DrillRequest:
    overrides = {"workers": workers, "per_worker.cpu": cpu, "per_worker.gpu": gpu, "faults.schedule[0].rank": workers - 1}
    if job is not None:
        overrides |= {
            "env": dict(job.spec.env),
            "deterministic": job.spec.deterministic,
            "recovery.preload": list(job.spec.recovery.preload),
        }
        if (storage := job.spec.checkpoint.storage) is not None:
            overrides["checkpoint.storage"] = storage if is_url(storage) else str(job.directory / storage)
    told = tuple(f"{key}={json.dumps(value)}" for key, value in overrides.items())
    return DrillRequest(nodes=tuple(nodes), workers=workers, cpu=cpu, gpu=gpu, overrides=told)


@contextmanager
def _no_empty_folders(root: Path) -> Iterator[None]:
    """Remove empty folders that were made meanwhile."""
    absent = [path for path in (root / "runs", root) if not path.exists()]
    try:
        yield
    finally:
        for path in absent:
            with suppress(OSError):  # kept runs
                path.rmdir()


def _nodes_without_the_root(setting: Setting, pool: Pool) -> dict[str, str]:
    """Nodes that cannot see files that this process writes under the root, and why. Raises OSError where it cannot write
    there."""
    setting.root.mkdir(parents=True, exist_ok=True)
    text = uuid.uuid4().hex  # no one else can have written it
    path, digest = setting.root / f".preflight-{text}", hashlib.sha256(text.encode()).hexdigest()
    path.write_text(text)
    try:
        call = ask("seen", 4 * SEEN_WITHIN_S, digests={str(path): digest}, wait_s=SEEN_WITHIN_S)
        told = pool.ask({node.name: call for node in pool.nodes}, SeenFiles)
    finally:
        path.unlink()
    return {
        **{name: silence.error for name, silence in told.unanswered.items()},
        **{name: why for name, seen in told.answered.items() for why in seen.missing.values()},
    }


def judge(setting: Setting, nodes: Sequence[Node], facts: DrillFacts) -> list[Finding]:
    if facts.unwritable:
        return [ROWS.error(f"runs cannot be written: {facts.unwritable}", "name a writable folder with --root")]
    findings = [*_unplaced(setting, facts), *_unobserved(facts)]
    sound = any(told.status == "PASS" for told in facts.nodes.values())
    remedy = LEAVE_OUT if sound else f"{LEAVE_OUT}; {SHARED}"
    for name, told in facts.nodes.items():
        rows = ROWS.of(node=name)
        if told.status == "LATE":
            findings.append(rows.skip("left out: no time was left to begin it; --level deep drills every node"))
            continue
        findings.append(_judged(rows, told, facts.strict, remedy))
        seconds = told.costs.restart_s
        if told.status == "PASS" and seconds is not None:
            # For comparing nodes; the check "forecast" reports the time of a job's restart.
            measure = Measure(number=seconds, unit="s", better="lower", warn=SLOW)
            findings.append(rows.passed(f"{seconds:.2g} s from a kill to the next step", name="restart", measure=measure))
    return [*findings, _over_all(facts)]


def _unplaced(setting: Setting, facts: DrillFacts) -> Iterator[Finding]:
    """Nodes without room for workers, such as a head without CPUs, are not used by a job; but it needs room somewhere."""
    nowhere = setting.drills is not None and setting.job is not None and not facts.nodes
    for name, why in facts.unplaced.items():
        rows = ROWS.of(node=name)
        yield rows.error(why, "lower per_worker in the job file, or add nodes") if nowhere else rows.skip(why)


def _unobserved(facts: DrillFacts) -> Iterator[Finding]:
    """A folder visible only on this machine is not shared; one that other nodes see but one does not is missing on that
    node."""
    shared = len(facts.nodes) > 1
    remedy = "mount there what the other nodes have" if shared else SHARE_ROOT
    for name, why in facts.unseen.items():
        reason = f"the folder for runs is not seen there ({why}): {remedy}"
        yield ROWS.row(Status.ERROR if shared else Status.SKIP, node=name, reason=reason, remedy=remedy)


def _over_all(facts: DrillFacts) -> Finding:
    told, rows = facts.all, ROWS.of(name="drill over all nodes")
    if told is None:
        drilled = sum(each.status in SOUND for each in facts.nodes.values())
        return rows.skip(f"it takes two nodes that can carry out a drill, there {'is' if drilled == 1 else 'are'} {drilled}")
    # Which nodes differ, unless all do.
    differing = tuple(dict.fromkeys(told.ranks[rank] for rank in told.differing if rank in told.ranks))
    where = differing if len(differing) < len(set(told.ranks.values())) else ()
    judged = _judged(rows, told, facts.strict, LEAVE_OUT if where else BETWEEN)
    if told.left_out:
        without = f"without {listed(told.left_out)}: a training over both would leave the GPUs idle"
        judged = replace(judged, reason=_joined(judged.reason, without))
    if judged.status is not Status.FAIL:
        return replace(judged, covers=told.on)
    # A failure on one node is that node's; one on several is the cluster's, and they are named. If they cannot be
    # distinguished, none of them has been shown to train with the others.
    return replace(judged, node=where[0] if len(where) == 1 else None, blames=where or told.on)


def _judged(rows: Rows, told: DrillOutcome, strict: bool, remedy: str) -> Finding:
    if told.status == "PASS":
        return _passed(rows, told)
    shown = f"`chaosrun verify {told.run_argument}` shows all of it" if told.run else ""
    kept = f"the run is kept: {told.run}" if told.run else ""
    remedy = _joined(remedy, shown)
    if told.irreproducible and strict:
        reason = _joined("on a sound machine this training repeats itself", kept)
        return rows.fail(told.cause, "two fault-free runs are bit-identical", remedy, reason=reason)
    if told.status == "FAIL" or told.outcome in ENDED:
        measured = told.difference or f"{ENDED.get(told.outcome or '', 'it differs')}: {told.cause}"
        return rows.fail(measured, EXACT, remedy, reason=_joined(told.why, told.hint, kept))
    return rows.error(_joined(told.cause, kept), _joined(told.hint, shown) or AGAIN)


def _passed(rows: Rows, told: DrillOutcome) -> Finding:
    if told.landed < LEAST_FAULTS:
        why = f"only {told.landed} of {told.planned} faults landed: the training was over before the others"
        return rows.error(why, AGAIN)
    times = f", {told.rounds} times" if told.rounds > 1 else ""
    several = told.workers > 1
    of = f"{told.workers} worker{'s' * several} on " + ("GPUs" if told.gpu else "CPUs")
    through = f" ({'NCCL' if told.gpu else 'gloo'})" if several else ""
    return rows.passed(f"bit-identical after {told.landed} faults{times}: {of}{through}", EXACT)


def _joined(*sentences: str | None) -> str:
    return "; ".join(filter(None, sentences))


CHECK = Check(
    name="drill",
    about="a small training is killed, and comes back exactly, on each node and over all",
    order=90,
    level=Level.STANDARD,
    judge=judge,
    gather=gather,
)
