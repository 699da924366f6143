"""The job's own preloads are imported again in children: what entropy, clock, process or address goes into is refused."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from chaosrun.cluster.agent import IMPORT_ENVIRONMENT
from chaosrun.cluster.preloads import _is_own, _why_not_shareable

COMPARE = """
import importlib, json, sys
from chaosrun.cluster import preloads
# In a process of its own without what every drill preloads: of that nothing is compared, and it takes seconds.
preloads.FRESH = "import chaosrun.cluster.forkserver as server; server.PRELOAD = ('random',); " + preloads.FRESH
for name in ("torch", "numpy", "datetime", "uuid", "secrets"):
    importlib.import_module(name)
found = [preloads._import_and_compare(names.split(), preloads._Imports()) for names in sys.argv[1:]]
print(json.dumps(found))
"""
DRAWN = {
    "salt": "import os; held = os.urandom(1)[0] / 1000; held2 = os.urandom(8)",
    "clock": "import time; held = time.time()",
    "date": "import datetime; held = datetime.date.today().isoformat()",
    "run": "import uuid; held = str(uuid.uuid4())",
    "process": "import os; held = os.getpid() % 1000",
    "generator": "import numpy; held = numpy.random.default_rng()",
    "stream": "import random; held = random.Random()",
    "torchs": "import torch; held = torch.Generator(); held.seed()",
    "default": "import os\ndef held(x, salt=os.urandom(8)): return x",
    "attribute": "import os\nclass held: salt = os.urandom(8)",
    "slot": "import os\nclass C: __slots__ = ('salt',)\nheld = C(); held.salt = os.urandom(8)",
    "tensor": "import os, torch; held = torch.full((3,), float(int.from_bytes(os.urandom(6))))",
    "large": "import numpy, os; held = numpy.frombuffer(os.urandom(1 << 22), dtype=numpy.uint8)",
    "closure": "import os\ndef make(salt): return lambda: salt\nheld = make(os.urandom(8))",
    "below": "from drawn_in_another_module import held",
}
ELSEWHERE = {
    "abroad": ("import os, torch; torch.salt = os.urandom(8)", "a value that was put into torch"),
    "variable": ("import os; os.environ['SALT'] = os.urandom(8).hex()", "environment variable SALT"),
    "once": (
        "import os, sys\nassert not hasattr(sys, 'been_here'), 'once'\nsys.been_here = True\nheld, same = os.urandom(8), [3]",
        "once.held",
    ),
}
"""What it is, and how it is told; the last one cannot be imported twice."""
FINE = """
import collections, dataclasses, enum, functools, itertools, logging, pathlib, random, re, threading
import numpy, torch
log, lock, mark, condition = logging.getLogger(__name__), threading.Lock(), object(), threading.Condition()
# Of the global streams, which are seeded: the same in every drill.
weights, noise, chance = torch.randn(3), numpy.random.rand(3), random.random()
names, pattern, here, count = {"a", "b", "c"}, re.compile("a+"), pathlib.Path(__file__), itertools.count(3)
@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    layers: list = dataclasses.field(default_factory=list)
class Kind(enum.Enum):
    A = 1
    B = enum.auto()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
net, point, rng = Net(), collections.namedtuple("Point", "x y")(1, 2), numpy.random.default_rng(3)
registry = {}
def register(function):
    registry[function.__name__] = function
    return functools.lru_cache(function)
@register
def one(): return 1
registry["self"] = registry
"""


def compare(folder: Path, modules: dict[str, str], *together: list[str]) -> list[list[str]]:
    """What differs, of each list of modules that a job may preload together."""
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    path = os.pathsep.join([os.getcwd(), str(folder)])
    environment = {**os.environ, **IMPORT_ENVIRONMENT, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", COMPARE, *map(" ".join, together)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_what_is_drawn_while_a_module_is_imported_is_named_and_ordinary_ones_are_the_same_every_time(tmp_path: Path) -> None:
    (tmp_path / "drawn_in_another_module.py").write_text("import os; held = os.urandom(8)")
    operator = (
        "import torch\n@torch.library.custom_op('own::one', mutates_args=())\ndef one(x: torch.Tensor) -> torch.Tensor: ..."
    )
    drawn = DRAWN | {name: text for name, (text, _) in ELSEWHERE.items()}
    twice = [name for name in drawn if name != "once"]
    modules = {"fine": FINE, "operator_of_ours": operator, **drawn}
    *same, found, once = compare(tmp_path, modules, ["fine"], ["operator_of_ours"], twice, ["once"])
    assert same == [[], []]
    expected = {name: f"{name}.held" for name in DRAWN} | {name: told for name, (_, told) in ELSEWHERE.items()}
    assert {name: expected[name] in found for name in twice} == dict.fromkeys(twice, True), found
    assert once == ["once.held"], "between processes nothing else differs"


@pytest.mark.parametrize(
    ("differing", "words"),
    [(["a.b"], "a.b differs after every import"), (["a.b", "c.d"], "a.b (and 1 more) differs after every import")],
)
def test_it_is_said_which(differing: list[str], words: str) -> None:
    assert words in (_why_not_shareable(differing) or "")


@pytest.mark.parametrize("module", ["sklearn.datasets", "pyarrow", "datasets"])
def test_libraries_are_imported_without_threads_of_theirs(module: str) -> None:
    """A fork would lose them. Left to themselves they start some: BLAS has a pool, pyarrow's allocator one that tidies up."""
    pytest.importorskip(module, reason=f"{module} is not installed")
    script = f"""
from chaosrun.cluster.preloads import _Imports
imports = _Imports()
imports.import_each(["{module}"])
print([each.module for each in imports.unsafe])
"""

    def told(**environment: str) -> str:
        bare = {name: value for name, value in os.environ.items() if name not in IMPORT_ENVIRONMENT}
        environment = {**bare, **environment}
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment).stdout.strip()

    assert told(**IMPORT_ENVIRONMENT) == "[]"
    assert told(OPENBLAS_NUM_THREADS="2", OMP_NUM_THREADS="2") == f"['{module}']"


@pytest.mark.parametrize(
    ("file", "own"), [("lib/site-packages/a.py", False), ("dist-packages/a/b.py", False), ("src/a.py", True)]
)
def test_packages_of_another_environment_are_installed_ones(tmp_path: Path, file: str, own: bool) -> None:
    module = types.ModuleType("a")
    module.__file__ = str(tmp_path / file)
    assert _is_own(module) == own
