"""The network between the supervisor and the agents, and a Ray that places them: what `chaosrun.cluster` is given for a Ray.

`RayCluster`, `AgentClient` and `ClusterWorkers` are the real ones. A call may be late, so that replies and events overtake each
other; Ray tells of a dead actor some time after its death.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from chaosrun.cluster.agent_client import AGAIN_S, AgentClient
from chaosrun.cluster.ray_cluster import Placement, RayCluster
from chaosrun.errors import ResourcesError
from chaosrun.records.events import NodePlace
from tests.simulation.nodes import SimulatedNode

if TYPE_CHECKING:
    from tests.simulation.drill import Simulation


REPEATABLE = frozenset({"events", "stop", "activities", "identify_rank"})
"""Calls that may arrive twice: Ray itself repeats none, and what starts or strikes is not to be repeated by anybody."""


class Reference:
    """Of a call: its answer, once it is here."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_lost = False
        """On its way when a connection broke."""
        self.value: Any = None
        self.error: Exception | None = None
        self.on_done: Callable[[], None] = lambda: None

    def settle(self, value: Any = None, error: Exception | None = None) -> None:
        if not self.is_done:
            self.is_done, self.value, self.error = True, value, error
            self.on_done()

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Handle:
    """Of an actor: calls go over the network."""

    def __init__(self, simulation: "Simulation", node: SimulatedNode) -> None:
        self.simulation, self.node = simulation, node
        self.agent = node.agent
        self.calls: list[Reference] = []
        """Those without an answer."""
        node.on_agent_end.append(self._lose)
        node.on_break.append(self._break)

    def _break(self) -> None:
        calls, self.calls = [call for call in self.calls if not call.is_done], []
        for call in calls:
            call.is_lost = True
            unavailable = ActorUnavailableError("the connection was lost", None)
            after_s = self.simulation.network.notices_after_s()
            self.simulation.world.after(after_s, lambda call=call, error=unavailable: call.settle(error=error))

    def _lose(self) -> None:
        """Ray notices, and tells whoever waits for an answer."""
        calls, self.calls = [call for call in self.calls if not call.is_done], []
        for call in calls:
            after_s = self.simulation.network.notices_after_s()
            self.simulation.world.after(after_s, lambda call=call: call.settle(error=actor_died(self)))

    @property
    def is_alive(self) -> bool:
        return self.node.is_agent_alive and self.node.agent is self.agent

    def __getattr__(self, method: str) -> "Method":
        return Method(self, method)


class Method:
    def __init__(self, handle: Handle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *arguments: Any) -> Reference:
        handle, simulation = self._handle, self._handle.simulation
        reference = Reference()
        handle.calls = [call for call in handle.calls if not call.is_done]
        handle.calls.append(reference)
        if simulation.is_supervisor_alive:
            for _ in range(simulation.network.copies(handle.node, self._name)):
                simulation.network.carry(handle.node, self._name, lambda: self._arrive(reference, arguments))
        return reference

    def _arrive(self, reference: Reference, arguments: tuple[Any, ...]) -> None:
        handle, world = self._handle, self._handle.simulation.world
        if reference.is_lost:
            return
        if not handle.is_alive:
            world.after(handle.simulation.network.notices_after_s(), lambda: reference.settle(error=actor_died(handle)))
            return
        if (silent_s := handle.node.agent_hangs_until_s - world.now) > 0:
            world.after(silent_s, lambda: self._arrive(reference, arguments))
            return
        task = world.spawn(getattr(handle.agent, self._name)(*arguments))
        handle.node.tasks.append(task)
        task.add_done_callback(lambda task: self._answer(reference, task))

    def _answer(self, reference: Reference, task: "asyncio.Task[Any]") -> None:
        handle, network = self._handle, self._handle.simulation.network
        if not handle.is_alive or task.cancelled() or reference.is_lost:
            return
        handle.node.tasks.remove(task)
        if (raised := task.exception()) is not None:
            assert isinstance(raised, Exception)
            error = RayTaskError(self._name, "", raised, pid=0, ip="")
            network.carry(handle.node, self._name, lambda: reference.settle(error=error))
            return
        value = task.result()
        if network.loses(handle.node, self._name):
            unavailable = ActorUnavailableError("the connection was lost", None)
            handle.simulation.world.after(network.notices_after_s(), lambda: reference.settle(error=unavailable))
            return
        network.carry(handle.node, self._name, lambda: reference.settle(value))


def actor_died(handle: Handle) -> RayActorError:
    return RayActorError(error_msg=f"the actor on {handle.node.name} died")


