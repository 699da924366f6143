"""A node on which torch's random stream, dropout's, cannot be put back: it stays where it is."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from after_import import after_import


def _change(random):
    random.set_rng_state = lambda state: None


after_import("torch.random", _change)
