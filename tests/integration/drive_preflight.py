"""A driver for a test of preflight: a Ray of three raylets on this machine, of which two are bad, and later one more.

`python -m tests.integration.drive_preflight <root folder>`; the last line of its output is what happened, as JSON.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from chaosrun import api
from chaosrun.cluster import probe_pool as pool
from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight import conduct
from chaosrun.preflight.checks import cluster as cluster_check
from chaosrun.preflight.checks import devices, host, network
from chaosrun.preflight.model import Answers, Check, Finding, Level, Pool, Setting, Status, ask
from chaosrun.preflight.result import Result, to_json
from chaosrun.processes import children, identify, is_alive, marked, wait_gone
from tests.conftest import REPOSITORY
from tests.integration.raylets import MARK, add, raylets

FAULTY = REPOSITORY / "tests" / "integration" / "faulty"
# A dead raylet is noticed within 2 s, not 15; a process that hangs is killed at once, not after 5 s.
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
QUICK |= {"kill_worker_timeout_milliseconds": 100}
ANSWER_S = 2.0
LIMIT_S = 6.0
PATIENT_S = 120.0
STRUCK = "struck"


def waiting(folder: Path, limit_s: float) -> Check:
    """Each node waits for the file STRUCK, and leaves a process; its pid is in a file called after the node's id."""

    def call(setting: Setting, node: Node) -> Call:
        strange = {"PYTHONPATH": str(FAULTY / "strange_probes")}
        parameters = {"do": "answer", "until": str(folder / STRUCK), "leave": str(folder / node.node_id)}
        return ask("strange", limit_s, strange, **parameters)

    def judge(setting: Setting, nodes: Sequence[Node], facts: Answers[Any]) -> Sequence[Finding]:
        return [Finding(check="waiting", name="waits", status=Status.PASS, node=name) for name in facts.answered]

    return Check(name="waiting", about="waits", order=1, level=Level.QUICK, judge=judge, call=call)


def all_together(name: str, meanwhile: Callable[[], None] = lambda: None) -> Check:
    """What several do: whoever is left takes part."""

    def gather(setting: Setting, pool: Pool) -> Any:
        asked = [node.name for node in pool.nodes]
        meanwhile()
        return {"asked": asked}

    def judge(setting: Setting, nodes: Sequence[Node], facts: Any) -> Sequence[Finding]:
        return [Finding(check=name, name="asked", status=Status.PASS)]

    return Check(name=name, about="asked", order=2, level=Level.QUICK, judge=judge, gather=gather)


def raylet_pid(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


def agent_of(node: Any) -> int:
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(raylet_pid(node))}
    (pid,) = [pid for pid, title in titles.items() if title.startswith(b"ray::ProbeAgent")]
    return pid


def kill_raylet(node: Any) -> None:
    """Its agent leaves with it, which takes a moment, in which the agent could still answer."""
    agent = identify(agent_of(node))
    os.kill(raylet_pid(node), signal.SIGKILL)
    assert agent is not None and not wait_gone([agent], timeout_s=PATIENT_S)


def told(result: Result, root: Path, order: Sequence[str]) -> dict[str, Any]:
    names = {node.node_id: node.name for node in result.nodes}
    lines = [f"{finding.check}: {finding.status} {finding.name} {finding.node} {finding.reason}" for finding in result.findings]
    return {
        "nodes": [names[node_id] for node_id in order],
        "good": list(result.good),
        "file": (root / "good").read_text().splitlines(),
        "exit_code": result.exit_code,
        "against": {name: sorted({f.check for f in findings}) for name, findings in result.bad().items()},
        "asked": {name: facts["asked"] for name, facts in result.facts.items() if isinstance(facts, dict) and "asked" in facts},
        "lines": lines,
        "seconds": {run.name: run.seconds for run in result.checks},
        "saved": to_json(result),
    }


def ids(cluster: Cluster, *others: Any) -> list[str]:
    assert cluster.head_node is not None
    return [node.node_id for node in (cluster.head_node, *others)]


def be_patient() -> None:
    """However busy this machine is, a sound node has the time that it needs."""
    pool.START_S = cluster_check.LIMIT_S = host.LIMIT_S = PATIENT_S
    for limits in (devices.LIMIT_S, devices.PATIENCE_S, network.JOIN_S, network.COLLECTIVE_S):
        limits[Level.QUICK] = PATIENT_S


def bad_nodes(root: Path, cluster: Cluster, *others: Any) -> dict[str, Any]:
    """Two nodes with a layer under their processes; the checks are the real ones."""
    checks = ("cluster", "host", "bits", "network")
    request = conduct.Request(level=Level.QUICK, only=checks, good_nodes=root / "good")
    result = api.preflight(request, root=root, address=cluster.address)
    return told(result, root, ids(cluster, *others))


def silent_nodes(root: Path, cluster: Cluster, hanging: Any, dying: Any, late: Any) -> dict[str, Any]:
    """An agent hangs and a raylet dies in the middle of what each does, and another dies in the middle of what several do."""

    def strike() -> None:
        while not all((root / node.node_id).exists() and (root / node.node_id).read_text() for node in (hanging, dying)):
            time.sleep(0.01)
        os.kill(agent_of(hanging), signal.SIGSTOP)
        kill_raylet(dying)
        (root / STRUCK).touch()

    striking = threading.Thread(target=strike, daemon=True)

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "check.began" and event["check"] == "waiting":
            striking.start()

    several = all_together("together", lambda: kill_raylet(late))
    conduct.CHECKS, pool.ANSWER_S = (waiting(root, LIMIT_S), several, all_together("last")), ANSWER_S
    result = api.preflight(conduct.Request(good_nodes=root / "good"), root=root, address=cluster.address, on_event=on_event)
    assert not ray.is_initialized()
    order = ids(cluster, hanging, dying, late)
    deadline = time.monotonic() + 120
    while (left := left_behind(root, order)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return {**told(result, root, order), "left": left, "waiting_s": LIMIT_S + ANSWER_S}


def left_behind(root: Path, order: Sequence[str]) -> list[str]:
    """Command lines of agents, and of what they start, that still run below this driver's raylets; what probes have left."""
    started = [identify(int((root / node_id).read_text())) for node_id in order]
    alive = [f"left by a probe: {each.pid}" for each in started if each is not None and is_alive(each)]
    mark = os.environ[MARK]
    lines = [Path(f"/proc/{each.pid}/cmdline") for each in marked(f"{MARK}={mark}", titles=(b"ray::",))]
    words = ("ProbeAgent", "cluster.probe_guard", "preflight.probe")
    return alive + [line for path in lines if path.exists() and any(word in (line := path.read_text()) for word in words)]


def main(root: Path) -> None:
    be_patient()
    with raylets(num_cpus=1, _system_config=QUICK) as cluster:
        faults = ("skewed_clock", "flipped_bit")
        hanging, dying = (add(cluster, num_cpus=1, env_vars={"PYTHONPATH": str(FAULTY / fault)}) for fault in faults)
        bad = bad_nodes(root, cluster, hanging, dying)
        late = add(cluster, num_cpus=1)
        print(json.dumps({"bad": bad, "silent": silent_nodes(root, cluster, hanging, dying, late)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
