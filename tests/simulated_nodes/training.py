"""What simulated ranks write: the records of a training whose every value follows from the step alone."""

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.faults.fault import Fault
from chaosrun.faults.points import FaultPoints
from chaosrun.records.codec import changed, encode
from chaosrun.records.events import RaisedError
from chaosrun.records.heartbeat import Heart
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import LegLayout, checkpoint_name, checkpoint_step
from chaosrun.records.markers import WorkerEnd, write_marker
from chaosrun.records.order import WorkerOrder
from chaosrun.records.position import Position
from chaosrun.records.trace_writer import TraceWriter
from chaosrun.records.traces import TRACE_VERSION, BucketsRecord, CheckpointRecord, EndRecord, StartRecord, StepRecord
from tests.records import manifest_of

STAGES = ("fetch", "forward", "backward", "optimizer", "record")
TENSORS = ("weight", "bias")


def digest(*values: object) -> str:
    """Sixteen hex digits."""
    return hashlib.blake2b(repr(values).encode(), digest_size=8).hexdigest()


def words(*values: object) -> bytes:
    """One word a tensor, as a trace has them."""
    return base64.b64decode(base64.b64encode(hashlib.blake2b(repr(values).encode(), digest_size=4 * len(TENSORS)).digest()))


class SimulatedRank:
    """One rank of one attempt: its files, and nothing else."""

    def __init__(self, order: WorkerOrder, pid: int, *, wrong: bool = False) -> None:
        self.order = order
        self.pid = pid
        self._data = "another batch" if wrong else "batch"
        self.leg = LegLayout(Path(order.leg_path), Path(order.storage_path) if order.storage_path else None)
        self.step = 0
        self.heart = Heart()
        self.faults = FaultPoints(order, self.leg)
        self._attempt = self.leg.attempt(order.attempt)
        self._trace: TraceWriter | None = None
        self._attempt.log(order.rank).touch()
        self.heart.open(self._attempt.heartbeat(order.rank))
        for stage in ("started", "script", "rendezvous"):
            self.heart.beat(stage, 0)

    def begin(self) -> None:
        """Join, restore, and write the first line of the trace."""
        order, entered_s = self.order, time.time()
        self.heart.beat("joined", 0)
        self.step = 0 if order.resume is None else checkpoint_step(order.resume) or 0
        self.heart.beat("restoring", self.step)
        self._trace = TraceWriter(self._attempt.trace(order.rank))
        self._trace.write(
            StartRecord(
                v=TRACE_VERSION,
                attempt=order.attempt,
                rank=order.rank,
                world_size=order.world_size,
                pid=self.pid,
                entered_s=entered_s,
                time_s=time.time(),
                position=self.position,
                restored=order.resume,
                rng=digest("rng", order.rank, self.step),
                canary=digest("canary"),
                param=digest("weights", self.step),
                params=words("weights", self.step),
                tensors=TENSORS,
                digests=self.digests() if order.resume else None,
            )
        )
        self._trace.write(BucketsRecord(step=0, layout=((0, 1),), primed=True))
        self.heart.beat("restored", self.step)

    @property
    def position(self) -> Position:
        return Position(epoch=0, batches=self.step, step=self.step)

    def take_step(self) -> None:
        """One step: five beats, one line."""
        assert self._trace is not None
        rank, step = self.order.rank, self.step + 1
        for stage in STAGES:
            self.heart.beat(stage, step)
        self.step = step
        self._trace.write(
            StepRecord(
                step=step,
                epoch=0,
                batches=step,
                time_s=time.time(),
                ids=((step * self.order.world_size + rank,),),
                batch=(digest(self._data, rank, step),),
                rng=digest("rng", rank, step - 1),
                loss=((1.0 / step).hex(),),
                lr=((0.1).hex(),),
                grad=digest("grad", step),
                grads=words("grad", step),
                param=digest("weights", step),
                params=words("weights", step),
            )
        )
        self.heart.beat("own", step)

    def due(self, phase: str) -> list[Fault]:
        """Faults that strike this rank here, claimed."""
        claim = {"rank": self.order.rank, "attempt": self.order.attempt, "step": self.step, "phase": phase}
        due = self.faults.due(phase, self.step)  # type: ignore[arg-type]
        return [f for f in due if write_marker(self.leg, f.id, pid=self.pid, ticks=1, group=f.group, **claim)]

    def digests(self) -> dict[str, dict[str, str]]:
        return {
            "model": {name: digest(name, self.step) for name in TENSORS},
            "buffers": {},
            "optimizer": {name: digest("momentum", name, self.step) for name in TENSORS},
            "scheduler": {},
            "rng": {"torch": digest("rng", self.order.rank, self.step)},
            "registered": {},
        }

    def saved(self, began_s: float) -> None:
        assert self._trace is not None
        about = {"time_s": time.time(), "duration_s": time.time() - began_s, "digests": self.digests()}
        self._trace.write(CheckpointRecord(step=self.step, name=checkpoint_name(self.step), **about))
        self.heart.beat("over", self.step)

    def finish(self) -> None:
        """The training is complete."""
        assert self._trace is not None
        about = {"step": self.step, "position": self.position, "time_s": time.time(), "digests": self.digests()}
        self._trace.write(EndRecord(checkpoint=checkpoint_name(self.step), **about))
        self.heart.beat("ended", self.step)
        self._end(WorkerEnd(status="returned", exit_code=0, completed=True))

    def lose_a_peer(self) -> None:
        """As gloo has it: the connection is closed, and an error raised."""
        message = "Connection closed by peer"
        error = RaisedError(type="RuntimeError", message=message, exit_code=1, traceback=f"RuntimeError: {message}")
        self._end(WorkerEnd(status="raised", exit_code=1, error=error))

    def _end(self, end: WorkerEnd) -> None:
        end = changed(end, pid=self.pid, step=self.step, time_s=time.time())
        write_durably(self._attempt.end(self.order.rank), encode(end))

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()
            self._trace = None


def save(ranks: Sequence[SimulatedRank]) -> None:
    """All together: a file of each rank, the manifest, the commit, retention."""
    first, began_s = ranks[0], time.time()
    store = CheckpointStore(first.leg, first.order.keep)
    staging = store.stage(first.step, first.order.attempt)
    names = [f"chaosrun-rank-{rank.order.rank}.pt" for rank in ranks]
    for name in names:
        (staging / name).write_bytes(name.encode())
    parts = [rank.digests() for rank in ranks]
    manifest = manifest_of(
        first.step,
        world_size=len(ranks),
        attempt=first.order.attempt,
        time_s=time.time(),
        job_fingerprint=first.order.job_fingerprint,
        files=store.seal(staging, names),
        digests={
            **{key: parts[0][key] for key in ("model", "optimizer", "scheduler")},
            "ranks": [{key: part[key] for key in ("rng", "buffers", "registered")} for part in parts],
            "job": {},
            "order": list(TENSORS),
        },
    )
    store.write_manifest(staging, manifest)
    store.commit(staging, first.step)
    for rank in ranks:
        rank.saved(began_s)
    store.retain()


def write_inputs(leg: LegLayout, script: Path) -> None:
    """What rank 0 writes about the sources, as it completes, and about its machine."""
    hashed = hashlib.sha256(script.read_bytes()).hexdigest()
    write_durably(leg.path / "inputs.json", json.dumps({str(script): hashed}).encode())
    write_durably(leg.environment, json.dumps({"machine": "simulated"}).encode())
