"""A node on which torch's random stream, dropout's, cannot be put back: it stays where it is."""

import importlib.abc
import importlib.util
import sys


class Patch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.random":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.set_rng_state = lambda state: None

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Patch())
