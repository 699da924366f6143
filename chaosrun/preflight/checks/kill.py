"""Judges whether a killed worker was gone in time and left nothing behind. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.model import PROBES, Answers, Check, Facts, Finding, Level, Measure, Rows, Setting
from chaosrun.preflight.placement import may_take_gpus

ROWS = Rows(check="kill")

DEVICES_S = 60.0
"""For torch to be imported and CUDA to start in the worker that is to be killed."""


def call(setting: Setting, node: Node) -> Call:
    gpus = node.gpus if may_take_gpus(setting) else 0
    # Processes, port and device memory have their time one after the other.
    limit_s = 4 * LIMIT_S + 10 + (DEVICES_S if gpus else 0)
    return Call(probe=f"{PROBES}.kill", parameters={"limit_s": LIMIT_S, "gpus": gpus}, limit_s=limit_s)


LIMIT_S = 5.0
WAITS = {
    "D": "it waits in the kernel, for a device or a file server: look into dmesg; a restart of the node ends it",
    "T": "it is stopped or traced: find its debugger",
}


def assess_kill(setting: Setting, nodes: Sequence[Node], facts: Answers[Facts]) -> list[Finding]:
    findings: list[Finding] = []
    for node in nodes:
        if (found := facts.answered.get(node.name)) is not None:
            findings += [_processes(node.name, found), _port(node.name, found), _shared_memory(node.name, found)]
            findings += _devices(setting, node, found)
    return findings


def _processes(node: str, found: Facts) -> Finding:
    about: dict[str, Any] = {"check": "kill", "name": "time until gone", "node": node}
    alive: Sequence[Mapping[str, Any]] = found["alive"]
    if alive:
        what = ", ".join(f"{each['what']} (process {each['pid']}, state {each['state']})" for each in alive)
        return ROWS.fail(
            f"{what}: alive {LIMIT_S:g} s after SIGKILL",
            f"at most {LIMIT_S:g} s for a worker and all below it",
            WAITS.get(alive[0]["state"], "see what keeps signals from it: a sandbox, or a security module"),
            **about,
        )
    return ROWS.passed(
        f"worker, child and grandchild gone after {found['killed_s'] * 1000:.0f} ms",
        measure=Measure(number=found["killed_s"], unit="s", better="lower"),
        **about,
    )


def _port(node: str, found: Facts) -> Finding:
    about: dict[str, Any] = {"check": "kill", "name": "port", "node": node}
    if found["unreached"]:
        return ROWS.fail(
            f"{found['unreached']}, while a worker listened there",
            "a worker can be connected to on its own node",
            "see what keeps processes of one node from each other: a firewall on the loopback interface, a sandbox",
            device=f"port {found['port']}",
            **about,
        )
    if found["port_error"]:
        holder = f", held by {found['held_by']}" if found["held_by"] else ""
        return ROWS.fail(
            f"{found['port_error']}{holder}, {LIMIT_S:g} s after the worker was killed",
            f"free after at most {LIMIT_S:g} s",
            "end what holds the port; a restarted worker could not listen there",
            device=f"port {found['port']}",
            **about,
        )
    return ROWS.passed(f"free after {found['port_s'] * 1000:.0f} ms", **about)


def _shared_memory(node: str, found: Facts) -> Finding:
    about: dict[str, Any] = {"check": "kill", "name": "shared memory", "node": node}
    if found["shared_memory_left"]:
        return ROWS.fail(
            "left, and some process still maps it",
            "removed once its processes are gone",
            "end what maps it (grep its name in /proc/*/maps), or /dev/shm fills with every kill",
            device=found["shared_memory"],
            **about,
        )
    return ROWS.passed("removed", **about)


def _devices(setting: Setting, node: Node, found: Facts) -> list[Finding]:
    about: dict[str, Any] = {"check": "kill", "name": "device memory", "node": node.name}
    if not node.gpus:
        return [ROWS.skip("no GPU", **about)]
    if not may_take_gpus(setting):
        return [ROWS.skip("the job takes no GPU", **about)]
    if not found["devices"]:
        why = found["device_error"] or "the worker's memory did not show in nvidia-smi"
        return [ROWS.skip(why, **about)]
    findings: list[Finding] = []
    for device, memory in found["devices"].items():
        if memory["seconds"] is None:
            findings.append(
                ROWS.fail(
                    f"{memory['after']} MiB in use {LIMIT_S:g} s after the kill, {memory['before']} MiB before",
                    f"free again after at most {LIMIT_S:g} s",
                    "look for the process that holds it (nvidia-smi); without one, reset the GPU or restart the node",
                    device=device,
                    **about,
                )
            )
        else:
            freed = f"{memory['held'] - memory['after']} MiB free again after {memory['seconds']:.1f} s"
            findings.append(ROWS.passed(freed, device=device, **about))
    return findings


CHECK = Check(
    name="kill",
    about="a killed worker is gone, with all it held",
    order=60,
    level=Level.QUICK,
    judge=assess_kill,
    call=call,
)
