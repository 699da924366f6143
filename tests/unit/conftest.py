"""Fixtures of several files. A file with a `run` of its own overrides the one here."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fresh import forget_accelerate
from legs import copy_run, write_run

from chaosrun.records.layout import RunLayout

if TYPE_CHECKING:
    from chaosrun.verify.verdict import Verdict


@pytest.fixture(scope="session")
def exact(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    """A run whose restarts all came back exactly: to be read."""
    return write_run(tmp_path_factory.mktemp("exact"))


@pytest.fixture(scope="session")
def passed(exact: RunLayout) -> "tuple[RunLayout, Verdict]":
    """And what was made of it."""
    from chaosrun.verify.verdict import judge

    return exact, judge(exact)


@pytest.fixture
def run(exact: RunLayout, tmp_path: Path) -> RunLayout:
    """A copy of it, to be broken."""
    return copy_run(exact, tmp_path)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    yield
    forget_accelerate()


@pytest.fixture
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
