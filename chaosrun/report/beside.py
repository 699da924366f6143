"""What goes to stderr while stdout is kept for results: progress, and warnings."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from chaosrun.report.escapes import harmless

if TYPE_CHECKING:
    from chaosrun.records.layout import RunLayout
    from chaosrun.report.live import LiveProgress


@contextmanager
def progress(*, quiet: bool, run: "RunLayout | None" = None) -> "Iterator[LiveProgress | None]":
    """For as long as something runs. What libraries print meanwhile (Ray does, when an agent dies) is no data: to stderr."""
    if quiet:
        with redirect_stdout(sys.stderr):
            yield None
        return
    from chaosrun.report.live import LiveProgress, is_live_terminal

    with (
        redirect_stdout(sys.stderr),
        LiveProgress(sys.stderr, terminal=is_live_terminal(sys.stderr, os.environ), run=run) as live,
    ):
        yield live


def warn(sentences: Sequence[str]) -> None:
    """On stderr, where --quiet silences progress but no warning."""
    for sentence in sentences:
        print(f"warning: {harmless(sentence)}", file=sys.stderr)
