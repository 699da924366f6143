"""Grants or refuses faults from `chaosrun inject` for the leg that takes faults, while it runs."""

import json
import math
import secrets
import threading
from dataclasses import replace

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.plan.injection import injected
from chaosrun.plan.permission import ask_permission
from chaosrun.records.events import EventRecord
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import RUN, RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import read_run
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.control import Answer, Inject, InjectedFault
from chaosrun.supervise.supervisor import Supervisor

STRUCK = ("chaos", RUN)
"""Legs that take faults."""
SOONEST_S = 0.001
"""A delay of 0 cannot be written in a job file."""


class Injections:
    """Passes faults from `chaosrun inject` to the leg that takes faults.

    Called by the control socket's thread, not the supervisor's: a granted fault is durable in plan.json before the supervisor
    gets it, so that the verdict includes it even if this process dies. While that leg runs, nothing else writes plan.json. The
    drill reports its progress to `watch` and `hear`.
    """

    def __init__(self, run: RunLayout, *, has_successor: bool) -> None:
        """`has_successor`: another process continues the run when this one is killed."""
        self._run = run
        self._has_successor = has_successor
        self._lock = threading.Lock()
        self._supervisor: Supervisor | None = None
        self._over = False
        """The leg under faults has ended."""

    def watch(self, supervisor: Supervisor | None) -> None:
        with self._lock:
            self._supervisor = supervisor

    def hear(self, record: EventRecord) -> None:
        """Take each journal record as it is written: after the last one the leg takes no more faults."""
        if record.get("leg") in STRUCK and record["event"] == "leg.finished":
            with self._lock:
                self._over = True

    def ask(self, command: Inject) -> Answer:
        """Strike the command's faults as soon as their ranks run. Raises UsageError, OSError if plan.json cannot be written."""
        seed = secrets.randbelow(2**31) if command.seed is None else command.seed
        with self._lock:
            info = read_run(self._run)
            spec = JobSpec.model_validate(info.spec)
            if info.kind == RUN and not spec.faults.allow_inject:
                raise UsageError(
                    f"run {self._run.run_id} is in production, and its job file does not allow faults",
                    hint="for a game day, start it with faults.allow_inject=true; `chaosrun submit` drills the job",
                )
            supervisor = self._open_leg()
            plan = FaultPlan.read(self._run.plan_json)
            after_s = max(SOONEST_S, math.floor(supervisor.outside_faults.elapsed_s() * 1000) / 1000)
            about = {"kind": command.kind, "rank": command.rank, "settings": command.settings}
            faults = injected(spec, plan, **about, seed=seed, after_s=after_s)
            self._permit(spec, faults, supervisor)
            grown = replace(plan, faults=(*plan.faults, *faults))
            write_durably(self._run.plan_json, json.dumps(grown.to_json(), indent=1).encode())
            supervisor.inject(faults)
        told = [InjectedFault(id=each.id, kind=each.kind, rank=each.rank, what=each.describe()) for each in faults]
        return Answer(faults=tuple(told), seed=seed)

    def _open_leg(self) -> Supervisor:
        status = f"`chaosrun status {run_argument(self._run)}` shows where it is"
        if self._supervisor is None:
            where = "the leg under faults is over" if self._over else "no leg is running now"
            raise UsageError(f"{where}: there is no rank to strike", hint=status)
        if self._supervisor.name not in STRUCK:
            raise UsageError(
                f"the {self._supervisor.name} leg is running, which must stay without faults",
                hint=f"only the chaos leg takes faults; {status}",
            )
        if self._over:
            raise UsageError("the training under faults has just ended: there is no rank to strike", hint=status)
        return self._supervisor

    def _permit(self, spec: JobSpec, faults: tuple[Fault, ...], supervisor: Supervisor) -> None:
        if not self._has_successor and any(fault.facts.evidence == "successor" for fault in faults):
            raise UsageError(
                f"a fault of kind {faults[0].kind} ends the run's supervising process, and there is no other to continue it",
                hint="plan one such fault in the job file: then a second process takes over, and takes more of them",
            )
        ask_permission(faults, spec, ray=supervisor.ray, has_successor=self._has_successor)
        if problem := supervisor.outside_faults.misplaced(faults):
            raise UsageError(problem, hint="join the cluster from a node that runs no ranks, or strike another rank")
