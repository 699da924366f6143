"""The check "shared storage": is it one storage that the nodes have, and do they see each other's files as they were written?
Pure."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaosrun.checkpoint.storage import hint_of
from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.checks.storage import IN_MEMORY, failure
from chaosrun.preflight.model import PROBES, Check, Facts, Finding, Level, Measure, Pool, Rows, Setting, Status
from chaosrun.preflight.placement import nodes_used
from chaosrun.wording import count, duration, listed

ROWS = Rows(check="shared storage")

_EFFORT = {
    Level.QUICK: {"meet_s": 3.0, "names": 40, "rounds": 20, "ring_s": 0.5, "wait_s": 3.0, "patience_s": 8.0},
    Level.STANDARD: {"meet_s": 10.0, "names": 100, "rounds": 100, "ring_s": 2.0, "wait_s": 5.0, "patience_s": 25.0},
    # Longer than a client of NFS keeps what it knows of a directory.
    Level.DEEP: {"meet_s": 65.0, "names": 1000, "rounds": 1000, "ring_s": 20.0, "wait_s": 65.0, "patience_s": 65.0},
}
NODE_S = 0.01
"""More of them take longer to look for each other."""
MARGIN_S = 7.0


def _gather(setting: Setting, pool: Pool) -> Facts:
    """{"names": of the nodes by number, "answered", "unanswered"}; a node alone is asked nothing."""
    names = [node.name for node in pool.nodes]
    if len(names) < 2:
        return {"names": names, "answered": {}, "unanswered": {}}
    effort = dict(_EFFORT[setting.level])
    effort["meet_s"] += NODE_S * len(names)
    limit_s = effort["meet_s"] + effort["ring_s"] + 3 * effort["wait_s"] + effort["patience_s"]
    about = {"storage": str(setting.storage), "token": setting.token, "number": len(names), "limit_s": limit_s}
    calls = {
        name: Call(probe=f"{PROBES}.shared_storage", parameters={**about, **effort, "me": number}, limit_s=limit_s + MARGIN_S)
        for number, name in enumerate(names)
    }
    return {"names": names, **pool.ask(calls, dict).raw()}


SAME, SEEN = "same storage", "files of one seen by the other"
LATEST_SEEN_S = 1.0
"""A restarted rank looks for its checkpoint within a second of the death of the one before."""
TOGETHER_S = 0.5
"""As long must two have looked for each other at the same time, for one that was not seen to be judged."""
PATIENT_S = 60.0
"""A client of NFS keeps what it knows of a directory for at most so long, unless it was told otherwise (acdirmax)."""
OF_ONE_NODE = IN_MEMORY | {"overlay"}
_EVERYONE = "files of every other node"
_SOON = f"at most {duration(LATEST_SEEN_S)}"
_LATE = "let clients keep what they know of directories for less long (NFS: actimeo), or expect restores to miss a save"
_SHARE = "mount one storage on every node, and name it with checkpoint.storage"


@dataclass(frozen=True, slots=True)
class _Nodes:
    path: str
    names: list[str]
    answered: Mapping[str, Facts]

    def met(self, name: str) -> Facts | None:
        """What it found while looking for the others; None when it did not come so far."""
        return self.step(name, "meet")

    def step(self, name: str, step: str) -> Any:
        return self.answered[name]["steps"].get(step, {}).get("found") if name in self.answered else None

    def looked_s(self, name: str) -> float:
        met = self.step(name, "meet")
        return met["left_s"] - met["arrived_s"]

    def place(self, name: str) -> str:
        found = self.step(name, "place")
        return f"{found['base']} ({found['type']} of {found['source'] or '?'})" if found else self.path

    def row(self, name: str, status: Status, measured: str = "", **fields: Any) -> Finding:
        return ROWS.row(status, measured, name=name, **{"device": self.path, **fields})


def judge(setting: Setting, nodes: Sequence[Node], facts: Facts) -> list[Finding]:
    those = _Nodes(str(setting.storage), facts["names"], facts["answered"])
    if len(those.names) < 2:
        return [those.row(SAME, Status.SKIP, reason="one node: it takes two nodes to share a storage")]
    again = "see what keeps the node busy, and ask again"
    found = [
        those.row(SAME, Status.ERROR, node=name, reason=told["error"], remedy=again)
        for name, told in facts["unanswered"].items()
    ]
    for name in those.names:
        found += _stopped(those, name)
    present = [name for name in those.names if those.met(name) is not None]
    groups = _groups(those, present, next((node.name for node in nodes if node.head), None))
    found += _sharing(those, groups, setting.job is not None and nodes_used(setting, nodes) > 1)
    for group in (group for group in groups[:1] if len(group) > 1):
        found += _ring(those, group)
        found += _names(those, group)
        found += _lock(those, group)
    return found


def _stopped(those: _Nodes, name: str) -> Iterator[Finding]:
    """What kept a node from going on."""
    said = those.answered.get(name)
    if said is None:
        return
    for failed in (told["failed"] for told in said["steps"].values() if "failed" in told):
        measured = failure(failed, those.place(name).partition(" (")[0])
        remedy = hint_of(failed["errno"]) or "see what the kernel log of the node says of it (dmesg)"
        yield those.row(SAME, Status.FAIL, measured, node=name, threshold="no error", remedy=remedy)
    if said["hung"]:
        measured = f"no answer within {duration(said['patience_s'])}"
        remedy = "see whether its server and the network to it are up (`mount`, and `dmesg` on the node)"
        yield those.row(SAME, Status.FAIL, measured, node=name, threshold="storage that answers", remedy=remedy)
    elif said["slow"]:
        measured = f"not done within {duration(said['limit_s'])}, though it goes on"
        remedy = "see how busy the storage and the network to it are"
        yield those.row(SAME, Status.WARN, measured, node=name, threshold="all of it within that time", remedy=remedy)


def _groups(those: _Nodes, present: Sequence[str], head: str | None) -> list[list[str]]:
    """Sets of nodes that saw each other, be it one way: the largest first, of equal ones that with Ray's head."""
    groups: list[set[str]] = []
    for name in present:
        met = those.met(name)
        assert met is not None
        linked: set[str] = {name, *(those.names[number] for number in met["met"])} & {*present}
        touching = [group for group in groups if group & linked]
        groups = [group for group in groups if not group & linked]
        groups.append(linked.union(*touching))
    groups.sort(key=lambda group: (len(group), head in group), reverse=True)
    return [[name for name in present if name in group] for group in groups]


