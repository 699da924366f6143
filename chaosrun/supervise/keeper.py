"""Keeping a run whose plan ends the very process that supervises it: the drill runs in a child, and one that was killed on plan
is started again.

`carry_out` runs every drill; one without such faults in this process. `python -m chaosrun.supervise.keeper` is the child:
it tells, one JSON line each on its standard output, every record, and at last how it ended. Decides nothing about the drill:
what a killed child had done, and whether what it died of can be seen, the next one reads from the run's files, as
`chaosrun resume` does.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.errors import ChaosrunError, RecoveryError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.processes import with_package
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.supervision import described, raised_again
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.run import Listener, execute

if TYPE_CHECKING:
    from chaosrun.verify.verdict import Verdict


def carry_out(
    run: RunLayout,
    root: Path,
    address: str | None,
    listener: Listener,
    interrupts: Interrupts,
    report: "Callable[[Verdict], Sequence[str]]" = lambda verdict: (),
) -> "Verdict":
    """Do what is left to do of a run, judge it and `report` the verdict, whose warnings that returns; its supervisor.json says
    how that went.

    With a fault in its plan that ends the supervisor, in a child process: on a Ray of that process's own, or the one at
    `address`. Raises what the child raised, RecoveryError when it died and no planned fault explains that.
    """
    from chaosrun.supervise.drill import supervised

    interrupts.check(run)
    with supervised(run) as (lock, warnings):
        if _deadly(run):
            verdict = _keep(run, root, address, listener, interrupts, lock)
        else:
            verdict = execute(run, root, address, listener, interrupts)
        warnings += report(verdict)
        return verdict


def _keep(run: RunLayout, root: Path, address: str | None, listener: Listener, interrupts: Interrupts, lock: int) -> "Verdict":
    from chaosrun.verify.verdict import judge

    listener({"leg": None, "event": "run.created", "run": run.run_id, "path": str(run.path)})
    while True:
        struck_before = _struck(run)
        with _Child(run, root, address, interrupts, lock) as child:
            told = child.listen(listener)
        if told.get("done"):
            return judge(run)
        if told.get("error"):
            raise raised_again(told["error"], run)
        new = _struck(run) - struck_before
        if not new:
            raise RecoveryError(
                f"the process that supervised the drill (pid {child.pid}) ended {child.ended()}, and no planned fault says so",
                hint=f"`chaosrun resume {run_argument(run)}` goes on with the run",
            )
        listener({"leg": None, "event": "supervisor.ended", "pid": child.pid, "faults": sorted(new)})


def _deadly(run: RunLayout) -> list[Fault]:
    """Faults that end a supervisor; one may have come to the plan since."""
    plan = FaultPlan.from_json(json.loads(run.plan_json.read_text()))
    return [fault for fault in plan.faults if fault.facts.evidence == "successor"]


def _struck(run: RunLayout) -> set[str]:
    """The faults of which a supervisor has written down that it dies of them."""
    from chaosrun.records.markers import read_marker, read_note
    from chaosrun.supervise.drill import leg_of

    leg = leg_of(run, "chaos")
    return {fault.id for fault in _deadly(run) if read_marker(leg, fault.id) and read_note(leg, fault.id)}


class _Child:
    """The process that supervises the drill; a context at whose end it is gone. Looks like a supervisor to `Interrupts`."""

    is_waiting_for_places = False

    def __init__(self, run: RunLayout, root: Path, address: str | None, interrupts: Interrupts, lock: int) -> None:
        """`lock`: of the run, held by this process and, for as long as it lives, by the child."""
        self._interrupts = interrupts
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "chaosrun.supervise.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=with_package(os.environ),
            # Its own session: a Ctrl-C is passed on, once, and not also sent by the terminal.
            start_new_session=True,
            pass_fds=(lock,),
        )
        order = {"lock": lock, "run": str(run.path.absolute()), "root": str(root), "address": address, "parent": os.getpid()}
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps(order).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def interrupt(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def __enter__(self) -> "_Child":
        self._interrupts.watch(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._interrupts.watch(None)
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def listen(self, listener: Listener) -> dict[str, Any]:
        """Pass its records on until it ends; returns the last thing it told, {} when it could not."""
        assert self._process.stdout is not None
        last: dict[str, Any] = {}
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                break  # killed while it wrote
            told = json.loads(line)
            if "record" in told:
                # Every child says which run it is about; here that has been said.
                if told["record"]["event"] != "run.created":
                    listener(told["record"])
            else:
                last = told
        self._process.wait()
        return last

    def ended(self) -> str:
        code = self._process.returncode
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"


@contextmanager
def _own_output() -> Iterator[int]:
    """The standard output for what this process tells; what libraries print goes to standard error."""
    ours = os.dup(1)
    os.dup2(2, 1)
    try:
        yield ours
    finally:
        os.close(ours)


def main() -> int:
    from chaosrun.processes import die_with_parent

    order = json.loads(sys.stdin.buffer.read())
    run = RunLayout(Path(order["run"]))
    die_with_parent(order["parent"])
    # Held until this process is gone; nothing that it starts may hold it longer.
    os.set_inheritable(order["lock"], False)
    with _own_output() as output:

        def tell(**what: Any) -> None:
            os.write(output, json.dumps(what).encode() + b"\n")

        try:
            with Interrupts() as interrupts:
                execute(run, Path(order["root"]), order["address"], lambda record: tell(record=record), interrupts, kept=True)
        except ChaosrunError as error:
            tell(error=described(error, run))
            return error.exit_code
        tell(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
