"""The rest of a drill's page, as rows: both legs' environments, a diagnosis, the run's files, and the cost of the restarts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from chaosrun.records.events import PlacementAcquired
from chaosrun.records.layout import RUN
from chaosrun.report.diagnosis import finding_rows, hazard_sentence, quantity_rows, replay_sentences
from chaosrun.report.html.page import Shown
from chaosrun.report.html.source import Leg, PageSource
from chaosrun.report.page import shown
from chaosrun.report.sentences import not_preloaded
from chaosrun.verify.compare import differing_keys
from chaosrun.verify.recovery_times import RecoveryTimes, Work, recoveries_of, work_of
from chaosrun.wording import count, listed, rank_list, span

if TYPE_CHECKING:
    from chaosrun.verify.diagnosis import Diagnosis

FINGERPRINTED = ("gradient", "optimizer", "weights", "buffers", "registered")
"""Kinds of which the records hold digests, not values."""
MOST_TEXT = 20_000
MOST_QUANTITIES = 200
OF_A_LEG = ("journal.jsonl", "attempts", "checkpoints", "quarantine")
FILES = (
    *("verdict.json", "job.yaml", "run.json", "plan.json", "report.md", "junit.xml", "diagnosis.json"),
    *("reference/journal.jsonl", *(f"{leg}/{name}" for leg in ("chaos", RUN) for name in OF_A_LEG)),
)
"""Files of a run that the page links to."""
MOST_ROWS = 300
Piece = tuple[int, str, float]
"""Of a bar: colour, words, seconds."""


def particulars(source: PageSource) -> Shown:
    """`environment`: rows of name, value in the reference leg, value in the chaos leg, and whether they are equal."""
    found, run = source.view.verdict.divergence, source.view.run
    return {
        "fingerprints_only": found is not None and found.kind in FINGERPRINTED and run.main != RUN,  # diagnosable
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


def _environment(source: PageSource) -> Iterator[tuple[str, str, str, bool]]:
    """Rows of both environments, differing ones first."""
    expected, seen = source.reference.history.environment or {}, source.chaos.history.environment or {}
    apart = differing_keys(expected, seen) if expected and seen else []
    for key in (*apart, *(key for key in {**expected, **seen} if key not in apart)):
        pair = [shown(facts[key]) if key in facts else "–" for facts in (expected, seen)]
        yield str(key).replace("_", " "), pair[0], pair[1], key not in apart


def _where(source: PageSource) -> Iterator[tuple[str, str]]:
    if source.view.facts.chaosrun:
        yield "chaosrun", source.view.facts.chaosrun
    if source.view.facts.reference_source:
        yield "reference", f"taken from {source.view.facts.reference_from}: {source.view.facts.reference_source}"
    for leg in (source.reference, source.chaos):
        if nodes := _nodes(leg):
            yield f"{leg.history.name} leg", nodes
    if source.view.spec is not None:
        yield "deterministic", str(source.view.spec.deterministic)
        losses, weights = source.view.spec.verify.losses, source.view.spec.verify.weights
        if not (losses.exact and weights.exact):
            yield (
                "tolerance",
                f"losses atol {losses.atol:g} rtol {losses.rtol:g}; weights atol {weights.atol:g} rtol {weights.rtol:g}",
            )


def _nodes(leg: Leg) -> str:
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


def restarts(source: PageSource) -> Shown | None:
    """`times`: of each recovery; `parts`: shares of the wall time. None without a chaos leg that began."""
    leg = source.chaos
    if not leg.history.attempts:
        return None
    times, work = recoveries_of(leg.history), work_of(leg.history, leg.chain)
    return {
        "quarantined": {attempt.number: attempt.quarantined for attempt in leg.history.attempts},
        "times": times[:MOST_ROWS],
        "recovered": _recovered(times),
        "work": work,
        "parts": _parts(times, work),
    }


def _recovered(times: Sequence[RecoveryTimes]) -> str:
    known = sorted((entry.total_s, entry.attempt) for entry in times if entry.total_s is not None)
    restarted = count(len(times), "restart")
    if not known:
        return f"{restarted}, of which none came to a first step that could be timed."
    unknown = "" if len(known) == len(times) else f" {len(known)} of them could be timed."
    if len(known) == 1:
        return f"{restarted}: {span(known[0][0])} from the end of the attempt to the next first step.{unknown}"
    middle = median(total_s for total_s, _ in known)
    worst = known[-1]
    return f"{restarted}: {span(middle)} in the median, {span(worst[0])} at worst (attempt {worst[1]}).{unknown}"


def _parts(times: Sequence[RecoveryTimes], work: Work) -> tuple[Piece, ...]:
    if not work.wall_s:
        return ()
    # A recovery's first step is work: it counts among the steps that were kept, or lost again.
    down_s = sum(
        seconds for entry in times for phase, seconds in entry.phases.items() if phase != "first_step" and seconds is not None
    )
    rest_s = work.wall_s - work.kept_s - work.lost_s - down_s
    found = [
        (3, "steps that count", work.kept_s),
        (0, "steps done for nothing", work.lost_s),
        (1, "down: from a death until the state was back", down_s),
        (5, "the rest: first start, and the end", max(0.0, rest_s)),
    ]
    return tuple(part for part in found if part[2] > 0)
