"""Pins everything that makes two executions of a script differ, before its first line runs (hazards K1, K3-K5, K7, C5).

PYTHONHASHSEED (`cluster.workers`) and the thread counts that libraries read when loaded (`cluster.agent`) are set even earlier,
in the fork server's environment.
"""

import functools
import os
import random
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy
import torch

from chaosrun.errors import UserScriptError

Determinism = Literal["strict", "warn", "off"]

_REFUSALS = (
    re.compile(r"(?P<operation>\S+) does not have a deterministic implementation"),
    re.compile(r"this operation is not deterministic because it uses (?P<operation>CuBLAS)"),
)
"""How torch refuses an operation: `alertNotDeterministic` and `alertCuBLASConfigNotDeterministic` of ATen's Context.cpp."""


def pin(*, seed: int, deterministic: Determinism, threads: int) -> None:
    """Fix algorithms, thread count and seeds. Call before CUDA starts: cuBLAS reads its workspace setting then."""
    pin_process(seed=seed, deterministic=deterministic, threads=threads)
    pin_algorithms(deterministic)


def pin_process(*, seed: int, deterministic: Determinism, threads: int) -> None:
    """The part of `pin` that costs nothing, for processes that may never train, such as launchers.

    Source: the torch notes on reproducibility; NCCL's algorithm choice (nccl#457) is fixed unless the job's env sets it.
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if deterministic != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NCCL_PROTO", "Simple")
    # Python, numpy's global stream and torch on all devices.
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def pin_algorithms(deterministic: Determinism) -> None:
    """Imports torch's compiler, as an optimizer would: a second or two."""
    if deterministic != "off":
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        # Costs some 3% of a step and changes nothing unless the program reads uninitialised memory, which the comparison of
        # bits would show.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def error_text(told: object) -> str:
    """Its text, even if the script's own code, as of an error's `__str__`, makes none."""
    try:
        return str(told)
    except Exception as error:
        return f"its __str__ raised {type(error).__name__}"


def refused_operation(error: BaseException, deterministic: Determinism) -> UserScriptError | None:
    """What to do about an operation that torch refused because it cannot be deterministic; None for any other error.

    Decided by the message, not the type: torch raises a RuntimeError, and the loader re-raises its workers' errors with longer
    texts.
    """
    found = next((match for refusal in _REFUSALS if (match := refusal.search(error_text(error)))), None)
    if not isinstance(error, RuntimeError) or found is None:
        return None
    operation = found["operation"]
    if operation == "CuBLAS":
        return UserScriptError(
            "a matrix product on the GPU is not deterministic: CUBLAS_WORKSPACE_CONFIG is "
            f"{os.environ.get('CUBLAS_WORKSPACE_CONFIG', 'not set')!r}",
            hint="leave CUBLAS_WORKSPACE_CONFIG out of the job's env, or set it to :4096:8",
        )
    if deterministic != "strict":
        return UserScriptError(
            f"{operation} has no deterministic implementation, and the script calls torch.use_deterministic_algorithms(True)",
            hint="use another operation, or leave the setting to `deterministic` in the job file",
        )
    return UserScriptError(
        f"{operation} has no deterministic implementation, and the job is deterministic: strict",
        hint="use another operation (torch.use_deterministic_algorithms lists those that have one), or set deterministic: "
        "warn; the operation then runs, its name stands in the worker's log, and the verdict shows whether its results differ",
    )


class Seeds:
    """Detects whether the script itself has seeded torch, or restored its random stream, in this process."""

    def __init__(self) -> None:
        self.seeded = self._watched = self._begun = False
        self._restored = False
        self._again: list[tuple[str, int]] | None = []
        """Where it has seeded torch after it restored torch's stream: files and lines, from the innermost call on. None from
        its first step on."""

    def watch(self) -> None:
        """Watch from now on; earlier observations (a script that seeds before it joins its group) still count."""
        if self._watched:
            return
        self._watched = True
        for name in ("manual_seed", "set_rng_state"):
            inner = getattr(torch, name)

            @functools.wraps(inner)
            def seed(*args: Any, name: str = name, inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
                self.seeded = True
                if self._again is not None:
                    self._note(name, sys._getframe(1))
                return inner(*args, **kwargs)

            setattr(torch, name, seed)
            setattr(torch.random, name, seed)

    def _note(self, function: str, frame: FrameType) -> None:
        if function == "manual_seed":
            stack = [(each.f_code.co_filename, line) for each, line in traceback.walk_stack(frame)]
            self._again = stack if self._restored else []
        else:
            self._again = []
            self._restored |= frame.f_globals.get("__name__") != "torch.random"  # it ends fork_rng, too

    def begin(self) -> None:
        """Note that a training begins; all earlier observations count for it, unless this process already had a training."""
        self.watch()
        if self._begun:
            self.seeded, self._restored, self._again = False, False, []
        self._begun = True

    def seeded_again(self) -> str:
        """The script's line that seeded torch after its stream was restored, "train.py:12", or ""; at the first step."""
        from chaosrun.observe.held import is_of_the_job

        stack, self._again = self._again, None
        places = [(Path(file).name, line) for file, line in stack or () if is_of_the_job(file)]
        return ":".join(map(str, places[0])) if places else ""


seeds = Seeds()
