"""The node agent and the cluster on a real Ray: deaths are told, and nothing is left behind, whoever is killed."""

import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from ray._private.node import Node

from chaosrun.cluster.agent_client import AgentClient
from chaosrun.cluster.forkserver import PRELOAD
from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.errors import ChaosrunError, ResourcesError
from chaosrun.processes import ProcessIdentity, child_called, children, identify, is_alive, marked, state_of
from chaosrun.records.heartbeat import Heart
from chaosrun.records.layout import LegLayout
from tests.e2e.drills import shared_memory_left
from tests.integration.ranks import TARGET, alive, eventually, make_orders, notes_of

pytestmark = pytest.mark.ray

RAY_TITLES = (b"ray::",)


@pytest.fixture(scope="module")
def cluster(local_ray: None) -> Iterator[RayCluster]:
    with RayCluster(None, workers=3, gpu=0) as cluster:
        yield cluster
    assert ray.is_initialized(), "a borrowed Ray is not ours to end"
    assert marked(cluster.mark, titles=RAY_TITLES) == []


@pytest.fixture
def placed(cluster: RayCluster, request: pytest.FixtureRequest) -> Iterator[RayCluster]:
    """Parametrized, with these modules imported once and not by every rank."""
    cluster.acquire(300)
    cluster.start_servers({"CHAOSRUN_TEST": "yes"}, preload=getattr(request, "param", ()), target=TARGET)
    drain(cluster)
    yield cluster
    cluster.release()


def drain(cluster: RayCluster) -> None:
    while True:
        try:
            cluster.events.get_nowait()
        except queue.Empty:
            return


def until(cluster: RayCluster, name: str, *, timeout_s: float = 120.0) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    while not events or events[-1]["event"] != name:
        events.append(json.loads(msgspec.json.encode(cluster.events.get(timeout=timeout_s)[1])))
    return events


def only_agent(cluster: RayCluster) -> AgentClient:
    (agent,) = cluster.agents.values()
    return agent


def fork_server_of(agent: AgentClient) -> int:
    (pid,) = children(agent.call("hello"))
    return pid


with_torch = pytest.mark.parametrize("placed", [("torch", "torch.utils.data")], indirect=True, ids=["with torch"])


def identities(pids: list[int]) -> list[ProcessIdentity]:
    return [identity for pid in pids if (identity := identify(pid)) is not None]


def test_the_placement_has_all_ranks_and_the_agent_knows_its_node(placed: RayCluster) -> None:
    assert placed.kind == "borrowed"
    placement = placed.placement
    assert placement is not None
    ((node_id, node),) = placement.nodes.items()
    assert node.ranks == (0, 1, 2)
    assert node.gpus == ()
    assert placement.master_addr == "127.0.0.1"
    assert placed.acquire(1) is placement
    agent = only_agent(placed)
    assert agent.node_id == node_id
    assert "torch" not in Path(f"/proc/{agent.call('hello')}/maps").read_text(), "the agent must stay light"


def test_the_ranks_see_the_given_environment_and_nothing_of_rays(placed: RayCluster, tmp_path: Path) -> None:
    placed.start_attempt(1, make_orders(tmp_path, "print"))
    until(placed, "stopped")
    environment = notes_of(tmp_path, 0)["environment"]
    assert environment["CHAOSRUN_TEST"] == "yes"
    assert [name for name in environment if name.startswith("RAY_")] == []
    assert notes_of(tmp_path, 0)["niceness"] == os.nice(0)


@with_torch
def test_stop_returns_when_all_are_gone_and_again_at_once(placed: RayCluster, tmp_path: Path) -> None:
    started = placed.start_attempt(1, make_orders(tmp_path, "loader"))
    workers = [pid for rank in range(3) for pid in notes_of(tmp_path, rank)["workers"]]
    everybody = identities([*started.pids.values(), *workers])
    assert len(everybody) == 9
    agent = only_agent(placed)
    assert list(agent.call("stop", 1)) == [0, 1, 2]
    assert alive(everybody) == []
    assert agent.call("stop", 1) == ()
    assert agent.call("stop", 99) == ()


def test_the_same_environment_keeps_the_server_and_another_replaces_it(placed: RayCluster) -> None:
    agent = only_agent(placed)
    before = fork_server_of(agent)
    placed.start_servers({"CHAOSRUN_TEST": "yes"}, preload=(), target=TARGET)
    assert fork_server_of(agent) == before
    placed.start_servers({"CHAOSRUN_TEST": "no"}, preload=(), target=TARGET)
    assert fork_server_of(agent) != before
    assert identify(before) is None


