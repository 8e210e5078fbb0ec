"""A language model with the shapes of Llama 3.2 1B, for benchmarks that need a real forward and backward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HEAD = 64  # elements of an attention head
LOGITS_AT_ONCE = 2048  # tokens, whose logits are in FP32 at a time


class Block(nn.Module):
    def __init__(self, width: int, key_width: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_width, bias=False)
        self.value = nn.Linear(width, key_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        query, key, value = (
            project(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """``width``, ``key_width`` (of keys and values), ``hidden``: of the layers; the embedding is also the output's."""

    def __init__(self, layers: int, width: int, key_width: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, key_width, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss of predicting each token of ``(batch, length)`` from those before it."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        x, targets = self.norm(x).flatten(0, 1), tokens[:, 1:].flatten()
        parts = zip(x.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE), strict=True)
        return torch.stack([self.total_loss(*part) for part in parts]).sum() / targets.numel()

    def total_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses of some tokens, from the last layer's output."""
        return F.cross_entropy(F.linear(x, self.embedding.weight).float(), targets, reduction="sum")


class LeanLlama(Llama):
    """Computes logits again in the backward pass, so that they are never all there: usual for large vocabularies."""

    def total_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return checkpoint(super().total_loss, x, targets, use_reentrant=False)


# Arguments of Llama: of 3.2 1B (1.236 B parameters in 146 tensors), 3.1 8B but with one embedding (7.5 B), and 3 M
# parameters, to try a benchmark.
SIZES = {
    "1b": (16, 2048, 512, 8192, 128256),
    "8b": (32, 4096, 1024, 14336, 128256),
    "small": (2, 256, 128, 1024, 4096),
}


def llama_1b() -> Llama:
    return Llama(*SIZES["1b"])


def small_llama() -> Llama:
    return Llama(*SIZES["small"])
