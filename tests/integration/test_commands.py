"""Commands that start the ranks of a node themselves: who becomes a rank, how deaths are seen, and what is said when one fails."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaosrun.cluster.command import TARGET
from tests.integration.ranks import make_orders
from tests.integration.test_forkserver import Server

TRAIN = str(Path(__file__).parent / "commanded" / "train.py")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(target=TARGET)
    try:
        assert server.next()["event"] == "ready"
        yield server
        server.end()
    finally:
        server.clean()


def start(server: Server, leg: Path, *command: str, workers: int = 2, **about: Any) -> None:
    orders = make_orders(leg, "", workers=workers)
    orders = [replace(order, args=(), command=command, by="script", **about) for order in orders]
    started = server.start(orders, listen=True)
    assert started["pids"] == {}


def test_the_ranks_of_torchrun_announce_themselves_and_end(server: Server, tmp_path: Path) -> None:
    start(server, tmp_path, TORCHRUN, "--nproc-per-node", "{workers_per_node}", TRAIN, "3")
    *events, stopped = server.until("stopped")
    announced = {event["rank"]: event["pid"] for event in events if event["event"] == "announced"}
    assert sorted(announced) == [0, 1]
    exits = [event for event in events if event["event"] == "exited"]
    assert {event["rank"]: (event["pid"], event["exit_code"], event["completed"]) for event in exits} == {
        rank: (pid, 0, True) for rank, pid in announced.items()
    }
    assert stopped == {"event": "stopped", "attempt": 1, "killed": []}
