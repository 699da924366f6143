"""What drivers say, read and judged: reports as healthy and as broken GPUs give them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from chaosrun.preflight.checks.devices import CHECK, call
from chaosrun.preflight.model import Finding, Setting, Status
from chaosrun.preflight.probes.compute import read_cpuinfo
from chaosrun.preflight.probes.devices import gpu_devices, how_it_ended, patience_in, visible_gpus
from chaosrun.preflight.probes.nvidia import matched, parse
from chaosrun.records.codec import to_plain
from tests.preflight_answers import SETTING, job_of, judged, node_of

UUIDS = ("GPU-6f8a1c52-0d7e-4b39-9a51-2f6f3f0e7c11", "GPU-1b2d9e40-77aa-4c0e-8f13-90c2a6d5b3f8")
GPU = """
  <gpu id="00000000:{bus}:00.0">
    <product_name>NVIDIA H100 80GB HBM3</product_name><uuid>{uuid}</uuid>
    <gpu_recovery_action>None</gpu_recovery_action><performance_state>P0</performance_state>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode><mig_devices>None</mig_devices>
    <clocks_event_reasons>
      <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
      <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
      <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
    </clocks_event_reasons>
    <fb_memory_usage><total>81559 MiB</total><free>81008 MiB</free></fb_memory_usage>
    <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
    <ecc_errors>
      <volatile>
        <sram_correctable>0</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
        <sram_uncorrectable_secded>0</sram_uncorrectable_secded><dram_uncorrectable>0</dram_uncorrectable>
      </volatile>
      <aggregate>
        <dram_correctable>117</dram_correctable><dram_uncorrectable>3</dram_uncorrectable>
        <sram_threshold_exceeded>No</sram_threshold_exceeded>
      </aggregate>
      <unrepairable_memory>No</unrepairable_memory>
    </ecc_errors>
    <remapped_rows>
      <remapped_row_corr>0</remapped_row_corr><remapped_row_unc>1</remapped_row_unc>
      <remapped_row_pending>No</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
    </remapped_rows>
    <processes></processes>
  </gpu>"""
OLD_GPU = """
  <gpu id="00000000:3B:00.0">
    <product_name>Tesla V100-SXM2-32GB</product_name>
    <mig_mode><current_mig>N/A</current_mig><pending_mig>N/A</pending_mig></mig_mode>
    <mig_devices>None</mig_devices>
    <uuid>GPU-0a1b2c3d-0000-1111-2222-333344445555</uuid>
    <clocks_throttle_reasons>
      <clocks_throttle_reason_gpu_idle>Not Active</clocks_throttle_reason_gpu_idle>
      <clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>
      <clocks_throttle_reason_hw_thermal_slowdown>Active</clocks_throttle_reason_hw_thermal_slowdown>
    </clocks_throttle_reasons>
    <fb_memory_usage><total>32510 MiB</total><used>0 MiB</used><free>32510 MiB</free></fb_memory_usage>
    <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
    <ecc_errors>
      <volatile><single_bit><total>4</total></single_bit><double_bit><total>2</total></double_bit></volatile>
      <aggregate><single_bit><total>9</total></single_bit><double_bit><total>2</total></double_bit></aggregate>
    </ecc_errors>
    <remapped_rows>N/A</remapped_rows>
    <processes></processes>
  </gpu>"""


def report(*gpus: str) -> str:
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <timestamp>Sat Nov 21 10:00:00 2026</timestamp>
  <driver_version>550.54.15</driver_version>
  <cuda_version>12.4</cuda_version>
  <attached_gpus>{len(gpus)}</attached_gpus>{"".join(gpus)}
</nvidia_smi_log>
"""


def gpu(at: int = 0, *changes: tuple[str, str]) -> str:
    text = GPU.format(bus=f"{0x1B + at:X}", uuid=UUIDS[at])
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def leaf(name: str, old: str, new: str) -> tuple[str, str]:
    return f"<{name}>{old}</{name}>", f"<{name}>{new}</{name}>"


def process(pid: int, name: str, mib: int, kind: str = "C") -> tuple[str, str]:
    told = {"pid": pid, "type": kind, "process_name": name, "used_memory": f"{mib} MiB"}
    parts = "".join(f"<{part}>{value}</{part}>" for part, value in told.items())
    return "<processes>", f"<processes><process_info>{parts}</process_info>"


