"""`on_and_off.py STEPS SAVE_EVERY`: `own_script.py`, in which chaosrun's observer hears of two steps and not of the next two.

Whatever the machine does, it does to both. Leaves on_and_off-<pid>.jsonl beside the script's own events: of each step when it
was complete, and whether the observer heard of it.
"""

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


class Deaf:
    """A listener that ignores everything; `own_scripts` holds it against `Listener`, which is not imported here: see `main`."""

    def forward(self, module: object, inputs: object, named: object) -> None: ...

    def backward(self, roots: object, run: Callable[[], None]) -> None:
        run()

    def before_optimizer_step(self, optimizer: object, *, closure: bool) -> None: ...

    def after_optimizer_step(self, optimizer: object) -> None: ...

    def step_was_skipped(self) -> None: ...

    def gradients_dropped(self, parameters: object) -> None: ...

    def wrapper_made(self, model: object) -> None: ...


def main() -> None:
    events = Path(f"on_and_off-{os.getpid()}.jsonl")
    deaf = Deaf()
    listeners: list[object] = []
    steps = 0

    def step_done(*_: object) -> None:
        nonlocal steps
        # A script that imports chaosrun would be one that attaches; under a launcher the observer comes when training begins.
        hooks = sys.modules["chaosrun.observe.hooks"]._seen
        if not listeners:
            listeners.extend([hooks.listener, deaf])
        with events.open("a") as file:
            file.write(json.dumps([time.time(), hooks.listener is not deaf]) + "\n")
        steps += 1
        hooks.listener = listeners[steps // 2 % 2]

    register_optimizer_step_post_hook(step_done)
    runpy.run_path(str(Path(__file__).with_name("own_script.py")), run_name="__main__")


if __name__ == "__main__":
    main()
