"""Resume protocols in one process: what each asks of the loader, and that the ledger names what was really handed out."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import chaosrun
from chaosrun.errors import MisuseError
from chaosrun.observe.ledger import SampleLedger, _next_index, listen
from chaosrun.protocol import context
from chaosrun.protocol.checkpointing import _Live
from chaosrun.protocol.state import TrainingState
from chaosrun.protocol.strategies import check_loader, open_epoch, resumed_position
from chaosrun.records.order import DataResume
from chaosrun.records.position import Position
from tests.conftest import REPOSITORY
from tests.records import order_of

SEEDABLE: dict[str, Any] = {"use_seedable_sampler": True, "data_seed": 4}
STATEFUL: dict[str, Any] = {"use_stateful_dataloader": True}
PLAIN: dict[str, Any] = {}
SAMPLES = 20
WITHOUT_TORCHDATA = """
import sys
sys.modules["torchdata"] = None
import chaosrun
from chaosrun.errors import MisuseError
from chaosrun.protocol import context
from tests.unit.test_protocol_strategies import worker_of

for protocol in ("seedable", "plain", "skip", "stateful", "stateful_skip"):
    context.enter(worker_of(protocol))
    try:
        chaosrun.dataloader_configuration()
    except MisuseError as error:
        print(f"{protocol}: {error}")
"""
INEXACT: list[DataResume] = ["plain", "skip", "stateful", "stateful_skip"]


def worker_of(protocol: DataResume) -> context.WorkerContext:
    return context.WorkerContext(order_of("/nowhere", deterministic="off", data_resume=protocol))


@pytest.fixture
def under(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`under(protocol)`: from here on this process is a worker of a job with this `data.resume`."""
    return lambda protocol: monkeypatch.setattr(context, "_current", worker_of(protocol))


def prepared(config: dict[str, Any], *, workers: int = 0, **loader_settings: Any) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    torch.manual_seed(0)
    loader = DataLoader(
        torch.arange(SAMPLES),  # pyright: ignore[reportArgumentType]
        batch_size=2,
        shuffle=True,
        num_workers=workers,
        **loader_settings,
    )
    return accelerator, accelerator.prepare(loader)


class TestLoaderFitsProtocol:
    @pytest.mark.parametrize(
        ("protocol", "config"),
        [
            ("seedable", SEEDABLE),
            ("plain", PLAIN),
            ("plain", SEEDABLE),
            ("skip", PLAIN),
            ("skip", SEEDABLE),
            ("stateful", STATEFUL),
            ("stateful_skip", STATEFUL),
        ],
    )
    def test_fits(self, protocol: DataResume, config: dict[str, Any]) -> None:
        check_loader(protocol, *prepared(config))

    @pytest.mark.parametrize(
        ("protocol", "config", "loader"),
        [
            ("seedable", PLAIN, "RandomSampler"),
            ("seedable", STATEFUL, "is stateful"),
            ("plain", STATEFUL, "is stateful"),
            ("skip", STATEFUL, "is stateful"),
            ("stateful", PLAIN, "not stateful"),
            ("stateful", SEEDABLE, "not stateful"),
            ("stateful_skip", PLAIN, "not stateful"),
        ],
    )
    def test_does_not(self, protocol: DataResume, config: dict[str, Any], loader: str) -> None:
        with pytest.raises(MisuseError, match=f"data.resume is {protocol}, .*{loader}") as raised:
            check_loader(protocol, *prepared(config))
        assert raised.value.hint and "chaosrun.dataloader_configuration(" in raised.value.hint


