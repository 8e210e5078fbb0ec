"""The optimizers that `step.py` times: ours in the formats people use, and the peers that are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fused_optim import FusedAdamW

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Contender:
    """``build`` makes the optimizer; ``moved`` counts the bytes per parameter that one step must read and write."""

    name: str
    dtype: torch.dtype  # of parameters and gradients
    moved: float | None
    build: Callable[[Sequence[Tensor]], Any]
    needs: tuple[str, ...] = field(default=())  # modules that must be importable
    cpu: bool = True


def ours(name: str, moved: float, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Contender:
    return Contender(f"FusedAdamW {name}", dtype, moved, lambda params: FusedAdamW(params, **HYPER, **options))


def _states(exp_avg: torch.dtype, exp_avg_sq: torch.dtype | None = None) -> dict[str, torch.dtype]:
    return {"exp_avg_dtype": exp_avg, "exp_avg_sq_dtype": exp_avg_sq or exp_avg}


def _torch_adamw(**options: Any) -> Callable[[Sequence[Tensor]], Any]:
    return lambda params: torch.optim.AdamW(params, **HYPER, **options)


def _imported(module: str, name: str, **options: Any) -> Callable[[Sequence[Tensor]], Any]:
    return lambda params: getattr(importlib.import_module(module), name)(params, **HYPER, **options)


FP32, BF16, FP8, INT8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8
SPLIT16 = {"store_param_remainders": True}
SPLIT8 = {"store_param_remainders": True, "param_remainder_bits": 8}
SCALE = 2 * 4 / 128  # one FP32 scale per 128 elements, read and written

OURS = [
    ours("FP32", 28.0, FP32),
    ours("FP32 master, FP32 states", 28.0),
    ours("FP32 master, BF16 states", 20.0, **_states(BF16)),
    ours("FP32 master, FP8 states", 16.0 + 2 * SCALE, **_states(FP8)),
    ours("FP32 master, int8 states", 16.0 + 2 * SCALE, **_states(INT8)),
    ours("16-bit remainder, BF16 states", 18.0, **SPLIT16, **_states(BF16)),
    ours("16-bit remainder, FP8 states", 14.0 + 2 * SCALE, **SPLIT16, **_states(FP8)),
    ours("16-bit remainder, int8 states", 14.0 + 2 * SCALE, **SPLIT16, **_states(INT8)),
    ours("8-bit remainder, FP8 states", 12.0 + 2 * SCALE, **SPLIT8, **_states(FP8)),
    ours("8-bit remainder, int8 states", 12.0 + 2 * SCALE, **SPLIT8, **_states(INT8)),
    ours("no master, int8 states", 10.0 + 2 * SCALE, master_weights=False, **_states(INT8)),
]

PEERS = [
    Contender("torch AdamW fused, FP32", FP32, 28.0, _torch_adamw(fused=True)),
    Contender("torch AdamW foreach, FP32", FP32, 28.0, _torch_adamw(foreach=True)),
    Contender("torch AdamW fused, BF16, no master", BF16, 14.0, _torch_adamw(fused=True)),
    Contender(
        "Apex FusedAdam, FP32",
        FP32,
        28.0,
        _imported("apex.optimizers", "FusedAdam"),
        ("apex", "amp_C"),
        cpu=False,
    ),
    Contender(
        "TransformerEngine FusedAdam, FP32 master, FP32 states",
        BF16,
        28.0,
        _imported("transformer_engine.pytorch.optimizers", "FusedAdam", master_weights=True),
        ("transformer_engine",),
        cpu=False,
    ),
    Contender(
        "TransformerEngine FusedAdam, FP32 master, BF16 states",
        BF16,
        20.0,
        _imported("transformer_engine.pytorch.optimizers", "FusedAdam", master_weights=True, **_states(BF16)),
        ("transformer_engine",),
        cpu=False,
    ),
    Contender(
        "TransformerEngine FusedAdam, FP32 master, FP8 states",
        BF16,
        16.0,
        _imported("transformer_engine.pytorch.optimizers", "FusedAdam", master_weights=True, **_states(torch.uint8)),
        ("transformer_engine",),
        cpu=False,
    ),
    Contender(
        "FlashAdamW, 24-bit master, 8-bit states",
        BF16,
        12.0,
        _imported("flashoptim", "FlashAdamW", master_weight_bits=24),
        ("flashoptim",),
        cpu=False,
    ),
    Contender("torchao AdamW8bit", BF16, 10.0, _imported("torchao.optim", "AdamW8bit"), ("torchao",), cpu=False),
    Contender(
        "bitsandbytes AdamW8bit", BF16, 10.0, _imported("bitsandbytes.optim", "AdamW8bit"), ("bitsandbytes",), cpu=False
    ),
]


def available(contender: Contender, device: torch.device) -> bool:
    """Whether the contender can run on ``device`` with what is installed."""
    present = all(importlib.util.find_spec(module) is not None for module in contender.needs)
    return present and (contender.cpu or device.type == "cuda")
