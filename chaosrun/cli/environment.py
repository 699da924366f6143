"""The facts of a bug report as lines to be pasted: a label, and what there is to say of it. Knows them as values alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from chaosrun.wording import size

UNLIMITED = -1


def environment_lines(facts: Mapping[str, Any]) -> list[str]:
    return [f"{label:<12} {text}".rstrip() for label, text in _labelled(facts)]


def _labelled(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    python, system, cpu, memory, root = (facts[key] for key in ("python", "system", "cpu", "memory", "root"))
    yield "chaosrun", f"{facts['chaosrun']['version']} ({facts['chaosrun']['path']})"
    yield "python", f"{python['version']} {python['implementation']} ({python['path']})"
    yield "torch", _torch(facts["torch"])
    for name, version in facts["packages"].items():
        yield name, version or "not installed"
    yield "system", ", ".join(filter(None, (system["distribution"], system["kernel"], system["machine"], system["libc"])))
    yield "container", "yes" if system["container"] else "no sign of one"
    limit = f", limited to {cpu['cgroup_limit']:g}" if cpu["cgroup_limit"] is not None else ""
    yield "cpu", f"{cpu['model'] or 'unknown'}, {cpu['usable']} of {cpu['count']} cores usable{limit}"
    limit = f", limited to {size(memory['cgroup_limit_bytes'])}" if memory["cgroup_limit_bytes"] is not None else ""
    yield "memory", f"{size(memory['total_bytes'])}, {size(memory['available_bytes'])} available{limit}"
    yield "/dev/shm", _room(memory["shm"])
    gpus = facts["gpus"]
    for gpu in [gpus] if isinstance(gpus, str) else gpus or ["none"]:
        yield "gpu", gpu
    for name, (soft, hard) in facts["limits"].items():
        yield name.replace("_", " "), f"at most {_number(soft)} (hard limit {_number(hard)})"
    about = [] if root["exists"] else ["not there yet"]
    about += [] if root["writable"] else ["not writable"]
    yield "root", ", ".join([root["path"], *about, root["file_system"] or "unknown file system", _room(root)])
    if not facts["environment"]:
        yield "variables", "none that matter"
    for name, value in facts["environment"].items():
        yield "variable", f"{name}={value}"


def _torch(torch: Mapping[str, Any]) -> str:
    if error := torch.get("error"):
        return f"{torch['version']}, BROKEN: {error}" if torch["version"] else error
    built = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "for CPUs"
    parts = [torch["version"], built, f"CPU kernels {torch['cpu_capability']}"]
    if torch["cuda_available"]:
        devices = ", ".join(f"{device['name']} ({size(device['memory_bytes'])})" for device in torch["devices"])
        parts += [f"cuDNN {torch['cudnn']}", f"NCCL {torch['nccl']}", f"{len(torch['devices'])} devices: {devices}"]
    elif torch["cuda"]:
        parts.append("CUDA NOT AVAILABLE")
    return ", ".join(parts)


def _room(room: Mapping[str, Any]) -> str:
    if "error" in room:
        return f"cannot be looked at: {room['error']}"
    return f"{size(room['total_bytes'])}, {size(room['free_bytes'])} free"


def _number(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)
