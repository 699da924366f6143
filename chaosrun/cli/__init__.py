"""The command line: its commands and its exit code. Nothing else.

Data goes to stdout, progress and errors to stderr. Everything heavy is imported inside the commands: `--help` must be instant.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from cyclopts import App, CycloptsError, Parameter

from chaosrun import __version__
from chaosrun.cli import campaigns, drills, files, housekeeping, preflight, runs
from chaosrun.errors import ChaosrunError, InterruptedRunError, UsageError, of_the_machine
from chaosrun.report.output import lose_what_stderr_refuses, report_error

__all__ = ["app", "main"]

EXIT_BUG = 1

EXIT_CODES = """Exit codes: 0 PASS, 3 FAIL, 6 INCONCLUSIVE, 2 wrong usage or YAML,
4 the training script failed by itself, 5 recovery failed, 7 no resources,
8 preflight finds the cluster unfit, 124 timeout, 130 interrupted,
1 a bug in chaosrun."""

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


OF_ANY_JOB = "Usage: chaosrun {command} [OPTIONS] JOB [KEY=VALUE...] [-- ARGUMENTS...]"

DRILL_HERE = ("suite", "sweep", "shrink", "diagnose", "preflight")
"""Commands that connect their own process to Ray; the others leave that to the supervising process."""
TAKE_COMMANDS = ("submit", "run", "plan", "validate", "sweep")
for command in (drills.submit, drills.run, drills.plan, drills.validate, campaigns.sweep):
    app.command(command, usage=OF_ANY_JOB.format(command=command.__name__))
for command in (drills.resume, drills.verify, drills.diagnose, campaigns.shrink, runs.status, runs.logs, runs.trace):
    app.command(command)
app.command(drills.inject, usage="Usage: chaosrun inject [OPTIONS] RUN --rank RANK")
app.command(drills.wait)
app.command(drills.cancel)
app.command(drills.compare, usage="Usage: chaosrun compare [OPTIONS] RUN RUN...")
app.command(campaigns.suite, usage="Usage: chaosrun suite [OPTIONS] SUITE")
app.command(runs.list_, name="list")
app.command(runs.report, usage="Usage: chaosrun report [OPTIONS] RUN")
app.command(files.init, usage="Usage: chaosrun init [OPTIONS] [DIR]")
app.command(files.schema, usage="Usage: chaosrun schema [OPTIONS] job|suite|verdict|preflight")
app.command(files.export, usage="Usage: chaosrun export [OPTIONS] github|ray|rayjob|slurm FILE [KEY=VALUE...]")
app.command(preflight.preflight, usage="Usage: chaosrun preflight [OPTIONS] [JOB] [KEY=VALUE...]")
app.command(housekeeping.env)
app.command(housekeeping.clean)
app.command(housekeeping.completion_of(app), usage="Usage: chaosrun completion [OPTIONS] [SHELL]")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's); returns the exit code."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    lose_what_stderr_refuses()
    if isinstance(sys.stdout, TextIOWrapper):
        # A character that the terminal's encoding lacks must not lose the report of a drill.
        sys.stdout.reconfigure(errors="replace")
    try:
        if not _only_asks(tokens):
            _expect_working_directory()
        if arguments is None and tokens and tokens[0] in DRILL_HERE:
            from chaosrun.supervise.watchdog import watched

            return watched(lambda: main(tokens))
        return _run(tokens) or 0
    except CycloptsError as error:
        command = " ".join(["chaosrun", *(error.command_chain or ())])
        hint = f"see `{command} --help`"
        if tokens[1:] and tokens[0] in TAKE_COMMANDS and "--" not in tokens and shutil.which(tokens[1]):
            hint += f"; a command comes after two dashes: {command} -- {tokens[1]} …"
        elif "--" not in tokens and (script := next((token for token in tokens if token.endswith(".py")), None)):
            hint += f"; what is for the script comes after two dashes: {command} {script} -- …"
        found: ChaosrunError = UsageError(str(error).strip(), hint=hint)
    except ChaosrunError as error:
        found = error
    except KeyboardInterrupt:
        found = InterruptedRunError("interrupted")
    except SystemExit:
        if not _only_asks(tokens):
            raise
        return 0  # by rich, when a reader of a help page has read enough
    except Exception as error:
        machine = of_the_machine(error)
        if machine is None:
            import traceback

            traceback.print_exception(error)
            message = f"this is a bug in chaosrun {__version__}: {type(error).__name__}: {error}"
            hint = "please report it with the traceback above; the run's files are kept"
            return report_error(tokens, type(error).__name__, message, hint, EXIT_BUG)
        found = machine
    return report_error(tokens, type(found).__name__, found.message, found.hint, found.exit_code)


def _only_asks(tokens: Sequence[str]) -> bool:
    """Whether the command line asks for help or the version, which no working directory is needed for."""
    own = tokens[: tokens.index("--")] if "--" in tokens else tokens
    return not own or any(token in ("--help", "-h", "--version") for token in own)


def _expect_working_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the current directory no longer exists", hint="it was removed: change to another") from error


def _run(tokens: Sequence[str]) -> int | None:
    """Run a command line; words after two dashes are passed on unchanged, to commands that take them."""
    if "--" in tokens:
        dashes = tokens.index("--")
        command, bound, unparsed = app.parse_args(tokens[:dashes])
        if "after" in unparsed:
            return command(*bound.args, **bound.kwargs, after=tuple(tokens[dashes + 1 :]))
    return app(tokens)
