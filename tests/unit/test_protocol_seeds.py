"""Whether a script has seeded torch: chaosrun says so of one that has not."""

import pytest
import torch

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
