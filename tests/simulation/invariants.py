"""What the real code never may do, checked at every step of the world against what really happened there."""

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from chaosrun.checkpoint.audit import audit_directory
from chaosrun.checkpoint.retention import FEWEST_KEPT
from chaosrun.errors import InvalidCheckpointError
from chaosrun.records.codec import to_plain
from chaosrun.records.events import EVENTS, OUTCOMES, EventRecord, LegFinished
from chaosrun.records.history import history_of, journal_events
from chaosrun.records.layout import MANIFEST_NAME, checkpoint_name, checkpoint_step
from chaosrun.records.manifest import Manifest
from chaosrun.records.markers import read_marker
from tests.simulation.ranks import SimulatedRank, rank_state
from tests.simulation.world import Violation

if TYPE_CHECKING:
    from tests.simulation.drill import Simulation

RESTARTS = (
    *("rank_dies", "rank_leaves", "rank_hangs", "end_is_torn", "server_dies", "agent_dies", "node_dies", "reply_lost"),
    "checkpoint_damaged",
)
"""Troubles that may cost a restart each; as many as it may make, a leg survives."""
EXCUSES = ("disk_full", "agent_hangs")
"""Troubles that may end a leg: nothing more can be written, or nobody answers any more. All others cost nothing."""
SMALLEST_MANIFEST = 100


def _plain(record: EventRecord) -> EventRecord:
    """As JSON has it, without the name of the leg, which listeners are told beside every event."""
    return msgspec.json.decode(msgspec.json.encode({key: value for key, value in record.items() if key != "leg"}))


