"""The report of a preflight: what is wrong comes first, 512 nodes are as readable as three, nothing hostile gets through."""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Finding, Measure, Status
from chaosrun.preflight.peers import BASELINE
from chaosrun.preflight.report.html import render_html
from chaosrun.preflight.report.junit import render_junit
from chaosrun.preflight.report.rows import ProblemRow, commands, groups, headline, measures, report_of
from chaosrun.preflight.report.text import render_text
from chaosrun.preflight.report.ticker import PreflightTicker
from chaosrun.preflight.result import ANSWERS, CheckRun, Result
from tests.unit.preflight_results import left_out, lost, node, odd_bits, result, small_shm, sound, swap, three_bad_of_512

NODES = [node(number) for number in (1, 2, 3)]
ESCAPE = "\x1b[2J\x1b]0;owned\x07"


def text(value: Result, **how: Any) -> str:
    return render_text(value, **{"width": 80, "colour": False, **how})


def skip(check: str, reason: str, **where: Any) -> Finding:
    return Finding(check=check, name="x", status=Status.SKIP, reason=reason, **where)


BAD_512 = """\
NOT FIT  509 of 512 nodes can be used
preflight, standard: 512 nodes, 49152 CPUs, 4096 GPUs, Ray at 10.0.0.1:6379, for jobs/gpt/job.yaml
2 FAIL, 3 ERROR, 4 WARN, 19931 PASS, 16 SKIP, in 48 s
left out: gpu-017, gpu-300, gpu-400

What is wrong
  FAIL   host: /dev/shm
         found     gpu-400 /dev/shm: 64 MiB
         must be   at least 2.3 GiB
         why       Ray's object store and data loaders' workers share it
         do        start the container with --shm-size=8g
  FAIL   bits: repeats
         found     gpu-017 cuda:3: 2 different fingerprints in 3 repeats
         must be   1
         why       the device disagrees with itself: the same computation gave different bits
         do        take the node out of the cluster and have the GPU tested (dcgmi diag -r 3)
  ERROR  devices, bits, storage
         found     gpu-300
         why       its agent is gone: the node died
         do        look at the raylet.err there, start Ray again

Warnings
  WARN   host: swap
         found     gpu-041, gpu-042, gpu-043, gpu-044: 1.2 GiB in use
         must be   none
         do        swapoff -a, or give the node more memory

Nodes
  gpu-017
    FAIL bits; PASS cluster, host, devices, storage; SKIP network, kill, shared storage, drill,
    forecast
  gpu-400
    FAIL host; PASS cluster, devices, bits, storage; SKIP network, kill, shared storage, drill,
    forecast
  gpu-300
    ERROR devices, bits, storage; PASS cluster, host; SKIP network, kill, shared storage, drill,
    forecast
  gpu-041, gpu-042, gpu-043, gpu-044
    WARN host; PASS cluster, devices, bits, storage, network, kill, drill
  the other 505 nodes
    PASS cluster, host, devices, bits, storage, network, kill, drill
  the whole cluster
    PASS cluster, network, shared storage; SKIP forecast

Not looked at
  network, kill, shared storage, drill, forecast (gpu-017): left out: FAIL of bits: repeats
  network, kill, shared storage, drill, forecast (gpu-300): left out: the node died
  network, kill, shared storage, drill, forecast (gpu-400): left out: FAIL of host: /dev/shm
  forecast: goodput: no --mtbf was given

Measured
                          values      median     worst  where
  host: free memory          512     863 GiB   838 GiB  gpu-001
  storage: fsync             511     4.12 ms   4.24 ms  gpu-007
  network: bus bandwidth     509  382.1 GB/s  371 GB/s  gpu-001
  cluster: resources: 16 GPUs
  network: all-reduce 1 MiB int64: exact
  shared storage: visible to others: p99 4 ms

cost   cluster 0.41 s, host 0.62 s, devices 2.3 s, bits 3.4 s, storage 1.7 s, network 4.0 s, kill
1.2 s, shared storage 0.55 s, drill 31 s, forecast 0.01 s

Next
  again       chaosrun preflight --only bits --only devices --only host --only storage
  good nodes  chaosrun preflight --write-good-nodes good-nodes.txt
"""


