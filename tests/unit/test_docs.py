"""The documents keep their word: every hazard has its row, every row its anchor, every test that a row names exists."""

import re
from pathlib import Path

from chaosrun.verify import hazards

ROOT = Path(__file__).parents[2]
HAZARDS = (ROOT / "docs" / "hazards.md").read_text()
TEST = re.compile(r"`((?:unit|integration|e2e|oracle)/[\w/]+\.py)((?:::\w+)+)`")
GROUPS = {"d": 21, "r": 9, "g": 5, "o": 10, "c": 9, "k": 7, "s": 12, "p": 11, "x": 5}
HANDLINGS = {"prevented", "refused", "detected", "warned", "diagnosed", "shown", "GPU"}
UNTESTED_HERE = {"R8", "C5", "K3", "K5", "K6", "K7"}


def rows() -> dict[str, list[str]]:
    found = {}
    for line in HAZARDS.splitlines():
        if match := re.match(r'\| <a id="(\w+)"></a>([A-Z0-9, ]+) \|', line):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert match[1] == match[2].split(",")[0].lower(), line
            assert len(cells) == 5, line
            found[match[2]] = cells
    return found


def test_every_hazard_has_its_row() -> None:
    named = {name for row in rows() for name in row.split(", ")}
    assert named == {f"{group.upper()}{number}" for group, count in GROUPS.items() for number in range(1, count + 1)}


def test_every_row_says_how_it_is_handled_and_where_that_is_shown() -> None:
    for name, (_, hazard, handling, how, shown) in rows().items():
        assert hazard and how, name
        assert "@" not in f"{handling} {how} {shown}", name
        words = {word for part in re.split("[;,]", handling) for word in part.split()[:1]} - {"or", "the"}
        assert words <= HANDLINGS | {"or"} and words, (name, handling)
        assert bool(TEST.search(shown)) != (name in UNTESTED_HERE and shown == "none"), name


def test_every_row_that_a_diagnosis_links_to_is_there() -> None:
    anchors = set(re.findall(r'<a id="(\w+)"></a>', HAZARDS))
    assert {row.lower() for row in hazards.HAZARDS} <= anchors


def test_every_test_that_is_named_exists() -> None:
    named = TEST.findall(HAZARDS)
    assert len(named) > 60
    for path, parts in named:
        source = (ROOT / "tests" / path).read_text()
        for part in parts.strip(":").split("::"):
            assert re.search(rf"^\s*(?:class|def) {part}\b", source, re.MULTILINE), f"{path}{parts}"
