"""`make zoo`: install the releases side by side, drill every bug of the catalogue with each, compare the verdicts with what
they should be, and write docs/zoo.md."""

import argparse
import fnmatch
import json
import os
import re
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
A drill by hand puts its releases first on Python's path, by a job's `env.PYTHONPATH`: each lies in a folder of its own, such as
`site-packages/accelerate--1.14.0`, below `CHAOSRUN_ZOO`, by default `~/.cache/chaosrun-zoo`.
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


def said(result: DrillResult) -> str:
    """What chaosrun said, for the page."""
    words = re.sub(r"/\S*/(\w+/output/)", r"\1", result.cause or result.error or "")
    return f"**{result.word}**" + ("" if result.status == "PASS" else f": {words.replace('|', '/')}")


def row(bug: Bug, kept: Mapping[str, str]) -> str:
    cells = []
    for drill in bug.drills:
        killed = f", killed after {', '.join(str(step) for _, step in drill.kills)}" if drill.kills else ""
        release = drill.releases[0].replace("==", " ")
        cells.append(f"{release}{killed}: {kept.get(name_of(bug, drill), 'not drilled yet')}")
    thread = f"[{bug.thread.partition('/')[2]}]({bug.url})"
    return f"| {bug.library} | {thread} | {bug.wrong} | {'<br>'.join(cells)} | `make zoo ARGS={bug.name}` |"


def page(kept: Mapping[str, str]) -> str:
    table = ["| library | thread | what goes wrong | what chaosrun says | command |", "|---|---|---|---|---|"]
    return HEAD + "\n".join([*table, *(row(bug, kept) for bug in BUGS)]) + "\n" + TAIL


def keep(results: Sequence[DrillResult]) -> None:
    """Remember what was said, and write the page of all that was ever said."""
    path = folder().parent / "said.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **{result.name: said(result) for result in results if not result.rerun}}, indent=1))
    PAGE.write_text(page(json.loads(path.read_text())))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make zoo", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs to drill, or patterns; default: all")
    wanted = parser.parse_args().names
    bugs = [bug for bug in BUGS if not wanted or any(fnmatch.fnmatch(bug.name, name) for name in wanted)]
    if not bugs:
        parser.error(f"no bug is named {' or '.join(wanted)}; there are {', '.join(bug.name for bug in BUGS)}")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "zoo.yaml"
        write_suite(path, bugs)
        whole = suite(SuiteRequest(path=path))
    for result in whole.drills:
        print(f"{'ok   ' if result.ok else 'WRONG'} {result.name:32} {result.word:12} {result.cause or result.error or ''}")
        for surprise in result.surprises:
            print(f"      {surprise}")
    keep(whole.drills)
    return 0 if whole.drills and not whole.left and all(result.ok for result in whole.drills) else 1


if __name__ == "__main__":
    sys.exit(main())
