"""Layouts of quantized weights in inference servers' files: names, tensors, and configurations.

Two layouts. ``"compressed-tensors"`` (of the package of that name, and of vLLM): ``weight`` and ``weight_scale``.
``"fp8"`` (fine-grained FP8 of Hugging Face transformers, as DeepSeek publishes it): ``weight`` and
``weight_scale_inv``. In both, weights are ``float8_e4m3fn`` and a scale is what to multiply by when decoding: FP32, one
per block, or the biased exponents of MXFP8 (uint8). One scale for a weight is written once per row: servers then join
rows of several weights as they are, where they would quantize anew for a common scale. NVFP4 in compressed-tensors:
``weight_packed`` (first element in the low half), ``weight_scale`` (``float8_e4m3fn``) and ``weight_global_scale``,
which is divided by.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fused_optim.quantized.recipes import (
    Components,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8TensorScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    elements,
)
from fused_optim.quantized.tensor import QuantizedTensor
from fused_optim.roles import is_head

Layout = Literal["compressed-tensors", "fp8"]
Readers = Literal["servers", "transformers"]
_SCALES: dict[Layout, str] = {"compressed-tensors": "_scale", "fp8": "_scale_inv"}  # appended to the weight's name
_PACKED, _GLOBAL = "_packed", "_global_scale"
_SUFFIXES = (_PACKED, _GLOBAL, "_scale_inv", "_scale")


def check_arguments(layout: str, readers: str) -> None:
    """Raise ValueError for a layout, or readers, that do not exist."""
    for name, value, known in (("layout", layout, get_args(Layout)), ("readers", readers, get_args(Readers))):
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(map(repr, known))}, got {value!r}")


def problem(recipe: Recipe, shape: tuple[int, ...], layout: Layout) -> str | None:
    """Why a weight cannot be written in this layout; None if it can."""
    block = _block(recipe)
    if not isinstance(recipe, Float8TensorScaling) and block is None:
        return f"{recipe.name} has no layout that inference servers know"
    if layout == "fp8" and (block is None or isinstance(recipe, NVFP4BlockScaling)):
        return f"layout 'fp8' has FP8 with scales of blocks, not {recipe.name}; use layout='compressed-tensors'"
    if block is not None and block[0] == 1 and shape[-1] % block[1]:
        return f"groups of {block[1]} must divide the last dim of shape {shape}"
    return None


def transformers_reads_experts(recipe: Recipe, layout: Layout) -> bool:
    """True if transformers 5.23.0 reads experts' weights: in compressed-tensors only with one scale, or one per row."""
    return layout == "fp8" or isinstance(recipe, Float8TensorScaling)


def transformers_reads_blocks(recipe: Recipe, layout: Layout, shape: tuple[int, ...]) -> bool:
    """True if transformers 5.23.0 reads these blocks: it assumes blocks of equal size when it decodes ``"fp8"``."""
    block = _block(recipe)
    if layout == "compressed-tensors" or block is None:
        return True
    return all(size % each == 0 or size < each for size, each in zip(shape[-2:], block, strict=True))


def components(recipe: Recipe) -> list[str]:
    """The names of the components that files hold: histories are not needed to decode."""
    return [part.name for part in recipe.components if part.name != "amax_history"]


def stored(recipe: Recipe, component: str, values: Tensor, layout: Layout) -> tuple[str, Tensor]:
    """The (suffix of the weight's name, tensor) under which a file holds a component of a matrix.

    ``values``: the FP32 values of the component at every element of the matrix, in its shape.
    """
    scale, nvfp4 = _SCALES[layout], isinstance(recipe, NVFP4BlockScaling)
    if component == "data":
        if not nvfp4:
            return "", values.to(torch.float8_e4m3fn)
        codes = elements.float4_encode(values, None)
        return _PACKED, codes[..., 0::2] | codes[..., 1::2] << 4
    if component == "tensor_scale":
        return (_GLOBAL, values.view(-1)[:1].reciprocal()) if nvfp4 else (scale, values[..., :1])
    rows, columns = _block(recipe) or recipe.block_shape
    of_blocks = values[..., ::columns]
    if nvfp4:
        return scale, of_blocks.to(torch.float8_e4m3fn)
    if isinstance(recipe, MXFP8BlockScaling):
        of_blocks = (of_blocks.contiguous().view(torch.int32) >> 23).to(torch.uint8)  # 2 ** -127 is below normal: 0
    return scale, of_blocks[::rows]


