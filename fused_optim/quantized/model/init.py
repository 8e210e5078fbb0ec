"""Makes weights of modules quantized, after these are built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fused_optim.adapters import Update
from fused_optim.memory import copies
from fused_optim.memory.replaced import mark_replaced
from fused_optim.quantized.adapters import update
from fused_optim.quantized.fp8 import linear
from fused_optim.quantized.fp8.kept import follow_kept_weights, kept_like, kept_weight
from fused_optim.quantized.model.selection import (
    Chosen,
    Filter,
    ParamFilter,
    Recipes,
    check_arguments,
    chosen_parameters,
    warn_of_plain,
)
from fused_optim.quantized.recipes import (
    WHOLE,
    Position,
    Recipe,
    as_matrix,
    check_dtype,
    check_shape,
    matrix_range,
    shares_blocks,
)
from fused_optim.quantized.tensor import (
    INITIAL,
    QuantizedTensor,
    Shared,
    as_initial,
    local_weight,
)
from fused_optim.sharding.dtensor import (
    dense,
    local_tensor,
    rewrap_like,
    shard_offsets,
    shard_ranges,
    sharded_dim,
    sharding_dims,
)


def quantize_model_(
    model: nn.Module,
    recipe: Recipes,
    filter_fn: Filter | None = None,
    *,
    param_filter: ParamFilter | None = None,
    keep_initial: bool = True,
) -> nn.Module:
    """Replace weights of modules by quantized parameters, in place, and return ``model``.

    After tensor parallelism, before ``fully_shard`` and before optimizers are made: one of this package that holds the
    former weights raises in its next step. Weights may be on the meta device. Tied weights stay tied. With
    ``keep_weights=True`` in a recipe they become :class:`~fused_optim.quantized.KeptWeight` instead.

    Args:
        recipe: one for all; or several by patterns of names, ``{"*.attn.*": Float8CurrentScaling(), ...}``, as
            ``fnmatch`` has them, of linear layers and of parameters with three dims (experts): the first pattern that
            matches the name of a parameter, or of its layer, says how it is quantized (None: not at all), and what
            none matches stays plain.
        filter_fn: ``filter_fn(module, name) -> bool``: the modules whose ``weight`` is quantized. Default: every
            ``nn.Linear`` but output heads, by their names (``lm_head``), and what shares its weight with an
            ``nn.Embedding``, and PEFT's adapters. A warning names weights of experts that stay plain, or says that no
            weight is quantized.
        param_filter: instead, ``param_filter(param, name) -> bool``: the parameters, by their names in the model, such
            as the weights of experts (three dims: the first counts rows, as of all weights) and ``in_proj_weight``.
        keep_initial: keep the values that weights have now, until the optimizer has started its FP32 masters from them,
            or until they are used as frozen ones. Those of weights that are frozen now are not kept.

    Raises:
        TypeError: for what is no recipe, for parameters that are not float32, bfloat16 or float16.
        ValueError: for a pattern that matches nothing, tied weights with several recipes, a weight that the recipe
            cannot quantize, that is quantized already, offloaded by Accelerate, or no parameter (parametrized modules),
            for a module without a weight, or a model that is sharded or in DDP already. Nothing has been changed then.
    """
    check_arguments(recipe, filter_fn, param_filter)
    chosen = chosen_parameters([model], recipe, filter_fn, param_filter)
    replace_parameters([model], chosen, keep_initial=keep_initial)
    if filter_fn is None and param_filter is None and not isinstance(recipe, Mapping):
        warn_of_plain([model], chosen, stacklevel=3)
    return model


@torch.no_grad()
def replace_parameters(models: Sequence[nn.Module], chosen: Sequence[Chosen], *, keep_initial: bool) -> None:
    """Replace them in all of these models, or raise what :func:`quantize_model_` does and change nothing."""
    modules = list(dict.fromkeys(module for model in models for module in model.modules()))
    for module in modules:
        _check_not_sharded(module)
    recipes = [each.recipe.for_shape(tuple(each.param.shape)) for each in chosen]
    for each, own in zip(chosen, recipes, strict=True):
        _check(each.param, own, each.name)
    replaced: dict[Tensor, nn.Parameter] = {}
    for each, own in zip(chosen, recipes, strict=True):
        if each.param not in replaced:
            replaced[each.param] = _quantized(each.param, own, keep_initial, each.name)
    for module in modules:  # tied weights have the same parameter in modules that were not chosen, too
        tied = {key: param for key, param in module._parameters.items() if param is not None and param in replaced}
        for key, param in tied.items():
            module._parameters[key] = replaced[param]
        if any(kept_weight(replaced[param]) is not None for param in tied.values()):
            follow_kept_weights(module)
        if tied:
            module.register_load_state_dict_pre_hook(_refuse_codes)
            module.register_load_state_dict_pre_hook(_quantize_assigned)
            linear.convert(module)
    mark_replaced(replaced, "quantize_model_ has replaced it; make the optimizer after quantize_model_")
    _finish(param for module in modules for param in module._parameters.values() if param is not None)


def _check_not_sharded(module: nn.Module) -> None:
    """Raise ValueError for what holds on to the parameters that were there before."""
    if isinstance(module, FSDPModule | FullyShardedDataParallel):
        raise ValueError("quantize_model_ after fully_shard: the order is tensor parallelism, quantization, FSDP")
    if isinstance(module, DistributedDataParallel):
        raise ValueError(
            "quantize_model_ after DistributedDataParallel, which would not reduce the gradients of new parameters: "
            "the order is tensor parallelism, quantization, DDP"
        )


def _refuse_codes(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Codes of files for inference servers would be taken for values."""
    for key, param in module._parameters.items():
        beside = {f"{key}{suffix}" for suffix in ("_scale", "_scale_inv", "_packed")} - {*module._parameters}
        if isinstance(param, Tensor) and any(f"{prefix}{name}" in state_dict for name in beside):
            raise ValueError(
                f"{prefix}{key}: the state dict has codes and scales, of files for inference servers: read "
                "these by load_quantized_safetensors"
            )


