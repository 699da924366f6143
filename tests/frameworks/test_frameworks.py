"""Each script, as its users write it, is drilled, and the verdict is what the table says. One of a kind is quick; all others
run at night, with the extra `frameworks`."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import WarmDrills
from tests.frameworks.page import PAGE, page
from tests.frameworks.subjects import FRAMEWORKS, HERE, Framework, Subject

pytestmark = pytest.mark.ray
DRILLED = [
    pytest.param(framework, subject, id=subject.name, marks=[] if subject.quick else pytest.mark.nightly)
    for framework in FRAMEWORKS
    for subject in framework.subjects
]


@pytest.mark.parametrize(("framework", "subject"), DRILLED)
def test_the_verdict_is(framework: Framework, subject: Subject, tmp_path: Path, warm_drills: WarmDrills) -> None:
    for package in framework.packages:
        if find_spec(framework.modules.get(package, package)) is None:
            pytest.skip(f"{package} is not installed: pip install 'chaosrun[frameworks]'")
    result = warm_drills(write_job(subject, tmp_path), root=tmp_path / "root")
    verdict = result.verdict
    assert verdict.status == subject.verdict, verdict.cause
    assert [fault.landed for fault in verdict.faults] == [True] * len(subject.kills)
    assert len(verdict.attempts) == 1 + len(subject.kills)
    if subject.verdict == "PASS":
        assert all(attempt.resumed_step > 0 for attempt in verdict.attempts[1:]), "it went on from a checkpoint of its own"
    else:
        assert verdict.divergence is not None
        assert verdict.divergence.reason.code == subject.cause, verdict.cause


def write_job(subject: Subject, folder: Path) -> Path:
    text = subject.path.read_text()
    if subject.change:
        before, after = subject.change
        assert text.count(before) == 1
        text = text.replace(before, after)
    (folder / "train.py").write_text(text)
    # torchrun and accelerate of this environment, activated or not.
    launch = [str(Path(sys.executable).parent / subject.launch[0]), *subject.launch[1:]] if subject.launch else []
    started = (
        {"command": [*launch, "train.py", *subject.args]} if launch else {"script": "train.py", "args": list(subject.args)}
    )
    schedule = [{"kind": subject.kind, "rank": rank, "at_step": step} for rank, step in subject.kills]
    # The seed of other tests' jobs: with these it shares a fork server.
    job = {"name": subject.name, **started, "workers": subject.workers, "seed": 1, "timeout": "10m"}
    job["faults"] = {"schedule": schedule}
    # Some take long to be imported where much else goes on.
    job["recovery"] = {"preload": list(subject.preload), "acquire_timeout": "5m"}
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def test_no_script_knows_of_chaosrun() -> None:
    paths = {subject.path for framework in FRAMEWORKS for subject in framework.subjects} | {*(HERE / "scripts").glob("*.py")}
    assert [path.name for path in paths if "import chaosrun" in path.read_text() or "CHAOSRUN" in path.read_text()] == []


def test_the_page_is_that_of_the_table() -> None:
    assert PAGE.read_text() == page(), "python -m tests.frameworks.page writes it anew"
