"""Of a batch that the script has made anew, the ledger tells what a loader had handed out for it, or nothing."""

import gc
import os
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from chaosrun.observe import hooks
from chaosrun.observe import ledger as observed
from chaosrun.observe.contents import MOST_OBJECTS, batch_tensors
from chaosrun.observe.ledger import BatchLedger, loader_workers
from chaosrun.processes import children

DATA = TensorDataset(torch.arange(24.0).reshape(12, 2))


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[BatchLedger]:
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    monkeypatch.setattr(_BaseDataLoaderIter, "_next_index", _BaseDataLoaderIter._next_index)
    yield BatchLedger()


def loader() -> Iterator[list[torch.Tensor]]:
    return iter(DataLoader(DATA, batch_size=2))


def test_what_was_handed_out_for_a_pass_is_told_once(ledger: BatchLedger) -> None:
    batches = loader()
    for ids in ([0, 1], [2, 3]):
        (x,) = next(batches)
        assert ledger.taken([x - 1]) is None and ledger.fetched(skipping=False) == ids
        assert ledger.fetched(skipping=False) is None  # a second pass with it
    (x,) = next(batches)
    assert ledger.taken([x]) == [4, 5] and ledger.fetched(skipping=False) == [4, 5]


def test_a_batch_that_the_script_makes_anew_counts_for_the_pass_over_its_loader(ledger: BatchLedger) -> None:
    counted: list[int] = []
    for _ in range(2):
        for number, (x,) in enumerate(DataLoader(DATA, batch_size=4)):
            for taken in ([x - 1], [x - 1], [x]) if number else ([x - 1],):
                ledger.taken(taken)
                ledger.fetched(skipping=False)
                counted.append(ledger.passes)
    assert counted == [1] * 7 + [2] * 7
    ledger.taken([torch.ones(1)])
    ledger.fetched(skipping=False)
    assert ledger.passes == 2, "no loader has handed out a batch for it"
    pairs = zip(loader(), loader(), strict=True)
    (x,), _ = next(pairs)
    ledger.taken([x - 1])
    ledger.fetched(skipping=False)
    assert ledger.passes == 2, "of two loaders it may be either's"


def test_loaders_that_are_read_in_turn_begin_no_pass_when_their_turn_comes_again(ledger: BatchLedger) -> None:
    counted: list[int] = []
    for _ in range(2):
        for (x,), (y,) in zip(loader(), loader(), strict=True):
            for taken in (x, y, x):
                ledger.taken([taken])
                counted.append(ledger.passes)
    assert counted == [1] + [2] * 17 + [3] + [4] * 17


