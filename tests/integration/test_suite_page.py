"""The page of a suite in a real browser: every figure drawn, every night told, nothing beyond the edge, nothing loaded."""

import random
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chaosrun.campaign.history import Night, label, nights, trend
from chaosrun.campaign.report.pages import junit_text, render_index
from chaosrun.campaign.results import DrillResult, SuiteResult
from chaosrun.records.layout import RunLayout
from tests.browser import SCHEMES, WIDTHS, open_browser, opened, overflow
from tests.unit.run_files import write_info
from tests.unit.suites import NIGHT

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = [f"probe[workers={workers},faults={faults}]" for workers in (1, 2, 3) for faults in ("spot", "flaky-node", "torture")]
HOSTILE = "order[data.resume=<script>alert(1)</script>&\"'stateful_skip_with_a_name_that_does_not_end]"
NIGHTS = 30


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with open_browser() as browser:
        yield browser


def history() -> list[Night]:
    """Nights in which drills failed and were left out, the last with a new failure, one that stays, and one that is fixed."""
    chance = random.Random(3)
    entries = []
    for number in range(NIGHTS):
        for name in [*NAMES, HOSTILE]:
            if chance.random() < 0.05 and number < NIGHTS - 2:
                continue
            ok = chance.random() > 0.04 or number >= NIGHTS - 11
            last = {NAMES[0]: [NIGHTS - 1], NAMES[1]: [NIGHTS - 2, NIGHTS - 1], NAMES[2]: [NIGHTS - 2], HOSTILE: [NIGHTS - 1]}
            ok = ok and number not in last.get(name, [])
            when = {"suite": f"nightly-{number:02}", "night": f"2026-10-{number + 1:02}", "time_s": float(number)}
            what = {"drill": name, "ok": ok, "status": "PASS" if ok else "FAIL", "recovery_s": 0.2 + chance.random() / 3}
            entries.append(replace(NIGHT, **when, **what, cause=None, run=None, seed=20261000 + number, took_s=4.0))
    return nights(entries)


