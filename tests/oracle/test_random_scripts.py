"""Random scripts that save and resume by themselves, right or with one piece of their state not restored, and kills at random
steps. What the scripts print says whether they came back exactly, and so what the verdict must be: an oracle that knows nothing
of chaosrun.

Every script follows from its number, so a failure can be had again: it prints its job file.
"""

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from chaosrun.api import RunResult
from chaosrun.records.layout import LegLayout
from tests.conftest import WarmDrills

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).with_name("own_random.py")
STEPS = 24
IN_ALL = 60
BY_DAY = (0,)
RIGHT = 0.5
"""The share of scripts of which nothing is lost."""
NOT_WENT_ON = {"all": "began_again", "older": "checkpoint_passed_over"}
"""They come back exactly, but not from the newest checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a script is made of."""

    model: str
    dropout: float
    optimizer: str
    optimizers: int
    by_turns: bool
    schedule: str
    data: str
    loader_workers: int
    augment: bool
    noise: bool
    mix: str
    gradients: str
    clips: bool
    teaches: bool
    validates: bool
    every: int
    format: str
    aside: bool
    lost: str = ""

    @classmethod
    def drawn(cls, source: random.Random, ranks: int) -> "Parts":
        optimizers = source.choice([1, 1, 2])
        # Each rank has statistics of its own: what they decide would be each rank's own, too.
        model = source.choice(["plain", "plain", "norm"])
        alike = model == "plain" or ranks == 1
        return cls(
            model=model,
            dropout=source.choice([0.0, 0.2]),
            optimizer=source.choice(["sgd", "adamw", "rms", "asgd"]),
            optimizers=optimizers,
            by_turns=optimizers > 1 and source.random() < 0.5,
            schedule=source.choice(["none", "step", "cosine", *(["plateau"] if alike else [])]),
            data=source.choice(["keyed", "stream", "shuffled", "random", "distributed"]),
            loader_workers=source.choice([0, 0, 0, 2]),
            augment=source.random() < 0.3,
            noise=source.random() < 0.3,
            mix=source.choice(["none", "numpy", "python"]),
            gradients=source.choice(["backward", "backward", "given"]),
            clips=source.random() < 0.4,
            teaches=source.random() < 0.4,
            validates=alike and source.random() < 0.4,
            every=source.choice([3, 4, 5, 7]),
            format=source.choice(["path", "path", "file", "buffer", "pickle"]),
            aside=source.random() < 0.25,
        )

    @property
    def pieces(self) -> list[str]:
        """What a restart may leave out to restore."""
        own_order = self.data in ("shuffled", "random")
        found = {
            **dict.fromkeys(["model", "optimizer 0", "torch now", "mean", "average", *NOT_WENT_ON], True),
            "optimizer 1": self.optimizers > 1,
            "buffers": self.model == "norm",
            "scheduler": self.schedule != "none",
            "norms": self.clips,
            "best": self.validates,
            "bad": self.validates,
            "numpy now": self.mix == "numpy",
            "python now": self.mix == "python",
            "order now": own_order,
            "order begun": own_order,
            "place": self.data != "keyed",
            "epoch of the sampler": self.data == "distributed",
        }
        return [name for name, there in found.items() if there]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the ranks of a leg printed."""

    steps: dict[tuple[str, str], set[str]]
    """By rank and step, the digests of all attempts."""
    ends: dict[str, dict[str, str]]

    @classmethod
    def by(cls, result: RunResult, name: str) -> "Told":
        steps: dict[tuple[str, str], set[str]] = {}
        ends: dict[str, dict[str, str]] = {}
        for log in sorted((LegLayout(result.run.path / name).path / "attempts").glob("*/rank-*.log")):
            for line in log.read_text().splitlines():
                match line.split(" ", 3):
                    case ["STEP", step, rank, digest]:
                        steps.setdefault((rank, step), set()).add(digest)
                    case ["END", rank, *held]:
                        ends[rank] = json.loads(" ".join(held))
        return cls(steps=steps, ends=ends)

    def differing(self, other: "Told") -> set[str]:
        """The parts that are not the same, "steps" among them."""
        parts = {part for rank, held in self.ends.items() for part in held if held[part] != other.ends.get(rank, {}).get(part)}
        return parts | ({"steps"} if self.steps != other.steps else set())


def drawn(number: int, folder: Path) -> tuple[Path, Parts]:
    """The job file of a script."""
    source = random.Random(number)
    ranks = source.choice([1, 2])
    parts = Parts.drawn(source, ranks)
    if source.random() >= RIGHT:
        parts = Parts(**{**asdict(parts), "lost": source.choice(parts.pieces)})
    steps = sorted(source.sample(range(2 * parts.every, STEPS), source.choice([1, 1, 1, 2])))
    job = {
        "name": f"random-{number}",
        "script": str(SCRIPT),
        "args": [json.dumps(asdict(parts))],
        "workers": ranks,
        "seed": 1,
        "faults": {"schedule": [{"rank": source.randrange(ranks), "at_step": step} for step in steps]},
        "timeout": "300s",
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path, parts


@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.nightly] * (n not in BY_DAY)) for n in range(IN_ALL)])
def test_the_verdict_is_what_the_script_itself_shows(warm_drills: WarmDrills, tmp_path: Path, number: int) -> None:
    path, parts = drawn(number, tmp_path)
    result = warm_drills(path, root=tmp_path / "root")
    verdict = result.verdict
    differing = Told.by(result, "reference").differing(Told.by(result, "chaos"))
    said = f"{verdict.status} {verdict.code}, differing: {sorted(differing)}\n{verdict.cause}\n{path.read_text()}"
    if parts.lost in NOT_WENT_ON:
        # A kill may come before a background thread has written the second checkpoint: an older one is none then.
        codes = set(NOT_WENT_ON.values()) if parts.aside else {NOT_WENT_ON[parts.lost]}
        assert verdict.status == "FAIL" and verdict.code in codes, said
    elif differing == {"counts"} and verdict.status == "PASS":
        # No step and no tensor is another: a number that is compared at the end alone.
        assert any("started over" in warning for warning in verdict.warnings), said
    else:
        assert verdict.status == ("FAIL" if differing else "PASS"), said
        assert verdict.blame.whose == ("yours" if differing else "nobody"), said