class TestText:
    def test_three_bad_of_512(self) -> None:
        assert text(three_bad_of_512(), width=100) == BAD_512
        assert "good nodes: here/good" in text(three_bad_of_512(), good_file="here/good")
        assert text(three_bad_of_512(), quiet=True) == "NOT FIT  509 of 512 nodes can be used\n"
        assert "--write-good-nodes" not in text(three_bad_of_512(), good_file="here/good")

    @pytest.mark.parametrize("width", [40, 80, 120])
    def test_it_fits_its_width(self, width: int) -> None:
        for value in (three_bad_of_512(), result(NODES, sound(NODES)), result([], [], checks=())):
            before, _, _ = text(value, width=width).partition("\nNext\n")
            assert max(map(len, before.splitlines())) <= width

    def test_many_ways_of_going_wrong_are_cut_short(self) -> None:
        nodes = [node(number) for number in range(1, 65)]
        bad = [replace(small_shm(each.name, f"{place} MiB"), name=f"limit {place}") for place, each in enumerate(nodes)]
        told = text(result(nodes, [*sound(nodes), *bad]))
        assert "and 52 more problems (-o html has all)" in told
        assert "all 64 nodes" in told and len(told.splitlines()) < 120
        different = [replace(odd_bits(each.name), check=f"c{place}") for place, each in enumerate(nodes)]
        checks = tuple(CheckRun(name=f"c{place}", about="") for place in range(64))
        assert "and 52 more groups (-o html has all)" in text(result(nodes, different, checks=checks), width=120)

    def test_no_control_reaches_the_terminal(self) -> None:
        words = dict.fromkeys(("device", "measured", "threshold", "reason", "remedy"), ESCAPE)
        measure = Measure(number=1.0, unit=ESCAPE, better="lower")
        bad = Finding(check="host", name=f"name{ESCAPE}", status=Status.FAIL, node=f"gpu-001{ESCAPE}", measure=measure, **words)
        hostile = result(
            [node(1, name=f"gpu-{{:03}}{ESCAPE}")], [bad, skip("bits", ESCAPE)], address=ESCAPE, job=ESCAPE, baseline=ESCAPE
        )
        for width in (60, 120):
            assert "\x1b" not in text(hostile, width=width, good_file=ESCAPE)
            colours = re.sub(r"\x1b\[[0-9;]*m", "", text(hostile, width=width, colour=True))
            assert "\x1b" not in colours and "\x07" not in colours
        assert "\x1b[1;31mNOT FIT" in text(three_bad_of_512(), colour=True)


@pytest.mark.parametrize(
    ("findings", "how", "says"),
    [
        (sound(NODES), {}, "all 3 nodes can be used"),
        (sound(NODES[:1]), {"nodes": NODES[:1]}, "the node can be used"),
        ([*sound(NODES), odd_bits("gpu-002")], {}, "2 of 3 nodes can be used"),
        ([*sound(NODES), swap("gpu-002")], {}, "all 3 nodes can be used"),
        ([*sound(NODES), swap("gpu-002")], {"strict": True}, "2 of 3 nodes can be used, and a warning counts (--strict)"),
        ([skip("host", "no")], {}, "nothing was shown to be right"),
        ([], {"nodes": (), "checks": ()}, "nothing was shown to be right"),
        (
            [*sound(NODES), replace(odd_bits("x"), node=None)],
            {},
            "all 3 nodes without a fault of their own, but not the cluster",
        ),
    ],
)
def test_headlines(findings: Sequence[Finding], how: dict[str, Any], says: str) -> None:
    value = replace(result(NODES, findings), **{key: tuple(part) if key == "nodes" else part for key, part in how.items()})
    assert headline(value) == says
    assert ("FIT" if value.fit else "NOT FIT") == text(value).partition("  ")[0]


def wrong(findings: Sequence[Finding], nodes: Sequence[Node] = NODES) -> Sequence[ProblemRow]:
    return report_of(result(nodes, findings)).wrong


