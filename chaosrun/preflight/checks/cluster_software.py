"""Whether every node has the same software and variables, and the job's script with all its imports. Pure.

A node on which no worker is ever placed, such as a head without CPUs, needs neither torch nor the script, and its variables do
not matter.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from chaosrun.preflight.majority import majority
from chaosrun.preflight.model import Finding, Rows, Status
from chaosrun.preflight.probes.script import ScriptFacts
from chaosrun.preflight.probes.software import SoftwareFacts
from chaosrun.wording import count, listed

ROWS = Rows(check="cluster")
EVERYWHERE = ("python", "chaosrun", "ray")
NEEDED = (*EVERYWHERE, "torch", "accelerate")
COMPARED = (*NEEDED, "numpy")
OF_GPUS = ("driver", "NCCL")
MATTERS = re.compile(r"(NCCL|OMP|MKL|OPENBLAS|CUBLAS|CUDA|TORCH|PYTORCH|GLOO)_.*|PYTHONHASHSEED|LD_PRELOAD")
DIFFERS_BY_NATURE = re.compile(r"CUDA_VISIBLE_DEVICES|.*_(FILE|DIR|PATH|HOME)")
"""Variables that name devices or places, and so differ between nodes by right."""
NOT_SET, ABSENT = "not set", "not there"
NO_WORKER = "no worker is placed there"
UNKNOWN = {"driver": "no kernel module there tells the driver's version", "NCCL": "no NCCL library is found there"}

Answered = Mapping[str, SoftwareFacts]


def differing(
    rows: Rows, has: Mapping[str, str], status: Status | Callable[[Iterable[str]], Status], reason: str, remedy: str
) -> Iterator[Finding]:
    """A row for each node that differs from most; without a majority, one row for all nodes."""
    if not has:
        return
    most = majority(has)
    grade = status if callable(status) else lambda values: status
    if most.tied:
        why = f"they differ, and nothing says which is right; {reason}"
        level, same = grade(most.groups), "the same on every node"
        yield rows.row(level, str(most), same, reason=why, remedy=remedy, blames=tuple(most.odd))
        return
    for node, value in most.odd.items():
        threshold = f"{most.value}, as on {most.share}"
        yield rows.row(grade((value, most.value)), value, threshold, node=node, reason=reason, remedy=remedy)


def _spoken_of(found: Iterable[Finding]) -> set[str]:
    """Nodes that are the subject of a finding other than a SKIP, or blamed by one."""
    bad = [finding for finding in found if finding.status is not Status.SKIP]
    return {name for finding in bad for name in (finding.node, *finding.blames) if name}


def versions(answered: Answered, workers: Collection[str], with_gpus: Collection[str]) -> Iterator[Finding]:
    """`workers`: nodes that can get one; `with_gpus`: those whose GPUs may be used."""

    def matters(what: str, node: str) -> bool:
        return what in EVERYWHERE or node in (with_gpus if what in OF_GPUS else workers)

    found: list[Finding] = []
    for what in (*COMPARED, *OF_GPUS):
        rows = ROWS.of(name=f"{what} version")
        has = {node: facts.versions[what] for node, facts in answered.items() if matters(what, node)}
        there = {node: version for node, version in has.items() if version is not None}
        for node in has.keys() - there.keys():
            if what in NEEDED:
                remedy = f"install {what} there, for the Python that Ray runs"
                found.append(rows.fail("not installed", "installed", remedy, node=node))
            elif what in OF_GPUS:
                found.append(rows.skip(UNKNOWN[what], node=node))
        found += _torch(rows, there, with_gpus) if what == "torch" else _versions(rows, what, there)
    yield from found
    odd = _spoken_of(found)
    for node, facts in answered.items():
        if node not in odd:
            told = {what: facts.versions[what] for what in (*COMPARED, *OF_GPUS) if matters(what, node)}
            yield ROWS.passed(
                ", ".join(f"{what} {version}" for what, version in told.items() if version is not None),
                "installed, and the same on every node",
                name="versions",
                node=node,
                reason="" if node in workers else f"{NO_WORKER}: it needs nothing else",
            )


def _torch(rows: Rows, there: Mapping[str, str], with_gpus: Collection[str]) -> Iterator[Finding]:
    """The build (+cpu, +cu130) must be the same only among nodes with GPUs, and among those without."""
    found = list(_versions(rows, "torch", {node: version.partition("+")[0] for node, version in there.items()}))
    yield from found
    alike = there.keys() - _spoken_of(found)
    for gpus in (True, False):
        builds = {node: there[node] for node in there if node in alike and (node in with_gpus) is gpus}
        yield from _versions(rows, "torch", builds)


def _versions(rows: Rows, what: str, there: Mapping[str, str]) -> Iterator[Finding]:
    # Versions that agree in this many parts differ little.
    parts = {"python": 2, "driver": 1, "numpy": 0}.get(what)

    def grade(values: Iterable[str]) -> Status:
        return Status.WARN if len({".".join(version.split(".")[:parts]) for version in values}) == 1 else Status.FAIL

    remedy = f"install the same {what} there" + (" and reboot" if what == "driver" else "")
    yield from differing(rows, there, grade, "the same job may give other numbers there, or not start", remedy)


def variables(answered: Answered, workers: Collection[str], of_job: frozenset[str]) -> Iterator[Finding]:
    """`of_job`: variables that the job's own environment sets equally on every node."""
    rows = ROWS.of(name="environment variables")
    has = {node: facts.variables for node, facts in answered.items() if node in workers}
    alone = "one node: nothing to compare with" if len(answered) < 2 else "no other node gets a worker: nothing to compare with"
    for node in answered:
        if node not in has or len(has) < 2:
            yield rows.skip(alone if node in has else NO_WORKER, node=node)
    if len(has) < 2:
        return
    names = {name for own in has.values() for name in own if MATTERS.fullmatch(name) and not DIFFERS_BY_NATURE.fullmatch(name)}
    why = "it changes how the node computes or talks to the others"
    remedy = "start Ray with the same environment on every node, or set it in the job's env"
    found: list[Finding] = []
    for name in sorted(names - of_job):
        values = {node: own.get(name, NOT_SET) for node, own in has.items()}
        found += differing(ROWS.of(name=f"variable {name}"), values, Status.WARN, why, remedy)
    yield from found
    number = len(names - of_job)
    same = f"{number} that matter to training are set" if number else "none that matters to training is set"
    for node in has.keys() - _spoken_of(found):
        yield rows.passed(same, "the same on every node", node=node)


