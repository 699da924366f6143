"""The report page in a real browser: drawn, quiet, usable with a keyboard, on a phone, in the dark and on paper."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from chaosrun.records.layout import RunLayout
from chaosrun.report.html import render_html
from chaosrun.report.view import read_view
from chaosrun.verify.verdict import judge
from tests.browser import SCHEMES, WIDTHS, Opened, open_browser, opened, overflow
from tests.unit.legs import Bugs, copy_run, edit_journal, only, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TRACEBACK = (
    "Traceback:\n  <script>document.title='owned'</script>\n" + "  a line that is much longer than any phone is wide " * 8
)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with open_browser() as browser:
        yield browser


def written(run: RunLayout) -> Path:
    run.report_html.write_text(render_html(read_view(run, judge(run))))
    return run.report_html


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(write_run(tmp_path_factory.mktemp("passed")))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that diverges, and lost a rank that nobody had planned to kill."""
    return written(write_run(tmp_path_factory.mktemp("failed"), bugs=Bugs(skip_off=1, lost_fault="F2")))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose script raised, with markup in its words."""
    whole = write_run(tmp_path_factory.mktemp("whole"), bugs=Bugs(lost_fault="F1"))
    run = copy_run(whole, tmp_path_factory.mktemp("broken"))
    error = {"type": "ValueError", "message": "<img src=x onerror=alert(1)>", "traceback": TRACEBACK}
    edit_journal(run, "chaos", only("death.unplanned", lambda line: {**line, "error": error}))
    ended = {"outcome": "user_error", "message": "rank 1 raised <b>ValueError</b>"}
    edit_journal(run, "chaos", only("leg.finished", lambda line: {**line, **ended}))
    return written(run)


@pytest.fixture
def passing_page(browser: "Browser", passed: Path) -> Iterator[Opened]:
    with opened(browser, passed) as page:
        yield page


@pytest.mark.parametrize("kind", ["passed", "failed", "broken"])
def test_nothing_overflows_complains_or_loads(browser: "Browser", request: pytest.FixtureRequest, kind: str) -> None:
    path: Path = request.getfixturevalue(kind)
    for width in WIDTHS:
        for scheme in SCHEMES:
            with opened(browser, path, width=width, scheme=scheme) as page:
                assert overflow(page) == [], f"{width} pixels, {scheme}"
                figures = page.evaluate(
                    "() => [...document.querySelectorAll('svg.plot, svg.axis')].map((svg) => svg.getBoundingClientRect())"
                    ".map((box) => box.width > 20 && box.height > 20)"
                )
                assert figures and all(figures)
                unmarked = page.evaluate(
                    "() => [...document.querySelectorAll('.mark')].filter((mark) => !mark.getBoundingClientRect().width).length"
                )
                assert unmarked == 0


@pytest.mark.parametrize("kind", ["passed", "failed"])
def test_on_a_phone_no_cell_of_a_table_is_out_of_sight(browser: "Browser", request: pytest.FixtureRequest, kind: str) -> None:
    script = """() => {
      document.querySelectorAll("details").forEach((part) => { part.open = true; });
      return [...document.querySelectorAll("main tbody th, main tbody td, main caption")]
        .filter((cell) => { const box = cell.getBoundingClientRect(); return box.right > innerWidth || box.width < 40; })
        .map((cell) => cell.outerHTML);
    }"""
    with opened(browser, request.getfixturevalue(kind), width=360) as page:
        assert page.evaluate(script) == []
        shown = page.evaluate("() => [...document.querySelectorAll('.cards td')].map((cell) => cell.dataset.label)")
        assert {"Seen", "Batches", "Where", "Landed", "Evidence", "Recovery", "Total"} <= set(shown) and None not in shown
        # Beyond the edge again without the rule for narrow pages.
        page.evaluate("() => { document.querySelectorAll('.cards').forEach((table) => table.classList.remove('cards')); }")
        assert page.evaluate(script) != []


@pytest.mark.parametrize("width", WIDTHS)
def test_every_attempt_has_its_number_where_there_is_room(browser: "Browser", passed: Path, width: int) -> None:
    with opened(browser, passed, width=width) as page:
        boxes = page.evaluate(
            "() => [...document.querySelectorAll('#timeline .names text')]"
            ".filter((name) => name.getBoundingClientRect().width)"
            ".map((name) => [name.textContent, name.getBoundingClientRect().left, name.getBoundingClientRect().right])"
        )
        assert [words for words, *_ in boxes] == ["1", "2", "3", "4"]
        assert all(before[2] < after[1] for before, after in pairwise(boxes))


def test_the_overflow_that_is_looked_for_is_seen(browser: "Browser", passed: Path) -> None:
    with opened(browser, passed, width=360) as page:
        page.evaluate("() => { document.querySelector('h1').style.width = '500px'; }")
        assert overflow(page)[0].startswith(("the page", "<h1"))


def test_what_runs_wrote_is_text(browser: "Browser", broken: Path) -> None:
    with opened(browser, broken) as page:
        assert page.page.title().startswith("INCONCLUSIVE")
        assert page.evaluate("() => document.querySelectorAll('main script, main img, h1 b').length") == 0
        assert TRACEBACK.rstrip() in page.evaluate("() => document.querySelector('#deaths details[open] pre').textContent")
        assert "Yours" in page.evaluate("() => document.querySelector('.answers').textContent")


def test_every_figure_has_its_marks(browser: "Browser", passed: Path, failed: Path) -> None:
    with opened(browser, passed) as page:
        # Three deaths, three saves, four attempts; one bar of the whole time.
        labels = marks(page, "#timeline")
        assert sum(label.startswith("Fault") for label in labels) == 3
        assert sum(label.startswith("Attempt") for label in labels) == 4
        assert sum(label.startswith("Checkpoint") for label in labels) == 3
        bars = page.evaluate("() => [...document.querySelectorAll('.bar')].map((bar) => bar.getBoundingClientRect().width)")
        assert len(bars) == 1 and bars[0] > 50
        assert page.evaluate("() => document.querySelectorAll('#curves .reference, #curves .chaos').length") == 2
        assert page.evaluate("() => document.querySelectorAll('#curves .tail').length") == 3
        assert page.evaluate("() => document.querySelector('#ulps')") is None, "there is nothing to draw"
        assert page.evaluate("() => document.querySelector('#divergence')") is None
    with opened(browser, failed) as page:
        labels = marks(page, "#timeline")
        assert [label for label in labels if label.startswith("Unplanned")]
        assert page.evaluate("() => document.querySelector('#ulps .strip').getBoundingClientRect().width") > 5
        assert page.evaluate("() => document.querySelectorAll('#ledger tr.apart').length") > 0
        assert "data order" in page.evaluate("() => document.querySelector('#divergence').textContent")


def marks(page: Opened, figure: str) -> list[str]:
    script = (
        "(figure) => [...document.querySelectorAll(figure + ' .mark')].map((mark) => mark.querySelector('title').textContent)"
    )
    return page.evaluate(script, figure)


def test_the_tab_key_goes_through_the_page_in_order(passing_page: Opened) -> None:
    page = passing_page
    stops: list[Any] = []
    for _ in range(60):
        page.page.keyboard.press("Tab")
        stops.append(
            page.evaluate(
                "() => { const at = document.activeElement; const box = at.getBoundingClientRect();"
                " const style = getComputedStyle(at.querySelector?.('.halo') ?? at);"
                " return [at.closest('[id]')?.id ?? at.tagName, box.top + scrollY,"
                " style.outlineStyle !== 'none' || style.stroke !== 'none']; }"
            )
        )
        if stops[-1][0] == "BODY":
            break
    names = [name for name, *_ in stops[:-1]]
    # The order is that of the page.
    order = ("verdict", "files")
    found = [name for name in names if name in order]
    assert found == sorted(found, key=order.index)
    assert all(visible for _, _, visible in stops[:-1])


def test_losses_are_told_in_numbers(passing_page: Opened) -> None:
    rows = passing_page.evaluate("() => [...document.querySelectorAll('#losses tbody tr')].map((row) => row.textContent)")
    assert len(rows) == 12 and rows[0].startswith("1") and sum(row.endswith("2") for row in rows) > 3


def test_the_command_can_be_copied(passing_page: Opened) -> None:
    page = passing_page
    page.evaluate("() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; }")
    button = page.page.locator("#verdict button[data-copy]")
    button.click()
    page.page.wait_for_function("() => document.querySelector('#verdict button[data-copy]').textContent === 'Copied'")
    assert page.evaluate("() => window.copied").startswith("chaosrun submit /job.yaml")


def test_on_paper_nothing_is_folded(passing_page: Opened) -> None:
    page = passing_page
    folded = "() => document.querySelectorAll('details:not([open])').length"
    before = page.evaluate(folded)
    assert before > 3
    page.page.emulate_media(media="print")
    page.page.wait_for_function("() => !document.querySelector('details:not([open])')")
    hidden = page.evaluate("() => [...document.querySelectorAll('details td')].filter((cell) => !cell.offsetHeight).length")
    assert hidden == 0
    assert page.evaluate("() => getComputedStyle(document.querySelector('[data-copy]')).display") == "none"
    # The width of A4 without its margins.
    page.page.set_viewport_size({"width": 718, "height": 1000})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 718
    page.page.emulate_media(media="screen")
    page.page.wait_for_function(f"() => ({folded})() === {before}")


def test_headings_are_in_order_and_landmarks_are_there(passing_page: Opened) -> None:
    page = passing_page
    levels = page.evaluate("() => [...document.querySelectorAll('h1, h2, h3')].map((title) => +title.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    facts = page.evaluate(
        "() => [document.documentElement.lang, document.querySelectorAll('main').length, !!document.title,"
        " new Set([...document.querySelectorAll('[id]')].map((at) => at.id)).size === document.querySelectorAll('[id]').length]"
    )
    assert facts == ["en", 1, True, True]


@pytest.mark.ray
@pytest.mark.nightly
def test_a_real_drill(browser: "Browser", warm_drills: Any, tmp_path: Path) -> None:
    job = Path(__file__).parents[2] / "jobs" / "probe" / "job.yaml"
    result = warm_drills(job, root=tmp_path / "root")
    with opened(browser, written(result.run), width=360) as page:
        assert overflow(page) == []
        assert "Bit-identical" in page.evaluate("() => document.querySelector('h1').textContent")
        # Every phase of a recovery is known of a real one.
        assert "not known" not in page.evaluate("() => document.querySelector('#recovery').textContent")
        assert "replaced" not in page.evaluate("() => document.body.textContent")
