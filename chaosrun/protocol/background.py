"""Asynchronous saves: each rank has a separate process, its writer, which saves a copy of the rank's state while the rank
trains on.

The writer is forked before the rank has threads or devices, and dies with it at any moment: an uncommitted checkpoint is then
in staging, and the next attempt clears it. It writes with the same code as a synchronous save (`protocol.saving`), from the
copy alone, and meets the other ranks' writers in the rendezvous store. Its errors are raised in the rank, at the next `look`.

Faults at a checkpoint's phases come due in the writer. Storage faults and the SIGKILL of the rank are struck from there; for
any other fault the writer waits at the fault point until the rank calls `look`, and strikes the fault itself.
"""

import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import torch
from accelerate.checkpointing import save_accelerator_state, save_custom_state
from accelerate.state import PartialState

from chaosrun.errors import ChaosrunError, MisuseError, ResourcesError
from chaosrun.faults.fault import Fault
from chaosrun.faults.points import FaultPoints
from chaosrun.observe.fingerprint import digests, spots
from chaosrun.observe.rng import restore_rng
from chaosrun.processes import die_with_parent
from chaosrun.protocol.saving import Digests, Saver, StorePeers, state_of
from chaosrun.protocol.snapshot import SPARE_BYTES, Arena, Layout, Sealed, Taken, arenas_of, read
from chaosrun.protocol.state import TrainingState, payload_of
from chaosrun.records.heartbeat import Heart
from chaosrun.records.layout import LegLayout, checkpoint_name
from chaosrun.records.order import WorkerOrder
from chaosrun.records.position import Position
from chaosrun.records.traces import CommittedRecord


class _Save(NamedTuple):
    layout: Layout
    place: int
    """Index of the arena."""


class _Reserve(NamedTuple):
    size: int
    place: int


class _Beat(NamedTuple):
    stage: str
    step: int


class _Due(NamedTuple):
    """A fault that the rank must strike itself."""

    fault: str
    step: int
    at: Mapping[str, Path]


class _Failed(NamedTuple):
    error: Exception
    cause: BaseException | None


