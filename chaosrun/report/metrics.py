"""Metrics of a run in production for Prometheus (docs/production.md), read from the run's files at each scrape."""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from chaosrun.errors import UsageError
from chaosrun.records.events import RecoveryAgreed, RecoveryDiverged
from chaosrun.records.history import read_leg
from chaosrun.records.layout import MANIFEST_NAME, RUN, RunLayout, checkpoint_name
from chaosrun.records.run_file import read_run, recorded_leg
from chaosrun.report.follow import RunFollower
from chaosrun.report.picture import LegPicture
from chaosrun.verify.lineage import lineage
from chaosrun.verify.recovery_times import from_first_attempt, pauses, work_of

LAST_PORT = 65535


class RunCollector:
    """The metrics of a scrape; a collector of prometheus_client."""

    def __init__(self, run: RunLayout) -> None:
        self._run, self._follower = run, RunFollower(run, legs=(RUN,))
        self._leg = recorded_leg(run, read_run(run), RUN)
        self._before: tuple[tuple[int, bool], float] = ((0, False), 0.0)
        """The newest attempt and whether it had begun to train; and the seconds of steps that count in the attempts before."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # pyright: ignore[reportMissingImports]

        self._follower.poll()
        leg = self._follower.picture.legs.get(RUN)
        if leg is None:
            return
        agreed, diverged = (len(leg.history.events(kind)) for kind in (RecoveryAgreed, RecoveryDiverged))
        counters = {
            "restarts": ("attempts after the first", leg.restarts),
            "lost_steps": ("steps that restarts rolled back", leg.lost_steps),
            "recoveries_judged": ("recoveries that were held against what was recorded before", agreed + diverged),
            "recoveries_diverged": ("of these, those that differed", diverged),
        }
        gauges = {
            "steps": ("the newest optimizer step that every rank has completed", _steps(leg)),
            "goodput_ratio": ("share of the time since the first attempt that went into steps that count", self._goodput(leg)),
            "checkpoint_age_seconds": ("since the newest checkpoint", self._checkpoint_age_s(leg)),
        }
        for family, metrics in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
            for name, (meaning, value) in metrics.items():
                if value is not None:
                    metric = family(f"chaosrun_{name}", meaning, labels=["run"])
                    metric.add_metric([self._run.run_id], value)
                    yield metric

    def _goodput(self, leg: LegPicture) -> float | None:
        """In the newest attempt every step counts; earlier attempts are read once for each new one."""
        attempts, journal = leg.history.attempts, from_first_attempt(leg.history.journal)
        if not attempts:
            return None
        key = attempts[-1].number, bool(attempts[-1].starts)
        if self._before[0] != key:
            whole = read_leg(self._leg)
            earlier = replace(whole, attempts=tuple(each for each in whole.attempts if each.number < key[0]))
            self._before = key, work_of(earlier, lineage(whole)).kept_s
        newest = [(trace.start, trace.steps) for trace in attempts[-1].traces.values() if trace.start and trace.steps]
        kept_s = self._before[1] + max((steps[steps.last].time_s - start.time_s for start, steps in newest), default=0.0)
        until_s = journal[-1].time_s if leg.history.finished else time.time()
        wall_s = until_s - journal[0].time_s - sum(end - begin for begin, end in pauses(journal))
        return min(1.0, kept_s / wall_s) if wall_s > 0 else None

    def _checkpoint_age_s(self, leg: LegPicture) -> float | None:
        """None before the first checkpoint, and for a script that saves by itself."""
        if not leg.kept:
            return None
        try:
            written_s = (self._leg.checkpoints / checkpoint_name(leg.kept[-1]) / MANIFEST_NAME).stat().st_mtime
        except FileNotFoundError:  # retention was faster
            return None
        return max(0.0, time.time() - written_s)


def _steps(leg: LegPicture) -> int:
    """While a restart has not begun, what was reached before it: where a script's own resume stands is known only then. By
    lanes, which heartbeats move at each poll: of many ranks' traces only some are read in one."""
    if not any(lane.state in ("starting", "restoring") or (lane.ended and not lane.step) for lane in leg.lanes.values()):
        return leg.step
    done = [[trace.steps.last for trace in each.traces.values() if trace.steps] for each in leg.history.attempts[:-1]]
    return next((min(steps) for steps in reversed(done) if steps), leg.step)


@contextmanager
def served(run: RunLayout) -> Iterator[None]:
    """Serve /metrics at the address in run.json, if there is one; without a host on the loopback, as the metrics are not
    public. Raises UsageError if that is not possible."""
    asked = read_run(run).metrics
    if asked is None:
        yield
        return
    from prometheus_client import CollectorRegistry, start_http_server  # pyright: ignore[reportMissingImports]

    registry = CollectorRegistry()
    registry.register(RunCollector(run))
    try:
        host, _, port = asked.rpartition(":")
        if not port.isdecimal() or int(port) > LAST_PORT:
            raise ValueError(f"{port or asked} is not a port, a number from 0 to {LAST_PORT}")
        server, thread = start_http_server(int(port), addr=host.strip("[]") or "127.0.0.1", registry=registry)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        raise UsageError(
            f"metrics cannot be served on {asked}: {why}",
            hint="end what listens there (`ss -ltnp` names it); a new run can take another port: --metrics PORT"
            if taken
            else "--metrics 9100, or --metrics HOST:9100 for other machines",
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