def test_samples_of_a_subset_have_the_ids_of_the_whole(ledger: BatchLedger) -> None:
    rest = Subset(Subset(DATA, torch.arange(2, 12)), [9, 0, 4, 1])  # pyright: ignore[reportArgumentType]
    assert [ledger.taken([x]) for (x,) in DataLoader(rest, batch_size=2)] == [[11, 2], [6, 3]]
    assert [ledger.taken([x]) for (x,) in DataLoader(rest, batch_size=None)] == [[11], [2], [6], [3]]
    by_tensor = DataLoader(DATA, batch_size=None, sampler=torch.tensor([5, 1]))  # pyright: ignore[reportArgumentType]
    assert [ledger.taken([x]) for (x,) in by_tensor] == [[5], [1]]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "kind",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.nested.nested_tensor(list(x)),
        lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
        lambda x: x.to_mkldnn(),
        lambda x: x.to("meta"),
    ],
    ids=["sparse", "csr", "nested", "jagged", "quantized", "mkldnn", "meta"],
)
def test_tensors_that_are_no_plain_memory_raise_nothing(
    ledger: BatchLedger, kind: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    other = kind(torch.eye(2))
    assert ledger.taken([other]) is None, "no loader has handed out anything"
    made = iter(DataLoader(DATA, batch_size=2, collate_fn=lambda items: [kind(torch.stack([x for (x,) in items]))]))
    next(made)
    assert ledger.taken([other]) is None
    (x,) = next(loader())
    assert ledger.taken([other, x.clone()]) == [0, 1], "its copy is still known"


class Slotted:
    __slots__ = ("inside", "unset")

    def __init__(self, inside: object) -> None:
        self.inside = inside


class Closed(Mapping[str, object]):
    def __getitem__(self, key: str) -> object:
        raise OSError(key)

    def __iter__(self) -> Iterator[str]:
        return iter("x")

    def __len__(self) -> int:
        return 1


class Lazy:
    """Opens a file when it is asked for anything, as a proxy for what is loaded late does."""

    def _load(self) -> Any:
        raise FileNotFoundError

    __class__ = __dict__ = property(_load)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __getattribute__(self, name: str) -> Any:
        raise FileNotFoundError


class LazyList(list[str]):
    def __iter__(self) -> Iterator[str]:
        raise FileNotFoundError


class Stored(dict[str, object]):
    def values(self) -> Any:
        raise FileNotFoundError


def gone() -> object:
    return weakref.proxy(Closed())


def leading_to_itself(x: torch.Tensor) -> object:
    batch = SimpleNamespace(x=x)
    batch.itself = [batch]
    return batch


@pytest.mark.parametrize(
    "made",
    [
        lambda x: SimpleNamespace(store=SimpleNamespace(mapping={"x": x})),
        Slotted,
        leading_to_itself,
        lambda x: [Closed(), SimpleNamespace(x=x)],
        lambda x: [Lazy(), LazyList(["a file"]), gone(), Stored(x=x)],
        lambda x: SimpleNamespace(store=Stored(file=Lazy()), x=x, many=range(10), dataset=[0.5] * 10**6),
        lambda x: UserDict(x=x),
    ],
    ids=["as graphs are", "slots", "itself", "unreadable", "of any class", "with a large one", "mapping"],
)
def test_a_batch_may_be_an_object(ledger: BatchLedger, made: Callable[[torch.Tensor], object]) -> None:
    """A lost order was told as batches repeated: none of its passes was counted."""
    batches = DataLoader(DATA, batch_size=2, collate_fn=lambda items: made(torch.stack([x for (x,) in items])))
    for number in (1, 2):
        for ids, batch in zip(([0, 1], [2, 3]), batches, strict=False):
            assert ledger.taken(batch_tensors([(batch,), {}])) == ids and ledger.passes == number
            ledger.fetched(skipping=False)
            assert ledger.taken([each.clone() for each in batch_tensors(batch)]) == ids, "on another device, perhaps"


def test_a_batch_is_looked_at_up_to_a_limit() -> None:
    """A step would take long: a list within itself, its samples with the model, the optimizer and the data set that they come
    from."""
    model = torch.nn.Linear(2, 2)
    around: list[Any] = [SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters()), data=DATA)]
    around += [around, [torch.ones(1)] * 3, *([0, 1] for _ in range(3 * MOST_OBJECTS))]
    before = len(hooks.optimizers())
    assert len(batch_tensors(around)) == 0 and len(batch_tensors(around[2])) == 1
    assert len(hooks.optimizers()) == before, "none was made to learn what one has"


class Weighed(Dataset[list[torch.Tensor]]):
    """Each batch has class weights that all share; its own are in the dataset's memory, or in a buffer that is filled anew."""

    def __init__(self, *, anew: bool) -> None:
        self.weights, self.buffer = torch.ones(2), torch.zeros(2, 2) if anew else None

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        x = torch.full((2, 2), float(index))
        return [x if self.buffer is None else self.buffer.copy_(x), self.weights]


