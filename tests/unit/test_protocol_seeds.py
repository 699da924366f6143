"""Whether a script has seeded torch: chaosrun says so of one that has not."""

import sys
from pathlib import Path

import pytest
import torch
from accelerate.utils import set_seed

from chaosrun.protocol.determinism import Seeds


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> Seeds:
    for module in (torch, torch.random):
        for name in ("manual_seed", "set_rng_state"):
            monkeypatch.setattr(module, name, getattr(module, name))
    return Seeds()


@pytest.mark.parametrize("by", ["manual_seed", "set_rng_state"])
def test_what_a_script_seeds_before_it_joins_its_group_counts(by: str, seeds: Seeds) -> None:
    """As MoCo and many others do. Under a command the hooks come only then."""
    seeds.watch()
    assert not seeds.seeded
    state = torch.get_rng_state()
    getattr(torch, by)(torch.initial_seed() if by == "manual_seed" else state)
    seeds.begin()
    assert seeds.seeded
    # A second script in the same process begins anew.
    seeds.begin()
    assert not seeds.seeded


def test_it_is_watched_once(seeds: Seeds) -> None:
    seeds.watch()
    first = torch.manual_seed
    seeds.watch()
    assert torch.manual_seed is first and torch.random.manual_seed is first


def test_the_line_that_seeds_again_after_a_restore_is_told(seeds: Seeds) -> None:
    def line() -> int:
        return sys._getframe(1).f_lineno

    seeds.begin()
    state = torch.get_rng_state()
    torch.manual_seed(torch.initial_seed())  # before the restore
    torch.set_rng_state(state)
    at = line() + 1
    set_seed(3)  # within a library
    assert seeds.seeded_again() == f"{Path(__file__).name}:{at}"
    # From the first step on nothing is told, and nothing is kept.
    torch.set_rng_state(state)
    torch.manual_seed(3)
    assert seeds.seeded_again() == ""
    # A second script in the same process begins anew.
    seeds.begin()
    torch.manual_seed(3)
    assert seeds.seeded_again() == ""
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    "order", ["seeds, restores", "forks, seeds", "restores, seeds, restores", "restores, seeds within a fork"]
)
def test_what_is_seeded_before_the_last_restore_or_for_a_while_is_not_told(order: str, seeds: Seeds) -> None:
    seeds.begin()
    state = torch.get_rng_state()
    for each in order.split(", "):
        match each:
            case "seeds":
                torch.manual_seed(3)
            case "restores":
                torch.set_rng_state(state)
            case _:
                with torch.random.fork_rng():
                    torch.manual_seed(4)
    assert seeds.seeded_again() == ""
    torch.set_rng_state(state)
