"""What `status` and `logs` print of a run, also while it goes on: loops over files until nobody supervises it any more."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from chaosrun.records.layout import RunLayout
from chaosrun.report.output import write_json, write_out

if TYPE_CHECKING:
    from chaosrun.report.sentences import Told

POLL_S = 0.2


def watch_status(run: RunLayout, *, quiet: bool, output: str) -> None:
    """Until the run ends: the live view on stderr, or JSON lines on stdout."""
    from chaosrun.supervise.drill import is_supervised

    if output != "json":
        if quiet or not is_supervised(run):
            _until_ended(run, lambda: True)
            return
        from chaosrun.report.live import is_live_terminal, watch

        watch(
            run,
            stream=sys.stderr,
            terminal=is_live_terminal(sys.stderr, os.environ),
            ended=lambda: not is_supervised(run),
        )
        return
    from chaosrun.report.follow import RunFollower
    from chaosrun.report.status import read_status

    follower, last = RunFollower(run, whole=False), None

    def tell() -> bool:
        nonlocal last
        now = read_status(run, supervised=is_supervised(run), follower=follower).to_json()
        # What is left of the time changes by itself.
        lasting = {key: value for key, value in now.items() if key != "eta_s"}
        if lasting == last:
            return True
        last = lasting
        return _write_lines([now])

    _until_ended(run, tell)


def print_logs(run: RunLayout, *, leg: str | None, attempt: int | None, rank: int | None, quiet: bool, output: str) -> None:
    from chaosrun.report.escapes import harmless
    from chaosrun.report.logs import last_written, read_log, rest_sentence, select_logs
    from chaosrun.supervise.drill import is_supervised

    chosen = select_logs(run, leg=leg, attempt=attempt, rank=rank)
    if output == "json":
        about = [
            {"leg": log.leg, "attempt": log.attempt, "rank": log.rank, "path": str(log.path.absolute()), "text": read_log(log)}
            for log in chosen
        ]
        write_json({"v": 1, "run": run.run_id, "logs": about})
        return
    if not quiet and attempt is None and (rest := rest_sentence(run, chosen[0], ended=not is_supervised(run))):
        print(rest, file=sys.stderr)
    for log in chosen:
        # As tail(1) has it: a single file needs no heading.
        heading = f"==> {log.leg}, attempt {log.attempt}, rank {log.rank} <==\n" if len(chosen) > 1 else ""
        text = read_log(log)
        if sys.stdout.isatty():
            text = "\n".join(harmless(last_written(line)) for line in text.split("\n"))
        write_out(heading + text + ("" if text.endswith("\n") or not text else "\n"))


def follow_logs(run: RunLayout, *, leg: str | None, attempt: int | None, rank: int | None, output: str) -> None:
    """From the last attempt on; of a run that has ended, all of them. Raises UsageError when there never was such a log."""
    from chaosrun.report.escapes import harmless
    from chaosrun.report.logs import LogFollower, LogLine, select_logs
    from chaosrun.supervise.drill import is_supervised

    follower = LogFollower(run, leg=leg, attempt=attempt, rank=rank, whole=not is_supervised(run))
    is_only_one = attempt is not None and rank is not None
    shown = harmless if sys.stdout.isatty() else str

    def write(lines: Iterable[LogLine]) -> bool:
        if output == "json":
            return _write_lines(
                {"v": 1, "leg": line.log.leg, "attempt": line.log.attempt, "rank": line.log.rank, "line": line.text}
                for line in lines
            )
        return _write("".join(f"{'' if is_only_one else f'{line.origin} | '}{shown(line.text)}\n" for line in lines))

    _until_ended(run, lambda: write(follower.poll()), or_when=lambda: follower.is_complete)
    write(follower.over())
    if not follower.has_found:
        select_logs(run, leg=leg, attempt=attempt, rank=rank)


def print_events(run: RunLayout, *, leg: str | None, attempt: int | None, rank: int | None, follow: bool, output: str) -> None:
    from chaosrun.report.follow import RunFollower

    follower, about = RunFollower(run), {"attempt": attempt, "rank": rank}

    def news() -> "list[Told]":
        told = [entry for entry in follower.poll_events() if leg in (None, entry.leg)]
        return [entry for entry in told if all(value in (None, entry.field(name)) for name, value in about.items())]

    if output == "json" and not follow:
        write_json({"v": 1, "run": run.run_id, "events": [told.to_json() for told in news()]})
        return

    def tell() -> bool:
        fresh = news()
        if output == "json":
            return _write_lines({"v": 1, **told.to_json()} for told in fresh)
        began_s = follower.picture.facts.created_s
        return _write("".join(f"{told.dated_line(began_s)}\n" for told in fresh))

    if follow:
        _until_ended(run, tell)
    else:
        tell()


def _until_ended(run: RunLayout, tell: Callable[[], bool], *, or_when: Callable[[], bool] = lambda: False) -> None:
    """Call `tell` again and again, once more after the end; until it says that nobody reads any more."""
    from chaosrun.supervise.drill import is_supervised

    while True:
        # Asked first: what was written before the end is then there to be read.
        over = or_when() or not is_supervised(run)
        if not tell() or over:
            return
        time.sleep(POLL_S)


def _write_lines(values: Iterable[Mapping[str, Any]]) -> bool:
    return _write("".join(f"{json.dumps(value)}\n" for value in values))


def _write(text: str) -> bool:
    return write_out(text) if text else True
