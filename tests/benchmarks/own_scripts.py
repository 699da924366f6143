"""What a drill of a script as it is costs: `own_script.py` under torchrun, as chaosrun's script, and as chaosrun's command.

    a step            the median step of a long run, against torchrun's
    the observer      the median step that it hears of, against one that it does not, by turns in one process: machines differ
                      more from one run to the next than the observer costs
    a recovery        SIGKILL of a rank → first new step, without the time that the script itself takes from its first line
    what is added     what an undisturbed run takes before the script's first line and after its last step, as a leg of
                      `chaosrun submit -- torchrun …`, against torchrun alone

Runs of all of them alternate, so that whatever else the machine does meets each.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.records.layout import RunLayout
from tests.benchmarks.launch import LaunchError, chaosrun_command, launch, scratch
from tests.benchmarks.samples import Samples
from tests.records import read_lines

if TYPE_CHECKING:
    from chaosrun.observe.hooks import Listener
    from tests.benchmarks.on_and_off import Deaf

    _: Listener = Deaf()  # the checker of types sees a method that is missing

__all__ = ["TARGETS", "OwnScriptTimes", "measure_own_scripts"]

SCRIPT = Path(__file__).parent / "own_script.py"
ON_AND_OFF = SCRIPT.with_name("on_and_off.py")
WORKERS = 2
LIMIT_S = 300.0
LONG, SHORT = 60, 30
"""Steps of a run whose steps are measured, and of one whose recovery is."""
SAVE_EVERY, KILL_AT = 10, 21
WARM_UP_STEPS = 10
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}")
TARGETS = {"step": 1.05, "recovery": 0.2, "added": 0.3}
"""× torchrun's; seconds beyond the script's own; seconds beyond the launcher's own."""


@dataclass(slots=True, kw_only=True)
class OwnScriptTimes:
    wall: dict[str, Samples] = field(default_factory=dict)
    """Of a step, by launcher: "torchrun", "script", "command"; seconds."""
    cpu: dict[str, Samples] = field(default_factory=dict)
    """CPU time of rank 0's process in a step."""
    recovery: dict[str, Samples] = field(default_factory=dict)
    """From the kill to the first new step without the script's own part, of "script" and "command"; the latter contains the
    start of its launcher, which "launcher" is: from torchrun's start to the script's first line."""
    observer: dict[str, Samples] = field(default_factory=dict)
    """A step "with" and "without" it, wall clock."""
    around: dict[str, Samples] = field(default_factory=dict)
    """What a short undisturbed run takes before the script's first line and after its last step: "torchrun" and "command"."""

    def ratio(self, name: str, times: dict[str, Samples]) -> float | None:
        ours, theirs = times[name].median, times["torchrun"].median
        return None if ours is None or theirs is None else ours / theirs

    def observer_ratio(self) -> float | None:
        heard, unheard = self.observer["with"].values, self.observer["without"].values
        return statistics.median(one / other for one, other in zip(heard, unheard, strict=True)) if heard else None

    def added_s(self) -> float | None:
        ours, theirs = self.around["command"].median, self.around["torchrun"].median
        return None if ours is None or theirs is None else ours - theirs

    def failures(self) -> list[str]:
        """Of runs under chaosrun."""
        groups = (self.wall, self.recovery, self.around)
        return [
            failure for group in groups for name in ("script", "command") if name in group for failure in group[name].failures
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "workers": WORKERS,
            **{f"step_ratio_{name}": self.ratio(name, self.wall) for name in ("script", "command")},
            **{f"step_cpu_ratio_{name}": self.ratio(name, self.cpu) for name in ("script", "command")},
            "observer_ratio": self.observer_ratio(),
            "added_s": self.added_s(),
            **{
                kind: {name: samples.to_json() for name, samples in group.items()}
                for kind, group in (
                    ("wall", self.wall),
                    ("cpu", self.cpu),
                    ("observer", self.observer),
                    ("recovery", self.recovery),
                    ("around", self.around),
                )
            },
        }


def measure_own_scripts(repeats: int, progress: Callable[[str], None]) -> OwnScriptTimes:
    launchers = ("torchrun", "script", "command")
    found = OwnScriptTimes(
        wall={name: Samples(limit_s=LIMIT_S) for name in launchers},
        cpu={name: Samples(limit_s=LIMIT_S) for name in launchers},
        recovery={name: Samples(limit_s=LIMIT_S) for name in ("script", "command", "launcher")},
        observer={name: Samples(limit_s=LIMIT_S) for name in ("with", "without")},
        around={name: Samples(limit_s=LIMIT_S) for name in ("torchrun", "command")},
    )
    for repeat in range(1, repeats + 1):
        for name in launchers if repeat % 2 else reversed(launchers):
            for measure in (_steps, _short_run) if name == "torchrun" else (_steps, _on_and_off, _short_run):
                try:
                    measure(name, found)
                except LaunchError as error:
                    found.wall[name].failures.append(str(error))
                    progress(f"scripts {repeat}/{repeats}: {name} failed: {str(error).splitlines()[0]}")
                else:
                    progress(f"scripts {repeat}/{repeats}: {name}{measure.__name__.replace('_', ' ')} measured")
    return found


