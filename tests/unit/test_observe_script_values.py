"""The plain values of a script, told where a restart may go on: found in functions and objects, and nothing is changed."""

import ctypes
import decimal
import gc
import itertools
import sys
import types
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from chaosrun.observe import script_values
from chaosrun.observe.held import locals_of
from chaosrun.observe.script_state import children, script_roots
from chaosrun.observe.script_values import ScriptValues
from chaosrun.observe.state import ObservedState


@pytest.fixture(autouse=True)
def _however_slow_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_values, "SLOW_S", 60.0)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Meter:
    def __init__(self) -> None:
        self.sum, self.model = 0.0, torch.nn.Linear(2, 2)


def test_values_of_functions_and_objects_are_told_and_then_what_changes() -> None:
    meter, best, seen = Meter(), 0.5, [1.0, 2.0]
    values = ScriptValues(lambda: [meter.model])
    first = values.changed()
    expected = {"meter/sum": "0.0", "best": "0.5", "seen": "list of 2: 1.0, 2.0"}
    assert expected.items() <= first.items() and not [name for name in first if name.startswith("meter/model")]
    meter.sum, best = 1.0, 0.25
    seen.extend([3.0] * 300)
    del first, expected
    changed = values.changed()
    assert {"meter/sum": "1.0", "best": "0.25", "seen": "list of 302"}.items() <= changed.items()
    assert best == 0.25


def test_settings_of_an_optimizer_are_told_by_group() -> None:
    decayed, plain = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = torch.optim.AdamW([{"params": [decayed], "weight_decay": 0.1}, {"params": [plain], "lr": 1.0}])
    values = ScriptValues(lambda: [optimizer])
    first = values.changed()
    assert first["optimizer.param_groups[0]/weight_decay"] == "0.1"
    assert first["optimizer.param_groups[1]/betas"] == "tuple of 2: 0.9, 0.999"
    assert not [name for name in first if name.startswith("optimizer.") and name.endswith(("/lr", "/params"))]
    optimizer.param_groups[1]["weight_decay"] = 0.5
    assert values.changed()["optimizer.param_groups[1]/weight_decay"] == "0.5"


@pytest.mark.parametrize("samples", [torch.ones(2, 3), numpy.ones((2, 3))])
def test_texts_beside_samples_are_left_out(samples: Any) -> None:
    batch, shards = (["17", "4"], ["a dog", "a cat"], "train", samples), ["a", "b"]
    first = ScriptValues(lambda: []).changed()
    assert first["shards"] == "list of 2: 'a', 'b'" and batch and shards
    assert [name for name in first if name.startswith("batch/") and name != "batch/3"] == []


def test_the_samples_of_a_small_data_set_leave_room_for_what_lies_deeper() -> None:
    """A list of dictionaries, beside the count of a callback in a trainer."""
    data = [{"text": each, "label": each % 2} for each in range(250)]
    trainer = SimpleNamespace(data=data, parts=SimpleNamespace(callbacks=[SimpleNamespace(count=0)]))
    del data
    values = ScriptValues(lambda: [])
    assert values.changed()["trainer/parts/callbacks/0/count"] == "0"
    trainer.parts.callbacks[0].count, trainer.data[0]["label"] = 7, 8
    assert {"trainer/parts/callbacks/0/count": "7", "trainer/data/0/label": "8"}.items() <= values.changed().items()


def test_what_is_given_another_name_later_keeps_its_first() -> None:
    holder = SimpleNamespace(meter=SimpleNamespace(count=1))
    values = ScriptValues(lambda: [])
    assert values.changed()["holder/meter/count"] == "1"
    meter = holder.meter
    meter.count = 2
    assert {"holder/meter/count": "2", "meter/count": "2"}.items() <= values.changed().items()


