"""What `pretraining.py` trains: a GPT with GPT-2's shapes, and every optimizer that it is trained with.

All runs compute with the same BF16 model. They differ by what their optimizers keep: FP32 copies of its parameters, or
the BF16 parameters themselves with what the optimizer adds to them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from fp8_training import RECIPES
from fused_optim import FusedAdam, FusedAdamW, FusedMuon
from fused_optim.compat import transformer_engine
from fused_optim.quantized import Recipe, UsualLayers, quantize_model_
from quality import HEAD_WIDTH, LARGEST_NORM, WEIGHT_DECAY

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from byte_gpt import Block

BETAS = (0.9, 0.95)
INITIAL = 0.02  # standard deviation of matrices, as GPT-2's

# --- the model ----------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """The mean cross-entropy, in nats per token, of ``targets`` given the last block's output."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class GPT(nn.Module):
    """12 layers of 768 with 25,344 tokens: 123.9 M parameters. Rotary positions, RMSNorm, no biases, untied head."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // HEAD_WIDTH)) for _ in range(layers))
        self.head = Head(width, vocabulary)
        for name, param in self.named_parameters():
            if param.dim() > 1:
                into_residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(param, std=INITIAL / (2 * layers) ** 0.5 if into_residual else INITIAL)

    def forward(self, windows: Tensor) -> Tensor:
        """The loss of predicting each token of (batch, length), int64, from those before it."""
        x = self.embedding(windows[:, :-1])
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x, windows[:, 1:])
        return loss

    def compile_parts(self) -> None:
        """One graph serves all blocks: seconds, where the whole model would take a minute."""
        for part in (*self.blocks, self.head):
            part.compile(fullgraph=True, dynamic=False)


def type_of(name: str) -> str:
    """Of a parameter: what it is in the model."""
    kinds = {"embedding": "embedding", "qkv": "attention qkv", "attention.out": "attention out", "mlp.": "MLP"}
    kinds["head.head"] = "head"
    return next((kind for part, kind in kinds.items() if part in name), "norms")


# --- runs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    label: str
    optimizer: Callable[..., Optimizer]
    copies: bool = False  # whether it holds FP32 copies of the BF16 parameters
    seed: int = 0
    recipe: Recipe | None = None  # of the weights, and of their products
    needs: str = ""  # a package
    cpu: bool = True
    named: bool = False  # whether the optimizer is given (name, parameter) pairs

    def obstacle(self, device: torch.device) -> str:
        """Why it cannot run; empty if it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"needs {self.needs}"
        return "" if self.cpu or device.type == "cuda" else "runs on GPUs only"


SEPARATE = {"master_weights": True}  # FP32 masters, which only the drop-in classes have beside BF16 parameters


def ours(label: str, states: torch.dtype, recipe: Recipe | None = None, seed: int = 0, **options: Any) -> Run:
    kind = transformer_engine.FusedAdam if "master_weights" in options else FusedAdamW
    optimizer = partial(kind, exp_avg_dtype=states, exp_avg_sq_dtype=states, **options)
    return Run(f"FusedAdamW {label}", optimizer, seed=seed, recipe=recipe)


def int8(seed: int = 0) -> Run:
    return ours("FP32 master, int8 states", torch.int8, seed=seed, **SEPARATE)


def remainder8(seed: int = 0) -> Run:
    return ours("8-bit remainder, int8 states", torch.int8, seed=seed, master_bits=24)


def fp8_products(recipe: str, seed: int = 0) -> Run:
    return ours(f"FP32 master, int8 states; {recipe}", torch.int8, RECIPES[recipe], seed, **SEPARATE)


def peer(label: str, path: str, copies: bool, **options: Any) -> Run:
    """``path``: the class, as module:name."""
    module, _, name = path.partition(":")

    def build(params: Iterable[Tensor], **common: Any) -> Optimizer:
        optimizer: Optimizer = getattr(importlib.import_module(module), name)(params, **common, **options)
        return optimizer

    return Run(label, build, copies, needs=module.partition(".")[0], cpu=False)


def fp32(seed: int) -> Run:
    return Run("torch AdamW, FP32", partial(torch.optim.AdamW, fused=True), True, seed)


MUONS_RATE = 20.0  # times AdamW's: 0.02, as usual, where that has 0.001
Named = list[tuple[str, Tensor]]


def muons_groups(named: Named, lr: float, betas: tuple[float, float], weight_decay: float) -> list[dict[str, Any]]:
    """The matrices of the blocks, whose weights decay as fast as others' do, and the rest."""
    matrices = {name for name, param in named if name.startswith("blocks.") and param.dim() == 2}
    muon = {"params": [pair for pair in named if pair[0] in matrices], "lr": MUONS_RATE * lr}
    rest = {"params": [pair for pair in named if pair[0] not in matrices], "lr": lr, "betas": betas}
    return [{**muon, "weight_decay": weight_decay / MUONS_RATE}, {**rest, "weight_decay": weight_decay}]


