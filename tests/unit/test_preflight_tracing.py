"""The check "tracing": its probe on this machine, and what it makes of the answers."""

from dataclasses import replace
from pathlib import Path

import pytest

from chaosrun.preflight.checks.tracing import TracingFacts, call, judge, probe
from chaosrun.preflight.model import Status
from tests.preflight_answers import SETTING, job_of, node_of, told

REFUSED = {"refused": "strace is not installed here", "remedy": "install strace"}


@pytest.mark.parametrize(
    ("by", "facts", "status"),
    [
        ("chaosrun", REFUSED, Status.SKIP),
        ("script", REFUSED, Status.WARN),
        ("script", {}, Status.PASS),
        (None, REFUSED, Status.SKIP),
    ],
)
def test_it_matters_to_jobs_that_save_by_themselves(by: str | None, facts: dict[str, str], status: Status) -> None:
    setting = SETTING if by is None else replace(SETTING, job=job_of(resume={"by": by}))
    (found,) = judge(setting, [node_of("a")], told(TracingFacts, {"a": facts}))
    assert (found.status, found.node, found.check) == (status, "a", "tracing")


def test_a_node_without_strace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in probe().refused
    assert call(SETTING, node_of("a")).probe == "chaosrun.preflight.checks.tracing"