def test_a_value_that_is_no_longer_found_is_told_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, state = SimpleNamespace(last_epoch=4), {"a": 1}
    values = ScriptValues(lambda: [])
    assert values.changed()["scheduler/last_epoch"] == "4"
    scheduler.last_epoch = 5
    monkeypatch.setattr(script_values, "MOST_VALUES", 0)
    assert values.changed()["scheduler/last_epoch"] == "", "it is behind too many others: 4 is not what it has now"
    assert "scheduler/last_epoch" not in values.changed() and state


def test_a_look_keeps_nothing_alive(no_garbage_collection: None) -> None:
    meter, values = Meter(), ScriptValues(lambda: [])
    freed = weakref.ref(meter)
    assert values.changed()["meter/sum"] == "0.0"
    del meter
    assert freed() is None


def test_a_file_is_not_looked_into(tmp_path: Path) -> None:
    with (tmp_path / "train.log").open("w") as log:
        first = ScriptValues(lambda: []).changed()
    assert log.closed and not [name for name in first if name.startswith("log/")], "each run opens its own, 'a' or 'w'"


class Memory(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.hidden, self.last = torch.nn.Linear(2, 2), None, torch.zeros(2)
        self.seen = dict[str, tuple[torch.Tensor, ...]]()


def test_a_hooks_handle_is_not_looked_into() -> None:
    """Its number is another in each process."""
    handle = torch.nn.Linear(2, 2).register_forward_hook(print)
    told = ScriptValues(lambda: []).changed()
    assert told and not [name for name in told if name.startswith("handle")]
    handle.remove()


def test_the_steps_that_an_averager_of_torch_counts_are_told() -> None:
    group: Any = SimpleNamespace()
    averager = PeriodicModelAverager(period=4, process_group=group)
    averager.step = 7
    placement = Shard(dim=1)
    told = ScriptValues(lambda: []).changed()
    assert told["averager/step"] == "7" and placement and not [name for name in told if name.startswith("placement")]


def test_what_a_trained_module_keeps_in_no_state_dict_is_told() -> None:
    memory = Memory()
    model = torch.nn.Sequential(memory)
    values = ScriptValues(lambda: [model])
    first = values.changed()
    assert {"model.0/hidden": "None", "model.0/seen": "dict of 0"}.items() <= first.items()
    assert first["model.0/last"].startswith("float32[2] ")
    assert not [name for name in first if name.startswith(("model/", "model.0/inner", "memory/"))]
    memory.hidden = (torch.ones(2, 2), torch.ones(3))  # pyright: ignore[reportAttributeAccessIssue]
    memory.seen["a"] = (torch.ones(2),)
    del first
    then = values.changed()
    assert then["model.0/hidden"].startswith("tuple[2] ") and then["model.0/seen"].startswith("dict[1] ")
    memory.seen["a"] = (torch.zeros(2),)
    assert [*values.changed().keys() & {"model.0/hidden", "model.0/seen", "model.0/last"}] == ["model.0/seen"]


class Pace:
    limit = 0.5

    def __init__(self) -> None:
        self.ids, self.last = dict[str, int](), deque[float]()


def test_what_is_empty_or_of_the_class_at_first_is_told() -> None:
    pace = Pace()
    values = ScriptValues(lambda: [])
    first = {"pace/limit": "0.5", "pace/ids": "dict of 0", "pace/last": "deque of 0"}
    assert first.items() <= values.changed().items()
    pace.limit = 0.25
    pace.ids["a"] = 1
    pace.last.append(2.0)
    then = {"pace/limit": "0.25", "pace/ids": "dict of 1", "pace/last": "deque of 1: 2.0"}
    assert then.items() <= values.changed().items()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_small_tensors_of_variables_and_objects_are_told_as_digests(device: str) -> None:
    table, meter = torch.ones(8, device=device), Meter()
    meter.sum = torch.zeros(2, 2, device=device)  # pyright: ignore[reportAttributeAccessIssue]
    samples, large, average = [torch.ones(3)], torch.ones(1 << 15), {"w": torch.ones(3)}
    values = ScriptValues(lambda: [meter.model])
    first = values.changed()
    assert first["table"].startswith("float32[8] ") and first["meter/sum"].startswith("float32[2, 2] ")
    assert first["average/w"].startswith("float32[3] ") and first["samples"] == "list of 1"
    assert not first.keys() & {"samples/0", "large"} and len(samples) == len(average) == len(large[:1])
    table[3] = 0.5
    del first
    assert {name for name in values.changed() if name in ("table", "meter/sum")} == {"table"}


def test_what_the_state_dict_of_a_registered_object_may_leave_out_is_told() -> None:
    state, pace = ObservedState(Accelerator(cpu=True)), Pace()
    state.registered["pace"] = pace
    assert "pace/limit" in ScriptValues(state.compared).changed()


def test_the_groups_that_an_optimizer_was_made_with_are_left_out() -> None:
    kept: dict[str, Any] = {
        "groups": [{"params": Meter().model.parameters(), "lr": 0.1}],
        "settings": [{"params": "all", "lr": 0.1}],
    }
    optimizer = torch.optim.SGD(kept["groups"])
    told = ScriptValues(lambda: [optimizer]).changed()
    inside = {name for name in told if name.startswith(("kept/groups/", "kept/settings/0/"))}
    assert inside == {"kept/settings/0/lr", "kept/settings/0/params"}


class Slow(torch.optim.SGD):
    """Which counts its steps where no state dict has them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), momentum=0.9)
        self.ahead, self._mixed = 0, False


def test_what_an_optimizer_keeps_besides_its_state_is_told() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer, hidden = Slow(model), [torch.optim.LBFGS(model.parameters())]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    values = ScriptValues(lambda: [model, optimizer, *hidden])
    told = {name for name in values.changed() if name.startswith(("optimizer/", "LBFGS/"))}
    assert told == {"optimizer/ahead", "optimizer/_mixed"}
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler.step()
    optimizer.ahead = 1
    assert {name for name in values.changed() if name.startswith("optimizer/")} == {"optimizer/ahead"}


def test_a_private_number_of_a_model_is_told() -> None:
    class Tempered(torch.nn.Linear):
        _tau = 1.0

    model = Tempered(2, 2)
    model._tau = 0.5
    values = ScriptValues(lambda: [model])
    assert values.changed()["model/_tau"] == "0.5"


class Meta(type):
    """A metaclass of the script's own."""


class Counted(metaclass=Meta):
    steps = 0


def test_a_class_with_a_metaclass_is_looked_into() -> None:
    counted = Counted
    assert ScriptValues(list).changed()["counted/steps"] == "0" and counted


@pytest.mark.parametrize("moment", ["pre", "post"])
def test_what_a_hook_on_the_steps_of_an_optimizer_keeps_is_told(moment: str) -> None:
    seen = {"steps": 0}
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())
    register = getattr(optimizer, f"register_step_{moment}_hook")
    register(lambda *_, seen=seen: seen.update(steps=seen["steps"] + 1))
    del seen
    del register
    values = ScriptValues(lambda: [optimizer])
    assert values.changed()["optimizer/hooks/0/keyword defaults/seen/steps"] == "0"
    optimizer.step()
    assert values.changed()["optimizer/hooks/0/keyword defaults/seen/steps"] == "1"


