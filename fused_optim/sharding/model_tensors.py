"""Names of a model's tensors, in the model and in files: inside of wrappers, under all of their names.

Hugging Face transformers keeps the weights of a layer's experts in one parameter and writes a tensor per expert, as
inference servers read them. It converts a state dict itself: elements are moved, and none is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_optim.sharding.collective import state_name

Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class Holder:
    """A module that holds a parameter: its name inside of wrappers, and its path with them."""

    name: str
    path: str
    module: nn.Module
    key: str  # of the parameter


def tensor_names(model: nn.Module) -> dict[Tensor, list[str]]:
    """All names of parameters and persistent buffers, as torch.distributed.checkpoint has them."""
    names: dict[Tensor, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names.setdefault(value, []).append(state_name(model, name))
    return names


def parameter_holders(model: nn.Module) -> dict[Tensor, list[Holder]]:
    """All holders of each parameter: tied ones, and those of modules that appear several times, have more than one."""
    holders: dict[Tensor, list[Holder]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, param in module._parameters.items():
            if param is not None:
                name = state_name(model, f"{path}.{key}" if path else key)
                holders.setdefault(param, []).append(Holder(name.rpartition(".")[0], path, module, key))
    return holders


# --- in files -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileTensors:
    """The tensors in files that one or several tensors of a model become.

    ``names``: in the model. ``convert``: values by our names to values by theirs; with ``are_views``, views of them.
    """

    names: tuple[str, ...]
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    new_name: str | None = None  # of one that stays as it is
    are_views: bool = False

    def rows(self, shape: torch.Size) -> dict[str, Tensor | None] | None:
        """By name in files: the rows of the model's tensor, as a matrix, in the file's tensor; None for all, in order.

        Indices (int64), in the shape of the file's tensor without its last dim. None altogether if the files' tensors
        have other parts than whole rows, or parts of several tensors.
        """
        if self.new_name is not None:
            return {self.new_name: None}
        if len(self.names) > 1 or len(shape) < 2:
            return None
        *lead, columns = shape
        one_expert = [1, *lead[1:]] if len(lead) > 1 else lead  # which stands for the others
        order = torch.arange(columns, dtype=torch.int32)
        try:
            numbers = self._of(torch.arange(shape[:-1].numel()).view(*lead, 1))
            whole = self._of(torch.empty(shape, device="meta"))
            ordered = self._of(order.expand(*one_expert, columns))
        except (RuntimeError, ValueError, IndexError):  # of operations on the last dim, which has one element here
            return None
        if any(numbers[name].shape != (*value.shape[:-1], 1) for name, value in whole.items()):
            return None
        if any(value.shape[-1] != columns or not (value == order).all() for value in ordered.values()):
            return None
        return {name: value.squeeze(-1) for name, value in numbers.items()}

    def empty(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The tensors in files without memory, in ``dtype`` if given."""
        meta = {name: torch.empty(x.shape, dtype=dtype or x.dtype, device="meta") for name, x in tensors.items()}
        return self.convert(meta)

    def _of(self, value: Tensor) -> dict[str, Tensor]:
        return self.convert({self.names[0]: value})


def file_tensors(model: nn.Module, shapes: Shapes, experts: Collection[str] = ()) -> list[FileTensors]:
    """The tensors in files by the names of the model's tensors, as transformers writes its own models.

    ``experts``: names of tensors with an expert per entry of dim 0, which become one tensor per expert if transformers
    does not know them.
    """
    files: list[FileTensors] = []
    left = dict(shapes)
    for prefix, root in _transformers_models(model):
        of_root = {name: left.pop(name) for name in list(left) if name.startswith(prefix)}
        files += _Reverting(prefix, root).file_tensors(of_root)
    return files + [_per_expert(name) if name in experts else _renamed(name, name) for name in left]


