"""What Hugging Face transformers, compressed-tensors and vLLM's rules make of exported models: logits as our own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distributed
from distributed import assert_same
from fused_optim import FusedAdam, save_master_safetensors
from fused_optim.quantized import (
    load_quantized_safetensors,
    quantize_model_,
    save_quantized_safetensors,
)
from quantized_cases import RECIPES, mesh_of

transformers = pytest.importorskip("transformers")
compressed_tensors = pytest.importorskip("compressed_tensors")
pytest.importorskip("accelerate")  # without which transformers reads no FP8

import vllm_rules  # noqa: E402
from hugging_face_cases import (  # noqa: E402
    MODELS,
    decoded_model,
    every_linear,
    has_experts,
    language_model,
    logits,
    quantized_language_model,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*transformers 5.23.0 decodes experts beside NVFP4")
FORMATS = ("current", "tiles", "rows", "mxfp8", "nvfp4")
LAYOUTS = [*((recipe, "compressed-tensors") for recipe in FORMATS), *((r, "fp8") for r in ("tiles", "rows", "mxfp8"))]
EACH = pytest.mark.parametrize("recipe, layout", LAYOUTS)
ALL = pytest.mark.parametrize("name", MODELS)


def saved(model: nn.Module, folder: Path, layout: Any, **options: Any) -> nn.Module:
    model.config.save_pretrained(folder)
    save_quantized_safetensors(model, folder, layout, **options)
    return model


def loaded(folder: Path, layout: str = "") -> nn.Module:
    """By transformers, which decodes what it reads."""
    kinds = {"fp8": transformers.FineGrainedFP8Config, "compressed-tensors": transformers.CompressedTensorsConfig}
    options = {"quantization_config": kinds[layout](dequantize=True)} if layout else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def read(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def quantization(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def decompressed(folder: Path, plain: Path) -> nn.Module:
    """By compressed-tensors: each module of the files as its configuration says, whatever has read it as a whole."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import is_match, match_targets

    config = json.loads((folder / "config.json").read_text())
    described = QuantizationConfig.model_validate(config.pop("quantization_config"))
    schemes = {target: scheme for scheme in described.config_groups.values() for target in scheme.targets}
    files, found, linear = read(folder), {}, nn.Linear(1, 1)
    for module in {name.rpartition(".")[0] for name in files}:
        own = {name.rpartition(".")[2]: value for name, value in files.items() if name.rpartition(".")[0] == module}
        is_vector = all(value.dim() < 2 for value in own.values())
        if not is_vector and is_match(module, linear, list(schemes), described.ignore):
            scheme = schemes[match_targets(module, linear, schemes)[0]]
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            assert set(own) == set(compressor.compression_param_names(scheme)), module
            own = {"weight": compressor.decompress(own, scheme)["weight"].bfloat16()}
        found |= {f"{module}.{key}": value.contiguous() for key, value in own.items()}
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    save_file(found, plain / "model.safetensors", metadata={"format": "pt"})
    return loaded(plain)


def assert_same_model(actual: nn.Module, expected: nn.Module) -> None:
    """Decoded weights bit for bit, hence logits."""
    weights = weights_of(expected)
    different = {key for key, value in weights_of(actual).items() if not torch.equal(value, weights[key])}
    assert not different
    assert torch.equal(logits(actual), logits(expected))


# --- the matrix ---------------------------------------------------------------------------------------------------


@EACH
@ALL
def test_transformers_loads_what_was_trained(name: str, recipe: str, layout: str, tmp_path: Path) -> None:
    if recipe == "nvfp4" and has_experts(name):
        pytest.skip("transformers cannot; it is refused below")
    model = saved(quantized_language_model(name, recipe), tmp_path, layout, readers="transformers")
    found = loaded(tmp_path, layout)
    assert_same_model(found, model)
    assert not torch.equal(logits(found), logits(language_model(name, seed=1)))
    quantized = [key for key, value in read(tmp_path).items() if value.dtype in (torch.float8_e4m3fn, torch.uint8)]
    assert len(quantized) >= 14 - 6 * has_experts(name)  # the linear layers of two layers


@EACH
def test_experts_of_llama_4_are_what_transformers_makes_of_them(recipe: str, layout: str, tmp_path: Path) -> None:
    """In compressed-tensors linear layers, expert by expert, with inputs in columns; and they are read again."""
    model = saved(quantized_language_model("llama4", recipe), tmp_path, layout, readers="transformers")
    found = loaded(tmp_path, layout)
    expected, actual = weights_of(model), weights_of(found)
    if layout == "compressed-tensors":
        expected = as_linear_experts(expected)
        (dtype,) = {value.dtype for name, value in read(tmp_path).items() if name.endswith("experts.2.up_proj.weight")}
        assert dtype == (torch.float8_e4m3fn if recipe == "current" else torch.bfloat16)
    assert {*actual} == {*expected}
    assert not {name for name, value in expected.items() if not torch.equal(actual[name], value)}
    torch.testing.assert_close(logits(found), logits(model), rtol=0.0, atol=2.0**-6 * float(logits(model).abs().max()))
    again = language_model("llama4", seed=1)
    load_quantized_safetensors(again, tmp_path)
    assert_same_model(again.eval(), model)


