"""Text from a run's files, which anything may have written, made safe to show: no control sequence reaches the terminal."""

import re

_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours and movements of the cursor (ECMA-48, 5.4: control sequences)."""


def without_escapes(text: str) -> str:
    """Without the colours that a library wrote into its message for a terminal."""
    return _SEQUENCE.sub("", text)


def harmless(text: str) -> str:
    """Lines and tabs stay, colours go, other controls become visible."""
    return "".join(each if each.isprintable() or each in "\t\n" else _visible(each) for each in without_escapes(text))


def on_one_line(text: str) -> str:
    """With a blank for whatever does not print: where a line is all the room there is."""
    return "".join(each if each.isprintable() else " " for each in without_escapes(text))


def _visible(control: str) -> str:
    """\\u241b for an escape: the first control characters have characters that stand for them."""
    return chr(0x2400 + ord(control)) if ord(control) < 0x20 else "\ufffd"
