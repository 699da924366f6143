"""What was seen of a fault that landed, in a few words: who died of what, which file was damaged, how long it took.

Pure. Told from the `fault.observed` record alone; whether that is proof enough, `verify.landed` says.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from chaosrun.faults.evidence import signal_name
from chaosrun.faults.fault import Fault
from chaosrun.wording import count

_ERRNO_NAMES = {"No space left on device": "ENOSPC", "Input/output error": "EIO"}
_NODE_ORDER = ("raylet", "head", "supervisor", "agent", "fork server")
BRIEF = 60
"""Characters of a value or an error that are told."""


def seen_words(fault: Fault, seen: Mapping[str, Any]) -> str:
    """In a few words: "pid 4211: SIGKILL"; "model.safetensors of step-00000008: 4096 bytes, now 2048; quarantined"."""
    found = seen.get("found")
    plain = f"pid {seen['pid']}: {_end(seen)}"
    tell = _BY_KIND.get(fault.kind)
    if tell is None:
        return plain
    try:
        return tell(fault, seen, found if isinstance(found, Mapping) else {})
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return plain  # a note with values of other types than its writer's: it proves what it proves, and tells less


def _end(seen: Mapping[str, Any]) -> str:
    number = seen.get("signal")
    if number is None:
        code = seen.get("exit_code")
        return "seen" if code is None else f"exit code {code}"
    return signal_name(number)


def _brief(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= BRIEF else f"{text[: BRIEF - 1]}…"


def _error(found: Mapping[str, Any]) -> str | None:
    """ "Type: message" of the end record."""
    end = found.get("end")
    error = end.get("error") if isinstance(end, Mapping) else None
    return error if isinstance(error, str) else None


def _preempt(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    if seen.get("signal") is None:
        return f"pid {seen['pid']}: left on the notice (exit code {seen.get('exit_code')})"
    after_s = found.get("after_s")
    when = "" if after_s is None else f" {after_s:.1f} s after the notice"
    return f"pid {seen['pid']}: {_end(seen)}{when}, out of grace"


def _stop(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return f"pid {seen['pid']}: stopped (state {found.get('state')}){_silence(found)}"


def _hang(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return f"pid {seen['pid']}: alive (state {found.get('state')}){_silence(found)}"


def _no_arrival(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return f"pid {seen['pid']}: alive, never at the rendezvous{_silence(found)}"


def _silence(found: Mapping[str, Any]) -> str:
    silent_s = found.get("silent_s")
    return "" if silent_s is None else f", no progress for {silent_s:.0f} s"


def _pause(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return f"pid {seen['pid']}: stopped for {found.get('stopped_s'):g} s (state {found.get('state_before')}), then running"


def _exception(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return f"pid {seen['pid']}: {(_error(found) or 'an exception').partition(':')[0]}"


def _exit(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return f"pid {seen['pid']}: exit code {seen.get('exit_code')}, no end record"


def _memory(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    limit = re.search(r"(\d+) MiB taken, then the limit \((\d+) MiB\)", _error(found) or "")
    more = f" after {limit[1]} MiB, at a limit of {int(limit[2]) / 1024:.1f} GiB" if limit else ""
    return f"pid {seen['pid']}: MemoryError{more}"


def _loader_worker(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    victim = (found.get("note") or {}).get("victim")
    return (
        f"loader worker {victim} of pid {seen['pid']}: SIGKILL" if victim else f"a loader worker of pid {seen['pid']}: SIGKILL"
    )


def _slow(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    before_s, during_s = found.get("before_s") or 0.0, found.get("during_s") or 0.0
    return f"pid {seen['pid']}: {found.get('steps')} steps at {_time(during_s)}, {_time(before_s)} before"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _gone(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The one that was struck by its pid, whoever went with it by a name."""
    gone = [each for each in found.get("gone") or () if isinstance(each, Mapping)]
    struck = {each.get("pid") for each in found.get("struck") or () if isinstance(each, Mapping)}
    order = {name: place for place, name in enumerate(_NODE_ORDER)}
    named = sorted(gone, key=lambda each: (order.get(str(each.get("what")), len(order)), str(each.get("what"))))
    direct = [f"{each['what']} {each['pid']}" for each in named if each.get("pid") in struck]
    with_it = [str(each["what"]) for each in named if each.get("pid") not in struck]
    if fault.kind in ("node", "drain"):
        words = ", ".join(dict.fromkeys(str(each["what"]) for each in named if each.get("what") != "process below"))
        ends = found.get("ends") or {}
        told = f"{count(len(ends), 'rank')} left on the notice; " if fault.kind == "drain" and ends else ""
        return f"{told}gone: {words}"
    with_it = [name for name in dict.fromkeys(with_it) if name != "process below"]
    return f"gone: {', '.join(direct) or 'nobody'}" + (f", with it {', '.join(with_it)}" if with_it else "")


