"""Drills inside pytest: the fixture `chaos`, the test cases that its marks make, and the one Ray of a session.

Imported when a test uses the fixture or has a mark; heavy modules are imported when the first drill runs.
"""

import json
import math
import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import chaosrun
from chaosrun.errors import ChaosrunError, InterruptedRunError, UsageError
from chaosrun.integrations.outcome import DrillFailed, Outcome, account
from chaosrun.records.naming import shortest
from chaosrun.supervise.interrupts import Interrupts

if TYPE_CHECKING:
    from chaosrun.cluster.ray_cluster import RayCluster
    from chaosrun.faults.fault import FaultPlan
    from chaosrun.spec.command_line import TypedJob
    from chaosrun.spec.model import JobSpec

Section = Mapping[str, object]
Faults = str | Section | Sequence[Section] | None
"""A preset's name, a `faults` section as in a job file, only its `schedule`, or None for the job's own faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The faults and seed of one case of a test that is marked with `chaos` or `chaos_plans`."""

    faults: Faults = None
    seed: int | None = None


class OneRay:
    """One Ray for all drills of a session in one process, started by the first; each pytest-xdist worker has its own."""

    def __init__(self, address: str | None) -> None:
        """`address`: a cluster to join instead of starting a private Ray."""
        self._address = address
        self._cluster: RayCluster | None = None
        self._cpus = 0.0

    def make_ready(self, spec: "JobSpec", plan: "FaultPlan") -> None:
        """Connect this process to a Ray that is large enough, for the drill to use; or to none, if the plan strikes Ray itself
        and the drill needs its own. Raises as `api.submit` does."""
        from chaosrun.campaign.drill import takes_agents

        if takes_agents(fault.kind for fault in plan.faults):
            self.close()
            return
        cpus = spec.workers * spec.per_worker.cpu
        if self._cluster is not None and not self._serves(self._cluster, cpus):
            self.close()
        if self._cluster is None:
            self._connect(spec)
            self._cpus = max(os.cpu_count() or 1, math.ceil(cpus))

    def _connect(self, spec: "JobSpec") -> None:
        with Interrupts() as interrupts:
            from chaosrun.cluster.ray_cluster import RayCluster

            with interrupts.postponed():
                cpu = spec.per_worker.cpu
                self._cluster = RayCluster(self._address, workers=spec.workers, cpu=cpu, gpu=0)
            interrupts.check()

    def _serves(self, cluster: "RayCluster", cpus: float) -> bool:
        """Whether Ray still runs (a test may have shut it down), and has enough CPUs if it is private, which cannot grow."""
        from chaosrun.supervise.run import expected_ray

        return expected_ray(self._address) is None and (cluster.kind != "private" or cpus <= self._cpus)

    def close(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            with Interrupts() as interrupts, interrupts.postponed():
                cluster.close()


@dataclass(slots=True, repr=False)
class Chaos:
    """The fixture `chaos`: runs drills; all drills of a session share one Ray."""

    request: pytest.FixtureRequest
    ray: OneRay
    plan: Plan = Plan()
    """Faults and seed of the test's marks; arguments of `run` take precedence."""
    _unobserved: dict[str, Outcome] = field(default_factory=dict)
    """Runs that are not PASS, and whose verdict the test has not asserted."""

    def __repr__(self) -> str:
        return "<the fixture of chaosrun>"  # pytest prints it above every failure

    def run(
        self,
        job: str | Path,
        *,
        faults: Faults = None,
        seed: int | None = None,
        workers: int | None = None,
        overrides: Sequence[str] = (),
        reference: str = "auto",
    ) -> Outcome:
        """Run one drill, as `chaosrun submit` does, and return how it ended, whatever the verdict.

        `job`: a path from the test's folder, or from pytest's rootdir. `faults`: a preset's name (spot, flaky-node, torture), a
        mapping or a list as in the job file's `faults` or `faults.schedule`; None: the mark's, else the job's own. `seed`:
        of the fault plan; None: the mark's, that of `faults`, --chaos-seed, or the job's own, in this order. `overrides`: as on
        the command line, such as "data.resume=plain"; later ones win. Fails the test when the drill cannot be carried out.
        """
        __tracebackhide__ = True
        return self._run(lambda: self._found(job), faults, seed, workers, overrides, reference)

    def run_script(
        self,
        script: str | Path,
        *args: str,
        kills: Sequence[str] = (),
        preempts: Sequence[str] = (),
        workers: int | None = None,
        faults: Faults = None,
        seed: int | None = None,
        overrides: Sequence[str] = (),
        reference: str = "auto",
    ) -> Outcome:
        """Like `run`, for a training script with its arguments, and no job file: as `chaosrun submit train.py -- ARGS` typed
        in pytest's rootdir. `script`: a path from the test's folder, or from the rootdir. `kills`: "RANK@STEP" or
        "RANK@STEP:PHASE"; `preempts`: "RANK@STEP"; without any faults, the default plan. chaosrun saves and resumes if the
        script imports it, else the script does."""
        __tracebackhide__ = True
        asked = {"workers": workers, "kills": kills, "preempts": preempts}
        return self._run(lambda: self._typed(self._found(script), args, **asked), faults, seed, None, overrides, reference)

    def run_command(
        self,
        command: Sequence[str],
        *,
        kills: Sequence[str] = (),
        preempts: Sequence[str] = (),
        workers: int | None = None,
        faults: Faults = None,
        seed: int | None = None,
        overrides: Sequence[str] = (),
        reference: str = "auto",
    ) -> Outcome:
        """Like `run_script`, for a command with the team's own launcher: `chaosrun submit -- torchrun … train.py`.
        `workers`: the number of ranks; None: as many as the command says."""
        __tracebackhide__ = True
        asked = {"workers": workers, "kills": kills, "preempts": preempts}
        return self._run(lambda: self._typed(None, command, **asked), faults, seed, None, overrides, reference)

    def _found(self, path: str | Path) -> Path:
        """The path, from the test's folder or from pytest's rootdir. Raises UsageError when it is in neither."""
        tried = list(dict.fromkeys(folder / path for folder in (self.request.path.parent, self.request.config.rootpath)))
        found = next(filter(Path.is_file, tried), None) or next(filter(Path.exists, tried), None)
        if found is None and len(tried) > 1:
            hint = "a path starts from the test's folder, or from pytest's rootdir"
            raise UsageError(f"no such file: {' and '.join(map(str, tried))}", hint=hint)
        return found or tried[0]  # the error of what is no file says more

    def _typed(
        self, script: Path | None, words: Sequence[str], *, workers: int | None, kills: Sequence[str], preempts: Sequence[str]
    ) -> "TypedJob":
        from chaosrun.spec.command_line import JobOptions, typed_job

        for name, given in (("command", words), ("kills", kills), ("preempts", preempts)):
            if isinstance(given, str):
                raise UsageError(f"{name}={given!r} is one string", hint=f"write a list: {name}={given.split()!r}")
        root = self.request.config.rootpath
        if script is not None and script.is_relative_to(root):
            script = script.relative_to(root)
        asked = JobOptions(workers=workers, kill=tuple(kills), preempt=tuple(preempts))
        return typed_job(script, tuple(map(str, words)), asked, root)

    def _run(
        self,
        job: "Callable[[], Path | TypedJob]",
        faults: Faults,
        seed: int | None,
        workers: int | None,
        overrides: Sequence[str],
        reference: str,
    ) -> Outcome:
        __tracebackhide__ = True
        repeat: list[tuple[str, str]] = []
        try:
            found = job()
            changes = self._changes(faults, seed, workers, overrides)
            words = [shortest(found), *changes] if isinstance(found, Path) else found.with_changes(changes)
            repeat.append(("repeat", shlex.join(["chaosrun", "submit", *words])))
            return self._carried_out(found, changes, reference)
        except InterruptedRunError as error:
            why = f"{error.message}; {error.hint}" if error.hint else error.message
            pytest.exit(f"chaosrun: {why}", returncode=pytest.ExitCode.INTERRUPTED)
        except ChaosrunError as error:
            failure = DrillFailed(account(error.message, [("hint", error.hint), *repeat]))
        except Exception as error:
            error.add_note(f"this is a bug in chaosrun {chaosrun.__version__}; please report it with the traceback above")
            raise
        # Outside of the handler: an error raised there would bring our own stack along.
        raise failure

    def unseen(self) -> list[str]:
        """A message for each drill that is not PASS and whose verdict the test never asserted."""
        return [outcome.unasked() for outcome in self._unobserved.values()]

    @property
    def _session_seed(self) -> int | None:
        return self.request.config.getoption("chaos_seed")

    def _changes(self, faults: Faults, seed: int | None, workers: int | None, overrides: Sequence[str]) -> list[str]:
        if isinstance(overrides, str):
            raise UsageError(f"overrides={overrides!r} is one string", hint=f"write a list: overrides=[{overrides!r}]")
        section = _section(self.plan.faults if faults is None else faults)
        if seed is None:
            seed = self.plan.seed
        if seed is None and not (section and "seed" in section):
            seed = self._session_seed
        return [
            *([] if section is None else [f"faults={_yaml(section)}"]),
            *([] if seed is None else [f"faults.seed={seed}"]),
            *([] if workers is None else [f"workers={workers}"]),
            *overrides,
        ]

    def _carried_out(self, job: "Path | TypedJob", changes: list[str], reference: str) -> Outcome:
        from chaosrun.campaign.drill import submit
        from chaosrun.report.live import progress
        from chaosrun.report.output import warn
        from chaosrun.supervise.run import plan as plan_job

        config = self.request.config
        asked: str | None = config.getoption("chaos_root") or os.environ.get("CHAOSRUN_ROOT")
        loaded, plan = plan_job(job, changes)
        # If captured, it would be printed with a failed test, and bury the message.
        captured = config.getoption("capture") != "no"
        with warnings.catch_warnings(), progress(quiet=captured) as on_event:
            # Warnings of libraries that a drill imports; pytest may be configured to turn them into errors.
            warnings.simplefilter("ignore")
            self.ray.make_ready(loaded.spec, plan)
            result = submit(
                job,
                overrides=changes,
                root=Path(asked).absolute() if asked else config.rootpath / ".chaosrun",
                address=config.getoption("chaos_address"),
                reference=reference,
                on_event=on_event,
            )
        warn(result.unwritten)
        run, verdict, node = result.run, result.verdict, self.request.node
        for name, value in (("run", run.run_id), ("verdict", verdict.status), ("seed", plan.seed)):
            node.user_properties.append((f"chaosrun_{name}", value))
        again = (
            None if self._session_seed is None else shlex.join(["pytest", node.nodeid, "--chaos-seed", str(self._session_seed)])
        )
        outcome = Outcome(
            run=run, seed=plan.seed, again=again, _verdict=verdict, _on_look=lambda: self._unobserved.pop(run.run_id, None)
        )
        if verdict.status != "PASS":
            self._unobserved[run.run_id] = outcome
        return outcome


def _section(faults: Faults) -> Section | None:
    if isinstance(faults, str):
        return {"preset": faults}
    return faults if faults is None or isinstance(faults, Mapping) else {"schedule": list(faults)}


def _yaml(section: Section) -> str:
    """The section as JSON, which YAML reads. Raises UsageError for a value that no job file can have."""
    try:
        return json.dumps(dict(section))
    except TypeError as error:
        raise UsageError(f"faults={section!r}: {error}", hint="write it as in the job file's faults section") from error


def cases(plans: pytest.Mark | None, seeds: pytest.Mark | None, *, where: str) -> list[tuple[str, Plan]]:
    """(id, plan) of each drill: every plan with every seed. Raises pytest.UsageError for a mark with other arguments."""
    faults = [("", None)] if plans is None else _plans(plans, where)
    drawn = [("", None)] if seeds is None else _seeds(seeds, where)
    return [
        ("-".join(filter(None, (name, number))), Plan(faults=section, seed=seed))
        for name, section in faults
        for number, seed in drawn
    ]


def _plans(mark: pytest.Mark, where: str) -> list[tuple[str, Faults]]:
    plans = mark.args
    wrong = [plan for plan in plans if not isinstance(plan, str | Mapping | Sequence)]
    if not plans or wrong or mark.kwargs.keys() - {"ids"}:
        raise pytest.UsageError(f"{where}: write @pytest.mark.chaos_plans(plan, …, ids=[…]), each plan as in a job's faults")
    ids = mark.kwargs.get("ids")
    if ids is None:
        ids = [plan if isinstance(plan, str) else f"plan{number}" for number, plan in enumerate(plans)]
    if len(ids) != len(plans):
        raise pytest.UsageError(f"{where}: @pytest.mark.chaos_plans has {len(plans)} plans and {len(ids)} ids")
    return list(zip(map(str, ids), plans, strict=True))


def _seeds(mark: pytest.Mark, where: str) -> list[tuple[str, int]]:
    seeds: Any = mark.kwargs.get("seeds")
    numbers = list(seeds) if isinstance(seeds, Iterable) else []
    wrong = [seed for seed in numbers if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0]
    if mark.args or mark.kwargs.keys() != {"seeds"} or not numbers or wrong:
        raise pytest.UsageError(f"{where}: write @pytest.mark.chaos(seeds=[…]) with numbers, 0 or more, such as range(3)")
    return [(f"seed{seed}", seed) for seed in numbers]