def test_what_a_script_puts_on_a_parameter_is_told() -> None:
    model = torch.nn.Linear(2, 2)
    setattr(model.weight, "level", 0.5)  # noqa: B010
    assert ScriptValues(lambda: [model]).changed()["model.weight/level"] == "0.5"


def a_schedule_that_counts(optimizer: torch.optim.Optimizer) -> Any:
    calls = 0

    def decay(step: int) -> float:
        nonlocal calls
        calls += 1
        return 0.9**calls

    return torch.optim.lr_scheduler.LambdaLR(optimizer, decay)


def test_what_optimizers_and_a_schedule_keep_under_accelerates_wrappers_is_told() -> None:
    class Slower(Slow):
        """A variable of the name that its optimizers would be told by."""

    state = ObservedState(Accelerator(cpu=True))
    model = torch.nn.Linear(2, 2)
    optimizer = Slower(model)
    schedule, _, second = state.accelerator.prepare(a_schedule_that_counts(optimizer), optimizer, Slower(model))
    del optimizer
    values = ScriptValues(state.compared)
    told = {"optimizer 0/ahead": "0", "optimizer 1/ahead": "0", "LambdaLR/lr_lambdas/0/calls": "1"}
    assert told.items() <= values.changed().items()
    second.optimizer.ahead = 3
    schedule.scheduler.lr_lambdas[0](1)
    assert {"optimizer 1/ahead": "3", "LambdaLR/lr_lambdas/0/calls": "2"}.items() <= values.changed().items()


