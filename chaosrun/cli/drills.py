"""Commands about one drill, wherever it is supervised: parse, call `chaosrun.api`, print, return the exit code."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from chaosrun import api
from chaosrun.cli.options import (
    MOMENTS,
    NO_FAULTS,
    NOTHING,
    OUT,
    Address,
    After,
    Drilled,
    FromTheBeginning,
    Out,
    Overrides,
    Root,
    Run,
    ToTheEnd,
    Verbose,
    WayIn,
    WayInWithoutFaults,
    about,
    begun,
    duration_s,
    early_of,
    job_asked,
    moment,
    show,
    show_verdict,
)
from chaosrun.errors import InterruptedRunError, RunTimeoutError, UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import default_root, run_argument
from chaosrun.report.escapes import harmless
from chaosrun.report.output import warn, write_json, write_out
from chaosrun.supervise.interrupts import at_a_terminal, follow

if TYPE_CHECKING:
    from chaosrun.campaign.drill import RunResult
    from chaosrun.spec.command_line import TypedJob
    from chaosrun.supervise.process import SupervisorProcess

Detach = Annotated[bool, Parameter(help="Return once the drill runs; it continues without a terminal. See `chaosrun wait`.")]


def submit(
    job: Drilled = None,
    /,
    *overrides: Overrides,
    asked: WayIn = NOTHING,
    after: After = (),
    address: Address = None,
    reference: Annotated[
        str, Parameter(help="auto: take a cached reference run of the same job if there is one; fresh: make one; or a run id.")
    ] = "auto",
    to_the_end: ToTheEnd = False,
    from_the_beginning: FromTheBeginning = False,
    detach: Detach = False,
    root: Root = None,
    verbose: Verbose = False,
    out: Out = OUT,
) -> int:
    """Run one drill: the job without faults, the job under faults, and the verdict."""
    from chaosrun.report.live import progress

    drilled, changes = job_asked(job, overrides, after, asked, quiet=out.quiet)
    wanted = {"overrides": (*changes, *begun(from_the_beginning)), "root": root, "address": address, "reference": reference}
    wanted |= {"early": early_of(to_the_end, "long")}
    if detach or at_a_terminal():
        return _tied(api.begin(drilled, **wanted), out, detach=detach, verbose=verbose)
    with progress(quiet=out.quiet) as on_event:
        result = api.submit(drilled, **wanted, on_event=on_event)
    return _shown(result, out, verbose=verbose)


def run(
    job: Drilled = None,
    /,
    *overrides: Overrides,
    asked: WayInWithoutFaults = NO_FAULTS,
    after: After = (),
    address: Address = None,
    metrics: Annotated[
        str | None,
        Parameter(
            help="Serve /metrics for Prometheus on [HOST:]PORT (without HOST: on the loopback interface). Default: not served."
        ),
    ] = None,
    detach: Detach = False,
    root: Root = None,
    verbose: Verbose = False,
    out: Out = OUT,
) -> int:
    """Run a job in production, without a reference or planned faults; every real recovery is judged."""
    from chaosrun.report.live import progress

    if asked.kill or asked.preempt:
        raise UsageError(
            "a run in production has no planned faults",
            hint="leave out --kill, --preempt: `chaosrun submit` drills a job with them, `chaosrun inject` strikes a run",
        )
    asked_for, changes = job_asked(job, overrides, after, asked, quiet=out.quiet)
    wanted = {"overrides": changes, "root": root, "address": address, "metrics": metrics}
    if detach or at_a_terminal():
        return _tied(api.begin(asked_for, **wanted, kind="run"), out, detach=detach, verbose=verbose)
    with progress(quiet=out.quiet) as on_event:
        result = api.run(asked_for, **wanted, on_event=on_event)
    return _shown(result, out, verbose=verbose)


def resume(
    run: Run, /, *, address: Address = None, detach: Detach = False, root: Root = None, verbose: Verbose = False, out: Out = OUT
) -> int:
    """Continue a run whose supervisor died or was interrupted."""
    from chaosrun.report.live import progress
    from chaosrun.supervise.drill import has_ended

    layout = api.find_run(run, root)
    if (detach or at_a_terminal()) and not has_ended(layout):
        process = api.go_on(layout, address=address)
        return _tied(process, out, detach=detach, verbose=verbose)
    with progress(quiet=out.quiet, run=layout) as on_event:
        result = api.resume(layout, address=address, on_event=on_event)
    return _shown(result, out, verbose=verbose)


def _shown(result: "RunResult", out: Out, *, verbose: bool) -> int:
    show_verdict(result.run, result.verdict, out, verbose=verbose)
    warn(result.unwritten)
    return result.verdict.exit_code


def _tied(process: "SupervisorProcess", out: Out, *, detach: bool, verbose: bool) -> int:
    """Follow a drill in another process to its verdict, or, if `detach`, let it run on by itself."""
    from chaosrun.campaign.drill import RunResult

    def watch() -> None:
        if out.quiet:
            process.wait()
            return
        from chaosrun.report.live import is_live_terminal, watch

        watch(process.run, stream=sys.stderr, terminal=is_live_terminal(sys.stderr, os.environ), ended=process.ended)

    with process:
        if process.detach() if detach else follow(process, watch):
            run, pid = process.run, process.pid
            then = _line("follow", "status -w", run) + _line("wait", "wait", run) + _line("cancel", "cancel", run)
            said = f"run {run.run_id} continues by itself (supervisor: process {pid})\n"
            show(out, lambda: about(run, detached=True, pid=pid), lambda: said + ("" if out.quiet else then))
            return 0
        result = RunResult(process.run, *process.result())
    return _shown(result, out, verbose=verbose)


def _line(label: str, command: str, run: RunLayout) -> str:
    return f"  {label:<7} chaosrun {command} {run_argument(run)}\n"


def plan(job: Drilled = None, /, *overrides: Overrides, asked: WayIn = NOTHING, after: After = (), out: Out = OUT) -> int:
    """Print which faults a drill would inject; start nothing."""
    from chaosrun.report.text import render_plan

    drilled, changes = job_asked(job, overrides, after, asked, quiet=out.quiet)
    loaded, faults = api.plan(drilled, changes)
    told = {"v": 1, "job": _called(drilled), "name": loaded.spec.name, "plan": faults.to_json()}
    return show(out, lambda: told, lambda: render_plan(loaded.spec, faults))


def validate(
    job: Drilled = None, /, *overrides: Overrides, asked: WayIn = NOTHING, after: After = (), root: Root = None, out: Out = OUT
) -> int:
    """Check a job and its fault plan; start nothing."""
    from chaosrun.report.text import job_sentence
    from chaosrun.spec.files import why_unwritable
    from chaosrun.supervise.creation import try_storage

    drilled, changes = job_asked(job, overrides, after, asked, quiet=out.quiet)
    place = default_root() if root is None else root
    if why := why_unwritable(place.absolute()):
        raise UsageError(f"runs cannot be kept in {place}: {why}", hint="--root, or $CHAOSRUN_ROOT, names another place")
    loaded, faults = api.plan(drilled, changes)
    try_storage(loaded.spec)
    if loaded.masked:
        from chaosrun.verify.warnings import masked_loads

        warn([masked_loads(loaded.masked)])
    told = {"v": 1, "job": _called(drilled), "valid": True, "spec": loaded.spec.model_dump(mode="json")}
    sentence = f"{_called(drilled)}: valid. {job_sentence(loaded.spec, faults)}\n"
    show(out, lambda: {**told, "faults": len(faults.faults)}, lambda: sentence)
    return 0


def _called(job: "Path | TypedJob") -> str:
    return str(job) if isinstance(job, Path) else job.command


def verify(run: Run, /, *, root: Root = None, verbose: Verbose = False, out: Out = OUT) -> int:
    """Judge a run again from its files alone; needs no Ray."""
    layout = api.find_run(run, root)
    verdict = api.verify(layout)
    show_verdict(layout, verdict, out, verbose=verbose)
    return verdict.exit_code


def compare(
    run: Run,
    /,
    *others: Annotated[str, Parameter(name="RUN", help="The runs to compare with the first.")],
    atol: Annotated[float, Parameter(help="Largest accepted absolute difference of a step's loss.")] = 1e-5,
    leg: Annotated[
        Literal["reference", "chaos"], Parameter(help="reference: without faults; chaos: under faults.")
    ] = "reference",
    root: Root = None,
    out: Out = OUT,
) -> int:
    """Compare the losses of runs, step by step: exit code 0 when all are within --atol of the first run's, else 3."""
    from chaosrun.report.text import render_comparison

    found = api.compare([api.find_run(name, root) for name in (run, *others)], atol=atol, leg=leg)
    show(out, found.to_json, lambda: render_comparison(found))
    return found.exit_code