MIG_ON = [leaf("current_mig", "Disabled", "Enabled"), leaf("pending_mig", "Disabled", "Enabled")]
INSTANCE = ("<mig_devices>None", "<mig_devices><mig_device><index>0</index><gpu_instance_id>3</gpu_instance_id></mig_device>")


def answer(
    *gpus: str, told: str = "all", error: str = "", visible: list[str] | None = None, made: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    driver = to_plain(parse(report(*gpus))) if told == "all" else {"told": told, "error": error}
    return {"visible": visible, "driver": driver, "computed": {"cuda:0": made} if made else {}}


def judge(
    answers: Mapping[str, Mapping[str, Any]], setting: Setting | None = None, gpus: int = 1
) -> dict[tuple[str, str], Finding]:
    """By device ("" of a node's own) and row, of the node that is last in the alphabet."""
    found = judged(CHECK, setting or SETTING, [node_of(name, gpus=gpus) for name in answers], answers)
    return {(finding.device or "", finding.name): finding for finding in found if finding.node == max(answers)}


def test_healthy_gpus_pass() -> None:
    found = judge({"n": answer(gpu(0), gpu(1))}, gpus=2)
    assert {finding.status for finding in found.values()} == {Status.PASS}
    assert {name for device, name in found if device == "cuda:1"} == {
        *("state", "ECC", "remapped rows", "throttling", "MIG", "free memory", "other processes")
    }
    assert found["", "number"].measured == "2"
    assert found["", "driver"].measured == "550.54.15, CUDA 12.4"
    assert found["cuda:0", "ECC"].measured == "on"
    assert found["cuda:0", "remapped rows"].measured == "1, none pending"


@pytest.mark.parametrize(
    ("changes", "row", "status", "measured"),
    [
        ([leaf("dram_uncorrectable", "0", "2")], "ECC", Status.FAIL, "2 uncorrectable errors"),
        ([leaf("sram_uncorrectable_parity", "0", "1")], "ECC", Status.FAIL, "1 uncorrectable errors"),
        ([leaf("sram_threshold_exceeded", "No", "Yes")], "ECC", Status.FAIL, "more SRAM errors"),
        ([leaf("unrepairable_memory", "No", "Yes")], "ECC", Status.FAIL, "cannot be repaired"),
        ([leaf("current_ecc", "Enabled", "Disabled")], "ECC", Status.WARN, "off"),
        ([leaf("current_ecc", "Enabled", "N/A"), leaf("pending_ecc", "Enabled", "N/A")], "ECC", Status.SKIP, ""),
        ([leaf("remapped_row_pending", "No", "Yes")], "remapped rows", Status.FAIL, "pending"),
        ([leaf("remapped_row_failure", "No", "Yes")], "remapped rows", Status.FAIL, "failed"),
        ([leaf("remapped_row_pending", "No", "N/A")], "remapped rows", Status.SKIP, ""),
        ([leaf("clocks_event_reason_hw_slowdown", "Not Active", "Active")], "throttling", Status.WARN, "hw_slowdown"),
        ([leaf("clocks_event_reason_sw_power_cap", "Not Active", "Active")], "throttling", Status.PASS, "none"),
        ([("clocks_event_reasons", "clocks_unknown")], "throttling", Status.SKIP, ""),
        (MIG_ON, "MIG", Status.FAIL, "without"),
        ([*MIG_ON, INSTANCE], "MIG", Status.WARN, "on, 1 instances"),
        ([leaf("current_mig", "Disabled", "N/A")], "MIG", Status.SKIP, ""),
        ([leaf("free", "81008 MiB", "41008 MiB")], "free memory", Status.WARN, "50% of 80 GiB"),
        ([leaf("free", "81008 MiB", "N/A")], "free memory", Status.SKIP, ""),
        ([process(4242, "/opt/env/bin/python", 40000)], "other processes", Status.WARN, "python (pid 4242, 39.1 GiB)"),
        ([process(900, "/usr/lib/xorg/Xorg", 30, "G")], "other processes", Status.PASS, "none"),
        ([leaf("gpu_recovery_action", "None", "Reboot")], "state", Status.FAIL, "Reboot"),
        ([leaf("gpu_recovery_action", "None", "N/A")], "state", Status.PASS, ""),
        ([leaf("performance_state", "P0", "[GPU requires reset]")], "state", Status.FAIL, "requires reset"),
    ],
)
def test_a_gpu_is_judged_by_what_its_driver_says(
    changes: list[tuple[str, str]], row: str, status: Status, measured: str
) -> None:
    found = judge({"n": answer(gpu(0, *changes), gpu(1))}, gpus=2)
    finding = found["cuda:0", row]
    assert finding.status is status
    assert measured in finding.measured
    if status is Status.FAIL and row != "MIG":
        assert UUIDS[0] in finding.measured and "00000000:1B:00.0" in finding.measured
    # The other GPU is not blamed.
    assert {found["cuda:1", name].status for device, name in found if device == "cuda:1"} == {Status.PASS}


def test_gpus_before_ampere_are_read_too() -> None:
    found = judge({"n": answer(OLD_GPU)})
    assert found["cuda:0", "ECC"].status is Status.FAIL and "2 uncorrectable" in found["cuda:0", "ECC"].measured
    assert found["cuda:0", "throttling"].measured.startswith("hw_slowdown")
    assert found["cuda:0", "MIG"].status is Status.SKIP


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "Unable to determine the device handle for GPU0000:1B:00.0: GPU is lost.  Reboot the system to recover this GPU",
        "<html></html>",
        report(gpu())[:900],
    ],
)
def test_what_is_no_report_is_said_and_not_read(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_a_report_without_anything_is_no_failure() -> None:
    bare = '<gpu id="00000000:01:00.0"><product_name>NVIDIA GeForce RTX 4090</product_name></gpu>'
    found = judge({"n": answer(bare)})
    assert {finding.status for (device, _), finding in found.items() if device == "cuda:0"} == {Status.PASS, Status.SKIP}


def test_the_number_is_compared_with_rays() -> None:
    assert judge({"n": answer(gpu(0))}, gpus=2)["", "number"].status is Status.FAIL
    assert judge({"n": answer(gpu(0), gpu(1))}, gpus=1)["", "number"].status is Status.WARN
    assert judge({"n": answer(gpu(0), gpu(1), visible=["1"])}, gpus=1)["", "number"].status is Status.PASS
    assert judge({"n": answer(gpu(0), visible=["0", "1"])}, gpus=2)["", "number"].measured == "1"
    assert judge({"n": answer(gpu(0), visible=["MIG-a", "MIG-b"])}, gpus=2)["", "number"].status is Status.PASS
    # A Ray without GPUs beside a machine's: nothing is wrong with it, and nothing is shown.
    assert {finding.status for finding in judge({"n": answer(gpu(0))}, gpus=0).values()} == {Status.SKIP}


def test_a_job_on_gpus_wants_ray_to_have_them() -> None:
    setting = asking(1, env={"A": "b"})
    assert judge({"n": answer(gpu(0))}, setting, gpus=0)["", "number"].status is Status.WARN
    # One worker needs no NCCL.
    assert judge({"n": answer(gpu(0, *MIG_ON, INSTANCE))}, setting)["cuda:0", "MIG"].status is Status.PASS
    assert call(setting, node_of(gpus=1)).env == {"A": "b"}


def test_visible_gpus_are_matched_by_index_and_by_uuid() -> None:
    bad = gpu(1, leaf("remapped_row_failure", "No", "Yes"))
    by_index = judge({"n": answer(gpu(0), bad, visible=["1", "0"])}, gpus=2)
    by_uuid = judge({"n": answer(gpu(0), bad, visible=[UUIDS[1][:12]])}, gpus=1)
    for found in (by_index, by_uuid):
        assert found["cuda:0", "remapped rows"].status is Status.FAIL
    two = parse(report(gpu(0), gpu(1))).gpus
    assert matched(two, ["GPU-", "MIG-7"]) == {}, "which one is meant cannot be told"
    assert gpu_devices(2, ["3", "1", "0"], list(UUIDS)) == {"cuda:0": "3", "cuda:1": "1"}
    assert gpu_devices(1, None, list(UUIDS)) == {"cuda:0": UUIDS[0]}
    assert gpu_devices(2, None, []) == {"cuda:0": "0", "cuda:1": "1"}


def test_without_a_gpu_one_row_says_so() -> None:
    found = judge({"n": answer(told="absent", error="there is no nvidia-smi on this node")}, gpus=0)
    assert {row: finding.status for row, finding in found.items()} == {("", "GPUs"): Status.SKIP}


def test_a_driver_that_does_not_answer_fails_only_where_ray_counts_gpus() -> None:
    broken = answer(told="nothing", error="nvidia-smi: couldn't communicate with the NVIDIA driver")
    assert judge({"n": broken})["", "driver"].status is Status.FAIL
    assert judge({"n": broken}, gpus=0)["", "GPUs"].status is Status.SKIP
    # Slow is not broken.
    silent = judge({"n": answer(told="silent", error="nvidia-smi gave no answer within 30 s")})["", "driver"]
    assert silent.status is Status.ERROR and "persistence" in silent.remedy
    # GPUs of another maker, or a container without the tool: what they compute is known all the same.
    assert judge({"n": answer(told="absent", error="there is no nvidia-smi on this node")})["", "driver"].status is Status.SKIP


BROKEN = leaf("remapped_row_failure", "No", "Yes")


def asking(gpus: int | str, workers: int = 1, **parts: Any) -> Setting:
    return replace(SETTING, job=job_of(workers, per_worker={"gpu": gpus}, **parts))


def test_a_broken_gpu_that_no_worker_gets_is_no_fault_of_the_node() -> None:
    hung = computed("hung", "allocation", error="no progress for 20 s")
    bad = answer(gpu(0, BROKEN), gpu(1), made=hung)
    assert judge({"n": bad}, gpus=2)["cuda:0", "remapped rows"].status is Status.FAIL
    assert judge({"n": bad}, asking(1), gpus=2)["cuda:0", "remapped rows"].status is Status.FAIL
    # The second of two, when Ray counts one.
    second = judge({"n": answer(gpu(0), gpu(1, BROKEN))}, gpus=1)["cuda:1", "remapped rows"]
    assert second.status is Status.WARN and "no worker gets" in second.reason
    # None for a job on CPUs, for one that asks for what there is where there is too little, and on a head without any.
    for setting, gpus in ((asking(0), 2), (asking("auto", workers=3), 2), (None, 0)):
        found = judge({"n": bad}, setting, gpus=gpus)
        assert found["cuda:0", "product"].status is found["cuda:0", "remapped rows"].status is Status.WARN
        assert {finding.status for finding in found.values()} == {Status.WARN, Status.SKIP}
    lost = judge({"n": answer(told="nothing", error="nvidia-smi: no driver")}, asking(0), gpus=2)
    assert {finding.status for finding in lost.values()} == {Status.WARN}
    assert call(asking(0), node_of(gpus=1)).parameters["gpus"] == 0
    assert call(asking("auto"), node_of(gpus=1)).parameters["gpus"] == 1


def test_a_model_that_no_worker_gets_is_none_of_the_jobs() -> None:
    asked = [node_of("a", gpus=1), node_of("b", gpus=1), node_of("head", head=True)]
    other = gpu(0, ("H100 80GB HBM3", "A100-SXM4-80GB"))
    answers = {"a": answer(gpu(0)), "b": answer(gpu(0)), "head": answer(other)}
    found = judged(CHECK, SETTING, asked, answers)
    assert {finding.status for finding in found if finding.node == "head"} == {Status.SKIP}


@pytest.mark.parametrize(
    ("given", "visible"), [(None, None), ("", []), ("-1", []), ("2,0", ["2", "0"]), (" 1 ,-1,0", ["1"]), ("NoDevFiles", [])]
)
def test_all_hidden_is_not_all_visible(monkeypatch: pytest.MonkeyPatch, given: str | None, visible: list[str] | None) -> None:
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_gpus() == visible
    assert gpu_devices(2, [], list(UUIDS)) == {}
    assert judge({"n": answer(gpu(0), visible=[])}, gpus=1)["", "number"].measured == "0"


def test_loading_a_devices_libraries_takes_longer_than_an_operation() -> None:
    for phase in ("import of torch", "first use", "1 sum (first call)"):
        assert patience_in(phase, 20.0) == 40
    assert patience_in("1 sum", 20.0) == patience_in("allocation", 20.0) == 20
    assert patience_in("first use", 60.0) == 60


def test_who_holds_the_memory_is_told_and_the_gpu_is_not_blamed() -> None:
    held = gpu(0, process(4242, "/opt/python", 81000))
    full = computed("raised", "allocation", error="OutOfMemoryError: CUDA out of memory")
    for made in (full, computed("raised", "first use", error="AcceleratorError: CUDA error: out of memory")):
        finding = judge({"n": answer(held, made=made)})["cuda:0", "product"]
        assert finding.status is Status.ERROR and "python (pid 4242, 79.1 GiB)" in finding.remedy
    assert "nvidia-smi" in judge({"n": answer(gpu(0), made=full)})["cuda:0", "product"].remedy


def test_a_death_by_a_signal_without_a_name_is_told() -> None:
    assert how_it_ended(-40, "") == "killed by signal 40"
    assert how_it_ended(-11, "one\nlast\n") == "killed by SIGSEGV: last"


def computed(ended: str = "done", phase: str = "", error: str = "", **facts: Any) -> dict[str, Any]:
    kind = {"model": "NVIDIA H100 80GB HBM3", "capability": "9.0", "torch": "2.9.0"}
    right = {"dtype": "float32", "entries": 100, "wrong": 0, "first": ""}
    sound = {"kind": kind, "memory_bytes": 1 << 30, "products": [right], "gflops": 5e4}
    answered = {**sound, **facts} if ended == "done" else None
    return {"ended": ended, "phase": phase, "error": error, "facts": answered}


WRONG = {"dtype": "bfloat16", "entries": 100, "wrong": 3, "first": "1.0 instead of 2"}


@pytest.mark.parametrize(
    ("made", "row", "status", "words"),
    [
        (computed(), "product", Status.PASS, "exact in float32"),
        (computed(), "speed of NVIDIA H100 80GB HBM3", Status.PASS, "5e+04 GFLOP/s"),
        (computed(memory_bytes=99, memory_wrong=8), "memory", Status.FAIL, "8 of 99 bytes"),
        (computed(products=[WRONG]), "product", Status.FAIL, "3 of 100 entries wrong in bfloat16"),
        (computed("hung", "float64 product", error="no progress"), "product", Status.FAIL, "hangs in: float64 product"),
        (computed("died", "allocation", error="killed by SIGSEGV"), "product", Status.FAIL, "died in: allocation"),
        (computed("raised", "first use", error="RuntimeError: CUDA error"), "product", Status.FAIL, "error in: first use"),
        (computed("raised", "first use", error="AssertionError: not compiled with CUDA"), "product", Status.ERROR, ""),
        (computed("died", "allocation", error="killed by SIGKILL"), "product", Status.ERROR, ""),
        (computed("raised", "import of torch", "No module named 'torch'"), "product", Status.ERROR, ""),
        (computed("hung", "import of torch", "no progress for 40 s"), "product", Status.ERROR, ""),
    ],
)
def test_what_comes_of_computing_is_judged(made: dict[str, Any], row: str, status: Status, words: str) -> None:
    finding = judge({"n": answer(gpu(0), made=made)})["cuda:0", row]
    assert finding.status is status
    assert words in finding.measured


@pytest.mark.parametrize(
    ("text", "model", "features"),
    [
        (
            "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) Platinum 8480+\n"
            "flags\t\t: fpu sse2 avx2 avx512f amx_tile ibpb\n\nprocessor\t: 1\nmodel name\t: other\n",
            "Intel(R) Xeon(R) Platinum 8480+ (6/143)",
            "amx_tile avx2 avx512f sse2",
        ),
        (
            "processor\t: 0\nFeatures\t: fp asimd crc32 sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n",
            "aarch64 (0x41/0xd4f)",
            "asimd sve",
        ),
        ("", "aarch64", ""),
    ],
)
def test_a_processor_is_named_by_what_decides_its_bits(text: str, model: str, features: str) -> None:
    assert read_cpuinfo(text, "aarch64") == (model, features)
