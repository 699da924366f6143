"""All events that an agent has for its supervisor, kept so that a lost answer can be requested again."""

import asyncio

from chaosrun.cluster.messages import AgentEvent


class EventLog:
    def __init__(self) -> None:
        self._events: list[AgentEvent] = []
        self._news = asyncio.Event()

    def tell(self, event: AgentEvent) -> None:
        self._events.append(event)
        self._news.set()

    async def after(self, heard: int) -> list[AgentEvent]:
        """All events after the first `heard`, as soon as there is one."""
        while len(self._events) <= heard:
            self._news.clear()
            await self._news.wait()
        return self._events[heard:]
