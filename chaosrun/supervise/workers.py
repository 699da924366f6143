"""What the supervisor needs from a cluster."""

from collections.abc import Sequence
from typing import Any, Protocol

from chaosrun.records.order import WorkerOrder
from chaosrun.supervise.detection import Monitor
from chaosrun.supervise.striking import Striker


class Workers(Striker, Monitor, Protocol):
    """What the supervisor needs from a cluster: `cluster.workers.ClusterWorkers`, or a fake in tests."""

    def acquire(self) -> dict[str, Any]:
        """Get places for all ranks, anew when a node was lost. Returns what the journal says of them. Raises ResourcesError."""
        ...

    @property
    def nodes(self) -> Sequence[str]: ...

    @property
    def ray(self) -> str:
        """ "private", "joined" or "borrowed"."""
        ...

    def place(self, order: WorkerOrder) -> WorkerOrder:
        """Fill in node, local rank and devices."""
        ...

    def start(self, orders: Sequence[WorkerOrder]) -> tuple[dict[int, int], str]:
        """Fork all ranks of an attempt; returns their pids by rank, and the rendezvous address. Raises ResourcesError."""
        ...

    def stop(self, attempt: int) -> None:
        """Begin to kill an attempt; each node reports when it has stopped."""
        ...

    def next_event(self, timeout_s: float) -> dict[str, Any] | None:
        """The next of these, None when none came in time:

        exited {attempt, rank, pid, exit_code, signal, killed, died_s}, stopped {attempt, node, killed [ranks]} once per node,
        agent_lost {node, message}, and what was given to `wake`. Others may come and are ignored.
        """
        ...

    def wake(self, event: dict[str, Any]) -> None:
        """Have `next_event` return this; safe from signal handlers and other threads."""
        ...
