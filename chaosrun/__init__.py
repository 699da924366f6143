"""chaosrun: kill a training job on purpose and prove, bit for bit, that it comes back.

A training script needs two names from here: `attach` and `sample_rng`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaosrun.train.randomness import sample_rng
    from chaosrun.train.session import Session, attach

__all__ = ["Session", "__version__", "attach", "sample_rng"]

__version__ = "0.1.0"

_HOMES = {"attach": "chaosrun.train.session", "Session": "chaosrun.train.session", "sample_rng": "chaosrun.train.randomness"}


def __getattr__(name: str) -> Any:
    # Lazy, so that `chaosrun --help` imports no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'chaosrun' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
