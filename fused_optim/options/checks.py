"""Argument checks. They run before anything is changed, name the parameter and never print tensor contents."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import FSDP_FLATTENED
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fused_optim.adapters import adapter_of
from fused_optim.formats.dtypes import as_dtype
from fused_optim.formats.elements import ELEMENT_TYPES
from fused_optim.formats.states import STATE_FORMATS
from fused_optim.memory.host_memory import can_be_streamed
from fused_optim.memory.layout import INITIAL_LR
from fused_optim.rules import Rule, Rules
from fused_optim.sharding.dtensor import is_dense, local_tensor

_RESIDUE = 1e-12  # of a schedule that should have ended at zero


def names_in(group: Mapping[str, Any]) -> Sequence[str | None]:
    """The names of a group's parameters; None where they have none. Raises ValueError where some have one."""
    count = len(group["params"])
    names: Sequence[str | None] = group.get("param_names", [None] * count)
    if len(names) != count:
        text = f"a param group has {count} parameters but {len(names)} names: change its params and param_names alike"
        raise ValueError(f"{text}; its names are {', '.join(map(repr, names[:5]))}{', ...' * (len(names) > 5)}")
    return names


def without_repeats(group: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The parameters of a group, and their names if it has some, each parameter once.

    torch warns of repeats, and updates them repeatedly; here shards are updated at the same time.
    """
    names_in(group)
    first = {param: index for index, param in reversed([*enumerate(group["params"])])}
    return {
        key: [group[key][index] for index in sorted(first.values())]
        for key in ("params", "param_names")
        if key in group
    }


def describe(param: Tensor, index: int, name: str | None = None) -> str:
    """``parameter 3 ('layers.0.weight', shape (8, 4), torch.bfloat16, placements (Shard(dim=0),))``."""
    parts = [f"shape {tuple(param.shape)}", str(param.dtype)]
    if name:
        parts.insert(0, repr(name))
    if isinstance(param, DTensor):
        parts.append(f"placements {tuple(param.placements)}")
    return f"parameter {index} ({', '.join(parts)})"


def some_of(items: list[str]) -> str:
    """The first few of a list, and how many more there are."""
    shown = "; ".join(items[:5])
    return shown if len(items) <= 5 else f"{shown}; and {len(items) - 5} more"


# Asked for first: whether a type is registered as Real takes longer than all other checks of a step.
_USUAL_NUMBERS = (float, int)


def is_number(value: Any) -> bool:
    """True for real numbers but bools."""
    return type(value) in _USUAL_NUMBERS or (isinstance(value, Real) and not isinstance(value, bool))


def check_hyperparameters(group: Mapping[str, Any], rules: Rules, running: bool = False) -> None:
    """Raise ValueError or TypeError for a learning rate, weight decay, formats or what else the rule has.

    They are as ``options.read_group`` gives them. ``running``: learning rate and weight decay are schedules', which may
    end a little below zero by rounding: any finite number is taken then, as by torch.optim, which checks them in the
    constructor only.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr: expected a tensor of one element, got shape {tuple(lr.shape)}")
        lr = float(lr) if lr.device.type == "cpu" else 0.0  # a value on a GPU is not read: that would synchronise
    if "state_dtype" in group:  # as running groups have it not
        word = group["state_dtype"]
        if word is not None and as_dtype(word) not in STATE_FORMATS:
            raise _unknown_format("state_dtype", word)
    least = -math.inf if running else 0.0
    check_number("lr", lr, least)
    check_number("weight_decay", group["weight_decay"], least)
    rule = rules.for_group(group)
    rule.check(group)
    for spec in rule.states:
        if as_dtype(group[spec.option]) not in STATE_FORMATS:
            raise _unknown_format(spec.option, group[spec.option])


def _unknown_format(option: str, given: Any) -> ValueError:
    return ValueError(f"{option}: expected one of {', '.join(map(str, STATE_FORMATS))}, got {given!r}")


def check_native_formats(group: Mapping[str, Any], options: Sequence[str]) -> None:
    """Raise ValueError for TransformerEngine's name of FP8 states, which drop-in classes alone take."""
    for option in ("state_dtype", *options):
        if as_dtype(group.get(option)) is torch.uint8:
            raise ValueError(f'{option}: write "float8_e4m3fn" for FP8; torch.uint8 is what it is stored as')


def check_number(key: str, value: Any, least: float = 0.0) -> None:
    """Raise TypeError or ValueError for what is not a finite number of at least ``least``."""
    if type(value) not in _USUAL_NUMBERS and not is_number(value):
        raise TypeError(f"{key}: expected a number, got {type(value).__name__}")
    if not math.isfinite(value) or value < least:
        raise ValueError(f"{key}: expected a finite number >= 0, got {value}")


def check_decay_rates(betas: Any, count: int = 2) -> None:
    """Raise TypeError or ValueError unless ``betas`` are ``count`` numbers in [0, 1)."""
    expected = f"betas: expected {'two' if count == 2 else 'three'} numbers"
    if not isinstance(betas, (tuple, list)):
        raise TypeError(f"{expected}, got {type(betas).__name__}")
    if len(betas) != count:
        raise TypeError(f"{expected}, got {len(betas)}")
    for i, beta in enumerate(betas):
        if type(beta) not in _USUAL_NUMBERS and not is_number(beta):
            raise TypeError(f"betas[{i}]: expected a number, got {type(beta).__name__}")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{i}]: expected a number in [0, 1), got {beta}")


