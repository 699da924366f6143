"""The ledger of sample ids: what a loader's sampler names, told batch by batch as the loader hands them out."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

__all__ = ["SampleLedger"]


class SampleLedger:
    """Sample ids of the batches handed out, in order, as the batch sampler named them; None for a dataset without indices."""

    def __init__(self) -> None:
        self._pending: deque[list[Any]] = deque()
        self._watching = False

    def watch(self, loader: Any) -> None:
        """Listen to the sampler that feeds `loader` from its next iterator on."""
        base = loader.base_dataloader
        self._pending.clear()
        self._watching = not isinstance(base.dataset, IterableDataset)
        if not self._watching:
            return
        # DataLoader forbids assigning its samplers after construction; its iterator reads this very attribute.
        place = "batch_sampler" if base._auto_collation else "sampler"
        source = base.__dict__[place]
        if isinstance(source, _Overheard):
            source.ledger = self
        else:
            base.__dict__[place] = _Overheard(source, self)

    def heard(self, ids: list[Any]) -> None:
        self._pending.append(ids)

    def next_ids(self) -> list[Any] | None:
        """The ids of the batch that the loader has just handed out."""
        return self._pending.popleft() if self._watching else None


class _Overheard:
    """A sampler, telling the ledger what it yields; otherwise the sampler itself."""

    def __init__(self, inner: Any, ledger: SampleLedger) -> None:
        self._inner = inner
        self.ledger = ledger

    def __iter__(self) -> Iterator[Any]:
        for indices in self._inner:
            self.ledger.heard(_plain(indices if isinstance(indices, Iterable) else [indices]))
            yield indices

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _plain(ids: Iterable[Any]) -> list[Any]:
    """Sample ids as JSON values: numbers out of numpy and torch, anything that is no number or text by its repr."""
    values = (value.item() if hasattr(value, "item") else value for value in ids)
    return [value if isinstance(value, int | float | str) else repr(value) for value in values]
