"""`make zoo`: install the releases side by side, drill every bug of the catalogue with each, compare the verdicts with what
they should be, and write docs/zoo.md. Names of bugs, or patterns such as 'datasets-*', have only those drilled."""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from chaosrun.api import suite
from chaosrun.campaign.results import DrillResult
from chaosrun.campaign.suite_plan import SuiteRequest
from tests.zoo.bugs import BUGS, Bug, Drill

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
JOBS = Path(__file__).parent / "jobs"

HEAD = """\
# The zoo: real resume bugs, and what chaosrun says of them

Each row is a bug of a released library. Its job is a training script as users of that library write it, without a word of
chaosrun; it is drilled with a release that has the bug and, where there is one, with a release that has not. `make zoo`
installs the releases side by side, drills them all and writes this page; `make zoo ARGS=datasets-8145` drills one.

"""
TAIL = """
To drill one by hand, put its releases first on Python's path:

    chaosrun submit tests/zoo/jobs/accelerate-4071.yaml env.PYTHONPATH=CACHE/site-packages/accelerate--1.14.0

CACHE is `CHAOSRUN_ZOO`, by default `~/.cache/chaosrun-zoo`.
"""


def folder() -> Path:
    """Where releases are installed. `site-packages` is part of the path, for dill pickles modules of other places."""
    cache = os.environ.get("CHAOSRUN_ZOO") or Path.home() / ".cache" / "chaosrun-zoo"
    return Path(cache).absolute() / "site-packages"


def install(releases: Sequence[str]) -> list[Path]:
    """The folders of these releases, each installed on its own if it is not there yet."""
    paths = []
    for release in releases:
        path = folder() / release.replace("==", "--")
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", scratch, release]
                subprocess.run(pip, check=True)
                # The scratch folder is for its owner alone.
                os.chmod(scratch, 0o755)
                os.rename(scratch, path)
                os.mkdir(scratch)
        paths.append(path)
    return paths


def name_of(bug: Bug, drill: Drill) -> str:
    return f"{bug.name}-{drill.of}"


def changes(drill: Drill) -> dict[str, object]:
    """What a drill changes in its bug's job. torch is never installed beside itself: its bugs are those of this environment."""
    beside = [release for release in drill.releases if not release.startswith("torch==")]
    changed: dict[str, object] = {"env.PYTHONPATH": os.pathsep.join(map(str, install(beside)))} if beside else {}
    if drill.kills is not None:
        changed["faults.schedule"] = [{"rank": rank, "at_step": step} for rank, step in drill.kills]
    return changed


def write_suite(path: Path, bugs: Sequence[Bug]) -> None:
    """All drills of these bugs as a suite. JSON is YAML."""
    drills = [
        {
            "name": name_of(bug, drill),
            "job": str(JOBS / f"{bug.name}.yaml"),
            "set": changes(drill),
            "expect": {"verdict": drill.verdict, **({"cause": drill.cause} if drill.cause else {})},
        }
        for bug in bugs
        for drill in bug.drills
    ]
    path.write_text(json.dumps({"name": "zoo", "drills": drills}, indent=1))


def row(bug: Bug, results: Mapping[str, DrillResult]) -> str:
    said = []
    for drill in bug.drills:
        result = results[name_of(bug, drill)]
        with_kills = f", killed at {', '.join(str(step) for _, step in drill.kills)}" if drill.kills else ""
        words = result.difference if result.status == "FAIL" and result.difference else result.cause or ""
        detail = "" if result.status == "PASS" else f": {words}"
        said.append(f"{drill.releases[0].replace('==', ' ')}{with_kills}: **{result.word}**{detail.replace('|', '/')}")
    thread = f"[{bug.thread.partition('/')[2]}]({bug.url})"
    return f"| {bug.library} | {thread} | {bug.wrong} | {'<br>'.join(said)} | `make zoo ARGS={bug.name}` |"


def page(results: Mapping[str, DrillResult]) -> str:
    table = ["| library | thread | what goes wrong | what chaosrun says | command |", "|---|---|---|---|---|"]
    return HEAD + "\n".join([*table, *(row(bug, results) for bug in BUGS)]) + "\n" + TAIL


def main() -> int:
    parser = argparse.ArgumentParser(prog="make zoo", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs to drill; default: all, and docs/zoo.md is written")
    wanted = parser.parse_args().names
    bugs = [bug for bug in BUGS if not wanted or any(fnmatch.fnmatch(bug.name, name) for name in wanted)]
    if not bugs:
        parser.error(f"no bug is named {' or '.join(wanted)}; there are {', '.join(bug.name for bug in BUGS)}")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "zoo.yaml"
        write_suite(path, bugs)
        whole = suite(SuiteRequest(path=path))
    results = {result.name: result for result in whole.drills}
    for result in results.values():
        found = result.difference or result.cause or ""
        print(f"{'ok   ' if result.ok else 'WRONG'} {result.name:32} {result.word:12} {found}")
        for surprise in result.surprises:
            print(f"      {surprise}")
    if not wanted:
        PAGE.write_text(page(results))
    return 0 if all(result.ok for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