def check_decoupled_lr(group: Mapping[str, Any], rule: Rule) -> None:
    """Raise ValueError if ``decoupled_lr`` means nothing in a param group, or divided by a learning rate of 0."""
    if not rule.decoupled:
        raise ValueError("decoupled_lr=True is for decoupled weight decay: write decoupled_weight_decay=True, too")
    if not group[INITIAL_LR] > 0.0:
        raise ValueError(f"decoupled_lr=True needs a first learning rate above 0, got {INITIAL_LR}={group[INITIAL_LR]}")


def check_saved_group(group: dict[str, Any], saved: Mapping[str, Any], rules: Rules) -> None:
    """Raise ValueError or TypeError for a param group that would have the hyperparameters of a state dict's, ``saved``.

    A learning rate or weight decay a little below zero is a schedule's that should have ended at zero. An eps that is
    too small is refused by the next step, before which it can be changed.
    """
    for key in ("lr", "weight_decay"):
        value = group[key]
        if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = float(value)
        if is_number(value) and -_RESIDUE <= value < 0.0:
            group = {**group, key: 0.0}
    if is_number(group.get("eps")) and 0.0 <= group["eps"] < 1.0:
        group = {**group, "eps": 1.0}
    check_hyperparameters(group, rules)
    names = {str(dtype).removeprefix("torch.") for dtype in STATE_FORMATS}
    for key in (spec.option for spec in rules.for_group(group).states):
        if key in saved and str(saved[key]).removeprefix("torch.") not in names:
            raise ValueError(f"{key}: expected one of {', '.join(sorted(names))}, got {saved[key]}")


def check_decoupling(group: Mapping[str, Any], defaults: Mapping[str, Any], rules: Rules) -> None:
    """Raise ValueError for a param group, as it was read, that asks for another kind of weight decay than the rule's.

    Also for a weight decay where nothing says which Adam's it is.
    """
    decoupled, own = group.get("decoupled_weight_decay"), rules.options.get("adam_w_mode", True)
    if decoupled not in (None, own):
        raise ValueError(
            f"decoupled_weight_decay={decoupled} in a param group: it is an option of the whole optimizer here, "
            f"which has decoupled_weight_decay={own}; use an optimizer for each"
        )
    if decoupled is not None or "adam_w_mode" not in rules.options or defaults["decoupled_weight_decay"] is not None:
        return
    if (decay := group.get("weight_decay", defaults["weight_decay"])) > 0.0:
        raise ValueError(
            f"weight_decay={decay}: FusedAdam must be told how to apply it: decoupled_weight_decay=False (added to the "
            "gradient, as by torch.optim.Adam) or decoupled_weight_decay=True (as by AdamW, and by TransformerEngine's "
            "and Apex's FusedAdam); FusedAdamW has the latter"
        )


def check_param(param: Tensor, index: int, name: str | None) -> None:
    """Raise TypeError for a parameter that cannot be updated, whatever its gradient."""
    if _is_unknown_wrapper(param):
        kind = type(local_tensor(param)).__name__
        text = f"a {kind} has no memory of its own to be updated, and how to write it is not known"
        raise TypeError(f"{describe(param, index, name)}: {text}; exclude it from the optimizer")
    if _has_usual_elements(param):
        return
    hint = "convert it to torch.float32" if param.dtype == torch.float64 else "exclude it from the optimizer"
    if param.is_complex():
        hint = "pass torch.view_as_real(param)"
    expected = "a dense torch.float32, torch.bfloat16 or torch.float16 tensor"
    got = param.dtype if param.layout == torch.strided else param.layout
    raise TypeError(f"{describe(param, index, name)}: expected {expected}, got {got}; {hint}")


def _has_usual_elements(param: Tensor) -> bool:
    return param.dtype in ELEMENT_TYPES and param.layout == torch.strided


def can_be_updated(param: Tensor) -> bool:
    """True if :func:`check_param` raises nothing. Frozen parameters that are held beside others may be of any kind."""
    return _has_usual_elements(param) and not _is_unknown_wrapper(param)


