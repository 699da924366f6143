"""Python's audit events (`sys.audit`), for all observers of a process through one hook: Python calls every hook for each event,
`id()` among them, which `copy.deepcopy` and others call once for each object.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

Listener = Callable[[str, tuple[Any, ...]], None]
"""Called with an event's name and arguments; an error that it raises reaches the code that caused the event."""
_LISTENERS: defaultdict[str, list[Listener]] = defaultdict(list)


def listen(events: Iterable[str], listener: Listener) -> None:
    """Call the listener on each of these events, until the end of the process: a hook cannot be removed."""
    if not _LISTENERS:
        sys.addaudithook(_hear)
    for event in events:
        _LISTENERS[event].append(listener)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if (listeners := _LISTENERS.get(event)) is not None:
        for listener in listeners:
            listener(event, arguments)
