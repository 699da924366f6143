"""The account of a diagnosis for people: what was replayed, the quantities of the first step that differs, the first one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.report.page import columns, indented, labelled, section, shown, unwrapped
from chaosrun.wording import count

if TYPE_CHECKING:
    from chaosrun.verify.diagnosis import Diagnosis, Replay
    from chaosrun.verify.inspection import Comparison, Finding


def render_diagnosis(diagnosis: "Diagnosis", run: RunLayout) -> RenderableType:
    finding = diagnosis.comparison.finding
    parts: list[RenderableType] = [unwrapped(f"run {run.run_id}", style="bold")]
    parts += section("Replays", indented(Group(*map(Text, _replay(diagnosis.replay)))))
    if finding is not None:
        place = "After the last step" if finding.at_end else f"Step {finding.step}"
        title = f"{place}, attempt {finding.attempt} of the replay"
        parts += section(title, _quantities(diagnosis.comparison))
        parts += section("What differs first", _first(finding))
    parts += ["", _conclusion(diagnosis)]
    if diagnosis.hazard is not None:
        hazard = diagnosis.hazard
        parts.append(labelled("hazard", f"{hazard.row}: {hazard.what} ({hazard.link})"))
    if diagnosis.hint is not None:
        parts.append(labelled("hint", diagnosis.hint))
    parts.append(unwrapped(f"{'inspect':<8}  chaosrun verify {run_argument(run)}"))
    return Group(*parts)


def _replay(replay: "Replay") -> Iterator[str]:
    yield f"from {replay.start or 'the beginning'}: {replay.why}"
    yield f"undisturbed, to step {replay.steps}"
    if replay.attempts:
        done = "; ".join(replay.faults) or "no fault came before the difference"
        yield f"disturbed, {count(replay.attempts, 'attempt')}: {done}"
    for name in replay.changed:
        yield f"{name} is not as it was in the run"


def _quantities(comparison: "Comparison") -> RenderableType:
    """In the order of diagnosis; a quantity that is equal in all micro-batches takes one line."""
    table = columns("quantity", "values", "on ranks", "largest")
    differing = {entry.quantity for entry in comparison.quantities if entry.finding}
    told: set[str] = set()
    for entry in comparison.quantities:
        found, name = entry.finding, _called(entry.quantity, at_end=comparison.at_end)
        if entry.quantity not in differing:
            if entry.quantity not in told:
                told.add(entry.quantity)
                equal = sum(other.compared for other in comparison.quantities if other.quantity == entry.quantity)
                table.add_row(name, f"{equal} equal", "", "")
            continue
        micro = "" if entry.micro_batch is None else f", micro-batch {entry.micro_batch}"
        if found is None:
            table.add_row(f"{name}{micro}", f"{entry.compared} equal", "", "")
            continue
        differ = Text(f"{found.tensors} of {found.of} differ", style="bold red")
        largest = "" if found.worst_ulp is None else f"{found.worst_ulp} ULP"
        table.add_row(f"{name}{micro}", differ, ", ".join(map(str, found.ranks)), largest)
    return table


def _called(quantity: str, *, at_end: bool) -> str:
    return quantity.removesuffix(" before") if at_end else quantity


def _first(found: "Finding") -> RenderableType:
    table = columns("", "")
    table.show_header = False
    ranks = f"rank {found.rank}" if len(found.ranks) == 1 else f"ranks {', '.join(map(str, found.ranks))}"
    micro = "" if found.micro_batch is None else f", micro-batch {found.micro_batch}"
    table.add_row("quantity", Text(_called(found.quantity, at_end=found.at_end), style="bold"))
    table.add_row("where", f"{'after' if found.at_end else 'in'} step {found.step}, {ranks}{micro}")
    if found.tensor:
        table.add_row("stream" if found.quantity == "rng" else "tensor", found.tensor)
    if found.problem is not None:
        table.add_row("", found.problem)
    elif found.difference is None:
        table.add_row("expected", shown(found.expected))
        table.add_row("seen", shown(found.seen))
    else:
        difference = found.difference
        at = f" at {list(difference.index)}" if difference.index else ""
        table.add_row("elements", f"{difference.differing} of {difference.elements} differ")
        table.add_row("expected", f"{shown(difference.expected)}{at}")
        table.add_row("seen", f"{shown(difference.seen)}{at}")
        if distances := "; ".join(_distances(found)):
            table.add_row("distance", distances)
    return table


def _distances(found: "Finding") -> Iterator[str]:
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


def _conclusion(diagnosis: "Diagnosis") -> RenderableType:
    if not diagnosis.reproduced:
        return labelled("NOT SHOWN", diagnosis.account, style="bold yellow")
    finding = diagnosis.comparison.finding
    if finding is None:
        equal = "" if not diagnosis.comparison.moments else "; every quantity of the steps around it is equal"
        return labelled("SHOWN", f"{diagnosis.account}{equal}", style="bold red")
    what = _called(finding.quantity, at_end=finding.at_end)
    when = f"{'after ' if finding.at_end else ''}step {finding.step}"
    where = f"{when}, rank {finding.rank}" + (f", {finding.tensor}" if finding.tensor else "")
    return labelled("SHOWN", f"{what} first ({where}); {diagnosis.account}", style="bold red")
