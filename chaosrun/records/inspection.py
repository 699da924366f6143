"""What an inspected step leaves behind: every quantity of it, in the order of diagnosis, with its bytes.

Only replays for `chaosrun diagnose` write this. A moment is one JSON file of a rank and an attempt, `rank-R.inspection/
step-NNNNNNNN.json`, or `end.json` after the last step: {v, step, entries}. An entry is {quantity, micro_batch, name} and one of

- bytes (a digest), dtype, shape: the raw bytes lie in the leg's `tensors/<digest>`, little-endian and contiguous; what is equal
  on several ranks and in several steps is stored once
- text: a value that has no bits of its own (sample ids, names, None)

`script` is what the script kept beside all that when the step began: path to value, readable or a digest.

`micro_batch` counts from 0 within the step; it is 0 for what belongs to the step as a whole.
"""

from typing import Literal, get_args

INSPECTION_VERSION = 1

Quantity = Literal[
    "sample ids",
    "batch",
    "rng",
    "parameters before",
    "buffers",
    "optimizer state",
    "scheduler state",
    "registered state",
    "loss",
    "local gradients",
    "reduced gradients",
    "learning rate",
    "parameters after",
]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
"""In the order of diagnosis: an earlier one that differs makes the later ones differ."""