class Network:
    """How long a message takes."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._random = simulation.world.random("network")

    def carry(self, node: SimulatedNode, what: str, arrive: Callable[[], None]) -> None:
        late_s = self._simulation.late_s(node, what)
        self._simulation.world.after(self._random.uniform(0.0003, 0.003) + late_s, arrive)

    def copies(self, node: SimulatedNode, what: str) -> int:
        return 2 if what in REPEATABLE and self._simulation.sends_twice(node, what) else 1

    def loses(self, node: SimulatedNode, what: str) -> bool:
        return self._simulation.loses_reply(node, what)

    def notices_after_s(self) -> float:
        """For Ray to tell of a dead actor."""
        return self._random.uniform(0.01, 2.0)


class Ray:
    """What `chaosrun.cluster.ray_cluster` calls of ray."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation

    def get(self, reference: Reference, timeout: float = 600.0) -> Any:
        if not self._simulation.world.wait(lambda: reference.is_done, timeout):
            raise GetTimeoutError("the call has timed out")
        return reference.get()

    def wait(self, references: list[Reference], timeout: float) -> tuple[list[Reference], list[Reference]]:
        assert timeout == 0
        return [each for each in references if each.is_done], [each for each in references if not each.is_done]

    def kill(self, handle: Handle, *, no_restart: bool) -> None:
        assert no_restart
        if not self._simulation.is_supervisor_alive:
            return

        def arrive() -> None:
            if handle.is_alive:
                handle.node.end_agent()

        self._simulation.world.after(0.02, arrive)


class Events:
    """The queue of a cluster."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._items: list[Any] = []

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float) -> Any:
        if not self._simulation.world.wait(lambda: bool(self._items), timeout):
            raise queue.Empty
        return self._items.pop(0)

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.pop(0)


class Pump:
    """In the place of the thread that carries an agent's events."""

    def __init__(self, client: "SimulatedClient") -> None:
        self._client = client
        self.ask()

    def join(self, timeout: float) -> None:
        pass

    def ask(self) -> None:
        self._client.ask(self._take)

    def _take(self, reference: Reference) -> None:
        world = self._client.simulation.world
        if self._client.takes(reference):
            world.after(AGAIN_S if reference.error else 0.0, self.ask)


class SimulatedClient(AgentClient):
    def __init__(self, handle: Handle, sink: Callable[[str, Any], None]) -> None:
        self.node_id = handle.node.name
        self.simulation = handle.simulation
        self._handle = handle
        self._sink = sink
        self._closing = False
        self._heard = 0
        self._stop = None
        self._pump: Any = Pump(self)

    def ask(self, on_done: Callable[[Reference], None]) -> None:
        """For events."""
        reference = self.submit("events", self._heard)
        reference.on_done = lambda: on_done(reference)

    def look(self) -> bool:
        return False  # Ray tells, when that is drawn

    def takes(self, reference: Reference) -> bool:
        """Whether there may be more after this answer."""
        return self._take_events(reference)


class SimulatedCluster(RayCluster):
    """Of one supervisor."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self.events: Any = Events(simulation)
        self.placement = None
        self.agents = {}
        self.standbys = {}
        self._over, self._watchers = threading.Event(), []
        self.kind = "joined"
        self.mark = "simulated"
        self.gpu = self.gpus_too_few = 0
        self._workers = simulation.scenario.workers
        self._cpu = 1.0
        self._only_on = frozenset()
        self._spread = False
        self._group = None
        self._closed = False
        self._connection: Any = SimpleNamespace(close=lambda: None)

    @property
    def oversubscribed(self) -> bool:
        return False

    @property
    def own_node(self) -> str:
        return "n-supervisor"

    def stop(self, attempt: int, nodes: Collection[str]) -> None:
        for node in nodes:
            self.agents[node].submit("stop", attempt)

    def _new_agent(self, node_id: str) -> SimulatedClient:
        node = next(node for node in self._simulation.nodes if node.name == node_id)
        if node.is_alive:
            node.start_agent()
        return SimulatedClient(Handle(self._simulation, node), self._take_event)

    def _spare_nodes(self, avoid: Collection[str]) -> list[str]:
        taken, simulation = {*avoid, *self.agents, *self.standbys}, self._simulation
        return [node.name for node in simulation.nodes if node.name not in taken and not simulation.is_known_dead(node)]

    def _acquire(self, deadline: float, avoid: Collection[str], timeout_s: float) -> Placement:
        simulation = self._simulation
        usable = [node for node in simulation.nodes if node.name not in avoid and not simulation.is_known_dead(node)]
        usable.sort(key=lambda node: bool(self.standbys) and node.name not in {*self.agents, *self.standbys})
        if not usable:
            simulation.world.wait(lambda: False, timeout_s)
            raise ResourcesError("no place for the workers", hint="join a larger cluster")
        ranks, count = list(range(self._workers)), min(len(usable), simulation.scenario.nodes)
        nodes: dict[str, NodePlace] = {}
        stood_by = tuple(node.name for node in usable[:count] if node.name in self.standbys)
        for number, node in enumerate(usable[:count]):
            own = tuple(ranks[number * self._workers // count : (number + 1) * self._workers // count])
            nodes[node.name] = NodePlace(address=f"10.0.0.{number + 1}", ranks=own)
            if node.name not in self.agents:
                self.agents[node.name] = self.standbys.pop(node.name, None) or self._new_agent(node.name)
        self._end({name: self.agents.pop(name) for name in self.agents.keys() - nodes.keys()}, lost=())
        self.placement = Placement(nodes=nodes, stood_by=stood_by)
        for agent in self.agents.values():
            agent.call("hello", timeout_s=max(30.0, deadline - simulation.world.now))
        return self.placement
