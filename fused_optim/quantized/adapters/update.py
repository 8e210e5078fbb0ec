"""The optimizer's adapter (``fused_optim/adapters.py``) for :class:`QuantizedTensor`.

Quantizes many weights at once: every weight's absmax, one reduction over the ranks that share weights, the codes.

Scales that depend on a whole weight are the same on all of its shards, over every mesh dim that shards it and none that
replicates it: otherwise a checkpoint could not be resharded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fused_optim.adapters import COMPARED, FusedEncode, Place, Update, equal_or_nan
from fused_optim.backends.compiled import increment_versions
from fused_optim.memory.by_parameter import reference_to
from fused_optim.quantized.recipes import Encoding, Recipe, as_matrix, codec, matrix_range, tiles
from fused_optim.quantized.tensor import Initials, QuantizedTensor, local_weight
from fused_optim.sharding.dtensor import shard_offsets, shard_ranges, sharded_dim, sharding_dims


def needs_master(param: Tensor) -> None:
    return None


def retain_initial(param: Tensor) -> None:
    local_weight(param).shared.has_optimizer = True


def has_initial(param: Tensor) -> bool:
    return local_weight(param).has_initial


def initial_values(param: Tensor) -> Tensor:
    local = local_weight(param)
    local.check_quantized()
    return local.initial_values().clone()


def discard_initial(param: Tensor) -> None:
    local_weight(param).discard_high_precision_init()


def values(local: Tensor) -> Tensor:
    return local_weight(local).values()


def is_master(param: Tensor, master: Tensor, written: Tensor) -> Tensor:
    local = local_weight(param)
    local.check_quantized()
    local.check_components([part.name for part in local.recipe.components])
    rows = tiles.row_slices(local.recipe, tuple(local.shape), local.rows_before, COMPARED)
    return torch.cat([_is_master(local, each, master[each], written[each]) for each in rows])


def _is_master(local: QuantizedTensor, rows: slice, master: Tensor, written: Tensor) -> Tensor:
    """:func:`is_master` of some rows: the first block's rest, or whole blocks."""
    recipe, before, x = local.recipe, local.before, master.reshape(as_matrix(master.shape))
    components = tiles.rows_of({**local.components, **(before or {})}, recipe, rows, local.rows_before)
    rounded = recipe.rounded(x, components).view(written.shape)
    same = equal_or_nan(rounded, written)
    if before is None:  # these scales may have been written, too
        return same & recipe.fits(x, components, same.view(x.shape)).view(same.shape)
    for shown in (rounded, recipe.decode(components, tuple(x.shape)).view(written.shape)):
        same |= equal_or_nan(shown, written) | equal_or_nan(shown.to(local.dtype).float(), written)
    return same


def codes(local: Tensor) -> Tensor:
    return local_weight(local).components["data"]


def keeps(param: Tensor, master: Tensor) -> bool:
    return False  # checkpoints have all scales


def parts(param: Tensor) -> dict[str, Tensor]:
    local = local_weight(param)
    names = (*local.recipe.of_elements, "tensor_scale")  # histories are not needed to decode
    return {name: local.components[name] for name in names if name in local.components}


def place(param: Tensor, part: str) -> Place:
    local = local_weight(param)
    component = next(each for each in local.recipe.components if each.name == part)
    whole, offset = tuple(param.shape), (0, 0)
    if isinstance(param, DTensor) and component.tile is not None:
        offsets, rows, columns = shard_offsets(param), *component.tile
        offset = offsets[0] // rows, matrix_range(whole, 1, offsets[1], offsets[1])[0] // columns
    return Place(local.recipe.component_shape(component, whole), offset[: len(local.components[part].shape)])


def needs_collective(param: Tensor) -> bool:
    """True if new values of this parameter need a reduction over ranks."""
    return (local_weight(param).recipe.scales_whole_tensor and bool(sharding_dims(param))) or _shares_blocks(param)


def target(param: Tensor) -> FusedEncode | None:
    local = local_weight(param)
    kernel, parts = local.recipe.kernel, local.components
    if kernel is None:
        return None
    measures = local.recipe.scales_whole_tensor
    names = tuple(part.name for part in local.recipe.components)
    local.check_components(names)
    data, scale = parts["data"], parts["scale" if "scale" in parts else "tensor_scale"]
    fits = kernel.block is not None and data.shape[1] % kernel.block == 0
    if not (fits and codec.is_plain(data) and codec.is_plain(scale)):
        return FusedEncode(kernel.format, kernel.round_up, None, None, measures, names, parts)
    return FusedEncode(kernel.format, kernel.round_up, data, scale, measures, names, parts)


def batch(updates: Sequence[Update]) -> Batch:
    return Batch(updates)


@torch.no_grad()
def write(updates: Sequence[Update], applies: Tensor | None = None, advance: bool = True) -> None:
    Batch(updates).write(applies, advance)


@torch.no_grad()
def quantize(updates: Sequence[Update], applies: Tensor | None = None, advance: bool = True) -> None:
    """:func:`write` of values that are no more precise than the initial ones, which stay."""
    weights = Batch(updates)
    weights.quantize(applies, advance)
    weights.mark_quantized()


