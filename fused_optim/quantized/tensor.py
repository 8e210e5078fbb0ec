"""``QuantizedTensor``: a weight that is kept, gathered and saved in its quantized form.

A wrapper subclass over flat components (data, scales, ...; see ``recipes.py``), compact and unpadded. What it can do
without decoding it does on the components: views by rows and columns, copies, moves. Everything else sees a plain
tensor that is decoded for it; nothing decoded is ever written back, and what cannot be done raises.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from fused_optim.quantized import all_gather, engine
from fused_optim.quantized.engine import Encoding
from fused_optim.quantized.recipes import RECIPES, Component, Components, Recipe, as_matrix
from fused_optim.sharding.dtensor import local_tensor

aten = torch.ops.aten
INITIAL = "initial"  # the component with high-precision initial values, until the optimizer has seeded its master
INITIAL_COMPONENT = Component(INITIAL, torch.float32, (1, 1))

# What torch calls with a function of ``torch.ops`` and its arguments, which are whatever that function takes.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[OpOverload, Args, Kwargs], Any]

_HANDLERS: dict[OpOverload, Handler] = {}


@dataclass(slots=True)
class Shared:
    """What all views of a weight know together.

    ``stale``: initial values were changed and not quantized since. ``discard``: they are to be freed once quantized.
    ``shard``: other ranks hold parts of the weight. ``columns_cut``: FSDP2 has cut it by columns. ``name``: of the
    parameter, for messages.
    """

    stale: bool = False
    discard: bool = False
    shard: bool = False
    columns_cut: bool = False
    name: str | None = None

    def copied(self) -> Shared:
        return Shared(self.stale, self.discard, self.shard, self.columns_cut, self.name)


# What compilers keep of a weight beside its components: recipe, shape, dtype, whether it is transposed, or flat, padded
# rows.
Context = tuple[Recipe, torch.Size, torch.dtype, bool, bool, int, Shared]


class QuantizedTensor(torch.Tensor):
    """A quantized weight of the logical ``shape`` and ``dtype`` (what it decodes to: float32, bfloat16 or float16).

    ``recipe``: how it is quantized. ``components``: name -> plain tensor, see ``recipe.components``; while the tensor
    has its high-precision initial values, also ``"initial"``, shaped as the matrix of the weight.

    Casts to another dtype raise, as do operations in place, except while it has initial values: those are changed, and
    ``finish_initialization`` quantizes them.

    ``copy_`` from a weight of the same recipe copies bytes (into a part of a weight also the scale of all of it, as
    loading part by part needs), and quantizes anything else: at once, or, where the recipe
    has one scale for all of a weight and other ranks hold parts of it, in ``finish_initialization``. State dicts of
    the shards, hence checkpoints of torch.distributed.checkpoint, hold the bytes. ``DTensor.full_tensor()`` and full
    state dicts hold plain decoded values; loaded again, also with ``broadcast_from_rank0``, these are quantized anew,
    which gives the same elements and scales that differ by no more than the dtype's rounding.
    """

    recipe: Recipe
    components: Components
    _weight_shape: torch.Size
    # A view with its dims swapped, or of all elements in one dim. Neither can be cut.
    _transposed: bool
    _flat: bool
    _shared: Shared
    # What it is a part of: the tensor, the dim, and from where to where.
    _cut_from: tuple[QuantizedTensor, int, int, int] | None
    # Rows of the tensor whose first rows these are: FSDP2 pads shards so, and gathers them padded.
    _padded_rows: int

    # As torch's own subclasses have it; only its stubs know another signature.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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
    ) -> QuantizedTensor:
        """One that decodes to zeros; with initial values of dtype ``initial`` if that is given."""
        check_shape(recipe, shape)
        components = recipe.empty(tuple(shape), device)
        if initial is not None:
            components[INITIAL] = torch.zeros(as_matrix(tuple(shape)), dtype=initial, device=device)
        return cls(components, recipe, shape, dtype)

    @classmethod
    def from_values(cls, values: Tensor, recipe: Recipe, keep_initial: bool = False) -> QuantizedTensor:
        """Quantize a plain tensor; with ``keep_initial`` it keeps ``values`` themselves (no copy) for the optimizer.

        Raises ValueError for a shape that the recipe cannot quantize.
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
    ) -> QuantizedTensor:
        """A tensor that shares memory with this one."""
        return QuantizedTensor(
            components,
            self.recipe,
            self._weight_shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
            self._transposed if transposed is None else transposed,
            self._flat if flat is None else flat,
            self._cut_from if cut_from is None else cut_from,
            self._shared,
            padded_rows,
        )

    def _copied(self, function: Callable[[Tensor], Tensor], padded_rows: int = 0) -> QuantizedTensor:
        """The same tensor with copies of the components."""
        self.check_not_freed()
        components = {name: function(part) for name, part in self.components.items()}
        return QuantizedTensor(
            components,
            self.recipe,
            self._weight_shape,
            self.dtype,
            transposed=self._transposed,
            flat=self._flat,
            shared=self._shared.copied(),
            padded_rows=padded_rows,
        )

    # --- values -------------------------------------------------------------------------------------------------

    @property
    def has_initial(self) -> bool:
        return INITIAL in self.components

    @property
    def stored_bytes(self) -> int:
        """What the components take; ``nbytes`` is what plain values would."""
        return sum(part.nbytes for part in self.components.values())

    def discard_high_precision_init(self) -> None:
        """Free the high-precision initial values."""
        self.check_fresh()
        self._shared.discard = False
        part: QuantizedTensor | None = self
        while part is not None:  # FSDP2 keeps the padded tensor that its shard is a part of
            part.components.pop(INITIAL, None)
            part = part._cut_from[0] if part._cut_from is not None else None

    def initial_values(self) -> Tensor:
        """FP32 values to start a master from: the initial ones if they are still there, else the decoded ones."""
        if self.has_initial:
            return self.components[INITIAL].float().view(self._weight_shape)
        return self.values()

    def values(self) -> Tensor:
        """FP32 values, in the shape of the weight. A new tensor."""
        return self._decode(torch.float32)

    def _decode(self, dtype: torch.dtype) -> Tensor:
        self.check_not_freed()
        self.check_fresh()
        return engine.decode(self.recipe, self.components, self._weight_shape, dtype)

    def of_whole_weight(self) -> list[Tensor]:
        """The components, all FP32, that are the same however the weight is cut."""
        return [self.components[part.name] for part in self.recipe.components if part.tile is None]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of ``dtype``, or of the tensor's own; wherever the data lies."""
        values = self._decode(self.dtype if dtype is None else dtype)
        return values.view(-1) if self._flat else values.t() if self._transposed else values

    def write(self, values: Tensor) -> None:
        """Quantize plain values of this tensor's shape, with a new tensor-wide scale from these values alone."""
        self.forget_scales()
        weight = Encoding(self.recipe, self.components, values.detach().float())
        if self.recipe.scales_whole_tensor:
            absmax = engine.absmax([self.recipe], [weight.values], self.device)[0]
            engine.rescale([(self.recipe, self.components)], [absmax], None, advance=True)
        engine.encode([weight])
        self.mark_fresh()

    def forget_scales(self) -> None:
        """Before values that have nothing to do with the earlier ones: histories of scales start anew."""
        for part in self.of_whole_weight():
            part.zero_()

    @property
    def prefix(self) -> str:
        """The parameter's name, where it is known, as the beginning of a message."""
        return f"{self._shared.name}: " if self._shared.name else ""

    def mark_fresh(self) -> None:
        """The data was quantized from the initial values as they are, or from later ones."""
        self._shared.stale = False
        if self._shared.discard:
            self.discard_high_precision_init()

    @property
    def is_stale(self) -> bool:
        """Whether plain values were written and not quantized since."""
        return self._shared.stale and self.numel() > 0

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
            part, shape = self.components[component.name], self.recipe.component_shape(component, self._weight_shape)
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
        self._ensure_initial(values.dtype if values.is_floating_point() else torch.float32)
        self.components[INITIAL].copy_(values.detach().reshape(as_matrix(tuple(self._weight_shape))))
        self._shared.stale = True
        self.forget_scales()

    def _ensure_initial(self, dtype: torch.dtype) -> None:
        if self.has_initial:
            return
        if self._cut_from is None:
            self.components[INITIAL] = self.values().to(dtype).view(as_matrix(tuple(self._weight_shape)))
            self._shared.discard = True
        else:
            whole, dim, start, end = self._cut_from
            whole._ensure_initial(dtype)
            self.components[INITIAL] = cut_component(whole.components[INITIAL], INITIAL_COMPONENT, dim, start, end)

    # --- what torch asks tensors without memory of their own ------------------------------------------------------

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        """torch's own setter does nothing to tensors without memory of their own."""
        views = self._transposed or self._flat
        if (
            views
            or not isinstance(other, QuantizedTensor)
            or _kind(other) != _kind(self)
            or other._cut_from is not None
        ):
            raise TypeError(
                f"{self.prefix}.data of a quantized weight takes a whole one of the same recipe, shape and dtype; "
                "copy_ quantizes other values"
            )
        self.components, self._shared, self._cut_from = other.components, other._shared, None

    def data_ptr(self) -> int:
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
        if self._transposed or self._flat:
            raise TypeError("views of a quantized weight cannot be pickled")
        self.check_fresh()
        kept = {name: part for name, part in self.components.items() if name != INITIAL}
        if self.is_freed:
            kept = {name: part.to("meta") for name, part in kept.items()}
        fields = {field.name: getattr(self.recipe, field.name) for field in dataclasses.fields(self.recipe)}
        described = (self.recipe.name, fields, tuple(self._weight_shape), self.dtype)
        flags = (self.requires_grad, isinstance(self, torch.nn.Parameter), self._shared.shard)
        return rebuild, (kept, *described, *flags)

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        """Without initial values: graphs decode, and would otherwise be compiled again when these are freed."""
        names = []
        for part in self.recipe.components:
            names.append(f"_{part.name}")
            setattr(self, names[-1], self.components[part.name])
        return names, (
            *(self.recipe, self._weight_shape, self.dtype),
            *(self._transposed, self._flat, self._padded_rows, self._shared),
        )

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Context, size: Sequence[int], stride: Sequence[int]
    ) -> QuantizedTensor:
        recipe, shape, dtype, transposed, flat, padded_rows, shared = context
        components = {name[1:]: part for name, part in inner.items()}
        return QuantizedTensor(components, recipe, shape, dtype, transposed, flat, None, shared, padded_rows)

    @classmethod
    def __metadata_guard__(cls, compiled: Context, other: Context) -> bool:
        """Whether a graph that was compiled for one weight can be used for another, in terms of ``__tensor_flatten__``.

        Names do not matter. How recipes compute does, though they compare equal, and so does that stale ones raise.
        """
        same_recipe = repr(compiled[0]) == repr(other[0])
        return same_recipe and compiled[1:-1] == other[1:-1] and compiled[-1].stale == other[-1].stale

    def __setitem__(self, index: Any, value: Any) -> None:
        """Written into a view or into initial values, or refused: into what is decoded for it, it would be lost."""
        if self.is_stale or not isinstance(self[index], QuantizedTensor):
            _run_in_place(Tensor.__setitem__, (self, index, value), {})
        else:
            super().__setitem__(index, value)

    # --- FSDP2 ----------------------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], all_gather.Gathered]:
        """FSDP2's hook: what is gathered of this shard. Bytes of data and scales, padded as FSDP2 pads shards."""
        self.check_cut_by_rows()
        self.check_fresh()
        shape = (self._padded_rows, *self._weight_shape[1:])
        return all_gather.inputs(self.recipe, self.components, shape, mesh.size())

    # FSDP2 asks for it at every gather, and inspect takes longer than the hook where it is not given.
    fsdp_pre_all_gather.__dict__["__signature__"] = inspect.signature(fsdp_pre_all_gather)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: all_gather.Gathered,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP2's hook: the whole weight, quantized, in the memory of what was gathered."""
        if out is not None:  # it lies in the memory that was gathered into
            return None
        gathered, shape = all_gather.outputs(self.recipe, outputs, metadata)
        own = {name: part for name, part in self.components.items() if name != INITIAL}  # histories are not gathered
        return QuantizedTensor({**own, **gathered}, self.recipe, shape, param_dtype), ()

    @classmethod
    # Else what a graph break leaves to it would be compiled, handler by handler. As in torch.optim, and unlike
    # torch.compiler.disable, this imports the compiler only when it is called.
    @torch._disable_dynamo
    def __torch_dispatch__(  # type: ignore[override]  # which torch's stubs take for a static method
        cls, func: OpOverload, types: Sequence[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        if func._schema.is_mutable:
            return _run_in_place(func, args, kwargs)
        if func.namespace == "c10d":  # these write into their arguments, but their schemas do not say so
            raise RuntimeError(f"{func} takes no quantized weights; dequantize() gives a plain copy")
        return func(*decoded(args), **decoded(kwargs))


def _kind(tensor: QuantizedTensor) -> tuple[Any, ...]:
    return tensor.recipe, tensor._weight_shape, tensor.dtype, tensor.device, tensor._transposed, tensor._flat


def rebuild(
    components: Components,
    recipe: str,
    fields: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    shard: bool,
) -> Tensor:
    """What a pickled ``QuantizedTensor`` is made of. Raises ValueError for a recipe of a newer version."""
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r} of a quantized tensor; known are {', '.join(RECIPES)}")
    result = QuantizedTensor(components, RECIPES[recipe](**fields), shape, dtype, shared=Shared(shard=shard))
    return torch.nn.Parameter(result, requires_grad) if is_parameter else result.requires_grad_(requires_grad)


def local_weight(param: Tensor) -> QuantizedTensor:
    """The quantized tensor that this rank holds of a parameter, which must be one."""
    local = local_tensor(param)
    if not isinstance(local, QuantizedTensor):
        raise TypeError(f"expected a quantized weight, got a {type(local).__name__} of shape {tuple(local.shape)}")
    return local


def check_shape(recipe: Recipe, shape: Sequence[int]) -> None:
    """Raise ValueError for a shape that the recipe cannot quantize."""
    problem = recipe.problem(tuple(shape))
    if problem is not None:
        raise ValueError(problem)


def cut_component(value: Tensor, component: Component, dim: int, start: int, end: int) -> Tensor:
    if component.tile is None:
        return value
    tile = component.tile[dim]
    return value.narrow(dim, start // tile, -(-end // tile) - start // tile)


# --- operations -------------------------------------------------------------------------------------------------


def decoded(value: Any) -> Any:
    """Arguments with plain tensors in the places of quantized ones. torch's pytree would take longer than decoding."""
    if isinstance(value, QuantizedTensor):
        return value.dequantize()
    if type(value) in (list, tuple):
        return type(value)(map(decoded, value))
    if type(value) is dict:
        return {key: decoded(item) for key, item in value.items()}
    return value


def _run_in_place(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    target = args[0] if args else None
    if not isinstance(target, QuantizedTensor):
        if any(isinstance(value, QuantizedTensor) for value in kwargs.values()):
            raise RuntimeError(f"{func}: its result cannot be written into a quantized weight")
        return func(target, *decoded(args[1:]), **decoded(kwargs))
    if not target.has_initial or target._transposed:
        raise RuntimeError(
            f"{func} cannot change a quantized weight in place; dequantize() gives a plain copy, copy_() writes one"
        )
    func(target.components[INITIAL].view(target.shape), *decoded(args[1:]), **decoded(kwargs))
    target._shared.stale = True
    return target


def implements(*functions: OpOverload) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for function in functions:
            _HANDLERS[function] = handler
        return handler

    return register
