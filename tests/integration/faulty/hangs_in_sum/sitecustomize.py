"""A node whose ranks come to a sum of several numbers, and never leave it."""

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from after_import import after_import


def _change(distributed):
    reduce = distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        if len(tensor) > 1:
            time.sleep(3600)
        return reduce(tensor, *args, **kwargs)

    distributed.all_reduce = all_reduce


after_import("torch.distributed", _change)
