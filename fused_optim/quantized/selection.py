"""Which parameters of a model are to be quantized: what filters may pick, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from fused_optim.quantized.recipes import Recipe

Filter = Callable[[nn.Module, str], bool]
ParamFilter = Callable[[nn.Parameter, str], bool]


class Chosen(NamedTuple):
    """A parameter: the module that holds it, its name there and in the model."""

    module: nn.Module
    key: str
    name: str

    @property
    def param(self) -> nn.Parameter:
        param = self.module._parameters[self.key]
        assert param is not None
        return param


def check_arguments(recipe: object, filter_fn: object, param_filter: object) -> None:
    """Raise TypeError for what is no recipe, or no filter, ValueError for both filters at once."""
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise TypeError(f"recipe: expected an instance, got the class {recipe.__name__}: write {recipe.__name__}()")
    if not isinstance(recipe, Recipe):
        got = repr(recipe) if isinstance(recipe, str) else f"a {type(recipe).__name__}"
        raise TypeError(f"recipe: expected a recipe such as MXFP8BlockScaling(), got {got}")
    for name, value in (("filter_fn", filter_fn), ("param_filter", param_filter)):
        if value is not None and not callable(value):
            raise TypeError(f"{name}: expected a function, got a {type(value).__name__}")
    if filter_fn is not None and param_filter is not None:
        raise ValueError("filter_fn picks modules and param_filter parameters: give one of them")


def chosen_parameters(model: nn.Module, filter_fn: Filter | None, param_filter: ParamFilter | None) -> list[Chosen]:
    """The parameters that ``param_filter`` picks, or those named ``weight`` of modules that ``filter_fn`` does.

    Raises ValueError for a module without such a parameter, and for parameters that nothing can be quantized of yet.
    """
    if param_filter is not None:
        chosen = [each for each in _all_parameters(model) if param_filter(each.param, each.name)]
    else:
        picks = filter_fn or _is_linear
        chosen = [_weight_of(module, name) for name, module in model.named_modules() if picks(module, name)]
    for each in chosen:
        if isinstance(each.module, ParametrizationList):
            raise ValueError(f"{each.name} is what torch.nn.utils.parametrize computes a parameter from; {_OTHERWISE}")
        if is_lazy(each.param):
            raise ValueError(f"{each.name} is not initialised: run a lazy module once before quantize_model_")
    return chosen


_OTHERWISE = "remove_parametrizations makes it a parameter again, or leave it out by a filter"


def _is_linear(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear)


def _all_parameters(model: nn.Module) -> Iterator[Chosen]:
    for module_name, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                yield Chosen(module, key, _joined(module_name, key))


def _joined(module_name: str, key: str) -> str:
    return f"{module_name}.{key}" if module_name else key


def _weight_of(module: nn.Module, name: str) -> Chosen:
    if module._parameters.get("weight") is not None:
        return Chosen(module, "weight", _joined(name, "weight"))
    described = f"{name or 'the model'}, a {type(module).__name__}"
    if isinstance(getattr(module, "weight", None), Tensor):
        how = "as torch.nn.utils.parametrize, weight_norm, spectral_norm and prune do"
        raise ValueError(f"{described}: its weight is computed from other tensors, {how}; {_OTHERWISE}")
    within = "; pick the layers that it contains" if next(module.children(), None) is not None else ""
    raise ValueError(
        f"{described}: filter_fn picks modules that have a parameter `weight`, and this has none{within}, "
        "or parameters of any name by param_filter(param, name)"
    )