def test_a_start_that_fails_says_why_and_the_next_one_works(placed: RayCluster, tmp_path: Path) -> None:
    LegLayout(tmp_path).attempt(1).log(2).mkdir(parents=True)
    with pytest.raises(ResourcesError, match=r"rank-2\.log"):
        placed.start_attempt(1, make_orders(tmp_path, "sleep"))
    until(placed, "stopped")
    placed.start_attempt(2, make_orders(tmp_path, "complete", attempt=2))
    assert until(placed, "stopped")[-1]["killed"] == []


def test_a_preload_that_fails_reaches_the_driver_with_its_traceback(placed: RayCluster) -> None:
    with pytest.raises(ChaosrunError, match="no_such_module_anywhere"):
        placed.start_servers({}, preload=("no_such_module_anywhere",), target=TARGET)


def test_the_pulse_of_a_rank_is_its_newest_beat_and_the_processor_time_it_has_used(placed: RayCluster, tmp_path: Path) -> None:
    started = placed.start_attempt(4, make_orders(tmp_path, "sleep", attempt=4))
    heart = Heart()
    heart.open(LegLayout(tmp_path).attempt(4).heartbeat(1))
    heart.beat("forward", 7)
    activities = only_agent(placed).call("activities", str(tmp_path), 4, (0, 1, 2))
    assert activities.keys() == started.pids.keys() == {0, 1, 2}
    assert [activities[rank].beat for rank in (0, 2)] == [None, None]
    seen = activities[1].beat
    assert seen is not None and (seen.count, seen.step, seen.stage) == (1, 7, "forward")
    assert all(activity.cpu_s >= 0 for activity in activities.values())


def test_hanging_ranks_write_their_stacks_down_and_a_stopped_one_does_not_hold_that_up(
    placed: RayCluster, tmp_path: Path
) -> None:
    started = placed.start_attempt(4, make_orders(tmp_path, ["say and sleep", "say and sleep", "loader"], attempt=4))
    loaders = notes_of(tmp_path, 2, attempt=4)["workers"]
    for rank in (0, 1):
        notes_of(tmp_path, rank, attempt=4)  # it is in its script, no standby any more
    (stopped,) = identities([started.pids[1]])
    os.kill(stopped.pid, signal.SIGSTOP)
    eventually(lambda: state_of(stopped) == "T")
    found = only_agent(placed).call("stacks", str(tmp_path), 4, 120.0)
    assert {rank: (told.pid, told.state == "T") for rank, told in found.items()} == {
        rank: (pid, rank == 1) for rank, pid in started.pids.items()
    }
    assert found[1].stack == ()
    assert "fork_targets.py" in found[0].stack[0]
    logs = {rank: LegLayout(tmp_path).attempt(4).log(rank).read_text() for rank in found}
    assert all("attempt 4 hangs" in log for log in logs.values())
    assert "most recent call first" in logs[0] and "most recent call first" not in logs[1]
    assert "no answer: the process is in state T" in logs[1]
    for pid in loaders:
        told = logs[2].partition(f"its child, process {pid} ---\n")[2].partition("---")[0]
        assert "_worker_loop" in told, "a loader worker is asked, too"
    assert len(alive(identities([*started.pids.values(), *loaders]))) == 5, "nobody dies of being asked"
    assert only_agent(placed).call("stacks", str(tmp_path), 3, 1.0) == {}, "no such attempt runs"


def test_a_rank_that_would_not_survive_the_question_is_not_asked(placed: RayCluster, tmp_path: Path) -> None:
    started = placed.start_attempt(4, make_orders(tmp_path, "exec sleep", attempt=4))
    eventually(lambda: all(Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in started.pids.values()))
    found = only_agent(placed).call("stacks", str(tmp_path), 4, 5.0)
    assert found[0].stack == ()
    assert len(alive(identities([*started.pids.values()]))) == 3


def test_the_death_of_the_fork_server_ends_the_attempt_and_the_next_start_brings_it_back(
    placed: RayCluster, tmp_path: Path
) -> None:
    started = placed.start_attempt(1, make_orders(tmp_path, "stray"))
    strays = [pid for rank in range(3) for pid in notes_of(tmp_path, rank)["strays"]]
    until(placed, "exited")  # rank 0 completes
    everybody = identities([started.pids[1], started.pids[2], *strays])
    assert len(everybody) == 8
    os.kill(fork_server_of(only_agent(placed)), signal.SIGKILL)
    events = until(placed, "stopped")
    assert [(event["event"], event.get("rank"), event.get("signal")) for event in events] == [
        ("exited", 1, None),
        ("exited", 2, None),
        ("stopped", None, None),
    ]
    assert alive(everybody) == []
    placed.start_attempt(2, make_orders(tmp_path, "complete", attempt=2))
    assert until(placed, "stopped")[-1]["killed"] == []


