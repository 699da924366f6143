"""The interface that a training script sees, outside chaosrun: what it yields, and what it refuses with a remedy."""

from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

import chaosrun
from chaosrun.errors import MisuseError
from chaosrun.observe.ledger import SampleLedger
from chaosrun.protocol.resume import open_epoch
from chaosrun.records.position import Position


class Job:
    """A prepared training of ten samples in batches of four."""

    def __init__(self, *, accumulation: int = 1, attach: bool = True, **loader_settings: Any) -> None:
        config = {"use_seedable_sampler": True, "data_seed": 4} | loader_settings
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, dataloader_config=DataLoaderConfiguration(**config)
        )
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.arange(10.0).unsqueeze(1)), batch_size=4, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        if attach:
            self.run = chaosrun.attach(self.accelerator)

    def train(self, epochs: int = 2) -> list[list[float]]:
        seen = []
        for (samples,) in self.run.batches(self.loader, epochs=epochs):
            seen.append(samples.flatten().tolist())
            self.learn(samples)
        return seen

    def learn(self, samples: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(samples).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.run.step(loss)


@pytest.fixture
def job() -> Job:
    return Job()


def test_every_epoch_yields_every_sample_in_an_order_of_its_own(job: Job) -> None:
    seen = job.train(epochs=2)
    first, second = [*chain(*seen[:3])], [*chain(*seen[3:])]
    assert sorted(first) == sorted(second) == [float(value) for value in range(10)]
    assert first != second
    assert not job.run.is_active
    assert job.run.position == Position(epoch=1, batches=3, step=6)


def test_accumulation_counts_optimizer_steps_and_closes_the_short_window() -> None:
    job = Job(accumulation=2)
    job.train(epochs=2)
    assert job.run.position == Position(epoch=1, batches=3, step=4)


def test_a_step_without_update_and_a_batch_left_out_count(job: Job) -> None:
    for number, (samples,) in enumerate(job.run.batches(job.loader, epochs=2)):
        if number == 1:
            continue
        loss = job.model(samples).mean()
        job.accelerator.backward(loss)
        if number != 3:
            job.optimizer.step()
        job.optimizer.zero_grad()
        job.run.step(loss)
    assert job.run.position == Position(epoch=1, batches=3, step=6)


def test_a_loss_that_is_no_tensor_is_refused(job: Job) -> None:
    with pytest.raises(MisuseError, match=r"run.step\(\) got a float") as raised:
        for (samples,) in job.run.batches(job.loader, epochs=1):
            job.run.step(job.model(samples).mean().item())
    assert raised.value.hint and "not loss.item()" in raised.value.hint


@pytest.mark.parametrize("done", [1, 2])
@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_the_rest_of_an_epoch_is_what_the_whole_epoch_ends_with(epoch: int, done: int, job: Job) -> None:
    ledger = SampleLedger()
    whole, ids = [], []
    for (samples,) in open_epoch(job.accelerator, job.loader, epoch=epoch, batches_done=0, seed=4, ledger=ledger):
        whole.append(samples.flatten().tolist())
        ids.append(ledger.next_ids())
    assert ids == whole, "the ledger names the samples that were handed out"
    fresh = Job(attach=False)
    ledger = SampleLedger()
    rest = open_epoch(fresh.accelerator, fresh.loader, epoch=epoch, batches_done=done, seed=4, ledger=ledger)
    assert [(samples.flatten().tolist(), ledger.next_ids()) for (samples,) in rest] == [
        (batch, batch) for batch in whole[done:]
    ]
    # And the epoch after it, from the original loader.
    after = open_epoch(fresh.accelerator, fresh.loader, epoch=epoch + 1, batches_done=0, seed=4, ledger=SampleLedger())
    again = open_epoch(job.accelerator, job.loader, epoch=epoch + 1, batches_done=0, seed=4, ledger=SampleLedger())
    assert [batch[0].tolist() for batch in after] == [batch[0].tolist() for batch in again]


def test_starting_an_epoch_draws_nothing_from_the_global_stream(job: Job) -> None:
    before = torch.get_rng_state()
    iter(open_epoch(job.accelerator, job.loader, epoch=0, batches_done=0, seed=4, ledger=SampleLedger())).__next__()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("position", "length", "expected"),
    [
        (Position(epoch=1, batches=3, step=6), 3, Position(epoch=2, batches=0, step=6)),
        (Position(epoch=1, batches=2, step=5), 3, Position(epoch=1, batches=2, step=5)),
        (Position(epoch=1, batches=2, step=5), None, Position(epoch=1, batches=2, step=5)),
    ],
)
def test_the_end_of_an_epoch_is_the_beginning_of_the_next(position: Position, length: int | None, expected: Position) -> None:
    assert position.normalised(length) == expected


