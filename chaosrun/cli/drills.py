"""Commands about one drill: parse, call `chaosrun.api`, print, return the exit code."""

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from chaosrun.cli.arguments import Address, Format, Job, Overrides, Quiet, Root, Run
from chaosrun.cli.control import Detach, show_detached
from chaosrun.cli.terminal import page, show_verdict, watch_drill
from chaosrun.report.output import warn, write_json, write_out
from chaosrun.supervise.interrupts import at_a_terminal, follow

if TYPE_CHECKING:
    from chaosrun.supervise.guard import SupervisorProcess


def submit(
    job: Job,
    /,
    *overrides: Overrides,
    address: Address = None,
    reference: Annotated[
        str,
        Parameter(help="auto: take a cached undisturbed run of the same job if there is one; fresh: run it anew; or a run id."),
    ] = "auto",
    detach: Detach = False,
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Run one drill: the job undisturbed, the job under faults, and the verdict."""
    from chaosrun import api

    if detach or at_a_terminal():
        process = api.begin(job, overrides=overrides, root=root, address=address, reference=reference)
        return _tied(process, detach, quiet, output)
    from chaosrun.report.live import progress

    with progress(quiet=quiet) as live:
        on_event = None if live is None else live.on_event
        result = api.submit(job, overrides=overrides, root=root, address=address, reference=reference, on_event=on_event)
    show_verdict(result.run, result.verdict, output)
    warn(result.unwritten)
    return result.verdict.exit_code


def resume(
    run: Run,
    /,
    *,
    address: Address = None,
    detach: Detach = False,
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Go on with a run whose supervisor died or was interrupted."""
    from chaosrun import api
    from chaosrun.supervise.drill import has_ended

    layout = api.find_run(run, root)
    if (detach or at_a_terminal()) and not has_ended(layout):
        process = api.go_on(layout, address=address)
        return _tied(process, detach, quiet, output)
    from chaosrun.report.live import progress

    with progress(quiet=quiet, run=layout) as live:
        result = api.resume(layout, address=address, on_event=None if live is None else live.on_event)
    show_verdict(result.run, result.verdict, output)
    warn(result.unwritten)
    return result.verdict.exit_code


def _tied(process: "SupervisorProcess", detach: bool, quiet: bool, output: str) -> int:
    """Follow a drill in another process to its verdict, or leave it to itself."""
    with process:
        if process.detach() if detach else follow(process, lambda: watch_drill(process, quiet=quiet)):
            show_detached(process.run, process.pid, quiet=quiet, output=output)
            return 0
        verdict, warnings = process.result()
    show_verdict(process.run, verdict, output)
    warn(warnings)
    return verdict.exit_code


def plan(job: Job, /, *overrides: Overrides, quiet: Quiet = False, output: Format = "text") -> int:
    """Print which faults a drill would inject; start nothing."""
    from chaosrun import api

    loaded, faults = api.plan(job, overrides)
    if output == "json":
        write_json({"v": 1, "job": str(job), "name": loaded.spec.name, "plan": faults.to_json()})
    else:
        from chaosrun.report.text import render_plan

        write_out(page(render_plan(loaded.spec, faults)))
    return 0


def validate(job: Job, /, *overrides: Overrides, quiet: Quiet = False, output: Format = "text") -> int:
    """Check a job file and its fault plan; start nothing."""
    from chaosrun import api

    loaded, faults = api.plan(job, overrides)
    if output == "json":
        write_json(
            {"v": 1, "job": str(job), "valid": True, "spec": loaded.spec.model_dump(mode="json"), "faults": len(faults.faults)}
        )
    else:
        from chaosrun.report.text import job_sentence

        write_out(f"{job}: valid. {job_sentence(loaded.spec, faults)}\n")
    return 0


def verify(run: Run, /, *, root: Root = None, quiet: Quiet = False, output: Format = "text") -> int:
    """Judge a run again from its files alone; needs no Ray."""
    from chaosrun import api

    layout = api.find_run(run, root)
    verdict = api.verify(layout)
    show_verdict(layout, verdict, output)
    return verdict.exit_code


def compare(
    run: Run,
    /,
    *others: Annotated[str, Parameter(name="RUN", help="The runs to compare with the first.")],
    atol: Annotated[float, Parameter(help="Largest absolute difference of a step's loss.")] = 1e-5,
    leg: Annotated[Literal["reference", "chaos"], Parameter(help="reference: undisturbed; chaos: under faults.")] = "reference",
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Compare the losses of runs, step by step: exit code 0 when all are within --atol of the first run's, else 3."""
    from chaosrun import api

    found = api.compare([api.find_run(name, root) for name in (run, *others)], atol=atol, leg=leg)
    if output == "json":
        write_json(found.to_json())
    else:
        from chaosrun.report.compare import render_comparison

        write_out(page(render_comparison(found)))
    return found.exit_code


def diagnose(run: Run, /, *, address: Address = None, root: Root = None, quiet: Quiet = False, output: Format = "text") -> int:
    """Run a FAIL again around its first difference and name the quantity, rank, tensor and ULP: exit code 0, or 6 when the
    difference does not show again."""
    from chaosrun import api

    layout = api.find_run(run, root)
    from chaosrun.report.live import progress

    with progress(quiet=quiet, run=layout) as live:
        diagnosis = api.diagnose(layout, address=address, on_event=None if live is None else live.on_event)
    if output == "json":
        write_json(diagnosis.to_json())
    else:
        from chaosrun.report.diagnosis import render_diagnosis

        write_out(page(render_diagnosis(diagnosis, layout)))
    return diagnosis.exit_code
