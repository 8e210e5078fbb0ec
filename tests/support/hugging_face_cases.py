"""Tiny language models of Hugging Face transformers, with quantized weights that were trained for a step."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from fused_optim import FusedAdam
from fused_optim.quantized import QuantizedTensor, discard_high_precision_init, plain_state_dict, quantize_model_
from quantized_cases import RECIPES, has_tiles

TOKENS = torch.arange(24).view(2, 12)
SIZES = {"vocab_size": 64, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "dtype": "bfloat16"}
SIZES |= {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64}
EXPERTS = {"num_experts_per_tok": 2, "pad_token_id": None}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"intermediate_size": 384}),
    "qwen3": ("Qwen3Config", {"intermediate_size": 384}),
    "mixtral": ("MixtralConfig", {"intermediate_size": 384, "num_local_experts": 4, **EXPERTS}),
    "llama4": (
        "Llama4TextConfig",
        {"intermediate_size": 384, "intermediate_size_mlp": 512, "num_local_experts": 4, "attention_chunk_size": 32}
        | {"interleave_moe_layer_step": 1, **EXPERTS},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {"moe_intermediate_size": 384, "num_experts": 4, **EXPERTS}),
}
# {tied, untied} x {dense, experts}
MODELS = ("llama", "llama-tied", "qwen3", "qwen3-tied", "mixtral", "qwen3_moe-tied")


def language_model(name: str, seed: int = 0) -> nn.Module:
    """Built in BF16, as from_pretrained does: what is computed in FP32 stays so."""
    torch.manual_seed(seed)
    family, _, tied = name.partition("-")
    kind, sizes = CONFIGS[family]
    config = getattr(transformers, kind)(**SIZES, **sizes, tie_word_embeddings=bool(tied))
    return transformers.AutoModelForCausalLM.from_config(config)


def every_linear(module: nn.Module, _: str) -> bool:
    """Heads and tied ones, too."""
    return isinstance(module, nn.Linear)


def has_experts(name: str) -> bool:
    return name.startswith(("mixtral", "qwen3_moe", "llama4"))


def quantized_language_model(name: str, recipe: str, train: bool = True) -> nn.Module:
    """Every linear layer, tied and head, and the experts if the recipe can; codes are those of an update."""
    model = quantize_model_(language_model(name), RECIPES[recipe], every_linear)
    if has_experts(name) and not has_tiles(recipe):
        quantize_model_(model, RECIPES[recipe], param_filter=lambda param, _: param.dim() == 3)
    if train:
        optimizer = FusedAdam(model.parameters(), lr=1e-3)
        model(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    discard_high_precision_init(model)
    return model.eval()


def decoded_model(model: nn.Module, name: str) -> nn.Module:
    """A plain one with its decoded weights."""
    plain = language_model(name, seed=1).eval()
    plain.load_state_dict(plain_state_dict(model))
    return plain


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(TOKENS).logits
    assert found.isfinite().all()
    return found


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    found = {name: param.detach() for name, param in model.named_parameters(remove_duplicate=False)}
    return {name: x.dequantize() if isinstance(x, QuantizedTensor) else x for name, x in found.items()}
