"""Judges sums over all nodes (all-reduce): exact everywhere, and if not, which node is at fault. Pure. The rank that sees a
wrong sum need not have caused it, as ranks pass partial sums on. A node that computes wrong sums also does so alone, so each is
tested by itself.

Bus bandwidth is nccl-tests': bytes / seconds × 2(n-1)/n for n ranks (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from msgspec import Struct

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Finding, Measure, Rows
from chaosrun.preflight.probes.allreduce import DONE, FORMED, JOINED, START, TIMED, RankFacts, SumFacts
from chaosrun.wording import duration, size

ROWS = Rows(check="network", name="all-reduce")
BANDWIDTH_WARN = 0.25
NEXT = {START: "join the others", JOINED: "form the group", FORMED: "begin", TIMED: "leave", DONE: "leave"}
EXACT = "every sum exact, and the same on every rank"
INEXACT = "leave this node out until its memory, its network card and their drivers have been checked"
HELD_UP = "look there for what holds processes up or ends them (dmesg, memory, load), and leave it out until then"
BETWEEN_TWO = "leave both out until their network cards, drivers, memory and the way between them have been checked"
BETWEEN_MANY = "repeat with --only network; then look for switches or limits that only many connections meet"
APART = "check its network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME choose it), and leave it out until then"


class Run(Struct, frozen=True, kw_only=True):
    nodes: tuple[str, ...]
    answered: dict[str, SumFacts]
    unanswered: dict[str, str]
    alone: "tuple[Run, ...]" = ()
    """The same within each node, if it failed."""

    @property
    def ranks(self) -> list[tuple[str, int, RankFacts]]:
        return [(name, number, rank) for name, facts in self.answered.items() for number, rank in facts.ranks.items()]


class Backend(Struct, frozen=True, kw_only=True):
    name: str
    nodes: tuple[str, ...]
    cases: tuple[tuple[int, str], ...] = ()
    """Bytes and dtype."""
    timed_bytes: int = 0
    rounds: tuple[Run, ...] = ()
    """The runs, each without the nodes blamed by the one before."""


class Suspicion(NamedTuple):
    why: str
    remedy: str


Suspects = Mapping[str, Suspicion]


def sound(run: Run) -> bool:
    """Whether every rank reached the end with every sum right."""
    ended = all(rank.ended == "done" and not _wrong(rank) for *_, rank in run.ranks)
    return not run.unanswered and ended and not _odd_hashes(run)


def _wrong(rank: RankFacts) -> str:
    """Its first wrong sum."""
    for case, result in enumerate(rank.results):
        if (wrong := result.wrong) is not None:
            places = f"at {wrong.count} places, first {wrong.index}: {wrong.got}, not {wrong.expected}"
            return f"sum {case + 1} is wrong {places}"
    return ""


def _odd_hashes(run: Run) -> set[str]:
    """Nodes with a result that differs from most ranks'."""
    odd: set[str] = set()
    for case in range(max((len(rank.results) for *_, rank in run.ranks), default=0)):
        hashes = [(name, rank.results[case].hash) for name, _, rank in run.ranks if len(rank.results) > case]
        usual, _ = Counter(value for _, value in hashes).most_common(1)[0]
        odd |= {name for name, value in hashes if value != usual}
    return odd


def suspects(run: Run) -> Suspects:
    """Nodes at fault for an unsound run, and why; empty when that is unknown."""
    count = len(run.nodes)
    if sound(run):
        return {}
    if count == 1:
        return dict.fromkeys(run.nodes, _trouble(run))
    if run.unanswered:
        return _silent(run)
    for found in (_stuck(run), _behind(run), _dead(run)):
        # If most of the nodes would be blamed, the fault is probably elsewhere.
        if found and 2 * len(found) < count + (count == 2):
            return found
    broken = {each.nodes[0]: _trouble(each) for each in run.alone if not sound(each)}
    return {
        name: trouble._replace(why=f"also over two processes of its own: {trouble.why}") for name, trouble in broken.items()
    }


def _trouble(run: Run) -> Suspicion:
    shown = {name: Suspicion(wrong, INEXACT) for name, _, rank in run.ranks if (wrong := _wrong(rank))}
    odd = dict.fromkeys(sorted(_odd_hashes(run)), Suspicion("its result is another than that of the other ranks", INEXACT))
    said = Suspicion(next((rank.error for *_, rank in run.ranks if rank.error), "it did not end"), APART)
    found = next(filter(None, (_silent(run), _stuck(run), _dead(run), shown, odd)), {"": said})
    return next(iter(found.values()))


