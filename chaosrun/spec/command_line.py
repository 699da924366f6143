"""A job without a file: turns the words of a command line into the text of a job file.

Decides what may be omitted there and what is guessed instead; each guess is reported. Must not know how the text is read.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path

from chaosrun.errors import UsageError
from chaosrun.spec import tree
from chaosrun.spec.fields import job_name
from chaosrun.spec.fragment import Entry, flow
from chaosrun.spec.launch import attaches, program_file
from chaosrun.spec.overrides import apply_overrides
from chaosrun.spec.places import SourceText, spec_error
from chaosrun.spec.tree import quoted

JOB_FILES = (".yaml", ".yml")
STRIKE = re.compile(r"(?P<rank>[0-9]{1,6}|all|random)@(?P<step>[0-9]{1,9})(:(?P<phase>[a-z][a-z.]*))?")
PER_NODE = ("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes", "--num_gpus")
"""How launchers are told the number of ranks: torchrun, accelerate, deepspeed."""
PARALLEL = re.compile(
    rb"^(?:\s*(?:from|import(?:[^\n#]*,)?)\s+|[^\n#]*(?=torch\.distributed))"
    rb"(torch\.distributed|accelerate|transformers|lightning|pytorch_lightning|deepspeed)\b",
    re.MULTILINE,
)
"""Imports and names in a script that show that it trains on several ranks."""
STARTS_RANKS = re.compile(
    rb"^[^#\n]*\b(?:(?:mp|multiprocessing)\.(?:spawn|start_processes)|(?:notebook|debug)_launcher)\s*\("
    rb"|^\s*from\s+torch\.multiprocessing\s+import\b[^#\n]*\b(?:spawn|start_processes)\b",
    re.MULTILINE,
)
"""By these a script starts its ranks itself, …"""
IS_TOLD_RANK = re.compile(
    rb"^[^#\n]*(?:(?:environ(?:\.get\(|\[)|getenv\()\s*['\"](?:LOCAL_)?(?:RANK|WORLD_SIZE)['\"](?!\]\s*=[^=])"
    rb"|['\"](?:LOCAL_)?(?:RANK|WORLD_SIZE)['\"]\s+(?:not\s+)?in\b)",
    re.MULTILINE,
)
"""… but for one that looks whether a launcher has."""
NPROCS = re.compile(rb"\bn(?:um_)?proc(?:esse)?s\s*=\s*([1-9][0-9]{0,3})\b")
NUM_PROCESSES = re.compile(r"^num_processes: ([1-9][0-9]{0,3})\b", re.MULTILINE)
"""In the configuration of accelerate, as `accelerate config` writes it."""
ONE_PROCESS = re.compile(r"^distributed_type: ['\"]?(NO|MULTI_CPU)\b", re.MULTILINE)
"""One process, whatever number it gives: on CPUs accelerate leaves several to mpirun."""
GUESSED_WORKERS = 2
LAUNCHING_PACKAGES = frozenset({"torch", "accelerate", "deepspeed", "lightning", "torchx"})
"""Packages with modules that start several ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options that stand for keys of a job file."""

    workers: int | None = None
    kill: tuple[str, ...] = ()
    """RANK@STEP or RANK@STEP:PHASE."""
    preempt: tuple[str, ...] = ()
    """RANK@STEP."""

    def faults(self) -> "Iterator[tuple[Entry, str]]":
        """The entry of each fault, and the option that requested it. Raises UsageError."""
        for option, kind, written in (("--kill", "kill", self.kill), ("--preempt", "preempt", self.preempt)):
            for text in written:
                match = STRIKE.fullmatch(text)
                if match is None or (kind == "preempt" and match["phase"]):
                    form = "RANK@STEP" if kind == "preempt" else "RANK@STEP or RANK@STEP:PHASE"
                    raise UsageError(
                        f"{option} {text!r} is not of the form {form}", hint=f"such as {option} 1@65; a rank, all or random"
                    )
                rank = int(match["rank"]) if match["rank"].isdecimal() else match["rank"]
                entry: dict[str, int | float | str | None] = {} if kind == "kill" else {"kind": kind}
                entry |= {"rank": rank, "at_step": int(match["step"])}
                yield {**entry, **({"phase": match["phase"]} if match["phase"] else {})}, f"{option} {text}"

    def overrides(self) -> list[str]:
        """The same as overrides of a job file."""
        changes = [] if self.workers is None else [f"workers={self.workers}"]
        return changes + [f"faults.schedule[]={flow(entry)}" for entry, _ in self.faults()]

    def words(self) -> list[str]:
        workers = [] if self.workers is None else ["--workers", str(self.workers)]
        return workers + [word for _, written in self.faults() for word in written.split()]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedJob:
    """A job given on the command line: the contents of its file."""

    sections: dict[str, str]
    """The text of each key."""
    words: tuple[str, ...]
    """The words typed after `chaosrun submit`, without changes."""
    directory: Path
    """Absolute: the working directory of the command, where its relative paths start."""
    guesses: tuple[str, ...]
    """Guesses for omitted values, one sentence each."""

    label = "the command line"

    def with_changes(self, changes: Sequence[str]) -> list[str]:
        """The typed words, with further changes to the job inserted in the right place."""
        dashes = self.words.index("--") if "--" in self.words else len(self.words)
        return [*self.words[:dashes], *changes, *self.words[dashes:]]

    @property
    def command(self) -> str:
        return shlex.join(["chaosrun", "submit", *self.words])

    def text(self, *, anywhere: bool) -> str:
        """The text as a job file; `anywhere`: with the directory in it, so that the file may be stored elsewhere."""
        parts = [f"{_comment(f'what was typed: {self.command}').lstrip()}\n", *self.sections.values()]
        if anywhere:
            parts.insert(2, f"directory: {flow(str(self.directory))}\n")
        return "".join(parts)


def is_job_file(name: Path) -> bool:
    """Whether it is read as a job file: a Python file is a script, any other existing file a job file."""
    is_program = name.is_file() and name.read_bytes()[:2] == b"#!"
    return name.suffix in JOB_FILES or (name.suffix != ".py" and name.exists() and not is_program)


def typed_job(script: Path | None, after: Sequence[str], asked: JobOptions, directory: Path) -> TypedJob:
    """The job of a script with its arguments, or (None) of a command. Raises UsageError if it cannot be a job."""
    if script is not None and script.suffix != ".py":
        if program_file(str(script), directory) or (directory / script).is_file():
            here = "./" if (directory / script).is_file() and "/" not in str(script) else ""
            hint = f"a command comes after two dashes: chaosrun submit -- {here}{script} …"
            raise UsageError(f"{script} is neither a job file nor a Python script, but a program", hint=hint)
        hint = "name a job file (.yaml) or a script (.py), or a command after two dashes: -- torchrun train.py"
        raise UsageError(f"no such job file: {script}", hint=hint)
    if script is None and not after:
        hint = "such as train.py --workers 3 -- --epochs 3, or -- torchrun train.py; see `chaosrun submit --help`"
        raise UsageError("nothing to drill: neither a job file nor a script nor a command", hint=hint)
    words = (*([str(script)] if script else []), *asked.words(), *(["--", *after] if after else []))
    key, started, arguments = ("command", "", after) if script is None else ("script", str(script), after)
    guesses: list[str] = []
    plain = None if script is not None else _without_launcher(after)
    program = script if script is not None else Path(plain[1]) if plain and plain[0] == "script" else None
    its_own = None if program is None else _ranks_of_its_own(directory / program)
    if its_own is not None and script is not None:
        key, started, arguments = "command", "", [_this_python(), str(script), *after]
        guesses.append(f"command: {shlex.join(arguments)}, as {script} starts its ranks itself")
    elif its_own is None and plain and (asked.workers or 1) > 1:
        key, started, arguments = plain
        guesses.append(f"{key}: {started}, which chaosrun starts on each rank, as this command starts one alone")
    if its_own is not None:
        workers, why = (asked.workers, None) if asked.workers is not None else its_own
    elif key == "command":
        workers, why = _workers_of_command(after, asked.workers)
    else:
        workers, why = (asked.workers, None) if asked.workers is not None else _workers_of_script(directory / started)
    guesses += [f"workers: {workers}, {why}"] if why else []
    sections = {"name": f"name: {flow(_name([started] if started else arguments))}\n"}
    sections[key] = f"{key}: {flow(started) if started else quoted(arguments)}\n"
    if started and arguments:
        sections["args"] = f"args: {quoted(arguments)}\n"
    sections["workers"] = f"workers: {workers}{_comment(why)}\n"
    if key == "script" and not attaches(directory / started):
        why = f"{started} does not import chaosrun: its own checkpoints and resume code are tested"
        guesses.append(f"resume by: the script, as {why}")
        sections["resume"] = f"resume: {{by: script}}{_comment(why)}\n"
    if faults := list(asked.faults()):
        entries = "".join(f"    - {flow(entry)}{_comment(written)}\n" for entry, written in faults)
        sections["faults"] = f"faults:\n  schedule:\n{entries}"
    return TypedJob(sections=sections, words=words, directory=directory.resolve(), guesses=tuple(guesses))


def _without_launcher(words: Sequence[str]) -> tuple[str, str, Sequence[str]] | None:
    """The target of `python train.py` or `python -m package.train`, where that Python is this one: key, its value,
    arguments."""
    found = program_file(words[0], Path.cwd())
    if found is None or os.path.realpath(found) != os.path.realpath(sys.executable):
        return None
    if len(words) > 2 and words[1] == "-m" and words[2].partition(".")[0] not in LAUNCHING_PACKAGES:
        return "module", words[2], words[3:]
    return ("script", words[1], words[2:]) if len(words) > 1 and words[1].endswith(".py") else None


def _this_python() -> str:
    """The word for this interpreter in a command."""
    found = program_file("python", Path.cwd())
    return "python" if found and os.path.realpath(found) == os.path.realpath(sys.executable) else sys.executable


def _ranks_of_its_own(script: Path) -> tuple[int, str] | None:
    """The number of ranks that a script starts itself, and why. None: as far as its text shows, it is started once per rank."""
    try:
        text = script.read_bytes()
    except OSError:
        return None  # loading the job reports why
    if STARTS_RANKS.search(text) is None or IS_TOLD_RANK.search(text):
        return None
    said = NPROCS.search(text)
    if said is None:
        return GUESSED_WORKERS, "as the script starts its ranks itself; --workers says how many"
    return int(said[1]), f"as the script starts its ranks itself, {said[0].decode()}; --workers says otherwise"


def _workers_of_script(script: Path) -> tuple[int, str]:
    """The number of workers, and why."""
    try:
        found = PARALLEL.search(script.read_bytes())
    except OSError:
        found = None  # loading the job reports why
    if found is None:
        return 1, "as the script imports nothing that trains on several ranks; --workers says otherwise"
    return GUESSED_WORKERS, f"as the script imports {found[1].decode()}; --workers says otherwise"


def _workers_of_command(words: Sequence[str], asked: int | None) -> tuple[int, str | None]:
    """The number of workers, and why, if it was guessed. Raises UsageError if the command and --workers contradict each
    other."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word.endswith(".py"):
            break  # from here on the words are the script's
        if name not in PER_NODE:
            continue
        value = value if equals else "".join(words[index + 1 : index + 2])
        if not value.isdecimal():
            if asked is None:
                raise UsageError(f"{name} {value}: chaosrun cannot tell how many ranks that is", hint="say it: --workers 3")
            return asked, None
        if asked is not None and asked % max(1, int(value)):
            hint = "leave --workers out, or write {workers_per_node} in the place of the number"
            raise UsageError(f"--workers {asked} does not agree with {name} {value} of the command", hint=hint)
        return (int(value), f"as the command says {name} {value}") if asked is None else (asked, None)
    if asked is not None:
        return asked, None
    return _by_accelerate(words) or (1, "as the command names no number of ranks; --workers says otherwise")


