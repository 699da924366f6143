"""The rest of a drill's page, as rows to print: the divergence, both legs' environments, a diagnosis, the run's files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.records.events import PlacementAcquired
from chaosrun.report.diagnosis import Quantity, finding_rows, hazard_sentence, quantity_rows, replay_sentences
from chaosrun.report.html.source import Leg, Source
from chaosrun.report.page import shown
from chaosrun.verify.compare import differing_keys

if TYPE_CHECKING:
    from chaosrun.verify.diagnosis import Diagnosis

FINGERPRINTED = ("gradient", "optimizer", "weights", "buffers", "registered")
"""Kinds of which the records hold digests, not values."""
MOST_TEXT = 20_000
MOST_QUANTITIES = 200
FILES = {
    "verdict.json": "the verdict, for programs",
    "job.yaml": "the job as it was submitted",
    "run.json": "what it was resolved to",
    "plan.json": "the faults, as planned",
    "report.md": "this report in short",
    "junit.xml": "the checks, for CI systems",
    "diagnosis.json": "the diagnosis",
    "reference/journal.jsonl": "what was decided and seen, undisturbed",
    "chaos/journal.jsonl": "the same under faults",
    "chaos/attempts": "traces and logs of every rank, by attempt",
    "chaos/checkpoints": "the checkpoints that were kept",
    "chaos/quarantine": "checkpoints that were set aside",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRow:
    name: str
    reference: str
    chaos: str
    alike: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    account: str
    reproduced: bool
    facts: tuple[tuple[str, str], ...]
    quantities: tuple[Quantity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Particulars:
    fingerprints_only: bool
    environment: tuple[EnvironmentRow, ...]
    where: tuple[tuple[str, str], ...]
    """What is known of the machines and versions besides."""
    diagnosis: Diagnosed | None
    files: tuple[tuple[str, str], ...]
    job: str | None
    """The text of the job file."""


def particulars(source: Source) -> Particulars:
    found = source.view.verdict.divergence
    return Particulars(
        fingerprints_only=found is not None and found.kind in FINGERPRINTED,
        environment=tuple(_environment(source)),
        where=tuple(_where(source)),
        diagnosis=_diagnosed(source.diagnosis) if source.diagnosis is not None else None,
        files=tuple((name, what) for name, what in FILES.items() if (source.view.run.path / name).exists()),
        job=_text(source.view.run.job_yaml),
    )


def _text(path: Path) -> str | None:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}\n… ({len(text)} characters)"


def _environment(source: Source) -> Iterator[EnvironmentRow]:
    """What differs first."""
    expected, seen = source.reference.history.environment or {}, source.chaos.history.environment or {}
    apart = differing_keys(expected, seen) if expected and seen else []
    for key in (*apart, *(key for key in {**expected, **seen} if key not in apart)):
        pair = [shown(facts[key]) if key in facts else "–" for facts in (expected, seen)]
        yield EnvironmentRow(name=str(key).replace("_", " "), reference=pair[0], chaos=pair[1], alike=key not in apart)


def _where(source: Source) -> Iterator[tuple[str, str]]:
    if source.view.facts.chaosrun:
        yield "chaosrun", source.view.facts.chaosrun
    if source.view.facts.reference_source:
        yield "reference", f"taken from the cache: {source.view.facts.reference_source}"
    for leg in (source.reference, source.chaos):
        if nodes := _nodes(leg):
            yield f"{leg.name} leg", nodes
    if source.view.spec is not None:
        yield "deterministic", str(source.view.spec.deterministic)
        losses, weights = source.view.spec.verify.losses, source.view.spec.verify.weights
        if not (losses.exact and weights.exact):
            yield (
                "tolerance",
                f"losses atol {losses.atol:g} rtol {losses.rtol:g}; weights atol {weights.atol:g} rtol {weights.rtol:g}",
            )


def _nodes(leg: Leg) -> str:
    """Of the newest placement."""
    for record in reversed(leg.history.events(PlacementAcquired)):
        told = [f"{node.address} (ranks {', '.join(map(str, node.ranks[:32]))})" for node in record.nodes.values()]
        more = "; more workers than cores" if record.oversubscribed else ""
        return f"{', '.join(told[:16])}{more}"
    return ""


def _diagnosed(found: "Diagnosis") -> Diagnosed:
    finding = found.comparison.finding
    facts = [] if finding is None else list(finding_rows(finding))
    facts += [("hazard", hazard_sentence(found))] if found.hazard else []
    facts += [("replayed", "; ".join(replay_sentences(found.replay)))]
    facts += [("what to do", found.hint)] if found.hint else []
    quantities = tuple(quantity_rows(found.comparison))[:MOST_QUANTITIES]
    return Diagnosed(account=found.account, reproduced=found.reproduced, facts=tuple(facts), quantities=quantities)
