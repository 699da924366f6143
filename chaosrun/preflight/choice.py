"""Which checks a preflight makes: those of its level, or those that are named."""

from collections.abc import Sequence

from chaosrun.errors import UsageError
from chaosrun.preflight.model import Check, Level


def choose(checks: Sequence[Check], level: Level, *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> tuple[Check, ...]:
    """In the catalogue's order. A check that is named is made whatever its level. Raises UsageError for a name that none has,
    and when nothing is left."""
    names = [check.name for check in checks]
    for option, wanted in (("--only", only), ("--skip", skip)):
        for name in wanted:
            if name not in names:
                raise UsageError(f"{option} {name}: there is no such check", hint=_hint(name, names))
    chosen = tuple(
        check for check in checks if check.name not in skip and (check.name in only if only else level.includes(check.level))
    )
    if not chosen:
        raise UsageError("no check is left to make", hint=f"there are {', '.join(names)}")
    return chosen


def _hint(name: str, names: Sequence[str]) -> str:
    from chaosrun.spec.diagnosis import nearest

    spelt = {known.replace(" ", "_"): known for known in names}
    close = nearest(name.replace(" ", "_"), spelt)
    return f"did you mean {spelt[close]!r}?" if close else f"there are {', '.join(names)}"
