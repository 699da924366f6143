"""The rest of a drill's page, as rows to print: the divergence, both legs' environments, a diagnosis, the run's files."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.records.events import PlacementAcquired
from chaosrun.report.diagnosis import finding_rows, hazard_sentence, quantity_rows, replay_sentences
from chaosrun.report.html.page import Shown
from chaosrun.report.html.source import Leg, Source
from chaosrun.report.page import shown
from chaosrun.report.sentences import not_preloaded
from chaosrun.verify.compare import differing_keys
from chaosrun.wording import listed, rank_list

if TYPE_CHECKING:
    from chaosrun.verify.diagnosis import Diagnosis

FINGERPRINTED = ("gradient", "optimizer", "weights", "buffers", "registered")
"""Kinds of which the records hold digests, not values."""
MOST_TEXT = 20_000
MOST_QUANTITIES = 200
FILES = (
    *("verdict.json", "job.yaml", "run.json", "plan.json", "report.md", "junit.xml", "diagnosis.json"),
    *("reference/journal.jsonl", "chaos/journal.jsonl", "chaos/attempts", "chaos/checkpoints", "chaos/quarantine"),
)
"""Of a run, for who wants to look further."""


def particulars(source: Source) -> Shown:
    """`environment`: rows of name, undisturbed, under faults, and whether they are the same."""
    found, run = source.view.verdict.divergence, source.view.run
    return {
        "fingerprints_only": found is not None and found.kind in FINGERPRINTED,
        "environment": list(_environment(source)),
        "where": list(_where(source)),
        "files": [name for name in FILES if (run.path / name).exists()],
        "job": _text(run.job_yaml),
        "diagnosed": () if source.diagnosis is None else list(_diagnosed(source.diagnosis)),
        "quantities": () if source.diagnosis is None else list(quantity_rows(source.diagnosis.comparison))[:MOST_QUANTITIES],
    }


def _text(path: Path) -> str | None:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return None
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}\n… ({len(text)} characters)"


def _environment(source: Source) -> Iterator[tuple[str, str, str, bool]]:
    """What differs first."""
    expected, seen = source.reference.history.environment or {}, source.chaos.history.environment or {}
    apart = differing_keys(expected, seen) if expected and seen else []
    for key in (*apart, *(key for key in {**expected, **seen} if key not in apart)):
        pair = [shown(facts[key]) if key in facts else "–" for facts in (expected, seen)]
        yield str(key).replace("_", " "), pair[0], pair[1], key not in apart


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
        told = [f"{node.address} ({rank_list(node.ranks)})" for node in record.nodes.values()]
        more = "; more workers than cores" if record.oversubscribed else ""
        alone = "".join(f"; {not_preloaded(each)}" for each in record.not_preloaded)
        return f"{listed(told, 16)}{more}{alone}"
    return ""


def _diagnosed(found: "Diagnosis") -> Iterator[tuple[str, str]]:
    if found.comparison.finding is not None:
        yield from finding_rows(found.comparison.finding)
    if found.hazard is not None:
        yield "hazard", hazard_sentence(found)
    yield "replayed", "; ".join(replay_sentences(found.replay))
    if found.hint:
        yield "what to do", found.hint
