"""A small byte-level GPT, and the text it learns: the source files of Python's own standard library."""

import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token per byte value
ROTARY_BASE = 10000.0


def rotate_by_position(x: Tensor) -> Tensor:
    """Rotary position embedding of queries or keys (..., length, head width)."""
    length, width = x.shape[-2:]
    frequencies = ROTARY_BASE ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().type_as(x), angles.sin().type_as(x)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate_by_position(q), rotate_by_position(k), v, is_causal=True)
        output: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return output


class Block(nn.Module):
    """One pre-norm transformer layer. RMSNorm and softmax accumulate in FP32 whatever the parameters' dtype is."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class ByteGPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, windows: Tensor) -> Tensor:
        """The mean cross-entropy, in nats per byte, of predicting each byte of (batch, length) from those before it."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def load_corpus(max_bytes: int = 8_000_000, held_out_every: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the standard library's modules to train on, and those of every tenth module, held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = files[::held_out_every]
    training = [file for file in files if file not in held_out]
    return _read(training, max_bytes), _read(held_out, max_bytes)


def _read(files: list[Path], max_bytes: int) -> np.ndarray:
    return np.frombuffer(b"".join(file.read_bytes() for file in files)[:max_bytes], dtype=np.uint8)


def training_batch(corpus: np.ndarray, seed: int, step: int, batch: int, length: int) -> Tensor:
    """The whole batch of one step: a function of the seed and the step alone, so the same for every world size."""
    starts = np.random.default_rng((seed, step)).integers(len(corpus) - length, size=batch)
    return _windows(corpus, starts, length)


def evaluation_batches(corpus: np.ndarray, batches: int, batch: int, length: int) -> list[Tensor]:
    """Windows spread evenly over the held-out bytes."""
    starts = np.linspace(0, len(corpus) - length, batches * batch, dtype=np.int64)
    return list(_windows(corpus, starts, length).split(batch))


def _windows(corpus: np.ndarray, starts: np.ndarray, length: int) -> Tensor:
    return torch.from_numpy(corpus[starts[:, None] + np.arange(length)]).long()
