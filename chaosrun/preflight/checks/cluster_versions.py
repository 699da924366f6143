"""Are the same versions installed on every node, and the same variables set? Pure.

Where no worker is ever placed, as on a head without CPUs, nobody needs torch, and its variables are its own matter.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from chaosrun.preflight.majority import Majority, majority
from chaosrun.preflight.model import Facts, Finding, Rows, Status

ROWS = Rows(check="cluster")

EVERYWHERE = ("python", "chaosrun", "ray")
OF_WORKERS = ("torch", "accelerate")
NEEDED = (*EVERYWHERE, *OF_WORKERS)
COMPARED = (*NEEDED, "numpy")
OF_GPUS = ("driver", "NCCL")
MATTERS = re.compile(r"(NCCL|OMP|MKL|OPENBLAS|CUBLAS|CUDA|TORCH|PYTORCH|GLOO)_.*|PYTHONHASHSEED|LD_PRELOAD")
DIFFERS_BY_NATURE = re.compile(r"CUDA_VISIBLE_DEVICES|.*_(FILE|DIR|PATH|HOME)")
"""Which devices and which places are a node's own matter."""
NOT_SET = "not set"
OTHER_NUMBERS = "the same job may give other numbers there, or not start"
NOBODY_KNOWS = "they differ, and nothing says which is right"


def versions(answered: Mapping[str, Facts], workers: Collection[str], with_gpus: Collection[str]) -> Iterator[Finding]:
    """`workers`: nodes that can get one; `with_gpus`: those whose GPUs may be used."""
    found: list[Finding] = []
    for what in (*COMPARED, *OF_GPUS):
        has = {node: facts["versions"][what] for node, facts in answered.items() if _matters_on(what, node, workers, with_gpus)}
        missing = [node for node, version in has.items() if version is None]
        if what in NEEDED:
            found += [_missing(what, node) for node in missing]
        elif what in OF_GPUS:
            found += [_unknown(what, node) for node in missing]
        there = {node: version for node, version in has.items() if version is not None}
        found += _torch(there, with_gpus) if what == "torch" else _differing(what, there)
    found += _other_code(answered, _spoken_of(found))
    yield from found
    odd = _spoken_of(found)
    for node, facts in answered.items():
        if node not in odd:
            listed = [
                what
                for what in (*COMPARED, *OF_GPUS)
                if facts["versions"][what] is not None and _matters_on(what, node, workers, with_gpus)
            ]
            yield ROWS.passed(
                ", ".join(f"{what} {facts['versions'][what]}" for what in listed),
                "installed, and the same on every node",
                name="versions",
                node=node,
                reason="" if node in workers else "no worker is placed there: it needs nothing else",
            )


def _matters_on(what: str, node: str, workers: Collection[str], with_gpus: Collection[str]) -> bool:
    return what in EVERYWHERE or node in (with_gpus if what in OF_GPUS else workers)


def _spoken_of(found: Collection[Finding]) -> set[str]:
    """Nodes with something against them."""
    bad = [finding for finding in found if finding.status is not Status.SKIP]
    return {name for finding in bad for name in (finding.node, *finding.blames) if name}


def _missing(what: str, node: str) -> Finding:
    return ROWS.fail(
        "not installed", "installed", f"install {what} there, for the Python that Ray runs", name=f"{what} version", node=node
    )


def _unknown(what: str, node: str) -> Finding:
    why = "driver unknown: no kernel module there tells its version" if what == "driver" else "no NCCL library is found there"
    return ROWS.skip(why, name=f"{what} version", node=node)


def _torch(there: Mapping[str, str], with_gpus: Collection[str]) -> Iterator[Finding]:
    """The build (+cpu, +cu130) has to be the same only where there are GPUs, and where there are none."""
    released = {node: version.partition("+")[0] for node, version in there.items()}
    found = list(_differing("torch", released))
    yield from found
    alike = there.keys() - _spoken_of(found)
    for gpus in (True, False):
        yield from _differing("torch", {node: there[node] for node in there if node in alike and (node in with_gpus) is gpus})


