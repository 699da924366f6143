"""The global random streams of one rank, captured whole, restored strictly, and digested.

accelerate ignores errors when it restores them (accelerate#4283, hazard R2), and restores by device index (R8).
Here a missing stream is an error, and only the rank's own device is touched.
"""

import random
from typing import Any

import numpy
import torch
import xxhash

Streams = dict[str, Any]
"""The state of every stream of random numbers, as its library gives it."""


def capture_rng(device: torch.device) -> Streams:
    """The streams as values that `torch.load(weights_only=True)` accepts: python, numpy, torch, and cuda on a CUDA device."""
    name, keys, position, has_gauss, gauss = numpy.random.get_state()
    state: Streams = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(numpy.asarray(keys).copy()), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Streams, device: torch.device) -> None:
    """Put every stream back. Raises KeyError when a stream of this device is missing from `state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy(), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def digest_rng(device: torch.device) -> dict[str, str]:
    """One 64-bit digest per stream, 16 hex digits."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    streams = {
        "python": numpy.array(internal, dtype=numpy.uint64).tobytes() + repr((version, gauss)).encode(),
        "numpy": numpy.asarray(keys).tobytes() + repr((name, int(position), int(has_gauss), float(cached))).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return {stream: xxhash.xxh3_64_hexdigest(data) for stream, data in streams.items()}
