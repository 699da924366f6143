"""A small convolutional network with batch normalisation, and a moving average of its weights. Knows nothing of the data."""

import torch
from torch import Tensor, nn

__all__ = ["DigitNet", "MovingAverage"]


class DigitNet(nn.Module):
    """Images of shape (batch, 1, 8, 8) to logits of shape (batch, 10)."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            # A stride instead of max-pooling, whose backward pass has no deterministic kernel on CUDA.
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 16, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class MovingAverage:
    """Exponential moving average of a module's parameters; its buffers are left to the module.

    `state_dict` and `load_state_dict` are all that a checkpoint needs of it.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights = {name: weight.detach().clone() for name, weight in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        for name, weight in module.named_parameters():
            self._weights[name].lerp_(weight, 1 - self._decay)

    @torch.no_grad()
    def copy_to(self, module: nn.Module) -> None:
        for name, weight in module.named_parameters():
            weight.copy_(self._weights[name])

    def state_dict(self) -> dict[str, Tensor]:
        return self._weights

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state.keys() != self._weights.keys():
            raise ValueError(f"the average is of {sorted(self._weights)}, the state is of {sorted(state)}")
        for name, weight in state.items():
            self._weights[name].copy_(weight)
