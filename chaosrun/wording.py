"""Numbers and lists, worded for people. Pure; knows nothing of drills."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

MIB = 1 << 20
GIB = 1 << 30
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|COOKIE|(^|_)(KEY|AUTH|PASS|PWD)(_|$)|APIKEY")
"""Names of variables that may hold secrets."""
LEFT_OUT = "(left out)"


def count(number: int | None, one: str, many: str | None = None) -> str:
    """1 → "1 step", 2 → "2 steps"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are: "a, b and 3 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def rank_list(numbers: Iterable[int]) -> str:
    """[1] → "rank 1", [0, 1] → "ranks 0 and 1", 0 to 39 and 41 → "ranks 0-39 and 41"."""
    parts: list[str] = []
    in_order = sorted(numbers)
    # Consecutive numbers have the same difference to their index.
    for _, run in groupby(enumerate(in_order), lambda placed: placed[1] - placed[0]):
        near = [str(number) for _, number in run]
        parts += near if len(near) < 3 else [f"{near[0]}-{near[-1]}"]
    told = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
    return f"rank{'s' if len(in_order) > 1 else ''} {told}"


def size(number: float) -> str:
    """Bytes: 1610612736 → "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # Four digits would be printed as 1e+03.
        if abs(number) < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} PiB"


def duration(seconds: float) -> str:
    """0.0123 → "12.3 ms", 250 → "4 min 10 s", 90061 → "1 d 1 h"."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    for unit, factor, below in (("µs", 1e6, 999.5), ("ms", 1e3, 999.5), ("s", 1.0, 59.95)):
        if seconds * factor < below:
            return f"{seconds * factor:.3g} {unit}"
    whole = round(seconds)
    longer = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    length, unit, part, smaller = next(units for units in longer if whole >= units[0])
    rest = whole % length // part
    return f"{whole // length} {unit}" + (f" {rest} {smaller}" if rest else "")


def span(seconds: float) -> str:
    """A duration in at most six characters: 0.18 s, 4.2 s, 37 s, 2m05s, 3h07m."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def ago(seconds: float) -> str:
    """7300 → "2 h ago"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def with_unit(number: float, unit: str) -> str:
    """Any number with its unit, bytes and seconds as people read them: (3e9, "B/s") → "2.79 GiB/s"."""
    if unit in ("B", "B/s"):
        return size(number) + unit[1:]
    return duration(number) if unit == "s" else f"{number:.4g} {unit}".rstrip()


def hiding(began_with: str | None) -> str:
    """Advice for a script that resumed from an earlier run's checkpoint; `began_with`: that checkpoint, if known."""
    if began_with is None:
        return "where it resumed from a checkpoint of an earlier run, outputs=[FOLDER] hides that folder from each leg"
    folder = began_with.rpartition("/")[0] or began_with
    return f"it read {began_with}: if an earlier run left that, outputs=[{folder}] hides it from each leg"
