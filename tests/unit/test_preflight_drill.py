"""What is made of a drill's outcome, which drill a node is given, and who is left out of it and why."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from chaosrun.cluster.probing import Call, Node, ProbeOutcome
from chaosrun.preflight.checks.drill import BEGIN_WITHIN_S, DrillOutcome, DrillRequest, Terms, request_on, request_over
from chaosrun.preflight.checks.drill import CHECK as DRILL
from chaosrun.preflight.drills.on_ray import JOB
from chaosrun.preflight.earlier_run import Costs
from chaosrun.preflight.model import Finding, Level, Setting, Status
from chaosrun.records.codec import changed
from chaosrun.spec.job_file import Job, load_job
from tests.preflight_answers import Answering

NODES = tuple(
    Node(name=name, node_id=f"id-{name}", address="192.0.2.1", hostname=name, cpus=8.0, gpus=0) for name in ("a", "b", "c")
)
PASSED = DrillOutcome(
    **{"status": "PASS", "outcome": "completed", "cause": "bit-identical", "landed": 2, "planned": 2, "seconds": 5.0},
    **{"ranks": {0: "a", 1: "b", 2: "c"}, "costs": Costs(restart_s=0.3)},
)
FAILED = changed(
    PASSED,
    **{"status": "FAIL", "cause": "RNG not restored", "hint": "restore it", "why": "RNG not restored", "differing": (1,)},
    **{"difference": "rng differs first at step 11, rank 1, 0.weight"},
    **{"run": "/runs/runs/preflight-1", "run_argument": "preflight-1"},
)
UNSURE = changed(FAILED, status="INCONCLUSIVE", difference="", why="", differing=())


@dataclass
class Answers(Answering):
    """A pool that sees what `blind` does not hide, and drills that come to what was written down."""

    told: Mapping[str, DrillOutcome] = field(default_factory=dict)
    whole: DrillOutcome = PASSED
    blind: Mapping[str, str] = field(default_factory=dict)
    nodes: Sequence[Node] = NODES
    asked: list[tuple[list[DrillRequest], Terms]] = field(default_factory=list)

    def probe(self, calls: Mapping[str, Call]) -> dict[str, ProbeOutcome]:
        ((path, digest),) = next(iter(calls.values())).parameters["digests"].items()
        assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == digest
        return {name: ProbeOutcome(facts={"missing": {path: self.blind[name]} if name in self.blind else {}}) for name in calls}

    def __call__(self, wanted: Sequence[DrillRequest], terms: Terms) -> list[DrillOutcome]:
        self.asked.append((list(wanted), terms))
        return [self.told.get(request.nodes[0].name, PASSED) if len(request.nodes) == 1 else self.whole for request in wanted]


def findings(answers: Answers, root: Path, *, drills: bool = True, **about: Any) -> dict[str, Finding]:
    """What the drills came to, by node."""
    rows = judged(answers, root, drills=answers if drills else None, **about)
    return {finding.node or "all": finding for finding in rows if finding.name != "restart"}


def judged(answers: Answers, root: Path, **about: Any) -> list[Finding]:
    setting = Setting(**{"level": Level.STANDARD, "root": root, "storage": root, "drills": answers, **about})
    assert DRILL.gather is not None
    told = DRILL.gather(setting, answers)
    assert not root.exists() or not list(root.iterdir())
    found = list(DRILL.judge(setting, answers.nodes, told))
    assert all(finding.remedy for finding in found if finding.status is Status.ERROR)
    return found


def setting_of(job: Job | None) -> Setting:
    return Setting(level=Level.STANDARD, root=Path("/runs"), storage=Path("/runs"), job=job)


def alone(*nodes: Node, job: Job | None = None) -> list[DrillRequest]:
    """The drills of these, where there can be one."""
    requests = [request_on(setting_of(job), node, nodes) for node in nodes]
    return [request for request in requests if isinstance(request, DrillRequest)]


def job(folder: Path, text: str) -> Job:
    (folder / "train.py").write_text("import chaosrun\n")
    path = folder / "job.yaml"
    path.write_text(f"name: j\nscript: train.py\nworkers: 4\n{text}")
    return load_job(path)


def test_every_node_and_all_together(tmp_path: Path) -> None:
    answers = Answers()
    found = findings(answers, tmp_path)
    assert {name: finding.status for name, finding in found.items()} == dict.fromkeys(("a", "b", "c", "all"), Status.PASS)
    assert found["a"].measured == "bit-identical after 2 faults: 2 workers on CPUs (gloo)"
    assert found["all"].measured == "bit-identical after 2 faults: 3 workers on CPUs (gloo)"
    (each, _), (whole, _) = answers.asked
    assert [len(request.nodes) for request in (*each, *whole)] == [1, 1, 1, 3]


def test_nodes_are_compared_by_a_row_that_says_what_its_number_is(tmp_path: Path) -> None:
    rows = {row.name: row for row in judged(Answers(told={"b": FAILED}), tmp_path) if row.node == "a"}
    assert rows["drill"].measure is None and rows["restart"].measure is not None
    assert (rows["restart"].measure.number, rows["restart"].measured) == (0.3, "0.3 s from a kill to the next step")
    assert not [row for row in judged(Answers(told={"b": FAILED}), tmp_path) if row.node == "b" and row.name == "restart"]


def test_a_node_that_does_not_come_back_exactly_is_named_and_left_out_of_the_rest(tmp_path: Path) -> None:
    answers = Answers(told={"b": FAILED})
    found = findings(answers, tmp_path)
    bad = found["b"]
    assert bad.status is Status.FAIL
    assert all(word in bad.measured for word in ("step 11", "rank 1", "0.weight"))
    assert "RNG not restored" in bad.reason and FAILED.run in bad.reason
    assert "leave the node out" in bad.remedy and "chaosrun verify preflight-1" in bad.remedy
    assert [node.name for node in answers.asked[1][0][0].nodes] == ["a", "c"]


@pytest.mark.parametrize(
    ("told", "status", "word"),
    [
        (changed(FAILED, difference=None, outcome="inexact_restore"), Status.FAIL, "RNG not restored"),
        (changed(UNSURE, outcome="recovery_failed"), Status.FAIL, "not come back"),
        (changed(UNSURE, cause="two runs differ", irreproducible=True), Status.FAIL, "two runs differ"),
        (changed(UNSURE, outcome="resources"), Status.ERROR, "RNG"),
        (changed(UNSURE, outcome="timeout"), Status.ERROR, "RNG"),
        (changed(UNSURE, outcome=None), Status.ERROR, "RNG"),
        (changed(PASSED, landed=1), Status.ERROR, "only 1 of 2"),
        (DrillOutcome(status="ERROR", cause="it did not end within 120 s"), Status.ERROR, "120 s"),
        (DrillOutcome(status="LATE"), Status.SKIP, "--level deep"),
    ],
)
def test_what_is_no_pass(told: DrillOutcome, status: Status, word: str, tmp_path: Path) -> None:
    found = findings(Answers(told={"b": told}), tmp_path)
    assert found["b"].status is status
    assert word in found["b"].measured + found["b"].reason
    assert found["a"].status is Status.PASS


def test_a_job_that_allows_differences_blames_no_node_for_them(tmp_path: Path) -> None:
    answers = Answers(told={"b": changed(UNSURE, irreproducible=True)})
    assert findings(answers, tmp_path, job=job(tmp_path.parent, "deterministic: off"))["b"].status is Status.ERROR


def test_all_nodes_failing_speaks_of_what_they_share(tmp_path: Path) -> None:
    found = findings(Answers(told=dict.fromkeys("abc", FAILED)), tmp_path)
    assert "share" in found["a"].remedy
    assert found["all"].status is Status.SKIP and "there are 0" in found["all"].reason


@pytest.mark.parametrize(
    ("ranks", "node", "blames"),
    [
        ([1], "b", ("b",)),
        ([0, 2], "all", ("a", "c")),
        ([0, 1, 2], "all", ("a", "b", "c")),
        (None, "all", ("a", "b", "c")),  # it did not come back
    ],
)
def test_a_drill_over_all_blames_the_nodes_that_differ(
    ranks: list[int] | None, node: str, blames: tuple[str, ...], tmp_path: Path
) -> None:
    failed = changed(FAILED, outcome="recovery_failed", differing=tuple(ranks or ()))
    whole = next(row for row in judged(Answers(whole=failed), tmp_path) if row.name == "drill over all nodes")
    assert (whole.status, whole.node or "all", tuple(whole.blames)) == (Status.FAIL, node, blames)


def test_nodes_with_gpus_are_drilled_without_the_others(tmp_path: Path) -> None:
    gpu, other, cpu = (replace(NODES[0], name=name, gpus=gpus) for name, gpus in (("a", 8), ("b", 1), ("c", 0)))
    answers = Answers(nodes=(gpu, other, cpu))
    whole = findings(answers, tmp_path)["all"]
    assert [node.name for node in answers.asked[1][0][0].nodes] == ["a", "b"]
    assert whole.status is Status.PASS and "without c" in whole.reason and whole.covers == ("a", "b")
    assert whole.measured == "bit-identical after 2 faults: 2 workers on GPUs (NCCL)"
    # One GPU trains with nobody: all are drilled, and the row says on what.
    mixed = findings(Answers(nodes=(gpu, cpu)), tmp_path)["all"]
    assert mixed.measured.endswith("2 workers on CPUs (gloo)") and not mixed.reason


def test_a_head_without_room_for_a_worker_is_left_out(tmp_path: Path) -> None:
    head = replace(NODES[0], name="head", cpus=0.0)
    for its in (job(tmp_path.parent, ""), job(tmp_path.parent, "per_worker: {gpu: 1}")):
        answers = Answers(nodes=(head, *(replace(node, gpus=8) for node in NODES)))
        found = findings(answers, tmp_path, job=its)
        statuses = {name: row.status for name, row in found.items()}
        assert statuses == {"head": Status.SKIP, **dict.fromkeys(("a", "b", "c", "all"), Status.PASS)}
    nowhere = findings(Answers(nodes=(head,)), tmp_path, job=its)
    assert nowhere["head"].status is Status.ERROR and "add nodes" in nowhere["head"].remedy


@pytest.mark.parametrize("before", [(), ("",), ("", "runs")])
def test_no_empty_folder_is_left_that_was_not_there(before: tuple[str, ...], tmp_path: Path) -> None:
    root = tmp_path / "root"
    for part in before:
        (root / part).mkdir()

    class Writing(Answers):
        def __call__(self, wanted: Sequence[DrillRequest], terms: Terms) -> list[DrillOutcome]:
            (terms.root / "runs").mkdir(exist_ok=True)
            return super().__call__(wanted, terms)

    answers = Writing()
    setting = Setting(level=Level.STANDARD, root=root, storage=root, drills=answers)
    assert DRILL.gather is not None
    DRILL.gather(setting, answers)
    there = {str(path.relative_to(root)) for path in (root, *root.rglob("*")) if path.exists()}
    assert there == {part or "." for part in before}


def test_nodes_that_do_not_see_the_runs(tmp_path: Path) -> None:
    # Of one node that sees them and two that do not, nobody can say that they are shared.
    alone = findings(Answers(blind=dict.fromkeys("bc", "/runs: No such file or directory")), tmp_path)
    assert (alone["b"].status, alone["a"].status) == (Status.SKIP, Status.PASS)
    assert "--root" in alone["b"].reason and "No such file" in alone["b"].reason
    missing = findings(Answers(blind={"c": "/runs: No such file or directory"}), tmp_path)
    assert (missing["c"].status, missing["all"].status) == (Status.ERROR, Status.PASS)
    assert "mount" in missing["c"].remedy


def test_a_root_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answers = Answers()
    setting = Setting(level=Level.STANDARD, root=tmp_path / "file" / "root", storage=tmp_path, drills=answers)
    assert DRILL.gather is not None
    (found,) = DRILL.judge(setting, NODES, DRILL.gather(setting, answers))
    assert found.status is Status.ERROR and "--root" in found.remedy and not answers.asked


def test_without_anybody_to_drill(tmp_path: Path) -> None:
    found = findings(Answers(), tmp_path, drills=False)
    assert {finding.status for finding in found.values()} == {Status.SKIP}


def test_a_node_has_two_workers_where_it_has_room(tmp_path: Path) -> None:
    def size(node: Node, job: Job | None = None) -> tuple[int, float, int] | str:
        request = request_on(setting_of(job), node, [node])
        return request if isinstance(request, str) else (request.workers, request.cpu, request.gpu)

    node = NODES[0]
    assert size(node) == (2, 1.0, 0)
    assert size(replace(node, cpus=1.0)) == (2, 0.5, 0)
    assert size(replace(node, gpus=8)) == (2, 1.0, 1)
    assert size(replace(node, gpus=1)) == (1, 1.0, 1)
    assert "0 there" in str(size(replace(node, cpus=0.0)))
    assert size(replace(node, gpus=8), job(tmp_path, "per_worker: {cpu: 6, gpu: 0}")) == (1, 6.0, 0)
    assert "9 CPUs" in str(size(node, job(tmp_path, "per_worker: {cpu: 9}")))
    assert "GPU" in str(size(node, job(tmp_path, "per_worker: {gpu: 1}")))
    assert size(replace(node, cpus=0.3), job(tmp_path, "per_worker: {cpu: 0.1}")) == (2, 0.1, 0)
    over = request_over(alone(replace(node, gpus=8), replace(node, gpus=0, cpus=0.5)), None)
    assert (over.workers, over.cpu, over.gpu) == (2, 0.5, 0)


def test_the_jobs_settings_are_the_drills(tmp_path: Path) -> None:
    text = "env: {NAME: 'a: \"b\" # c'}\ndeterministic: warn\nrecovery: {preload: [json]}\ncheckpoint: {storage: there}\n"
    asked = job(tmp_path, text)
    (request,) = alone(NODES[0], job=asked)
    spec = load_job(JOB, request.overrides).spec
    assert (spec.env, spec.deterministic, spec.recovery.preload) == (asked.spec.env, "warn", ("json",))
    assert spec.checkpoint.storage == str(tmp_path / "there")
    assert (spec.name, spec.workers) == ("preflight", 2)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_drill_is_one_that_can_be_carried_out(workers: int) -> None:
    from chaosrun import api

    request = request_over(alone(*(replace(node, name=str(number)) for number, node in enumerate(NODES[:1] * workers))), None)
    loaded, plan = api.plan(JOB, (*request.overrides, "args[3]=7"))
    assert loaded.spec.args[3] == "7"
    assert [(fault.rank, fault.phase) for fault in plan.faults] == [(workers - 1, "step"), (0, "checkpoint.file")]


def test_a_deep_preflight_drills_every_node_for_its_share_of_the_time(tmp_path: Path) -> None:
    standard, deep = Answers(), Answers()
    findings(standard, tmp_path)
    findings(deep, tmp_path, level=Level.DEEP, seconds=600.0)
    assert (standard.asked[0][1].begin_within_s, standard.asked[0][1].repeat_s) == (BEGIN_WITHIN_S, 0.0)
    assert (deep.asked[0][1].begin_within_s, deep.asked[0][1].repeat_s) == (None, 180.0)
