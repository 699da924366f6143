"""The catalogue of fault kinds, the arms that strike, and the table in docs/faults.md are one closed set."""

import re
from pathlib import Path
from typing import get_args

from chaosrun.faults.arms import ARMS
from chaosrun.faults.kind import PHASES, FaultKind
from chaosrun.faults.kinds import KINDS

FAULTS = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()


def test_every_kind_has_its_facts_and_nothing_else_has() -> None:
    assert KINDS.keys() == set(get_args(FaultKind))


def test_every_kind_of_the_worker_has_an_arm_and_no_other_has() -> None:
    assert ARMS.keys() == {name for name, kind in KINDS.items() if kind.striker == "worker"}


def test_every_kind_strikes_somewhere_by_default() -> None:
    for name, kind in KINDS.items():
        assert kind.phases <= set(PHASES), name
        assert kind.default_phase in kind.phases, name
        # Only a kind that the rank outlives, or that is told from outside, can show otherwise than by a death.
        assert kind.evidence != "death" or kind.signals or kind.exit_codes != "none", name


def test_the_table_has_a_row_for_every_kind() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .+? \| (.+ \| (?:PASS|FAIL)) \|$", FAULTS, re.MULTILINE))
    assert rows == {name: f"{kind.proof} | {kind.verdict}" for name, kind in KINDS.items()}