def _silent(run: Run) -> Suspects:
    return {name: Suspicion(why, HELD_UP) for name, why in run.unanswered.items()}


def _stuck(run: Run) -> Suspects:
    return {
        name: Suspicion(f"rank {number} hung and did not {_next(rank)}, when the others gave up", HELD_UP)
        for name, number, rank in run.ranks
        if rank.ended == "stuck"
    }


def _behind(run: Run) -> Suspects:
    """Nodes whose ranks made the least progress, if other nodes' made more."""
    places = {name: min(rank.place for rank in facts.ranks.values()) for name, facts in run.answered.items()}
    least = min(places.values(), default=0)
    if least == max(places.values(), default=0):
        return {}
    return {
        name: Suspicion(f"rank {number} did not {_next(rank)}, as others did: {rank.error or rank.ended}", APART)
        for name, number, rank in run.ranks
        if rank.place == least
    }


def _dead(run: Run) -> Suspects:
    dead = [(name, number, rank.error) for name, number, rank in run.ranks if rank.ended == "died"]
    return {name: Suspicion(f"rank {number} died: {error}", HELD_UP) for name, number, error in dead}


def _next(rank: RankFacts) -> str:
    """The next operation that the rank should have done, in words."""
    case, finished = divmod(rank.place, 2)
    return NEXT.get(rank.place) or (f"come to sum {case + 2}" if finished else f"finish sum {case + 1}")


def judge_sums(nodes: Sequence[Node], backends: Sequence[Backend]) -> list[Finding]:
    findings = [finding for backend in backends for finding in _judged(backend)]
    summed = {name for backend in backends for run in backend.rounds for name in run.nodes}
    talking = {name for backend in backends for name in backend.nodes}
    for name in (node.name for node in nodes if node.name not in summed):
        why = "left out: what was found before would make the others hang, or leaves nobody to sum with"
        findings.append(ROWS.skip(why if name in talking else "no worker that sums with others is placed there", node=name))
    return findings


def _judged(backend: Backend) -> Iterator[Finding]:
    rows = ROWS.of(device=backend.name)
    against: Suspects = {}
    for run in backend.rounds:
        against = suspects(run)
        for name, (why, remedy) in against.items():
            own = rows.of(node=name)
            yield own.error(why, remedy) if name in run.unanswered else own.fail(why, EXACT, remedy)
    if not backend.rounds:
        return
    last = backend.rounds[-1]
    if sound(last):
        yield from _exact(rows, backend, last)
    elif against:
        why = f"a sum with the nodes that seemed good failed as well, {len(backend.rounds)} times"
        remedy = "repeat with --only network once the nodes that failed are out or repaired"
        yield from (rows.error(why, remedy, node=name) for name in last.nodes if name not in against)
    else:
        # No single nodes can be blamed.
        right = "; each was right alone" if last.alone else ""
        remedy = BETWEEN_MANY if len(last.nodes) > 2 else BETWEEN_TWO
        reason = f"over {len(last.nodes)} nodes together{right}"
        yield rows.fail(_trouble(last).why, EXACT, remedy, reason=reason, blames=last.nodes)


def _exact(rows: Rows, backend: Backend, run: Run) -> Iterator[Finding]:
    count, sizes = len(run.ranks), [number for number, _ in backend.cases]
    over = f"{count} ranks on {f'{len(run.nodes)} nodes' if len(run.nodes) > 1 else 'this node'}"
    for name in run.nodes:
        exact = f"{len(sizes)} sums exact, {size(min(sizes))} to {size(max(sizes))}, over {over}"
        yield rows.passed(exact, node=name)
    if count > 1 and all(rank.seconds for *_, rank in run.ranks):
        seconds = max(median(rank.seconds) for *_, rank in run.ranks)
        bus = backend.timed_bytes / seconds * 2 * (count - 1) / count / 1e9
        yield rows.passed(
            f"{bus:.3g} GB/s ({size(backend.timed_bytes)} in {duration(seconds)} over {count} ranks)",
            name=f"all-reduce bus bandwidth, {size(backend.timed_bytes)}",
            measure=Measure(number=bus, unit="GB/s", better="higher", warn=BANDWIDTH_WARN),
        )
