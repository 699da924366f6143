"""Recorded traces: what each format says, where it is wrong, and which faults become of it. The files are made here."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaosrun import api
from chaosrun.errors import SpecError, UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.plan.planner import make_plan
from chaosrun.plan.replay import Loss, detect, read_recording
from chaosrun.spec.model import JobSpec
from chaosrun.spec.places import SourceText

BAMBOO = "0,0\r\n10,0\r\n10,4\r\n60,4\r\n60,3\r\n90,3\r\n90,4\r\n100,1\r\n"
PARCAE = """\
[0, "add", {"nodes": ["a", "b", "c", "d", "e"], "duration": 60000}]
[60000, "no-op", {"nodes": []}]
[120000, "remove", {"nodes": ["e", "b"]}]

[180000, "migration", {"nodes": []}]
[240000, "add", {"nodes": ["f"]}]
[300000, "remove", {"nodes": ["f"]}]
"""
SKYPILOT = json.dumps({"metadata": {"gap_seconds": 600, "zone": "here"}, "data": [4, 4, 2, 3, 3, 0]}, indent=1)


def source(text: str) -> SourceText:
    return SourceText(label="trace.csv", text=text)


def plan(text: str, *, workers: int = 4, seed: int = 0, **replay) -> tuple[Fault, ...]:
    job = {"name": "a", "script": "b.py", "workers": workers, "faults": {"seed": seed, "replay": {"trace": "t", **replay}}}
    return make_plan(JobSpec.model_validate(job), source(text)).faults


def refusal(text: str, **replay) -> str:
    with pytest.raises(UsageError) as caught:
        plan(text, **replay)
    assert caught.value.hint
    return caught.value.message


def test_bamboo():
    recording = read_recording(source(BAMBOO))
    assert recording.length_s == 100.0
    assert recording.losses == (Loss(time_s=60.0, count=1, line=5), Loss(time_s=100.0, count=3, line=8))
    assert read_recording(source("0.0,2\n0.5,1\n"), unit="hours").losses[0].time_s == 1800.0


def test_parcae():
    recording = read_recording(source(PARCAE))
    assert recording.length_s == 300.0
    assert recording.losses == (
        Loss(time_s=120.0, count=2, nodes=(1, 4), line=3),
        Loss(time_s=300.0, count=1, nodes=(5,), line=7),
    )


@pytest.mark.parametrize("text", [SKYPILOT, SKYPILOT.replace("\n", ""), SKYPILOT.replace(" ", "")])
def test_skypilot(text):
    recording = read_recording(source(text))
    assert recording.length_s == 3000.0
    assert [(loss.time_s, loss.count) for loss in recording.losses] == [(1200.0, 2), (3000.0, 3)]
    if text == SKYPILOT:
        assert [text.splitlines()[loss.line - 1].strip(" ,") for loss in recording.losses] == ["2", "0"]


def test_losses_become_faults_from_outside():
    faults = plan(BAMBOO, compress=10)
    assert [(fault.after_s, fault.source) for fault in faults] == [
        (6.0, "faults.replay, line 5"),
        *[(10.0, "faults.replay, line 8")] * 3,
    ]
    assert {(fault.kind, fault.phase, fault.required, fault.group) for fault in faults} == {("kill", None, False, None)}
    assert len({fault.rank for fault in faults[1:]}) == 3
    assert faults[0].describe() == f"SIGKILL rank {faults[0].rank} 6 s after the start"


def test_more_nodes_than_ranks_are_all_ranks():
    assert [fault.rank for fault in plan("0,9\n5,1\n", workers=2)] == [0, 1]


def test_a_node_with_a_name_is_the_same_rank_each_time():
    assert [(fault.after_s, fault.rank) for fault in plan(PARCAE, compress=60)] == [(2.0, 0), (2.0, 1), (5.0, 1)]
    # Nodes that share a rank take it away once.
    assert [(fault.after_s, fault.rank) for fault in plan(PARCAE, compress=60, workers=3)] == [(2.0, 1), (5.0, 2)]


def test_a_window_of_the_recording():
    assert [fault.after_s for fault in plan(SKYPILOT, start="10m", until="50m", compress=60)] == [10.0, 10.0]
    assert [fault.after_s for fault in plan(SKYPILOT, start="20m", until=1201, compress=60)] == [0.001, 0.001]
    message = refusal(SKYPILOT, start=1201, until="50m")
    assert message == "faults.replay: trace.csv records no loss of a node from 1201 s to 3000 s"
    assert "records no loss of a node" in refusal("0,1\n5,2\n")


def test_onto_nodes():
    assert {fault.kind for fault in plan(BAMBOO, onto="nodes")} == {"node"}
    assert {fault.kind for fault in plan(BAMBOO, onto="nodes", kind="drain")} == {"drain"}
    assert {fault.kind for fault in plan(BAMBOO, kind="preempt")} == {"preempt"}


@pytest.mark.parametrize(
    ("text", "form", "place", "message"),
    [
        ("", "auto", "1:1", "the trace is empty"),
        ("\n \n", "auto", "1:1", "the trace is empty"),
        ("time,nodes\n0,1\n", "auto", "1:1", "'time' is no time"),
        ("0,1\n5\n", "auto", "2:1", "1 column where 2 are expected"),
        ("0,1\n5,1,2\n", "auto", "2:1", "3 columns where 2 are expected"),
        ("0,1\n5,-1\n", "auto", "2:1", "'-1' is not a number of nodes"),
        ("0,1\n5,1.5\n", "auto", "2:1", "'1.5' is not a number of nodes"),
        ("0,1\nnan,1\n", "auto", "2:1", "'nan' is no time"),
        ("0,1\n-1,1\n", "auto", "2:1", "'-1' is no time"),
        ("0,1\n1e999,1\n", "auto", "2:1", "'1e999' is no time"),
        ("0,1\n9,1\n5,1\n", "auto", "3:1", "time goes back, from 9 s to 5 s"),
        ('[0, "add", {"nodes": []}]\n[1, "add"\n', "auto", "2:10", "not JSON"),
        ('[0, "add"]\n', "auto", "1:1", "not a list of a time, an event and its facts"),
        ('[0, "lunch", {"nodes": []}]\n', "auto", "1:1", "'lunch' is not an event"),
        ('[0, ["add"], {"nodes": []}]\n', "auto", "1:1", "['add'] is not an event"),
        ('["0", "add", {"nodes": []}]\n', "auto", "1:1", "'0' is no time in milliseconds"),
        ('[true, "add", {"nodes": []}]\n', "auto", "1:1", "True is no time in milliseconds"),
        ('[0, "add", {"nodes": [1]}]\n', "auto", "1:1", "its nodes are not a list of names"),
        ('[0, "add", {}]\n', "auto", "1:1", "its nodes are not a list of names"),
        ('[0, "add", {"nodes": ["a", "a"]}]\n', "auto", "1:1", "it names a node twice"),
        ('[0, "add", {"nodes": ["a"]}]\n[5, "remove", {"nodes": ["b"]}]\n', "auto", "2:1", "'b' is removed, and is not there"),
        ('[0, "add", {"nodes": ["a"]}]\n[5, "add", {"nodes": ["a"]}]\n', "auto", "2:1", "'a' is added, and is there already"),
        ("[NaN, 1, 2]\n", "auto", "1:1", "NaN is not a number"),
        ("[" * 100_000, "auto", "1:", "not JSON"),
        (f"[{'9' * 5_000}, 1, 1]", "auto", "1:1", "not JSON that can be read"),
        ("{}", "auto", "1:1", "no metadata with gap_seconds"),
        ('{"metadata": {\n"gap_seconds": 0}, "data": [1]}', "auto", "2:1", "no metadata with gap_seconds"),
        ('{"metadata": {"gap_seconds": 1},\n"data": []}', "auto", "2:1", "no data, a list"),
        ('{"metadata": {"gap_seconds": 1},\n"data": [1,\n true]}', "auto", "3:1", "data[1]: True is not a number of nodes"),
        ('{"metadata": {"gap_seconds": 1},\n"data": [1, [2,\n 3], -1]}', "auto", "2:1", "data[1]: [2, 3] is not a number"),
        ("[1]", "skypilot", "1:1", "no metadata with gap_seconds"),
        ("0,1\n", "parcae", "1:2", "not JSON"),
        ("{}", "bamboo", "1:1", "1 column"),
    ],
)
def test_what_is_wrong_is_shown_at_its_line(text, form, place, message):
    with pytest.raises(SpecError) as caught:
        read_recording(source(text), form)
    shown = caught.value.message
    assert shown.startswith(f"trace.csv:{place}") and message in shown.splitlines()[0], shown
    assert caught.value.hint


def test_a_unit_is_for_bamboo():
    assert "has its own unit of time" in refusal(PARCAE, unit="hours")


@pytest.mark.parametrize(
    ("replay", "message"),
    [
        ({"onto": "nodes", "kind": "kill"}, "a fault of kind kill is not done to nodes"),
        ({"kind": "node"}, "a fault of kind node is not done to ranks"),
        ({"start": 5, "until": 5}, "no time lies between"),
        ({"unit": "hours", "format": "parcae"}, "has its own unit of time"),
        ({"compress": 0}, "greater than 0"),
    ],
)
def test_contradictions_in_the_job_file(replay, message):
    with pytest.raises(ValueError, match=message):
        plan(BAMBOO, **replay)


class TestTheJobFile:
    JOB = "name: a\nscript: train.py\nworkers: 2\nfaults:\n  replay:\n    trace: {trace}\n    compress: 10\n"

    @pytest.fixture
    def job(self, tmp_path: Path) -> Path:
        (tmp_path / "train.py").write_text("from chaosrun import attach\n")
        path = tmp_path / "job.yaml"
        path.write_text(self.JOB.format(trace="traces/one.csv"))
        (tmp_path / "traces").mkdir()
        (tmp_path / "traces" / "one.csv").write_text(BAMBOO)
        return path

    def test_the_trace_lies_beside_it(self, job, monkeypatch):
        monkeypatch.chdir("/")
        _, faults = api.plan(job)
        assert len(faults.faults) == 3

    def test_what_was_planned_needs_the_trace_no_more(self, job):
        _, faults = api.plan(job)
        (job.parent / "traces" / "one.csv").unlink()
        assert FaultPlan.from_json(json.loads(json.dumps(faults.to_json()))) == faults

    def test_a_trace_that_is_not_there_is_told_where_it_is_named(self, job):
        (job.parent / "traces" / "one.csv").rename(job.parent / "traces" / "two.csv")
        with pytest.raises(SpecError) as caught:
            api.plan(job)
        assert caught.value.message.startswith(f"{job}:6:12: no such trace: ")
        assert caught.value.hint == ".csv files there: two.csv"

    def test_so_is_a_directory_and_a_file_too_large(self, job):
        with pytest.raises(SpecError, match=r"job.yaml:6:12: .*traces is a directory, not a trace"):
            api.plan(_with(job, "traces"))
        with (job.parent / "large").open("wb") as file:
            file.truncate((64 << 20) + 1)
        with pytest.raises(SpecError, match=r"job.yaml:6:12: .*is larger than 64 MiB"):
            api.plan(_with(job, "large"))

    def test_what_is_wrong_in_it_is_told_at_its_own_line(self, job):
        trace = job.parent / "traces" / "one.csv"
        trace.write_text("0,1\n1,x\n")
        with pytest.raises(SpecError) as caught:
            api.plan(job)
        assert caught.value.message.startswith(f"{trace}:2:1: 'x' is not a number of nodes")
        trace.write_bytes(b"0,1\n1,\xff\n")
        with pytest.raises(SpecError, match=r"one.csv:2:3: not UTF-8"):
            api.plan(job)


def _with(job: Path, trace: str) -> Path:
    job.write_text(TestTheJobFile.JOB.format(trace=trace))
    return job


levels = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 40)), min_size=1, max_size=60)


@given(levels=levels, workers=st.integers(1, 8), seed=st.integers(0, 2**63))
def test_every_fall_is_a_loss_and_nothing_else(levels, workers, seed):
    rows = sorted(levels, key=lambda level: level[0])
    text = "\n".join(f"{time},{live}" for time, live in rows)
    falls = [(now[0], before[1] - now[1]) for before, now in pairwise(rows) if now[1] < before[1]]
    assert [(loss.time_s, loss.count) for loss in read_recording(source(text)).losses] == falls
    if not falls:
        assert "records no loss" in refusal(text)
        return
    faults = plan(text, workers=workers, seed=seed, compress=7)
    assert faults == plan(text, workers=workers, seed=seed, compress=7)
    assert len(faults) == sum(min(workers, count) for _, count in falls)
    assert all(0 <= fault.rank < workers and (fault.after_s or 0) > 0 for fault in faults)
    assert [fault.after_s for fault in faults] == sorted(fault.after_s or 0 for fault in faults)


@given(gap=st.integers(1, 3600), live=st.lists(st.integers(0, 20), min_size=1, max_size=40))
def test_the_same_course_in_two_formats_is_the_same(gap, live):
    rows = "\n".join(f"{place * gap},{number}" for place, number in enumerate(live))
    recorded = json.dumps({"metadata": {"gap_seconds": gap}, "data": live})
    one, two = read_recording(source(rows)), read_recording(source(recorded))
    assert [(loss.time_s, loss.count) for loss in one.losses] == [(loss.time_s, loss.count) for loss in two.losses]
    assert one.length_s == two.length_s


@given(moves=st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_named_nodes_keep_their_numbers(moves, seed):
    chance, names, lines, expected = random.Random(seed), 0, [], []
    alive: list[str] = []
    for place, (adds, count) in enumerate(moves):
        adds = adds or not alive
        if adds:
            chosen = [f"node-{names + number}" for number in range(count)]
            names, alive = names + count, alive + chosen
        else:
            chosen = chance.sample(alive, min(count, len(alive)))
            alive = [name for name in alive if name not in chosen]
            expected.append((float(place), tuple(sorted(int(name.removeprefix("node-")) for name in chosen))))
        lines.append(json.dumps([place * 1000, "add" if adds else "remove", {"nodes": chosen}]))
    recording = read_recording(source("\n".join(lines)))
    assert [(loss.time_s, loss.nodes) for loss in recording.losses] == expected


@settings(max_examples=300)
@given(
    text=st.text(alphabet=st.sampled_from('0123456789,.[]{}"ade-:\n \r\\nNf'), max_size=60),
    form=st.sampled_from(["auto", "bamboo", "parcae", "skypilot"]),
)
def test_no_text_whatever_escapes_as_another_error(text, form):
    try:
        read_recording(source(text), form)
    except SpecError as error:
        assert error.message.startswith("trace.csv:") and error.hint


def test_formats_are_told_by_their_first_character():
    assert [detect(text) for text in (BAMBOO, PARCAE, SKYPILOT)] == ["bamboo", "parcae", "skypilot"]
    assert detect(f"\n  {SKYPILOT}") == "skypilot"
