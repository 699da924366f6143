"""Scripts with checkpoints of their own, observed by hooks in ranks that a real fork server starts and real signals kill."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaosrun.cluster.forkserver import PRELOAD
from chaosrun.cluster.forkserver import TARGET as WORKER
from chaosrun.faults.fault import Fault
from chaosrun.records.layout import LegLayout
from chaosrun.records.trace_reader import read_trace
from chaosrun.records.traces import RankTrace, StepRecord
from tests.integration.ranks import make_orders
from tests.integration.test_forkserver import Server

SCRIPTS = Path(__file__).parent / "scripts"
RECORDED = ("ids", "batch", "rng", "loss", "lr", "grad", "param", "state")


class Ranks:
    """Runs attempts of a script."""

    def __init__(self, server: Server, root: Path) -> None:
        self._server = server
        self.reference, self.chaos = root / "reference", root / "chaos"

    def run(
        self,
        leg: Path,
        script: str,
        *args: str,
        workers: int = 1,
        attempt: int = 1,
        kill: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> dict[int, Any]:
        """One attempt to its end: how each rank ended, its exit code or minus the signal."""
        (leg / "output").mkdir(parents=True, exist_ok=True)
        about = {"leg": leg.name, "script": str(SCRIPTS / script), "cwd": str(leg), "args": args, "by": "script", **more}
        about |= {"attempt": attempt, "reference_path": str(self.reference) if leg == self.chaos else None}
        orders = [replace(order, **about) for order in make_orders(leg, "", workers=workers)]
        if kill is not None:
            fault = Fault(**{"id": f"f{attempt}", "rank": workers - 1, "source": "test", **kill})
            orders[fault.rank] = replace(orders[fault.rank], faults=(fault.to_json(),))
        self._server.start(orders, listen=True)
        events = self._server.until("stopped")
        return {e["rank"]: -e["signal"] if e["signal"] else e["exit_code"] for e in events if e["event"] == "exited"}

    def drill(
        self, script: str, *args: str, workers: int = 1, kill: Mapping[str, Any], then: Sequence[str] = (), **more: Any
    ) -> None:
        """A reference, an attempt that is killed, and its restart, which gets the arguments `then` besides."""
        assert set(self.run(self.reference, script, *args, workers=workers, **more).values()) == {0}, self.log(self.reference)
        assert self.run(self.chaos, script, *args, workers=workers, kill=kill, **more)[workers - 1] == -9, self.log(self.chaos)
        again = self.run(self.chaos, script, *args, *then, workers=workers, attempt=2, **more)
        assert set(again.values()) == {0}, self.log(self.chaos, attempt=2)

    def trace(self, leg: Path, *, attempt: int = 1, rank: int = 0) -> RankTrace:
        problems: list[str] = []
        found = read_trace(LegLayout(leg).attempt(attempt).trace(rank), attempt, rank, problems)
        assert not problems, problems
        return found

    def log(self, leg: Path, *, attempt: int = 1, rank: int = 0) -> str:
        return LegLayout(leg).attempt(attempt).log(rank).read_text()

    def first_difference(self, *, rank: int = 0, attempt: int = 2) -> tuple[int, list[str]] | None:
        """The first step of the restart that is not the reference's, and in what."""
        expected = self.trace(self.reference, rank=rank).steps
        for step in self.trace(self.chaos, attempt=attempt, rank=rank).steps.values():
            if differing := _differing(step, expected[step.step]):
                return step.step, differing
        return None

    def ends_equal(self, *, rank: int = 0) -> bool:
        ends = [self.trace(self.reference, rank=rank).end, self.trace(self.chaos, attempt=2, rank=rank).end]
        assert ends[0] and ends[1]
        return (ends[0].step, ends[0].digests) == (ends[1].step, ends[1].digests)


