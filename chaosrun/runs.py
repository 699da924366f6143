"""The runs under a root: which there are, how each of them stands, and which one a name means."""

import os
from pathlib import Path

from chaosrun.errors import UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.records.runs import RunSummary

__all__ = ["default_root", "find_run", "list_runs"]


def default_root() -> Path:
    """Where runs are kept: $CHAOSRUN_ROOT, else .chaosrun in the working directory."""
    return Path(os.environ.get("CHAOSRUN_ROOT") or ".chaosrun")


def list_runs(root: Path | None = None) -> list[RunSummary]:
    """All runs under `root`, newest first."""
    from chaosrun.records.run_file import read_object, read_run
    from chaosrun.supervise.drill import is_supervised

    folder = (default_root() if root is None else root) / "runs"
    summaries = []
    for path in folder.iterdir() if folder.is_dir() else ():
        run = RunLayout(path)
        if not run.run_json.is_file():
            continue  # being created, or not ours
        try:
            info = read_run(run)
            ended = read_object(run.verdict_json) if run.verdict_json.is_file() else None
        except UsageError:
            # One damaged run must not hide the others.
            created_s = run.run_json.stat().st_mtime
            summaries.append(RunSummary(run_id=run.run_id, name="?", status="damaged", created_s=created_s, path=path))
            continue
        if ended is not None:
            status = str(ended.get("status", "damaged"))
        else:
            status = "running" if is_supervised(run) else "interrupted"
        summaries.append(
            RunSummary(run_id=run.run_id, name=info["spec"]["name"], status=status, created_s=info["created_s"], path=path)
        )
    return sorted(summaries, key=lambda summary: (-summary.created_s, summary.run_id))


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"


def find_run(ref: str, root: Path | None = None) -> RunLayout:
    """The run called `ref`: an id, a unique prefix of one, "latest", or the path of a run directory. Raises UsageError."""
    if os.sep in ref and os.path.isfile(RunLayout(Path(ref)).run_json):
        return RunLayout(Path(ref))
    if not ref:
        raise UsageError("the name of a run is empty", hint="`chaosrun list` shows the runs")
    runs = list_runs(root)
    if ref == "latest" and runs:
        return RunLayout(runs[0].path)
    exact = [summary for summary in runs if summary.run_id == ref]
    matches = exact or [summary for summary in runs if summary.run_id.startswith(ref)]
    if len(matches) == 1:
        return RunLayout(matches[0].path)
    place = default_root() if root is None else root
    if not matches:
        hint = "`chaosrun list` shows the runs; --root names another place"
        raise UsageError(f"no run {_shortened(ref)!r} under {place}", hint=hint)
    some = ", ".join(summary.run_id for summary in matches[:5])
    raise UsageError(f"{ref!r} could be any of {len(matches)} runs: {some}", hint="write more of the name")