def test_what_a_script_puts_on_an_object_of_accelerate_is_told() -> None:
    accelerator: Any = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    values = ScriptValues(lambda: [model, optimizer, optimizer.optimizer])
    assert not [name for name in values.changed() if name.startswith(("accelerator", "optimizer/"))]
    accelerator.best, optimizer.warm = 0.5, 3
    assert {"accelerator/best": "0.5", "optimizer/warm": "3"}.items() <= values.changed().items()
    optimizer.param_groups[0]["momentum"] = 0.5
    assert values.changed()["optimizer.param_groups[0]/momentum"] == "0.5"


def test_numbers_that_are_not_pythons_own_are_told() -> None:
    average, norms, phase, rate = numpy.float64(0.5), [numpy.float32(2.0)], 1 + 2j, decimal.Decimal("0.25")
    bits, address, table = numpy.random.PCG64(3), ctypes.c_void_p(0), numpy.zeros(1, dtype=[("n", "i4")])
    told = ScriptValues(lambda: []).changed()
    assert told["average"].endswith("0.5)") and "2.0" in told["norms"] and told["table"].startswith("records[1] ")
    assert (told["phase"], told["rate"]) == ("(1+2j)", "0.25") and told["bits"].startswith("PCG64 ")
    assert told["address"] == "" and (average, norms, phase, rate, bits, address, table)


def test_where_a_generator_stands_is_told() -> None:
    def counted() -> Iterator[int]:
        yield 1
        yield 2

    numbers, whole = counted(), counted()
    assert next(numbers) == 1 and len([*whole]) == 2
    values = ScriptValues(list)
    told = values.changed()
    assert told["numbers (generator)"] != "at None" == told["whole (generator)"]
    next(numbers)
    assert values.changed()["numbers (generator)"] != told["numbers (generator)"]


def test_values_in_unusual_places_are_told() -> None:
    settings, scale, grid = types.ModuleType("settings"), _scale(), itertools.product([1, 2], [3, 4])
    settings.rate = 0.5  # pyright: ignore[reportAttributeAccessIssue]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    _watch(model[0])
    seen = {"gradients": 0}
    model[0].get_parameter("weight").register_hook(lambda gradient, seen=seen: seen.update(gradients=seen["gradients"] + 1))
    del seen
    values = ScriptValues(lambda: [model])
    first = {"settings/rate": "0.5", "grid/at/1": "None", "model.0/forward_hooks/0/passes": "0"}
    first["model.0.weight/hooks/0/defaults/0/gradients"] = "0"
    assert first.items() <= values.changed().items()
    scale.send(None)
    next(grid)
    model(torch.zeros(1, 2)).sum().backward()
    settings.rate = 0.25  # pyright: ignore[reportAttributeAccessIssue]
    changed = values.changed()
    then = {"settings/rate": "0.25", "model.0/forward_hooks/0/passes": "1", "scale/factor": "2.0"}
    then["model.0.weight/hooks/0/defaults/0/gradients"] = "1"
    assert then.items() <= changed.items() and changed["grid/at/1"] == "tuple of 2: 0, 0", changed
    scale.close()


async def _scale() -> None:
    factor = 1.0
    while True:
        factor *= 2
        await _Given()


