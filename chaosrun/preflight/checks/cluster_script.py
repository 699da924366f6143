"""Is the job's script there on every node, the same, with everything that it imports? Pure."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from chaosrun.preflight.checks.cluster_versions import COMPARED, tie
from chaosrun.preflight.majority import Majority, majority
from chaosrun.preflight.model import Facts, Finding, Rows, Status
from chaosrun.wording import count, listed

ROWS = Rows(check="cluster")

ABSENT = "not there"


def script(answered: Mapping[str, Facts], path: Path, workers: Collection[str]) -> Iterator[Finding]:
    """Of every node that can get a worker: the script's files and its imports."""
    readable = {node: facts["script"] for node, facts in answered.items() if node in workers and "error" not in facts["script"]}
    for node, facts in answered.items():
        if node not in workers:
            reason = "no worker of the job is placed there"
            yield ROWS.skip(reason, name="script", node=node)
        elif node not in readable:
            yield ROWS.fail(
                facts["script"]["error"],
                f"{path} on every node",
                "put the job's directory at the same path on every node, or on a shared file system",
                name="script",
                node=node,
            )
    if readable:
        yield from _files(readable)
        yield from _imports(readable)
        yield from _import_versions(readable)


def _files(readable: Mapping[str, Facts]) -> Iterator[Finding]:
    odd: dict[str, list[str]] = {}
    tied: dict[str, Majority] = {}
    for file in sorted({file for facts in readable.values() for file in facts["files"]}):
        most = majority({node: facts["files"].get(file, ABSENT) for node, facts in readable.items()})
        if most.tied:
            tied[file] = most
            continue
        for node in most.odd:
            odd.setdefault(node, []).append(file)
    row: dict[str, Any] = {
        "name": "script",
        "status": Status.FAIL,
        "reason": "its ranks would run another program than the others",
        "remedy": "put the same files on every node, or use a shared file system",
    }
    if tied:
        most = next(iter(tied.values()))
        sides = " as on ".join(listed(nodes) for nodes in most.groups.values())
        yield tie(most, **row, measured=f"{listed([*tied])} not the same on {sides}")
    for node, facts in readable.items():
        if node in odd:
            yield Finding(
                check="cluster",
                **row,
                node=node,
                measured=f"{listed(odd[node])} not the same",
                threshold="the files that most nodes have",
            )
        elif not tied:
            yield ROWS.passed(
                f"there, {count(len(facts['files']), 'file')}", "the same on every node", name="script", node=node
            )


def _imports(readable: Mapping[str, Facts]) -> Iterator[Finding]:
    for node, facts in readable.items():
        missing = [name for name, found in facts["imports"].items() if not found["found"]]
        needed = [name for name in missing if not facts["imports"][name]["optional"]]
        # What is there elsewhere decides which way a script goes that can do without.
        needed_elsewhere = [name for name in missing if name not in needed and _found_somewhere(readable, name)]
        packages = len(facts["imports"])
        if not needed and not needed_elsewhere:
            yield ROWS.passed(
                f"{count(packages, 'package')}, {'all that it needs' if missing else 'none missing'}",
                "all can be imported",
                name="script's imports",
                node=node,
            )
            continue
        perhaps = facts["own_path"] and not any(_found_somewhere(readable, name) for name in needed)
        doubt = "the script changes sys.path, so that they may still be found" if perhaps else ""
        yield ROWS.row(
            Status.FAIL if needed and not perhaps else Status.WARN,
            f"no {listed(needed or needed_elsewhere)}",
            "all can be imported",
            name="script's imports",
            node=node,
            reason=doubt or ("" if needed else "the script can do without, but would go another way than on the other nodes"),
            remedy=f"install {listed(needed or needed_elsewhere)} there, for the Python that Ray runs, or set PYTHONPATH in "
            "the job's env",
        )


def _found_somewhere(readable: Mapping[str, Facts], name: str) -> bool:
    return any(facts["imports"].get(name, {}).get("found") for facts in readable.values())


def _import_versions(readable: Mapping[str, Facts]) -> Iterator[Finding]:
    for name in sorted({name for facts in readable.values() for name in facts["imports"]} - {*COMPARED}):
        has = {node: facts["imports"].get(name, {}).get("version") for node, facts in readable.items()}
        there = {node: version for node, version in has.items() if version is not None}
        if not there:
            continue
        most = majority(there)
        row: dict[str, Any] = {
            "name": f"{name} version",
            "status": Status.WARN,
            "reason": "the script imports it, and may compute something else there",
        }
        if most.tied:
            yield tie(most, **row, remedy=f"install the same {name} on all of them")
            continue
        for node, version in most.odd.items():
            yield Finding(
                check="cluster",
                **row,
                node=node,
                measured=version,
                threshold=f"{most.value}, as on {most.share}",
                remedy=f"install the {name} of the other nodes there",
            )