def _sharing(those: _Nodes, groups: Sequence[Sequence[str]], several: bool) -> Iterator[Finding]:
    if len(groups) == 1 and len(groups[0]) == 1:
        yield those.row(SAME, Status.SKIP, node=groups[0][0], reason="no other node came so far")
        return
    for group in groups:
        for name in group:
            rivals = [rival for rival in groups if rival is not group and len(rival) >= len(group)]
            yield _apart(those, name, group, rivals, several) if rivals else _inside(those, name, group)


def _inside(those: _Nodes, name: str, group: Sequence[str]) -> Finding:
    """Of a node that shares with most."""
    seen = {those.names[number] for number in those.step(name, "meet")["met"]}
    missed = [other for other in group if other not in {name, *seen}]
    if not missed:
        peers = count(len(group) - 1, "other node")
        return those.row(SAME, Status.PASS, f"sees {peers}, and is seen", node=name)
    return those.row(
        SAME,
        Status.WARN,
        f"{listed(missed)} not seen within {duration(those.looked_s(name))}, though seen from there",
        node=name,
        threshold=_EVERYONE,
        remedy="see how long this client keeps what it knows of a directory (NFS: actimeo, lookupcache)",
    )


def _apart(those: _Nodes, name: str, group: Sequence[str], rivals: Sequence[Sequence[str]], several: bool) -> Finding:
    """Of a node that is not in the one group that is larger than all others."""
    missed = [other for rival in rivals for other in rival]
    if not any(_were_together(those, name, other) for other in missed):
        why = f"it looked when {missed[0]} did not: the nodes were not asked at the same time"
        remedy = "see what kept its processes from starting at once, and ask again"
        return those.row(SAME, Status.ERROR, node=name, reason=why, remedy=remedy)
    looked_s = those.looked_s(name)
    measured = f"not shared: {listed(missed)} not seen within {duration(looked_s)}, at {those.place(name)}"
    if len(group) > 1:
        measured += f"; shared with {listed([other for other in group if other != name])}"
    if looked_s < PATIENT_S and any(_may_come_late(those, name, other) for other in missed):
        why = f"the same is mounted there, and a client may keep what it knows of a directory for {duration(PATIENT_S)}"
        remedy = "ask again with --level deep, which looks for longer"
        return those.row(SAME, Status.WARN, measured, node=name, threshold=_EVERYONE, reason=why, remedy=remedy)
    why = (
        "the job needs several nodes, and a rank finds no checkpoint that was saved on another"
        if several
        else "a job that goes on on another node finds none of its checkpoints there"
    )
    status = Status.FAIL if several or len(rivals[0]) > 1 else Status.WARN
    return those.row(SAME, status, measured, node=name, threshold=_EVERYONE, reason=why, remedy=_SHARE)


def _may_come_late(those: _Nodes, one: str, other: str) -> bool:
    """Whether both have mounted the same from a server. What a node has of its own is seen at once, or never."""
    first, second = those.step(one, "place"), those.step(other, "place")
    same = all(first[key] == second[key] for key in ("base", "type", "source"))
    return same and not first["source"].startswith("/dev/") and first["type"] not in OF_ONE_NODE


def _were_together(those: _Nodes, one: str, other: str) -> bool:
    first, second = those.met(one), those.met(other)
    assert first is not None and second is not None
    return min(first["left_s"], second["left_s"]) - max(first["arrived_s"], second["arrived_s"]) >= TOGETHER_S


