"""What a command shows: pages on stdout, progress on stderr."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from chaosrun.report.output import has_colour, page_width, rendered, write_json, write_out

if TYPE_CHECKING:
    from chaosrun.records.layout import RunLayout
    from chaosrun.report.ticker import Ticker
    from chaosrun.supervise.guard import SupervisorProcess
    from chaosrun.verify.verdict import Verdict


def page(renderable: Any) -> str:
    return rendered(renderable, width=page_width(), colour=has_colour(sys.stdout, os.environ))


@contextmanager
def ticking(*, quiet: bool) -> "Iterator[Ticker | None]":
    """As `report.live.progress`, for many drills."""
    if quiet:
        with redirect_stdout(sys.stderr):
            yield None
        return
    from chaosrun.report.live import is_live_terminal
    from chaosrun.report.ticker import Ticker

    ticker = Ticker(sys.stderr, terminal=is_live_terminal(sys.stderr, os.environ))
    try:
        with redirect_stdout(sys.stderr):
            yield ticker
    finally:
        ticker.close()


def watch_drill(process: "SupervisorProcess", *, quiet: bool) -> None:
    """Until the process that supervises it has ended."""
    if quiet:
        process.wait()
        return
    from chaosrun.report.live import is_live_terminal, watch

    watch(process.run, stream=sys.stderr, terminal=is_live_terminal(sys.stderr, os.environ), ended=process.ended)


def show_verdict(run: "RunLayout", verdict: "Verdict", output: str) -> None:
    if output == "json":
        write_json({"v": 1, "run": run.run_id, "path": str(run.path.absolute()), "verdict": verdict.to_json()})
    else:
        from chaosrun.report.text import render_text
        from chaosrun.report.view import read_view

        write_out(page(render_text(read_view(run, verdict))))
