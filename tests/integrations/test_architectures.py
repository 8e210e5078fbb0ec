"""Quantized weights in architectures of transformers, with plain models whose weights are rounded independently beside.

Fused queries, keys and values, biases, encoders and decoders, convolutions, tied embeddings of several names, routers,
experts, layers that hold transposed weights, sizes that are no multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_optim import FusedAdamW
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    QuantizedTensor,
    Recipe,
    discard_high_precision_init,
    load_quantized_safetensors,
    quantize_model_,
    quantized_model_init,
    save_quantized_safetensors,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytest.importorskip("accelerate")

from transformers.pytorch_utils import Conv1D  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*weights of experts, which have three dims")

TOKENS = torch.arange(3, 35).view(2, 16)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
SOUNDS = torch.linspace(-1, 1, 2 * 16 * 32).view(2, 16, 32).sin()
SPECIAL = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {**SPECIAL, **WIDTHS, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 16}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}
GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK = {
    **SIZES,
    **LATENT,
    **GROUPS,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ODD = {**SIZES, "hidden_size": 40, "intermediate_size": 52, "head_dim": 10, "attention_bias": True, "mlp_bias": True}
ENCODER, DECODER = (
    {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 96} for part in ("encoder", "decoder")
)
WHISPER = {
    **SPECIAL,
    "decoder_start_token_id": 1,
    **ENCODER,
    **DECODER,
    "d_model": 64,
    "num_mel_bins": 16,
    "max_source_positions": 16,
}
T5 = {
    "vocab_size": 64,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VIT = {**WIDTHS, "image_size": 16, "patch_size": 4, "num_labels": 10}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# The class, its configuration, how many weights the default quantizes.
MODELS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "gemma": ("GemmaForCausalLM", "GemmaConfig", SIZES, 14),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, "sliding_window": 8}, 14),
    "phi": ("PhiForCausalLM", "PhiConfig", {k: v for k, v in SIZES.items() if k != "head_dim"}, 12),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {k: v for k, v in SIZES.items() if k != "head_dim"}, 8),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SPECIAL, **WIDTHS, "max_position_embeddings": 64}, 8),
    "odd sizes": ("LlamaForCausalLM", "LlamaConfig", ODD, 14),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**SIZES, **EXPERTS}, 8),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK, 16),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5, 32),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", {**WHISPER, "max_target_positions": 32}, 32),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT, 12),
    "bert": ("BertForMaskedLM", "BertConfig", {**WIDTHS, **SPECIAL, "max_position_embeddings": 64}, 13),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, 0),
}
EACH = pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])
ROUTED = ("qwen3-moe", "deepseek-v3")


def model_of(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    kind, configuration, sizes, _ = MODELS[name]
    config = getattr(transformers, configuration)(**sizes, dtype=dtype)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model: nn.Module = getattr(transformers, kind)(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.copy_(torch.randn(param.shape) * 0.08)
    return model.eval()


def batch(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": IMAGES.to(dtype), "labels": torch.tensor([1, 3])}
    if name == "whisper":
        return {"input_features": SOUNDS.to(dtype), "labels": TOKENS}
    return {"input_ids": TOKENS, "labels": TOKENS}


def results(model: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """The loss and the logits."""
    out = model(**batch(name, next(model.parameters()).dtype))
    return out.loss, out.logits.detach()


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if isinstance(param, QuantizedTensor)}


def one_scale(values: Tensor) -> Tensor:
    scale = values.abs().max() / 448
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def tiles(values: Tensor) -> Tensor:
    found = torch.empty_like(values)
    for row in range(0, values.shape[0], 128):
        for column in range(0, values.shape[1], 128):
            found[row : row + 128, column : column + 128] = one_scale(values[row : row + 128, column : column + 128])
    return found


RECIPES: dict[str, tuple[Recipe, Callable[[Tensor], Tensor]]] = {
    "one scale": (Float8CurrentScaling(), one_scale),
    "tiles": (Float8BlockScaling(), tiles),
}
BOTH = pytest.mark.parametrize("recipe", RECIPES)


def rounded(model: nn.Module, names: set[str], rounds: Callable[[Tensor], Tensor]) -> nn.Module:
    with torch.no_grad():
        for name in names:
            param = model.get_parameter(name)
            param.copy_(rounds(param.float()))
    return model


# --- computing and training -------------------------------------------------------------------------------------------


@BOTH
@EACH
def test_logits_and_gradients_are_those_of_rounded_weights(name: str, recipe: str) -> None:
    quantizes, rounds = RECIPES[recipe]
    model = quantize_model_(model_of(name), quantizes)
    names = quantized_names(model)
    assert len(names) == MODELS[name][3]
    discard_high_precision_init(model)
    plain = rounded(model_of(name), names, rounds)
    (loss, logits), (expected_loss, expected) = results(model, name), results(plain, name)
    assert torch.equal(logits, expected) and not torch.equal(logits, results(model_of(name), name)[1])
    loss.backward(), expected_loss.backward()
    for key, param in plain.named_parameters():
        found = model.get_parameter(key).grad
        assert (found is None) == (param.grad is None), key
        if found is not None and name not in ROUTED:  # whose sums are not in one order
            assert torch.equal(found, param.grad), key


@BOTH
@EACH
def test_training_is_that_of_rounded_masters(name: str, recipe: str) -> None:
    """With torch's AdamW on FP32 masters, and plain weights that are rounded anew from them."""
    quantizes, rounds = RECIPES[recipe]
    model, plain = quantize_model_(model_of(name), quantizes), model_of(name)
    names = quantized_names(model)
    masters = {key: param.detach().clone().requires_grad_() for key, param in plain.named_parameters()}
    ours, theirs = (
        FusedAdamW(model.parameters(), lr=1e-3, eps=1e-3),
        torch.optim.AdamW(masters.values(), lr=1e-3, eps=1e-3),
    )
    for _ in range(3):
        with torch.no_grad():
            for key, param in plain.named_parameters():
                param.copy_(rounds(masters[key]) if key in names else masters[key])
        (loss, _), (expected, _) = results(model, name), results(plain, name)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        loss.backward(), expected.backward()
        for key, param in plain.named_parameters():
            masters[key].grad = param.grad
            param.grad = None
        ours.step(), ours.zero_grad(), theirs.step()
    start = dict(model_of(name).named_parameters())
    for key, master in ours.master_state_dict(model).items():
        moved = (masters[key] - start[key]).norm()
        assert (master - masters[key]).norm() <= 0.02 * moved + 1e-6, key


