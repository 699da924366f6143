"""The codec, whatever its records."""

import subprocess
import sys

FIRST_USES = """
import sys, threading
from collections.abc import Mapping
from chaosrun.records.codec import Record, convert

sys.setswitchinterval(1e-6)
for _ in range(40):
    class Inner(Record):
        times: Mapping[str, tuple[int, ...]]

    class Outer(Record):
        items: tuple[Inner, ...]
        named: Mapping[str, Inner]
        either: int | str | None = None

    at_once = threading.Barrier(4)

    def ask():
        at_once.wait()
        convert({"items": [{"times": {}}], "named": {}}, Outer)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_are_the_first_to_use_a_type_do_not_end_the_process():
    """Two drills of a suite that began at once did, by SIGSEGV in msgspec.convert."""
    subprocess.run([sys.executable, "-c", FIRST_USES], check=True, timeout=60)