class TestFolding:
    def test_what_says_the_same_is_told_once(self) -> None:
        odd_ones = [odd_bits("gpu-001", "cuda:0"), odd_bits("gpu-001", "cuda:1"), odd_bits("gpu-002", "cuda:0")]
        shm, bits = wrong([*(small_shm(each.name) for each in NODES), *odd_ones])
        assert shm.found == ("all 3 nodes, /dev/shm: 64 MiB",) and shm.remedy == "start the container with --shm-size=8g"
        odd = "2 different fingerprints in 3 repeats"
        assert bits.found == (f"gpu-001 cuda:0, cuda:1: {odd}", f"gpu-002 cuda:0: {odd}")
        assert bits.nodes == ("gpu-001", "gpu-002")

    def test_different_values_stand_with_their_nodes(self) -> None:
        bad = [small_shm("gpu-001", "1 MiB"), small_shm("gpu-002", "2 MiB"), small_shm("gpu-003", "1 MiB")]
        assert wrong(bad)[0].found == ("gpu-001, gpu-003, /dev/shm: 1 MiB", "gpu-002 /dev/shm: 2 MiB")
        nodes = [node(number) for number in range(1, 10)]
        (many,) = wrong([small_shm(each.name, f"{each.name[-1]} MiB") for each in nodes], nodes)
        *four, rest = many.found
        assert four[0] == "gpu-001 /dev/shm: 1 MiB" and len(four) == 4 and rest == "and 5 more, with other values"

    def test_an_agent_that_died_is_one_thing(self) -> None:
        (gone,) = wrong([*lost("gpu-001"), *lost("gpu-002")])
        assert gone.title == "devices, bits, storage" and gone.nodes == ("gpu-001", "gpu-002")

    def test_what_speaks_against_nodes_without_being_theirs(self) -> None:
        blaming = replace(odd_bits("x"), node=None, device=None, blames=("gpu-002", "gpu-001"))
        value = result(NODES, [*sound(NODES), blaming])
        assert report_of(value).wrong[0].nodes == ("gpu-001", "gpu-002")
        told = [("gpu-001, gpu-002", True), ("gpu-003", False), ("the whole cluster", False)]
        assert [(group.title, group.bad) for group in groups(value)] == told

    def test_numbers(self) -> None:
        rows = {row.title: row for row in measures(three_bad_of_512())}
        assert (rows["host: free memory"].number, rows["host: free memory"].where) == (512, "gpu-001")
        assert rows["storage: fsync"].worst == "4.24 ms" and rows["storage: fsync"].where == "gpu-007"
        cpus = [Measure(number=number, unit="CPUs", better="higher") for number in (4.0, 4.0, float("nan"))]
        passed = Finding(check="host", name="CPUs", status=Status.PASS)
        same = [replace(passed, node=each.name, measure=measure) for each, measure in zip(NODES, cpus, strict=True)]
        (row,) = measures(result(NODES, same))
        assert (row.number, row.median, row.where) == (2, "4 CPUs", "")

    def test_numbers_are_told_apart_as_they_are_compared(self) -> None:
        def speed(node: str, device: str, number: float) -> Finding:
            measure = Measure(number=number, unit="GB/s", better="higher")
            return Finding(check="bits", name="speed", status=Status.PASS, node=node, device=device, measure=measure)

        named = [*(("alpha", device) for device in ("cpu", "gloo", "beta", "cuda:0", "cuda:1")), ("beta", "alpha")]
        nodes = [node(1, "alpha"), node(2, "beta")]
        rows = measures(result(nodes, [speed(*where, place) for place, where in enumerate(named)]))
        assert {row.title: row.number for row in rows} == {"bits: speed (cpu)": 1, "bits: speed": 3, "bits: speed (cuda)": 2}
        rows = measures(result([nodes[0], node(2, "beta", gpus=0)], [speed("alpha", "cpu", 1.0), speed("beta", "cpu", 2.0)]))
        assert [row.title for row in rows] == ["bits: speed (nodes with GPUs)", "bits: speed (nodes without GPUs)"]

    def test_commands_are_those_of_the_preflight_that_was_made(self) -> None:
        arguments = ("a job.yaml", "workers=4", "--root", "/shared/runs", "--address", "10.0.0.1:6379")
        said = {"arguments": arguments, "options": ("--level", "quick", "--mtbf", "720h"), "choice": ("--skip", "kill")}
        fit = result(NODES, sound(NODES), job="a job.yaml", **said)
        same = "'a job.yaml' workers=4 --root /shared/runs --address 10.0.0.1:6379"
        assert commands(fit, None) == [
            ("keep", f"chaosrun preflight {same} --level quick --mtbf 720h --skip kill -o json --to baseline.json"),
            ("go", f"chaosrun submit {same}"),
        ]
        assert [label for label, _ in commands(replace(fit, baseline="old.json", job=None), None)] == []
        unfit = replace(fit, findings=(*sound(NODES), odd_bits("gpu-002")), baseline="old.json", strict=True)
        again = f"chaosrun preflight {same} --level quick --mtbf 720h --baseline old.json --strict"
        assert commands(unfit, None) == [
            ("again", f"{again} --only bits"),
            ("good nodes", f"{again} --skip kill --write-good-nodes good-nodes.txt"),
        ]
        for check in (ANSWERS, BASELINE):
            silent = Finding(check=check, name="no check of its own", status=Status.ERROR, reason="gone")
            assert "--only" not in str(commands(result(NODES, [*sound(NODES), silent]), None))

    def test_what_was_not_looked_at_for_one_reason_is_one_row(self) -> None:
        found = [skip("host", "it takes two nodes", node="gpu-001"), skip("bits", "it takes two nodes")]
        found += [skip("kill", "no GPU", node=f"gpu-00{number}") for number in (1, 2)]
        told = [("kill: x", "no GPU"), ("host: x (gpu-001); bits: x", "it takes two nodes")]
        assert report_of(result(NODES[:2], found)).skips == told

    def test_nodes_with_nothing_to_look_at_are_neither_good_nor_bad(self) -> None:
        head = node(9, "head")
        value = result([head, *NODES], [*sound(NODES), skip("host", "no worker is placed there", node="head")])
        assert headline(value) == "3 of 4 nodes can be used, 1 not checked" and value.fit
        assert next((group.title, group.bad) for group in groups(value)) == ("head, not checked", False)
        told = text(value, width=120)
        assert "not checked, with nothing to look at: head\n" in told and "\n  head, not checked\n" in told
        assert "left out:" not in told
        page = render_html(value)
        assert "head, not checked" in page and 'class="apart"' not in page
        assert "not checked: head" in (ET.fromstring(render_junit(value)).findtext(".//system-out") or "")
        bad = replace(value, findings=(*value.findings, odd_bits("gpu-002")))
        assert headline(bad) == "2 of 4 nodes can be used, 1 not checked" and not bad.fit
        whole = replace(value, findings=(*value.findings, replace(odd_bits("x"), node=None)))
        assert headline(whole) == "3 of 4 nodes without a fault of their own, but not the cluster"

    def test_what_is_found_of_the_whole_cluster_is_told(self) -> None:
        def of_all(name: str, status: Status, **about: Any) -> Finding:
            return Finding(check="forecast", name=name, status=status, **about)

        found = [
            of_all("goodput here", Status.PASS, measured="99.9%, saving every 94 s", reason="a save takes 27 ms"),
            of_all("goodput of the job", Status.SKIP, measured="a restart takes 2 s", reason="give --mtbf 720h"),
            of_all("interval", Status.SKIP, reason="no run of it is known"),
            of_all("other sizes", Status.WARN, measured="12%", threshold="at least 50%", remedy="use fewer"),
        ]
        value = result(NODES, [*sound(NODES), *found])
        _, _, measured = text(value, width=120).partition("Measured\n")
        assert "forecast: goodput here: 99.9%, saving every 94 s (a save takes 27 ms)\n" in measured
        assert "forecast: goodput of the job: a restart takes 2 s (give --mtbf 720h)\n" in measured
        assert "interval" not in measured and "12%" not in measured
        page = render_html(value)
        for words in ("99.9%, saving every 94 s", "a save takes 27 ms", "give --mtbf 720h", "no run of it is known"):
            assert page.count(words) == 1 and text(value).count(words) == 1


