"""Refuses faults on a Ray that does not allow them: they would strike other people's processes, or leave nothing to recover.
Pure."""

from collections.abc import Iterable, Iterator

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault
from chaosrun.spec.model import JobSpec


def ask_permission(faults: Iterable[Fault], spec: JobSpec, *, ray: str, has_successor: bool) -> None:
    """Raises UsageError when a fault would strike processes that are not ours, or leave nothing that could recover. `ray`:
    "private", "joined" or "borrowed". `has_successor`: another process watches this one, and continues the run when it dies."""
    allowed = spec.faults.allow_cluster_faults
    for message, hint in (refusal for fault in faults for refusal in _refusals(fault, ray, allowed, has_successor)):
        raise UsageError(message, hint=hint)


def _refusals(fault: Fault, ray: str, allow_cluster_faults: bool, has_successor: bool) -> Iterator[tuple[str, str]]:
    what = f"{fault.source}: {fault.describe()}"
    if fault.facts.ends_node and ray == "private":
        one = "a private Ray is one node, and no node would be left to go on"
        yield f"{what}: {one}", "join a cluster of several nodes with --address; kind node needs only one"
    elif fault.facts.strikes_ray == "raylet" and not allow_cluster_faults:
        hint = "set faults.allow_cluster_faults: true if it is yours to break; kind node strikes only what chaosrun started"
        yield f"{what}: that raylet belongs to a cluster which chaosrun has joined", hint
    if fault.facts.strikes_ray == "head" and ray != "private":
        hint = "leave out --address and RAY_ADDRESS: a private Ray's head may be struck"
        yield f"{what}: that head belongs to a cluster which chaosrun has joined, and cannot be put back", hint
    if fault.facts.evidence == "successor" and not has_successor:
        yield f"{what}: it ends this process, and there is no other to continue it", "run the job with `chaosrun submit`"
