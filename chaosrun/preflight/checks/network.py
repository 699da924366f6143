"""The check "network": interfaces, then connections between all nodes, then all-reduces over the remaining nodes. When an
all-reduce over all nodes fails without showing which node is at fault, it is repeated within each node, and then without the
nodes at fault, to show that the others are sound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from msgspec import Struct

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.checks.network_connections import again, judge_connections
from chaosrun.preflight.checks.network_sums import Backend, Run, judge_sums, sound, suspects
from chaosrun.preflight.model import BAD, Answers, Check, Finding, Level, Pool, Rows, Setting, ask
from chaosrun.preflight.placement import gpus_per_worker, workers_on
from chaosrun.preflight.probes import allreduce, mesh
from chaosrun.preflight.probes.interfaces import InterfaceFacts
from chaosrun.records.codec import changed, to_plain
from chaosrun.wording import MIB

INTERFACE = Rows(check="network", name="interface")
LOOKUP_S = 20.0
START_S = {Level.QUICK: 15.0, Level.STANDARD: 30.0, Level.DEEP: 60.0}
"""For the processes of all nodes to come up, before a closed port counts as one."""
CONNECT_S = {Level.QUICK: 2.0, Level.STANDARD: 5.0, Level.DEEP: 10.0}
JOIN_S = {Level.QUICK: 20.0, Level.STANDARD: 60.0, Level.DEEP: 120.0}
COLLECTIVE_S = {Level.QUICK: 8.0, Level.STANDARD: 20.0, Level.DEEP: 60.0}
PER_NODE_S = 0.02
NCCL_START_S = 20.0
"""It makes its connections within the first collective."""
DTYPES = ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
SMALL = tuple((size, dtype) for size in (1, 1000, 1 << 16, MIB) for dtype in DTYPES)
LARGE = tuple((16 * MIB, dtype) for dtype in ("int64", "bfloat16", "float32"))
HUGE = tuple((size * MIB, dtype) for size in (64, 256) for dtype in ("int64", "bfloat16", "float32"))
CASES = {Level.QUICK: SMALL, Level.STANDARD: SMALL + LARGE, Level.DEEP: SMALL + LARGE + HUGE}
OF_GPUS = "bfloat16"
"""Not every torch sums bfloat16 over gloo, and jobs that train in it use GPUs."""
TIMED = {Level.QUICK: (MIB, 3), Level.STANDARD: (16 * MIB, 5), Level.DEEP: (256 * MIB, 9)}
MOST_ROUNDS = 3
VARIABLES = ("GLOO_", "NCCL_", "TORCH_NCCL_", "UCX_", "FI_")
"""Beginnings of the job's environment variables that say how ranks talk."""


class NetworkFacts(Struct, frozen=True, kw_only=True):
    """A node that cannot take part in one of the probes has no answer to it."""

    interfaces: Answers[InterfaceFacts]
    connections: Answers[mesh.MeshFacts] = Answers(answered={}, unanswered={})
    ports: dict[str, int] = {}
    backends: tuple[Backend, ...] = ()


def gather(setting: Setting, pool: Pool) -> NetworkFacts:
    nodes = list(pool.nodes)
    env = {name: value for name, value in setting.env.items() if name.startswith(VARIABLES)}
    told = pool.ask({node.name: ask("interfaces", LOOKUP_S, env) for node in nodes}, InterfaceFacts)
    groups = backends(setting, nodes)
    talking = tuple(Backend(name=name, nodes=tuple(node.name for node in group)) for name, group in groups)
    facts = NetworkFacts(interfaces=told, backends=talking)
    ports = _Ports(told.answered)
    nodes = [node for node in nodes if node.name in told.answered]
    if len(nodes) > 1:
        connections, listening = _connect(setting.level, pool, nodes, ports)
        facts = changed(facts, connections=connections, ports=listening)
    found = [*judge_interfaces(nodes, facts.interfaces, talking), *judge_connections(nodes, facts.connections, facts.ports)]
    good = {node.name for node in nodes} - {each.node for each in found if each.status in BAD}
    summed: list[Backend] = []
    for backend, (name, group) in zip(talking, groups, strict=True):
        left = [node for node in group if node.name in good]
        sums = _Sums(pool=pool, level=setting.level, backend=name, ports=ports, env=env)
        rounds = tuple(sums.rounds(left)) if _two_ranks(name, left) else ()
        timed, _ = TIMED[setting.level]
        summed.append(changed(backend, cases=sums.cases, timed_bytes=timed, rounds=rounds))
    return changed(facts, backends=tuple(summed))