class Uneven(BatchSampler):
    """Another number of batches in every epoch, as bucketing by length has it."""

    def __init__(self) -> None:
        self.batch_size, self.drop_last, self.epoch = 2, False, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return (3, 5, 2)[self.epoch]

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[self.epoch, batch] for batch in range(len(self))])


@pytest.mark.parametrize(
    ("restored", "rest"),
    [
        (Position(epoch=1, batches=3, step=6), [[1, 3], [1, 4], [2, 0], [2, 1]]),
        (Position(epoch=1, batches=5, step=8), [[2, 0], [2, 1]]),
        (Position(epoch=2, batches=2, step=10), []),
    ],
)
def test_an_epoch_ends_where_its_own_length_says(restored: Position, rest: list[list[int]]) -> None:
    job = Job(attach=False)
    data = TensorDataset(torch.arange(10.0).unsqueeze(1))
    job.loader = job.accelerator.prepare(DataLoader(data, batch_sampler=Uneven()))
    job.run = chaosrun.attach(job.accelerator)
    job.run._recorder = MagicMock(ended=False)
    job.run._recorder.begin.return_value = restored
    assert job.train(epochs=3) == rest
    assert job.run.position.epoch == 2


class TestMisuse:
    def test_attach_before_prepare(self) -> None:
        accelerator = Accelerator(cpu=True)
        with pytest.raises(MisuseError, match=r"before accelerator\.prepare"):
            chaosrun.attach(accelerator)

    def test_attach_in_a_job_that_resumes_by_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        order = SimpleNamespace(by="script")
        monkeypatch.setattr("chaosrun.protocol.session.current", lambda: SimpleNamespace(order=order))
        with pytest.raises(MisuseError, match="resumes by itself") as raised:
            chaosrun.attach(Accelerator(cpu=True))
        assert raised.value.hint and "leave attach out" in raised.value.hint

    def test_a_loader_that_was_not_prepared(self, job: Job) -> None:
        with pytest.raises(MisuseError, match=r"prepare\(\) did not return"):
            next(job.run.batches(DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2), epochs=1))

    def test_a_loader_that_is_made_anew_without_accelerate(self) -> None:
        model, data = torch.nn.Linear(1, 1), TensorDataset(torch.zeros(4, 1))
        run = chaosrun.attach(model, torch.optim.SGD(model.parameters()), DataLoader(data, batch_size=2))
        with pytest.raises(MisuseError, match=r"chaosrun.attach\(\) was not given"):
            next(run.batches(DataLoader(data, batch_size=2), epochs=1))

    def test_a_sampler_that_cannot_be_restored(self) -> None:
        job = Job(use_seedable_sampler=False, data_seed=None)
        with pytest.raises(MisuseError, match="RandomSampler") as raised:
            job.train()
        assert raised.value.hint and "use_seedable_sampler=True" in raised.value.hint

    def test_batches_twice(self, job: Job) -> None:
        job.train(epochs=1)
        with pytest.raises(MisuseError, match="called twice"):
            job.train(epochs=1)

    @pytest.mark.parametrize("through_the_accelerator", [True, False])
    def test_a_loop_that_forgets_step(self, through_the_accelerator: bool, job: Job) -> None:
        batches = job.run.batches(job.loader, epochs=1)
        (samples,) = next(batches)
        loss = job.model(samples).mean()
        job.accelerator.backward(loss) if through_the_accelerator else loss.backward()
        job.optimizer.step()
        with pytest.raises(MisuseError, match=r"went on without run\.step"):
            next(batches)

    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_a_loop_that_never_makes_a_step(self, accumulation: int) -> None:
        job = Job(accumulation=accumulation)
        with pytest.raises(MisuseError, match=r"ended without one optimizer\.step"):
            list(job.run.batches(job.loader, epochs=1))

    def test_an_optimizer_that_is_never_stepped(self, job: Job) -> None:
        with pytest.raises(MisuseError, match=r"ended without one optimizer\.step"):
            for (samples,) in job.run.batches(job.loader, epochs=1):
                loss = job.model(samples).mean()
                job.accelerator.backward(loss)
                job.optimizer.zero_grad()
                job.run.step(loss)

    def test_step_outside_the_loop(self) -> None:
        with pytest.raises(MisuseError, match="without a batch"):
            Job().run.step(torch.tensor(1.0))

    def test_step_before_the_optimizer(self, job: Job) -> None:
        (samples,) = next(job.run.batches(job.loader, epochs=1))
        loss = job.model(samples).mean()
        job.accelerator.backward(loss)
        job.run.step(loss)
        with pytest.raises(MisuseError, match=r"before optimizer\.step"):
            job.optimizer.step()

    def test_accumulation_by_hand(self, job: Job) -> None:
        """The second backward pass adds to gradients that no checkpoint after the first step would hold."""
        batches = job.run.batches(job.loader, epochs=1)
        (samples,) = next(batches)
        loss = job.model(samples).mean()
        job.accelerator.backward(loss)
        job.run.step(loss)
        (samples,) = next(batches)
        with pytest.raises(MisuseError, match="gradients were kept"):
            job.accelerator.backward(job.model(samples).mean())

    def test_gradients_that_came_past_the_accelerator(self, job: Job) -> None:
        job.run._primer = MagicMock(done=False)
        (samples,) = next(job.run.batches(job.loader, epochs=1))
        loss = job.model(samples).mean()
        loss.backward()
        job.optimizer.step()
        with pytest.raises(MisuseError, match=r"loss\.backward") as raised:
            job.run.step(loss)
        assert raised.value.hint and "accelerator.backward(loss)" in raised.value.hint

    def test_a_pass_that_ddp_does_not_reduce(self, job: Job) -> None:
        """As in accelerate's LocalSGD, where optimizers step under no_sync."""
        job.run._primer = MagicMock(done=False, is_due=False)
        job.train(epochs=1)
        job.run._primer.prime.assert_not_called()

    def test_a_loss_that_is_no_scalar(self, job: Job) -> None:
        next(job.run.batches(job.loader, epochs=1))
        with pytest.raises(MisuseError, match=r"shape \(3,\)"):
            job.run.step(torch.zeros(3))

    def test_preparing_after_attach(self, job: Job) -> None:
        job.accelerator.prepare(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1))
        with pytest.raises(MisuseError, match="prepared after"):
            job.train()

    def test_a_parameter_of_no_prepared_model(self, job: Job) -> None:
        loose = torch.nn.Parameter(torch.ones(2))
        job.optimizer.add_param_group({"params": [loose]})
        with pytest.raises(MisuseError, match=r"no prepared model \(group 1, parameter 0, shape \(2,\)\)"):
            next(job.run.batches(job.loader, epochs=1))
        job.run.register("loose", torch.nn.ParameterList([loose]))
        next(job.run.batches(job.loader, epochs=1))

    def test_register_needs_a_state_a_name_and_to_be_early(self, job: Job) -> None:
        with pytest.raises(MisuseError, match="no state_dict"):
            job.run.register("count", 3)
        job.run.register("model", job.model)
        with pytest.raises(MisuseError, match="called twice"):
            job.run.register("model", job.model)
        job.train()
        with pytest.raises(MisuseError, match="after the first batch"):
            job.run.register("late", job.model)


def test_sample_streams_depend_on_seed_epoch_and_index_alone() -> None:
    from chaosrun.protocol.randomness import enter_epoch

    def draw(seed: int, epoch: int, index: int) -> float:
        enter_epoch(seed, epoch)
        return float(chaosrun.sample_rng(index).random())

    values = {(seed, epoch, index): draw(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in (0, 1)}
    assert len(set(values.values())) == 8
    assert draw(1, 0, 1) == values[1, 0, 1]


class Augmented(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        (value,) = super().__getitem__(index)
        return (value + float(chaosrun.sample_rng(index).random()),)


def test_persistent_loader_workers_see_the_epoch_change() -> None:
    from chaosrun.protocol.randomness import enter_epoch

    loader = DataLoader(Augmented(torch.zeros(4, 1)), batch_size=4, num_workers=1, persistent_workers=True)
    drawn = []
    for epoch in (0, 1, 0):
        enter_epoch(7, epoch)
        drawn.append(next(iter(loader))[0].tolist())
    assert drawn[0] == drawn[2] != drawn[1]
