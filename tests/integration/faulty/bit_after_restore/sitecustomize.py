"""A node whose memory flips the lowest bit of one weight in the first step after a restore."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from after_import import after_import


def _change(accelerator):
    restore, step = accelerator.Accelerator.load_state, accelerator.AcceleratedOptimizer.step
    restored = []

    def load_state(self, *arguments, **options):
        restored.append(True)
        return restore(self, *arguments, **options)

    def flipping_step(self, *arguments, **options):
        step(self, *arguments, **options)
        if restored:
            import torch

            restored.clear()
            weight = self.param_groups[0]["params"][0]
            with torch.no_grad():
                weight.view(torch.int32)[0, 0] ^= 1

    accelerator.Accelerator.load_state, accelerator.AcceleratedOptimizer.step = load_state, flipping_step


after_import("accelerate.accelerator", _change)
