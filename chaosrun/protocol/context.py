"""A worker process's drill context (order, leg, faults, heartbeat): set once, by `worker.main` or `commanded.become_rank`. None
outside chaosrun."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.errors import MisuseError
from chaosrun.faults.points import FaultPoints
from chaosrun.observe.file_guard import FileGuard
from chaosrun.observe.opened import FileWatch
from chaosrun.observe.results import Results
from chaosrun.protocol.early_end import EarlyEnd
from chaosrun.protocol.preemption import Preemption
from chaosrun.records.heartbeat import Heart
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import WorkerEnd
from chaosrun.records.order import ASYNC_FROM_BYTES, WorkerOrder

if TYPE_CHECKING:
    from chaosrun.protocol.background import Writer
    from chaosrun.protocol.script import ScriptTraining
    from chaosrun.protocol.session import Session


@dataclass(slots=True)
class WorkerContext:
    order: WorkerOrder
    leg: LegLayout = field(init=False)
    faults: FaultPoints = field(init=False)
    heart: Heart = field(init=False, default_factory=Heart)
    preemption: Preemption = field(init=False)
    settling: EarlyEnd = field(init=False)
    files: FileWatch | None = None
    """None in a leg without a previous leg."""
    file_guard: FileGuard | None = None
    """For a script that saves by itself."""
    writer: "Writer | None" = None
    """Where checkpoints are saved asynchronously."""
    session: "Session | None" = None
    """The session that the script attached, once it has."""
    results: Results = field(init=False)
    """Files that the script writes, once it has attached."""
    script: "ScriptTraining | None" = None
    """Observes a script that resumes by itself."""

    def __post_init__(self) -> None:
        self.leg = LegLayout.at(Path(self.order.leg_path), self.order.storage_path)
        self.faults = FaultPoints(self.order, self.leg)
        self.preemption = Preemption(self.order)
        self.settling = EarlyEnd(self.order, self.leg)
        self.results = Results(lambda: self.step, (self.leg.checkpoints, self.leg.staging, self.leg.path / "attempts"))

    def begin_a_writer(self, listen_fd: int | None) -> None:
        """Fork the writer, before the script or torch starts threads: a process with threads cannot be forked safely."""
        order, resume = self.order, self.order.resume
        if order.mode == "sync" or order.by == "script":
            return
        saved = (self.leg.checkpoints / resume).glob("*") if resume else ()
        small = resume and sum(path.lstat().st_size for path in saved) < ASYNC_FROM_BYTES
        if order.mode == "async" or not small:
            from chaosrun.protocol.background import Writer

            self.writer = Writer(self.order, self.leg, listen_fd=listen_fd)

    @property
    def training(self) -> "Session | ScriptTraining | None":
        return self.script or self.session

    @property
    def finished(self) -> bool:
        """Whether the training is complete."""
        return self.training is not None and self.training.finished

    @property
    def left(self) -> WorkerEnd | None:
        """The end of a rank that left the training normally: on notice, or because its leg is decided."""
        if self.preemption.left is not None:
            return self.preemption.end()
        return WorkerEnd(status=self.settling.left, exit_code=0) if self.settling.left else None

    @property
    def step(self) -> int:
        """The last complete step."""
        return self.training.position.step if self.training else 0

    def adopt(self, session: "Session") -> None:
        if self.session is not None:
            raise MisuseError(
                "chaosrun.attach() was called twice in one process",
                hint="attach once, after accelerator.prepare(), and pass the session around",
            )
        self.session = session


_current: WorkerContext | None = None


def enter(context: WorkerContext) -> None:
    global _current
    _current = context


def current() -> WorkerContext | None:
    """This process's context, None when the script does not run under chaosrun."""
    return _current