def diagnose(run: Run, /, *, address: Address = None, root: Root = None, out: Out = OUT) -> int:
    """Run a FAIL again around its first difference and name the quantity, rank, tensor and ULP: exit code 0, or 6 when the
    difference does not show again."""
    from chaosrun.report.diagnosis import render_conclusion, render_diagnosis
    from chaosrun.report.live import progress
    from chaosrun.report.write import write_reports

    layout = api.find_run(run, root)
    with progress(quiet=out.quiet, run=layout) as on_event:
        diagnosis = api.diagnose(layout, address=address, on_event=on_event)
    unwritten = write_reports(layout, api.verify(layout))
    show(out, diagnosis.to_json, lambda: (render_conclusion if out.quiet else render_diagnosis)(diagnosis, layout))
    warn(unwritten)
    return diagnosis.exit_code


def cancel(
    run: Run,
    /,
    *,
    timeout: Annotated[str, Parameter(help="How long to wait until the run has ended, such as 90s.")] = "2m",
    root: Root = None,
    out: Out = OUT,
) -> int:
    """End a live run cleanly, wherever it runs; it can be resumed."""
    from chaosrun.records.supervision import read_supervision
    from chaosrun.supervise.drill import has_ended

    layout, timeout_s = api.find_run(run, root), duration_s("--timeout", timeout)
    api.cancel(layout, timeout_s=timeout_s)
    try:
        ended, seen = has_ended(layout), read_supervision(layout)
    except UsageError:
        if layout.run_json.is_file():
            raise
        ended, seen = False, None  # the command that began it has removed it in the meantime
    error = None if seen is None or seen.error is None or seen.error.kind == InterruptedRunError.__name__ else seen.error
    name = f"run {layout.run_id}"
    if error is not None:
        said, then = f"{name} ended before it could be cancelled: {harmless(error.message)}", _line("look", "status", layout)
    elif ended:
        said, then = f"{name} came to its end before it could be cancelled", _line("look", "verify", layout)
    else:
        said = f"{name} is cancelled: none of its processes trains any more"
        then = _line("resume", "resume", layout) if layout.run_json.is_file() else ""
    was_cancelled = not ended and error is None
    show(out, lambda: about(layout, cancelled=was_cancelled), lambda: f"{said}\n" + ("" if out.quiet else then))
    return 0


