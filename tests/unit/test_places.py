"""Which nodes a drill's workers come onto, by what is free on each."""

import pytest

from chaosrun.cluster.placement import places_for

CPU = {"CPU": 2.0}
GPUS = {"CPU": 1.0, "GPU": 2}


def cpus(**free: float) -> dict[str, dict[str, float]]:
    return {node: {"CPU": amount} for node, amount in free.items()}


@pytest.mark.parametrize(
    ("workers", "free", "places"),
    [
        (1, cpus(a=5, b=2, c=3), {"b": 1}),
        (2, cpus(a=7, b=4), {"b": 2}),
        (4, cpus(a=2, b=5, c=3), {"b": 2, "a": 1, "c": 1}),
        (2, cpus(a=3, b=1), None),  # in sum there would be room
        (1, cpus(a=1.5, b=1.5), None),
        (1, cpus(a=-2), None),
        (1, {"a": {}}, None),
    ],
)
def test_on_as_few_nodes_as_can_be(workers: int, free: dict[str, dict[str, float]], places: dict[str, int] | None) -> None:
    assert places_for(workers, CPU, free) == places


def test_gpus_and_cpus_of_a_worker_are_of_one_node() -> None:
    free = {"a": {"CPU": 8.0, "GPU": 1.0}, "b": {"CPU": 1.0, "GPU": 8.0}, "c": {"CPU": 8.0, "GPU": 4.0}}
    assert places_for(3, GPUS, free) == {"c": 2, "b": 1}
    assert places_for(4, GPUS, free) is None


def test_one_worker_a_node() -> None:
    assert places_for(2, CPU, cpus(a=8, b=2), spread=True) == {"a": 1, "b": 1}
    assert places_for(3, CPU, cpus(a=8, b=2), spread=True) is None


def test_a_fraction_is_not_lost_to_rounding() -> None:
    assert places_for(3, {"CPU": 0.1}, cpus(a=0.1 + 0.2)) == {"a": 3}
