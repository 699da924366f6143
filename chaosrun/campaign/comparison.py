"""Which drills of tonight have their losses compared, and what of that a part of the suite cannot say. Pure."""

from collections.abc import Sequence

from chaosrun.spec.suite import Comparison, Suite, SuiteDrill
from chaosrun.wording import listed

MOST_NAMED = 12


def comparison_of(suite: Suite, tonight: Sequence[SuiteDrill]) -> tuple[Comparison | None, list[str]]:
    """The suite's comparison as far as tonight's drills go, its first drill named whatever else runs; and what is to be told
    of those that it leaves out."""
    asked = suite.spec.comparison
    if asked is None:
        return None, []
    first = asked.first or suite.drills[0].name
    here = [drill.name for drill in tonight]
    elsewhere = [drill.name for drill in suite.drills if drill.name not in here]
    if not here:
        return None, []
    if first not in here:
        return None, [f"the losses are not compared: drill {first} is not in this part of the suite"]
    if here == [first] and elsewhere:
        return None, [f"the losses are not compared: of the drills with losses {first} alone is in this part of the suite"]
    notes = (
        [f"the losses are compared of {listed(here, MOST_NAMED)} alone: {listed(elsewhere, MOST_NAMED)} left out"]
        if elsewhere
        else []
    )
    return asked.model_copy(update={"first": first, "beyond": tuple(name for name in asked.beyond if name in here)}), notes
