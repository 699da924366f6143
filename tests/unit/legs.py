"""Writes believable runs for tests of verify: a toy training, simulated on all ranks and recorded with chaosrun.records.

The toy has what can go wrong on a resume: momentum, dropout, a warm-up schedule, buffers, shuffled epochs that do not end with
a checkpoint, two micro-batches a step. `Bugs` breaks its restore in one way each; the records follow from the broken state,
they are not edited.
"""

import base64
import copy
import hashlib
import json
import math
import random
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import safetensors.numpy

from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.journal import Journal
from chaosrun.records.layout import LegLayout, RunLayout, checkpoint_name
from chaosrun.records.manifest import Manifest, ManifestPosition
from tests.records import PlainTraceWriter, read_lines, write_lines
from tests.unit.events import event

TENSORS = ("embed.weight", "block.weight", "head.bias")
MICRO_BATCHES = 2
BATCHES_PER_EPOCH = 10
STEPS = 12

KILLS = (
    Fault(id="F1", rank=1, phase="step", at_step=6, source="faults.schedule[0]"),
    Fault(id="F2", rank=2, phase="reduce", at_step=10, source="faults.schedule[1]"),
    Fault(id="F3", rank=0, phase="checkpoint.precommit", at_step=12, source="faults.schedule[2]"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bugs:
    """What goes wrong when an attempt restores a checkpoint (or, for the last group, always)."""

    keep_rng: bool = True
    keep_optimizer: bool = True
    keep_scheduler: bool = True
    keep_buffers: bool = True
    keep_weights: bool = True
    keep_registered: bool = True
    set_epoch: bool = True
    skip_off: int = 0
    each_pass: bool = False
    """Its later passes begin where it went on, too."""
    batches_off: int = 0
    weights_off: float = 0.0
    keep_augmentation: bool = True
    start_over: bool = False
    drifting_rank: int | None = None
    stale_checkpoint: bool = False

    primed: bool = True
    random_script: bool = False
    with_ids: bool = True
    with_digests: bool = True
    """Of the state that was restored and saved."""
    lost_fault: str | None = None


@dataclass(slots=True)
class _State:
    step: int = 0
    epoch: int = 0
    batches: int = 0
    weights: list[float] = field(default_factory=lambda: [0.5, -0.25, 0.125])
    moments: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    buffers: list[float] = field(default_factory=list)
    """One running mean a rank."""
    rng: list[int] = field(default_factory=list)
    """One stream a rank: how many numbers it has given."""
    schedule: int = 0
    average: float = 0.0
    """A registered object."""
    augmentation: float = 0.0
    """A random stream of the dataset's own."""


def digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def words(values: Sequence[float]) -> str:
    raw = b"".join(hashlib.sha256(struct.pack("<d", value)).digest()[:4] for value in values)
    return base64.b64encode(raw).decode()


def samples(epoch: int, index: int, rank: int, workers: int) -> list[int]:
    order = list(range(BATCHES_PER_EPOCH * workers * 2))
    random.Random(1000 + epoch).shuffle(order)
    first = (index * workers + rank) * 2
    return order[first : first + 2]


def noise(*values: object) -> float:
    return int(digest(*values), 16) / 2**64


class Clock:
    """Half a second a look."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 0.5
        return self.now_s


class LegWriter:
    """Simulates one leg and writes its journal, traces and checkpoints."""

    libraries: dict[str, str] | None = None
    """Of the environment."""

    def __init__(self, layout: LegLayout, *, workers: int, steps: int, every_steps: int, bugs: Bugs, clock: Clock) -> None:
        self.layout = layout
        self.workers = workers
        self.steps = steps
        self.every_steps = every_steps
        self.bugs = bugs
        self.clock = clock
        self.journal = Journal(layout.journal, clock=clock)
        self.store = CheckpointStore(layout, keep=3)
        self.saved: dict[str, _State] = {}
        self.initial = _State(rng=[0] * workers, buffers=[0.0] * workers)

    def write(self, kills: Sequence[Fault], name: str) -> None:
        more = {} if self.libraries is None else {"libraries": self.libraries}
        self.layout.environment.write_text(json.dumps({"torch": "2.13.0", "threads": 1, "cpu": "AVX2", **more}))
        self.journal.append(event("leg.started", leg=name, workers=self.workers, supervisor_pid=1))
        waiting = list(kills)
        attempt = 0
        done = False
        while not done:
            attempt += 1
            done = self.attempt(attempt, waiting)
        self.journal.append(event("leg.finished", outcome="completed", message="", hint=None, final_step=self.steps))
        self.journal.close()

    def attempt(self, number: int, waiting: list[Fault]) -> bool:
        """Run one attempt until its end (True) or the first of the `waiting` faults, which is taken off."""
        names = sorted(self.saved)[: -1 if self.bugs.stale_checkpoint and len(self.saved) > 1 else None]
        resume = names[-1] if names and not self.bugs.start_over else None
        state = self.restore(resume)
        armed = [fault.id for fault in waiting]
        resume_step = int(resume[5:]) if resume else 0
        self.journal.append(event("attempt.starting", attempt=number, armed=armed, **self.ordered(resume, resume_step)))
        pids = {rank: 100 * number + rank for rank in range(self.workers)}
        self.journal.append(event("attempt.started", attempt=number, pids=pids, address="127.0.0.1:1"))
        writers = [PlainTraceWriter(self.layout.attempt(number).trace(rank)) for rank in range(self.workers)]
        self.start(writers, number, state, resume)
        cursor = self.cursor(state, resume)
        fault = waiting[0] if waiting else None
        killed = resume is not None and fault is not None and fault.phase == "restore.end"
        first = True
        while not killed and state.step < self.steps:
            killed = self.step(writers, number, state, cursor, first, fault)
            first = False
        if killed:
            assert fault is not None
            self.die(number, fault, state.step)
            waiting.remove(fault)
        else:
            self.end(writers, state)
        for writer in writers:
            writer.close()
        return not killed

    def ordered(self, resume: str | None, resume_step: int) -> dict[str, Any]:
        return {"resume": resume, "resume_step": resume_step}

    def restore(self, name: str | None) -> _State:
        """The state to go on from, broken as the bugs demand."""
        bugs, fresh = self.bugs, copy.deepcopy(self.initial)
        if name is None:
            return fresh
        state = copy.deepcopy(self.saved[name])
        state.weights = [weight + bugs.weights_off for weight in (state if bugs.keep_weights else fresh).weights]
        state.rng = state.rng if bugs.keep_rng else fresh.rng
        state.moments = state.moments if bugs.keep_optimizer else fresh.moments
        state.schedule = state.schedule if bugs.keep_scheduler else fresh.schedule
        state.buffers = state.buffers if bugs.keep_buffers else fresh.buffers
        state.average = state.average if bugs.keep_registered else fresh.average
        state.augmentation += 0.0 if bugs.keep_augmentation else 0.5
        state.batches += bugs.batches_off
        return state

    def cursor(self, state: _State, resume: str | None) -> list[int]:
        """Epoch and index of the next batch that the loader hands out."""
        if resume is None:
            self.went_on = 0
            return [0, 0]
        epoch, index = state.epoch, state.batches - self.bugs.batches_off
        if index >= BATCHES_PER_EPOCH:
            epoch, index = epoch + 1, 0
        self.went_on = index if self.bugs.each_pass else 0
        return [epoch if self.bugs.set_epoch else 0, index + self.bugs.skip_off]

    def start(self, writers: list[PlainTraceWriter], number: int, state: _State, resume: str | None) -> None:
        for rank, writer in enumerate(writers):
            drift = 1e-3 if resume and rank == self.bugs.drifting_rank else 0.0
            weights = [weight + drift for weight in state.weights]
            writer.put(
                "start",
                v=3,
                attempt=number,
                rank=rank,
                world_size=self.workers,
                pid=100 * number + rank,
                entered_s=self.clock(),
                time_s=self.clock(),
                position={"epoch": state.epoch, "batches": state.batches, "step": state.step},
                restored=resume,
                rng=digest("rng", rank, state.rng[rank]),
                canary=digest("canary"),
                param=digest(weights),
                params=words(weights),
                tensors=TENSORS,
                digests=self.digests(state, rank) if resume and self.bugs.with_digests else None,
            )
            if self.workers == 1 or self.bugs.primed:
                self.buckets(writer, 0, 1)

    def buckets(self, writer: PlainTraceWriter, step: int, kind: int) -> None:
        layout = None if self.workers == 1 else [[[0, 1, 2]], [[2, 1], [0]]][kind]
        writer.put("buckets", step=step, layout=layout, primed=self.workers > 1 and self.bugs.primed)

    def step(
        self, writers: list[PlainTraceWriter], number: int, state: _State, cursor: list[int], first: bool, fault: Fault | None
    ) -> bool:
        """One optimizer step on all ranks; True when the fault struck within it."""
        step = state.step + 1
        if fault and fault.phase == "reduce" and fault.at_step == step:
            state.step = step
            return True
        if state.batches >= BATCHES_PER_EPOCH:
            state.epoch, state.batches = state.epoch + 1, 0
        batches: list[tuple[int, int]] = []
        for _ in range(MICRO_BATCHES):
            if cursor[1] >= BATCHES_PER_EPOCH:
                # From the second epoch of an attempt on, the loader counts its own epochs.
                cursor[:] = [state.epoch if self.bugs.skip_off == 0 else cursor[0] + 1, self.went_on]
            batches.append((cursor[0], cursor[1]))
            cursor[1] += 1
        state.batches += MICRO_BATCHES
        rate = 0.1 * min(1.0, (state.schedule + 1) / 8)
        lines = [self.forward(rank, state, batches) for rank in range(self.workers)]
        reduced = [sum(line["local"][i] for line in lines) / self.workers for i in range(len(TENSORS))]
        if self.workers > 2 and first and not self.bugs.primed:
            reduced = [value * (1 + 1e-9) for value in reduced]
        state.moments = [0.9 * moment + value for moment, value in zip(state.moments, reduced, strict=True)]
        state.weights = [weight - rate * moment for weight, moment in zip(state.weights, state.moments, strict=True)]
        state.average = 0.9 * state.average + 0.1 * state.weights[0]
        state.schedule += 1
        state.step = step
        for rank, (writer, line) in enumerate(zip(writers, lines, strict=True)):
            if self.workers > 1 and not self.bugs.primed and (first or step == self.first_step + 1):
                self.buckets(writer, step, 0 if first else 1)
            drift = 1e-3 if number > 1 and rank == self.bugs.drifting_rank else 0.0
            weights = [weight + drift for weight in state.weights]
            writer.put(
                "step",
                step=step,
                epoch=state.epoch,
                batches=state.batches,
                time_s=self.clock(),
                ids=line["ids"],
                batch=line["batch"],
                rng=line["rng"],
                loss=line["loss"],
                lr=[rate.hex()],
                grad=digest(reduced),
                grads=words(reduced),
                param=digest(weights),
                params=words(weights),
            )
        if first:
            self.first_step = step
        return self.after_step(writers, number, state, fault)

    def forward(self, rank: int, state: _State, batches: list[tuple[int, int]]) -> dict[str, Any]:
        """Both micro-batches of one rank: what it records, and its local gradients."""
        line: dict[str, Any] = {
            "rng": digest("rng", rank, state.rng[rank]),
            "ids": [],
            "batch": [],
            "loss": [],
            "local": [0.0] * len(TENSORS),
        }
        for epoch, index in batches:
            ids = samples(epoch, index, rank, self.workers)
            dropout = noise("dropout", rank, state.rng[rank])
            if self.bugs.random_script:
                dropout = random.SystemRandom().random()
            state.rng[rank] += 1
            data = sum(ids) / 100 + state.augmentation
            state.buffers[rank] = 0.9 * state.buffers[rank] + 0.1 * data
            loss = math.cos(sum(state.weights) * data) + dropout + state.buffers[rank]
            line["ids"].append(ids)
            line["batch"].append(digest("batch", ids, state.augmentation))
            line["loss"].append(loss.hex())
            for i, weight in enumerate(state.weights):
                line["local"][i] += math.sin(weight * (i + 1) + data) * dropout / 10
        if not self.bugs.with_ids:
            line["ids"] = None
        return line

    def after_step(self, writers: list[PlainTraceWriter], number: int, state: _State, fault: Fault | None) -> bool:
        phase = fault.phase if fault and fault.at_step in (None, state.step) else None
        if state.step % self.every_steps == 0 or state.step == self.steps:
            if phase == "checkpoint.precommit":
                return True
            name = self.save(number, state)
            if phase == "checkpoint.postcommit":
                return True
            for rank, writer in enumerate(writers):
                digests = self.digests(state, rank) if self.bugs.with_digests else None
                writer.put("checkpoint", step=state.step, name=name, time_s=self.clock(), duration_s=0.01, digests=digests)
        return phase == "step"

    def save(self, number: int, state: _State) -> str:
        name = checkpoint_name(state.step)
        self.saved[name] = copy.deepcopy(state)
        staging = self.store.stage(state.step, number)
        tensors = {name: numpy.array([weight]) for name, weight in zip(TENSORS, state.weights, strict=True)}
        (staging / "model.safetensors").write_bytes(safetensors.numpy.save(tensors))
        (staging / "rng.bin").write_bytes(repr(state.rng).encode())
        manifest = Manifest(
            step=state.step,
            position=ManifestPosition(epoch=state.epoch, batches=state.batches, step=state.step),
            world_size=self.workers,
            attempt=number,
            time_s=self.clock(),
            job_fingerprint="job",
            files=self.store.seal(staging, ["model.safetensors", "rng.bin"]),
            digests={str(rank): self.digests(state, rank) for rank in range(self.workers)},
        )
        self.store.write_manifest(staging, manifest)
        self.store.commit(staging, state.step)
        return name

    def digests(self, state: _State, rank: int) -> dict[str, dict[str, str]]:
        return {
            "model": {name: digest(weight) for name, weight in zip(TENSORS, state.weights, strict=True)},
            "buffers": {"norm.mean": digest(state.buffers[rank])},
            "optimizer": {f"{name}.momentum": digest(moment) for name, moment in zip(TENSORS, state.moments, strict=True)},
            "scheduler": {"0.last_epoch": digest(state.schedule)},
            "rng": {"torch": digest("rng", rank, state.rng[rank])},
            "registered": {"average": digest(state.average)},
        }

    def end(self, writers: list[PlainTraceWriter], state: _State) -> None:
        for rank, writer in enumerate(writers):
            writer.put(
                "end",
                step=state.step,
                position={"epoch": state.epoch, "batches": state.batches, "step": state.step},
                time_s=self.clock(),
                digests=self.digests(state, rank),
                checkpoint=checkpoint_name(state.step),
            )

    def die(self, number: int, fault: Fault, step: int) -> None:
        """The fault and what the agent does about the other ranks. A lost fault is a death that nobody asked for."""
        pid = 100 * number + fault.rank
        died = self.clock()
        lost = fault.id == self.bugs.lost_fault
        if not lost:
            self.journal.append(
                event("fault.requested", fault=fault.id, attempt=number, rank=fault.rank, step=step, phase=fault.phase)
            )
        exited = {"exit_code": None, "signal": 9, "died_s": died}
        self.journal.append(event("worker.exited", attempt=number, rank=fault.rank, pid=pid, **exited))
        if lost:
            self.journal.append(
                event("death.unplanned", attempt=number, rank=fault.rank, reason="signal 9", step=step, error=None)
            )
        else:
            seen = {"fault": fault.id, "attempt": number, "rank": fault.rank, "pid": pid, "how": "death", "found": None}
            seen |= {"exit_code": None, "signal": 9, "died_s": died}
            self.journal.append(event("fault.observed", **seen))
        others = [rank for rank in range(self.workers) if rank != fault.rank]
        for rank in others:
            exited = {"exit_code": None, "signal": 9, "died_s": self.clock()}
            self.journal.append(event("worker.exited", attempt=number, rank=rank, pid=100 * number + rank, **exited))
        self.journal.append(event("attempt.stopped", attempt=number, reason="a rank died", killed=others))


def write_run(
    root: Path,
    *,
    kills: Sequence[Fault] = KILLS,
    bugs: Bugs = Bugs(),
    reference_bugs: Bugs | None = None,
    workers: int = 3,
    steps: int = STEPS,
    every_steps: int = 4,
    verify: dict[str, Any] | None = None,
    kind: type[LegWriter] = LegWriter,
    spec: dict[str, Any] | None = None,
    **facts: Any,
) -> RunLayout:
    """A whole run directory. Bugs that are not of the restore apply to both legs unless `reference_bugs` says otherwise."""
    run = RunLayout(root / "run")
    clock = Clock()
    for name in ("reference", "chaos"):
        leg_bugs = bugs if name == "chaos" or reference_bugs is None else reference_bugs
        with patch("os.fsync"):  # nothing here is about power cuts, and it is what takes the time
            writer = kind(run.leg(name), workers=workers, steps=steps, every_steps=every_steps, bugs=leg_bugs, clock=clock)
            writer.write(kills if name == "chaos" else (), name)
    spec = spec or {"name": "toy", "script": "train.py", "workers": workers, "verify": verify or {}}
    about = {"v": 1, "run_id": run.run_id, "created_s": 1000.0, "job": "/job.yaml", "directory": "/", "script": "/train.py"}
    more = {"overrides": [], "reference": {"mode": "auto", "source": None, "key": None}, "irreproducible": None}
    storage = {"reference": None, "chaos": None, "confirm": None}
    run.run_json.write_text(json.dumps({**about, **more, "spec": spec, "storage": storage, **facts}))
    run.plan_json.write_text(json.dumps(FaultPlan(seed=0, faults=tuple(kills)).to_json()))
    return run


def copy_run(run: RunLayout, root: Path) -> RunLayout:
    return RunLayout(Path(shutil.copytree(run.path, root / "run")))


def die_raising(run: RunLayout, traceback: str = "", **more: Any) -> None:
    """Have the chaos leg end with an error of rank 1 in its last attempt, a ValueError unless `more` says otherwise."""

    edit_journal(run, "chaos", only("leg.finished", lambda line: None))
    error = {"type": "ValueError", "message": "boom", "traceback": traceback, **more}
    with patch("os.fsync"):
        journal = Journal(run.leg("chaos").journal)
        attempt = len(run.leg("chaos").attempts())
        journal.append(event("death.unplanned", attempt=attempt, rank=1, reason="raised", step=12, error=error))
        journal.append(event("leg.finished", outcome="user_error", message="rank 1 raised ValueError"))
        journal.close()


Edit = Callable[[dict[str, Any]], dict[str, Any] | None]


def edit_trace(run: RunLayout, leg: str, attempt: int, rank: int, edit: Edit) -> None:
    """Rewrite one trace line by line; a line for which `edit` returns None is left out."""
    path = run.leg(leg).attempt(attempt).trace(rank)
    before = list(read_lines(path))
    after = [line for line in map(edit, copy.deepcopy(before)) if line is not None]
    assert after != before, f"the edit changed nothing in {path}"
    write_lines(path, after)


def edit_ranks(run: RunLayout, leg: str, attempt: int, *edits: Edit) -> None:
    """The traces of all three ranks."""
    for rank in range(3):
        for edit in edits:
            edit_trace(run, leg, attempt, rank, edit)


def edit_journal(run: RunLayout, leg: str, edit: Edit) -> None:
    """Rewrite a journal; the sequence numbers stay whole."""
    _rewrite(run.leg(leg).journal, edit)
    lines = [json.loads(line) for line in run.leg(leg).journal.read_text().splitlines()]
    numbered = [{**line, "seq": number} for number, line in enumerate(lines, start=1)]
    run.leg(leg).journal.write_text("".join(json.dumps(line) + "\n" for line in numbered))


def only(kind: str, change: Callable[[dict[str, Any]], dict[str, Any] | None], step: int | None = None) -> Edit:
    """An edit of the lines of this kind (trace) or event (journal), at this step if one is given."""

    def edit(line: dict[str, Any]) -> dict[str, Any] | None:
        if line.get("kind", line.get("event")) != kind or step not in (None, line.get("step")):
            return line
        return change(line)

    return edit


def drop(_line: dict[str, Any]) -> None:
    return None


def put(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda line: {**line, **values}


def finding(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A change of what a restart was found with."""
    return lambda line: {**line, "found": {**line["found"], **values}}


def _rewrite(path: Path, edit: Edit) -> None:
    """Leave out what `edit` returns None for, and insist that it changed something."""
    before = path.read_text()
    lines = [edit(json.loads(line)) for line in path.read_text().splitlines()]
    after = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines if line is not None)
    assert after != before, f"the edit changed nothing in {path}"
    path.write_text(after)


def with_spec(**spec: Any) -> Callable[[RunLayout], None]:
    """An edit of what a run was asked for."""

    def edit(run: RunLayout) -> None:
        told = json.loads(run.run_json.read_text())
        run.run_json.write_text(json.dumps({**told, "spec": {**told["spec"], **spec}}))

    return edit
