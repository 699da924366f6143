"""The README's numbers are those of the newest bench that was kept: `make bench ARGS=--keep` measures, and writes them."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
KEPT = Path(__file__).with_name("kept.json")
BEGIN, END = "<!-- numbers: begin -->\n", "<!-- numbers: end -->\n"


def keep(report: Mapping[str, Any]) -> None:
    """Raises KeyError when a part was not measured: numbers of two benches do not stand in one table."""
    text = with_numbers(README.read_text(), report)
    KEPT.write_text(json.dumps(_without_outputs(report), indent=1) + "\n")
    README.write_text(text)


def _without_outputs(found: Any) -> Any:
    """What was measured; of a failure the sentence, without the output below it, which is full of this machine's paths."""
    if isinstance(found, Mapping):
        return {
            key: [failure.splitlines()[0] for failure in value] if key == "failures" else _without_outputs(value)
            for key, value in found.items()
        }
    return [_without_outputs(value) for value in found] if isinstance(found, list) else found


def with_numbers(readme: str, report: Mapping[str, Any]) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"the README has no {BEGIN.strip()} … {END.strip()}"
    return before + begin + table(report) + end + after


def table(report: Mapping[str, Any]) -> str:
    machine, recovery, steps, scripts = (report[name] for name in ("machine", "recovery", "steps", "scripts"))
    loads = " and ".join(
        f"{machine[name][0]:.1f} {when}" for name, when in (("load_before", "before"), ("load_after", "after"))
    )
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "accelerate", "ray"))
    day = time.strftime("%Y-%m-%d", time.gmtime(report["time_s"]))
    rows = [
        ("SIGKILL of a rank to the first new step (`jobs/probe`)", *(seconds(recovery.get(name)) for name in PEERS)),
        ("a step of `jobs/bytelm`", times(steps["ratio"]), "1", "–"),
        ("a step of a script as it is", times(scripts["step_ratio_script"]), "1", "–"),
        ("a step that chaosrun watches, beside unwatched ones of the same process", times(scripts["observer_ratio"]), "1", "–"),
        ("added before and after a script", f"{scripts['added_s']:+.2f} s", "0", "–"),
        ("`chaosrun --help`", seconds(report["startup"], 2), "–", "–"),
    ]
    return (
        f"| medians of {report['repeats']} | chaosrun | torchrun | Ray Train |\n|---|---|---|---|\n"
        + "".join(f"| {' | '.join(row)} |\n" for row in rows)
        + f"\nMeasured {day} with {machine['cpus']} CPUs (load average {loads}), Python {machine['python']}, {versions}.\n"
    )


PEERS = ("chaosrun", "torchrun", "Ray Train")


def seconds(samples: Mapping[str, Any] | None, digits: int | None = None) -> str:
    """`samples`: of `Samples.to_json`; None: not installed. How many of its runs did not come back is told."""
    if samples is None or samples["median_s"] is None:
        return "–"
    median, failed = samples["median_s"], len(samples["failures"])
    shown = f"{median:.{digits if digits is not None else 2 if median < 1 else 1}f} s"
    return f"{shown} ({failed} failed)" if failed else shown


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f} ×"
