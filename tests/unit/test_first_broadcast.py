"""DDP's first broadcast is spared where all ranks hold the same bits, and made where one holds others."""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel, distributed

from chaosrun.observe.fingerprint import fingerprint
from chaosrun.protocol.rendezvous import _sync, skip_equal_broadcasts

WHERE_SENT = {"": 0, "seed": 1, "bit": 1, "buffer": 1}
"""By what differs between two ranks' models: how often they are sent."""


def _rank(rank: int, store: Path, told: Any) -> None:
    """One of two: wraps models, and tells what it held then and whether it was sent."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    sent: list[int] = []
    send = distributed._sync_module_states

    def noted(*args: Any, **named: Any) -> None:
        sent.append(1)
        send(*args, **named)

    distributed._sync_module_states = noted
    skip_equal_broadcasts()
    for differs in WHERE_SENT:
        torch.manual_seed(rank if differs == "seed" else 0)
        linear, norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        assert norm.running_mean is not None
        with torch.no_grad():
            if rank and differs == "bit":
                linear.bias.view(torch.int32)[0] ^= 1
            if rank and differs == "buffer":
                norm.running_mean[0] = 1.0
        model = torch.nn.Sequential(linear, norm)
        sent.clear()
        DistributedDataParallel(model)
        told.put((differs, fingerprint([*model.parameters(), *model.buffers()]).value, len(sent)))
    torch.distributed.destroy_process_group()


def test_equal_models_are_not_sent_and_others_are(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.nn.parallel", __name__])
    told: Any = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, tmp_path / "store", told)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = [told.get(timeout=240) for _ in range(2 * len(WHERE_SENT))]
    for process in ranks:
        process.join()
    for differs, times in WHERE_SENT.items():
        first, second = [each[1:] for each in found if each[0] == differs]
        assert first == second, f"both hold the same then, whatever differed: {differs}"
        assert first[1] == times, differs


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
