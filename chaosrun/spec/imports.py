"""Finds missing modules that a script or the job's preloads import, without importing anything. Only imports that always run
count: at the top level, outside try and if. A script that changes sys.path is not checked.
"""

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from chaosrun.spec.job_file import Job
from chaosrun.spec.launch import attaches, problem_of_script, program_file, syntax_tree
from chaosrun.spec.places import Problem

LOOKS_ELSEWHERE = re.compile(rb"sys\.(path|meta_path|modules)|addsitedir")
ATTACH = re.compile(rb"\battach\b")
MOST_FILES = 300
"""At most so many files of the script's folder are searched for a call of chaosrun.attach."""


def missing_imports(job: Job) -> Iterator[Problem]:
    """Imports that fail at each start, and a script that imports chaosrun and never attaches."""
    path = job.spec.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    places = [str(job.directory / part) for part in path.split(os.pathsep) if part]
    for number, name in enumerate(job.spec.recovery.preload):
        if not _is_found(name, places):
            hint = "it is looked for among the installed packages, and in env: {PYTHONPATH: …}"
            yield job.problem(f"recovery.preload[{number}]", f"recovery.preload: no module {name.partition('.')[0]}", hint)
    script = job.script_path
    if script.suffix != ".py" or not _runs_here(job):
        return
    source = script.read_bytes()
    text = source.decode(errors="replace")
    beside = str(job.directory if job.spec.module else script.parent)
    if not LOOKS_ELSEWHERE.search(source):
        for node, name in _imports(syntax_tree(source)):
            if not _is_found(name, [beside, *places]):
                message = f"ModuleNotFoundError: No module named {name.partition('.')[0]!r}"
                hint = f"install it in {sys.prefix}, where chaosrun is, or name its folder in env: {{PYTHONPATH: …}}"
                yield problem_of_script(script, text, message, hint, node.lineno - 1, node.col_offset)
    if job.spec.by == "chaosrun" and attaches(script) and not _mentions_attach(script):
        message = f"{script.name} imports chaosrun, and nothing beside it calls chaosrun.attach"
        hint = "run = chaosrun.attach(accelerator) after prepare(); of one that saves and resumes itself, resume: {by: script}"
        yield job.problem("script", message, hint)


def _runs_here(job: Job) -> bool:
    """Whether the job runs with this Python, as scripts that chaosrun starts and commands of this environment do."""
    if not job.spec.command:
        return True
    program = program_file(job.spec.command[0], job.directory)
    return program is not None and os.path.dirname(program) == os.path.dirname(sys.executable)


def _imports(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node, node.module


def _is_found(name: str, places: Sequence[str]) -> bool:
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or PathFinder.find_spec(top, places):
        return True
    try:
        return importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):  # a package loaded in this process without a spec
        return top in sys.modules


def _mentions_attach(script: Path) -> bool:
    files = (path for number, path in enumerate(script.parent.rglob("*.py")) if number < MOST_FILES)
    return any(ATTACH.search(path.read_bytes()) for path in (script, *files) if os.access(path, os.R_OK))