def as_linear_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, value in weights.items():
        parent, _, own = name.rpartition(".")
        if not parent.endswith("experts"):
            found[name] = value
            continue
        parts = (
            {"down_proj": value} if own == "down_proj" else {"gate_proj": value[..., :384], "up_proj": value[..., 384:]}
        )
        for layer, part in parts.items():
            found |= {f"{parent}.{expert}.{layer}.weight": part[expert].t() for expert in range(4)}
    return found


def test_experts_of_llama_4_have_the_names_of_servers(tmp_path: Path) -> None:
    """For which the default is; and codes load into the same recipe."""
    model = saved(quantized_language_model("llama4", "current"), tmp_path, "compressed-tensors")
    plain, router = quantization(tmp_path)["ignore"], "model.layers.1.feed_forward.router"
    assert router in plain and not [name for name in plain if "experts" in name]
    assert read(tmp_path)[f"{router}.weight"].dtype == torch.bfloat16
    again = quantized_language_model("llama4", "current", train=False)
    load_quantized_safetensors(again, tmp_path)
    assert_same_model(again, model)
    shape = {"model.layers.0.feed_forward.experts.0.up_proj.weight": torch.zeros(3, 256)}
    save_file(shape, tmp_path / "other.safetensors")
    with pytest.raises(KeyError, match="the files lack"):
        load_quantized_safetensors(again, tmp_path / "other.safetensors")


@pytest.mark.parametrize("recipe", FORMATS)
@ALL
def test_compressed_tensors_decompresses_what_was_trained(name: str, recipe: str, tmp_path: Path) -> None:
    model = saved(quantized_language_model(name, recipe), tmp_path / "out", "compressed-tensors")
    found, expected = decompressed(tmp_path / "out", tmp_path / "plain"), decoded_model(model, name)
    assert torch.equal(logits(expected), logits(model))
    if recipe == "nvfp4":
        with torch.no_grad():
            for key, value in with_joined_scales(model).items():
                expected.get_parameter(key).copy_(value)
    assert_same_model(found, expected)


def with_joined_scales(model: nn.Module) -> dict[str, Tensor]:
    """Weights of layers that servers join, by the definition: one FP32 scale, those of blocks in E4M3 for it."""
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    found, changed = {}, []
    for path, module in model.named_modules():
        for keys in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            weights = {f"{path}.{key}.weight": getattr(module, key).weight for key in keys if hasattr(module, key)}
            scales = [float(weight.components["tensor_scale"]) for weight in weights.values()]
            if not scales:
                continue
            common = scales[0]  # of the first, which is the largest here
            while common < max(scales):
                common *= 2
            for (key, weight), scale in zip(weights.items(), scales, strict=True):
                steps = weight.components["scale"].view(torch.float8_e4m3fn).float() * scale / common
                packed = weight.components["data"].int()
                elements = levels[torch.stack([packed & 15, packed >> 4], -1).flatten(1)]
                steps = steps.to(torch.float8_e4m3fn).float().repeat_interleave(16, 1) * common
                found[key] = (elements * steps).bfloat16()
                changed += [key] if not torch.equal(found[key], weight.dequantize()) else []
    assert changed and not any(key.endswith(("q_proj.weight", "gate_proj.weight")) for key in changed)
    return found


@EACH
@ALL
def test_vllm_takes_every_tensor_by_name(name: str, recipe: str, layout: str, tmp_path: Path) -> None:
    """Or says that it does not: there are no kernels for blocks within a row, but those of MXFP8 and NVFP4."""
    saved(quantized_language_model(name, recipe, train=False), tmp_path, layout)
    if recipe == "rows" or (recipe, layout) == ("mxfp8", "fp8"):
        with pytest.raises(vllm_rules.Refused, match=r"no kernel for blocks of|no scheme for"):
            vllm_rules.check(tmp_path)
        return
    found = vllm_rules.check(tmp_path)
    kind = {"current": "channel", "tiles": "block"}.get(recipe, recipe)
    plain = {layer for layer, own in found.items() if own == "plain"}
    experts = {layer for layer in found if layer.endswith("experts")} if recipe == "tiles" else set()
    routers = {layer for layer in found if layer.endswith("gate")}
    head = {"lm_head"} & {*found} if recipe == "tiles" else set()
    assert plain == {"model.embed_tokens"} | experts | routers | head and set(found.values()) == {kind, "plain"}


