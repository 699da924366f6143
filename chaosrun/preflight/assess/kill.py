"""Judges whether a killed worker was gone in time and left nothing behind. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Answers, Facts, Finding, Measure, Setting, Status
from chaosrun.preflight.placement import may_take_gpus

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
        return Finding(
            **about,
            status=Status.FAIL,
            measured=f"{what}: alive {LIMIT_S:g} s after SIGKILL",
            threshold=f"at most {LIMIT_S:g} s for a worker and all below it",
            remedy=WAITS.get(alive[0]["state"], "see what keeps signals from it: a sandbox, or a security module"),
        )
    return Finding(
        **about,
        status=Status.PASS,
        measured=f"worker, child and grandchild gone after {found['killed_s'] * 1000:.0f} ms",
        measure=Measure(number=found["killed_s"], unit="s", better="lower"),
    )


def _port(node: str, found: Facts) -> Finding:
    about: dict[str, Any] = {"check": "kill", "name": "port", "node": node}
    if found["unreached"]:
        return Finding(
            **about,
            status=Status.FAIL,
            device=f"port {found['port']}",
            measured=f"{found['unreached']}, while a worker listened there",
            threshold="a worker can be connected to on its own node",
            remedy="see what keeps processes of one node from each other: a firewall on the loopback interface, a sandbox",
        )
    if found["port_error"]:
        holder = f", held by {found['held_by']}" if found["held_by"] else ""
        return Finding(
            **about,
            status=Status.FAIL,
            device=f"port {found['port']}",
            measured=f"{found['port_error']}{holder}, {LIMIT_S:g} s after the worker was killed",
            threshold=f"free after at most {LIMIT_S:g} s",
            remedy="end what holds the port; a restarted worker could not listen there",
        )
    return Finding(**about, status=Status.PASS, measured=f"free after {found['port_s'] * 1000:.0f} ms")


def _shared_memory(node: str, found: Facts) -> Finding:
    about: dict[str, Any] = {"check": "kill", "name": "shared memory", "node": node}
    if found["shared_memory_left"]:
        return Finding(
            **about,
            status=Status.FAIL,
            device=found["shared_memory"],
            measured="left, and some process still maps it",
            threshold="removed once its processes are gone",
            remedy="end what maps it (grep its name in /proc/*/maps), or /dev/shm fills with every kill",
        )
    return Finding(**about, status=Status.PASS, measured="removed")


def _devices(setting: Setting, node: Node, found: Facts) -> list[Finding]:
    about: dict[str, Any] = {"check": "kill", "name": "device memory", "node": node.name}
    if not node.gpus:
        return [Finding(**about, status=Status.SKIP, reason="no GPU")]
    if not may_take_gpus(setting):
        return [Finding(**about, status=Status.SKIP, reason="the job takes no GPU")]
    if not found["devices"]:
        why = found["device_error"] or "the worker's memory did not show in nvidia-smi"
        return [Finding(**about, status=Status.SKIP, reason=why)]
    findings: list[Finding] = []
    for device, memory in found["devices"].items():
        if memory["seconds"] is None:
            findings.append(
                Finding(
                    **about,
                    status=Status.FAIL,
                    device=device,
                    measured=f"{memory['after']} MiB in use {LIMIT_S:g} s after the kill, {memory['before']} MiB before",
                    threshold=f"free again after at most {LIMIT_S:g} s",
                    remedy="look for the process that holds it (nvidia-smi); without one, reset the GPU or restart the node",
                )
            )
        else:
            freed = f"{memory['held'] - memory['after']} MiB free again after {memory['seconds']:.1f} s"
            findings.append(Finding(**about, status=Status.PASS, device=device, measured=freed))
    return findings
