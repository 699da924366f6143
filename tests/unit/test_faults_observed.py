"""What is told of a fault that landed: the fact, for every kind of the catalogue."""

import errno
from typing import Any

import pytest

from chaosrun.faults.fault import Fault
from chaosrun.faults.kinds import KINDS
from chaosrun.faults.observed import Observation
from tests.unit.events import event

NODE = {
    "struck": [{"what": "agent", "pid": 40, "start_ticks": 1}],
    "gone": [
        {"what": "rank 1", "pid": 43, "start_ticks": 1},
        {"what": "process below", "pid": 44, "start_ticks": 1},
        {"what": "fork server", "pid": 41, "start_ticks": 1},
        {"what": "agent", "pid": 40, "start_ticks": 1},
    ],
    "left": [],
}
RAYLET = {
    "struck": [{"what": "raylet", "pid": 39, "start_ticks": 1}],
    "gone": [{"what": "raylet", "pid": 39, "start_ticks": 1}, *NODE["gone"]],
}
SUPERVISOR = {"struck": [], "gone": [{"what": "supervisor", "pid": 30, "start_ticks": 1}], "successor": 31}
HEAD = {**SUPERVISOR, "gone": [{"what": "head", "pid": 29, "start_ticks": 1}, *SUPERVISOR["gone"]]}
STANDSTILL = {"rank": 1, "pid": 7, "step": 9, "stage": "forward", "silent_s": 20.4, "stack": []}
BIT = {"state": "parameter", "tensor": "0.weight", "element": 17, "bit": 30, "before": "3e000000", "after": "7e000000"}
VALUES = {"value_before": "0.125", "value_after": "4.253529586511731e+37"}


def damage(file: str, before: int, after: int | None, *, size: int | None = None) -> dict[str, Any]:
    looks = [None if each is None else {"size": size or each, "sha256": f"{each:08x}" * 8} for each in (before, after)]
    return {"checkpoint": "step-00000008", "file": file, "path": "x", "before": looks[0], "after": looks[1]}


def raised(error: str, errno: int | None = None, **note: Any) -> dict[str, Any]:
    return {"end": {"status": "failed", "error": error, "errno": errno}, "note": note or None, "after_s": 0.1}


STORAGE = "ResourcesError: checkpoint storage failed at /c/staging/step-00000008.attempt-1/chaosrun-rank-1.pt: "

