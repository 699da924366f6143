"""What stands on the report page, whatever became of the run; and that it stays small. How it looks, a browser tells:
tests/integration/test_report_page.py."""

import contextlib
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from verdicts import saying

from chaosrun.errors import ChaosrunError
from chaosrun.faults.fault import Fault
from chaosrun.records.layout import RUN, RunLayout
from chaosrun.records.traces import StepRecord
from chaosrun.report.html import render_html
from chaosrun.report.html.losses import thinned
from chaosrun.report.html.page import TEMPLATES, Scale, integer_ticks, moment, number, sentence, ticks
from chaosrun.report.html.samples import _rows
from chaosrun.report.view import read_view
from chaosrun.verify.hazards import Hazard
from chaosrun.verify.verdict import Verdict, judge
from tests.long_runs import write_long_run
from tests.unit.fuzzing import AMOUNTS, changed_as, tried
from tests.unit.legs import Bugs, drop, edit_journal, edit_ranks, edit_trace, only, put, write_run
from tests.unit.script_legs import write_script_run
from tests.unit.test_report_diagnosis import DIAGNOSIS

MARKUP = "<script>alert('x')</script>&\"'"
MOST_BYTES = 1_500_000


class Text(HTMLParser):
    """Texts by the id of the section that they stand in, elements by name; void elements as HTML has them."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.count: dict[str, int] = {}
        self.attributes: list[tuple[str, str]] = []
        self.open: list[tuple[str, str | None]] = []
        self.feed(page)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_data(" ")
        self.count[tag] = self.count.get(tag, 0) + 1
        named = dict(attrs)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append((tag, named.get("id") if tag in ("section", "header") else None))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1][0] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()
        self.handle_data(" ")

    def handle_data(self, data: str) -> None:
        for _, name in self.open:
            if name is not None and self.open[-1][0] not in ("script", "style"):
                self.sections[name] = self.sections.get(name, "") + data

    def said(self, section: str) -> str:
        return " ".join(self.sections.get(section, "").split())


def page_of(run: RunLayout, verdict: Verdict | None = None) -> Text:
    return Text(render_html(read_view(run, verdict or judge(run))))


def test_a_drill_that_passed(exact: RunLayout) -> None:
    page = page_of(exact)
    top = page.said("verdict")
    assert "PASS Bit-identical to the reference run: 12 steps on 3 ranks, 3 faults" in top
    assert "toy on 3 workers" in top and "F1: SIGKILL rank 1 after step 6" in top
    assert "Whose fault Nobody's" in top
    assert "chaosrun submit /job.yaml" in top
    assert page.said("checks").startswith("Checks: 2") and "passed" in page.said("checks")
    assert "The losses of all 12 steps are the same to the last bit" in page.said("losses")
    assert "steps 5–6 of attempt 1" in page.said("losses") and "counted once" in page.said("losses")
    assert "They are the same." in page.said("ledger")
    assert "steps done again after a restart 7" in page.said("work")
    assert page.said("attempts").count("step-0000000") == 3
    assert page.said("recovery").startswith("Recovery 3 restarts: 8.5 s in the median, ")
    assert not {"divergence", "deaths", "diagnosis"} & page.sections.keys()


def test_what_a_script_saved_by_itself_is_on_the_timeline(tmp_path: Path) -> None:
    run, attached = write_script_run(tmp_path), write_run(tmp_path / "attached")
    saved = re.findall("<title>(Saved by the script[^<]*)</title>", render_html(read_view(run, judge(run))))
    assert len(saved) == len(set(saved)) and "after step 4, attempt 1" in saved[0]
    assert all(value.endswith("model.pt, ckpt-" + value.rsplit("ckpt-", 1)[1]) for value in saved)
    assert "Saved by the script" not in render_html(read_view(attached, judge(attached)))


def test_a_drill_that_passed_within_tolerances(tmp_path: Path) -> None:
    said = page_of(write_run(tmp_path, verify={"weights": {"atol": 1e-6}})).said("verdict")
    assert "compared within the job file's tolerances" in said and "recovered within the tolerances" in said
    assert "bit for bit" not in said and "exactly" not in said


def test_a_batch_of_several_steps_is_said_to_belong_to_each_of_them() -> None:
    """Of a small data set every epoch has the same samples: the nearest step is not where the data went back to."""
    expected, seen = (cast(StepRecord, SimpleNamespace(ids=((sample,),), attempt=2)) for sample in (9, 5))
    for places, told in (([5], "step 5"), ([5, 8], "steps 5, 8"), ([], None)):
        (row,) = _rows(12, expected, seen, True, {repr((5,)): places}, here=False)
        assert row["found_at"] == told


def test_a_drill_that_came_back_to_other_data(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(skip_off=1))
    page = page_of(run)
    assert page.said("verdict").startswith(
        "chaosrun drill"
    ) and "FAIL 1 batch skipped First divergence where step 5, ranks 0, 1, 2" in page.said("verdict")
    assert "Whose fault Chaosrun's, most likely" in page.said("verdict")
    assert "data order" in page.said("divergence") and "expected" in page.said("divergence")
    assert "≠ another one: it belongs to step" in page.said("ledger") and "→ 5" in page.said("ledger")
    assert "steps differ, the first is step 5" in page.said("losses") and "ULP" in page.said("losses")
    # What to do is said once.
    hint = judge(run).hint
    assert hint is not None and sum(said.count(hint[1:]) for said in page.sections.values()) == 1


def test_a_run_in_production_is_told_no_command_that_it_cannot_take_and_where_its_files_are(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(keep_optimizer=False))
    drill = render_html(read_view(run, judge(run)))
    (run.path / "chaos").rename(run.path / RUN)
    run.run_json.write_text(json.dumps({**json.loads(run.run_json.read_bytes()), "kind": "run"}))
    page = render_html(read_view(run, judge(run)))
    assert "chaosrun diagnose" in drill and "chaosrun diagnose" not in page
    assert 'href="run/journal.jsonl"' in page and 'href="chaos/' not in page
    assert "In a drill this short" in drill and "In a run this short" in page and "of the disturbed run from" not in page
    assert re.search(r"counted once, as they led to the final weights: steps? \d+.*? of attempt 1", page)


def test_what_only_one_of_the_legs_did_is_told_in_words(run: RunLayout) -> None:
    edit_ranks(run, "chaos", 4, lambda line: None if line["kind"] == "step" and line["step"] == 12 else line)
    page = render_html(read_view(run, judge(run)))
    assert "1 step was done by the reference run only." in page
    apart = re.findall(r'data-label="Step">(11|12)</td>.*?data-label="ULP apart">(.*?)</td>', page)
    assert apart == [("11", "0"), ("12", "–")], "of a step that one leg alone made there is no distance"


def test_commands_are_told_with_the_directory_they_work_from(
    run: RunLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**facts, "job": str(tmp_path / "jobs" / "job.yaml")}))
    monkeypatch.chdir(tmp_path)
    said = page_of(run).said("verdict")
    assert "chaosrun submit jobs/job.yaml" in said and f"from {tmp_path}" in said


@pytest.mark.parametrize(("outcome", "words"), [("user_error", "the script failed"), ("interrupted", "interrupted")])
def test_beside_inconclusive_stands_how_it_ended(run: RunLayout, outcome: str, words: str) -> None:
    edit_journal(run, "chaos", only("leg.finished", lambda line: {**line, "outcome": outcome, "message": "so it ended"}))
    text = render_html(read_view(run, judge(run)))
    assert f"INCONCLUSIVE: {words} Chaos leg: so it ended" in Text(text).said("verdict")
    assert f"<title>INCONCLUSIVE: {words} · toy" in text


def test_a_divergence_in_what_was_cut_off_later_shows_what_was_seen_there(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    edit_trace(run, "chaos", 2, 0, only("step", put(ids=[[1, 2], [3, 4]]), step=9))
    verdict = judge(run)
    assert verdict.divergence is not None and (verdict.divergence.attempt, verdict.divergence.step) == (2, 9)
    assert "1, 2" in page_of(run, verdict).said("ledger")


def test_no_colour_of_a_terminal_is_on_the_page(run: RunLayout) -> None:
    text = render_html(read_view(run, replace(judge(run), hint="a \x1b[31mred\x1b[0m word\x07")))
    assert "A red word\u2407" in text and "\x1b" not in text


def test_markup_in_a_runs_words_stays_text(run: RunLayout) -> None:
    verdict = judge(run)
    facts = json.loads(run.run_json.read_text())
    facts["spec"]["name"], facts["job"], facts["overrides"] = MARKUP, f"/{MARKUP}.yaml", [f"seed={MARKUP}"]
    run.run_json.write_text(json.dumps(facts))
    edit_ranks(run, "chaos", 2, only("step", put(ids=[[MARKUP], [MARKUP]]), step=5))
    run.leg("chaos").environment.write_text(json.dumps({MARKUP: MARKUP}))
    hazard = Hazard(row="O5", what=MARKUP)
    run.diagnosis_json.write_text(json.dumps(replace(DIAGNOSIS, account=MARKUP, hint=MARKUP, hazard=hazard).to_json()))
    error = {"type": MARKUP, "message": MARKUP, "traceback": MARKUP}
    edit_journal(
        run,
        "chaos",
        only("fault.observed", lambda line: {**line, "event": "death.unplanned", "reason": MARKUP, "step": 6, "error": error}),
    )
    divergence = judge(write_run(run.path / "other", bugs=Bugs(skip_off=1))).divergence
    assert divergence is not None
    divergence = replace(divergence, tensor=MARKUP, reason=saying(MARKUP), expected=[MARKUP], seen={MARKUP: 1})
    verdict = replace(verdict, divergence=divergence, headline=MARKUP, hint=MARKUP, warnings=(MARKUP,))
    text = render_html(read_view(run, verdict))
    page = Text(text)
    clean = page_of(write_run(run.path / "another"))
    assert MARKUP not in text
    assert page.count["script"] == clean.count["script"] == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    for section in ("verdict", "deaths", "divergence", "ledger", "environment", "diagnosis"):
        assert "<script>alert('x')</script>&" in page.said(section), section


DAMAGE: dict[str, Callable[[RunLayout], Any]] = {
    "run.json": lambda run: run.run_json.write_text("{"),
    "plan.json": lambda run: run.plan_json.write_text("[]"),
    "diagnosis.json": lambda run: run.diagnosis_json.write_bytes(b"\xff\0"),
    "rank-1.trace": lambda run: run.leg("chaos").attempt(2).trace(1).write_bytes(b"\xc4\x01\xc0"),
    "journal.jsonl": lambda run: run.leg("chaos").journal.write_text("nothing\n"),
    "environment.json": lambda run: run.leg("chaos").environment.write_text("nothing"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_the_page_names_what_is_damaged(run: RunLayout, name: str) -> None:
    verdict = judge(run)
    assert "not whole" not in page_of(run, verdict).said("verdict")
    DAMAGE[name](run)
    said = page_of(run, verdict).said("verdict")
    assert "This page is not whole" in said
    assert name in said.partition("damaged or missing.")[2]


def test_a_run_that_is_no_more_than_a_folder(exact: RunLayout, tmp_path: Path) -> None:
    page = page_of(RunLayout(tmp_path), judge(exact))
    assert "run.json is missing" in page.said("verdict") and "plan.json is missing" in page.said("verdict")
    assert not {"losses", "course", "recovery"} & page.sections.keys()


def test_a_run_whose_disturbed_leg_never_began(run: RunLayout) -> None:
    shutil.rmtree(run.leg("chaos").path)
    ended = {"outcome": "user_error", "message": "rank 0 raised ValueError"}
    edit_journal(run, "reference", only("leg.finished", lambda line: {**line, **ended}))
    page = page_of(run)
    assert "Nothing: the chaos run never began." in page.said("verdict")
    assert "not whole" not in page.said("verdict")
    assert "The course of the reference run" in page.said("course")
    assert "A leg did not come to its end" in page.said("checks")
    assert "recovery" not in page.sections


def test_an_inexact_restore(run: RunLayout) -> None:
    message = "rank 1: optimizer is not what checkpoint step-00000008 holds"
    edit_journal(run, "chaos", only("leg.finished", lambda line: {**line, "outcome": "inexact_restore", "message": message}))
    page = page_of(run)
    assert f"FAIL {message[0].upper()}{message[1:]}" in page.said("verdict")
    assert "chaosrun diagnose" in page.said("files")


def test_a_job_of_one_rank_without_faults(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, workers=1, kills=()))
    assert "toy on 1 worker" in page.said("verdict") and "once again with no fault planned, and" in page.said("verdict")
    assert "recovery" not in page.sections and "faults" not in page.sections
    assert "rank 0" in page.said("course") and "rolled back" not in page.said("course")


def test_a_hang_and_a_quarantine_are_on_the_timeline(run: RunLayout) -> None:
    hang = {"event": "hang.declared", "first": 1, "ranks": [], "silent_s": 30.0, "message": "attempt 1 hangs"}
    edit_journal(run, "chaos", only("fault.requested", lambda line: {**line, **hang} if line["fault"] == "F1" else line))
    aside = {"event": "checkpoint.quarantined", "name": "step-00000004", "step": 4, "reason": "a hash", "moved_to": "there"}
    edit_journal(run, "chaos", only("fault.requested", lambda line: {**line, **aside} if line["fault"] == "F2" else line))
    text = render_html(read_view(run, judge(run)))
    assert re.search(r"<title>Attempt 1 hangs\s\+", text) and 'class="hang"' in text
    assert "Checkpoint step-00000004 quarantined: a hash" in text and 'class="aside"' in text


@pytest.mark.parametrize(("kind", "words"), [("kill", "killed as planned"), ("preempt", "preempted as planned")])
def test_a_preempt_is_not_called_a_kill(run: RunLayout, kind: str, words: str) -> None:
    verdict = judge(run)
    told = replace(verdict, faults=tuple(replace(fault, kind=kind) for fault in verdict.faults))
    course = page_of(run, told).said("course")
    assert {said for said in ("killed as planned", "preempted as planned", "another fault") if said in course} == {words}


def test_a_hang_that_a_fault_was_the_cause_of_is_told_by_the_fault(run: RunLayout) -> None:
    hang = {"event": "hang.declared", "first": 1, "ranks": [], "silent_s": 30.0, "message": "attempt 1 hangs"}
    edit_journal(run, "chaos", only("fault.requested", lambda line: {**line, **hang} if line["fault"] == "F1" else line))
    edit_journal(run, "chaos", only("fault.observed", lambda line: {**line, "how": "hang"} if line["fault"] == "F1" else line))
    text = render_html(read_view(run, judge(run)))
    assert "<title>Attempt 1 hangs" not in text and "<title>Fault F1: " in text


def test_an_attempt_that_died_with_its_supervisor_ends_on_the_timeline(run: RunLayout) -> None:
    """Its bar does not go on below those of the attempts that follow."""
    taken_over = {"event": "supervisor.resumed", "supervisor_pid": 2}

    def succeed(line: dict[str, Any]) -> dict[str, Any] | None:
        if line.get("attempt") != 1 or line["event"] not in ("attempt.stopped", "worker.exited"):
            return line
        return {**{key: line[key] for key in ("v", "time_s")}, **taken_over} if line["event"] == "attempt.stopped" else None

    def ends() -> list[int]:
        of_rank_0 = re.findall(r'<path class="lost" d="([^"]*)"', render_html(read_view(run, judge(run))))[0]
        return [int(right) for right in re.findall(r"0H(\d+)V14", of_rank_0)]

    before = ends()
    edit_journal(run, "chaos", succeed)
    after = ends()
    assert len(after) == len(before) and after[1:] == before[1:]
    assert after[0] < after[1]
    # However long nobody supervised it, its bar ends with its last step.
    edit_journal(run, "chaos", only("supervisor.resumed", lambda line: {**line, "time_s": line["time_s"] + 0.2}))
    assert ends() == after


def test_rays_start_does_not_squeeze_the_timeline(run: RunLayout) -> None:
    def drawn(text: str) -> str:
        return re.sub(r"\s+", " ", text.partition('id="timeline"')[2].partition("</figure>")[0])

    warm = render_html(read_view(run, judge(run)))
    edit_journal(run, "chaos", only("leg.started", lambda line: {**line, "time_s": line["time_s"] - 100}))
    cold = render_html(read_view(run, judge(run)))
    assert drawn(cold) == drawn(warm) and drawn(warm)
    assert "1m40s of placement and Ray's start came before" in Text(cold).said("work")
    assert Text(cold).said("course").count("before started, 3 workers") == 1


def test_ranks_to_whom_nothing_happened_share_a_lane(tmp_path: Path) -> None:
    few, many = (page_of(write_run(tmp_path / str(ranks), workers=ranks)).said("course") for ranks in (24, 30))
    lanes = [re.findall(r"(?<!\+)\brank (\d+)\b", said.partition(" saved ")[0])[:24] for said in (few, many)]
    assert lanes[0] == [str(rank) for rank in range(24)]
    assert lanes[1][:3] == ["0", "1", "2"] and "3" not in lanes[1]
    assert re.findall(r"\+\d+ ranks", few + many) == ["+27 ranks"]


def test_losses_that_are_no_numbers_leave_gaps(run: RunLayout) -> None:
    for leg in ("reference", "chaos"):
        attempt = 1 if leg == "reference" else 4
        edit_trace(run, leg, attempt, 0, only("step", put(loss=["nan", "inf"]), step=11))
    edit_trace(run, "chaos", 4, 1, only("step", put(loss=["nan", "0x1p+0"]), step=12))
    said = page_of(run).said("losses")
    assert "2 losses are no numbers" in said.replace("3 losses", "2 losses")
    assert re.search(r"11 nan nan \S+ 2 12 [\d.]+ nan no number 2", said)


def test_other_environments_are_shown_first(run: RunLayout) -> None:
    run.leg("chaos").environment.write_text(json.dumps({"torch": "2.14.0", "threads": 1, "cpu": "AVX2"}))
    said = page_of(run).said("environment")
    assert "The legs ran in different environments. What Reference Under faults torch 2.13.0 ≠ 2.14.0" in said
    assert "2 facts the same" in said


def test_a_diagnosis_is_told(run: RunLayout) -> None:
    run.diagnosis_json.write_text(json.dumps(DIAGNOSIS.to_json()))
    said = page_of(run).said("diagnosis")
    assert "quantity reduced gradients where in step 9, ranks 0, 1, 2" in said and "4 ULP there; at most 32 ULP" in said
    assert "-0.000376319629 (-0x1.8a99880000000p-12) at [3, 14]" in said
    assert "≠ 4 of 4 differ 0, 1, 2 77 ULP" in said and "local gradients = 48 equal" in said
    assert "C1: gradients are reduced in another bucket layout (docs/hazards.md#c1)" in said


@pytest.mark.parametrize("examples", [10, *AMOUNTS[1:]])
@pytest.mark.parametrize(
    "name", ["chaos/journal.jsonl", "chaos/attempts/002/rank-1.trace", "run.json", "plan.json", "diagnosis.json"]
)
def test_whatever_lies_in_a_runs_files_there_is_a_page(run: RunLayout, examples: int, name: str) -> None:
    verdict = judge(run)
    path = run.path / name
    if name == "diagnosis.json":
        path.write_text(json.dumps(DIAGNOSIS.to_json()))
    whole = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        Text(render_html(read_view(run, verdict)))
        with contextlib.suppress(ChaosrunError):
            render_html(read_view(run, judge(run)))

    tried(examples, changed_as(name, whole), check)


@pytest.mark.parametrize("workers", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_ten_thousand_steps_stay_small(tmp_path: Path, exact: RunLayout, workers: int) -> None:
    kills = tuple(range(250, 10_000, 330))
    differing = (*range(5000, 5010), 7777, *range(8000, 10_000, 2))
    run = write_long_run(tmp_path, steps=10_000, workers=workers, every_steps=25, kills=kills, differing=differing)
    # What it says does not depend on the verdict, which takes longer than the page.
    page = render_html(read_view(run, replace(judge(exact), attempts=(), faults=())))
    assert len(page.encode()) < MOST_BYTES
    assert f"{len(differing)} of 10000 steps differ, the first is step 5000; the largest difference is 1 ULP" in " ".join(
        page.split()
    )
    # Every stretch of steps that differ is in the strip, alone or not.
    strip = page.partition('class="strip" d="')[2].partition('"')[0]
    assert strip.count("M") == 1 + 1 + 1000
    assert "9800 steps between them are left out." in page


def test_hundreds_of_restarts_stay_small(tmp_path: Path) -> None:
    kills = tuple(range(3, 1000, 3))
    run = write_long_run(tmp_path, steps=1000, workers=1, every_steps=2, kills=kills)
    page = render_html(read_view(run, judge(run)))
    assert len(page.encode()) < MOST_BYTES
    assert "marks are left out" in page and "more attempts are in verdict.json" in page


def test_thinning_keeps_the_extremes() -> None:
    points = [(step, math.sin(step)) for step in range(1, 20_001)]
    spike, dip = 12_345, 777
    points[spike - 1], points[dip - 1] = (spike, 50.0), (dip, -50.0)
    points[9_999] = (10_000, math.nan)
    kept = thinned(points)
    assert {1, spike, dip, 20_000} <= set(kept)
    assert len(kept) <= 2500 and kept == sorted(kept)
    assert thinned(points[:500]) == list(range(1, 501))


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 1.0), (0.0, 0.0), (-1e308, 1e308), (5e-324, 1e-323), (1.0, 1.0 + 2**-52), (0.0, math.inf), (0.0, 7e9)],
)
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 8
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)
    assert all(0 <= Scale(low, high).at(value) <= 1 for value in found if math.isfinite(high))


def test_steps_on_an_axis_are_whole_numbers() -> None:
    assert integer_ticks(1, 3) == [1, 2, 3] and integer_ticks(1, 1) == [1]
    assert integer_ticks(1, 10_000)[:3] == [1, 2000, 4000]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("the optimizer started new", "The optimizer started new"),
        ("half-written, and read", "Half-written, and read"),
        ("ckpt/model.pt was opened", "ckpt/model.pt was opened"),
        ("data_order: other samples", "data_order: other samples"),
        ("`chaosrun init` makes one", "`chaosrun init` makes one"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_unless_with_a_name(words: str, told: str) -> None:
    assert sentence(words) == told


def test_numbers_and_moments_are_told_for_people() -> None:
    assert number(120212804) == "120 212 804" and number(None) == "–" and number(math.nan) == "nan"
    assert moment(0.0) == "1970-01-01 00:00:00 UTC" and moment(1e300) == "–"


def test_a_samples_name_that_looks_like_a_float_stays_as_it_is(exact: RunLayout, tmp_path: Path) -> None:
    divergence = judge(write_run(tmp_path, bugs=Bugs(skip_off=1))).divergence
    assert divergence is not None
    odd = replace(divergence, expected=["0xp", "0x1p-1"], seen=["0xpear", "0x1p99999"])
    said = page_of(exact, replace(judge(exact), divergence=odd)).said("divergence")
    assert "[0xp, 0.5 (0x1p-1)]" in said and "[0xpear, 0x1p99999]" in said


def test_a_leg_whose_journal_is_gone_has_not_never_begun(run: RunLayout) -> None:
    verdict = judge(run)
    run.leg("chaos").journal.unlink()
    said = page_of(run, verdict).said("verdict")
    assert "chaos leg: journal.jsonl is missing" in said


def tokens(css: str) -> dict[str, dict[str, str]]:
    """Colours by scheme, from the blocks of `:root`."""
    names = ("light", "dark", "print")
    blocks = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    ]
    assert len(blocks) == len(names)
    return dict(zip(names, blocks, strict=True))


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_it_is_defined() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_colours_are_told_apart_from_their_ground(scheme: str) -> None:
    colours = tokens((TEMPLATES / "page.css").read_text())[scheme]
    texts = [(text, ground) for ground in ("paper", "card", "code") for text in ("ink", "soft", "link")]
    texts += [("pass", "pass-ground"), ("fail", "fail-ground"), ("doubt", "doubt-ground"), ("skip", "skip-ground")]
    texts += [("ink", f"{kind}-ground") for kind in ("fail", "doubt")] + [("paper", "ink"), ("fail", "paper")]
    weak = {pair: contrast(*(colours[name] for name in pair)) for pair in texts}
    assert {pair: ratio for pair, ratio in weak.items() if ratio < 4.5} == {}
    series = [name for name in colours if name.startswith("s-")]
    assert len(series) == 6
    assert {
        name: ratio
        for name in (*series, "focus")
        if name in colours and (ratio := contrast(colours[name], colours["paper"])) < 3
    } == {}


def test_a_fault_that_was_asked_for_and_never_seen_is_marked_so(tmp_path: Path) -> None:
    run = write_run(tmp_path, kills=(Fault(id="F1", rank=1, phase="step", at_step=6, source="faults.schedule[0]"),))
    edit_journal(run, "chaos", only("fault.observed", drop))
    text = render_html(read_view(run, judge(run)))
    assert "Fault F1 was asked for, and not seen to happen" in text and "not shown" in Text(text).said("faults")
