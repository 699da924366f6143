"""The check "bits": does the same computation give the same bits, again on one device, and on all devices of a kind? Pure.

Told apart are faults (a device that disagrees with itself, or with its like) and what is known to change bits: another model,
instruction set, version or number of threads. Devices are alike when all of these are equal; only alike ones are compared for
faults.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.checks.devices import LIMIT_S, PATIENCE_S
from chaosrun.preflight.checks.devices_computing import gpus_for_work, of_unused, product, remedy_for, unfinished
from chaosrun.preflight.model import PROBES, Answers, Check, Finding, Level, Rows, Setting, Status
from chaosrun.preflight.placement import may_take_gpus
from chaosrun.preflight.probes.bits import BitsFacts
from chaosrun.preflight.probes.compute import ComputeFacts
from chaosrun.preflight.probes.fingerprinted_training import Training, first_difference
from chaosrun.preflight.probes.per_device import Computed
from chaosrun.wording import count, listed

ROWS = Rows(check="bits")

REPEATS = 3
THREADS = 2
"""Without a job: enough to see whether their number matters."""
DEEP_S = 60.0
DEEP_SHARE = 0.25
"""Of the time that a deep preflight may take."""


def call(setting: Setting, node: Node) -> Call:
    seconds = 0.0
    if setting.level is Level.DEEP:
        seconds = DEEP_S if setting.seconds is None else DEEP_SHARE * setting.seconds
    training = {"repeats": REPEATS, "seconds": seconds, "cores": setting.level is not Level.QUICK}
    return Call(
        probe=f"{PROBES}.bits",
        parameters={
            "gpus": node.gpus if may_take_gpus(setting) else 0,
            "patience_s": PATIENCE_S[setting.level],
            "work": {"threads": setting.job.spec.threads if setting.job else THREADS, "training": training},
        },
        limit_s=LIMIT_S[setting.level] + seconds,
        env=setting.job.spec.env if setting.job else {},
    )


CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")
"""Of x86, from what every processor has to what few have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """What one device computed with one number of threads."""

    node: str
    device: str
    kind: Mapping[str, Any]
    threads: int
    operations: Mapping[str, str]
    like: str
    """Equal for devices that must compute the same."""
    whole: str
    """Over all operations."""

    @property
    def who(self) -> tuple[str, str]:
        return self.node, self.device


def judge(setting: Setting, nodes: Sequence[Node], told: Answers[BitsFacts]) -> list[Finding]:
    found: list[Finding] = []
    sound: list[Bits] = []
    for node in nodes:
        answer = told.answered.get(node.name)
        for device, computed in (answer.computed if answer else {}).items():
            rows = list(_alone(node.name, device, computed))
            if device != "cpu" and device not in gpus_for_work(setting, nodes, node):
                found += of_unused("bits", node.name, device, rows)
                continue
            found += rows
            if (facts_of := computed.facts) is not None and not any(run.differs for run in facts_of.training):
                sound += [_bits(node.name, device, facts_of.kind, run) for run in facts_of.training]
    return [*found, *_peers(sound), *_kinds(sound)]


def _alone(node: str, device: str, computed: Computed) -> Iterator[Finding]:
    """What one device says of itself."""
    if (facts := computed.facts) is None:
        yield unfinished("bits", node, device, computed)
        return
    yield from product("bits", node, device, facts)
    yield from _repeats(node, device, facts)
    yield from _cores(node, device, facts)
    if not any(run.differs for run in facts.training):
        yield from _threads(node, device, facts)


def _bits(node: str, device: str, kind: Mapping[str, Any], run: Training) -> Bits:
    return Bits(
        node=node,
        device=device,
        kind=kind,
        threads=run.threads,
        operations=run.operations,
        like=json.dumps({**kind, "threads": run.threads}, sort_keys=True),
        whole="".join(run.operations.values()),
    )


def _row(who: tuple[str, str], name: str, status: Status, **words: Any) -> Finding:
    return ROWS.row(status, name=name, node=who[0], device=who[1], **words)


