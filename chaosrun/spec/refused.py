"""What a planner refuses, shown at the entries of the job file that ask for it."""

import re
from collections.abc import Sequence

from chaosrun.errors import SpecError
from chaosrun.spec.problems import Problem, spec_error
from chaosrun.spec.source import Job
from chaosrun.spec.tree import find

ENTRY = re.compile(r"(?P<path>faults(?:\.\w+|\[\d+\])*): ")
PART = re.compile(r"(?P<name>\w+)|\[(?P<index>\d+)\]")


def refused(job: Job, reasons: Sequence[str], hint: str) -> SpecError:
    """One error with a place for each of the reasons, which begin with an entry: "faults.schedule[0]: …"."""
    problems = []
    for reason in reasons:
        named = ENTRY.match(reason)
        parts = PART.finditer(named["path"] if named else "")
        path = tuple(part["name"] if part["name"] else int(part["index"]) for part in parts)
        key, node = find(job.tree, path)
        # An entry of a list has no key; what is written is shown, or the first line of it.
        problems.append(Problem(place=key or node.place, message=reason))
    return SpecError(spec_error(problems).message, hint=hint)
