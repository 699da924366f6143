"""How a drill without a verdict on its recovery ended, in words: what tells one INCONCLUSIVE from another."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from chaosrun.records.journal import Outcome

if TYPE_CHECKING:
    from chaosrun.verify.verdict import Verdict

OUTCOME_WORDS: Mapping[Outcome, str] = {
    "user_error": "the script failed",
    "recovery_failed": "recovery failed",
    "resources": "no resources",
    "timeout": "timed out",
    "interrupted": "interrupted",
}
"""Of a leg that did not complete."""


def undecided_by(verdict: "Verdict") -> str | None:
    """None where the status says it all, or the checks have the reason."""
    if verdict.status != "INCONCLUSIVE" or verdict.outcome is None:
        return None
    return OUTCOME_WORDS.get(verdict.outcome)


def status_words(verdict: "Verdict") -> str:
    """ "INCONCLUSIVE: the script failed"; the status alone where that is all."""
    why = undecided_by(verdict)
    return verdict.status if why is None else f"{verdict.status}: {why}"
