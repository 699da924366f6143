"""The checks "devices" and "bits" with their real processes, on devices that are made to compute wrongly, hang and die."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chaosrun.preflight.checks.bits import CHECK, call
from chaosrun.preflight.model import Finding, Setting, Status
from chaosrun.processes import marked
from tests.preflight_answers import SETTING, judged, node_of

FAULTY = Path(__file__).parent / "faulty"


def run(layer: str | None = None, *, setting: Setting = SETTING, patience_s: float = 99, **variables: str) -> Mapping[str, Any]:
    """The facts of one node, as its agent would get them."""
    asked = call(setting, node_of())
    environment = os.environ | variables | ({"PYTHONPATH": str(FAULTY / layer)} if layer else {})
    answer = subprocess.run(
        [sys.executable, "-m", "chaosrun.cluster.probing", asked.probe],
        input=json.dumps({**asked.parameters, "patience_s": patience_s}),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(answer.stdout)["facts"]


def judge(**facts: Mapping[str, Any]) -> dict[tuple[str, str], Finding]:
    """By node and row."""
    found = judged(CHECK, SETTING, [node_of(name) for name in facts], facts)
    return {(finding.node or "", finding.name): finding for finding in found}


@pytest.fixture(scope="module")
def facts() -> Mapping[str, Mapping[str, Any]]:
    """Of three nodes at the same time: a sound one, and two on which something is wrong."""
    with ThreadPoolExecutor() as pool:
        running = {
            "sound": pool.submit(run),
            "odd": pool.submit(run, "flipped_bit", FLIPS="fractions"),
            "hangs": pool.submit(run, "broken_matmul", BROKEN="hangs", patience_s=4),
        }
        return {name: answer.result() for name, answer in running.items()}


def test_a_sound_node_repeats_itself(facts: Mapping[str, Mapping[str, Any]]) -> None:
    found = judge(n=facts["sound"])
    assert {name: finding.status for (_, name), finding in found.items()} == {
        "product": Status.PASS,
        "speed": Status.PASS,
        "repeats": Status.PASS,
        "peers": Status.SKIP,
        "kind": Status.PASS,
    }


def test_the_odd_one_of_three_is_named_with_the_operation(facts: Mapping[str, Mapping[str, Any]]) -> None:
    found = judge(a=facts["sound"], odd=facts["odd"], b=facts["sound"])
    assert {row for row, finding in found.items() if finding.status is Status.FAIL} == {("odd", "peers")}
    odd = found["odd", "peers"]
    assert odd.device == "cpu"
    assert "first in matmul (step 1)" in odd.measured and "2 of 3" in odd.threshold
    # Alone it is right to itself, and products of integers are right.
    assert found["odd", "repeats"].status is Status.PASS and found["odd", "product"].status is Status.PASS


def test_a_device_that_hangs_fails(facts: Mapping[str, Mapping[str, Any]]) -> None:
    ((_, finding),) = judge(odd=facts["hangs"]).items()
    assert finding.status is Status.FAIL and finding.device == "cpu"
    assert "hangs in: float32 product" in finding.measured and "no progress for 4 s" in finding.reason


@pytest.mark.nightly
def test_a_device_that_kills_its_process_fails() -> None:
    ((_, finding),) = judge(odd=run("broken_matmul", BROKEN="dies")).items()
    assert finding.status is Status.FAIL and finding.device == "cpu"
    assert "died in: float32 product" in finding.measured and "SIGSEGV" in finding.reason


def test_a_process_that_hangs_is_gone(facts: Mapping[str, Mapping[str, Any]]) -> None:
    assert facts["hangs"]["computed"]["cpu"]["ended"] == "hung"
    assert not marked("BROKEN=hangs")


@pytest.mark.nightly
def test_a_flipped_bit_in_every_product_is_wrong_even_where_there_is_nobody_to_compare_with() -> None:
    found = judge(odd=run("flipped_bit"))
    product = found["odd", "product"]
    assert product.status is Status.FAIL
    assert "float32" in product.measured and "instead of" in product.reason
    assert found["odd", "repeats"].status is Status.PASS


@pytest.mark.nightly
def test_a_device_that_flips_one_bit_once_disagrees_with_itself() -> None:
    found = judge(odd=run("flipped_bit", FLIPS="once"))
    assert [row for row, finding in found.items() if finding.status is Status.FAIL] == [("odd", "repeats")]
    assert "1 of 3 differ with 1 thread, first in matmul at the end (step 1) of repeat 2" in found["odd", "repeats"].measured


@pytest.mark.nightly
def test_another_instruction_set_is_no_fault_and_is_told(facts: Mapping[str, Mapping[str, Any]]) -> None:
    sound = facts["sound"]
    if sound["computed"]["cpu"]["facts"]["kind"]["capability"] == "DEFAULT":
        pytest.skip("this processor has no other instruction set to leave out")
    found = judge(a=sound, b=sound, old=run(ATEN_CPU_CAPABILITY="default"))
    assert {row: finding.status for row, finding in found.items() if finding.status not in (Status.PASS, Status.SKIP)} == {
        ("old", "kind"): Status.WARN
    }
    assert "ATEN_CPU_CAPABILITY=default" in found["old", "kind"].remedy
    assert "other bits from" in found["old", "kind"].measured
