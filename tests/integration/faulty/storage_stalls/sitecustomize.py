"""A storage that takes its time: one fsync of a large file takes 1 s ($CHAOSRUN_TEST_STALL is "once"), or every fsync 0.1 s
("always")."""

import os
import time

LARGE = 1 << 20
always = os.environ["CHAOSRUN_TEST_STALL"] == "always"
fsync = os.fsync
stalled = []


def sync_slowly(descriptor):
    if always:
        time.sleep(0.1)
    elif not stalled and os.fstat(descriptor).st_size >= LARGE:
        stalled.append(True)
        time.sleep(1.0)
    fsync(descriptor)


os.fsync = sync_slowly
