"""The optimizers that `step.py` times: ours in the formats people use, and the peers that are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fused_optim import FusedAdamW, FusedAdEMAMix
from fused_optim.compat import transformer_engine as compat
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Recipe,
)

HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Contender:
    """``build`` makes the optimizer; ``moved`` counts the bytes per parameter that one step must read and write.

    Where it can run: ``needs`` modules that can be imported, parameters on ``gpu`` or ``cpu``, ``dtensors`` or only
    plain tensors (kernels that are given a DTensor's address read memory that is not theirs).
    """

    name: str
    dtype: torch.dtype  # of parameters and gradients
    moved: float
    build: Callable[[Sequence[Tensor]], Any]
    needs: tuple[str, ...] = field(default=())
    gpu: bool = True
    cpu: bool = True
    dtensors: bool = True


FP32, BF16, FP16, FP8, INT8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8


def states(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}


# --- ours -------------------------------------------------------------------------------------------------------

SEPARATE: dict[str, Any] = {"master_weights": True}  # only the drop-in classes have these
SPLIT16: dict[str, Any] = {"master_bits": 32}
SPLIT8: dict[str, Any] = {"master_bits": 24}
NO_MASTER: dict[str, Any] = {"master_bits": 0}
SCALES = 2 * 2 * 4 / 128  # of both moments: one FP32 scale per 128 elements, read and written


def ours(name: str, moved: float, dtype: torch.dtype = BF16, **options: Any) -> Contender:
    kind = compat.FusedAdam if "master_weights" in options else FusedAdamW
    return Contender(f"FusedAdamW {name}", dtype, moved, lambda params: kind(params, **HYPER, **options))


OURS = [
    ours("FP32", 28, FP32),
    ours("FP32 master, FP32 states", 28, **SEPARATE),
    ours("FP32 master, BF16 states", 20, **SEPARATE, **states(BF16)),
    ours("FP32 master, FP16 states", 20 + SCALES, **SEPARATE, **states(FP16)),
    ours("FP32 master, FP8 states", 16 + SCALES, **SEPARATE, **states(FP8)),
    ours("FP32 master, int8 states", 16 + SCALES, **SEPARATE, **states(INT8)),
    ours("16-bit remainder, FP32 states", 26, **SPLIT16),
    ours("16-bit remainder, BF16 states", 18, **SPLIT16, **states(BF16)),
    ours("16-bit remainder, FP8 states", 14 + SCALES, **SPLIT16, **states(FP8)),
    ours("16-bit remainder, int8 states", 14 + SCALES, **SPLIT16, **states(INT8)),
    ours("8-bit remainder, BF16 states", 16, **SPLIT8, **states(BF16)),
    ours("8-bit remainder, FP8 states", 12 + SCALES, **SPLIT8, **states(FP8)),
    ours("8-bit remainder, int8 states", 12 + SCALES, **SPLIT8, **states(INT8)),
    ours("no master, BF16 states", 14, **NO_MASTER, **states(BF16)),
    ours("no master, FP8 states", 10 + SCALES, **NO_MASTER, **states(FP8)),
    ours("no master, int8 states", 10 + SCALES, **NO_MASTER, **states(INT8)),
]


def quantized(name: str, written: float, recipe: Recipe, moments: torch.dtype = INT8) -> Contender:
    """Weights of a recipe with FP32 masters; ``written``: bytes per element that a step writes of them."""

    def build(params: Sequence[Tensor]) -> FusedAdamW:
        weights = []
        for param in params:
            weight = param
            if param.dim() > 1:
                weight = nn.Parameter(QuantizedTensor.from_values(param.detach(), recipe))
                weight.grad = param.grad
            weights.append(weight)
        return FusedAdamW(weights, **HYPER, **states(moments))

    of_states = 16 if moments is FP32 else 4 + SCALES
    return Contender(f"FusedAdamW {name}", BF16, 10 + of_states + written, build, dtensors=False)


OURS += [
    quantized("MXFP8 weights, int8 states", 1 + 1 / 32, MXFP8BlockScaling()),
    quantized("MXFP8 weights, FP32 states", 1 + 1 / 32, MXFP8BlockScaling(), FP32),
    quantized("FP8 weights (1, 128), int8 states", 1 + 4 / 128, Float8BlockScaling((1, 128))),
    quantized("FP8 weights delayed, int8 states", 1, Float8DelayedScaling()),
    quantized("FP8 weights current, int8 states", 1 + 4, Float8CurrentScaling()),  # reads the master again
    quantized("FP8 weights (128, 128), int8 states", 1 + 4, Float8BlockScaling()),
    quantized("NVFP4 weights, int8 states", 0.5625 + 4, NVFP4BlockScaling()),
]


def ademamix(name: str, moved: float, dtype: torch.dtype, moments: torch.dtype, **options: Any) -> Contender:
    own = HYPER | {"betas": (*HYPER["betas"], 0.9999)} | states(moments) | {"exp_avg_slow_dtype": moments} | options
    return Contender(f"FusedAdEMAMix {name}", dtype, moved, lambda params: FusedAdEMAMix(params, **own))


OURS += [
    ademamix("FP32", 36, FP32, FP32),
    ademamix("16-bit remainder, BF16 states", 22, BF16, BF16, **SPLIT16),
    ademamix("16-bit remainder, int8 states", 16 + 1.5 * SCALES, BF16, INT8, **SPLIT16),
    ademamix("8-bit remainder, FP8 states", 14 + 1.5 * SCALES, BF16, FP8, **SPLIT8),
]


# --- peers ------------------------------------------------------------------------------------------------------


class MastersAround:
    """What a training loop does by hand: torch's fused AdamW on FP32 copies of BF16 parameters."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = list(params)
        self.masters = [param.detach().float().requires_grad_() for param in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **HYPER)
        self.state = self.optimizer.state

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self.params, self.masters):
            master.grad = param.grad.float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(self.params, self.masters)


