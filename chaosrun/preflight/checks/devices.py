"""The check "devices": are all devices present, healthy according to their driver, free, and do they compute correctly?
Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.model import Answers, Check, Finding, Level, Measure, Rows, Setting, Status, ask
from chaosrun.preflight.placement import gpus_per_worker, may_take_gpus
from chaosrun.preflight.probes.compute import FEWER_THREADS, ComputeFacts, DeviceKind
from chaosrun.preflight.probes.devices import Computed, DevicesFacts
from chaosrun.preflight.probes.nvidia import Gpu, matched
from chaosrun.wording import MIB, listed, size

PATIENCE_S = {Level.QUICK: 20.0, Level.STANDARD: 40.0, Level.DEEP: 60.0}
"""How long a device may take for one operation."""
LIMIT_S = {Level.QUICK: 100.0, Level.STANDARD: 150.0, Level.DEEP: 180.0}
RESET = "reset the GPU (nvidia-smi --gpu-reset) or reboot the node; if it comes back, have the GPU replaced"
REPLACE = "take the node out and have the GPU replaced"
SLOWED = {
    "hw_slowdown": "the hardware halves its clocks",
    "hw_thermal_slowdown": "too hot",
    "hw_power_brake_slowdown": "the power supply asks for less",
    "sw_thermal_slowdown": "warmer than its target",
}
"""Reasons that also hold back a GPU with nothing to do. A power limit (sw_power_cap) is reached in ordinary work."""
LEAST_FREE = 0.9
"""Of a GPU's memory, before the job comes. Drivers and ECC keep a few percent."""
UNUSED = "no worker gets this device"
DEVICE_ERRORS = ("RuntimeError", "OutOfMemoryError", "AcceleratorError")
"""Exceptions by which torch reports a device's error. Any other is an error of the program."""


def call(setting: Setting, node: Node) -> Call:
    return ask_devices(setting, node, 0.0, cuda={"products": True})


def ask_devices(setting: Setting, node: Node, seconds: float, **works: Any) -> Call:
    """A call of the probe that computes on each device; `works` by kind of device; `seconds`: their planned duration."""
    gpus = node.gpus if may_take_gpus(setting) else 0
    limit_s = LIMIT_S[setting.level] + seconds
    return ask("devices", limit_s, env=setting.env, gpus=gpus, patience_s=PATIENCE_S[setting.level], works=works)


def judge(setting: Setting, nodes: Sequence[Node], told: Answers[DevicesFacts]) -> Iterator[Finding]:
    for node in nodes:
        if facts := told.answered.get(node.name):
            used = gpus_for_work(setting, nodes, node)
            yield from _of_node(setting, node, facts, used, gpus_per_worker(setting, nodes))


def _of_node(setting: Setting, node: Node, facts: DevicesFacts, used: Sequence[str], per_worker: int) -> Iterator[Finding]:
    row = Rows(check="devices", node=node.name)
    if not node.gpus and not facts.driver.gpus:
        yield row.skip("no GPU: Ray counts none on this node, and no driver does", name="GPUs")
        return
    of_driver = list(_driver(row, node, facts, wanted=setting.job is not None and per_worker > 0))
    yield from of_driver if used or not node.gpus else of_unused(row, of_driver)
    health = matched(facts.driver.gpus, facts.visible)
    one_worker = setting.job is not None and setting.job.spec.workers == 1
    for device in dict.fromkeys([*health, *facts.computed]):
        here = row.of(device=device)
        gpu, computed = health.get(device), facts.computed.get(device)
        rows = [] if gpu is None else _gpu(here, gpu, one_worker)
        if computed is not None and computed.facts is not None:
            rows += product(here, computed.facts)
        elif computed is not None:
            rows.append(unfinished(here, computed, "" if gpu is None else _computing(gpu)))
        yield from rows if device in used else of_unused(here, rows)


def _driver(row: Rows, node: Node, facts: DevicesFacts, *, wanted: bool) -> Iterator[Finding]:
    """`wanted`: whether workers take GPUs."""
    driver, row = facts.driver, row.of(name="driver")
    if driver.told == "absent":
        yield row.skip(f"{driver.error}: only what comes of computing on its GPUs is known")
    elif driver.told == "silent":
        remedy = "run nvidia-smi on that node: where only slow, switch on persistence mode (nvidia-smi -pm 1); else reboot"
        yield row.error(driver.error, remedy)
    elif driver.told == "nothing":
        remedy = "run nvidia-smi on that node; reload the driver or reboot"
        yield row.fail(driver.error, "tells what it knows of its GPUs", remedy)
    else:
        seen = len(matched(driver.gpus, facts.visible)) + sum(token.startswith("MIG-") for token in facts.visible or ())
        number, counts = row.of(name="number"), f"{node.gpus}, as Ray counts"
        if not node.gpus and not wanted:
            yield number.skip(f"Ray counts no GPU on this node, its driver {seen}: no worker gets one")
            return
        yield row.passed(f"{driver.version}, CUDA {driver.cuda}")
        if seen < node.gpus:
            why = "Ray would place work on GPUs that are not there"
            remedy = "look at dmesg for GPUs that fell off the bus and reboot; or start Ray there with the right --num-gpus"
            yield number.fail(f"{seen}", counts, remedy, reason=why)
        elif seen > node.gpus:
            remedy = "start Ray there with --num-gpus, or with CUDA_VISIBLE_DEVICES for the ones that it may use"
            yield number.warn(f"{seen}", counts, remedy, reason="Ray leaves the others idle")
        else:
            yield number.passed(f"{seen}", counts)


