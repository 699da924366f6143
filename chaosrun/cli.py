"""The command line: parse, call `chaosrun.api`, print, end with the right exit code. Nothing else.

Data goes to stdout, progress and errors to stderr. Everything heavy is imported inside the commands: `--help` must be instant.

Exit codes: 0 PASS · 1 a bug in chaosrun · 2 usage or YAML · 3 FAIL · 4 the script failed outside a fault · 5 recovery failed ·
6 INCONCLUSIVE · 7 resources unavailable · 124 timeout · 130 interrupted.
"""

import os
import sys
import time
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from chaosrun import __version__
from chaosrun.commands.arguments import Address, Format, Job, Overrides, Quiet, Root, Run
from chaosrun.commands.campaigns import shrink, sweep
from chaosrun.commands.terminal import page, progress
from chaosrun.errors import ChaosrunError, InterruptedRunError, UsageError
from chaosrun.report.output import has_colour, write_error, write_json, write_out

if TYPE_CHECKING:
    from chaosrun.records.layout import RunLayout
    from chaosrun.verify.verdict import Verdict

__all__ = ["app", "main"]

EXIT_BUG = 1

EXIT_CODES = """Exit codes: 0 PASS, 3 FAIL, 6 INCONCLUSIVE, 2 wrong usage or YAML,
4 the training script failed by itself, 5 recovery failed, 7 no resources,
124 timeout, 130 interrupted, 1 a bug in chaosrun."""

app = App(
    name="chaosrun",
    help="Kill a training job on purpose and prove, bit for bit, that it comes back.",
    help_format="plaintext",
    help_epilogue=EXIT_CODES,
    version=__version__,
    default_parameter=Parameter(negative=()),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    exit_on_error=False,
    print_error=False,
    help_on_error=False,
)


