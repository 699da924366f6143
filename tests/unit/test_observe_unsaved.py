"""State that nobody saves: what a training changes and keeps is named, what each step makes anew and what is saved is not."""

import ast
import copy
from typing import Any

import pytest
import torch

from chaosrun.observe import unsaved as module
from chaosrun.observe.unsaved import Outside, made_anew
from chaosrun.records.layout import RunLayout
from chaosrun.verify.verdict import judge
from tests.unit.legs import edit_trace, only, put, write_run


class Holder:
    def __init__(self) -> None:
        self.shadow = [torch.zeros(3), torch.zeros(3)]


class Training:
    """A state as `Outside` sees it: a prepared model and optimizer, and the script's variables."""

    def __init__(self, **variables: Any) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.registered: dict[str, Any] = {}
        self.names = {"model": self.model, "optimizer": self.optimizer, **variables}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def variables(self) -> dict[str, Any]:
        return self.names

    def prepared(self) -> list[Any]:
        return [self.model, self.optimizer, *self.registered.values()]

    def components(self) -> dict[str, Any]:
        registered = {name: item.state_dict() for name, item in self.registered.items()}
        return {
            "model": dict(self.model.named_parameters()),
            "optimizer": self.optimizer.state_dict(),
            "registered": registered,
        }


def watched(training: Training, made: set[str] | None, monkeypatch: pytest.MonkeyPatch) -> Outside:
    monkeypatch.setattr(module, "_loops_variables", lambda frame: made)
    return Outside(training)  # pyright: ignore[reportArgumentType]


def step(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_what_changes_and_is_kept_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    aux = torch.nn.Linear(2, 2)
    loose = torch.optim.Adam(aux.parameters())
    holder = Holder()
    training = Training(aux=aux, loose=loose, ema={"weight": torch.zeros(2, 2)}, best=None, mean=torch.zeros(()), holder=holder)
    watch = watched(training, set(), monkeypatch)
    step(training.optimizer, training.model)
    step(loose, aux)
    training.names["ema"]["weight"] = torch.ones(2, 2)
    training.names["best"] = copy.deepcopy(training.model.state_dict())
    training.names["mean"] = torch.ones(())
    holder.shadow[1].add_(1)
    assert sorted(watch.found()) == [
        "aux (Linear, 2 tensors)",
        "best (OrderedDict, 2 tensors)",
        "ema (dict, 1 tensor)",
        "holder/shadow (list, 2 tensors)",
        "loose (Adam over 2 parameters, which is not prepared)",
        "mean (Tensor)",
    ]


def test_what_is_saved_made_anew_or_left_alone_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ema, teacher = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    training = Training(ema=ema, teacher=teacher, data=torch.ones(4), x=None, batch=None, loss=None, losses=[])
    training.registered["ema"] = ema
    training.names["view"] = dict(training.model.named_parameters())
    watch = watched(training, {"x", "batch"}, monkeypatch)
    step(training.optimizer, training.model)
    with torch.no_grad():
        ema.weight.add_(1)
    training.names |= {"x": torch.ones(2), "batch": {"x": torch.ones(2)}, "loss": training.model(torch.ones(2)).sum()}
    training.names["losses"].append(0.5)
    assert watch.found() == []


def test_where_the_loop_is_not_found_modules_alone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    average = torch.nn.Linear(2, 2)
    training = Training(average=average, x=torch.zeros(2), batch={"x": torch.zeros(2)})
    watch = watched(training, None, monkeypatch)
    with torch.no_grad():
        average.weight.add_(1)
    training.names |= {"x": torch.ones(2), "batch": {"x": torch.ones(2)}}
    assert watch.found() == ["average (Linear, 2 tensors)"]


def test_an_optimizer_that_a_prepared_one_is_made_of_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    inner = torch.optim.SGD(training.model.parameters(), lr=0.1)
    training.optimizer.inner = inner  # pyright: ignore[reportAttributeAccessIssue]
    watch = watched(training, set(), monkeypatch)
    step(inner, training.model)
    assert watch.found() == []


@pytest.mark.parametrize(
    ("body", "made"),
    [
        ("loss = f(x)", {"x", "loss"}),
        ("ema = 0.9 * ema + x", {"x"}),
        ("n += x", {"x"}),
        ("if old is not None: use(old)\n    old = x", {"x"}),
        ("if good(x): best = x\nsave(best)", {"x"}),
        ("if good(x):\n        shown = f(x)\n        print(shown)", {"x", "shown"}),
        ("if good(x): kept = x\n    use(kept)", {"x"}),
        ("if good(x): kept = x", {"x"}),
        ("norm = clip(x)", {"x", "norm"}),
        ("for part in x:\n        y = f(part)\n        use(y)", {"x", "part", "y"}),
        ("with no_grad(): y = f(x)\nprint(y)", {"x", "y"}),
        ("y = [f(p) for p in x]", {"x", "y", "p"}),
        ("first, second = f(x)", {"x", "first", "second"}),
        ("hidden = f(x, hidden)", {"x"}),
    ],
)
def test_what_a_loop_makes_anew(body: str, made: set[str]) -> None:
    assert made_anew(ast.parse(f"for x in tqdm(run.batches(loader, epochs=3)):\n    {body}\n")) == made


def test_a_source_without_the_loop_tells_nothing() -> None:
    assert made_anew(ast.parse("for x in loader: y = x")) is None


def test_a_verdict_warns_and_passes(tmp_path: Any) -> None:
    run: RunLayout = write_run(tmp_path)
    assert not judge(run).warnings
    edit_trace(run, "reference", 1, 0, only("end", put(outside=["ema (dict, 4 tensors)"])))
    verdict = judge(run)
    assert verdict.status == "PASS"
    (warning,) = verdict.warnings
    assert warning.startswith("state_outside: ") and "ema (dict, 4 tensors)" in warning and "run.register" in warning
