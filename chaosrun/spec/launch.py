"""Checks what a job starts (script, module or command) as files, before anything runs.

Nothing is imported or executed: a Python file is compiled, a program is looked up as a shell would.
"""

import ast
import difflib
import os
import re
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from collections.abc import Sequence as AnySequence
from importlib.machinery import PathFinder
from pathlib import Path

from chaosrun.spec.files import files_like
from chaosrun.spec.places import LINE_BREAK, Place, Problem, SourceText
from chaosrun.spec.tree import Mapping, Scalar, Sequence, child, name_in

ATTACHES = re.compile(rb"^\s*(?:from|import(?:[^\n#]*,)?)\s+chaosrun\b", re.MULTILINE)
LOADS = re.compile(r"(^|\.)(torch\.load|load_state|load_checkpoint|dcp\.load|checkpoint\.load|load_file|load_model)$")
LOADING_WORDS = ("resume_from_checkpoint", "ckpt_path")
"""Arguments of trainers that name a checkpoint."""
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
PLACEHOLDERS = ("output",)
OF_A_COMMAND = ("node_rank", "nodes", "master_addr", "master_port", "workers_per_node")
"""Placeholders that are filled in on each node."""
TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
NEAR = 0.75
"""How similar a word in braces has to be to a placeholder to be taken for a misspelt one, from 0 to 1."""


_PARSES = threading.Lock()


def syntax_tree(source: bytes) -> ast.Module:
    """As `ast.parse`, one thread at a time: CPython counts the depth of a tree globally, and raises a SystemError when two
    threads build one at once (seen with 3.11.7; drills of a sweep run in parallel). Raises SyntaxError, ValueError."""
    with _PARSES:
        return ast.parse(source)


def attaches(script: Path) -> bool:
    """Whether a script lets chaosrun save and resume; False if it cannot be read."""
    try:
        return ATTACHES.search(script.read_bytes()) is not None
    except OSError:
        return False


