"""The page of a preflight in a real browser: nothing beyond the edge, nothing loaded, every node can be found, on paper too."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from chaosrun.preflight.report.html import render_html
from tests.browser import SCHEMES, WIDTHS, open_browser, opened, overflow
from tests.unit.preflight_results import node, odd_bits, result, small_shm, sound, three_bad_of_512

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LONG = "node-with-a-name-that-does-not-end-" + "x" * 60 + "-{:03}"


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    one = [node(1, gpus=0, cpus=2.0)]
    long = [node(number, LONG, gpus=1) for number in range(1, 9)]
    odd = [odd_bits(long[0].name), *(small_shm(each.name, f"{place} MiB <b>") for place, each in enumerate(long[:6]))]
    results = {
        "512": three_bad_of_512(),
        "one": result(one, sound(one), job="job.yaml"),
        "long": result(long, [*sound(long), *odd], address="10.0.0.1:6379"),
        "nothing": result([], [], checks=()),
    }
    for name, value in results.items():
        (folder / f"{name}.html").write_text(render_html(value))
    return {name: folder / f"{name}.html" for name in results}


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [*((name, width, "light") for name in ("one", "long") for width in WIDTHS), ("nothing", WIDTHS[0], "light")]
    + [("512", width, scheme) for width in WIDTHS for scheme in SCHEMES],
)
def test_it_fits(browser: "Browser", pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    with opened(browser, pages[name], width=width, scheme=scheme) as seen:
        assert overflow(seen) == []
        seen.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
        assert overflow(seen) == []


def test_what_is_wrong_comes_first_and_every_node_is_there(browser: "Browser", pages: dict[str, Path]) -> None:
    with opened(browser, pages["512"]) as seen:
        text = seen.evaluate("document.body.innerText")
        order = ["NOT FIT", "What is wrong", "gpu-017 cuda:3", "Warnings", "Nodes", "Left out", "Measured", "Not looked at"]
        assert sorted(order, key=text.index) == order
        rows = seen.evaluate("[...document.querySelectorAll('.matrix tbody tr')].map(row => row.innerText.split(/\\s+/))")
        assert len(rows) == 6 and rows[0][0] == "gpu-017" and rows[0].count("FAIL") == 1
        # No table is cut off where there is room.
        assert seen.evaluate("[...document.querySelectorAll('.scroll')].every(box => box.scrollWidth <= box.clientWidth)")
        listed = seen.evaluate("[...document.querySelectorAll('#nodes details')].map(details => details.textContent).join(' ')")
        assert all(f"gpu-{number:03}" in listed for number in range(1, 513))
        assert seen.evaluate("document.documentElement.scrollHeight") < 5000


def test_the_keyboard_reaches_what_can_be_done(browser: "Browser", pages: dict[str, Path]) -> None:
    with opened(browser, pages["512"]) as seen:
        reached = []
        for _ in range(13):
            seen.page.keyboard.press("Tab")
            reached.append(seen.evaluate("document.activeElement.tagName"))
        assert reached[0] == "A" and reached.count("SUMMARY") == 4 and reached.count("BUTTON") == 2
        seen.page.evaluate("document.querySelector('.matrix summary').focus()")
        seen.page.keyboard.press("Enter")
        assert seen.evaluate("document.querySelector('.matrix details').open")


def test_on_paper_nothing_is_folded_or_cut_off(browser: "Browser", pages: dict[str, Path]) -> None:
    with opened(browser, pages["512"], width=720) as seen:
        seen.page.emulate_media(media="print")
        seen.page.wait_for_function("() => [...document.querySelectorAll('details')].every(details => details.open)")
        assert overflow(seen) == []
        assert seen.evaluate("[...document.querySelectorAll('.scroll')].every(box => box.scrollWidth <= box.clientWidth)")
