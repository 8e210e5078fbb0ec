"""``QuantizedTensor``: a weight that is kept, gathered and saved in its quantized form.

A wrapper subclass over flat components (data, scales, ...; see ``recipes.py``), compact and unpadded. What it can do
without decoding it does on the components: views by rows and columns, copies, moves. Everything else sees a plain
tensor that is decoded for it; what is written into a view is written into the weight (``in_place.py``), or raises.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from fused_optim.quantized import all_gather, engine, tiles
from fused_optim.quantized.coverage import Part, joined
from fused_optim.quantized.engine import Encoding
from fused_optim.quantized.recipes import (
    RECIPES,
    Component,
    Components,
    Recipe,
    as_matrix,
    cut_component,
    matrix_range,
)
from fused_optim.quantized.tiles import WHOLE, Position
from fused_optim.sharding.dtensor import dense, local_tensor

aten = torch.ops.aten
INITIAL = "initial"  # the component with high-precision initial values, until the optimizer has seeded its master
INITIAL_COMPONENT = Component(INITIAL, torch.float32, (1, 1))

# What torch calls with a function of ``torch.ops`` and its arguments, which are whatever that function takes.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[OpOverload, Args, Kwargs], Any]


class Kind(enum.Enum):
    """What functions without a handler of their own are told apart by."""

    VIEW = enum.auto()  # gives views of its argument
    MUTABLE = enum.auto()  # writes into its arguments


_BY_KIND: dict[Kind, Handler] = {}


@dataclass(slots=True)
class Shared:
    """What all views of a weight know together.

    ``stale``: initial values were changed and not quantized since. ``discard``: they are to be freed once quantized.
    ``held``: an optimizer holds the parameter. ``shard``: other ranks hold parts of the weight. ``columns_cut``: FSDP2
    has cut it by columns. ``in_layer``: a ``QuantizedLinear`` has it, as far as is known. ``name``: of the parameter,
    for messages. ``source``: the shard, where this was gathered. ``position``: where all that shares this lies in the
    weight. ``loaded``: the parts of a stale weight that bytes were copied into since; once these are all of it, it is
    not stale any more.
    """

    stale: bool = False
    discard: bool = False
    held: bool = False
    shard: bool = False
    columns_cut: bool = False
    in_layer: bool = True
    name: str | None = None
    source: QuantizedTensor | None = field(default=None, compare=False)
    position: Position = WHOLE
    loaded: tuple[Part, ...] = ()


# What compilers keep of a weight beside its components: recipe, shape, dtype, whether it is transposed, or flat, padded
# rows, its first row.
Context = tuple[Recipe, torch.Size, torch.dtype, bool, bool, int, int, Shared]


class Decodable(torch.Tensor):
    """What most of torch's operations see as a plain tensor that is decoded for them: a quantized weight, or a view."""

    handlers: ClassVar[dict[OpOverload, Handler]]  # of functions whose first tensors of this kind are of this class

    # As torch's own subclasses have it; only its stubs know another signature.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of ``dtype``, or of the tensor's own; wherever the data lies."""
        raise NotImplementedError

    def __dlpack__(self, **options: Any) -> Any:
        return self.dequantize().__dlpack__(**options)

    @classmethod
    # Else what a graph break leaves to it would be compiled, handler by handler. As in torch.optim, and unlike
    # torch.compiler.disable, this imports the compiler only when it is called.
    @torch._disable_dynamo
    def __torch_dispatch__(  # type: ignore[override]  # which torch's stubs take for a static method
        cls, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        handler = cls.handlers.get(func)
        return (_default_handler(func) if handler is None else handler)(func, args, kwargs or {})


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


class QuantizedTensor(Decodable):
    """A quantized weight of the logical ``shape`` and ``dtype`` (what it decodes to: float32, bfloat16 or float16).

    ``recipe``: how it is quantized. ``components``: name -> plain tensor, see ``recipe.components``; while the tensor
    has its high-precision initial values, also ``"initial"``, shaped as the matrix of the weight.

    Casts to another dtype raise, as do operations in place, except while it has initial values: those are changed, also
    through views, are what the weight decodes to from then on, and ``finish_initialization`` quantizes them.

    ``copy_`` from a weight of the same recipe copies bytes (into a part of a weight also the scale of all of it, as
    loading part by part needs), and quantizes anything else: at once, or, where the recipe
    has one scale for all of a weight and other ranks hold parts of it, in ``finish_initialization``. State dicts of
    the shards, hence checkpoints of torch.distributed.checkpoint, hold the bytes. ``DTensor.full_tensor()`` and full
    state dicts hold plain decoded values; loaded again, also with ``broadcast_from_rank0``, these are quantized anew,
    which gives the same elements and scales that differ by no more than the dtype's rounding.
    """

    handlers: ClassVar[dict[OpOverload, Handler]] = {}

    recipe: Recipe
    components: Components  # initial values are those of what this is a part of
    _weight_shape: torch.Size
    # A view with its dims swapped, or of all elements in one dim. Neither can be cut.
    _transposed: bool
    _flat: bool
    _shared: Shared
    # What it is a part of: the tensor, the dim, and from where to where.
    _cut_from: tuple[QuantizedTensor, int, int, int] | None
    # Rows of the tensor whose first rows these are: FSDP2 pads shards so, and gathers them padded.
    _padded_rows: int
    # The first of its rows in what shares its memory, and, if it was split off for a rank, what its copies will know.
    _start: int
    _split: Position | None
    _sent: all_gather.Shard | None  # to FSDP2, the last time

    # All in __new__, and no keyword arguments below: views are made by every matrix product, and these calls cost most.
    @staticmethod
    def __new__(
        cls,
        components: Components,
        recipe: Recipe,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        flat: bool = False,
        cut_from: tuple[QuantizedTensor, int, int, int] | None = None,
        shared: Shared | None = None,
        padded_rows: int = 0,
        start: int = 0,
        split: Position | None = None,
    ) -> QuantizedTensor:
        size = (math.prod(shape),) if flat else (shape[1], shape[0]) if transposed else shape
        strides = (1, shape[1]) if transposed else None
        device = components["data"].device
        self = torch.Tensor._make_wrapper_subclass(cls, size, strides, None, None, dtype, torch.strided, device)
        self.components = components
        self.recipe = recipe
        self._weight_shape = torch.Size(shape)
        self._transposed, self._flat, self._cut_from = transposed, flat, cut_from
        self._shared = Shared() if shared is None else shared
        self._padded_rows = max(padded_rows, shape[0])
        self._start, self._split, self._sent = start, split, None
        return self

    # --- making -------------------------------------------------------------------------------------------------

    @classmethod
    def empty(
        cls,
        recipe: Recipe,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        initial: torch.dtype | None = None,
        shared: Shared | None = None,
    ) -> QuantizedTensor:
        """One that decodes to zeros; with initial values of dtype ``initial`` if that is given."""
        check_shape(recipe, shape)
        check_dtype(dtype)
        components = recipe.empty(tuple(shape), device, 0 if shared is None else shared.position.rows_before)
        if initial is not None:
            components[INITIAL] = torch.zeros(as_matrix(tuple(shape)), dtype=initial, device=device)
        return cls(components, recipe, shape, dtype, shared=shared)

    @classmethod
    def from_values(cls, values: Tensor, recipe: Recipe, keep_initial: bool = False) -> QuantizedTensor:
        """Quantize a plain tensor; with ``keep_initial`` it keeps ``values`` themselves (no copy) for the optimizer.

        Raises ValueError for a shape that the recipe cannot quantize, TypeError for dtypes other than float32, bfloat16
        and float16.
        """
        result = cls.empty(recipe, values.shape, values.dtype, values.device)
        if values.device.type != "meta":
            result.write(values)
        if keep_initial:
            result.components[INITIAL] = values.detach().reshape(as_matrix(tuple(values.shape)))
        return result

    def _view(
        self,
        components: Components,
        shape: Sequence[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        transposed: bool | None = None,
        flat: bool | None = None,
        cut_from: tuple[QuantizedTensor, int, int, int] | None = None,
        padded_rows: int = 0,
        split: Position | None = None,
    ) -> QuantizedTensor:
        """A tensor that shares memory with this one."""
        start = self._start + (cut_from[2] if cut_from is not None and cut_from[1] == 0 else 0)
        return view_of(
            self,
            QuantizedTensor,
            components,
            self.recipe,
            self._weight_shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
            self._transposed if transposed is None else transposed,
            self._flat if flat is None else flat,
            self._cut_from if cut_from is None else cut_from,
            self._shared,
            padded_rows,
            start,
            self._split if cut_from is None else split,
        )

    def _copied(self, function: Callable[[Tensor], Tensor], padded_rows: int = 0) -> QuantizedTensor:
        """The same tensor with copies of the components."""
        self.check_not_freed()
        return QuantizedTensor(
            {name: function(part) for name, part in self.parts.items()},
            self.recipe,
            self._weight_shape,
            self.dtype,
            transposed=self._transposed,
            flat=self._flat,
            shared=self.shared_of_copy(),
            padded_rows=padded_rows,
        )

    def shared_of_copy(self) -> Shared:
        """A copy of what was split off for a rank is a shard."""
        position = replace(self.position, rows=None)
        return replace(self._shared, source=None, position=position, shard=self.is_shard, loaded=())

    # --- where it lies ------------------------------------------------------------------------------------------

    @property
    def rows_before(self) -> int:
        """How many rows of its first block of several rows come before it."""
        return (self._shared.position.rows_before + self._start) % self.recipe.block_rows

    @property
    def position(self) -> Position:
        return replace(self._shared.position, rows_before=self.rows_before) if self._split is None else self._split

    @property
    def is_shard(self) -> bool:
        """Whether other ranks hold, or are to hold, parts of the weight."""
        return self._shared.shard or self._split is not None

    @property
    def has_whole_blocks(self) -> bool:
        """Whether no row of its blocks lies elsewhere: on other ranks, or in the weight that it is cut from."""
        tall, position = self.recipe.block_rows, self._shared.position
        if tall == 1 or self.rows_before or position.shares_blocks:
            return tall == 1
        end = self._start + self._weight_shape[0]
        return end % tall == 0 or end == self._rows_of_whole

    @property
    def _rows_of_whole(self) -> int:
        """Of what this is a part of, without padding."""
        rows = self._shared.position.rows
        return self._whole._weight_shape[0] if rows is None else rows

    @property
    def _part(self) -> Part:
        """Which part of that it is, as a matrix."""
        first, last, cut = 0, as_matrix(self._weight_shape)[1], self._cut_from
        while cut is not None:
            of, dim, start, _ = cut
            offset = matrix_range(tuple(of._weight_shape), dim, start, start)[0] if dim == 1 else 0
            first, last, cut = first + offset, last + offset, of._cut_from
        return Part((self._start, self._start + self._weight_shape[0]), (first, last))

    def take_position(self, position: Position) -> None:
        """Become the shard that lies there; its memory was made for one that touches as many blocks as possible."""
        whole, known = self._whole, self._shared.position
        assert not known.known and self._start == 0
        self._shared.position = replace(position, gathered=known.gathered, rows=self._weight_shape[0])
        for tensor in (whole, self):
            for part in self.recipe.components:
                rows, *_ = self.recipe.component_shape(part, tensor._weight_shape, position.rows_before)
                if part.tile is not None:
                    tensor.components[part.name] = whole.components[part.name][:rows]

    # --- values -------------------------------------------------------------------------------------------------

    @property
    def initial(self) -> Tensor | None:
        """The high-precision initial values, as a matrix; None where they were freed, or never kept.

        A part has those of the whole: FSDP2 keeps the padded tensor that its shard is a part of.
        """
        if self._cut_from is None:
            return self.components.get(INITIAL)
        whole, dim, start, end = self._cut_from
        initial = whole.initial
        if initial is None:
            return None
        start, end = matrix_range(tuple(whole._weight_shape), dim, start, end)
        return cut_component(initial, INITIAL_COMPONENT, dim, start, end)

    @property
    def has_initial(self) -> bool:
        return INITIAL in self._whole.components

    @property
    def parts(self) -> Components:
        """The components, and the initial values where there are any."""
        initial = self.initial
        return self.components if initial is None else {**self.components, INITIAL: initial}

    @property
    def stored_bytes(self) -> int:
        """What the components and initial values take; ``nbytes`` is what plain values would."""
        return sum(part.nbytes for part in self.parts.values())

    def discard_high_precision_init(self) -> None:
        """Free the high-precision initial values. Raises RuntimeError where they were changed and not quantized yet."""
        self.check_fresh()
        self._shared.discard = False
        self._whole.components.pop(INITIAL, None)

    @property
    def _whole(self) -> QuantizedTensor:
        """What this is a part of; itself if it is none."""
        return self if self._cut_from is None else self._cut_from[0]._whole

    def release(self) -> None:
        """No master is going to start from the initial values: free them as soon as they are quantized.

        Except where an optimizer holds the parameter, and on the meta device, where they are still to be made.
        """
        if self._shared.held or self.is_meta:
            return
        if self.is_stale:
            self._shared.discard = True
        elif self.has_initial:
            self.discard_high_precision_init()

    def release_if_frozen(self) -> None:
        """:meth:`release` where this is used as a parameter that is frozen."""
        weight = self if self._shared.source is None else self._shared.source
        if weight.has_initial and isinstance(self, torch.nn.Parameter) and not self.requires_grad:
            weight.release()

    def initial_values(self) -> Tensor:
        """FP32 values to start a master from: the initial ones if they are still there, else the decoded ones."""
        return self.values() if self.initial is None else self.initial.float().reshape(self._weight_shape)

    def values(self) -> Tensor:
        """FP32 values, in the shape of the weight. A new tensor."""
        return self._decode(torch.float32)

    def _decode(self, dtype: torch.dtype) -> Tensor:
        self.release_if_frozen()
        if self.is_stale and self.initial is not None:
            return self.initial.to(dtype, copy=True, memory_format=torch.contiguous_format).view(self._weight_shape)
        self.check_not_freed()
        self.check_fresh()
        return tiles.decode(self.recipe, self.components, self._weight_shape, dtype, self.rows_before)

    def of_whole_weight(self) -> list[Tensor]:
        """The components, all FP32, that are the same however the weight is cut."""
        return [self.components[part.name] for part in self.recipe.components if part.tile is None]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self._decode(self.dtype if dtype is None else dtype)
        return values.view(-1) if self._flat else values.t() if self._transposed else values

    def write(self, values: Tensor) -> None:
        """Quantize plain values of this tensor's shape, with a new tensor-wide scale from these values alone."""
        self.forget_scales()
        weight = Encoding(self.recipe, self.components, values.detach().float())
        if self.recipe.scales_whole_tensor:
            absmax = engine.absmax([self.recipe], [weight.values], self.device)
            engine.Scales([(self.recipe, self.components)]).rescale([absmax], None, advance=True)
        engine.encode(tiles.pieces(weight, self.rows_before))
        self.mark_fresh()

    def forget_scales(self) -> None:
        """Before values that have nothing to do with the earlier ones: histories of scales start anew."""
        for part in self.of_whole_weight():
            part.zero_()

    @property
    def is_rearranged(self) -> bool:
        """Whether this is a view with its dims swapped, or of all elements in one dim."""
        return self._transposed or self._flat

    @property
    def prefix(self) -> str:
        """The parameter's name, where it is known, as the beginning of a message."""
        return f"{self._shared.name}: " if self._shared.name else ""

    def mark_fresh(self) -> None:
        """The data was quantized from the initial values as they are, or from later ones."""
        self._shared.stale, self._shared.loaded = False, ()
        if self._shared.discard:
            self.discard_high_precision_init()

    def mark_updated(self) -> None:
        """Later values than the initial ones were quantized, which are not wanted any more."""
        self.mark_fresh()
        self.discard_high_precision_init()

    def mark_stale(self) -> None:
        """Initial values were changed: they are what the weight decodes to until they are quantized."""
        self._shared.stale, self._shared.loaded = True, ()

    def mark_loaded(self) -> None:
        """Bytes were copied here, and into the initial values if there are any."""
        if not self.is_stale:
            return
        self._shared.loaded = joined(self._shared.loaded, self._part)
        everything = Part((0, self._rows_of_whole), (0, as_matrix(self._whole._weight_shape)[1]))
        if self._shared.loaded == (everything,):
            self.mark_fresh()

    @property
    def is_stale(self) -> bool:
        """Whether plain values were written and not quantized since."""
        return self._shared.stale and self.numel() > 0 and not self.is_meta

    def check_fresh(self) -> None:
        if self.is_stale:
            raise RuntimeError(
                f"{self.prefix}plain values were written into a quantized weight but not quantized yet: call "
                "fused_optim.quantized.finish_initialization(model) on all ranks after initialising or loading it"
            )

    def check_cut_by_rows(self) -> None:
        if self._shared.columns_cut:
            raise RuntimeError(f"{self.prefix}FSDP2 can shard quantized weights by rows only: placement Shard(0)")

    @property
    def is_freed(self) -> bool:
        """Whether its memory was given back, as FSDP2 does with gathered weights after their use."""
        data = self.components["data"]
        return data.numel() > 0 and not data.is_meta and data.untyped_storage().size() == 0

    def check_not_freed(self) -> None:
        if self.is_freed:
            raise RuntimeError(f"{self.prefix}the data of this quantized weight has been freed")

    def check_components(self, names: Sequence[str]) -> None:
        """Raise where these were freed or replaced, and their memory is no place for this weight any more."""
        self.check_not_freed()
        for component in self.recipe.components if self.numel() else ():
            part = self.components[component.name]
            shape = self.recipe.component_shape(component, self._weight_shape, self.rows_before)
            fits = tuple(part.shape) == shape and part.dtype == component.dtype and part.device == self.device
            if component.name in names and not fits:
                raise ValueError(
                    f"{self.prefix}component {component.name!r} of a quantized weight: expected {component.dtype} of "
                    f"shape {shape} on {self.device}, got {part.dtype} of shape {tuple(part.shape)} on {part.device}"
                )

    def keep_plain(self, values: Tensor) -> None:
        """Take plain values of this tensor's shape as initial values, to be quantized by ``finish_initialization``.

        Where the tensor has none, they are freed then.
        """
        initial = self.ensure_initial(values.dtype if values.is_floating_point() else torch.float32)
        initial.copy_(values.detach().reshape(as_matrix(tuple(self._weight_shape))))
        self.mark_stale()
        self.forget_scales()

    def ensure_initial(self, dtype: torch.dtype) -> Tensor:
        """The initial values; where there are none, the decoded ones in ``dtype`` become them.

        These are freed once they are quantized or, where there is an optimizer, when its masters have followed them.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{self.prefix}compiled code cannot change a quantized weight: its graphs decode it only"
            )
        whole = self._whole
        if INITIAL not in whole.components:
            dtype = torch.float32 if self._shared.held else dtype  # masters tell what was written from what was not
            whole.components[INITIAL] = whole.values().to(dtype).view(as_matrix(tuple(whole._weight_shape)))
            self._shared.discard = not self._shared.held
        initial = self.initial
        assert initial is not None
        return initial

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
            or other._cut_from is not None
        ):
            raise TypeError(
                f"{self.prefix}.data of a quantized weight takes a whole one of the same recipe, shape and dtype; "
                "copy_ quantizes other values"
            )
        self.components, self._shared, self._cut_from = other.components, other._shared, None
        self._start, self._split, self._sent = other._start, other._split, None

    def data_ptr(self) -> int:
        """0: torch's stagers copy what has no memory of its own as tensors. safetensors would write no bytes for it."""
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("safetensors"):
            raise TypeError(
                f"{self.prefix}safetensors cannot hold a quantized weight as one tensor: save_quantized_safetensors "
                "writes codes and scales, dequantize_model_ makes plain weights, and save_master_safetensors writes "
                "FP32 masters; torch.save and torch.distributed.checkpoint keep quantized weights as they are"
            )
        return 0

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0, device=self.device)

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
        self.check_fresh()
        kept = {name: part for name, part in self.components.items() if name != INITIAL}
        if self.is_freed:
            kept = {name: part.to("meta") for name, part in kept.items()}
        fields = {field.name: getattr(self.recipe, field.name) for field in dataclasses.fields(self.recipe)}
        described = (self.recipe.name, fields, tuple(self._weight_shape), self.dtype)
        flags = (self.requires_grad, isinstance(self, torch.nn.Parameter), self._shared.shard)
        where = (self.rows_before, self.position.shares_blocks)
        cut = [where] if any(where) else []
        return rebuild, (kept, *described, *flags, *cut)

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        """Without initial values: graphs decode, and would otherwise be compiled again when these are freed."""
        names = []
        for part in self.recipe.components:
            names.append(f"_{part.name}")
            setattr(self, names[-1], self.components[part.name])
        return names, (
            *(self.recipe, self._weight_shape, self.dtype),
            *(self._transposed, self._flat, self._padded_rows, self._start, self._shared),
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
        """Whether a graph that was compiled for one weight can be used for another, in terms of ``__tensor_flatten__``.

        Names do not matter. How recipes compute does, though they compare equal, and so does that stale ones raise.
        """
        same_recipe = repr(compiled[0]) == repr(other[0])
        same_state = compiled[-1].stale == other[-1].stale and compiled[-1].position == other[-1].position
        return same_recipe and same_state and compiled[1:-1] == other[1:-1]

    def _stable_hash_for_caching(self) -> str:
        """What torch's caches of compiled graphs know a weight by. Names do not matter, the code of the graphs does."""
        recipe, *others, shared = self.__tensor_flatten__()[1]
        parts = [(name, part.dtype, tuple(part.shape), str(part.device)) for name, part in self.components.items()]
        described = (repr(recipe), others, shared.stale, parts, self.requires_grad, _sources())
        return hashlib.sha256(repr(described).encode()).hexdigest()

    # --- FSDP2 ----------------------------------------------------------------------------------------------------

    @_Hook
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], all_gather.Gathered]:
        """FSDP2's hook: what is gathered of this shard. Bytes of data and scales, padded as FSDP2 pads shards."""
        self.check_cut_by_rows()
        self.check_fresh()
        rows, ranks, before = self._padded_rows, mesh.size(), self._shared.position.gathered or 0
        if self._sent is None or not self._sent.sends(self.components, rows, ranks, before):
            shape = (rows, *self._weight_shape[1:])
            self._sent = all_gather.Shard(self.recipe, self.components, shape, ranks, before)
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
            weight._shared.source = self
            all_gather.refresh(outputs, metadata, weight.components)
            return None
        gathered, made = all_gather.outputs(outputs, metadata)
        own = {name: part for name, part in self.components.items() if name != INITIAL}  # histories are not gathered
        shared = Shared(name=self._shared.name, source=self, position=Position(metadata.rows_before))
        return QuantizedTensor({**own, **gathered}, self.recipe, metadata.shape, param_dtype, shared=shared), made


