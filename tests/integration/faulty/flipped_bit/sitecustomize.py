"""A node whose matrix products have one bit flipped: the lowest of their first entry.

FLIPS: "always" (also without the variable), "once" (in one product of a repeated training), "fractions" (not where all entries
are integers, so that products of integers stay right).
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from after_import import after_import


def _change(torch):
    product, flips = torch.matmul, os.environ.get("FLIPS", "always")
    fractions = 0

    def matmul(left, right):
        nonlocal fractions
        result = product(left, right)
        values = result.data
        fraction = not bool((values == values.round()).all())
        fractions += fraction
        # Two trainings of eight products have gone before.
        if flips == "always" or (fraction and flips == "fractions") or (fraction and fractions == 20 and flips == "once"):
            width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
            values.view(width).view(-1)[0] ^= 1
        return result

    torch.matmul = matmul


after_import("torch", _change)