def _is_unknown_wrapper(param: Tensor) -> bool:
    """True if updates would go into what is decoded for them, and be lost."""
    local = local_tensor(param)
    wraps = is_traceable_wrapper_subclass(local) and not isinstance(local, AsyncCollectiveTensor)
    return wraps and adapter_of(param) is None


def check_grad(param: Tensor, grad: Tensor, index: int, name: str | None) -> None:
    """Raise TypeError, RuntimeError or ValueError for a gradient that does not fit its parameter."""
    problem = _grad_problem(param, grad)
    if problem is not None:
        kind, text = problem
        raise kind(f"{describe(param, index, name)}: {text}")


def _grad_problem(param: Tensor, grad: Tensor) -> tuple[type[Exception], str] | None:
    if not isinstance(grad, Tensor):
        return TypeError, f"expected a tensor as its gradient, got {type(grad).__name__}"
    if grad.layout != torch.strided or grad.is_nested:
        kind = "nested" if grad.is_nested else "sparse" if "sparse" in str(grad.layout) else "such"
        return RuntimeError, f"{kind} gradients are not supported (got {grad.layout}); use a dense gradient"
    if grad.dtype not in ELEMENT_TYPES:
        return TypeError, f"expected a gradient of float32, bfloat16 or float16, got {grad.dtype}"
    if isinstance(param, DTensor) != isinstance(grad, DTensor):
        kind, grad_kind = ("a DTensor" if isinstance(tensor, DTensor) else "a plain tensor" for tensor in (param, grad))
        return TypeError, f"the parameter is {kind} but its gradient is {grad_kind}; both must be of one kind"
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.device_mesh != param.device_mesh:
        return ValueError, f"its gradient lies on another device mesh ({grad.device_mesh})"
    if grad.shape != param.shape:
        return ValueError, f"expected a gradient of the same shape, got {tuple(grad.shape)}"
    if local_tensor(grad).device != local_tensor(param).device:
        return ValueError, f"its gradient is on {local_tensor(grad).device}, not {local_tensor(param).device}"
    local = local_tensor(grad)
    if is_traceable_wrapper_subclass(local) and not isinstance(local, AsyncCollectiveTensor):
        return TypeError, f"its gradient is a {type(local).__name__}, whose memory is not its values; use a plain one"
    if _lacks_memory(local) and not _lacks_memory(local_tensor(param)):
        hint = "its storage was freed, or it belongs to a transform of torch.func or to a FakeTensorMode"
        return RuntimeError, f"its gradient has no memory to be read: {hint}"
    return None


def _lacks_memory(local: Tensor) -> bool:
    """True if there is nothing at a tensor's address, or less than it should hold."""
    if not local.numel() or local._is_zerotensor() or isinstance(local, AsyncCollectiveTensor):
        return False
    if isinstance(local, FakeTensor):
        return True
    try:
        if local.is_contiguous():  # usually, and faster
            last = local.numel() - 1
        else:
            last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
        needed = (local.storage_offset() + last + 1) * local.element_size()
        return local.data_ptr() == 0 or local.untyped_storage().nbytes() < needed
    except RuntimeError:  # wrappers of torch.func
        return True


def check_local_shapes(param: Tensor, other: Tensor, what: str, index: int, name: str | None) -> None:
    """Raise ValueError where the local shards of a parameter and its gradient or state differ."""
    local, local_other = local_tensor(param), local_tensor(other)
    if local.shape != local_other.shape:
        raise ValueError(
            f"{describe(param, index, name)}: its local shard has shape {tuple(local.shape)}, "
            f"its {what}'s {tuple(local_other.shape)}"
        )


def _check_writable(param: Tensor, index: int, name: str | None) -> None:
    """Raise RuntimeError for a parameter whose memory cannot take an update."""
    local = local_tensor(param)
    problem = None
    if local._is_zerotensor():
        problem = "a zero tensor has no memory of its own; use param.clone()"
    elif local.is_inference() and not torch.is_inference_mode_enabled():
        problem = "it was made in inference mode and can be updated there only; clone it outside of that mode"
    elif any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)):
        problem = f"several of its elements share memory (strides {local.stride()}); clone it"
    elif adapter_of(param) is None and not local.is_meta and not isinstance(local, FakeTensor) and _lacks_memory(local):
        problem = "its storage was freed, so there is nothing to be updated"
    if problem is not None:
        raise RuntimeError(f"{describe(param, index, name)}: {problem}")


def check_update(param: Tensor, grad: Tensor, index: int, name: str | None) -> None:
    """All checks of a parameter and its gradient. Local shards are compared where they are placed alike."""
    check_param(param, index, name)
    _check_writable(param, index, name)
    check_grad(param, grad, index, name)
    if not isinstance(param, DTensor) or not isinstance(grad, DTensor) or grad.placements == param.placements:
        check_local_shapes(param, grad, "gradient", index, name)


