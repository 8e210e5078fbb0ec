"""Makes weights of modules quantized, after or while they are built."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fused_optim.dtensor import local_tensor, rewrap_like
from fused_optim.quantized import update
from fused_optim.quantized.protocol import Update
from fused_optim.quantized.recipes import Recipe
from fused_optim.quantized.tensor import QuantizedTensor, check_shape

Filter = Callable[[nn.Module, str], bool]


def _is_linear(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear)


@torch.no_grad()
def quantize_model_(
    model: nn.Module, recipe: Recipe, filter_fn: Filter | None = None, *, keep_initial: bool = True
) -> nn.Module:
    """Replace ``weight`` of modules by a quantized parameter, in place, and return ``model``.

    After tensor parallelism and before ``fully_shard``. Weights may be on the meta device. Tied weights stay tied.

    Args:
        filter_fn: ``filter_fn(module, name) -> bool``: which modules. Default: every ``nn.Linear``.
        keep_initial: keep the values that weights have now, until the optimizer has started its FP32 masters from them.

    Raises:
        ValueError: for a weight that the recipe cannot quantize, or a model that is sharded already.
    """
    chosen = [
        (module, f"{name}.weight" if name else "weight")
        for name, module in model.named_modules()
        if (filter_fn or _is_linear)(module, name)
    ]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            raise ValueError("quantize_model_ after fully_shard: the order is tensor parallelism, quantization, FSDP")
    for module, name in chosen:
        _check(module.weight, recipe, name)
    replaced: dict[Tensor, nn.Parameter] = {}
    for module, name in chosen:
        weight = module.weight
        if weight not in replaced:
            replaced[weight] = _quantized(weight, recipe, keep_initial, name)
    for module in model.modules():  # tied weights have the same parameter in modules that were not chosen, too
        for key, param in list(module._parameters.items()):
            if param is not None and param in replaced:
                module._parameters[key] = replaced[param]
    finish_initialization(model)
    return model


def _check(weight: Tensor, recipe: Recipe, name: str) -> None:
    if isinstance(local_tensor(weight), QuantizedTensor):
        raise ValueError(f"{name} is quantized already: {local_tensor(weight).recipe}")
    try:
        check_shape(recipe, local_tensor(weight).shape)
        _check_cuts(weight, recipe)
    except ValueError as error:
        raise ValueError(f"{name}, shape {tuple(weight.shape)}: {error}") from None


def _check_cuts(weight: Tensor, recipe: Recipe) -> None:
    """Raise ValueError where tensor parallelism has cut a block, on every rank."""
    if not isinstance(weight, DTensor):
        return
    for ranks, placement in zip(weight.device_mesh.shape, weight.placements, strict=True):
        if placement.is_replicate() or placement.dim > 1:
            continue
        size = weight.shape[placement.dim]
        chunk = -(-size // ranks)
        for start in range(0, size, chunk):
            problem = recipe.cut_problem(start, min(start + chunk, size), size, placement.dim)
            if problem is not None:
                raise ValueError(f"{problem} (placements {tuple(weight.placements)})")


def _quantized(weight: Tensor, recipe: Recipe, keep_initial: bool, name: str) -> nn.Parameter:
    values = local_tensor(weight.detach())
    local = QuantizedTensor.empty(recipe, values.shape, values.dtype, values.device)
    local.components["initial"] = values.contiguous().view(values.shape[0], -1)
    stale = values.device.type != "meta"
    local._shared.update(stale=stale, discard=not keep_initial, name=name)
    return nn.Parameter(rewrap_like(local, weight), requires_grad=weight.requires_grad)


@torch.no_grad()
def finish_initialization(model: nn.Module) -> None:
    """Quantize the weights whose initial values were changed since, with one reduction for all.

    To be called on all ranks after weights that were on the meta device have been given values:
    ``model.to_empty(device=...)``, ``model.apply(initialise)``, ``finish_initialization(model)``.
    """
    params = [param for param in dict.fromkeys(model.parameters()) if isinstance(local_tensor(param), QuantizedTensor)]
    stale = [param for param in params if local_tensor(param).is_stale and not local_tensor(param).is_meta]
    update.write([Update(param, local_tensor(param).initial_values()) for param in stale])
    for param in params:
        local = local_tensor(param)
        if local._shared.pop("discard", False) and not local.is_meta:
            local.discard_high_precision_init()


@contextmanager
def quantized_model_init(recipe: Recipe) -> Iterator[None]:
    """Within this context every ``nn.Linear`` is built with a quantized weight, also on the meta device.

    Its initial values are kept until the optimizer has started its FP32 masters from them.
    """
    build = nn.Linear.__init__

    @functools.wraps(build)
    def build_quantized(module: nn.Linear, *args: Any, **kwargs: Any) -> None:
        build(module, *args, **kwargs)
        quantize_model_(module, recipe, lambda candidate, _: candidate is module)

    nn.Linear.__init__ = build_quantized  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.__init__ = build  # type: ignore[method-assign]
