"""The canary: one digest of a few kernels' results on fixed inputs, to see whether two processes compute the same bits at all.

The instruction set, the thread count, a library's version or the GPU's model change sums, matrix products, softmax, layer
normalisation and convolution gradients in their last bits (hazards K1, K2, K7). Where the canaries of two ranks, attempts or
legs differ, recovery is not what made the training differ.
"""

import torch
import xxhash

from chaosrun.observe.modes import outside_modes

LENGTH = 8192
"""Elements of the longest sum: long enough for every kernel to split it."""


def canary(device: torch.device) -> str:
    """16 hex digits, the same in any autograd or autocast context. Draws no random number and leaves no gradient behind."""
    hasher = xxhash.xxh3_64()
    with (
        outside_modes(),
        torch.inference_mode(False),
        torch.autocast(device.type, enabled=False),
        # The first pass may be one whose activations are checkpointed: what is computed here is none of them.
        torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged),
    ):
        # Irregular fractions, so that every order of summation rounds in its own way.
        values = torch.arange(1, LENGTH + 1, dtype=torch.float32, device=device).mul(0.6180339887).frac().sub(0.37)
        square = values[: 64 * 64].view(64, 64)
        images = values[: 2 * 4 * 16 * 16].view(2, 4, 16, 16)
        with torch.enable_grad():
            kernel = values[: 8 * 4 * 3 * 3].view(8, 4, 3, 3).clone().requires_grad_()
            torch.nn.functional.conv2d(images, kernel, padding=1).square().sum().backward()
        with torch.no_grad():
            results = (
                values.sum(),
                square @ square,
                values.view(8, -1).softmax(dim=1),
                torch.nn.functional.layer_norm(values.view(8, -1), (LENGTH // 8,)),
                kernel.grad,
            )
            for result in results:
                assert result is not None
                hasher.update(result.cpu().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
