"""Nodes that stand by: which, what is heard of them, and when the next placement goes there first; and nodes that are gone."""

import queue
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from chaosrun.cluster import agent_client, ray_cluster
from chaosrun.cluster.agent_client import AgentClient, look_after
from chaosrun.cluster.messages import AgentDied, RanksStopped
from chaosrun.cluster.placement import Placement
from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.records.events import NodePlace
from chaosrun.spec.model import RecoverySpec


class Agent:
    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.asked: list[tuple[Any, ...]] = []

    def submit(self, *call: Any) -> None:
        self.asked.append(call)


class Cluster(RayCluster):
    """Of two ranks on "a" and "b", and free nodes."""

    def __init__(self, **free: float) -> None:
        self._free = {node: {"CPU": cpus} for node, cpus in {"a": 0.0, "b": 0.0, **free}.items()}
        self._workers, self._cpu, self._spread, self._only_on, self.gpu = 2, 1.0, False, frozenset[str](), 0
        self.events = queue.SimpleQueue()
        self.agents: Any = {node: Agent(node) for node in "ab"}
        self.standbys: Any = {}
        self._rooms, self.places = {}, {"a": 1, "b": 1}
        nodes = {node: NodePlace(address="", ranks=(rank,)) for rank, node in enumerate("ab")}
        self.placement = Placement(nodes=nodes)

    def free(self) -> Any:  # type: ignore[override]
        return self._free

    def _new_agent(self, node_id: str) -> Any:
        return Agent(node_id)


@pytest.mark.parametrize(("wanted", "chosen"), [(0, []), (1, ["d"]), (2, ["d", "c"]), (9, ["d", "c"]), ("all", ["d", "c"])])
def test_free_nodes_with_room_stand_by_the_roomiest_first(wanted: Any, chosen: list[str]) -> None:
    cluster = Cluster(c=1, d=4, full=0.5, avoided=8)
    cluster.stand_by(wanted, {"X": "1"}, avoid=["avoided"], preload=("torch",))
    assert list(cluster.standbys) == chosen
    for agent in cluster.standbys.values():
        assert [call[0] for call in agent.asked] == ["hello", "start_server"]
        assert agent.asked[1][1:3] == ({"X": "1"}, ("torch",))


def test_one_that_is_gone_is_replaced_by_another() -> None:
    cluster = Cluster(c=1, d=2)
    cluster.stand_by(1, {})
    cluster._take_event("d", RanksStopped(attempt=1, killed=()))  # of no attempt that is here
    assert list(cluster.standbys) == ["d"]
    cluster._take_event("d", AgentDied(message="killed"))
    assert list(cluster.standbys) == []
    assert cluster.events.empty(), "the attempt goes on"
    cluster._free["d"] = {}
    cluster.stand_by(1, {})
    assert list(cluster.standbys) == ["c"]
    cluster._take_event("a", AgentDied(message="killed"))
    assert cluster.events.get_nowait() == ("a", AgentDied(message="killed"))


def test_the_next_placement_prefers_warm_nodes_where_they_have_room_for_all() -> None:
    cluster = Cluster(c=1)
    cluster.stand_by("all", {})
    assert cluster._warm([]) == {"a", "b", "c"}
    del cluster.agents["b"]
    assert cluster._warm([]) == {"a", "c"}
    assert cluster._warm(["c"]) == frozenset(), "one rank would have no place"
    assert Cluster(c=1)._warm([]) == frozenset(), "nobody stands by: wherever there is room"


def test_places_that_are_warm_are_taken_before_ray_has_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ray_cluster, "placement_group", lambda *bundles, **where: asked.append((bundles, where)) or "group")
    cluster = Cluster(c=1, d=2)
    assert cluster._reserve_at_once([]) == {}, "nobody stands by"
    cluster.stand_by("all", {})
    del cluster.agents["b"]
    taken = cluster._reserve_at_once([])
    assert taken[0] == "a" and set(taken.values()) <= {"a", "c", "d"} and len(taken) == cluster._workers
    (((bundles,), where),) = asked
    assert len(bundles) == cluster._workers
    assert where["bundle_label_selector"] == [{"ray.io/node-id": f"in({node})"} for node in taken.values()]
    cluster._free = {"c": {"CPU": 0.0}, "d": {"CPU": 0.0}}
    assert cluster._reserve_at_once([]) == {}, "somebody else has taken them"
    cluster._free = {"c": {"CPU": 9.0}, "d": {"CPU": 9.0}}
    assert "c" not in cluster._reserve_at_once(["c"]).values()
    cluster.gpu = 1
    assert cluster._reserve_at_once([]) == {}
    assert len(asked) == 2


@pytest.mark.parametrize("value", [-1, 1.0, True, "some"])
def test_values_that_are_none(value: object) -> None:
    with pytest.raises(ValueError, match="'all' or a number of nodes"):
        RecoverySpec.model_validate({"standby": value})


class Told(AgentClient):
    """Of a node whose raylet is said to listen at `place`."""

    def __init__(self, node_id: str, answers: bool = False) -> None:
        self.node_id, self._closing, self._answers = node_id, False, answers
        self.told: list[Any] = []
        self._sink = lambda node, event: self.told.append((node, event))

    def has_answered(self, reference: Any) -> bool:
        return self._answers


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Any:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node = {"NodeID": "n", "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": listener.getsockname()[1]}
        monkeypatch.setattr(agent_client.ray, "nodes", lambda: [node])
        yield listener


def test_a_node_is_gone_when_its_raylet_refuses_and_that_is_told_once(listener: socket.socket) -> None:
    agent = Told("n")
    assert not agent.look()
    assert agent.told == []
    listener.close()
    assert agent.look()
    assert agent.look()
    assert agent.told == [("n", AgentDied(message="its raylet is gone"))]
    assert not Told("unknown").look()


def test_silence_is_no_death(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any, **__: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(agent_client.socket, "create_connection", silent)
    assert not Told("n").look()


def test_only_who_does_not_answer_is_looked_after(listener: socket.socket) -> None:
    listener.close()
    silent, other, over = Told("n"), Told("n", answers=True), threading.Event()
    watching = threading.Thread(target=look_after, args=([(silent, 1), (other, 2)], over))
    watching.start()
    while not silent.told:
        assert watching.is_alive()
    over.set()
    watching.join()
    assert other.told == []


def test_a_ray_without_room_for_its_files_is_not_taken_for_a_busy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers die at their start, so that the agents never are: no other job holds their places."""
    cluster = Cluster()
    cluster.kind, cluster.mark = "private", "/tmp/small/chaosrun-ray-x#1"
    full = {Path("/tmp/small"): OSError(28, "No space left on device")}
    monkeypatch.setattr(ray_cluster, "refusal", full.get)
    error = cluster._no_placement({"CPU": 1.0}, (), waited_s=60)
    assert error.message == "Ray cannot be started with its files below /tmp/small: No space left on device"
    assert error.hint is not None and "TMPDIR" in error.hint