def test_a_tensor_that_batches_share_tells_nothing(ledger: BatchLedger) -> None:
    """With a batch fetched ahead, its ids were told."""
    batches = iter(DataLoader(Weighed(anew=False), batch_size=None))
    (x, weights), _ = next(batches), next(batches)
    assert ledger.taken([x, weights]) == [0]
    assert ledger.taken([x - 1, weights]) is None
    for number, batch in enumerate(DataLoader(Weighed(anew=True), batch_size=None)):
        assert ledger.taken(batch) == [number]
    buffer, numbers = torch.zeros(2), TensorDataset(torch.arange(4))
    made = iter(DataLoader(numbers, batch_size=1, collate_fn=lambda rows: [buffer, torch.stack([row[0] for row in rows])]))
    assert [ledger.taken([buffer]) for _ in made] == [[0], [1], [2], [3]], "a buffer that each batch fills anew, given alone"
    for _ in range(2):
        assert [ledger.taken(batch) for batch in DataLoader([[torch.ones(1), weights]], batch_size=None)] == [[0]]  # pyright: ignore[reportArgumentType]


def test_a_kept_batch_is_sampled_again_only_where_it_was_changed(ledger: BatchLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, sampled = [], observed._samples
    monkeypatch.setattr(observed, "_samples", lambda tensors: asked.append(tensors) or sampled(tensors))
    batches = loader()
    (x,), (y,) = next(batches), next(batches)
    assert ledger.taken([torch.ones(2)]) is None and len(asked) == 3
    assert ledger.taken([torch.ones(2)]) is None and len(asked) == 4, "the two that are kept were not changed"
    assert ledger.taken([y.mul_(0.5).clone()]) == [2, 3] and len(asked) == 6 and x.numel()


def test_of_several_batches_none_is_told_but_behind_those_that_a_restart_skips(ledger: BatchLedger) -> None:
    batches = loader()
    *_, last = (next(batches) for _ in range(3))
    assert ledger.fetched(skipping=True) == [4, 5] and last
    assert next(batches) and next(batches)
    assert ledger.fetched(skipping=True) is None


def test_at_the_very_beginning_nothing_is_skipped(ledger: BatchLedger) -> None:
    batches = loader()
    assert next(batches) and next(batches)
    assert ledger.fetched(skipping=False) is None


def test_of_two_loaders_none_is_told_but_beside_an_evaluation(ledger: BatchLedger) -> None:
    batches, others = loader(), loader()
    assert next(others) and next(batches)
    assert ledger.fetched(skipping=False) is None
    for _ in range(2):
        next(others)
        ledger.passed_by()
    next(batches)
    ledger.passed_by()  # a teacher sees it first
    assert ledger.fetched(skipping=False) == [2, 3]


def test_what_is_read_to_its_end_without_a_training_pass_was_evaluated(ledger: BatchLedger) -> None:
    """Under torch.no_grad(), where no pass is seen."""
    assert len(list(loader())) == 6
    batches = loader()
    (x,) = next(batches)
    assert ledger.taken([x - 1]) is None and ledger.fetched(skipping=False) == [0, 1] and ledger.passes == 1
    evaluated = loader()
    assert next(evaluated) and next(batches)
    assert ledger.fetched(skipping=False) is None, "it may be part of the step"


def test_an_iterator_may_have_the_id_of_one_that_is_gone(ledger: BatchLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "id", lambda _: 1, raising=False)
    for number in range(1, 4):
        evaluated = loader()
        next(evaluated)
        ledger.passed_by()
        del evaluated
        (x,) = next(loader())
        assert ledger.taken([x - 1]) is None and ledger.fetched(skipping=False) == [0, 1] and ledger.passes == number


def test_the_workers_of_loaders_that_are_read_from_are_known(ledger: BatchLedger) -> None:
    batches = iter(DataLoader(DATA, batch_size=2, num_workers=2))
    assert next(batches)
    pids = {pid for pid, _ in loader_workers()}
    assert len(pids) == 2 and pids <= set(children(os.getpid()))
    del batches
    gc.collect()
    assert not pids & {pid for pid, _ in loader_workers()}
