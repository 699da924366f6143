"""`python -m tests.benchmarks`: recovery time, time per step and start-up time of chaosrun beside its peers, on this machine,
what a drill of a script as it is adds to it, what many nodes cost a preflight and a drill, and many records a verdict.

Tables on stdout, progress on stderr, everything measured in `--json FILE`. Ends with 1 when a run of chaosrun failed; a target
that was missed is shown, and no failure: times depend on what else the machine does.
"""

import argparse
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks import (
    checkpoint_stall,
    control_plane,
    own_scripts,
    preflight,
    readme,
    records,
    recovery,
    startup,
    step_time,
    throughput,
)
from tests.benchmarks.launch import ON_GPU
from tests.benchmarks.samples import Samples

PARTS = ("recovery", "sizes", "throughput", "steps", "scripts", "startup", "preflight", "records", "control_plane", "stall")
GPU_PARTS = ("recovery", "sizes", "steps", "stall")


def main() -> int:
    arguments = parse_arguments()
    if arguments.gpu:
        os.environ[ON_GPU] = "1"
    parts = arguments.only or list(GPU_PARTS if arguments.gpu else PARTS)
    console = Console(width=None if sys.stdout.isatty() else 110)
    report: dict[str, Any] = {"v": 1, "time_s": time.time(), "repeats": arguments.repeats, "machine": machine_facts()}
    failures: list[str] = []
    if "startup" in parts:
        help_time = startup.measure_startup(arguments.repeats, progress)
        report["startup"] = {"target_s": startup.TARGET_S, **help_time.to_json()}
        console.print(startup_table(help_time))
    if "recovery" in parts:
        times = recovery.measure_recovery(arguments.repeats, progress)
        failures += times["chaosrun"].failures
        report["recovery"] = {"target_s": recovery.TARGET_S, **{name: samples.to_json() for name, samples in times.items()}}
        console.print(recovery_table(times))
        if missing := recovery.why_no_ray_train():
            report["recovery"]["Ray Train"] = None
            console.print(missing)
    if "sizes" in parts:
        sizes = {size: recovery.measure_recovery(arguments.repeats, progress, size) for size in recovery.MEGABYTES}
        failures += [failure for times in sizes.values() for failure in times["chaosrun"].failures]
        report["sizes"] = {size: {name: each.to_json() for name, each in times.items()} for size, times in sizes.items()}
        console.print(sizes_table(sizes))
    if "throughput" in parts:
        rates = throughput.measure_throughput(arguments.repeats, progress)
        report["throughput"] = {"bytes": throughput.BYTES, **{name: samples.to_json() for name, samples in rates.items()}}
        console.print(throughput_table(rates))
    if "steps" in parts:
        steps = step_time.measure_steps(arguments.repeats, progress)
        failures += steps.wall["chaosrun"].failures
        report["steps"] = {"target_ratio": step_time.TARGET_RATIO, **steps.to_json()}
        console.print(steps_table(steps))
    if "scripts" in parts:
        scripts = own_scripts.measure_own_scripts(arguments.repeats, progress)
        failures += scripts.failures()
        report["scripts"] = {"targets": own_scripts.TARGETS, **scripts.to_json()}
        console.print(scripts_table(scripts))
    if "preflight" in parts:
        by_nodes = preflight.measure_preflight(arguments.repeats, progress)
        ratios = {"target_ratio": preflight.TARGET_RATIO, "nodes": {n: s.to_json() for n, s in by_nodes.items()}}
        report["preflight"] = ratios
        console.print(preflight_table(by_nodes))
    if "records" in parts:
        report["records"] = {"targets": records.TARGETS, "sizes": records.measure_records(records.SIZES, progress)}
        failures += [found["cause"] for found in report["records"]["sizes"] if found["status"] != "PASS"]
        console.print(records_table(report["records"]["sizes"]))
        for name, (value, is_met) in records.met(report["records"]["sizes"]).items():
            console.print(f"{name} {value:,.4g}, target {records.TARGETS[name]:,.4g}: {'met' if is_met else 'missed'}")
    if "control_plane" in parts:
        by_ranks = control_plane.measure_control_plane(arguments.repeats, progress)
        failures += [failure for each in by_ranks for failure in each.failures]
        measured = {each.ranks: each.to_json() for each in by_ranks}
        report["control_plane"] = {"targets": control_plane.TARGETS, "ranks": measured}
        console.print(control_plane_table(by_ranks))
    if "stall" in parts:
        stalls = checkpoint_stall.measure_stalls(arguments.repeats, progress)
        failures += [failure for stall in stalls for failure in stall.failures]
        report["stall"] = {"targets": checkpoint_stall.TARGETS, "sizes": [stall.to_json() for stall in stalls]}
        console.print(stall_table(stalls))
    report["machine"]["load_after"] = os.getloadavg()
    before, after = (report["machine"][key][0] for key in ("load_before", "load_after"))
    console.print(f"{os.cpu_count()} CPUs; load average {before:.1f} before, {after:.1f} after")
    if arguments.keep:
        readme.keep(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failures else 0


def recovery_table(times: dict[str, Samples]) -> Table:
    table = new_table("SIGKILL of one rank → first new optimizer step", "failed", "target")
    for name, samples in times.items():
        target = met(samples.median, recovery.TARGET_S, "s") if name == "chaosrun" else ""
        table.add_row(name, *columns(samples, 1, "s", 3), f"{len(samples.failures)}", target)
    return table


def sizes_table(sizes: dict[int, dict[str, Samples]]) -> Table:
    table = new_table("SIGKILL of one rank → first new optimizer step, by megabytes of state", "failed", "of torchrun's")
    for megabytes, times in sizes.items():
        for name, samples in times.items():
            cells = (*columns(samples, 1, "s", 3), f"{len(samples.failures)}", of(samples, times["torchrun"]))
            table.add_row(f"{megabytes} MB, {name}", *cells)
    return table


def throughput_table(rates: dict[str, Samples]) -> Table:
    table = new_table(f"One thread and {throughput.BYTES // 1_000_000} MB in memory or page cache", "a second", "of memcpy's")
    for name, samples in rates.items():
        told = f"{throughput.rate(samples):.2f} GB", of(samples, rates["memcpy"])
        table.add_row(name, *columns(samples, 1, "s", 3), *told)
    return table


def of(samples: Samples, other: Samples) -> str:
    return f"{samples.median / other.median:.2f} ×" if samples.median is not None and other.median else ""


def steps_table(steps: step_time.StepTimes) -> Table:
    table = new_table(f"Time per step (jobs/bytelm, {steps.workers} workers)", "of torchrun's", "target")
    for kind, times in (("", steps.wall), (", CPU time", steps.cpu)):
        ratio = steps.ratio(times)
        for name, samples in times.items():
            ours = name == "chaosrun"
            target = met(ratio, step_time.TARGET_RATIO, "×") if ours and not kind else ""
            shown = f"{ratio:.3f} ×" if ours and ratio is not None else ""
            table.add_row(name + kind, *columns(samples, 1000, "ms", 2), shown, target)
    return table


def scripts_table(times: own_scripts.OwnScriptTimes) -> Table:
    table = new_table(
        "A script as it is, with its own checkpoints (tests/benchmarks/own_script.py, 2 workers)", "of torchrun's", "target"
    )
    for kind, group in (("a step", times.wall), ("a step, CPU time", times.cpu)):
        for name, samples in group.items():
            ratio = None if name == "torchrun" else times.ratio(name, group)
            target = met(ratio, own_scripts.TARGETS["step"], "×") if ratio is not None and group is times.wall else ""
            table.add_row(
                f"{kind}, {name}", *columns(samples, 1000, "ms", 2), "" if ratio is None else f"{ratio:.3f} ×", target
            )
    for name, samples in times.observer.items():
        ratio = times.observer_ratio() if name == "with" else None
        target = met(ratio, own_scripts.TARGETS["step"], "×") if ratio is not None else ""
        shown = "" if ratio is None else f"{ratio:.3f} × without"
        table.add_row(f"a step {name} the observer, by turns", *columns(samples, 1000, "ms", 2), shown, target)
    for name, samples in times.recovery.items():
        what = "its launcher's start → first line" if name == "launcher" else f"kill → step without its own part, {name}"
        target = met(samples.median, own_scripts.TARGETS["recovery"], "s") if name == "script" else ""
        table.add_row(what, *columns(samples, 1, "s", 3), "", target)
    for name, samples in times.around.items():
        added = times.added_s() if name == "command" else None
        target = met(added, own_scripts.TARGETS["added"], "s") if name == "command" else ""
        table.add_row(
            f"before and after the script, {name}",
            *columns(samples, 1, "s", 3),
            "" if added is None else f"{added:+.3f} s",
            target,
        )
    return table


def startup_table(samples: Samples) -> Table:
    table = new_table("Start-up", "target")
    table.add_row("chaosrun --help", *columns(samples, 1, "s", 3), met(samples.median, startup.TARGET_S, "s"))
    return table


def preflight_table(by_nodes: dict[int, Samples]) -> Table:
    table = new_table("Preflight, quick: per-node checks, simulated agents", "of 4 nodes'", "target")
    few = by_nodes[4].median
    for nodes, samples in by_nodes.items():
        ratio = samples.median / few if samples.median is not None and few else None
        target = met(ratio, preflight.TARGET_RATIO, "×") if nodes == 64 else ""
        table.add_row(f"{nodes} nodes", *columns(samples, 1, "s", 2), "" if ratio is None else f"{ratio:.2f} ×", target)
    return table


def records_table(sizes: list[dict[str, Any]]) -> Table:
    table = Table(title="Judging a drill by its records, both legs equal, 100 tensors", title_justify="left")
    for name in (
        "ranks",
        "steps",
        "verdict",
        "records a second",
        "processor time for each rank more",
        "peak",
        "bytes a step and rank",
        "with checkpoints",
    ):
        table.add_column(name, justify="right")
    fixed, more = records.each_rank(sizes)
    for found, each in zip(sizes, (f"{1e3 * fixed:.0f} ms for none", *(f"{1e3 * each:.1f} ms" for each in more)), strict=True):
        cells = [f"{found['ranks']}", f"{found['steps']}", f"{found['seconds']:.1f} s"]
        cells += [f"{found['records'] / found['seconds']:,.0f}", each]
        table.add_row(
            *cells, f"{found['peak_bytes'] / 1e6:.0f} MB", f"{found['bytes_a_step']:.0f}", f"{found['all_bytes_a_step']:.0f}"
        )
    return table


def control_plane_table(by_ranks: list[control_plane.ControlPlane]) -> Table:
    table = new_table("The control plane, on simulated nodes of 8 ranks", "target")
    targets, most = control_plane.TARGETS, by_ranks[-1]
    for each in by_ranks:
        last = each is most
        for loss in control_plane.LOSSES:
            for what, found in (("all others told to stop", each.told), ("all restarted", each.restarted)):
                target = met(found[loss].median, targets["told" if found is each.told else "restarted"], "s") if last else ""
                table.add_row(f"{each.ranks} ranks, {loss} lost → {what}", *columns(found[loss], 1, "s", 3), target)
            per_rank = each.per_rank(each.recovery_cpu[loss])
            table.add_row(f"{each.ranks} ranks, {loss} lost: CPU time for a rank", *columns(per_rank, 1e6, "µs", 0), "")
        target = met(each.cores.median, targets["cores"], "processors") if last else ""
        table.add_row(f"{each.ranks} ranks: processors while they train", *columns(each.cores, 1, "", 2), target)
    return table


def stall_table(stalls: list[checkpoint_stall.Stall]) -> Table:
    table = new_table("A checkpoint of 2 ranks: how long the training stands still", "first", "of save_state's", "target")
    for stall in stalls:
        for way, samples in stall.ways.items():
            ratio, target = stall.ratio(way), checkpoint_stall.TARGETS.get(way)
            told = [f"{stall.first[way]:.3f} s", "" if ratio is None else f"{ratio:.2f} ×"]
            told += ["" if target is None or ratio is None else met(ratio, target, "×")]
            table.add_row(f"{stall.size / 1e9:g} GB, {way}", *columns(samples, 1, "s", 3), *told)
    return table


def new_table(title: str, *more: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("median", "min", "max", *more):
        table.add_column(name, justify="right")
    return table


def columns(samples: Samples, scale: float, unit: str, digits: int) -> list[str]:
    if not samples.values:
        return ["–", "–", "–"]
    assert samples.median is not None
    return [f"{scale * value:.{digits}f} {unit}" for value in (samples.median, min(samples.values), max(samples.values))]


def met(value: float | None, target: float, unit: str) -> str:
    if value is None:
        return f"≤ {target} {unit}: not measured"
    return f"≤ {target} {unit}: {'met' if value <= target else 'missed'}"


def machine_facts() -> dict[str, Any]:
    names = ("chaosrun", "torch", "accelerate", "ray")
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg(),
        **{name: version(name) for name in names},
    }


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measure chaosrun beside its peers.")
    parser.add_argument("--repeats", type=int, default=5, help="runs of everything (default: 5)")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part; may be repeated")
    parser.add_argument("--gpu", action="store_true", help=f"one rank on a GPU instead; alone: {', '.join(GPU_PARTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to this file")
    parser.add_argument("--keep", action="store_true", help="keep them, and write the README's numbers anew")
    arguments = parser.parse_args()
    if arguments.gpu and arguments.keep:
        parser.error("the README's numbers are those of CPUs: --keep does not go with --gpu")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
