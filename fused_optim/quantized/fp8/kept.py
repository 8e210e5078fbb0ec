"""``KeptWeight``: a weight that stays plain, for optimizers and checkpoints, and is quantized where it is used.

FSDP2 gathers its codes and scales, as those of quantized weights (``tensor/all_gather.py``). One scale for all of a
weight is that of all shards, which are asked for it at each gather. Where ranks would share 128 x 128 blocks the values
themselves are gathered, and quantized then. A layer that holds such a weight whole quantizes it at each forward pass.

Everything else sees the plain tensor: optimizers update it in place, files hold it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from fused_optim.quantized.fp8 import casts
from fused_optim.quantized.recipes import Components, Encoding, Recipe, as_matrix, codec
from fused_optim.quantized.tensor import QuantizedTensor, all_gather, patches
from fused_optim.quantized.tensor.dispatch import NO_RECIPE, as_parameter, asked_by
from fused_optim.sharding.dtensor import dense, local_tensor, rewrap_like

aten = torch.ops.aten

# What makes shards, copies and views of a weight that are such weights.
_MAKES_WEIGHTS = {
    *(aten.detach.default, aten.clone.default, aten.view.default, aten.as_strided.default, aten._to_copy.default),
    *(aten.slice.Tensor, aten.split.Tensor, aten.new_zeros.default, aten.empty_like.default),
    aten._pin_memory.default,
}


class KeptWeight(Tensor):
    """A plain tensor, ``plain``, that is quantized by ``recipe`` where it is used.

    ``padded_rows``: of the tensor whose first rows these are: FSDP2 pads shards so.
    """

    plain: Tensor
    recipe: Recipe
    padded_rows: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        plain: Tensor,
        recipe: Recipe = NO_RECIPE,
        padded_rows: int = 0,
        requires_grad: bool | None = None,
    ) -> Self:
        if requires_grad is not None:
            return as_parameter(cls, plain, requires_grad)
        patches.install()
        self = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, plain.stride(), plain.storage_offset(), None, plain.dtype, plain.layout, plain.device
        )
        self.plain, self.recipe = plain, recipe
        self.padded_rows = max(padded_rows, plain.shape[0] if plain.dim() else 0)
        return self

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"KeptWeight({self.plain!r}, {self.recipe})"

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        """torch's own setter does nothing to tensors without memory of their own."""
        plain = other.plain if isinstance(other, KeptWeight) else other
        if (plain.shape, plain.dtype, plain.device) != (self.shape, self.dtype, self.device):
            raise TypeError(
                f".data of a weight that is kept takes tensors of its shape {tuple(self.shape)}, {self.dtype} and "
                f"{self.device}, got {tuple(plain.shape)}, {plain.dtype} and {plain.device}"
            )
        self.plain = plain

    # It has no memory of its own: torch would crash, or take addresses of nothing.

    def data_ptr(self) -> int:
        """0, as torch's copies and stagers expect it; of the plain tensor for safetensors, which reads there.

        For Accelerate, too, which would take all weights with one address for tied.
        """
        asks = asked_by("safetensors") or asked_by("accelerate")
        return self.plain.data_ptr() if asks else super().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.plain.untyped_storage() if asked_by("safetensors") else super().untyped_storage()

    def share_memory_(self) -> Self:
        self.plain.share_memory_()
        return self

    def is_shared(self) -> bool:
        return bool(self.plain.is_shared())

    def is_pinned(self, device: str | torch.device | int | None = None) -> bool:
        return bool(self.plain.is_pinned())

    def numpy(self, *, force: bool = False) -> Any:
        if self.requires_grad and not force:
            raise RuntimeError("numpy() of a weight that requires grad: detach() it, or pass force=True")
        return self.plain.numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self.plain.__dlpack__(**options)

    def __reduce_ex__(self, proto: SupportsIndex) -> Any:
        """Files hold the plain tensor."""
        plain = self.plain.detach()
        plain = nn.Parameter(plain, self.requires_grad) if isinstance(self, nn.Parameter) else plain
        return plain.__reduce_ex__(proto)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Recipe, int]]:
        return ["plain"], (self.recipe, self.padded_rows)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Recipe, int], size: Sequence[int], stride: Sequence[int]
    ) -> KeptWeight:
        return KeptWeight(inner["plain"], *context)

    @classmethod
    def __metadata_guard__(cls, compiled: tuple[Recipe, int], other: tuple[Recipe, int]) -> bool:
        """True if a compiled graph fits. Recipes are compared by ``repr``: equal ones may compute in other ways."""
        (recipe, padded_rows), (other_recipe, other_padded_rows) = compiled, other
        return padded_rows == other_padded_rows and (recipe is other_recipe or repr(recipe) == repr(other_recipe))

    @classmethod
    @torch._disable_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            return func.decompose(*args, **kwargs)
        out = func(*_plain(args), **_plain(kwargs))
        if func in _MAKES_WEIGHTS and isinstance(args[0], KeptWeight):
            return return_and_correct_aliasing(func, args, kwargs, _weights(func, args, out))
        if func._schema.is_mutable:  # what it has written into is what it returns
            given = {id(weight.plain): weight for weight in (*args, *kwargs.values()) if isinstance(weight, KeptWeight)}
            return given.get(id(out), out)
        return out

    # --- FSDP2 ----------------------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], all_gather.Gathered | None]:
        """FSDP2's hook: the tensors to gather of this shard."""
        shape, ranks = (self.padded_rows, *self.shape[1:]), mesh.size()
        if ranks > 1 and self.padded_rows % self.recipe.block_rows:
            rows = all_gather.padded_rows(self.plain.view(as_matrix(tuple(self.shape))), self.padded_rows)
            return (rows.view(-1),), None
        parts = quantized_parts(self.plain, self.recipe, mesh.get_group() if ranks > 1 else None)
        sent = all_gather.SentShard(self.recipe, parts, shape, ranks, 0)
        return sent.inputs, sent.metadata

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: all_gather.Gathered | None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP2's hook: the whole weight, quantized."""
        weight = None if out is None else out._local_tensor if isinstance(out, DTensor) else out
        if metadata is None:
            values = outputs[0].view(-1, *self.shape[1:])
            if weight is None:
                parts = quantized_parts(values, self.recipe)
                whole = QuantizedTensor(parts, self.recipe, tuple(values.shape), param_dtype)
                return whole, tuple(parts.values())
            for name, part in quantized_parts(values, self.recipe).items():
                target = cast(QuantizedTensor, weight).components[name]
                target.copy_(part[: len(target)])
            return None
        if weight is not None:  # it lies in the memory that was gathered into, except what was put together
            all_gather.refresh(outputs, metadata, cast(QuantizedTensor, weight).components)
            return None
        gathered, made = all_gather.outputs(outputs, metadata)
        return QuantizedTensor(gathered, self.recipe, metadata.shape, param_dtype), made


