"""Who computes other bits: judged from fingerprints, and the fingerprints themselves, on a device that is made to flip bits."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from chaosrun.preflight.checks.bits import CHECK, call
from chaosrun.preflight.model import Finding, Level, Setting, Status
from chaosrun.preflight.probes.compute import check_memory, check_products, kind_of
from chaosrun.preflight.probes.fingerprinted_training import TrainingDifference, repeated, train
from chaosrun.records.codec import to_plain
from tests.preflight_answers import SETTING, judged, node_of

CPU = torch.device("cpu")
OPERATIONS = {"1 convolution": "a", "1 matmul": "b", "1 softmax": "c", "1 AdamW": "d"}
KIND = {"model": "EPYC", "features": "avx2 avx512f", "capability": "AVX512", "torch": "2.9.0", "settings": {}}
GPU = {"model": "H100", "capability": "9.0", "units": 132, "torch": "2.9.0", "cuda": "12.8", "cudnn": 91002}


def trained(threads: int = 1, at: str | None = None, differs: str | None = None, word: str = "x") -> dict[str, Any]:
    """What `repeated` says; from the operation `at` on it computed something else than others."""
    names = list(OPERATIONS)
    changed = names[names.index(at) :] if at else []
    operations = {name: word + value if name in changed else value for name, value in OPERATIONS.items()}
    how = {"differs": {"repeat": 2, "operation": differs} if differs else None, "differing": 1 if differs else 0}
    return {"threads": threads, "repeats": 3, "operations": operations, **how}


def computed(*runs: Mapping[str, Any], kind: Mapping[str, Any] = KIND, **more: Any) -> dict[str, Any]:
    facts = {"kind": kind, "training": list(runs) or [trained()], **more}
    return {"ended": "done", "phase": "", "facts": facts}


def judge(**nodes: Mapping[str, Any]) -> dict[tuple[str, str, str], Finding]:
    """Facts by node: of its CPU, or {"device": facts}. Findings by node, device and row."""
    about: dict[str, Any] = {"visible": None, "driver": {"told": "absent"}}
    devices = {name: {"cpu": facts} if "ended" in facts else facts for name, facts in nodes.items()}
    answered = {name: {**about, "computed": computed} for name, computed in devices.items()}
    found = judged(CHECK, SETTING, [node_of(name, gpus=2) for name in nodes], answered)
    return {(finding.node or "", finding.device or "", finding.name): finding for finding in found}


def bad(found: Mapping[tuple[str, str, str], Finding], status: Status = Status.FAIL) -> set[tuple[str, str, str]]:
    return {row for row, finding in found.items() if finding.status is status}


def test_equal_bits_pass() -> None:
    found = judge(a=computed(), b=computed(), c=computed())
    assert {finding.status for finding in found.values()} == {Status.PASS}
    assert found["b", "cpu", "peers"].measured == "3 of 3 equal"
    assert judge(a=computed())["a", "cpu", "peers"].status is Status.SKIP, "one alone has no peers"


def test_the_odd_one_is_named_with_its_operation() -> None:
    found = judge(a=computed(), b=computed(trained(at="1 softmax")), c=computed())
    assert bad(found) == {("b", "cpu", "peers")}
    assert "first in softmax (step 1)" in found["b", "cpu", "peers"].measured
    assert found["b", "cpu", "peers"].threshold == "the same bits as 2 of 3 of its kind"
    assert found["a", "cpu", "peers"].measured == "2 of 3 equal"


def test_the_odd_gpu_of_a_node_is_named() -> None:
    sound, odd = computed(kind=GPU), computed(trained(at="1 matmul"), kind=GPU)
    found = judge(a={"cuda:0": sound, "cuda:1": sound}, b={"cuda:0": sound, "cuda:1": odd})
    assert bad(found) == {("b", "cuda:1", "peers")}
    assert "dcgmi" in found["b", "cuda:1", "peers"].remedy


@pytest.mark.parametrize("nodes", [2, 4])
def test_without_a_majority_all_disagree_and_it_is_said(nodes: int) -> None:
    one, other = computed(), computed(trained(at="1 matmul"))
    found = judge(**{f"n{index}": other if index % 2 else one for index in range(nodes)})
    assert bad(found) == {(f"n{index}", "cpu", "peers") for index in range(nodes)}
    row = found["n0", "cpu", "peers"]
    assert "no majority" in row.reason and "n1 cpu" in row.measured and "matmul" in row.measured


def test_more_than_half_is_a_majority_and_most_is_not() -> None:
    odd = [computed(trained(at="1 matmul", word=word)) for word in "uvw"]
    found = judge(a=computed(), b=computed(), c=computed(), d=odd[0], e=odd[1])
    assert bad(found) == {("d", "cpu", "peers"), ("e", "cpu", "peers")}
    assert len(bad(judge(a=computed(), b=computed(), c=odd[0], d=odd[1], e=odd[2]))) == 5


def test_a_device_that_disagrees_with_itself_is_broken_and_has_no_vote() -> None:
    found = judge(a=computed(trained(differs="1 softmax", at="1 matmul")), b=computed(), c=computed())
    assert bad(found) == {("a", "cpu", "repeats")}
    row = found["a", "cpu", "repeats"]
    assert row.measured == "1 of 3 differ with 1 thread, first in softmax (step 1) of repeat 2"
    assert found["b", "cpu", "peers"].measured == "2 of 2 equal"


def test_another_number_of_threads_is_no_fault() -> None:
    found = judge(a=computed(trained(), trained(4, at="1 matmul")), b=computed(trained(), trained(4, at="1 matmul")))
    assert {finding.status for finding in found.values()} == {Status.PASS}


def test_the_odd_one_is_found_with_several_threads_only() -> None:
    sound, odd = computed(trained(), trained(4)), computed(trained(), trained(4, at="1 softmax"))
    found = judge(a=sound, b=odd, c=sound)
    assert bad(found) == {("b", "cpu", "peers")} and "with 4 threads" in found["b", "cpu", "peers"].measured


OTHER = trained(at="1 matmul")


@pytest.mark.parametrize(
    ("usual", "other", "measured", "threshold"),
    [
        (KIND, {"features": "avx2", "capability": "AVX2"}, "AVX2", "AVX512"),
        (KIND, {"model": "Xeon"}, "Xeon", "EPYC"),
        (KIND, {"settings": {"MKL_CBWR": "AVX2"}}, "settings MKL_CBWR=AVX2", "settings none"),
        (GPU, {"cudnn": 90100}, "cudnn 90100", "cudnn 91002"),
    ],
)
def test_another_kind_is_no_fault_and_named_by_what_is_another(
    usual: Mapping[str, Any], other: Mapping[str, Any], measured: str, threshold: str
) -> None:
    device = "cpu" if usual is KIND else "cuda:0"
    sound, odd = ({device: computed(run, kind=kind)} for run, kind in ((trained(), usual), (OTHER, {**usual, **other})))
    found = judge(a=sound, b=sound, c=odd)
    assert not bad(found) and bad(found, Status.WARN) == {("c", device, "kind")}
    row = found["c", device, "kind"]
    assert row.measured == f"{measured}: other bits from matmul (step 1) on" and row.threshold == f"{threshold}, as most have"
    assert ("ATEN_CPU_CAPABILITY=avx2" in row.remedy) == (measured == "AVX2")
    assert found["c", device, "peers"].status is Status.SKIP


def test_two_kinds_of_node_are_no_faults_of_each_other() -> None:
    other = computed(OTHER, kind={**KIND, "model": "Xeon"})
    found = judge(a=computed(), b=computed(), c=other, d=other)
    assert not bad(found) and bad(found, Status.WARN) == {("c", "cpu", "kind"), ("d", "cpu", "kind")}
    assert found["c", "cpu", "peers"].measured == "2 of 2 equal"
    # With the same bits it is none that matters.
    found = judge(a=computed(), b=computed(kind={**KIND, "model": "Xeon"}))
    assert not bad(found) and not bad(found, Status.WARN)


def test_a_device_that_no_worker_gets_has_no_vote_and_is_no_fault() -> None:
    """Two GPUs a node, as Ray counts: a third is none that it gives to anybody."""
    sound, odd = computed(kind=GPU), computed(trained(at="1 matmul", differs="1 matmul"), kind=GPU)
    found = judge(a={"cuda:0": sound, "cuda:2": odd}, b={"cuda:0": sound, "cuda:2": sound})
    assert not bad(found) and bad(found, Status.WARN) == {("a", "cuda:2", "repeats")}
    assert found["b", "cuda:2", "GPUs"].status is Status.SKIP
    assert found["a", "cuda:0", "peers"].measured == "2 of 2 equal"


def test_a_device_that_hangs_fails_and_does_not_vote() -> None:
    hung = {"ended": "hung", "phase": "1 matmul (repeat 2)", "error": "no progress for 20 s"}
    found = judge(a=hung, b=computed(), c=computed())
    assert bad(found) == {("a", "cpu", "product")}
    assert found["a", "cpu", "product"].measured == "hangs in: 1 matmul (repeat 2)"


def test_a_deep_preflight_trains_for_a_share_of_its_time() -> None:
    deep = call(Setting(level=Level.DEEP, root=Path("/r"), storage=Path("/r"), seconds=400), node_of())
    asked = {"threads": 2, "repeats": 3, "products": True}
    assert deep.parameters["works"]["cpu"] == {**asked, "seconds": 100}
    assert deep.limit_s > 100
    assert call(SETTING, node_of()).parameters["works"]["cpu"] == {**asked, "seconds": 0}


@pytest.fixture
def flips(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Have the n-th call of a function of torch return its result with the lowest bit of one entry flipped."""

    def install(name: str, call: int) -> None:
        sound, calls = getattr(torch, name), 0

        def faulty(*arguments: Any, **options: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            result = sound(*arguments, **options)
            if calls == call:
                result.data.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[result.element_size()]).view(-1)[-1] ^= 1
            return result

        monkeypatch.setattr(torch, name, faulty)

    return install


