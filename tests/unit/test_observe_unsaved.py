"""State that nobody saves: what a training changes and keeps is named, what each step makes anew and what is saved is not."""

import ast
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from chaosrun.observe import unsaved as module
from chaosrun.observe.loop_variables import set_in_each_round
from chaosrun.observe.unsaved import Outside
from chaosrun.records.layout import RunLayout
from chaosrun.verify.verdict import judge
from tests.unit.legs import edit_trace, only, put, write_run


class Holder:
    def __init__(self) -> None:
        self.shadow = [torch.zeros(3), torch.zeros(3)]


class Registered:
    """Hands out what a test says."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Kept(Registered, torch.utils.data.Dataset[int]):
    pass


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

    def all_registered(self) -> dict[str, Any]:
        return self.registered

    def components(self) -> dict[str, Any]:
        registered = {name: item.state_dict() for name, item in self.registered.items()}
        return {
            "model": dict(self.model.named_parameters()),
            "optimizer": self.optimizer.state_dict(),
            "registered": registered,
        }


def watched(training: Training, made: set[str] | None, monkeypatch: pytest.MonkeyPatch) -> Outside:
    monkeypatch.setattr(module, "loop_variables", lambda frame: made)
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
    assert sorted(watch.found(training.components())) == [
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
    assert watch.found(training.components()) == []


def test_what_saved_objects_keep_beside_what_they_hand_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(seen=np.zeros(4))
    vars(training.model)["shadow"] = shadow = {"weight": torch.zeros(2, 2)}
    training.optimizer.average = [torch.zeros(2)]  # pyright: ignore[reportAttributeAccessIssue]
    partial, empty = Registered(shadow=torch.zeros(3)), Registered(total=torch.zeros(()), values=[])
    vars(partial)["state_dict"] = lambda: {"decay": 0.9}
    vars(empty)["state_dict"] = dict
    training.names |= {"partial": partial, "empty": empty}
    training.registered = {"partial": partial, "empty": empty}
    watch = watched(training, set(), monkeypatch)
    step(training.optimizer, training.model)
    training.names["seen"][1] += 1
    shadow["weight"].add_(1)
    training.optimizer.average[0].add_(1)  # pyright: ignore[reportAttributeAccessIssue]
    partial.shadow.add_(1)
    empty.total.add_(1)
    empty.values.append(torch.ones(2))
    watch.left()
    training.names.clear()  # as when the function that holds them returns
    assert sorted(watch.found(training.components())) == [
        "empty/total (Tensor)",
        "empty/values (list, 1 tensor)",
        "model/shadow (dict, 1 tensor)",
        "optimizer/average (list, 1 tensor)",
        "partial/shadow (Tensor)",
        "seen (ndarray)",
    ]


def test_what_saved_objects_make_anew_or_hand_out_otherwise_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    order = np.arange(8)
    training = Training(dataset=Kept(order=order), still=np.zeros(3), mapped=np.zeros(2))
    copied, rounded = Registered(shadow=torch.zeros(3)), Registered(shadow=torch.zeros(3))
    vars(copied)["state_dict"] = lambda: {"shadow": copied.shadow.clone()}
    vars(rounded)["state_dict"] = lambda: {"shadow": [round(value, 3) for value in rounded.shadow.tolist()]}
    training.names |= {"copied": copied, "rounded": rounded}
    training.registered = {"copied": copied, "rounded": rounded}
    watch = watched(training, {"mapped"}, monkeypatch)
    step(training.optimizer, training.model)
    training.model.cache, training.optimizer.direction = torch.ones(3), torch.ones(3)  # pyright: ignore[reportAttributeAccessIssue]
    order[:] = order[::-1].copy()
    copied.shadow.add_(1)
    rounded.shadow.add_(2)
    assert watch.found(training.components()) == []


@torch.no_grad()
def evaluate(model: torch.nn.Module) -> None:
    model(torch.ones(1, 2))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_of_a_sharded_model_the_parts_that_are_here_are_seen_without_a_word_to_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In objects that hang at the model's hooks FSDP2 keeps whole parameters, and tensors whose memory it has freed."""
    training = Training()
    fully_shard(training.model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
    training.optimizer.param_groups[0]["params"] = list(training.model.parameters())
    average = {name: value.detach().clone() for name, value in training.model.named_parameters()}
    frozen = {name: value.detach().clone() for name, value in training.model.named_parameters()}
    average["freed"] = torch.ones(2)
    average["freed"].untyped_storage().resize_(0)
    training.names |= {"average": average, "frozen": frozen}
    vars(training.model)["shadow"] = shadow = {"weight": average["weight"].clone()}
    evaluate(training.model)
    with CommDebugMode() as said:
        watch = watched(training, set(), monkeypatch)
    assert not said.get_total_counts()
    step(training.optimizer, training.model)
    for each in (average["weight"], shadow["weight"]):
        assert isinstance(each, DTensor)
        each.add_(1)
    evaluate(training.model)
    with CommDebugMode() as said:
        found = watch.found(training.components())
    assert not said.get_total_counts()
    assert sorted(found) == ["average (dict, 2 tensors)", "model/shadow (dict, 1 tensor)"]


TOUCHED: list[str] = []
"""What has run code of its own."""


class Touchy:
    def __init__(self) -> None:
        self.kept = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        TOUCHED.append("state_dict")
        return {}

    def cache_info(self) -> str:
        TOUCHED.append("cache_info")
        return ""


class Proxy:
    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        TOUCHED.append("class")
        return dict


class Asking:
    def __getattribute__(self, name: str) -> Any:
        TOUCHED.append(name)
        return object.__getattribute__(self, name)


class Fetching(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        TOUCHED.append("items")
        return super().__iter__()


class Gathering(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        TOUCHED.append(str(func))
        raise ConnectionError


class Counting(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        TOUCHED.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


class Loading(torch.nn.Linear):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise ConnectionError


def test_what_runs_code_when_it_is_looked_at_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = torch.Tensor._make_wrapper_subclass(Gathering, (2,))  # pyright: ignore[reportAttributeAccessIssue]
    counting = torch.zeros(2)
    own, asking = Touchy(), Asking()
    training = Training(proxy=Proxy(), asking=asking, items=Fetching([1]), loading=Loading(2, 2), own=own)
    training.names["within"] = {"deep": [Proxy(), asking, gathering, torch.nn.parameter.UninitializedParameter()]}
    training.names["counting"] = counting.as_subclass(Counting)
    training.registered["own"] = own
    TOUCHED.clear()
    watch = watched(training, set(), monkeypatch)
    own.kept.add_(1)
    counting.add_(1)
    watch.left()
    assert TOUCHED == []  # nor a state_dict, for which all ranks may be needed
    assert sorted(watch.found(training.components())) == ["counting (Counting)", "own/kept (Tensor)"]
    assert TOUCHED == ["state_dict"]


def test_a_loop_that_an_error_leaves_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(mean=torch.zeros(()))
    watch = watched(training, set(), monkeypatch)

    def never(*_: Any) -> None:
        raise AssertionError("waits for the device")

    monkeypatch.setattr(module, "_digests", never)
    watch.left()
    monkeypatch.setattr(training, "variables", never)
    watch.left()


def test_where_the_loop_is_not_found_modules_alone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    average = torch.nn.Linear(2, 2)
    training = Training(average=average, x=torch.zeros(2), batch={"x": torch.zeros(2)})
    watch = watched(training, None, monkeypatch)
    with torch.no_grad():
        average.weight.add_(1)
    training.names |= {"x": torch.ones(2), "batch": {"x": torch.ones(2)}}
    assert watch.found(training.components()) == ["average (Linear, 2 tensors)"]


def test_an_optimizer_that_a_prepared_one_is_made_of_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    inner = torch.optim.SGD(training.model.parameters(), lr=0.1)
    training.optimizer.inner = inner  # pyright: ignore[reportAttributeAccessIssue]
    watch = watched(training, set(), monkeypatch)
    step(inner, training.model)
    assert watch.found(training.components()) == []


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
    assert set_in_each_round(ast.parse(f"for x in tqdm(run.batches(loader, epochs=3)):\n    {body}\n")) == made


@pytest.mark.parametrize(
    ("beside", "made"),
    [
        ("def g(shown): print(shown)", True),
        ("g = lambda shown: shown", True),
        ("def g():\n    shown = 1\n    return shown", True),
        ("def g(): print(shown)", False),
        ("def g():\n    global shown\n    shown = 1\n    return shown", False),
        ("def g():\n    def h(shown): pass\n    print(shown)", False),
        ("def g(shown): pass\nprint(shown)", False),
        ("def g(shown=shown): print(shown)", False),
        ("g = lambda *, shown=shown: shown", False),
    ],
)
def test_what_another_function_calls_its_own_is_another_variable(beside: str, made: bool) -> None:
    loop = "for x in run.batches(loader):\n    if good(x):\n        shown = f(x)\n        use(shown)\n"
    assert set_in_each_round(ast.parse(f"{beside}\n{loop}")) == ({"x", "shown"} if made else {"x"})
    inside = "\n".join(f"    {line}" for line in f"{loop}print(shown)".splitlines())
    assert set_in_each_round(ast.parse(f"def main(shown):\n{inside}")) == {"x"}, "the function of the loop has it, too"


def test_a_source_without_the_loop_tells_nothing() -> None:
    assert set_in_each_round(ast.parse("for x in loader: y = x")) is None


def test_a_verdict_warns_and_passes(tmp_path: Any) -> None:
    run: RunLayout = write_run(tmp_path)
    assert not judge(run).warnings
    edit_trace(run, "reference", 1, 0, only("end", put(outside=["ema (dict, 4 tensors)"])))
    verdict = judge(run)
    assert verdict.status == "PASS"
    (warning,) = verdict.warnings
    assert warning.startswith("state_outside: ") and "ema (dict, 4 tensors)" in warning and "run.register" in warning