class _Ports:
    """Ports that nodes reported as free, each given out once; nodes of one machine share theirs."""

    def __init__(self, told: Mapping[str, InterfaceFacts]) -> None:
        self._told = told
        self._taken: set[tuple[str, int]] = set()

    def take(self, name: str) -> int:
        free, network = self._told[name].free_ports, self._told[name].network
        # When all have been used, the first one may be free again.
        port = next((port for port in free if (network, port) not in self._taken), free[0])
        self._taken.add((network, port))
        return port


def _connect(
    level: Level, pool: Pool, nodes: Sequence[Node], ports: _Ports, *, tries: int = 2
) -> tuple[Answers[mesh.MeshFacts], dict[str, int]]:
    """Connect all nodes; also returns the ports on which they had to listen."""
    listening = {node.name: ports.take(node.name) for node in nodes}
    peers = tuple(
        mesh.Peer(name=node.name, address=node.address, port=listening[node.name], ports=dict(node.ports)) for node in nodes
    )
    about: dict[str, float] = {"start_s": START_S[level], "connect_s": CONNECT_S[level]}
    limit_s = mesh.stays_s(**about, peers=len(peers)) + START_S[level] + 30
    asked = {name: mesh.MeshOrder(node=name, port=port, peers=peers, **about) for name, port in listening.items()}
    told = pool.ask({name: ask("mesh", limit_s, **to_plain(each)) for name, each in asked.items()}, mesh.MeshFacts)
    return _connect(level, pool, nodes, ports, tries=1) if tries > 1 and again(told) else (told, listening)


def backends(setting: Setting, nodes: Sequence[Node]) -> list[tuple[str, list[Node]]]:
    """The workers' backends over the nodes where they may be placed: NCCL when they take GPUs, else gloo."""
    used = [node for node in nodes if workers_on(setting, node, nodes)]
    if not gpus_per_worker(setting, nodes):
        return [("gloo", used)]
    on_gpus = [node for node in used if node.gpus]
    if _two_ranks("nccl", on_gpus):
        return [("nccl", on_gpus)]
    # A single GPU needs no communication. Without a job, more GPUs may be meant.
    return [("gloo", used)] if setting.job is None else []


