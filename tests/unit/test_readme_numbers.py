"""The README's table of numbers is made of the bench that is kept, and of nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import readme
from tests.benchmarks.samples import Samples


def samples(*values: float, failures: int = 0) -> dict[str, Any]:
    return Samples(values=list(values), failures=["did not come back:\nthe output of /tmp/x"] * failures).to_json()


@pytest.fixture
def report() -> dict[str, Any]:
    machine = {"cpus": 2, "python": "3.11.9", "torch": "2.13.0", "accelerate": "1.15.0", "ray": "2.60.0"}
    return {
        "time_s": 1_795_442_201.0,
        "repeats": 5,
        "machine": {**machine, "load_before": [0.4, 0, 0], "load_after": [1.1, 0, 0]},
        "startup": samples(0.147),
        "recovery": {"chaosrun": samples(0.12, 0.131, 0.14), "torchrun": samples(5.04, failures=4), "Ray Train": None},
        "steps": {"ratio": 1.0171},
        "scripts": {"step_ratio_script": 1.02, "observer_ratio": 1.004, "added_s": 0.31},
    }


def test_the_readme_has_those_of_the_bench_that_is_kept() -> None:
    text = readme.README.read_text()
    assert text.count(readme.BEGIN) == text.count(readme.END) == 1
    if readme.KEPT.exists():
        kept = json.loads(readme.KEPT.read_text())
        assert readme.with_numbers(text, kept) == text, "make bench ARGS=--keep writes them anew"


def test_a_bench_is_kept_and_told(report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(readme, "KEPT", tmp_path / "kept.json")
    readme.README.write_text(f"before\n{readme.BEGIN}1.02 times\n{readme.END}after\n")
    readme.keep(report)
    text = readme.README.read_text()
    assert "(`jobs/probe`) | 0.13 s | 5.0 s (4 failed) | – |" in text and "| 1.02 × | 1 |" in text and "+0.31 s" in text
    assert "with 2 CPUs (load average 0.4 before and 1.1 after), Python 3.11.9, torch 2.13.0" in text
    assert text.startswith("before\n") and text.endswith(f"{readme.END}after\n") and "1.02 times" not in text
    assert readme.with_numbers(text, json.loads(readme.KEPT.read_text())) == text
    assert "did not come back" in readme.KEPT.read_text() and "/tmp/x" not in readme.KEPT.read_text()
    other = {**report, "repeats": 7}
    assert readme.with_numbers(text, other) != text, "the control was not seen"


def test_a_part_of_a_bench_is_not_kept(report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "KEPT", tmp_path / "kept.json")
    with pytest.raises(KeyError, match="scripts"):
        readme.keep({name: part for name, part in report.items() if name != "scripts"})
    assert not readme.KEPT.exists()
