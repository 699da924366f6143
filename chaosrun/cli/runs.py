"""Commands about existing runs, live or ended: parse, call `chaosrun.api`, print, return the exit code."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from chaosrun import api
from chaosrun.cli.options import OUT, Out, Root, Run, show
from chaosrun.errors import InterruptedRunError, UsageError
from chaosrun.records.layout import LEGS, RunLayout
from chaosrun.records.naming import default_root, run_argument
from chaosrun.report.escapes import harmless
from chaosrun.report.output import printed, write_json, write_out, write_product

if TYPE_CHECKING:
    from chaosrun.report.sentences import EventText

Leg = Annotated[Literal["reference", "chaos", "confirm", "run"] | None, Parameter(help="Default: chaos/run, else reference.")]


def list_(*, root: Root = None, out: Out = OUT) -> int:
    """List the runs, newest first."""
    from chaosrun.report.text import render_runs

    runs = api.list_runs(root)
    same = ("name", "status", "outcome", "exit_code", "created_s")
    fields = [
        {"run": run.run_id, **{name: getattr(run, name) for name in same}, "path": str(run.path.absolute())} for run in runs
    ]
    return show(
        out, lambda: {"v": 1, "runs": fields}, lambda: render_runs(runs, root=root or default_root(), now_s=time.time())
    )


def status(
    run: Run,
    /,
    *,
    watch: Annotated[bool, Parameter(name=["--watch", "-w"], help="Show it live until the run ends.")] = False,
    root: Root = None,
    out: Out = OUT,
) -> int:
    """Say what a run is doing, or how it ended.

    With --watch and -o json: a JSON object whenever something has changed, one a line. Ctrl-C leaves a watched run as it is.
    """
    from chaosrun.records.supervision import is_supervised
    from chaosrun.report.status import read_status, status_lines

    layout = api.find_run(run, root)
    if watch:
        try:
            _watch_status(layout, out)
        except KeyboardInterrupt:
            if not out.is_json:
                print(f"run {layout.run_id} continues", file=sys.stderr)
            return InterruptedRunError.exit_code  # only the watching has ended, not the run
        if out.is_json:
            return printed()
    seen = read_status(layout, supervised=is_supervised(layout))
    return show(out, seen.to_json, lambda: "".join(f"{line}\n" for line in status_lines(seen, now_s=time.time())))


def logs(
    run: Run,
    /,
    *,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], help="Keep printing what comes, until the run ends.")] = False,
    events: Annotated[bool, Parameter(help="Print events, as sentences, instead of what the workers wrote.")] = False,
    leg: Leg = None,
    attempt: Annotated[int | None, Parameter(help="Default: the leg's last attempt.")] = None,
    rank: Annotated[int | None, Parameter(help="Default: every rank.")] = None,
    root: Root = None,
    out: Out = OUT,
) -> int:
    """Print what the workers, and the command that started them, wrote to stdout and stderr.

    With --follow: also later attempts and legs, each line after its leg/attempt/rank; all attempts if the run has ended.
    With --events: all events, or those about this leg, attempt, rank. With --follow and -o json: a JSON object a line.
    """
    layout = api.find_run(run, root)
    try:
        if events:
            _print_events(layout, leg=leg, attempt=attempt, rank=rank, follow=follow, out=out)
        elif follow:
            _follow_logs(layout, leg=leg, attempt=attempt, rank=rank, out=out)
        else:
            _print_logs(layout, leg=leg, attempt=attempt, rank=rank, out=out)
    except KeyboardInterrupt:
        if not follow:
            raise
        return InterruptedRunError.exit_code
    return printed()


def trace(
    run: Run,
    /,
    *,
    leg: Leg = None,
    attempt: Annotated[int | None, Parameter(help="Default: every attempt.")] = None,
    rank: Annotated[int | None, Parameter(help="Default: every rank.")] = None,
    root: Root = None,
    out: Out = OUT,
) -> int:
    """Print what the ranks recorded, a JSON object a line: what `verify` compares. docs/traces.md explains them."""
    from chaosrun.records.codec import encode
    from chaosrun.records.trace_reader import all_records, trace_files

    layout = api.find_run(run, root)
    name = leg or (layout.main if layout.leg(layout.main).attempts() else "reference")
    found = [place for place in trace_files(layout.leg(name)) if attempt in (None, place[0]) and rank in (None, place[1])]
    if not found:
        hint = f"`chaosrun status {run_argument(layout)}` tells what there is"
        raise UsageError(f"there is no such trace of the {name} leg", hint=hint)
    for number, of, path in found:
        for record in all_records(path, 0, 0):
            # The origin of its file, so that each line names its source.
            about = {"leg": name, "attempt": number, "rank": of}
            if not write_out(json.dumps({**about, **json.loads(encode(record))}) + "\n"):
                return printed()
    return printed()


def report(
    run: Run,
    /,
    *,
    format: Annotated[
        Literal["html", "junit", "markdown", "tensorboard", "text"],
        Parameter(
            help="html: one page that needs nothing else; junit: XML for CI systems; markdown: for a job summary; tensorboard: "
            "event files (needs chaosrun[tensorboard]); text: what `verify -v` prints."
        ),
    ] = "html",
    to: Annotated[
        str | None,
        Parameter(
            help="A file, a directory for tensorboard, or - for stdout. Default: a file in the run's own directory.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    root: Root = None,
    out: Out = OUT,
) -> int:
    """Write a report of a run, judged again from its files, and print where it is.

    Exit code 0 when it is written, whatever the verdict: `chaosrun verify` ends with the verdict's own.
    """
    if to is not None and to.startswith("-") and to != "-":
        raise UsageError(f"--to {to}: not a path", hint=f"a file of that name is ./{to}")
    if to == "-" and out.is_json:
        raise UsageError("the report and JSON would both go to stdout", hint="leave out --to - or -o json")
    made = api.report(api.find_run(run, root), format=format, to=to)
    if made.text is not None:
        return write_product(made.text)
    told = {"format": format, "path": str(made.path and made.path.absolute()), "verdict": made.verdict.status}
    show(out, lambda: {"v": 1, "run": made.run_id, **told}, lambda: f"{made.path}\n")
    return 0


def _watch_status(run: RunLayout, out: Out) -> None:
    """Show the live view on stderr, or JSON lines on stdout, until the run ends."""
    from chaosrun.records.supervision import is_supervised

    if not out.is_json and (out.quiet or not is_supervised(run)):
        _until_ended(run, lambda: True)
        return
    if not out.is_json:
        from chaosrun.report.live import is_live_terminal, watch

        terminal = is_live_terminal(sys.stderr, os.environ)
        watch(run, stream=sys.stderr, terminal=terminal, ended=lambda: not is_supervised(run))
        return
    from chaosrun.report.follow import RunFollower
    from chaosrun.report.status import read_status

    follower, last = RunFollower(run), None

    def tell() -> bool:
        nonlocal last
        now = read_status(run, supervised=is_supervised(run), follower=follower).to_json()
        # The remaining time changes by itself.
        lasting = {key: value for key, value in now.items() if key != "eta_s"}
        if lasting == last:
            return True
        last = lasting
        return _write_lines([now])

    _until_ended(run, tell)


def _print_logs(run: RunLayout, *, leg: str | None, attempt: int | None, rank: int | None, out: Out) -> None:
    from chaosrun.report.logs import last_written, read_log, select_logs

    chosen = select_logs(run, leg=leg, attempt=attempt, rank=rank)
    if out.is_json:
        about = [
            {"leg": log.leg, "attempt": log.attempt, "rank": log.rank, "path": str(log.path.absolute()), "text": read_log(log)}
            for log in chosen
        ]
        write_json({"v": 1, "run": run.run_id, "logs": about})
        return
    if not out.quiet and attempt is None and sum(len(run.leg(name).attempts()) for name in LEGS) > 1:
        told = f"this is attempt {chosen[0].attempt} of the {chosen[0].leg} leg; --attempt, --leg and -f show others"
        print(told, file=sys.stderr)
    for log in chosen:
        # As tail(1) does: no heading for a single file.
        heading = f"==> {log.heading} <==\n" if len(chosen) > 1 else ""
        text = read_log(log)
        if sys.stdout.isatty():
            text = "\n".join(harmless(last_written(line)) for line in text.split("\n"))
        write_out(heading + text + ("" if text.endswith("\n") or not text else "\n"))


def _follow_logs(run: RunLayout, *, leg: str | None, attempt: int | None, rank: int | None, out: Out) -> None:
    """Print logs from the last attempt on; all attempts of an ended run. Raises UsageError when there never was such a log."""
    from chaosrun.records.supervision import is_supervised
    from chaosrun.report.logs import LogFollower, LogLine, select_logs

    follower = LogFollower(run, leg=leg, attempt=attempt, rank=rank, whole=not is_supervised(run))
    is_only_one = attempt is not None and rank is not None
    shown = harmless if sys.stdout.isatty() else str

    def write(lines: Iterable[LogLine]) -> bool:
        if out.is_json:
            return _write_lines(
                {"v": 1, "leg": line.log.leg, "attempt": line.log.attempt, "rank": line.log.rank, "line": line.text}
                for line in lines
            )
        return _write("".join(f"{'' if is_only_one else f'{line.log.origin} | '}{shown(line.text)}\n" for line in lines))

    _until_ended(run, lambda: write(follower.poll()), or_when=lambda: follower.is_complete)
    write(follower.over())
    if not follower.has_found:
        select_logs(run, leg=leg, attempt=attempt, rank=rank)


def _print_events(run: RunLayout, *, leg: str | None, attempt: int | None, rank: int | None, follow: bool, out: Out) -> None:
    from chaosrun.report.follow import RunFollower
    from chaosrun.report.sentences import folded

    follower, about = RunFollower(run), {"attempt": attempt, "rank": rank}

    def news() -> "list[EventText]":
        told = [entry for entry in follower.poll_events() if leg in (None, entry.leg)]
        return [entry for entry in told if all(value in (None, entry.field(name)) for name, value in about.items())]

    if out.is_json and not follow:
        write_json({"v": 1, "run": run.run_id, "events": [told.to_json() for told in news()]})
        return

    def tell() -> bool:
        fresh = news()
        if out.is_json:
            return _write_lines({"v": 1, **told.to_json()} for told in fresh)
        began_s = follower.picture.facts.created_s
        return _write("".join(f"{told.dated_line(began_s)}\n" for told in folded(fresh)))

    _until_ended(run, tell, or_when=lambda: not follow)


def _until_ended(run: RunLayout, tell: Callable[[], bool], *, or_when: Callable[[], bool] = lambda: False) -> None:
    """Call `tell` repeatedly, and once more after the run's end, unless `tell` returns that the reader is gone."""
    from chaosrun.records.supervision import looks

    for end in looks(run, None):
        # Checked before `tell`, which then reads everything written before the end.
        over = or_when() or end
        if not tell() or over:
            return


def _write_lines(values: Iterable[Mapping[str, object]]) -> bool:
    return _write("".join(f"{json.dumps(value)}\n" for value in values))


def _write(text: str) -> bool:
    return write_out(text) if text else True
