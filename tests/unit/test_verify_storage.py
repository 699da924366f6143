"""Damage that nobody met proves nothing, and a commit that failed must not have committed anything."""

from pathlib import Path
from typing import Any

import pytest

from chaosrun.faults.fault import Fault
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.layout import LegLayout
from chaosrun.verify.storage import DAMAGES, storage_problem
from tests.unit.events import event

SEEN = event("fault.observed", found={"checkpoint": "step-00000020", "staged": "step-00000020.attempt-0"})


def fault(kind: str) -> Fault:
    return Fault(id="F1", kind=kind, rank=0, at_step=20, source="test")  # type: ignore[arg-type]


def attempt(number: int, resume: int, *quarantined: str) -> Attempt:
    return Attempt(
        number=number,
        resume=f"step-{resume:08}" if resume else None,
        resume_step=resume,
        pids={},
        exits=(),
        unplanned=(),
        stopped=None,
        quarantined=quarantined,
        traces={},
    )


def history(*attempts: Attempt, records: tuple[Any, ...] = ()) -> LegHistory:
    starts = tuple(event("attempt.starting", attempt=each.number, seq=10 * each.number) for each in attempts)
    asked = (event("fault.requested", step=20, seq=11),)
    return LegHistory(name="chaos", layout=LegLayout(Path("/run")), journal=(*starts, *asked, *records), attempts=attempts)


@pytest.mark.parametrize("kind", sorted(DAMAGES))
def test_a_damage_counts_once_a_later_start_has_met_it(kind: str) -> None:
    first = attempt(1, 0)
    assert storage_problem(fault(kind), SEEN, history(first, attempt(2, 10, "step-00000020"))) is None
    met_late = history(first, attempt(2, 30), attempt(3, 10, "step-00000030", "step-00000020"))
    assert storage_problem(fault(kind), SEEN, met_late) is None


@pytest.mark.parametrize(
    ("later", "told"),
    [
        ((), "no attempt started after that"),
        ((attempt(2, 30),), "went on from newer checkpoints"),
        ((attempt(2, 20),), "an attempt went on from it"),
        ((attempt(2, 10, "step-00000030"),), "went on from newer checkpoints"),
    ],
)
def test_a_damage_that_nobody_met_proves_nothing(later: tuple[Attempt, ...], told: str) -> None:
    problem = storage_problem(fault("truncate"), SEEN, history(attempt(1, 0, "step-00000020"), *later))
    assert problem is not None and told in problem


def test_a_folder_left_behind_has_to_be_cleared_away() -> None:
    both = (attempt(1, 0), attempt(2, 10))

    def cleared(seq: int, *names: str) -> tuple[Any, ...]:
        return (event("staging.cleared", names=names, seq=seq),)

    found = history(*both, records=cleared(15, "step-00000020.attempt-0"))
    assert storage_problem(fault("stale_staging"), SEEN, found) is None
    for records in ((), cleared(15, "step-00000030.attempt-1"), cleared(5, "step-00000020.attempt-0")):
        problem = storage_problem(fault("stale_staging"), SEEN, history(*both, records=records))
        assert problem is not None and "it was not there at the next start" in problem
    problem = storage_problem(fault("stale_staging"), SEEN, history(attempt(1, 0)))
    assert problem is not None and "no attempt came after it" in problem


def test_a_commit_that_failed_left_no_checkpoint() -> None:
    assert storage_problem(fault("failed_rename"), SEEN, history(attempt(1, 0), attempt(2, 10))) is None
    problem = storage_problem(fault("failed_rename"), SEEN, history(attempt(1, 0), attempt(2, 20)))
    assert problem == "the checkpoint of step 20 was committed all the same"
    assert storage_problem(fault("kill"), SEEN, history(attempt(1, 0), attempt(2, 20))) is None
