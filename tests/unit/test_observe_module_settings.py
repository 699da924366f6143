"""How a script's modules are set is told once, and then as far as it changes."""

from typing import Any

import pytest
import torch

from chaosrun.observe.module_settings import MOST_CHANGES, MOST_SETTINGS, ModuleSettings


class Scaled(torch.nn.Linear):
    scale: float | None = None
    name = "class attributes are no state"


def test_what_no_state_dict_holds_is_told() -> None:
    model: Any = torch.nn.Sequential(Scaled(2, 2), torch.nn.Dropout(0.1))
    told = ModuleSettings([model])
    assert told.changed() == {"0.in_features": "2", "0.out_features": "2", "1.p": "0.1", "1.inplace": "False"}
    assert told.changed() == {}
    model[0].scale, model[1].p = 0.5, 0.2
    model[0].weight.requires_grad_(False)
    assert told.changed() == {"0.scale": "0.5", "1.p": "0.2", "0.weight.requires_grad": "False"}
    del model[0].scale
    model[0].weight.requires_grad_()
    model[1].eval()
    assert told.changed() == {"0.scale": "", "0.weight.requires_grad": "", "1.training": "False"}
    hook = model[1].register_forward_hook(lambda *_: None)
    model[0].bias.register_hook(lambda gradient: gradient)
    assert told.changed() == {"1.hooks": "1", "0.bias.hooks": "1"}
    hook.remove()
    assert told.changed() == {"1.hooks": ""}


def test_several_models_are_told_apart_and_very_many_settings_left_out() -> None:
    models = [torch.nn.Dropout(0.1), torch.nn.Dropout(0.2)]
    assert ModuleSettings(models).changed() == {"p": "0.1", "inplace": "False", "1:.p": "0.2", "1:.inplace": "False"}
    many = torch.nn.ModuleList(torch.nn.Dropout() for _ in range(MOST_SETTINGS))
    assert len(ModuleSettings([many]).changed()) == MOST_SETTINGS


def test_what_changes_at_every_step_is_told_no_more_some_day() -> None:
    model = torch.nn.Dropout()
    told = ModuleSettings([model])
    values = []
    for step in range(2 * MOST_CHANGES):
        model.p = step
        values.append(told.changed().get("p"))
    assert values == [*(str(step) for step in range(MOST_CHANGES - 1)), "…", *[None] * MOST_CHANGES]


def test_a_module_that_raises_as_it_is_looked_at_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Dropout(0.1)
    monkeypatch.setattr(model, "named_modules", lambda: 1 / 0)
    assert ModuleSettings([model]).changed() == {}
