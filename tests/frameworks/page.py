"""docs/frameworks.md, made from the table of subjects and the versions of constraints.txt.

`python -m tests.frameworks.page` writes it anew.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from chaosrun.verify.codes import TABLE
from tests.frameworks.subjects import FRAMEWORKS, TEMPLATES, Framework, Subject

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "frameworks.md"
PARAMETER = re.compile(r"\{(\w+)[^}]*\}")
HEAD = """\
# Frameworks

The verdicts on typical training scripts: each saves and resumes with its framework's own functions, none imports chaosrun.
The tests in `tests/frameworks` drill the script of every row, with the versions named here, and compare the verdict with the
row's; `make nightly` runs them all. `chaosrun init --template NAME` writes the scripts marked with it.

A FAIL is about the variant in its row: the row above it shows the correct one.
"""


def page() -> str:
    return "\n".join([HEAD, *(line for framework in FRAMEWORKS for line in _section(framework))])


def _section(framework: Framework) -> Iterator[str]:
    pinned = dict(re.findall(r"^([^#=\s]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    yield f"## {framework.title}\n"
    yield f"{', '.join(f'{package} {pinned[package]}' for package in framework.packages)}, on CPUs with gloo.\n"
    yield "| script | ranks | faults | verdict |"
    yield "|---|---|---|---|"
    for subject in framework.subjects:
        yield f"| {_what(subject)} | {subject.workers} | {_faults(subject)} | {_verdict(subject)} |"
    yield ""


def _what(subject: Subject) -> str:
    if subject.path.is_relative_to(TEMPLATES) and not subject.change and not subject.launch:
        return f"{subject.what} (`init --template {subject.path.parent.name}`)"
    return f"{subject.what}{f' (`{subject.script} {chr(32).join(subject.args)}`)' if subject.args else ''}"


def _faults(subject: Subject) -> str:
    word = {"kill": "SIGKILL", "preempt": "SIGTERM"}[subject.kind]
    return f"{word} {', '.join(f'rank {rank} at step {step}' for rank, step in subject.kills)}"


def _verdict(subject: Subject) -> str:
    if subject.verdict == "FAIL":
        return f"FAIL: {PARAMETER.sub(_plain, TABLE[subject.cause].sentence)} ([`{subject.cause}`](causes.md))"
    return "PASS, bit-identical"


def _plain(parameter: re.Match[str]) -> str:
    """ "{batches:batch}" as "batches"."""
    return parameter[1]


if __name__ == "__main__":
    PAGE.write_text(page())
