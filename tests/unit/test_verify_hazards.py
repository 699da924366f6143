"""From a difference to a row of the catalogue: every cause that the verdict names has one, and an inspection knows better."""

import ast
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import chaosrun.verify
from chaosrun.records.inspection import QUANTITIES
from chaosrun.verify import hazards
from chaosrun.verify.causes import WHOLE
from chaosrun.verify.divergence import Divergence
from chaosrun.verify.hazards import HAZARDS, hazard_of, row_of_cause
from chaosrun.verify.inspection import Finding

SOURCES = [Path(chaosrun.verify.__path__[0]) / f"{name}.py" for name in ("causes", "ledger")]
CALLS = {"Cause", "Displacement"}
VARIABLES = {"batches": ("1 batch", "3 batches"), "word": ("skipped", "repeated")}
"""What the f-strings of causes are made of, besides the names of components."""


def causes() -> Iterator[str]:
    """Every cause that the sources spell, f-strings filled in; a part that this does not know fails the test."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        whats = tuple(text for text in _spelt(functions["_component"], ())) if "_component" in functions else ()
        for name, function in functions.items():
            if name != "_component":
                yield from _spelt(function, whats)


def _spelt(function: ast.FunctionDef, whats: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS and not _handed_on(node):
            said = [keyword.value for keyword in node.keywords if keyword.arg == "cause"] or node.args[:1]
            yield from _texts(said[0], function, whats)


def _handed_on(call: ast.Call) -> bool:
    """What another function has said already."""
    return bool(call.args) and (isinstance(call.args[0], ast.Starred) or ast.unparse(call.args[0]).endswith(".cause"))


def _texts(node: ast.expr, function: ast.FunctionDef, whats: tuple[str, ...]) -> list[str]:
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.IfExp():
            return _texts(node.body, function, whats) + _texts(node.orelse, function, whats)
        case ast.JoinedStr():
            parts = [
                _texts(part.value if isinstance(part, ast.FormattedValue) else part, function, whats) for part in node.values
            ]
            return ["".join(combination) for combination in itertools.product(*parts)]
        case ast.Name(id="what"):
            assert whats
            return list(whats)
        case ast.Subscript(value=ast.Name(id="WHOLE")):
            return [*WHOLE.values()]
        case ast.Name(id=name) if name in VARIABLES:
            return list(VARIABLES[name])
        case ast.Name(id=name):
            assigned = [
                entry.value
                for entry in ast.walk(function)
                if isinstance(entry, ast.Assign)
                and any(isinstance(target, ast.Name) and target.id == name for target in entry.targets)
            ]
            assert assigned, f"{function.name}: nobody knows what {name} says"
            return [text for value in assigned for text in _texts(value, function, whats)]
        case _:
            raise AssertionError(f"{function.name} makes up a cause in a way this test cannot follow: {ast.unparse(node)}")


CAUSES = sorted(set(causes()))


def test_the_causes_are_seen() -> None:
    assert {"RNG not restored", "3 batches skipped", "gradient reduction (bucket layout)", "optimizer state drifted"} <= set(
        CAUSES
    )
    assert len(CAUSES) > 40


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_a_row(cause: str) -> None:
    assert row_of_cause(cause) in HAZARDS


@pytest.mark.parametrize("cause", ["", "RNG", "something new", "the gradient", "gradients"])
def test_a_cause_that_nobody_knows_has_none(cause: str) -> None:
    assert row_of_cause(cause) is None


def test_every_pattern_is_of_use() -> None:
    used = {next(pattern for pattern, _ in hazards._BY_CAUSE if hazards.re.fullmatch(pattern, cause)) for cause in CAUSES}
    assert used == {pattern for pattern, _ in hazards._BY_CAUSE}


DIVERGENCE = Divergence(step=9, rank=0, ranks=(0, 1), attempt=2, kind="rng", cause="RNG not restored", hint="…")
FINDING = Finding(
    quantity="rng",
    step=9,
    at_end=False,
    attempt=2,
    rank=0,
    ranks=(0, 1),
    micro_batch=0,
    tensor="torch",
    tensors=1,
    of=9,
    expected=None,
    seen=None,
    difference=None,
    problem=None,
    worst=None,
    worst_ulp=None,
)


@pytest.mark.parametrize(
    ("quantity", "tensor", "kind", "cause", "after_restore", "row"),
    [
        ("sample ids", "", "data order", "sampler epoch not set", True, "D1"),
        ("sample ids", "", "data order", "sampler epoch not set", False, "D3"),
        ("sample ids", "", "data order", "1 batch skipped", True, "D8"),
        ("batch", "0", "batch", "batch contents", True, "R5"),
        ("rng", "torch", "rng", "RNG not restored", True, "R2"),
        ("rng", "torch", "rng", "RNG drifted", True, "R1"),
        ("rng", "torch", "rng", "RNG drifted", False, "R7"),
        ("rng", "numpy/1", "rng", "RNG drifted", True, "R7"),
        ("parameters before", "0.weight", "weights", "weights of another step", True, "S6"),
        ("parameters before", "0.weight", "weights", "weights drifted", False, "S11"),
        ("buffers", "1.running_mean", "loss", "forward pass", True, "C7"),
        ("optimizer state", "0/state/0.weight/exp_avg", "optimizer", "optimizer state not restored", True, "O3"),
        ("optimizer state", "0/state/0.weight/exp_avg", "optimizer", "optimizer state under other names", True, "O5"),
        ("optimizer state", "0/param_groups/0/betas/0", "optimizer", "optimizer update", True, "O4"),
        ("optimizer state", "scaler/scale", "optimizer", "optimizer update", True, "O7"),
        ("scheduler state", "0/last_epoch", "learning rate", "LR scheduler not restored", True, "O10"),
        ("scheduler state", "0/last_epoch", "loss", "forward pass", True, "O10"),
        ("registered state", "ema/shadow", "loss", "forward pass", True, "O8"),
        ("loss", "", "loss", "forward pass", True, "O8"),
        ("loss", "", "loss", "forward pass", False, "K4"),
        ("local gradients", "0.weight", "gradient", "gradient", True, "K4"),
        ("local gradients", "0.weight", "gradient", "gradient reduction (bucket layout)", True, "K4"),
        ("reduced gradients", "0.weight", "gradient", "gradient reduction (bucket layout)", True, "C1"),
        ("reduced gradients", "0.weight", "gradient", "gradient", True, "G1"),
        ("reduced gradients", "0.weight", "gradient", "gradient", False, "C1"),
        ("learning rate", "group 0", "learning rate", "learning rate", False, "O9"),
        ("learning rate", "group 0", "learning rate", "LR scheduler not restored", True, "O10"),
        # What is undisturbed the same twice follows no clock and no chance.
        ("optimizer state", "0/param_groups/0/lr", "learning rate", "learning rate", False, "O8"),
        ("parameters after", "0.weight", "optimizer", "optimizer update", False, "O8"),
        ("parameters after", "0.weight", "optimizer", "optimizer update", True, "O6"),
    ],
)
def test_an_inspection_knows_the_row(quantity: str, tensor: str, kind: str, cause: str, after_restore: bool, row: str) -> None:
    assert quantity in QUANTITIES
    finding = replace(FINDING, quantity=quantity, tensor=tensor)
    divergence = replace(DIVERGENCE, kind=kind, cause=cause)
    hazard = hazard_of(finding, divergence, after_restore=after_restore, repeats=True)
    assert hazard is not None and hazard.row == row
    assert hazard.link == f"docs/hazards.md#{row.lower()}"
    assert hazard.to_json() == {"row": row, "what": HAZARDS[row], "link": hazard.link}


@pytest.mark.parametrize(("quantity", "row"), [("loss", "K4"), ("rng", "R4")])
def test_a_job_that_does_not_repeat_itself_is_not_blamed_on_a_restore(quantity: str, row: str) -> None:
    finding = replace(FINDING, quantity=quantity)
    hazard = hazard_of(finding, DIVERGENCE, after_restore=False, repeats=False)
    assert hazard is not None and hazard.row == row


def test_every_quantity_has_a_row_of_its_own() -> None:
    for quantity in QUANTITIES:
        hazard = hazard_of(replace(FINDING, quantity=quantity), None, after_restore=False, repeats=True)
        assert hazard is not None


def test_without_a_finding_the_cause_decides() -> None:
    hazard = hazard_of(None, DIVERGENCE, after_restore=False, repeats=True)
    assert hazard is not None and hazard.row == "R2"
    for nothing in (None, replace(DIVERGENCE, cause="not shown to come from the restore")):
        assert hazard_of(None, nothing, after_restore=False, repeats=True) is None


def test_every_row_is_in_the_catalogue() -> None:
    catalogue = (Path(chaosrun.verify.__path__[0]).parents[1] / hazards.CATALOGUE).read_text()
    missing = [row for row in HAZARDS if f'<a id="{row.lower()}"></a>{row} ' not in catalogue]
    assert not missing


def test_every_row_can_be_reached() -> None:
    refined = {"D3", "G1", "O8", "R1", "R4"}
    rows = {row for _, row in hazards._BY_CAUSE} | set(hazards._BY_QUANTITY.values()) | refined
    assert rows == set(HAZARDS)