def own_loads(script: Path) -> tuple[str, ...]:
    """Where a script loads checkpoints by itself, as far as its text shows: "torch.load, line 12"."""
    try:
        tree = syntax_tree(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [(call.lineno, name) for call in calls if LOADS.search(name := ast.unparse(call.func))]
    told = [
        (call.lineno, f"{word.arg}=")
        for call in calls
        for word in call.keywords
        if word.arg in LOADING_WORDS and not (isinstance(word.value, ast.Constant) and not word.value.value)
    ]
    return tuple(f"{name}, line {line}" for line, name in sorted(found + told))


def launch_problems(root: Mapping, directory: Path) -> Iterator[Problem]:
    """Problems that keep the job from starting; values of a wrong type are left to the validation."""
    script, module, command = (child(root, key) for key in ("script", "module", "command"))
    if isinstance(script, Scalar) and name_in(script):
        yield from _script_problems(script, directory)
    if isinstance(module, Scalar) and name_in(module):
        yield from _module_problems(module, directory)
    if isinstance(command, Sequence) and command.items:
        first = command.items[0]
        if isinstance(first, Scalar) and first.text and "\0" not in first.text:
            yield from _program_problems(first, directory)
        script = next((item for item in command.items if isinstance(item, Scalar) and item.text.endswith(".py")), None)
        if script is not None and " " in script.text and not (directory / script.text).exists():
            script = None  # the text that a shell runs
        if script is not None and script is not first and "{" not in script.text:
            yield from _script_problems(script, directory)
        yield from _nodes_problems(root, [item for item in command.items if isinstance(item, Scalar)])
    yield from _placeholder_problems(root)


def _nodes_problems(root: Mapping, words: AnySequence[Scalar]) -> Iterator[Problem]:
    """A torchrun for several nodes without {node_rank}: the same command on each node would wait for the others forever."""
    end = next((at for at, word in enumerate(words) if word.text.endswith(".py")), len(words))
    start = next((at for at, word in enumerate(words[:end]) if os.path.basename(word.text) in TORCHRUN), end)
    env = child(root, "env")
    variables = [*os.environ, *(env.entries if isinstance(env, Mapping) else ())]
    finds_others = any(word.text.startswith(("--rdzv", "--standalone")) or "{node_rank}" in word.text for word in words)
    if finds_others or any(name.startswith("PET_") for name in variables):  # torchrun's options, as variables
        return
    for at, word in enumerate(words[start:end], start):
        name, equals, value = word.text.partition("=")
        value = value if equals else "".join(after.text for after in words[at + 1 : at + 2])
        if name == "--nnodes" and value.isdecimal() and int(value) > 1:
            yield Problem(
                place=word.place,
                message=f"{name} {value}: the command is started once on each node, and does not say which of them it is on",
                hint="write --nnodes {nodes} --node-rank {node_rank} --master-addr {master_addr} --master-port {master_port}, "
                "or leave it out: one node needs none",
            )


def program_file(name: str, directory: Path) -> str | None:
    """The file of a command's program: on the PATH, or next to this Python."""
    beside = os.path.dirname(sys.executable)
    return shutil.which(str(directory / name) if "/" in name else name) or shutil.which(name, path=beside)


def first_file(root: Mapping, directory: Path) -> Path | None:
    """The file that begins the training: the script's, the module's, or the first that a command names, Python files first."""
    command = child(root, "command")
    named: list[Path | str | None] = []
    if script := name_in(child(root, "script")):
        named = [directory / script]
    elif module := name_in(child(root, "module")):
        named = [_module_file(module, directory)]
    elif isinstance(command, Sequence):
        words = [item.text for item in command.items if isinstance(item, Scalar)]
        named = [directory / word for word in sorted(words[1:], key=lambda word: not word.endswith(".py"))]
        named += [program_file(words[0], directory)] if words else []
    return next((Path(path).resolve() for path in named if path and os.path.isfile(path)), None)


def meaningless(root: Mapping, by: str, script: Path | None) -> Iterator[Problem]:
    """Keys about how chaosrun saves and resumes, in a job that does so by itself, and vice versa."""
    if by == "script":
        why = "the job resumes by itself"
        if "resume" not in root.entries and script is not None:
            why = f"{script.name} does not import chaosrun, so it resumes by itself"
        hint = "leave it out; or have chaosrun save and resume, with chaosrun.attach in the script"
        keys = [(root, "checkpoint"), (root, "data")]
    else:
        why, hint = "chaosrun saves and resumes", "leave it out; resume: {by: script} is for scripts that do so themselves"
        keys = [(root, "outputs"), *((child(root, "resume"), key) for key in ("args", "env"))]
    for parent, key in keys:
        if isinstance(parent, Mapping) and key in parent.entries:
            name = key if parent is root else f"resume.{key}"
            yield Problem(place=parent.entries[key].key, message=f"{name} means nothing here: {why}", hint=hint)


def _script_problems(node: Scalar, directory: Path) -> Iterator[Problem]:
    script = directory / node.text
    # os.path returns False for an invalid path, pathlib raises.
    if os.path.isfile(script):
        yield from _syntax_problems(script)
    elif os.path.isdir(script):
        yield Problem(place=node.place, message=f"the script {script} is a directory", hint="name the Python file itself")
    else:
        hint = files_like(script) or "a script is a path relative to the directory of the job"
        yield Problem(place=node.place, message=f"no such script: {script}", hint=hint)


def _module_problems(node: Scalar, directory: Path) -> Iterator[Problem]:
    path = _module_file(node.text, directory)
    if path is None:
        hint = f"it is looked for as `python -m` would in {directory}, and among the installed packages"
        yield Problem(place=node.place, message=f"no module {node.text}, or none that can be run", hint=hint)
    elif path.suffix == ".py":
        yield from _syntax_problems(path)


def _module_file(name: str, directory: Path) -> Path | None:
    """The file that `python -m` would execute. Parent packages are found, not imported."""
    places: list[str] | None = [str(directory), *sys.path]
    parts = name.split(".")
    spec = None
    for number, part in enumerate(parts, start=1):
        if places is None or not part.isidentifier():
            return None
        spec = PathFinder.find_spec(part, places)
        places = None if spec is None or spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        if spec is None or (number < len(parts) and places is None):
            return None
    if places is not None:
        spec = PathFinder.find_spec("__main__", places)
    return Path(spec.origin) if spec is not None and spec.origin else None


def _program_problems(node: Scalar, directory: Path) -> Iterator[Problem]:
    """Problems of a command's program. A relative path starts at the directory; a name is searched on the PATH, and next to
    this Python."""
    program = node.text
    if "/" in program:
        path = directory / program
        if not os.path.isfile(path):
            yield Problem(place=node.place, message=f"no such program: {path}", hint=files_like(path))
        elif not os.access(path, os.X_OK):
            hint = f"chmod +x {path}, or begin the command with what runs it, such as [bash, {program}]"
            yield Problem(place=node.place, message=f"{path} is not executable", hint=hint)
    elif program_file(program, directory) is None:
        hint = "install it in this environment, or write its path"
        if program.endswith(".py"):
            hint = f"begin the command with what runs it: [python, {program}], or write script: {program}"
        yield Problem(place=node.place, message=f"no such program: {program} is not on the PATH", hint=hint)


def _syntax_problems(path: Path) -> Iterator[Problem]:
    """Why Python could not compile the file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        yield problem_of_script(path, "", f"it cannot be read: {error.strerror}", "check its permissions")
        return
    # A zip may follow a line for the shell; compiled code begins with two bytes of its Python's version.
    if b"PK\3\4" in data or (data[2:4] == b"\r\n" and data[5:8] == b"\0\0\0"):
        yield problem_of_script(path, "", "it holds no text: a zip, or compiled", "name the source that it was made from")
        return
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0"))
        yield problem_of_script(path, "", "a NUL byte in its text", "remove it: Python cannot compile it", line)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(data, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        message = f"{type(error).__name__}: {error.msg}"
        line, column = max(1, error.lineno or 1), max(1, error.offset or 1)
        text = data.decode("utf-8", errors="replace")
        yield problem_of_script(path, text, message, "Python cannot compile it: nothing was started", line - 1, column - 1)
    except (ValueError, RecursionError, MemoryError) as error:
        yield problem_of_script(path, "", f"Python cannot compile it: {error}", "nothing was started")


def problem_of_script(path: Path, text: str, message: str, hint: str, line: int = 0, column: int = 0) -> Problem:
    """A problem at a line and column of `path`, counted from 0."""
    # Python's lines are not YAML's: form feeds and the like do not end one.
    lines = [LINE_BREAK.sub(" ", each) for each in re.split(r"\r\n|[\n\r]", text)]
    source = SourceText(label=str(path), text="\n".join(lines), order=2)
    return Problem(place=Place(source=source, line=line, column=column, end=column + 1), message=message, hint=hint)


def _placeholder_problems(root: Mapping) -> Iterator[Problem]:
    """Misspelt placeholders, and those that cannot be filled in for this job."""
    is_command = "command" in root.entries
    known = PLACEHOLDERS + OF_A_COMMAND if is_command else PLACEHOLDERS
    for item in _texts(root):
        for name in PLACEHOLDER.findall(item.text):
            if name in known:
                continue
            if name in OF_A_COMMAND:
                hint = "torch.distributed finds the same in the environment that every rank is given"
                yield Problem(place=item.place, message=f"{{{name}}} is filled in for a command alone", hint=hint)
            elif close := difflib.get_close_matches(name, known, n=1, cutoff=NEAR):
                yield Problem(place=item.place, message=f"no placeholder {{{name}}}", hint=f"did you mean {{{close[0]}}}?")


def _texts(root: Mapping) -> Iterator[Scalar]:
    """The texts that may contain placeholders: args, env and command, and those of resume."""
    paths = (("args",), ("env",), ("command",), ("resume", "args"), ("resume", "env"))
    for node in (child(root, *path) for path in paths):
        inner = [entry.value for entry in node.entries.values()] if isinstance(node, Mapping) else ()
        for item in node.items if isinstance(node, Sequence) else inner:
            if isinstance(item, Scalar):
                yield item
