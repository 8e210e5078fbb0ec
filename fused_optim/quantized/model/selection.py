"""Which parameters of a model are to be quantized: filters, what these may pick, and what is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from fused_optim.quantized.compute import products
from fused_optim.quantized.recipes import Recipe, check_recipe
from fused_optim.roles import is_embedding, is_head, is_router

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
    check_recipe(recipe)
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
        picks = filter_fn.of(model) if isinstance(filter_fn, UsualLayers) else filter_fn or _is_linear
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


# --- filters ----------------------------------------------------------------------------------------------------

_MEASURED = Path(__file__).with_name("measured_sizes.json")


class UsualLayers:
    """A ``filter_fn``: every ``nn.Linear`` but those that are usually left in high precision.

    These are: the first one, unless the model has embeddings, which are its first layer then; the last one; output
    heads (``lm_head``, ``output_layer``, ``embed_out``, ``unembed``, ``score``, ``classifier``, and ``output`` outside
    of numbered layers); what has ``embed`` in its name, or shares its weight with an ``nn.Embedding``; routers: what
    has ``router`` in its name, or is named ``gate`` or ``shared_expert_gate`` and lies beside ``experts``. First and
    last go by the order in which modules are registered.

    ``also``: a filter that layers must pass, too, such as :func:`gains`.
    """

    def __init__(self, also: Filter | None = None) -> None:
        if also is not None and not callable(also):
            raise TypeError(f"also: expected a filter, a function of a module and its name, got {also!r}")
        self.also = also

    def of(self, model: nn.Module) -> Filter:
        """The filter for a model."""
        layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        ends = {id(module) for _, module in (layers[:1] if not embeddings else []) + layers[-1:]}
        picked = {
            id(module)
            for name, module in layers
            if id(module) not in ends
            and not any(module.weight is each for each in embeddings)
            and not _is_exception(model, name)
            and (self.also is None or self.also(module, name))
        }
        return lambda module, _: id(module) in picked

    def __call__(self, module: nn.Module, name: str) -> bool:
        """Raises TypeError: which layers are the first and the last is known of whole models only."""
        raise TypeError("UsualLayers() sees a whole model: give it as filter_fn itself, and other filters as `also`")


def _is_exception(model: nn.Module, name: str) -> bool:
    return is_head(name) or is_router(model, name) or is_embedding(name)


def gains(recipe: Recipe, rows: int, table: str | os.PathLike[str] | None = None) -> Filter:
    """A ``filter_fn``: every ``nn.Linear`` of a size at which FP8 products were measured to save time.

    That is one with which a smaller size, or the same, took less time than in BF16, forward and backward: smaller or
    equal in rows, inputs and outputs. Larger ones save more, since casts grow less than products. Sizes that no
    measured one is smaller than are left out, as are those that the recipe multiplies in BF16.

    Args:
        recipe: with ``compute="fp8"``.
        rows: of activations, of each call on each rank: batch times sequence.
        table: a file that ``benchmarks/fp8_training.py --parts sizes`` has written; default: that of this package,
            ``measured_sizes.json``, which says what was measured where.

    Raises:
        TypeError: for what is no recipe.
        ValueError: for a recipe that decodes, or that the table does not have.
    """
    check_recipe(recipe)
    if recipe.products is None:
        raise ValueError(f'{recipe} has no products in FP8, so no layer gains: give it compute="fp8"')
    kind = products.kind_of(recipe.products)
    sizes = json.loads(Path(_MEASURED if table is None else table).read_text())["sizes"]
    gained = [_size(row) for row in sizes if kind in row and row[kind] < row["BF16"]]
    if not any(kind in row for row in sizes):
        raise ValueError(f"{recipe}: {table or _MEASURED.name} has no times of products of kind {kind!r}")

    def picks(module: nn.Module, _: str) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        shape = module.out_features, module.in_features
        size = (rows, module.in_features, module.out_features)
        in_fp8 = products.unsupported_reason("output", recipe, rows, shape) is None
        return in_fp8 and any(all(a <= b for a, b in zip(known, size, strict=True)) for known in gained)

    return picks


def _size(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["rows"], row["inputs"], row["outputs"]


# --- parameters by their names ------------------------------------------------------------------------------------


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