def _repeats(node: str, device: str, facts: ComputeFacts) -> Iterator[Finding]:
    """A device against itself."""
    name = "repeats"
    bad = [run for run in facts.training if run.differs]
    if not bad:
        counts = ", ".join(f"{run.repeats} equal{_with(device, run.threads)}" for run in facts.training)
        yield _row((node, device), name, Status.PASS, measured=counts, threshold="the same bits each time")
        return
    run = bad[0]
    differs = run.differs
    assert differs is not None
    # With one thread a device has nothing left to choose; with several, only if it is not the threads.
    alone = all(run.threads > 1 for run in bad) and len(bad) < len(facts.training)
    reason = "this device does not repeat itself: what it trains cannot be trusted"
    if alone:
        reason = f"with one thread it repeats itself, with {run.threads} it does not"
    yield _row(
        (node, device),
        name,
        Status.FAIL,
        measured=f"{run.differing} of {run.repeats} differ{_with(device, run.threads)}, "
        f"first in {_step(differs.operation)} of repeat {differs.repeat}",
        threshold="the same bits each time",
        reason=reason,
        remedy=remedy_for(device, facts.kind) + ("; until then set per_worker.cpu to 1" if alone else ""),
    )


def _cores(node: str, device: str, facts: ComputeFacts) -> Iterator[Finding]:
    """The cores of a CPU against each other."""
    if facts.cores is None:
        return
    differing, tried = facts.cores.differing, facts.cores.tried
    if not differing:
        yield _row((node, device), "cores", Status.PASS, measured=f"{tried} equal", threshold="the same bits on each core")
        return
    shown = [f"core {core} in {_step(operation)}" for core, operation in differing.items()]
    yield _row(
        (node, device),
        "cores",
        Status.FAIL,
        measured=listed(shown, 4),
        threshold="the same bits on each core",
        reason="a core that computes something else spoils what it trains without an error",
        remedy=remedy_for(device, facts.kind),
    )


def _threads(node: str, device: str, facts: ComputeFacts) -> Iterator[Finding]:
    """One thread against several: other bits are no fault, if every node has the same number."""
    if device != "cpu" or len(facts.training) < 2:
        return
    one, several = facts.training
    operation = first_difference(one.operations, several.operations)
    measured = f"{several.threads} compute the same bits as one"
    reason = ""
    if operation:
        measured = f"{several.threads} compute other bits than one, from {_step(operation)} on"
        reason = "no fault, but a restart needs the same number: chaosrun takes it from per_worker.cpu"
    yield _row((node, device), "threads", Status.PASS, measured=measured, reason=reason)


def _peers(sound: Sequence[Bits]) -> Iterator[Finding]:
    """Each device against those that are alike, by majority."""
    groups: dict[str, list[Bits]] = defaultdict(list)
    for bits in sound:
        groups[bits.like].append(bits)
    # One row a device: what it computed with one thread, else with several, that is not what its peers did.
    rows: dict[tuple[str, str], Finding] = {}
    for group in groups.values():
        for bits, finding in zip(group, _vote(group), strict=True):
            earlier = rows.get(bits.who)
            if earlier is None or (earlier.status is not Status.FAIL and finding.status is not Status.SKIP):
                rows[bits.who] = finding
    yield from rows.values()


def _vote(group: Sequence[Bits]) -> Iterator[Finding]:
    name, size = "peers", len(group)
    counts = Counter(bits.whole for bits in group)
    usual = _usual(group)
    most = counts[usual.whole]
    decided = 2 * most > size
    for bits in group:
        if size == 1:
            reason = "no other device here is of its kind: model, instruction set, versions and threads"
            yield _row(bits.who, name, Status.SKIP, reason=reason)
        elif decided and bits.whole == usual.whole:
            measured = f"{most} of {size} equal"
            yield _row(bits.who, name, Status.PASS, measured=measured, threshold="the same bits as the majority of its kind")
        elif decided:
            yield _row(
                bits.who,
                name,
                Status.FAIL,
                measured=f"other bits{_with(bits.device, bits.threads)}, {_where(usual, bits)}",
                threshold=f"the same bits as {most} of {size} of its kind",
                reason="it repeats itself, and computes something else than its like",
                remedy=remedy_for(bits.device, bits.kind),
            )
        else:
            other = next(other for other in group if other.whole != bits.whole)
            split = " against ".join(str(count) for _, count in counts.most_common(4))
            yield _row(
                bits.who,
                name,
                Status.FAIL,
                measured=f"other bits than {other.node} {other.device}, {_where(other, bits)}",
                threshold=f"the same bits as the majority of {size} of its kind",
                reason=f"there is no majority ({split}): one at least is broken, and nothing here says which",
                remedy=f"test each, or add a node of the same kind to decide; {remedy_for(bits.device, bits.kind)}",
            )


