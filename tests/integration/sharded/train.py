"""jobs/fsdp, restored wrongly: `train.py MUTANT ...`, the rest as there. In restarted attempts, on rank 1 alone,

- `shard_of_another`: DCP gives it the weights that rank 0 has
- `moments_forgotten`: DCP gives it a first moment of zeros
- `moments_lost_later`: that is lost between the restore and the first batch's step
- `none`
"""

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import chaosrun
from chaosrun.protocol.session import Session

SCRIPT = Path(__file__).parents[3] / "jobs" / "fsdp" / "train.py"


def main() -> None:
    mutant = sys.argv.pop(1)
    load, batches = dcp.load, Session.batches

    def wrong_load(state: Any, **options: Any) -> None:
        load(state, **options)
        name = "0.0.weight"
        if mutant == "shard_of_another":
            own = state["model"][name].to_local()
            others = own.detach().clone()
            dist.broadcast(others, 0)
            own.detach().copy_(others)
        if mutant == "moments_forgotten" and dist.get_rank() == 1:
            state["optimizer"]["state"][name]["exp_avg"].to_local().zero_()

    def after_wrong_restore(self: Session, *arguments: Any, **options: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches(self, *arguments, **options)):
            if number == 0 and mutant == "moments_lost_later" and os.environ.get("CHAOSRUN_ATTEMPT", "1") != "1":
                (optimizer,) = self._state.optimizers()
                if dist.get_rank() == 1:
                    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].to_local().zero_()
            yield batch

    dcp.load = wrong_load
    chaosrun.Session.batches = after_wrong_restore  # type: ignore[method-assign]
    torch.set_num_threads(1)
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