def _successor(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    named = [f"{each['what']} {each['pid']}" for each in found.get("gone") or ()]
    return f"gone: {', '.join(named) or 'nobody'}, seen by the next supervisor ({found.get('successor')})"


def _damage(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    before, after = found.get("before") or {}, found.get("after")
    match fault.kind:
        case "truncate":
            change = f"{before.get('size')} bytes, now {(after or {}).get('size')}"
        case "missing_file" | "missing_manifest":
            change = "removed"
        case "foreign_manifest":
            change = "another step's"
        case _:
            hashes = [str((look or {}).get("sha256"))[:8] for look in (before, after)]
            change = f"sha256 {hashes[0]}…, now {hashes[1]}…"
    return f"{found.get('file')} of {found.get('checkpoint')}: {change}; quarantined"


def _staging(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return f"{found.get('staged')}: left behind, cleared away at the next start"


def _storage_error(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    error = _error(found) or ""
    name = next((name for words, name in _ERRNO_NAMES.items() if words in error), None)
    where = {"checkpoint.file": "write", "checkpoint.fsync.before": "fsync", "checkpoint.rename.before": "rename"}
    call = where.get(fault.phase or "", "the storage")
    return f"pid {seen['pid']}: {name} from {call}" if name else f"pid {seen['pid']}: {_brief(error or _end(seen))}"


def _slow_storage(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    waits = count(found.get("waits"), "fsync")
    return f"pid {seen['pid']}: {waits} took {found.get('waited_s') or 0.0:.2g} s longer in all"


def _port(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    note = found.get("note") or {}
    return f"pid {seen['pid']}: EADDRINUSE at port {note.get('port')}, held by pid {note.get('stranger')}"


def _corruption(fault: Fault, seen: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    whose = {"parameter": "", "gradient": "gradient of "}.get(str(found.get("state")), f"{found.get('state')} of ")
    place = f"{whose}{found.get('tensor')}"
    if fault.kind == "diverge":
        return f"{place}: {_brief(found.get('before'))}, now {_brief(found.get('after'))}"
    bit = f"bit {found.get('bit')} of " if fault.kind == "flip_bit" else ""
    values = [found.get(key) if found.get(key) is not None else found.get(raw) for key, raw in _VALUES]
    return f"{bit}{place}[{found.get('element')}]: {_number(values[0])}, now {_number(values[1])}"


_VALUES = (("value_before", "before"), ("value_after", "after"))


def _number(value: Any) -> str:
    try:
        return f"{float(value):.6g}"
    except (TypeError, ValueError, OverflowError):
        return _brief(value)


_BY_KIND: Mapping[str, Callable[[Fault, Mapping[str, Any], Mapping[str, Any]], str]] = {
    "preempt": _preempt,
    "stop": _stop,
    "pause": _pause,
    "exception": _exception,
    "exit": _exit,
    "memory": _memory,
    "loader_worker": _loader_worker,
    "slow": _slow,
    "hang": _hang,
    "node": _gone,
    "raylet": _gone,
    "drain": _gone,
    "agent": _gone,
    "supervisor": _successor,
    "head": _successor,
    "flip_bit": _corruption,
    "nan": _corruption,
    "diverge": _corruption,
    **dict.fromkeys(
        ("truncate", "zero_tail", "flip_file_bit", "missing_file", "missing_manifest", "foreign_manifest"), _damage
    ),
    "stale_staging": _staging,
    "no_space": _storage_error,
    "io_error": _storage_error,
    "failed_rename": _storage_error,
    "slow_storage": _slow_storage,
    "port_taken": _port,
    "no_arrival": _no_arrival,
}
"""Kinds that are not told by their end alone, as a kill and a segmentation fault are."""
