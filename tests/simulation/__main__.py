"""`make simulate SEEDS=…`: simulated drills, one for each seed; a seed that fails is replayed with as few troubles as it takes.

SEEDS is a number (0 to N - 1), a range such as 500-600, or one seed such as =1234, whose story is printed.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.simulation.drill import Ended, run
from tests.simulation.scenario import Scenario, draw


def seeds_of(text: str) -> range:
    """The seeds that are meant by "1000", "500-600" or "=1234"."""
    if text.startswith("="):
        return range(int(text[1:]), int(text[1:]) + 1)
    first, separator, last = text.partition("-")
    return range(int(first), int(last) + 1) if separator else range(int(text))


def shrunk(scenario: Scenario, rule: str) -> Scenario:
    """The same failure with as few faults and troubles as it takes."""
    parts = [*scenario.faults, *scenario.troubles]
    for part in parts:
        smaller = scenario.without(part)
        ended = run(smaller)
        if ended.violation is not None and ended.violation.rule == rule:
            scenario = smaller
    return scenario


def failures(seeds: Iterable[int]) -> Iterable[tuple[int, Ended]]:
    """Those seeds that fail, and how."""
    for seed in seeds:
        ended = run(draw(seed))
        if ended.violation is not None:
            yield seed, ended


def report(seed: int, ended: Ended) -> str:
    """What failed, and the story of the smallest scenario that fails likewise."""
    assert ended.violation is not None
    scenario = shrunk(draw(seed), ended.violation.rule)
    again = run(scenario)
    lines = [f"seed {seed}: {ended.violation}", scenario.words(), *again.story, f"ends with: {again.violation}"]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    text = arguments[0] if arguments else "1000"
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The same order everywhere, also where somebody iterates over a set.
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", text], {**os.environ, "PYTHONHASHSEED": "0"})
    seeds, began_s = seeds_of(text), time.monotonic()
    outcomes: Counter[str] = Counter()
    failed = 0
    for seed in seeds:
        ended = run(draw(seed))
        outcomes[ended.outcome] += 1
        if text.startswith("="):
            print(draw(seed).words(), *ended.story, f"{ended.outcome}: {ended.message}", sep="\n")
        if ended.violation is not None:
            failed += 1
            print(report(seed, ended), flush=True)
    took_s = time.monotonic() - began_s
    print(f"{len(seeds)} drills, {failed} failed, {len(seeds) / took_s:.0f} a second: {dict(outcomes.most_common())}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
