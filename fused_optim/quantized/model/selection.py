"""Selection of the parameters to quantize, and their recipes: filters, patterns of names, and refusals by name."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from fused_optim.quantized.fp8 import GroupedLinear, grouped, measured, products
from fused_optim.quantized.fp8.kept import kept_weight
from fused_optim.quantized.recipes import Recipe, check_recipe
from fused_optim.quantized.tensor import QuantizedTensor
from fused_optim.roles import is_adapter, is_embedding, is_expert, is_head, is_router
from fused_optim.sharding.dtensor import local_tensor

Filter = Callable[[nn.Module, str], bool]
ParamFilter = Callable[[nn.Parameter, str], bool]


Recipes = Recipe | Mapping[str, Recipe | None]  # one for all, or by patterns of names


class Chosen(NamedTuple):
    """A parameter: the module that holds it, its name there and in the model, and its recipe."""

    module: nn.Module
    key: str
    name: str
    recipe: Recipe

    @property
    def param(self) -> nn.Parameter:
        return _param(self.module, self.key)


def check_arguments(recipe: object, filter_fn: object, param_filter: object) -> None:
    """Raise TypeError for what is no recipe, no pattern or no filter, ValueError for several ways to pick at once."""
    if isinstance(recipe, Mapping):
        if not any(each is not None for each in recipe.values()):
            raise ValueError(
                f"recipe: {dict(recipe)} has no recipe at all; leave out the call to keep all weights plain"
            )
        for pattern, each in recipe.items():
            if not isinstance(pattern, str):
                raise TypeError(f"recipe: expected patterns of names as keys, got {pattern!r}")
            if each is not None:
                check_recipe(each)
        if filter_fn is not None or param_filter is not None:
            raise ValueError("recipe: patterns of names pick weights themselves: leave out filter_fn and param_filter")
    else:
        check_recipe(recipe)
    for name, value in (("filter_fn", filter_fn), ("param_filter", param_filter)):
        if value is not None and not callable(value):
            raise TypeError(f"{name}: expected a function, got a {type(value).__name__}")
    if filter_fn is not None and param_filter is not None:
        raise ValueError("filter_fn picks modules and param_filter parameters: give one of them")


def chosen_parameters(
    models: Sequence[nn.Module],
    recipe: Recipes,
    filter_fn: Filter | None,
    param_filter: ParamFilter | None,
    of: Container[nn.Module] | None = None,
) -> list[Chosen]:
    """The parameters that patterns or ``param_filter`` pick, or the ``weight`` of each module that ``filter_fn`` does.

    ``of``: where nothing says which ones, linear layers among these modules whose weights are plain yet.

    Raises ValueError for a module without such a parameter, for a pattern that picks nothing, and for parameters that
    nothing can be quantized of yet.
    """
    chosen: list[Chosen] = []
    if isinstance(recipe, Mapping):
        chosen += _by_patterns(models, recipe)
    elif param_filter is not None:
        everything = [each for model in models for each in _all_parameters(model)]
        chosen += [Chosen(*each, recipe) for each in everything if param_filter(_param(*each[:2]), each[2])]
    else:
        embedded = _embedded(models)
        for model in models:
            picks = _filter(model, filter_fn, embedded, of)
            picked = [(module, name) for name, module in model.named_modules() if picks(module, name)]
            chosen += [Chosen(*_weight_of(*each), recipe) for each in picked]
    for each in chosen:
        if isinstance(each.module, ParametrizationList):
            raise ValueError(f"{each.name} is what torch.nn.utils.parametrize computes a parameter from; {_OTHERWISE}")
        if is_lazy(each.param):
            raise ValueError(f"{each.name} is not initialised: run a lazy module once before quantize_model_")
        if _is_offloaded(each.module):
            raise ValueError(
                f"{each.name} is offloaded by Accelerate, to the CPU or to disk: load the model without such a "
                "device_map, then quantize it, then offload it by dispatch_model or cpu_offload"
            )
    return chosen


def _is_offloaded(module: nn.Module) -> bool:
    """True if a hook of Accelerate replaces the module's parameters at each call, by those of a table."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(each, "offload", False) for each in getattr(hook, "hooks", [hook]))


_OTHERWISE = "remove_parametrizations makes it a parameter again, or leave it out by a filter"


def _filter(model: nn.Module, filter_fn: Filter | None, embedded: Set[int], of: Container[nn.Module] | None) -> Filter:
    if isinstance(filter_fn, UsualLayers):
        return filter_fn.for_model(model, embedded)
    if filter_fn is not None:
        return filter_fn
    return lambda module, name: (
        isinstance(module, nn.Linear)
        and not is_head(name)
        and not is_adapter(model, name)
        and id(module._parameters.get("weight")) not in embedded
        and (of is None or (module in of and _has_plain_weight(module)))
    )


