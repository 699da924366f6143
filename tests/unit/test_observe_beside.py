"""What a script keeps in memory beside the model that it trains."""

import copy
from typing import Any

import pytest
import torch

from chaosrun.observe.live_modules import MOST_ALIKE, digests_of_others
from chaosrun.records.traces import ALIVE


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)


class Alone(Net): ...


class InBuffers(torch.nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        for name, each in net.named_parameters():
            self.register_buffer(name.replace(".", "_"), each.detach().clone())


class InAList:
    def __init__(self, net: Net) -> None:
        self.shadow_params = [each.detach().clone() for each in net.parameters()]
        self.backup = [each.detach().clone() for each in net.parameters()]
        self.ema_of = list(net.parameters())
        self.losses_avg = [torch.zeros(())]


class InADictionary(InAList):
    def __init__(self, net: Net) -> None:
        self.shadow = {name: each.detach().clone() for name, each in reversed(list(net.named_parameters()))}


def told(net: Net) -> dict[str, str]:
    weights = list(net.parameters())
    return {name.removeprefix(ALIVE): value for name, value in digests_of_others(weights, {*map(id, weights)}).items()}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (copy.deepcopy, "Net"),
        (InBuffers, "InBuffers"),
        (InAList, "InAList.shadow_params"),
        (InADictionary, "InADictionary.shadow"),
    ],
)
def test_an_average_is_seen_in_whatever_form_it_is_kept(make: Any, name: str) -> None:
    net = Net()
    before = told(net)
    average = make(net)
    found = told(net)
    assert found.keys() - before.keys() == {name}
    with torch.no_grad():
        net.layer.bias.add_(1)
    assert told(net)[name] == found[name]
    del average
    other = make(net)
    assert told(net)[name] != found[name], other


def test_of_several_of_one_name_all_are_told_up_to_a_limit() -> None:
    net = Alone()
    copies = [copy.deepcopy(net), Alone()]
    assert len(told(net)["Alone"].split()) == 2
    copies += [copy.deepcopy(net) for _ in range(MOST_ALIKE)]
    assert "Alone" not in told(net)


def test_objects_that_refuse_to_be_looked_at_hide_no_other() -> None:
    class Kind(type):
        def __hash__(cls) -> int:
            raise RuntimeError

    class Refusing(metaclass=Kind):
        @property
        def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
            raise RuntimeError

    net = Net()
    kept = [Refusing(), InAList(net)]
    assert "InAList.shadow_params" in told(net) and kept