def tonight(known: list[Night], folder: Path) -> SuiteResult:
    drills = []
    for name, entry in known[-1].drills.items():
        before = [entry.ok for entry in trend(name, known[:-1])]
        run = RunLayout(folder.parent.parent / "runs" / f"run of #{len(drills)}")
        run.path.mkdir(parents=True)
        run.report_html.write_text("<!doctype html>")
        long = [f"faults.schedule=[{', '.join(f'{{rank: 0, at_step: {step}}}' for step in range(9))}]", "args=['<b>']"]
        write_info(run, job="/a/job.yaml", overrides=tuple(long))
        drill = DrillResult(
            name=name,
            run=run,
            status=entry.status,
            expected="PASS",
            cause="weights",
            difference=None if entry.ok else "data order at step 8, rank 0: expected samples [5], seen [1] <b>(epoch not set)",
            surprises=() if entry.ok else ("FAIL where PASS was expected: <i>data order",),
            **{"faults": 3, "landed": 3, "restarts": 3, "recovery_s": entry.recovery_s, "took_s": 12.3},
            **{"reference": "cached", "label": label(before, entry.ok)},
        )
        drills.append(drill)
    return SuiteResult(
        name="nightly", drills=tuple(drills), suite_id="nightly-29", night="2026-10-30", seed=20261029, took_s=512.0
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root") / "suites" / "nightly-29"
    former = folder.parent / "nightly-28"
    for each in (folder, former):
        each.mkdir(parents=True)
        (each / "index.html").write_text("<!doctype html>")
    known = history()
    (folder / "index.html").write_text(render_index(tonight(known, folder), known, folder))
    return folder / "index.html"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_fits_and_says_what_is_new(browser: "Browser", page: Path, width: int, scheme: str) -> None:
    with opened(browser, page, width=width, scheme=scheme) as seen:
        assert overflow(seen) == []
        text = seen.evaluate("document.body.innerText")
        assert "nightly: 3 of 10 drills not as expected" in text and "--seed 20261029" in text
        rows = seen.evaluate(
            "[...document.querySelectorAll('.drills tbody tr')].map(row => row.innerText.replace(/\\s+/g, ' '))"
        )
        # What is not as expected stands first.
        assert len(rows) == 10 and [("FAIL" in row) for row in rows] == [True] * 3 + [False] * 7
        tags = {row.split("]")[0]: tag for row in rows for tag in ("new", "still failing", "fixed") if f"] {tag} " in row}
        assert [tags[name.split("]")[0]] for name in NAMES[:3]] == ["new", "still failing", "fixed"]
        assert HOSTILE.split("]")[0] in " ".join(rows)
        # What is not as expected, and nothing else, can be done again.
        again = seen.evaluate("[...document.querySelectorAll('#repeats code')].map(code => code.innerText)")
        assert len(again) == 3 and all(line.startswith("chaosrun submit /a/job.yaml 'faults.schedule=[") for line in again)


def test_every_night_is_drawn_and_told(browser: "Browser", page: Path) -> None:
    with opened(browser, page) as seen:
        for figure in ("rates", "recoveries"):
            marks = seen.evaluate(f"document.querySelectorAll('#{figure} .mark').length")
            assert marks == NIGHTS
            boxes = seen.evaluate(
                f"[...document.querySelectorAll('#{figure} rect.halo')].map(e => e.getBoundingClientRect().width)"
            )
            assert min(boxes) > 5
        assert seen.evaluate("document.querySelectorAll('.drills .cells').length") == 10
        cells = seen.evaluate("[...document.querySelectorAll('.drills .cells')].map(strip => strip.children.length)")
        assert set(cells) == {NIGHTS}
        titles = seen.evaluate("[...document.querySelectorAll('#rates .mark title')].map(e => e.textContent)")
        assert titles[-1] == "2026-10-30: 7 of 10 as expected"
        high = seen.evaluate(
            "[...document.querySelectorAll('#rates .mark:last-of-type rect.odd')].map(e => e.getBoundingClientRect().height)"
        )
        assert len(high) == 1 and high[0] > 5


def test_links_lead_to_reports_and_to_other_nights(browser: "Browser", page: Path) -> None:
    with opened(browser, page) as seen:
        seen.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
        links = seen.evaluate("[...document.querySelectorAll('main a[href]')].map(link => link.getAttribute('href'))")
    assert len([link for link in links if link.startswith("../../runs/run%20of%20%23")]) == 10
    assert [link for link in links if link.endswith("index.html")] == ["../nightly-28/index.html"]
    for link in links:
        assert (page.parent / link.replace("%20", " ").replace("%23", "#")).is_file()


def test_a_first_night_and_an_empty_one(browser: "Browser", tmp_path: Path) -> None:
    known = history()[-1:]
    first = replace(tonight(known, tmp_path / "suites" / "one"), notes=("a note",))
    empty = SuiteResult(name="nightly", drills=(), suite_id="x", night="2026-10-30", left=("a", "b"))
    for number, (result, nights_before) in enumerate([(first, known), (empty, [])]):
        path = tmp_path / f"{number}.html"
        path.write_text(render_index(result, nights_before, tmp_path))
        with opened(browser, path, width=360) as seen:
            assert overflow(seen) == []
            assert ("Not begun: a, b" in seen.evaluate("document.body.innerText")) == (number == 1)
            shares = seen.evaluate(
                "[...document.querySelectorAll('#rates rect.well')].map(bar => "
                "bar.getBoundingClientRect().width / bar.closest('svg').getBoundingClientRect().width)"
            )
            assert (len(shares) == 1 and 0 < shares[0] < 0.1) if number == 0 else shares == [], "one night is one of many"


def test_junit_of_a_drill_that_could_not_run() -> None:
    error = DrillResult(name="a<b", run=None, status=None, expected="PASS", error="no place", surprises=("no place",))
    suites = ET.fromstring(junit_text(SuiteResult(name="toys", drills=(error,)))).findall("testsuite")
    assert [suite.get("name") for suite in suites] == ["a<b"]
    assert int(suites[0].get("errors") or 0) + int(suites[0].get("failures") or 0) == 1
