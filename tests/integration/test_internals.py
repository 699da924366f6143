"""accelerate's internals: every way of preparing a loader is killed in the middle of its second epoch and comes back exactly.

The table is the product of loader, split_batches, ending and source, as far as accelerate takes them; rng_types, precision and
the rest go round in it. `make test` runs a part in which every value of every column occurs, `make nightly` runs it all.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path

import pytest

from chaosrun.verify.verdict import Verdict
from tests.conftest import WarmDrills, job_file

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).parent / "internals" / "train.py"
STEPS = 12
"""3 epochs of 4 steps."""
KILLED_AT = 7
RESUMED_FROM = 6
"""After two batches of the second epoch."""
JOB = """\
name: internals
script: {script}
args: [{args}]
workers: {workers}
seed: 1
checkpoint: {{every_steps: 2}}
recovery: {{hang_timeout: 30s}}
faults: {{schedule: [{{rank: {rank}, at_step: {killed_at}}}]}}
verify: {{confirm: false}}
timeout: 300s
"""
WORKERS = (1, 2, 3)
STREAMS = ("stream", "epoch-stream", "drawn-stream")
SOURCES = ("shuffle", "sampler", "batches", "strided", "nested", "ragged", "augmented", *STREAMS)
RNG_TYPES = ("", "--rng-types torch", "--rng-types", "--rng-types torch generator", "--rng-types generator")
EXTRAS = ("", "--precision bf16", "--scheduler plateau", "--precision scaler", "--loader-workers 2")


def table() -> Iterator[str]:
    """The arguments of every case."""
    rng_types, extras = cycle(RNG_TYPES), cycle(EXTRAS)
    for loader, split, ending, source in product(("shard", "dispatcher"), (False, True), ("even", "drop", "uneven"), SOURCES):
        # A dispatcher and a stream take no notice of even_batches; a dispatcher drops a sampler of batches.
        if ending == "uneven" and (loader == "dispatcher" or source in STREAMS):
            continue
        if loader == "dispatcher" and source in ("nested", "ragged"):
            continue
        # Batches without a size can neither be split nor evened out, a sampler of batches cannot be split.
        if (source == "ragged" and (split or ending != "uneven")) or (source == "nested" and split):
            continue
        words = [f"--loader {loader}", "--split" if split else "", f"--ending {ending} --source {source}"]
        yield " ".join(word for word in (*words, next(rng_types), next(extras)) if word)
    yield "--source shuffle --loader-workers 2 --persistent --rng-types torch"
    yield "--loader dispatcher --source strided --loader-workers 2 --persistent"
    yield "--source stream --loader-workers 2 --persistent --rng-types torch"


CASES = [(args, workers) for args in table() for workers in WORKERS if workers > 1 or "nested" not in args]
"""accelerate itself fails for a sampler of batches in a single process."""


def covering() -> list[tuple[str, int]]:
    """Cases, as few as a greedy choice needs, with every value of every column, at 3 workers or, every other time, at 2."""
    wanted = {value for args, _ in CASES for value in values(args)}
    chosen: list[tuple[str, int]] = []
    while wanted:
        args = max(dict(CASES), key=lambda args: len(values(args) & wanted))
        wanted -= values(args)
        chosen.append((args, 3 - len(chosen) % 2))
    return chosen


def values(args: str) -> set[str]:
    """ "--ending even", "--split", "--rng-types torch generator", …"""
    return {f"--{part.strip()}" for part in args.split("--") if part.strip()}


FEW = covering()
ALONE = [("--loader dispatcher --ending even --source shuffle", 1), ("--split --source drawn-stream", 1)]
"""By night, though each of their values is met by day: one worker wants a placement of its own."""


@dataclass(slots=True, kw_only=True)
class Drills:
    warm: WarmDrills
    folder: Path

    def __call__(self, args: str, workers: int, killed_at: int = KILLED_AT) -> Verdict:
        words = ", ".join(args.split())
        job = JOB.format(script=SCRIPT, args=words, workers=workers, rank=workers - 1, killed_at=killed_at)
        path = job_file(job, self.folder)
        return self.warm(path, root=self.folder / "root").verdict


@pytest.fixture
def drills(warm_drills: WarmDrills, tmp_path: Path) -> Drills:
    return Drills(warm=warm_drills, folder=tmp_path)


def assert_exact(verdict: Verdict, resumed_from: int = RESUMED_FROM) -> None:
    assert verdict.status == "PASS", verdict.cause
    assert verdict.steps == STEPS
    assert [fault.landed for fault in verdict.faults] == [True]
    # The second attempt went on in the middle of the second epoch.
    assert [(attempt.resumed_step, attempt.first_step) for attempt in verdict.attempts] == [
        (0, 1),
        (resumed_from, resumed_from + 1),
    ]
    # And what gather_for_metrics made of the last batch of that epoch was compared.
    assert next(check for check in verdict.checks if check.name == "final_registered").status == "pass"


OTHERS = [pytest.param(*case, marks=pytest.mark.nightly) for case in (*(case for case in CASES if case not in FEW), *ALONE)]


@pytest.mark.parametrize(("args", "workers"), [*FEW, *OTHERS])
def test_a_loader_comes_back_exactly(drills: Drills, args: str, workers: int) -> None:
    assert_exact(drills(args, workers))


@pytest.mark.parametrize("loader", ["shard", pytest.param("dispatcher", marks=pytest.mark.nightly)])
def test_a_stream_killed_at_the_end_of_an_epoch_goes_on_with_the_next(drills: Drills, loader: str) -> None:
    # Nobody can tell that the first epoch is over but by reading it to its end.
    verdict = drills(f"--loader {loader} --source epoch-stream --rng-types torch", 2, killed_at=5)
    assert_exact(verdict, resumed_from=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """What accelerate does by itself, in the attempt that is restored, and how that is found."""

    stock: str
    args: str
    cause: str
    kind: str
    step: int = RESUMED_FROM + 1
    workers: int = 2


CONTROLS = {
    # The dispatcher's loader skips batches as the dataset has them, one for each rank and step.
    "D8": Control(stock="skip", args="--loader dispatcher", cause="1 batch repeated", kind="batch"),
    # The epoch does not pass the skipping sampler.
    "D9": Control(stock="skip-then-epoch", args="--loader dispatcher", cause="repeated|sampler epoch", kind="batch"),
    # The right count for a dispatcher; what fills up the last batch is not the epoch's first any more.
    "D8-filled": Control(
        stock="skip-dispatched", args="--loader dispatcher", cause="order", kind="batch", step=RESUMED_FROM + 2, workers=3
    ),
    # The skipping loader does not know its batch size, hence not how much of the last batch is padding.
    "D12": Control(stock="skip", args="--ending even", cause="metric/count", kind="registered", step=RESUMED_FROM + 2),
    "D10": Control(stock="epoch", args="--source augmented", cause="batch contents", kind="batch"),
    "D15-batches": Control(stock="epoch", args="--source batches", cause="sampler epoch not set", kind="data order"),
    "D15-nested": Control(stock="epoch", args="--source nested", cause="data order|sampler epoch", kind="data order"),
    "R1": Control(stock="rng", args="--rng-types torch", cause="RNG", kind="rng"),
}


@pytest.mark.parametrize(
    "name", [name if name in ("D8", "D12") else pytest.param(name, marks=pytest.mark.nightly) for name in CONTROLS]
)
def test_what_accelerate_gets_wrong_is_found(drills: Drills, name: str) -> None:
    """By day oracle/test_mutants.py has the causes of D15-batches and R1: epochs not set, random streams not restored."""
    control = CONTROLS[name]
    verdict = drills(f"{control.args} --stock {control.stock}", control.workers)
    assert (verdict.status, verdict.exit_code) == ("FAIL", 3), verdict.cause
    assert verdict.divergence is not None
    assert re.search(control.cause, verdict.cause), verdict.cause
    assert (verdict.divergence.kind, verdict.divergence.step) == (control.kind, control.step)
    if control.stock == "rng":
        # Rank 0's own stream is the one that all were given.
        assert verdict.divergence.ranks == tuple(range(1, control.workers))


@pytest.mark.parametrize(
    ("args", "workers", "told"),
    [
        ("--ending short", 2, r"different numbers of batches \(4, 3\)"),
        pytest.param("--ending short --split", 3, r"different numbers of batches \(4, 3, 3\)", marks=pytest.mark.nightly),
        ("--source global", 2, "GlobalSampler draws from the global random stream"),
        ("--source buffer", 2, r"shuffles in a buffer \(ShufflerIterDataPipe\)"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(drills: Drills, args: str, workers: int, told: str) -> None:
    verdict = drills(args, workers)
    assert (verdict.status, verdict.exit_code, verdict.steps) == ("INCONCLUSIVE", 4, 0), verdict.cause
    assert re.search(told, verdict.cause), verdict.cause
    assert verdict.hint


@pytest.mark.gpu
def test_a_gradient_scaler_on_a_gpu_comes_back_exactly(tmp_path: Path) -> None:
    job = JOB.format(script=SCRIPT, args="--precision, fp16, --rng-types, torch, cuda", workers=1, rank=0, killed_at=KILLED_AT)
    path = job_file(job + "per_worker: {gpu: 1}\n", tmp_path)
    command = [Path(sys.executable).with_name("chaosrun"), "submit", path, "--root", tmp_path / "root"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
