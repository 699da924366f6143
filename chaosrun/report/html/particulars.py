"""The rest of a drill's page, as rows to print: the divergence, both legs' environments, a diagnosis, the run's files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaosrun.records.events import PlacementAcquired
from chaosrun.report.html.source import Leg, Source
from chaosrun.report.page import shown
from chaosrun.verify.compare import differing_keys

FINGERPRINTED = ("gradient", "optimizer", "weights", "buffers", "registered")
"""Kinds of which the records hold digests, not values."""
MOST_TEXT = 20_000
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
    link: str | None
    """To the hazard it names."""
    quantities: tuple[tuple[str, str, str, bool], ...]
    """What, how many, how far, and whether it differs."""


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


def _diagnosed(found: Mapping[str, Any]) -> Diagnosed:
    """diagnosis.json, as far as it holds what it should."""
    finding, hazard, replay = (_part(found, name) for name in ("finding", "hazard", "replay"))
    difference = _part(finding, "difference")
    facts: list[tuple[str, str]] = []
    if finding:
        place = "after the last step" if finding.get("at_end") else f"in step {finding.get('step')}"
        facts.append(("first quantity", f"{finding.get('quantity')}, {place}, rank {finding.get('rank')}"))
        if finding.get("tensor"):
            facts.append(("tensor", str(finding["tensor"])))
        if finding.get("problem"):
            facts.append(("", str(finding["problem"])))
        values = difference or finding
        facts += [(name, shown(values[name])) for name in ("expected", "seen") if values.get(name) is not None]
    if difference:
        facts.append(
            (
                "elements",
                f"{difference.get('differing')} of {difference.get('elements')} differ, first at {difference.get('index')}",
            )
        )
        if difference.get("ulp") is not None:
            facts.append(("distance", f"{difference['ulp']} ULP there, at most {difference.get('max_ulp')} in this tensor"))
    if hazard:
        place = hazard.get("link")
        told = f" ({place})" if isinstance(place, str) and _web(place) is None and place.startswith("docs/") else ""
        facts.append(("hazard", f"{hazard.get('row')}: {hazard.get('what')}{told}"))
    if replay:
        facts.append(("replayed", f"from {replay.get('start') or 'the beginning'}: {replay.get('why')}"))
    if found.get("hint"):
        facts.append(("what to do", str(found["hint"])))
    quantities = found.get("quantities")
    return Diagnosed(
        account=str(found.get("account", "")),
        reproduced=found.get("reproduced") is True,
        facts=tuple(facts),
        link=_web(hazard.get("link")),
        quantities=tuple(_quantities(quantities if isinstance(quantities, list) else [])),
    )


def _web(link: Any) -> str | None:
    """A link that may be followed: a page, or a place in the documentation; never a script."""
    return link if isinstance(link, str) and link.startswith("https://") else None


def _part(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = value.get(name)
    return part if isinstance(part, dict) else {}


def _quantities(entries: list[Any]) -> Iterator[tuple[str, str, str, bool]]:
    for entry in entries[:200]:
        if not isinstance(entry, dict):
            continue
        micro = "" if entry.get("micro_batch") is None else f", micro-batch {entry['micro_batch']}"
        found = _part(entry, "finding")
        how = f"{found.get('tensors')} of {found.get('of')} differ" if found else f"{entry.get('compared')} equal"
        far = f"{found['worst_ulp']} ULP" if found.get("worst_ulp") is not None else ""
        yield f"{entry.get('quantity')}{micro}", how, far, bool(found)
