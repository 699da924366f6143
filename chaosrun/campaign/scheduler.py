"""Several drills at once on one Ray: which begins next, and on which agents; collects their results. It must not know what a
drill does.

Agents are kept from drill to drill, so that a drill costs no more than its legs. A `RayCluster` stands for one placement.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from chaosrun.records.events import EventRecord
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.run import Listener, Watch

if TYPE_CHECKING:
    from chaosrun.cluster.ray_cluster import RayCluster
    from chaosrun.supervise.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Shape:
    """The resources that a job needs: ranks, and CPUs and GPUs for each."""

    workers: int
    cpu: float
    gpu: int | Literal["auto"]

    @classmethod
    def of(cls, spec: JobSpec) -> "Shape":
        return cls(spec.workers, spec.per_worker.cpu, spec.per_worker.gpu)

    def connect(self, address: str | None, interrupts: Interrupts) -> "RayCluster":
        from chaosrun.cluster.ray_cluster import RayCluster

        with interrupts.postponed():
            return RayCluster(address, workers=self.workers, cpu=self.cpu, gpu=self.gpu)


@dataclass(slots=True)
class PlacementPool:
    """Hands out as many placements as the nodes of one Ray have room for. It counts those itself, as Ray knows a reservation
    only once it is made. Used by one thread."""

    address: str | None
    interrupts: Interrupts
    _free: dict[str, dict[str, float]]
    """By node, the resources that were free before the first placement."""
    _idle: "list[tuple[Shape, RayCluster]]" = field(default_factory=list)
    _used: "list[RayCluster]" = field(default_factory=list)

    def take(self, shape: Shape, *, fresh: bool = False) -> "RayCluster | None":
        """A placement for a drill; None while there is no room for it. If no placement is in use, the drill gets one in any
        case, and starting it then fails with the message that the cluster is too small. `fresh`: with agents that served no
        other drill."""
        for entry in self._idle:
            if entry[0] == shape and not fresh:
                self._idle.remove(entry)
                self._used.append(entry[1])
                return entry[1]
        cluster = shape.connect(self.address, self.interrupts)
        while (places := cluster.places_within(self._left())) is None and self._idle:
            self._close(*self._idle[0])
        if places is None and self._used:
            cluster.close()
            return None
        cluster.prefer(places or {})
        self._used.append(cluster)
        return cluster

    def give_back(self, shape: Shape, cluster: "RayCluster", *, sound: bool) -> None:
        """Return a placement. `sound`: its agents may serve the next drill."""
        self._used.remove(cluster)
        self._idle.append((shape, cluster))
        if not sound:
            self._close(shape, cluster)

    def clear(self) -> None:
        """Release all placements that are not in use."""
        while self._idle:
            self._close(*self._idle[0])

    def _left(self) -> dict[str, dict[str, float]]:
        left = {node: {**amounts} for node, amounts in self._free.items()}
        for cluster in (*self._used, *(cluster for _, cluster in self._idle)):
            for node, workers in cluster.places.items():
                for name, amount in cluster.bundle.items():
                    if name in left.get(node, ()):
                        left[node][name] -= workers * amount
        return left

    def _close(self, shape: Shape, cluster: "RayCluster") -> None:
        self._idle.remove((shape, cluster))
        with self.interrupts.postponed():
            cluster.close()


@contextmanager
def one_ray(address: str | None, shapes: Sequence[Shape], interrupts: Interrupts) -> Iterator[PlacementPool]:
    """Connect once for many drills; a private Ray has room for the largest of the shapes."""
    workers, cpu = max((shape.workers for shape in shapes), default=1), max((shape.cpu for shape in shapes), default=1.0)
    cluster = Shape(workers, cpu, 0).connect(address, interrupts)
    try:
        interrupts.check()
        pool = PlacementPool(address, interrupts, cluster.free())
        try:
            yield pool
        finally:
            pool.clear()
    finally:
        with interrupts.postponed():
            cluster.close()


D = TypeVar("D")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Task(Generic[D]):
    """A drill, with the conditions on when it may begin."""

    drill: D
    name: str
    shape: Shape
    reference: str | None = None
    """Drills with the same value share a reference leg, which one of them makes first; None: it exists already."""
    needs_all: bool = False
    """No other drill may run at the same time."""
    needs_fresh: bool = False
    """It needs agents that no other drill used before or can use afterwards."""


@dataclass(slots=True)
class RunningSupervisors:
    """The supervisors that are running, in any thread: an interrupt reaches all of them."""

    _working: "set[Supervisor]" = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    interrupted: bool = False

    def watch(self) -> Watch:
        """The callback with which one thread's drills register their supervisors in turn."""
        mine: list[Supervisor] = []

        def supervised(supervisor: "Supervisor | None") -> None:
            with self._lock:
                self._working.difference_update(mine)
                mine[:] = [] if supervisor is None else [supervisor]
                self._working.update(mine)
                if supervisor is not None and self.interrupted:
                    supervisor.interrupt()

        return supervised

    def interrupt(self) -> None:
        with self._lock:
            self.interrupted = True
            for supervisor in self._working:
                supervisor.interrupt()