@torch.no_grad()
def _quantize_assigned(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """Hook before ``load_state_dict``: with ``assign=True``, replace values by weights in the recipe of the module's.

    Otherwise a state dict with plain weights, or of another recipe, would replace the quantized ones.
    """
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for key, param in module._parameters.items():
        value, current = state_dict.get(prefix + key), None if param is None else local_tensor(param)
        if not isinstance(value, Tensor) or not isinstance(current, QuantizedTensor):
            continue
        local = local_tensor(value.detach())
        if not isinstance(local, QuantizedTensor) or local.recipe != current.recipe:
            position = replace(current.position, rows=None) if local.shape == current.shape else WHOLE
            shared = Shared(shard=isinstance(value, DTensor), name=prefix + key, position=position)
            target = QuantizedTensor.empty(current.recipe, local.shape, current.dtype, local.device, shared=shared)
            if current.has_initial and not current.shared.discard:
                initial = as_initial(local)
                target.components[INITIAL] = initial.view(as_matrix(tuple(local.shape)))
                if not isinstance(local, QuantizedTensor) or not current.recipe.same_format(local.recipe):
                    local = initial
            target.copy_(local)
            state_dict[prefix + key] = rewrap_like(target, value)


def _check(weight: Tensor, recipe: Recipe, name: str) -> None:
    local = local_tensor(weight)
    if isinstance(local, QuantizedTensor):
        raise ValueError(f"{name} is quantized already: {local.recipe}")
    kept = kept_weight(weight)
    if kept is not None:
        raise ValueError(f"{name} is quantized already, where it is used: {kept.recipe}")
    try:
        check_dtype(weight.dtype)
        check_shape(recipe, local.shape)
        if not recipe.keeps_weights:  # each rank quantizes what it multiplies with
            _check_cuts(weight, recipe)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}, shape {tuple(weight.shape)}: {error}") from None


