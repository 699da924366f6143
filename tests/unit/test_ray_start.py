"""A private Ray that does not start is the machine's trouble, and is told as such."""

from types import SimpleNamespace

import pytest

from chaosrun.cluster import connection
from chaosrun.errors import ResourcesError


@pytest.fixture(autouse=True)
def no_ray_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have joined one."""
    monkeypatch.setattr(connection.ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_what_keeps_ray_from_starting_is_no_bug_of_chaosrun(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nmore")

    monkeypatch.setattr(connection.ray, "init", start)
    with pytest.raises(ResourcesError, match=r"Ray does not start here: The current node timed out during startup\.\n +hint"):
        connection.connect(None, cpus=1)


def test_ray_is_not_started_where_its_processes_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.sys, "flags", SimpleNamespace(optimize=2))
    with pytest.raises(ResourcesError, match="PYTHONOPTIMIZE=2"):
        connection.connect(None, cpus=1)
