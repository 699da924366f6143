"""Ranks that outlived their supervisor do not train beside those of the next one."""

import subprocess
import sys
from functools import partial
from pathlib import Path

from chaosrun.processes import identify
from chaosrun.records.layout import LegLayout
from chaosrun.supervise.taking_over import _left_over
from tests.unit.events import event

RANK = """\
import mmap, os, sys
held = [mmap.mmap(os.open(path, os.O_RDWR), 0) for path in sys.argv[1:]]
print(flush=True)
sys.stdin.read()
"""


def test_only_processes_that_hold_the_heartbeat_of_their_rank_are_left_over(tmp_path: Path) -> None:
    leg = LegLayout(tmp_path / "run")
    beat = leg.attempt(1).heartbeat(0)
    beat.parent.mkdir(parents=True)
    beat.write_bytes(bytes(64))
    arguments = [sys.executable, "-c", RANK]
    start = partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with start([*arguments, str(beat)]) as rank, start(arguments) as other:
        for process in (rank, other):
            assert process.stdout is not None
            process.stdout.readline()
        started = event("attempt.started", attempt=1, pids={0: rank.pid, 1: other.pid})
        gone = event("attempt.started", attempt=1, pids={0: 2**22 + 1})
        announced = event("worker.started", attempt=1, rank=0, pid=other.pid)
        assert list(_left_over([gone, started, announced], leg)) == [identify(rank.pid)]
