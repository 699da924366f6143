"""The check "shared storage": is it one storage that the nodes have, and do they see each other's files as they were written?
Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaosrun.checkpoint.storage import hint_of
from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.checks.storage import IN_MEMORY, failure, no_answer
from chaosrun.preflight.model import PROBES, Answers, Check, Finding, Level, Measure, Pool, Rows, Setting, Status
from chaosrun.preflight.placement import nodes_used
from chaosrun.preflight.probes.shared_storage import Meeting, Ring, SharedFacts
from chaosrun.wording import count, duration, listed

ROWS = Rows(check="shared storage")
_EFFORT = {
    Level.QUICK: {"meet_s": 3.0, "rounds": 20, "ring_s": 0.5, "wait_s": 3.0, "patience_s": 8.0},
    Level.STANDARD: {"meet_s": 10.0, "rounds": 100, "ring_s": 2.0, "wait_s": 5.0, "patience_s": 25.0},
    # Longer than a client of NFS keeps what it knows of a directory.
    Level.DEEP: {"meet_s": 65.0, "rounds": 1000, "ring_s": 20.0, "wait_s": 65.0, "patience_s": 65.0},
}
NODE_S = 0.01
"""More of them take longer to look for each other."""
MARGIN_S = 7.0
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


@dataclass(frozen=True, slots=True)
class Meet:
    """What the nodes told; a node alone is asked nothing."""

    names: list[str]
    """Of the nodes, by number."""
    told: Answers[SharedFacts]

    def meeting(self, name: str) -> Meeting | None:
        """None: it did not come so far."""
        return self.told.answered[name].meeting if name in self.told.answered else None

    def met(self, name: str) -> set[str]:
        meeting = self.meeting(name)
        return {self.names[number] for number in (meeting.met if meeting else ())}

    def seconds(self, name: str, other: str | None = None) -> float:
        """For how long it looked; at the same time as the other did."""
        meetings = [met for each in (name, other or name) if (met := self.meeting(each))]
        return min(met.left_s for met in meetings) - max(met.arrived_s for met in meetings)


def gather(setting: Setting, pool: Pool) -> Meet:
    names = [node.name for node in pool.nodes]
    if len(names) < 2:
        return Meet(names, Answers(answered={}, unanswered={}))
    effort = dict(_EFFORT[setting.level])
    effort["meet_s"] += NODE_S * len(names)
    limit_s = effort["meet_s"] + effort["ring_s"] + 3 * effort["wait_s"] + effort["patience_s"]
    about = {"storage": str(setting.storage), "token": setting.token, "number": len(names), "limit_s": limit_s, **effort}
    calls = {
        name: Call(probe=f"{PROBES}.shared_storage", parameters={**about, "me": number}, limit_s=limit_s + MARGIN_S)
        for number, name in enumerate(names)
    }
    return Meet(names, pool.ask(calls, SharedFacts))


def judge(setting: Setting, nodes: Sequence[Node], meet: Meet) -> list[Finding]:
    path = str(setting.storage)
    same = ROWS.of(name="same storage", device=path)
    if len(meet.names) < 2:
        return [same.skip("one node: it takes two nodes to share a storage")]
    again = "see what keeps the node busy, and ask again"
    found = [same.error(silence.error, again, node=name) for name, silence in meet.told.unanswered.items()]
    for name, facts in meet.told.answered.items():
        found += _stopped(same.of(node=name), facts)
    groups = _groups(meet, next((node.name for node in nodes if node.head), None))
    found += _sharing(same, meet, groups, setting.job is not None and nodes_used(setting, nodes) > 1)
    if groups and len(groups[0]) > 1:
        row = ROWS.of(name="files of one seen by the other", device=path)
        for name in groups[0]:
            found += _ring(row.of(node=name), meet.names, meet.told.answered[name], path)
    return found


def _stopped(row: Rows, facts: SharedFacts) -> Iterator[Finding]:
    """What kept a node from going on."""
    for failed in facts.failed.values():
        remedy = hint_of(failed.errno) or "see what the kernel log of the node says of it (dmesg)"
        yield row.fail(failure(failed, facts.mount.base if facts.mount else row.device or ""), "no error", remedy)
    yield from no_answer(row, facts)


def _groups(meet: Meet, head: str | None) -> list[list[str]]:
    """Sets of nodes that saw each other, be it one way: the largest first, of equal ones that with Ray's head."""
    present = [name for name in meet.names if meet.meeting(name) is not None]
    groups: list[set[str]] = []
    for name in present:
        linked = {name, *meet.met(name)} & {*present}
        touching = [group for group in groups if group & linked]
        groups = [group for group in groups if not group & linked]
        groups.append(linked.union(*touching))
    groups.sort(key=lambda group: (len(group), head in group), reverse=True)
    return [[name for name in present if name in group] for group in groups]