def wait(
    run: Run,
    /,
    *,
    until: Annotated[str | None, Parameter(help=f"Wait only until {MOMENTS}. Exit code 2 when the run ends before.")] = None,
    timeout: Annotated[str | None, Parameter(help="Wait at most so long, such as 90s, 10m, 2h; then exit code 124.")] = None,
    root: Root = None,
    verbose: Verbose = False,
    out: Out = OUT,
) -> int:
    """Wait until a run has ended; print its verdict and exit as `submit` would."""
    layout, timeout_s = api.find_run(run, root), None if timeout is None else duration_s("--timeout", timeout)
    waiting = partial(api.wait, layout) if until is None else partial(api.wait_until, layout, **moment("--until", until))
    try:
        result = waiting(timeout_s=timeout_s)
    except KeyboardInterrupt:
        hint = f"run {layout.run_id} continues; `chaosrun cancel {run_argument(layout)}` ends it"
        raise InterruptedRunError("the waiting was interrupted", hint=hint) from None
    if result is not None:
        return _shown(result, out, verbose=verbose)
    if out.is_json:
        write_json(about(layout, reached=until))
    return 0


def inject(
    run: Run,
    /,
    *,
    kind: Annotated[str, Parameter(help="Kind of fault: kill, preempt, stop, pause, segfault, node, agent, …")] = "kill",
    rank: Annotated[str, Parameter(help="The rank to strike, 'all' at once, or 'random'.")],
    set_: Annotated[list[str] | None, Parameter(name="--set", help="Its options, such as grace=5s; repeatable.")] = None,
    seed: Annotated[int | None, Parameter(help="Seed for --rank random (default: drawn, and printed).")] = None,
    when: Annotated[str | None, Parameter(help=f"First wait, without a limit, until {MOMENTS}. Default: now.")] = None,
    timeout: Annotated[str, Parameter(help="How long to wait until the fault is seen to have landed.")] = "2m",
    no_wait: Annotated[bool, Parameter(help="Return as soon as the fault is part of the run's plan.")] = False,
    root: Root = None,
    out: Out = OUT,
) -> int:
    """Strike a live drill now; the fault becomes part of its plan and of its verdict. Exit code 0 once it has landed, 6 when
    that cannot be shown, 124 when nothing of it is seen in time."""
    from chaosrun.verify.ruling import EXIT_CODES

    layout, timeout_s = api.find_run(run, root), duration_s("--timeout", timeout)
    if when is not None:
        api.wait_until(layout, **moment("--when", when))
    asked = api.inject(layout, kind=kind, rank=rank, settings=set_ or (), seed=seed)
    if not out.is_json:
        drawn = f"  (drawn with --seed {asked['seed']})" if rank == "random" else ""
        write_out("".join(f"{fault['id']}  {fault['what']}{drawn}\n" for fault in asked["faults"]))
    names = [fault["id"] for fault in asked["faults"]]
    seen = () if no_wait else api.landings(layout, names, timeout_s=timeout_s)
    found = {each.fault: each.to_json() for each in seen}
    faults = [{**found.get(fault["id"], {}), **fault} for fault in asked["faults"]]
    said = "".join(f"{each.fault}  {harmless(each.sentence)}\n" for each in seen)
    show(out, lambda: about(layout, seed=asked["seed"], faults=faults), lambda: said)
    if any(each.problem for each in seen):
        return EXIT_CODES["INCONCLUSIVE"]
    return 0 if all(each.landed for each in seen) else RunTimeoutError.exit_code