class Invariants:
    def __init__(self, simulation: "Simulation") -> None:
        self._simulation = simulation
        self._world = simulation.world
        self._leg = simulation.leg
        self._journal: list[EventRecord] = []
        """What listeners were told."""
        self._strikes: dict[str, list[SimulatedRank]] = {}
        self._observed: set[str] = set()
        self._committed: set[int] = set()
        """Steps whose commit has returned, and that nothing has spoilt since."""
        self._damaged: set[str] = set()
        self._aside: set[int] = set()
        self._attempt = 0
        """The last that was started."""
        self._over = 0
        """The last that has ended, or that nobody supervises any more."""

    # What happens

    def struck(self, fault: str, rank: SimulatedRank) -> None:
        self._strikes.setdefault(fault, []).append(rank)
        # A claim that was given back leaves its marker under another name.
        given_back = len(list(self._leg.faults.glob(f"{fault}.json.unseen-*")))
        if len(self._strikes[fault]) > 1 + given_back or fault in self._observed:
            raise Violation("fired_twice", f"{fault} has struck {len(self._strikes[fault])} times")

    def struck_from_outside(self, rank: SimulatedRank) -> None:
        timed = [fault.id for fault in self._simulation.scenario.faults if fault.phase is None and fault.rank == rank.rank]
        for fault in timed:
            self.struck(fault, rank)

    def committed(self, step: int) -> None:
        self._committed.add(step)
        self._damaged.discard(checkpoint_name(step))

    def damaged(self, name: str) -> None:
        self._damaged.add(name)
        self._committed.discard(checkpoint_step(name) or 0)

    def renamed(self, path: Path, target: Path) -> None:
        if target.parent == self._leg.checkpoints:
            self._complete(target.name)
        if target.parent == self._leg.staging:
            self._deleted(checkpoint_step(path.name) or 0)

    def _deleted(self, step: int) -> None:
        """By retention."""
        newer = [each for each in self._committed if each > step]
        if step in self._committed and len(newer) < FEWEST_KEPT:
            raise Violation("lost", f"the checkpoint of step {step} is deleted, of newer ones there are {sorted(newer)}")
        self._committed.discard(step)

    def _complete(self, name: str) -> None:
        """Whatever is given a checkpoint's name was complete at that moment."""
        folder, step = self._leg.checkpoints / name, checkpoint_step(name)
        ranks = range(self._simulation.scenario.workers)
        wanted = {f"chaosrun-rank-{rank}.pt": rank_state(step or 0, rank) for rank in ranks}
        wanted["model.safetensors"] = rank_state(step or 0, -1)
        found = {each: (folder / each).read_bytes() if (folder / each).exists() else None for each in wanted}
        if name not in self._damaged and (found != wanted or (folder / MANIFEST_NAME).stat().st_size < SMALLEST_MANIFEST):
            raise Violation("early_commit", f"{name} is not whole: {sorted(os.listdir(folder))}")

    def restored(self, rank: SimulatedRank, name: str, manifest: Manifest) -> None:
        folder = self._leg.checkpoints / name
        if (folder / f"chaosrun-rank-{rank.rank}.pt").read_bytes() != rank_state(manifest.step, rank.rank):
            raise Violation("wrong_state", f"rank {rank.rank} restored another state than that of step {manifest.step}")

    def recorded(self, record: EventRecord) -> None:
        self._journal.append(_plain(record))
        match record["event"]:
            case "attempt.starting":
                self._starting(record)
            case "attempt.stopped":
                self._stopped(record["attempt"])
            case "fault.observed":
                self._fault_observed(record)
            case "fault.withdrawn":
                self._withdrawn(record["fault"])
            case "checkpoint.quarantined":
                self._quarantined(record)
            case "leg.finished" if record["code"] != "unkillable":
                self._nobody_lives("the leg is finished")
            case _:
                pass

    def _starting(self, record: EventRecord) -> None:
        attempt = record["attempt"]
        self._nobody_lives(f"attempt {attempt} starts")
        if attempt != self._attempt + 1:
            raise Violation("journal", f"attempt {attempt} follows attempt {self._attempt}")
        self._attempt = attempt
        begun = checkpoint_step(record["resume"]) if record["resume"] else 0
        newest = max((step for step in self._committed if step not in self._aside), default=0)
        if (begun or 0) < newest:
            raise Violation("passed_over", f"attempt {attempt} begins from step {begun}, step {newest} is valid")
        if begun:
            # Whoever committed it was killed before it could say so.
            self._committed.add(begun)

    def _quarantined(self, record: EventRecord) -> None:
        step = record["step"]
        if ".invalid-" in (record["moved_to"] or "") and step in self._committed:
            raise Violation("lost", f"the checkpoint of step {step} was valid: {record['reason']}")
        self._aside.add(step)
        self._committed.discard(step)

    def _stopped(self, attempt: int) -> None:
        self._nobody_lives(f"attempt {attempt} is recorded as stopped")
        self._over = attempt

    def _withdrawn(self, fault: str) -> None:
        """Of an attempt that goes on, by the supervisor that has begun it: that one hears of all that strikes there."""
        struck = [rank for rank in self._strikes.get(fault, []) if rank.attempt == self._attempt]
        if struck and self._over < self._attempt:
            raise Violation("withdrawn", f"{fault} has struck rank {struck[0].rank}, and is withdrawn")

    def _nobody_lives(self, when: str) -> None:
        for process in self._simulation.processes.values():
            if process.is_alive:
                who = f"rank {process.rank} of attempt {process.attempt} (pid {process.pid})"
                raise Violation("outlived", f"{who} lives when {when}")

    def _fault_observed(self, record: EventRecord) -> None:
        fault = record["fault"]
        if fault in self._observed:
            raise Violation("observed_twice", fault)
        self._observed.add(fault)
        who = (record["attempt"], record["rank"], record["pid"])
        struck = any((rank.attempt, rank.rank, rank.pid) == who for rank in self._strikes.get(fault, []))
        if not struck and not self._is_killed_at_its_point(record):
            raise Violation("reported", f"{fault} is reported, and did not happen: {record}")

    def _is_killed_at_its_point(self, record: EventRecord) -> bool:
        """Its rank had claimed it, and was killed, as planned, a moment earlier: by its attempt's end."""
        kind = next(fault.kind for fault in self._simulation.scenario.faults if fault.id == record["fault"])
        process, marker = self._simulation.processes.get(record["pid"]), read_marker(self._leg, record["fault"])
        dead = process is not None and not process.is_alive and process.signal == signal.SIGKILL
        return kind == "kill" and dead and marker is not None and marker.pid == record["pid"]

    # What holds always

    def check(self) -> None:
        if len(self._simulation.living) > 1:
            raise Violation("two_attempts", f"processes of attempts {sorted(self._simulation.living)} run")

    def supervisor_is_gone(self, *, power_cut: bool) -> None:
        """The journal may have one event more than listeners heard of; after a power cut it may end earlier, but not before
        what has been acted upon."""
        kept = self._read_journal()
        both = min(len(kept), len(self._journal))
        self._same(kept[:both], self._journal[:both])
        if not power_cut and not len(self._journal) <= len(kept) <= len(self._journal) + 1:
            raise Violation("journal", f"{len(self._journal)} events were told, it holds {len(kept)}")
        known = {record["attempt"] for record in kept if record["event"] == "attempt.starting"}
        if lost := self._simulation.teams.keys() - known:
            raise Violation("journal", f"attempts {sorted(lost)} ran, and it does not know of them")
        self._journal = kept
        self._attempt = self._over = max(known, default=0)
        self._observed = {record["fault"] for record in kept if record["event"] == "fault.observed"}
        self._aside |= {record["step"] for record in kept if record["event"] == "checkpoint.quarantined"}
        for step in sorted(self._committed):
            self._is_there(step)

    def _read_journal(self) -> list[EventRecord]:
        """As far as whoever opens it goes on from: a power cut may leave a hole."""
        if not self._leg.journal.exists():
            return []
        sound, _, _ = self._leg.journal.read_bytes().partition(b"\0")[0].rpartition(b"\n")
        return [_plain(to_plain(EVENTS.decode(line))) for line in sound.splitlines()]

    def _same(self, kept: list[EventRecord], told: list[EventRecord]) -> None:
        if kept != told:
            differing = next((pair for pair in zip(kept, told, strict=False) if pair[0] != pair[1]), (len(kept), len(told)))
            raise Violation("journal", f"it holds other events than listeners were told: {differing}")

    def _is_there(self, step: int) -> None:
        try:
            audit_directory(self._leg.checkpoints / checkpoint_name(step), step)
        except InvalidCheckpointError as error:
            names = os.listdir(self._leg.quarantine) if self._leg.quarantine.is_dir() else []
            if any(name.startswith(f"{checkpoint_name(step)}.superseded-") for name in names):
                return
            if any(name.startswith(f"{checkpoint_name(step)}.unwanted-") for name in names):
                # Set aside on purpose, by a supervisor that was killed before it could say so: the next one has to.
                self._aside.add(step)
                return
            raise Violation("lost", f"the checkpoint of step {step} had been committed: {error.message}") from error

    # At last

    def finished(self, result: LegFinished) -> None:
        if result.outcome not in OUTCOMES:
            raise Violation("outcome", result.outcome)
        self._journal_agrees()
        supervisor = self._simulation.supervisor
        assert supervisor is not None
        # 0: of one that took over, and started none.
        if supervisor._attempt not in (0, self._attempt) or supervisor._observations.observed != self._observed:
            raise Violation("journal", f"it says {self._attempt}, {self._observed}; the supervisor knows otherwise")
        if result.outcome == "completed":
            attempt = max(self._simulation.teams)
            team = self._simulation.teams[attempt].members
            steps = self._simulation.scenario.steps
            if len(team) != self._simulation.scenario.workers or any(rank.step != steps for rank in team):
                raise Violation("false_end", f"attempt {attempt} has not completed the training")

    def _journal_agrees(self) -> None:
        self._same(self._read_journal(), self._journal)
        problems: list[str] = []
        history = history_of(self._leg, journal_events(self._leg.journal), None, problems)
        if problems:
            raise Violation("journal", "; ".join(problems))
        told = {Path(record["moved_to"]).name for record in self._journal if record["event"] == "checkpoint.quarantined"}
        lying = os.listdir(self._leg.quarantine) if self._leg.quarantine.is_dir() else []
        if unknown := sorted(name for name in lying if ".superseded-" not in name and name not in told):
            raise Violation("journal", f"{unknown} lie in quarantine, and nobody says why")
        if [attempt.number for attempt in history.attempts] != list(range(1, len(history.attempts) + 1)):
            raise Violation("journal", "attempts are missing")

    def at_last(self, outcome: str) -> None:
        """All is over, and some seconds have passed."""
        self._nobody_lives("all is over")
        scenario = self._simulation.scenario
        fired = self._simulation.fired
        restarts = sum(fired.get(kind, 0) for kind in RESTARTS)
        excused = any(kind in fired for kind in EXCUSES) or not any(node.is_alive for node in self._simulation.nodes)
        if restarts <= scenario.max_restarts and not excused and outcome not in ("completed", "fault_missed"):
            raise Violation("without_cause", f"the leg ended as {outcome}, and nothing that happened accounts for it")
        kinds = {fault.id: fault.kind for fault in scenario.faults}
        died = {fault for fault in self._strikes if kinds[fault] not in ("stop", "hang")}
        if not self._simulation.fired and (unseen := sorted(died - self._observed)):
            raise Violation("unseen", f"{', '.join(unseen)} ended a rank each, and nobody says so")
        if outcome == "completed" and not self._simulation.fired:
            missing = sorted({fault.id for fault in scenario.faults if fault.required} - self._observed)
            if missing:
                raise Violation("unseen", f"{', '.join(missing)} happened or should have, and was not observed")