def _differing(what: str, there: Mapping[str, str]) -> Iterator[Finding]:
    if not there:
        return
    most = majority(there)
    row: dict[str, Any] = {"name": f"{what} version", "reason": OTHER_NUMBERS}
    if most.tied:
        status = Status.WARN if len({_family(what, version) for version in most.groups}) == 1 else Status.FAIL
        yield tie(most, **row, status=status, remedy=f"install the same {what} on all of them")
        return
    again = " and reboot" if what == "driver" else ""
    for node, version in most.odd.items():
        yield ROWS.row(
            Status.WARN if _family(what, version) == _family(what, most.value) else Status.FAIL,
            version,
            f"{most.value}, as on {most.share}",
            node=node,
            remedy=f"install {what} {most.value} there{again}",
            **row,
        )


def tie(most: Majority, *, reason: str, measured: str = "", **row: Any) -> Finding:
    """One row of all nodes that differ without a majority."""
    return Finding(
        check="cluster",
        **row,
        blames=tuple(most.odd),
        measured=measured or str(most),
        threshold="the same on every node",
        reason=f"{NOBODY_KNOWS}; {reason}",
    )


def _family(what: str, version: str) -> str:
    """Versions of one family differ by little."""
    if what == "numpy":
        return ""
    parts = {"python": 2, "driver": 1}.get(what)
    return version if parts is None else ".".join(version.split(".")[:parts])


def _other_code(answered: Mapping[str, Facts], odd: set[str]) -> Iterator[Finding]:
    """chaosrun of one version but not the same files."""
    codes = {node: facts["code"] for node, facts in answered.items() if node not in odd}
    if not codes:
        return
    most = majority(codes)
    row: dict[str, Any] = {
        "name": "chaosrun version",
        "status": Status.WARN,
        "reason": "somebody has changed chaosrun's own files",
        "remedy": "install the same chaosrun on every node",
    }
    if most.tied:
        yield tie(most, **row, measured=f"files {most}")
        return
    for node, code in most.odd.items():
        yield Finding(
            check="cluster",
            **row,
            node=node,
            measured=f"{answered[node]['versions']['chaosrun']}, files {code}",
            threshold=f"files {most.value}, as on {most.share}",
        )


def variables(answered: Mapping[str, Facts], workers: Collection[str], of_job: frozenset[str]) -> Iterator[Finding]:
    """`of_job`: what the job's own environment sets on every node alike."""
    name = "environment variables"
    compared = {node: facts["variables"] for node, facts in answered.items() if node in workers}
    why = "one node: nothing to compare with" if len(answered) < 2 else "no other node gets a worker: nothing to compare with"
    for node in answered:
        if node not in compared:
            reason = "no worker is placed there"
            yield ROWS.skip(reason, name=name, node=node)
        elif len(compared) < 2:
            yield ROWS.skip(why, name=name, node=node)
    if len(compared) < 2:
        return
    set_ = {variable for of_node in compared.values() for variable in of_node if _matters(variable)} - of_job
    found: list[Finding] = []
    for variable in sorted(set_):
        most = majority({node: of_node.get(variable, NOT_SET) for node, of_node in compared.items()})
        row: dict[str, Any] = {
            "name": f"variable {variable}",
            "status": Status.WARN,
            "reason": "it changes how the node computes or talks to the others",
            "remedy": "start Ray with the same environment on every node, or set it in the job's env",
        }
        if most.tied:
            found.append(tie(most, **row))
            continue
        found += [
            Finding(check="cluster", **row, node=node, measured=value, threshold=f"{most.value}, as on {most.share}")
            for node, value in most.odd.items()
        ]
    yield from found
    same = f"{len(set_)} that matter to training are set" if set_ else "none that matters to training is set"
    for node in compared.keys() - _spoken_of(found):
        yield ROWS.passed(same, "the same on every node", name=name, node=node)


def _matters(variable: str) -> bool:
    return MATTERS.fullmatch(variable) is not None and DIFFERS_BY_NATURE.fullmatch(variable) is None
