"""The runs under a root: their list, their state, and which one a name refers to."""

import os
import shlex
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

from chaosrun.errors import UsageError
from chaosrun.records.folders import called
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import default_root, root_arguments
from chaosrun.records.run_file import RunSummary, is_owner, own_leg, read_object, read_run
from chaosrun.records.supervision import is_supervised, read_supervision


def list_runs(root: Path | None = None) -> list[RunSummary]:
    """All runs under `root`, newest first."""
    folder = (default_root() if root is None else root) / "runs"
    runs = [RunLayout(path) for path in (folder.iterdir() if folder.is_dir() else ())]
    # A directory without run.json is a run being created, or not ours.
    summaries = (_summary(run) for run in runs if run.run_json.is_file())
    return sorted(filter(None, summaries), key=lambda summary: (-summary.created_s, summary.run_id))


def _summary(run: RunLayout) -> RunSummary | None:
    """None: it was removed meanwhile."""
    summary = partial(RunSummary, run_id=run.run_id, path=run.path)
    try:
        info = read_run(run)
        ended = read_object(run.verdict_json) if run.verdict_json.is_file() else None
    except UsageError:
        # One damaged run must not hide the others.
        with suppress(FileNotFoundError):
            return summary(name="?", status="damaged", created_s=run.run_json.stat().st_mtime)
        return None
    summary = partial(summary, name=info.name, created_s=info.created_s)
    if ended is not None:
        outcome, exit_code = ended.get("outcome"), ended.get("exit_code")
        return summary(
            status=str(ended.get("status", "damaged")),
            outcome=outcome if isinstance(outcome, str) else None,
            exit_code=exit_code if isinstance(exit_code, int) else None,
        )
    if is_supervised(run):
        return summary(status="running")
    return summary(status="interrupted", exit_code=_exit_code(run))


def _exit_code(run: RunLayout) -> int | None:
    """The exit code of the error that the last supervisor ended with; None if it was killed."""
    try:
        last = read_supervision(run)
    except UsageError:
        return None  # `status` reports the damage
    return None if last is None or last.error is None else last.error.exit_code


def find_run(ref: str, root: Path | None = None) -> RunLayout:
    """The run called `ref`: an id, a unique prefix of one, "latest", or the path of a run directory. Raises UsageError."""
    if os.sep in ref and os.path.isfile(RunLayout(Path(ref)).run_json):
        return RunLayout(Path(ref))
    if os.sep in ref and os.path.isdir(ref):
        raise UsageError(f"{ref} is not a run: run.json is missing", hint="`chaosrun list` shows the runs")
    if not ref:
        raise UsageError("the name of a run is empty", hint="`chaosrun list` shows the runs")
    found = called(ref, {summary.path: summary.created_s for summary in list_runs(root)})
    if found is None:
        place = default_root() if root is None else root
        listing = shlex.join(["chaosrun", "list", *root_arguments(place)])
        name = ref if len(ref) <= 80 else f"{ref[:80]}…"
        raise UsageError(f"no run {name!r} under {place}", hint=f"`{listing}` shows the runs; --root names another place")
    return RunLayout(found)


def remove_run(run: RunLayout) -> None:
    """The run, and its checkpoints where `checkpoint.storage` puts them."""
    from chaosrun.supervise.objects import remove_all_objects

    info = read_run(run)
    storage = own_leg(run, info, run.main).storage
    if storage is not None and is_owner(storage.parent, run.path, info):
        shutil.rmtree(storage.parent)
    remove_all_objects(run, run.path)
    run.run_json.unlink()  # first, so that a half-removed directory is not taken for a run
    shutil.rmtree(run.path)
