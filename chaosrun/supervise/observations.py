"""Observed faults: turns markers, notes, deaths and hangs into `fault.requested` and `fault.observed`.

A fault counts as observed when independent evidence confirms it, of the sort that its kind requires (`faults.kind.Evidence`).
Decides nothing about attempts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from msgspec import structs

from chaosrun.cluster.messages import Exited
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.kind import PREEMPTED_EXIT_CODE
from chaosrun.faults.landed import death_problem, hang_problem, note_problem
from chaosrun.faults.observed import Death, HungRank, Observation, RecordedEnd
from chaosrun.faults.process import TAKEN, NoticeNote
from chaosrun.plan.missed import Missed, Outlook, first_missed
from chaosrun.records.codec import changed, to_plain
from chaosrun.records.events import FaultObserved, FaultRequested, FaultWithdrawn, SilentRank
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import Marker, Note, read_end, read_marker, read_markers, read_note, withdraw_marker
from chaosrun.records.order import WorkerOrder
from chaosrun.supervise.deaths import failure_of
from chaosrun.supervise.failure import Failure

Record = Callable[..., None]
"""`record(event, durable=…)`: append to the journal."""


class Observations:
    """The faults of one leg, and which of them have been seen."""

    def __init__(self, leg: LegLayout, plan: FaultPlan, record: Record, *, by_script: bool = False) -> None:
        """`by_script`: the script resumes by itself."""
        self._leg, self._by_script = leg, by_script
        self._faults: dict[str, Fault] = {}
        self._of_rank: dict[int, list[str]] = {}
        """Faults by the rank that they strike, so that the ends of a thousand ranks are each compared with their own faults
        only."""
        self._complete: set[tuple[str, int]] = set()
        """Groups all of whose faults had reached their points, with the attempt."""
        self._record = record
        self._ended_by = "another supervisor took over"
        """What ended the attempt before, in words."""
        self.observed: set[str] = set()
        self.requested: set[str] = set()
        for fault in plan.faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """Add a fault of the plan, or one injected while the leg runs."""
        self._faults[fault.id] = fault
        self._of_rank.setdefault(fault.rank, []).append(fault.id)

    def of_death(self, exited: Exited) -> str | None:
        """The fault that this death proves; None when it proves none."""
        who = (exited.attempt, exited.rank, exited.pid)
        for fault, marker in self._unobserved(self._of_rank.get(exited.rank, ())):
            if (marker.attempt, marker.rank, marker.pid) != who:
                continue
            note = read_note(self._leg, fault.id, fault.facts.note)
            death = Death(
                end=self._end_of(exited.attempt, exited.rank),
                note=note and to_plain(note),
                after_s=round(exited.died_s - marker.time_s, 6),
                killed=exited.killed,
                collected=exited.collected,
                alone=not self._is_complete(fault, exited.attempt),
                of_script=self._by_script,
            )
            code, number = exited.exit_code, exited.signal
            seen = Observation(fault=fault, pid=exited.pid, exit_code=code, signal=number, death=death, note=note)
            if note and fault.facts.may_end and note_problem(seen) is None and code not in (None, 0):
                self.see(fault.id, marker, how="note", found=note)
                return fault.id
            if death_problem(seen) is None:
                ended = {"exit_code": code, "signal": number, "died_s": exited.died_s}
                self.see(fault.id, marker, how="death", found=death, **ended)
                return fault.id
        return None

    def leaves(self, fault: str, exited: Exited) -> bool:
        """Whether other ranks may still be leaving on the notice on which this one left."""
        if not self._faults[fault].facts.notice:
            return False
        told = (marker for each, marker in self._unobserved() if each.facts.notice and each.facts.evidence == "death")
        return exited.exit_code == PREEMPTED_EXIT_CODE or any(marker.attempt == exited.attempt for marker in told)

    def failure_of(self, exited: Exited) -> Failure | None:
        """Why this rank, which no fault ended, failed; None when it completed."""
        failure = failure_of(self._leg, exited)
        return replace(failure, leaving=True) if failure and self._leaves_with_another(exited) else failure

    def _leaves_with_another(self, exited: Exited) -> bool:
        """Whether it left together with a rank that is leaving on a notice: the ranks of a script often pass a notice on, and a
        rank that did not get it itself may be the first to exit."""
        end = read_end(self._leg.attempt(exited.attempt), exited.rank)
        if end is None or exited.exit_code is None:
            return False
        for fault, marker in self._unobserved():
            if fault.facts.notice and fault.facts.evidence == "death" and marker.attempt == exited.attempt:
                other = read_end(self._leg.attempt(marker.attempt), marker.rank)
                if end.status == "exited" or (other is not None and other.told is not None):
                    return True
        return False

    def _is_complete(self, fault: Fault, attempt: int) -> bool:
        """Whether all faults that strike together with this one have reached their trigger points in this attempt."""
        if fault.group is None:
            return True
        if (fault.group, attempt) not in self._complete:
            markers = read_markers(self._leg)
            members = [markers.get(each.id) for each in self._faults.values() if each.group == fault.group]
            if any(marker is None or marker.attempt != attempt for marker in members):
                return False
            self._complete.add((fault.group, attempt))
        return True

    def of_broken_groups(self, attempt: int) -> None:
        """After an attempt: let a fault that waited in vain for others of its group strike again with them."""
        for fault, marker in self._unobserved():
            if fault.group is not None and marker.attempt == attempt and not self._is_complete(fault, attempt):
                self.withdraw(fault.id, "its attempt ended before all that strike together had come")

    def _end_of(self, attempt: int, rank: int) -> RecordedEnd | None:
        if (end := read_end(self._leg.attempt(attempt), rank)) is None:
            return None
        if (error := end.error) is None:
            return RecordedEnd(status=end.status)
        words = f"{error.type}: {error.message}"
        return RecordedEnd(status=end.status, error=words, fault=error.fault, errno=error.errno, told=end.told == rank)

    def attempt_ended(self, attempt: int, planned: str | None, failure: Failure | None) -> None:
        fault = self._faults.get(planned or "")
        self._ended_by = f"attempt {attempt} ended unplanned" + (f" ({failure.message})" if failure else "")
        if fault is not None:
            self._ended_by = f"{fault.id} ({fault.describe()}) ended attempt {attempt}"

    def missed(self, order: WorkerOrder, *, resume: int, passed: Mapping[str, int]) -> Missed | None:
        """A planned fault that can no longer happen when the next attempt resumes at step `resume`; None before the first
        attempt. `passed`: how many earlier attempts passed each phase that occurs once an attempt.
        """
        if not passed.get("rendezvous"):
            return None
        outlook = Outlook(
            attempt=passed["rendezvous"] + 1,
            resume=resume,
            restores=passed.get("restore.begin", 0),
            every=order.every_steps,
            last=order.max_steps,
            struck={fault: marker and marker.attempt for fault, marker in read_markers(self._leg).items()},
            observed=self.observed,
            ended_by=self._ended_by,
        )
        missed = first_missed(list(self._faults.values()), outlook)
        return missed and replace(missed, taken=self._was_taken(missed.fault))

    def _was_taken(self, notice: Fault) -> bool:
        """Whether an attached script's own handler took the notice."""
        if not notice.facts.notice or (marker := read_marker(self._leg, notice.id)) is None:
            return False
        note = read_note(self._leg, notice.id, notice.facts.note)
        if isinstance(note, NoticeNote) and note.taken:
            return True
        end = read_end(self._leg.attempt(marker.attempt), marker.rank)
        return end is not None and end.own_sigterm

    def of_hang(self, attempt: int, rank: int, found: SilentRank) -> str | None:
        """The fault that explains why this rank stopped making progress; `found` is the state in which its process was
        found."""
        for fault, marker in self._unobserved():
            if fault.facts.evidence == "hang" and (marker.attempt, marker.rank) == (attempt, rank):
                hang = HungRank(**structs.asdict(found))
                problem = hang_problem(Observation(fault=fault, pid=marker.pid, hang=hang))
                self.see(fault.id, marker, how="hang", found=changed(hang, problem=problem.words) if problem else hang)
                return None if problem else fault.id
        return None

    def of_notes(self, *, at_last: bool = False) -> None:
        """Record final notes as observations; with `at_last` also notes that are not final, as the leg is over. If the fault's
        kind requires other evidence, only a note that explains its absence is recorded."""
        if not self._leg.notes.is_dir():
            return
        for fault, marker in self._unobserved():
            note = read_note(self._leg, fault.id, fault.facts.note)
            if note and (note.final or at_last) and (fault.facts.evidence == "note" or note.problem):
                self.see(fault.id, marker, how="note", found=note)

    def conclude(self) -> None:
        """At the end of the leg: journal the requests of faults that were claimed and never seen, and who took a notice."""
        self.of_notes(at_last=True)
        for fault, marker in self._unobserved():
            if fault.facts.note is NoticeNote and self._was_taken(fault):
                self.see(fault.id, marker, how="note", found=TAKEN)
            else:
                self.request(fault.id, marker)

    def see(self, fault: str, marker: Marker, *, how: str, found: Death | HungRank | Note, **ended: Any) -> None:
        """Journal that a fault was requested, unless that is journalled already, and that it was observed."""
        self.request(fault, marker)
        self.observed.add(fault)
        who = {"attempt": marker.attempt, "rank": marker.rank, "pid": marker.pid}
        self._record(FaultObserved(fault=fault, how=how, found=to_plain(found), **who, **ended))

    def withdraw(self, fault: str, reason: str) -> bool:
        """Let a fault strike again that was claimed but cannot be shown to have struck. False when it cannot, because others of
        its group have been seen to strike and it would wait for them; it is reported as missed when the next attempt is due."""
        group = self._faults[fault].group if fault in self._faults else None
        met = {each.id for each in self._faults.values() if group is not None and each.group == group and each.phase}
        if fault in met and met & self.observed:
            return False
        withdraw_marker(self._leg, fault)
        self._complete.clear()
        if fault in self.requested:
            self.requested.discard(fault)
            self._record(FaultWithdrawn(fault=fault, reason=reason))
        return True

    def request(self, fault: str, marker: Marker, *, durable: bool = False) -> None:
        """Journal, from its marker, that a fault is about to strike or has struck."""
        if fault in self.requested:
            return
        self.requested.add(fault)
        where = {"attempt": marker.attempt, "rank": marker.rank, "step": marker.step, "phase": marker.phase}
        self._record(FaultRequested(fault=fault, requested_s=marker.time_s, **where), durable=durable)

    def _unobserved(self, of: Iterable[str] | None = None) -> list[tuple[Fault, Marker]]:
        """Faults of the plan, or of these, that have a readable marker and have not been observed."""
        markers = read_markers(self._leg) if of is None else {fault: read_marker(self._leg, fault) for fault in sorted(of)}
        return [
            (self._faults[fault], marker)
            for fault, marker in markers.items()
            if marker and fault not in self.observed and fault in self._faults
        ]
