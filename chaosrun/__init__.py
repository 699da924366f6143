"""chaosrun: kill a training job on purpose and prove, bit for bit, that it comes back.

What a training script needs: `dataloader_configuration` and `attach`; in a dataset, `sample_rng` or `reproducible`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chaosrun.protocol.randomness import reproducible, sample_rng, sample_streams
    from chaosrun.protocol.session import Session, attach
    from chaosrun.protocol.strategies import dataloader_configuration

__all__ = ["Session", "__version__", "attach", "dataloader_configuration", "reproducible", "sample_rng", "sample_streams"]

__version__ = "0.1.0"

_HOMES = {
    "Session": "chaosrun.protocol.session",
    "attach": "chaosrun.protocol.session",
    "dataloader_configuration": "chaosrun.protocol.strategies",
    "reproducible": "chaosrun.protocol.randomness",
    "sample_rng": "chaosrun.protocol.randomness",
    "sample_streams": "chaosrun.protocol.randomness",
}


def __getattr__(name: str) -> Any:
    # Lazy, so that `chaosrun --help` imports no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'chaosrun' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