class _Given:
    def __await__(self) -> Generator[None]:
        yield None


def _watch(layer: torch.nn.Module) -> None:
    passes = 0

    def count(module: torch.nn.Module, given: Any, made: Any) -> None:
        nonlocal passes
        passes += 1

    layer.register_forward_hook(count)


class Loop:
    """Whose method calls that of another object, which has a `self`, too."""

    def __init__(self, inner: "Inner") -> None:
        self.step, self.history, self.inner = 7, numpy.zeros(3), inner

    def run(self) -> dict[str, str]:
        return self.inner.run()


class Inner:
    def __init__(self) -> None:
        self.values, self.scale = ScriptValues(list), 2.0

    def run(self) -> dict[str, str]:
        return self.values.changed()


def test_the_objects_of_all_running_methods_are_told_with_small_arrays() -> None:
    told = Loop(Inner()).run()
    assert {"Loop.self/step": "7", "Inner.self/scale": "2.0"}.items() <= told.items() and told["Loop.self/history"].startswith(
        "float64[3] "
    )


def test_functions_that_keep_nothing_that_changes_are_left_out() -> None:
    def plain(size: int = 3, *, name: str | None = None) -> None: ...

    def keeps(seen: list[int] = [1]) -> None: ...  # noqa: B006

    told = ScriptValues(list).changed()
    assert not [name for name in told if name.startswith("plain/")] and [name for name in told if name.startswith("keeps/")]


def test_of_a_progress_bar_what_it_goes_through_counts() -> None:
    progress = tqdm([1, 2, 3], disable=True)  # noqa: F841
    told = ScriptValues(list).changed()
    assert {name: told[name] for name in told if name.startswith("progress/")} == {"progress/iterable": "list of 3: 1, 2, 3"}


def test_of_a_drawn_figure_nothing_counts() -> None:
    axes, meter = type("Axes", (Meter,), {"__module__": "matplotlib.axes._axes"})(), Meter()
    told = ScriptValues(list).changed()
    assert [name for name in told if name.startswith("axes")] == [] and "meter/sum" in told and axes.sum == meter.sum


def test_of_a_queue_its_items_count_and_of_a_pool_nothing() -> None:
    todo, pool = Queue(), ThreadPoolExecutor(1)
    todo.put(7)
    pool.submit(int).result()
    told = ScriptValues(list).changed()
    assert [name for name in told if name.startswith("pool")] == []
    assert told["todo/queue"] == "deque of 1: 7" and "todo/unfinished_tasks" not in told


def test_of_a_loaders_iterator_its_dataset_and_sampler_count_and_nothing_of_its_pass() -> None:
    """Its seed, its counts and the handles of its queues are others after each start."""
    data, sampler = TensorDataset(torch.zeros(3)), SimpleNamespace(epoch=2)
    data.seen = 7  # pyright: ignore[reportAttributeAccessIssue]
    batches = iter(DataLoader(data, generator=torch.Generator()))
    batches._index_sampler = sampler  # pyright: ignore[reportAttributeAccessIssue]
    listed = iter(DataLoader(TensorDataset(torch.zeros(3)), batch_sampler=[[0], [1]]))  # noqa: F841
    own = SimpleNamespace(_base_seed=7)  # noqa: F841
    del data, sampler
    told = ScriptValues(list).changed()
    found = {name: text for name, text in told.items() if name.startswith(("batches/", "listed/"))}
    assert (found.pop("batches/_dataset/seen"), found.pop("batches/_index_sampler/epoch")) == ("7", "2")
    assert {name.split("/")[1] for name in found} <= {"_dataset", "_index_sampler"} and "listed/_index_sampler" not in found
    assert [name for name in told if "_base_seed" in name] == ["own/_base_seed"]


