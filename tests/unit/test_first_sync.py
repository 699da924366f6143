"""DDP's first broadcast is spared where all ranks hold the same bits, and made where one holds others."""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel, distributed

from chaosrun.observe.fingerprint import fingerprint
from chaosrun.protocol.first_sync import _sync, spare_equal_models


def _rank(rank: int, store: Path, differs: str, told: Any) -> None:
    """One of two: wraps a model, and tells what it held then and whether it was sent."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    sent: list[int] = []
    send = distributed._sync_module_states

    def noted(*args: Any, **named: Any) -> None:
        sent.append(1)
        send(*args, **named)

    distributed._sync_module_states = noted
    spare_equal_models()
    torch.manual_seed(rank if differs == "seed" else 0)
    linear, norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
    assert norm.running_mean is not None
    with torch.no_grad():
        if rank and differs == "bit":
            linear.bias.view(torch.int32)[0] ^= 1
        if rank and differs == "buffer":
            norm.running_mean[0] = 1.0
    model = torch.nn.Sequential(linear, norm)
    DistributedDataParallel(model)
    told.put((rank, fingerprint([*model.parameters(), *model.buffers()]).value, len(sent)))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("differs", "sent"), [("", 0), ("seed", 1), ("bit", 1), ("buffer", 1)])
def test_equal_models_are_not_sent_and_others_are(tmp_path: Path, differs: str, sent: int) -> None:
    context = multiprocessing.get_context("spawn")
    told: Any = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, tmp_path / "store", differs, told)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = {rank: (held, times) for rank, held, times in (told.get(timeout=120) for _ in ranks)}
    for process in ranks:
        process.join()
    assert found[0] == found[1]
    assert found[0][1] == sent


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """What two ranks, both of which hold this model, do on this backend."""

    def gather(into: list[Any], mine: Any, group: object) -> None:
        into[:] = [mine, mine]

    def sync(model: torch.nn.Module, backend: str = "gloo") -> list[str]:
        monkeypatch.setattr(torch.distributed, "get_backend", lambda group: backend)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        sent: list[str] = []
        _sync(lambda **named: sent.append("sent"), module=model, process_group=object())
        return sent

    yield sync


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_only_what_can_be_compared_on_the_cpu_is_spared(gathered: Callable[..., list[str]]) -> None:
    model = torch.nn.Linear(2, 2)
    assert gathered(model) == []
    assert gathered(model, backend="nccl") == ["sent"]
    assert gathered(model.to("meta")) == ["sent"]
    strange = torch.nn.Module()
    strange.register_buffer("table", torch.eye(2).to_sparse_csr())
    assert gathered(strange) == ["sent"]


def test_a_call_of_another_form_is_passed_on() -> None:
    sent: list[Any] = []
    _sync(lambda *args, **named: sent.append((args, named)), "module", "group")
    assert sent == [(("module", "group"), {})]
