"""The rules of the house, as tests: who may import whom, what stays light, what may be exported, how files are named and sized.

Imports are read from the source, so a rule holds for code that no test runs; what is really loaded, a new interpreter tells.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import chaosrun
from tests.sources import parsed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "chaosrun"

TABLE = Path(__file__).with_name("imports.json")
"""Who imports whom, exactly: `python -m tests.unit.test_architecture` writes it anew; its diff is what a reviewer looks at."""
MAY_IMPORT: dict[str, set[str]] = {room: set(others) for room, others in json.loads(TABLE.read_text()).items()}

PURE = {"spec", "plan", "records", "errors", "wording", "processes"}
# Not even inside a function: these judge files and values, wherever they run.
NEVER_RAY_OR_TORCH = PURE | {"checkpoint"}
MAY_IMPORT_TORCH = {"observe", "protocol", "faults"}
JUDGING = ("model", "peers", "placement", "result")
"""Of preflight, beside what assesses: values only."""
FORBIDDEN_NAMES = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
LONGEST_FILE_LINES = 400
LONGEST_FUNCTION_LINES = 60
MOST_ROOMS, MOST_FLOORS = 20, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One imported module, and where: `eager` when merely importing the file imports it."""

    path: Path
    line: int
    module: str
    eager: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"

    @property
    def distribution(self) -> str:
        return self.module.partition(".")[0]

    @property
    def room(self) -> str | None:
        """The part of chaosrun it leads to; None for other packages and for the names that `chaosrun` itself exports."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == "chaosrun" and len(parts) > 1 else None


STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""What an import can stand in."""


def imports_of(path: Path, *, but_in: str = "") -> Iterator[Import]:
    """`but_in`: a function whose own imports are left out."""
    tree = parsed(path.read_text())
    waiting = [(node, False) for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name == but_in)]
    while waiting:
        node, deferred = waiting.pop()
        deferred = deferred or _defers(node)
        waiting += [(inner, deferred) for inner in ast.iter_child_nodes(node) if isinstance(inner, STATEMENTS)]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = [node.module or ""]
            if node.module == "chaosrun":
                names = [f"chaosrun.{alias.name}" for alias in node.names if alias.name not in {*chaosrun.__all__}]
        else:
            continue
        for name in names:
            yield Import(path=path, line=node.lineno, module=name, eager=not deferred)


def _defers(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return True
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def room_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    if inside.name == "__main__.py":
        return "cli"  # the command line as a program
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def every_import() -> list[Import]:
    return [found for path in sources() for found in imports_of(path)]


def test_the_rules_see_the_code() -> None:
    # Without this a moved package would pass every rule below.
    assert {room_of(path) for path in sources()} == MAY_IMPORT.keys()
    assert any(found.distribution == "ray" for found in every_import())
    assert any(found.distribution == "torch" and not found.eager for found in every_import())


def test_imports_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import ray.util\n"
        "from chaosrun import attach, verify\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "class Late:\n    import numpy\n    def load(self):\n        from chaosrun.observe.rng import digest_rng\n"
    )
    found = {(entry.module, entry.distribution, entry.room, entry.eager) for entry in imports_of(path)}
    assert found == {
        ("ray.util", "ray", None, True),
        ("chaosrun.verify", "chaosrun", "verify", True),
        ("torch", "torch", None, False),
        ("numpy", "numpy", None, True),
        ("chaosrun.observe.rng", "chaosrun", "observe", False),
    }


def used_edges() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {room_of(path): set() for path in sources()}
    for found in every_import():
        if found.room is not None and found.room != room_of(found.path):
            edges[room_of(found.path)].add(found.room)
    return edges


def test_the_table_allows_what_is_used_and_no_more() -> None:
    used = used_edges()
    added = [
        str(found) for found in every_import() if found.room in used[room_of(found.path)] - MAY_IMPORT[room_of(found.path)]
    ]
    assert not added, "not in the table:\n" + "\n".join(added)
    gone = {room: sorted(MAY_IMPORT[room] - others) for room, others in used.items() if MAY_IMPORT[room] - others}
    assert not gone, f"in the table, but not used: {gone}"


