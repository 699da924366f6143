"""Has DDP name parameters in its errors: TORCH_DISTRIBUTED_DEBUG=DETAIL, for the one attempt that the supervisor orders so."""

import os
from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d


def speak_in_detail() -> None:
    """Call before the process group is made; torch was loaded long ago and has read its environment.

    DETAIL would also have every collective checked by a wrapper around the process group. That is left out: it would make this
    attempt's communication another one than its neighbours', and DDP over gloo crashes with it (torch 2.13, SIGSEGV in the
    constructor). What DDP says and does is the same without.
    """
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    distributed.set_debug_level_from_env()
    distributed_c10d._create_process_group_wrapper = _bare


def _bare(wrapped_pg: Any, *_: Any, **__: Any) -> Any:
    return wrapped_pg
