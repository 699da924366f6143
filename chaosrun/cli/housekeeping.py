"""Commands that look after an installation: parse, call `chaosrun.api`, print, return the exit code."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from chaosrun import api
from chaosrun.cli.options import OUT, Out, Root, as_text, duration_s, show
from chaosrun.errors import UsageError
from chaosrun.wording import count, size, span

if TYPE_CHECKING:
    from rich.console import RenderableType

    from chaosrun.housekeeping.cleaning import Cleaning
    from chaosrun.housekeeping.environment import Facts

DEFAULT_AGE = "14d"
DAY_S = 86400.0


def env(*, root: Root = None, out: Out = OUT) -> int:
    """Print what a bug report needs: versions, machine, limits and settings, without secrets."""
    facts = api.environment(root)
    return show(out, lambda: facts, lambda: "".join(f"{line}\n" for line in environment_lines(facts)))


def environment_lines(facts: "Facts", indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from environment_lines(value, f"{indent}  ")
        else:
            told = size(value) if name.endswith("_bytes") and isinstance(value, int) else "-" if value is None else value
            yield f"{indent}{name}: {told}".replace("\n", f"\n{indent}  ")


def clean(
    *,
    older_than: Annotated[
        str | None, Parameter(help=f"Only what is older than this, such as 36h (default: {DEFAULT_AGE}; with --keep: any age).")
    ] = None,
    keep: Annotated[int, Parameter(help="Keep this many of the newest of each kind.")] = 0,
    failed: Annotated[bool, Parameter(help="Also what did not PASS: failed, inconclusive, interrupted, damaged.")] = False,
    dry_run: Annotated[bool, Parameter(help="Only say what would go.")] = False,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], help="Do not ask.")] = False,
    root: Root = None,
    out: Out = OUT,
) -> int:
    """Remove old runs that passed, with their checkpoints, and old references, sweeps and suites."""
    if keep < 0:
        raise UsageError(f"--keep {keep} is not a number of runs", hint="give --keep 0 or more")
    age = older_than or (None if keep else DEFAULT_AGE)
    may_ask = not out.is_json and sys.stdin.isatty() and sys.stderr.isatty()

    asked = False

    def agreed(intended: "Cleaning") -> bool:
        nonlocal asked
        if dry_run or yes:
            return yes and not dry_run
        if not may_ask:
            raise UsageError(
                f"{_cleaning_sentence(intended)}, and there is no terminal to ask on",
                hint="add --yes to remove it, or --dry-run to see it",
            )
        asked = True
        sys.stderr.write(as_text(_cleaning_page(intended)) + "Remove it? [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    cleaning = api.clean(
        root, older_than_s=0.0 if age is None else duration_s("--older-than", age), keep=keep, failed=failed, agreed=agreed
    )
    refused = "nothing was removed\n" if asked and not cleaning.done else None
    show(out, cleaning.to_json, lambda: refused or _cleaning_page(cleaning, short=out.quiet or asked))
    return 0


def _cleaning_page(cleaning: "Cleaning", *, short: bool = False) -> "RenderableType":
    """A line for each thing removed, what stays and why, and the space that is freed. `short`: only the last line."""
    from rich.console import Group

    from chaosrun.report.page import columns, unwrapped

    last = unwrapped(_cleaning_sentence(cleaning))
    if short:
        return last
    choice, parts = cleaning.choice, []
    if choice.removed:
        table = columns("what", "name", "status", "age", "size", right=("age", "size"))
        now_s = time.time()
        for found, bytes_ in zip(choice.removed, cleaning.sizes, strict=True):
            age_s = max(0.0, now_s - found.used_s)
            age = span(age_s) if age_s < 2 * DAY_S else f"{age_s / DAY_S:.0f} days"
            table.add_row(found.kind, found.name, found.status, age, size(bytes_))
        parts += [table, ""]
    reasons = Counter((kept.found.kind, kept.why) for kept in choice.kept)
    kept = [f"{count(number, kind)}: {why}" for (kind, why), number in reasons.items()]
    kept += [f"{place}: these checkpoints may belong to another run" for place in cleaning.spared]
    return Group(*parts, *(unwrapped(f"kept      {line}") for line in kept), last)


def _cleaning_sentence(cleaning: "Cleaning") -> str:
    """What was removed, or would be, and how much space that frees."""
    counts = Counter(found.kind for found in cleaning.choice.removed)
    what = [count(number, kind) for kind, number in counts.items()]
    if cleaning.leftovers:
        what.append("what an earlier cleaning left")
    if not what:
        return f"there is nothing to remove under {cleaning.root}"
    return f"{'removed' if cleaning.done else 'to be removed'}: {', '.join(what)}, {size(cleaning.freed_bytes)}"


def completion_of(app: App) -> Callable[..., int]:
    """The command that completes the command line of `app`."""

    def completion(
        shell: Annotated[Literal["bash", "zsh", "fish"] | None, Parameter(name="SHELL", help="Default: your shell.")] = None,
        /,
        *,
        install: Annotated[bool, Parameter(help="Write it where the shell looks, and load it in its startup file.")] = False,
        out: Out = OUT,
    ) -> int:
        """Print what makes a shell complete commands, options and run ids; --install puts it in place."""
        chosen = shell or _this_shell()
        if install:
            path = app.install_completion(shell=chosen)
            said = f"wrote     {path}\n" + ("" if out.quiet else f"next      begin a new {chosen}\n")
            show(out, lambda: {"v": 1, "shell": chosen, "path": str(path)}, lambda: said)
            return 0
        script = app.generate_completion(shell=chosen)
        return show(out, lambda: {"v": 1, "shell": chosen, "script": script}, lambda: script)

    return completion


def _this_shell() -> Literal["bash", "zsh", "fish"]:
    from cyclopts.completion import ShellDetectionError, detect_shell

    try:
        found = detect_shell()
    except ShellDetectionError as error:
        raise UsageError("cannot tell which shell this is", hint="name it: bash, zsh or fish") from error
    if found not in ("bash", "zsh", "fish"):
        raise UsageError(f"there is no completion for {found}", hint="name another: bash, zsh or fish")
    return found