def _by_accelerate(words: Sequence[str]) -> tuple[int, str] | None:
    """The number of processes that the configuration of `accelerate launch` gives; None without such a command or a number."""
    own = list(takewhile(lambda word: not word.endswith(".py"), words))
    if not any(Path(word).name == "accelerate" or word.startswith("accelerate.commands") for word in own) or "--cpu" in own:
        return None
    cache = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    named = f"{cache}/accelerate/default_config.yaml"
    for word, after in pairwise([*own, ""]):
        name, equals, value = word.partition("=")
        if name in ("--config_file", "--config-file"):
            named = value if equals else after
    file = Path(named).expanduser()
    try:
        text = file.read_text()
    except (OSError, ValueError):
        return None  # accelerate will report why
    found = None if ONE_PROCESS.search(text) else NUM_PROCESSES.search(text)
    return (int(found[1]), f"as {file} says {found[0]}; --workers says otherwise") if found else None


def _name(words: Sequence[str]) -> str:
    """The job's name: from the Python file or module that is started, else from the program."""
    modules = [after for word, after in pairwise(words) if word in ("-m", "--module")]
    files = [word for word in words if word.endswith(".py")]
    return job_name(Path((files or modules or list(words))[0]).name.removesuffix(".py"))


def _comment(why: str | None) -> str:
    """The reason as a YAML comment of one line."""
    return f"    # {''.join(each if each.isprintable() else ' ' for each in why)}" if why else ""


