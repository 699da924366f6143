"""`python -m chaosrun.cli.supervisor`: the supervisor of a drill that a command follows, or has detached.

Like `chaosrun.supervise.process`, with the additions of `submit` and `resume`: reports, and progress, which is its log.
"""

import sys

from chaosrun import api
from chaosrun.records.events import EventRecord
from chaosrun.records.layout import RunLayout
from chaosrun.report.live import progress
from chaosrun.supervise import process
from chaosrun.supervise.run import Listener


def supervise(run: RunLayout, address: str | None, on_record: Listener) -> int:
    with progress(quiet=False, run=run) as show:
        assert show is not None

        def on_event(record: EventRecord) -> None:
            on_record(record)
            show(record)

        return api.resume(run, address=address, on_event=on_event).verdict.exit_code


if __name__ == "__main__":
    sys.exit(process.main(supervise))
