"""`python -m chaosrun.supervise.process`: supervises one run for a command that only follows it, in a session of its own.

It is told on its standard input, and tells on its standard output, one JSON line each:

    → {run, address}       which run, before anything else        ← {supervises: pid}     the run's lock is held
    → {say: "cancel"}      end it in order                        ← {detached: true}      from now on nobody holds it
    → {say: "detach"}      go on alone                            ← {error} or {done}     the last thing that it tells

When the input ends and it has not been detached, whoever began the drill is gone, and it is cancelled: no drill goes on that
nobody follows, unless somebody wished so. What it prints goes to the run's supervisor.log.
"""

import json
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from chaosrun import api
from chaosrun.errors import ChaosrunError
from chaosrun.records.layout import RunLayout
from chaosrun.records.supervision import described
from chaosrun.report.beside import progress


class _Ties:
    """Both ends of the pipes to the command that began the drill."""

    def __init__(self) -> None:
        # Out of the way: nothing that is started here may read or write there.
        self.commands: BinaryIO = os.fdopen(os.dup(0), "rb")
        self._telling = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._over = False
        self._interrupted = False

    def tell(self, **what: Any) -> None:
        with suppress(BrokenPipeError):  # nobody follows any more
            os.write(self._telling, json.dumps(what).encode() + b"\n")

    def hold(self) -> None:
        """Do what is said, until detached or let go."""
        for line in self.commands:
            if json.loads(line)["say"] == "detach":
                self.tell(detached=True)
                return
            self._interrupt()
        if not self._interrupted:
            self._interrupt()

    def let_go(self) -> None:
        """The drill is over: nothing is interrupted from now on."""
        with self._lock:
            self._over = True

    def _interrupt(self) -> None:
        """A second time it does not wait for a cluster that is being started: see `Interrupts.postponed`."""
        with self._lock:
            if not self._over:
                self._interrupted = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def main() -> int:
    # Whatever this process inherited. A handler, not SIG_IGN, which the workers would inherit.
    signal.signal(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ties = _Ties()
    first = ties.commands.readline()
    if not first.endswith(b"\n"):
        return 130  # the command was gone before it could say anything
    order = json.loads(first)
    run = RunLayout(Path(order["run"]))
    try:
        threading.Thread(target=ties.hold, name="chaosrun-ties", daemon=True).start()
        exit_code = _supervise(run, order["address"], ties)
    except BaseException as error:
        ties.let_go()
        if not isinstance(error, ChaosrunError | KeyboardInterrupt):
            traceback.print_exc()
        about = described(error, run)
        print(f"error: {about['message']}", file=sys.stderr)
        ties.tell(error=about)
        return about["exit_code"]
    ties.let_go()
    ties.tell(done=True)
    return exit_code


def _supervise(run: RunLayout, address: str | None, ties: _Ties) -> int:
    with progress(quiet=False, run=run) as live:
        assert live is not None

        def heard(record: dict[str, Any]) -> None:
            if record["event"] == "run.created":
                ties.tell(supervises=os.getpid())
            live.on_event(record)

        return api.resume(run, address=address, on_event=heard).verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
