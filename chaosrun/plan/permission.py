"""Which faults a given Ray does not allow: they strike what is somebody else's, or would leave nothing. Pure."""

from collections.abc import Iterable, Iterator

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault


def ask_permission(faults: Iterable[Fault], *, ray: str, allow_cluster_faults: bool, has_successor: bool) -> None:
    """Raises UsageError when a fault would strike what is not ours, or what nothing could recover from. `ray`: "private",
    "joined" or "borrowed". `has_successor`: this process is watched by one that goes on when it dies."""
    refused = next(
        (refusal for fault in faults for refusal in _refusals(fault, ray, allow_cluster_faults, has_successor)), None
    )
    if refused is not None:
        message, hint = refused
        raise UsageError(message, hint=hint)


def _refusals(fault: Fault, ray: str, allow_cluster_faults: bool, has_successor: bool) -> Iterator[tuple[str, str]]:
    what = f"{fault.source}: {fault.describe()}"
    if fault.facts.ends_node and ray == "private":
        one = "a private Ray is one node, and nothing would be left to go on with"
        yield f"{what}: {one}", "join a cluster of several nodes with --address; kind node needs only one"
    elif fault.facts.strikes_ray == "raylet" and not allow_cluster_faults:
        hint = "set faults.allow_cluster_faults: true if it is yours to break; kind node strikes only what chaosrun started"
        yield f"{what}: that raylet belongs to a cluster which chaosrun has joined", hint
    if fault.facts.strikes_ray == "head" and ray != "private":
        hint = "leave out --address and RAY_ADDRESS: a private Ray's head may be struck"
        yield f"{what}: that head belongs to a cluster which chaosrun has joined, and cannot be put back", hint
    if fault.facts.evidence == "successor" and not has_successor:
        yield f"{what}: it ends this process, and nobody is there to go on", "run the job with `chaosrun submit`"