def _check_cuts(weight: Tensor, recipe: Recipe) -> None:
    """Raise ValueError, on every rank, if tensor parallelism has cut a weight within a block or in dims from 2 on."""
    if not isinstance(weight, DTensor):
        return
    for dim in sorted({dim for dim in map(sharded_dim, weight.placements) if dim is not None}):
        if dim > 1:
            raise ValueError(f"quantized weights can be cut in dims 0 and 1 only, got {tuple(weight.placements)}")
        shape = tuple(weight.shape)
        for start, end in shard_ranges(shape, weight.device_mesh, weight.placements, dim):
            problem = recipe.cut_problem(*matrix_range(shape, dim, start, end), as_matrix(shape)[dim], dim)
            if problem is not None:
                ranks = ", ".join(map(str, recipe.fitting_ranks(shape, dim)))
                raise ValueError(f"{problem} (placements {tuple(weight.placements)}). It can be cut on {ranks} ranks")


def _position(weight: Tensor, recipe: Recipe) -> Position:
    if not isinstance(weight, DTensor) or recipe.block_rows == 1:
        return WHOLE
    starts = [start for start, _ in shard_ranges(tuple(weight.shape), weight.device_mesh, weight.placements, 0)]
    return Position(shard_offsets(weight)[0] % recipe.block_rows, shares_blocks(recipe, 0, starts))


def _quantized(weight: Tensor, recipe: Recipe, keep_initial: bool, name: str) -> nn.Parameter:
    if recipe.keeps_weights:
        return nn.Parameter(kept_like(weight.detach(), recipe), requires_grad=weight.requires_grad)
    values = local_tensor(weight.detach())
    shared = Shared(
        pending=values.device.type != "meta",
        discard=not (keep_initial and weight.requires_grad),
        shard=bool(sharding_dims(weight)),
        in_layer=False,
        name=name,
        position=_position(weight, recipe),
    )
    local = QuantizedTensor.empty(recipe, values.shape, values.dtype, values.device, shared=shared)
    local.components[INITIAL] = dense(values).view(as_matrix(tuple(values.shape)))
    return nn.Parameter(rewrap_like(local, weight), requires_grad=weight.requires_grad)


@torch.no_grad()
def finish_initialization(model: nn.Module) -> None:
    """Quantize the weights that plain values were written into since, with one reduction for all.

    To be called on all ranks after sharded weights got plain values: after ``model.to_empty(device=...)`` and
    ``model.apply(initialise)``, and after a state dict that is not quantized was loaded into weights whose recipe has a
    scale for all of a weight. Until then such weights raise where they are used.
    """
    _finish(model.parameters())


def _finish(all_params: Iterable[nn.Parameter]) -> None:
    params = [param for param in dict.fromkeys(all_params) if isinstance(local_tensor(param), QuantizedTensor)]
    params = [param for param in params if not local_tensor(param).is_meta]
    for param in params:
        if not param.requires_grad:
            local_weight(param).release()
    updates = [Update(param, local_weight(param).initial_values()) for param in _pending(params)]
    copies.wait_for_saves()
    for pending in updates:
        local_weight(pending.param).forget_scales()
    update.quantize(updates)


def discard_high_precision_init(model: nn.Module) -> None:
    """Free the values that weights had before they were quantized, also those of sharded ones.

    They are three quarters of a quantized model's memory, or more, and only an optimizer's masters start from them:
    FusedAdam frees them itself, as frozen weights do when they are used. A model that is never trained needs none.

    Raises:
        RuntimeError: where they were changed, and ``finish_initialization(model)`` has not quantized them yet.
    """
    for param in model.parameters():
        local = local_tensor(param)
        if isinstance(local, QuantizedTensor):
            local.discard_high_precision_init()


def _pending(params: Sequence[Tensor]) -> list[Tensor]:
    """The parameters that some rank has to quantize: ranks without rows have nothing, and take part all the same.

    Raises RuntimeError, on all ranks, for what ``to_empty`` has made and nobody has filled.
    """
    flags = {}
    for param in params:
        local = local_weight(param)
        flag = 2.0 if local.is_unfilled else float(local.is_pending)
        flags[param] = torch.tensor([flag], dtype=torch.float32, device=local.device)
    reduced = {param: flag.item() for param, flag in update.reduce_over_shards(flags).items()}
    for param, flag in reduced.items():
        local_weight(param).check_filled()
        if flag == 2.0:
            raise RuntimeError(f"{local_weight(param).prefix}another rank has written only a part of its shard")
    return [param for param, flag in reduced.items() if flag]
