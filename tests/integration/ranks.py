"""Orders, waiting and process checks that the tests of the cluster share."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaosrun.processes import ProcessIdentity, is_alive
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from tests.records import order_of

TARGET = "tests.integration.fork_targets:main"


def make_orders(leg: Path, do: str | list[str], *, attempt: int = 1, workers: int = 3) -> list[WorkerOrder]:
    """Orders for `workers` ranks on one node; `do`, the only argument, is what each does."""
    each = [do] * workers if isinstance(do, str) else do
    sizes = dict.fromkeys(("world_size", "local_world_size"), len(each))
    return [order_of(leg, attempt=attempt, rank=rank, local_rank=rank, **sizes, args=(what,)) for rank, what in enumerate(each)]


def eventually(condition: Callable[[], Any], *, timeout_s: float = 120.0) -> Any:
    """The first true value of `condition`; fails when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def notes_of(leg: Path, rank: int, *, attempt: int = 1) -> dict[str, Any]:
    path = LegLayout(leg).attempt(attempt).path / f"rank-{rank}.notes.json"
    eventually(path.exists)
    return json.loads(path.read_text())


def alive(identities: list[ProcessIdentity]) -> list[ProcessIdentity]:
    return [identity for identity in identities if is_alive(identity)]
