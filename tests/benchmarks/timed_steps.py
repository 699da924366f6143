"""`timed_steps.py FOLDER SCRIPT [ARGUMENT…]`: runs a training script as it is and notes when each optimizer step was complete.

Leaves FOLDER/rank-<RANK>.json: a list of [wall clock, CPU time of the process] in seconds. The same stopwatch for every
launcher.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook


def main(folder: Path, script: Path, arguments: list[str]) -> None:
    stamps: list[tuple[float, float]] = []
    register_optimizer_step_post_hook(lambda *_: stamps.append((time.perf_counter(), time.process_time())))
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    rank = os.environ["RANK"]
    runpy.run_path(str(script), run_name="__main__")
    (folder / f"rank-{rank}.json").write_text(json.dumps(stamps))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
