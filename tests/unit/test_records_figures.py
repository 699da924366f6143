"""Numbers in files for people."""

from pathlib import Path

import pytest

from chaosrun.records.figures import figures


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        (
            "all.json",
            '{"loss": 0.5, "best": {"step": 3}, "top": [1, 2.5]}',
            {"loss": "0.5", "best/step": "3", "top/0": "1", "top/1": "2.5"},
        ),
        ("nan.json", '{"loss": NaN, "ok": true, "name": "a", "none": null}', {"loss": "nan"}),
        (
            "times.json",
            '{"train_runtime": 3, "samples_per_second": 9.0, "stepTimeMs": 4, "total_flos": 2, "dur": 0.1, "tokens": 7}',
            {"tokens": "7"},
        ),
        ("log.jsonl", '{"loss": 2}\n{"loss": 1}\n', {"loss": "1"}),
        ("log.csv", "step,loss,time\n1,2.0,7\n2,1.5,8\n", {"step": "2.0", "loss": "1.5"}),
        ("cut.json", '{"loss": 0.5', {}),
        ("empty.jsonl", "", {}),
        ("deep.json", "[" * 5000 + "]" * 5000, {}),
    ],
)
def test_numbers_but_those_of_a_process(tmp_path: Path, name: str, text: str, found: dict[str, str]) -> None:
    (tmp_path / name).write_text(text)
    assert figures(tmp_path / name) == found


def test_large_files_are_not_read_whole(tmp_path: Path) -> None:
    (tmp_path / "many.json").write_text("[" + "1," * 5000 + "1]")
    assert len(figures(tmp_path / "many.json")) == 1000
    (tmp_path / "large.json").write_text("[" + "1," * 600_000 + "1]")
    assert figures(tmp_path / "large.json") == {}