class Initials:
    """The initial values of many weights, as long as these keep their ``components``; asked at every step."""

    def __init__(self, weights: Sequence[QuantizedTensor]) -> None:
        self._weights = [(weight, weight._shared, weight._whole.components) for weight in weights]

    def mark_updated(self) -> None:
        """:meth:`QuantizedTensor.mark_updated` of each."""
        for weight, shared, components in self._weights:
            if shared.stale or shared.discard or INITIAL in components:
                weight.mark_updated()

    def mark_fresh(self) -> None:
        for weight, _, _ in self._weights:
            weight.mark_fresh()


@functools.cache
def _sources() -> str:
    """A digest of this package's code, by which graphs were traced that may be found in a cache."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _kind(tensor: QuantizedTensor) -> tuple[Any, ...]:
    kind = tensor.recipe, tensor._weight_shape, tensor.dtype, tensor.device, tensor._transposed, tensor._flat
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
    """What a pickled ``QuantizedTensor`` is made of. Raises ValueError for a recipe of a newer version."""
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r} of a quantized tensor; known are {', '.join(RECIPES)}")
    shared = Shared(shard=shard, position=Position(*position))
    result = QuantizedTensor(components, RECIPES[recipe](**fields), shape, dtype, shared=shared)
    return torch.nn.Parameter(result, requires_grad) if is_parameter else result.requires_grad_(requires_grad)


def local_weight(param: Tensor) -> QuantizedTensor:
    """The quantized tensor that this rank holds of a parameter, which must be one."""
    local = local_tensor(param)
    if not isinstance(local, QuantizedTensor):
        raise TypeError(f"expected a quantized weight, got a {type(local).__name__} of shape {tuple(local.shape)}")
    return local


Made = TypeVar("Made")


def view_of(source: Tensor, make: Callable[..., Made], *args: Any) -> Made:
    """``make(*args)``: no inference tensor where ``source`` is none, as torch counts the versions of both together."""
    if torch.is_inference_mode_enabled() and not source.is_inference():
        with torch.inference_mode(False):
            return make(*args)
    return make(*args)


def as_initial(values: Tensor) -> Tensor:
    """Values to start a master from: dense, and themselves where they are plain ones that FP32 does not round."""
    if isinstance(values, QuantizedTensor):
        return values.initial_values().clone()
    return dense(values if values.dtype in (torch.float32, torch.bfloat16, torch.float16) else values.float())


def check_shape(recipe: Recipe, shape: Sequence[int]) -> None:
    """Raise ValueError for a shape that the recipe cannot quantize."""
    problem = recipe.problem(tuple(shape))
    if problem is not None:
        raise ValueError(problem)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError for values that quantized weights do not decode to."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"quantized weights are float32, bfloat16 or float16, got {dtype}; convert it first")


# --- operations -------------------------------------------------------------------------------------------------


def decoded(value: Any) -> Any:
    """Arguments with plain tensors in the places of quantized ones. torch's pytree would take longer than decoding."""
    if isinstance(value, Decodable):
        return value.dequantize()
    if type(value) in (list, tuple):
        return type(value)(map(decoded, value))
    if type(value) is dict:
        return {key: decoded(item) for key, item in value.items()}
    return value


@functools.cache
def _default_handler(func: OpOverload) -> Handler:
    if func.namespace == "c10d":  # these write into their arguments, but their schemas do not say so
        return _refuse
    if func._schema.is_mutable:
        return _BY_KIND[Kind.MUTABLE]
    is_view = any(result.alias_info is not None for result in func._schema.returns)
    return _BY_KIND[Kind.VIEW] if is_view else call_decoded


def call_default(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """What is done with functions of a kind."""
    return _default_handler(func)(func, args, kwargs)


def _refuse(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    raise RuntimeError(f"{func} takes no quantized weights; dequantize() gives a plain copy")


def call_decoded(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    return func(*decoded(args), **decoded(kwargs))


def implements(*functions: OpOverload, of: type[Decodable] = QuantizedTensor) -> Callable[[Handler], Handler]:
    """Registers what a class does with these functions."""

    def register(handler: Handler) -> Handler:
        of.handlers.update(dict.fromkeys(functions, handler))
        return handler

    return register


def implements_kind(kind: Kind) -> Callable[[Handler], Handler]:
    """Registers what is done with functions of this kind that have no handler of their own."""

    def register(handler: Handler) -> Handler:
        _BY_KIND[kind] = handler
        return handler

    return register
