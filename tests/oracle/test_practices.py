"""Whole scripts and what the verdict makes of them: innocents pass, mistakes are found, with the right cause and culprit.

practices.yaml lists what scripts do, in families of which each deserves one verdict; practice.py.jinja is the script around it.
Each is a real drill with one kill, compared with its own reference.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import jinja2
import pytest
from ruamel.yaml import YAML

from chaosrun.verify.verdict import Verdict
from tests.conftest import WarmDrills
from tests.oracle.mutants import MUTANTS
from tests.oracle.score import Score

HERE = Path(__file__).parent
SCRIPT = jinja2.Template((HERE / "practice.py.jinja").read_text(), undefined=jinja2.ChainableUndefined)
JOB = """\
name: practice
script: train.py
workers: {workers}
seed: 1
checkpoint: {{every_steps: {every}}}
faults: {{schedule: [{{kind: {kind}, rank: 1, at_step: {kill}}}]}}
timeout: 300s
"""


KILLS = {2: (13, 5), 3: (8, 3)}
"""Step of the kill and steps between checkpoints, by workers: the checkpoint lies in the middle of the second epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    family: str
    name: str
    what: str
    says: tuple[str, list[str] | str, str]
    warns: str = ""
    make_test: int = 0
    kill: int | None = None
    every: int | None = None
    kind: str = "kill"
    job: str = ""
    files: dict[str, str] = field(default_factory=dict)
    pieces: dict[str, str]

    def write(self, folder: Path, workers: int) -> Path:
        """The script and its job file, in a folder of their own."""
        (folder / "train.py").write_text(SCRIPT.render(self.pieces, what=self.what))
        for name, text in self.files.items():
            (folder / name).write_text(text)
        job = folder / "job.yaml"
        modules = f"env: {{PYTHONPATH: {folder}}}\n" if self.files else ""
        kill, every = KILLS[workers]
        text = JOB.format(workers=workers, kill=self.kill or kill, kind=self.kind, every=self.every or every)
        job.write_text(text + modules + self.job + "\n")
        return job

    def missed(self, verdict: Verdict) -> str | None:
        """What the verdict does not say as it should; None when it is right."""
        status, codes, whose = self.says
        said = f"{verdict.status} {verdict.code} {verdict.blame.whose}: {verdict.cause}; {verdict.hint}"
        if (verdict.status, verdict.blame.whose) != (status, whose) or verdict.code not in (
            [codes] if isinstance(codes, str) else codes
        ):
            return f"{status}, {codes}, {whose} is not what was said: {said}"
        if verdict.status == "PASS" and (
            self.warns not in " ".join(verdict.warnings) or bool(self.warns) != bool(verdict.warnings)
        ):
            return f"{self.warns!r} is not what was warned of: {verdict.warnings}"
        return None


def practices() -> list[Practice]:
    given = {each.name for each in fields(Practice)}
    found = []
    for family in YAML(typ="safe").load((HERE / "practices.yaml").read_text()):
        for row in family["scripts"]:
            row = {"says": family["says"], **row}
            pieces = {name: text for name, text in row.items() if name not in given}
            found.append(Practice(family=family["family"], pieces=pieces, **{k: v for k, v in row.items() if k in given}))
    return found


PRACTICES = practices()


def drills() -> list[Any]:
    return [
        pytest.param(each, workers, id=f"{each.name}-{workers}", marks=() if workers == each.make_test else pytest.mark.nightly)
        for each in PRACTICES
        for workers in KILLS
    ]


def test_there_are_innocents_and_mistakes_of_each_kind() -> None:
    assert len({each.name for each in PRACTICES}) == len(PRACTICES)
    innocents = sum(each.says[0] == "PASS" and not each.warns for each in PRACTICES)
    assert innocents >= 60
    assert len(PRACTICES) - innocents + len(MUTANTS) >= 90
    families = {each.family for each in PRACTICES}
    assert families == {each.family for each in PRACTICES if each.make_test}, "make test meets each family"


@pytest.mark.ray
@pytest.mark.parametrize(("practice", "workers"), drills())
def test_a_script_gets_the_verdict_that_it_deserves(
    warm_drills: WarmDrills, tmp_path: Path, score: Score, practice: Practice, workers: int
) -> None:
    with score.of(f"{practice.name} on {workers} workers", practice.family) as outcome:
        verdict = warm_drills(practice.write(tmp_path, workers), root=tmp_path / "root").verdict
        outcome.said = f"{verdict.status} {verdict.code} {verdict.blame.whose}"
        outcome.missed = practice.missed(verdict)
