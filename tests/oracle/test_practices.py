"""Whole scripts and what the verdict makes of them: innocents pass, mistakes are found, with the right cause and culprit.

practices.yaml lists what scripts do, in families of which each deserves one verdict; practice.py.jinja is the script around it.
Each is a real drill with one kill, compared with its own reference.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
from ruamel.yaml import YAML

from chaosrun.errors import UsageError
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
    tells: str = ""
    checked: str = "completed"
    diagnosis: str = ""
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
        kill, every = self.times(workers)
        job.write_text(JOB.format(workers=workers, kill=kill, kind=self.kind, every=every) + modules + self.job + "\n")
        return job

    def times(self, workers: int) -> tuple[int, int]:
        return self.kill or KILLS[workers][0], self.every or KILLS[workers][1]

    def restored(self, workers: int) -> int:
        kill, every = self.times(workers)
        return (kill - 1) // every * every

    def missed(self, verdict: Verdict, workers: int) -> str | None:
        """What the verdict does not say as it should; None when it is right."""
        said = (verdict.status, verdict.code, verdict.blame.whose)
        status, codes, whose = self.says
        told = f"{verdict.cause}; {verdict.hint}; {verdict.blame.reason}"
        if (
            said not in [(status, code, whose) for code in ([codes] if isinstance(codes, str) else codes)]
            or self.tells not in told
        ):
            return f"{self.says} {self.tells!r} is not what was said: {said}: {told}"
        if status != "PASS":
            return None
        if bool(self.warns) != bool(verdict.warnings) or self.warns not in " ".join(verdict.warnings):
            return f"{self.warns!r} is not what was warned of: {verdict.warnings}"
        if self.checked not in [check.name for check in verdict.checks if check.status == "pass"]:
            return f"{self.checked} was not checked"
        if [attempt.resumed_step for attempt in verdict.attempts] != [0, self.restored(workers)]:
            return f"it did not go on from step {self.restored(workers)} once: {verdict.attempts}"
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
        try:
            result = warm_drills(practice.write(tmp_path, workers), root=tmp_path / "root")
        except UsageError as error:
            outcome.said = "REFUSED usage yours"
            right = practice.says[0] == "REFUSED" and practice.tells in str(error)
            outcome.missed = None if right else f"{practice.says} was refused: {error}"
        else:
            verdict = result.verdict
            outcome.said = f"{verdict.status} {verdict.code} {verdict.blame.whose}"
            outcome.missed = practice.missed(verdict, workers)
            if practice.diagnosis and outcome.missed is None:
                hint = warm_drills.diagnose(result.run).hint or ""
                outcome.missed = None if f"no checkpoint holds {practice.diagnosis}" in hint else f"the diagnosis said: {hint}"


@pytest.mark.ray
@pytest.mark.nightly
def test_a_reference_of_another_job_is_not_taken_for_this_one(warm_drills: WarmDrills, tmp_path: Path) -> None:
    """By day integration/test_not_fooled.py meets one."""
    one, other = (next(each for each in PRACTICES if each.name == name) for name in ("sgd", "amsgrad"))
    earlier = warm_drills(other.write(tmp_path, 2), root=tmp_path / "root")
    verdict = warm_drills(one.write(tmp_path, 2), root=tmp_path / "root", reference=str(earlier.run.path)).verdict
    assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "reference_of_another_job")
    assert earlier.run.run_id in verdict.cause


@pytest.mark.ray
@pytest.mark.nightly
def test_a_confirming_leg_that_reads_what_the_chaos_leg_left_replaces_no_reference(
    warm_drills: WarmDrills, tmp_path: Path
) -> None:
    found = next(each for each in PRACTICES if each.name == "statistics-by-torch")
    job = replace(found, kill=6, every=5).write(tmp_path, 2)
    for expected in ("chaos leg read", "confirm leg read"):
        # The second time the reference comes from the cache, and the chaos leg finds nothing of its.
        (tmp_path / "statistics.pt").unlink(missing_ok=True)
        kept = {path: path.read_bytes() for path in tmp_path.glob("root/references/*/journal.jsonl")}
        verdict = warm_drills(job, root=tmp_path / "root").verdict
        assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "file_of_another_leg")
        assert expected in verdict.cause and "statistics.pt" in verdict.cause
    assert kept == {path: path.read_bytes() for path in tmp_path.glob("root/references/*/journal.jsonl")} != {}