class Writer:
    def __init__(self, order: WorkerOrder, leg: LegLayout, *, listen_fd: int | None = None) -> None:
        """Fork the writer, without this rank's listening socket. Call before this process has threads."""
        self._rank = order.rank
        self._arenas = arenas_of(order)
        self._places = deque(range(len(self._arenas)))
        """Indices of the arenas, the one to be written next first."""
        self._connection, theirs = Pipe()
        self.saving: int | None = None
        """The step of the save that is under way."""
        self._committed: list[CommittedRecord] = []
        self._asked = 0
        """Requests for memory that have not been answered yet."""
        rank_pid = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            if listen_fd is not None:
                os.close(listen_fd)
            _live(order, leg, theirs, self._arenas, rank_pid)
        theirs.close()

    def prepare(self, size: int) -> None:
        """Make the writer allocate memory for the next snapshot, of this size, while the training goes on."""
        self._tell(_Reserve(size, self._places[0]))
        self._asked += 1

    def reserve(self, taken: Taken) -> str:
        """Reserve memory for the snapshot in both processes; returns why that failed, or an empty string. No save may be under
        way."""
        problem = self._reserve(taken)
        if problem and len(self._places) > 1:
            # Reuse the memory that holds the copy of the newest checkpoint.
            self._places.popleft()
            problem = self._reserve(taken)
        return problem

    def _reserve(self, taken: Taken) -> str:
        size, problem = taken.layout.size, ""
        if self._asked or not self._arena.holds(size):
            self.prepare(size)
        while self._asked:
            problem, self._asked = self._hear(), self._asked - 1
            assert isinstance(problem, str), f"{problem} was not asked for"
        if not problem:
            self._arena.reserve(size)
            try:
                taken.prepare(self._arena)
            except RuntimeError as error:
                problem = str(error)
        return problem

    @property
    def _arena(self) -> Arena:
        """The arena that is written next."""
        return self._arenas[self._places[0]]

    def leave(self) -> None:
        """End the writer, which is not needed. No save may be under way."""
        self._tell(None)
        os.waitpid(self._pid, 0)

    def copy(self, taken: Taken) -> None:
        """Copy the state. No save may be under way, and memory must be reserved."""
        assert self.saving is None, f"step {self.saving} is being saved"
        taken.copy(self._arena)

    def save(self, taken: Taken, step: int) -> None:
        self.saving = step
        self._tell(_Save(taken.layout, self._places[0]))
        self._places.rotate(-1)
        if not self._arena.holds(taken.layout.size):
            self.prepare(taken.layout.size)

    def look(self, faults: FaultPoints) -> list[CommittedRecord]:
        """Checkpoints that were committed since the last call. Raises the error of a failed save."""
        while self.saving is not None and self._connection.poll():
            self._take(self._hear(), faults)
        committed, self._committed = self._committed, []
        return committed

    def wait(self, heart: Heart, faults: FaultPoints) -> None:
        """Wait until the save is over. The rank repeats the writer's heartbeat meanwhile, so that a hanging writer shows as a
        hanging rank."""
        while self.saving is not None:
            message = self._hear()
            if isinstance(message, _Beat):
                heart.beat(*message)
            self._take(message, faults)

    def _take(self, message: object, faults: FaultPoints) -> None:
        match message:
            case _Due():
                faults.fire_by_id(message.fault, message.step, **message.at)
                self._tell(message)
            case CommittedRecord():
                self.saving = None
                self._committed.append(message)
            case _Failed():
                raise message.error from message.cause
            case _:
                assert isinstance(message, _Beat), f"{message} was not asked for"

    def _tell(self, message: object) -> None:
        try:
            self._connection.send(message)
        except BrokenPipeError as error:
            raise self._gone() from error

    def _hear(self) -> object:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._gone() from error

    def _gone(self) -> ResourcesError:
        return ResourcesError(
            f"the process that saves rank {self._rank}'s checkpoints is gone",
            hint="what it printed last is in the rank's log; if it was killed for lack of memory, the kernel's log (dmesg) "
            "says so, and checkpoint: {mode: sync} needs no memory of its own",
        )


def _live(order: WorkerOrder, leg: LegLayout, connection: Connection, arenas: Sequence[Arena], rank_pid: int) -> NoReturn:
    code = 1
    try:
        die_with_parent(rank_pid)
        # SIGTERM is for the training, which waits for its last save.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        torch.set_num_threads(1)
        _serve(order, leg, connection, arenas, rank_pid)
        code = 0
    except BaseException:
        # The process's outermost function: errors can only go to the log.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(order: WorkerOrder, leg: LegLayout, connection: Connection, arenas: Sequence[Arena], rank_pid: int) -> None:
    def ask(fault: Fault, step: int, at: Mapping[str, object]) -> None:
        connection.send(_Due(fault.id, step, {name: value for name, value in at.items() if isinstance(value, Path)}))
        connection.recv()

    points = FaultPoints(order, leg, rank_pid=rank_pid, ask=ask)
    saver = Saver(order, leg, points, _Relayed(connection))
    peers = StorePeers(order)
    lay: dict[int, str] = {}
    # GPU tensors are saved as such, and loaded to the GPU again.
    torch.serialization.register_package(0, lambda storage: lay.get(storage.data_ptr()), lambda storage, location: None)
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if message is None:
            return
        if isinstance(message, _Reserve):
            connection.send(_reserve(arenas, message, order.memory_limit))
            continue
        assert isinstance(message, _Save)
        arena = arenas[message.place]
        try:
            found = read(arena, message.layout)
            lay.clear()
            lay.update(found.lay)
            copied = _Copied(found.state, order)
            peers.begin()
            copy = Sealed(copied.position.step, order.attempt, message.layout)
            saver.save(copied, peers, before_commit=partial(arena.seal, copy))
        except Exception as error:  # any error: raised again in the rank
            traceback.print_exc()
            connection.send(_sendable(error))
            return
        connection.send(copied.committed(saver))


