"""Writes runs of a script that saves and resumes by itself: the toy of `legs`, whose restarts are told by evidence alone.

The numbers come from the broken state, as in `legs`; what an attempt began with is found again among the reference's states.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from legs import BATCHES_PER_EPOCH, MICRO_BATCHES, Bugs, LegWriter, _State, digest, write_run

from chaosrun.faults.fault import Fault
from chaosrun.records.layout import RunLayout
from tests.records import PlainTraceWriter
from tests.unit.events import event

EXACT = Bugs()
SCRIPT_KILLS = (
    Fault(id="F1", rank=1, phase="step", at_step=6, source="faults.schedule[0]"),
    Fault(id="F2", rank=2, phase="reduce", at_step=10, source="faults.schedule[1]"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the script saves and resumes."""

    saves: bool = True
    exports_at: int | None = None
    """After this step it also writes a file that is no checkpoint."""
    optimizer_from: int = 0
    """Its restart takes the optimizer of so many checkpoints before."""
    weights_late: bool = False
    """A save in the background takes the weights of a step later."""
    apart: bool = False
    """One rank goes on from an older checkpoint."""
    ends_at: int | None = None
    """Where a restart ends, in the place of the job's end."""
    never_back: str | None = None
    """What every restart raises before it trains."""


@dataclass
class _Of:
    """What the reference of a run has recorded."""

    states: dict[int, _State] = field(default_factory=dict)
    cursors: dict[int, tuple[int, int]] = field(default_factory=dict)


class ScriptLegWriter(LegWriter):
    habits: ClassVar[Habits] = Habits()
    reference: ClassVar[_Of] = _Of()
    number = 1
    offset = 0
    """From the script's own count of steps to the reference's."""

    def write(self, kills: Sequence[Fault], name: str) -> None:
        self.name = name
        if name == "reference":
            type(self).reference = _Of()
        super().write(kills, name)

    def attempt(self, number: int, waiting: list[Fault]) -> bool:
        self.number, steps = number, self.steps
        if number > 1 and self.habits.never_back:
            return self.fail(number)
        if number > 1 and self.habits.ends_at:
            self.steps = self.habits.ends_at
        done = super().attempt(number, waiting)
        self.steps = steps
        return done

    def ordered(self, resume: str | None, resume_step: int) -> dict[str, Any]:
        return {"by": "script", "resume": None, "resume_step": 0}

    def fail(self, number: int) -> bool:
        self.journal.append(event("attempt.starting", attempt=number, armed=[], **self.ordered(None, 0)))
        self.journal.append(event("attempt.started", attempt=number, pids={0: 100 * number}, address="127.0.0.1:1"))
        error = {"type": "FileNotFoundError", "message": str(self.habits.never_back), "ours": False}
        about = {"attempt": number, "rank": 0, "reason": f"rank 0 raised {error['type']}", "step": 0, "error": error}
        self.journal.append(event("death.unplanned", **about))
        self.journal.append(event("attempt.stopped", attempt=number, reason="it failed", killed=[]))
        return number > 2

    def restore(self, name: str | None) -> _State:
        state = super().restore(name)
        older = sorted(self.saved)[: -self.habits.optimizer_from] if self.habits.optimizer_from else []
        if name is not None and older:
            state.moments = self.saved[older[-1]].moments
        if name is not None and self.habits.weights_late:
            state.weights = self.reference.states[state.step + 1].weights
        return state

    def cursor(self, state: _State, resume: str | None) -> list[int]:
        cursor = super().cursor(state, resume)
        self.began = tuple(cursor)
        return cursor

    def start(self, writers: list[PlainTraceWriter], number: int, state: _State, resume: str | None) -> None:
        wrapped = [_ScriptTrace(writer, self, rank) for rank, writer in enumerate(writers)]
        writers[:] = wrapped  # type: ignore[assignment]
        self.state = state
        if self.name == "reference":
            self.keep(state, (0, 0))
        super().start(writers, number, state, resume)

    def keep(self, state: _State, cursor: tuple[int, int]) -> None:
        self.reference.states[state.step] = copy.deepcopy(state)
        self.reference.cursors[state.step] = cursor

    def found(self, rank: int) -> dict[str, Any]:
        """As `observe.resumed_at` finds it."""
        state = self.state
        if self.habits.apart and rank == self.workers - 1:
            state = self.reference.states[max(0, state.step - self.every_steps)]
        steps = self.reference.states

        def alike(same: Any) -> list[int]:
            return [step for step, other in steps.items() if same(other)]

        cursors = self.reference.cursors
        data = self.cursor_now() if state is self.state else cursors[state.step]
        agree = {
            "weights": alike(lambda other: other.weights == state.weights),
            "optimizer": alike(lambda other: other.moments == state.moments),
            "rates": alike(lambda other: min(other.schedule, 7) == min(state.schedule, 7)),
            "rng": alike(lambda other: other.rng[rank] == state.rng[rank]),
            "data": [step for step, cursor in cursors.items() if cursor == data],
        }
        whole = set.intersection(*map(set, agree.values()))
        return {"step": max(whole, default=None), **agree}

    def cursor_now(self) -> tuple[int, int]:
        names = sorted(self.saved)[: -1 if self.bugs.stale_checkpoint and len(self.saved) > 1 else None]
        epoch, index = self.cursor(self.state, names[-1] if names and not self.bugs.start_over else None)
        return (epoch + 1, 0) if index >= BATCHES_PER_EPOCH else (epoch, index)

    def after_step(self, writers: list[PlainTraceWriter], number: int, state: _State, fault: Fault | None) -> bool:
        if self.name == "reference":
            done = state.epoch * BATCHES_PER_EPOCH + state.batches
            self.keep(state, divmod(done, BATCHES_PER_EPOCH))
        if state.step == self.habits.exports_at:
            writers[0].put("save", step=state.step, path="export.bin", how="open", time_s=self.clock(), done=True)
        return super().after_step(writers, number, state, fault)

    def save(self, number: int, state: _State) -> str:
        return super().save(number, state) if self.habits.saves else "none"


