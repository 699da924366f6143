"""A node whose memory flips the lowest bit of one weight in the first step after a restore."""

import importlib.abc
import importlib.util
import sys


class Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "accelerate.accelerator":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


def patch(module):
    restore, step = module.Accelerator.load_state, module.AcceleratedOptimizer.step
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

    module.Accelerator.load_state, module.AcceleratedOptimizer.step = load_state, flipping_step


sys.meta_path.insert(0, Patch())