# --- what is picked ---------------------------------------------------------------------------------------------------


def test_layers_that_are_no_linear_ones_are_not_left_silently(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no weight is quantized: .* filter_fn"):
        quantize_model_(model_of("gpt2"), Float8CurrentScaling())
    model_of("gpt2").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="no weight is quantized"), quantized_model_init(Float8CurrentScaling()):
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert not quantized_names(model)


def test_transposed_weights_are_picked_by_a_filter(tmp_path: Path) -> None:
    model = quantize_model_(model_of("gpt2"), Float8CurrentScaling(), lambda module, _: isinstance(module, Conv1D))
    names = quantized_names(model)
    assert len(names) == 8
    discard_high_precision_init(model)
    assert torch.equal(results(model, "gpt2")[1], results(rounded(model_of("gpt2"), names, one_scale), "gpt2")[1])
    model.config.save_pretrained(tmp_path)
    save_quantized_safetensors(model, tmp_path)  # plain: no layout has them
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.equal(results(loaded, "gpt2")[1], results(model, "gpt2")[1])


# --- exports ----------------------------------------------------------------------------------------------------------

EXPORTS = [("one scale", "compressed-tensors"), ("tiles", "compressed-tensors"), ("tiles", "fp8")]


@pytest.mark.parametrize("recipe, layout", EXPORTS)
@EACH
def test_transformers_loads_exports(name: str, recipe: str, layout: Any, tmp_path: Path) -> None:
    """Fused queries, keys and values have 192 rows: transformers would take them for blocks of 96."""
    model = quantize_model_(model_of(name, torch.bfloat16), RECIPES[recipe][0], keep_initial=False)
    model.config.save_pretrained(tmp_path)
    save_quantized_safetensors(model, tmp_path, layout, readers="transformers")
    kinds = {"fp8": transformers.FineGrainedFP8Config, "compressed-tensors": transformers.CompressedTensorsConfig}
    loaded = type(model).from_pretrained(tmp_path, quantization_config=kinds[layout](dequantize=True)).eval()
    for key in quantized_names(model):
        assert torch.equal(loaded.get_parameter(key), model.get_parameter(key).dequantize()), key
    expected = results(model, name)[1]
    assert torch.equal(results(loaded, name)[1], expected)
    ours = model_of(name, torch.bfloat16)
    load_quantized_safetensors(ours, tmp_path)
    assert torch.equal(results(ours, name)[1], expected)
