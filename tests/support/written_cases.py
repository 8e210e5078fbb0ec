"""Small checkpoints that each supported torch has written: an archive each in tests/checkpoint/written_by.

They were made after one step on two ranks under FSDP2, in each form through torch.distributed.checkpoint, and by a
Checkpointer. All numbers are such that the step is exact and a formula says what must be read. One more, of the torch
that runs:

    PYTHONPATH=.:tests python -c 'import written_cases; written_cases.add()'
"""

from __future__ import annotations

import math
import tarfile
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import distributed
from fused_optim import FusedAdam
from fused_optim.checkpoint import Checkpointer

FOLDER = Path(__file__).parents[1] / "checkpoint" / "written_by"
VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in FOLDER.iterdir())
FORMS = ("native", "unscaled")
CHECKPOINTER = "run"  # a folder of Checkpointer's, beside those named after forms
SHAPES = {"matrix": (5, 64), "vector": (10,)}  # int8 moments; a vector's stay FP32. Both sharded unevenly
LR, BETAS = 2.0**-12, (0.5, 0.75)


# --- the formula --------------------------------------------------------------------------------------------------


def start(name: str) -> Tensor:
    """Values from 1 to under 2, which BF16 has."""
    return 1 + torch.arange(math.prod(SHAPES[name])).remainder(8).view(SHAPES[name]) / 8


def gradient(name: str) -> Tensor:
    """Powers of two of both signs, up to another one in each row."""
    index = torch.arange(math.prod(SHAPES[name])).view(SHAPES[name])
    exponent = -index.remainder(3) - index.div(64, rounding_mode="floor")
    return torch.where(index % 5 < 2, -1.0, 1.0) * torch.exp2(exponent.float())


def master(name: str, steps: int = 1) -> Tensor:
    """With the same gradient in each step, bias correction makes every step LR long. BF16 cannot hold the result."""
    return start(name) - steps * LR * gradient(name).sign()


def moments(name: str) -> dict[str, Tensor]:
    grad = gradient(name)
    return {"exp_avg": (1 - BETAS[0]) * grad, "exp_avg_sq": (1 - BETAS[1]) * grad.square()}


# --- model and optimizer ------------------------------------------------------------------------------------------


def build(*, fresh: bool = False) -> tuple[nn.Module, FusedAdam]:
    """``fresh``: with other values and hyperparameters, to be loaded into."""
    model = nn.Module()
    for name in SHAPES:
        model.register_parameter(name, nn.Parameter((start(name) + 5 * fresh).bfloat16()))
    if torch.distributed.is_initialized():
        fully_shard(model, mesh=distributed.mesh())
    lr, betas = (0.5, (0.9, 0.999)) if fresh else (LR, BETAS)
    formats = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
    return model, FusedAdam(model.parameters(), lr=lr, betas=betas, eps=1e-16, **formats)


def step(model: nn.Module, optimizer: FusedAdam) -> None:
    for name, param in model.named_parameters():
        param.grad = distributed.shard_like(gradient(name).bfloat16(), param)
    optimizer.step()
    optimizer.zero_grad()


def write(folder: str) -> None:
    model, optimizer = build()
    step(model, optimizer)
    for form in FORMS:
        optimizer.checkpoint_format = form
        states = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states)), checkpoint_id=f"{folder}/{form}")
    with Checkpointer(model, optimizer, f"{folder}/{CHECKPOINTER}", sigterm=False) as checkpointer:
        checkpointer.save(1)


def add() -> None:
    version = torch.__version__.partition("+")[0]
    with tempfile.TemporaryDirectory() as folder, tarfile.open(FOLDER / f"{version}.tar.xz", "w:xz") as archive:
        distributed.run(2, write, folder)
        archive.add(folder, ".")
