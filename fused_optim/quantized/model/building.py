"""Makes weights of modules quantized, as soon as these are built."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from fused_optim.quantized.model.init import replace_parameters
from fused_optim.quantized.model.selection import (
    Chosen,
    Filter,
    ParamFilter,
    Recipes,
    check_arguments,
    chosen_parameters,
    warn_of_plain,
)

_T = TypeVar("_T")


@contextmanager
def quantized_model_init(
    recipe: Recipes, filter_fn: Filter | None = None, *, param_filter: ParamFilter | None = None
) -> Iterator[None]:
    """Quantize models that are built in this context, as ``quantize_model_`` does, when it ends; also on meta devices.

    The outermost modules are quantized, since names are known only then. So shard a model, wrap it in DDP, and give its
    parameters to an optimizer, afterwards. Initial values are kept until the optimizer has started its FP32 masters
    from them. Without a filter or patterns, layers that were not built here, and weights that are computed from others,
    stay as they are. Copies that ``copy.deepcopy`` makes here are built here. Weights that an inner context has
    quantized stay as it has made them.

    Raises what :func:`quantize_model_` raises, also when the context ends, and ValueError if an optimizer that was made
    in the context holds a weight that is to be quantized. No module has been changed then.
    """
    check_arguments(recipe, filter_fn, param_filter)
    built: list[weakref.ref[nn.Module]] = []
    optimizers: list[weakref.ref[Optimizer]] = []
    with (
        _noted(nn.Module, "__init__", built),
        _noted(nn.Module, "__setstate__", built),  # of copies, whose __init__ nobody calls
        _noted(Optimizer, "add_param_group", optimizers),  # as their __init__ does
    ):
        yield
    modules = _alive(built)
    models = _outermost(modules)
    by_default = filter_fn is None and param_filter is None and not isinstance(recipe, Mapping)
    chosen = chosen_parameters(models, recipe, filter_fn, param_filter, of=set(modules) if by_default else None)
    _check_without_optimizer(chosen, _alive(optimizers))
    replace_parameters(models, chosen, keep_initial=True)
    if by_default:
        warn_of_plain(models, chosen, stacklevel=4)


def _check_without_optimizer(chosen: Sequence[Chosen], optimizers: Sequence[Optimizer]) -> None:
    """Raise ValueError where one would go on with parameters that are no longer the model's."""
    names = {each.param: each.name for each in chosen}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param in names:
                    raise ValueError(
                        f"{names[param]} is held by a {type(optimizer).__name__} that was made within "
                        "quantized_model_init, which replaces it when it ends: make optimizers after it"
                    )


@contextmanager
def _noted(kind: type[_T], method: str, found: list[weakref.ref[_T]]) -> Iterator[None]:
    """Note the objects of a kind of which a method has run."""
    original: Callable[..., Any] = vars(kind)[method]

    @functools.wraps(original)
    def run_and_note(self: _T, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        found.append(weakref.ref(self))

    setattr(kind, method, run_and_note)
    try:
        yield
    finally:
        setattr(kind, method, original)


def _alive(references: Sequence[weakref.ref[_T]]) -> list[_T]:
    """Each once, though a class may call ``nn.Module.__init__`` several times."""
    return list(dict.fromkeys(each for reference in references if (each := reference()) is not None))


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that no other one contains."""
    contained = {child for module in modules for child in module.children()}
    return [module for module in modules if module not in contained]
