"""One node's ranks of an all-reduce over several nodes, or over two local processes: sums of small integers, exact.

The ranks are forked, torch already imported, as chaosrun forks its workers; this process only listens, and ends ranks that are
stuck.
"""

import hashlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from chaosrun.preflight.probes.forked import Say, forked
from chaosrun.records.codec import convert

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

PERIOD = 8191
"""Of the numbers that are summed, a prime: pieces that were swapped show."""
MOST_ADDENDS = 32
"""Of them at most this many are not zero at any place, each at most 3: the sum fits int8 and every float exactly."""
GRACE_S = 3.0
"""Time beyond torch's own limit before a rank counts as stuck."""
IMPORT_S = 60.0
START, JOINED, FORMED, TIMED, DONE = -3, -2, -1, 1 << 30, 1 << 31
"""Places of a rank; between FORMED and TIMED it has entered the sum of a case at 2 × case, and finished it at 2 × case + 1."""

Tell = Callable[..., None]


class SumOrder(Struct, frozen=True, kw_only=True):
    backend: str
    """gloo or nccl; then local rank i has cuda:i."""
    first: int
    """First rank here."""
    local: int
    """Ranks here."""
    world: int
    """Ranks in all."""
    master: tuple[str, int]
    """Where rank 0 hosts the store."""
    cases: tuple[tuple[int, str], ...]
    """Bytes and dtype."""
    timed: tuple[int, int]
    """Bytes and repeats: sums of float32 to be timed after the cases."""
    join_s: float
    """For all ranks to come up."""
    collective_s: float


class Wrong(Struct, frozen=True, kw_only=True):
    count: int
    index: int
    """Of the first."""
    got: str
    expected: int


class Sum(Struct, frozen=True, kw_only=True):
    hash: str = ""
    wrong: Wrong | None = None


class RankFacts(Struct, kw_only=True):
    """How far a rank came; updated by each of its messages."""

    place: int = START
    patience_s: float = IMPORT_S
    """A rank that sends nothing for this long is stuck."""
    ended: str = ""
    """done, raised, died, or stuck: it stopped sending, without reporting an error."""
    error: str = ""
    results: list[Sum] = []
    """By case."""
    seconds: list[float] = []
    """Of the timed sums."""


class SumFacts(Struct, frozen=True, kw_only=True):
    ranks: dict[int, RankFacts]


@dataclass(slots=True, kw_only=True)
class Rank:
    """The parent's handle of a rank."""

    pid: int
    heard_s: float = field(default_factory=time.monotonic)
    unread: bytes = b""
    facts: RankFacts = field(default_factory=RankFacts)


def probe(**parameters: Any) -> SumFacts:
    """Parameters: those of `SumOrder`."""
    import torch.distributed  # noqa: F401  once, before the ranks are forked

    asked = convert(parameters, SumOrder)
    ranks: dict[int, Rank] = {}
    with selectors.DefaultSelector() as selector:
        for local in range(asked.local):
            number = asked.first + local
            pid, reading = forked(partial(_be, asked, number, local))
            ranks[number] = Rank(pid=pid)
            selector.register(reading, selectors.EVENT_READ, ranks[number])
        while selector.get_map():
            for key, _ in selector.select(0.2):
                listen(selector, key.fd, key.data)
            for rank in ranks.values():
                if not rank.facts.ended and time.monotonic() - rank.heard_s > rank.facts.patience_s:
                    rank.facts.ended = "stuck"
                    os.kill(rank.pid, signal.SIGKILL)
    return SumFacts(ranks={number: rank.facts for number, rank in ranks.items()})


def listen(selector: selectors.BaseSelector, descriptor: int, rank: Rank) -> None:
    received = os.read(descriptor, 1 << 16)
    *lines, rank.unread = (rank.unread + received).split(b"\n")
    for line in lines if rank.facts.ended != "stuck" else ():
        rank.heard_s, rank.facts = time.monotonic(), msgspec.json.decode(line, type=RankFacts)
    if received:
        return
    selector.unregister(descriptor)
    os.close(descriptor)
    _, status = os.waitpid(rank.pid, 0)
    if not rank.facts.ended:
        # Imported only here, as it takes a while.
        from chaosrun.faults.observed import signal_name

        code = os.waitstatus_to_exitcode(status)
        rank.facts.ended = "died"
        rank.facts.error = f"killed by {signal_name(-code)}" if code < 0 else f"left with exit code {code}"


