"""The pytest plugin, in pytest sessions of its own: what a test sees, what is said of a red one, what is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from chaosrun.integrations.testing import cases
from chaosrun.records.layout import RunLayout
from tests.e2e.drills import Shell, eventually, finish, kills, open_shell, reached, write_job

CONFTEST = """\
import json, os, pathlib, pytest

@pytest.fixture(autouse=True)
def noted(request):
    yield
    import ray
    node = ray.nodes()[0]["NodeID"] if ray.is_initialized() else None
    about = {"worker": os.environ.get("PYTEST_XDIST_WORKER"), "test": request.node.name, "node": node}
    with pathlib.Path("rays.jsonl").open("a") as file:
        file.write(json.dumps(about) + "\\n")
"""
TESTS = """\
import pytest

def test_exact(chaos):
    outcome = chaos.run("jobs/job.yaml", faults=[{"rank": 1, "at_step": 5}], seed=3)
    assert outcome.assert_exact() is outcome
    assert (outcome.status, outcome.seed, outcome.verdict.lost_steps) == ("PASS", 3, 2)
    assert outcome.run_path.is_dir() and outcome.report.is_file()

def test_inexact(chaos):
    outcome = chaos.run("job.yaml", overrides=["data.resume=plain"])
    outcome.assert_verdict("FAIL", kind="data order", cause="batches repeated")
    with pytest.raises(AssertionError, match="but data order differed first where rng was expected"):
        outcome.assert_verdict("FAIL", kind="rng")
    outcome.assert_exact()

def test_script(chaos):
    outcome = chaos.run_script("own.py", "--epochs", "2", workers=2, kills=["1@9"])
    assert outcome.assert_exact().verdict.lost_steps == 3

@pytest.mark.chaos_plans({}, [{"rank": 0, "at_stepp": 5}], ids=["nothing", "wrong"])
def test_plans(chaos):
    chaos.run("job.yaml").assert_exact()
"""


def start(shell: Shell, *options: str) -> subprocess.Popen[str]:
    """A pytest session in the shell's folder, as a terminal would start it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CHAOSRUN_", "PYTEST_"))}
    fresh = ["-p", "no:cacheprovider", "--basetemp", "temporary", "--strict-markers"]
    return shell.begin([sys.executable, "-m", "pytest", *fresh, *options], {**environment, "PYTHONDONTWRITEBYTECODE": "1"})


def write_tests(folder: Path, tests: str = TESTS) -> None:
    jobs = folder / "tests" / "jobs"
    jobs.mkdir(parents=True)
    write_job(folder, "", kills(5))
    for name in ("job.yaml", "train.py"):
        (jobs / name).write_text((folder / name).read_text())
    (folder / "own.py").write_text((Path(__file__).parent / "own" / "train.py").read_text())
    (folder / "pytest.ini").touch()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "tests" / "test_jobs.py").write_text(tests)


