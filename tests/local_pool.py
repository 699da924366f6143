"""Nodes that are only names: each call's probe runs on this machine below an agent, with its node's environment."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from chaosrun.cluster.probe_agent import ProbeAgent
from chaosrun.cluster.probing import Call, Node, ProbeOutcome
from tests.preflight_answers import Answering

FAULTY = Path(__file__).parent / "integration" / "faulty"
"""Layers that go under a node's processes: PYTHONPATH is a folder of it, whose sitecustomize.py Python imports first."""


class LocalPool(Answering):
    """`LocalPool({"a": {}, "b": {"PYTHONPATH": layer}})`: every node has a loopback address of its own."""

    def __init__(self, nodes: Mapping[str, Mapping[str, str]], ports: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self._env = nodes
        self.nodes = tuple(
            Node(
                name=name,
                node_id=name,
                address=f"127.0.0.{index}",
                hostname=socket.gethostname(),
                cpus=1.0,
                gpus=0,
                ports=(ports or {}).get(name, {}),
                head=index == 2,
            )
            for index, name in enumerate(nodes, start=2)
        )

    def probe(self, calls: Mapping[str, Call]) -> dict[str, ProbeOutcome]:
        return asyncio.run(self._probe(calls))

    async def _probe(self, calls: Mapping[str, Call]) -> dict[str, ProbeOutcome]:
        agent = ProbeAgent("CHAOSRUN_LOCAL_CREW")
        told = await asyncio.gather(
            *(agent.probe(replace(call, env={**self._env[name], **call.env})) for name, call in calls.items())
        )
        return dict(zip(calls, told, strict=True))
