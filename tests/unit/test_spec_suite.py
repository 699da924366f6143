"""Suites: what a file may say, where what is wrong in it is shown, and what becomes of a drill's changes."""

from pathlib import Path

import pytest

from chaosrun.errors import SpecError, UsageError
from chaosrun.spec.job_file import load_job
from chaosrun.spec.suite import Expectation, load_suite

MATRIX = "name: all\njob: job.yaml\nmatrix: {workers: [1, 2]}\n"
JOB = "name: probe\nscript: train.py\nworkers: 2\nargs: [--epochs, 3]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text("import chaosrun\n")
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "suite.yaml"
    path.write_text(text)
    return path


def wrong(folder: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_suite(write(folder, text))
    return str(caught.value)


def test_changes_reach_the_job_and_can_be_said_on_the_command_line(folder: Path) -> None:
    suite = load_suite(
        write(
            folder,
            "name: all\njob: job.yaml\ndrills:\n"
            '  - {name: a, set: {workers: 3, data.resume: plain, args: [--lr, 0.10, "on", --name, "a b"], faults: {seed: 7}}}\n'
            "  - {name: b, expect: {verdict: FAIL, kind: data order}}\n",
        )
    )
    first, second = suite.drills
    assert (first.job.spec.workers, first.job.spec.data.resume, first.job.spec.faults.seed) == (3, "plain", 7)
    assert first.job.spec.args == ("--lr", "0.10", "on", "--name", "a b")
    assert load_job(first.job.path, first.overrides).spec == first.job.spec
    assert first.expect == Expectation(verdict="PASS")
    assert second.overrides == () and second.job.spec.workers == 2
    assert second.expect == Expectation(verdict="FAIL", kind="data order")
    assert [drill.name for drill in suite.drills] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("name: all\ndrils: []\n", "2:1", "unknown key 'drils', did you mean 'drills'?"),
        ("name: all\ndrills: []\n", "2:9", "drills must be a list with at least one entry"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, expct: PASS}]\n", "3:20", "did you mean 'expect'?"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, expect: PAS}]\n", "3:28", "one of PASS, FAIL, INCONCLUSIVE"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, set: {workrs: 3}}]\n", "3:26", "did you mean 'workers'?"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, set: {faults.sed: 3}}]\n", "3:33", "did you mean 'seed'?"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, set: {workers: many}}]\n", "3:35", "a whole number"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, set: [1]}]\n", "3:25", "a mapping"),
        ("name: all\ndrills: [{name: a}]\n", "2:10", "has no job file"),
        ("name: all\njob: other.yaml\ndrills: [{name: a}]\n", "2:1", "no such job file"),
        ("name: all\njob: job.yaml\ndrills: [{name: a}, {name: a}]\n", "3:1", "two drills are called 'a'"),
        ("name: all\njob: job.yaml\ndrills: [{name: a}]\ncomparison: {beyond: [b]}\n", "4:1", "'b', which is no drill"),
        ("name: all\nname: all\n", "2:1", "duplicate key"),
        ("name: all\njob: job.yaml\nmatrix: {workers: []}\ndrills: [{name: a}]\n", "3:10", "workers has no values"),
        ("name: all\njob: job.yaml\nmatrix: {workers: {}}\ndrills: [{name: a}]\n", "3:10", "workers has no values"),
        ('name: all\njob: job.yaml\nmatrix: {workers: {"": 1}}\ndrills: [{name: a}]\n', "3:20", "1 to 40 printable"),
        ('name: all\njob: job.yaml\nmatrix: {workers: {"a\\tb": 1}}\ndrills: [{name: a}]\n', "3:20", "1 to 40 printable"),
        (f"name: all\njob: job.yaml\nmatrix: {{workers: {{{'a' * 41}: 1}}}}\ndrills: [{{name: a}}]\n", "3:20", "1 to 40"),
        (f"{MATRIX}drills: [{{name: a, matrix: {{}}}}]\n", "3:1", "no drill uses this matrix"),
        (f"{MATRIX}drills: [{{name: a, matrix: {{}}}}]\nexclude: [{{workers: 1}}]\n", "5:1", "no drill uses this exclude"),
        (f"{MATRIX}drills: [{{name: a, matrix: {{}}}}]\ninclude: [{{workers: 9}}]\n", "5:1", "no drill uses this include"),
        ("name: all\njob: job.yaml\nmatrix: {workers: [1, 1]}\ndrills: [{name: a}]\n", "3:23", "1 is there twice"),
        ("name: all\njob: job.yaml\nmatrix: {workers: [1, no]}\ndrills: [{name: a}]\n", "3:23", "a whole number"),
        ("name: all\njob: job.yaml\nmatrix: {wrkers: [1]}\ndrills: [{name: a}]\n", "3:10", "did you mean 'workers'?"),
        ("name: all\njob: job.yaml\nexclude: [{workers: 1}]\ndrills: [{name: a}]\n", "3:11", "no such combination"),
        (f"{MATRIX}exclude: [{{workers: 1}}, {{workers: 2}}]\ndrills: [{{name: a}}]\n", "5:10", "no combination left"),
        (f"{MATRIX}include: [{{workers: 1}}]\ndrills: [{{name: a}}]\n", "5:10", "two combinations are called 'a[workers=1]'"),
        (f"{MATRIX}cases: [{{when: {{workers: 3}}, expect: FAIL}}]\ndrills: [{{name: a}}]\n", "4:16", "no drill has such"),
        (f"{MATRIX}drills: [{{name: a, cases: [{{when: {{}}, expect: FAIL}}]}}]\n", "4:35", "at least one key of the matrix"),
        (f"{MATRIX}drills: [{{name: a, cases: [{{when: {{workers: 3}}}}]}}]\n", "4:35", "no such combination"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, faults: spott}]\n", "3:28", "did you mean 'spot'?"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, faults: {sede: 1}}]\n", "3:29", "did you mean 'seed'?"),
        ("name: all\njob: job.yaml\ndrills: [{name: a, faults: 3}]\n", "3:28", "the name of a preset"),
        ("- a\n", "1:1", "a suite holds keys and values"),
    ],
)
def test_what_is_wrong_is_shown_where_it_stands(folder: Path, text: str, place: str, message: str) -> None:
    shown = wrong(folder, text)
    assert f"suite.yaml:{place}: " in shown, shown
    assert message in shown, shown


