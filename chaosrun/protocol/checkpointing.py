"""Saves and restores checkpoints from inside a training loop, all ranks together.

`protocol.saving` does a save: while the training waits (`checkpoint: {mode: sync}`), or from a copy, while it goes on (async).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from accelerate import Accelerator

from chaosrun.errors import (
    HookedStateError,
    MisuseError,
    OptimizerCastError,
    ParameterOrderError,
    RegisteredStateError,
    RestoreMismatchError,
)
from chaosrun.faults.points import FaultPoints
from chaosrun.protocol.background import Writer, differing, refuse_changes
from chaosrun.protocol.saving import Digests, GroupPeers, Saver, rank_file, state_of
from chaosrun.protocol.snapshot import Taken, copies_of, keeps_shared
from chaosrun.protocol.state import TrainingState, replaced
from chaosrun.records.heartbeat import Heart
from chaosrun.records.layout import LegLayout, checkpoint_name
from chaosrun.records.manifest import Manifest
from chaosrun.records.order import ASYNC_FROM_BYTES, WorkerOrder
from chaosrun.records.position import Position
from chaosrun.records.traces import CommittedRecord, Source
from chaosrun.wording import listed

SMALL = "the state is small"


class Checkpointer:
    """The checkpoints of one leg, for one rank of one attempt."""

    def __init__(
        self,
        accelerator: Accelerator,
        state: TrainingState,
        order: WorkerOrder,
        leg: LegLayout,
        faults: FaultPoints,
        heart: Heart | None = None,
        writer: Writer | None = None,
    ) -> None:
        """`writer`: saves asynchronously; None: the training waits for saves."""
        self._accelerator = accelerator
        self._state = state
        self._order = order
        self._faults = faults
        self._heart = heart or Heart()
        self._leg = leg
        self._saver = Saver(order, leg, faults, self._heart)
        self._store = self._saver.store
        self._peers = GroupPeers(accelerator)
        self._writer = writer
        self.newest_step: int | None = None
        """Step of the newest checkpoint that this attempt restored or saved."""
        self.digests: dict[str, dict[str, str]] | None = None
        """Digests of this rank's state after the latest save or restore; None where the writer digests the copy."""
        self.changed: dict[str, str] = {}
        """What the latest save changed of the live state: a hook of the script's, or a state_dict() with a side effect."""
        self.because = ""
        """Why the training waits for its saves although `async` was asked for; empty if it does not."""
        self.source: Source = "storage"
        """Where the restore read the state from."""

    def save(self, position: Position, job: dict[str, object]) -> str:
        """Save a checkpoint of this position. A collective: every rank calls it at the same step.

        When this returns, the checkpoint is committed; or, asynchronously, copied and being written: later changes of the state
        do not affect it, and no other checkpoint is saved before it is committed. Raises ResourcesError when the storage is
        full or cannot be written (also for an earlier save); older checkpoints stay as they are. Returns its name.
        """
        self.wait()
        self._heart.beat("checkpoint.write", position.step)
        self.newest_step, name = position.step, checkpoint_name(position.step)
        if self._writer is not None:
            because = self._copy(self._writer, position, job)
            if not because:
                return name
            if because != SMALL:
                self.because = because
                print(f"chaosrun: the training waits for its checkpoints: {because}", flush=True)
            self._writer.leave()
            self._writer = None
        content = _Live(self._accelerator, self._state, self._order.rank, position, job)
        self._saver.save(content, self._peers)
        self.digests, self.changed = content.digests, content.changed
        return name

    @property
    def pending(self) -> bool:
        """Whether the latest save is still under way."""
        return self._writer is not None and self._writer.saving is not None

    def prepare(self) -> None:
        """Allocate the memory for the copies before the first is taken: allocating takes longer than filling."""
        if self._writer is not None and not self._is_small():
            self._writer.prepare(self._state.size() * 17 // 16 if keeps_shared(self._order) else 0)

    def wait(self) -> None:
        """Wait until no save is under way. Raises the error of the save."""
        if self._writer is not None:
            self._writer.wait(self._heart, self._faults)

    def look(self) -> list[CommittedRecord]:
        """Strike the faults that are due in the writer, and return the checkpoints committed asynchronously since the last
        call. Raises the error of the save."""
        return self._writer.look(self._faults) if self._writer is not None else []

    def _copy(self, writer: Writer, position: Position, job: dict[str, object]) -> str:
        """Begin an asynchronous save of the present state; or return why the training has to wait for it, on all ranks."""
        problem = SMALL if self._is_small() else self._state.only_while_it_waits()
        taken, before, modes = None, {}, {"mode": self._state.modes()}
        # A GPU digests its tensors faster than it copies them. On a CPU the writer digests the copy, unless the digests are to
        # be compared at once.
        on_gpu = self._accelerator.device.type != "cpu"
        whole = on_gpu or bool(self._order.settle)
        if not problem:
            before = self._state.digests(whole=whole)
            facts = {
                "position": position,
                "job": job,
                "names": self._state.parameter_names(),
                "digests": before,
                "whole": whole,
            }
            parts = self._state.parts(shared=keeps_shared(self._order), digested=self._order.rank == 0)
            taken = Taken({**facts, **parts, **({"components": {}} if on_gpu else {})})
            problem = writer.reserve(taken)
        if because := next(filter(None, self._peers.gather(problem)), ""):
            return because
        assert taken is not None
        writer.copy(taken)
        if on_gpu:
            now = self._state.digests()
            for component in now.keys() - {"rng"}:
                refuse_changes(component, before[component], now[component], self._order.rank, position.step)
        writer.save(taken, position.step)
        self._accelerator.project_configuration.iteration += 1
        after = {"rng": self._state.rng(), "mode": self._state.modes()}
        self.digests = before if whole else None
        self.changed = _changes({"rng": before["rng"], **modes}, after)
        return ""

    def _is_small(self) -> bool:
        return self._order.mode == "auto" and self._state.size() < ASYNC_FROM_BYTES

    def position_of(self, name: str) -> Position:
        """The position at which a checkpoint was taken, from its manifest alone. Raises InvalidCheckpointError."""
        return Position(**self._store.audit(name, hashed=()).position.model_dump())

    def restore(self, name: str, job: dict[str, object]) -> Position:
        """Load a checkpoint into the prepared objects and prove that they hold the saved state.

        The supervisor has hashed every file; this rank validates the manifest and all sizes again before it touches the model,
        and hashes its own file if the checkpoint was modified since. Afterwards the digests of the live state are compared with
        those taken at the save. Raises InvalidCheckpointError, MisuseError (another job's checkpoint) or RestoreMismatchError
        naming the component and the tensor; as its subclasses, ParameterOrderError when the optimizers hold their parameters in
        another order (they are restored by number), and OptimizerCastError when torch casts the values it loads.
        """
        directory = self._leg.checkpoints / name
        rank = self._order.rank
        manifest = self._store.audit(name, hashed=[rank_file(rank)], vouched=self._order.audited)
        _check_same_job(name, manifest, self._order, job)
        if not self._order.inspect:
            _check_order(name, manifest.digests.get("order"), self._state.parameter_names(), rank)
        expected = state_of(manifest, rank)
        live = self._from_memory(manifest, expected)
        if live is None:
            self._state.load(directory, directory / rank_file(rank))
            live = self._state.digests()
        # A replay for `chaosrun diagnose` trains on from a wrong restore, to show its effect.
        for component, values in expected.items() if not self._order.inspect else ():
            hooks = self._state.hooks_of(component)
            if component == "optimizer" and not hooks:
                self._refuse_cast(directory, values, live[component])
            own = self._state.own_loading() if component == "optimizer" else {}
            _compare(component, values, live[component], name, rank, hooks, own)
        self.newest_step, self.digests = manifest.step, live
        return Position(**manifest.position.model_dump())

    def _refuse_cast(self, directory: Path, expected: dict[str, str], live: dict[str, str]) -> None:
        """Raise OptimizerCastError where torch's cast is the only difference."""
        names = sorted(differing(expected, live))
        cast = self._state.cast_on_load(directory, names) if names else None
        if cast is not None:
            saved, now = cast
            raise OptimizerCastError(
                f"rank {self._order.rank}: optimizer is not what checkpoint {directory.name} holds: {names[0]!r} was "
                f"{saved} when saved and is {now}, its parameter's type, after the restore: torch's Optimizer.load_state_dict "
                "casts it",
                hint="keep that state in the parameters' type, or give the optimizer a load_state_dict that restores its type",
            )

    def _from_memory(self, manifest: Manifest, expected: Digests) -> dict[str, dict[str, str]] | None:
        """Load the copies of this checkpoint in the nodes' memory, and return their digests; None on every rank if any rank has
        no copy, or one of another checkpoint."""
        if not self._order.from_memory:
            return None
        copies = copies_of(self._order, manifest, self._accelerator.device)
        if not all(self._peers.gather(copies is not None)):
            return None
        assert copies is not None
        self._state.load_copied(*copies)
        live = self._state.digests()
        if not all(self._peers.gather(all(live[component] == values for component, values in expected.items()))):
            print("chaosrun: a copy of the checkpoint in memory is not what was saved: the files are read", flush=True)
            return None
        self.source = "memory"
        return live


class _Live:
    """The live state of this rank, saved while the training waits."""

    def __init__(
        self, accelerator: Accelerator, state: TrainingState, rank: int, position: Position, job: Mapping[str, object]
    ) -> None:
        self._accelerator, self._state, self._rank = accelerator, state, rank
        self.position, self.job, self.own_components = position, job, state.own_components
        self._whole = bool(state.hooks())
        """Whether the whole state is digested to find what the save changes; else only `spots` of it."""
        self._before = {**state.digests(whole=self._whole), "mode": state.modes()}
        self.digests: dict[str, dict[str, str]] | None = None
        self.changed: dict[str, str] = {}

    def write(self, staging: Path) -> list[str]:
        # Rank 0 alone writes the files of a stateful dataloader and the gradient scaler. accelerate makes every rank write the
        # same file and the last one wins (hazards D18, O7), so a hash might be taken while another rank still writes.
        written_by_rank_zero = {"_dataloaders": [], "scaler": None}
        with replaced(self._accelerator, written_by_rank_zero if self._rank else {}):
            self._state.save(staging)
        return self._state.own_files(staging, self._rank)

    def payload(self) -> bytes:
        return self._state.rank_payload()

    def seen(self) -> tuple[Digests, list[str]]:
        self.digests = self._state.digests()
        after = self.digests if self._whole else self._state.digests(whole=False)
        self.changed = _changes(self._before, {**after, "mode": self._state.modes()})
        return self.digests, self._state.parameter_names()


def _check_same_job(name: str, manifest: Manifest, order: WorkerOrder, job: dict[str, object]) -> None:
    """Refuse a checkpoint from which the training would continue differently (hazards D14, G4, C4)."""
    saved = {**manifest.digests["job"], "world size": manifest.world_size, "spec": manifest.job_fingerprint}
    now = {**job, "world size": order.world_size, "spec": order.job_fingerprint}
    if changed := [f"{key}: {saved.get(key)} then, {now.get(key)} now" for key in sorted(differing(saved, now))]:
        raise MisuseError(
            f"checkpoint {name} belongs to another configuration of this job ({'; '.join(changed)})", hint="start a new run"
        )


def _check_order(name: str, saved: list[str] | None, now: list[str], rank: int) -> None:
    if saved is None or saved == now or sorted(saved) != sorted(now):
        return
    index = next(number for number, pair in enumerate(zip(saved, now, strict=True)) if pair[0] != pair[1])
    raise ParameterOrderError(
        f"rank {rank}: the optimizer's parameter {index} is {now[index]}, in checkpoint {name} it is {saved[index]}"
    )


def _changes(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> dict[str, str]:
    """For each component that changed: its first changed value, and how many more."""
    found = {component: differing(values, after[component]) for component, values in before.items()}
    return {component: listed(names, 1) for component, names in found.items() if names}


def _compare(
    component: str,
    expected: dict[str, str],
    live: dict[str, str],
    name: str,
    rank: int,
    hooks: Sequence[str],
    own: Mapping[str, str],
) -> None:
    """`own`: classes of the optimizers whose load_state_dict is the script's, by number."""
    if expected == live:
        return
    names = sorted(differing(expected, live))
    # A saved value that is missing says more than the empty container in its place.
    first = next((key for key in names if key in expected), names[0])
    kind = RegisteredStateError if component == "registered" else HookedStateError if hooks else RestoreMismatchError
    beside = f"; the script's hooks on saving and loading: {', '.join(hooks)}" if kind is HookedStateError else ""
    if kind is RestoreMismatchError and (optimizer := own.get(first.partition("/")[0])):
        kind, beside = RegisteredStateError, f"; {optimizer} loads by a load_state_dict of its own"
    raise kind(
        f"rank {rank}: {component} is not what checkpoint {name} holds: {first!r} "
        f"was {expected.get(first, 'absent')} when saved and is {live.get(first, 'absent')} after the restore{beside}",
        hint="something between the save and the first batch changed it, or it was never restored",
    )
