"""Commands that look after an installation: parse, call `chaosrun.api`, print, return the exit code."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from chaosrun.cli.arguments import Format, Quiet, Root, duration_s
from chaosrun.cli.terminal import page
from chaosrun.errors import UsageError
from chaosrun.report.output import write_json, write_out

if TYPE_CHECKING:
    from chaosrun.housekeeping.cleaning import Cleaning

DEFAULT_AGE = "14d"


def env(*, root: Root = None, quiet: Quiet = False, output: Format = "text") -> int:
    """Print what a bug report needs: versions, machine, limits and settings, without secrets."""
    from chaosrun import api

    facts = api.environment(root)
    if output == "json":
        write_json(facts)
    else:
        from chaosrun.cli.environment import environment_lines

        write_out("".join(f"{line}\n" for line in environment_lines(facts)))
    return 0


def clean(
    *,
    older_than: Annotated[
        str | None,
        Parameter(help=f"Only what was begun longer ago, such as 36h (default: {DEFAULT_AGE}; with --keep: any age)."),
    ] = None,
    keep: Annotated[int, Parameter(help="Leave the newest so many of each kind.")] = 0,
    failed: Annotated[bool, Parameter(help="Also what did not PASS: failed, inconclusive, interrupted, damaged.")] = False,
    dry_run: Annotated[bool, Parameter(help="Only say what would go.")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], help="Do not ask.")] = False,
    root: Root = None,
    quiet: Quiet = False,
    output: Format = "text",
) -> int:
    """Remove old runs that passed, with their checkpoints, and old references, sweeps and suites."""
    from chaosrun import api
    from chaosrun.cli.cleaning import cleaning_sentence

    if keep < 0:
        raise UsageError(f"--keep {keep} is no number of runs", hint="give --keep 0 or more")
    age = older_than or (None if keep else DEFAULT_AGE)
    may_ask = output == "text" and sys.stdin.isatty() and sys.stderr.isatty()

    shown: list[Cleaning] = []

    def agreed(intended: "Cleaning") -> bool:
        if dry_run:
            return False
        if yes:
            return True
        if not may_ask:
            raise UsageError(
                f"{cleaning_sentence(intended)}, and nobody can be asked here",
                hint="add --yes to remove it, or --dry-run to see it",
            )
        shown.append(intended)
        _show(intended, sys.stderr.write)
        sys.stderr.write("Remove it? [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    cleaning = api.clean(
        root, older_than_s=0.0 if age is None else duration_s("--older-than", age), keep=keep, failed=failed, agreed=agreed
    )
    if output == "json":
        write_json(cleaning.to_json())
    elif shown and not cleaning.done:
        write_out("nothing was removed\n")
    else:
        _show(cleaning, write_out, short=quiet or bool(shown))
    return 0


def _show(cleaning: "Cleaning", write: Callable[[str], object], *, short: bool = False) -> None:
    from chaosrun.cli.cleaning import render_cleaning

    write(page(render_cleaning(cleaning, short=short)))


def completion_of(app: App) -> Callable[..., int]:
    """The command that completes the command line of `app`."""

    def completion(
        shell: Annotated[
            Literal["bash", "zsh", "fish"] | None, Parameter(name="SHELL", help="Default: the one this is run from.")
        ] = None,
        /,
        *,
        install: Annotated[
            bool, Parameter(help="Put it where the shell looks for it, and have the shell's startup file load it.")
        ] = False,
        quiet: Quiet = False,
        output: Format = "text",
    ) -> int:
        """Print what makes a shell complete commands, options and run ids; --install puts it in place."""
        chosen = shell or _this_shell()
        if install:
            path = app.install_completion(shell=chosen)
            if output == "json":
                write_json({"v": 1, "shell": chosen, "path": str(path)})
            else:
                write_out(f"wrote     {path}\n" + ("" if quiet else f"next      begin a new {chosen}\n"))
            return 0
        script = app.generate_completion(shell=chosen)
        if output == "json":
            write_json({"v": 1, "shell": chosen, "script": script})
        else:
            write_out(script)
        return 0

    return completion


def _this_shell() -> Literal["bash", "zsh", "fish"]:
    from cyclopts.completion import ShellDetectionError, detect_shell

    try:
        found = detect_shell()
    except ShellDetectionError as error:
        raise UsageError("which shell this is cannot be told", hint="name it: bash, zsh or fish") from error
    if found not in ("bash", "zsh", "fish"):
        raise UsageError(f"there is no completion for {found}", hint="name another: bash, zsh or fish")
    return found