def test_too_many_combinations_are_refused_before_any_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaosrun.spec.suite.load_job", lambda *_, **__: pytest.fail("a job was read"))
    axes = ", ".join(f"key{number}: [{', '.join(map(str, range(40)))}]" for number in range(12))
    shown = wrong(folder, f"name: all\njob: job.yaml\nmatrix: {{{axes}}}\ndrills: [{{name: a}}]\n")
    assert "suite.yaml:3:9: " in shown and f"comes to {40**12} combinations, at most 2000" in shown
    drills = ", ".join(f"{{name: a{number}}}" for number in range(51))
    seeds = f"{{seed: [{', '.join(map(str, range(40)))}]}}"
    shown = wrong(folder, f"name: all\njob: job.yaml\nmatrix: {seeds}\ndrills: [{drills}]\n")
    assert "suite.yaml:3:9: the suite comes to 2040 drills" in shown


def overrides(folder: Path, text: str) -> dict[str, tuple[str, ...]]:
    suite = load_suite(write(folder, text))
    for drill in suite.drills:
        assert load_job(drill.job.path, drill.overrides).spec == drill.job.spec
    return {drill.name: drill.overrides for drill in suite.drills}


def test_a_matrix_stands_for_its_combinations(folder: Path) -> None:
    text = (
        "name: all\njob: job.yaml\nset: {max_steps: 30}\nmatrix: {workers: [1, 2], seed: [3, 4]}\n"
        "exclude: [{workers: 1, seed: 3}]\ninclude: [{workers: 5}]\n"
        "cases: [{when: {workers: 2}, set: {max_steps: 40}}]\n"
        "drills:\n  - {name: a}\n  - {name: b, matrix: {}}\n  - {name: c, exclude: [{seed: 4}]}\n"
    )
    assert overrides(folder, text) == {
        "a[workers=1,seed=4]": ("max_steps=30", "workers=1", "seed=4"),
        "a[workers=2,seed=3]": ("max_steps=40", "workers=2", "seed=3"),
        "a[workers=2,seed=4]": ("max_steps=40", "workers=2", "seed=4"),
        "a[workers=5]": ("max_steps=30", "workers=5"),
        "b": ("max_steps=30",),
        "c[workers=2,seed=3]": ("max_steps=40", "workers=2", "seed=3"),
        "c[workers=5]": ("max_steps=30", "workers=5"),
    }


