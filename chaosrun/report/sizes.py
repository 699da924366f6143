"""Numbers of bytes for people."""

__all__ = ["size"]

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(number: float) -> str:
    """1536 → "1.5 KiB"."""
    for unit in UNITS[:-1]:
        if number < 1024:
            return f"{number:.3g} {unit}" if unit != "B" else f"{number:.0f} B"
        number /= 1024
    return f"{number:.3g} {UNITS[-1]}"
