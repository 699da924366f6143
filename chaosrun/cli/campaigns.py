"""Commands about many drills: parse, call `chaosrun.api`, print, return the exit code."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from chaosrun import api
from chaosrun.cli import options
from chaosrun.errors import ChaosrunError, UsageError
from chaosrun.records.destination import expect_writable
from chaosrun.report.output import warn, write_out

if TYPE_CHECKING:
    from chaosrun.campaign.results import SuiteResult


def suite(
    path: Annotated[Path, Parameter(name="SUITE", help="The suite file (YAML): drills and what is expected of each.")],
    /,
    *,
    only: Annotated[
        list[str] | None, Parameter(help="Run only these drills: a name, or a pattern such as 'digits*'; repeatable.")
    ] = None,
    except_: Annotated[list[str] | None, Parameter(name="--except", help="Leave these drills out; repeatable.")] = None,
    shard: Annotated[str, Parameter(help="Run only one part of the suite, such as 2/5: the second of five.")] = "",
    seed: Annotated[str, Parameter(help="Draw all faults anew: the seed, or 'today' (the UTC date, printed).")] = "",
    list_: Annotated[bool, Parameter(name="--list", help="Show what would run, and start nothing.")] = False,
    fail_fast: Annotated[bool, Parameter(help="Begin no more drills after the first unexpected verdict.")] = False,
    keep_going: Annotated[bool, Parameter(help="Run all drills, whatever their verdicts (the default).")] = False,
    at_once: options.AtOnce = None,
    to_the_end: options.ToTheEnd = False,
    from_the_beginning: options.FromTheBeginning = False,
    resume: Annotated[str | None, Parameter(help="Continue a suite: its id, the beginning of its id, or 'latest'.")] = None,
    history: Annotated[Path | None, Parameter(help="File of past nights (default: ROOT/suites/history/SUITE.jsonl).")] = None,
    junit: Annotated[Path | None, Parameter(help="Also write JUnit XML to this file.")] = None,
    markdown: Annotated[Path | None, Parameter(help="Append a summary to this file, such as $GITHUB_STEP_SUMMARY.")] = None,
    address: options.Address = None,
    root: options.Root = None,
    out: options.Out = options.OUT,
) -> int:
    """Run a suite's drills and compare each verdict with the expected one. Exit code 0 when all are as expected, 3 when one is
    not, 6 when every exception is inconclusive, was cancelled or could not be run."""
    from chaosrun.campaign.report.pages import hand_out
    from chaosrun.campaign.report.text import render_plan, render_suite
    from chaosrun.campaign.suite_plan import SuiteRequest, parse_seed, parse_shard

    if fail_fast and keep_going:
        raise UsageError("--fail-fast and --keep-going exclude each other", hint="leave one of the two out")
    options.one_or_more("--at-once", at_once)
    for option, file in (("--history", history), ("--junit", junit), ("--markdown", markdown)):
        if file is not None and not list_:
            expect_writable(option, file)  # refused now, not after hours of drills
    now_s = time.time()
    request = SuiteRequest(
        path=path,
        only=tuple(only or ()),
        without=tuple(except_ or ()),
        shard=parse_shard(shard) if shard else None,
        seed=parse_seed(seed, now_s) if seed else None,
        fail_fast=fail_fast,
        history=history,
        asked_s=now_s,
    )
    if list_:
        return options.show(out, (plan := api.suite_plan(request, root=root)).to_json, lambda: render_plan(plan))
    short = {"early": options.early_of(to_the_end), "overrides": options.begun(from_the_beginning)}
    run = partial(api.suite, request, resume=resume, at_once=at_once, **short, root=root, address=address)
    result = _run_suite(run, junit, markdown, out)
    options.show(out, result.to_json, lambda: render_suite(result, quiet=out.quiet))
    hand_out(result, junit, markdown)
    return result.exit_code


def _run_suite(run: "Callable[..., SuiteResult]", junit: Path | None, markdown: Path | None, out: options.Out) -> "SuiteResult":
    """If the suite is cut short, the drills that had ended are shown and reported before the error is raised."""
    from chaosrun.campaign.report.pages import hand_out
    from chaosrun.campaign.report.text import render_suite

    ended: list[SuiteResult] = []

    def on_cut_short(so_far: "SuiteResult") -> None:
        ended.append(so_far)
        try:
            hand_out(so_far, junit, markdown)
        except UsageError as error:
            warn([error.message])

    try:
        with options.ticking(quiet=out.quiet) as on_event:
            return run(on_event=on_event, on_cut_short=on_cut_short)
    except ChaosrunError:
        if not out.is_json:  # otherwise the error is the only value
            write_out("".join(options.as_text(render_suite(so_far, quiet=out.quiet)) for so_far in ended))
        raise


def sweep(
    job: options.Drilled = None,
    /,
    *overrides: options.Overrides,
    asked: options.WayInWithoutFaults = options.NO_FAULTS,
    after: options.After = (),
    steps: Annotated[
        str,
        Parameter(help="Steps at which the training's phases are tried, such as 1,27,66 (default: five representative ones)."),
    ] = "",
    only: Annotated[
        list[str] | None, Parameter(help="Points to try, by phase or name, such as 'checkpoint.*' or 'recovery/*'; repeatable.")
    ] = None,
    at_once: options.AtOnce = None,
    keep: Annotated[bool, Parameter(help="Keep the runs that pass, too.")] = False,
    to_the_end: options.ToTheEnd = False,
    from_the_beginning: options.FromTheBeginning = False,
    saves: Annotated[bool, Parameter(help="Try points inside one of the script's own saves, and power cuts.")] = False,
    resume: Annotated[str | None, Parameter(help="Continue a sweep: its id, the beginning of its id, or 'latest'.")] = None,
    address: options.Address = None,
    root: options.Root = None,
    out: options.Out = options.OUT,
) -> int:
    """Kill the job once at every point that it reaches, one drill each: exit code 0 when all PASS, 3 when one does not, 6 when
    none fails and one is inconclusive."""
    from chaosrun.campaign.report.text import render_sweep

    options.one_or_more("--at-once", at_once)
    if asked.kill or asked.preempt:
        raise UsageError("a sweep strikes at every point by itself", hint="leave out --kill, --preempt; --only chooses points")
    drilled, changes = options.job_asked(job, overrides, after, asked, quiet=out.quiet)
    with options.ticking(quiet=out.quiet) as on_event:
        swept = api.sweep(
            drilled,
            overrides=(*changes, *options.begun(from_the_beginning)),
            steps=options.numbers("--steps", steps, "steps"),
            only=only or (),
            at_once=at_once,
            keep=keep,
            saves=saves,
            resume=resume,
            early=options.early_of(to_the_end),
            root=root,
            address=address,
            on_event=on_event,
        )
    options.show(
        out, lambda: {**swept.to_json(), "exit_code": swept.exit_code}, lambda: render_sweep(swept, root=root, quiet=out.quiet)
    )
    return swept.exit_code


def shrink(
    run: options.Run,
    /,
    *,
    max_drills: Annotated[int | None, Parameter(help="Stop with the smallest plan found by then (default: 100).")] = None,
    to_the_end: options.ToTheEnd = False,
    from_the_beginning: options.FromTheBeginning = False,
    address: options.Address = None,
    root: options.Root = None,
    out: options.Out = options.OUT,
) -> int:
    """Reduce the faults of a run that failed to a smallest plan that fails in the same way. The plan is printed as part of a
    job file; exit code 0, or 6 when the run does not fail again."""
    from chaosrun.campaign.report.text import render_shrunk

    options.one_or_more("--max-drills", max_drills)
    layout = api.find_run(run, root)
    with options.ticking(quiet=out.quiet) as on_event:
        short = {"early": options.early_of(to_the_end), "overrides": options.begun(from_the_beginning)}
        shrunk = api.shrink(layout, max_drills=max_drills, **short, address=address, on_event=on_event)
    options.show(out, shrunk.to_json, lambda: render_shrunk(shrunk))
    return shrunk.exit_code
