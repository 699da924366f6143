"""Protects files from before the drill: a script is stopped before it changes a file that another run left.

Each leg of a script that saves by itself runs in its own working folder, whose entries link to those of the job's folder
(`supervise.working_folder`). A new file below a linked folder is created in the leg: the links on its path become folders of
the leg. A change elsewhere, in the job's folder or below a path among the script's arguments, is refused. So is a save over a
file of the job that the script has read, or to the next of its series (step-10.pt, step-15.pt): the leg then began where
another run had ended. Python reports changes (`observe.audit`); torch and safetensors, which open files in native code, are
wrapped. Not seen: programs that the script starts.
"""

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from torch.optim.optimizer import register_optimizer_step_post_hook

from chaosrun.errors import MisuseError
from chaosrun.observe.audit import listen
from chaosrun.observe.writers import path_of, wrap_writers
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder

CHECKPOINTS = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp", ".metadata", "optimizer.bin")
"""Files of these kinds are guarded wherever they lie; the last is accelerate's, whose weights are read past Python."""
CACHES = ("~/.cache", "~/.config", "~/.triton")
SHARED = "outside of what is this leg's own: both legs would share it"
LEFT = "which another run left"
THERE_BEFORE = "which was there before: a drill never overwrites what another run left"
MOST_READ = 20_000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_TAKES_AWAY = frozenset({"os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"})
_TWO_NAMES = frozenset({"os.rename", "os.link", "os.symlink"})
_LOCK = ".chaosrun-links"


