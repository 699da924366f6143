"""The check "network": names, then connections between all nodes, then sums over all that can still take part.

When a sum over all nodes fails and does not itself show on whom, it is repeated within each node and between pairs of
neighbours, and then once more without whoever is to blame, so that the others are shown to be right.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.checks.network_connections import judge_connections, late
from chaosrun.preflight.checks.network_names import judge_names
from chaosrun.preflight.checks.network_sums import judge_sums, sound, suspects
from chaosrun.preflight.model import PROBES, Check, Facts, Finding, Level, Pool, Setting, Status
from chaosrun.preflight.placement import gpus_per_worker, workers_on

LOOKUP_S = 5.0
MOST_LOOKUPS = 32
"""Nodes that a node looks up, those after it: a name server need not stand what the square of hundreds would be."""
START_S = {Level.QUICK: 8.0, Level.STANDARD: 15.0, Level.DEEP: 30.0}
"""For the processes of all nodes to come up, before a closed port counts as one."""
CONNECT_S = {Level.QUICK: 2.0, Level.STANDARD: 5.0, Level.DEEP: 10.0}
ROUND_TRIPS = {Level.QUICK: 9, Level.STANDARD: 25, Level.DEEP: 101}
STREAM_S = {Level.QUICK: 0.0, Level.STANDARD: 1.0, Level.DEEP: 5.0}
JOIN_S = {Level.QUICK: 20.0, Level.STANDARD: 60.0, Level.DEEP: 120.0}
COLLECTIVE_S = {Level.QUICK: 8.0, Level.STANDARD: 20.0, Level.DEEP: 60.0}
PER_NODE_S = 0.02
NCCL_START_S = 20.0
"""It makes its connections within the first collective."""
MIB = 1 << 20
DTYPES = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
SMALL = tuple((size, dtype) for size in (1, 1000, 1 << 16, MIB) for dtype in DTYPES)
LARGE = tuple((16 * MIB, dtype) for dtype in ("int64", "bfloat16", "float32"))
HUGE = tuple((size * MIB, dtype) for size in (64, 256) for dtype in ("int64", "bfloat16", "float32"))
CASES = {Level.QUICK: SMALL, Level.STANDARD: SMALL + LARGE, Level.DEEP: SMALL + LARGE + HUGE}
TIMED = {Level.QUICK: (MIB, 3), Level.STANDARD: (16 * MIB, 5), Level.DEEP: (256 * MIB, 9)}
MOST_ROUNDS = 3
USED_PORTS = ("node manager", "object manager", "gcs")
"""Those of Ray's that other nodes connect to."""
VARIABLES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "UCX_", "FI_")
"""Beginnings of the job's environment variables that say how ranks talk."""


def gather(setting: Setting, pool: Pool) -> Facts:
    """{names, connections, sums}; of nodes that cannot take part in the next question there is none to it."""
    nodes = list(pool.nodes)
    env = {name: value for name, value in (setting.job.spec.env if setting.job else {}).items() if name.startswith(VARIABLES)}
    peers = [{"name": node.name, "hostname": node.hostname, "address": node.address} for node in nodes]
    calls = {
        node.name: Call(
            probe=f"{PROBES}.names",
            parameters={"peers": _next(index, peers), "limit_s": LOOKUP_S},
            limit_s=LOOKUP_S + 15,
            env=env,
        )
        for index, node in enumerate(nodes)
    }
    groups = backends(setting, nodes)
    facts: dict[str, Any] = {
        "backends": [[backend, [node.name for node in group]] for backend, group in groups],
        "names": pool.ask(calls, dict).raw(),
        "connections": None,
        "sums": [],
    }
    ports = _Ports(facts["names"]["answered"])
    nodes = [node for node in nodes if node.name in facts["names"]["answered"]]
    if len(nodes) > 1:
        facts["connections"] = _connect(setting.level, pool, nodes, ports)
    found = [*judge_names(setting, nodes, facts), *judge_connections(setting, nodes, facts)]
    out = {finding.node for finding in found if finding.status in (Status.FAIL, Status.ERROR)}
    good = {node.name for node in nodes} - out
    for backend, group in groups:
        left = [node for node in group if node.name in good]
        rounds = _sum(setting.level, pool, left, _Sum(backend, ports, env)) if _two_ranks(backend, left) else []
        cases = [list(case) for case in CASES[setting.level]]
        facts["sums"].append({"backend": backend, "cases": cases, "timed": list(TIMED[setting.level]), "rounds": rounds})
    return facts