def _ring(those: _Nodes, group: Sequence[str]) -> Iterator[Finding]:
    for name in group:
        ring = those.step(name, "ring")
        if ring is None:
            yield _no_ring(those, name)
            continue
        torn: dict[str, str] = {those.names[number]: what for number, what in reversed(ring["torn"])}
        yield from (_torn(those, name, writer, what) for writer, what in sorted(torn.items()))
        peer: str = those.names[ring["peer"]]
        if peer not in torn:
            yield _took(those, name, peer, ring) if ring["there_and_back_s"] else _silent(those, name, peer, ring)


def _no_ring(those: _Nodes, name: str) -> Finding:
    compete = those.step(name, "compete")
    if compete is None or "left" in compete:
        return those.row(SEEN, Status.SKIP, node=name, reason="not every node came so far")
    measured = f"files of all nodes were not seen within {duration(compete['waited_s'])}"
    return those.row(SEEN, Status.WARN, measured, node=name, threshold=_SOON, remedy=_LATE)


def _torn(those: _Nodes, name: str, writer: str, what: str) -> Finding:
    return those.row(
        SEEN,
        Status.FAIL,
        f"seen in part at {those.path}: {what}",
        node=name,
        device=writer,
        threshold="a file is whole when it is seen",
        remedy="put checkpoints on storage that shows a renamed file only when its bytes are there",
    )


def _silent(those: _Nodes, name: str, peer: str, ring: Facts) -> Finding:
    """Nothing came back."""
    waited_s = ring["waited_s"]
    measured = f"nothing came back from {peer} within {duration(waited_s)} at {those.path}"
    status = Status.FAIL if waited_s >= PATIENT_S else Status.WARN
    remedy = "see whether both nodes have mounted the same storage, and how late they see each other's files"
    return those.row(SEEN, status, measured, node=name, device=peer, threshold=_SOON, remedy=remedy)


def _took(those: _Nodes, name: str, peer: str, ring: Facts) -> Finding:
    half_s = [took / 2 for took in sorted(ring["there_and_back_s"])]
    p50_s, p99_s = _share(half_s, 0.5), _share(half_s, 0.99)
    measured = f"p50 {duration(p50_s)}, p99 {duration(p99_s)}, of {len(half_s)} files there and back"
    if not ring["answered"]:
        measured += "; the last one did not come back"
    late = not ring["answered"] or p99_s > LATEST_SEEN_S
    return those.row(
        SEEN,
        Status.WARN if late else Status.PASS,
        measured,
        node=name,
        device=peer,
        threshold=_SOON,
        remedy=_LATE if late else "",
        measure=Measure(number=p50_s, unit="s", better="lower"),
    )


def _names(those: _Nodes, group: Sequence[str]) -> Iterator[Finding]:
    name = "exclusive create between nodes"
    tried = {member: found for member in group if (found := those.step(member, "compete")) and "won" in found}
    if len(tried) < len(group):
        yield those.row(name, Status.SKIP, reason="not every node came so far")
        return
    names = next(iter(tried.values()))["names"]
    wins = Counter(number for found in tried.values() for number in found["won"])
    again = {number for found in tried.values() for number in found["again"]}
    twice = again | {number for number, times in wins.items() if times > 1}
    never = [number for number in range(names) if number not in wins]
    what = f"{names} names, {len(group)} nodes"
    if not twice and not never:
        yield those.row(name, Status.PASS, f"{what}: one each")
        return
    # Whose client makes once more what is there, that one does not honour it; who came first does not matter.
    loose = [member for member in group if tried[member]["again"]]
    who = loose or [member for member in group if twice & {*tried[member]["won"]}]
    measured = f"of {what}, {len(twice)} created twice" + (f", by {listed(who)}" if who else "")
    if never:
        measured += f", {len(never)} by nobody"
    remedy = "two runs could take one folder: use storage that honours O_EXCL between its clients"
    about: dict[str, Any] = {"threshold": "each created by exactly one", "remedy": remedy, "blames": tuple(loose)}
    yield those.row(name, Status.FAIL, f"{measured}, at {those.path}", **about)


def _lock(those: _Nodes, group: Sequence[str]) -> Iterator[Finding]:
    name, holder = "lock between nodes", group[0]
    refused = {
        member: found["refused"]
        for member in group
        if member != holder and (found := those.step(member, "compete")) and "refused" in found
    }
    ignored = [member for member, was in refused.items() if was is False]
    if ignored:
        yield those.row(
            name,
            Status.WARN,
            f"{listed(ignored)} could take at {those.path} what {holder} held",
            threshold="one holder in the whole cluster",
            reason="two supervisors on two nodes could take one run",
            remedy="resume a run on the node that it was started on, or mount the storage with locks (NFS: without nolock, "
            "local_lock)",
        )
    elif refused:
        yield those.row(name, Status.PASS, f"held by {holder}, refused to {count(len(refused), 'other')}")


def _share(ascending: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    return ascending[max(0, math.ceil(share * len(ascending)) - 1)]


CHECK = Check(
    name="shared storage",
    about="what one node saves, the others see: whole, soon, and created once",
    order=80,
    level=Level.QUICK,
    gather=_gather,
    judge=judge,
)