@with_torch
def test_the_death_of_the_agent_is_told_and_leaves_no_process(placed: RayCluster, tmp_path: Path) -> None:
    started = placed.start_attempt(1, make_orders(tmp_path, "loader"))
    workers = [pid for rank in range(3) for pid in notes_of(tmp_path, rank)["workers"]]
    agent = only_agent(placed)
    everybody = identities([*started.pids.values(), *workers, fork_server_of(agent)])
    assert len(everybody) == 10
    os.kill(agent.call("hello"), signal.SIGKILL)
    lost = until(placed, "agent_lost")[-1]
    assert lost["message"]
    eventually(lambda: not alive(everybody))
    placed.release()
    placed.acquire(300)
    placed.start_servers({}, preload=(), target=TARGET)
    placed.start_attempt(2, make_orders(tmp_path, "complete", attempt=2))
    assert until(placed, "stopped")[-1]["killed"] == []


@pytest.mark.nightly
def test_sigkill_to_next_attempt_started_through_ray_takes_milliseconds(
    cluster: RayCluster, tmp_path: Path, record_property: Any
) -> None:
    cluster.acquire(300)
    try:
        cluster.start_servers({}, preload=PRELOAD, target=TARGET)
        drain(cluster)
        server_pid = fork_server_of(only_agent(cluster))
        started = cluster.start_attempt(1, make_orders(tmp_path, "sleep"))
        told_ms: list[float] = []
        stopped_ms: list[float] = []
        started_ms: list[float] = []
        for attempt in range(2, 12):
            eventually(lambda: len(children(server_pid)) == 6)
            began = time.monotonic()
            os.kill(started.pids[1], signal.SIGKILL)
            until(cluster, "exited")
            told_ms.append((time.monotonic() - began) * 1000)
            until(cluster, "stopped")
            stopped_ms.append((time.monotonic() - began) * 1000)
            started = cluster.start_attempt(attempt, make_orders(tmp_path, "sleep", attempt=attempt))
            started_ms.append((time.monotonic() - began) * 1000)
        medians = [round(statistics.median(each), 1) for each in (told_ms, stopped_ms, started_ms)]
        record_property("told_stopped_started_ms", medians)
        print(f"SIGKILL → told, stopped, started (through Ray): {medians} ms")
        assert all(told <= stopped <= started for told, stopped, started in zip(told_ms, stopped_ms, started_ms, strict=True))
    finally:
        cluster.release()


def test_what_can_never_be_placed_is_refused_with_the_numbers(cluster: RayCluster) -> None:
    with RayCluster(None, workers=3, gpu=4) as asked, pytest.raises(ResourcesError) as caught:
        asked.acquire(0.5)
    assert caught.value.exit_code == 7
    assert "3 workers with CPU 1, GPU 4 each within 0.5 s" in caught.value.message
    assert "GPU 0 (0 free)" in caught.value.message
    assert caught.value.hint
    assert ray.is_initialized(), "a borrowed Ray is not ours to end"


def test_two_clusters_share_a_ray_and_the_second_waits_for_resources(cluster: RayCluster) -> None:
    cluster.acquire(300)
    try:
        # Every CPU there is could be had, were it not for those that the first cluster holds: not how fast Ray answers decides.
        everything = ray.cluster_resources()["CPU"]
        with RayCluster(None, workers=1, cpu=everything, gpu=0) as other:
            with pytest.raises(ResourcesError, match=r"within 0\.5 s") as caught:
                other.acquire(0.5)
            assert caught.value.hint == "wait for other jobs to end, or raise recovery.acquire_timeout"
    finally:
        cluster.release()