def _next(index: int, peers: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    return [*peers[index + 1 :], *peers[:index]][:MOST_LOOKUPS]


class _Ports:
    """Ports that nodes have said are free, each given out once; nodes of one machine share theirs."""

    def __init__(self, names: Mapping[str, Facts]) -> None:
        self._free = {name: list(facts["free_ports"]) for name, facts in names.items()}
        self._network = {name: facts["network"] for name, facts in names.items()}
        self._taken: set[tuple[str, int]] = set()

    def take(self, name: str) -> int:
        fresh = [port for port in self._free[name] if (self._network[name], port) not in self._taken]
        # When all have been used, the first may be free again.
        port = fresh[0] if fresh else self._free[name][0]
        self._taken.add((self._network[name], port))
        return port


# Connections


def _connect(level: Level, pool: Pool, nodes: Sequence[Node], ports: _Ports) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for _ in range(2):
        told = _connect_once(level, pool, nodes, ports)
        # Once more with other ports, or now that what is slow to be read for the first time has been read.
        if not any("taken" in facts for facts in told["answered"].values()) and not late(told):
            break
    return told


def _connect_once(level: Level, pool: Pool, nodes: Sequence[Node], ports: _Ports) -> dict[str, Any]:
    peers = [
        {
            "name": node.name,
            "address": node.address,
            "port": ports.take(node.name),
            "ports": {purpose: port for purpose, port in node.ports.items() if purpose in USED_PORTS and port > 0},
        }
        for node in nodes
    ]
    size, stream_s = len(nodes), STREAM_S[level]
    # Each sends to two others, where there are two, and receives from two: whose other end is slow has another to show.
    shifts = sorted({1, max(2, size // 2)} - {size}) if stream_s else []
    start_s, connect_s = START_S[level], CONNECT_S[level]
    calls = {
        node.name: Call(
            probe=f"{PROBES}.mesh",
            parameters={
                "node": node.name,
                "port": peers[index]["port"],
                "peers": peers,
                "start_s": start_s,
                "give_up_s": start_s + 10,
                "connect_s": connect_s,
                "round_trips": ROUND_TRIPS[level],
                "streams": [nodes[(index + shift) % size].name for shift in shifts],
                "incoming": len(shifts),
                "stream_s": stream_s,
            },
            limit_s=start_s + 8 * connect_s + 4 * stream_s + 30,
        )
        for index, node in enumerate(nodes)
    }
    return {"ports": {peer["name"]: peer["port"] for peer in peers}, **pool.ask(calls, dict).raw()}


# Sums


def backends(setting: Setting, nodes: Sequence[Node]) -> list[tuple[str, list[Node]]]:
    """How workers talk, over the nodes that they may be placed on: NCCL when they take GPUs, else gloo."""
    used = [node for node in nodes if workers_on(setting, node, nodes)]
    if not gpus_per_worker(setting, nodes):
        return [("gloo", used)]
    on_gpus = [node for node in used if node.gpus]
    if _two_ranks("nccl", on_gpus):
        return [("nccl", on_gpus)]
    # One GPU has nobody to talk to. Without a job others may still be meant.
    return [("gloo", used)] if setting.job is None else []


def _two_ranks(backend: str, nodes: Sequence[Node]) -> bool:
    """A node alone can have two of gloo."""
    return sum(node.gpus for node in nodes) > 1 if backend == "nccl" else bool(nodes)


class _Sum:
    """How ranks of one backend are called."""

    def __init__(self, backend: str, ports: _Ports, env: Mapping[str, str]) -> None:
        self.backend = backend
        self.ports = ports
        self.env = env

    def calls(self, level: Level, nodes: Sequence[Node]) -> dict[str, Call]:
        """For one sum over these nodes; alone, a node sums over two processes of its own."""
        local = [node.gpus if self.backend == "nccl" else 2 if len(nodes) == 1 else 1 for node in nodes]
        first = nodes[0]
        master = ["127.0.0.1" if len(nodes) == 1 else first.address, self.ports.take(first.name)]
        collective_s = COLLECTIVE_S[level] + PER_NODE_S * len(nodes) + (NCCL_START_S if self.backend == "nccl" else 0)
        return {
            node.name: Call(
                probe=f"{PROBES}.allreduce",
                parameters={
                    "backend": self.backend,
                    "first": sum(local[:index]),
                    "local": local[index],
                    "world": sum(local),
                    "master": master,
                    "cases": CASES[level],
                    "timed": TIMED[level],
                    "join_s": JOIN_S[level],
                    "collective_s": collective_s,
                },
                # It ends by itself well before: no collective that hangs is followed by another.
                limit_s=60 + JOIN_S[level] + 3 * collective_s + len(CASES[level]),
                env=self.env,
            )
            for index, node in enumerate(nodes)
        }


def _sum(level: Level, pool: Pool, nodes: Sequence[Node], how: _Sum) -> list[dict[str, Any]]:
    """Rounds until one is sound; each without those that the last has spoken against."""
    rounds: list[dict[str, Any]] = []
    while nodes and len(rounds) < MOST_ROUNDS:
        this = {**_run(level, pool, [nodes], how)[0], "alone": [], "pairs": []}
        rounds.append(this)
        if sound(this):
            break
        if not suspects(this) and len(nodes) > 1:
            divisible = [node for node in nodes if how.backend == "gloo" or node.gpus > 1]
            this["alone"] = _run(level, pool, [[node] for node in divisible], how)
            # Of two nodes the pair is what has just failed.
            if not suspects(this) and len(nodes) > 2:
                this["pairs"] = [run for pairs in _neighbours(nodes) for run in _run(level, pool, pairs, how)]
        against = suspects(this)
        if not against:
            break
        nodes = [node for node in nodes if node.name not in against]
    return rounds


def _run(level: Level, pool: Pool, groups: Sequence[Sequence[Node]], how: _Sum) -> list[dict[str, Any]]:
    """One sum within each group, all at the same time; no node is in two."""
    runs: list[dict[str, Any]] = []
    for _ in range(2):
        calls = {name: call for group in groups for name, call in how.calls(level, group).items()}
        told = pool.ask(calls, dict).raw()
        members = [[node.name for node in group] for group in groups]
        runs = [
            {"nodes": names, **{part: {name: of[name] for name in names if name in of} for part, of in told.items()}}
            for names in members
        ]
        # Somebody took the port between its choice and its use: once more with another.
        if "EADDRINUSE" not in json.dumps(runs):
            break
    return runs


def _neighbours(nodes: Sequence[Node]) -> list[list[list[Node]]]:
    """Every node with the next one, in a circle; in each batch no node twice."""
    size = len(nodes)
    if size == 2:
        return [[list(nodes)]]
    pairs = [[nodes[index], nodes[(index + 1) % size]] for index in range(size)]
    even = size - size % 2
    return [batch for batch in (pairs[0:even:2], pairs[1:even:2], pairs[even:]) if batch]


def judge_network(setting: Setting, nodes: Sequence[Node], facts: Facts) -> list[Finding]:
    return [found for judge in (judge_names, judge_connections, judge_sums) for found in judge(setting, nodes, facts)]


CHECK = Check(
    name="network",
    about="names, connections between all nodes, exact sums over all ranks",
    order=70,
    level=Level.QUICK,
    judge=judge_network,
    gather=gather,
)
