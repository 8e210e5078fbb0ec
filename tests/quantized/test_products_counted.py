"""``optimizer.summary()`` says which products run in FP8 and why the others do not, before any has run."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distributed
from fused_optim import FusedAdamW
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Recipe,
    quantize_model_,
)
from fused_optim.quantized.fp8 import grouped, products
from fused_optim.quantized.model.selection import gains
from fused_optim.sharding.dtensor import local_tensor
from product_cases import RECIPES

Predicted = dict[str, str | None]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How many products of each kind run in FP8."""
    seen: Counter[str] = Counter()
    places = [(products, name.replace(" ", "_"), name) for name in products.PRODUCTS] + [
        (grouped, "_product", "grouped"),
        (grouped, "_weight_gradient", "weight gradient"),
    ]
    originals = [getattr(module, attribute) for module, attribute, _ in places]

    def counting(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen[name] += 1
            return function(*args, **kwargs)

        return run

    for (module, attribute, name), original in zip(places, originals, strict=True):
        setattr(module, attribute, counting(original, name))
    try:
        yield seen
    finally:
        for (module, attribute, _), original in zip(places, originals, strict=True):
            setattr(module, attribute, original)


def predicted(weight: Tensor, rows: int | None) -> Predicted:
    """By product: why it decodes, None where it does not."""
    summary = FusedAdamW([("weight", weight)]).summary(rows)
    found: Predicted = {}
    for each in summary["products"]:
        assert each["fp8"] + each["decoded"] == 1
        assert [reason["examples"] for reason in each["reasons"]] == [["weight"]] * each["decoded"]
        found[each["product"]] = each["reasons"][0]["reason"] if each["decoded"] else None
    return found


def ran(layer: nn.Module, rows: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> set[str]:
    """Which products of a layer are in FP8, forward and backward."""
    x = torch.randn(rows, inputs, dtype=dtype).requires_grad_()
    more = (torch.tensor([rows // 2, rows], dtype=torch.int32),) if isinstance(layer, GroupedLinear) else ()
    with counted() as forward:
        out = layer(x, *more)
    with counted() as backward:
        out.backward(torch.ones_like(out))
    assert set(forward) <= {"output", "grouped"} and "output" not in backward
    seen = {name for name in (*forward, *backward) if name != "grouped"}
    return seen | ({"output"} if forward["grouped"] else set()) | ({"input gradient"} if backward["grouped"] else set())


def in_fp8(found: Predicted) -> set[str]:
    return {name for name, why in found.items() if why is None}


class OwnLinear(nn.Linear):
    """A class of its own: only its outputs are products in FP8."""


LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many inputs they have
    "whole": (lambda: nn.Linear(256, 128), 256),
    "without bias": (lambda: nn.Linear(128, 256, bias=False), 128),
    "outputs": (lambda: nn.Linear(256, 24), 256),
    "inputs": (lambda: nn.Linear(72, 128), 72),
    "less than a block": (lambda: nn.Linear(128, 48), 128),
    "own": (lambda: OwnLinear(128, 128), 128),
    "experts": (lambda: GroupedLinear(2, 64, 32), 64),
    "thin experts": (lambda: GroupedLinear(2, 64, 24), 64),
}


NAMES = ["tensor", "row", "row, FP8 weight gradients", "block", "block (1, 128)"]


@pytest.mark.parametrize("rows", [128, 48, 50])
@pytest.mark.parametrize("name", [*NAMES, "mxfp8", "nvfp4"])
def test_what_is_predicted_runs(name: str, rows: int) -> None:
    refused = set()
    for kind, (build, inputs) in LAYERS.items():
        if name == "block" and "experts" in kind:
            continue  # tiles need multiples of 128
        layer = quantize_model_(build().bfloat16(), RECIPES[name], lambda *_: True)
        found = predicted(layer.weight, rows)
        assert set(found) == set(products.PRODUCTS)
        assert ran(layer, rows, inputs) == in_fp8(found), (kind, found)
        if kind != "own":  # of which a copy does not know what holds it
            again = pickle.loads(pickle.dumps(layer.weight))
            assert predicted(again, rows) == found
        refused |= {why for why in found.values() if why}
    assert "out_features = 24 is no multiple of 16" in refused


def test_other_dtypes_wait_for_autocast() -> None:
    layer = quantize_model_(nn.Linear(64, 64), RECIPES["tensor"])
    found = predicted(layer.weight, 64)
    assert not in_fp8(found) and all("it is float32: only autocast" in str(why) for why in found.values())
    assert not ran(layer, 64, 64, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert ran(layer, 64, 64, torch.float32) == set(products.PRODUCTS)


def test_the_summary_counts_products() -> None:
    model = nn.Sequential(*(nn.Linear(64, size, bias=False) for size in (64, 64, 24, 24, 24, 24))).bfloat16()
    quantize_model_(model, RECIPES["tensor"])
    model[0].weight.requires_grad_(False)  # is multiplied nevertheless
    summary = FusedAdamW(list(model.named_parameters())).summary()
    reason = "out_features = 24 is no multiple of 16"
    examples = ["2.weight", "3.weight", "4.weight"]
    reasons = [{"reason": reason, "parameters": 4, "examples": examples}]
    assert summary["products"] == [
        {"product": name, "fp8": 2, "decoded": 4, "reasons": reasons} for name in products.PRODUCTS
    ]
    line = f"  output in FP8 for 2 of 6 parameters; decoded for 4 parameters ({', '.join(examples)}, ...): {reason}"
    assert line in str(summary).splitlines()
    assert "rows = 40" in str(FusedAdamW(list(model.named_parameters())).summary(rows=40))
    decoding = quantize_model_(nn.Linear(64, 64).bfloat16(), type(RECIPES["tensor"])(compute="decode"))
    assert FusedAdamW(decoding.parameters()).summary()["products"] == []


def test_gpus_without_such_products_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = {"cuda:0": (8, 0), "cuda:1": (9, 0), "cuda:2": (10, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[str(device)])
    products._capability.cache_clear()
    for name, working in {"tensor": {1, 2}, "block": {1}, "mxfp8": {2}, "nvfp4": {2}}.items():
        format = RECIPES[name].products
        assert format is not None
        reasons = [products.device_unsupported_reason(torch.device("cuda", i), format) for i in range(3)]
        assert {i for i, why in enumerate(reasons) if why is None} == working
    why = products.device_unsupported_reason(torch.device("cuda", 1), RECIPES["mxfp8"].products)
    assert why == "products in MXFP8 need compute capability 10.x, this GPU has 9.0"
    shape = (2, 128, 128)
    experts = [grouped.unsupported_reason("output", RECIPES["row"], torch.device("cuda", i), shape) for i in range(3)]
    assert [why is None for why in experts] == [False, True, True]  # the last one by one
    products._capability.cache_clear()


# --- shards -------------------------------------------------------------------------------------------------------


def shards() -> dict[str, tuple[Predicted, set[str], tuple[int, ...]]]:
    """What is predicted of sharded layers, what runs, and the shape of the local shard; on four ranks."""
    both = distributed.mesh(2, 2, names=("dp", "tp"))
    found = {}
    for kind, style, outputs in [
        ("fsdp", None, 48),  # whole it is 48 x 64, of which a rank has 12
        ("fsdp, uneven", None, 16),
        ("columns", ColwiseParallel(), 48),  # 24 of each rank: decodes
        ("columns, gathered", ColwiseParallel(), 64),
        ("rows", RowwiseParallel(), 64),
        ("mixed precision", None, 48),
    ]:
        dtype = torch.float32 if kind == "mixed precision" else torch.bfloat16
        model = nn.Sequential(nn.Linear(64, outputs, bias=False, dtype=dtype))
        if style is not None:
            parallelize_module(model, both["tp"], {"0": style})
        quantize_model_(model, RECIPES["tensor"])
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        mesh = both["dp"] if style is not None else distributed.mesh(4)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        weight = model[0].weight
        inputs = 32 if isinstance(style, RowwiseParallel) else 64
        found[kind] = predicted(weight, 32), ran(model, 32, inputs), tuple(local_tensor(weight).shape)
        assert isinstance(local_tensor(weight), QuantizedTensor)
    return found


def test_shards_are_predicted_as_they_are_multiplied() -> None:
    everything = set(products.PRODUCTS)
    for found in distributed.run(4, shards):
        for kind in ("fsdp", "fsdp, uneven", "columns, gathered", "rows"):
            assert (in_fp8(found[kind][0]), found[kind][1]) == (everything, everything), (kind, found[kind])
        assert found["fsdp"][2] == (12, 64)
        why, seen, _ = found["columns"]
        assert set(why.values()) == {"out_features = 24 is no multiple of 16"} and not seen
        why, seen, _ = found["mixed precision"]
        assert all("FSDP2's mixed precision" in str(each) for each in why.values()) and seen == everything


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    products._capability.cache_clear()
    products._known_products_in_fp8.cache_clear()
    yield torch.device("cuda", 7)
    products._capability.cache_clear()
    products._known_products_in_fp8.cache_clear()


def test_products_are_in_fp8_by_default_where_they_were_measured_to_gain(hopper: torch.device) -> None:
    recipe, square = Float8CurrentScaling(), (4096, 4096)
    assert all(products.products_in_fp8(recipe, hopper, 8192, square))
    # The GPU would gain with fewer rows, too, but waits for the host there, which FP8 takes longer.
    assert not any(products.products_in_fp8(recipe, hopper, 2048, square))
    assert all(products.products_in_fp8(recipe, hopper, 2048, (14336, 4096)))
    assert all(products.products_in_fp8(recipe, hopper, 2048, (4096, 14336)))  # the same products
    assert not any(products.products_in_fp8(recipe, hopper, 8192, (512, 512)))
    assert not any(products.products_in_fp8(recipe, hopper, 64, square))
    # Beside BF16, for weights that are kept, more rows are needed.
    kept = Float8CurrentScaling(keep_weights=True)
    assert not any(products.products_in_fp8(kept, hopper, 512, (8192, 8192), "BF16"))
    assert all(products.products_in_fp8(kept, hopper, 1024, (8192, 8192), "BF16"))
    # Scales by rows are those of activations: their weights are cast as those with one scale. Blocks were not measured.
    rows = Float8CurrentScaling(keep_weights=True, activation_scaling="row", weight_gradients="fp8")
    assert not any(products.products_in_fp8(rows, hopper, 2048, square, "BF16"))
    assert all(products.products_in_fp8(rows, hopper, 8192, square, "BF16"))
    assert not any(products.products_in_fp8(rows, hopper, 8192, (1024, 4096), "BF16"))  # a gain that the cast costs
    assert all(products.products_in_fp8(kept, hopper, 32768, (1024, 4096), "BF16"))
    assert any(products.products_in_fp8(dataclasses.replace(rows, weight_gradients=None), hopper, 8192, square, "BF16"))
    for recipe_of_blocks in (Float8BlockScaling(keep_weights=True), Float8BlockScaling((1, 128), keep_weights=True)):
        format = recipe_of_blocks.products
        assert format is not None
        why = products.slower_reason(format, hopper, 32768, square, "BF16")
        assert (
            why == 'FP8 products were not measured with block, weights kept: compute="fp8" asks for them all the same'
        )
        assert products.slower_reason(format, hopper, 32768, square, "decoded") is None  # as FSDP2 gathers them
    for other in (Float8CurrentScaling(compute="decode"), Float8CurrentScaling(compute="dequantize")):
        assert not any(products.products_in_fp8(other, hopper, 8192, square)) and other.compute == "decode"
    assert all(products.products_in_fp8(Float8CurrentScaling(compute="fp8"), hopper, 64, (512, 512)))
    assert not any(products.products_in_fp8(MXFP8BlockScaling(), hopper, 8192, square))
    assert not any(products.products_in_fp8(recipe, torch.device("cpu"), 8192, square))


@pytest.mark.parametrize("rows", [256, 512, 1024, 2048, 8192, 32768])
@pytest.mark.parametrize(
    "shape", [(4096, 4096), (14336, 4096), (4096, 14336), (2048, 2048), (1024, 4096), (1024, 1024)]
)
def test_what_gains_is_in_fp8_by_default(hopper: torch.device, rows: int, shape: tuple[int, int]) -> None:
    """A filter that leaves layers plain where BF16 is faster must not pick one that decodes."""
    layer = nn.Linear(shape[1], shape[0], device="meta")
    for recipe in (Float8CurrentScaling(), Float8CurrentScaling(activation_scaling="row"), Float8BlockScaling()):
        is_picked = gains(recipe, rows)(layer, "")
        assert products.products_in_fp8(recipe, hopper, rows, shape).output or not is_picked
        assert is_picked or rows < 8192 or max(shape) < 4096 or min(shape) < 4096


def test_experts_have_weight_gradients_in_fp8_where_these_gain(hopper: torch.device) -> None:
    def found(recipe: Recipe, rows: int, weight: tuple[int, ...]) -> list[bool]:
        return [grouped.unsupported_reason(each, recipe, hopper, weight, rows) is None for each in products.PRODUCTS]

    large, small = (8, 14336, 4096), (64, 1408, 2048)
    assert found(Float8CurrentScaling(), 16384, large) == [True, True, True]
    assert found(Float8CurrentScaling(), 8192, large) == [True, True, False]
    assert found(Float8CurrentScaling(), 16384, small) == [True, True, False]
    tiles = Float8BlockScaling().for_shape(large)
    assert found(tiles, 16384, large) == [True, True, True] and not any(found(tiles, 8192, large))
    assert found(Float8CurrentScaling(compute="fp8"), 64, small) == [True, True, True]
    for recipe in (MXFP8BlockScaling(compute="fp8"), NVFP4BlockScaling(compute="fp4")):
        why = grouped.unsupported_reason("output", recipe, hopper, large, 16384)
        assert "need compute capability 10.x, this GPU has 9.0" in str(why)
        assert not any(found(recipe, 16384, large))


def test_the_summary_tells_why_products_are_not_in_fp8() -> None:
    layer = quantize_model_(nn.Linear(64, 64).bfloat16(), Float8CurrentScaling())
    found = predicted(layer.weight, 64)
    assert set(found.values()) == {'CPUs have no FP8 products: compute="fp8" asks for them all the same, in FP32'}
    kept = quantize_model_(nn.Linear(128, 64).bfloat16(), Float8CurrentScaling(compute="fp8", keep_weights=True))
    assert predicted(kept.weight, 64) == dict.fromkeys(products.PRODUCTS)
    in_fp32 = quantize_model_(nn.Linear(64, 64), Float8CurrentScaling(compute="fp8"))
    assert "it is float32: only autocast" in str(predicted(in_fp32.weight, 64)["output"])
    with torch.autocast("cpu", torch.bfloat16):
        assert predicted(in_fp32.weight, 64) == dict.fromkeys(products.PRODUCTS)
    in_mxfp8 = quantize_model_(nn.Linear(64, 64).bfloat16(), MXFP8BlockScaling(compute="fp8"))
    with torch.autocast("cpu", torch.float16):
        for each in (kept, in_fp32):
            assert predicted(each.weight, 64) == dict.fromkeys(products.PRODUCTS)
        for reason in predicted(in_mxfp8.weight, 64).values():
            assert str(reason) == "it is float16: products in MXFP8 have outputs in bfloat16 alone"
