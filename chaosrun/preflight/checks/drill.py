"""The check "drill": a small real drill on each node, and one over all nodes that came back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.drills.folders import marked_file, no_empty_folders, shuffled
from chaosrun.preflight.drills.request import DrillRequest, Terms, request_on, request_over
from chaosrun.preflight.model import PROBES, Check, Facts, Finding, Level, Measure, Pool, Rows, Setting, Status
from chaosrun.wording import listed

ROWS = Rows(check="drill")

BEGIN_WITHIN_S = 40.0
"""No drill of a single node begins later, unless the preflight is deep."""
LIMIT_S = 120.0
"""Of one drill."""
SEEN_WITHIN_S = 5.0
DEEP_SHARE = 0.3
"""Of the time that a deep preflight may take, drills of single nodes are repeated for this share."""


def gather(setting: Setting, pool: Pool) -> Facts:
    """{"nodes": {name: facts | None}, "all": facts | None, "unplaced": {name: why}, "unseen": {name: why}, "unwritable": why,
    "strict": whether the drill's job forbids what is not deterministic}; of each drill also "workers", "gpu" (of each worker)
    and "on" (names of its nodes), of the one over all also "left_out"."""
    with no_empty_folders(setting.root):
        return _drilled(setting, pool)


def _drilled(setting: Setting, pool: Pool) -> Facts:
    strict = setting.job is None or setting.job.spec.deterministic == "strict"
    facts = {"nodes": {}, "all": None, "unplaced": {}, "unseen": {}, "unwritable": None, "strict": strict}
    if setting.drills is None:
        return {**facts, "unplaced": {node.name: "there is no Ray to place it on" for node in pool.nodes}}
    try:
        with marked_file(setting.root) as (path, text):
            unseen = _nodes_without(pool, path, text)
    except OSError as error:
        return {**facts, "unwritable": f"{error.filename or setting.root}: {error.strerror}"}
    nodes = list(pool.nodes)
    wishes = {node.name: request_on(setting, node, nodes) for node in nodes if node.name not in unseen}
    wanted = {name: wish for name, wish in wishes.items() if isinstance(wish, DrillRequest)}
    unplaced = {name: wish for name, wish in wishes.items() if isinstance(wish, str)}
    # Should time run out, it is not always for the same ones.
    order = shuffled(wanted)
    alone = dict(zip(order, setting.drills.run([wanted[name] for name in order], _terms(setting)), strict=True))
    told = {name: _with_place(alone[name], wish) for name, wish in wanted.items()}
    whole = None
    sound = [name for name, each in told.items() if each is None or each.get("status") == "PASS"]
    if len(sound) > 1:
        terms = Terms(root=setting.root, begin_within_s=None, limit_s=LIMIT_S)
        over = request_over([wanted[name] for name in sound], setting.job)
        whole = _with_place(setting.drills.run([over], terms)[0], over)
        if whole is not None:
            whole = {**whole, "left_out": [name for name in sound if name not in whole["on"]]}
    return {**facts, "nodes": told, "all": whole, "unplaced": unplaced, "unseen": unseen}


def _with_place(told: Facts | None, wish: DrillRequest) -> Facts | None:
    place = {"workers": wish.workers, "gpu": wish.gpu, "on": [node.name for node in wish.nodes]}
    return None if told is None else {**told, **place}


def _terms(setting: Setting) -> Terms:
    deep = setting.level is Level.DEEP
    return Terms(
        root=setting.root,
        begin_within_s=None if deep else BEGIN_WITHIN_S,
        limit_s=LIMIT_S,
        repeat_s=DEEP_SHARE * setting.seconds if deep and setting.seconds else 0.0,
    )


def _nodes_without(pool: Pool, path: Path, text: str) -> dict[str, str]:
    """Nodes that do not see what this process writes under the root, and why."""
    call = Call(
        probe=f"{PROBES}.shared_file",
        parameters={"path": str(path), "text": text, "wait_s": SEEN_WITHIN_S},
        limit_s=4 * SEEN_WITHIN_S,
    )
    told = pool.ask({node.name: call for node in pool.nodes}, dict)
    return {
        **{name: silence.error for name, silence in told.unanswered.items()},
        **{name: facts["why"] for name, facts in told.answered.items() if not facts["seen"]},
    }


LEAST_FAULTS = 2
EXACT = f"bit-identical to the undisturbed run after at least {LEAST_FAULTS} faults"
ENDED = {"recovery_failed": "it did not come back", "inexact_restore": "it did not come back exactly"}
SHARE_ROOT = "name a folder that all nodes share: --root"
LEAVE_OUT = "leave the node out until its memory, processor or GPU, and driver have been tested"
SHARED = "look for what the nodes share: the driver, the versions of torch and accelerate, the job's env"
BETWEEN = "each node alone came back: look at what is between them, the network and the storage"
AGAIN = "see what the node has said of it in Ray's logs, and make the preflight again: --only drill"
SLOW = 0.2
"""A restart that takes five times as long as on the other nodes is told."""


def judge_drill(setting: Setting, nodes: Sequence[Node], facts: Facts) -> list[Finding]:
    if facts["unwritable"]:
        reason = f"runs cannot be written: {facts['unwritable']}"
        return [_finding(Status.ERROR, reason=reason, remedy="name a writable folder with --root")]
    findings = [*_unplaced(setting, facts), *_unseen(facts)]
    sound = any(told is not None and told.get("status") == "PASS" for told in facts["nodes"].values())
    remedy = LEAVE_OUT if sound else f"{LEAVE_OUT}; {SHARED}"
    for name, told in facts["nodes"].items():
        if told is None:
            reason = "left out: no time was left to begin it; --level deep drills every node"
            findings.append(_finding(Status.SKIP, node=name, reason=reason))
        else:
            findings.append(replace(_judged(told, facts["strict"], remedy), node=name))
            findings += _restart(name, told)
    return [*findings, _over_all(facts)]


def _unplaced(setting: Setting, facts: Facts) -> Iterator[Finding]:
    """A job leaves a node without room for its workers alone, such as a head without CPUs; it has to have room somewhere."""
    nowhere = setting.drills is not None and setting.job is not None and not facts["nodes"]
    status, remedy = (Status.ERROR, "lower per_worker in the job file, or add nodes") if nowhere else (Status.SKIP, "")
    for name, why in facts["unplaced"].items():
        yield _finding(status, node=name, reason=why, remedy=remedy)


def _unseen(facts: Facts) -> list[Finding]:
    """A folder that only this machine sees is not shared; one that others see and a node does not is missing there."""
    shared = len(facts["nodes"]) > 1
    status = Status.ERROR if shared else Status.SKIP
    remedy = "mount there what the other nodes have" if shared else SHARE_ROOT
    return [
        _finding(status, node=name, reason=f"the folder for runs is not seen there ({why}): {remedy}", remedy=remedy)
        for name, why in facts["unseen"].items()
    ]


def _over_all(facts: Facts) -> Finding:
    told, name = facts["all"], "drill over all nodes"
    if told is None:
        drilled = sum(each is None or each.get("status") == "PASS" for each in facts["nodes"].values())
        reason = f"it takes two nodes on which a drill can be carried out, there {'is' if drilled == 1 else 'are'} {drilled}"
        return _finding(Status.SKIP, name=name, reason=reason)
    where = _nodes_of(told)
    judged = replace(_judged(told, facts["strict"], LEAVE_OUT if where else BETWEEN), name=name)
    if told["left_out"]:
        without = f"without {listed(told['left_out'])}: a training over both would leave the GPUs idle"
        judged = replace(judged, reason=_joined(judged.reason, without))
    if judged.status is not Status.FAIL:
        return replace(judged, covers=tuple(told["on"]))
    # Of one node it is that node's; of several the cluster's, and they are named. Where nothing tells them apart, none of them
    # has been shown to train with the others.
    return replace(judged, node=where[0] if len(where) == 1 else None, blames=where or tuple(told["on"]))


def _nodes_of(told: Facts) -> tuple[str, ...]:
    """The nodes whose ranks differ, unless all do."""
    divergence, ranks = told.get("divergence"), told.get("ranks", {})
    if not divergence:
        return ()
    differing = dict.fromkeys(ranks[str(rank)] for rank in divergence["ranks"] if str(rank) in ranks)
    return tuple(differing) if len(differing) < len(set(ranks.values())) else ()


def _judged(told: Facts, strict: bool, remedy: str) -> Finding:
    if "error" in told:
        return _finding(Status.ERROR, reason=told["error"], remedy=told.get("hint") or AGAIN)
    if told["status"] == "PASS":
        return _passed(told)
    shown = f"`chaosrun verify {told['run_argument']}` shows all of it" if told.get("run") else ""
    remedy = _joined(remedy, shown)
    kept = f"the run is kept: {told['run']}" if told.get("run") else ""
    if told["irreproducible"] and strict:
        return _finding(
            Status.FAIL,
            measured=told["irreproducible"],
            threshold="two undisturbed runs are bit-identical",
            reason=_joined("on a sound machine this training repeats itself", kept),
            remedy=remedy,
        )
    if told["status"] == "FAIL" or told["outcome"] in ENDED:
        divergence = told["divergence"]
        return _finding(
            Status.FAIL,
            measured=_difference(divergence) or f"{ENDED.get(told['outcome'], 'it differs')}: {told['cause']}",
            threshold=EXACT,
            reason=_joined(divergence["cause"] if divergence else None, told["hint"], kept),
            remedy=remedy,
        )
    return _finding(Status.ERROR, reason=_joined(told["cause"], kept), remedy=_joined(told["hint"], shown) or AGAIN)


def _passed(told: Facts) -> Finding:
    if told["landed"] < LEAST_FAULTS:
        reason = f"only {told['landed']} of {told['planned']} faults landed: the training was over before the others"
        return _finding(Status.ERROR, reason=reason, remedy=AGAIN)
    times = f", {told['rounds']} times" if told["rounds"] > 1 else ""
    several = told["workers"] > 1
    of = f"{told['workers']} worker{'s' * several} on " + ("GPUs" if told["gpu"] else "CPUs")
    through = f" ({'NCCL' if told['gpu'] else 'gloo'})" if several else ""
    return _finding(Status.PASS, measured=f"bit-identical after {told['landed']} faults{times}: {of}{through}", threshold=EXACT)


def _restart(node: str, told: Facts) -> Iterator[Finding]:
    """Nodes are compared by it; how long a job's takes is the forecast's."""
    seconds = told["costs"].get("restart_s") if told.get("status") == "PASS" else None
    if seconds is not None:
        measure = Measure(number=seconds, unit="s", better="lower", warn=SLOW)
        measured = f"{seconds:.2g} s from a kill to the next step"
        yield _finding(Status.PASS, name="restart", node=node, measured=measured, measure=measure)


def _difference(divergence: Mapping[str, Any] | None) -> str:
    if not divergence:
        return ""
    tensor = f", {divergence['tensor']}" if divergence["tensor"] else ""
    return f"{divergence['kind']} differs first at step {divergence['step']}, rank {divergence['rank']}{tensor}"


def _joined(*sentences: str | None) -> str:
    return "; ".join(filter(None, sentences))


def _finding(status: Status, *, name: str = "drill", **about: Any) -> Finding:
    return ROWS.row(status, name=name, **about)


CHECK = Check(
    name="drill",
    about="a small training is killed, and comes back exactly, on each node and over all",
    order=90,
    level=Level.STANDARD,
    judge=judge_drill,
    gather=gather,
)
