"""What DDP's reducer complains about, said in fewer words and with the remedy: reads messages, decides nothing.

These errors are the script's (hazards C8, C9). TORCH_DISTRIBUTED_DEBUG=DETAIL has torch add the names of parameters.
"""

import re
from dataclasses import dataclass

_FIND_UNUSED = "DistributedDataParallelKwargs(find_unused_parameters=True)"
_HINTS = {
    "Expected to mark a variable ready only once": (
        "the parameter was used outside the wrapped model's forward: with find_unused_parameters=True, DDP marks what forward "
        "leaves unused as ready at once, and the gradient that arrives all the same marks it again. Use parameters through the "
        "wrapped model only, never by model.module; or pass find_unused_parameters=False if each gets a gradient in every step "
        "(in several reentrant checkpoints: use_reentrant=False); or static_graph=True (_set_static_graph) if the graph never "
        "changes"
    ),
    "Expected to have finished reduction in the prior iteration": (
        "a parameter got no gradient, so DDP never averaged its bucket and the replicas part: ranks take other branches, or "
        f"forward leaves a parameter out. Pass {_FIND_UNUSED}; a parameter that no rank ever uses: requires_grad_(False)"
    ),
    "Your training graph has changed in this iteration": (
        f"static_graph=True promises the same graph in every step: pass {_FIND_UNUSED} instead"
    ),
    "expect_autograd_hooks_ INTERNAL ASSERT FAILED": (
        "a static graph cannot begin in no_sync: with static_graph=True, DDP reduces the very first backward pass, even of a "
        f"micro-batch whose gradients are only to be accumulated. Accumulate without it, or pass {_FIND_UNUSED} instead"
    ),
}
"""By words of torch's message."""
_ABOUT = re.compile(
    r"(?P<twice>Parameter at index \d+(?: with name \S+)? has been marked as ready twice)"
    r"|(?P<lacking>Parameters which did not receive grad for rank \d+: [^\n]+)"
    r"|(?P<indices>Parameter indices which did not receive grad for rank \d+: [\d ]+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducerError:
    message: str
    """Torch's first words, and what it says of the parameters."""
    hint: str


def reducer_error(message: str) -> ReducerError | None:
    """None for any other error."""
    for words, hint in _HINTS.items():
        if words in message:
            # Names are worth more than numbers, and come before them.
            about = _ABOUT.search(message)
            said = f"{words} ({about.group().strip()})" if about else words
            return ReducerError(message=said, hint=hint)
    return None