class TestConfiguration:
    @pytest.mark.parametrize(
        ("protocol", "seedable", "stateful"),
        [
            ("seedable", True, False),
            ("plain", False, False),
            ("skip", False, False),
            ("stateful", False, True),
            ("stateful_skip", False, True),
        ],
    )
    def test_gives_a_loader_that_fits(self, under: Any, protocol: DataResume, seedable: bool, stateful: bool) -> None:
        under(protocol)
        config = chaosrun.dataloader_configuration(data_seed=7, non_blocking=True)
        assert (config.use_seedable_sampler, config.use_stateful_dataloader) == (seedable, stateful)
        assert (config.data_seed, config.non_blocking) == (7, True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        check_loader(protocol, accelerator, accelerator.prepare(DataLoader(torch.arange(4), shuffle=True)))  # type: ignore[arg-type]

    def test_one_that_skips_by_hand_is_told_to_pass_the_whole(self) -> None:
        accelerator = Accelerator(cpu=True, dataloader_config=chaosrun.dataloader_configuration(data_seed=7))
        loader: Any = accelerator.prepare(DataLoader(torch.arange(4), shuffle=True))  # type: ignore[arg-type]
        with pytest.raises(MisuseError, match="did not return") as refused:
            check_loader("seedable", accelerator, accelerator.skip_first_batches(loader, 1))
        assert "that loader itself (skip_first_batches is not needed" in f"{refused.value.hint}"

    def test_outside_chaosrun_it_is_seedable(self) -> None:
        config = chaosrun.dataloader_configuration(data_seed=7)
        assert (config.use_seedable_sampler, config.use_stateful_dataloader, config.data_seed) == (True, False, 7)

    def test_what_the_protocol_decides_cannot_be_given(self, under: Any) -> None:
        under("skip")
        with pytest.raises(MisuseError, match=r"use_seedable_sampler, which data\.resume decides \(here: skip\)"):
            chaosrun.dataloader_configuration(use_seedable_sampler=True)

    def test_torchdata_is_missed_by_name_and_only_where_it_is_needed(self) -> None:
        command = [sys.executable, "-c", WITHOUT_TORCHDATA]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=300)
        refused = [line.split(": ")[0] for line in done.stdout.splitlines() if "needs torchdata 0.8" in line]
        assert refused == ["stateful", "stateful_skip"]
        assert done.stdout.count("pip install 'chaosrun[stateful]'") == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_loader_that_was_resumed_is_copied_and_pickled_as_one_of_the_scripts(copied: Callable[[Any], Any]) -> None:
    accelerator, loader = prepared(SEEDABLE)
    epoch = open_epoch("seedable", accelerator, loader, epoch=0, batches_done=1, seed=0, ledger=SampleLedger())
    done = list(epoch)
    base = loader.base_dataloader
    again = copied(base)
    assert type(again.batch_sampler).__module__.split(".")[0] != "chaosrun"
    assert len(list(again)) == len(done) + 1
    assert b"chaosrun" not in pickle.dumps(base)


@pytest.mark.parametrize(
    ("protocol", "epoch", "batches"),
    [("seedable", 1, 3), ("plain", 1, 0), ("skip", 1, 3), ("stateful", 1, 3), ("stateful_skip", 1, 3)],
)
def test_only_plain_starts_the_epoch_again(protocol: DataResume, epoch: int, batches: int) -> None:
    at = Position(epoch=1, batches=3, step=13)
    assert resumed_position(protocol, at) == Position(epoch=epoch, batches=batches, step=13)


@pytest.mark.parametrize("protocol", INEXACT)
def test_an_inexact_protocol_leaves_loader_and_random_streams_as_a_script_would(protocol: DataResume) -> None:
    accelerator, loader = prepared(STATEFUL if protocol.startswith("stateful") else PLAIN)
    alone = [batch.tolist() for _ in range(2) for batch in loader]
    stream = torch.get_rng_state()
    accelerator, loader = prepared(STATEFUL if protocol.startswith("stateful") else PLAIN)
    told: list[list[int]] = []
    for epoch in range(2):
        opened = open_epoch(protocol, accelerator, loader, epoch=epoch, batches_done=0, seed=4, ledger=SampleLedger())
        told += [batch.tolist() for batch in opened]
    assert told == alone
    assert torch.equal(torch.get_rng_state(), stream)
    assert loader.base_dataloader.generator is None