class TestJunit:
    def test_statuses_and_counts(self) -> None:
        bad = [odd_bits("gpu-002"), *lost("gpu-003"), swap("gpu-001"), *left_out("gpu-002", "why", "network")]
        whole = [each for each in sound(NODES) if each.node != "gpu-003" and (each.node, each.check) != ("gpu-002", "network")]
        root = ET.fromstring(render_junit(result(NODES, [*whole, *bad])))
        suites = {suite.get("name"): suite for suite in root}
        assert [*suites][:3] == ["preflight", "preflight.cluster", "preflight.host"]
        kinds = {
            (name.rpartition(".")[2], case.get("name")): [part.tag for part in case if part.tag != "system-out"]
            for name, suite in suites.items()
            if name
            for case in suite
        }
        assert kinds["preflight", "verdict"] == ["failure"]
        assert kinds["bits", "gpu-001"] == [] and kinds["bits", "gpu-002"] == ["failure"]
        assert kinds["bits", "gpu-003"] == kinds["devices", "gpu-003"] == ["error"]
        assert kinds["network", "gpu-002"] == kinds["forecast", "the whole cluster"] == ["skipped"]
        assert kinds["host", "gpu-001"] == []
        (case,) = [case for case in suites["preflight.host"] if case.get("name") == "gpu-001"]
        assert "WARN: swap: 1.2 GiB in use, must be none" in (case.findtext("system-out") or "")
        failure = next(case.find("failure") for case in suites["preflight.bits"] if case.get("name") == "gpu-002")
        assert failure is not None and "do: take the node out" in (failure.text or "")
        found = [int(root.get(name) or 0) for name in ("tests", "failures", "errors", "skipped")]
        assert found == [len(kinds), 2, 3, 2]

    def test_a_warning_counts_when_it_is_strict(self) -> None:
        for strict, failures in ((False, "0"), (True, "2")):
            root = ET.fromstring(render_junit(result(NODES, [*sound(NODES), swap("gpu-001")], strict=strict)))
            assert root.get("failures") == failures

    def test_a_check_that_found_nothing_is_skipped_and_hostile_text_is_xml(self) -> None:
        hostile = replace(odd_bits("<&>"), measured=f"{ESCAPE}\0\ud800", remedy="]]>")
        root = ET.fromstring(render_junit(result([node(1, name="<&>")], [hostile])))
        cases = {(suite.get("name"), case.get("name")): case for suite in root for case in suite}
        assert cases["preflight.host", "the whole cluster"].find("skipped") is not None
        assert cases["preflight.bits", "<&>"].find("failure") is not None


