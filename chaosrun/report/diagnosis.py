"""A diagnosis for people, as rows and sentences: what was replayed, which quantities of the first differing step differ, and
which one first."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from chaosrun.errors import UsageError
from chaosrun.records.codec import convert
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument, shortest
from chaosrun.records.run_file import read_object
from chaosrun.report.page import columns, indented, labelled, pairs, section, shown, unwrapped
from chaosrun.wording import count

if TYPE_CHECKING:
    from chaosrun.verify.diagnosis import Diagnosis, Replay
    from chaosrun.verify.inspection import InspectionComparison, QuantityDifference

Quantity = tuple[str, str, str, str, bool]
"""What, how many values, on which ranks they differ, how far, and whether they do."""


def read_diagnosis(run: RunLayout) -> "Diagnosis":
    """diagnosis.json. Raises UsageError when it is damaged."""
    from chaosrun.verify.diagnosis import Diagnosis, Replay
    from chaosrun.verify.hazards import Hazard
    from chaosrun.verify.inspection import InspectionComparison

    found = read_object(run.diagnosis_json)
    try:
        return Diagnosis(
            run_id=run.run_id,
            divergence=None,
            replay=convert(found.get("replay"), Replay),
            reproduced=convert(found.get("reproduced"), bool),
            account=convert(found.get("account"), str),
            comparison=convert(found, InspectionComparison),
            hazard=convert(found.get("hazard"), Hazard | None),
            hint=convert(found.get("hint"), str | None),
        )
    except ValueError as error:
        hint = f"`chaosrun diagnose {run_argument(run)}` makes it again"
        raise UsageError(f"{run.diagnosis_json} is damaged: {error}", hint=hint) from error


def render_diagnosis(diagnosis: "Diagnosis", run: RunLayout) -> RenderableType:
    finding = diagnosis.comparison.finding
    parts: list[RenderableType] = [unwrapped(f"run {run.run_id}", style="bold")]
    parts += section("Replays", indented(Group(*map(Text, replay_sentences(diagnosis.replay)))))
    if finding is not None:
        place = "After the last step" if finding.at_end else f"Step {finding.step}"
        parts += section(f"{place}, attempt {finding.attempt} of the replay", _quantities(diagnosis.comparison))
        parts += section("What differs first", pairs(finding_rows(finding), bold="quantity"))
    label, account = _conclusion(diagnosis)
    parts += ["", labelled(label, account, style="bold red" if diagnosis.reproduced else "bold yellow")]
    if diagnosis.divergence is not None and diagnosis.reproduced:
        parts.append(labelled("cause", diagnosis.divergence.cause))
    if diagnosis.hazard is not None:
        parts.append(labelled("hazard", hazard_sentence(diagnosis)))
    if diagnosis.hint is not None:
        parts.append(labelled("hint", diagnosis.hint))
    if run.report_html.is_file():
        parts.append(labelled("report", shortest(run.report_html.absolute()), wrap=False))
    parts.append(labelled("inspect", f"chaosrun verify {run_argument(run)}", wrap=False))
    return Group(*parts)


def render_conclusion(diagnosis: "Diagnosis", run: RunLayout) -> RenderableType:
    label, account = _conclusion(diagnosis)
    return unwrapped(f"{label}  {run.run_id}: {account}")


def hazard_sentence(diagnosis: "Diagnosis") -> str:
    hazard = diagnosis.hazard
    return "" if hazard is None else f"{hazard.row}: {hazard.what} ({hazard.link})"


def replay_sentences(replay: "Replay") -> Iterator[str]:
    yield f"from {replay.start or 'the beginning'}: {replay.why}"
    yield f"without faults, to step {replay.steps}"
    if replay.attempts:
        done = "; ".join(replay.faults) or "no fault came before the difference"
        yield f"with faults, {count(replay.attempts, 'attempt')}: {done}"
    for name in replay.changed:
        yield f"{name} is not as it was in the run"


def quantity_rows(comparison: "InspectionComparison") -> Iterator[Quantity]:
    """Rows in the order of diagnosis; a quantity that is equal in all micro-batches takes one line."""
    differing = {entry.quantity for entry in comparison.quantities if entry.finding}
    told: set[str] = set()
    for entry in comparison.quantities:
        found, name = entry.finding, _called(entry.quantity, at_end=comparison.at_end)
        micro = "" if entry.micro_batch is None else f", micro-batch {entry.micro_batch}"
        if found is not None:
            largest = "" if found.worst_ulp is None else f"{found.worst_ulp} ULP"
            yield f"{name}{micro}", f"{found.tensors} of {found.of} differ", ", ".join(map(str, found.ranks)), largest, True
        elif entry.quantity in differing:
            yield f"{name}{micro}", f"{entry.compared} equal", "", "", False
        elif entry.quantity not in told:
            told.add(entry.quantity)
            equal = sum(other.compared for other in comparison.quantities if other.quantity == entry.quantity)
            yield name, f"{equal} equal", "", "", False


def _quantities(comparison: "InspectionComparison") -> RenderableType:
    table = columns("quantity", "values", "on ranks", "largest")
    for name, values, ranks, largest, differs in quantity_rows(comparison):
        table.add_row(name, Text(values, style="bold red" if differs else ""), ranks, largest)
    return table


def _called(quantity: str, *, at_end: bool) -> str:
    return quantity.removesuffix(" before") if at_end else quantity


def finding_rows(found: "QuantityDifference") -> Iterator[tuple[str, str]]:
    ranks = f"rank {found.rank}" if len(found.ranks) == 1 else f"ranks {', '.join(map(str, found.ranks))}"
    micro = "" if found.micro_batch is None else f", micro-batch {found.micro_batch}"
    yield "quantity", _called(found.quantity, at_end=found.at_end)
    yield "where", f"{'after' if found.at_end else 'in'} step {found.step}, {ranks}{micro}"
    if found.tensor:
        yield "stream" if found.quantity == "rng" else "tensor", found.tensor
    if found.problem is not None:
        yield "", found.problem
    elif found.difference is None:
        yield "expected", shown(found.expected)
        yield "seen", shown(found.seen)
    else:
        difference = found.difference
        at = f" at {list(difference.index)}" if difference.index else ""
        yield "elements", f"{difference.differing} of {difference.elements} differ"
        yield "expected", f"{shown(difference.expected)}{at}"
        yield "seen", f"{shown(difference.seen)}{at}"
        if distances := "; ".join(_distances(found)):
            yield "distance", distances


def _distances(found: "QuantityDifference") -> Iterator[str]:
    difference = found.difference
    assert difference is not None
    if difference.ulp is not None:
        yield f"{difference.ulp} ULP there"
    if difference.max_ulp is not None:
        yield f"at most {difference.max_ulp} ULP in this tensor"
    if found.worst_ulp is not None and found.worst != found.tensor:
        yield f"{found.worst_ulp} ULP in {found.worst}"
    if difference.not_finite:
        yield f"NaN or infinity in {count(difference.not_finite, 'pair')}"
    if difference.max_distance is not None and found.quantity != "rng":
        yield f"at most {difference.max_distance}"


def _conclusion(diagnosis: "Diagnosis") -> tuple[str, str]:
    if not diagnosis.reproduced:
        return "NOT SHOWN", diagnosis.account
    finding = diagnosis.comparison.finding
    if finding is None:
        equal = "" if not diagnosis.comparison.moments else "; every quantity of the steps around it is equal"
        return "SHOWN", f"{diagnosis.account}{equal}"
    what = _called(finding.quantity, at_end=finding.at_end)
    when = f"{'after ' if finding.at_end else ''}step {finding.step}"
    where = f"{when}, rank {finding.rank}" + (f", {finding.tensor}" if finding.tensor else "")
    return "SHOWN", f"{what} first ({where}); {diagnosis.account}"