def _reserve(arenas: Sequence[Arena], asked: _Reserve, limit: int | None) -> str:
    """Why that failed, or an empty string: the answer to the rank."""
    size, others = asked.size, sum(arena.size for place, arena in enumerate(arenas) if place != asked.place)
    if limit is not None and size + others > limit:
        return f"a copy takes {size >> 20} MiB, checkpoint.memory allows {(limit - others) >> 20} MiB"
    try:
        # A second copy is less important than other users of memory: it leaves as much free as it takes.
        arenas[asked.place].reserve(size, spare=max(SPARE_BYTES, size if others else 0))
    except (OSError, MemoryError) as error:
        return str(error)
    return ""


def _sendable(error: Exception) -> _Failed:
    if not isinstance(error, ChaosrunError) and type(error).__module__ != "builtins":
        # An error class of the script or a library may fail to unpickle in the rank: send its text.
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return _Failed(error, error.__cause__ if isinstance(error.__cause__, OSError) else None)


class _Relayed(Heart):
    """The writer's heartbeat, sent to the rank, which repeats it while waiting."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection

    def beat(self, stage: str, step: int) -> None:
        self._connection.send(_Beat(stage, step))


class _Copied:
    """The state of a rank at the time of its snapshot."""

    own_components = TrainingState.own_components

    def __init__(self, copied: Any, order: WorkerOrder) -> None:
        self._copied = copied
        self._order = order
        self.position: Position = copied["position"]
        self.job: Mapping[str, object] = copied["job"]

    def write(self, staging: Path) -> list[str]:
        """Write the copied state with the function that `Accelerator.save_state` calls at its end."""
        copied = self._copied
        PartialState._shared_state.update(copied["process"])
        restore_rng(copied["values"]["rng"], torch.device("cpu"))
        # accelerate requires these, and this process has none.
        torch.cuda.get_rng_state_all = lambda: copied["cuda_streams"]
        optimizers, schedulers = ([_Holder(state=state) for state in states] for states in copied["states"])
        save_accelerator_state(
            str(staging),
            copied["weights"],
            optimizers,
            schedulers,
            [_Holder(state=state, dataset=None, use_stateful_dataloader=state is not None) for state in copied["loaders"]],
            self._order.rank,
            copied["values"]["micro_step"],
            None if copied["scaler"] is None else _Holder(state=copied["scaler"]),  # pyright: ignore[reportArgumentType]
            save_on_each_node=copied["each_node"],
            safe_serialization=True,
        )
        for number, state in enumerate(copied["custom"]):
            save_custom_state(_Holder(state=state), str(staging), number, save_on_each_node=copied["each_node"])
        return [f"random_states_{self._order.rank}.pkl"]

    def payload(self) -> bytes:
        return payload_of(self._copied["values"], self._order.classes)

    def seen(self) -> tuple[Digests, list[str]]:
        """Raises MisuseError when the copy differs from the digests taken before it."""
        expected, whole = self._copied["digests"], self._copied["whole"]
        for component, values in self._copied["components"].items():
            found = digests(values if whole else spots(values))
            refuse_changes(component, expected[component], found, self._order.rank, self.position.step)
        parts = {} if whole else {name: digests(values) for name, values in self._copied["components"].items()}
        return {**expected, **parts}, self._copied["names"]

    def committed(self, saver: Saver) -> CommittedRecord:
        step = self.position.step
        if self._copied["whole"]:  # the rank has digested its state itself
            return CommittedRecord(step=step)
        saved = saver.store.audit(checkpoint_name(step), hashed=())
        return CommittedRecord(step=step, digests=state_of(saved, self._order.rank))


def differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names whose values differ."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def refuse_changes(component: str, before: Mapping[str, str], after: Mapping[str, str], rank: int, step: int) -> None:
    """Raise MisuseError when the copy differs from the digests taken before it."""
    if changed := differing(before, after):
        raise MisuseError(
            f"rank {rank}: {component} {changed[0]!r} changed while the state of step {step} was copied",
            hint="a state_dict() with a side effect, or a thread that keeps running, changes it: mend that, or use "
            "checkpoint: {mode: sync}",
        )


class _Holder(SimpleNamespace):
    """Stands for an object of the training: its state_dict is the copy."""

    def state_dict(self) -> object:
        return self.state
