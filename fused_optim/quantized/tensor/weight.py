"""A quantized weight: its components, where it lies in the whole, its values and what is pending of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from fused_optim.quantized.recipes import (
    WHOLE,
    Component,
    Components,
    Encoding,
    Position,
    Recipe,
    as_matrix,
    check_dtype,
    check_recipe,
    check_shape,
    codec,
    cut_component,
    matrix_range,
    tiles,
)
from fused_optim.quantized.tensor import all_gather, patches
from fused_optim.quantized.tensor.coverage import Region, joined
from fused_optim.quantized.tensor.dispatch import NO_RECIPE, Decodable, as_parameter, view_of

INITIAL = "initial"  # the component with high-precision initial values, until the optimizer has seeded its master
INITIAL_COMPONENT = Component(INITIAL, torch.float32, (1, 1))


@dataclass(slots=True)
class Shared:
    """State that all views of a weight share.

    ``pending``: initial values were changed and not quantized since. ``discard``: they are to be freed once quantized.
    ``has_optimizer``: one updates the parameter. ``shard``: other ranks hold parts of the weight. ``columns_cut``:
    FSDP2 has cut it by columns. ``in_layer``: a ``QuantizedLinear`` has it, as far as is known. ``name``: of the
    parameter, for messages. ``source``: the shard, if this was gathered. ``position``: of everything that shares this,
    in the weight. ``loaded``: the parts of a pending weight that bytes were copied into since; once these are all of
    it, it is pending no more. ``filled``: the parts that were written of a weight that ``to_empty`` has made; None once
    these are all of it, as of any other weight. ``before``: the codes and scales that it had before plain values were
    written into it beside an optimizer's master: elements that come back as these show them were not written.
    """

    pending: bool = False
    discard: bool = False
    has_optimizer: bool = False
    shard: bool = False
    columns_cut: bool = False
    in_layer: bool = True
    name: str | None = None
    source: Weight | None = field(default=None, compare=False)
    position: Position = WHOLE
    loaded: tuple[Region, ...] = ()
    filled: tuple[Region, ...] | None = None
    before: Components | None = field(default=None, compare=False)


class Weight(Decodable):
    """Base of :class:`QuantizedTensor`, its only subclass: its components and state."""

    recipe: Recipe
    components: Components  # initial values are those of what this is a part of
    weight_shape: torch.Size
    # A view with its dims swapped, or of all elements in one dim. Neither can be cut.
    is_transposed: bool
    is_flat: bool
    shared: Shared
    # What it is a part of: the tensor, the dim, and from where to where.
    cut_from: tuple[Weight, int, int, int] | None
    # Rows of the tensor whose first rows these are: FSDP2 pads shards so, and gathers them padded.
    padded_rows: int
    # The first of its rows in what shares its memory, and, if it was split off for a rank, what its copies will know.
    _start: int
    rank_position: Position | None
    _sent: all_gather.SentShard | None  # to FSDP2, the last time

    # All in __new__, and no keyword arguments below: views are made by every matrix product, and these calls cost most.
    @staticmethod
    def __new__(
        cls,
        components: Components,
        recipe: Recipe = NO_RECIPE,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        transposed: bool = False,
        flat: bool = False,
        cut_from: tuple[Weight, int, int, int] | None = None,
        shared: Shared | None = None,
        padded_rows: int = 0,
        start: int = 0,
        split: Position | None = None,
        requires_grad: bool | None = None,
    ) -> Self:
        if requires_grad is not None:
            return as_parameter(cls, components, requires_grad)
        patches.install()
        size = (math.prod(shape),) if flat else (shape[1], shape[0]) if transposed else shape
        strides = (1, shape[1]) if transposed else None
        device = components["data"].device
        self = torch.Tensor._make_wrapper_subclass(cls, size, strides, None, None, dtype, torch.strided, device)
        self.components = components
        self.recipe = recipe
        self.weight_shape = torch.Size(shape)
        self.is_transposed, self.is_flat, self.cut_from = transposed, flat, cut_from
        self.shared = Shared() if shared is None else shared
        self.padded_rows = max(padded_rows, shape[0])
        self._start, self.rank_position, self._sent = start, split, None
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
    ) -> Self:
        """A tensor that decodes to zeros; with initial values of dtype ``initial`` if that is given."""
        check_recipe(recipe)
        check_shape(recipe, shape)
        check_dtype(dtype)
        recipe = recipe.for_shape(tuple(shape))
        components = recipe.empty(tuple(shape), device, 0 if shared is None else shared.position.rows_before)
        if initial is not None:
            components[INITIAL] = torch.zeros(as_matrix(tuple(shape)), dtype=initial, device=device)
        return cls(components, recipe, shape, dtype, shared=shared)

    @classmethod
    def from_values(cls, values: Tensor, recipe: Recipe, keep_initial: bool = False) -> Self:
        """Quantize a plain tensor; with ``keep_initial`` it keeps ``values`` themselves (no copy) for the optimizer.

        Raises ValueError for a shape that the recipe cannot quantize, TypeError for what is no recipe, and for dtypes
        other than float32, bfloat16 and float16.
        """
        result = cls.empty(recipe, values.shape, values.dtype, values.device)
        if values.device.type != "meta":
            result.write(values)
        if keep_initial:
            result.components[INITIAL] = values.detach().reshape(as_matrix(tuple(values.shape)))
        return result

    def view_with(
        self,
        components: Components,
        shape: Sequence[int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        transposed: bool | None = None,
        flat: bool | None = None,
        cut_from: tuple[Weight, int, int, int] | None = None,
        padded_rows: int = 0,
        split: Position | None = None,
    ) -> Self:
        """A tensor that shares memory with this one."""
        start = self._start + (cut_from[2] if cut_from is not None and cut_from[1] == 0 else 0)
        return view_of(
            self,
            type(self),
            components,
            self.recipe,
            self.weight_shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
            self.is_transposed if transposed is None else transposed,
            self.is_flat if flat is None else flat,
            self.cut_from if cut_from is None else cut_from,
            self.shared,
            padded_rows,
            start,
            self.rank_position if cut_from is None else split,
        )

    def copied(self, function: Callable[[Tensor], Tensor], padded_rows: int = 0) -> Self:
        """The same tensor with copies of the components."""
        self.check_not_freed()
        return type(self)(
            {name: function(part) for name, part in self.parts.items()},
            self.recipe,
            self.weight_shape,
            self.dtype,
            transposed=self.is_transposed,
            flat=self.is_flat,
            shared=self.shared_of_copy(),
            padded_rows=padded_rows,
        )

    def shared_of_copy(self) -> Shared:
        """The shared state of a copy; a copy of a part that was split off for a rank is a shard."""
        position = replace(self.position, rows=None)
        return replace(self.shared, source=None, position=position, shard=self.is_shard, loaded=(), before=None)

    # --- where it lies ------------------------------------------------------------------------------------------

    @property
    def rows_before(self) -> int:
        """The number of rows of its first block that come before it."""
        return (self.shared.position.rows_before + self._start) % self.recipe.block_rows

    @property
    def position(self) -> Position:
        return (
            replace(self.shared.position, rows_before=self.rows_before)
            if self.rank_position is None
            else self.rank_position
        )

    @property
    def is_shard(self) -> bool:
        """True if other ranks hold, or are to hold, parts of the weight."""
        return self.shared.shard or self.rank_position is not None

    @property
    def has_whole_blocks(self) -> bool:
        """True if all rows of its blocks are here, not on other ranks or in the rest of the weight it is cut from."""
        block_rows, position = self.recipe.block_rows, self.shared.position
        if block_rows == 1 or self.rows_before or position.shares_blocks:
            return block_rows == 1
        end = self._start + self.weight_shape[0]
        return end % block_rows == 0 or end == self._rows_of_whole

    @property
    def _rows_of_whole(self) -> int:
        """Rows of the weight that this is a part of, without padding."""
        rows = self.shared.position.rows
        return self.whole.weight_shape[0] if rows is None else rows

    @property
    def _region(self) -> Region:
        """The region of this part in the whole weight, as a matrix."""
        first, last, cut = 0, as_matrix(self.weight_shape)[1], self.cut_from
        while cut is not None:
            of, dim, start, _ = cut
            offset = matrix_range(tuple(of.weight_shape), dim, start, start)[0] if dim == 1 else 0
            first, last, cut = first + offset, last + offset, of.cut_from
        return Region((self._start, self._start + self.weight_shape[0]), (first, last))

    def _region_of(self, box: tuple[slice, ...]) -> Region:
        """The region of a part of this in the whole weight, as a matrix; nothing of what cuts rows of three dims."""
        shape, own = tuple(self.weight_shape), self._region
        columns = box[1] if len(box) == 2 else slice(0, as_matrix(shape)[1])
        whole_rows = all((each.start, each.stop) == (0, size) for each, size in zip(box[2:], shape[2:], strict=True))
        whole_rows &= len(box) == 2 or (box[1].start, box[1].stop) == (0, shape[1])
        rows = box[0] if whole_rows else slice(0, 0)
        (first, _), (left, _) = own
        return Region((first + rows.start, first + rows.stop), (left + columns.start, left + columns.stop))

    @property
    def _everything(self) -> Region:
        return Region((0, self._rows_of_whole), (0, as_matrix(self.whole.weight_shape)[1]))

    @property
    def is_part(self) -> bool:
        """True if there is more of the weight here, padding aside."""
        return self.cut_from is not None and self._region != self._everything

    def cut(self, dim: int, start: int, end: int, trims: bool = False, split: Position | None = None) -> Self:
        """Rows (dim 0) or columns ``start`` to ``end``, as a view. Raises ValueError where a block cannot be cut.

        With ``trims`` the first rows or columns may end within the last block: the others are padding. ``split``: what
        copies of it, which are shards, will know of where they lie.
        """
        shape = tuple(self.weight_shape)
        if self.is_rearranged or dim > 1:
            lines = "flat or transposed views" if dim < 2 else f"shape {shape} in dim {dim}"
            raise RuntimeError(f"{self.prefix}quantized weights can be cut in dims 0 and 1 only, not {lines}")
        problem = self.cut_problem(dim, start, end, trims)
        if problem is not None:
            ranks = ", ".join(map(str, self.recipe.fitting_ranks(shape, dim)))
            raise ValueError(f"{self.prefix}{problem}. It can be cut on {ranks} ranks")
        first, last = matrix_range(shape, dim, start, end)
        before = self.rows_before if dim == 0 else 0
        components = {
            part.name: cut_component(self.components[part.name], part, dim, first, last, before)
            for part in self.recipe.components
        }
        cut_shape = [*shape]
        cut_shape[dim] = end - start
        return self.view_with(components, cut_shape, cut_from=(self, dim, start, end), split=split)

    def cut_problem(self, dim: int, start: int, end: int, trims: bool) -> str | None:
        """Why it cannot be cut so; None if it can."""
        shape = tuple(self.weight_shape)
        size, (first, last) = as_matrix(shape)[dim], matrix_range(shape, dim, start, end)
        block = self.recipe.block_shape[dim]
        if trims and start == 0 and -(-last // block) == -(-size // block):
            return None
        return self.recipe.cut_problem(first, last, size, dim)

    def take_position(self, position: Position) -> None:
        """Become the shard at this position; its memory was made for one that touches as many blocks as possible."""
        whole, known = self.whole, self.shared.position
        assert not known.known and self._start == 0
        self.shared.position = replace(position, gathered=known.gathered, rows=self.weight_shape[0])
        for tensor in (whole, self):
            for part in self.recipe.components:
                rows, *_ = self.recipe.component_shape(part, tensor.weight_shape, position.rows_before)
                if part.tile is not None:
                    tensor.components[part.name] = whole.components[part.name][:rows]

    # --- values -------------------------------------------------------------------------------------------------

    @property
    def initial(self) -> Tensor | None:
        """The high-precision initial values, as a matrix; None where they were freed, or never kept.

        A part has those of the whole: FSDP2 keeps the padded tensor that its shard is a part of.
        """
        if self.cut_from is None:
            return self.components.get(INITIAL)
        whole, dim, start, end = self.cut_from
        initial = whole.initial
        if initial is None:
            return None
        start, end = matrix_range(tuple(whole.weight_shape), dim, start, end)
        return cut_component(initial, INITIAL_COMPONENT, dim, start, end)

    @property
    def has_initial(self) -> bool:
        return INITIAL in self.whole.components

    @property
    def before(self) -> Components | None:
        """:attr:`Shared.before`, cut to this part."""
        if self.cut_from is None:
            return self.shared.before
        whole, dim, start, end = self.cut_from
        if whole.before is None:
            return None
        start, end = matrix_range(tuple(whole.weight_shape), dim, start, end)
        first = whole.rows_before if dim == 0 else 0
        parts = {part.name: part for part in self.recipe.components}
        return {name: cut_component(x, parts[name], dim, start, end, first) for name, x in whole.before.items()}

    @property
    def parts(self) -> Components:
        """The components, and the initial values where there are any."""
        initial = self.initial
        return self.components if initial is None else {**self.components, INITIAL: initial}

    @property
    def stored_bytes(self) -> int:
        """Bytes of the components and initial values; ``nbytes`` is that of plain values."""
        return sum(part.nbytes for part in self.parts.values())

    def discard_high_precision_init(self) -> None:
        """Free the high-precision initial values. Raises RuntimeError where they were changed and not quantized yet."""
        self.check_quantized()
        self.shared.discard = False
        self.drop_initial()

    def drop_initial(self) -> None:
        self.whole.components.pop(INITIAL, None)
        self.shared.before = None

    @property
    def whole(self) -> Weight:
        """The tensor that this is a part of; itself if it is none."""
        return self if self.cut_from is None else self.cut_from[0].whole

    def release(self) -> None:
        """Free initial values as soon as they are quantized: no master is going to start from them.

        Not if an optimizer holds the parameter, nor on the meta device, where they are still to be made.
        """
        if self.shared.has_optimizer or self.is_meta:
            return
        if self.is_pending:
            self.shared.discard = True
        elif self.has_initial:
            self.discard_high_precision_init()

    def release_if_frozen(self) -> None:
        """:meth:`release` if this is used as a frozen parameter."""
        weight = self if self.shared.source is None else self.shared.source
        if weight.has_initial and isinstance(self, torch.nn.Parameter) and not self.requires_grad:
            weight.release()

    def initial_values(self) -> Tensor:
        """FP32 values to start a master from: the initial ones if they are still there, else the decoded ones."""
        self.check_filled()
        return self.values() if self.initial is None else self.initial.float().reshape(self.weight_shape)

    def values(self) -> Tensor:
        """FP32 values, in the shape of the weight. A new tensor."""
        return self._decode(torch.float32)

    def _decode(self, dtype: torch.dtype) -> Tensor:
        if not self.requires_grad:
            self.release_if_frozen()
        pending = self.shared.pending and self.is_pending
        if pending and self.initial is not None and not self.is_unfilled:
            return self.initial.to(dtype, copy=True, memory_format=torch.contiguous_format).view(self.weight_shape)
        self.check_not_freed()
        if pending or self.shared.filled is not None:
            self.check_quantized()
        return tiles.decode(self.recipe, self.components, self.weight_shape, dtype, self.rows_before)

    def of_whole_weight(self) -> list[Tensor]:
        """The components, all FP32, that are the same however the weight is cut."""
        return [self.components[part.name] for part in self.recipe.components if part.tile is None]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self._decode(self.dtype if dtype is None else dtype)
        return values.view(-1) if self.is_flat else values.t() if self.is_transposed else values

    def write(self, values: Tensor) -> None:
        """Quantize plain values of this tensor's shape, with a new tensor-wide scale from these values alone."""
        self.forget_scales()
        weight = Encoding(self.recipe, self.components, values.detach().float())
        if self.recipe.scales_whole_tensor:
            absmax = codec.absmax([self.recipe], [weight.values], self.device)
            codec.Scales([(self.recipe, self.components)]).rescale([absmax], None, advance=True)
        codec.encode(tiles.pieces(weight, self.rows_before))
        self.mark_quantized()

    def ensure_initial(self, dtype: torch.dtype) -> Tensor:
        """The initial values, of this part; where there are none, the decoded ones in ``dtype`` become them.

        These are freed once they are quantized or, where there is an optimizer, when its masters have followed them.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{self.prefix}compiled code cannot change a quantized weight: its graphs decode it only"
            )
        whole, shared = self.whole, self.shared
        if INITIAL not in whole.components:
            if shared.has_optimizer:
                dtype = torch.float32  # which masters can be compared with
                shared.before = {part.name: whole.components[part.name].clone() for part in self.recipe.components}
            shape = tuple(whole.weight_shape)
            values = tiles.decode(whole.recipe, whole.components, shape, torch.float32, whole.rows_before)
            whole.components[INITIAL] = values.to(dtype).view(as_matrix(shape))
            shared.discard = not shared.has_optimizer
        initial = self.initial
        assert initial is not None
        return initial

    def write_initial(self, values: Tensor, box: tuple[slice, ...] | None = None) -> Tensor:
        """Store plain values as initial values. ``box``: the part of each dim that they are for; None: all of this.

        Beside an optimizer's masters, elements that are only what the weight decodes to stay what was written before.
        Returns the values to be quantized.
        """
        initial = self.ensure_initial(values.dtype if values.is_floating_point() else torch.float32)
        target = initial.view(self.weight_shape)[... if box is None else box]
        before = self.before
        if before is not None and not self.is_pending and not self.is_unfilled:
            old = tiles.decode(self.recipe, before, self.weight_shape, torch.float32, self.rows_before)
            now, old = (x[... if box is None else box] for x in (self.values(), old))
            values = torch.where(_shows(values, now, self.dtype) & ~_shows(values, old, self.dtype), target, values)
        target.copy_(values)
        return values

    def write_pending(self, values: Tensor, box: tuple[slice, ...] | None = None) -> None:
        """:meth:`write_initial` of values that ``finish_initialization`` is to quantize."""
        self.write_initial(values, box)
        self.mark_pending()
        self.mark_filled(None if box is None else self._region_of(box))

    def forget_scales(self) -> None:
        """Zero tensor-wide scales and histories, before values that have nothing to do with the earlier ones."""
        for part in self.of_whole_weight():
            part.zero_()

    @property
    def is_rearranged(self) -> bool:
        """True for a view with its dims swapped, or of all elements in one dim."""
        return self.is_transposed or self.is_flat

    @property
    def prefix(self) -> str:
        """The parameter's name, where it is known, as the beginning of a message."""
        return f"{self.shared.name}: " if self.shared.name else ""

    def mark_quantized(self) -> None:
        """Note that the data was quantized from the initial values as they are, or from later ones."""
        self.shared.pending, self.shared.loaded, self.shared.filled = False, (), None
        if self.shared.discard:
            self.discard_high_precision_init()

    def mark_updated(self) -> None:
        """Note that later values than the initial ones were quantized, and free the latter."""
        self.mark_quantized()
        self.discard_high_precision_init()

    def mark_pending(self) -> None:
        """Note that initial values were changed: the weight decodes to them until they are quantized."""
        self.shared.pending, self.shared.loaded = True, ()

    def mark_filled(self, region: Region | None = None) -> None:
        """Note that values, of any kind, were written here, or into a ``region`` of the whole weight."""
        if self.shared.filled is not None:
            filled = joined(self.shared.filled, self._region if region is None else region)
            (_, rows), columns = self._everything
            whole = (
                len(filled) == 1 and filled[0].rows[0] == 0 and filled[0].rows[1] >= rows
            )  # padding may be filled, too
            self.shared.filled = None if whole and filled[0].columns == columns else filled

    def mark_loaded(self) -> None:
        """Note that bytes were copied here, and into the initial values if there are any."""
        self.mark_filled()
        if not self.is_pending:
            return
        self.shared.loaded = joined(self.shared.loaded, self._region)
        if self.shared.loaded == (self._everything,):
            self.mark_quantized()

    @property
    def is_pending(self) -> bool:
        """True if plain values were written and not quantized since."""
        return self.shared.pending and self.numel() > 0 and not self.is_meta

    @property
    def is_unfilled(self) -> bool:
        """True for a weight that ``to_empty`` has made, until all of it was written."""
        return self.shared.filled is not None and self.numel() > 0 and not self.is_meta

    def check_filled(self) -> None:
        if self.is_unfilled:
            raise RuntimeError(
                f"{self.prefix}{'only a part' if self.shared.filled else 'nothing'} of a quantized weight was written "
                "since it was made without values, as to_empty() does: initialise, or load, all of it"
            )

    def check_quantized(self) -> None:
        self.check_filled()
        if self.is_pending:
            raise RuntimeError(
                f"{self.prefix}plain values were written into a quantized weight but not quantized yet: call "
                "fused_optim.quantized.finish_initialization(model) on all ranks after initialising or loading it"
            )

    def check_cut_by_rows(self) -> None:
        if self.shared.columns_cut:
            raise RuntimeError(f"{self.prefix}FSDP2 can shard quantized weights by rows only: placement Shard(0)")

    @property
    def is_freed(self) -> bool:
        """True if its memory was given back, as FSDP2 does with gathered weights after their use."""
        data = self.components["data"]
        return data.numel() > 0 and not data.is_meta and data.untyped_storage().size() == 0

    def check_not_freed(self) -> None:
        if self.is_freed:
            raise RuntimeError(f"{self.prefix}the data of this quantized weight has been freed")

    def check_components(self, names: Sequence[str]) -> None:
        """Raise ValueError if these were freed or replaced, so that their memory is no longer this weight's."""
        self.check_not_freed()
        for component in self.recipe.components if self.numel() else ():
            part = self.components[component.name]
            shape = self.recipe.component_shape(component, self.weight_shape, self.rows_before)
            fits = tuple(part.shape) == shape and part.dtype == component.dtype and part.device == self.device
            if component.name in names and not fits:
                raise ValueError(
                    f"{self.prefix}component {component.name!r} of a quantized weight: expected {component.dtype} of "
                    f"shape {shape} on {self.device}, got {part.dtype} of shape {tuple(part.shape)} on {part.device}"
                )


def _shows(values: Tensor, decoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Mask of the values that are decoded ones, or these as ``dtype``."""
    return (values == decoded) | (values == decoded.to(dtype))
