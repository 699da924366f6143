"""Detects reads, by this rank and every process it forks, of files that other legs of the job or earlier attempts left
(`records.opened`).

Python reports every file that it opens (`observe.audit`). The common readers written in C++ and Rust are wrapped, and files
mapped into memory are listed when a training begins and ends. Not seen: a started program without the file's name among its
arguments, other native readers, and a script that only checks whether a file exists.
"""

import os
import shlex
import stat
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from chaosrun.observe.audit import listen
from chaosrun.observe.writers import wrap_imported
from chaosrun.records.codec import encode
from chaosrun.records.layout import LegLayout
from chaosrun.records.opened import OpenedFile, TrainingTime
from chaosrun.records.order import WorkerOrder

NATIVE_READERS = (
    ("safetensors", "safe_open"),
    ("safetensors.torch", "safe_open"),
    ("safetensors.numpy", "safe_open"),
    ("torch.jit", "load"),
    ("torch", "from_file"),
    ("h5py.h5f", "open"),
    ("dbm.gnu", "open"),
    ("dbm.ndbm", "open"),
    ("pyarrow", "memory_map"),
    ("pyarrow", "OSFile"),
    ("pyarrow.parquet", "read_table"),
    ("pandas", "read_parquet"),
    ("cv2", "imread"),
)
TRACKERS = frozenset(
    {"aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "tensorboard", "tensorboardX", "trackio", "wandb"}
)
"""Experiment trackers: the files that they open are their own records, which no training reads."""
DO_NOT_READ = frozenset({"chmod", "chown", "du", "ls", "mkdir", "rm", "rmdir", "stat", "test", "touch"})
"""Programs that take files as arguments and read none of their bytes."""
_THIS_LEG = TrainingTime(leg="", begun_s=0.0, since_s=0.0, until_s=0.0)


class FileWatch:
    """Records, once each, the files of earlier legs that a rank and its children read. Files in the leg's own folder belong to
    this leg, even if another process trained next to it before a supervisor took over."""

    def __init__(self, order: WorkerOrder, leg: LegLayout) -> None:
        self._record, self._attempt, self._rank = leg.attempt(order.attempt).opened(order.rank), order.attempt, order.rank
        self._earlier = order.earlier
        self._own = os.path.join(os.path.realpath(leg.path), "")
        # Files here count as an earlier attempt's if they were last changed between the drill's beginning and now.
        made = (leg.output, leg.work) if order.attempt > 1 else ()
        self._made = tuple(os.path.join(os.path.realpath(folder), "") for folder in made)
        self._since_s, self._began_s = order.drill_began_s, time.time()
        self._told: set[str] = set()
        # The reference's traces show the attempt's position.
        self._caches = (*caches(), *([f"{order.reference_path}/attempts/"] if order.reference_path else ()))
        self._kept: dict[tuple[int, int], tuple[TrainingTime, float]] = {}
        """By device and inode: files of another leg that have since been renamed, appended to or given other rights."""
        self._handlers: Mapping[str, Callable[..., None]] = {
            "open": self._open,
            "sqlite3.connect": self._connect,
            "subprocess.Popen": lambda _program, arguments, *_: self._start(arguments),
            "os.posix_spawn": lambda _program, arguments, *_: self._start(arguments),
            "os.exec": lambda _program, arguments, *_: self._start(arguments),
            "os.system": self._start,
            **dict.fromkeys(("os.rename", "os.link", "os.chmod", "os.chown", "os.truncate", "os.utime"), self._keep),
        }

    def begin(self) -> None:
        """Listen from now until the end of the process."""
        listen(self._handlers, self._hear)
        self.wrap_native_readers()

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        self._handlers[event](*arguments)

    def wrap_native_readers(self) -> None:
        """Wrap those native readers that have been imported."""
        wrap_imported(NATIVE_READERS, self._read)

    def look_at_mappings(self) -> None:
        """Check files that are mapped into memory or open for reading only, by whichever code."""
        for path in {*mapped_files(), *(path for path, writes, _ in open_files() if not writes)}:
            self._read(path)

    def _open(self, path: Any, mode: str | None, flags: int) -> None:
        if isinstance(path, int) or flags & (os.O_TRUNC | os.O_EXCL):
            return
        if flags & os.O_WRONLY:
            self._keep(path)
        else:
            self._read(path)

    def _connect(self, database: Any) -> None:
        if isinstance(database, str) and database.startswith("file:"):
            database = unquote(urlsplit(database).path)
        self._read(database)

    def _start(self, command: Any) -> None:
        """Count a started program as reading every file among its arguments."""
        try:
            words = shlex.split(os.fsdecode(command)) if isinstance(command, str | bytes) else [os.fsdecode(a) for a in command]
            if len(words) == 3 and words[1] == "-c":
                words = shlex.split(words[2])
        except (TypeError, ValueError):
            return
        if words and os.path.basename(words[0]) not in DO_NOT_READ:
            for word in words[1:]:
                self._read(word.lstrip("<"))

    def _read(self, path: Any) -> None:
        left = self._left(path)
        if left is None:
            return
        name = os.path.abspath(os.fsdecode(path))
        if name in self._told or name.startswith(self._caches) or "__pycache__" in name or _is_of_a_tracker():
            return
        self._told.add(name)
        left_by, changed_s = left
        about = {"changed_s": changed_s, "before_training": changed_s < left_by.since_s}
        # In its working folder the leg finds links to the job's files, which are what a person knows.
        named = os.path.realpath(name) if left_by.leg and name.startswith(self._own) else name
        opened = OpenedFile(path=named, left_by=left_by.leg, attempt=self._attempt, rank=self._rank, **about)
        # One write, as several processes may append to the file.
        descriptor = os.open(self._record, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, encode(opened) + b"\n")
        finally:
            os.close(descriptor)

    def _keep(self, path: Any, *_: Any) -> None:
        """Remember a file of another leg with its content, before a change makes it look like this leg's own."""
        left = self._left(path)
        if left is not None:
            found = os.stat(path)
            self._kept[found.st_dev, found.st_ino] = left

    def _left(self, path: Any) -> tuple[TrainingTime, float] | None:
        """Which leg left a file, and when; None for this attempt, for no leg, or if there is no such file."""
        try:
            found = os.stat(path)
        except (OSError, TypeError, ValueError):
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        for earlier in self._earlier:
            if earlier.begun_s <= found.st_ctime <= earlier.until_s and not self._is_in(path, self._own):
                return earlier, found.st_ctime
        if self._made and self._since_s <= found.st_ctime < self._began_s and self._is_in(path, self._made):
            return _THIS_LEG, found.st_ctime
        return self._kept.get((found.st_dev, found.st_ino)) if self._kept else None

    def _is_in(self, path: Any, folders: str | tuple[str, ...]) -> bool:
        name = f"/proc/self/fd/{path}" if isinstance(path, int) else os.fsdecode(path)
        return os.path.realpath(name).startswith(folders)


def caches() -> list[str]:
    """Folders to ignore: caches of compilers and Hugging Face, whose files are named by their content; Python itself and
    installed packages, whose files change when others are installed by hard links (their versions are compared elsewhere)."""
    home = Path(os.path.expanduser("~"))  # not Path.home(): a user id without a name and $HOME has none
    user = home.name
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    hugging_face = os.environ.get("HF_HOME") or cache / "huggingface"
    places = [
        os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_",
        f"/tmp/torchinductor_{user}",
        os.environ.get("TRITON_CACHE_DIR") or home / ".triton",
        os.environ.get("MPLCONFIGDIR") or cache / "matplotlib",
        os.environ.get("HF_DATASETS_CACHE") or hugging_face,
        os.environ.get("TORCH_HOME") or cache / "torch",
        *(os.environ[name] for name in ("NUMBA_CACHE_DIR", "CUDA_CACHE_PATH") if os.environ.get(name)),
        config / "matplotlib",  # which it makes when it is imported
        *(hugging_face, home / ".nv", cache / "fontconfig", "/proc/", "/sys/", "/dev/null"),
    ]
    packages = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries = [*packages, sysconfig.get_config_var("LIBDIR") or "/lib", "/lib", "/usr/lib"]
    places.append(os.path.realpath(sys.executable))
    return [*(os.path.abspath(place) for place in places), *(f"{place}/" for place in libraries)]


def _is_of_a_tracker() -> bool:
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return any(module.partition(".")[0] in TRACKERS for module in modules)


def open_files() -> Iterator[tuple[str, bool, int]]:
    """Regular files that this process has open: path, whether for writing, and the position in them."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, KeyError):  # closed meanwhile
            about = dict(line.split(":", 1) for line in Path(f"/proc/self/fdinfo/{name}").read_text().splitlines()[:2])
            path = os.readlink(f"/proc/self/fd/{name}")
            if stat.S_ISREG(os.fstat(int(name)).st_mode) and path.startswith("/"):
                yield path, bool(int(about["flags"], 8) & os.O_ACCMODE), int(about["pos"])


def mapped_files(access: str = " ") -> Iterator[str]:
    """Files that are mapped into this process's memory; `access`: only with these permissions of /proc, such as " rw-s "."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if access in line and " /" in line:
            yield line.split(maxsplit=5)[5]
