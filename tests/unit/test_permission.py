"""Which faults a Ray, and a process, allow."""

import pytest

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault
from chaosrun.faults.kinds import FaultKind
from chaosrun.plan.permission import ask_permission
from chaosrun.spec.model import JobSpec

EVERYWHERE = ("private", "joined", "borrowed")


def ask(kind: FaultKind, ray: str, *, allow: bool = False, has_successor: bool = True) -> str | None:
    fault = Fault(id="F1", kind=kind, rank=1, at_step=7, source="faults.schedule[0]")
    try:
        ask_permission(
            [Fault(id="F0", rank=0, at_step=1, source="faults.schedule[1]"), fault],
            JobSpec.model_validate({"name": "a", "script": "a.py", "workers": 2, "faults": {"allow_cluster_faults": allow}}),
            ray=ray,
            has_successor=has_successor,
        )
    except UsageError as error:
        assert error.message.startswith("faults.schedule[0]: ")
        assert error.hint
        return error.message
    return None


@pytest.mark.parametrize("ray", EVERYWHERE)
@pytest.mark.parametrize("kind", ["node", "agent", "kill"])
def test_what_chaosrun_has_started_may_be_struck_anywhere(kind: FaultKind, ray: str) -> None:
    assert ask(kind, ray, has_successor=False) is None


@pytest.mark.parametrize("kind", ["raylet", "drain"])
def test_a_private_ray_has_no_other_node_to_go_on_with(kind: FaultKind) -> None:
    assert "no node would be left" in (ask(kind, "private", allow=True) or "")


@pytest.mark.parametrize("ray", ["joined", "borrowed"])
def test_a_raylet_of_a_cluster_that_was_joined_only_when_its_owner_says_so(ray: str) -> None:
    assert "joined" in (ask("raylet", ray) or "")
    assert ask("raylet", ray, allow=True) is None
    assert ask("drain", ray) is None


@pytest.mark.parametrize("ray", EVERYWHERE)
def test_rays_head_only_where_it_can_be_put_back(ray: str) -> None:
    refused = ask("head", ray, allow=True)
    assert (refused is None) == (ray == "private")


@pytest.mark.parametrize("kind", ["supervisor", "head"])
def test_this_process_is_not_ended_unless_another_goes_on(kind: FaultKind) -> None:
    assert "there is no other to continue it" in (ask(kind, "private", has_successor=False) or "")
    assert ask(kind, "private", has_successor=True) is None
