"""``QuantizedTensor``: a weight that is kept, gathered and saved in its quantized form.

A wrapper subclass over flat components (data, scales, ...; see ``recipes/``), compact and unpadded. What it can do
without decoding it does on the components: views by rows and columns, copies, moves. Everything else sees a plain
tensor that is decoded for it; what is written into a view is written into the weight (``in_place.py``), or raises.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, SupportsIndex

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from fused_optim.formats.elements import ELEMENT_TYPES
from fused_optim.quantized.recipes import RECIPES, Components, Position, Recipe
from fused_optim.quantized.tensor import all_gather
from fused_optim.quantized.tensor.dispatch import Handler, asked_by
from fused_optim.quantized.tensor.weight import INITIAL, Shared, Weight
from fused_optim.sharding.dtensor import dense, local_tensor

# What compilers keep of a weight beside its components: recipe, shape, dtype, whether it is transposed, or flat, padded
# rows, its first row.
Context = tuple[Recipe, torch.Size, torch.dtype, bool, bool, int, int, Shared]


class _Hook:
    """A method with its signature at hand: FSDP2 asks for it at every gather, and working it out takes longer."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        _, *others = inspect.signature(method).parameters.values()
        self.signature = inspect.Signature(others)
        self.__doc__ = method.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
        if instance is None:
            return self.method
        bound = functools.partial(self.method, instance)
        bound.__signature__ = self.signature  # type: ignore[attr-defined]  # where inspect looks first
        return bound


