"""`on_and_off.py STEPS SAVE_EVERY`: `own_script.py`, in which chaosrun's observer hears of two steps and not of the next two.

Whatever the machine does, it does to both. Leaves on_and_off-<pid>.jsonl beside the script's own events: of each step when it
was complete, and whether the observer heard of it.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from torch.optim.optimizer import register_optimizer_step_post_hook

DEAF = SimpleNamespace(
    forward=lambda *_: None,
    backward=lambda _roots, run: run(),
    before_optimizer_step=lambda _: None,
    after_optimizer_step=lambda _: None,
    gradients_dropped=lambda _: None,
)


def main() -> None:
    events = Path(f"on_and_off-{os.getpid()}.jsonl")
    listeners: list[object] = []
    steps = 0

    def step_done(*_: object) -> None:
        nonlocal steps
        # A script that imports chaosrun would be one that attaches; under a launcher the observer comes when training begins.
        hooks = sys.modules["chaosrun.observe.hooks"]._seen
        if not listeners:
            listeners.extend([hooks.listener, DEAF])
        with events.open("a") as file:
            file.write(json.dumps([time.time(), hooks.listener is not DEAF]) + "\n")
        steps += 1
        hooks.listener = listeners[steps // 2 % 2]

    register_optimizer_step_post_hook(step_done)
    runpy.run_path(str(Path(__file__).with_name("own_script.py")), run_name="__main__")


if __name__ == "__main__":
    main()