def floors(edges: dict[str, set[str]]) -> list[set[str]]:
    """Rooms by floor: each imports rooms of lower floors alone. Raises CycleError, naming the rooms, for a circle."""
    order, found = TopologicalSorter(edges), []
    order.prepare()
    while order.is_active():
        found.append(set(order.get_ready()))
        order.done(*found[-1])
    return found


def test_a_house_of_few_rooms_and_no_circle() -> None:
    found = floors(used_edges())
    assert sum(map(len, found)) - 1 <= MOST_ROOMS and len(found) <= MOST_FLOORS
    with pytest.raises(CycleError):
        floors({"plan": {"spec"}, "spec": {"plan"}})


def test_only_cluster_imports_ray() -> None:
    wrong = [str(found) for found in every_import() if found.distribution == "ray" and room_of(found.path) != "cluster"]
    assert not wrong, "\n".join(wrong)


def test_training_libraries_stay_in_the_worker() -> None:
    heavy = {"torch", "accelerate", "safetensors"}
    wrong = [
        str(found)
        for found in every_import()
        if found.distribution in heavy
        and found.path not in job_sources()
        and (
            room_of(found.path) in NEVER_RAY_OR_TORCH
            or found.path == PACKAGE / "supervise" / "lifecycle.py"
            or (found.eager and room_of(found.path) not in MAY_IMPORT_TORCH)
        )
    ]
    assert not wrong, "\n".join(wrong)


EFFECTS = {"asyncio", "os", "pathlib", "psutil", "random", "shutil", "signal", "socket", "subprocess", "threading", "time"}


def test_the_state_machine_touches_nothing() -> None:
    wrong = [str(found) for found in imports_of(PACKAGE / "supervise" / "lifecycle.py") if found.distribution in EFFECTS]
    assert not wrong, "\n".join(wrong)


def test_what_judges_a_cluster_touches_nothing() -> None:
    """A check asks nodes through the pool alone; what acts there lies beside the checks, or is the function `probe` of one."""
    # Paths are values here, and may be joined.
    effects = {*EFFECTS, "torch", "numpy"} - {"pathlib"}
    judges = {*(PACKAGE / "preflight" / "checks").glob("*.py"), *(PACKAGE / "preflight" / f"{name}.py" for name in JUDGING)}
    found = [each for path in judges for each in imports_of(path, but_in="probe")]
    wrong = [str(each) for each in found if each.distribution in effects]
    assert len(judges) > len(JUDGING) and not wrong, "\n".join(wrong)


def test_probes_start_quickly() -> None:
    """A node runs many, each in a process of its own."""
    light = {*sys.stdlib_module_names, "chaosrun", "msgspec", "psutil"}
    checks = [path for path in (PACKAGE / "preflight" / "checks").glob("*.py") if "\ndef probe(" in path.read_text()]
    probes = [each for each in every_import() if each.path.parent == PACKAGE / "preflight" / "probes" or each.path in checks]
    wrong = [str(found) for found in probes if found.eager and found.distribution not in light]
    assert probes and not wrong, "\n".join(wrong)


ATTACHES = (
    "import accelerate, chaosrun, chaosrun.protocol.recorder, chaosrun.protocol.worker, torch; "
    "accelerator = accelerate.Accelerator(cpu=True); model = torch.nn.Linear(1, 1); "
    "accelerator.prepare(model, torch.optim.SGD(model.parameters())); chaosrun.attach(accelerator)"
)


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import chaosrun", ["torch", "ray", "pydantic", "accelerate", "numpy"]),
        ("import chaosrun.cli", ["torch", "ray", "pydantic", "accelerate", "numpy", "msgspec"]),
        ("import chaosrun.integrations.pytest_plugin", ["torch", "ray", "pydantic", "accelerate", "numpy", "rich", "jinja2"]),
        (
            "import chaosrun.verify.verdict, chaosrun.supervise.lifecycle, chaosrun.cluster.forkserver, "
            "chaosrun.preflight.engine, chaosrun.preflight.conduct",
            ["torch", "ray", "accelerate"],
        ),
        # Ray reads at its import whether its own handler of SIGTERM is wanted: `Interrupts` must come first.
        (
            "import chaosrun.campaign.sweep, chaosrun.campaign.suite_run, chaosrun.campaign.shrink, "
            "chaosrun.supervise.process, chaosrun.integrations.testing",
            ["ray"],
        ),
        ("import chaosrun.cluster.probe_agent, chaosrun.cluster.probing", ["torch", "ray", "pydantic", "rich", "numpy"]),
        # Each restart would wait for it.
        (ATTACHES, ["torch.distributed.checkpoint", "ray"]),
    ],
)
def test_what_an_import_loads(statement: str, unwanted: list[str]) -> None:
    question = f"import sys; {statement}; print(*[name for name in {unwanted} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True, cwd=ROOT)
    assert answer.stdout.split() == []


