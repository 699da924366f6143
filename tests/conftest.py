"""What tests share: one local Ray for all tests that need one, and drills on it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[1]
Submit = Callable[..., Any]


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One Ray on this machine, started once; drills inside this process use it."""
    import ray

    from chaosrun.cluster.ray_cluster import RayCluster

    with RayCluster.connect(None, workers=4, cpu=2.0, gpu=0):
        assert ray.is_initialized()
        yield


@pytest.fixture
def submit(local_ray: None, tmp_path: Path) -> Submit:
    """`submit(job, *overrides, **spec)`: run one drill, return its RunResult.

    `job` is a path, or the text of a job file, which is then written into the test's directory. All drills of one test share
    a root, hence the cached references.
    """
    from chaosrun import api

    def run(job: Path | str, *overrides: str, **options: Any) -> api.RunResult:
        if isinstance(job, str):
            path = tmp_path / "job.yaml"
            path.write_text(job)
            job = path
        return api.submit(job, overrides=overrides, root=tmp_path / "root", **options)

    return run
