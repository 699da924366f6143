"""`python -m tests.simulated_nodes.farm FOLDER NODES PACE`: all simulated nodes, each behind a socket `FOLDER/NODE.sock`.

A request is one pickle (number, method, arguments), its answer (number, whether it went well, what came of it); each behind
its length in eight bytes. Ends with its standard input. What happened, and when, is added to `FOLDER/events.jsonl`.
"""

import asyncio
import json
import pickle
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

from tests.simulated_nodes.fork_server import Note, Pace, SimulatedAgent, World, spare_the_disk

HEADER_BYTES = 8


class Worlds(dict[tuple[str, int], World]):
    """By leg and attempt, made as they are asked for."""

    def __init__(self, pace: Pace, note: Note) -> None:
        super().__init__()
        self._pace = pace
        self._note = note

    def __missing__(self, key: tuple[str, int]) -> World:
        self[key] = world = World(pace=self._pace, note=self._note)
        return world


class Farm:
    def __init__(self, folder: Path, pace: Pace) -> None:
        self._folder = folder
        self._events = (folder / "events.jsonl").open("a", buffering=1)
        self._writers: dict[str, set[asyncio.StreamWriter]] = defaultdict(set)
        self._servers: dict[str, asyncio.Server] = {}
        self._agents: dict[str, SimulatedAgent] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._worlds = Worlds(pace, self.note)

    def note(self, what: str, **about: Any) -> None:
        self._events.write(json.dumps({"what": what, "time_s": time.time(), **about}) + "\n")

    async def add(self, node: str) -> None:
        self._servers[node] = await asyncio.start_unix_server(partial(self._serve, node), self._folder / f"{node}.sock")

    def end(self, node: str) -> None:
        """The whole node is gone at once."""
        agent = self._agents.get(node)
        if agent is not None and agent.fork_server is not None:
            agent.fork_server.end()
        self._servers[node].close()
        for writer in self._writers.pop(node, ()):
            writer.transport.abort()

    async def _serve(self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A new agent for who connects, as Ray starts a new actor for a new placement."""
        agent = self._agents[node] = SimulatedAgent(node, self._worlds, self.note, partial(self.end, node))
        self._writers[node].add(writer)
        self.note("agent", node=node)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(HEADER_BYTES))
                request = pickle.loads(await reader.readexactly(size))
                task = asyncio.create_task(self._answer(agent, writer, *request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionResetError, asyncio.CancelledError):
            writer.close()  # the supervisor's end, the node's, or everybody's

    async def _answer(
        self, agent: SimulatedAgent, writer: asyncio.StreamWriter, number: int, method: str, arguments: tuple[Any, ...]
    ) -> None:
        try:
            answer = (number, True, await getattr(agent, method)(*arguments))
        except Exception as error:
            answer = (number, False, error)
        body = pickle.dumps(answer)
        if not writer.is_closing():
            writer.write(len(body).to_bytes(HEADER_BYTES) + body)


async def main(folder: Path, nodes: list[str], pace: Pace) -> None:
    farm = Farm(folder, pace)
    for node in nodes:
        await farm.add(node)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    spare_the_disk()
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2].split(","), Pace(**json.loads(sys.argv[3]))))