def linear_experts(model: nn.Module, name: str) -> FileTensors | None:
    """Llama 4's experts as linear layers, as transformers makes them when it reads compressed-tensors.

    In the model ``gate_up_proj`` and ``down_proj`` have inputs in their rows. None for other tensors.
    """
    parent, _, own = name.rpartition(".")
    modules = model.named_modules(remove_duplicate=False)
    of_parent = (module for path, module in modules if state_name(model, path) == parent)
    kinds = type(next(of_parent, None)).__mro__ if own in ("gate_up_proj", "down_proj") else ()
    if all(kind.__name__ != "Llama4TextExperts" for kind in kinds):  # of which FSDP2 makes a class of its own
        return None

    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        turned = tensors[name].transpose(-2, -1)
        parts = {"down_proj": turned}
        if own == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), turned.chunk(2, 1), strict=True))
        return {
            f"{parent}.{expert}.{layer}.weight": matrix
            for layer, matrices in parts.items()
            for expert, matrix in enumerate(matrices.unbind(0))
        }

    return FileTensors((name,), convert, are_views=True)


def names_to_write(model: nn.Module, names: list[str]) -> list[str]:
    """The first name of a tensor, and others that transformers would not tie to it by itself when it loads a model."""
    more = set()
    for prefix, root in _transformers_models(model):
        tied = {f"{prefix}{name}" for pair in root.all_tied_weights_keys.items() for name in pair}
        more |= {name for name in names if name.startswith(prefix)} - tied
    return [name for name in dict.fromkeys(names) if name == names[0] or name in more]


def _per_expert(name: str) -> FileTensors:
    """A tensor per expert: ``experts.w1``, or ``experts.w1.weight``, becomes ``experts.0.w1.weight`` and so on."""
    parent, _, layer = f".{name}".removesuffix(".weight").removeprefix(".").rpartition(".")

    def convert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = enumerate(tensors[name].unbind(0))
        return {".".join(filter(None, (parent, str(at), layer, "weight"))): part for at, part in parts}

    return FileTensors((name,), convert)


# --- transformers -------------------------------------------------------------------------------------------------


def _transformers_models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(prefix of its names in the model, module) of the outermost models of transformers 5."""
    modeling, loading = (sys.modules.get(f"transformers.{name}") for name in ("modeling_utils", "core_model_loading"))
    if modeling is None or loading is None:
        return
    prefixes: list[str] = []
    for path, module in model.named_modules():
        key = next((key for key, _ in module.named_parameters()), None)
        if not isinstance(module, modeling.PreTrainedModel) or key is None:
            continue
        full = state_name(model, f"{path}.{key}" if path else key)
        prefix = full.removesuffix(state_name(module, key))
        if not any(prefix.startswith(outer) for outer in prefixes):
            prefixes.append(prefix)
            yield prefix, module


class _Reverting:
    """The conversion that transformers applies to a model's state dict before it writes it."""

    def __init__(self, prefix: str, root: Any) -> None:
        self.prefix, self.root = prefix, root
        self.loading: Any = sys.modules["transformers.core_model_loading"]

    def __call__(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {name.removeprefix(self.prefix): value for name, value in tensors.items()}
        with self._without_quantizer():
            found = self.loading.revert_weight_conversion(self.root, own)
        return {f"{self.prefix}{name}": value for name, value in found.items()}

    def file_tensors(self, shapes: Shapes) -> Iterator[FileTensors]:
        meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        whole = self(meta)
        renamed = {id(value): name for name, value in whole.items()}
        together = []
        for name, value in meta.items():
            if id(value) in renamed:
                yield _renamed(name, renamed[id(value)])
            elif self._is_whole(name, value, whole):
                yield FileTensors((name,), self)
            else:
                together.append(name)
        if together:
            yield FileTensors(tuple(together), self)

    def _is_whole(self, name: str, value: Tensor, whole: Mapping[str, Tensor]) -> bool:
        """True if a tensor is not joined with others: alone it becomes the same."""
        try:
            alone = self({name: value})
        except Exception:  # of any operation that misses the others
            return False
        return all(key in whole and whole[key].shape == part.shape for key, part in alone.items())

    @contextmanager
    def _without_quantizer(self) -> Iterator[None]:
        """Hide conversions of a quantizer that the model was loaded by, which would quantize the written values."""
        attributes, key = vars(self.root), "_weight_conversions"
        known = attributes.get(key) or ()
        operations = [op for each in known if isinstance(each, self.loading.WeightConverter) for op in each.operations]
        hidden = {key: attributes.pop(key)} if any("hf_quantizer" in vars(op) for op in operations) else {}
        try:
            yield
        finally:
            attributes.update(hidden)


def _renamed(name: str, new: str) -> FileTensors:
    return FileTensors((name,), lambda tensors: {new: tensors[name]}, new)
