"""Accelerate's hooks around models with quantized weights: ``dispatch_model``, offloading, ``device_map``.

They work, or say at once what to call.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fused_optim.quantized import (
    Float8CurrentScaling,
    KeptWeight,
    MXFP8BlockScaling,
    QuantizedTensor,
    Recipe,
    discard_high_precision_init,
    quantize_model_,
    quantized_model_init,
)
from fused_optim.quantized.fp8.linear import QuantizedLinear
from pairwise import pairwise
from quantized_cases import RECIPES

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from hugging_face_cases import every_linear, language_model, logits, weights_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
NAMES = ["llama", "llama-tied", "mixtral"]
KEPT = Float8CurrentScaling(compute="fp8", keep_weights=True)
MODULES = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")
CPU = {**{f"model.{name}": "cpu" for name in MODULES}, "lm_head": "cpu"}
DISK = {**CPU, "model.layers.1": "disk"}


def quantized(name: str, recipe: Recipe, initial: bool = False) -> nn.Module:
    return quantize_model_(language_model(name), recipe, every_linear, keep_initial=initial).eval()


# --- hooks that move nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(  # not the product: each two
    "recipe, name, initial", pairwise([*RECIPES.values(), KEPT], NAMES, [False, True]), ids=str
)
def test_dispatched_models_compute_the_same(name: str, recipe: Recipe, initial: bool) -> None:
    """Weights without memory of their own are not taken for one tied weight."""
    model = quantized(name, recipe, initial)
    expected, weights = logits(model), weights_of(model)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert torch.equal(logits(model), expected)
    assert all(torch.equal(value, weights[key]) for key, value in weights_of(model).items())
    kinds = {type(param) for param in model.parameters()}
    assert kinds & {QuantizedTensor, KeptWeight}
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == name.endswith("tied")


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(compute="fp8"), KEPT], ids=["mxfp8", "kept"])
def test_layers_with_hooks_multiply_in_fp8(recipe: Recipe) -> None:
    """Whether they are quantized before or after."""
    model, before, after = (language_model("llama").eval() for _ in range(3))
    quantize_model_(model, recipe)
    accelerate.dispatch_model(quantize_model_(before, recipe), {"": "cpu"}, force_hooks=True)
    quantize_model_(accelerate.dispatch_model(after, {"": "cpu"}, force_hooks=True), recipe)
    assert type(after.model.layers[0].mlp.up_proj) is QuantizedLinear
    expected = logits(model)
    assert torch.equal(logits(before), expected) and torch.equal(logits(after), expected)
    decoded = quantize_model_(language_model("llama").eval(), MXFP8BlockScaling(compute="decode"))
    assert not torch.equal(logits(decoded), expected)


# --- offloading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe, name, initial", pairwise(list(RECIPES), NAMES, [False, True]))
def test_weights_are_offloaded_to_the_cpu(name: str, recipe: str, initial: bool) -> None:
    model = quantized(name, RECIPES[recipe], initial)
    expected = logits(model)
    accelerate.cpu_offload(model, "cpu")
    resting = model.model.layers[0].self_attn.q_proj.weight
    assert isinstance(resting, QuantizedTensor) and resting.is_meta
    for _ in range(2):
        assert torch.equal(logits(model), expected)
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta


@pytest.mark.parametrize("recipe", ["mxfp8", "current"])
def test_disks_are_refused_by_name(recipe: str, tmp_path: Path) -> None:
    model = quantized("llama", RECIPES[recipe])
    with pytest.raises(TypeError, match=r"q_proj\.weight.*Accelerate writes weights to disk.*dequantize_model_"):
        accelerate.disk_offload(model, tmp_path, "cpu")


def test_kept_weights_are_not_offloaded() -> None:
    model = accelerate.cpu_offload(quantize_model_(language_model("llama"), KEPT), "cpu")
    with pytest.raises(TypeError, match=r"recipe they do not tell.*keep_weights=True not at all"):
        logits(model)


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", ["cpu", "auto", {"": "cpu"}])
def test_what_is_loaded_by_a_map_is_quantized(places: str | dict[str, str], tmp_path: Path) -> None:
    language_model("llama").save_pretrained(tmp_path)
    with quantized_model_init(RECIPES["mxfp8"]):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places).eval()
    expected = quantize_model_(language_model("llama"), RECIPES["mxfp8"]).eval()
    discard_high_precision_init(model)
    assert sum(isinstance(param, QuantizedTensor) for param in model.parameters()) == 14
    assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize("within", [True, False])
def test_offloaded_weights_are_not_quantized(within: bool, tmp_path: Path) -> None:
    language_model("llama").save_pretrained(tmp_path / "model")
    options = {"device_map": DISK, "offload_folder": str(tmp_path / "offloaded")}
    load = transformers.AutoModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj\.weight is offloaded by Accelerate.*dispatch"):
        if within:
            with quantized_model_init(RECIPES["mxfp8"]):
                load(tmp_path / "model", **options)
        else:
            model = load(tmp_path / "model", **options)
            quantize_model_(model, RECIPES["mxfp8"])
    if not within:
        assert not any(isinstance(param, QuantizedTensor) for param in model.parameters())
        only = quantize_model_(model, {"model.layers.0.*": RECIPES["mxfp8"]})
        assert isinstance(only.model.layers[0].self_attn.q_proj.weight, QuantizedTensor)


def test_plain_values_say_what_to_call(tmp_path: Path) -> None:
    """Accelerate puts them in the places of weights, and has no recipe for them."""
    language_model("llama").save_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        built = quantize_model_(language_model("llama"), RECIPES["mxfp8"])
    with pytest.raises(TypeError, match=r"load_quantized_safetensors or from_pretrained within quantized_model_init"):
        accelerate.load_checkpoint_and_dispatch(built, tmp_path, device_map={"": "cpu"})
