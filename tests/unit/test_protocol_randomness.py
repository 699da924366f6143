"""Random streams that are computed: of samples, shared with loader workers and nobody else, and of the loader workers."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import chaosrun
from chaosrun.errors import MisuseError
from chaosrun.observe.rng import digest_rng
from chaosrun.protocol.loader_workers import LoaderWorkers, newest_workers, seed_loader, seed_worker
from chaosrun.protocol.randomness import enter_epoch, loader_generator

CPU = torch.device("cpu")

RANK_BESIDE_ITS_SERVER = """
import os, sys
from chaosrun.records.order import WorkerOrder
from chaosrun.protocol import randomness, worker

randomness.enter_epoch(7, 0)
before = randomness.sample_rng(3).random()
if os.fork() == 0:
    order = WorkerOrder(
        leg="chaos", leg_path=sys.argv[1], storage_path=None, attempt=1, rank=1, world_size=2, local_rank=1, local_world_size=2,
        node_rank=0, master_addr="127.0.0.1", master_port=1, script=sys.argv[2], cwd=sys.argv[1], seed=0, deterministic="off",
        threads=1, every_steps=1, keep=2,
    )
    worker.main(order, None)
    os._exit(0)
os.wait()
print(before, randomness.sample_rng(3).random())
"""


def test_a_rank_shares_its_epoch_with_no_rank_of_the_same_fork_server(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from chaosrun.protocol.randomness import enter_epoch\nenter_epoch(7, 1)\nopen('ran', 'w').close()\n")
    command = [sys.executable, "-c", RANK_BESIDE_ITS_SERVER, str(tmp_path), str(script)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    assert (tmp_path / "ran").exists()
    before, after = done.stdout.split()[-2:]
    assert before == after


def draw_everything() -> torch.Tensor:
    return torch.tensor([random.random(), numpy.random.random(), torch.rand((), dtype=torch.double)], dtype=torch.double)


class Draws(Dataset[torch.Tensor]):
    """Every item is drawn from the three global streams."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return draw_everything()

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [draw_everything() for _ in indices]