class Session:
    """One that is over."""

    def __init__(self, folder: Path, done: "subprocess.CompletedProcess[str]") -> None:
        self.folder = folder
        self.out = done.stdout
        self.returncode = done.returncode
        self.cases = {case.get("name"): case for case in ElementTree.parse(folder / "junit.xml").iter("testcase")}
        self.rays = [json.loads(line) for line in (folder / "rays.jsonl").read_text().splitlines()]

    def failure(self, test: str) -> str:
        """What is printed of a test, without what was captured."""
        (text,) = re.findall(rf"^_+ {re.escape(test)} _+$(.*?)(?=^(?:-----|_____|=====))", self.out, re.MULTILINE | re.DOTALL)
        return text

    def properties(self, test: str) -> dict[str, str]:
        return {entry.get("name", ""): entry.get("value", "") for entry in self.cases[test].iter("property")}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Two workers of xdist, each with drills."""
    folder = tmp_path_factory.mktemp("session")
    write_tests(folder)
    with open_shell(folder) as shell:
        # xdist gives the first two tests to one worker, the others to the other.
        options = ["-n", "2", "--chaos-seed", "today", "--junitxml", "junit.xml", "-W", "error", "-rA"]
        yield Session(folder, finish(start(shell, *options)))


class TestSession:
    def test_what_passes(self, session: Session) -> None:
        bad = {
            kind: {name for name, case in session.cases.items() if case.find(kind) is not None} for kind in ("failure", "error")
        }
        failed = bad["failure"] | bad["error"]
        assert failed == {"test_inexact", "test_plans[nothing]", "test_plans[wrong]"}, session.out
        assert (len(session.cases), session.returncode) == (5, 1)

    def test_a_fail_says_what_differs_and_what_to_type(self, session: Session) -> None:
        said = session.failure("test_inexact")
        assert ">       outcome.assert_exact()\n" in said
        (seed,) = re.findall(r"chaosrun: --chaos-seed (\d{8})", session.out)
        run = session.folder / ".chaosrun" / "runs" / session.properties("test_inexact")["chaosrun_run"]
        for line in (
            r"FAIL: 3 batches repeated \(first difference in data order: step 4, rank 0, attempt 2",
            r"where +step 4, ranks 0, 1, attempt 2",
            r"kind +data order",
            r"expected +\[",
            r"seen +\[",
            r"hint +.*only seedable is exact",
            rf"run +{re.escape(str(run))}",
            rf"report +\S*{run.name}/report.html",
            r"blame +yours \(the job file\)",
            r"diagnose +chaosrun diagnose small-",
            rf"repeat +chaosrun submit job.yaml faults.seed={seed} data.resume=plain",
            rf"test +pytest tests/test_jobs.py::test_inexact --chaos-seed {seed}",
        ):
            assert re.search(line, said), f"{line} is not in {said}"
        frames = said.replace(str(run), "").replace(sys.executable, "").replace(".chaosrun/runs", "")
        assert "chaosrun/" not in frames, "frames of chaosrun"
        assert "Traceback" not in said
        assert "attempt 1 starts" not in session.out, "progress buries the verdict"

    def test_other_failures_say_why(self, session: Session) -> None:
        assert "INCONCLUSIVE: faults_landed: no fault was planned" in session.failure("test_plans[nothing]")
        said = session.failure("test_plans[wrong]")
        assert "unknown key 'at_stepp' in faults.schedule[0], did you mean 'at_step'?" in said
        assert "chaosrun/" not in said.replace(sys.executable, ""), "frames of chaosrun"

    def test_junit(self, session: Session) -> None:
        found = session.properties("test_exact")
        run = RunLayout(session.folder / ".chaosrun" / "runs" / found["chaosrun_run"])
        assert json.loads(run.plan_json.read_bytes())["seed"] == 3
        assert (found["chaosrun_verdict"], found["chaosrun_seed"]) == ("PASS", "3")
        assert session.properties("test_inexact")["chaosrun_verdict"] == "FAIL"

    def test_one_ray_for_each_worker(self, session: Session) -> None:
        nodes = {worker: {ray["node"] for ray in session.rays if ray["worker"] == worker} for worker in ("gw0", "gw1")}
        assert all(len(found - {None}) <= 1 for found in nodes.values()), nodes
        assert len(set().union(*nodes.values()) - {None}) == 2, nodes


def test_collecting_imports_nothing_heavy(tmp_path: Path) -> None:
    write_tests(tmp_path)
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        "def pytest_collection_finish(session):\n"
        "    heavy = {'torch', 'ray', 'pydantic', 'numpy', 'accelerate', 'jinja2'} & set(sys.modules)\n"
        "    print('chaosrun.integrations.pytest_plugin' in sys.modules, 'heavy:', *sorted(heavy))\n"
    )
    # Others' plugins import what they like.
    options = ["--collect-only", "-q", "-s", "-p", "no:hypothesispytest", "-p", "no:anyio"]
    with open_shell(tmp_path) as shell:
        done = finish(start(shell, *options))
    assert "True heavy:\n" in done.stdout
    assert "test_plans[nothing]" in done.stdout


def test_marks() -> None:
    def mark(name: str, *args: object, **kwargs: object) -> pytest.Mark:
        return getattr(pytest.mark, name)(*args, **kwargs).mark

    plans, seeds = mark("chaos_plans", "spot", [{"rank": 0}], ids=["a", "b"]), mark("chaos", seeds=range(2))
    found = {name: (plan.faults, plan.seed) for name, plan in cases(plans, seeds, where="it")}
    one, other = "spot", [{"rank": 0}]
    assert found == {"a-seed0": (one, 0), "a-seed1": (one, 1), "b-seed0": (other, 0), "b-seed1": (other, 1)}
    assert [name for name, _ in cases(mark("chaos_plans", "spot", {}), None, where="it")] == ["spot", "plan1"]
    for wrong in (
        (mark("chaos_plans"), None),
        (mark("chaos_plans", 7), None),
        (mark("chaos_plans", {}, ids=["a", "b"]), None),
        (mark("chaos_plans", {}, seed=1), None),
        (None, mark("chaos", seeds=[])),
        (None, mark("chaos", seeds=[-1])),
        (None, mark("chaos", [1])),
    ):
        with pytest.raises(pytest.UsageError, match=r"it: .*@pytest\.mark\.chaos"):
            cases(*wrong, where="it")


LATER = """\
import pytest

