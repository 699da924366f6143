"""A GitHub Actions workflow that runs a job's drill, or a suite, each night and on pull requests."""

import hashlib

from chaosrun.errors import UsageError
from chaosrun.integrations.export.rendering import checked, render

MOST_SHARDS = 256
"""Jobs that one matrix of GitHub may have."""
INSTALL = """\
if [ -f requirements.txt ]; then python -m pip install --requirement requirements.txt; fi
python -m pip install "$CHAOSRUN_REQUIREMENT\""""


def workflow(
    job: str,
    *,
    suite: bool = False,
    title: str = "chaosrun",
    shards: int = 1,
    cron: str = "17 3 * * *",
    python: str = "3.12",
    install: str | None = None,
    timeout_min: int = 60,
) -> str:
    """The workflow's text. `job`: path of the job file (with `suite`, of a suite) from the repository's root, with slashes.

    `install`: shell commands that install $CHAOSRUN_REQUIREMENT and what the script needs. Raises UsageError for shards of
    a job, which is one drill, and for names that no script can hold.
    """
    if shards != 1 and not suite:
        raise UsageError("a job is one drill, which cannot be sharded", hint="write a suite, or leave out --shards")
    if not 1 <= shards <= MOST_SHARDS:
        raise UsageError(f"{shards} is no number of shards", hint=f"give --shards a number from 1 to {MOST_SHARDS}")
    return render(
        "github.yml.j2",
        job=checked(job, "the path"),
        # One repository may have several workflows: their caches are their own.
        mark=hashlib.sha256(job.encode()).hexdigest()[:8],
        suite=suite,
        title=checked(title, "the name"),
        shards=list(range(1, shards + 1)),
        cron=checked(cron, "the schedule"),
        python=checked(python, "the version"),
        install=(install or INSTALL).strip().splitlines(),
        timeout_min=timeout_min,
    )