def test_values_may_be_labelled_and_arguments_set(folder: Path) -> None:
    text = (
        "name: all\njob: job.yaml\ndrills:\n  - name: a\n"
        "    matrix: {args: {short: [--epochs, 1], long: [--epochs, 9, --lr, 0.10]}, --lr: [0.1], --fast: [true, false]}\n"
    )
    assert overrides(folder, text) == {
        "a[args=short,lr=0.1,fast=true]": ('args=["--epochs", "1", "--lr", "0.1", "--fast"]',),
        "a[args=short,lr=0.1,fast=false]": ('args=["--epochs", "1", "--lr", "0.1"]',),
        "a[args=long,lr=0.1,fast=true]": ('args=["--epochs", "9", "--lr", "0.1", "--fast"]',),
        "a[args=long,lr=0.1,fast=false]": ('args=["--epochs", "9", "--lr", "0.1"]',),
    }


def test_faults_are_a_preset_a_mapping_or_the_jobs_own(folder: Path) -> None:
    (folder / "job.yaml").write_text(JOB + "faults: {seed: 7, schedule: [{rank: 0, at_step: 3}]}\n")
    (folder / "mine.yaml").write_text("faults: [{kind: kill, mean: 30%}]\n")
    text = (
        "name: all\njob: job.yaml\nset: {max_steps: 30}\nfaults: spot\ndrills:\n  - {name: a}\n  - {name: b, faults: job}\n"
        "  - {name: c, faults: {random: {count: 2}}}\n  - {name: d, matrix: {faults: [./mine.yaml, torture]}}\n"
    )
    path = (folder / "mine.yaml").absolute()
    suite = load_suite(write(folder, text))
    names = [drill.name for drill in suite.drills]
    assert names[:3] == ["a", "b", "c"] and names[4] == "d[faults=torture]"
    assert [drill.job.spec.faults.preset and drill.job.spec.faults.preset.name for drill in suite.drills] == [
        "spot",
        None,
        None,
        "mine",
        "torture",
    ]
    assert {drill.job.spec.faults.seed for drill in suite.drills} == {7}
    assert overrides(folder, text)["c"] == ("max_steps=30", 'faults={"random": {"count": 2}, "seed": 7}')
    assert suite.drills[3].overrides == ("max_steps=30", f'faults.preset="{path}"')


def test_what_is_expected_may_hang_on_the_combination(folder: Path) -> None:
    suite = load_suite(
        write(
            folder,
            f"{MATRIX}cases: [{{when: {{workers: 1}}, expect: FAIL}}]\ndrills:\n  - {{name: a}}\n"
            "  - {name: b, expect: INCONCLUSIVE, cases: [{when: {workers: 1}, expect: {verdict: FAIL, kind: rng}}]}\n",
        )
    )
    expected = {drill.name: drill.expect for drill in suite.drills}
    assert [entry.verdict for entry in expected.values()] == ["FAIL", "PASS", "FAIL", "INCONCLUSIVE"]
    assert expected["b[workers=1]"].kind == "rng"


def test_what_is_wrong_in_a_job_file_is_shown_there(folder: Path) -> None:
    (folder / "job.yaml").write_text("name: probe\nscript: train.py\nworkers: none\n")
    assert "job.yaml:3:10: " in wrong(folder, "name: all\njob: job.yaml\ndrills: [{name: a}]\n")


def test_a_suite_that_is_not_there(folder: Path) -> None:
    with pytest.raises(UsageError, match="no such suite"):
        load_suite(folder / "suit.yaml")
    with pytest.raises(UsageError, match="is a directory, not a suite"):
        load_suite(folder)


@pytest.mark.parametrize(
    ("name", "told"),
    [("job.yaml", "job.yaml is a job file, not a suite"), ("train.py", "train.py is a Python script, not a suite")],
)
def test_a_file_of_another_kind_is_told_in_one_sentence(folder: Path, name: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_suite(folder / name)
    assert caught.value.message == f"{folder}/{told}" and f"chaosrun submit {folder / name}" in (caught.value.hint or "")
