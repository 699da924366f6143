"""Where the drills of a shrink are carried out: on one warm place, unless their faults are for more than worker processes."""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from chaosrun.campaign.place import Calmly, WarmPlace, Watch, new_run, remove_run, warm_places
from chaosrun.campaign.shrink import Case, symptom_of
from chaosrun.errors import ChaosrunError, InterruptedRunError
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.verify.verdict import Verdict

APART = frozenset({"node", "control"})
"""Families of faults that take agents, Ray or the supervising process along: their drills have all that to themselves."""


class Bench:
    """Use as a context manager; the place is there from the first drill on that wants it."""

    def __init__(
        self, case: Case, *, address: str | None, carry_out: Callable[[RunLayout], Verdict], watch: Watch, calmly: Calmly
    ) -> None:
        """`carry_out`: a drill with everything to itself."""
        self._case = case
        self._carry_out = carry_out
        self._address = address
        self._watch = watch
        self._calmly = calmly
        self._root = case.run.path.parent.parent.absolute()
        self._stack = ExitStack()
        self._place: WarmPlace | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()
        shutil.rmtree(self._case.folder, ignore_errors=True)

    def drill(self, overrides: Sequence[str]) -> str | None:
        """The symptom of a drill that leaves nothing behind."""
        run = new_run(self._case.folder.absolute(), self._case.job.path, overrides, reference="auto")
        try:
            return self._carried_out(run)
        finally:
            remove_run(run)

    def verify(self, overrides: Sequence[str]) -> tuple[RunLayout, str | None]:
        """A drill like any other, that stays beside the run it is about."""
        run = new_run(self._root, self._case.job.path, overrides, reference="auto")
        return run, self._carried_out(run)

    def _carried_out(self, run: RunLayout) -> str | None:
        try:
            return symptom_of(self._apart(run) if _is_apart(run) else self._warm().drill(run, watch=self._watch))
        except InterruptedRunError as error:
            hint = f"`chaosrun shrink {run_argument(self._case.run)}` begins again; the run is as it was"
            raise InterruptedRunError("interrupted", hint=hint) from error
        except ChaosrunError:
            raise
        except Exception as error:
            # What is being looked for may be a bug in here. What its drill has left running goes with the place.
            self._close()
            return f"bug: {type(error).__name__}"

    def _apart(self, run: RunLayout) -> Verdict:
        self._close()
        return self._carry_out(run)

    def _warm(self) -> WarmPlace:
        if self._place is None:
            job = self._case.job
            places = warm_places(self._address, job, self._root, at_most=1, calmly=self._calmly)
            (self._place,) = self._stack.enter_context(places)
        return self._place

    def _close(self) -> None:
        self._stack.close()
        self._place = None


def _is_apart(run: RunLayout) -> bool:
    plan = FaultPlan.from_json(json.loads(run.plan_json.read_text()))
    return any(fault.facts.family in APART for fault in plan.faults)
