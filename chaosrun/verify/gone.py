"""What shows that a node went, or the supervisor and Ray's head: who was struck, who was seen gone, by pid and start time.

Pure. The note of a node's end is written by `faults.witness`, that of the supervisor's by `supervise.striking`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import PREEMPTED_EXIT_CODE
from chaosrun.records.history import LegHistory

_SIGKILL = 9
_STRUCK: Mapping[str, tuple[str, ...]] = {
    "node": ("agent", "fork server", "{rank}"),
    "drain": ("agent", "fork server"),
    "agent": ("agent",),
    "raylet": ("raylet",),
    "supervisor": ("supervisor",),
    "head": ("head", "supervisor"),
}
"""Who must have been struck."""
_ALONE = ("agent", "raylet", "supervisor", "head")
"""Kinds that strike nobody else."""
_GONE: Mapping[str, tuple[str, ...]] = {
    "node": ("agent", "fork server", "{rank}"),
    "drain": ("agent", "fork server", "{rank}"),
    "agent": ("agent", "fork server", "{rank}"),
    "raylet": ("raylet", "agent", "fork server", "{rank}"),
    "supervisor": ("supervisor",),
    "head": ("head", "supervisor"),
}
"""Who must have been seen to be gone."""


def gone_problem(fault: Fault, asked: Mapping[str, Any], seen: Mapping[str, Any], chaos: LegHistory) -> str | None:
    """Why this does not show that what the fault was meant to end has ended; None when it does."""
    found = seen.get("found")
    if not isinstance(found, Mapping):
        return "nothing was written down of what it did"
    if found.get("problem"):
        return str(found["problem"])
    complaints = (*_of_processes(fault, seen, found), *_of_place(fault, asked, found, chaos))
    return complaints[0] if complaints else None


def _of_processes(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    struck, gone = _by_name(found, "struck"), _by_name(found, "gone")
    rank = f"rank {fault.rank}"
    if found.get("left") != []:
        yield f"it is not said that nobody was left: {found.get('left')}"
    for whose, listed, expected in (("struck", struck, _STRUCK), ("seen gone", gone, _GONE)):
        for name in expected[fault.kind]:
            what = name.format(rank=rank)
            if what not in listed:
                yield f"the {what} was not {whose}"
    if fault.kind in _ALONE and set(struck) - set(_STRUCK[fault.kind]):
        yield f"others were struck too: {', '.join(sorted(set(struck) - set(_STRUCK[fault.kind])))}"
    if not {who for each in struck.values() for who in each} <= {who for each in gone.values() for who in each}:
        yield "some that were struck were not seen gone"
    if fault.facts.evidence == "node":
        if seen["pid"] not in {pid for pid, _ in gone.get(rank, ())}:
            yield f"process {seen['pid']} of {rank} was not seen gone"
        if found.get("agent") not in {pid for pid, _ in gone.get("agent", ())}:
            yield f"the agent, process {found.get('agent')}, was not seen gone"
    if fault.kind == "drain":
        yield from _of_notice(fault, found)


def _of_notice(fault: Fault, found: Mapping[str, Any]) -> Iterator[str]:
    """Told, and then gone in order, or killed when grace had run out."""
    if fault.rank not in found.get("told", ()):
        yield f"rank {fault.rank} was not told to leave"
    for rank in found.get("told", ()):
        end = (found.get("ends") or {}).get(str(rank))
        out_of_time = found.get("waited_s", 0.0) >= fault.option("grace_s")
        if end is None and not out_of_time:
            yield f"it is not known how rank {rank} left"
        elif end is not None and end.get("exit_code") != PREEMPTED_EXIT_CODE and end.get("signal") != _SIGKILL:
            yield f"rank {rank} did not leave on the notice: it {_end_of(end)}"
        elif end is not None and end.get("signal") == _SIGKILL and not out_of_time:
            yield f"rank {rank} was killed {found.get('waited_s', 0.0):g} s after the notice, before its grace ran out"


def _of_place(fault: Fault, asked: Mapping[str, Any], found: Mapping[str, Any], chaos: LegHistory) -> Iterator[str]:
    """The node where that rank was, the supervisor that wrote the journal then."""
    before = [record for record in chaos.journal if record["seq"] < asked["seq"]]
    if fault.facts.evidence == "node":
        placed = [record["nodes"] for record in before if record["event"] == "placement.acquired"]
        here = [node for node, about in (placed[-1] if placed else {}).items() if fault.rank in about["ranks"]]
        if found.get("node") not in here:
            yield f"node {found.get('node')} was ended, rank {fault.rank} was on {', '.join(here) or 'no known node'}"
        return
    writers = [record["supervisor_pid"] for record in before if record["event"] in ("leg.started", "supervisor.resumed")]
    struck = [pid for pid, _ in _by_name(found, "struck").get("supervisor", ())]
    if struck != writers[-1:]:
        yield f"process {struck} was struck, the supervisor was process {writers[-1:]}"
    after = [
        record["supervisor_pid"]
        for record in chaos.journal
        if record["event"] == "supervisor.resumed" and record["seq"] > asked["seq"]
    ]
    if found.get("successor") not in after[:1]:
        yield "it was not the supervisor that took over who says so"


def _by_name(found: Mapping[str, Any], key: str) -> dict[str, list[tuple[int, int]]]:
    named: dict[str, list[tuple[int, int]]] = {}
    for each in found.get(key) or ():
        named.setdefault(each["what"], []).append((each["pid"], each["start_ticks"]))
    return named


def _end_of(end: Mapping[str, Any]) -> str:
    if end.get("signal") is not None:
        return f"was ended by signal {end['signal']}"
    return f"left with exit code {end.get('exit_code')}"
