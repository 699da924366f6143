"""Judges sums over all nodes (all-reduce): exact everywhere, and if not, because of whom. Pure.

Where a wrong sum shows says nothing of where it was made: ranks hand their parts on. Who makes it has it alone too, or with
every neighbour.

Bus bandwidth is nccl-tests': bytes / seconds × 2(n-1)/n for n ranks (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from chaosrun.cluster.probing import Node
from chaosrun.preflight.checks.network_blame import fewest_to_blame
from chaosrun.preflight.model import Facts, Finding, Measure, Rows, Setting
from chaosrun.wording import duration, size

ROWS = Rows(check="network")

BANDWIDTH_WARN = 0.25
PLACES = {"start": "join the others", "joined": "form the group", "formed": "begin", "timed": "leave", "done": "leave"}
ORDER = {"start": -3, "joined": -2, "formed": -1, "timed": 1 << 30, "done": 1 << 31}


def sound(run: Facts) -> bool:
    """Whether every rank came to the end and had every sum right."""
    return not run["unanswered"] and all(_node_sound(found) for found in run["answered"].values()) and not _odd_hashes(run)


def _node_sound(found: Facts) -> bool:
    return all(rank["ended"] == "done" and not _first_wrong(rank) for rank in found["ranks"].values())


def _first_wrong(rank: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]] | None:
    return next(((case, result["wrong"]) for case, result in enumerate(rank["results"]) if result.get("wrong")), None)


def _odd_hashes(run: Facts) -> set[str]:
    """Nodes with a result that most ranks do not have."""
    odd: set[str] = set()
    ranks = [(name, rank["results"]) for name, found in run["answered"].items() for rank in found["ranks"].values()]
    for case in range(max((len(results) for _, results in ranks), default=0)):
        hashes = {(name, index): each[case].get("hash") for index, (name, each) in enumerate(ranks) if len(each) > case}
        usual, _ = Counter(hashes.values()).most_common(1)[0]
        odd |= {name for (name, _), value in hashes.items() if value != usual}
    return odd


class Suspicion(NamedTuple):
    why: str
    remedy: str


EXACT = "every sum exact, and the same on every rank"
INEXACT = "leave this node out until its memory, its network card and their drivers have been checked"
HELD_UP = "look there for what holds processes up or ends them (dmesg, memory, load), and leave it out until then"
BETWEEN_TWO = "leave both out until their network cards, drivers, memory and the way between them have been checked"
BETWEEN_MANY = "repeat with --only network; then look for switches or limits that only many connections meet"
APART = "check its network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME choose it), and leave it out until then"


def suspects(round: Facts) -> dict[str, Suspicion]:
    """Who is to blame that a round is not sound, and why; empty when that cannot be told."""
    size = len(round["nodes"])
    if sound(round):
        return {}
    if size == 1:
        return dict.fromkeys(round["nodes"], _trouble(round))
    if round["unanswered"]:
        return _missing(round)
    for found in (_stuck(round), _behind(round), _dead(round)):
        # When it is most of them, it is rather somebody else.
        if found and 2 * len(found) < size + (size == 2):
            return found
    broken = [run for run in round["alone"] if not sound(run)]
    if broken:
        return {run["nodes"][0]: _in_addition("also over two processes of its own", run) for run in broken}
    return _of_pairs(round)


def _of_pairs(round: Facts) -> dict[str, Suspicion]:
    """The fewest by whom the pairs that failed are explained; of two that fail with each other only, both."""
    failed = [run for run in round["pairs"] if not sound(run)]
    often = Counter(name for run in failed for name in run["nodes"])
    fewest = fewest_to_blame(round["nodes"], [(run["nodes"][0], run["nodes"][1]) for run in failed])
    against: dict[str, Suspicion] = {}
    for run in failed:
        one, other = run["nodes"]
        for name, partner in ((one, other), (other, one)):
            if name in fewest or often[one] == often[other] == 1:
                against.setdefault(name, _in_addition(f"right alone, not together with {partner}", run))
    return against


def _in_addition(when: str, run: Facts) -> Suspicion:
    trouble = _trouble(run)
    return trouble._replace(why=f"{when}: {trouble.why}")


def _missing(run: Facts) -> dict[str, Suspicion]:
    return {name: Suspicion(why["error"], HELD_UP) for name, why in run["unanswered"].items()}


def _stuck(run: Facts) -> dict[str, Suspicion]:
    return {
        name: Suspicion(f"rank {number} hung and did not {_next_of(rank['place'])}, when the others gave up", HELD_UP)
        for name, number, rank in _ranks(run)
        if rank["ended"] == "stuck"
    }


def _behind(run: Facts) -> dict[str, Suspicion]:
    places = {name: min(_order(rank["place"]) for rank in found["ranks"].values()) for name, found in run["answered"].items()}
    if not places or min(places.values()) == max(places.values()):
        return {}
    return {
        name: Suspicion(
            f"rank {number} did not {_next_of(rank['place'])}, as others did: {rank['error'] or rank['ended']}", APART
        )
        for name, number, rank in _ranks(run)
        if _order(rank["place"]) == min(places.values())
    }


def _dead(run: Facts) -> dict[str, Suspicion]:
    dead = [(name, number, rank["error"]) for name, number, rank in _ranks(run) if rank["ended"] == "died"]
    return {name: Suspicion(f"rank {number} died: {error}", HELD_UP) for name, number, error in dead}


def _wrong(run: Facts) -> dict[str, Suspicion]:
    """On whom it shows."""
    found = {name: Suspicion(_said(wrong), INEXACT) for name, _, rank in _ranks(run) if (wrong := _first_wrong(rank))}
    odd = Suspicion("its result is another than that of the other ranks", INEXACT)
    return found or dict.fromkeys(sorted(_odd_hashes(run)), odd)


def _ranks(run: Facts) -> list[tuple[str, str, Mapping[str, Any]]]:
    return [(name, number, rank) for name, found in run["answered"].items() for number, rank in found["ranks"].items()]


def _order(place: Any) -> int:
    if isinstance(place, str):
        return ORDER[place]
    case, what = place
    return 2 * case + (what == "finished")


def _next_of(place: Any) -> str:
    if isinstance(place, str):
        return PLACES[place]
    case, what = place
    return f"finish sum {case + 1}" if what == "entered" else f"come to sum {case + 2}"


def _said(wrong: tuple[int, Mapping[str, Any]]) -> str:
    case, what = wrong
    return f"sum {case + 1} is wrong at {what['count']} places, first {what['index']}: {what['got']}, not {what['expected']}"


def _trouble(run: Facts) -> Suspicion:
    """What is wrong with a run that is not sound."""
    for found in (_missing(run), _stuck(run), _dead(run), _wrong(run)):
        if found:
            return next(iter(found.values()))
    return Suspicion(next((rank["error"] for _, _, rank in _ranks(run) if rank["error"]), "it did not end"), APART)


def judge_sums(setting: Setting, nodes: Sequence[Node], facts: Facts) -> list[Finding]:
    findings: list[Finding] = []
    for group in facts["sums"]:
        findings += _group(group)
    summed = {name for group in facts["sums"] for round in group["rounds"] for name in round["nodes"]}
    for node in nodes:
        if node.name not in summed:
            talks = any(node.name in names for _, names in facts["backends"])
            reason = (
                "left out: what was found before would make the others hang, or leaves nobody to sum with"
                if talks
                else "no worker that sums with others is placed there"
            )
            findings.append(ROWS.skip(reason, name="all-reduce", node=node.name))
    return findings


def _group(group: Facts) -> list[Finding]:
    backend: str = group["backend"]
    findings: list[Finding] = []
    if not group["rounds"]:
        return findings
    against: Mapping[str, Suspicion] = {}
    for round in group["rounds"]:
        against = suspects(round)
        findings += [_blamed(backend, name, why, round) for name, why in against.items()]
    last = group["rounds"][-1]
    if sound(last):
        return [*findings, *_exact(group, last), *_bandwidth(group, last)]
    if not against:
        return [*findings, _nobodys(backend, last)]
    return [*findings, *(_unclear(group, name) for name in last["nodes"] if name not in against)]


def _nobodys(backend: str, run: Facts) -> Finding:
    """Of a failure that cannot be put down to some of the nodes."""
    tried = [words for words, runs in (("alone", run["alone"]), ("with its neighbours", run["pairs"])) if runs]
    right = f"; each was right {' and '.join(tried)}" if tried else ""
    return ROWS.fail(
        _trouble(run).why,
        EXACT,
        BETWEEN_MANY if len(run["nodes"]) > 2 else BETWEEN_TWO,
        name="all-reduce",
        device=backend,
        reason=f"over {len(run['nodes'])} nodes together{right}",
        blames=tuple(run["nodes"]),
    )


def _unclear(group: Facts, name: str) -> Finding:
    return ROWS.error(
        f"a sum with the nodes that seemed good failed as well, {len(group['rounds'])} times",
        "repeat with --only network once the nodes that failed are out or repaired",
        name="all-reduce",
        node=name,
        device=group["backend"],
    )


def _blamed(backend: str, name: str, suspicion: Suspicion, round: Facts) -> Finding:
    about: dict[str, Any] = {"check": "network", "name": "all-reduce", "node": name, "device": backend}
    if name in round["unanswered"]:
        return ROWS.error(suspicion.why, suspicion.remedy, **about)
    return ROWS.fail(suspicion.why, EXACT, suspicion.remedy, **about)


def _exact(group: Facts, run: Facts) -> list[Finding]:
    on = f"{len(run['nodes'])} nodes" if len(run["nodes"]) > 1 else "this node"
    over = f"{len(_ranks(run))} ranks on {on}"
    return [_exact_on(group, name, list(run["answered"][name]["ranks"].values()), over) for name in run["nodes"]]


def _exact_on(group: Facts, name: str, own: Sequence[Mapping[str, Any]], over: str) -> Finding:
    sizes = [number for number, _ in group["cases"]]
    missing = sorted({group["cases"][case][1] for case, result in enumerate(own[0]["results"]) if "unsupported" in result})
    addresses = sorted({address for rank in own for address in rank["addresses"]})
    reasons = [f"through {', '.join(addresses)}"] if addresses else []
    reasons += [f"this torch has no sums of {', '.join(missing)}"] if missing else []
    exact = len(sizes) - sum("unsupported" in result for result in own[0]["results"])
    return ROWS.passed(
        f"{exact} sums exact, {size(min(sizes))} to {size(max(sizes))}, over {over}",
        name="all-reduce",
        node=name,
        device=group["backend"],
        reason="; ".join(reasons),
    )


def _bandwidth(group: Facts, run: Facts) -> list[Finding]:
    ranks = [rank for _, _, rank in _ranks(run)]
    if len(ranks) < 2 or not all(rank["seconds"] for rank in ranks):
        return []
    summed, _ = group["timed"]
    seconds = max(statistics.median(rank["seconds"]) for rank in ranks)
    bus = summed / seconds * 2 * (len(ranks) - 1) / len(ranks) / 1e9
    return [
        ROWS.passed(
            f"{bus:.3g} GB/s ({size(summed)} in {duration(seconds)} over {len(ranks)} ranks)",
            name=f"all-reduce bus bandwidth, {size(summed)}",
            device=group["backend"],
            measure=Measure(number=bus, unit="GB/s", better="higher", warn=BANDWIDTH_WARN),
        )
    ]