class QuantizedTensor(Weight):
    """A quantized weight of the logical ``shape`` and ``dtype`` (what it decodes to: float32, bfloat16 or float16).

    ``recipe``: how it is quantized. ``components``: name -> plain tensor, see ``recipe.components``; while the tensor
    has its high-precision initial values, also ``"initial"``, shaped as the matrix of the weight.

    Casts to another dtype raise for what is trained, and give plain copies elsewhere. Operations in place raise, except
    while it has initial values: those are changed, also through views, are what the weight decodes to from then on, and
    ``finish_initialization`` quantizes them.

    ``copy_`` from a weight of the same recipe copies bytes, and quantizes anything else: at once, or, where the recipe
    has one scale for all of a weight and other ranks hold parts of it, in ``finish_initialization``. Into a part of a
    weight it copies the scale of all of it, too, as loading part by part needs: until that is done the other parts keep
    their values beside the bytes. State dicts of the shards, hence checkpoints of torch.distributed.checkpoint, hold
    the bytes. ``DTensor.full_tensor()`` and full
    state dicts hold plain decoded values; loaded again, also with ``broadcast_from_rank0``, these are quantized anew,
    which gives the same elements and scales that differ by no more than the dtype's rounding.
    """

    handlers: ClassVar[dict[OpOverload, Handler]] = {}

    # --- what torch asks tensors without memory of their own ------------------------------------------------------

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        """torch's own setter does nothing to tensors without memory of their own."""
        if (
            self.is_rearranged
            or not isinstance(other, QuantizedTensor)
            or _kind(other) != _kind(self)
            or other.cut_from is not None
        ):
            raise TypeError(
                f"{self.prefix}.data of a quantized weight takes a whole one of the same recipe, shape and dtype; "
                "copy_ quantizes other values, dequantize_model_(model) makes plain weights, which take any"
            )
        has_optimizer = self.shared.has_optimizer
        self.components, self.shared, self.cut_from = other.components, other.shared, None
        self.shared.has_optimizer |= has_optimizer
        self._start, self.rank_position, self._sent = other._start, other.rank_position, None

    def data_ptr(self) -> int:
        """0, as of what has no memory of its own: torch's stagers then copy the tensors that it consists of.

        safetensors asks for nothing else of what it writes that others do not ask for, and refuses 0 without a name. So
        this function looks who calls it, for an error that says what to do. Accelerate, which would take all weights
        with one address for tied, gets that of the codes.
        """
        if asked_by("safetensors"):
            raise self._not_for_safetensors()
        return self.components["data"].data_ptr() if asked_by("accelerate") else 0

    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage of no bytes. Raises if transformers asks for its size, through safetensors, before it writes."""
        if sys._getframe(1).f_code.co_qualname == "storage_size":
            raise self._not_for_safetensors()
        return torch.UntypedStorage(0, device=self.device)

    def share_memory_(self) -> Self:
        """Moves codes and scales, and initial values, into memory that other processes see; views share it, too.

        Raises RuntimeError where plain values wait to be quantized, of which other processes would not know.
        """
        self.check_quantized()
        self.check_not_freed()
        for part in self.parts.values():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(part.is_shared() for part in self.components.values())

    def _not_for_safetensors(self) -> TypeError:
        return TypeError(
            f"{self.prefix}safetensors cannot hold a quantized weight as one tensor: save_quantized_safetensors writes "
            "codes and scales for inference servers; plain_state_dict(model) gives decoded values to save instead, as "
            "save_pretrained_as(model) does for Hugging Face's save_pretrained and Trainer; dequantize_model_ makes "
            "plain weights; save_master_safetensors writes FP32 masters; torch.save and torch.distributed.checkpoint "
            "keep quantized weights as they are"
        )

    def is_pinned(self, device: str | torch.device | int | None = None) -> bool:
        return all(part.is_pinned() for part in self.components.values())

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # of one without types
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, {self.recipe}"
            f"{', with initial values' if self.has_initial else ''})"
        )

    def __reduce_ex__(self, proto: SupportsIndex) -> tuple[Any, ...]:
        if self.is_rearranged:
            raise TypeError("views of a quantized weight cannot be pickled")
        self.check_quantized()
        kept = {name: part for name, part in self.components.items() if name != INITIAL}
        if self.is_freed:
            kept = {name: part.to("meta") for name, part in kept.items()}
        fields = {field.name: getattr(self.recipe, field.name) for field in dataclasses.fields(self.recipe)}
        described = (self.recipe.name, fields, tuple(self.weight_shape), self.dtype)
        flags = (self.requires_grad, isinstance(self, torch.nn.Parameter), self.shared.shard)
        where = (self.rows_before, self.position.shares_blocks)
        cut = [where] if any(where) else []
        return rebuild, (kept, *described, *flags, *cut)

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        """The components without initial values: graphs decode, and would be compiled again when these are freed."""
        names = []
        for part in self.recipe.components:
            names.append(f"_{part.name}")
            setattr(self, names[-1], self.components[part.name])
        return names, (
            *(self.recipe, self.weight_shape, self.dtype),
            *(self.is_transposed, self.is_flat, self.padded_rows, self._start, self.shared),
        )

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Context, size: Sequence[int], stride: Sequence[int]
    ) -> QuantizedTensor:
        recipe, shape, dtype, transposed, flat, padded_rows, start, shared = context
        components = {name[1:]: part for name, part in inner.items()}
        shared = replace(shared)  # what happens while code is compiled did not happen to the weight
        return QuantizedTensor(components, recipe, shape, dtype, transposed, flat, None, shared, padded_rows, start)

    @classmethod
    def __metadata_guard__(cls, compiled: Context, other: Context) -> bool:
        """True if a graph that was compiled for one weight can be used for another, in terms of ``__tensor_flatten__``.

        Names do not matter. How recipes compute does, though they compare equal, and so does that pending ones raise.
        """
        same_recipe = compiled[0] is other[0] or repr(compiled[0]) == repr(other[0])  # asked at every call
        same_state = compiled[-1].pending == other[-1].pending and compiled[-1].position == other[-1].position
        return same_recipe and same_state and compiled[1:-1] == other[1:-1]

    def _stable_hash_for_caching(self) -> str:
        """The key of a weight in torch's caches of compiled graphs.

        Names do not matter, the code of the graphs does.
        """
        recipe, *others, shared = self.__tensor_flatten__()[1]
        parts = [(name, part.dtype, tuple(part.shape), str(part.device)) for name, part in self.components.items()]
        described = (repr(recipe), others, shared.pending, parts, self.requires_grad, _sources())
        return hashlib.sha256(repr(described).encode()).hexdigest()

    # --- FSDP2 ----------------------------------------------------------------------------------------------------

    @_Hook
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], all_gather.Gathered]:
        """FSDP2's hook: the tensors to gather of this shard, bytes of data and scales, padded as FSDP2 pads shards."""
        self.check_cut_by_rows()
        self.check_quantized()
        rows, ranks, before = self.padded_rows, mesh.size(), self.shared.position.gathered or 0
        if self._sent is None or not self._sent.sends(self.components, rows, ranks, before):
            shape = (rows, *self.weight_shape[1:])
            self._sent = all_gather.SentShard(self.recipe, self.components, shape, ranks, before)
        return self._sent.inputs, self._sent.metadata

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: all_gather.Gathered,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP2's hook: the whole weight, quantized, in the memory of what was gathered."""
        if out is not None:  # it lies in the memory that was gathered into, except what was put together
            weight = local_weight(out)
            weight.shared.source = self
            all_gather.refresh(outputs, metadata, weight.components)
            return None
        gathered, made = all_gather.outputs(outputs, metadata)
        kept_components = {
            name: part for name, part in self.components.items() if name != INITIAL
        }  # histories are not gathered
        shared = Shared(name=self.shared.name, source=self, position=Position(metadata.rows_before))
        return QuantizedTensor(
            {**kept_components, **gathered}, self.recipe, metadata.shape, param_dtype, shared=shared
        ), made