def silent(phase: str) -> None:
    pass


@pytest.mark.usefixtures("one_thread")
def test_a_sound_training_repeats_itself_and_covers_every_operation() -> None:
    run = repeated(CPU, threads=1, repeats=3, seconds=0, say=silent)
    assert run.differs is None and run.differing == 0 and run.repeats == 3
    assert run.operations == train(CPU, silent)
    first = [name.removeprefix("1 ") for name in run.operations if name.startswith("1 ")]
    assert first == [
        *("convolution", "layer norm", "matmul", "matmul of scores", "softmax", "matmul of values", "sum", "matmul at the end"),
        *("gradient of matmul at the end", "gradient of matmul", "gradient of layer norm", "gradient of convolution", "AdamW"),
    ]
    # Every operation computes something of its own, in both steps.
    assert len({*run.operations.values()}) == 2 * len(first)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "call", "operation"),
    [
        # Two trainings go before the first repeat: the first call, and the one that it is compared with.
        ("matmul", 17, "1 matmul"),
        ("matmul", 18, "1 matmul of scores"),
        ("matmul", 24, "2 matmul at the end"),
        ("softmax", 5, "1 softmax"),
        ("softmax", 6, "2 softmax"),
    ],
)
def test_one_flipped_bit_is_found_in_its_operation(
    flips: Callable[[str, int], None], name: str, call: int, operation: str
) -> None:
    flips(name, call)
    run = repeated(CPU, threads=1, repeats=3, seconds=0, say=silent)
    assert run.differs == TrainingDifference(repeat=2, operation=operation)
    assert run.differing == 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("call", "dtype"), [(1, "float32"), (2, "float64"), (3, "bfloat16")])
