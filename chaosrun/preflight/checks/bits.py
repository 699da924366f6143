"""The check "bits": does the same computation give the same bits, repeated on one device, and on all devices of a kind? Pure.

It separates faults (a device whose bits change from run to run, or differ from those of equal devices) from known causes of
other bits: another model, instruction set, version or number of threads. Devices are compared for faults only if all of these
are equal.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.checks.devices import ask_devices, gpus_for_work, of_unused, product, remedy_for, unfinished
from chaosrun.preflight.model import Answers, Check, Finding, Level, Rows, Setting, Status
from chaosrun.preflight.probes.compute import ComputeFacts, DeviceKind
from chaosrun.preflight.probes.devices import DevicesFacts
from chaosrun.preflight.probes.fingerprinted_training import FingerprintedTraining, first_difference
from chaosrun.records.grouping import grouped
from chaosrun.wording import count

REPEATS = 3
THREADS = 2
"""Number of threads if no job is given: enough to see whether the number changes bits."""
DEEP_S = 60.0
DEEP_SHARE = 0.25
"""Of the time that a deep preflight may take."""
CAPABILITIES = ("DEFAULT", "AVX2", "AVX512")
"""Instruction sets of x86, from the commonest to the rarest."""


def call(setting: Setting, node: Node) -> Call:
    seconds = 0.0
    if setting.level is Level.DEEP:
        seconds = DEEP_S if setting.seconds is None else DEEP_SHARE * setting.seconds
    threads = setting.job.spec.threads if setting.job else THREADS
    work = {"threads": threads, "repeats": REPEATS, "seconds": seconds}
    # Products on GPUs are left to the check "devices"; torch is loaded for the CPU only here.
    return ask_devices(setting, node, seconds, cpu={**work, "products": True}, cuda=work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """The results of one device with one number of threads."""

    row: Rows
    kind: DeviceKind
    run: FingerprintedTraining

    @property
    def who(self) -> tuple[str | None, str | None]:
        return self.row.node, self.row.device

    @property
    def like(self) -> tuple[str, int]:
        """A key that is equal for devices which must compute the same bits."""
        return repr(self.kind), self.run.threads

    @property
    def family(self) -> tuple[str, int]:
        return (self.row.device or "").partition(":")[0], self.run.threads

    @property
    def whole(self) -> str:
        """One digest over all operations."""
        return "".join(self.run.operations.values())


def judge(setting: Setting, nodes: Sequence[Node], told: Answers[DevicesFacts]) -> list[Finding]:
    found: list[Finding] = []
    sound: list[Bits] = []
    for node in nodes:
        facts = told.answered.get(node.name)
        for device, computed in (facts.computed if facts else {}).items():
            row = Rows(check="bits", node=node.name, device=device)
            rows = [unfinished(row, computed)] if computed.facts is None else list(_alone(row, computed.facts))
            if device != "cpu" and device not in gpus_for_work(setting, nodes, node):
                found += of_unused(row, rows)
                continue
            found += rows
            if (facts_of := computed.facts) is not None and not any(run.differs for run in facts_of.training):
                sound += [Bits(row=row, kind=facts_of.kind, run=run) for run in facts_of.training]
    peers = _one_a_device(_votes(sound), (Status.SKIP, Status.PASS, Status.FAIL))
    return [*found, *peers, *_one_a_device(_kinds(sound), (Status.PASS, Status.WARN))]


def _one_a_device(found: Iterable[tuple[Bits, Finding]], worse: Sequence[Status]) -> list[Finding]:
    """One finding per device, from those with one and with several threads: the worse one, else the first."""
    rows: dict[tuple[str | None, str | None], Finding] = {}
    for bits, finding in found:
        earlier = rows.get(bits.who)
        if earlier is None or worse.index(finding.status) > worse.index(earlier.status):
            rows[bits.who] = finding
    return [*rows.values()]


def _alone(row: Rows, facts: ComputeFacts) -> Iterator[Finding]:
    """The finding on one device alone: whether its results are repeatable."""
    yield from product(row, facts)
    same, remedy = "the same bits each time", remedy_for(row.device, facts.kind)
    bad = next((run for run in facts.training if run.differs), None)
    if bad is None or bad.differs is None:
        counts = ", ".join(f"{run.repeats} equal{_with(row, run)}" for run in facts.training)
        yield row.passed(counts, same, name="repeats")
    else:
        first = f"first in {_step(bad.differs.operation)} of repeat {bad.differs.repeat}"
        measured = f"{bad.differing} of {bad.repeats} differ{_with(row, bad)}, {first}"
        why = "this device does not repeat itself: what it trains cannot be trusted"
        yield row.fail(measured, same, remedy, name="repeats", reason=why)


def _votes(sound: Sequence[Bits]) -> Iterator[tuple[Bits, Finding]]:
    """Compare each device with the equal ones, by majority."""
    for group in grouped(sound, lambda bits: bits.like).values():
        counts = Counter(bits.whole for bits in group)
        for bits in group:
            yield bits, _vote(bits, group, counts)


def _vote(bits: Bits, group: Sequence[Bits], counts: Mapping[str, int]) -> Finding:
    row, total = bits.row.of(name="peers"), len(group)
    usual = _usual(group)
    most = counts[usual.whole]
    if total == 1:
        return row.skip("no other device here is of its kind: model, instruction set, versions and threads")
    if 2 * most <= total:
        other = next(other for other in group if other.whole != bits.whole)
        split = " against ".join(str(each) for each in sorted(counts.values(), reverse=True)[:4])
        why = f"there is no majority ({split}): one at least is broken, and nothing here says which"
        remedy = f"test each, or add a node of the same kind to decide; {remedy_for(row.device, bits.kind)}"
        measured = f"other bits than {other.row.node} {other.row.device}, {_where(other, bits)}"
        return row.fail(measured, f"the same bits as the majority of {total} of its kind", remedy, reason=why)
    if bits.whole == usual.whole:
        return row.passed(f"{most} of {total} equal", "the same bits as the majority of its kind")
    why = "it repeats itself, but computes other bits than equal devices"
    measured = f"other bits{_with(row, bits.run)}, {_where(usual, bits)}"
    return row.fail(measured, f"the same bits as {most} of {total} of its kind", remedy_for(row.device, bits.kind), reason=why)


def _kinds(sound: Sequence[Bits]) -> Iterator[tuple[Bits, Finding]]:
    """Compare kinds of device with each other: a job that moves from one kind to another is not exact."""
    for family in grouped(sound, lambda bits: bits.family).values():
        like = Counter(bits.like for bits in family).most_common(1)[0][0]
        usual = _usual([bits for bits in family if bits.like == like])
        for bits in family:
            yield bits, _beside(bits, usual, [other.kind.capability for other in family])


def _beside(bits: Bits, usual: Bits, capabilities: Sequence[str]) -> Finding:
    """Compare a device with the most frequent kind of its family."""
    row, kind, most = bits.row.of(name="kind"), structs.asdict(bits.kind), structs.asdict(usual.kind)
    operation = None if bits.like == usual.like else first_difference(usual.run.operations, bits.run.operations)
    if operation is None and kind["capability"] == most["capability"]:
        return row.passed(f"{bits.kind.model}, {bits.kind.capability}")
    differing = [key for key in kind if kind[key] != most[key]]
    # Features are what the capability is made of, units what a model has.
    shown = [key for key in differing if key not in ("features", "units", "caches")] or differing
    remedy = "keep a job to nodes of one kind, with the same versions"
    if "capability" in differing and row.device == "cpu" and {*capabilities} <= {*CAPABILITIES}:
        lowest = min(capabilities, key=CAPABILITIES.index).lower()
        remedy = (
            f"set ATEN_CPU_CAPABILITY={lowest} in the job's env (MKL and oneDNN obey MKL_CBWR=COMPATIBLE and "
            "ONEDNN_MAX_CPU_ISA=AVX2), then run this check with the job file; or keep the job to one kind of node"
        )
    measured = _words(bits.kind, shown) + (f": other bits from {_step(operation)} on" if operation else "")
    why = "no fault, but a job that moves between the two is not exact to the bit"
    return row.warn(measured, f"{_words(usual.kind, shown)}, as most have", remedy, reason=why)


def _usual(alike: Sequence[Bits]) -> Bits:
    whole = Counter(bits.whole for bits in alike).most_common(1)[0][0]
    return next(bits for bits in alike if bits.whole == whole)


def _words(kind: DeviceKind, keys: Sequence[str]) -> str:
    words: list[str] = []
    for key in keys:
        value = getattr(kind, key)
        if key == "settings":
            value = " ".join(f"{name}={setting}" for name, setting in value.items()) or "none"
        words.append(str(value) if key in ("capability", "model") else f"{key} {value}")
    return ", ".join(words)


def _where(usual: Bits, bits: Bits) -> str:
    return f"first in {_step(first_difference(usual.run.operations, bits.run.operations))}"


def _step(operation: str | None) -> str:
    """ "1 matmul of scores" as people say it."""
    step, _, name = (operation or "").partition(" ")
    return f"{name} (step {step})"


def _with(row: Rows, run: FingerprintedTraining) -> str:
    return f" with {count(run.threads, 'thread')}" if row.device == "cpu" else ""


CHECK = Check(
    name="bits", about="the same bits on every device, each time", order=40, judge=judge, call=call, facts=DevicesFacts
)
