"""The Markdown account: what it says, and that it reads as meant whatever a run's names and values hold."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, copy_run, die_raising, write_run
from markdown_it import MarkdownIt
from verdicts import check_that, script_failed

from chaosrun.records.layout import RunLayout
from chaosrun.report.markdown import MOST_BYTES, render_markdown
from chaosrun.report.view import read_view
from chaosrun.verify.verdict import Verdict, judge

NASTY = "a | b `c` *d* _e_ <script>alert(1)</script> [f](http://x) \\ ~g~ $h$ &amp; ![i](j)\n\n# k\x1b[31m\x00"
SEEN = "a | b `c` *d* _e_ <script>alert(1)</script> [f](http://x) \\ ~g~ $h$ &amp; ![i](j) # k"


@pytest.fixture(scope="module")
def differing(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunLayout, Verdict]:
    run = write_run(tmp_path_factory.mktemp("failed"), bugs=Bugs(skip_off=1), reference_bugs=Bugs())
    return run, judge(run)


class Page:
    """What a reader of GitHub's flavour makes of a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = MarkdownIt("commonmark", {"html": True}).enable("table").enable("strikethrough").parse(text)

    def headings(self) -> list[str]:
        return [self.words(after) for token, after in pairwise(self.tokens) if token.type == "heading_open"]

    def tables(self) -> list[list[list[str]]]:
        """Rows of cells as they are read."""
        tables: list[list[list[str]]] = []
        for number, token in enumerate(self.tokens):
            if token.type == "table_open":
                tables.append([])
            elif token.type == "tr_open":
                tables[-1].append([])
            elif token.type in ("td_open", "th_open"):
                tables[-1][-1].append(self.words(self.tokens[number + 1]))
        return tables

    def fences(self) -> list[str]:
        return [token.content for token in self.tokens if token.type == "fence"]

    def markup(self) -> set[str]:
        """Inline markup and HTML, of blocks too."""
        inline = {child.type for token in self.tokens for child in token.children or ()}
        return inline | {token.content for token in self.tokens if token.type == "html_block"}

    @staticmethod
    def words(token: Any) -> str:
        """Without the spaces of no width that keep them from becoming links and mentions."""
        return "".join(child.content for child in token.children or ()).replace("\u200b", "")


def test_a_pass(passed: tuple[RunLayout, Verdict]) -> None:
    page = Page(render_markdown(read_view(*passed)))
    attempts = "4, 7 steps lost and done again, recovery 8.5 s"
    assert page.headings() == ["✅ PASS: toy, 3 workers", "Faults: 3 of 3 landed", f"Attempts: {attempts}"]
    faults, attempts, checks = page.tables()
    assert faults[1] == ["F1", "SIGKILL rank 1 after step 6", "attempt 1, step 6", "pid 101: SIGKILL"]
    assert attempts[2][:5] == ["2", "step-00000004", "5-9", "fault F2", "1"]
    assert {row[0] for row in checks[1:]} == {"pass"}
    assert "Whose fault" not in page.text


def test_a_fail_says_whose_fault_what_differed_and_how_to_do_it_again(differing: tuple[RunLayout, Verdict]) -> None:
    run, verdict = differing
    page = Page(render_markdown(read_view(run, verdict)))
    assert page.headings()[0] == "❌ FAIL: toy, 3 workers"
    assert "**Whose fault:** chaosrun's, most likely: 1 batch skipped on resume" in page.text
    first = dict(row for row in page.tables()[0] if len(row) == 2)
    assert first["where"] == "step 5, ranks 0, 1, 2, attempt 2, micro-batch 0"
    assert first["cause"] == "1 batch skipped"
    assert page.text.count(f"**Hint:** {verdict.hint}") == 1 and "in detail" not in first
    other = Page(render_markdown(read_view(run, replace(verdict, hint="set data.resume: seedable"))))
    assert "**Hint:** set data.resume: seedable" in other.text and "in detail" in other.text
    failing = {check.name for check in verdict.checks if check.status == "fail"}
    assert [row[1] for row in page.tables()[1][1:]] == ["data_order"]
    following = [row[1] for row in page.tables()[2][1:]]
    assert {"data_order", *following} == failing and f"{len(following)} further checks differ as a consequence" in page.text
    (commands,) = page.fences()
    # The one that does it again comes first, and they can be found from here.
    assert commands.splitlines()[0] == "chaosrun submit /job.yaml  # repeat"
    assert f"chaosrun diagnose {run.path}  # diagnose" in commands


