"""Where a job's workers can go: as Ray places them, and the same for every check that asks."""

from pathlib import Path

import pytest

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Level, Setting
from chaosrun.preflight.placement import gpus_per_worker, may_take_gpus, nodes_used, room_on, workers_on
from chaosrun.spec.job_file import load_job


def node(cpus: float = 2.0, gpus: int = 0) -> Node:
    return Node(name="a", node_id="1", address="192.0.2.1", hostname="a", cpus=cpus, gpus=gpus)


def setting(folder: Path | None, per_worker: str = "{}") -> Setting:
    """With a job of four workers."""
    job = None
    if folder is not None:
        (folder / "train.py").write_text("import chaosrun\n")
        path = folder / "job.yaml"
        path.write_text(f"name: j\nscript: train.py\nworkers: 4\nper_worker: {per_worker}\n")
        job = load_job(path)
    return Setting(level=Level.QUICK, root=Path("/runs"), storage=Path("/runs"), job=job)


@pytest.mark.parametrize(
    ("per_worker", "gpus", "each", "may"),
    [
        ("{}", [2, 2], 1, True),
        ("{}", [2, 1], 0, True),  # auto: every worker gets one, or none does
        ("{gpu: 1}", [1], 1, True),
        ("{gpu: 0}", [8], 0, False),
        (None, [0, 1], 1, True),
        (None, [0, 0], 0, True),
    ],
)
def test_whether_workers_take_gpus(tmp_path: Path, per_worker: str | None, gpus: list[int], each: int, may: bool) -> None:
    asked = setting(None) if per_worker is None else setting(tmp_path, per_worker)
    assert gpus_per_worker(asked, [node(gpus=count) for count in gpus]) == each
    assert may_take_gpus(asked) is may


@pytest.mark.parametrize(("cpus", "cpu", "room"), [(0.3, 0.1, 3), (0.6, 0.2, 3), (2.0, 1.5, 1), (0.0, 1.0, 0), (0.29, 0.1, 2)])
def test_cpus_are_counted_as_ray_counts_them(cpus: float, cpu: float, room: int) -> None:
    assert room_on(node(cpus), cpu=cpu, gpu=0) == room


def test_where_workers_are_placed(tmp_path: Path) -> None:
    head, one, many = node(cpus=0.0), node(gpus=1), node(cpus=64.0, gpus=8)
    nodes = [head, one, many, node(cpus=64.0)]
    assert [workers_on(setting(tmp_path, "{gpu: 1}"), each, nodes) for each in nodes] == [0, 1, 4, 0]
    assert [workers_on(setting(tmp_path, "{gpu: 0}"), each, nodes) for each in nodes] == [0, 2, 4, 4]
    assert [workers_on(setting(None), each, nodes) for each in nodes] == [0, 1, 1, 1]


def test_how_many_nodes_a_job_fills(tmp_path: Path) -> None:
    small = [node()] * 5
    assert nodes_used(setting(tmp_path), small) == 2
    assert nodes_used(setting(tmp_path, "{cpu: 2}"), small) == 4
    assert nodes_used(setting(tmp_path, "{gpu: 1}"), [node(gpus=1)] * 5) == 4
    assert nodes_used(setting(tmp_path, "{cpu: 4}"), small) == 0
    assert nodes_used(setting(tmp_path, "{cpu: 0.1}"), [node(cpus=0.4)] * 5) == 1
    assert nodes_used(setting(None), small) == 5