def _gpu(row: Rows, gpu: Gpu, one_worker: bool) -> list[Finding]:
    # This identifies the GPU to a technician.
    place = f"({gpu.uuid or 'no UUID'}, bus {gpu.bus})"
    return [
        _state(row.of(name="state"), gpu, place),
        _ecc(row.of(name="ECC"), gpu, place),
        _rows(row.of(name="remapped rows"), gpu, place),
        _throttling(row.of(name="throttling"), gpu),
        _mig(row.of(name="MIG"), gpu, one_worker),
        _memory(row.of(name="free memory"), gpu),
        _others(row.of(name="other processes"), gpu),
    ]


def _state(row: Rows, gpu: Gpu, place: str) -> Finding:
    if gpu.lost:
        return row.fail(f"{gpu.lost} {place}", "needs no recovery", RESET)
    if gpu.recovery:
        remedy = "reboot the node" if gpu.recovery == "Reboot" else RESET
        return row.fail(f"the driver asks for: {gpu.recovery} {place}", "needs no recovery", remedy)
    return row.passed("needs no recovery")


def _ecc(row: Rows, gpu: Gpu, place: str) -> Finding:
    if gpu.ecc is None:
        return row.skip("this GPU has no ECC")
    if gpu.uncorrectable:
        return row.fail(f"{gpu.uncorrectable} uncorrectable errors since the driver was loaded {place}", "none", RESET)
    if gpu.threshold_exceeded or gpu.unrepairable:
        what = "memory that cannot be repaired" if gpu.unrepairable else "more SRAM errors than the driver tolerates"
        return row.fail(f"{what} {place}", "none", REPLACE)
    if gpu.ecc != "Enabled":
        why = "bits that flip in its memory go into the weights unnoticed"
        return row.warn("off", "on", "nvidia-smi -e 1, then reboot", reason=why)
    return row.passed("on")


def _rows(row: Rows, gpu: Gpu, place: str) -> Finding:
    if gpu.remapping_pending is None:
        return row.skip("this GPU does not replace memory")
    if gpu.remapping_failed:
        return row.fail(f"a replacement failed {place}", "none failed", REPLACE)
    if gpu.remapping_pending:
        return row.fail(f"pending {place}", "none pending", RESET)
    return row.passed(f"{gpu.remapped}, none pending")


def _throttling(row: Rows, gpu: Gpu) -> Finding:
    if gpu.throttling is None:
        return row.skip("the driver does not say")
    slowed = ", ".join(f"{reason} ({SLOWED[reason]})" for reason in gpu.throttling if reason in SLOWED)
    remedy = "look at its cooling and power (nvidia-smi -q -d TEMPERATURE,POWER); leave the node out until it is gone"
    return _none(row, slowed, remedy, "one slow GPU slows every rank")


def _mig(row: Rows, gpu: Gpu, one_worker: bool) -> Finding:
    if gpu.mig is None:
        return row.skip("this GPU cannot be divided")
    if gpu.mig != "Enabled":
        return row.passed("off")
    if not gpu.instances:
        remedy = "create instances (nvidia-smi mig -cgi …), or switch it off with nvidia-smi -mig 0"
        return row.fail("on, without an instance: nothing can run there", "off, or with instances", remedy)
    return row.judged(
        Status.PASS if one_worker else Status.WARN,
        f"on, {gpu.instances} instances",
        "off, or jobs of one worker",
        "switch it off with nvidia-smi -mig 0, or run jobs of one worker there",
        reason="NCCL does not connect ranks on instances of one GPU",
    )


def _memory(row: Rows, gpu: Gpu) -> Finding:
    if not gpu.total_mib or gpu.free_mib is None or gpu.mig == "Enabled":
        return row.skip("the driver does not say")
    free = gpu.free_mib / gpu.total_mib
    return row.judged(
        Status.PASS if free >= LEAST_FREE else Status.WARN,
        f"{free:.0%} of {gpu.total_mib / 1024:.0f} GiB",
        f"at least {LEAST_FREE:.0%}",
        "find what holds it (nvidia-smi, fuser -v /dev/nvidia*; processes of other containers are not listed) and end it",
        reason="the job may not fit",
    )


