"""What is drawn from a seed before anything runs: the job, its planned faults, and the troubles that nobody planned."""

import random
from dataclasses import dataclass, replace
from typing import Literal, get_args

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import Phase

TroubleKind = Literal[
    "rank_dies",
    "rank_leaves",
    "rank_hangs",
    "end_is_torn",
    "server_dies",
    "agent_dies",
    "agent_hangs",
    "node_dies",
    "messages_late",
    "messages_twice",
    "connection_breaks",
    "reply_lost",
    "strike_reply_lost",
    "clock_jumps",
    "disk_full",
    "disk_slow",
    "checkpoint_damaged",
    "supervisor_killed",
    "killed_at_disk",
    "killed_at_quarantine",
    "power_cut",
]
TROUBLES: tuple[str, ...] = get_args(TroubleKind)
COMMON: tuple[TroubleKind, ...] = ("rank_dies", "supervisor_killed", "killed_at_disk", "messages_late", "power_cut")
"""Drawn more often than others."""
ENDS = ("kill", "kill", "kill", "segfault", "abort", "exit", "exception", "stop", "hang")
PLACES: tuple[Phase, ...] = (
    *("step", "fetch", "forward", "reduce", "optimizer", "record"),
    *("checkpoint.begin", "checkpoint.file", "checkpoint.precommit", "checkpoint.postcommit", "checkpoint.retention"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    kind: TroubleKind
    at_s: float = 0.0
    """Since the drill began, or since the record of the journal that `record` counts."""
    record: int = 0
    """0: of none."""
    number: int = 0
    """Of a wait of the supervisor, of an operation on its disk, of a rank or a node."""
    amount: float = 0.0
    """Seconds it lasts, or a clock jumps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    seed: int
    workers: int
    nodes: int
    """Of a placement."""
    spares: int
    steps: int
    every: int
    keep: int
    max_restarts: int
    hang_timeout_s: float | None
    faults: tuple[Fault, ...]
    troubles: tuple[Trouble, ...]

    def without(self, part: Fault | Trouble) -> "Scenario":
        return replace(
            self,
            faults=tuple(each for each in self.faults if each is not part),
            troubles=tuple(each for each in self.troubles if each is not part),
        )

    def words(self) -> str:
        about = (
            f"{self.workers} ranks on {self.nodes} nodes (+{self.spares}), {self.steps} steps, a checkpoint every {self.every}"
        )
        lines = [f"{fault.id}: {fault.describe()}" for fault in self.faults]
        lines += [f"{t.kind}, {t.at_s:.3f} s after record {t.record}, {t.number}, {t.amount:.3f}" for t in self.troubles]
        return "\n  ".join([about, *lines])


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    drawn = random.Random(f"scenario {seed}")
    workers, nodes = drawn.randint(1, 4), drawn.choice([1, 1, 2, 2, 3])
    steps, every = drawn.randint(4, 9), drawn.choice([1, 2, 2, 3])
    return Scenario(
        seed=seed,
        workers=max(workers, nodes),
        nodes=nodes,
        spares=drawn.randint(0, 2),
        steps=steps,
        every=every,
        keep=drawn.randint(1, 3),
        max_restarts=drawn.randint(1, 3),
        hang_timeout_s=drawn.choice([None, 4.0, 4.0]),
        faults=_faults(drawn, max(workers, nodes), steps, every),
        troubles=tuple(_trouble(drawn) for _ in range(drawn.choice([0, 0, 1, 1, 1, 2, 2, 3, 4]))),
    )


def _faults(drawn: random.Random, workers: int, steps: int, every: int) -> tuple[Fault, ...]:
    """At later and later steps, so that each can be reached after the one before."""
    found: list[Fault] = []
    moments = sorted(drawn.sample(range(1, steps + 1), k=min(steps, drawn.randint(0, 3))))
    for step in moments:
        phase = drawn.choice(PLACES)
        if phase.startswith("checkpoint") and step % every:
            phase = "step"
        kind, members = drawn.choice(ENDS), [drawn.randrange(workers)]
        if workers > 1 and kind == "kill" and drawn.random() < 0.3:
            members = sorted(drawn.sample(range(workers), k=drawn.randint(2, workers)))
        group = f"g{step}/{len(members)}" if len(members) > 1 else None
        for rank in members:
            about = {"id": f"F{len(found) + 1}", "rank": rank, "phase": phase, "at_step": step, "group": group}
            found.append(Fault(kind=kind, source="simulation", **about))
    if drawn.random() < 0.2:
        after_s = drawn.uniform(0.05, 1.0)
        about = {"id": f"F{len(found) + 1}", "rank": drawn.randrange(workers), "phase": None, "after_s": after_s}
        found.append(Fault(kind="kill", source="simulation", required=False, **about))
    return tuple(found)


def _trouble(drawn: random.Random) -> Trouble:
    kind: TroubleKind = drawn.choice(COMMON) if drawn.random() < 0.5 else drawn.choice(get_args(TroubleKind))
    at_s, number = drawn.uniform(0.0, 3.0), drawn.randrange(4)
    amount = drawn.uniform(0.05, 3.0)
    match kind:
        case "supervisor_killed":
            number = drawn.randint(1, 60)
        case "killed_at_disk":
            number = drawn.randint(1, 150)
        case "power_cut":
            number = drawn.randint(1, 300)
        case "clock_jumps":
            amount = drawn.choice([-3600.0, -30.0, 30.0, 90.0, 3600.0, 86400.0])
        case "agent_hangs":
            amount = drawn.choice([0.5, 5.0, 30.0, 1e9])
        case "disk_full":
            amount = drawn.choice([0.1, 1.0, 10.0])
        case _:
            pass
    record = drawn.choice([0, drawn.randint(1, 40)])
    if record:
        at_s = drawn.choice([0.0, drawn.uniform(0.0, 0.02)])
    return Trouble(kind=kind, at_s=at_s, record=record, number=number, amount=amount)
