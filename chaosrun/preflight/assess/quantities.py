"""Bytes, ages and durations as people read them. Pure."""

__all__ = ["GIB", "MIB", "ago", "duration", "size", "with_unit"]

MIB = 1 << 20
GIB = 1 << 30


def size(number: float) -> str:
    """1610612736 → "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        # Four digits would be told as 1e+03.
        if abs(number) < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB"


def ago(seconds: float) -> str:
    """7300 → "2 h ago"."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def duration(seconds: float) -> str:
    """0.0123 → "12.3 ms", 75 → "75 s", 7200 → "2 h"."""
    for unit, factor, below in (("µs", 1e6, 1e-3), ("ms", 1e3, 1.0), ("s", 1.0, 300.0), ("min", 1 / 60, 7200.0)):
        if abs(seconds) < below:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds / 3600:.3g} h"


def with_unit(number: float, unit: str) -> str:
    """Any number with its unit, bytes and seconds as people read them: (3e9, "B/s") → "2.79 GiB/s"."""
    if unit in ("B", "B/s"):
        return size(number) + unit[1:]
    return duration(number) if unit == "s" else f"{number:.4g} {unit}".rstrip()