@app.command(usage="Usage: chaosrun submit [OPTIONS] JOB [KEY=VALUE...]")
def submit(
    job: Job,
    /,
    *overrides: Overrides,
    address: Address = None,
    reference: Annotated[
        str,
        Parameter(help="auto: take a cached undisturbed run of the same job if there is one; fresh: run it anew; or a run id."),
    ] = "auto",
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Run one drill: the job undisturbed, the job under faults, and the verdict."""
    from chaosrun import api

    with progress(quiet=quiet) as live:
        on_event = None if live is None else live.on_event
        result = api.submit(job, overrides=overrides, root=root, address=address, reference=reference, on_event=on_event)
    _show_verdict(result.run, result.verdict, root, output)
    return result.verdict.exit_code


@app.command
def resume(run: Run, /, *, address: Address = None, root: Root = None, quiet: Quiet = False, output: Format = "text") -> int:
    """Go on with a run whose supervisor died or was interrupted."""
    from chaosrun import api

    layout = api.find_run(run, root)
    with progress(quiet=quiet, run=layout) as live:
        result = api.resume(layout, address=address, on_event=None if live is None else live.on_event)
    _show_verdict(result.run, result.verdict, root, output)
    return result.verdict.exit_code


@app.command(usage="Usage: chaosrun plan [OPTIONS] JOB [KEY=VALUE...]")
def plan(job: Job, /, *overrides: Overrides, output: Format = "text") -> int:
    """Print which faults a drill would inject; start nothing."""
    from chaosrun import api

    loaded, faults = api.plan(job, overrides)
    if output == "json":
        write_json({"v": 1, "job": str(job), "name": loaded.spec.name, "plan": faults.to_json()})
    else:
        from chaosrun.report.text import render_plan

        write_out(page(render_plan(loaded.spec, faults)))
    return 0


@app.command(usage="Usage: chaosrun validate [OPTIONS] JOB [KEY=VALUE...]")
def validate(job: Job, /, *overrides: Overrides, output: Format = "text") -> int:
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


@app.command
def verify(run: Run, /, *, root: Root = None, output: Format = "text") -> int:
    """Judge a run again from its files alone; needs no Ray."""
    from chaosrun import api

    layout = api.find_run(run, root)
    verdict = api.verify(layout)
    _show_verdict(layout, verdict, root, output)
    return verdict.exit_code


@app.command(usage="Usage: chaosrun compare [OPTIONS] RUN RUN...")
def compare(
    run: Run,
    /,
    *others: Annotated[str, Parameter(name="RUN", help="The runs to compare with the first.")],
    atol: Annotated[float, Parameter(help="Largest absolute difference of a step's loss.")] = 1e-5,
    leg: Annotated[Literal["reference", "chaos"], Parameter(help="reference: undisturbed; chaos: under faults.")] = "reference",
    root: Root = None,
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


@app.command(usage="Usage: chaosrun suite [OPTIONS] SUITE")
def suite(
    path: Annotated[Path, Parameter(name="SUITE", help="The suite file (YAML): drills and what is expected of each.")],
    /,
    *,
    only: Annotated[list[str] | None, Parameter(help="Run this drill alone; may be given several times.")] = None,
    address: Address = None,
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Run several drills and compare each verdict with the expected one: exit code 0 when all are as expected, else 3."""
    from chaosrun import api

    with progress(quiet=quiet) as live:
        on_event = None if live is None else live.on_event
        result = api.suite(path, only=only or (), root=root, address=address, on_event=on_event)
    if output == "json":
        write_json(result.to_json())
    else:
        from chaosrun.report.suite import render_suite

        write_out(page(render_suite(result, root=root)))
    return result.exit_code


@app.command
def diagnose(run: Run, /, *, address: Address = None, root: Root = None, quiet: Quiet = False, output: Format = "text") -> int:
    """Run a FAIL again around its first difference and name the quantity, rank, tensor and ULP: exit code 0, or 6 when the
    difference does not show again."""
    from chaosrun import api

    layout = api.find_run(run, root)
    with progress(quiet=quiet, run=layout) as live:
        diagnosis = api.diagnose(layout, address=address, on_event=None if live is None else live.on_event)
    if output == "json":
        write_json(diagnosis.to_json())
    else:
        from chaosrun.report.diagnosis import render_diagnosis

        write_out(page(render_diagnosis(diagnosis, layout, root=root)))
    return diagnosis.exit_code


app.command(sweep, usage="Usage: chaosrun sweep [OPTIONS] JOB [KEY=VALUE...]")
app.command(shrink)


@app.command(name="list")
def list_(*, root: Root = None, output: Format = "text") -> int:
    """List the runs, newest first."""
    from chaosrun import api

    runs = api.list_runs(root)
    if output == "json":
        fields = [
            {"run": s.run_id, "name": s.name, "status": s.status, "created_s": s.created_s, "path": str(s.path)} for s in runs
        ]
        write_json({"v": 1, "runs": fields})
    else:
        from chaosrun.report.text import render_runs

        write_out(page(render_runs(runs, now_s=time.time())))
    return 0


@app.command
def status(run: Run, /, *, root: Root = None, output: Format = "text") -> int:
    """Say what a run is doing, or how it ended."""
    from chaosrun import api
    from chaosrun.report.status import read_status, status_lines
    from chaosrun.supervise.drill import is_supervised

    layout = api.find_run(run, root)
    seen = read_status(layout, supervised=is_supervised(layout))
    if output == "json":
        write_json(seen.to_json())
    else:
        write_out("".join(f"{line}\n" for line in status_lines(seen, now_s=time.time())))
    return 0


@app.command
def logs(
    run: Run,
    /,
    *,
    leg: Annotated[
        Literal["reference", "chaos", "confirm"] | None, Parameter(help="Default: the chaos leg, once it has begun.")
    ] = None,
    attempt: Annotated[int | None, Parameter(help="Default: the leg's last attempt.")] = None,
    rank: Annotated[int | None, Parameter(help="Default: every rank.")] = None,
    root: Root = None,
    output: Format = "text",
) -> int:
    """Print what the workers wrote to stdout and stderr."""
    from chaosrun import api
    from chaosrun.report.logs import read_log, select_logs

    chosen = select_logs(api.find_run(run, root), leg=leg, attempt=attempt, rank=rank)
    if output == "json":
        about = [
            {"leg": log.leg, "attempt": log.attempt, "rank": log.rank, "path": str(log.path), "text": read_log(log)}
            for log in chosen
        ]
        write_json({"v": 1, "run": run, "logs": about})
        return 0
    for log in chosen:
        # As tail(1) has it: a single file needs no heading.
        heading = f"==> {log.leg}, attempt {log.attempt}, rank {log.rank} <==\n" if len(chosen) > 1 else ""
        text = read_log(log)
        write_out(heading + text + ("" if text.endswith("\n") or not text else "\n"))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's); returns the exit code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        # A job's name that the terminal's encoding lacks is no reason to lose the account of a drill.
        sys.stdout.reconfigure(errors="replace")
    try:
        return app(tokens) or 0
    except CycloptsError as error:
        command = " ".join(["chaosrun", *(error.command_chain or ())])
        return _report(UsageError(str(error).strip(), hint=f"see `{command} --help`"), tokens)
    except ChaosrunError as error:
        return _report(error, tokens)
    except KeyboardInterrupt:
        return _report(InterruptedRunError("interrupted"), tokens)
    except Exception as error:
        return _report_bug(error, tokens)


def _show_verdict(run: "RunLayout", verdict: "Verdict", root: Path | None, output: str) -> None:
    if output == "json":
        write_json({"v": 1, "run": run.run_id, "path": str(run.path), "verdict": verdict.to_json()})
    else:
        from chaosrun.report.text import render_verdict

        write_out(page(render_verdict(verdict, run, root=root)))


def _stderr_colour() -> bool:
    return has_colour(sys.stderr, os.environ)


def _report(error: ChaosrunError, tokens: Sequence[str]) -> int:
    write_error(error.message, error.hint, colour=_stderr_colour())
    if _asks_for_json(tokens):
        about = {"kind": type(error).__name__, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        write_json({"v": 1, "error": about})
    return error.exit_code


def _report_bug(error: Exception, tokens: Sequence[str]) -> int:
    import traceback

    traceback.print_exception(error)
    message = f"this is a bug in chaosrun {__version__}: {type(error).__name__}: {error}"
    write_error(message, "please report it with the traceback above; the run's files are kept", colour=_stderr_colour())
    if _asks_for_json(tokens):
        about = {"kind": type(error).__name__, "message": message, "hint": None, "exit_code": EXIT_BUG}
        write_json({"v": 1, "error": about})
    return EXIT_BUG


def _asks_for_json(tokens: Sequence[str]) -> bool:
    """Whether the command line wants JSON, also when it cannot be parsed."""
    pairs = zip(tokens, [*tokens[1:], ""], strict=True)
    return any(
        (option in ("-o", "--output") and value == "json") or option in ("-ojson", "-o=json", "--output=json")
        for option, value in pairs
    )


if __name__ == "__main__":
    sys.exit(main())
