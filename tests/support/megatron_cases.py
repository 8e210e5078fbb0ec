"""What the tests of Megatron-FSDP and Megatron-LM share: parameters of uneven rows, wrapped optimizers, training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import distributed
from cases import normal
from fused_optim.sharding.dtensor import local_tensor
from peers import FusedAdam, FusedMuon

SHAPES = {"matrix": (7, 64), "second": (7, 2, 32), "vector": (11,), "wide": (4, 128)}
ROWS = {  # by world size and rank
    1: {name: (shape[0],) for name, shape in SHAPES.items()},
    2: {"matrix": (3, 4), "second": (7, 0), "vector": (2, 9), "wide": (0, 4)},
    3: {"matrix": (5, 2, 0), "second": (0, 4, 3), "vector": (10, 0, 1), "wide": (1, 0, 3)},
}
F32, BF16 = torch.float32, torch.bfloat16
FORMATS = [F32, BF16, torch.float16, torch.float8_e4m3fn, torch.int8]
MASTERS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (F32, {}),
    "masters": (BF16, {}),
    "remainders": (BF16, {"store_param_remainders": True}),
    "24-bit": (BF16, {"store_param_remainders": True, "param_remainder_bits": 8}),
    "fp16": (BF16, {"master_weight_dtype": torch.float16}),
    "none": (BF16, {"master_weights": False}),
}


class Model:
    """What the wrapped optimizer calls of MegatronFSDP."""

    model_auto_sync = True

    def __init__(self) -> None:
        self.called: list[str] = []

    def install_optimized_model_weights(self) -> None:
        self.called.append("install")

    def zero_grad_buffer(self) -> None:
        self.called.append("zero")


def own_rows(name: str) -> slice:
    rows = ROWS[dist.get_world_size()][name]
    first = sum(rows[: dist.get_rank()])
    return slice(first, first + rows[dist.get_rank()])


def uneven(name: str, full: Tensor) -> DTensor:
    local = full[own_rows(name)].clone()
    options = {"run_check": False, "shape": full.shape, "stride": full.stride()}
    return DTensor.from_local(local, distributed.mesh(), [Shard(0)], **options)


def named_parameters(dtype: torch.dtype, fresh: bool) -> Iterator[tuple[str, nn.Parameter]]:
    from megatron_fsdp.uneven_dtensor import update_uneven_dtensor_chunk_metadata

    for i, (name, shape) in enumerate(SHAPES.items()):
        value = uneven(name, (normal(shape, i) * (0 if fresh else 1)).to(dtype))
        update_uneven_dtensor_chunk_metadata(value)
        yield name, nn.Parameter(value)  # which loses what the line above has set


def build_model(dtype: torch.dtype, fresh: bool) -> nn.ParameterDict:
    model = nn.ParameterDict(dict(named_parameters(dtype, fresh)))
    stand_in = Model()
    for param in model.parameters():
        param._megatron_fsdp_model = stand_in
    return model


def build_muon(kind: str, **options: Any) -> tuple[nn.ParameterDict, FusedMuon]:
    """Muon for matrices, the second one of experts; wrapped by the real ``fully_shard_optimizer``."""
    from megatron_fsdp.fully_shard import fully_shard_optimizer

    dtype, masters = MASTERS[kind]
    model = build_model(dtype, fresh=False)
    matrix, second, vector, wide = model.values()
    groups = [{"params": [matrix, second, wide], "experts": True}, {"params": [vector], "algorithm": "adamw"}]
    return model, fully_shard_optimizer(FusedMuon(groups, lr=0.02, **masters, **options))


def build(kind: str, *, fresh: bool = False, **options: Any) -> tuple[nn.ParameterDict, FusedAdam]:
    """Two param groups with their own settings, wrapped by the real ``fully_shard_optimizer``."""
    from megatron_fsdp.fully_shard import fully_shard_optimizer

    dtype, masters = MASTERS[kind]
    model = build_model(dtype, fresh)
    matrix, second, vector, wide = model.values()
    groups = [
        {"params": [matrix, vector], "weight_decay": 0.3},
        {"params": [second, wide], "lr": 0.02, "betas": (0.8, 0.9)},
    ]
    optimizer = FusedAdam(
        groups, lr=0.5 if fresh else 0.01, weight_decay=0.1, **masters, **options, decoupled_weight_decay=True
    )
    return model, fully_shard_optimizer(optimizer)


def train(
    model: nn.ParameterDict, optimizer: FusedAdam | FusedMuon, steps: range, grad_dtype: torch.dtype | None = None
) -> None:
    attribute = "decoupled_grad" if optimizer.use_decoupled_grad else "grad"
    for step in steps:
        for i, (name, param) in enumerate(model.items()):
            grad = normal(SHAPES[name], 100 * step + i).to(grad_dtype or param.dtype)
            rows = own_rows(name)
            setattr(param, attribute, uneven(name, grad) if rows.stop > rows.start else None)  # as Megatron-FSDP does
        optimizer.step()
        optimizer.zero_grad()


def contents(model: nn.Module, optimizer: FusedAdam | FusedMuon) -> dict[str, Tensor]:
    """This rank's parts of parameters, masters and moments, in host memory."""
    found = {f"{name} parameter": param.detach() for name, param in model.named_parameters()}
    found |= {f"{name} master": value for name, value in optimizer.master_state_dict(model).items()}
    for name, param in model.named_parameters():
        for moment in sorted({"exp_avg", "exp_avg_sq", "momentum_buffer"} & optimizer.state[param].keys()):
            found[f"{name} {moment}"] = optimizer.get_unscaled_state(param, moment)
    return {key: local_tensor(value).cpu().clone() for key, value in found.items()}


def joined(results: list[tuple[dict[str, Tensor], Any]]) -> dict[str, Tensor]:
    return {key: torch.cat([result[key] for result, _ in results]) for key in results[0][0]}


def state_options(fmt: torch.dtype) -> dict[str, Any]:
    return {"exp_avg_dtype": fmt, "exp_avg_sq_dtype": fmt}


def settings(optimizer: FusedAdam) -> list[tuple[float, float, tuple[float, float], int]]:
    return [(g["lr"], g["weight_decay"], g["betas"], g["step"]) for g in optimizer.param_groups]