class FileGuard:
    """Guards the files against one rank, until the process ends."""

    def __init__(self, order: WorkerOrder) -> None:
        leg = LegLayout(Path(order.leg_path))
        self._leg = os.path.join(os.path.realpath(leg.path), "")
        self._work = os.path.join(os.path.realpath(leg.work), "")
        self._above = os.path.join(os.path.realpath(leg.work.parents[1]), "")
        self._directory = os.path.realpath(order.directory)
        self._script = os.path.realpath(order.script)
        self._began_s = order.drill_began_s
        # A path among the arguments that is missing or empty is an output.
        self._named = [path for word in (*order.args, *order.command) if (path := _absolute(word))]
        self._to_be_written = tuple(os.path.join(path, "") for path in self._named if _is_empty(path))
        free = [tempfile.gettempdir(), *map(os.path.expanduser, CACHES)]
        inside = [place for path in free if (place := os.path.join(os.path.realpath(path), "")).startswith(self._directory)]
        self._free = (self._leg, *inside)
        beside = [os.path.dirname(path) for path in self._named if os.path.splitext(path)[1] and not os.path.exists(path)]
        guarded = (self._directory, *self._named, *(path for path in beside if not _is_common(path)))
        self._guarded = tuple(os.path.join(path, "") for path in guarded)
        self._caches = tuple(os.path.join(os.path.realpath(os.path.expanduser(place)), "") for place in CACHES)
        self._passing = tuple(os.path.join(os.path.realpath(place), "") for place in (tempfile.gettempdir(), "/dev/shm"))
        self.refused: MisuseError | None = None
        """The first refusal: the leg is over even if the script catches the error."""
        self._has_begun = False
        """Whether training has begun: files that were made before it are caches and downloads."""
        self._read: dict[str, None] = {}
        """Files of the job that the script has read, relative to the working folder."""
        self._made: list[str] = []
        """Folders outside of the leg that the script has made, outermost first."""
        self._busy = False

    def install(self) -> None:
        register_optimizer_step_post_hook(self._begin)
        wrap_writers(self._write)
        listen(("open", "os.mkdir", *_TAKES_AWAY, *_TWO_NAMES), self._hear)

    @property
    def began_with(self) -> str | None:
        """A checkpoint of the job that the script has read, if any."""
        return next((name for name in self._read if name.endswith(CHECKPOINTS)), None)

    def _begin(self, *_: Any) -> None:
        self._has_begun = True

    def _write(self, target: Any, _how: str, _given: Any, write: Callable[[], Any]) -> Any:
        self._change(target, follows=True, is_save=True)
        return write()

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            flags = arguments[2]
            if isinstance(flags, int) and flags & _WRITES:
                self._change(arguments[0], follows=True)
            elif not self._busy and not self._has_begun:
                self._note_read(arguments[0])
        elif event == "os.mkdir":
            self._change(arguments[0], makes_folder=True)
        elif event in _TAKES_AWAY:
            self._change(arguments[0], follows=event in ("os.truncate", "shutil.rmtree"))
        else:
            if event == "os.rename":
                self._change(arguments[0])
            self._change(arguments[1])

    def _change(self, target: Any, *, follows: bool = False, makes_folder: bool = False, is_save: bool = False) -> None:
        """Check a change before it is made. `follows`: resolve a link to its target. Raises MisuseError."""
        if self._busy or (path := path_of(target)) is None:
            return
        self._busy = True
        try:
            self._look(path, follows=follows, makes_folder=makes_folder, is_save=is_save)
        finally:
            self._busy = False

    def _note_read(self, target: Any) -> None:
        """Note a read of a file of the job, which may be a checkpoint of another run."""
        path = path_of(target) or ""
        top = next((top for top in (self._work, os.path.join(self._directory, "")) if path.startswith(top)), None)
        if top is None or len(self._read) >= MOST_READ:
            return
        self._busy = True
        try:
            real = os.path.realpath(path)
        finally:
            self._busy = False
        if not real.startswith(self._leg):
            self._read[path.removeprefix(top)] = None

    def _expect_own_beginning(self, name: str, *, is_save: bool) -> None:
        """Raises MisuseError if the script saves, as `name` in its working folder, over a file of the job that it has read."""
        read = name if name in self._read else None
        if read is None and (is_save or name.endswith(CHECKPOINTS) or not os.path.splitext(name)[1]):
            parts = name.count(os.sep) + 1
            alike = {os.sep.join(each.split(os.sep)[:parts]): each for each in self._read}
            found = [each for top, each in alike.items() if _series(top) == _series(name)]
            # Several files of one series are inputs: items of a dataset.
            read = found[0] if len(found) == 1 else None
        if read is not None:
            what = "it anew" if read == name else name
            message = f"the script began with {read}, {LEFT}, and saves {what}: each leg has to begin at the beginning"
            self._refuse(message, outputs=self._outputs(read, name))

    def _look(self, path: str, *, follows: bool, makes_folder: bool, is_save: bool) -> None:
        folder, name = os.path.split(path)
        real = os.path.join(os.path.realpath(folder), name)
        if follows:
            real = os.path.realpath(real)
        if "__pycache__" in real:
            return
        if self._has_begun and path.startswith(self._work) and not makes_folder:
            self._expect_own_beginning(path.removeprefix(self._work), is_save=is_save)
        there = _seen(real)
        if path.startswith(self._above) and not path.startswith(self._work):
            if not makes_folder or there is None:
                self._refuse_changing(path, real, f"the script would write {os.path.relpath(path, self._work)}, {SHARED}")
            return
        is_guarded = f"{real}/".startswith(self._guarded)
        if not is_guarded and (is_save or real.endswith(CHECKPOINTS)) and not real.startswith(self._caches):
            is_guarded = there is not None or not real.startswith(self._passing)
        if makes_folder and there is None and not real.startswith(self._leg):
            self._made.append(real)
        if real.startswith(self._free) or not is_guarded:
            return
        if there is None:
            if path.startswith(self._work):
                self._make_own(folder)
            elif f"{real}/".startswith(self._to_be_written) or self._has_begun:
                self._refuse_changing(path, real, f"the script would write {real}, {SHARED}")
        elif not makes_folder and there.st_ctime < self._began_s and not _holds_nothing(real, there):
            self._refuse_changing(path, real, f"the script would change {real}, {THERE_BEFORE}")
        elif not makes_folder and self._has_begun:
            self._refuse_changing(path, real, f"the script would change {real}, {SHARED}")

    def _make_own(self, folder: str) -> None:
        """Make every folder on the path to this one a folder of the leg, with links to its present entries."""
        with self._alone():
            here = self._work.rstrip("/")
            for part in os.path.relpath(folder, here).split(os.sep):
                here = os.path.join(here, part)
                if os.path.islink(here) and os.path.isdir(here):
                    _unlinked(here)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock, so that no other rank of this node does the same at the same time."""
        descriptor = os.open(os.path.join(self._leg, _LOCK), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _outputs(self, *names: str) -> str:
        """The value of `outputs` that hides these files of the job from each leg."""
        folder = os.path.commonpath([os.path.dirname(name) for name in names])
        whole = os.path.join(self._directory, folder, "") if folder else self._directory
        if folder and not self._script.startswith(whole):
            return folder
        first = _series(os.path.relpath(names[0], folder or ".").partition(os.sep)[0])
        return ", ".join(sorted(os.path.join(folder, each) for each in os.listdir(whole) if _series(each) == first))

    def _refuse_changing(self, path: str, real: str, message: str) -> NoReturn:
        for folder in reversed(self._made):
            if real.startswith(os.path.join(folder, "")):
                with suppress(OSError):  # it is not empty
                    os.rmdir(folder)
        # The leg itself may be in the job's folder, and its `..` is not a folder of the job; a path that does not lead through
        # the leg's folder (absolute, or made from __file__) leads to the job's file, whatever `outputs` says.
        inside = f"{real}/".startswith(os.path.join(self._directory, "")) and not real.startswith(self._leg)
        inside = inside and path.startswith(self._work)
        self._refuse(message, outputs=self._outputs(os.path.relpath(real, self._directory)) if inside else None)

    def _refuse(self, message: str, *, outputs: str | None) -> NoReturn:
        hint = "write {output} in the place of its path, in args, env or command: it is a folder of each leg's own"
        if outputs:
            hint = f"outputs=[{outputs}] gives each leg its own, empty at first; or {hint}"
        else:
            hint += "; a path that stands in the script, or is made from __file__, has to become an argument, or to lie in its "
            hint += "working folder"
        error = MisuseError(message, hint=hint)
        self.refused = self.refused or error
        raise error


def _series(name: str) -> str:
    """A name without its numbers: the same for all checkpoints of a series."""
    return re.sub(r"[0-9]+", "0", name)


def _unlinked(link: str) -> None:
    """Replace a link to a folder by a folder of links; for other processes it is missing only for an instant."""
    source = os.readlink(link)
    made = tempfile.mkdtemp(prefix=".chaosrun-", dir=os.path.dirname(link))
    for entry in os.scandir(source):
        os.symlink(entry.path, os.path.join(made, entry.name))
    os.chmod(made, 0o755)
    os.unlink(link)
    os.rename(made, link)


def _absolute(word: str) -> str | None:
    """The real path of an argument that names a path of the job; None for other words and for system folders."""
    path = word.rpartition("=")[2]
    if not path.startswith("/") or "{" in path or "\0" in path:
        return None
    real = os.path.realpath(path)
    return None if _is_common(real) else real


def _is_common(path: str) -> bool:
    """Whether it is a folder that belongs to no job, or contains such a folder."""
    common = (tempfile.gettempdir(), os.path.expanduser("~"), "/dev", "/proc", "/sys")
    return any(f"{place}/".startswith(os.path.join(path, "")) for place in common)


def _is_empty(path: str) -> bool:
    try:
        return not os.listdir(path)
    except NotADirectoryError:
        return False
    except OSError:
        return True


def _seen(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _holds_nothing(path: str, seen: os.stat_result) -> bool:
    """Whether it is an empty file or folder, or neither (a pipe or a device)."""
    if stat.S_ISDIR(seen.st_mode):
        return _is_empty(path)
    return seen.st_size == 0 or not stat.S_ISREG(seen.st_mode)
