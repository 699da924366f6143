"""Where a suite's drills are carried out: agents that are kept from drill to drill, as many at once as one Ray has room for.

A place is of one shape: number of workers, and what each of them takes. Reckons with what it has handed out itself: Ray learns
of a reservation only when it is made. Used by one thread.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, cast

from chaosrun.campaign.place import Calmly
from chaosrun.campaign.planned import PlannedDrill
from chaosrun.cluster.ray_cluster import RayCluster

Shape = tuple[int, float, int | str]


@dataclass(slots=True, eq=False)
class Place:
    shape: Shape
    cluster: RayCluster


@dataclass(slots=True)
class Places(AbstractContextManager["Places"]):
    """Use as a context manager, while this process is connected to a Ray."""

    address: str | None
    calmly: Calmly
    _free: dict[str, float] = field(init=False)
    _idle: list[Place] = field(default_factory=list)
    _used: int = 0

    def __enter__(self) -> Self:
        probe = RayCluster.connect(self.address, workers=1, cpu=1.0, gpu=0)
        self._free = probe.free
        probe.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for place in list(self._idle):
            self._close(place)

    def take(self, drill: PlannedDrill) -> Place | None:
        """A place for the drill; None while there is no room for it. Where nothing is in use it gets one in any case: that the
        cluster is too small for it, whoever wants the resources will be told."""
        shape = drill.workers, drill.cpu, drill.gpu
        for place in self._idle:
            if place.shape == shape and not drill.needs_fresh:
                self._idle.remove(place)
                self._used += 1
                return place
        gpu = cast(int | Literal["auto"], drill.gpu)
        with self.calmly():
            cluster = RayCluster.connect(self.address, workers=drill.workers, cpu=drill.cpu, gpu=gpu)
        for place in list(self._idle):
            if self._has_room(cluster):
                break
            self._close(place)
        if not self._has_room(cluster) and self._used:
            cluster.close()
            return None
        self._reserve(cluster, 1)
        self._used += 1
        return Place(shape, cluster)

    def give_back(self, place: Place, *, sound: bool) -> None:
        """`sound`: its agents may serve the next drill."""
        self._used -= 1
        self._idle.append(place)
        if not sound:
            self._close(place)

    def clear(self) -> None:
        """Let go of all that is not in use."""
        for place in list(self._idle):
            self._close(place)

    def _has_room(self, cluster: RayCluster) -> bool:
        return all(self._free.get(name, 0.0) + 1e-6 >= amount for name, amount in cluster.needs.items() if amount)

    def _reserve(self, cluster: RayCluster, times: int) -> None:
        for name, amount in cluster.needs.items():
            self._free[name] = self._free.get(name, 0.0) - times * amount

    def _close(self, place: Place) -> None:
        self._idle.remove(place)
        self._reserve(place.cluster, -1)
        with self.calmly():
            place.cluster.close()
