"""Seeds of a night: one number, printed, from which every drill's faults are drawn. Pure."""

import hashlib
import re
from datetime import UTC, datetime

from chaosrun.errors import UsageError

NUMBER = re.compile(r"[0-9]{1,18}")


def night_of(now_s: float) -> str:
    """The date, in UTC: `2026-11-21`."""
    return datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%d")


def parse_seed(text: str, now_s: float) -> int:
    """`today`, the date in UTC as a number (20261121), or a number. Raises UsageError."""
    if text == "today":
        return int(night_of(now_s).replace("-", ""))
    if not NUMBER.fullmatch(text):
        raise UsageError(f"--seed {text!r} is no seed", hint="write today, or a number such as 20261121")
    return int(text)


def derive(seed: int, drill: str, draw: int = 0) -> int:
    """The seed of one drill's faults, for its first, second, … draw. Of the drill's name alone: what else is in the suite, or
    is left out of it, changes nothing."""
    digest = hashlib.sha256(f"{seed}/{drill}/{draw}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1
