"""An unmodified training script, in one rank of one attempt: hooks in torch detect its steps, which are counted and recorded
and at which faults strike; the attempt is aligned with the reference by its initial state.

The counterpart of `session`. Saves and restores nothing: the script does.

A step is a call of an optimizer after a backward pass. Optimizers that are called one after the other, without a backward pass
in between, make one step together; a call without one is no step, nor is a restart's first with a learning rate of 0, before it
loads its checkpoint: both only make state to load into. A step is over when it is recorded; faults "after" it strike at the
script's next forward pass, or at its end: all that it does in between, such as a save, belongs to the step.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from chaosrun.errors import MisuseError, UserScriptError
from chaosrun.faults.save_points import SavePoints
from chaosrun.observe import hooks
from chaosrun.observe.contents import batch_tensors, input_digest, tensors_in
from chaosrun.observe.early_pass import EarlyPass, Pass, scalar
from chaosrun.observe.found_state import FoundState, free_dropped_optimizers, names_of_optimizers, rates_of, stepped_digest
from chaosrun.observe.hooks import parameters_of
from chaosrun.observe.ledger import BatchLedger
from chaosrun.observe.modes import outside_modes
from chaosrun.observe.resumed_at import Due
from chaosrun.observe.saves import SaveWatch
from chaosrun.protocol.bucket_priming import BucketPrimer
from chaosrun.protocol.context import WorkerContext
from chaosrun.protocol.determinism import seeds
from chaosrun.protocol.earlier_traces import EarlierTraces
from chaosrun.protocol.steps import Steps, refuse_captured, why_added, why_no_step
from chaosrun.records.codec import changed
from chaosrun.records.position import Position
from chaosrun.records.traces import SavedRecord, SaveRecord
from chaosrun.wording import count


class ScriptTraining:
    """Receives the events of one rank's training from `observe.hooks`."""

    def __init__(self, context: WorkerContext) -> None:
        self._context, self._order = context, context.order
        self._earlier = EarlierTraces(context.order, context.leg)
        self._faults, self._heart = context.faults, context.heart
        self._ledger = BatchLedger()
        self._state: FoundState | None = None
        self._steps: Steps | None = None
        self.thread: threading.Thread | None = None
        """The thread that trains."""
        self._started_s = time.time()
        self._began_with: str | None = None
        """`stepped_digest` when a restarted attempt began; None once it has made a step."""
        self._builds = False
        """Since the attempt began there was no step, and no pass with a loader's batch: it may be building its models yet."""
        self._passes = 0  # forward ones, since the attempt began
        self._due: Due | None = None  # what its first one is to take
        self.position = Position()
        self._batches = 0
        """Micro-batches of this pass over the loader."""
        self._busy = False
        """chaosrun itself is running code that the hooks see: they ignore it."""
        self._backwards = 0
        """Backward passes since the last step."""
        self._dropped: set[int] = set()  # parameters, by id, whose gradients were dropped since the last backward pass
        self._goes_backward = False
        """A backward pass has been seen; without one, the script computes gradients in other ways."""
        self._calls = 0
        """Nested calls of optimizers' `step` that are running."""
        self._stepped: list[int] = []
        """Optimizers of the step that is being made, by id."""
        self._together: dict[int, int] = {}
        """By the first optimizer of a step, by id: how many make the step, once a whole one has been seen."""
        self._looked_beside = -1
        """The step at whose save the script's modules were last looked up."""
        self._unmoving: str | None = None
        """`stepped_digest` after a restart's first step, if its learning rate is 0: a checkpoint may be loaded only now."""
        self._recorded, self._incomplete = True, False
        self._evaluated: Pass | None = None  # the last in evaluation mode since the last step: some scripts train in it
        self._early: EarlyPass | None = None  # the last before the first optimizer
        self._may_add = False  # this step's first optimizer was built after its pass: more may be, within the step (Pyro's)
        self._first: Pass | None = None
        """The last one of a restarted attempt before its first step: it may load or build an optimizer only after that."""
        self._primer = BucketPrimer([], saves_itself=True, primes=self._order.prime_buckets)
        self._saves = SavePoints(self._faults, self._order, context.leg)
        self._watch = SaveWatch(self._order.outputs, self._step_of_save, self._saves.begin, self._see_save)
        self._watch.install()
        seeds.begin()
        hooks.install(self)

    @property
    def begun(self) -> bool:
        """Whether the training has reached its first step."""
        return self._steps is not None

    @property
    def finished(self) -> bool:
        return self._steps is not None and self._steps.ended

    # Events from the hooks

    def forward(self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, object]) -> None:
        if self._busy:
            return
        with self._ignoring_events():
            call = Pass(module, [inputs, named])
            if (tensors := [*tensors_in(call.arguments)]) and all(tensor.grad_fn for tensor in tensors):
                return  # it continues from another module's output
            if not module.training:
                # An evaluation, unless a backward pass follows.
                self._ledger.passed_by()
                self._evaluated, self._early = call, None
                return
            self._go_on()
            if self._steps is None and call.comes_early:
                self._early = EarlyPass(call)
                return
            self._take(self._begun_by(call), call)
            self._first = None if self._began_with is None else call

    def backward(self, roots: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
        if self._busy or (self._steps is None and not hooks.optimizers()):
            if self._early and not self._busy:
                self._early.note_backward(roots)
            return run()
        with self._ignoring_events():
            self._go_on()
            if self._early and not self._early.losses:
                self._take_early(self._early)
            seen = self._evaluated or (self._first if self._has_loaded() else None)
            steps = self._begun_by(seen)
            if seen and not steps.observer.has_batch:
                self._take(steps, seen)
            steps.open_window()
            steps.observer.losses([scalar(root) for root in roots[:1]])
            if self._primer.synchronises and not self._backwards:
                steps.before_synchronised_backward()
        self._goes_backward = True
        self._backwards += 1
        self._dropped.clear()
        if not self._primer.is_due:
            return run()
        with self._ignoring_events(contextlib.nullcontext()):
            self._primer.prime(lambda _loss: run(), roots[0])

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> None:
        refuse_captured()
        if not self._calls and not self._busy and not closure and self._may_lack_backward() and hooks.has_gradients(optimizer):
            with self._ignoring_events():
                self._take_own_gradients()
        if not self._calls and self._steps and not self._busy:
            assert self._state
            with self._ignoring_events():
                self._state.keep(optimizer, () if self._recorded else self._stepped)
                if self._backwards or not (self._recorded or id(optimizer) in self._stepped):
                    self._steps.before_optimizer_step(parameters_of(optimizer))
                else:
                    self._go_on()  # its backward passes are made in a closure
        self._calls += 1

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._calls -= 1
        if self._calls or self._steps is None or self._busy:
            return
        assert self._state
        with self._ignoring_events():
            self._state.keep(optimizer)
            if added := self._state.added(optimizer):
                raise MisuseError(
                    f"{type(optimizer).__name__} steps {count(len(added), 'parameter')} at step {self.position.step + 1} that "
                    "no trained model held at the first step",
                    hint=why_added(self._order.attempt > 1),
                )
            if self._backwards:
                if not self._steps.observer.has_met_an_optimizer:
                    self._steps.before_optimizer_step(parameters_of(optimizer))  # its backward passes were made in a closure
                unmoving = self._began_with is not None and not any(rates_of(self._state.optimizers()))
                self._finish_step([id(optimizer)])
                self._unmoving = stepped_digest() if unmoving else None
            elif not self._recorded:
                self._stepped.append(id(optimizer))
            if not self._recorded and self._unmoving is None and self._is_whole():
                self._record()

    def step_was_skipped(self) -> None:
        if self._backwards and self._steps and not self._busy:
            with self._ignoring_events():
                self._finish_step([])
                self._record()

    def gradients_dropped(self, parameters: Iterable[torch.Tensor]) -> None:
        if not (self._backwards and self._steps and self._state) or self._calls:
            return
        self._dropped.update(map(id, parameters))
        # One optimizer of several: the others' gradients are still to come.
        if all(id(each) in self._dropped for optimizer in self._state.optimizers() for each in parameters_of(optimizer)):
            self._backwards = 0
            self._steps.observer.drop_window()

    def wrapper_made(self, model: DistributedDataParallel) -> None:
        self._primer.expect(model)

    def _take(self, steps: Steps, call: Pass) -> None:
        """Record its inputs as a micro-batch of the current step."""
        self._evaluated = None
        steps.open_window()
        self._heart.beat("forward", self.position.step + 1)
        passes = self._ledger.passes
        ids = self._ledger.taken(tensor for tensor in batch_tensors(call.arguments) if tensor.grad_fn is None)
        fetched = self._ledger.fetched(skipping=self._order.attempt > 1)
        self._builds = self._builds and ids is None and fetched is None
        self._passes += 1
        self._batches = self._batches + 1 if self._ledger.passes == passes else 1
        steps.observer.batch(call.arguments, ids, fetched if ids is None else None)

    def _may_lack_backward(self) -> bool:
        """Whether the present gradients may come from no backward pass: there was none yet, or none since a batch was taken for
        the next step."""
        taken = self._recorded and self._steps is not None and self._steps.observer.has_batch
        return not self._goes_backward or (taken and not self._backwards)

    def _take_own_gradients(self) -> None:
        """Record gradients about to be applied that no backward pass made (torch.autograd.grad, torch.func, other ranks')."""
        if self._recorded:
            self._go_on()
            if self._early and self._early.losses:
                self._take_early(self._early)
            self._begun_by(None).open_window()
            self._backwards = 1

    def _take_early(self, early: EarlyPass) -> None:
        """Begin with this pass: the first step's."""
        with early.with_its_rng():
            steps = self._begun_by(early.call)
            self._take(steps, early.call)
        self._may_add = True
        steps.observer.losses([scalar(root) for root in early.losses])

    @contextlib.contextmanager
    def _ignoring_events(self, within: contextlib.AbstractContextManager[None] | None = None) -> Iterator[None]:
        """`within`: where the script itself runs, too, so that its modes must see it."""
        self._busy = True
        try:
            with within or outside_modes():
                yield
        finally:
            self._busy = False

    def _begun_by(self, call: Pass | None) -> Steps:
        """The steps of this training, begun now if they were not. The attempt begins again with this pass if, after an earlier
        one, the script loaded its checkpoint or built or replaced an optimizer, or if the earlier passes were not yet training
        (they built or measured something)."""
        begins_again = self._has_loaded() or (call and (self._has_rebuilt() or self._has_measured(call)))
        if self._steps and not begins_again:
            return self._steps
        steps = self._begin(call)
        self._began_with = stepped_digest() if self._order.attempt > 1 else None
        return steps

    def _has_loaded(self) -> bool:
        """Whether the script has changed weights or optimizer since the attempt began, before its first step."""
        return self._began_with is not None and not self._calls and self._began_with != stepped_digest()

    def _has_rebuilt(self) -> bool:
        """Whether, before the first step, the optimizers have other parameters than when the attempt began."""
        return self._builds and not self._calls and self._state is not None and self._state.is_outdated()

    def _has_measured(self, call: Pass) -> bool:
        """Whether these inputs are the expected first ones of a restarted attempt, while the passes before them, none with a
        backward pass, took other inputs, or the step has none of these after as many: passes that the script makes at each
        start."""
        if self._began_with is None or self._due is None or self._backwards or self._calls or not self._passes:
            return False
        due, now = self._due, input_digest(call.arguments)
        return now == due.batches[0] and not (due.taken and now in due.batches[self._passes : self._passes + 1])

    def _begin(self, call: Pass | None, *, at_end: bool = False) -> Steps:
        """Find this attempt's position, and write the `start` record."""
        if not at_end:
            hooks.release_kept()
            free_dropped_optimizers(call and call.module)
        state = FoundState(call and call.module, self._earlier.first_start())
        steps = Steps(state, self._context, state.device)
        data = None if call is None else input_digest(call.arguments)
        began, place = self._earlier.begin(state, steps.observer, data, at_end=at_end)
        found = place.found if place else None
        if self._steps and not self._has_rebuilt() and not (found and found.weights):
            return self._steps  # these weights are of no checkpoint
        if self._order.attempt == 1 and (place is None or place.step == 0 or not place.found.weights):
            # The initial state, or a job that is not reproducible: its state identifies no step. Differences from the
            # reference then show in the steps.
            place, found = None, None
        self.position = Position(step=place.step if place else 0)
        steps.start(
            self.position,
            began,
            entered_s=self._started_s,
            found=found,
            buffers=state.buffers() if found else {},
            optimizers=state.optimizer_digests() if found else {},
            scheduled=self._order.attempt == 1 and state.scheduled(),
            in_part=state.in_part,
            again=self._steps is not None,
            seeded=seeds.seeded,
            seeded_again=seeds.seeded_again(),
        )
        self._state, self._steps, self.thread, self._backwards = state, steps, threading.current_thread(), 0
        self._early, self._builds, self._passes, self._due = None, True, 0, place.due if place else None
        if place:
            # Use what the reference run had learnt by then: a step must be recorded at the same moment.
            names = names_of_optimizers(state.optimizers()).items()
            self._together = {each: place.together[name] for each, name in names if name in place.together}
        return steps

    def _finish_step(self, stepped: list[int]) -> None:
        self._backwards, self._recorded, self._stepped, self._began_with, self._first = 0, False, stepped, None, None
        self._builds, epoch = False, max(0, self._ledger.passes - 1)
        self.position = Position(epoch=epoch, batches=self._batches, step=self.position.step + 1)

    def _is_whole(self) -> bool:
        """Whether all optimizers that make this step have been called."""
        if self._may_add:
            # As many as in an earlier record of this step. Step 1, of which there may be none, ends with the next event.
            return self._due is not None and self.position.step > 1 and len(self._stepped) >= self._due.stepped
        return len(self._stepped) >= self._together.get(self._stepped[0], len(hooks.optimizers()))

    def _record(self) -> None:
        assert self._steps
        self._recorded, self._incomplete, self._may_add = True, True, False
        self._steps.record(self.position, self._primer, stepped=self._stepped)

    def _go_on(self) -> None:
        """Go to the next step, unless this is inside an optimizer's closure. Ends the script after the job's last."""
        if not self._calls:
            self._complete()
            if self._order.max_steps is not None and self.position.step >= self._order.max_steps:
                raise SystemExit(0)

    def _step_of_save(self) -> int | None:
        """The step to which a save that begins now belongs; None before the attempt's step is known."""
        ours = self._busy and threading.current_thread() is self.thread
        return self.position.step if self._steps and not ours else None

    def _see_save(self, save: SaveRecord) -> None:
        assert self._steps is not None and self._state is not None
        if threading.current_thread() is not self.thread:
            save = changed(save, aside=True)
        if save.held:
            live = self._state
            with contextlib.suppress(TypeError), outside_modes():  # a tensor that has no memory itself
                save = changed(save, trained=live.trained_in(save.held))
                if save.how == "pickle" and not save.trained:
                    save = changed(save, held={})  # of any kind: losses, samples
                elif save.step != self._looked_beside:
                    self._looked_beside = save.step
                    held, optimizers = {**save.held, **live.digests_of_others()}, live.optimizer_digests()
                    save = changed(save, held=held, buffers=live.buffers(), optimizers=optimizers)
        self._steps.save(save)

    def _complete(self) -> None:
        """The script is done with the last step."""
        if self._unmoving not in (None, stepped_digest()):
            self._take_back()
        self._unmoving = None
        if self._state and self._steps and self._watch.look(self._state.is_held_in):
            self._steps.observer.write(SavedRecord(step=self.position.step, time_s=time.time()))
        if not self._recorded:
            self._together[self._stepped[0]] = len(self._stepped)
            self._record()
        if self._incomplete:
            self._incomplete = False
            self._faults.pace.step_done()
            self._saves.step_done(self.position.step)
            self._faults.reach("step", self.position.step)

    def _take_back(self) -> None:
        """Forget a step that was followed by loading a checkpoint: the attempt begins again, see `_has_loaded`."""
        assert self._steps
        self._steps.observer.drop_window()
        self.position, self._stepped, self._recorded, self._began_with = Position(), [], True, ""

    def finish(self, *, waiting: bool = True) -> None:
        """Handle the script's normal end, `waiting` for its threads unless it trained in one: Ray's stay with the process.
        Raises UserScriptError when it trained nothing."""
        if waiting and threading.current_thread() is threading.main_thread():
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # with a save under way perhaps
        with self._ignoring_events():
            self._complete()
            self._saves.end()
            steps = self._steps
            if steps is None and (self._order.attempt == 1 or not hooks.optimizers()):
                hint = why_no_step(self._context, self._earlier.has_trained())
                raise UserScriptError("the script ended without a step of any optimizer", hint=hint)
            if steps is None or self._has_loaded():
                steps = self._begin(None, at_end=True)
            steps.end(self.position)