class Batch:
    """Updates of many weights, for one step or many: everything that depends on the parameters only is found once.

    Parameters are held by weak reference.
    """

    lasts = True

    def __init__(self, updates: Sequence[Update]) -> None:
        pairs = [(local_weight(update.param), update) for update in updates]
        changed = [(local, update) for local, update in pairs if update.values is not None]
        reduced = [(local, update) for local, update in pairs if local.recipe.scales_whole_tensor]
        self._reduced = _Absmaxes([update for _, update in reduced])
        self._rescaled = [i for i, (_, update) in enumerate(reduced) if update.values is not None]
        weights = [(reduced[i][0].recipe, reduced[i][0].components) for i in self._rescaled]
        self._scales = codec.Scales(weights, self._of_rescaled(self._reduced.in_place))
        self._initials = Initials([local for local, _ in changed])
        written = [local for local, update in changed if update.written]
        self._written = codec.countable(x.components[name] for x in written for name in x.recipe.of_elements)
        encodings = {
            update.param: (
                Encoding(local.recipe, local.components, update.values, update.fractions),
                local.rows_before,
            )
            for local, update in changed
            if not update.written and update.values is not None
        }
        self._begin_in_blocks = [(weight, before) for weight, before in encodings.values() if before]
        self._encoded = codec.Encodings([weight for weight, before in encodings.values() if not before])
        sharing = [update.param for _, update in pairs if _shares_blocks(update.param)]
        self._sharing_blocks = _Params(sharing)
        self._encoded_sharing = [encodings[param][0] if param in encodings else None for param in sharing]

    def _of_rescaled(self, absmaxes: list[Tensor] | None) -> list[Tensor] | None:
        return None if absmaxes is None else [absmaxes[i] for i in self._rescaled]

    def prepare(self, applies: Tensor | None) -> None:
        """Prepare scales before the pass, as ``adapters.Batch.prepare``."""
        self._scales.prepare(applies)

    def write(self, applies: Tensor | None, advance: bool = True) -> None:
        """Write after the pass, as :meth:`Adapter.write`."""
        self.quantize(applies, advance)
        self._initials.mark_updated()  # whose initial values are not wanted any more

    def mark_quantized(self) -> None:
        self._initials.mark_quantized()

    def quantize(self, applies: Tensor | None, advance: bool) -> None:
        absmax = self._reduced.over_shards()
        if not advance:
            _complete_empty_shards(self._reduced.params.all())
        self._scales.rescale(self._of_rescaled(absmax), applies, advance)
        self._encoded.encode()
        for weight, before in self._begin_in_blocks:  # views, which do not last
            codec.encode(tiles.pieces(weight, before))
        if self._encoded_sharing:
            _agree_on_blocks(dict(zip(self._sharing_blocks.all(), self._encoded_sharing, strict=True)))
        increment_versions(self._written)


