"""Whether the ranks of this machine get on: their heartbeats, read here, and the processor time that they have used."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from chaosrun.processes import cpu_and_state
from chaosrun.records.heartbeat import Pulse, read_heartbeat
from chaosrun.records.layout import AttemptLayout


def feel_pulses(layout: AttemptLayout, ranks: Iterable[int], live: Mapping[int, int]) -> dict[int, Pulse]:
    """By rank; `live` are the pids of those that have not exited."""
    return {rank: _feel(layout.heartbeat(rank), live.get(rank)) for rank in ranks}


def _feel(heartbeat: Path, pid: int | None) -> Pulse:
    cpu_s, state = (0.0, None) if pid is None else cpu_and_state(pid)
    return Pulse(beat=read_heartbeat(heartbeat), cpu_s=cpu_s, is_stopped=state == "T")
