"""Reading a file that is being appended to: only the lines that are new since the last time."""

import os
from pathlib import Path

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 64
"""First bytes by which a file is recognised: they hold a record's number and time, so they differ from file to file."""


class Tail:
    """The whole lines of one file, as they come; a torn last one is left for later. If the file is replaced, or cut before the
    position read so far, reading begins again: `restarts` counts how often."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head = b""
        self._offset = 0
        self.restarts = 0

    def lines(self, limit: int = CHUNK_BYTES) -> list[bytes]:
        """The next whole lines, about `limit` bytes, without newlines; [] if there are none, or no file. Raises OSError."""
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        if found.st_size == self._offset:
            return []
        with self._path.open("rb") as file:
            # Not the inode, which a replacing file may have as well.
            head = os.pread(file.fileno(), HEAD_BYTES, 0)
            if found.st_size < self._offset or not head.startswith(self._head):
                self.restarts += 1
                self._offset = 0
            lines = self._read(file.fileno(), limit)
            self._head = head[: self._offset]
            return lines

    def rest(self) -> bytes:
        """The text after the last whole line. Raises as `lines`."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return b""

    def _read(self, file: int, limit: int) -> list[bytes]:
        block, end = b"", -1
        # A line that is longer than the limit is still one line.
        while end < 0:
            more = os.pread(file, limit, self._offset + len(block))
            if not more:
                return []
            end = more.rfind(b"\n")
            end = end if end < 0 else len(block) + end
            block += more
        self._offset += end + 1
        return block[:end].split(b"\n")