class TestHtml:
    def test_512_nodes_are_a_small_page(self) -> None:
        page = render_html(three_bad_of_512())
        assert len(page) < 80_000
        assert "509 of 512 nodes can be used" in page and "gpu-017 cuda:3: 2 different fingerprints" in page

    def test_nothing_in_it_is_obeyed(self) -> None:
        script = "<script>alert(1)</script>"
        hostile = replace(odd_bits(script), name=script, device=script, measured=script, remedy=script)
        page = render_html(result([node(1, name=script)], [hostile, skip("host", script)], job=script, address=script))
        assert script not in page and "&lt;script&gt;" in page


class TestTicker:
    EVENTS = (
        {"event": "cluster.joined", "nodes": 3, "address": None},
        {"event": "check.began", "check": "bits", "about": "the same bits", "nodes": 3},
        {"event": "check.began", "check": "host", "about": "memory", "nodes": 3},
        {"event": "check.ended", "check": "bits", "seconds": 3.42, "statuses": {"PASS": 5, "FAIL": 1}},
        {"event": "node.out", "node": f"gpu-002{ESCAPE}", "check": "bits", "why": "FAIL of bits: repeats"},
        {"event": "check.ended", "check": "host", "seconds": 0.5, "statuses": {"WARN": 1, "PASS": 2}},
    )

    def test_lines(self) -> None:
        stream, ticks = io.StringIO(), iter(range(100))
        ticker = PreflightTicker(stream, now_s=lambda: float(next(ticks)))
        for event in self.EVENTS:
            ticker.on_event(event)
        assert [line.partition("] ")[2] for line in stream.getvalue().splitlines()] == [
            "3 nodes in the cluster; only this machine is looked at: --address, or $RAY_ADDRESS, names a cluster",
            "bits: the same bits",
            "host: memory",
            "bits: 1 FAIL, 5 PASS, 3.4 s",
            "gpu-002 ]0;owned  is left out from now on: FAIL of bits: repeats (bits)",
            "host: 1 WARN, 2 PASS, 0.50 s",
        ]

    def test_nobody_reads_any_more(self) -> None:
        stream = io.StringIO()
        stream.close()
        ticker = PreflightTicker(stream)
        for event in self.EVENTS:
            ticker.on_event(event)