def test_hooks_on_many_layers_leave_room_for_what_modules_keep() -> None:
    layers = [torch.nn.Identity() for _ in range(450)]
    model = torch.nn.Sequential(*layers, Memory())
    for layer in layers:
        _watch(layer)
    first = ScriptValues(lambda: [model]).changed()
    assert first["model.450/hidden"] == "None" and "model.450/last" in first and "model.0/forward_hooks/0/passes" in first


def test_a_key_may_be_no_text_of_any_encoding() -> None:
    kept, count = {"a\udcff": torch.zeros(2)}, 1
    first = ScriptValues(list).changed()
    assert first["kept/a\udcff"] and first["count"] == f"{count}" and kept


def test_long_texts_and_secrets_are_told_as_digests() -> None:
    stage, api_key, command = "warmup", "hunter no. 2", "x" * 30
    told = ScriptValues(list).changed()
    assert told["stage"] == "'warmup'" and stage
    assert all(told[name].startswith("text ") for name in ("api_key", "command"))
    assert api_key not in str(told) and command not in str(told)


def test_of_a_list_of_texts_the_length_is_told() -> None:
    files, pair, one = (
        ["first.txt", "second.txt", "third.txt"],
        ("first.txt", "second.txt, third.txt"),
        "files of 3: " + "x" * 30,
    )
    told = ScriptValues(list).changed()
    assert told["files"].startswith("list of 3: text ") and told["pair"].startswith("tuple of 2: text "), told
    assert told["one"].startswith("text ") and "txt" not in told["files"] + told["pair"] and files and pair and one


def test_it_is_asked_so_often_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_values, "MOST_LOOKS", 5)
    values = ScriptValues(list)
    for count in range(5):
        assert values.changed()["count"] == str(count)
    count = -1
    assert values.changed() == {}


@pytest.mark.parametrize(("pause", "again"), [(1e6, False), (0, True)])
def test_a_script_that_takes_long_is_looked_at_less_often(monkeypatch: pytest.MonkeyPatch, pause: float, again: bool) -> None:
    monkeypatch.setattr(script_values, "SLOW_S", 0.0)
    monkeypatch.setattr(script_values, "PAUSE", pause)
    values = ScriptValues(list)
    assert values.changed()
    later = 1
    assert ("later" in values.changed()) == again and later


def test_an_error_in_looking_ends_it_and_reaches_nobody() -> None:
    def broken() -> list[Any]:
        raise RuntimeError

    values = ScriptValues(broken)
    assert [values.changed() for _ in range(2)] == [{}, {}]


class Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        pytest.fail(f"it was asked for {name}")


def test_modules_are_not_asked_for_what_they_have_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazy_module_of_a_test", Lazy("lazy_module_of_a_test"))
    assert ScriptValues(list).changed()


def _dropping(dropped: torch.Tensor) -> Generator[None]:
    yield
    del dropped
    yield


async def _dropping_later(dropped: torch.Tensor) -> None:
    await _Given()
    del dropped
    await _Given()


@pytest.mark.parametrize("make", [_dropping, _dropping_later])
def test_what_a_suspended_function_drops_is_not_kept_alive(make: Any) -> None:
    dropped = torch.zeros(3)
    gone, suspended = weakref.ref(dropped), make(dropped)
    del dropped
    suspended.send(None)
    assert "dropped" in dict(children(suspended))
    suspended.send(None)
    gc.collect()
    assert gone() is None
    suspended.close()


def test_what_a_function_drops_is_not_kept_alive() -> None:
    dropped = torch.zeros(3)
    gone = weakref.ref(dropped)
    assert "dropped" in locals_of(sys._getframe())
    del dropped
    gc.collect()
    assert gone() is None


def test_a_function_that_asks_for_its_own_variables_finds_them_unchanged() -> None:
    def asks(size: int) -> tuple[dict[str, Any], dict[str, Any]]:
        taken = locals()
        later = 3
        return taken, {**locals_of(sys._getframe()), "later": later}

    taken, found = asks(2)
    assert taken == {"size": 2} and found == {"later": 3}