@pytest.mark.nightly
def test_two_nodes_meet_at_the_port_that_the_first_one_chose(tmp_path: Path) -> None:
    driver = subprocess.run(
        [sys.executable, "-m", "tests.integration.drive_two_nodes", str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert driver.returncode == 0, driver
    told = json.loads(driver.stdout.splitlines()[-1])
    assert told["ranks"] == [[0], [1, 2]] or told["ranks"] == [[0, 1], [2]]
    assert told["master_addr"] == told["address"] != "127.0.0.1"
    assert [notes_of(tmp_path, rank)["port"] for rank in range(3)] == [told["port"]] * 3
    assert sorted(told["stopped"]) == sorted(told["nodes"])
    # torchrun, once on each node: its ranks announce themselves on the node that they are placed on.
    nodes = [node for node, ranks in zip(told["nodes"], told["ranks"], strict=True) for _ in ranks]
    assert told["commanded"] == {"where": nodes, "completed": {"0": True, "1": True, "2": True}, "failed": []}
    # Placements that say where: bound to one node after the other, and no two workers on one.
    assert (told["bound"], told["spread"]) == (told["nodes"], sorted(told["nodes"]))


@pytest.mark.nightly
@pytest.mark.parametrize("reckoned", ["by node", "sum"])
def test_a_drill_begins_where_a_node_has_room_for_its_ranks(reckoned: str) -> None:
    driver = subprocess.run(
        [sys.executable, "-m", "tests.integration.drive_free_nodes", reckoned], capture_output=True, text=True, timeout=300
    )
    assert driver.returncode == 0, driver
    told = json.loads(driver.stdout.splitlines()[-1])
    wide = told["wide wide"]
    if reckoned == "sum":  # the control: it is begun, and has no place
        assert "no place for 1 workers with CPU 3 each within 6 s" in wide["where"]["wide 1"]
        return
    assert wide == {"most": 1, "where": {"wide 0": [5.0], "wide 1": [5.0]}}
    assert told["narrow whole"] == {"most": 2, "where": {"narrow 0": [2.0], "whole 1": [5.0]}}
    assert sorted(told["both"]["where"]["both 0"]) == [2.0, 5.0, 5.0]


def run_driver(leg: Path, then: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "tests.integration.drive_cluster", str(leg), then]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ})


@pytest.mark.parametrize("then", ["raise", *(pytest.param(then, marks=pytest.mark.nightly) for then in ("close", "wait"))])
def test_nothing_is_left_after_the_driver(tmp_path: Path, then: str) -> None:
    """An orderly end, an interrupt, and a SIGKILL of the driver: no process, no folder, no entry in /dev/shm or at home."""
    token = Path.home() / ".ray" / "auth_token"
    before = (set(os.listdir("/dev/shm")), token.exists() and token.stat().st_mtime)
    driver = run_driver(tmp_path, then)
    try:
        assert driver.stdout is not None and driver.stderr is not None
        told = json.loads(driver.stdout.readline())
        folder = told["mark"].partition("#")[0]
        if then == "wait":
            workers = [pid for rank in range(2) for pid in notes_of(tmp_path, rank)["workers"]]
            everybody = identities([*told["pids"], *workers, told["agent"], told["server"]])
            everybody += marked(folder, titles=RAY_TITLES)
            assert len(everybody) > 10
            driver.kill()
            driver.wait()
            eventually(lambda: not alive(everybody))
        else:
            _, printed = driver.communicate(timeout=300)
            assert (driver.returncode == 0) == (then == "close")
            if then == "close":
                assert printed == "", "a private Ray is quiet"
        eventually(lambda: not marked(folder, titles=RAY_TITLES))
        eventually(lambda: not Path(folder).exists())
        eventually(lambda: not shared_memory_left(before[0]))
        assert (token.exists() and token.stat().st_mtime) == before[1]
    finally:
        driver.kill()
        driver.communicate()


def test_the_cleanup_process_itself_ends_with_the_cluster(cluster: RayCluster) -> None:
    cleaners = [pid for pid in children(os.getpid()) if b"cluster.cleanup" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(cleaners) == 1
    assert is_alive(identities(cleaners)[0])


def test_a_private_ray_starts_nothing_that_nobody_asks(placed: RayCluster) -> None:
    raylet = child_called("raylet", os.getpid())
    assert raylet is not None and child_called("ray::NodeAgent", raylet.pid)
    assert child_called("ray::IDLE", raylet.pid) is None
    commands = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(os.getpid()))
    assert not [name for name in (b"monitor.py", b"dashboard/dashboard.py") if name in commands]
    assert Node.start_monitor.__name__ == "start_monitor"  # for whoever starts another Ray in this process


@pytest.mark.parametrize(
    ("act", "address", "said"),
    [
        # As root, no disk is full: a file is in the way.
        (
            "os.environ['TMPDIR'] = tempfile.tempdir = place + '/file'; os.mknod(tempfile.tempdir)", None,
            "Ray cannot be started with its files below {}: ",
        ),
        ("os.rmdir(place)", None, "the current directory no longer exists"),
        ("", "127.0.0.1:1", "no Ray cluster at 127.0.0.1:1: "),
        ("", "ray://nowhere:1", "ray://nowhere:1: chaosrun does not go through Ray's client"),
    ],
)  # fmt: skip
def test_where_there_can_be_no_ray_it_is_said_why(act: str, address: str | None, said: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    code = (
        "import os, sys, tempfile\n"
        "from chaosrun.cluster.connection import connect\n"
        "from chaosrun.errors import ChaosrunError\n"
        f"place = {str(place)!r}\n{act}\n"
        "try:\n"
        f"    connect({address!r}, cpus=1)\n"
        "except ChaosrunError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.startswith(said.format(place / "file"))