Carry = Callable[[D, "RayCluster | None", RunningSupervisors, Listener], tuple[R, bool]]
"""Carry a drill out, on kept agents or (None) alone; returns its result, and whether the agents may serve another."""


@dataclass(slots=True, kw_only=True)
class Scheduler(Generic[D, R]):
    """Runs drills in the given order, as far as there is room."""

    carry: Carry[D, R]
    pool: PlacementPool
    at_once: int | None
    """None: as many as there is room for."""
    on_result: Callable[[D, R], bool]
    """Returns whether to begin further drills."""
    tell: Listener
    """Called for each drill, by name: `drill.began`, `drill.left`, and `drill.at` with its present leg and attempt."""
    _waiting: list[Task[D]] = field(default_factory=list)
    _running: dict[str, Task[D]] = field(default_factory=dict)
    _made: set[str | None] = field(default_factory=lambda: {None})
    _making: dict[str | None, Task[D]] = field(default_factory=dict)
    _events: SimpleQueue[Callable[[], None]] = field(default_factory=SimpleQueue)
    """Calls that the drills' threads queue for the scheduler's thread."""
    _supervisors: RunningSupervisors = field(default_factory=RunningSupervisors)
    _beginning: bool = True

    def run(self, tasks: Sequence[Task[D]]) -> None:
        """Run all drills. Raises the error of `carry`, once the drills under way have been interrupted and have ended."""
        self._waiting = list(tasks)
        self.at_once = self.at_once or len(tasks) or 1
        with ThreadPoolExecutor(self.at_once, thread_name_prefix="chaosrun-drill") as threads:
            try:
                while True:
                    while self._beginning and (begun := self._next()) is not None:
                        self._begin(threads, *begun)
                        self.pool.interrupts.check()
                    if not self._running:
                        return
                    # A signal may have come while agents were started or released, within `postponed`.
                    self.pool.interrupts.check()
                    self._events.get()()
            except BaseException:
                self._supervisors.interrupt()
                while self._running:
                    # Drills that still completed count; interrupts of the others are expected.
                    with suppress(Exception):
                        self._events.get()()
                raise

    def _next(self) -> "tuple[Task[D], RayCluster | None] | None":
        """The drill that begins now, and its agents; None: another drill must end first."""
        if len(self._running) == self.at_once or any(task.needs_all for task in self._running.values()):
            return None
        for task in self._waiting:
            if task.needs_all:
                if self._running:
                    return None  # begin no other drill before it, or its turn would never come
                self.pool.clear()
                return task, None
            if task.reference in self._making:
                continue
            cluster = self.pool.take(task.shape, fresh=task.needs_fresh)
            return None if cluster is None else (task, cluster)
        return None

    def _begin(self, threads: ThreadPoolExecutor, task: Task[D], cluster: "RayCluster | None") -> None:
        self._waiting.remove(task)
        self._running[task.name] = task
        if task.reference not in self._made:
            self._making[task.reference] = task
        self._tell("drill.began", task)
        threads.submit(self._work, task, cluster)

    def _tell(self, event: str, task: Task[D], **about: object) -> None:
        self.tell({"leg": None, "event": event, "drill": task.name, **about})

    def _work(self, task: Task[D], cluster: "RayCluster | None") -> None:
        """Run one drill; the body of its thread."""

        def listen(record: EventRecord) -> None:
            event, leg = record.get("event"), record.get("leg")
            # The reference leg is over: begun here, or continued.
            if event in ("leg.started", "supervisor.resumed") and leg == "chaos":
                self._events.put(partial(self._reference_made, task))
            if event == "attempt.starting":
                self._events.put(partial(self._tell, "drill.at", task, of_leg=leg, attempt=record["attempt"]))

        try:
            result, sound = self.carry(task.drill, cluster, self._supervisors, listen)
        except BaseException as error:
            self._events.put(partial(self._failed, task, cluster, error))
        else:
            self._events.put(partial(self._ended, task, cluster, result, sound))

    def _reference_made(self, task: Task[D]) -> None:
        self._made.add(task.reference)
        self._stop_waiting_for(task)

    def _stop_waiting_for(self, task: Task[D]) -> None:
        if self._making.get(task.reference) is task:
            del self._making[task.reference]

    def _ended(self, task: Task[D], cluster: "RayCluster | None", result: R, sound: bool) -> None:
        self._leave(task, cluster, sound=sound)
        self._beginning = self.on_result(task.drill, result) and self._beginning

    def _failed(self, task: Task[D], cluster: "RayCluster | None", error: BaseException) -> None:
        self._leave(task, cluster, sound=False)
        raise error

    def _leave(self, task: Task[D], cluster: "RayCluster | None", *, sound: bool) -> None:
        del self._running[task.name]
        self._tell("drill.left", task)
        self._stop_waiting_for(task)  # if this drill did not make the reference, the next one does
        if cluster is not None:
            self.pool.give_back(task.shape, cluster, sound=sound)