class _ScriptTrace:
    """What a script that nobody adapted leaves in the place of our records."""

    def __init__(self, writer: PlainTraceWriter, leg: ScriptLegWriter, rank: int) -> None:
        self._writer, self._leg, self._rank = writer, leg, rank

    def put(self, kind: str, **fields: Any) -> None:
        leg = self._leg
        match kind:
            case "start":
                found = leg.found(self._rank) if leg.number > 1 else None
                step = 0
                if found:
                    chosen = [max(found[name]) for name in ("weights", "data", "optimizer") if found[name]]
                    step = found["step"] if found["step"] is not None else chosen[0] if chosen else 0
                    leg.offset = step - leg.state.step if self._rank == 0 else leg.offset
                place = {"epoch": 0, "batches": 0, "step": step}
                state = digest(leg.state.moments)
                fields |= {"restored": None, "digests": None, "position": place, "found": found, "state": state}
            case "step":
                fields |= {"step": fields["step"] + leg.offset, "state": digest(leg.state.moments)}
                if leg.number > 1:
                    fields |= {"epoch": 0, "batches": MICRO_BATCHES}
            case "checkpoint":
                for done in (False, True) if self._rank == 0 and leg.habits.saves else ():
                    for file in ("model.pt", "optimizer.pt"):
                        path = f"ckpt-{fields['step']}/{file}"
                        about = {"path": path, "how": "torch.save", "time_s": leg.clock(), "done": done}
                        held = {"average": digest(leg.state.average), "1.mean": digest(leg.state.buffers)}
                        about["held"] = {} if done else {**held, "elapsed": str(leg.clock())}
                        self._writer.put("save", step=fields["step"] + leg.offset, **about)
                return
            case "buckets":
                fields["step"] += leg.offset if fields["step"] else 0
            case "end":
                digests = {name: fields["digests"][name] for name in ("model", "buffers", "optimizer", "rng")}
                fields |= {"checkpoint": None, "digests": digests, "step": fields["step"] + leg.offset}
                fields["position"] = {"epoch": 0, "batches": 0, "step": fields["step"]}
            case _:
                pass
        self._writer.put(kind, **fields)

    def close(self) -> None:
        self._writer.close()


def write_script_run(
    root: Path,
    *,
    bugs: Bugs = EXACT,
    habits: Habits = Habits(),
    libraries: dict[str, str] | None = None,
    kills: Sequence[Fault] = SCRIPT_KILLS,
    spec: dict[str, Any] | None = None,
    **facts: Any,
) -> RunLayout:
    """As `legs.write_run`; `spec`: what the job file says besides."""
    kind = type("Writer", (ScriptLegWriter,), {"habits": habits, "libraries": libraries})
    workers = facts.get("workers", 3)
    told = {"name": "toy", "script": "train.py", "workers": workers, "resume": {"by": "script"}, **(spec or {})}
    plain = replace(Bugs(), primed=bugs.primed, with_ids=bugs.with_ids)
    return write_run(root, bugs=bugs, reference_bugs=plain, kills=kills, kind=kind, spec=told, **facts)
