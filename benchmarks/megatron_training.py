"""What a training step under Megatron-FSDP costs with FusedAdamW and with torch.optim.AdamW: times and peak memory.

torchrun --nproc-per-node 2 benchmarks/megatron_training.py --output FILE
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from torch import nn
from torch.optim import AdamW, Optimizer

from fused_optim import FusedAdamW
from quantized import compare, parse_args, phases


def states(dtype: torch.dtype) -> dict[str, Any]:
    return {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}


# Class and options. Parameters are FP32 main weights, except where FusedAdamW keeps what BF16 weights lack of FP32.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "torch.optim.AdamW": (AdamW, {}),
    "torch.optim.AdamW, foreach": (AdamW, {"foreach": True}),
    "torch.optim.AdamW, fused": (AdamW, {"fused": True}),
    "FusedAdamW": (FusedAdamW, {}),
    "FusedAdamW, BF16": (FusedAdamW, states(torch.bfloat16)),
    "FusedAdamW, FP8": (FusedAdamW, states(torch.float8_e4m3fn)),
    "FusedAdamW, int8": (FusedAdamW, states(torch.int8)),
    "FusedAdamW, int8, 16-bit remainders": (FusedAdamW, {**states(torch.int8), "master_bits": 32}),
}


class Layer(nn.Linear):
    """What Megatron-FSDP gathers and releases as a whole."""


def measure(name: str, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    cls, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    layers = [Layer(args.width, args.width, bias=False, device=device) for _ in range(args.layers)]
    main = None if "master_bits" in options else torch.float32
    policy = MixedPrecisionPolicy(main_params_dtype=main)
    model = nn.Sequential(*layers).bfloat16()
    model = fully_shard_model(model, fsdp_unit_modules=[Layer], mixed_precision_policy=policy)
    optimizer = fully_shard_optimizer(cls(model.parameters(), lr=1e-4, **options))
    return phases(model, optimizer, args, device)


if __name__ == "__main__":
    compare(parse_args(__doc__), {name: functools.partial(measure, name) for name in OPTIMIZERS})
