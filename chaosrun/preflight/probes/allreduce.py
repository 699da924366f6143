"""One node's ranks of an all-reduce over several nodes, or over two processes of its own: sums of small integers, exact.

Parameters:
  backend     gloo or nccl (then local rank i has cuda:i)
  first, local, world    first rank here, ranks here, ranks in all
  master      [address, port]: where rank 0 hosts the store
  cases       [[bytes, dtype]]
  timed       [bytes, repeats]: sums to be timed after the cases; dtype float32
  join_s      for all ranks to come up; collective_s: for one collective

Facts: ranks {rank: {place, ended, error, results, addresses, seconds}}. `place` is how far it came: "start", "joined",
"formed", then [case, "entered" | "finished"], "timed", "done"; `ended`: done, raised, stuck (it said nothing any more, not even
that it gave up), died. results: by case {hash, wrong}; wrong: null, or what differs; {unsupported} where torch has no such sum.
The ranks are forked, torch already imported, as chaosrun forks its workers; this process only listens and ends what is stuck.
"""

import hashlib
import json
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from chaosrun.preflight.model import Facts
from chaosrun.preflight.probes.forked import Say, forked

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

PERIOD = 8191
"""Of the numbers that are summed, a prime: pieces that were swapped show."""
MOST_ADDENDS = 32
"""Of them at most this many are not zero at any place, each at most 3: the sum fits int8 and every float exactly."""
GRACE_S = 3.0
"""Beyond a limit of torch's own before a rank counts as stuck."""
IMPORT_S = 60.0

Tell = Callable[..., None]


@dataclass(slots=True, kw_only=True)
class Rank:
    pid: int
    place: Any = "start"
    patience_s: float = IMPORT_S
    heard_s: float = field(default_factory=time.monotonic)
    unread: bytes = b""
    ended: str = ""
    error: str = ""
    results: list[dict[str, Any]] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def hear(self, line: dict[str, Any]) -> None:
        self.heard_s = time.monotonic()
        for name, value in line.items():
            if name == "result":
                self.results.append(value)
            else:
                setattr(self, name, value)


def probe(**parameters: Any) -> Facts:
    import torch.distributed  # noqa: F401  once, before the ranks are forked

    ranks: dict[int, Rank] = {}
    with selectors.DefaultSelector() as selector:
        for local in range(parameters["local"]):
            number = parameters["first"] + local
            pid, reading = forked(partial(_be, parameters, number, local))
            ranks[number] = Rank(pid=pid)
            selector.register(reading, selectors.EVENT_READ, ranks[number])
        while selector.get_map():
            for key, _ in selector.select(0.2):
                listen(selector, key.fd, key.data)
            for rank in ranks.values():
                if not rank.ended and time.monotonic() - rank.heard_s > rank.patience_s:
                    rank.ended = "stuck"
                    os.kill(rank.pid, signal.SIGKILL)
    told = ("place", "ended", "error", "results", "addresses", "seconds")
    return {"ranks": {str(number): {name: getattr(rank, name) for name in told} for number, rank in ranks.items()}}


def listen(selector: selectors.BaseSelector, descriptor: int, rank: Rank) -> None:
    received = os.read(descriptor, 1 << 16)
    *lines, rank.unread = (rank.unread + received).split(b"\n")
    for line in lines:
        rank.hear(json.loads(line))
    if received:
        return
    selector.unregister(descriptor)
    os.close(descriptor)
    _, status = os.waitpid(rank.pid, 0)
    if not rank.ended:
        code = os.waitstatus_to_exitcode(status)
        rank.ended = "died"
        rank.error = f"killed by {_name_of(-code)}" if code < 0 else f"left with exit code {code}"


def _name_of(number: int) -> str:
    # Only here: what faults are made of takes a while to be read.
    from chaosrun.faults.observed import signal_name

    return signal_name(number)


def _be(parameters: Facts, rank: int, local: int, say: Say) -> None:
    """The life of a rank."""

    def tell(**what: Any) -> None:
        say(what)

    try:
        _reduce(tell, parameters, rank, local)
        tell(place="done", ended="done")
    except Exception as error:
        # Whatever torch says is the answer.
        tell(ended="raised", error=f"{type(error).__name__}: {error}".splitlines()[0])


