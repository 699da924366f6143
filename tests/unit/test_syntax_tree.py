"""Scripts are parsed by several threads at once: drills of a sweep run side by side."""

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from chaosrun.spec.launch import syntax_tree

SOURCE = b"x = [" + b"((1 + 2) * f(3))," * 2000 + b"]"


class Finalized:
    """Garbage that lets other threads run while it is collected, in the middle of a parse, and leaves more of its kind."""

    def __init__(self, go_on: threading.Event) -> None:
        self.me, self.go_on = self, go_on

    def __del__(self) -> None:
        time.sleep(0.0001)
        if self.go_on.is_set():
            Finalized(self.go_on)


@pytest.fixture
def threads_change_while_trees_are_built() -> Iterator[None]:
    thresholds, go_on = gc.get_threshold(), threading.Event()
    go_on.set()
    gc.set_threshold(200)
    Finalized(go_on)
    yield
    go_on.clear()
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("threads_change_while_trees_are_built")
def test_threads_that_parse_at_once_get_their_trees() -> None:
    """With `ast.parse` in its place one in some ten raises a SystemError of CPython's, where one stack is deeper."""
    failed: list[BaseException] = []

    def parse(depth: int) -> None:
        if depth:
            return parse(depth - 1)
        try:
            for _ in range(10):
                assert len(syntax_tree(SOURCE).body) == 1
        except SystemError as error:
            failed.append(error)
        return None

    threads = [threading.Thread(target=parse, args=(depth,)) for depth in (0, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
