"""Writes the trace of one rank of one attempt, a record for every step. Changes nothing.

The protocol calls it as the script passes certain points; `records.traces` defines the records.
"""

import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash

from chaosrun.observe.contents import input_digest
from chaosrun.observe.environment import canary, record_changes, record_environment
from chaosrun.observe.fingerprint import NONE_DIGEST, combined, fingerprint, part_of, tensor_digests
from chaosrun.observe.found_state import names_of_optimizers, rates_of
from chaosrun.observe.module_settings import ModuleSettings
from chaosrun.observe.own import OwnState
from chaosrun.observe.probe import probe
from chaosrun.observe.resumed_at import RankStart
from chaosrun.observe.rng import digest_rng
from chaosrun.observe.script_values import ScriptValues
from chaosrun.observe.sources import record_sources
from chaosrun.records.layout import LegLayout, checkpoint_name
from chaosrun.records.order import WorkerOrder
from chaosrun.records.position import Position
from chaosrun.records.trace_writer import TraceWriter
from chaosrun.records.traces import (
    NO_INPUTS,
    TRACE_VERSION,
    CheckpointRecord,
    EndRecord,
    HoldingsRecord,
    Line,
    SaveRecord,
    StartRecord,
    StateRecord,
    StepRecord,
)

if TYPE_CHECKING:
    from chaosrun.observe.found_state import FoundState
    from chaosrun.observe.state import ObservedState
    from chaosrun.observe.unsaved import Outside

    State = FoundState | ObservedState

FEW_TENSORS = 8
"""For so few tensors, a digest of each takes no more room than the rest of a step's record."""