@pytest.mark.parametrize("plain", ["q_proj", "experts", "lm_head", "mlp"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "fp8"])
def test_vllm_knows_what_is_plain(plain: str, layout: str, tmp_path: Path) -> None:
    """A layer that it joins with others must be as these."""
    name, recipe = ("mixtral", "current" if layout == "compressed-tensors" else "tiles")
    name = "llama" if plain == "mlp" else name
    model = language_model(name)
    quantize_model_(model, RECIPES[recipe], lambda module, path: is_linear(module) and plain not in path)
    saved(model, tmp_path, layout)
    if plain == "q_proj":
        with pytest.raises(vllm_rules.Refused, match="qkv_proj: parts of a joined layer differ"):
            vllm_rules.check(tmp_path)
    else:
        found = vllm_rules.check(tmp_path)
        assert all(kind == "plain" for layer, kind in found.items() if plain in layer)
        assert found["model.layers.1.self_attn.qkv_proj"] != "plain"
    assert_same_model(loaded(tmp_path, layout), model)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def save_sharded(names: list[str], folder: str) -> None:
    for name in names:
        model = quantized_language_model(name, "nvfp4", train=False)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh_of("fsdp"))
        save_quantized_safetensors(fully_shard(model, mesh=mesh_of("fsdp")), f"{folder}/{name}")


@pytest.mark.parametrize("ranks", [3])
def test_ranks_change_no_bit_and_no_name(ranks: int, tmp_path: Path) -> None:
    """Of experts that transformers writes one by one, and of scales that layers share."""
    names = ["mixtral", "llama-tied"]
    distributed.run(ranks, save_sharded, names, str(tmp_path), timeout=200)
    for name in names:
        saved(quantized_language_model(name, "nvfp4", train=False), tmp_path / "whole" / name, "compressed-tensors")
        actual, expected = (
            {key: value.view(torch.uint8) for key, value in sorted(read(folder / name).items())}
            for folder in (tmp_path, tmp_path / "whole")
        )
        assert_same(actual, expected)
        assert quantization(tmp_path / name) == quantization(tmp_path / "whole" / name)


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["compressed-tensors", "fp8"])
def test_what_is_plain_has_all_its_names(layout: str, tmp_path: Path) -> None:
    """In the model, and in files."""
    saved(quantized_language_model("qwen3_moe-tied", "tiles"), tmp_path / "tied", layout)
    saved(quantized_language_model("mixtral", "tiles"), tmp_path / "mixtral", layout)
    key = "ignore" if layout == "compressed-tensors" else "modules_to_not_convert"
    found, mixtral = ({*quantization(tmp_path / folder)[key]} for folder in ("tied", "mixtral"))
    assert found >= {"model.embed_tokens", "lm_head", "model.layers.1.mlp.gate", "model.layers.1.mlp.experts"}
    assert mixtral >= {"model.layers.1.mlp.gate", "model.layers.1.block_sparse_moe.gate", "model.layers.0.mlp.experts"}
    expert = "model.layers.0.block_sparse_moe.experts.3.w1"
    assert (
        expert in mixtral if layout == "fp8" else any(re.match(name[3:], expert) for name in mixtral if "re:" in name)
    )


def test_wrappers_change_no_name(tmp_path: Path) -> None:
    """Those of torch.compile: of the model, and of a layer."""
    model = saved(quantized_language_model("llama-tied", "mxfp8"), tmp_path / "bare", "compressed-tensors")
    model.model.layers[0] = torch.compile(model.model.layers[0])
    wrapped = torch.compile(model)
    assert any("_orig_mod" in name for name, _ in wrapped.named_modules())
    model.config.save_pretrained(tmp_path / "wrapped")
    save_quantized_safetensors(wrapped, tmp_path / "wrapped")
    bare, found = read(tmp_path / "bare"), read(tmp_path / "wrapped")
    assert {*bare} == {*found} and all(torch.equal(found[name], value) for name, value in bare.items())
    assert quantization(tmp_path / "bare") == quantization(tmp_path / "wrapped")


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_names_that_transformers_does_not_tie_are_all_written(recipe: str, tmp_path: Path) -> None:
    model = language_model("llama")  # whose configuration says that they are not tied
    model.lm_head.weight = model.model.embed_tokens.weight
    quantize_model_(model, RECIPES[recipe], every_linear)
    saved(model.eval(), tmp_path, "compressed-tensors")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= {*read(tmp_path)}
    assert_same_model(loaded(tmp_path, "compressed-tensors"), model)
    again = language_model("llama", seed=1)
    load_quantized_safetensors(again, tmp_path)
    assert_same_model(again.eval(), model)