def one(recipe: Recipe, component: str) -> int:
    """The byte of a component that decodes to one: of elements (two in NVFP4), or of scales."""
    if isinstance(recipe, NVFP4BlockScaling) and component == "data":
        return 0x22
    return 127 if isinstance(recipe, MXFP8BlockScaling) and component == "scale" else 0x38


def _block(recipe: Recipe) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where a whole weight does, or no layout has them."""
    if isinstance(recipe, Float8BlockScaling):
        return recipe.block  # experts' weights have a tile of their own
    return recipe.tile if type(recipe) in (MXFP8BlockScaling, NVFP4BlockScaling) else None


# --- configurations -----------------------------------------------------------------------------------------------


def config(by_recipe: Mapping[Recipe, Collection[str]], plain: Collection[str], layout: Layout) -> Any:
    """The ``quantization_config`` for ``config.json``.

    ``by_recipe``: names of the linear layers that are quantized so, or compressed-tensors' patterns of names.
    ``plain``: modules with plain weights. If one recipe covers all layers, only the names of heads are needed, which
    servers do not count as linear layers.

    Raises ValueError for recipes that the layout cannot describe.
    """
    if layout == "fp8":
        blocks = {(_block(recipe), isinstance(recipe, MXFP8BlockScaling)) for recipe in by_recipe}
        if len(blocks) != 1:
            names = ", ".join(sorted(map(str, by_recipe))) or "none"
            raise ValueError(f"layout 'fp8' has one size of blocks for all weights, got {names}")
        (block, exponents) = blocks.pop()
        found = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
        return {**found, **({"scale_fmt": "ue8m0"} if exponents else {}), "modules_to_not_convert": sorted(plain)}
    groups: dict[str, dict[str, Any]] = {}
    for recipe, modules in by_recipe.items():
        targets = [*filter(is_head, sorted(modules)), "Linear"] if len(by_recipe) == 1 else sorted(modules)
        groups[f"group_{len(groups)}"] = {"targets": targets, **_scheme(recipe)}
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": sorted(plain),
    }


def _scheme(recipe: Recipe) -> dict[str, Any]:
    """A group of compressed-tensors: the weights, and activations that are quantized as they are used.

    Except for NVFP4, where activations would need a scale from a calibration.
    """
    arguments: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    block = _block(recipe)
    if isinstance(recipe, NVFP4BlockScaling):
        group = {**arguments, "num_bits": 4, "strategy": "tensor_group", "group_size": recipe.block_shape[1]}
        return _scheme_of("nvfp4-pack-quantized", {**group, "scale_dtype": "torch.float8_e4m3fn"}, None)
    if isinstance(recipe, MXFP8BlockScaling):
        group = {**arguments, "strategy": "group", "group_size": recipe.block_shape[1], "scale_dtype": "torch.uint8"}
        return _scheme_of("mxfp8-quantized", group, group)
    if block is None:
        return _scheme_of("float-quantized", {**arguments, "strategy": "channel"}, {**arguments, "strategy": "token"})
    group = {**arguments, "strategy": "group", "group_size": block[1]}
    if block[0] == 1:
        return _scheme_of("float-quantized", group, group)
    return _scheme_of("float-quantized", {**arguments, "strategy": "block", "block_structure": list(block)}, group)


def _scheme_of(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "format": form,
        "weights": {**weights, "dynamic": False},
        "input_activations": None if activations is None else {**activations, "dynamic": True},
        "output_activations": None,
    }


# --- reading ------------------------------------------------------------------------------------------------------


def weight_of(key: str) -> str:
    """The name of the weight that a tensor in a file belongs to: of scales, too."""
    for suffix in _SUFFIXES:
        if key.endswith(suffix):
            return key.removesuffix(suffix)
    return key


def keys_of(name: str, keys: Collection[str]) -> list[str]:
    """Under which keys files hold a weight; nothing where they do not. Raises ValueError where a part is missing."""
    if name + _PACKED in keys:
        found = [name + _PACKED, name + "_scale", name + _GLOBAL]
        if missing := [key for key in found if key not in keys]:
            raise ValueError(f"{name}: expected {missing[0]} beside {found[0]}")
        return found
    scales = [name + suffix for suffix in _SCALES.values() if name + suffix in keys]
    return [name, *scales] if name in keys else []


def read(found: list[Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """A weight from the tensors under :func:`keys_of`: a quantized one of ``dtype`` where a recipe has it, else plain.

    Raises ValueError where a scale fits no blocks, or FP8 has none.
    """
    if len(found) == 3:
        packed, scale, whole = found
        parts = {"data": _matrix(packed), "scale": _matrix(scale), "tensor_scale": whole.float().reciprocal().view(1)}
        return QuantizedTensor(parts, NVFP4BlockScaling(), (*packed.shape[:-1], 2 * packed.shape[-1]), dtype)
    if found[0].dtype != torch.float8_e4m3fn:
        return found[0]
    if len(found) == 1:
        raise ValueError(f"{name}: expected a scale beside FP8, {name}_scale or {name}_scale_inv")
    codes, scale = found
    known = _recipe_of(tuple(codes.shape), scale)
    if known is None:
        return codes.float() * _expand_scales(scale, tuple(codes.shape), name)
    recipe, part = known
    return QuantizedTensor({"data": _matrix(codes), **part}, recipe, tuple(codes.shape), dtype)


def _matrix(part: Tensor) -> Tensor:
    """Bytes, or FP32 scales, of a weight as its components have them."""
    return (part if part.dtype == torch.float32 else part.view(torch.uint8)).flatten(1)


def _recipe_of(shape: tuple[int, ...], scale: Tensor) -> tuple[Recipe, Components] | None:
    if scale.numel() == 1:
        return Float8CurrentScaling(), {"tensor_scale": _as_float(scale).view(1)}
    mxfp8 = MXFP8BlockScaling()
    if _are_exponents(scale) and _fits(shape, scale, mxfp8.block_shape):
        return mxfp8, {"scale": _matrix(scale)}
    if scale.shape == (shape[0], 1) and bool((scale == scale[0]).all()):  # one scale, per row
        return Float8CurrentScaling(), {"tensor_scale": _as_float(scale)[0]}
    for recipe in (Float8BlockScaling(), Float8BlockScaling((1, 128))):
        if _fits(shape, scale, recipe.block):
            return recipe, {"scale": _matrix(_as_float(scale))}
    return None


def _fits(shape: tuple[int, ...], scale: Tensor, block: tuple[int, int]) -> bool:
    """True if scales have the shape that blocks give. In more than two dims, blocks must not go from row to row."""
    found = tuple(scale.shape) == (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    return found and (len(shape) == 2 or (block[0] == 1 and shape[-1] % block[1] == 0))


def _are_exponents(scale: Tensor) -> bool:
    return scale.dtype in (torch.uint8, torch.float8_e8m0fnu)


def _as_float(scale: Tensor) -> Tensor:
    """The FP32 scales; exponents are converted."""
    return elements.power_of_two(scale.view(torch.uint8).int()) if _are_exponents(scale) else scale.float()


def _expand_scales(scale: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Scales at every element of the last two dims: of blocks of 128, the last of which may be short, or others."""
    misfit = f"{name}: scales of shape {tuple(scale.shape)} fit no blocks of a weight of shape {shape}"
    if scale.dim() != len(shape) or scale.shape[:-2] != shape[:-2]:
        raise ValueError(misfit)
    expanded = _as_float(scale)
    for dim in (-2, -1):
        blocks, size = scale.shape[dim], shape[dim]
        length = 128 if -(-size // 128) == blocks else size // max(blocks, 1)
        if length * blocks < size:
            raise ValueError(misfit)
        expanded = expanded.repeat_interleave(length, dim).narrow(dim, 0, size)
    return expanded