def _steps(name: str, found: OwnScriptTimes) -> None:
    """A long run; chaosrun's steps are those of its undisturbed leg, which is recorded like any other."""
    with scratch() as folder:
        # No save but the last: a drill of a script that saves nothing would end before it has begun.
        _run(name, folder, LONG, LONG, kill_at=None)
        steps = [
            [line for line in events if line["event"] == "step"] for events in _processes(folder) if events[0]["rank"] == 0
        ]
        pairs = list(pairwise(steps[0]))[WARM_UP_STEPS:-1]
        found.wall[name].values.append(statistics.median(after["time_s"] - before["time_s"] for before, after in pairs))
        found.cpu[name].values.append(statistics.median(after["cpu_s"] - before["cpu_s"] for before, after in pairs))


def _on_and_off(name: str, found: OwnScriptTimes) -> None:
    with scratch() as folder:
        _run(name, folder, LONG, LONG, kill_at=LONG // 2 - 1, script=ON_AND_OFF)
        for path in folder.rglob("reference/**/on_and_off-*.jsonl"):
            pairs = list(pairwise(json.loads(line) for line in path.open()))[WARM_UP_STEPS:-1]
            for kind, heard in (("with", True), ("without", False)):
                steps = [after[0] - before[0] for before, after in pairs if after[1] is heard]
                found.observer[kind].values.append(statistics.median(steps))


def _short_run(name: str, found: OwnScriptTimes) -> None:
    with scratch() as folder:
        began_s = time.time()
        run = _run(name, folder, SHORT, SAVE_EVERY, kill_at=KILL_AT)
        ended_s = time.time()
        processes = _processes(folder)
        if run is None:
            found.around[name].values.append(_around_the_script(processes, began_s, ended_s))
            found.recovery["launcher"].values.append(min(events[0]["began_s"] for events in processes) - began_s)
            return
        if name == "command":
            time_of = {line["event"]: line["time_s"] for line in read_lines(run.leg("reference").journal)}
            began_s, ended_s = time_of["attempt.starting"], time_of["leg.finished"]
            found.around[name].values.append(_around_the_script(processes[:WORKERS], began_s, ended_s))
        killed_s = json.loads((run.leg("chaos").faults / "F1.json").read_text())["time_s"]
        restarted = [events for events in processes if events[0]["began_s"] > killed_s]
        first = [min(line["time_s"] for line in events if line["event"] == "step") for events in restarted]
        if len(first) != WORKERS or any(events[1]["step"] != KILL_AT // SAVE_EVERY * SAVE_EVERY for events in restarted):
            raise LaunchError("the restarted ranks did not all go on from the last checkpoint")
        own_s = [step_s - events[0]["began_s"] for step_s, events in zip(first, restarted, strict=True)]
        found.recovery[name].values.append(min(first) - killed_s - max(own_s))


def _run(
    name: str, folder: Path, steps: int, save_every: int, *, kill_at: int | None, script: Path = SCRIPT
) -> RunLayout | None:
    """One run, with the events of its processes below `folder`; where chaosrun ran it, the run."""
    arguments = [str(script), str(steps), str(save_every)]
    torchrun = [sys.executable, *TORCHRUN, *arguments]
    if name == "torchrun":
        launch(torchrun, folder, limit_s=LIMIT_S)
        return None
    submit = [chaosrun_command(), "submit", "--root", str(folder / "root"), "--quiet", "-o", "json"]
    # A drill without a fault proves nothing, and is refused; one after the measured steps disturbs none of the undisturbed leg.
    submit += ["--kill", f"1@{kill_at or steps - 1}"]
    alone = ["--workers", str(WORKERS), arguments[0], "--", *arguments[1:]]
    subject = ["--", *torchrun] if name == "command" else alone
    told = launch([*submit, *subject], folder, limit_s=LIMIT_S)
    return RunLayout(Path(json.loads(told)["path"]))


def _around_the_script(processes: list[list[dict[str, Any]]], began_s: float, ended_s: float) -> float:
    """Seconds before its first line and after its last step."""
    first_s, last_s = min(events[0]["began_s"] for events in processes), max(events[-1]["time_s"] for events in processes)
    return first_s - began_s + ended_s - last_s


def _processes(folder: Path) -> list[list[dict[str, Any]]]:
    """The events of each process, the first process first."""
    found = [[json.loads(line) for line in path.open()] for path in folder.rglob("own-*.jsonl")]
    return sorted(found, key=lambda events: events[0]["began_s"])
