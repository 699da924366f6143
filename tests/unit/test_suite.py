"""A suite's summary: what counts as expected, what becomes of a drill that cannot be run, how it is shown."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from chaosrun.errors import InterruptedRunError, ResourcesError
from chaosrun.records.layout import RunLayout
from chaosrun.report.output import rendered
from chaosrun.report.suite import render_suite
from chaosrun.spec.suite import Expectation, Suite, SuiteDrill, load_suite
from chaosrun.suite import run_suite, surprises
from chaosrun.verify.divergence import Divergence
from chaosrun.verify.verdict import Verdict

PASSED = Verdict(
    status="PASS",
    exit_code=0,
    cause="bit-identical to the undisturbed run",
    hint=None,
    outcome="completed",
    checks=(),
    divergence=None,
    faults=(),
    attempts=(),
    steps=9,
    lost_steps=0,
)
FAILED = replace(
    PASSED,
    status="FAIL",
    exit_code=3,
    cause="data order: sampler epoch not set (first difference: step 8)",
    divergence=Divergence(
        step=8,
        rank=0,
        ranks=(0, 1),
        attempt=2,
        kind="data order",
        cause="sampler epoch not set",
        hint="call set_epoch",
        expected=[5],
        seen=[1],
    ),
)


def suite(folder: Path, *expected: str) -> Suite:
    (folder / "job.yaml").write_text("name: toy\nscript: train.py\nworkers: 1\n")
    (folder / "train.py").write_text("")
    drills = "".join(f"  - {{name: drill-{number}, expect: {text}}}\n" for number, text in enumerate(expected))
    path = folder / "suite.yaml"
    path.write_text(f"name: toys\njob: job.yaml\ndrills:\n{drills}")
    return load_suite(path)


def runs(folder: Path, verdicts: Sequence[Verdict | Exception]):
    waiting = list(verdicts)

    def run_drill(drill: SuiteDrill) -> tuple[RunLayout, Verdict]:
        verdict = waiting.pop(0)
        if isinstance(verdict, Exception):
            raise verdict
        return RunLayout(folder / f"run-of-{drill.spec.name}"), verdict

    return run_drill


def page(folder: Path, verdicts: Sequence[Verdict | Exception], *expected: str) -> tuple[int, str]:
    result = run_suite(suite(folder, *expected), runs(folder, verdicts))
    return result.exit_code, rendered(render_suite(result), width=120, colour=False)


def test_all_as_expected(tmp_path: Path) -> None:
    code, text = page(tmp_path, [PASSED, FAILED], "PASS", "{verdict: FAIL, kind: data order, cause: step 8}")
    assert code == 0
    assert "AS EXPECTED  2 drills" in text and "NOT AS EXPECTED" not in text
    line = next(line for line in text.splitlines() if "drill-1" in line)
    assert "data order at step 8, rank 0: expected samples [5]" in line


@pytest.mark.parametrize(
    ("verdict", "expected", "told"),
    [
        (FAILED, "PASS", "FAIL where PASS was expected: data order"),
        (PASSED, "FAIL", "PASS where FAIL was expected"),
        (PASSED, "{verdict: PASS, kind: rng}", "nothing differed first, expected was rng"),
        (FAILED, "{verdict: FAIL, kind: rng}", "data order differed first, expected was rng"),
        (FAILED, "{verdict: FAIL, cause: RNG}", "the cause does not say 'RNG'"),
        (FAILED, "{verdict: FAIL, exit_code: 4}", "exit code 3, expected was 4"),
        (ResourcesError("no placement"), "PASS", "no placement"),
    ],
)
def test_a_surprise_is_told_and_fails_the_suite(tmp_path: Path, verdict: Verdict | Exception, expected: str, told: str) -> None:
    code, text = page(tmp_path, [verdict, PASSED], expected, "PASS")
    assert code == 3
    assert "NOT AS EXPECTED" in text
    assert f"drill-0: {told}" in " ".join(text.split())
    # The others are run all the same.
    assert any("drill-1" in line and "PASS" in line for line in text.splitlines())


def test_an_expected_failure_holds_no_surprise() -> None:
    assert list(surprises(Expectation(verdict="FAIL", kind="data order", cause="step 8", exit_code=3), FAILED)) == []


def test_an_interrupt_ends_the_suite(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRunError):
        run_suite(suite(tmp_path, "PASS", "PASS"), runs(tmp_path, [InterruptedRunError("interrupted"), PASSED]))