@pytest.mark.parametrize(("rank", "written"), [(0, ["dl_state_dict.bin", "scaler.pt"]), (1, [])])
def test_only_rank_zero_writes_the_files_that_accelerate_has_every_rank_write(
    tmp_path: Path, rank: int, written: list[str]
) -> None:
    accelerator, loader = prepared(STATEFUL)
    scaler = accelerator.scaler = torch.amp.GradScaler("cpu")  # pyright: ignore[reportPrivateImportUsage]
    _Live(accelerator, TrainingState(accelerator), rank, Position(), {}).write(tmp_path / "state")
    names = {path.name for path in (tmp_path / "state").iterdir()} & {"dl_state_dict.bin", "scaler.pt"}
    assert sorted(names) == written
    assert accelerator._dataloaders == [loader]
    assert accelerator.scaler is scaler


def dismiss_workers(loader: Any) -> None:
    """Left to the garbage collector, workers of an iterator that its loader keeps are waited for, five seconds each, wherever
    that happens to run."""
    iterator: Any = getattr(loader.base_dataloader, "_iterator", None)
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def handed_out(batches: Any, ledger: SampleLedger) -> list[tuple[list[int], list[int] | None]]:
    return [(batch.tolist(), ledger.next_ids()) for batch in batches]


@pytest.mark.parametrize("protocol", ["seedable", *INEXACT])
class TestLedger:
    @pytest.mark.parametrize(
        ("workers", "done", "persistent"),
        [(0, 0, False), (2, 0, False), (0, 3, False), (2, 3, False), (2, 3, True)],
        ids=["every batch", "of workers", "after a restart", "of workers, after a restart", "of persistent workers"],
    )
    def test_names_the_samples(self, protocol: DataResume, workers: int, done: int, persistent: bool) -> None:
        config = {"seedable": SEEDABLE, "stateful": STATEFUL, "stateful_skip": STATEFUL}.get(protocol, PLAIN)
        listen()
        state: dict[str, Any] | None = None
        if done and config is STATEFUL:
            _, first = prepared(config, workers=workers, persistent_workers=persistent)
            for number, _ in enumerate(first, start=1):
                if number == done:
                    state = first.state_dict()
                    break
            dismiss_workers(first)
        accelerator, loader = prepared(config, workers=workers, persistent_workers=persistent)
        if state is not None:
            loader.load_state_dict(state)
        ledger = SampleLedger()
        for epoch, batches_done in [(1, done), (2, 0)]:
            opened = open_epoch(protocol, accelerator, loader, epoch=epoch, batches_done=batches_done, seed=4, ledger=ledger)
            seen = handed_out(opened, ledger)
            assert len(seen) >= SAMPLES // 2 - done - 1
            assert [ids for _, ids in seen] == [batch for batch, _ in seen]
        dismiss_workers(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_ledger_does_not_follow_a_pass_that_was_left(workers: int) -> None:
    _, loader = prepared(PLAIN, workers=workers)
    ledger = SampleLedger()
    ledger.watch(loader)
    next(iter(loader))
    ledger.watch(loader)
    seen = handed_out(loader, ledger)
    assert len(seen) == SAMPLES // 2
    assert all(batch == ids for batch, ids in seen)


def test_the_ledger_owns_up_to_batches_drawn_before_anybody_listened(monkeypatch: pytest.MonkeyPatch) -> None:
    # The control: this is why a worker listens before it runs the script.
    monkeypatch.setattr(_BaseDataLoaderIter, "_next_index", _next_index)
    _, loader = prepared(STATEFUL, workers=2)
    ledger = SampleLedger()
    ledger.watch(loader)
    seen = handed_out(loader, ledger)
    assert [ids for _, ids in seen] == [None] * 4 + [batch for batch, _ in seen[4:]]


def test_the_ledger_names_nothing_where_workers_may_overtake_each_other() -> None:
    _, loader = prepared(PLAIN, workers=2, in_order=False)
    ledger = SampleLedger()
    ledger.watch(loader)
    assert {ids is None for _, ids in handed_out(loader, ledger)} == {True}
