"""The check "cluster": the odd node is named, and what is the same, or cannot be known, is held against nobody."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from chaosrun.cluster.probing import Node
from chaosrun.preflight.checks.cluster import CHECK as CLUSTER
from chaosrun.preflight.checks.cluster import ClusterFacts, gather, majority
from chaosrun.preflight.model import Finding, Level, Setting, Status
from chaosrun.preflight.probes.software import SoftwareFacts, _dotted
from chaosrun.spec.job_file import Job, load_job
from tests.local_pool import LocalPool
from tests.preflight_answers import told

FAULTY = Path(__file__).parents[1] / "integration" / "faulty"
GOOD: dict[str, Any] = {
    "versions": {"python": "3.11.7", "chaosrun": "1.0", "ray": "2.60.0", "torch": "2.13.0", "accelerate": "1.15.0"}
    | {"numpy": "2.4.6", "driver": "570.1", "NCCL": "2.27.3"},
    "variables": {"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0", "TERM": "xterm"},
    "auth": "token",
    "own_ray": False,
    "cpus": 8,
    "script": {
        "files": {"train.py": "1"},
        "imports": {"datasets": {"found": True, "optional": False, "version": "4.0"}},
        "own_path": False,
    },
}


def node(name: str, *, cpus: float = 4, gpus: int = 1) -> Node:
    return Node(name=name, node_id=name, address="10.0.0.1", hostname=name, cpus=cpus, gpus=gpus, head=name == "a")


def job(folder: Path, *lines: str, workers: int = 4) -> Job:
    (folder / "train.py").write_text("import chaosrun\n")
    (folder / "job.yaml").write_text("\n".join(["name: probe", "script: train.py", f"workers: {workers}", *lines]))
    return load_job(folder / "job.yaml")


def judge(
    changes: Mapping[str, Mapping[str, Any]],
    *,
    names: str = "abcd",
    with_job: Job | None = None,
    nodes: Sequence[Node] = (),
    clocks: Mapping[str, tuple[float, float]] | None = None,
) -> list[Finding]:
    """`changes`: of each node, new values by "versions.torch"-like keys."""
    answered = {name: copy.deepcopy(GOOD) for name in names}
    for name, changed in changes.items():
        for place, value in changed.items():
            facts = answered[name]
            *groups, last = place.split("/")
            for group in groups:
                facts = facts[group]
            facts[last] = value
    setting = Setting(level=Level.QUICK, root=Path("/runs"), storage=Path("/runs"), job=with_job)
    known = clocks or dict.fromkeys(names, (-0.01, 0.01))
    facts = ClusterFacts(software=told(SoftwareFacts, answered), clocks=dict(known))
    return list(CLUSTER.judge(setting, nodes or [node(name) for name in names], facts))


def bad(found: Sequence[Finding]) -> set[tuple[str, str | None, Status]]:
    return {(row.name, row.node, row.status) for row in found if row.status not in (Status.PASS, Status.SKIP)}


class TestVersions:
    def test_equal_nodes_pass(self) -> None:
        found = judge({})
        assert bad(found) == set()
        assert {row.node for row in found if row.name == "versions" and row.status is Status.PASS} == {*"abcd"}

    @pytest.mark.parametrize(
        ("place", "value", "name", "status"),
        [
            ("versions/torch", "2.12.0", "torch version", Status.FAIL),
            ("versions/ray", "2.59.0", "ray version", Status.FAIL),
            ("versions/accelerate", None, "accelerate version", Status.FAIL),
            ("versions/chaosrun", "0.9", "chaosrun version", Status.FAIL),
            ("versions/driver", "560.1", "driver version", Status.FAIL),
            ("versions/driver", "570.133", "driver version", Status.WARN),
            ("versions/NCCL", "2.26.0", "NCCL version", Status.FAIL),
            ("versions/python", "3.12.0", "python version", Status.FAIL),
            ("versions/python", "3.11.9", "python version", Status.WARN),
            ("versions/numpy", "2.0.0", "numpy version", Status.WARN),
            ("variables/NCCL_ALGO", "Tree", "variable NCCL_ALGO", Status.WARN),
            ("variables", {"TERM": "xterm"}, "variable NCCL_ALGO", Status.WARN),
            ("script", {"error": "/job/train.py: No such file or directory"}, "script", Status.FAIL),
            ("script/files", {"train.py": "2"}, "script", Status.FAIL),
            ("script/files", {"train.py": "1", "more.py": "1"}, "script", Status.FAIL),
            ("script/imports/datasets/found", False, "script's imports", Status.FAIL),
            ("script/imports/datasets", {"found": False, "optional": True, "version": None}, "script's imports", Status.WARN),
            ("script/imports/datasets/version", "3.0", "datasets version", Status.WARN),
        ],
    )
    def test_the_odd_node_is_named(self, tmp_path: Path, place: str, value: Any, name: str, status: Status) -> None:
        assert bad(judge({"c": {place: value}}, with_job=job(tmp_path))) == {(name, "c", status)}

    def test_what_is_a_nodes_own_matter(self) -> None:
        cuda = {"CUDA_VISIBLE_DEVICES": "3", "CUDA_HOME": "/opt/cuda"}
        other = {"NCCL_ALGO": "Ring", "NCCL_DEBUG_FILE": "b", "TERM": "no", **cuda}
        assert bad(judge({"b": {"variables": other}})) == set()

    def test_a_driver_without_gpus_does_not_matter(self) -> None:
        nodes = [node("a"), node("b"), node("c"), node("d", gpus=0)]
        assert bad(judge({"d": {"versions/driver": "1", "versions/NCCL": "1"}}, nodes=nodes)) == set()

    @pytest.mark.parametrize(
        ("place", "value", "name", "status"),
        [
            ("versions/ray", "3", "ray version", Status.FAIL),
            ("versions/driver", "570.2", "driver version", Status.WARN),
            ("versions/python", "3.11.2", "python version", Status.WARN),
            ("variables/NCCL_ALGO", "Tree", "variable NCCL_ALGO", Status.WARN),
            ("script/files", {"train.py": "2"}, "script", Status.FAIL),
            ("script/imports/datasets/version", "3.0", "datasets version", Status.WARN),
        ],
    )
    def test_between_two_nothing_says_which_is_right(
        self, tmp_path: Path, place: str, value: Any, name: str, status: Status
    ) -> None:
        found = judge({"a": {place: value}}, names="ab", with_job=job(tmp_path, workers=2))
        (row,) = (row for row in found if row.status not in (Status.PASS, Status.SKIP))
        assert (row.name, row.node, row.status, {*row.blames}) == (name, None, status, {"a", "b"})
        assert "on a" in row.measured and "b" in row.measured and "nothing says which is right" in row.reason

    def test_as_many_of_one_as_of_another(self) -> None:
        found = judge({"a": {"versions/torch": "2.0"}, "b": {"versions/torch": "2.0"}})
        (row,) = (row for row in found if row.status is Status.FAIL)
        assert row.measured == "2.0 on a, b; 2.13.0 on c, d" and {*row.blames} == {*"abcd"}
        assert not [row for row in found if row.name == "versions"]

    def test_a_driver_that_is_not_known_is_said(self) -> None:
        found = judge({"c": {"versions/driver": None, "versions/NCCL": None}})
        assert bad(found) == set()
        skipped = {row.name for row in found if row.status is Status.SKIP and row.node == "c"}
        assert skipped == {"driver version", "NCCL version"}

    @pytest.mark.parametrize("head", [{"versions/torch": "2.13.0+cpu"}, {"versions/torch": None, "versions/accelerate": None}])
    def test_a_head_without_workers_needs_no_torch(self, head: Mapping[str, Any], tmp_path: Path) -> None:
        head = {**head, "script": {"error": "/job/train.py: No such file or directory"}, "variables": {"OMP_NUM_THREADS": "1"}}
        for its in (None, job(tmp_path, "per_worker: {gpu: 1}", workers=1)):
            nodes = [node("a", cpus=8 if its else 0, gpus=0), node("b")]
            found = judge({"a": head, "b": {"versions/torch": "2.13.0+cu130"}}, names="ab", nodes=nodes, with_job=its)
            assert bad(found) == set()
            assert {row.measured for row in found if row.name == "versions" and row.node == "a"} == {
                "python 3.11.7, chaosrun 1.0, ray 2.60.0"
            }
        wrong = judge({"a": {**head, "versions/ray": "2.0"}}, names="ab", nodes=nodes, with_job=its)
        assert {row.name for row in wrong if row.status is Status.FAIL} == {"ray version"}

    def test_builds_are_compared_among_their_like(self) -> None:
        nodes = [node("a", gpus=0), node("b", gpus=0), node("c"), node("d"), node("e")]
        built = {name: {"versions/torch": "2.13.0+" + ("cpu" if name in "ab" else "cu130")} for name in "abcde"}
        assert bad(judge(built, names="abcde", nodes=nodes)) == set()
        for other in ("2.13.0+cu128", "2.12.0+cu130"):
            built["d"] = {"versions/torch": other}
            assert bad(judge(built, names="abcde", nodes=nodes)) == {("torch version", "d", Status.FAIL)}

    def test_one_node_has_nothing_to_compare_with(self) -> None:
        found = judge({}, names="a")
        assert bad(found) == set()
        assert {row.name for row in found if row.status is Status.SKIP} == {"environment variables", "clock", "authentication"}

    def test_what_the_job_sets_on_every_node(self, tmp_path: Path) -> None:
        its = job(tmp_path, "env: {NCCL_ALGO: Tree}")
        assert bad(judge({"b": {"variables/NCCL_ALGO": "Tree"}}, with_job=its)) == set()

    def test_majority(self) -> None:
        most = majority({"a": "1", "b": "2", "c": "2"})
        assert (most.value, dict(most.odd), most.share) == ("2", {"a": "1"}, "2 of 3 nodes")

    def test_nccls_numbers(self) -> None:
        assert [_dotted(number) for number in (2804, 21005, 22703)] == ["2.8.4", "2.10.5", "2.27.3"]


class TestClocks:
    @pytest.mark.parametrize(
        ("bounds", "status"),
        [
            ((-0.15, 0.15), Status.PASS),
            ((0.05, 0.18), Status.PASS),  # may be right
            ((-0.25, 0.25), Status.SKIP),  # may be wrong
            ((0.05, 0.5), Status.SKIP),
            ((0.2, 0.3), Status.WARN),
            ((-0.9, -0.4), Status.WARN),
            ((1.2, 1.6), Status.FAIL),
            ((-70.0, -58.0), Status.FAIL),
            ((-3.0, 3.0), Status.SKIP),  # nobody knows
        ],
    )
    def test_what_is_sure(self, bounds: tuple[float, float], status: Status) -> None:
        found = judge({}, clocks={"a": (-0.01, 0.01), "b": (-0.01, 0.01), "c": bounds, "d": (-0.01, 0.01)})
        assert next(row.status for row in found if row.name == "clock" and row.node == "c") is status
        assert all(row.status is Status.PASS for row in found if row.name == "clock" and row.node != "c")

    def test_all_are_measured_against_their_median(self) -> None:
        # It is the clock of the one who asks that is wrong.
        assert bad(judge({}, clocks=dict.fromkeys("abcd", (59.9, 60.1)))) == set()

    def test_of_two_nothing_says_which_is_right(self) -> None:
        found = judge({}, names="ab", clocks={"a": (-0.01, 0.01), "b": (5.0, 5.1)})
        assert bad(found) == {("clock", "a", Status.FAIL), ("clock", "b", Status.FAIL)}
        row = next(row for row in found if row.name == "clock" and row.node == "a")
        assert row.measured == "5.05 s behind (± 0.06 s)" and row.threshold.startswith("at most 0.1 s from b: nothing says")
        for bounds, status in (((0.0, 0.1), Status.PASS), ((0.0, 3.0), Status.SKIP)):
            found = judge({}, names="ab", clocks={"a": bounds, "b": (-0.01, 0.01)})
            assert {(row.node, row.status) for row in found if row.name == "clock"} == {("a", status), ("b", status)}


class TestResources:
    def test_room_is_counted_by_whole_workers(self, tmp_path: Path) -> None:
        its = job(tmp_path, "per_worker: {cpu: 3, gpu: 0}")
        found = judge({}, with_job=its, nodes=[node(name, cpus=5, gpus=0) for name in "abc"], names="abc")
        assert bad(found) == {("resources", None, Status.FAIL)}
        assert "room for 3" in next(row.measured for row in found if row.name == "resources")
        assert bad(judge({}, with_job=its)) == set()

    def test_gpus(self, tmp_path: Path) -> None:
        its = job(tmp_path, "per_worker: {gpu: 1}")
        assert bad(judge({}, with_job=its, nodes=[node(name, gpus=name != "d") for name in "abcd"])) == {
            ("resources", None, Status.FAIL)
        }

    def test_a_private_ray_may_count_more_cpus_than_there_are(self, tmp_path: Path) -> None:
        its = job(tmp_path)
        for counted in (2, 4):
            found = judge({"a": {"own_ray": True, "cpus": 2}}, names="a", with_job=its, nodes=[node("a", cpus=counted, gpus=0)])
            assert bad(found) == {("resources", None, Status.WARN)}
            assert "2 CPUs: room for 2" in {row.measured for row in found}

    def test_nothing_to_place_a_worker_on(self, tmp_path: Path) -> None:
        for its in (None, job(tmp_path)):
            found = judge({}, names="a", with_job=its, nodes=[node("a", cpus=0, gpus=0)])
            assert bad(found) == {("resources", None, Status.FAIL)}
            assert any("request_resources" in row.remedy for row in found)

    def test_without_a_token(self) -> None:
        assert bad(judge({"b": {"auth": None}})) == {("authentication", None, Status.WARN)}

    def test_a_node_that_does_not_answer_is_an_error(self) -> None:
        found = judge({}, names="abc", nodes=[node(name) for name in "abcd"])
        assert bad(found) == {("node answers", "d", Status.ERROR)}


class TestScript:
    def test_optional_imports_that_no_node_has(self, tmp_path: Path) -> None:
        missing = {"script/imports/datasets": {"found": False, "optional": True, "version": None}}
        assert bad(judge(dict.fromkeys("abcd", missing), with_job=job(tmp_path))) == set()

    def test_a_script_that_changes_its_own_path(self, tmp_path: Path) -> None:
        missing = {"script/imports/datasets/found": False, "script/own_path": True}
        found = judge(dict.fromkeys("abcd", missing), with_job=job(tmp_path))
        assert {(name, status) for name, _, status in bad(found)} == {("script's imports", Status.WARN)}


def test_bad_nodes_are_named_by_real_probes(tmp_path: Path) -> None:
    """One with another accelerate, one whose clock is a minute ahead, two that are good."""
    its = job(tmp_path)
    (tmp_path / "train.py").write_text("import torch\nimport no_such_package\n")
    bad_ones = {"other": "other_version", "skewed": "skewed_clock"}
    pool = LocalPool({"good": {}, "fine": {}} | {name: {"PYTHONPATH": str(FAULTY / bad)} for name, bad in bad_ones.items()})
    setting = Setting(level=Level.QUICK, root=tmp_path, storage=tmp_path, job=its)
    found = CLUSTER.judge(setting, pool.nodes, gather(setting, pool))
    failed = {(row.name, row.node) for row in found if row.status is Status.FAIL}
    missing = {("script's imports", name.name) for name in pool.nodes}
    assert failed - missing == {("accelerate version", "other"), ("clock", "skewed")}
    assert missing <= failed
    (version,) = (row for row in found if row.name == "accelerate version")
    assert version.measured == "0.0.1" and version.remedy == "install the same accelerate there"
    assert not [row for row in found if row.status is Status.ERROR]
