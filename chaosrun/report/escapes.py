"""Makes text from a run's files, which any program may have written, safe to show: no control sequence reaches the terminal."""

import re
import unicodedata

_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours and movements of the cursor (ECMA-48, 5.4: control sequences)."""


def without_escapes(text: str) -> str:
    """Remove the colours that a library wrote into its message for a terminal."""
    return _SEQUENCE.sub("", text)


def harmless(text: str) -> str:
    """Keep line breaks and tabs, remove colours, and make other control characters visible."""
    return "".join(each if each.isprintable() or each in "\t\n" else _visible(each) for each in without_escapes(text))


def harmless_on_a_page(text: str) -> str:
    """As `harmless`, but a browser shows what is no control character: a no-break space, the joined parts of an emoji. A lone
    surrogate, which no page can hold, is replaced, too."""
    shown = without_escapes(text)
    return "".join(
        _visible(each) if unicodedata.category(each) in ("Cc", "Cs") and each not in "\t\n" else each for each in shown
    )


def on_one_line(text: str) -> str:
    """Replace characters that do not print with blanks, for places with room for one line."""
    return "".join(each if each.isprintable() else " " for each in without_escapes(text))


def _visible(control: str) -> str:
    """\\u241b for an escape: the first control characters have characters that stand for them."""
    return chr(0x2400 + ord(control)) if ord(control) < 0x20 else "\ufffd"