def fused_muon(named: Named, *, momentum: torch.dtype, **common: Any) -> FusedMuon:
    groups = muons_groups(named, **common)
    return FusedMuon([groups[0], {**groups[1], "algorithm": "adamw"}], momentum_dtype=momentum)


class TorchMuon:
    """torch.optim.Muon and AdamW, as one optimizer."""

    def __init__(self, named: Named, **common: Any) -> None:
        muon, rest = muons_groups(named, **common)
        self.optimizers: list[Optimizer] = [torch.optim.Muon([muon]), torch.optim.AdamW([rest], fused=True)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"both": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, own in zip(self.optimizers, state["both"], strict=True):
            optimizer.load_state_dict(own)


def muon(label: str, build: Callable[..., Any], seed: int, copies: bool = False) -> Run:
    return Run(label, build, copies, seed, named=True)


def muons(seed: int) -> dict[str, Run]:
    """The same matrices with Muon, the rest with AdamW."""
    ending = f"-seed{seed}" if seed else ""
    of_format = {"bf16": BF16, "int8": INT8}
    ours_ = {
        f"muon-{name}": muon(f"FusedMuon FP32 master, {name} momentum", partial(fused_muon, momentum=dtype), seed)
        for name, dtype in of_format.items()
    }
    both = {"muon-torch": muon("torch Muon and AdamW, FP32", TorchMuon, seed, copies=True), **ours_}
    return {f"{name}{ending}": run for name, run in both.items()}


BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
RUNS: dict[str, Run] = {  # in the order of their worth
    "fp32": fp32(0),
    "fp32-seed1": fp32(1),
    "int8": int8(),
    "remainder8-int8": remainder8(),
    "fp8": ours("FP32 master, FP8 states", FP8, **SEPARATE),
    "bf16": ours("FP32 master, BF16 states", BF16, **SEPARATE),
    "no-master-int8": ours("no master, int8 states", INT8, master_bits=0),
    "flash": peer("FlashAdamW, 24-bit master", "flashoptim:FlashAdamW", copies=False, master_weight_bits=24),
    "torchao": peer("torchao AdamW8bit, FP32 parameters", "torchao.optim:AdamW8bit", copies=True),
    "bitsandbytes": peer("bitsandbytes AdamW8bit, FP32 parameters", "bitsandbytes.optim:AdamW8bit", copies=True),
    "products-tensor": fp8_products("FP8, one scale"),
    "products-rows": fp8_products("FP8, rows, weight gradients BF16"),
    "products-blocks": fp8_products("FP8, blocks"),
    "products-delayed": fp8_products("FP8, one scale, delayed"),
    "products-rows-fp8": fp8_products("FP8, rows"),
    **muons(0),
    **muons(1),
    "int8-seed1": int8(1),
    "remainder8-int8-seed1": remainder8(1),
    "products-tensor-seed1": fp8_products("FP8, one scale", 1),
    "products-rows-seed1": fp8_products("FP8, rows, weight gradients BF16", 1),
    "products-blocks-seed1": fp8_products("FP8, blocks", 1),
}

# --- one run's model and optimizer --------------------------------------------------------------------------------


class Trainee:
    """A BF16 model and what its optimizer holds of it."""

    def __init__(self, run: Run, device: torch.device, shape: tuple[int, int, int], rate: float) -> None:
        torch.manual_seed(run.seed)
        self.model = GPT(*shape).to(device, BF16)  # drawn on the CPU: the same on every machine
        if run.recipe is not None:
            quantize_model_(self.model, run.recipe, UsualLayers())
        self.weights = [*self.model.parameters()]
        self.params = (
            [weight.detach().float().requires_grad_() for weight in self.weights] if run.copies else self.weights
        )
        names = [name for name, _ in self.model.named_parameters()]
        given: list[Any] = list(zip(names, self.params, strict=True)) if run.named else self.params
        self.optimizer = run.optimizer(given, lr=rate, betas=BETAS, weight_decay=WEIGHT_DECAY)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def backward(self, windows: Tensor) -> Tensor:
        """The loss; ``params`` have its gradients, clipped."""
        loss: Tensor = self.model(windows)
        loss.backward()
        if self.params is not self.weights:
            for param, weight in zip(self.params, self.weights):
                param.grad, weight.grad = weight.grad.float(), None
        if isinstance(self.optimizer, FusedAdam | FusedMuon):
            self.optimizer.clip_grad_norm_(LARGEST_NORM)
        else:
            nn.utils.clip_grad_norm_(self.params, LARGEST_NORM)
        return loss.detach()

    def step(self, share: float) -> None:
        """With a share of the learning rate."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):  # torchao's
                group["lr"].fill_(share * rate)
            else:
                group["lr"] = share * rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.write_weights()

    @torch.no_grad()
    def write_weights(self) -> None:
        if self.params is not self.weights:
            torch._foreach_copy_(self.weights, self.params)

    def state_dict(self) -> dict[str, Any]:
        params = [param.detach() for param in self.params]
        return {"params": params, "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for param, saved in zip(self.params, state["params"], strict=True):
            param.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.write_weights()