def _others(row: Rows, gpu: Gpu) -> Finding:
    why = "they take memory and time from the job; left over from an earlier job, they also hold its ports"
    return _none(row, _computing(gpu), "end them, or wait until they are gone", why)


def _none(row: Rows, found: str, remedy: str, reason: str) -> Finding:
    status = Status.WARN if found else Status.PASS
    return row.judged(status, found or "none", "none before the job begins", remedy, reason=reason)


def _computing(gpu: Gpu) -> str:
    """Processes that compute on the GPU, not those with graphics only."""
    mib = {process.pid: "?" if process.mib is None else size(process.mib * MIB) for process in gpu.processes}
    there = [process for process in gpu.processes if process.type != "G"]
    return listed([f"{each.name.split('/')[-1] or '?'} (pid {each.pid}, {mib[each.pid]})" for each in there], 3)


# Results of computing on a device: rows shared with the check "bits"


def gpus_for_work(setting: Setting, nodes: Sequence[Node], node: Node) -> list[str]:
    """GPUs that workers on this node may get: of those its Ray may use, the first ones it counts."""
    return [f"cuda:{index}" for index in range(node.gpus)] if gpus_per_worker(setting, nodes) else []


def of_unused(row: Rows, found: Sequence[Finding]) -> list[Finding]:
    """Findings on an unused device: a FAIL becomes a WARN."""
    broken = [finding for finding in found if finding.status is Status.FAIL]
    told = [replace(each, status=Status.WARN, reason="; ".join(filter(None, (each.reason, UNUSED)))) for each in broken]
    return told or [row.skip(UNUSED, name="GPUs")]


def unfinished(row: Rows, computed: Computed, holders: str = "") -> Finding:
    """A device that gave no answer: broken, unless its process never reached it, or was ended by something else, or other
    processes hold its memory (`holders` by name, where known)."""
    row, ended, error, at = row.of(name="product"), computed.ended, computed.error, f"(in: {computed.phase})"
    if not computed.touched:
        return row.error(f"{error} {at}", "see whether torch can be imported on that node, and how busy it is")
    if ended == "died" and "SIGKILL" in error:
        return row.error(f"something ended its process {at}", "see in dmesg whether memory ran out")
    if ended == "raised" and ("OutOfMemoryError" in error or "out of memory" in error):
        who = f": {holders}" if holders else ", see which with nvidia-smi (of the CPU with `top`)"
        why = f"other processes hold the memory that it would be tried with {at}: {error}"
        return row.error(why, f"end what holds its memory{who}")
    if ended == "raised" and error.partition(":")[0] not in DEVICE_ERRORS:
        return row.error(f"{error} {at}", "see whether this torch is for this device")
    how = {"hung": "hangs", "died": "its process died", "raised": "gives an error"}[ended]
    return row.fail(f"{how} in: {computed.phase}", "finishes", remedy_for(row.device), reason=error)


def product(row: Rows, facts: ComputeFacts) -> Iterator[Finding]:
    """Memory, products and their speed, for a device on which they were tested."""
    if not facts.products:
        return
    gpu, remedy = row.device != "cpu", remedy_for(row.device, facts.kind)
    if facts.memory_wrong:
        measured = f"{facts.memory_wrong} of {facts.memory_bytes} bytes read back wrong"
        yield row.fail(measured, "as they were written", remedy, name="memory")
    if wrong := [entry for entry in facts.products if entry.wrong]:
        worst = max(wrong, key=lambda entry: entry.wrong)
        measured = f"{worst.wrong} of {worst.entries} entries wrong in {', '.join(entry.dtype for entry in wrong)}"
        why = f"{worst.dtype}: {worst.first}"
        yield row.fail(measured, "exact: integers that have one right answer", remedy, name="product", reason=why)
        return
    yield row.passed(f"exact in {', '.join(entry.dtype for entry in facts.products)}", "exact", name="product")
    worse = {"warn": 0.7, "fail": 0.25} if gpu else {"warn": 0.2}
    measure = Measure(number=facts.gflops, unit="GFLOP/s", better="higher", **worse)
    name = f"speed of {facts.kind.model}" if gpu else "speed"
    yield row.passed(f"{facts.gflops:.3g} GFLOP/s", name=name, measure=measure)


def remedy_for(device: str | None, kind: DeviceKind | None = None) -> str:
    """`kind`: known facts of the device; effects of its environment are considered first."""
    if device != "cpu":
        return "take the node out and test the GPU (dcgmi diag -r 3); reset it or have it replaced"
    test = "take the node out and test its processor and memory (memtest86+, stress-ng --verify)"
    limits = [name for name in (kind.settings if kind else ()) if name in FEWER_THREADS]
    why = "libraries leave out what the threads that they do not get had to do"
    return f"unset {', '.join(limits)} and try again: {why}; if it comes again, {test}" if limits else test


CHECK = Check(
    name="devices", about="number, health, room, a product on each", order=30, judge=judge, call=call, facts=DevicesFacts
)
