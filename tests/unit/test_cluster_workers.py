"""What a fork server is started with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaosrun.cluster.ray_cluster import RayCluster
from chaosrun.cluster.workers import ClusterWorkers
from chaosrun.spec.model import JobSpec


class OneServer:
    kind, oversubscribed, gpus_too_few = "local", None, None

    def acquire(self, timeout_s: float, *, avoid: object) -> Any:
        return SimpleNamespace(nodes={}, stood_by=())

    def start_servers(self, env: dict[str, str], **runs: Any) -> list[str]:
        self.env = env
        return []


@pytest.mark.parametrize(
    ("started_by", "path"),
    [({"script": "train.py"}, "/job:/job/lib:/elsewhere"), ({"command": ["torchrun", "train.py"]}, ".:lib:/elsewhere")],
)
def test_where_its_modules_are_found(started_by: dict[str, Any], path: str) -> None:
    """A job's PYTHONPATH starts at the job's directory, wherever `chaosrun submit` was typed; a command starts there itself."""
    spec = JobSpec.model_validate({"name": "a", "workers": 1, **started_by, "env": {"PYTHONPATH": ".:lib:/elsewhere"}})
    cluster = OneServer()
    ClusterWorkers(cast(RayCluster, cluster), spec, Path("/job")).acquire()
    assert cluster.env["PYTHONPATH"] == path