def _two_ranks(backend: str, nodes: Sequence[Node]) -> bool:
    """A single node can have two ranks with gloo."""
    return sum(node.gpus for node in nodes) > 1 if backend == "nccl" else bool(nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    pool: Pool
    level: Level
    backend: str
    ports: _Ports
    env: Mapping[str, str]

    @property
    def cases(self) -> tuple[tuple[int, str], ...]:
        return tuple(case for case in CASES[self.level] if self.backend == "nccl" or case[1] != OF_GPUS)

    def rounds(self, nodes: Sequence[Node]) -> list[Run]:
        """Runs until one is sound, each without the nodes blamed by the one before."""
        rounds: list[Run] = []
        while nodes and len(rounds) < MOST_ROUNDS:
            (run,) = self._run([nodes])
            if not sound(run) and not suspects(run) and len(nodes) > 1:
                divisible = [node for node in nodes if self.backend == "gloo" or node.gpus > 1]
                run = changed(run, alone=tuple(self._run([[node] for node in divisible])))
            rounds.append(run)
            against = suspects(run)
            if not against:
                break
            nodes = [node for node in nodes if node.name not in against]
        return rounds

    def _run(self, groups: Sequence[Sequence[Node]], *, again: bool = True) -> list[Run]:
        """One sum within each group, all at the same time; no node is in two."""
        calls = {name: call for group in groups for name, call in self._calls(group).items()}
        told = self.pool.ask(calls, allreduce.SumFacts)
        if again and any("EADDRINUSE" in rank.error for facts in told.answered.values() for rank in facts.ranks.values()):
            # Another process took the port between its choice and its use.
            return self._run(groups, again=False)
        return [
            Run(
                nodes=tuple(node.name for node in group),
                answered={node.name: told.answered[node.name] for node in group if node.name in told.answered},
                unanswered={node.name: told.unanswered[node.name].error for node in group if node.name in told.unanswered},
            )
            for group in groups
        ]

    def _calls(self, nodes: Sequence[Node]) -> dict[str, Call]:
        """The calls for one sum over these nodes; a single node sums over two local processes."""
        alone, first = len(nodes) == 1, nodes[0]
        local = [node.gpus if self.backend == "nccl" else 2 if alone else 1 for node in nodes]
        master = ("127.0.0.1" if alone else first.address, self.ports.take(first.name))
        join_s, cases = JOIN_S[self.level], self.cases
        collective_s = COLLECTIVE_S[self.level] + PER_NODE_S * len(nodes) + (NCCL_START_S if self.backend == "nccl" else 0)
        # It ends well before that: no other collective follows one that hangs.
        limit_s = 60 + join_s + 3 * collective_s + len(cases)
        asked = [
            allreduce.SumOrder(
                backend=self.backend,
                first=sum(local[:index]),
                local=count,
                world=sum(local),
                master=master,
                cases=cases,
                timed=TIMED[self.level],
                join_s=join_s,
                collective_s=collective_s,
            )
            for index, count in enumerate(local)
        ]
        return {
            node.name: ask("allreduce", limit_s, self.env, **to_plain(each)) for node, each in zip(nodes, asked, strict=True)
        }


def judge_interfaces(nodes: Sequence[Node], told: Answers[InterfaceFacts], talking: Sequence[Backend]) -> list[Finding]:
    findings: list[Finding] = []
    for node in nodes:
        rows = INTERFACE.of(node=node.name)
        if found := told.answered.get(node.name):
            backends = [backend.name for backend in talking if node.name in backend.nodes]
            machines = {told.answered[other.name].network for other in nodes if other.name in told.answered}
            findings.append(_interface(rows, node, found, backends, alone=len(machines) == 1))
        elif silence := told.unanswered.get(node.name):
            remedy = "look at this node's name server (/etc/resolv.conf) and at its load, and repeat"
            findings.append(rows.error(silence.error, remedy))
    return findings


def _interface(rows: Rows, node: Node, found: InterfaceFacts, backends: Sequence[str], *, alone: bool) -> Finding:
    """The interface of this node's ranks: Ray, torch and chaosrun use addresses, gloo the resolution of the node's own
    hostname, unless GLOO_SOCKET_IFNAME names an interface. `alone`: all nodes are on its machine."""
    if ip_address(node.address).is_loopback and not alone:
        return rows.fail(
            f"Ray knows this node as {node.address}, which leads every other node to itself",
            "an address that the other nodes can reach",
            "start Ray there with --node-ip-address and the address of its network interface",
        )
    if "gloo" in backends and "GLOO_SOCKET_IFNAME" not in found.environment and not alone:
        return _gloo(rows, found)
    chosen = [f"{name}={value}" for name, value in sorted(found.environment.items()) if not alone]
    return rows.passed(", ".join([_named(node.address, found), *chosen]))


def _gloo(rows: Rows, found: InterfaceFacts) -> Finding:
    """Of its own name's addresses gloo takes the first that it can bind to, else the loopback address."""
    usable = next((address for address in found.own if _interface_of(address, found)), None)
    if usable is not None and not ip_address(usable).is_loopback:
        return rows.passed(f"gloo: {_named(usable, found)}")
    to = ", ".join(found.own) or f"nothing ({found.own_error})"
    return rows.fail(
        f"its own hostname {found.hostname} resolves to {to}: gloo would listen on the loopback interface",
        "an address that the other nodes can reach, like the one that Ray knows",
        "set GLOO_SOCKET_IFNAME to the interface of that address, or give the hostname that address in /etc/hosts",
    )


def _interface_of(address: str, found: InterfaceFacts) -> str | None:
    if ip_address(address).is_loopback:
        return "lo"
    return next((name for name, interface in found.interfaces.items() if address in interface), None)


def _named(address: str, found: InterfaceFacts) -> str:
    name = _interface_of(address, found)
    return f"{name} {address}" if name else f"{address} (on no interface here: translated on the way)"


def judge(setting: Setting, nodes: Sequence[Node], facts: NetworkFacts) -> list[Finding]:
    """A node without an answer on interfaces got no further probes."""
    return [
        *judge_interfaces(nodes, facts.interfaces, facts.backends),
        *judge_connections(nodes, facts.connections, facts.ports),
        *judge_sums(nodes, facts.backends),
    ]


CHECK = Check(
    name="network",
    about="interfaces, connections between all nodes, exact sums over all ranks",
    order=70,
    judge=judge,
    gather=gather,
)
