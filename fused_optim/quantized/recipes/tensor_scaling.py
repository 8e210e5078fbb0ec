"""Recipes with one scale per weight, and what all recipes of E4M3 elements have."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fused_optim.backends.tables import WeightFormat
from fused_optim.quantized.recipes import elements
from fused_optim.quantized.recipes.recipe import (
    FLOAT8_DATA,
    TENSOR_SCALE,
    Component,
    KernelFormat,
    ProductFormat,
    ScaledRecipe,
    Scaling,
    check_choice,
    check_compute,
    set_where,
)

Compute = Literal["auto", "fp8", "decode"]
ActivationScaling = Literal["tensor", "row", "delayed"]
GradientFormat = Literal["e4m3", "e5m2"]
WeightGradients = Literal["fp8", "bf16"]
Float8Format = Literal["e4m3", "hybrid"]
AmaxAlgorithm = Literal["max", "most_recent"]


@dataclass(frozen=True)
class Float8Recipe(ScaledRecipe):
    """E4M3 elements, which products in FP8 can take as they are.

    Args:
        compute: ``"auto"`` for products in FP8 in layers on GPUs, of sizes at which they were measured to save time
            (``fp8/measured.py``); ``"fp8"`` wherever they can run (``fp8/products.py``); ``"decode"`` nowhere.
        gradient_format: of such products: ``"e5m2"`` or ``"e4m3"``. Default: E5M2, whose range is wider, where all
            of a gradient shares one scale; E4M3, whose steps are finer, where each of its rows or blocks has its own.
        weight_gradients: of such products: those in ``"fp8"`` or ``"bf16"``. Default: ``"fp8"``, but ``"bf16"``
            with scales per row.
        keep_weights: weights stay what they are (BF16, FP32, FP16) for optimizers and checkpoints. They are quantized
            where FSDP2 gathers them, and where a layer multiplies with them (``fp8/kept.py``).

    None of these is part of the format: recipes that differ in them only are equal.
    """

    compute: Compute = field(default="auto", compare=False, kw_only=True)
    gradient_format: GradientFormat | None = field(default=None, compare=False, kw_only=True)
    weight_gradients: WeightGradients | None = field(default=None, compare=False, kw_only=True)
    keep_weights: bool = field(default=False, compare=False, kw_only=True)

    half_step_above: ClassVar[float] = 464.0

    def __post_init__(self) -> None:
        check_compute(self, Compute)
        if not isinstance(self.keep_weights, bool):
            raise TypeError(f"keep_weights: expected True or False, got {self.keep_weights!r}")
        if self.keep_weights and self.compute == "decode":
            raise ValueError("keep_weights=True with compute='decode' leaves nothing to quantize for: take no recipe")
        if self.gradient_format is not None:
            check_choice("gradient_format", self.gradient_format, GradientFormat)
        if self.weight_gradients is not None:
            check_choice("weight_gradients", self.weight_gradients, WeightGradients)

    def _products(self, scaling: Scaling, **others: Any) -> ProductFormat | None:
        """The format of products; None for ``compute="decode"``.

        ``others``: further fields of :class:`ProductFormat`.
        """
        if self.compute == "decode":
            return None
        gradients = self.gradient_format or ("e5m2" if scaling == "tensor" else "e4m3")
        weight_gradients = self.weight_gradients or ("bf16" if scaling == "row" else "fp8")
        dtype = torch.float8_e5m2 if gradients == "e5m2" else torch.float8_e4m3fn
        return ProductFormat(scaling, dtype, weight_gradients == "fp8", measured=self.compute == "auto", **others)

    @property
    def keeps_weights(self) -> bool:
        return self.keep_weights

    def decode(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        data = components["data"]
        return (elements.float8_decode(data) * self.scales(components, tuple(data.shape))).view(shape)

    def nearest(self, x: Tensor) -> Tensor:
        return elements.float8_decode(elements.float8_encode(x, None))

    def _check_e4m3_gradients(self) -> None:
        if self.gradient_format == "e5m2":
            raise ValueError("gradient_format: products of blocks take 'e4m3' alone, got 'e5m2'")


@dataclass(frozen=True)
class Float8TensorScaling(Float8Recipe):
    """E4M3 with one FP32 scale per weight.

    Args:
        activation_scaling: of products in FP8: one scale per ``"tensor"`` or per ``"row"`` of activations and of
            gradients, or ``"delayed"``: one per tensor, from the largest magnitudes of the layer's last 16 training
            passes, so that casts need not measure first.
        fast_gradients: of products in FP8: GPUs add up the products of gradients with 14 bits, as they do those of
            outputs. That takes less time, and costs accuracy in long sums.

    Neither is part of the format.
    """

    scales_whole_tensor: ClassVar[bool] = True
    activation_scaling: ActivationScaling = field(default="tensor", compare=False, kw_only=True)
    fast_gradients: bool = field(default=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("activation_scaling", self.activation_scaling, ActivationScaling)

    @functools.cached_property
    def products(self) -> ProductFormat | None:
        delayed = self.activation_scaling == "delayed"
        scaling: Scaling = "row" if self.activation_scaling == "row" else "tensor"
        return self._products(scaling, delayed=delayed, fast_gradients=self.fast_gradients)

    def encode(self, x: Tensor, components: Mapping[str, Tensor], fractions: Tensor | None = None) -> None:
        inverse = 1.0 / components["tensor_scale"]
        data = components["data"]
        data.copy_(elements.float8_encode(x.reshape(data.shape) * inverse, elements.shaped(fractions, data.shape)))

    def scales(self, components: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        return components["tensor_scale"]


@dataclass(frozen=True)
class Float8CurrentScaling(Float8TensorScaling):
    """float8_e4m3fn, one FP32 scale per weight: its absmax / 448. A new scale at every update."""

    components: ClassVar[tuple[Component, ...]] = (FLOAT8_DATA, TENSOR_SCALE)

    @functools.cached_property
    def kernel(self) -> KernelFormat:
        return KernelFormat(WeightFormat.FLOAT8, largest=elements.FLOAT8_LARGEST)

    def rescale(self, components: Mapping[str, Tensor], absmax: Tensor, applies: Tensor | None, advance: bool) -> None:
        set_where(components["tensor_scale"], elements.float8_scale(absmax), applies)


@dataclass(frozen=True)
class Float8DelayedScaling(Float8TensorScaling):
    """float8_e4m3fn, one FP32 scale per weight, from the absmax of earlier updates.

    Args:
        fp8_format: ``"e4m3"`` or ``"hybrid"``. Weights are E4M3 in both; the latter is for recipes whose gradients are
            E5M2.
        amax_history_len: how many updates are remembered.
        amax_compute_algo: ``"max"`` of the history or its ``"most_recent"`` entry.
        margin: the scale leaves room for values ``2 ** margin`` times as large.

    The first scale comes from the initial values; that of zeros counts as 1. A weight that grows faster than its
    history saturates at 448 times the scale, for one update.
    """

    fp8_format: Float8Format = "e4m3"
    amax_history_len: int = 16
    amax_compute_algo: AmaxAlgorithm = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("fp8_format", self.fp8_format, Float8Format)
        check_choice("amax_compute_algo", self.amax_compute_algo, AmaxAlgorithm)
        if self.keep_weights:
            raise ValueError(
                "keep_weights: weights that are quantized at each use have no history: Float8CurrentScaling"
            )
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len: expected at least 1, got {self.amax_history_len}")

    @functools.cached_property
    def components(self) -> tuple[Component, ...]:
        history = Component("amax_history", torch.float32, None, (self.amax_history_len,))
        return (FLOAT8_DATA, TENSOR_SCALE, history)

    @functools.cached_property
    def kernel(self) -> KernelFormat:
        return KernelFormat(
            WeightFormat.FLOAT8,
            block=1,
            largest=elements.FLOAT8_LARGEST,
            factor=2.0**self.margin,
            history=self.amax_history_len,
            most_recent=self.amax_compute_algo == "most_recent",
        )

    def _scale(self, absmax: Tensor) -> Tensor:
        return elements.float8_scale(absmax) * 2.0**self.margin

    def _most(self, components: Mapping[str, Tensor], same: Tensor) -> Tensor:
        """The last update's absmax may have saturated; an FP16 master's is rounded."""
        return torch.maximum(super()._most(components, same), components["amax_history"][0] * (1 + 2.0**-10))

    def prepare(self, components: Mapping[str, Tensor], applies: Tensor | None) -> None:
        """The scale of the history; as it is where that is empty, but 1 where it is that of zeros."""
        history, scale = components["amax_history"], components["tensor_scale"]
        seen = history.amax() if self.amax_compute_algo == "max" else history[0]
        kept = torch.where(scale > self._scale(torch.zeros_like(scale)), scale, 1.0)
        set_where(scale, torch.where(seen > 0, self._scale(seen), kept), applies)

    def rescale(self, components: Mapping[str, Tensor], absmax: Tensor, applies: Tensor | None, advance: bool) -> None:
        """A first scale where there is none, and ``absmax`` into the history (entry 0 is the latest)."""
        history, scale = components["amax_history"], components["tensor_scale"]
        set_where(scale, torch.where(scale > 0, scale, self._scale(absmax)), applies)
        if advance:
            set_where(history, torch.cat([absmax.reshape(1), history[:-1]]), applies)
