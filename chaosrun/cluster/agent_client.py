"""The supervisor's handle of one agent: calls to the actor, and a thread that always waits for its events."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from chaosrun.cluster.messages import AgentDied, AgentEvent, NodeEvent
from chaosrun.errors import ChaosrunError, RecoveryError, ResourcesError

AGAIN_S = 0.2
LOOK_EVERY_S = 0.1
CONNECT_LIMIT_S = 1.0
CLOSE_LIMIT_S = 10.0
Sink = Callable[[str, NodeEvent], None]
"""Takes (node id, event); called from another thread."""


class AgentClient:
    """One agent. In addition to the agent's own events the sink gets an AgentDied when the agent or its node dies."""

    def __init__(self, handle: Any, node_id: str, sink: Sink) -> None:
        self.node_id = node_id
        self._handle = handle
        self._sink = sink
        self._closing = False
        self._heard = 0
        """Number of events received so far."""
        self._stop: tuple[Any, ...] | None = None
        """Arguments of the last `stop`, until the next start."""
        self._pump = threading.Thread(target=self._carry_events, name=f"agent-events-{node_id[:8]}", daemon=True)
        self._pump.start()

    def submit(self, method: str, *arguments: Any) -> Any:
        """Begin a call; `collect` waits for it. So several agents can work at once."""
        if method in ("start", "stop"):
            self._stop = arguments if method == "stop" else None
        return getattr(self._handle, method).remote(*arguments)

    def collect(self, reference: Any, *, timeout_s: float) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s)
        except GetTimeoutError as error:
            raise ResourcesError(
                f"the agent on node {self.node_id[:8]} did not answer within {timeout_s:.0f} s",
                hint="is the node overloaded or cut off?",
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, ChaosrunError):
                raise error.cause from error
            raise
        except RayActorError as error:
            raise RecoveryError(
                f"the agent on node {self.node_id[:8]} is gone: {_first_line(error)}", hint="did the node or its raylet die?"
            ) from error

    def has_answered(self, reference: Any) -> bool:
        """Whether `collect` would return without waiting."""
        return bool(ray.wait([reference], timeout=0)[0])

    def call(self, method: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        return self.collect(self.submit(method, *arguments), timeout_s=timeout_s)

    def submit_shutdown(self) -> Any:
        """Make the agent kill all processes below it, so that several do so at once; `close` waits for it."""
        self._closing = True
        return self.submit("shutdown")

    def close(self, shutdown: Any) -> None:
        """End the agent, once it has answered the call of `submit_shutdown`."""
        try:
            # Dead or stuck: its fork server kills everything when the agent's end of the socket closes.
            with suppress(RecoveryError, ResourcesError):
                self.collect(shutdown, timeout_s=CLOSE_LIMIT_S)
        finally:
            ray.kill(self._handle, no_restart=True)
            self._pump.join(timeout=CLOSE_LIMIT_S)

    def abandon(self) -> None:
        """Forget an agent whose processes are known to be gone: Ray may take long to notice, and a call would wait for that."""
        self._closing = True
        ray.kill(self._handle, no_restart=True)

    def look(self) -> bool:
        """Whether its raylet, and so the agent, is gone; reports that. Ray itself may need 15 s to report the loss of a whole
        node."""
        found = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes()}
        gone = self.node_id in found and _refuses(found[self.node_id])
        if gone and not self._closing:
            self._closing = True
            self._sink(self.node_id, AgentDied(message="its raylet is gone"))
        return gone

    def _carry_events(self) -> None:
        while self._take_events(self.submit("events", self._heard)):
            pass

    def _take_events(self, reference: Any) -> bool:
        """Pass on the agent's events; False if no more will come."""
        try:
            events: list[AgentEvent] = ray.get(reference)
        except ActorUnavailableError:
            # Cut off, perhaps for a moment: its events are requested again, and a stop, for which no call waits, is repeated.
            # If it is dead, Ray reports that, or its raylet is gone.
            time.sleep(AGAIN_S)
            if self.look():
                return False
            if self._stop is not None and not self._closing:
                self.submit("stop", *self._stop)
            return not self._closing
        except RayActorError as error:
            if not self._closing:
                self._sink(self.node_id, AgentDied(message=_first_line(error)))
            return False
        self._heard += len(events)
        for event in events:
            self._sink(self.node_id, event)
        return True


def look_after(calls: Sequence[tuple[AgentClient, Any]], over: threading.Event) -> None:
    """Check whether the agents are gone, until these calls are answered or `over` is set."""
    while not over.wait(LOOK_EVERY_S) and (calls := [each for each in calls if not each[0].has_answered(each[1])]):
        for agent, _ in calls:
            agent.look()


def _refuses(place: tuple[str, int]) -> bool:
    """Whether the machine refuses the connection, so that nothing listens there. No answer proves nothing: the machine may be
    cut off."""
    try:
        socket.create_connection(place, timeout=CONNECT_LIMIT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
