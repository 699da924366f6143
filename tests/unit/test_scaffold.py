"""`chaosrun init`: what it writes is right as it is, and it overwrites nothing and writes nothing by halves."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from chaosrun import api, cli
from chaosrun.errors import UsageError
from chaosrun.integrations import scaffold as files
from chaosrun.integrations.scaffold import init
from chaosrun.spec.job_file import load_job
from chaosrun.spec.places import SourceText
from chaosrun.spec.tree import plain, read_tree

TEMPLATES: list[Any] = ["accelerate", "trainer", "lightning", "torch"]
NEEDED = {"trainer": " transformers", "lightning": " pytorch-lightning torchdata"}
FRAMEWORK = {"accelerate": "accelerate", "trainer": "transformers", "lightning": "pytorch_lightning", "torch": "torch"}


def written(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: name)


@pytest.mark.usefixtures("everything_installed")
@pytest.mark.parametrize("template", TEMPLATES)
class TestEveryTemplate:
    def test_is_a_job_that_can_be_planned(self, template: Any, tmp_path: Path) -> None:
        made = init(tmp_path / "my job", template=template)
        # On a cluster: what its nodes have installed is not looked for here.
        loaded, plan = api.plan(made.job, address="127.0.0.1:6379")
        assert loaded.spec.name == "my-job"
        assert loaded.spec.workers == 2
        assert loaded.spec.resume.by == "script"
        assert [(fault.kind, fault.at_step) for fault in plan.faults] == [("kill", 8), ("kill", 17), ("kill", 18)]

    def test_names_the_schema_that_its_job_fits(self, template: Any, tmp_path: Path) -> None:
        made = init(tmp_path, template=template)
        first = made.job.read_text().splitlines()[0]
        assert first == "# yaml-language-server: $schema=job.schema.json"
        fits = Draft202012Validator(json.loads((tmp_path / "job.schema.json").read_text()))
        root, _ = read_tree(SourceText(label="job.yaml", text=made.job.read_text()))
        assert root is not None
        fits.validate(plain(root))
        assert not fits.is_valid({**plain(root), "wrokers": 2})

    def test_its_script_is_one_as_people_write_it(self, template: Any, tmp_path: Path) -> None:
        text = (init(tmp_path, template=template).directory / "train.py").read_text()
        compile(text, "train.py", "exec")
        assert "import chaosrun" not in text and "CHAOSRUN" not in text
        assert re.search(rf"^(from|import) {FRAMEWORK[template]}\b", text, re.MULTILINE)
        assert "checkpoint" in text.partition("def main")[2].lower(), "it saves, and finds what it saved"

    def test_its_workflow_runs_it(self, template: Any, tmp_path: Path) -> None:
        init(tmp_path, template=template)
        workflow = (tmp_path / ".github" / "workflows" / "chaosrun.yml").read_text()
        assert "chaosrun submit job.yaml" in workflow
        assert f'pip install "$CHAOSRUN_REQUIREMENT"{NEEDED.get(template, "")}\n' in workflow


def test_prints_what_it_wrote_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "x", "--ci", "none"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote     x/job.yaml",
        "wrote     x/train.py",
        "wrote     x/job.schema.json",
        "next      chaosrun submit x/job.yaml",
    ]
    assert cli.main(["init", "z", "--ci", "none", "--quiet"]) == 0
    assert "next" not in capsys.readouterr().out
    assert cli.main(["validate", "x/job.yaml"]) == 0
    capsys.readouterr()
    assert cli.main(["init", "y", "--template", "torch", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == ["y/job.yaml", "y/train.py", "y/job.schema.json", "y/.github/workflows/chaosrun.yml"]
    assert told["next"] == "chaosrun submit y/job.yaml"


@pytest.mark.parametrize("name", ["job.yaml", "train.py", "job.schema.json", ".github/workflows/chaosrun.yml"])
def test_overwrites_nothing_and_then_writes_nothing(tmp_path: Path, name: str) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(UsageError, match=r"already there: .*nothing was written") as refused:
        init(tmp_path)
    assert str(mine) in refused.value.message
    assert "--force" in (refused.value.hint or "")
    assert written(tmp_path) == {name: "mine"}
    init(tmp_path, force=True)
    assert mine.read_text() != "mine"
    assert len(written(tmp_path)) == 4


@pytest.mark.parametrize("made", [lambda path: path.mkdir(), lambda path: path.symlink_to("/etc/passwd")])
def test_what_is_no_file_is_never_overwritten(tmp_path: Path, made: Any) -> None:
    made(tmp_path / "train.py")
    with pytest.raises(UsageError, match="not an ordinary file"):
        init(tmp_path, force=True)
    assert sorted(os.listdir(tmp_path)) == ["train.py"]


def test_a_directory_that_cannot_be_made_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        init(tmp_path / "file" / "job")
    assert written(tmp_path) == {"file": ""}


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(descriptor: int, mode: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fchmod", full)
    with pytest.raises(UsageError, match="No space left on device"):
        init(tmp_path, template="torch", ci="none")
    assert written(tmp_path) == {}


def test_a_template_whose_library_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="--template trainer needs transformers") as refused:
        init(tmp_path / "x", template="trainer")
    assert "pip install transformers" in (refused.value.hint or "")
    with pytest.raises(UsageError, match="--template lightning needs pytorch-lightning and torchdata, which are not"):
        init(tmp_path / "x", template="lightning")
    assert not (tmp_path / "x").exists()
    init(tmp_path / "x", template="torch")


def test_the_workflow_of_a_repository_lies_at_its_top(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    init(tmp_path / "drills" / "small one")
    (workflow,) = (tmp_path / ".github" / "workflows").iterdir()
    assert workflow.name == "chaosrun-drills-small-one.yml"
    assert "chaosrun submit 'drills/small one/job.yaml'" in workflow.read_text()


def test_a_workflow_outside_of_any_repository_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "a b"]) == 0
    err = capsys.readouterr().err
    assert "GitHub reads workflows at a repository's top alone" in err
    assert "`git init 'a b'`" in err
    for found in (["init", "x", "--ci", "none"], ["init", "y"]):
        assert cli.main(found) == 0
        assert capsys.readouterr().err == ""
        (tmp_path / ".git").mkdir(exist_ok=True)


def test_one_marked_line_says_what_the_workflow_installs(tmp_path: Path) -> None:
    init(tmp_path)
    text = (tmp_path / ".github" / "workflows" / "chaosrun.yml").read_text()
    assert text.index("# EDIT") < text.index("CHAOSRUN_REQUIREMENT: chaosrun\n") < text.index("jobs:")
    assert "pip install chaosrun" not in text


@pytest.mark.parametrize(
    ("name", "called"),
    [
        *(("x", "x"), ("..a b/", "a-b"), ("über", "ber"), ("---", "job"), ("n" * 99, "n" * 64)),
        # What YAML reads as something else than text.
        *((name, name) for name in ("2024", "1.5", "1e3", "0x10", "null", "on", "2024-01-01")),
    ],
)
def test_the_job_is_called_after_its_directory(name: str, called: str, tmp_path: Path) -> None:
    made = init(tmp_path / name, ci="none")
    assert load_job(made.job).spec.name == called


def test_writing_a_job_imports_no_training_library(tmp_path: Path) -> None:
    question = (
        "import sys; from chaosrun.integrations.scaffold import init; from pathlib import Path\n"
        f"init(Path({str(tmp_path)!r}), template='trainer')\n"
        "print(*[name for name in ('torch', 'accelerate', 'transformers', 'ray') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []
