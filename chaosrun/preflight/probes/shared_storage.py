"""Whether nodes share a storage, and how: they meet in it, compete for names, and send each other files.

{"storage": path, "token", "me": number of this node, "number": of nodes, "meet_s", "names", "rounds", "ring_s", "wait_s",
"patience_s", "limit_s"} → as in `probes.storage`, steps place, meet, compete, ring
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from chaosrun.preflight.model import Facts
from chaosrun.preflight.probes.storage_exchange import Exchange, folder_of
from chaosrun.preflight.probes.storage_place import about_place, nearest_folder, own_folder
from chaosrun.preflight.probes.storage_watchdog import Report, watched
from chaosrun.records.locks import locked


def probe(**parameters: Any) -> Facts:
    patience_s, limit_s = parameters["patience_s"], parameters["limit_s"]
    return watched(lambda report: _steps(parameters, report), patience_s=patience_s, limit_s=limit_s)


def _steps(parameters: Facts, report: Report) -> None:
    base = Path()
    names, ring_s, wait_s = (parameters[name] for name in ("names", "ring_s", "wait_s"))

    def look() -> Facts:
        nonlocal base
        base = nearest_folder(Path(parameters["storage"]))
        return about_place(base)

    with ExitStack() as stack:

        def meet() -> Facts:
            folder = stack.enter_context(own_folder(base, folder_of(parameters["token"], parameters["me"])))
            # Before the others can know of it.
            stack.enter_context(locked(folder / "lock", "taken"))
            return meeting.meet(parameters["meet_s"])

        if not report("place", look):
            return
        token, me, number = (parameters[name] for name in ("token", "me", "number"))
        meeting = Exchange(base=base, token=token, me=me, number=number, goes_on=report.goes_on)
        if not report("meet", meet) or len(meeting.met) < 2:
            return
        if report("compete", lambda: meeting.compete(names, wait_s)) and meeting.together:
            report("ring", lambda: meeting.ring(parameters["rounds"], ring_s, ring_s + wait_s))
        report("leave", lambda: meeting.leave(wait_s))
