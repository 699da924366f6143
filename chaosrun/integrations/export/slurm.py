"""A Slurm batch script: a Ray across the job's nodes, one drill or suite on it, gone on with after a preemption."""

import math

from chaosrun.errors import UsageError
from chaosrun.integrations.export.rendering import render
from chaosrun.integrations.export.subject import Subject
from chaosrun.wording import count

DEFAULT_TIME_S = 2 * 3600
SETUP_TIME_S = 15 * 60
"""What Ray, both legs and the verdict take beside the job's own time."""


def script(subject: Subject, *, nodes: int = 1) -> str:
    """The script's text. Raises UsageError for a number of nodes that cannot be."""
    if not 1 <= nodes <= subject.workers:
        raise UsageError(
            f"{nodes} nodes are not for {count(subject.workers, 'worker')}",
            hint=f"give --nodes a number from 1 to {subject.workers}",
        )
    a_node = math.ceil(subject.workers / nodes)
    limit_s = DEFAULT_TIME_S if subject.timeout_s is None else subject.timeout_s + SETUP_TIME_S
    return render(
        "slurm.sh.j2",
        name=subject.name,
        suite=subject.suite,
        command=subject.command(str(subject.path)),
        project=str(subject.project),
        nodes=nodes,
        cpus=subject.cpus(a_node),
        gpu=subject.gpu,
        a_node=a_node,
        time=_clock(limit_s),
    )


def _clock(seconds: float) -> str:
    """hours:minutes:seconds, as Slurm reads it."""
    whole = math.ceil(seconds)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}"
