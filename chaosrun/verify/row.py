"""The types for blame and for the rows of the table of causes. The rows themselves are in `code_*`, see `codes`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Whose = Literal["nobody", "planned", "yours", "library", "machine", "chaosrun", "unknown"]
Part = Literal["script", "job file", "plan", "command"]

WHOSE: Mapping[Whose, str] = {
    "nobody": "nobody's",
    "planned": "as planned",
    "yours": "yours",
    "library": "a library's",
    "machine": "the machine's",
    "chaosrun": "chaosrun's",
    "unknown": "not known",
}
"""In words, as an answer to "whose fault is it?"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Whose fault it is: chaosrun is responsible for the state and data order that it restores, the script for its use of
    them."""

    whose: Whose
    likely: bool = False
    """The records point there without proving it."""
    part: Part | None = None
    """If the fault is the user's: where to look."""
    reason: str
    """A clause for people: "its own steps differ, although everything was restored as it was saved"."""

    @property
    def words(self) -> str:
        """ "yours (the script), most likely"."""
        part = "" if self.part is None else f" (the {self.part})"
        return f"{WHOSE[self.whose]}{part}{', most likely' if self.likely else ''}"

    @property
    def sentence(self) -> str:
        return f"{self.words}: {self.reason}"


def nobody(reason: str) -> Blame:
    return Blame(whose="nobody", reason=reason)


def script(reason: str, *, likely: bool = False) -> Blame:
    return Blame(whose="yours", part="script", reason=reason, likely=likely)


def plan(reason: str, *, likely: bool = False) -> Blame:
    return Blame(whose="yours", part="plan", reason=reason, likely=likely)


def machine(reason: str, *, likely: bool = False) -> Blame:
    return Blame(whose="machine", reason=reason, likely=likely)


def ours(reason: str, *, likely: bool = False) -> Blame:
    return Blame(whose="chaosrun", reason=f"{reason}; please report it, with the run's folder", likely=likely)


def unknown(reason: str) -> Blame:
    return Blame(whose="unknown", reason=reason)


OF_NO_STATE = (
    "what no restart can restore (elapsed seconds, a time, a process id) is not training state: leave it out of state_dict(), "
    "and keep it in a separate file"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Sentence, hint and reason are templates over the cause's parameters.

    Of a number, `{steps:step}` makes "3 steps"; of several names, `{names}` makes "a, b" and `{names:1}` "a and 3 more".
    """

    sentence: str
    """A few words, or one sentence, without a full stop."""
    blame: Blame | None = None
    hint: str | None = None
    """What to do, or details."""
    hazard: str | None = None
    """Row of docs/hazards.md."""


def detail(*, hint: str, hazard: str | None = None) -> Row:
    """A row whose hint replaces that of a code's own row, or stands before it (`codes._EVIDENCE`)."""
    return Row("", hint=hint, hazard=hazard)
