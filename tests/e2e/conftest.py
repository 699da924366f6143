"""A shell of one's own for a test that runs the command."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.drills import Shell, open_shell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """Fails the test at its end when a command left a process, a temporary file or an entry in /dev/shm."""
    with open_shell(tmp_path) as opened:
        yield opened