def _differing(step: StepRecord, expected: StepRecord) -> list[str]:
    return [name for name in RECORDED if getattr(step, name) != getattr(expected, name)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(preload=PRELOAD, target=WORKER)
    try:
        assert server.next()["event"] == "ready"
        yield server
        server.end()
    finally:
        server.clean()


@pytest.fixture
def ranks(server: Server, tmp_path: Path) -> Ranks:
    return Ranks(server, tmp_path)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_script_comes_back_by_itself(ranks: Ranks, workers: int) -> None:
    ranks.drill("plain_ddp.py", workers=workers, kill={"at_step": 10})
    for rank in range(workers):
        killed, again = ranks.trace(ranks.chaos, rank=rank), ranks.trace(ranks.chaos, attempt=2, rank=rank)
        assert killed.start and killed.start.found is None and killed.steps.last == 10
        assert again.start and again.start.found and again.start.position.step == 8
        found = again.start.found
        assert (found.step, found.weights, found.optimizer, found.rng, found.data) == (8, (8,), (8,), (8,), (8,))
        assert list(again.steps) == list(range(9, 12 + 1 if workers == 3 else 36 + 1))
        assert all(step.knows_ids and len(step.loss) == 1 for step in again.steps.values())
        assert ranks.first_difference(rank=rank) is None and ranks.ends_equal(rank=rank)
        assert again.buckets[0].primed == (workers > 1)


def test_three_ranks_without_priming_show_what_torch_does(ranks: Ranks) -> None:
    ranks.drill("plain_ddp.py", workers=3, kill={"at_step": 10}, prime_buckets=False)
    again = ranks.trace(ranks.chaos, attempt=2)
    assert again.start and again.start.found and again.start.found.step == 8
    assert not again.buckets[0].primed
    first = ranks.first_difference()
    assert first and first[0] == 9 and first[1][0] == "grad"


@pytest.mark.parametrize(
    ("forgotten", "missing", "first"),
    [
        ("optimizer", "optimizer", "param"),
        pytest.param("rng", "rng", "rng", marks=pytest.mark.nightly),
        pytest.param("data", "data", "ids", marks=pytest.mark.nightly),
        ("all", None, None),
    ],
)
def test_what_a_script_forgets_is_seen_where_it_starts(
    ranks: Ranks, forgotten: str, missing: str | None, first: str | None
) -> None:
    ranks.drill("plain_ddp.py", "--epochs", "2", kill={"at_step": 10}, then=("--forget", forgotten))
    start = ranks.trace(ranks.chaos, attempt=2).start
    assert start and start.found
    if missing is None:
        assert (start.found.step, start.position.step) == (0, 0) and ranks.ends_equal()
        return
    assert start.found.step is None and start.position.step == 8
    agreeing = {name: 8 in getattr(start.found, name) for name in ("weights", "optimizer", "rng", "data")}
    assert agreeing == {name: name != missing for name in agreeing}
    step, differing = ranks.first_difference() or (0, [])
    assert step == 9 and first in differing


@pytest.mark.parametrize(
    "phase",
    [
        "reduce",
        *(pytest.param(p, marks=pytest.mark.nightly) for p in ("rendezvous", "fetch", "forward", "optimizer", "record")),
    ],
)
def test_every_point_of_a_step_can_be_struck_at(ranks: Ranks, phase: str) -> None:
    at = {} if phase == "rendezvous" else {"at_step": 6}
    ended = ranks.run(ranks.chaos, "plain_ddp.py", "--epochs", "1", workers=2, kill={"phase": phase, **at})
    assert ended[1] == -9
    trace = ranks.trace(ranks.chaos, rank=1) if at else None
    assert (len(trace.steps) if trace else 0) == {"rendezvous": 0, "record": 6}.get(phase, 5)


def test_a_script_that_trains_nothing(ranks: Ranks) -> None:
    ended = ranks.run(ranks.reference, "plain_ddp.py", "--epochs", "0")
    assert ended == {0: 4} and "without a step of any optimizer" in ranks.log(ranks.reference)


def test_parameters_that_come_in_later_are_refused(ranks: Ranks) -> None:
    """Nobody would compare them. Those of a later stage that were there before are no matter: the loop `stages`."""
    ended = ranks.run(ranks.reference, "loops.py", "one_after_the_other")
    assert ended[0] not in (0, None) and "4 parameters at step 2 that no trained model held at the first step" in ranks.log(
        ranks.reference
    )


def test_an_optimizer_that_was_saved_apart_from_its_model_is_told_of(ranks: Ranks) -> None:
    assert ranks.run(ranks.chaos, "loops.py", "optimizer_apart", kill={"at_step": 3}) == {0: -9}
    ended = ranks.run(ranks.chaos, "loops.py", "optimizer_apart", attempt=2)
    assert ended[0] not in (0, None) and "unpickled apart from its model" in ranks.log(ranks.chaos, attempt=2)


def test_max_steps_end_a_script(ranks: Ranks) -> None:
    assert ranks.run(ranks.reference, "plain_ddp.py", workers=2, max_steps=7) == {0: 0, 1: 0}
    end = ranks.trace(ranks.reference, rank=1).end
    assert end and end.step == 7


LOOPS: dict[str, tuple[int, int, int, int]] = {
    # Workers, steps, micro-batches of a step, losses of a step.
    "gan": (1, 12, 0, 0),
    "two_optimizers": (1, 6, 1, 1),
    "built_after_a_pass": (1, 6, 1, 1),
    "replaced_after_a_pass": (1, 6, 1, 1),
    "tried_before": (1, 6, 1, 1),
    "made_at_the_first_step": (1, 6, 1, 1),
    "made_before_backward": (1, 6, 1, 1),
    "measured_at_each_start": (1, 6, 0, 1),
    "tried_at_each_start": (1, 6, 0, 1),
    "stepped_at_each_restart": (1, 6, 1, 1),
    "together": (1, 6, 2, 2),
    "stages": (1, 6, 1, 1),
    "scaler": (1, 6, 1, 1),
    "closures": (1, 6, 0, 0),
    "accumulation": (1, 6, 3, 3),
    "no_sync": (3, 6, 2, 2),
    "accelerated": (1, 6, 2, 2),
    "evaluation": (1, 6, 1, 1),
    "nested": (1, 6, 1, 1),
    "in_parts": (1, 6, 1, 1),
    "recomputed": (1, 6, 1, 1),
    "inside_backward": (1, 6, 1, 1),
    "functional": (1, 6, 1, 1),
    "in_evaluation_mode": (1, 6, 1, 1),
    "clipped_weights": (1, 6, 1, 1),
    "compiled": (1, 6, 1, 1),
    "compiled_step": (1, 6, 1, 1),
    "fsdp1": (2, 6, 1, 1),
    "fsdp2": (2, 6, 1, 1),
}


SLOW = (
    "compiled_step",
    "gan",
    "nested",
    "clipped_weights",
    "together",
    "stages",
    "no_sync",
    "in_evaluation_mode",
    "accelerated",
    "evaluation",
    "in_parts",
    "recomputed",
    "inside_backward",
    "functional",
    "compiled",
    "fsdp1",
)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind in SLOW)) for kind in LOOPS])
def test_loops_of_many_kinds_are_counted_and_come_back(ranks: Ranks, kind: str) -> None:
    workers, steps, batches, losses = LOOPS[kind]
    ranks.drill("loops.py", kind, workers=workers, kill={"at_step": steps - 1})
    for rank in range(workers):
        trace, again = ranks.trace(ranks.reference, rank=rank), ranks.trace(ranks.chaos, attempt=2, rank=rank)
        assert list(trace.steps) == list(range(1, steps + 1))
        if batches:
            assert {(len(step.batch), len(step.loss)) for step in trace.steps.values()} == {(batches, losses)}
        assert again.start and again.start.found
        assert again.start.found.step == steps * 2 // 3, again.start.found
        assert again.end and again.end.digests["optimizer"]
        assert ranks.first_difference(rank=rank) is None and ranks.ends_equal(rank=rank)


def test_optimizers_that_are_built_within_a_step_are_parts_of_it(ranks: Ranks) -> None:
    """Also in the first step of a restart, whose state is whole only at its end."""
    ranks.drill("loops.py", "built_in_turn", kill={"at_step": 5})
    assert list(ranks.trace(ranks.chaos, attempt=2).steps) == [5, 6]
    assert ranks.first_difference() is None and ranks.ends_equal()


def test_a_restart_without_a_step_left_ends_with_what_it_has_loaded(ranks: Ranks) -> None:
    # Its model and optimizers are a function's own: gone when the script has ended.
    ranks.drill("loops.py", "two_optimizers", kill={"at_step": 6})
    again = ranks.trace(ranks.chaos, attempt=2)
    assert again.start and again.start.found and again.start.found.step == 6 and not again.steps
    assert ranks.ends_equal()
