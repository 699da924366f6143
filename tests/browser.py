"""A real headless Chromium for tests of the pages that chaosrun writes, and what must hold for any of them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NEEDED = "CHAOSRUN_TESTS_NEED_CHROMIUM"
"""Set where a missing browser is a failure, not a reason to skip."""
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDTHS = (360, 1440)
SCHEMES = ("light", "dark")


@contextmanager
def open_browser() -> "Iterator[Browser]":
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        reason = "there is no chromium to look at the pages with (`make browser`)"
        pytest.fail(reason) if os.environ.get(NEEDED) else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@dataclass(slots=True)
class Opened:
    """A page, and what it said and asked for."""

    page: "Page"
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def evaluate(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)


@contextmanager
def opened(browser: "Browser", path: Path, *, width: int = 1440, scheme: Any = "light") -> Iterator[Opened]:
    """The page as it looks at this width; fails when it complains or loads anything but itself."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
    context.set_default_timeout(120_000)
    found = Opened(context.new_page())
    found.page.on("console", lambda message: found.console.append(message.text))
    found.page.on("pageerror", lambda error: found.console.append(str(error)))
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.goto(path.absolute().as_uri())
    yield found
    assert found.console == []
    assert [url for url in found.requests if not url.startswith("data:")] == [path.absolute().as_uri()]
    context.close()


def overflow(page: Opened) -> list[str]:
    """What reaches beyond the page's right edge, but for what scrolls in a box of its own."""
    script = """() => {
      const wide = document.documentElement.scrollWidth > innerWidth ? ["the page"] : [];
      const boxed = (element) => element.closest(".scroll, pre, svg, .skip, .visually-hidden");
      for (const element of document.querySelectorAll("main *"))
        if (!boxed(element) && element.getBoundingClientRect().right > innerWidth + 0.5) wide.push(element.outerHTML);
      return wide;
    }"""
    return page.evaluate(script)
