"""The kinds of faults and the table in docs/faults.md are one closed set."""

import re
from pathlib import Path

from chaosrun.faults.kind import PHASES
from chaosrun.faults.kinds import FAMILIES, KINDS

ROOT = Path(__file__).parents[2]
FAULTS = (ROOT / "docs" / "faults.md").read_text()


def test_every_kind_has_one_way_to_strike_at_a_point() -> None:
    for name, kind in KINDS.items():
        # What does not strike inside, the supervisor does, or the agent on its word.
        assert kind.inside or kind.timed, name
        assert not (kind.outside and kind.last_act), name


def test_no_two_families_declare_the_same_kind() -> None:
    declared = [kind.name for family in FAMILIES for kind in family.KINDS]
    assert sorted(declared) == sorted(KINDS) and len(declared) == len(KINDS)


def test_every_kind_strikes_somewhere_by_default() -> None:
    for name, kind in KINDS.items():
        assert kind.phases <= set(PHASES), name
        assert kind.default_phase in kind.phases, name
        # Only a kind that the rank outlives, or that is told from outside, can show otherwise than by a death.
        assert kind.evidence != "death" or kind.signals or kind.exit_code is not None, name


def test_the_readme_counts_them() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"The {len(KINDS)} kinds of faults, {len(PHASES)} points in a worker to strike at" in readme


def test_the_table_has_a_row_for_every_kind() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .+? \| (.+ \| (?:PASS|FAIL)) \|$", FAULTS, re.MULTILINE))
    assert rows == {name: f"{kind.proof} | {kind.verdict}" for name, kind in KINDS.items()}