def check_states(
    param: Tensor,
    states: dict[str, Tensor],
    dtypes: dict[str, torch.dtype],
    index: int,
    name: str | None,
    offloaded: Sequence[str] = (),
) -> None:
    """Raise ValueError or TypeError for states that were replaced, or whose parameter was, since they were created."""
    local = local_tensor(param)
    for key, dtype in dtypes.items():
        if key not in states:
            raise ValueError(f"{describe(param, index, name)}: state {key} was removed; the others are {[*states]}")
        state = local_tensor(states[key])
        device = torch.device("cpu") if key in offloaded else local.device
        check_local_shapes(param, state, f"state {key}", index, name)
        if state.dtype != dtype or state.device != device or not is_dense(state):
            expected = f"a contiguous {dtype} tensor on {device}, got {state.dtype} on {state.device}"
            if state.is_neg():
                expected += " that is negated lazily; use state.resolve_neg()"
            raise TypeError(f"{describe(param, index, name)}: state {key}: expected {expected}")
        if key in offloaded and not can_be_streamed(state, local.device):
            raise TypeError(
                f"{describe(param, index, name)}: state {key}: expected page-locked memory, as it is offloaded: "
                "copy into the tensor that is there, or use state.pin_memory()"
            )
        if _lacks_memory(state) and not _lacks_memory(local):
            raise RuntimeError(f"{describe(param, index, name)}: state {key}: its storage was freed")
    if dtypes.get("master_param") in (torch.int16, torch.int8) and param.dtype != torch.bfloat16:
        raise TypeError(f"{describe(param, index, name)}: its remainders belong to a torch.bfloat16 parameter")


def check_params(group: Mapping[str, Any], first: int, rule: Rule) -> None:
    """Raise TypeError or ValueError for parameters that cannot be in their group. ``first``: how many are before.

    Frozen ones are checked when they are thawed, or get a gradient: quantized ones below adapters never do.
    """
    for index, (param, name) in enumerate(zip(group["params"], names_in(group), strict=True), start=first):
        if not isinstance(param, nn.Parameter) or param.requires_grad:
            check_param(param, index, name)
        if problem := rule.problem_of(param, group):
            raise ValueError(f"{describe(param, index, name)}: {problem}")


def check_iterable(params: Any) -> None:
    """Raise TypeError for a model in the place of its parameters. An ``nn.ParameterList`` goes through them."""
    if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        raise TypeError(f"params: expected parameters, got a {type(params).__name__}: pass model.parameters()")


def check_order(model: Any, optimizer: Any) -> None:
    """Raise TypeError for a model and an optimizer that are none, or are given in another order."""
    if not isinstance(model, nn.Module) or isinstance(optimizer, nn.Module):
        given = f"a {type(model).__name__} and a {type(optimizer).__name__}"
        raise TypeError(f"expected a model and its optimizer, in this order, got {given}")


def check_whole(model: nn.Module, params: Sequence[Tensor]) -> None:
    """Raise TypeError for flat shards of FSDP1, which are plain tensors. All ranks answer alike."""
    wrappers = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    unsharded = bool(wrappers) and all(w.sharding_strategy is ShardingStrategy.NO_SHARD for w in wrappers)
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    for index, param in enumerate(params):
        # FSDP1's own marks. With use_orig_params=False an optimizer has flat parameters, each of several of the model.
        is_flat = getattr(param, FSDP_FLATTENED, False)
        is_several = getattr(param, "_is_flat_param", False)
        if is_several or (is_flat and not (unsharded and param in names)):
            raise TypeError(
                f"{describe(param, index, names.get(param))}: expected a whole tensor or a DTensor, got a flat shard "
                "of FullyShardedDataParallel (FSDP1); use fully_shard (FSDP2), or get_optimizer_state_dict and "
                "set_optimizer_state_dict of torch.distributed.checkpoint.state_dict with full_state_dict=True"
            )


def check_belongs(model: nn.Module, params: Sequence[Tensor]) -> None:
    """Raise KeyError if none of an optimizer's parameters is one of the model's."""
    own = set(model.parameters())
    if params and own.isdisjoint(params):
        raise KeyError(
            f"{describe(params[0], 0)} is not one of the model's parameters, nor is any other of the optimizer's; "
            "those of Megatron-LM's distributed optimizer are flat slices, which its own checkpoints read and write"
        )


def whole_number(name: str, given: Any, least: int) -> int:
    """An integer of any library, at least ``least``; no truth value. Raises TypeError or ValueError."""
    try:
        number = operator.index(given)
    except TypeError:
        raise TypeError(f"{name}: expected a whole number, got {type(given).__name__}") from None
    if isinstance(given, bool) or (isinstance(given, Tensor) and given.dtype == torch.bool):
        raise TypeError(f"{name}: expected a whole number, got a truth value")
    if number < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {number}")
    return number
