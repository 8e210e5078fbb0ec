"""Makes weights of modules quantized, after or while they are built."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fused_optim.adapters import Update
from fused_optim.quantized import update
from fused_optim.quantized.recipes import Recipe
from fused_optim.quantized.tensor import QuantizedTensor, Shared, check_shape, local_weight
from fused_optim.sharding.dtensor import dense, local_tensor, rewrap_like, sharded_dim, sharding_dims

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
        keep_initial: keep the values that weights have now, until the optimizer has started its FP32 masters from them;
            frozen weights' are never kept.

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
        tied = {key: param for key, param in module._parameters.items() if param is not None and param in replaced}
        for key, param in tied.items():
            module._parameters[key] = replaced[param]
        if tied:
            module.register_load_state_dict_pre_hook(_quantize_assigned)
    finish_initialization(model)
    return model


@torch.no_grad()
def _quantize_assigned(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """``load_state_dict(assign=True)`` would make weights plain, or of another recipe, where the state dict's are."""
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for key, param in module._parameters.items():
        value, current = state_dict.get(prefix + key), None if param is None else local_tensor(param)
        if not isinstance(value, Tensor) or not isinstance(current, QuantizedTensor):
            continue
        local = local_tensor(value.detach())
        if not isinstance(local, QuantizedTensor) or local.recipe != current.recipe:
            target = QuantizedTensor.empty(current.recipe, local.shape, current.dtype, local.device)
            target._shared.shard, target._shared.name = isinstance(value, DTensor), prefix + key
            target.copy_(local)
            state_dict[prefix + key] = rewrap_like(target, value)


def _check(weight: Tensor, recipe: Recipe, name: str) -> None:
    local = local_tensor(weight)
    if isinstance(local, QuantizedTensor):
        raise ValueError(f"{name} is quantized already: {local.recipe}")
    try:
        check_shape(recipe, local.shape)
        _check_cuts(weight, recipe)
    except ValueError as error:
        raise ValueError(f"{name}, shape {tuple(weight.shape)}: {error}") from None


def _check_cuts(weight: Tensor, recipe: Recipe) -> None:
    """Raise ValueError where tensor parallelism has cut a block, on every rank."""
    if not isinstance(weight, DTensor):
        return
    for ranks, placement in zip(weight.device_mesh.shape, weight.placements, strict=True):
        dim = sharded_dim(placement)
        if dim is None or dim > 1:
            continue
        size = weight.shape[dim]
        chunk = -(-size // ranks)
        for start in range(0, size, chunk):
            problem = recipe.cut_problem(start, min(start + chunk, size), size, dim)
            if problem is not None:
                raise ValueError(f"{problem} (placements {tuple(weight.placements)})")


def _quantized(weight: Tensor, recipe: Recipe, keep_initial: bool, name: str) -> nn.Parameter:
    values = local_tensor(weight.detach())
    local = QuantizedTensor.empty(recipe, values.shape, values.dtype, values.device)
    local.components["initial"] = dense(values).view(values.shape[0], -1)
    local._shared = Shared(
        stale=values.device.type != "meta",
        discard=not (keep_initial and weight.requires_grad),
        shard=bool(sharding_dims(weight)),
        name=name,
    )
    return nn.Parameter(rewrap_like(local, weight), requires_grad=weight.requires_grad)


@torch.no_grad()
def finish_initialization(model: nn.Module) -> None:
    """Quantize the weights that plain values were written into since, with one reduction for all.

    To be called on all ranks after sharded weights got plain values: after ``model.to_empty(device=...)`` and
    ``model.apply(initialise)``, and after a state dict that is not quantized was loaded into weights whose recipe has a
    scale for all of a weight. Until then such weights raise where they are used.
    """
    params = [param for param in dict.fromkeys(model.parameters()) if isinstance(local_tensor(param), QuantizedTensor)]
    params = [param for param in params if not local_tensor(param).is_meta]
    updates = [Update(param, local_weight(param).initial_values()) for param in _stale(params)]
    for stale in updates:
        local_weight(stale.param).forget_scales()
    update.write(updates)


def _stale(params: Sequence[Tensor]) -> list[Tensor]:
    """What any rank has to quantize: ranks without rows have nothing, and the others' values count for all."""
    flags = {param: torch.tensor([float(local_weight(param).is_stale)]) for param in params}
    flags = {param: flag.to(local_tensor(param).device) for param, flag in flags.items()}
    return [param for param, flag in update.reduce_over_shards(flags).items() if flag.item()]


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

    nn.Linear.__init__ = build_quantized  # type: ignore[method-assign, assignment]  # for as long as the context lasts
    try:
        yield
    finally:
        nn.Linear.__init__ = build  # type: ignore[method-assign]
