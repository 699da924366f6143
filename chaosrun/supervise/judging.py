"""Judges the restarts of a run in production while it runs, in a thread next to its supervisor, which collects the results.

An attempt is judged once every rank has repeated the steps done before it; an attempt that is over is judged as far as it came.
A resume at a wrong place is reported as soon as every rank has begun, since repeating all steps may take days.
`verify.production` says what is compared.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from chaosrun.records.events import (
    START,
    AttemptStarting,
    JournalEvent,
    Judgement,
    RecoveryAgreed,
    RecoveryDiverged,
    RecoveryUnjudged,
)
from chaosrun.records.history import LegHistory, read_leg
from chaosrun.records.layout import LegLayout
from chaosrun.records.trace_reader import read_ends, read_start, read_trace
from chaosrun.records.traces import RankTrace
from chaosrun.spec.model import JobSpec
from chaosrun.verify.confirm import NO_FAULTS
from chaosrun.verify.production import Recovery, judge_recovery

LOOK_EVERY_S = 0.5


class RecoveryJudge:
    """Judges attempts, which the supervisor reports as they begin and end."""

    def __init__(self, leg: LegLayout, spec: JobSpec) -> None:
        self._leg, self._spec = leg, spec
        self._since = 1
        """The newest attempt that differed; see `judge_recovery`."""
        self._changed = threading.Condition()
        self._open: dict[int, bool] = {}
        """Restarted attempts that have not been judged; whether they are over."""
        self._targets: dict[int, dict[int, int]] = {}
        """For each of those attempts, by rank, the last step that had been done before."""
        self._begun: set[int] = set()
        """Attempts whose beginning has been judged."""
        self._over: dict[tuple[int, int], RankTrace] = {}
        """Traces of attempts that are over, by attempt and rank."""
        self._found: list[Recovery] = []
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="chaosrun-judge", daemon=True)

    def take_over(self, past: Sequence[JournalEvent]) -> None:
        """Continue with the attempts that a former supervisor left unjudged."""
        judged = {event.attempt for event in past if isinstance(event, Judgement)}
        differed = (event.attempt for event in past if isinstance(event, RecoveryDiverged) and event.quantity != START)
        self._since = max(differed, default=1)
        for number in (event.attempt for event in past if isinstance(event, AttemptStarting) if event.attempt not in judged):
            self.began(number)
            self.ended(number)

    def began(self, attempt: int) -> None:
        """The first attempt is not judged: it has recovered nothing."""
        with self._changed:
            if attempt > 1:
                self._open[attempt] = False
        if not self._thread.is_alive() and attempt > 1:
            self._thread.start()

    def ended(self, attempt: int) -> None:
        with self._changed:
            if attempt in self._open:
                self._open[attempt] = True
                self._changed.notify()

    def found(self) -> list[Judgement]:
        """The judgements since the last call."""
        with self._changed:
            found, self._found = self._found, []
            return [_event_of(each) for each in found]

    def close(self) -> list[Judgement]:
        """Judge the rest, once all attempts of the leg are over."""
        with self._changed:
            self._open, self._closing = dict.fromkeys(self._open, True), True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        return self.found()

    def _work(self) -> None:
        while self._look():
            pass

    def _look(self) -> bool:
        """Judge an attempt that is due, or wait; False when no more will come."""
        with self._changed:
            waiting = dict(self._open)
        for attempt, over in waiting.items():
            if found := self._judged(attempt, over=over):
                self._since = attempt if found.divergence else self._since
                with self._changed:
                    del self._open[attempt]
                    self._found.append(found)
                return True
        with self._changed:
            if self._closing and not self._open:
                return False
            self._changed.wait(LOOK_EVERY_S)
        return True

    def _judged(self, attempt: int, *, over: bool) -> Recovery | None:
        """None while there is nothing new to report about it."""
        begun = not (over or self._is_through(attempt))
        if begun and (attempt in self._begun or not self._has_begun(attempt)):
            return None
        self._begun.add(attempt)
        found = judge_recovery(self._read(attempt), attempt, self._spec, NO_FAULTS, since=self._since, begun=begun)
        return found if found.wrong or not begun else None

    def _has_begun(self, attempt: int) -> bool:
        return all(read_start(self._leg.attempt(attempt).trace(rank)) for rank in range(self._spec.workers))

    def _is_through(self, attempt: int) -> bool:
        """Whether every rank is beyond the last step done before, so that its records up to there are written."""
        if attempt not in self._targets:
            targets = self._targets[attempt] = {}
            for trace in self._read(attempt).traces:
                if trace.attempt < attempt:
                    targets[trace.rank] = max([targets.get(trace.rank, 0), *(block.last for block in trace.blocks)])
        ranks = range(self._spec.workers)
        return all(self._step(attempt, rank) > self._targets[attempt].get(rank, 0) for rank in ranks)

    def _read(self, attempt: int) -> LegHistory:
        """The leg; the traces of earlier attempts, which are over, are read only once."""

        def read(path: Path, number: int, rank: int, problems: list[str]) -> RankTrace:
            if number >= attempt:
                return read_trace(path, number, rank, problems)
            if (number, rank) not in self._over:
                self._over[number, rank] = read_trace(path, number, rank, problems)
            return self._over[number, rank]

        return read_leg(self._leg, read)

    def _step(self, attempt: int, rank: int) -> int:
        """The last step that the rank made; 0 before its first."""
        with suppress(FileNotFoundError):
            return read_ends(self._leg.attempt(attempt).trace(rank), attempt, rank, []).steps.last
        return 0


def _event_of(found: Recovery) -> Judgement:
    wrong, differs, attempt, source = found.wrong, found.divergence, found.attempt, found.source
    if wrong is None and found.judged == "nothing":
        return RecoveryUnjudged(attempt=attempt, why=found.words)
    if wrong is None:
        return RecoveryAgreed(attempt=attempt, source=source, steps=found.steps, last=found.last, states=found.states)
    where = {"step": found.began + 1, "rank": 0, "quantity": START}
    if differs:
        where = {"step": differs.step, "rank": differs.rank, "quantity": differs.kind, "tensor": differs.tensor}
    return RecoveryDiverged(attempt=attempt, source=source, code=wrong.code, what=wrong.sentence, **where)
