"""What compressed-tensors and Hugging Face transformers read of files that were written for inference servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fused_optim import FusedAdam
from fused_optim.quantized import (
    QuantizedTensor,
    load_quantized_safetensors,
    quantize_model_,
    save_quantized_safetensors,
)
from quantized_cases import RECIPES

compressed_tensors = pytest.importorskip("compressed_tensors")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # without which transformers reads no FP8
SMALL = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
TOKENS = torch.arange(24).view(2, 12)


def small_llama(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, dtype="bfloat16")
    return transformers.LlamaForCausalLM(config).bfloat16()


def is_projection(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and name != "lm_head"


def trained(recipe: str) -> nn.Module:
    """One step, so that codes are those of an update."""
    model = quantize_model_(small_llama(), RECIPES[recipe], is_projection)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    found = {name: param.detach() for name, param in model.named_parameters()}
    return {name: x.dequantize() if isinstance(x, QuantizedTensor) else x for name, x in found.items()}


def saved(recipe: str, layout: Any, folder: Path) -> nn.Module:
    model = trained(recipe)
    model.config.save_pretrained(folder)
    # Servers join layers under one scale of NVFP4, which rounds the scales of blocks; this package's bits are compared.
    readers = {"readers": "transformers"} if recipe == "nvfp4" else {}
    save_quantized_safetensors(model, folder, layout, **readers)
    return model


def check_same(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 0.0) -> None:
    assert set(actual) == set(expected)
    for name, value in actual.items():
        torch.testing.assert_close(
            value, expected[name].to(value.dtype), rtol=rtol, atol=0.0, msg=f"{name}: {{}}".format
        )


def test_compressed_tensors_converts_fine_grained_fp8(tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    model = saved("tiles", "fp8", tmp_path)
    converter = FP8BlockDequantizer.from_pretrained(str(tmp_path))
    stored = load_file(next(tmp_path.glob("*.safetensors")))
    check_same(converter.process(stored), weights_of(model))


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "NVFP4A16"])
def test_what_compressed_tensors_writes_is_read(preset: str, tmp_path: Path) -> None:
    """Quantized and saved by their packages."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    source = small_llama()
    config = QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=["lm_head"])
    apply_quantization_config(source, config)
    for module in source.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            observe(module, calculate_qparams)
            module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(source)
    compressor.compress_model(source)
    save_state(source, tmp_path)
    compressor.decompress_model(source)
    plain = small_llama(seed=1)
    load_quantized_safetensors(plain, tmp_path)
    names = {name for name, _ in plain.named_parameters()}
    expected = {name: value for name, value in weights_of(source).items() if name in names}
    check_same(weights_of(plain), expected, 2**-7)


def observe(module: nn.Module, calculate_qparams: Any) -> None:
    """What an observer of minima and maxima would set."""
    args, weight = module.quantization_scheme.weights, module.weight.detach().float()
    if args.strategy == "tensor_group":
        module.weight_global_scale.data.fill_(448 * 6 / weight.abs().max())
    if args.strategy == "channel":
        blocks = weight[:, None, :]
    elif args.strategy == "block":
        rows, columns = args.block_structure
        blocks = weight.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns)).transpose(1, 2).flatten(2)
    else:
        blocks = weight.unflatten(-1, (-1, args.group_size))
    options = {"global_scale": module.weight_global_scale} if args.strategy == "tensor_group" else {}
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, **options)
    module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(module.weight_scale.dtype)


def save_state(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
