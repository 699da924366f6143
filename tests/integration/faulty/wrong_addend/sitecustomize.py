"""A node whose ranks add one too much to the first number of every sum."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from after_import import after_import


def _change(distributed):
    reduce = distributed.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        tensor[0] += 1
        return reduce(tensor, *args, **kwargs)

    distributed.all_reduce = all_reduce


after_import("torch.distributed", _change)