class Observer:
    """Observes any training that proceeds in steps."""

    def __init__(self, state: "State", order: WorkerOrder, leg: LegLayout, device: torch.device) -> None:
        self._state = state
        self._order = order
        self._leg = leg
        self._device = device
        self._trace = TraceWriter(leg.attempt(order.attempt).trace(order.rank))
        self._inspector = None
        if order.inspect:
            # Imported for a replay only.
            from chaosrun.observe.inspection import Inspector

            self._inspector = Inspector(state, order, leg, device)
        self._facts: Mapping[str, object] = {}
        """What rank 0 recorded of its environment."""
        self._outside: Outside | None = None
        self._modules: ModuleSettings | None = None
        itself = weakref.ref(self)  # where an attempt begins again, its models and optimizers are freed at once
        self._values = ScriptValues(lambda: [itself(), *state.compared()])
        self._named: list[tuple[str, torch.nn.Parameter]] = []
        self.parameters: list[torch.nn.Parameter] = []
        self._weights = ""
        """Digest of the parameters after the last step, or at the start."""
        self._restarts_here = True
        """Whether an attempt goes on, or a later one might, with the next step. A difference would begin there, so its record
        holds a digest of each tensor. Other records only show that something differs, and `chaosrun diagnose` shows what."""
        self._knows_sources = False
        self._saved_here = False
        """A checkpoint was taken after the last step, which itself changed nothing."""
        self._clear_window()

    def beginning(self) -> RankStart:
        """The state with which the attempt begins, before its first step."""
        self._named = self._state.parameters()
        self.parameters = [parameter for _, parameter in self._named]
        weights = fingerprint(self.parameters)
        return RankStart(
            weights=weights.value,
            params=weights.each,
            optimizer=self._state.optimizer_digest(),
            rates=_hex_of(rates_of(self._state.optimizers())),
            rng=self._rng(),
        )

    def begin(self, position: Position, at_start: RankStart, *, again: bool = False, **about: Any) -> None:
        """Write the `start` record. `again`: an earlier one, written too soon, is removed; `about`: its fields that other
        modules know."""
        if again:
            self._trace.empty()
        if self._order.rank == 0:
            # Here, as the script has chosen its device: reading the GPU's name earlier would initialise CUDA.
            self._facts = record_environment(self._leg.environment)
        self._modules = ModuleSettings(self._state.modules())
        fault_free = self._order.leg != "chaos" and self._order.attempt == 1
        if fault_free and self._order.rank == 0 and self._order.by == "chaosrun":
            # Done in the reference leg, so that no restart waits for it.
            from chaosrun.observe.unsaved import Outside

            self._outside = Outside(cast("ObservedState", self._state))
        self._trace.write(
            StartRecord(
                v=TRACE_VERSION,
                attempt=self._order.attempt,
                rank=self._order.rank,
                world_size=self._order.world_size,
                pid=os.getpid(),
                time_s=time.time(),
                position=position,
                restored=self._order.resume,
                rng=at_start.rng or "",
                canary=canary(self._device),
                param=at_start.weights,
                params=at_start.params,
                tensors=tuple(name + part_of(parameter) for name, parameter in self._named),
                sharded=any(part_of(parameter) for _, parameter in self._named),
                parts=True,
                state=at_start.optimizer,
                rates=at_start.rates or (),
                **about,
            )
        )
        self._weights = at_start.weights
        if self._inspector:
            self._inspector.begin(position, self._named)

    def probe(self, loader: Any) -> None:
        """Test whether the loader yields the same samples again after a restart. Once per leg, so that no recovery waits for
        it."""
        if self._order.probe and self._order.rank == 0 and self._order.attempt == 1:
            self._trace.write(probe(loader))

    def write(self, record: Line) -> None:
        """Write a record that another module has made."""
        self._trace.write(record)
        self._restarts_here |= isinstance(record, SaveRecord)

    @property
    def is_between_steps(self) -> bool:
        """Whether no batch of the next step has been seen yet."""
        return not self._rng_before

    @property
    def has_batch(self) -> bool:
        """Whether a batch of the next step has been seen."""
        return bool(self._digests)

    def holdings(self, step: int, *, settings: bool = True, saved: bool = False, within: bool = False) -> None:
        """Record the script's non-tensor state as this step begins. `settings`: with those of its modules; `saved`: a rank has
        saved, perhaps another; `within`: the step goes on after a save, with these random streams."""
        values = self._values.changed() if self._restarts_here or saved else {}
        modules = self._modules.changed() if self._modules and settings else {}
        streams = self._rng() if within else ""
        if modules or values or streams:
            self._trace.write(HoldingsRecord(step=step, modules=modules, values=values, streams=streams))

    def open_window(self) -> None:
        """Note the first batch of a step."""
        self._rng_before = self._rng()
        if self._order.by == "script" or self._saved_here:
            before = fingerprint(self.parameters).value
            self._began = "" if before == self._weights else before

    def batch(self, batch: Any, ids: list[Any] | None, fetched: list[Any] | None = None) -> None:
        """Record a micro-batch that the script was given. `fetched`: see `StepRecord`."""
        self._ids.append(ids)
        self._fetched.append(fetched)
        self._digests.append(input_digest(batch))
        if self._inspector:
            self._inspector.batch(batch, ids)

    def drop_window(self) -> None:
        """Discard the backward passes since the last step, as no step follows from them; the next step still begins there."""
        kept = self._rng_before, self._began
        done = self._went_back
        forward = self._ids[done:], self._fetched[done:], self._digests[done:]
        self._clear_window()
        self._rng_before, self._began = kept
        self._ids, self._fetched, self._digests = forward

    def losses(self, losses: Sequence[torch.Tensor]) -> None:
        """Record losses of the micro-batches done since the last call, one scalar each."""
        self._losses.extend(loss.detach() for loss in losses)
        self._went_back = len(self._digests)
        if self._inspector:
            self._inspector.losses(losses)

    @property
    def has_met_an_optimizer(self) -> bool:
        return bool(self._rates)

    def before_optimizer_step(self, stepped: Iterable[torch.Tensor] | None = None) -> None:
        """Record gradients about to be applied: of all parameters, or only of `stepped`, even if others have any."""
        own = None if stepped is None else set(map(id, stepped))
        applied = tensor_digests([p.grad if own is None or id(p) in own else None for p in self.parameters])
        others = self._gradients or applied
        self._gradients = [other if one == NONE_DIGEST else one for one, other in zip(applied, others, strict=True)]
        self._settings, self._rates = self._state.optimizer_settings(), rates_of(self._state.optimizers())
        groups = [group for optimizer in self._state.optimizers() for group in optimizer.param_groups]
        for number, group in enumerate(groups):
            if own is None or not own.isdisjoint(map(id, group["params"])):
                self._applied[id(group)] = self._rates[number]
            # Of an optimizer that has stepped, which may have changed it since: the rate with which it did.
            self._rates[number] = self._applied.get(id(group), self._rates[number])
        if self._inspector:
            self._inspector.before_optimizer_step(self._rates)

    def step(self, position: Position, *, items: int | None, stepped: Iterable[int] = ()) -> None:
        """Record a complete optimizer step. `items`: the items of its window over all ranks; None: the loop does not count
        them. `stepped`: the optimizers that made it, by id."""
        names = names_of_optimizers(self._state.optimizers())
        parameters = fingerprint(self.parameters)
        gradients = combined(self._gradients) if self._gradients else None
        worded = self._restarts_here or len(self.parameters) <= FEW_TENSORS
        losses = [loss.to(self._device, torch.float64).reshape(()) for loss in self._losses]
        self._trace.write(
            StepRecord(
                step=position.step,
                epoch=position.epoch,
                batches=position.batches,
                time_s=time.time(),
                ids=None if None in self._ids or not self._ids else tuple(tuple(ids or ()) for ids in self._ids),
                batch=tuple(self._digests) or (NO_INPUTS,),
                rng=self._rng_before,
                # One transfer from the device for all of them.
                loss=_hex_of(torch.stack(losses).tolist() if losses else ()),
                lr=_hex_of(self._rates),
                grad=gradients.value if gradients else "",
                grads=gradients.each if gradients and worded else b"",
                param=parameters.value,
                params=parameters.each if worded else b"",
                items=items,
                state=self._state.optimizer_digest(),
                settings=self._settings,
                began=self._began,
                fetched=tuple(None if ids is None else tuple(ids) for ids in self._fetched) if any(self._fetched) else None,
                stepped=tuple(names[each] for each in stepped if each in names),
            )
        )
        self._weights, self._restarts_here, self._saved_here = parameters.value, False, False
        if self._order.rank == 0 and not self._knows_sources:
            # After a step, so that no recovery waits for it, and as nearly all is imported by now.
            record_sources(self._leg.inputs, Path(self._order.script))
            self._knows_sources = True
        if self._inspector:
            self._inspector.step()
        self._clear_window()

    def checkpoint(self, step: int, own: OwnState, *, changed: Mapping[str, str], **about: Any) -> CheckpointRecord:
        """Record a saved checkpoint. `changed`: the live state that the save itself changed; `about`: fields of the record that
        others know. Returns the record."""
        about |= {"changed": changed, "hooks": tuple(self._state.hooks()) if changed else ()}
        about |= {"name": checkpoint_name(step), "own": own.digest, "unseen": own.unseen}
        record = CheckpointRecord(step=step, time_s=time.time(), **about)
        self._trace.write(record)
        self._restarts_here, self._saved_here = True, not changed
        return record

    def state(self, step: int, own: OwnState) -> StateRecord:
        """Write digests of the complete state at a step without a checkpoint. Returns the record."""
        about = {"digests": self._state.digests(), "own": own.digest, "unseen": own.unseen}
        record = StateRecord(step=step, time_s=time.time(), **about)
        self._trace.write(record)
        return record

    def left(self) -> None:
        """Note that the script leaves its loop, whose variables are still readable."""
        if self._outside:
            self._outside.left()

    def end(self, position: Position, *, checkpoint: str | None) -> None:
        """Write digests of everything, as the training is complete."""
        if self._inspector:
            self._inspector.end()
        if self._order.rank == 0:
            record_changes(self._leg.environment, self._facts)
        # Read exactly once, as on every other rank.
        components = self._state.components()
        self._trace.write(
            EndRecord(
                step=position.step,
                position=position,
                time_s=time.time(),
                digests=self._state.digests(of=components),
                checkpoint=checkpoint,
                outside=tuple(self._outside.found(components)) if self._outside else (),
                optimizers=self._state.optimizer_digests(),
            )
        )

    def _clear_window(self) -> None:
        self._ids: list[list[Any] | None] = []
        self._fetched: list[list[Any] | None] = []
        self._digests: list[str] = []
        self._went_back = 0
        """How many of the batches have had their backward pass."""
        self._losses: list[torch.Tensor] = []
        self._rng_before = self._began = self._settings = ""
        # Both stay empty for a step that a gradient scaler skipped.
        self._gradients: list[int] = []
        self._rates, self._applied = list[float](), dict[int, float]()

    def _rng(self) -> str:
        return xxhash.xxh3_64_hexdigest("".join(digest_rng(self._device).values()).encode())


def _hex_of(rates: Sequence[float]) -> tuple[str, ...]:
    return tuple(rate.hex() for rate in rates)