class Keyed(Draws):
    """Every item is drawn from the sample's own stream."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(chaosrun.sample_rng(index).random(3))

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


@pytest.fixture(autouse=True)
def first_epoch() -> Iterator[None]:
    yield
    enter_epoch(0, 0)


def test_a_name_of_a_file_may_be_no_text_of_any_encoding() -> None:
    name = os.fsdecode(b"a\xff.jpg")
    assert chaosrun.sample_rng(name).random() != chaosrun.sample_rng("a.jpg").random()


class TestLoaderWorkers:
    @staticmethod
    def first_draws(rank: int, epoch: int = 0, **settings: Any) -> tuple[list[tuple[float, ...]], LoaderWorkers]:
        """What each of three workers draws first from python, numpy and torch."""
        loader = DataLoader(Draws(), batch_size=1, num_workers=3, **settings)
        seed_loader(loader, seed=5, epoch=epoch, rank=rank)
        batches = [tuple(batch[0].tolist()) for batch in loader]
        workers = newest_workers()
        assert workers is not None
        return batches[:3], workers

    def test_no_two_workers_ranks_or_epochs_draw_the_same_numbers(self) -> None:
        draws = [
            draw for rank, epoch in ((0, 0), (1, 0), (0, 1)) for worker in self.first_draws(rank, epoch)[0] for draw in worker
        ]
        assert len(set(draws)) == len(draws) == 27

    def test_what_they_draw_follows_from_base_seed_worker_and_rank(self) -> None:
        again = self.first_draws(1)[0]
        assert self.first_draws(1)[0] == again
        base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader_generator(5, 0, 1)))
        before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        for worker, draws in enumerate(again):
            seed_worker(base_seed, worker, 1)
            assert tuple(draw_everything().tolist()) == draws
            numpy.random.seed(numpy.random.SeedSequence([base_seed, worker, 1]).generate_state(4))
            assert numpy.random.random() == draws[1]
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])

    def test_they_report_where_their_streams_stand(self) -> None:
        _, workers = self.first_draws(0)
        streams = workers.streams()
        digests = [streams[worker][name] for worker in range(3) for name in ("python", "numpy", "torch")]  # type: ignore[index]
        assert len(set(digests)) == 9

    def test_the_scripts_own_worker_init_fn_has_the_last_word_and_the_report_shows_it(self) -> None:
        def alike(worker_id: int) -> None:
            numpy.random.seed(0)

        draws, workers = self.first_draws(0, worker_init_fn=alike)
        assert len({python for python, _, _ in draws}) == len({of_torch for _, _, of_torch in draws}) == 3
        assert len({numpy for _, numpy, _ in draws}) == 1
        streams = workers.streams()
        assert len({worker["numpy"] for worker in streams if worker}) == 1
        assert len({worker["python"] for worker in streams if worker}) == 3

    def test_a_loader_that_is_seeded_again_wraps_the_scripts_own_once(self) -> None:
        called = torch.zeros(1).share_memory_()

        def count(worker_id: int) -> None:
            called.add_(1)

        loader = DataLoader(Draws(), batch_size=12, num_workers=1, worker_init_fn=count)
        for epoch in range(3):
            seed_loader(loader, seed=5, epoch=epoch, rank=0)
            next(iter(loader))
            assert called.item() == epoch + 1

    def test_without_workers_there_is_nothing_to_report(self) -> None:
        seed_loader(DataLoader(Draws()), seed=5, epoch=0, rank=0)
        assert newest_workers() is None


class TestSamples:
    @staticmethod
    def epochs(data: Dataset[torch.Tensor], **settings: Any) -> list[list[list[float]]]:
        loader = DataLoader(data, batch_size=4, **settings)
        seen = []
        for epoch in (0, 1):
            enter_epoch(7, epoch)
            seed_loader(loader, seed=7, epoch=epoch, rank=0)
            seen.append([item for batch in loader for item in batch.tolist()])
        return seen

    @pytest.mark.parametrize(
        ("data", "settings"),
        [
            (Keyed(), {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 4}),
            (chaosrun.reproducible(Draws()), {"num_workers": 3}),
            # Their arguments are pickled, the shared memory with them. (It is what newer Python does by itself.)
            (
                chaosrun.reproducible(Keyed()),
                {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"},
            ),
        ],
        ids=["persistent", "three", "spawned"],
    )
    def test_the_same_from_any_workers(self, data: Dataset[torch.Tensor], settings: dict[str, Any]) -> None:
        expected = self.epochs(data)
        assert self.epochs(data, **settings) == expected
        everything = [tuple(item) for epoch in expected for item in epoch]
        assert len(set(everything)) == 24

    def test_an_epoch_that_is_left_early_leaves_nothing_behind_in_persistent_workers(self) -> None:
        loader = DataLoader(Keyed(), batch_size=1, num_workers=2, persistent_workers=True, prefetch_factor=5)
        alone = DataLoader(Keyed(), batch_size=1)
        for epoch in range(6):
            enter_epoch(7, epoch)
            # The workers still fetch ahead when the next epoch is entered: for nobody.
            assert torch.equal(next(iter(loader)), next(iter(alone)))

    def test_streams_are_put_back(self) -> None:
        before = digest_rng(CPU)
        with chaosrun.sample_streams(3):
            inside = draw_everything()
        assert digest_rng(CPU) == before
        with pytest.raises(ZeroDivisionError), chaosrun.sample_streams(3):
            raise ZeroDivisionError
        assert digest_rng(CPU) == before
        with chaosrun.sample_streams(3):
            assert torch.equal(draw_everything(), inside)

    def test_python_numpy_torch_and_sample_rng_are_not_one_stream(self) -> None:
        with chaosrun.sample_streams(3):
            draws = [*draw_everything().tolist(), chaosrun.sample_rng(3).random()]
        assert len(set(draws)) == 4

    @pytest.mark.parametrize("index", ["one", ("one", 2), numpy.int64(4), torch.tensor(4), -1, 2**70])
    def test_whatever_a_sampler_may_name_a_sample_by(self, index: Any) -> None:
        value = chaosrun.sample_rng(index).random()
        assert value == chaosrun.sample_rng(index).random()
        others = [chaosrun.sample_rng(other).random() for other in (0, 1, "two", ("one", 3))]
        assert value not in others

    def test_what_is_no_name_is_refused(self) -> None:
        with pytest.raises(TypeError):
            chaosrun.sample_rng(0.5)


class TestReproducible:
    def test_it_is_the_dataset_otherwise(self) -> None:
        class Named(Draws):
            classes = ("one", "two")

        data = chaosrun.reproducible(Named())
        assert (len(data), data.classes) == (12, ("one", "two"))
        with pytest.raises(AttributeError):
            data.colours  # noqa: B018

    def test_a_dataset_that_fetches_batches_cannot_get_past_it(self) -> None:
        data: Any = chaosrun.reproducible(Subset(Draws(), range(12)))
        assert not hasattr(data, "__getitems__")
        whole, single = (DataLoader(data, batch_size=size) for size in (12, 1))
        assert torch.equal(next(iter(whole)), torch.cat(list(single)))

    def test_a_stream_has_no_index(self) -> None:
        class Stream(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(3))

        with pytest.raises(MisuseError, match="Stream"):
            chaosrun.reproducible(Stream())


def test_the_global_streams_alone_are_not_the_same_from_any_workers() -> None:
    """The control of the table above: without a key, the number of workers shows."""

    def first(settings: dict[str, Any]) -> Any:
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        return TestSamples.epochs(Draws(), **settings)

    each: list[Callable[[], Any]] = [lambda: first({}), lambda: first({"num_workers": 1}), lambda: first({"num_workers": 3})]
    assert len({repr(run()) for run in each}) == 3