def _sharing(row: Rows, meet: Meet, groups: Sequence[Sequence[str]], several: bool) -> Iterator[Finding]:
    if len(groups) == 1 and len(groups[0]) == 1:
        yield row.skip("no other node came so far", node=groups[0][0])
        return
    for group in groups:
        rivals = [rival for rival in groups if rival is not group and len(rival) >= len(group)]
        for name in group:
            here = row.of(node=name)
            missed = [other for other in group if other not in {name, *meet.met(name)}]
            if rivals:
                yield _apart(here, meet, name, group, rivals, several)
            elif missed:
                measured = f"{listed(missed)} not seen within {duration(meet.seconds(name))}, though seen from there"
                remedy = "see how long this client keeps what it knows of a directory (NFS: actimeo, lookupcache)"
                yield here.warn(measured, _EVERYONE, remedy)
            else:
                yield here.passed(f"sees {count(len(group) - 1, 'other node')}, and is seen")


def _apart(row: Rows, meet: Meet, name: str, group: Sequence[str], rivals: Sequence[Sequence[str]], several: bool) -> Finding:
    """Of a node that is not in the one group that is larger than all others."""
    missed = [other for rival in rivals for other in rival]
    if not any(meet.seconds(name, other) >= TOGETHER_S for other in missed):
        why = f"it looked when {missed[0]} did not: the nodes were not asked at the same time"
        return row.error(why, "see what kept its processes from starting at once, and ask again")
    looked_s, mount = meet.seconds(name), meet.told.answered[name].mount
    where = f"{mount.base} ({mount.type} of {mount.source or '?'})" if mount else row.device
    measured = f"not shared: {listed(missed)} not seen within {duration(looked_s)}, at {where}"
    if len(group) > 1:
        measured += f"; shared with {listed([other for other in group if other != name])}"
    if looked_s < PATIENT_S and any(_may_come_late(meet, name, other) for other in missed):
        why = f"the same is mounted there, and a client may keep what it knows of a directory for {duration(PATIENT_S)}"
        return row.warn(measured, _EVERYONE, "ask again with --level deep, which looks for longer", reason=why)
    why = "a job that goes on on another node finds none of its checkpoints there"
    if several:
        why = "the job needs several nodes, and a rank finds no checkpoint that was saved on another"
    status = Status.FAIL if several or len(rivals[0]) > 1 else Status.WARN
    remedy = "mount one storage on every node, and name it with checkpoint.storage"
    return row.row(status, measured, _EVERYONE, reason=why, remedy=remedy)


def _may_come_late(meet: Meet, one: str, other: str) -> bool:
    """Whether both have mounted the same from a server. What a node has of its own is seen at once, or never."""
    first, second = meet.told.answered[one].mount, meet.told.answered[other].mount
    if first is None or second is None:
        return False
    same = (first.base, first.type, first.source) == (second.base, second.type, second.source)
    return same and not first.source.startswith("/dev/") and first.type not in OF_ONE_NODE


def _ring(row: Rows, names: Sequence[str], facts: SharedFacts, path: str) -> Iterator[Finding]:
    if facts.ring is None:
        if facts.gathered_s is None:
            yield row.skip("not every node came so far")
        else:
            yield row.warn(f"files of all nodes were not seen within {duration(facts.gathered_s)}", _SOON, _LATE)
        return
    torn = {names[number]: what for number, what in reversed(facts.ring.torn)}
    for writer, what in sorted(torn.items()):
        remedy = "put checkpoints on storage that shows a renamed file only when its bytes are there"
        yield row.fail(f"seen in part at {path}: {what}", "a file is whole when it is seen", remedy, device=writer)
    if (peer := names[facts.ring.peer]) not in torn:
        yield _soon(row.of(device=peer), peer, facts.ring, path)


def _soon(row: Rows, peer: str, ring: Ring, path: str) -> Finding:
    half_s = [took / 2 for took in sorted(ring.there_and_back_s)]
    if not half_s:
        measured = f"nothing came back from {peer} within {duration(ring.waited_s)} at {path}"
        status = Status.FAIL if ring.waited_s >= PATIENT_S else Status.WARN
        remedy = "see whether both nodes have mounted the same storage, and how late they see each other's files"
        return row.row(status, measured, _SOON, remedy=remedy)
    p50_s, p99_s = (half_s[math.ceil(share * len(half_s)) - 1] for share in (0.5, 0.99))
    measured = f"p50 {duration(p50_s)}, p99 {duration(p99_s)}, of {len(half_s)} files there and back"
    if not ring.answered:
        measured += "; the last one did not come back"
    status = Status.PASS if ring.answered and p99_s <= LATEST_SEEN_S else Status.WARN
    return row.judged(status, measured, _SOON, _LATE, measure=Measure(number=p50_s, unit="s", better="lower"))


CHECK = Check(
    name="shared storage",
    about="what one node saves, the others see: whole, and soon",
    order=80,
    level=Level.QUICK,
    gather=gather,
    judge=judge,
)