SEEN: dict[str, tuple[dict[str, Any], Any, str]] = {
    "kill": ({"signal": 9}, None, "pid 7: SIGKILL"),
    "preempt": ({"exit_code": 85}, raised("Preempted: rank 1 was told to leave"), "pid 7: left on the notice (exit code 85)"),
    "stop": ({}, {**STANDSTILL, "state": "T"}, "pid 7: stopped (state T), no progress for 20 s"),
    "pause": (
        {},
        {"state_stopped": "T", "state_before": "T", "state_after": "S", "stopped_s": 1.002},
        "pid 7: stopped for 1.002 s (state T), then running",
    ),
    "segfault": ({"signal": 11}, None, "pid 7: SIGSEGV"),
    "abort": ({"signal": 6}, None, "pid 7: SIGABRT"),
    "exception": ({"exit_code": 1}, raised("InjectedError: fault F1: raised on purpose after step 7"), "pid 7: InjectedError"),
    "exit": ({"exit_code": 0}, {"end": None}, "pid 7: exit code 0, no end record"),
    "memory": (
        {"exit_code": 1},
        raised("MemoryError: fault F1: 255 MiB taken, then …", taken_mib=255, limit_mib=2048),
        "pid 7: MemoryError after 255 MiB, at a limit of 2.0 GiB",
    ),
    "loader_worker": (
        {"exit_code": 1},
        raised("RuntimeError: DataLoader worker (pid(s) 4242) exited unexpectedly", victim=4242, start_ticks=5),
        "loader worker 4242 of pid 7: SIGKILL",
    ),
    "slow": ({}, {"steps": 10, "before_s": 0.0104, "during_s": 0.0312}, "pid 7: 10 steps at 31.2 ms, 10.4 ms before"),
    "hang": ({}, {**STANDSTILL, "state": "S"}, "pid 7: alive (state S), no progress for 20 s"),
    "node": ({}, {**NODE, "struck": NODE["gone"]}, "gone: agent, fork server, rank 1"),
    "raylet": ({}, RAYLET, "gone: raylet 39, with it agent, fork server, rank 1"),
    "drain": (
        {},
        {**NODE, "ends": {"1": {"exit_code": 85, "signal": None}}},
        "1 rank left on the notice; gone: agent, fork server, rank 1",
    ),
    "supervisor": ({}, SUPERVISOR, "gone: supervisor 30, seen by the next supervisor (31)"),
    "agent": ({}, NODE, "gone: agent 40, with it fork server, rank 1"),
    "head": ({}, HEAD, "gone: head 29, supervisor 30, seen by the next supervisor (31)"),
    "flip_bit": ({}, {**BIT, **VALUES}, "bit 30 of 0.weight[17]: 0.125, now 4.25353e+37"),
    "nan": (
        {},
        {**BIT, **VALUES, "state": "gradient", "bit": None, "value_after": "nan"},
        "gradient of 0.weight[17]: 0.125, now nan",
    ),
    "diverge": (
        {},
        {"state": "parameter", "tensor": "0.weight", "before": "11ff", "after": "22ee"},
        "0.weight: 11ff, now 22ee",
    ),
    "truncate": (
        {},
        damage("model.safetensors", 4096, 2048),
        "model.safetensors of step-00000008: 4096 bytes, now 2048; quarantined",
    ),
    "zero_tail": (
        {},
        damage("optimizer.bin", 17, 18, size=17),
        "optimizer.bin of step-00000008: sha256 00000011…, now 00000012…; quarantined",
    ),
    "flip_file_bit": (
        {},
        damage("optimizer.bin", 17, 18, size=17),
        "optimizer.bin of step-00000008: sha256 00000011…, now 00000012…; quarantined",
    ),
    "missing_file": ({}, damage("chaosrun-rank-1.pt", 17, None), "chaosrun-rank-1.pt of step-00000008: removed; quarantined"),
    "missing_manifest": ({}, damage("MANIFEST.json", 17, None), "MANIFEST.json of step-00000008: removed; quarantined"),
    "foreign_manifest": ({}, damage("MANIFEST.json", 17, 18), "MANIFEST.json of step-00000008: another step's; quarantined"),
    "stale_staging": (
        {},
        {"staged": "step-00000008.attempt-0", "path": "x", "files": {}},
        "step-00000008.attempt-0: left behind, cleared away at the next start",
    ),
    "no_space": ({"exit_code": 7}, raised(f"{STORAGE}No space left on device", errno.ENOSPC), "pid 7: ENOSPC from write"),
    "io_error": ({"exit_code": 7}, raised(f"{STORAGE}Input/output error", errno.EIO), "pid 7: EIO from write"),
    "slow_storage": ({}, {"waits": 12, "waited_s": 2.4321, "longest_s": 0.3}, "pid 7: 12 fsyncs took 2.4 s longer in all"),
    "failed_rename": ({"exit_code": 7}, raised(f"{STORAGE}Input/output error", errno.EIO), "pid 7: EIO from rename"),
    "failed_put": ({"exit_code": 7}, raised(f"{STORAGE}Input/output error", errno.EIO), "pid 7: EIO from the storage"),
    "lost_reply": ({}, {"requests": 1, "accepted": 1}, "pid 7 lost the reply to 1 request, and saved the checkpoint"),
    "late_listing": (
        {},
        {"requests": 1, "accepted": 4},
        "pid 7: 1 listing left out 4 objects that were new, and are still there",
    ),
    "throttled_store": ({}, {"requests": 3, "accepted": 9}, "pid 7 was refused 3 requests, and saved the checkpoint"),
    "power_cut": (
        {"signal": 9},
        {"note": {"save": 8, "done": 3, "last": "write last.pt", "struck_s": 1.0}},
        "pid 7: SIGKILL after 3 operations of its save (write last.pt)",
    ),
    "port_taken": (
        {"exit_code": 1},
        raised("DistNetworkError: port: 29500 EADDRINUSE", port=29500, stranger=77),
        "pid 7: EADDRINUSE at port 29500, held by pid 77",
    ),
    "no_arrival": (
        {},
        {**STANDSTILL, "stage": "started", "state": "S"},
        "pid 7: alive, never at the rendezvous (state S), no progress for 20 s",
    ),
}


def observed(found: Any, ended: dict[str, Any], how: str = "death") -> Any:
    return event("fault.observed", **{"rank": 1, "pid": 7, "how": how, "found": found, **ended})


def fault_of(kind: str, **more: Any) -> Fault:
    return Fault.from_json(Fault(id="F1", kind=kind, rank=1, phase=KINDS[kind].default_phase, source="x", **more).to_json())  # type: ignore[arg-type]


def test_every_kind_has_its_words() -> None:
    assert {name for name, kind in KINDS.items() if kind.tell} <= SEEN.keys() <= KINDS.keys()


@pytest.mark.parametrize("kind", SEEN)
def test_the_fact_is_told(kind: str) -> None:
    ended, found, words = SEEN[kind]
    assert Observation.of(fault_of(kind), observed(found, ended, KINDS[kind].evidence)).words == words


def test_out_of_grace() -> None:
    seen = observed({"end": None, "note": None, "after_s": 30.04, "killed": False, "alone": False}, {"signal": 9})
    assert Observation.of(fault_of("preempt"), seen).words == "pid 7: SIGKILL 30.0 s after the notice, when grace had run out"


def test_at_an_fsync() -> None:
    fault = Fault(id="F1", kind="io_error", rank=1, phase="checkpoint.fsync.before", source="x")
    assert (
        Observation.of(fault, observed(raised(f"{STORAGE}Input/output error", errno.EIO), {})).words == "pid 7: EIO from fsync"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_writes_down_cannot_be_read(kind: str) -> None:
    found = {"gone": 3, "before": "x", "after_s": "x", "waits": "x", "silent_s": "x", "staged": 1, "victim": "x", "final": 3}
    with pytest.raises(ValueError):
        Observation.of(fault_of(kind), observed(found, {}, KINDS[kind].evidence))
