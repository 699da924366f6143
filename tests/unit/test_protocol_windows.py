"""Accumulation windows in one process: where they are cut, what they divide by and tell accelerate, and what they refuse."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from fresh import forget_accelerate
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import chaosrun
from chaosrun.errors import MisuseError
from chaosrun.protocol.windows import Window
from chaosrun.records.position import Position

SAMPLES = 10


class Job:
    """A prepared training of ten samples; sample i has i + 1 items, and its features are i + 1."""

    def __init__(self, *, batch_size: int = 4, **settings: Any) -> None:
        config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=4)
        self.accelerator = Accelerator(cpu=True, dataloader_config=config, **settings)
        torch.manual_seed(0)
        self.bare = torch.nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(self.bare.parameters(), lr=0.1)
        data = TensorDataset(torch.arange(1.0, SAMPLES + 1, dtype=torch.float64).unsqueeze(1))
        loader = DataLoader(data, batch_size=batch_size, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(self.bare, optimizer, loader)
        self.run = chaosrun.attach(self.accelerator)

    def windows(self, accumulation: int = 2, epochs: int = 1, **options: Any) -> Iterator[Window]:
        settings = {"count": items, **options}
        return self.run.windows(self.loader, self.model, epochs=epochs, accumulation_steps=accumulation, **settings)

    def loss_sum(self, batch: list[Tensor]) -> Tensor:
        """Of each item the squared output: a sample of i items counts i times."""
        return (self.model(batch[0]).square() * batch[0]).sum()

    def learn(self, window: Window) -> list[float]:
        """One window; the gradient that the optimizer got."""
        for batch in window:
            window.backward(self.loss_sum(batch))
        gradient = [float(p.grad) for p in self.bare.parameters() if p.grad is not None]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.run.step(window.loss)
        return gradient


def items(batch: list[Tensor]) -> Tensor:
    return batch[0].sum().long()


def test_an_epoch_is_cut_into_windows_and_the_last_is_short() -> None:
    job = Job()
    seen = []
    for window in job.windows(accumulation=2, epochs=2):
        seen.append((len(window), window.items))
        job.learn(window)
    lengths, counted = zip(*seen, strict=True)
    assert lengths == (2, 1, 2, 1)
    assert counted[0] + counted[1] == counted[2] + counted[3] == SAMPLES * (SAMPLES + 1) / 2
    assert job.run.position == Position(epoch=1, batches=3, step=4)


@pytest.mark.parametrize(("batch_size", "accumulation"), [(2, 4), (4, 2), (1, 8)])
def test_the_gradient_and_loss_of_a_window_are_those_of_one_large_batch(batch_size: int, accumulation: int) -> None:
    def train(batch_size: int, accumulation: int) -> list[tuple[float, ...]]:
        job = Job(batch_size=batch_size)
        found = [(*job.learn(window), float(window.loss)) for window in job.windows(accumulation, epochs=2)]
        forget_accelerate()
        return found

    whole = train(8, 1)
    assert len(whole) == 4, "two epochs of one whole window and one of two samples"
    for expected, seen in zip(whole, train(batch_size, accumulation), strict=True):
        assert seen == pytest.approx(expected, rel=1e-12)


def test_the_mean_of_means_is_another_loss() -> None:
    # The control: on these data the naive loss is far off, so the test above would see it.
    job = Job(batch_size=2)
    window = next(iter(job.windows(accumulation=4)))
    means = []
    for batch in window:
        loss_sum = job.loss_sum(batch)
        means.append(float(loss_sum.detach() / items(batch)))
        window.backward(loss_sum)
    assert float(window.loss) != pytest.approx(sum(means) / len(means), rel=0.01)
    assert window.loss.dtype == torch.float64


def test_accelerate_hears_of_both_ends_when_they_come() -> None:
    # The loader has known of the epoch's end since the window was fetched. Left to itself, accelerate would cut what is
    # gathered for metrics to the last batch's share too early.
    job = Job()
    told, gathered = [], []
    for window in job.windows(accumulation=3):
        for batch in window:
            state = job.accelerator.gradient_state
            told.append((state.sync_gradients, state.end_of_dataloader))
            gathered.append(len(job.accelerator.gather_for_metrics(batch[0])))
            window.backward(job.loss_sum(batch))
            job.optimizer.step()  # prepared optimizers let the micro-batches before the last one pass
        job.optimizer.zero_grad()
        job.run.step(window.loss)
    assert told == [(False, False), (False, False), (True, True)]
    assert gathered == [4, 4, 2]
    assert job.accelerator.sync_gradients
    assert not job.accelerator.gradient_state.in_dataloader


def test_leaving_a_window_early_leaves_accelerate_synchronising() -> None:
    job = Job()
    window = next(iter(job.windows()))
    for _ in window:
        assert not job.accelerator.sync_gradients
        break
    assert job.accelerator.sync_gradients


@pytest.mark.parametrize("start", [Position(epoch=1, batches=2, step=3), Position(epoch=0, batches=2, step=1)])
def test_the_rest_of_an_epoch_is_cut_where_the_whole_one_is(start: Position) -> None:
    def cut(begin: Position) -> list[tuple[int, list[list[float]]]]:
        job = Job()
        next(job.windows(epochs=2))  # sets everything up
        found = []
        for window in job.run._rest_of(job.loader, begin):
            samples = []
            for batch in window:
                samples.append(batch[0].flatten().tolist())
                window.backward(job.loss_sum(batch))
            job.optimizer.step()
            job.run.step(window.loss)
            found.append((window.items, samples))
        forget_accelerate()
        return found

    whole = cut(Position(epoch=start.epoch))
    assert len(whole) == 2
    assert cut(start) == whole[1:]


class TestMisuse:
    @pytest.fixture
    def job(self) -> Job:
        return Job()

    @pytest.fixture
    def window(self, job: Job) -> Window:
        return next(iter(job.windows()))

    def refuse(self, job: Job, match: str, **options: Any) -> None:
        with pytest.raises(MisuseError, match=match) as raised:
            next(iter(job.windows(**options)))
        assert raised.value.hint

    @pytest.mark.parametrize("steps", [0, -1, 2.0, True])
    def test_accumulation_steps(self, job: Job, steps: Any) -> None:
        self.refuse(job, "accumulation_steps=", accumulation=steps)

    @pytest.mark.parametrize("counted", [1.5, -1, True, None, torch.tensor([1, 2])])
    def test_what_count_returns(self, job: Job, counted: Any) -> None:
        self.refuse(job, r"count\(batch\) returned", count=lambda batch: counted)

    @pytest.mark.parametrize(("count", "match"), [(7, "count=7"), (lambda batch: 0, "no items")])
    def test_count_that_is_no_function_or_counts_nothing(self, job: Job, count: Any, match: str) -> None:
        self.refuse(job, match, count=count)

    def test_accelerate_dividing_too(self) -> None:
        self.refuse(Job(gradient_accumulation_steps=2), "divide the loss again")

    def test_a_model_left_out(self, job: Job) -> None:
        with pytest.raises(MisuseError, match="0 of 1 prepared models"):
            next(job.run.windows(job.loader, epochs=1, accumulation_steps=2, count=items))

    def test_windows_after_batches(self, job: Job) -> None:
        next(job.run.batches(job.loader, epochs=1))
        self.refuse(job, "called twice")

    def test_a_micro_batch_without_backward(self, window: Window) -> None:
        batches = iter(window)
        next(batches)
        with pytest.raises(MisuseError, match=r"without window\.backward\(loss_sum\) after micro-batch 1 of 2"):
            next(batches)

    def test_the_last_micro_batch_without_backward(self, job: Job) -> None:
        window = next(iter(job.windows(accumulation=1)))
        with pytest.raises(MisuseError, match="after micro-batch 1 of 1"):
            list(window)

    def test_backward_twice(self, job: Job, window: Window) -> None:
        for batch in window:
            window.backward(job.loss_sum(batch))
            with pytest.raises(MisuseError, match="called twice for one micro-batch"):
                window.backward(job.loss_sum(batch))

    def test_backward_outside_the_window(self, window: Window) -> None:
        with pytest.raises(MisuseError, match="without a micro-batch"):
            window.backward(torch.zeros(()))

    def test_backward_on_no_scalar(self, job: Job, window: Window) -> None:
        batches = iter(window)
        batch = next(batches)
        with pytest.raises(MisuseError, match=r"shape \(4, 1\)"):
            window.backward(job.model(batch[0]))

    def test_accumulate_inside_a_window(self, job: Job, window: Window) -> None:
        batches = iter(window)
        batch = next(batches)
        with job.accelerator.accumulate(job.model), pytest.raises(MisuseError, match=r"accelerator\.accumulate"):
            window.backward(job.loss_sum(batch))

    def test_a_window_iterated_twice(self, job: Job, window: Window) -> None:
        job.learn(window)
        with pytest.raises(MisuseError, match="iterated twice"):
            list(window)

    def test_a_window_left_by_break(self, job: Job, window: Window) -> None:
        for batch in window:
            window.backward(job.loss_sum(batch))
            break
        with pytest.raises(MisuseError, match="left after 1 of its 2 micro-batches"):
            job.run.step(window.loss)

    def test_step_with_another_loss(self, job: Job, window: Window) -> None:
        for batch in window:
            window.backward(job.loss_sum(batch))
        job.optimizer.step()
        with pytest.raises(MisuseError, match="another loss than the window's"):
            job.run.step(torch.zeros(()))

    def test_step_before_the_optimizer(self, job: Job, window: Window) -> None:
        for batch in window:
            window.backward(job.loss_sum(batch))
        job.run.step(window.loss)
        with pytest.raises(MisuseError, match=r"before optimizer\.step"):
            job.optimizer.step()

    def test_a_loop_that_forgets_step(self, job: Job) -> None:
        windows = job.windows()
        next(windows)
        with pytest.raises(MisuseError, match=r"without run\.step\(window\.loss\) after the window at batch 0 of epoch 0"):
            next(windows)
