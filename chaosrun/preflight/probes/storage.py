"""A node's storage: does it keep what chaosrun relies on, and how fast is it? Everything is done in a folder of its own.

{"storage": path, "kills", "kills_s", "names", "speed_s", "speed_bytes", "patience_s", "limit_s"} → as `disk.watched` has it,
steps place, sequence, exclusive, lock, kills, speed
"""

from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from chaosrun.cluster.guard import new_name
from chaosrun.preflight.model import Facts
from chaosrun.preflight.probes.storage_kills import kill_writers
from chaosrun.preflight.probes.storage_place import about_place, nearest_folder, own_folder, remove_stale
from chaosrun.preflight.probes.storage_promises import make_checkpoint, race_for_names, try_lock
from chaosrun.preflight.probes.storage_speed import measure_speed
from chaosrun.preflight.probes.storage_watchdog import Report, watched


def probe(**parameters: Any) -> Facts:
    patience_s, limit_s = parameters["patience_s"], parameters["limit_s"]
    return watched(lambda report: _steps(parameters, report), patience_s=patience_s, limit_s=limit_s)


def _steps(parameters: Facts, report: Report) -> None:
    base = folder = Path()

    def look() -> Facts:
        nonlocal base
        base = nearest_folder(Path(parameters["storage"]))
        return about_place(base)

    with ExitStack() as stack:

        def make() -> Facts:
            nonlocal folder
            folder = stack.enter_context(own_folder(base, new_name()))
            remove_stale(base, folder)
            return make_checkpoint(folder, report.goes_on)

        if not report("place", look) or not report("sequence", make):
            return
        report("exclusive", lambda: race_for_names(folder, parameters["names"]))
        report("lock", lambda: try_lock(folder))
        goes_on, kills, kills_s = report.goes_on, parameters["kills"], parameters["kills_s"]
        report("kills", lambda: kill_writers(folder, kills=kills, budget_s=kills_s, random=Random(), goes_on=goes_on))
        speed_s, most_bytes = parameters["speed_s"], parameters["speed_bytes"]
        report("speed", lambda: measure_speed(folder, budget_s=speed_s, most_bytes=most_bytes, goes_on=goes_on))