def _plain(value: Any) -> Any:
    if isinstance(value, KeptWeight):
        return value.plain
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {key: _plain(each) for key, each in value.items()} if type(value) is dict else value


def _weights(func: OpOverload, args: tuple[Any, ...], out: Any) -> Any:
    source: KeptWeight = args[0]
    if isinstance(out, list | tuple):
        return type(out)(KeptWeight(each, source.recipe) for each in out)
    cuts = func is aten.slice.Tensor and (len(args) < 2 or args[1] == 0) and (len(args) < 3 or not args[2])
    return KeptWeight(out, source.recipe, source.padded_rows if cuts or out.shape == source.shape else 0)


# --- quantized -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantized_parts(values: Tensor, recipe: Recipe, group: dist.ProcessGroup | None = None) -> Components:
    """The components of values; ``group``: ranks that hold other rows of the same weight."""
    if recipe.of_elements == ("data",) and len(recipe.components) == 2 and values.dtype == torch.bfloat16:
        return _parts_of_one_scale(values, group)
    shape, values = tuple(values.shape), values.float()
    parts = recipe.empty(shape, values.device)
    if recipe.scales_whole_tensor:
        absmax = codec.absmax([recipe], [values], values.device)
        if group is not None:
            dist.all_reduce(absmax, dist.ReduceOp.MAX, group=group)
        codec.Scales([(recipe, parts)]).rescale([absmax], None, advance=True)
    codec.encode([Encoding(recipe, parts, values)])
    return parts


def _parts_of_one_scale(values: Tensor, group: dist.ProcessGroup | None) -> Components:
    """:func:`quantized_parts` of BF16 values with one scale, without a copy in FP32."""
    matrix = values.reshape(-1, values.shape[-1])
    none = matrix.numel() == 0
    absmax = matrix.new_zeros(1, dtype=torch.float32) if none else casts.largest_magnitude(matrix)
    if group is not None:
        dist.all_reduce(absmax, dist.ReduceOp.MAX, group=group)
    data, _, scale = casts.cast_tensor(matrix, absmax, torch.float8_e4m3fn, True, False)
    assert data is not None
    return {"data": data.view(torch.uint8).view(as_matrix(tuple(values.shape))), "tensor_scale": scale}


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: KeptWeight) -> QuantizedTensor:
        parts = quantized_parts(weight.plain, weight.recipe)
        return QuantizedTensor(parts, weight.recipe, tuple(weight.shape), weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def quantized(weight: KeptWeight) -> QuantizedTensor:
    """The weight as it is now, quantized; gradients are those of the weight."""
    found: QuantizedTensor = _Quantize.apply(weight)  # type: ignore[no-untyped-call]
    return found


# --- modules -------------------------------------------------------------------------------------------------------


def kept_weight(tensor: Tensor | None) -> KeptWeight | None:
    """This rank's local tensor of a parameter if it is a KeptWeight, else None."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local if isinstance(local, KeptWeight) else None


def kept_like(values: Tensor, recipe: Recipe) -> Tensor:
    """A plain tensor, perhaps a DTensor, as a kept weight in the same memory."""
    local = local_tensor(values)
    plain = local.dequantize() if isinstance(local, QuantizedTensor) else dense(local)
    return rewrap_like(KeptWeight(plain, recipe), values)


def plain_values(tensor: Tensor) -> Tensor:
    """The plain tensor of a kept weight, detached; other tensors as they are."""
    kept = kept_weight(tensor)
    return tensor if kept is None else rewrap_like(kept.plain.detach(), tensor)


def follow_kept_weights(module: nn.Module) -> None:
    """Let state dicts hold plain tensors, and ``load_state_dict(assign=True)`` make kept weights of them."""
    module.register_state_dict_post_hook(_show_plain)
    module.register_load_state_dict_pre_hook(_keep_assigned)


def _show_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for key, param in module._parameters.items():
        value = state_dict.get(prefix + key)
        if isinstance(value, Tensor) and value is not param and kept_weight(value) is not None:
            state_dict[prefix + key] = plain_values(value)


def _keep_assigned(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for key, param in module._parameters.items():
        value, kept = state_dict.get(prefix + key), kept_weight(param)
        if kept is not None and isinstance(value, Tensor) and kept_weight(value) is None:
            state_dict[prefix + key] = kept_like(value.detach(), kept.recipe)
