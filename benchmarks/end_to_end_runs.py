"""What `end_to_end.py` compares: optimizers as their users set them up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from contenders import BF16, FP32, Contender, MastersAround, ours, peer, torch_adamw
from fused_optim.quantized import Float8DelayedScaling, quantize_model_
from llama import LeanLlama

LR = 3e-4
WARMUP = 20  # steps
WEIGHTS = Float8DelayedScaling(compute="fp8")  # of linear layers; their products run in FP8 as well

QUANTIZED = "FusedAdamW, FP8 weights, int8 states, FP32 masters"


def adamw(path: str, dtype: torch.dtype = BF16, dtensors: bool = True, **options: Any) -> Contender:
    """A peer's class, as module:name."""
    return peer("", 0, path, dtype=dtype, dtensors=dtensors, **options)


RUNS: dict[str, Contender] = {
    "torch AdamW fused, FP32 parameters": torch_adamw("", FP32, 28, fused=True),
    "torch AdamW fused around FP32 masters, BF16": Contender("", BF16, 28, MastersAround, dtensors=False),
    "torch AdamW fused, BF16 parameters, no masters": torch_adamw("", BF16, 14, fused=True),
    "bitsandbytes AdamW8bit, FP32 parameters": adamw("bitsandbytes.optim:AdamW8bit", FP32, dtensors=False),
    "bitsandbytes AdamW8bit, BF16, no master": adamw("bitsandbytes.optim:AdamW8bit", dtensors=False),
    "torchao AdamW8bit, FP32 parameters": adamw("torchao.optim:AdamW8bit", FP32),
    "torchao AdamW8bit, BF16, stochastic rounding": adamw("torchao.optim:AdamW8bit", bf16_stochastic_round=True),
    "FlashAdamW, BF16, 24-bit masters": adamw("flashoptim:FlashAdamW", master_weight_bits=24),
    "FusedAdamW, FP32 parameters": ours("", 0, FP32),
    "FusedAdamW, BF16, int8 states, 24-bit masters": ours("", 0, state_dtype="int8", master_bits=24),
    QUANTIZED: ours("", 0, state_dtype="int8"),
}


def build_optimizer(
    contender: Contender, model: LeanLlama, shard: Callable[[LeanLlama], LeanLlama]
) -> tuple[LeanLlama, Any]:
    """The model, cast, quantized and sharded as the optimizer's users do it, and the optimizer."""
    model = model.to(contender.dtype)
    if contender is RUNS[QUANTIZED]:
        quantize_model_(model, WEIGHTS)
    model = shard(model)
    return model, contender.build(list(model.parameters()))


def set_lr(optimizer: Any, factor: float) -> None:
    """A schedule's value, written as each optimizer wants it: torchao's is a tensor that is filled."""
    inner = optimizer.optimizer if isinstance(optimizer, MastersAround) else optimizer
    for group in inner.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(LR * factor)
        else:
            group["lr"] = LR * factor
