"""An attempt run by a fork server: its live processes, how their ends are detected and reported, and how they are killed.

The ranks are children of the server or, with a command, processes that announce themselves. Knows nothing of standbys, orphans
and the agent's socket; its events go to the `Send` that it is given.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from chaosrun.cluster.command import Command, EndedRank
from chaosrun.cluster.messages import Announced, Exited, LauncherFailed, ServerEvent
from chaosrun.faults.kind import LEFT_ON_NOTICE
from chaosrun.processes import is_dying
from chaosrun.records.layout import AttemptLayout, LegLayout
from chaosrun.records.markers import WorkerEnd, read_end, read_markers

Send = Callable[[ServerEvent], None]


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    number: int
    leg: LegLayout
    ranks: dict[int, int] = field(default_factory=dict)
    """By pid, all ranks ever started here."""
    live: set[int] = field(default_factory=set)
    """pids of ranks, and of the command, whose death has not been seen."""
    killed: set[int] = field(default_factory=set)
    """Ranks that this server killed."""
    shared_memory: frozenset[str]
    leaving: bool = False
    """A rank has left on a notice."""

    @property
    def layout(self) -> AttemptLayout:
        return self.leg.attempt(self.number)

    def see_deaths(self, send: Send) -> None:
        """Kill the processes that dead ranks leave behind, and the other ranks when one died badly; then reap and report."""
        # Seen before they are reaped: while a process is a zombie, its pid and process group are not reused.
        looked = (os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in self.live)
        # Signals first: if ranks died together, one that exited with an error has often only lost its peer.
        dead = sorted((seen for seen in looked if seen is not None), key=lambda seen: seen.si_code == os.CLD_EXITED)
        for seen in dead:
            kill_group(seen.si_pid)
        self._tell([EndedRank.of(self.ranks[seen.si_pid], seen) for seen in dead], send)

    def _tell(self, ended: Sequence[EndedRank], send: Send) -> set[int]:
        """Kill the other ranks if one of these ended badly, then report the ends; returns ranks that have completed."""
        died_s, completed, in_order = time.time(), set[int](), True
        self.live.difference_update(seen.pid for seen in ended)
        for seen in ended:
            end = read_end(self.layout, seen.rank)
            if end is not None and end.completed and self._left_well(seen, end):
                completed.add(seen.rank)
            elif end is not None and end.status == LEFT_ON_NOTICE:
                self.leaving = True  # the others will leave as well
            else:
                in_order = in_order and seen.signal != signal.SIGKILL and self._are_leaving()
        if not in_order:
            self.kill_all()
        for seen in ended:
            with suppress(ChildProcessError):  # the child of a launcher
                os.waitid(os.P_PID, seen.pid, os.WEXITED | os.WNOHANG)
            how = {"exit_code": seen.exit_code, "signal": seen.signal, "collected": seen.is_unknown}
            # A rank that exited just before the signal reached it was not killed by it.
            killed = seen.rank in self.killed and seen.exit_code is None
            told = {"completed": seen.rank in completed, "killed": killed, "died_s": died_s}
            send(Exited(attempt=self.number, rank=seen.rank, pid=seen.pid, **how, **told))
        return completed

    def _are_leaving(self) -> bool:
        """Whether a live rank got a preemption notice: a script that handles notices itself decides how it leaves."""
        told = [marker for marker in read_markers(self.leg).values() if marker and marker.notice]
        return any(marker.attempt == self.number and marker.pid in self.live for marker in told)

    def _left_well(self, seen: EndedRank, end: WorkerEnd) -> bool:
        """Whether a rank that recorded a complete training also exited well."""
        return seen.exit_code == 0

    def _count_killed(self) -> None:
        """Note which ranks are about to be killed: not those that are dying already, even if that has not been seen."""
        self.killed.update(self.ranks[pid] for pid in self.live if pid in self.ranks and not is_dying(pid))

    def kill_all(self) -> None:
        """SIGKILL all live processes of the attempt."""
        self._count_killed()
        for pid in self.live:
            kill_group(pid)


@dataclass(slots=True, kw_only=True)
class CommandAttempt(RunningAttempt):
    """An attempt whose ranks are started by a command, which is the server's only child."""

    command: Command
    launcher: int = 0
    """The command's pid."""
    unsure: bool = False
    """Whether a rank failed, or ended in a way that only the launcher knows: then the launcher's exit code decides."""
    ending: bool = False
    """Whether it has been killed: then the end of the command is not reported."""

    def see_deaths(self, send: Send) -> None:
        """As in the base class; also accepts announcements of ranks, and detects the end of the command."""
        news = list(self.command.look())
        ranks = [seen for seen in news if isinstance(seen, EndedRank)]
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
            ended = EndedRank.of(-1, seen)
            if not self.leaving and (not self.command.has_completed or (self.unsure and ended.exit_code != 0)):
                self._fail(self.command.failed("launcher_ended", ended=ended), send)

    def _left_well(self, seen: EndedRank, end: WorkerEnd) -> bool:
        # A signal is fine: torch's threads may crash an interpreter at its end. (Ranks that chaosrun forks leave by os._exit.)
        return seen.exit_code in (0, None, end.exit_code)

    def _fail(self, failed: LauncherFailed, send: Send) -> None:
        if not self.ending:
            self.kill_all()
            send(failed)

    def kill_all(self) -> None:
        self.ending = True
        self._count_killed()
        # The launcher first: it would replace ranks that die.
        if self.launcher in self.live:
            kill_group(self.launcher)
        self.command.kill_ranks()


def kill_group(pid: int) -> None:
    """SIGKILL a child that has not been reaped, and its process group."""
    with suppress(ProcessLookupError):
        # A child that was just forked does not have its own group yet.
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