def _be(asked: SumOrder, rank: int, local: int, say: Say) -> None:
    facts = RankFacts()

    def tell(**what: Any) -> None:
        for name, value in what.items():
            setattr(facts, name, value)
        say(facts)

    try:
        _reduce(tell, facts, asked, rank, local)
        tell(place=DONE, ended="done")
    except Exception as error:
        # Any error of torch is the answer.
        tell(ended="raised", error=f"{type(error).__name__}: {error}".splitlines()[0])


def _reduce(tell: Tell, facts: RankFacts, asked: SumOrder, rank: int, local: int) -> None:
    import torch
    from torch import distributed

    device = torch.device("cuda", local) if asked.backend == "nccl" else torch.device("cpu")
    torch.set_num_threads(1)
    # The store lives on rank 0, as long as this variable.
    store = _meet(tell, asked, rank)
    tell(patience_s=asked.collective_s + GRACE_S)
    if device.type == "cuda":
        # Otherwise its watchdog would end waiting ranks like the hanging one.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=asked.collective_s)
    distributed.init_process_group(asked.backend, store=store, rank=rank, world_size=asked.world, timeout=timeout)
    tell(place=FORMED)
    _sum_cases(tell, facts.results, asked, rank, device)
    tell(place=TIMED, seconds=_timed(asked, device))
    # No rank closes its sockets until all are done.
    distributed.barrier()
    distributed.destroy_process_group()


def _meet(tell: Tell, asked: SumOrder, rank: int) -> "TCPStore":
    """Wait until all ranks have started."""
    from torch import distributed

    limit = timedelta(seconds=asked.join_s)
    tell(patience_s=asked.join_s + GRACE_S)
    store = distributed.TCPStore(*asked.master, asked.world, is_master=rank == 0, timeout=limit, wait_for_workers=False)
    store.set(f"here {rank}", "")
    tell(place=JOINED)
    store.wait([f"here {each}" for each in range(asked.world)], limit)
    return store


def _sum_cases(tell: Tell, results: list[Sum], asked: SumOrder, rank: int, device: "torch.device") -> None:
    import torch
    from torch import distributed

    for case, (size, dtype) in enumerate(asked.cases):
        addend = _numbers(rank, asked.world, size, dtype)
        expected = _numbers(None, asked.world, size, dtype)
        given = addend.to(device)
        tell(place=2 * case)
        distributed.all_reduce(given)
        result = given.cpu()
        digest = hashlib.sha256(result.view(torch.uint8).numpy().data).hexdigest()
        results.append(Sum(hash=digest[:16], wrong=_wrong(result, expected)))
        tell(place=2 * case + 1)


def _timed(asked: SumOrder, device: "torch.device") -> list[float]:
    import torch
    from torch import distributed

    size, repeats = asked.timed
    scratch = torch.zeros(size // 4, device=device)
    seconds: list[float] = []
    for _ in range(repeats):
        distributed.barrier()
        began = time.perf_counter()
        distributed.all_reduce(scratch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds


def _numbers(rank: int | None, world: int, size: int, dtype: str) -> "torch.Tensor":
    """A rank's input, or the sum over all; at least one element."""
    import torch

    places = torch.arange(PERIOD)
    total = torch.zeros(PERIOD, dtype=torch.int64)
    spread = -(-world // MOST_ADDENDS)
    for each in range(world) if rank is None else (rank,):
        total += ((places * 7919 + each * 104729) >> 3) % 4 * ((places + each) % spread == 0)
    kind: torch.dtype = getattr(torch, dtype)
    count = max(1, size // kind.itemsize)
    return total.to(kind).repeat(-(-count // PERIOD))[:count].clone()


def _wrong(result: "torch.Tensor", expected: "torch.Tensor") -> Wrong | None:
    different = (result != expected).nonzero().flatten()
    if not len(different):
        return None
    first = int(different[0])
    return Wrong(count=len(different), index=first, got=repr(result[first].item()), expected=int(expected[first].item()))