def test_exported_names() -> None:
    assert chaosrun.__all__ == [
        "Session",
        "__version__",
        "attach",
        "dataloader_configuration",
        "reproducible",
        "sample_rng",
        "sample_streams",
    ]
    assert all(getattr(chaosrun, name) is not None for name in chaosrun.__all__)
    with pytest.raises(AttributeError, match="submit"):
        chaosrun.submit  # noqa: B018


def test_every_module_says_what_it_owns() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sources()}
    silent = [path for path, text in texts.items() if text.strip() and not ast.get_docstring(parsed(text))]
    assert not silent, f"without a docstring: {silent}"


def test_modules_are_named_by_their_subject() -> None:
    paths = [*sources(), *job_sources()]
    nameless = [str(path.relative_to(ROOT)) for path in paths if FORBIDDEN_NAMES & set(re.split("[_.]", path.name))]
    assert not nameless


def test_files_hold_one_subject() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in [*sources(), *job_sources()]}
    too_long = {path: length for path, length in lengths.items() if length > LONGEST_FILE_LINES}
    assert not too_long


def test_functions_fit_on_a_screen() -> None:
    too_long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in {*sources()} - {*job_sources()}
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION_LINES
    ]
    assert not too_long, "\n".join(too_long)


def test_jobs_see_only_what_chaosrun_exports() -> None:
    inside = [str(found) for path in job_sources() for found in imports_of(path) if found.room is not None]
    assert not inside, "\n".join(inside)


def job_sources() -> list[Path]:
    """Training scripts."""
    found = sorted((ROOT / "jobs").rglob("*.py"))
    assert found
    templates = (PACKAGE / "integrations" / "templates").rglob("*.py")
    return [*found, *templates, PACKAGE / "preflight" / "drills" / "job" / "train.py"]


FOREIGN_TEXTS = {
    "verify/recovery.py",  # what torch and the operating system say in an error of the script
    "verify/inspection.py",  # names of files
    "verify/libraries.py",  # versions of libraries
    "verify/alignment.py",  # names of files that a script saves
    "verify/suspects.py",  # names of entries in them
    "verify/plain_values.py",  # names of a script's variables and attributes
    "verify/left.py",  # likewise
    "report/page.py",  # float.hex()
    "report/next_commands.py",  # a file's byte order mark
    "report/picture.py",  # names of phases and folders
    "report/markdown.py",  # escapes markup
    "report/diagnosis.py",  # names of quantities
    "report/escapes.py",  # escapes commands to a terminal
    "report/follow.py",  # names of files
    "report/junit.py",  # what XML cannot hold
    "report/write.py",  # names of files
    "report/logs.py",  # names of files, and what workers print
    "report/metrics.py",  # the host and port that were asked for
}
"""Files of the rooms that judge and tell which look into texts, and whose texts those are: never chaosrun's own sentences."""
PARSES = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"}


def parses_text(source: str) -> bool:
    """Whether it takes texts apart, by `re` or by their beginnings and ends."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Attribute) and node.attr in PARSES:
            return True
        if isinstance(node, ast.Import) and any(alias.name == "re" for alias in node.names):
            return True
    return False


def test_nobody_parses_a_sentence_of_ours() -> None:
    """Who decides by a cause looks at its code, see `verify.codes`."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in sources()
        if room_of(path) in ("verify", "report") and parses_text(path.read_text())
    }
    assert found == FOREIGN_TEXTS


def test_a_parsed_sentence_is_seen() -> None:
    assert parses_text("import re\nre.search('x', cause)")
    assert parses_text("if verdict.cause.startswith('the reference of run '): pass")
    assert not parses_text("if verdict.code == 'reference_of_another_job': pass")


if __name__ == "__main__":
    TABLE.write_text(json.dumps({room: sorted(others) for room, others in sorted(used_edges().items())}, indent=1) + "\n")