def test_masters_have_the_names_that_transformers_gives_them(tmp_path: Path) -> None:
    model = quantized_language_model("mixtral", "current", train=False)
    model.lm_head.weight = model.model.embed_tokens.weight  # unlike what its configuration says
    optimizer = FusedAdam(model.parameters())
    save_master_safetensors(model, optimizer, tmp_path / "masters")
    model.config.save_pretrained(tmp_path / "masters")
    found = weights_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "masters", dtype=torch.float32))
    masters = optimizer.master_state_dict(model)
    masters["lm_head.weight"] = masters["model.embed_tokens.weight"]
    assert {*found} == {*masters} and all(torch.equal(found[name], value) for name, value in masters.items())
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in read(tmp_path / "masters")


def test_layers_of_several_recipes_are_told_apart(tmp_path: Path) -> None:
    """Experts by a pattern of names: transformers has no modules of these names, files have."""
    model = quantize_model_(
        language_model("mixtral"), RECIPES["current"], lambda m, path: "attn" in path and is_linear(m)
    )
    quantize_model_(model, RECIPES["mxfp8"], param_filter=lambda param, _: param.dim() == 3)
    saved(model.eval(), tmp_path / "out", "compressed-tensors")
    groups = {group["format"]: group["targets"] for group in quantization(tmp_path / "out")["config_groups"].values()}
    assert len(groups["float-quantized"]) == 8 and len(groups["mxfp8-quantized"]) == 6
    assert_same_model(decompressed(tmp_path / "out", tmp_path / "plain"), model)
    found = vllm_rules.check(tmp_path / "out")
    assert found["model.layers.0.block_sparse_moe.experts"] == "mxfp8" and found["lm_head"] == "plain"


# --- read again, and refused --------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
def test_models_are_read_again(name: str, recipe: str, layout: str, tmp_path: Path) -> None:
    """Into the same recipe and into plain weights; also what transformers has written itself. Heads may be plain."""
    readers = "servers" if name == "mixtral" else "transformers"
    model = saved(quantized_language_model(name, recipe), tmp_path / "out", layout, readers=readers)
    again, plain = quantized_language_model(name, recipe, train=False), language_model(name, seed=1)
    for each in (again, plain):
        load_quantized_safetensors(each, tmp_path / "out")
    for key, value in weights_of(again).items() if recipe != "nvfp4" else ():
        if has_experts(name) and key == "lm_head.weight":
            torch.testing.assert_close(value, weights_of(model)[key], rtol=2**-3, atol=2**-9 * float(value.abs().max()))
        else:
            assert torch.equal(value, weights_of(model)[key]), key
    decoded_model(model, name).save_pretrained(tmp_path / "plain")
    load_quantized_safetensors(plain, tmp_path / "plain")
    assert_same_model(plain.eval(), model)


def test_experts_in_nvfp4_are_for_servers(tmp_path: Path) -> None:
    model = quantized_language_model("mixtral", "nvfp4", train=False)
    text = "transformers 5.23.0 decodes experts beside NVFP4 without their FP32 scale; vLLM and SGLang read them"
    with pytest.raises(ValueError, match=rf"q_proj.weight: {text}: use readers='servers'"):
        save_quantized_safetensors(model, tmp_path, readers="transformers")
    with pytest.warns(UserWarning, match=rf"gate_up_proj: {text}"):
        save_quantized_safetensors(model, tmp_path)


def test_adapters_are_merged_before(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(language_model("llama"), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"^the model, a PeftModel.*, has adapters.* merge_and_unload"):
        save_quantized_safetensors(model, tmp_path)
    with pytest.raises(ValueError, match="has adapters"):
        save_quantized_safetensors(model.get_base_model(), tmp_path)
    merged = quantize_model_(model.merge_and_unload(), RECIPES["mxfp8"]).eval()
    assert_same_model(loaded(saved_to(merged, tmp_path), "compressed-tensors"), merged)


def saved_to(model: nn.Module, folder: Path) -> Path:
    saved(model, folder, "compressed-tensors")
    return folder


def test_a_file_that_would_be_loaded_in_place_of_others_is_refused(tmp_path: Path) -> None:
    model = quantized_language_model("llama", "mxfp8", train=False)
    language_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.safetensors would be loaded in place of what is written: remove it"):
        save_quantized_safetensors(model, tmp_path)
    assert not list(tmp_path.glob("*-of-*"))


def test_codes_are_not_taken_for_values(tmp_path: Path) -> None:
    model = saved(quantized_language_model("llama", "mxfp8"), tmp_path, "compressed-tensors")
    text = r"q_proj.weight: the state dict has codes and scales.*load_quantized_safetensors"
    with pytest.raises(ValueError, match=text):
        model.load_state_dict(read(tmp_path), strict=False)
