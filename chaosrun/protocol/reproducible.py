"""Makes an unchanged map dataset reproducible: for transforms that draw from the global streams, as torchvision's do."""

from typing import Any

from torch.utils.data import Dataset, IterableDataset

from chaosrun.errors import MisuseError
from chaosrun.protocol.randomness import sample_streams


class Reproducible(Dataset[Any]):
    """Wraps `dataset`: each item is fetched with the global streams seeded by (seed, epoch, index). Attributes are read from
    the dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        with sample_streams(index):
            return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # Not names that Python and the loader look up themselves: above all not __getitems__, which would bypass this class.
        if name == "dataset" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)


def reproducible(dataset: Any) -> Reproducible:
    """Make a map dataset's `__getitem__` draw the same from the global python, numpy and torch streams for one (seed, epoch,
    index) in every process, with any number of loader workers, before and after a restart; outside it the streams do not
    advance.

    A dataset that fetches whole batches (`__getitems__`) is read item by item. Draws in `collate_fn` are not covered: make them
    inside `sample_streams(index)`. Costs about 0.1 ms an item. Raises MisuseError for a stream, which has no indices.
    """
    if isinstance(dataset, IterableDataset):
        raise MisuseError(
            f"chaosrun.reproducible() got a {type(dataset).__name__}: the items of an iterable dataset have no index",
            hint="draw inside its __iter__ from chaosrun.sample_rng(number), counting the items",
        )
    return Reproducible(dataset)