def test_one_flipped_bit_makes_a_product_wrong(flips: Callable[[str, int], None], call: int, dtype: str) -> None:
    assert [entry.wrong for entry in check_products(CPU, silent)] == [0, 0, 0]
    flips("matmul", call)
    wrong = [entry for entry in check_products(CPU, silent) if entry.wrong]
    assert [(entry.dtype, entry.wrong) for entry in wrong] == [(dtype, 1)]
    assert "instead of" in wrong[0].first and "row 247, column 247" in wrong[0].first


def test_memory_that_forgets_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_memory(CPU, 1 << 20) == 0
    full = torch.full

    def forgetful(*arguments: Any, **options: Any) -> torch.Tensor:
        block = full(*arguments, **options)
        block[7] ^= 1 << 40
        return block

    monkeypatch.setattr(torch, "full", forgetful)
    assert check_memory(CPU, 1 << 20) == 8


def test_what_the_environment_does_to_products_is_not_the_processors_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    monkeypatch.setenv("OMP_DYNAMIC", "FALSE")
    kind = to_plain(kind_of(CPU))
    assert kind["settings"] == {"OMP_THREAD_LIMIT": "1"}
    wrong = {"dtype": "bfloat16", "entries": 4, "wrong": 2, "first": "0 instead of 1 in row 0, column 2"}
    more = {"memory_bytes": 8, "products": [wrong], "gflops": 1.0}
    found = judge(a=computed(trained(2, differs="1 matmul"), kind=kind, **more))
    for row in ("product", "repeats"):
        assert found["a", "cpu", row].remedy.startswith("unset OMP_THREAD_LIMIT and try again: ")