def _embedded(models: Iterable[nn.Module]) -> set[int]:
    """The ids of the weights of embeddings, which layers may share."""
    modules = (module for model in models for module in model.modules())
    return {id(module.weight) for module in modules if isinstance(module, nn.Embedding)}


def _has_plain_weight(layer: nn.Linear) -> bool:
    weight = layer._parameters.get("weight")  # none where it is computed from others
    return weight is not None and not is_quantized(weight)


def is_quantized(param: Tensor) -> bool:
    """True for a quantized weight, and for one that is kept plain and quantized where it is used."""
    return isinstance(local_tensor(param), QuantizedTensor) or kept_weight(param) is not None


def warn_of_plain(models: Sequence[nn.Module], chosen: Sequence[Chosen], stacklevel: int) -> None:
    """Name the weights of experts that no filter and no pattern was asked about; or tell that nothing was chosen."""
    if models and not chosen:
        warnings.warn(
            "no weight is quantized: by default these are the weights of nn.Linear, except output heads and what is "
            "tied to an embedding; pick others, as those of transformers' Conv1D (GPT-2), by filter_fn",
            stacklevel=stacklevel,
        )
    experts = [
        name
        for model in models
        for module, key, name in _all_parameters(model)
        if _is_of_experts(module, key, name) and not is_quantized(_param(module, key))
    ]
    if experts:
        warnings.warn(
            f"{len(experts)} weights of experts, which have three dims, stay plain ({', '.join(experts[:3])}"
            f"{', ...' * (len(experts) > 3)}): pick them by patterns of names or param_filter",
            stacklevel=stacklevel,
        )


def _is_of_experts(module: nn.Module, key: str, name: str) -> bool:
    """True if a parameter is taken for weights of experts: three dims, and neither a convolution's nor an embedding.

    If it holds a single expert, as a rank may, its name decides: class tokens and positions have such a dim, too.
    """
    param = _param(module, key)
    if is_lazy(param) or param.dim() != 3 or type(module).__module__.startswith("torch.nn."):
        return False
    if isinstance(module, GroupedLinear):
        return True
    path_end = ".".join(name.split(".")[-2:])
    return not is_embedding(path_end) and (param.shape[0] > 1 or is_expert(name))


# --- patterns of names ---------------------------------------------------------------------------------------------


def _by_patterns(models: Sequence[nn.Module], recipes: Mapping[str, Recipe | None]) -> Iterator[Chosen]:
    """Weights of linear layers and of experts whose names match a pattern; the first one that does counts.

    Raises ValueError for one that matches none in any of the models.
    """
    candidates = [each for model in models for each in _candidates(model)]
    _check_patterns([name for _, _, name in candidates], recipes)
    decided: dict[nn.Parameter, tuple[str, Recipe | None]] = {}
    for module, key, name in candidates:
        matching = [pattern for pattern in recipes if _matches(name, pattern)]
        recipe = recipes[matching[0]] if matching else None
        if recipe is not None and isinstance(module, nn.Linear) and key == "weight":
            _weight_of(module, name.removesuffix("weight").removesuffix("."))  # raises where it is computed
        param = module._parameters.get(key)
        if param is None:
            continue
        known = decided.setdefault(param, (name, recipe))
        if repr(known[1]) != repr(recipe):
            raise ValueError(f"{name} is tied to {known[0]}: expected one recipe for both, got {recipe} and {known[1]}")
        if recipe is not None:
            yield Chosen(module, key, name, recipe)


def _check_patterns(names: Sequence[str], recipes: Mapping[str, Recipe | None]) -> None:
    shown = [name.removesuffix(".weight") for name in names]
    for pattern in recipes:
        if not any(_matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, shown, cutoff=0.3) or shown[:3]
            has = ", ".join(near) or "none"
            raise ValueError(f"recipe: {pattern!r} matches no weight of the model, which has {has}")


