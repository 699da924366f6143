"""Faults in the form of a job file: as entries of a schedule, as YAML on one line, as overrides that replace a job's faults by
a schedule. Pure."""

import re
from collections.abc import Mapping, Sequence

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import RESTORE_PHASES
from chaosrun.records.grouping import grouped
from chaosrun.spec.model import JobSpec
from chaosrun.spec.tree import quoted

Entry = Mapping[str, int | float | str | None]
"""One entry of `faults.schedule`, as a job file writes it."""

PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
NO_TEXT = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""Words that YAML does not read as text."""
COUNTED = RESTORE_PHASES | {"rendezvous", "step", "reduce"}
"""Phases at which an entry without a step gives the occurrence."""


def as_entries(faults: Sequence[Fault], workers: int) -> list[Entry]:
    """The entries of `faults.schedule` that plan these faults; a group of all ranks is one entry."""
    entries = [_entry(fault) for fault in faults if fault.group is None]
    for members in grouped((fault for fault in faults if fault.group is not None), lambda fault: fault.group).values():
        if {fault.rank for fault in members} == set(range(workers)):
            entries.append({**_entry(members[0]), "rank": "all"})
        else:
            entries += map(_entry, members)
    return entries


def cleared(spec: JobSpec) -> list[str]:
    """Overrides that remove the job's faults other than the schedule."""
    return [f"faults.{key}=null" for key in ("random", "replay", "preset") if getattr(spec.faults, key) is not None]


def scheduled(schedule: Sequence[Entry]) -> str:
    """The override that replaces the job's schedule by this one."""
    return f"faults.schedule={flow(schedule)}"


def as_yaml(seed: int, schedule: Sequence[Entry]) -> str:
    """The part of a job file that plans these faults and no others."""
    lines = ["faults:", *([f"  seed: {seed}"] if seed else []), "  schedule:", *(f"    - {flow(entry)}" for entry in schedule)]
    return "".join(f"{line}\n" for line in lines)


def flow(value: object) -> str:
    """A JSON value as YAML on one line, without the quotes that it does not need."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{flow(key)}: {flow(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(flow, value))}]"
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in NO_TEXT:
        return value
    return quoted(value)


def _entry(fault: Fault) -> Entry:
    entry: dict[str, int | float | str | None] = {} if fault.kind == "kill" else {"kind": fault.kind}
    entry["rank"] = fault.rank
    if fault.phase is None:
        entry["after"] = fault.after_s
    elif fault.phase != fault.facts.default_phase:
        entry["phase"] = fault.phase
    if fault.at_step is not None:
        entry["at_step"] = fault.at_step
    if fault.occurrence > 1 or (fault.at_step is None and fault.phase in COUNTED):
        entry["occurrence"] = fault.occurrence
    if fault.attempt is not None:
        entry["attempt"] = fault.attempt
    if fault.target is not None:
        entry["file"] = fault.target
    # An option's key in the file lacks the unit of its name.
    entry.update({name.removesuffix("_s"): value for name, value in fault.options.items() if value is not None})
    return entry
