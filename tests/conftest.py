"""What tests share: one local Ray for all tests that need one, placements that stay warm on it, and drills."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from chaosrun.api import RunResult
    from chaosrun.cluster.ray_cluster import RayCluster
    from chaosrun.records.layout import RunLayout
    from chaosrun.records.run_file import Early
    from chaosrun.spec.command_line import TypedJob
    from chaosrun.verify.diagnosis import Diagnosis

pytest_plugins = ["tests.oracle.score"]
# The same examples every time, and however busy the machine is. What the night is to draw anew says so.
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")
REPOSITORY = Path(__file__).parents[1]
Submit = Callable[..., Any]


def pytest_configure() -> None:
    # A shell has what it starts in the background ignore Ctrl-C, nohup a hang-up, and so would everything that the tests start.
    for ignored, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are, and say so."""
    if marker := item.get_closest_marker("gpu"):
        import torch

        needed, found = (*marker.args, 1)[0], torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"needs {needed} GPU(s), there are {found}: untested here")


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One Ray on this machine, started once; drills inside this process use it."""
    import ray

    from chaosrun.cluster.ray_cluster import RayCluster

    with RayCluster(None, workers=4, cpu=4.0, gpu=0):
        assert ray.is_initialized()
        yield


@pytest.fixture
def own_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drill would start its own Ray, whichever test has connected this process to one before."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


@pytest.fixture
def submit(local_ray: None, tmp_path: Path) -> Submit:
    """`submit(job, *overrides, **options)`: what `api.submit` does, from connecting to the cluster on.

    `job` is a path, or the text of a job file, which is then written into the test's directory. All drills of one test share
    a root, hence the cached references.
    """
    from chaosrun import api

    def run(job: Path | str, *overrides: str, **options: Any) -> api.RunResult:
        return api.submit(job_file(job, tmp_path), overrides=overrides, root=tmp_path / "root", **options)

    return run


class WarmDrills:
    """Drills on placements that are kept: an agent and a fork server for each world size, started once for all tests.

    A drill then costs its legs and nothing else. Jobs with the same env, seed and preload share a fork server.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._clusters: dict[int, RayCluster] = {}

    def __call__(
        self,
        job: "Path | TypedJob",
        *,
        root: Path,
        overrides: Sequence[str] = (),
        reference: str = "auto",
        early: "Early" = "never",
        on_event: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> "RunResult":
        from chaosrun import api
        from chaosrun.cluster.workers import ClusterWorkers
        from chaosrun.supervise.creation import create_run
        from chaosrun.supervise.drill import DrillExecution, LegRunner
        from chaosrun.supervise.run import deadline_of

        loaded, plan = api.plan(job, overrides)
        run = create_run(root, loaded, plan=plan, overrides=list(overrides), reference=reference, early=early)
        workers = ClusterWorkers(self._cluster(loaded.spec.workers), loaded.spec)
        legs = LegRunner(workers=workers, on_record=on_event, deadline_s=deadline_of(run))
        verdict = DrillExecution(run=run, root=root, legs=legs).execute()
        # Whatever it is, the files alone say the same.
        assert api.verify(run) == verdict
        return api.RunResult(run, verdict)

    def production(
        self,
        job: "Path | RunLayout",
        *,
        root: Path,
        overrides: Sequence[str] = (),
        on_event: Callable[[dict[str, Any]], None] = lambda record: None,
    ) -> "RunResult":
        """What `api.run` does, or of a run `api.resume`, from connecting to the cluster on."""
        from chaosrun import api
        from chaosrun.cluster.workers import ClusterWorkers
        from chaosrun.records.run_file import read_run
        from chaosrun.spec.model import JobSpec
        from chaosrun.supervise.creation import create_run
        from chaosrun.supervise.drill import LegRunner
        from chaosrun.supervise.production import Production
        from chaosrun.supervise.run import deadline_of
        from chaosrun.verify.confirm import NO_FAULTS

        if isinstance(job, Path):
            loaded, _ = api.plan(job, overrides)
            run = create_run(root, loaded, plan=NO_FAULTS, overrides=list(overrides), reference="auto", kind="run")
        else:
            run = job
        on_event({"leg": None, "event": "run.created", "run": run.run_id, "path": str(run.path)})
        spec = JobSpec.model_validate(read_run(run).spec)
        workers = ClusterWorkers(self._cluster(spec.workers), spec)
        legs = LegRunner(workers=workers, on_record=on_event, deadline_s=deadline_of(run))
        verdict = Production(run=run, legs=legs).execute()
        assert api.verify(run) == verdict
        return api.RunResult(run, verdict)

    def diagnose(self, run: "RunLayout", on_event: Callable[[dict[str, Any]], None] = lambda record: None) -> "Diagnosis":
        """What `api.diagnose` does, from connecting to the cluster on."""
        from chaosrun.cluster.workers import ClusterWorkers
        from chaosrun.supervise.diagnosis import diagnose, open_case
        from chaosrun.supervise.drill import LegRunner

        case = open_case(run)
        workers = ClusterWorkers(self._cluster(case.drill.spec.workers), case.drill.spec)
        return diagnose(case, LegRunner(workers=workers, on_record=on_event))

    def _cluster(self, workers: int) -> "RayCluster":
        from chaosrun.cluster.ray_cluster import RayCluster

        if workers not in self._clusters:
            self._clusters[workers] = self._stack.enter_context(RayCluster(None, workers=workers, gpu=0))
        return self._clusters[workers]


@pytest.fixture(scope="session")
def warm_drills(local_ray: None) -> Iterator[WarmDrills]:
    with ExitStack() as stack:
        yield WarmDrills(stack)


def job_file(job: Path | str, folder: Path) -> Path:
    if isinstance(job, Path):
        return job
    path = folder / "job.yaml"
    path.write_text(job)
    return path