def _reduce(tell: Tell, parameters: Facts, rank: int, local: int) -> None:
    import torch
    from torch import distributed

    device = torch.device("cuda", local) if parameters["backend"] == "nccl" else torch.device("cpu")
    torch.set_num_threads(1)
    # It lives on rank 0, as long as this name does.
    store = _meet(tell, parameters, rank)
    collective_s = parameters["collective_s"]
    tell(patience_s=collective_s + GRACE_S)
    if device.type == "cuda":
        # Or its watchdog would end the ranks that wait like the one that hangs.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        torch.cuda.set_device(device)
    world, timeout = parameters["world"], timedelta(seconds=collective_s)
    distributed.init_process_group(parameters["backend"], store=store, rank=rank, world_size=world, timeout=timeout)
    tell(place="formed")
    _sum_cases(tell, parameters, rank, device)
    tell(place="timed", seconds=_timed(parameters, device))
    # Nobody's sockets go before everybody is done.
    distributed.barrier()
    distributed.destroy_process_group()


def _meet(tell: Tell, parameters: Facts, rank: int) -> "TCPStore":
    """Wait until all ranks are there."""
    from torch import distributed

    world, join_s = parameters["world"], parameters["join_s"]
    address, port = parameters["master"]
    tell(patience_s=join_s + GRACE_S)
    store = distributed.TCPStore(
        address, port, world, is_master=rank == 0, timeout=timedelta(seconds=join_s), wait_for_workers=False
    )
    store.set(f"here {rank}", "")
    tell(place="joined")
    store.wait([f"here {each}" for each in range(world)], timedelta(seconds=join_s))
    return store


def _sum_cases(tell: Tell, parameters: Facts, rank: int, device: "torch.device") -> None:
    from torch import distributed

    world = parameters["world"]
    for case, (size, dtype) in enumerate(parameters["cases"]):
        addend = _numbers(rank, world, size, dtype)
        expected = _numbers(None, world, size, dtype)
        given = addend.to(device)
        tell(place=[case, "entered"])
        try:
            distributed.all_reduce(given)
        except RuntimeError as error:
            if "scalar type" not in str(error):
                raise
            # This torch cannot add them with this backend; all ranks are told so before anything is sent.
            tell(place=[case, "finished"], result={"unsupported": str(error).splitlines()[0]})
            continue
        result = given.cpu()
        tell(place=[case, "finished"], result={"hash": _hash(result), "wrong": _wrong(result, expected)})
        if case == 0:
            tell(addresses=_addresses(parameters["master"][1]))


def _timed(parameters: Facts, device: "torch.device") -> list[float]:
    import torch
    from torch import distributed

    size, repeats = parameters["timed"]
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
    """What a rank adds, or the sum over all; at least one element."""
    import torch

    places = torch.arange(PERIOD)
    total = torch.zeros(PERIOD, dtype=torch.int64)
    spread = -(-world // MOST_ADDENDS)
    for each in range(world) if rank is None else (rank,):
        total += ((places * 7919 + each * 104729) >> 3) % 4 * ((places + each) % spread == 0)
    kind: torch.dtype = getattr(torch, dtype)
    count = max(1, size // kind.itemsize)
    return total.to(kind).repeat(-(-count // PERIOD))[:count].clone()


def _hash(tensor: "torch.Tensor") -> str:
    import torch

    return hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()[:16]


def _wrong(result: "torch.Tensor", expected: "torch.Tensor") -> dict[str, Any] | None:
    different = (result != expected).nonzero().flatten()
    if not len(different):
        return None
    first = int(different[0])
    return {"count": len(different), "index": first, "got": repr(result[first].item()), "expected": int(expected[first].item())}


def _addresses(store_port: int) -> list[str]:
    """Own addresses of the connections to the other ranks; none when they go through no sockets."""
    found = [entry for entry in psutil.Process().net_connections("tcp") if entry.status == psutil.CONN_ESTABLISHED]
    return sorted({entry.laddr.ip for entry in found if entry.raddr.port != store_port and entry.laddr.port != store_port})