def test_small(chaos):
    chaos.run("job.yaml").assert_exact()

def test_larger_than_the_machine(chaos):
    chaos.run("job.yaml", workers=4).assert_exact()

def test_command(chaos):
    words = ["torchrun", "--nproc-per-node", "2", "own.py"]
    chaos.run_command(words, kills=["1@9"]).assert_exact()
    with pytest.raises(AssertionError, match="does not agree with --nproc-per-node 2"):
        chaos.run_command(words, workers=3)

def test_with_a_ray_of_its_own(chaos):
    chaos.run("job.yaml", faults=[{"kind": "node", "rank": 1, "at_step": 5}]).assert_exact()

@pytest.mark.chaos_plans("spot")
@pytest.mark.chaos(seeds=[1])
def test_preset(chaos):
    chaos.run("job.yaml", overrides=["max_steps=12"]).assert_exact()

def test_nobody_asks(chaos):
    chaos.run("job.yaml", overrides=["data.resume=plain"])
"""


@pytest.mark.nightly
def test_without_xdist(tmp_path: Path) -> None:
    write_tests(tmp_path, LATER)
    with open_shell(tmp_path) as shell:
        ended = finish(start(shell, "-p", "no:xdist", "--junitxml", "junit.xml", "-rA", "-s"), timeout_s=300)
    done = Session(tmp_path, ended)
    assert "attempt 1 starts" in ended.stderr, "nothing is captured: it is followed as it goes"
    assert done.returncode == 1 and "6 passed, 1 error" in done.out, done.out
    assert "ERROR tests/" in done.out and "FAIL, and the test did not ask for the verdict of this drill: " in done.out
    nodes = [ray["node"] for ray in done.rays]
    assert len(nodes) == 6 and len(set(nodes)) >= 3, "a larger one, and one beside them"
    assert nodes[-1] == nodes[-2], "one Ray for all"


@pytest.mark.nightly
@pytest.mark.parametrize("options", [["-p", "no:xdist"], ["-n", "2"]])
def test_ctrl_c(tmp_path: Path, options: list[str]) -> None:
    """Ends in order, leaves nothing behind (the shell sees to that), and says how to go on."""
    write_tests(tmp_path, "def test_slow(chaos): chaos.run('job.yaml').assert_exact()\n")
    slow = tmp_path / "train.py"
    (tmp_path / "tests" / "jobs").rename(tmp_path / "unused")
    line = "    step = run.position.step\n"
    slow.write_text(slow.read_text().replace(line, f"{line}    time.sleep(0.3)\n"))
    with open_shell(tmp_path) as shell:
        process = start(shell, *options)
        runs = tmp_path / ".chaosrun" / "runs"
        try:
            eventually(lambda: runs.is_dir() and any(reached(RunLayout(run).reference, 1, 3) for run in runs.iterdir()))
            os.killpg(process.pid, signal.SIGINT)
            done = finish(process)
        finally:
            process.kill()
    assert done.returncode == 2, done.stdout
    if "no:xdist" in options:
        assert "chaosrun: interrupted in the reference leg; `chaosrun resume small-" in done.stdout
        assert "chaosrun/" not in done.stdout