def _kinds(sound: Sequence[Bits]) -> Iterator[Finding]:
    """Kinds of device against each other: a job that moves from one to another is not exact."""
    families: dict[tuple[str, int], list[Bits]] = defaultdict(list)
    for bits in sound:
        families[bits.device.partition(":")[0], bits.threads].append(bits)
    rows: dict[tuple[str, str], Finding] = {}
    for family in families.values():
        like = Counter(bits.like for bits in family).most_common(1)[0][0]
        usual = _usual([bits for bits in family if bits.like == like])
        lowest = _lowest([bits.kind["capability"] for bits in family])
        for bits in family:
            earlier = rows.get(bits.who)
            if earlier is None or earlier.status is not Status.WARN:
                rows[bits.who] = _beside(bits, usual, lowest)
    yield from rows.values()


def _beside(bits: Bits, usual: Bits, lowest: str | None) -> Finding:
    """A device beside the most frequent kind of its family."""
    name = "kind"
    capability, model = bits.kind["capability"], bits.kind["model"]
    operation = None if bits.like == usual.like else first_difference(usual.operations, bits.operations)
    if operation is None and capability == usual.kind["capability"]:
        return _row(bits.who, name, Status.PASS, measured=f"{model}, {capability}")
    differing = [key for key in bits.kind if bits.kind[key] != usual.kind.get(key)]
    shown = [key for key in ("capability", "model", "torch", "cuda", "cudnn", "settings") if key in differing] or differing
    if "capability" in differing and bits.device == "cpu" and lowest is not None:
        remedy = (
            f"set ATEN_CPU_CAPABILITY={lowest.lower()} in the job's env (MKL and oneDNN obey MKL_CBWR=COMPATIBLE and "
            "ONEDNN_MAX_CPU_ISA=AVX2), then run this check with the job file; or keep the job to one kind of node"
        )
    else:
        remedy = "keep a job to nodes of one kind, with the same versions"
    return _row(
        bits.who,
        name,
        Status.WARN,
        measured=_words(bits.kind, shown) + (f": other bits from {_step(operation)} on" if operation else ""),
        threshold=f"{_words(usual.kind, shown)}, as most have",
        reason="no fault, but a job that moves between the two is not exact to the bit",
        remedy=remedy,
    )


def _usual(alike: Sequence[Bits]) -> Bits:
    whole = Counter(bits.whole for bits in alike).most_common(1)[0][0]
    return next(bits for bits in alike if bits.whole == whole)


def _lowest(capabilities: Sequence[str]) -> str | None:
    """The instruction set that every one of these has; None where they are not of one family."""
    if not set(capabilities) <= {*CAPABILITIES}:
        return None
    return min(capabilities, key=CAPABILITIES.index)


def _words(kind: Mapping[str, Any], keys: Sequence[str]) -> str:
    words = []
    for key in keys:
        value = kind.get(key)
        if isinstance(value, Mapping):
            value = " ".join(f"{name}={setting}" for name, setting in value.items()) or "none"
        words.append(str(value) if key in ("capability", "model") else f"{key} {value}")
    return ", ".join(words)


def _where(usual: Bits, bits: Bits) -> str:
    return f"first in {_step(first_difference(usual.operations, bits.operations))}"


def _step(operation: str | None) -> str:
    """ "1 matmul of scores" as people say it."""
    step, _, name = (operation or "").partition(" ")
    return f"{name} (step {step})"


def _with(device: str, threads: int) -> str:
    if device != "cpu":
        return ""
    return f" with {count(threads, 'thread')}"


CHECK = Check(
    name="bits",
    about="the same bits on every device, each time",
    order=40,
    level=Level.QUICK,
    judge=judge,
    call=call,
    facts=BitsFacts,
)
