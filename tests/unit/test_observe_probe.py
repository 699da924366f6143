"""The probe: what it sees of datasets that depend on the global random streams, and that the rank does not see it."""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import chaosrun
from chaosrun.observe import probe as probing
from chaosrun.observe.probe import probe
from chaosrun.observe.rng import capture_rng, digest_rng

CPU = torch.device("cpu")
Draw = Callable[[int], float]


class Items(Dataset[torch.Tensor]):
    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.draw(index)])


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(index), self.draw(index)]) for index in range(9))


def reseed(index: int) -> float:
    random.seed(index)
    return random.random()


DRAWS: dict[str, tuple[Draw, str]] = {
    "nothing": (lambda index: 0.0, "independent"),
    "sample_rng": (lambda index: chaosrun.sample_rng(index).random(), "independent"),
    "python": (lambda index: random.random(), "global_rng"),
    "numpy": (lambda index: numpy.random.random(), "global_rng"),
    "torch": (lambda index: float(torch.rand(())), "global_rng"),
    # Decides the same for most states of the stream: that it draws is seen, and more states are tried.
    "a coin": (lambda index: float(random.random() < 0.5), "global_rng"),
    "the seed": (lambda index: float(torch.initial_seed() % 97), "global_rng"),
    "reseeds": (reseed, "draws"),
    "in vain": (lambda index: 0 * random.random(), "draws"),
    "the system": (lambda index: numpy.random.default_rng().random(), "never_repeats"),
    "the clock": (lambda index: time.monotonic() % 100, "never_repeats"),
}


@pytest.mark.parametrize("kind", [Items, Stream])
@pytest.mark.parametrize("draws", DRAWS)
def test_what_samples_draw_from(draws: str, kind: Callable[[Draw], Any]) -> None:
    draw, expected = DRAWS[draws]
    found = probe(DataLoader(kind(draw), batch_size=4))
    assert found.items == expected, found
    if draws in ("python", "numpy", "torch"):
        assert draws in found.detail
        assert ("item 0 of the stream" if kind is Stream else "item 0 depends") in found.detail


def test_a_generator_that_the_dataset_keeps() -> None:
    own = numpy.random.default_rng(0)
    assert probe(DataLoader(Items(lambda index: own.random()), batch_size=4)).items == "never_repeats"


def test_a_dataset_that_remembers_what_it_drew_is_seen_as_it_is_before() -> None:
    remembered: dict[int, float] = {}
    found = probe(DataLoader(Items(lambda index: remembered.setdefault(index, random.random())), batch_size=4))
    assert found.items == "global_rng"
    assert not remembered


def test_what_collate_fn_draws_is_told_apart() -> None:
    def mask(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * torch.rand(())

    found = probe(DataLoader(Items(lambda index: 1.0), batch_size=4, collate_fn=mask))
    assert found.items == "global_rng"
    assert found.detail.startswith("what collate_fn makes of item 0")


def test_it_fetches_what_the_sampler_names() -> None:
    class Names(Dataset[str]):
        def __getitem__(self, name: str) -> str:
            return name + str(random.random())

    found = probe(DataLoader(Names(), sampler=["a", "b"], batch_size=2))  # pyright: ignore[reportArgumentType]
    assert (found.items, found.detail) == ("global_rng", "item 'a' depends on the global RNG (python)")
    unbatched = probe(DataLoader(Names(), sampler=["a", "b"], batch_size=None))  # pyright: ignore[reportArgumentType]
    assert unbatched == found


def test_a_shuffle_that_goes_on_is_not_taken_for_the_samples() -> None:
    # Asked again, the sampler names others: the same ones are to be compared.
    generator = torch.Generator().manual_seed(3)
    assert probe(DataLoader(Items(lambda index: 0.0), shuffle=True, generator=generator)).items == "independent"


def test_nothing_of_it_stays_in_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    before = digest_rng(CPU)
    descriptors = os.listdir("/proc/self/fd")
    children = set(psutil.Process().children())
    state = capture_rng(CPU)["numpy"][2]

    def draw(index: int) -> float:
        print("fetched", file=sys.__stdout__)
        os.write(2, b"fetched")
        return random.random() + numpy.random.random() + float(torch.rand(()))

    assert probe(DataLoader(Items(draw), batch_size=4)).items == "global_rng"
    assert digest_rng(CPU) == before
    assert capture_rng(CPU)["numpy"][2] == state
    assert os.listdir("/proc/self/fd") == descriptors
    assert capfd.readouterr() == ("", "")
    assert set(psutil.Process().children()) <= children


def test_an_open_file_is_read_on_where_it_stood_and_a_pipe_is_left_alone() -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(bytes(range(100)))
        file.seek(10)
        readable, writable = os.pipe()
        os.write(writable, b"kept")

        class Lines(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                os.set_blocking(readable, False)
                assert os.read(readable, 4) == b""
                while byte := file.read(1):
                    yield byte[0]

        found = probe(DataLoader(Lines(), batch_size=4))
        assert found.items == "independent", found
        assert file.tell() == 10
        assert os.read(readable, 4) == b"kept"
        os.close(readable)
        os.close(writable)


def test_a_file_that_is_open_for_writing_is_not_written(tmp_path: Any) -> None:
    with (tmp_path / "log").open("wb", buffering=0) as log:
        found = probe(DataLoader(Items(lambda index: float(log.write(b"fetched"))), batch_size=4))
    assert found.items == "independent", found
    assert (tmp_path / "log").read_bytes() == b""


@pytest.mark.parametrize(
    ("draw", "why"),
    [
        (lambda index: 1 / 0, "ZeroDivisionError"),
        (lambda index: os._exit(3), "died"),
        (lambda index: os.kill(os.getpid(), signal.SIGSEGV), "died"),
        (lambda index: time.sleep(60), "longer"),
    ],
    ids=["raises", "exits", "crashes", "hangs"],
)
def test_what_cannot_be_fetched_is_unknown(monkeypatch: pytest.MonkeyPatch, draw: Any, why: str) -> None:
    if why == "longer":
        monkeypatch.setattr(probing, "BUDGET_S", 1.0)
    found = probe(DataLoader(Items(draw), batch_size=4))
    assert found.items == "unknown"
    assert why in found.detail


def test_of_slow_samples_fewer_are_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(probing, "ENOUGH_S", 0.05)

    def draw(index: int) -> float:
        (tmp_path / str(index)).touch()
        time.sleep(0.1)
        return random.random()

    assert probe(DataLoader(Items(draw), batch_size=4)).items == "global_rng"
    assert os.listdir(tmp_path) == ["0"]


def test_no_samples_no_finding() -> None:
    assert probe(DataLoader([], batch_size=4)).items == "unknown"  # pyright: ignore[reportArgumentType]