def keep(job: TypedJob, changes: Sequence[str], path: Path) -> None:
    """Write the job file, with the `changes` of the command line in it. Raises UsageError if the path exists."""
    if path.suffix not in JOB_FILES:
        raise UsageError(f"--write {path}: a job file ends in .yaml", hint="such as --write job.yaml")
    elsewhere = path.absolute().parent.resolve() != job.directory
    text = _changed(job, changes).text(anywhere=elsewhere)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"--write {path}: it is there already", hint="name another file, or submit this one") from error
    except OSError as error:
        if path.is_file():  # the disk is full
            path.unlink()
        raise UsageError(f"--write {path}: {error.strerror}", hint="name a file that can be written") from error


def _changed(job: TypedJob, changes: Sequence[str]) -> TypedJob:
    """The sections, with each changed key rewritten. Raises SpecError."""
    root, _ = tree.read_tree(SourceText(label=job.label, text=job.text(anywhere=False), is_file=False))
    assert isinstance(root, tree.Mapping)
    changed, problems = apply_overrides(root, changes)
    if problems:
        raise spec_error(problems)
    new = {
        key: f"{key}: {tree.flow(entry.value)}\n"
        for key, entry in changed.entries.items()
        if key not in root.entries or entry.value is not root.entries[key].value
    }
    return replace(job, sections={**job.sections, **new})
