"""The check "devices": are all there, healthy as their driver sees them, free, and do they compute? Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.checks.devices_computing import gpus_for_work, of_unused, product, unfinished
from chaosrun.preflight.majority import majority
from chaosrun.preflight.model import PROBES, Answers, Check, Finding, Level, Rows, Setting, Status
from chaosrun.preflight.placement import gpus_per_worker, may_take_gpus
from chaosrun.preflight.probes.devices import DevicesFacts
from chaosrun.preflight.probes.nvidia import Gpu, GpuProcess
from chaosrun.wording import MIB, listed, size

ROWS = Rows(check="devices")

PATIENCE_S = {Level.QUICK: 20.0, Level.STANDARD: 40.0, Level.DEEP: 60.0}
"""Of a device, with one operation."""
LIMIT_S = {Level.QUICK: 100.0, Level.STANDARD: 150.0, Level.DEEP: 180.0}


def call(setting: Setting, node: Node) -> Call:
    return Call(
        probe=f"{PROBES}.devices",
        parameters={
            "gpus": node.gpus if may_take_gpus(setting) else 0,
            "patience_s": PATIENCE_S[setting.level],
            "work": {"threads": 1, "products": True, "training": None},
        },
        limit_s=LIMIT_S[setting.level],
        env=setting.job.spec.env if setting.job else {},
    )


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


def judge(setting: Setting, nodes: Sequence[Node], told: Answers[DevicesFacts]) -> list[Finding]:
    answered = told.answered
    used = {node.name: gpus_for_work(setting, nodes, node) for node in nodes if node.name in answered}
    models = {name: named for name, gpus in used.items() if (named := _models(answered[name], gpus))}
    usual = majority(models).value if models else ""
    found: list[Finding] = []
    for node in nodes:
        if node.name in answered:
            same = models.get(node.name) == usual
            found += _of_node(setting, nodes, node, answered[node.name], used[node.name], "" if same else usual)
    return found


def _models(answer: DevicesFacts, gpus: Sequence[str]) -> str:
    return ", ".join(sorted({gpu.model or "?" for name, gpu in _health_of(answer).items() if name in gpus}))


def _of_node(
    setting: Setting, nodes: Sequence[Node], node: Node, answer: DevicesFacts, used: Sequence[str], usual: str
) -> Iterator[Finding]:
    """`usual`: what most nodes have, where this one has another model."""
    if not node.gpus and not answer.driver.gpus:
        reason = "no GPU: Ray counts none on this node, and no driver does"
        yield _row(node.name, None, "GPUs", Status.SKIP, reason=reason)
        return
    of_driver = list(_driver(setting, nodes, node, answer))
    yield from of_driver if used or not node.gpus else of_unused("devices", node.name, None, of_driver)
    health, computed = _health_of(answer), answer.computed
    for device in dict.fromkeys([*health, *computed]):
        rows: list[Finding] = []
        if gpu := health.get(device):
            judged = [_model(gpu, usual), _state(gpu), _ecc(gpu), _rows(gpu), _throttling(gpu), _mig(setting, gpu)]
            rows += [_row(node.name, device, **row) for row in (*judged, _memory(gpu), _others(gpu))]
        if (made := computed.get(device)) is not None:
            if made.facts is None:
                rows.append(unfinished("devices", node.name, device, made, _named(_computing(gpu)) if gpu else ""))
            else:
                rows += product("devices", node.name, device, made.facts)
        yield from rows if device in used else of_unused("devices", node.name, device, rows)


def _row(node: str, device: str | None, name: str, status: Status, **words: Any) -> Finding:
    return ROWS.row(status, name=name, node=node, device=device, **words)


def _health_of(answer: DevicesFacts) -> dict[str, Gpu]:
    """What the driver says of each device that it can be matched with: by index, or by (the beginning of) its UUID."""
    gpus = answer.driver.gpus
    if (visible := answer.visible) is None:
        return {f"cuda:{index}": gpu for index, gpu in enumerate(gpus)}
    matched = {}
    for index, token in enumerate(visible):
        same = [gpu for at, gpu in enumerate(gpus) if token == str(at) or (gpu.uuid or "").startswith(token)]
        if len(same) == 1:
            matched[f"cuda:{index}"] = same[0]
    return matched


def _driver(setting: Setting, nodes: Sequence[Node], node: Node, answer: DevicesFacts) -> Iterator[Finding]:
    driver = answer.driver
    if not driver.there:
        reason = f"{driver.error}: only what comes of computing on its GPUs is known"
        yield _row(node.name, None, "driver", Status.SKIP, reason=reason)
    elif driver.silent:
        remedy = (
            "run nvidia-smi on that node: where it is only slow, switch on persistence mode (nvidia-smi -pm 1); else reboot"
        )
        yield _row(node.name, None, "driver", Status.ERROR, reason=driver.error, remedy=remedy)
    elif driver.error:
        yield _row(
            node.name,
            None,
            "driver",
            Status.FAIL,
            measured=driver.error,
            threshold="tells what it knows of its GPUs",
            remedy="run nvidia-smi on that node; reload the driver or reboot",
        )
    else:
        yield from _number(node, answer, wanted=setting.job is not None and gpus_per_worker(setting, nodes) > 0)


def _number(node: Node, answer: DevicesFacts, *, wanted: bool) -> Iterator[Finding]:
    """`wanted`: whether workers take GPUs."""
    driver = answer.driver
    seen = len(_health_of(answer)) + sum(token.startswith("MIG-") for token in answer.visible or ())
    if not node.gpus and not wanted:
        reason = f"Ray counts no GPU on this node, its driver {seen}: no worker gets one"
        yield _row(node.name, None, "number", Status.SKIP, reason=reason)
        return
    yield _row(node.name, None, "driver", Status.PASS, measured=f"{driver.driver}, CUDA {driver.cuda}")
    row = {"measured": f"{seen}", "threshold": f"{node.gpus}, as Ray counts"}
    if seen < node.gpus:
        row["reason"] = "Ray would place work on GPUs that are not there"
        row["remedy"] = "look at dmesg for GPUs that fell off the bus and reboot; or start Ray there with the right --num-gpus"
        status = Status.FAIL
    elif seen > node.gpus:
        row["reason"] = "Ray leaves the others idle"
        row["remedy"] = "start Ray there with --num-gpus, or with CUDA_VISIBLE_DEVICES for the ones that it may use"
        status = Status.WARN
    else:
        status = Status.PASS
    yield _row(node.name, None, "number", status, **row)


def _model(gpu: Gpu, usual: str) -> dict[str, Any]:
    if not gpu.model:
        return _skip("model", "the driver does not say")
    row = {"name": "model", "measured": gpu.model}
    if not usual:
        return row | {"status": Status.PASS}
    return row | {
        "status": Status.WARN,
        "threshold": f"{usual}, as most nodes have",
        "reason": "steps are as slow as the slowest GPU, and a rank that moves between models computes other bits",
        "remedy": "keep a job to nodes of one model",
    }


def _state(gpu: Gpu) -> dict[str, Any]:
    if bad := gpu.lost or gpu.recovery:
        measured = gpu.lost or f"the driver asks for: {gpu.recovery}"
        return _bad("state", f"{measured} {_place(gpu)}", "needs no recovery", RESET if bad != "Reboot" else "reboot the node")
    return {"name": "state", "status": Status.PASS, "measured": "needs no recovery"}


def _ecc(gpu: Gpu) -> dict[str, Any]:
    ecc, name = gpu.ecc, "ECC"
    if ecc.mode is None:
        return _skip(name, "this GPU has no ECC")
    if ecc.uncorrectable:
        measured = f"{ecc.uncorrectable} uncorrectable errors since the driver was loaded {_place(gpu)}"
        return _bad(name, measured, "none", RESET)
    if ecc.threshold_exceeded or ecc.unrepairable:
        what = "memory that cannot be repaired" if ecc.unrepairable else "more SRAM errors than the driver tolerates"
        return _bad(name, f"{what} {_place(gpu)}", "none", REPLACE)
    if ecc.mode != "Enabled":
        return {
            "name": name,
            "status": Status.WARN,
            "measured": "off",
            "threshold": "on",
            "reason": "bits that flip in its memory go into the weights unnoticed",
            "remedy": "nvidia-smi -e 1, then reboot",
        }
    if ecc.pending not in (None, ecc.mode):
        return _pending(name, f"on, {ecc.pending.lower()} after the next reset")
    ever = f", {ecc.uncorrectable_ever} uncorrectable errors ever" if ecc.uncorrectable_ever else ""
    return {"name": name, "status": Status.PASS, "measured": f"on{ever}"}


def _rows(gpu: Gpu) -> dict[str, Any]:
    rows, name = gpu.rows, "remapped rows"
    if rows is None:
        return _skip(name, "this GPU does not replace memory")
    if rows.failure:
        return _bad(name, f"a replacement failed {_place(gpu)}", "none failed", REPLACE)
    if rows.pending:
        return _bad(name, f"{rows.kind} pending {_place(gpu)}", "none pending", RESET)
    return {"name": name, "status": Status.PASS, "measured": f"{rows.count} {rows.kind}, none pending"}


def _throttling(gpu: Gpu) -> dict[str, Any]:
    reasons = gpu.throttling
    if reasons is None:
        return _skip("throttling", "the driver does not say")
    if slowed := [reason for reason in reasons if reason in SLOWED]:
        return {
            "name": "throttling",
            "status": Status.WARN,
            "measured": ", ".join(f"{reason} ({SLOWED[reason]})" for reason in slowed),
            "threshold": "none before the job begins",
            "reason": "one slow GPU slows every rank",
            "remedy": "look at its cooling and power (nvidia-smi -q -d TEMPERATURE,POWER); leave the node out until it is gone",
        }
    return {"name": "throttling", "status": Status.PASS, "measured": "none"}


def _mig(setting: Setting, gpu: Gpu) -> dict[str, Any]:
    mig = gpu.mig
    if mig.mode is None:
        return _skip("MIG", "this GPU cannot be divided")
    if mig.pending not in (None, mig.mode):
        return _pending("MIG", f"{mig.mode.lower()}, {mig.pending.lower()} after the next reset")
    if mig.mode != "Enabled":
        return {"name": "MIG", "status": Status.PASS, "measured": "off"}
    if not mig.instances:
        remedy = "create instances (nvidia-smi mig -cgi …), or switch it off with nvidia-smi -mig 0"
        return _bad("MIG", "on, without an instance: nothing can run there", "off, or with instances", remedy)
    if setting.job is not None and setting.job.spec.workers == 1:
        return {"name": "MIG", "status": Status.PASS, "measured": f"on, {mig.instances} instances"}
    return {
        "name": "MIG",
        "status": Status.WARN,
        "measured": f"on, {mig.instances} instances",
        "threshold": "off",
        "reason": "NCCL does not connect ranks on instances of one GPU",
        "remedy": "switch it off with nvidia-smi -mig 0, or run jobs of one worker there",
    }


def _memory(gpu: Gpu) -> dict[str, Any]:
    total, free = gpu.total_mib, gpu.free_mib
    if not total or free is None or gpu.mig.mode == "Enabled":
        return _skip("free memory", "the driver does not say")
    row = {
        "name": "free memory",
        "measured": f"{free / total:.0%} of {total / 1024:.0f} GiB",
        "threshold": f"at least {LEAST_FREE:.0%}",
    }
    if free >= LEAST_FREE * total:
        return row | {"status": Status.PASS}
    remedy = "find what holds it (nvidia-smi, fuser -v /dev/nvidia*; processes of other containers are not listed) and end it"
    return row | {"status": Status.WARN, "reason": "the job may not fit", "remedy": remedy}


def _others(gpu: Gpu) -> dict[str, Any]:
    computing = _computing(gpu)
    if not computing:
        return {"name": "other processes", "status": Status.PASS, "measured": "none"}
    return {
        "name": "other processes",
        "status": Status.WARN,
        "measured": _named(computing),
        "threshold": "none before the job begins",
        "reason": "they take memory and time from the job; left over from an earlier job, they also hold its ports",
        "remedy": "end them, or wait until they are gone",
    }


def _computing(gpu: Gpu) -> list[GpuProcess]:
    return [process for process in gpu.processes if process.type != "G"]


def _named(processes: Sequence[GpuProcess]) -> str:
    told = [f"{process.name.split('/')[-1] or '?'} (pid {process.pid}, {_size(process.mib)})" for process in processes]
    return listed(told, 3)


def _bad(name: str, measured: str, threshold: str, remedy: str) -> dict[str, Any]:
    return {"name": name, "status": Status.FAIL, "measured": measured, "threshold": threshold, "remedy": remedy}


def _pending(name: str, measured: str) -> dict[str, Any]:
    remedy = "reboot the node now, so that it does not change during the job"
    return {"name": name, "status": Status.WARN, "measured": measured, "threshold": "nothing pending", "remedy": remedy}


def _skip(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "status": Status.SKIP, "reason": reason}


def _place(gpu: Gpu) -> str:
    """What a technician finds it by."""
    return f"({gpu.uuid or 'no UUID'}, bus {gpu.bus})"


def _size(mib: int | None) -> str:
    return "?" if mib is None else size(mib * MIB)


CHECK = Check(
    name="devices",
    about="number, health, room, a product on each",
    order=30,
    level=Level.QUICK,
    judge=judge,
    call=call,
    facts=DevicesFacts,
)
