"""What decides a loader's order: found through its wrappers, told the epoch, and refused where nothing could bring it back."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
from accelerate.utils import DataLoaderConfiguration
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from chaosrun.errors import MisuseError
from chaosrun.observe.ledger import SampleLedger
from chaosrun.protocol.resume import _length, _Resumable, open_epoch, total_batch_size
from chaosrun.protocol.sources import check_sources, samplers, set_epoch, shuffle_buffer, source_state, unseedable_sampler


def prepare(loader: DataLoader[Any], **settings: Any) -> Any:
    config = {"dispatch_batches": False} | settings
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config)).prepare(loader)


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 10


class EpochNumbers(Numbers):
    epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Drawn(Sampler[int]):
    """Draws its order from something that it keeps."""

    def __init__(self, generator: Any = None) -> None:
        self.source = generator

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def __len__(self) -> int:
        return 10


class EpochDrawn(Drawn):
    epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Around(BatchSampler):
    """A batch sampler of the script's own around a sampler, which it calls by a name of its own."""

    def __init__(self, inside: Any) -> None:
        self.inside, self.batch_size, self.drop_last = inside, 5, False

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.inside)
        return iter([order[:5], order[5:]])

    def __len__(self) -> int:
        return 2


class EpochAround(Around):
    def set_epoch(self, epoch: int) -> None: ...


class Stream(IterableDataset[int]):
    def __init__(self, source: Any = None, **attributes: Any) -> None:
        self.source = source
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class TestEpoch:
    @pytest.mark.parametrize("wrap", [lambda inner: Around(inner), lambda inner: BatchSamplerShard(Around(inner), 2, 1)])
    def test_reaches_a_sampler_through_wrappers_that_know_nothing_of_epochs(self, wrap: Callable[[Any], Any]) -> None:
        inner = EpochDrawn()
        loader = prepare(DataLoader(Numbers(), batch_sampler=wrap(inner)))
        loader.set_epoch(3)
        assert inner.epoch is None, "accelerate alone does not reach it"
        set_epoch(loader, 3)
        assert inner.epoch == 3

    def test_reaches_a_dataset_and_one_that_is_wrapped(self) -> None:
        data = EpochNumbers()
        set_epoch(prepare(DataLoader(Subset(data, range(4)))), 2)
        assert data.epoch == 2

    def test_seeds_the_generator_of_a_stream_in_a_single_process_too(self) -> None:
        generator = torch.Generator()
        set_epoch(prepare(DataLoader(Stream(generator=generator))), 6)
        assert torch.equal(generator.get_state(), torch.Generator().manual_seed(6).get_state())

    def test_names_the_samplers_outermost_first(self) -> None:
        loader = prepare(DataLoader(Numbers(), batch_sampler=BatchSamplerShard(Around(Drawn()), 2, 0)))
        assert [type(sampler).__name__ for sampler in samplers(loader)] == ["BatchSamplerShard", "Around", "Drawn"]
        assert list(samplers(prepare(DataLoader(Stream())))) == []


class TestRefusals:
    @pytest.mark.parametrize("generator", [torch.Generator(), numpy.random.default_rng(0), random.Random(0)])
    def test_a_generator_that_nobody_seeds_anew(self, generator: Any) -> None:
        with pytest.raises(MisuseError, match=f"Drawn draws its order from a {type(generator).__name__} of its own") as raised:
            check_sources(prepare(DataLoader(Numbers(), sampler=Drawn(generator))))
        assert raised.value.hint and "set_epoch" in raised.value.hint
        check_sources(prepare(DataLoader(Numbers(), sampler=EpochDrawn(generator))))
        check_sources(prepare(DataLoader(Numbers(), batch_sampler=EpochAround(Drawn(generator)))))

    def test_torchs_random_sampler_wherever_it_is(self) -> None:
        own = RandomSampler(range(10), generator=torch.Generator())
        assert unseedable_sampler(prepare(DataLoader(Numbers(), batch_sampler=Around(own)))) == "RandomSampler"
        unseeded = EpochAround(RandomSampler(range(10)))
        assert unseedable_sampler(prepare(DataLoader(Numbers(), batch_sampler=unseeded))) is not None
        assert unseedable_sampler(prepare(DataLoader(Numbers(), batch_sampler=EpochAround(own)))) is None
        assert unseedable_sampler(prepare(DataLoader(Numbers(), shuffle=True), use_seedable_sampler=True)) is None

    @pytest.mark.parametrize("data", [EpochNumbers(), Stream(generator=torch.Generator())])
    def test_persistent_workers_that_the_epoch_does_not_reach(self, data: Any) -> None:
        with pytest.raises(MisuseError, match="persistent loader workers"):
            check_sources(prepare(DataLoader(data, num_workers=1, persistent_workers=True)))
        check_sources(prepare(DataLoader(data, num_workers=1)))

    def test_persistent_workers_that_share_the_epoch(self) -> None:
        data = EpochNumbers()
        data._epoch = torch.tensor(0).share_memory_()  # pyright: ignore[reportAttributeAccessIssue]
        check_sources(prepare(DataLoader(data, num_workers=1, persistent_workers=True)))
        check_sources(prepare(DataLoader(Numbers(), num_workers=1, persistent_workers=True)))

    def test_a_shuffle_buffer(self) -> None:
        with pytest.raises(MisuseError, match=r"buffer \(ShufflerIterDataPipe\).* no checkpoint holds"):
            check_sources(prepare(DataLoader(IterableWrapper(range(9)).shuffle(buffer_size=4))))


