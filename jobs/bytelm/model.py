"""A small decoder-only transformer: pre-norm blocks, learned positions, causal attention. Knows nothing of data or training."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ByteLM"]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._drop(self._attend(self.norm_attention(hidden)))
        return hidden + self._drop(self.mlp(self.norm_mlp(hidden)))

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.query_key_value(hidden).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))

    def _drop(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, self.dropout, self.training)


class ByteLM(nn.Module):
    """Tokens of shape (batch, length ≤ context) to logits of shape (batch, length, vocabulary)."""

    def __init__(self, *, vocabulary: int, context: int, width: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(initialise)
        # Quieter than the tokens: in a short training what a byte is matters more than where it stands.
        nn.init.normal_(self.positions.weight, std=0.01)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.1)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
