"""Several drills at once: which begins next, where, and what comes of each. Knows places and drills, not what a drill means."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from chaosrun.campaign.places import Place, Places
from chaosrun.campaign.planned import PlannedDrill
from chaosrun.campaign.results import DrillResult
from chaosrun.campaign.sweep import Interruptible

Listener = Callable[[Mapping[str, Any]], None]
Carry = Callable[[PlannedDrill, Place | None, Interruptible, Listener], tuple[DrillResult, bool]]
"""Carry a drill out, at a place or (None) with all to itself; tells its result, and whether the place is still sound. What
works now can be interrupted, all of it at once."""


def carry_out_all(
    drills: Sequence[PlannedDrill],
    carry: Carry,
    places: Places,
    *,
    at_once: int,
    on_start: Callable[[PlannedDrill], None],
    on_result: Callable[[PlannedDrill, DrillResult], bool],
) -> None:
    """Carry out all drills, in this order as far as there is room. `on_result` says whether to begin more of them.

    A drill whose reference another one is just making waits for it. Raises what `carry` raises, KeyboardInterrupt too: once
    every drill that was under way has been interrupted and has ended.
    """
    waiting = list(drills)
    made: set[str] = set()
    making: dict[str, PlannedDrill] = {}
    running: dict[str, PlannedDrill] = {}
    events: SimpleQueue[Callable[[], None]] = SimpleQueue()
    working = Interruptible()
    going_on = True

    with ThreadPoolExecutor(max(1, at_once), thread_name_prefix="chaosrun-suite") as pool:

        def begin(drill: PlannedDrill, place: Place | None) -> None:
            waiting.remove(drill)
            running[drill.name] = drill
            if drill.reference not in made:
                making[drill.reference] = drill
            on_start(drill)
            pool.submit(work, drill, place)

        def work(drill: PlannedDrill, place: Place | None) -> None:
            def listen(record: Mapping[str, Any]) -> None:
                # Begun here, or gone on with.
                if record.get("event") in ("leg.started", "supervisor.resumed") and record.get("leg") == "chaos":
                    events.put(lambda: reference_is_there(drill))

            try:
                result, sound = carry(drill, place, working, listen)
            except BaseException as error:
                failure = error  # the name that `except` binds is gone when the function runs
                events.put(lambda: failed(drill, place, failure))
            else:
                events.put(lambda: ended(drill, place, result, sound))

        def reference_is_there(drill: PlannedDrill) -> None:
            made.add(drill.reference)
            if making.get(drill.reference) is drill:
                del making[drill.reference]

        def leave(drill: PlannedDrill, place: Place | None, *, sound: bool) -> None:
            del running[drill.name]
            if making.get(drill.reference) is drill:
                del making[drill.reference]  # the next one makes it
            if place is not None:
                places.give_back(place, sound=sound)

        def ended(drill: PlannedDrill, place: Place | None, result: DrillResult, sound: bool) -> None:
            nonlocal going_on
            leave(drill, place, sound=sound)
            going_on = on_result(drill, result) and going_on

        def failed(drill: PlannedDrill, place: Place | None, error: BaseException) -> None:
            leave(drill, place, sound=False)
            raise error

        def begin_what_fits() -> None:
            for drill in list(waiting):
                if len(running) >= at_once or any(other.needs_all for other in running.values()):
                    return
                if drill.needs_all:
                    if running:
                        return  # nothing is begun before it: its turn would never come
                    places.clear()
                    begin(drill, None)
                    return
                if drill.reference in making:
                    continue
                place = places.take(drill)
                if place is None:
                    return
                begin(drill, place)

        try:
            while True:
                if going_on:
                    begin_what_fits()
                if not running:
                    return
                events.get()()
        except BaseException:
            working.interrupt()
            while running:
                # What has ended all the same counts; that the others were interrupted is no news.
                with suppress(Exception):
                    events.get()()
            raise