def script(answered: Answered, path: Path, workers: Collection[str]) -> Iterator[Finding]:
    """The script's files and imports on every node that can get a worker."""
    rows = ROWS.of(name="script")
    readable: dict[str, ScriptFacts] = {}
    for node, facts in answered.items():
        if node not in workers:
            yield rows.skip(NO_WORKER, node=node)
        elif facts.script is None or facts.script.error:
            remedy = "put the job's directory at the same path on every node, or on a shared file system"
            yield rows.fail(facts.script.error if facts.script else ABSENT, f"{path} on every node", remedy, node=node)
        else:
            readable[node] = facts.script
    if readable:
        yield from _files(rows, readable)
        yield from _imports(ROWS.of(name="script's imports"), readable)


def _files(rows: Rows, readable: Mapping[str, ScriptFacts]) -> Iterator[Finding]:
    names = sorted({file for facts in readable.values() for file in facts.files})
    found = {file: majority({node: facts.files.get(file, ABSENT) for node, facts in readable.items()}) for file in names}
    tied = [file for file in names if found[file].tied]
    why, remedy = "its ranks would run another program than the others", "put the same files on every node, or use a shared one"
    if tied:
        most = found[tied[0]]
        measured = f"{listed(tied)} not the same on {' as on '.join(map(listed, most.groups.values()))}"
        reason = f"nothing says which is right; {why}"
        yield rows.fail(measured, "the same on every node", remedy, blames=tuple(most.odd), reason=reason)
    for node, facts in readable.items():
        if odd := [file for file in names if file not in tied and node in found[file].odd]:
            yield rows.fail(f"{listed(odd)} not the same", "the files that most nodes have", remedy, node=node, reason=why)
        elif not tied:
            yield rows.passed(f"there, {count(len(facts.files), 'file')}", "the same on every node", node=node)


def _imports(rows: Rows, readable: Mapping[str, ScriptFacts]) -> Iterator[Finding]:
    somewhere = {name for facts in readable.values() for name, about in facts.imports.items() if about.found}
    for node, facts in readable.items():
        missing = {name: about.optional for name, about in facts.imports.items() if not about.found}
        needed = [name for name, optional in missing.items() if not optional]
        # A script may run without an optional module, but then behaves differently from nodes that have it.
        names = needed or [name for name in missing if name in somewhere]
        if not names:
            told = f"{count(len(facts.imports), 'package')}, {'all that it needs' if missing else 'none missing'}"
            yield rows.passed(told, "all can be imported", node=node)
            continue
        perhaps = facts.own_path and not somewhere & {*needed}
        doubt = "the script changes sys.path, so that they may still be found" if perhaps else ""
        other = "" if needed else "the script can do without, but would go another way than on the other nodes"
        yield rows.row(
            Status.FAIL if needed and not perhaps else Status.WARN,
            f"no {listed(names)}",
            "all can be imported",
            node=node,
            reason=doubt or other,
            remedy=f"install {listed(names)} there, for the Python that Ray runs, or set PYTHONPATH in the job's env",
        )
    for name in sorted(somewhere - {*COMPARED}):
        has = {node: about.version for node, facts in readable.items() if (about := facts.imports.get(name))}
        there = {node: version for node, version in has.items() if version is not None}
        why = "the script imports it, and may compute something else there"
        yield from differing(ROWS.of(name=f"{name} version"), there, Status.WARN, why, f"install the same {name} there")