def _matches(name: str, pattern: str) -> bool:
    """True if a pattern matches the name of a parameter, or of its layer."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(".weight"), pattern)


def _candidates(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    for path, module in model.named_modules():
        if is_adapter(model, path):
            continue
        if isinstance(module, nn.Linear):
            yield module, "weight", _joined(path, "weight")  # which may be computed from others
        for key, param in module._parameters.items():
            if param is not None and _is_of_experts(module, key, name := _joined(path, key)):
                yield module, key, name


# --- filters ----------------------------------------------------------------------------------------------------


class UsualLayers:
    """A ``filter_fn``: every ``nn.Linear`` but those that are usually left in high precision.

    These are: the first one, unless the model has embeddings, which are its first layer then; the last one; output
    heads (``lm_head``, ``output_layer``, ``embed_out``, ``unembed``, ``score``, ``classifier``, and ``output`` and
    ``head`` outside of numbered layers); what has ``embed`` in its name, or shares its weight with an
    ``nn.Embedding``; routers: what has ``router`` in its name, or is named ``gate`` or ``shared_expert_gate`` and lies
    beside ``experts``. First and last go by the order in which modules are registered.

    ``also``: a filter that layers must pass, too, such as :func:`gains`.
    """

    def __init__(self, also: Filter | None = None) -> None:
        if also is not None and not callable(also):
            raise TypeError(f"also: expected a filter, a function of a module and its name, got {also!r}")
        self.also = also

    def for_model(self, model: nn.Module, embedded: Set[int]) -> Filter:
        """The filter for a model. ``embedded``: ids of weights of embeddings, which other models may have."""
        layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        embeddings = any(isinstance(module, nn.Embedding) for module in model.modules())
        ends = {id(module) for _, module in (layers[:1] if not embeddings else []) + layers[-1:]}
        picked = {
            id(module)
            for name, module in layers
            if id(module) not in ends
            and id(module._parameters.get("weight")) not in embedded
            and not (is_head(name) or is_router(model, name) or is_embedding(name) or is_adapter(model, name))
            and (self.also is None or self.also(module, name))
        }
        return lambda module, _: id(module) in picked

    def __call__(self, module: nn.Module, name: str) -> bool:
        """Raises TypeError: which layers are the first and the last is known of whole models only."""
        raise TypeError("UsualLayers() sees a whole model: give it as filter_fn itself, and other filters as `also`")


def gains(recipe: Recipe, rows: int, table: str | os.PathLike[str] | None = None) -> Filter:
    """A ``filter_fn``: every ``nn.Linear`` and ``GroupedLinear`` of a size at which FP8 products were measured to gain.

    That is one with which a smaller size, or the same, took less time than in BF16, forward and backward: smaller or
    equal in rows, inputs and outputs, or with the latter exchanged. Larger ones save more, since casts grow less than
    products. Sizes that no measured one is smaller than are left out, as are those that the recipe multiplies in BF16,
    and with ``"auto"`` those where BF16 takes the GPU less than 0.5 ms: the host limits steps there.

    Args:
        recipe: with ``compute="auto"``, the default, or ``"fp8"``.
        rows: of activations, of each call on each rank: batch times sequence. Of experts all together, who are taken
            to have as many each.
        table: a file that ``benchmarks/fp8_training.py --parts sizes`` has written; default: that of this package,
            ``measured_sizes.json``, which says what was measured where.

    Raises:
        TypeError: for what is no recipe.
        ValueError: for a recipe that decodes, or that the table does not have.
    """
    check_recipe(recipe)
    format = recipe.products
    if format is None:
        raise ValueError(f'{recipe} has no products in FP8, so no layer gains: leave out compute="decode"')
    kind, path = measured.kind_of(format, recipe.keeps_weights), measured.TABLE if table is None else Path(table)
    least_ms = measured.HOST_MS if format.measured else 0.0
    try:
        gaining = measured.gaining_sizes(kind, "BF16", table=path, least_ms=least_ms)
    except KeyError:
        raise ValueError(f"{recipe}: {path.name} has no times of products of kind {kind!r}") from None
    of_experts = grouped.gaining_sizes(recipe, path)

    def picks(module: nn.Module, _: str) -> bool:
        if isinstance(module, GroupedLinear):
            experts, outputs, inputs = module.weight.shape
            return measured.gains(measured.Size(rows // experts, inputs, outputs), of_experts)
        if not isinstance(module, nn.Linear):
            return False
        shape = module.out_features, module.in_features
        in_fp8 = products.unsupported_reason("output", recipe, rows, shape) is None
        return in_fp8 and measured.gains(measured.Size(rows, module.in_features, module.out_features), gaining)

    return picks


# --- parameters by their names ------------------------------------------------------------------------------------


def _all_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """(module, the parameter's name there, its name in the model) of all parameters."""
    for path, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                yield module, key, _joined(path, key)


def _param(module: nn.Module, key: str) -> nn.Parameter:
    param = module._parameters[key]
    assert param is not None
    return param


def _joined(module_name: str, key: str) -> str:
    return f"{module_name}.{key}" if module_name else key


def _weight_of(module: nn.Module, name: str) -> tuple[nn.Module, str, str]:
    if module._parameters.get("weight") is not None:
        return module, "weight", _joined(name, "weight")
    described = f"{name or 'the model'}, a {type(module).__name__}"
    if isinstance(getattr(module, "weight", None), Tensor):
        how = "as torch.nn.utils.parametrize, weight_norm, spectral_norm and prune do"
        raise ValueError(f"{described}: its weight is computed from other tensors, {how}; {_OTHERWISE}")
    within = "; pick the layers that it contains" if next(module.children(), None) is not None else ""
    raise ValueError(
        f"{described}: filter_fn picks modules that have a parameter `weight`, and this has none{within}, "
        "or parameters of any name by param_filter(param, name)"
    )
