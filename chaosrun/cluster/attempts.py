"""An attempt that a fork server runs: its live processes, how their ends are seen and told, and how they are killed.

The ranks are children of the server, or, of a command, processes that announce themselves. Knows nothing of standbys, orphans
and the agent's socket; what it has to tell goes to the `Send` that it is given.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from chaosrun.cluster.command import Command, Ended
from chaosrun.cluster.messages import Announced, Exited, LauncherFailed, ServerEvent
from chaosrun.faults.kind import LEFT_ON_NOTICE, PREEMPTED_EXIT_CODE
from chaosrun.processes import is_dying
from chaosrun.records.layout import AttemptLayout
from chaosrun.records.markers import WorkerEnd, read_end

Send = Callable[[ServerEvent], None]


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    number: int
    layout: AttemptLayout
    ranks: dict[int, int] = field(default_factory=dict)
    """pid → rank, of all ranks ever started here."""
    live: set[int] = field(default_factory=set)
    """pids of ranks, and of a command, whose death has not been seen."""
    killed: set[int] = field(default_factory=set)
    """Ranks that this server killed."""
    shared_memory: frozenset[str]

    def see_deaths(self, send: Send) -> None:
        """Kill what dead ranks leave behind, and the others when one died badly; then reap and tell."""
        # Seen before they are reaped: a zombie keeps its pid and its process group from being given out again.
        looked = (os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in self.live)
        # Signals first: of ranks that died at once, the one that exited with an error often only lost its peer.
        dead = sorted((seen for seen in looked if seen is not None), key=lambda seen: seen.si_code == os.CLD_EXITED)
        for seen in dead:
            kill_group(seen.si_pid)
        self._tell([Ended.of(self.ranks[seen.si_pid], seen) for seen in dead], send)

    def _tell(self, ended: Sequence[Ended], send: Send) -> set[int]:
        """Kill the others where one of these did not end in order, then tell of them; returns ranks that have completed."""
        died_s, completed, in_order = time.time(), set[int](), True
        self.live.difference_update(seen.pid for seen in ended)
        for seen in ended:
            end = read_end(self.layout, seen.rank)
            if end is not None and end.completed and self._left_well(seen, end):
                completed.add(seen.rank)
            # On notice all ranks leave after the same step: the others are on their way.
            elif seen.exit_code != PREEMPTED_EXIT_CODE or end is None or end.status != LEFT_ON_NOTICE:
                in_order = False
        if not in_order:
            self.kill_all()
        for seen in ended:
            with suppress(ChildProcessError):  # of a launcher
                os.waitid(os.P_PID, seen.pid, os.WEXITED | os.WNOHANG)
            how = {"exit_code": seen.exit_code, "signal": seen.signal, "collected": seen.is_unknown}
            # One that ended by itself just before our signal came to it was not killed by it.
            killed = seen.rank in self.killed and seen.exit_code is None
            told = {"completed": seen.rank in completed, "killed": killed, "died_s": died_s}
            send(Exited(attempt=self.number, rank=seen.rank, pid=seen.pid, **how, **told))
        return completed

    def _left_well(self, seen: Ended, end: WorkerEnd) -> bool:
        """Of a rank that says that it has completed the training."""
        return seen.exit_code == 0

    def _count_killed(self) -> None:
        """Just before they are: who is dead by then, though nobody has seen it yet, is not."""
        self.killed.update(self.ranks[pid] for pid in self.live if pid in self.ranks and not is_dying(pid))

    def kill_all(self) -> None:
        """SIGKILL what lives of it."""
        self._count_killed()
        for pid in self.live:
            kill_group(pid)


@dataclass(slots=True, kw_only=True)
class CommandAttempt(RunningAttempt):
    """The ranks are started by a command, which is the one child of the server's own."""

    command: Command
    launcher: int = 0
    """Its pid."""
    unsure: bool = False
    """How one of the ranks ended, its launcher alone knows, which has told it by its own exit code."""
    ending: bool = False
    """It has been killed: what becomes of the command is no news."""

    def see_deaths(self, send: Send) -> None:
        """As that of other attempts; and see who announces himself, and that the command has ended."""
        news = list(self.command.look())
        ranks = [seen for seen in news if isinstance(seen, Ended)]
        self.unsure |= any(seen.is_unknown or seen.exit_code for seen in ranks)
        self.command.completed |= self._tell(ranks, send)
        for event in news:
            if isinstance(event, Announced):
                self.ranks[event.pid] = event.rank
                self.live.add(event.pid)
                send(event)
            elif isinstance(event, LauncherFailed):
                self._fail(event, send)
        seen = os.waitid(os.P_PID, self.launcher, os.WEXITED | os.WNOHANG | os.WNOWAIT) if self.launcher in self.live else None
        if seen is not None:
            self.live.remove(self.launcher)
            kill_group(self.launcher)
            ended = Ended.of(-1, seen)
            if not self.command.has_completed or (self.unsure and ended.exit_code != 0):
                self._fail(self.command.failed("launcher_ended", ended=ended), send)

    def _left_well(self, seen: Ended, end: WorkerEnd) -> bool:
        # By a signal, too: torch's threads may crash an interpreter that ends. Ranks that we fork leave by os._exit.
        return seen.exit_code in (0, None, end.exit_code)

    def _fail(self, failed: LauncherFailed, send: Send) -> None:
        if not self.ending:
            self.kill_all()
            send(failed)

    def kill_all(self) -> None:
        self.ending = True
        self._count_killed()
        # First who would start others in the place of those that die.
        if self.launcher in self.live:
            kill_group(self.launcher)
        self.command.kill_ranks()


def kill_group(pid: int) -> None:
    """SIGKILL a child that has not been reaped, and its process group."""
    with suppress(ProcessLookupError):
        # Not yet a group of its own when it has only just been forked.
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