class ApexMasters:
    """Apex's kernel with FP32 masters, called directly: its FusedAdam leaves the masters of BF16 parameters unused."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = [param.detach() for param in params]
        self.grads = [param.grad for param in params]
        self.masters = [param.float() for param in self.params]
        self.exp_avgs = [torch.zeros_like(master) for master in self.masters]
        self.exp_avg_sqs = [torch.zeros_like(master) for master in self.masters]
        device = self.params[0].device
        self.step_count = torch.zeros(1, dtype=torch.int32, device=device)
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)
        self.lr = torch.tensor(HYPER["lr"], dtype=FP32, device=device)
        self.inverse_scale = torch.ones(1, device=device)
        self.apply = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
        self.kernel = importlib.import_module("amp_C").multi_tensor_adam_capturable_master

    def step(self) -> None:
        self.step_count += 1
        lists = [self.grads, self.params, self.exp_avgs, self.exp_avg_sqs, self.masters]
        hyper = (self.lr, *HYPER["betas"], HYPER["eps"], self.step_count, 1, 1, HYPER["weight_decay"])
        self.apply(self.kernel, self.overflow, lists, *hyper, self.inverse_scale)


def deepspeed(name: str, dtype: torch.dtype, moved: float, **options: Any) -> Contender:
    def build(params: Sequence[Tensor]) -> Any:
        return importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(params, **HYPER, **options)

    return Contender(f"DeepSpeed CPUAdam {name}", dtype, moved, build, ("deepspeed",), gpu=False, dtensors=False)


def torch_adamw(name: str, dtype: torch.dtype, moved: float, **options: Any) -> Contender:
    return Contender(f"torch AdamW {name}", dtype, moved, lambda params: torch.optim.AdamW(params, **HYPER, **options))


def peer(
    name: str, moved: float, path: str, *needs: str, dtype: torch.dtype = BF16, dtensors: bool = True, **options: Any
) -> Contender:
    """``path``: the class, as module:name. Imported only when it is built, since some peers import slowly."""
    module, _, cls = path.partition(":")

    def build(params: Sequence[Tensor]) -> Any:
        return getattr(importlib.import_module(module), cls)(params, **HYPER, **options)

    return Contender(name, dtype, moved, build, (module.partition(".")[0], *needs), cpu=False, dtensors=dtensors)


def transformer_engine(name: str, moved: float, dtype: torch.dtype = BF16, **options: Any) -> Contender:
    path = "transformer_engine.pytorch.optimizers:FusedAdam"
    return peer(f"TransformerEngine {name}", moved, path, dtype=dtype, **options)


MASTER: dict[str, Any] = {"master_weights": True}
REMAINDERS: dict[str, Any] = {"master_weights": True, "store_param_remainders": True}
TE_FP8 = torch.uint8  # TransformerEngine's spelling of its FP8 states
GROUP_SCALES = 2 * 2 * 2 / 32  # FlashOptim's, of both moments: one FP16 scale per 32 elements

PEERS = [
    torch_adamw("fused, FP32", FP32, 28, fused=True),
    torch_adamw("foreach, FP32", FP32, 28, foreach=True),
    torch_adamw("fused, BF16, no master", BF16, 14, fused=True),
    Contender("torch AdamW fused around FP32 masters", BF16, 28, MastersAround, dtensors=False),  # no foreach copies
    peer("Apex FusedAdam, FP32", 28, "apex.optimizers:FusedAdam", "amp_C", dtype=FP32, dtensors=False),
    Contender(
        "Apex capturable kernel, FP32 master", BF16, 28, ApexMasters, ("apex", "amp_C"), cpu=False, dtensors=False
    ),
    transformer_engine("FP32", 28, FP32),
    transformer_engine("FP32 master, FP32 states", 28, **MASTER),
    transformer_engine("16-bit remainder, FP32 states", 26, **REMAINDERS),
    transformer_engine("FP32 master, BF16 states", 20, **MASTER, **states(BF16)),
    transformer_engine("16-bit remainder, BF16 states", 18, **REMAINDERS, **states(BF16)),
    transformer_engine("FP32 master, FP16 states", 20, **MASTER, **states(FP16)),
    transformer_engine("FP32 master, FP8 states", 16, **MASTER, **states(TE_FP8)),
    transformer_engine("16-bit remainder, FP8 states", 14, **REMAINDERS, **states(TE_FP8)),
    peer("FlashAdamW 24-bit master", 12 + GROUP_SCALES, "flashoptim:FlashAdamW", master_weight_bits=24),
    peer("FlashAdamW 32-bit master", 14 + GROUP_SCALES, "flashoptim:FlashAdamW", master_weight_bits=32),
    peer("torchao AdamW8bit, no master", 10 + 2 * 2 * 4 / 256, "torchao.optim:AdamW8bit"),
    peer("torchao AdamWFp8, no master", 10 + 2 * 2 * 4 / 256, "torchao.optim:AdamWFp8"),
    peer("torchao AdamW4bit, no master", 8 + 2 * 2 * 4 / 128, "torchao.optim:AdamW4bit"),
    peer("bitsandbytes AdamW8bit, no master", 10 + 2 * 2 * 4 / 256, "bitsandbytes.optim:AdamW8bit", dtensors=False),
    deepspeed("FP32", FP32, 28),
    deepspeed("BF16, BF16 states, no master", BF16, 14, fp32_optimizer_states=False),
]


def obstacle(contender: Contender, device: torch.device, dtensors: bool) -> str:
    """Why the contender cannot run on parameters of ``device`` that are ``dtensors`` or not; empty if it can."""
    missing = [module for module in contender.needs if importlib.util.find_spec(module) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    if device.type != "cuda" and not contender.cpu:
        return "runs on GPUs only"
    if device.type == "cuda" and not contender.gpu:
        return "runs on CPUs only"
    return "takes no DTensors" if dtensors and not contender.dtensors else ""
