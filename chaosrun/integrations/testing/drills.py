"""`chaos.run`: a drill inside a test, from a job file, what the test changes about it, and what the session says.

A job's path is looked for beside the test's file first, then from pytest's rootdir.
"""

import json
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chaosrun
from chaosrun.errors import ChaosrunError, InterruptedRunError, UsageError
from chaosrun.integrations.testing.one_ray import OneRay
from chaosrun.integrations.testing.outcome import Outcome, failed_to_run
from chaosrun.records.naming import shortest

Faults = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""A preset's name, the `faults` section of a job file, its `schedule` alone, or None: the job's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One case of a test that is marked with `chaos` or `chaos_plans`."""

    faults: Faults = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a test's drills run, as its session has it."""

    folders: tuple[Path, ...]
    """Where job files are looked for, in this order."""
    root: Path
    """Where runs are kept."""
    ray: OneRay
    address: str | None
    seed: int | None
    """Of --chaos-seed."""
    repeat: Callable[[int], str]
    """The command line that runs this test again with such a --chaos-seed."""
    stop: Callable[[str], None]
    """Ends the session: the drill was interrupted."""
    note: Callable[[str, object], None]
    """Writes a property of this test into its JUnit record."""


@dataclass(slots=True, repr=False)
class Chaos:
    """The fixture `chaos`: runs drills, all of a session on one Ray."""

    place: Place
    plan: Plan = Plan()
    """Of the test's marks; what `run` is told goes before it."""
    _unseen: dict[str, Outcome] = field(default_factory=dict)
    """Runs whose verdict nobody has asked for, and which is not PASS."""

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
        """Run one drill, as `chaosrun submit` does, and return how it ended, whatever that is.

        `faults`: a preset's name (spot, flaky-node, torture), a mapping or a list as in the job file's `faults` or
        `faults.schedule`; None: the mark's, else the job's own. `seed`: of the fault plan; None: the mark's, that of `faults`,
        --chaos-seed, or the job's own, in this order. `overrides`: as on the command line, such as "data.resume=plain"; later
        ones win. Fails the test when the drill cannot be carried out.
        """
        __tracebackhide__ = True
        repeat: list[tuple[str, str]] = []
        try:
            path = _found(Path(job), self.place.folders)
            changes = self._changes(faults, seed, workers, overrides)
            repeat.append(("repeat", shlex.join(["chaosrun", "submit", shortest(path), *changes])))
            return self._carried_out(path, changes, reference)
        except InterruptedRunError as error:
            self.place.stop(f"{error.message}; {error.hint}" if error.hint else error.message)
            raise
        except ChaosrunError as error:
            failure = failed_to_run(error, repeat)
        except Exception as error:
            error.add_note(f"this is a bug in chaosrun {chaosrun.__version__}; please report it with the traceback above")
            raise
        # Outside of the handler: what is raised there brings our own stack along.
        raise failure

    def unseen(self) -> list[str]:
        """An account of each drill that is not PASS and of which the test never asked."""
        return [outcome.unasked() for outcome in self._unseen.values()]

    def _changes(self, faults: Faults, seed: int | None, workers: int | None, overrides: Sequence[str]) -> list[str]:
        if isinstance(overrides, str):
            raise UsageError(f"overrides={overrides!r} is one string", hint=f"write a list: overrides=[{overrides!r}]")
        chosen = self.plan.faults if faults is None else faults
        section = _section(chosen)
        if seed is None:
            seed = self.plan.seed
        if seed is None and not (section and "seed" in section):
            seed = self.place.seed
        return [
            *([] if section is None else [f"faults={_yaml(section)}"]),
            *([] if seed is None else [f"faults.seed={seed}"]),
            *([] if workers is None else [f"workers={workers}"]),
            *overrides,
        ]

    def _carried_out(self, path: Path, changes: list[str], reference: str) -> Outcome:
        from chaosrun.campaign.drill import submit
        from chaosrun.report.beside import progress
        from chaosrun.supervise.run import plan as plan_job

        loaded, plan = plan_job(path, changes)
        with warnings.catch_warnings(), progress(quiet=False) as live:
            # Of the libraries that a drill imports; a test run may make errors of them.
            warnings.simplefilter("ignore")
            self.place.ray.make_ready(loaded.spec, plan)
            result = submit(
                path,
                overrides=changes,
                root=self.place.root,
                address=self.place.address,
                reference=reference,
                on_event=None if live is None else live.on_event,
            )
        for why in result.unwritten:
            print(f"warning: {why}", file=sys.stderr)
        run, verdict = result.run, result.verdict
        for name, value in (("run", run.run_id), ("verdict", verdict.status), ("seed", plan.seed)):
            self.place.note(f"chaosrun_{name}", value)
        outcome = Outcome(
            run=run,
            seed=plan.seed,
            again=None if self.place.seed is None else self.place.repeat(self.place.seed),
            _verdict=verdict,
            _on_look=lambda: self._look_at(run.run_id),
        )
        if verdict.status != "PASS":
            self._unseen[run.run_id] = outcome
        return outcome

    def _look_at(self, run: str) -> None:
        self._unseen.pop(run, None)


def _found(path: Path, folders: Sequence[Path]) -> Path:
    """Raises UsageError when it is in none of these."""
    tried = list(dict.fromkeys(folder / path for folder in folders))
    for candidate in tried:
        if candidate.is_file():
            return candidate
    if len(tried) == 1 or any(candidate.exists() for candidate in tried):
        return next((candidate for candidate in tried if candidate.exists()), tried[0])  # whose error says it better
    where = " and ".join(str(candidate) for candidate in tried)
    hint = "a path starts from the test's folder, or from pytest's rootdir"
    raise UsageError(f"no such job file: {where}", hint=hint)


def _section(faults: Faults) -> dict[str, Any] | None:
    if faults is None:
        return None
    if isinstance(faults, str):
        return {"preset": faults}
    return dict(faults) if isinstance(faults, Mapping) else {"schedule": list(faults)}


def _yaml(section: Mapping[str, Any]) -> str:
    """JSON, which YAML reads. Raises UsageError for what is no value of a job file."""
    try:
        return json.dumps(section)
    except TypeError as error:
        raise UsageError(f"faults={section!r}: {error}", hint="write it as in the job file's faults section") from error
