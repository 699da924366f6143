"""The check "kill": kills a worker with children on every node: is it gone in time, with nothing left behind? Pure."""

from collections.abc import Iterator, Sequence

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.model import Answers, Check, Finding, Measure, Rows, Setting, ask
from chaosrun.preflight.placement import may_take_gpus
from chaosrun.preflight.probes.kill import KillFacts

ROWS = Rows(check="kill")
LIMIT_S = 5.0
DEVICES_S = 60.0
"""For torch to be imported and CUDA to start in the worker that is to be killed."""
WAITS = {
    "D": "it waits in the kernel, for a device or a file server: look into dmesg; a restart of the node ends it",
    "T": "it is stopped or traced: find its debugger",
}


def call(setting: Setting, node: Node) -> Call:
    gpus = node.gpus if may_take_gpus(setting) else 0
    # Processes and device memory each have their own time limit, in turn.
    return ask("kill", 3 * LIMIT_S + 10 + (DEVICES_S if gpus else 0), within_s=LIMIT_S, gpus=gpus)


def judge(setting: Setting, nodes: Sequence[Node], told: Answers[KillFacts]) -> Iterator[Finding]:
    for node in nodes:
        if (facts := told.answered.get(node.name)) is not None:
            row = ROWS.of(node=node.name)
            yield _processes(row.of(name="time until gone"), facts)
            yield from _devices(row.of(name="device memory"), node.gpus, may_take_gpus(setting), facts)


def _processes(row: Rows, facts: KillFacts) -> Finding:
    if facts.alive:
        what = ", ".join(f"{each.what} (process {each.pid}, state {each.state})" for each in facts.alive)
        most = f"at most {LIMIT_S:g} s for a worker and all below it"
        remedy = WAITS.get(facts.alive[0].state, "see what keeps signals from it: a sandbox, or a security module")
        return row.fail(f"{what}: alive {LIMIT_S:g} s after SIGKILL", most, remedy)
    measure = Measure(number=facts.killed_s, unit="s", better="lower")
    return row.passed(f"worker, child and grandchild gone after {facts.killed_s * 1000:.0f} ms", measure=measure)


def _devices(row: Rows, gpus: int, wanted: bool, facts: KillFacts) -> Iterator[Finding]:
    if not gpus or not wanted:
        yield row.skip("the job takes no GPU" if gpus else "no GPU")
    elif not facts.devices:
        yield row.skip(facts.device_error or "the worker's memory did not show in nvidia-smi")
    for device, memory in facts.devices.items():
        if memory.seconds is None:
            measured = f"{memory.after} MiB in use {LIMIT_S:g} s after the kill, {memory.before} MiB before"
            remedy = "look for the process that holds it (nvidia-smi); without one, reset the GPU or restart the node"
            yield row.fail(measured, f"free again after at most {LIMIT_S:g} s", remedy, device=device)
        else:
            freed = f"{memory.held - memory.after} MiB free again after {memory.seconds:.1f} s"
            yield row.passed(freed, device=device)


CHECK = Check(name="kill", about="a killed worker is gone, with all it held", order=60, call=call, facts=KillFacts, judge=judge)