class BufferShuffledExamplesIterable:
    """As in `datasets`: the examples of a stream that was shuffled."""

    def __init__(self, ex_iterable: Any) -> None:
        self.ex_iterable, self.buffer_size = ex_iterable, 10


class ShardShuffledExamplesIterable:
    """As in `datasets`: the order of files, without a buffer."""

    def __init__(self) -> None:
        self.generator = numpy.random.default_rng(0)


class MappedExamplesIterable:
    def __init__(self, ex_iterable: Any) -> None:
        self.ex_iterable = ex_iterable


def _shuffle(data: Any, bufsize: int) -> Any:
    return data


class FilterFunction:
    """As in webdataset: a stage of a pipeline."""

    def __init__(self, f: Any) -> None:
        self.f = f


class detshuffle:
    """As in webdataset."""

    def __init__(self) -> None:
        self.bufsize = 100


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (IterableWrapper(range(9)).shuffle(buffer_size=4), "ShufflerIterDataPipe"),
        (IterableWrapper(range(9)).shuffle(buffer_size=4).map(abs).batch(2), "ShufflerIterDataPipe"),
        (IterableDatasetShard(IterableWrapper(range(9)).shuffle()), "ShufflerIterDataPipe"),
        (Stream(_ex_iterable=BufferShuffledExamplesIterable(None)), "BufferShuffledExamplesIterable"),
        (Stream(_ex_iterable=MappedExamplesIterable(BufferShuffledExamplesIterable(None))), "BufferShuffledExamplesIterable"),
        (Stream(_ex_iterable=MappedExamplesIterable(ShardShuffledExamplesIterable())), None),
        (Stream(pipeline=[FilterFunction(abs), FilterFunction(_shuffle)]), "shuffle"),
        (Stream(pipeline=[detshuffle()]), "detshuffle"),
        (Stream(pipeline=[FilterFunction(abs)]), None),
        (Stream(Stream(Stream())), None),
        (Stream(Stream(detshuffle())), "detshuffle"),
        (Stream(source=list(range(1000))), None),
        (IterableWrapper(range(9)).map(abs), None),
    ],
)
def test_a_shuffle_buffer_is_found_in_what_a_stream_reads_from(data: Any, expected: str | None) -> None:
    assert shuffle_buffer(data) == expected


def test_a_source_that_reads_from_itself_ends_the_search() -> None:
    data = Stream()
    data.source = data
    assert shuffle_buffer(data) is None


class TestResumable:
    def test_skips_once(self) -> None:
        sampler = _Resumable(BatchSampler(SequentialSampler(range(6)), 2, False), "SequentialSampler")
        sampler.skip_once(2)
        # torch's iterator with workers asks twice and reads once.
        assert [list(source) for source in (iter(sampler), iter(sampler))] == [[[4, 5]], [[0, 1], [2, 3], [4, 5]]]
        sampler.skip_once(2, keep=1)
        assert list(sampler) == [[0, 1], [4, 5]]
        assert list(sampler) == [[0, 1], [2, 3], [4, 5]]

    def test_passes_for_what_it_wraps(self) -> None:
        sampler: Any = _Resumable(BatchSampler(SequentialSampler(range(6)), 2, False), "SequentialSampler")
        assert isinstance(sampler, BatchSampler)
        assert (len(sampler), sampler.batch_size) == (3, 2)
        with pytest.raises(AttributeError):
            getattr(sampler, "no_such_thing")  # noqa: B009

    @pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, numpy.random.random])
    def test_refuses_an_order_from_the_global_stream(self, draw: Callable[[], Any]) -> None:
        def order() -> Iterator[int]:
            draw()
            yield from range(4)

        class Drawing(Drawn):
            def __iter__(self) -> Iterator[int]:
                return order()

        with pytest.raises(MisuseError, match="Drawing draws from the global random stream"):
            next(iter(_Resumable(Drawing(), "Drawing")))


