"""A node whose device hangs in a matrix product, or kills the process: BROKEN is "hangs" or "dies"."""

import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from after_import import after_import


def _change(torch):
    def matmul(left, right):
        if os.environ["BROKEN"] == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(600)

    torch.matmul = matmul


after_import("torch", _change)