class _Params:
    """Parameters held by weak reference; the caller of :meth:`all` holds them."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._references = list(map(reference_to, params))

    def all(self) -> list[Tensor]:
        found = [param for reference in self._references if (param := reference()) is not None]
        assert len(found) == len(self._references)
        return found


# --- blocks of several rows -------------------------------------------------------------------------------------


def _shares_blocks(param: Tensor) -> bool:
    """True if ranks share blocks of this parameter; the same on all ranks."""
    block_rows = local_weight(param).recipe.block_rows
    return block_rows > 1 and isinstance(param, DTensor) and _rows_cut(param._spec)[1] % block_rows > 0


def _first_row(param: Tensor) -> int:
    assert isinstance(param, DTensor)
    return _rows_cut(param._spec)[0]


@functools.cache  # torch takes longer to find it than a step may
def _rows_cut(spec: DTensorSpec) -> tuple[int, int]:
    """(this rank's first row, the greatest common divisor of all ranks' first rows)."""
    shape, placements = tuple(spec.shape), spec.placements
    _, offsets = compute_local_shape_and_global_offset(shape, spec.mesh, placements)
    return offsets[0], math.gcd(*(start for start, _ in shard_ranges(shape, spec.mesh, placements, 0)))


def _edges(param: Tensor, weight: Encoding) -> list[Encoding]:
    """Encodings of the rows in blocks that other ranks may share."""
    local = local_weight(param)
    ends = _first_row(param) + local.shape[0] == param.shape[0]
    return tiles.edges(weight, local.rows_before, ends) if local.numel() else []


def _agree_on_blocks(weights: Mapping[Tensor, Encoding | None]) -> None:
    """Give shared blocks the largest scale that a rank has found; all ranks pass the same parameters.

    ``weights``: this rank's encoding of each, None if it has nothing new.
    """
    encodings = {param: weight for param, weight in weights.items() if weight is not None}
    scales: dict[Tensor, Tensor] = {}  # of all blocks of the weight in these columns; 0 of those on other ranks
    own_blocks: dict[Tensor, slice] = {}
    for param in weights:
        recipe, here = local_weight(param).recipe, local_weight(param).components["scale"]
        blocks, first = -(-param.shape[0] // recipe.block_rows), _first_row(param) // recipe.block_rows
        scales[param] = here.new_zeros(blocks * here.shape[1])
        own_blocks[param] = slice(first * here.shape[1], first * here.shape[1] + here.numel())
        if param in encodings:
            scales[param][own_blocks[param]] = here.reshape(-1)
    for param, largest in reduce_over_shards(scales, rows_only=True).items():
        if param in encodings:
            here = local_weight(param).components["scale"]
            here.copy_(largest[own_blocks[param]].view(here.shape))
    tiles.encode_under_scales([edge for param, weight in encodings.items() for edge in _edges(param, weight)])


# --- reductions -------------------------------------------------------------------------------------------------

_Sharding = tuple[DeviceMesh, tuple[int, ...], torch.device]  # the mesh's dims that shard; where the numbers are


class _Absmaxes:
    """The largest finite magnitude of each parameter's values.

    ``in_place``: the measured absmaxes, of shape ``(1,)``, if the update pass has measured all and they are reduced in
    their memory; else None.
    """

    def __init__(self, updates: Sequence[Update]) -> None:
        self.params = _Params(update.param for update in updates)
        self._measured = [update.absmax for update in updates]
        self._others = [_to_be_measured(update) for update in updates if update.absmax is None]
        measured = {update.param: update.absmax for update in updates if update.absmax is not None}
        by_sharding = _by_sharding(measured)
        stacks = [_side_by_side([measured[param] for param in alike]) for alike in by_sharding.values()]
        self._stacks = [(*key[:2], stack) for key, stack in zip(by_sharding, stacks, strict=True) if stack is not None]
        are_in_place = not self._others and len(self._stacks) == len(by_sharding)
        self.in_place = list(measured.values()) if are_in_place else None

    def over_shards(self) -> list[Tensor] | None:
        """The absmaxes reduced over all shards, of shape ``(1,)`` each; measured here if the update pass has not.

        None if they were reduced ``in_place``.
        """
        if self.in_place is None:
            measured = iter(codec.absmaxes(self._others))
            own = [next(measured) if absmax is None else absmax for absmax in self._measured]
            return list(reduce_over_shards(dict(zip(self.params.all(), own, strict=True))).values())
        for mesh, dims, absmaxes in self._stacks:
            _reduce(absmaxes, mesh, dims)
        return None


def _to_be_measured(update: Update) -> tuple[Recipe, Tensor | None, torch.device]:
    local = local_weight(update.param)
    return local.recipe, update.values, local.device


def _side_by_side(entries: Sequence[Tensor]) -> Tensor | None:
    """Tensors of shape ``(1,)`` as one view of their memory; None unless they follow each other in it."""
    first = entries[0]
    memory, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    for i, entry in enumerate(entries):
        if entry.untyped_storage().data_ptr() != memory or entry.storage_offset() != begin + i:
            return None
    return first.as_strided((len(entries),), (1,))


def reduce_over_shards(numbers: Mapping[Tensor, Tensor], rows_only: bool = False) -> dict[Tensor, Tensor]:
    """The largest of the ranks' numbers of each parameter, element by element; all ranks pass the same parameters.

    ``rows_only``: reduce over ranks with the same columns only.
    """
    largest = dict(numbers)
    for (mesh, dims, _), alike in _by_sharding(numbers, rows_only).items():
        reduced = torch.cat([numbers[param] for param in alike])
        _reduce(reduced, mesh, dims)
        largest.update(zip(alike, reduced.split([len(numbers[param]) for param in alike]), strict=True))
    return largest


def _by_sharding(numbers: Mapping[Tensor, Tensor], rows_only: bool = False) -> dict[_Sharding, list[Tensor]]:
    """The parameters with shards on several ranks, by mesh, sharding dims and device."""
    params: dict[_Sharding, list[Tensor]] = {}
    for param, number in numbers.items():
        dims = sharding_dims(param)
        if isinstance(param, DTensor) and rows_only:
            dims = tuple(dim for dim in dims if sharded_dim(param.placements[dim]) == 0)
        if isinstance(param, DTensor) and dims:
            params.setdefault((param.device_mesh, dims, number.device), []).append(param)
    return params


def _reduce(numbers: Tensor, mesh: DeviceMesh, dims: Sequence[int]) -> None:
    for dim in dims:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=mesh.get_group(dim))


def _complete_empty_shards(params: Iterable[Tensor]) -> None:
    """Give ranks without rows the others' scales and histories: a checkpoint neither saves nor loads theirs."""
    locals_ = {param: local_weight(param) for param in params}
    scales = {param: torch.cat(local.of_whole_weight()) for param, local in locals_.items()}
    scales = {param: value if locals_[param].numel() else torch.zeros_like(value) for param, value in scales.items()}
    for param, numbers in reduce_over_shards(scales).items():
        if not locals_[param].numel():
            parts = locals_[param].of_whole_weight()
            for part, value in zip(parts, numbers.split([len(part) for part in parts]), strict=True):
                part.copy_(value)