def test_markup_in_a_run_is_text(differing: tuple[RunLayout, Verdict]) -> None:
    run, verdict = differing
    assert verdict.divergence is not None
    nasty = replace(
        verdict,
        headline=NASTY,
        hint=NASTY,
        warnings=(NASTY,),
        checks=(check_that("x|y", "fail", NASTY),),
        faults=(replace(verdict.faults[0], description=NASTY, evidence=NASTY),),
        divergence=replace(verdict.divergence, tensor=NASTY, expected=[NASTY], seen={"|": NASTY}),
    )
    page = Page(render_markdown(read_view(run, nasty)))
    first, failing, faults, attempts = page.tables()
    assert {len(row) for row in first} == {2}
    assert dict(row for row in first)["tensor"] == SEEN
    assert failing[1] == ["fail", "x|y", SEEN]
    assert faults[1][1] == faults[1][3] == SEEN
    assert len(attempts) == 1 + len(verdict.attempts)
    assert page.headings()[1:] == ["First divergence", *page.headings()[2:]]
    assert page.markup() <= {"text", "text_special", "strong_open", "strong_close", "html_inline", "softbreak"}
    assert page.text.count("<") == page.text.count("\\<") + page.text.count("<sub>") + page.text.count("</sub>")
    assert "\x1b" not in page.text and "\x00" not in page.text


def test_no_web_page_makes_a_link_or_a_mention_of_what_a_run_wrote(passed: tuple[RunLayout, Verdict]) -> None:
    run, verdict = passed
    said = "@octocat @_x a@b.org #12 !34 https://x.org ftp://x HTTP://x www.x.org"
    page = Page(render_markdown(read_view(run, replace(verdict, headline=said, warnings=(said,)))))
    assert page.words(page.tokens[4]) == said
    # Mentions and links are looked for in what a page shows, after its Markdown was read.
    shown = " ".join(child.content for token in page.tokens for child in token.children or ())
    assert "octocat" in shown
    assert re.findall(r"@\w|#\d|!\d|://|www\.", shown, re.IGNORECASE) == []


@pytest.mark.parametrize(
    "cause", ["# not a heading", "- not a list", "1. nor this", "=== nor this", "+ nor this", "--- nor this"]
)
def test_a_cause_is_a_paragraph(passed: tuple[RunLayout, Verdict], cause: str) -> None:
    run, verdict = passed
    page = Page(render_markdown(read_view(run, replace(verdict, headline=cause))))
    assert [token.type for token in page.tokens[3:6]] == ["paragraph_open", "inline", "paragraph_close"]
    assert page.words(page.tokens[4]) == cause


def test_a_job_in_backticks_stays_in_its_fence(passed: tuple[RunLayout, Verdict], tmp_path: Path) -> None:
    run, verdict = passed
    info = run.run_json.read_text()
    try:
        run.run_json.write_text(info.replace('"overrides": []', '"overrides": ["args=[```, `]"]'))
        (commands,) = Page(render_markdown(read_view(run, verdict))).fences()
    finally:
        run.run_json.write_text(info)
    assert "'args=[```, `]'" in commands


def test_it_stays_short_and_whole(differing: tuple[RunLayout, Verdict]) -> None:
    run, verdict = differing
    many = replace(
        verdict,
        checks=tuple(check_that(f"check-{number}", "fail", "x" * 10_000) for number in range(500)),
        faults=verdict.faults * 300,
        attempts=verdict.attempts * 300,
        warnings=("w" * 10_000,) * 100,
    )
    text = render_markdown(read_view(run, many))
    assert len(text.encode()) <= MOST_BYTES < 64_000
    page = Page(text)
    assert ["… 460 more", "", ""] in page.tables()[1]
    assert all(len({len(row) for row in table}) == 1 for table in page.tables())
    assert "Cut off here" not in text
    wide = replace(many, hint="|" * 100_000, warnings=("|" * 900,) * 100, checks=many.checks * 2)
    assert len(render_markdown(read_view(run, wide)).encode()) <= MOST_BYTES


def test_a_run_that_did_not_complete_shows_no_checks(passed: tuple[RunLayout, Verdict]) -> None:
    run, verdict = passed
    text = render_markdown(read_view(run, script_failed(verdict)))
    assert text.startswith("## ⚠️ INCONCLUSIVE (the script failed): toy")
    assert "### Checks" not in text
    assert "yours (the script)" in text


def test_a_script_that_failed_shows_its_traceback(passed: tuple[RunLayout, Verdict], tmp_path: Path) -> None:
    run, verdict = copy_run(passed[0], tmp_path), passed[1]
    raised = "Traceback (most recent call last):\n" + "  line\n" * 99 + "\x1b[1mValueError: ``` boom\x1b[0m"
    die_raising(run, raised)
    page = Page(render_markdown(read_view(run, script_failed(verdict, headline="rank 1 raised"))))
    assert page.headings()[1] == "Traceback of rank 1, attempt 4"
    told = page.fences()[1].splitlines()
    assert (len(told), told[-1]) == (40, "ValueError: ``` boom")
