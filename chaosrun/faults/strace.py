"""strace: the command that shows every file change of a process, and the parser of its lines.

Attached to a running process, it sees what native code does (C++ of torch.save, Rust of safetensors) as well as Python. Knows
nothing of faults. Standard library only, except for the record of an operation.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaosrun.errors import ResourcesError
from chaosrun.records.operations import FileOperation, OperationKind

WRITES = (
    *("write", "writev", "pwrite64", "pwritev", "pwritev2", "sendfile", "copy_file_range"),
    *("truncate", "ftruncate", "fallocate"),
)
SYNCS = ("fsync", "fdatasync", "sync", "syncfs", "msync", "sync_file_range")
_NAMES = ("openat", "renameat", "renameat2", "linkat", "symlinkat", "unlinkat", "mkdirat")
# System calls that newer architectures lack.
_OLD_NAMES = ("open", "creat", "rename", "link", "symlink", "unlink", "mkdir", "rmdir")
CALLS = ",".join([*WRITES, *SYNCS, *_NAMES, *(f"?{name}" for name in _OLD_NAMES)])
HINT = "install strace (apt-get install strace), and let processes be traced: a container may need --cap-add SYS_PTRACE"
_LINE = re.compile(r"(\d+) +(\d+\.\d+) (.*)")
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+|\?)(.*)", re.DOTALL)
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)", re.DOTALL)
_UNFINISHED = " <unfinished ...>"
_PATHS = re.compile(r'(?P<of>AT_FDCWD|\d+)<(?P<fd>(?:[^<>\\]|\\.)*)>|"(?P<text>(?:[^"\\]|\\.)*)"')


def expect_strace() -> None:
    """Raises ResourcesError where strace is missing or not permitted to trace."""
    found = shutil.which("strace")
    if found is None:
        raise ResourcesError("a fault inside the script's own save needs strace, which is not installed here", hint=HINT)
    tried = subprocess.run([found, "-qq", "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        said = tried.stderr.strip().splitlines()[-1:] or [f"exit code {tried.returncode}"]
        raise ResourcesError(
            f"a fault inside the script's own save needs strace, which cannot trace here: {said[0]}", hint=HINT
        )


def command(pid: int, log: str, *more: str) -> list[str]:
    """The strace command that attaches to a process, its threads and children, and writes a line for each call into `log`."""
    return ["strace", "-f", "-y", "-ttt", "-s", "0", "-o", log, "-e", f"trace={CALLS}", *more, "-p", str(pid)]


@dataclass(slots=True)
class Reader:
    """Turns strace's lines into operations on files below `outputs`."""

    outputs: Sequence[str]
    save: int
    stopped: int | None = None
    """The thread that, according to the last line, was stopped by the SIGSTOP injected into its call."""
    _count: int = 0
    _pending: dict[str, str] = field(default_factory=dict)
    _signalled: set[str] = field(default_factory=set)

    def read(self, line: str) -> FileOperation | None:
        """The operation on the outputs that one line reports, if any."""
        self.stopped = None
        match = _LINE.fullmatch(line.rstrip("\n"))
        if match is None:
            return None
        thread, time_s, said = match.groups()
        if said.startswith("--- "):
            self._see_signal(thread, said)
            return None
        if said.endswith(_UNFINISHED):
            self._pending[thread] = said.removesuffix(_UNFINISHED)
            return None
        if resumed := _RESUMED.fullmatch(said):
            said = self._pending.pop(thread, "") + resumed[1]
        call = _CALL.fullmatch(said)
        if call is None or call[3] == "?":
            return None
        return self._operation(call, int(thread), float(time_s))

    def _see_signal(self, thread: str, said: str) -> None:
        if said.startswith("--- SIGSTOP") and "SI_KERNEL" in said:
            self._signalled.add(thread)
        elif said.startswith("--- stopped by SIGSTOP") and thread in self._signalled:
            self._signalled.discard(thread)
            self.stopped = int(thread)

    def _operation(self, call: re.Match[str], thread: int, time_s: float) -> FileOperation | None:
        name, arguments, result, rest = call.groups()
        injected = rest.endswith("(INJECTED)")
        if result.startswith("-") and not injected:
            return None
        change = _change(name, arguments, thread)
        if change is None or not any(self._concerns(path) for path in change[1:] if path is not None):
            return None
        failed = rest.split()[0] if injected and result.startswith("-") else None
        self._count += failed is None
        kind, path, target = change
        size = int(result) if kind == "write" and name != "fallocate" else _new_size(arguments) if kind == "truncate" else 0
        return FileOperation(
            number=0 if failed else self._count,
            save=self.save,
            kind=kind,
            path=path,
            target=target,
            size=max(0, size),
            time_s=time_s,
            process=thread,
            failed=failed,
        )

    def _concerns(self, path: str) -> bool:
        return path == "/" or any(path == output or path.startswith(output + "/") for output in self.outputs)


_ONE_NAME: dict[str, OperationKind] = {
    "creat": "create",
    "mkdir": "mkdir",
    "mkdirat": "mkdir",
    "rmdir": "rmdir",
    "unlink": "remove",
    "truncate": "truncate",
}


def _change(name: str, arguments: str, thread: int) -> tuple[OperationKind, str, str | None] | None:
    """(kind, path, target) of a call, None for a call that changes nothing."""
    if name in ("sync", "syncfs", "msync"):
        # msync names no file, and writes through a mapping are not seen here.
        return None if name == "msync" else ("sync", "/", None)
    found = list(_PATHS.finditer(arguments))
    files = [_plain(each["fd"]) for each in found if each["fd"] is not None]
    if name in SYNCS or (name in WRITES and name != "truncate"):
        which = files[1:2] if name == "copy_file_range" else files[:1]
        kind = "sync" if name in SYNCS else "truncate" if name == "ftruncate" else "write"
        return (kind, which[0], None) if which else None
    names = _names(found, thread)
    if name in ("open", "openat"):
        return ("create", names[0], None) if names and re.search("O_CREAT|O_TRUNC", arguments) else None
    if name.startswith("symlink"):
        # The first name is the link's target.
        return ("symlink", names[1], None) if len(names) == 2 else None
    if name.startswith(("rename", "link")):
        return ("rename" if name.startswith("rename") else "link", names[0], names[1]) if len(names) == 2 else None
    if name == "unlinkat":
        return ("rmdir" if "AT_REMOVEDIR" in arguments else "remove", names[0], None) if names else None
    return (_ONE_NAME[name], names[0], None) if names and name in _ONE_NAME else None


def _names(found: Sequence[re.Match[str]], thread: int) -> list[str]:
    """Names given as text, made absolute by the folder argument before them, else by the working folder."""
    names: list[str] = []
    folder: str | None = None
    for each in found:
        if each["fd"] is not None:
            folder = _plain(each["fd"])
            continue
        if not (text := _plain(each["text"])).startswith("/") and folder is None:
            try:
                folder = os.readlink(f"/proc/{thread}/cwd")
            except OSError:
                folder = "/"  # it has ended, and its folder is unknown
        path = os.path.normpath(os.path.join(folder or "/", text))
        # With links in the path resolved, as strace shows descriptors.
        names.append(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)))
        folder = None
    return names


def _plain(quoted: str) -> str:
    """Decode a name in strace's form, with octal escapes for bytes that are not ASCII."""
    return os.fsdecode(quoted.encode("latin-1", "replace").decode("unicode_escape").encode("latin-1", "replace"))


def _new_size(arguments: str) -> int:
    last = arguments.rpartition(",")[2].strip()
    return int(last) if last.isdigit() else 0
