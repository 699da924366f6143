"""What a process keeps of an accelerate that it has used."""

import sys


def forget_accelerate() -> None:
    if state := sys.modules.get("accelerate.state"):
        for each in (state.AcceleratorState, state.GradientState, state.PartialState):
            each._reset_state()