class Initials:
    """The initial values of many weights, as long as these keep their ``components``; asked at every step."""

    def __init__(self, weights: Sequence[QuantizedTensor]) -> None:
        self._weights = [(weight, weight.shared, weight.whole.components) for weight in weights]

    def mark_updated(self) -> None:
        """Call :meth:`QuantizedTensor.mark_updated` of each weight that has initial values."""
        for weight, shared, components in self._weights:
            if shared.pending or shared.discard or INITIAL in components:
                weight.mark_updated()

    def mark_quantized(self) -> None:
        for weight, _, _ in self._weights:
            weight.mark_quantized()


@functools.cache
def _sources() -> str:
    """A digest of this package's code, by which graphs were traced that may be found in a cache."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _kind(tensor: QuantizedTensor) -> tuple[Any, ...]:
    kind = tensor.recipe, tensor.weight_shape, tensor.dtype, tensor.device, tensor.is_transposed, tensor.is_flat
    return *kind, tensor.rows_before


def rebuild(
    components: Components,
    recipe: str,
    fields: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    shard: bool,
    position: tuple[int, bool] = (0, False),
) -> Tensor:
    """Rebuild a pickled ``QuantizedTensor``. Raises ValueError for a recipe of a newer version."""
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r} of a quantized tensor; known are {', '.join(RECIPES)}")
    shared = Shared(shard=shard, position=Position(*position))
    result = QuantizedTensor(components, RECIPES[recipe](**fields), shape, dtype, shared=shared)
    return torch.nn.Parameter(result, requires_grad) if is_parameter else result.requires_grad_(requires_grad)


rebuild.__module__ = __package__  # as files name it, whatever this module is called


def local_weight(param: Tensor) -> QuantizedTensor:
    """The quantized tensor that this rank holds of a parameter, which must be one."""
    local = local_tensor(param)
    if not isinstance(local, QuantizedTensor):
        raise TypeError(f"expected a quantized weight, got a {type(local).__name__} of shape {tuple(local.shape)}")
    return local


def as_initial(values: Tensor) -> Tensor:
    """Values to start a master from: dense, and themselves where they are plain ones that FP32 does not round."""
    if isinstance(values, QuantizedTensor):
        return values.initial_values().clone()
    return dense(values if values.dtype in ELEMENT_TYPES else values.float())


def implements(*functions: OpOverload) -> Callable[[Handler], Handler]:
    """Register the implementation of operations on quantized weights."""

    def register(handler: Handler) -> Handler:
        QuantizedTensor.handlers.update(dict.fromkeys(functions, handler))
        return handler

    return register