@given(samples=st.integers(1, 40), size=st.integers(1, 4), workers=st.integers(1, 4), split=st.booleans(), drop=st.booleans())
def test_batches_of_a_rank_are_counted_as_they_come(samples: int, size: int, workers: int, split: bool, drop: bool) -> None:
    size = size * workers if split else size
    for rank in range(workers):
        batches = BatchSampler(SequentialSampler(range(samples)), size, drop)
        shard = BatchSamplerShard(batches, workers, rank, split_batches=split, even_batches=False)
        if not drop:
            assert _length(shard) == len(list(shard))


class Sizeless(Drawn):
    """A batch sampler without a batch size."""

    def __iter__(self) -> Any:
        return iter([[1], [2, 3]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"batch_size": 3}, 3), ({"batch_sampler": Around(range(10))}, 5), ({"batch_sampler": Sizeless()}, None)],
)
@pytest.mark.parametrize("dispatch", [False, True])
def test_the_total_batch_size_of_any_loader(options: Any, expected: int | None, dispatch: bool) -> None:
    loader = prepare(DataLoader(Numbers(), **options), dispatch_batches=dispatch)
    assert total_batch_size(Accelerator(cpu=True), loader) == expected


@pytest.mark.parametrize("dispatch", [False, True])
def test_the_rest_of_an_epoch_comes_with_the_random_streams_of_its_middle(dispatch: bool) -> None:
    class Noisy(Numbers):
        def __getitem__(self, index: int) -> int:
            torch.rand(1)
            return index

    loader = prepare(DataLoader(Noisy(), batch_size=2), dispatch_batches=dispatch)
    before = torch.get_rng_state()
    rest = iter(open_epoch(Accelerator(cpu=True), loader, epoch=1, batches_done=2, seed=0, ledger=SampleLedger()))
    assert next(rest).tolist() == [4, 5]
    # The batch that follows was fetched ahead: its two samples have drawn, those of the first had done so before the save.
    now = torch.get_rng_state()
    torch.set_rng_state(before)
    for _ in range(2):
        torch.rand(1)
    assert torch.equal(torch.get_rng_state(), now)
    assert [batch.tolist() for batch in rest] == [[6, 7], [8, 9]]
    # Nothing is left, and nothing was drawn.
    empty = open_epoch(Accelerator(cpu=True), loader, epoch=1, batches_done=5, seed=0, ledger=SampleLedger())
    assert list(empty) == []
    # The next epoch is whole again, from the very same loader.
    whole = open_epoch(Accelerator(cpu=True), loader, epoch=2, batches_done=0, seed=0, ledger=SampleLedger())
    assert [batch.tolist() for batch in whole] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


class Rotating(Sampler[int]):
    """Another order in each pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([self.passes % 3, 0, 1, 2])

    def __len__(self) -> int:
        return 4


class Told(Rotating):
    def set_epoch(self, epoch: int) -> None:
        self.passes = epoch


class Cursor(IterableDataset[int]):
    def __init__(self) -> None:
        self.cursor = 5

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.cursor))


@pytest.mark.parametrize(
    ("loader", "own", "held"),
    [
        (lambda: DataLoader(Numbers(), sampler=Rotating()), "Rotating", {"Rotating/passes": "0"}),
        (lambda: DataLoader(Numbers(), sampler=Told()), None, {"Told/passes": "0"}),
        (lambda: DataLoader(Cursor(), batch_size=2), "Cursor", {"Cursor/cursor": "5"}),
        (lambda: DataLoader(Numbers(), shuffle=True), None, {}),
    ],
)
def test_what_a_source_of_the_scripts_holds(loader: Callable[[], Any], own: str | None, held: dict[str, str]) -> None:
    assert source_state(prepare(loader(), use_seedable_sampler=True)) == (own, held)