@pytest.mark.parametrize("source", ["vars(args)", "model.eval()"])
def test_one_that_only_seems_to_is_looked_at(source: str) -> None:
    space: dict[str, Any] = {"locals_of": locals_of, "sys": sys}
    exec(f"def function(args, model):\n    {source}\n    return locals_of(sys._getframe())", space)
    model = torch.nn.Linear(1, 1)
    assert space["function"](model, model).keys() == {"args", "model"}


def test_variables_that_somebody_has_asked_for_stay_there() -> None:
    held = sys._getframe().f_locals
    later = 1
    assert locals_of(sys._getframe())["later"] == later
    assert not isinstance(held, dict) or "held" in held


def test_one_value_that_cannot_be_read_leaves_the_others() -> None:
    sparse, whole = torch.ones(1).to_sparse(), torch.ones(1)
    told = ScriptValues(list).changed()
    assert told["whole"] == "tensor 1.0" and "sparse" not in told
    del sparse, whole


@pytest.fixture
def module_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of a package below the job's folder, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "memory.py").write_text("kept = 1\n")
    module = types.ModuleType("pack.memory")
    module.__file__, module.kept = str(tmp_path / "pack" / "memory.py"), 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pack.memory", module)
    return module


def test_modules_are_found_however_many_a_library_imports_later(
    module_below: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = ScriptValues(list)
    assert values.changed()["pack.memory.kept"] == "1"
    module_below.kept = 2  # type: ignore[attr-defined]
    for number in range(script_values.NEWEST):
        monkeypatch.setitem(sys.modules, f"later_{number}", types.ModuleType(f"later_{number}"))
    assert values.changed()["pack.memory.kept"] == "2"
    assert "pack.memory.kept" not in ScriptValues(list).changed()


@pytest.mark.usefixtures("module_below")
def test_of_an_attached_script_the_same_variables_are_looked_at() -> None:
    accelerator, patience = Accelerator(cpu=True), 3
    roots = script_roots(accelerator)
    assert (roots["pack.memory.kept"], roots["patience"]) == (1, patience)
    assert roots["accelerator"] is accelerator


class Average:
    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow, self.source = [each.detach().clone() for each in model.parameters()], model


def test_weights_that_no_optimizer_steps_are_told_as_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_values, "of_the_job", lambda _: [])  # other tests' are there, too
    model, teacher, batch = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), [torch.ones(2), torch.ones(2)]
    optimizer, average = torch.optim.SGD(model.parameters()), Average(model)
    values = ScriptValues(lambda: [torch.nn.Sequential(model), optimizer])
    told = {name for name, text in values.changed().items() if text.startswith("weights ")}
    assert told == {"teacher", "average/shadow"} and batch
    with torch.no_grad():
        teacher.weight[0].add_(1)
        model.weight.add_(1)
    assert {name for name, text in values.changed().items() if text.startswith("weights ")} == {"teacher"}
    average.shadow[1][-1] = 7.0
    assert {name for name, text in values.changed().items() if text.startswith("weights ")} == {"average/shadow"}


class Bank(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(4, 2), persistent=False)


def test_buffers_of_a_module_that_is_not_trained_are_told_and_state_dicts_of_live_models_are_not() -> None:
    model, criterion, twin = torch.nn.Linear(2, 2), Bank(), torch.nn.Linear(2, 2)
    saved = {"model": model.state_dict(), "twin": twin.state_dict(), "copy": {"weight": torch.ones(2, 2)}}
    values = ScriptValues(lambda: [model])
    first = values.changed()
    assert first["criterion/bank"].startswith("float32[4, 2]") and "saved/copy/weight" in first and "saved/copy" in first
    assert saved and not [name for name in first if name.startswith(("saved/model/", "saved/twin/"))]
    with torch.no_grad():
        criterion.get_buffer("bank")[0] += 1
        for each in (model, twin):
            each.weight.add_(1)
    assert {name for name in values.changed() if name.startswith(("criterion", "saved"))} == {"criterion/bank"}
