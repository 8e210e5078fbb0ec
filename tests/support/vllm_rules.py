"""What vLLM 0.33.0 takes of a checkpoint, read from its source, as rules of our own that files are held to by name.

Where they are, below vllm/model_executor: layers/quantization/compressed_tensors (which layers are quantized, and how:
compressed_tensors.py, utils.py; what parameters these have: schemes/, compressed_tensors_moe/); fp8.py and
utils/quant_utils.py beside it (the layout "fp8"); layers/fused_moe/routed_experts.py (names of experts); llama.py,
qwen3.py, qwen3_moe.py and mixtral.py in models/ (which layers are joined, what they are called).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

BLOCK = [128, 128]
Group = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """A layer of the server: the class that it is there, its name, and those of the parts that files have, by shape."""

    kind: str
    name: str
    parts: dict[str, tuple[int, int]]
    joined: bool = False


class Refused(Exception):
    """vLLM would raise an error, or take a tensor for something else."""


def layers_of(config: dict[str, Any]) -> Iterator[Layer]:
    """Of Llama, Qwen3, Qwen3-MoE and Mixtral, as config.json describes them."""
    hidden, experts = config["hidden_size"], config.get("num_local_experts") or config.get("num_experts")
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    sizes = {"q": config["num_attention_heads"] * head, "k": config["num_key_value_heads"] * head}
    sizes["v"] = sizes["k"]
    yield Layer("VocabParallelEmbedding", "model.embed_tokens", {"model.embed_tokens": (config["vocab_size"], hidden)})
    if not config["tie_word_embeddings"]:
        yield Layer("ParallelLMHead", "lm_head", {"lm_head": (config["vocab_size"], hidden)})
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        parts = {f"{attention}.{key}_proj": (rows, hidden) for key, rows in sizes.items()}
        yield Layer("QKVParallelLinear", f"{attention}.qkv_proj", parts, joined=True)
        yield Layer("RowParallelLinear", f"{attention}.o_proj", {f"{attention}.o_proj": (hidden, sizes["q"])})
        if not experts:
            width = config["intermediate_size"]
            parts = {f"{layer}.mlp.{key}_proj": (width, hidden) for key in ("gate", "up")}
            yield Layer("MergedColumnParallelLinear", f"{layer}.mlp.gate_up_proj", parts, joined=True)
            yield Layer("RowParallelLinear", f"{layer}.mlp.down_proj", {f"{layer}.mlp.down_proj": (hidden, width)})
            continue
        mixtral = config["model_type"] == "mixtral"
        block = f"{layer}.block_sparse_moe" if mixtral else f"{layer}.mlp"
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        width = config["intermediate_size"] if mixtral else config["moe_intermediate_size"]
        shapes = dict(zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True))
        yield Layer("Router" if mixtral else "GateLinear", f"{block}.gate", {f"{block}.gate": (experts, hidden)})
        own = {f"{block}.experts.{e}.{key}": shape for e in range(experts) for key, shape in shapes.items()}
        yield Layer("RoutedExperts", f"{block}.experts", own)


# --- which layers are quantized -----------------------------------------------------------------------------------


def matches(name: str, patterns: list[str]) -> bool:
    """Exact names, or after ``re:`` what a name begins with."""
    return any(re.match(p[3:], name) if p.startswith("re:") else p == name for p in patterns)


def ignored(layer: Layer, names: list[str]) -> bool:
    """A joined layer is plain where all of its parts are, and refused where some are."""
    if not layer.joined or matches(layer.name, names):
        return matches(layer.name, names)
    of_parts = {matches(part, names) for part in layer.parts}
    if len(of_parts) > 1:
        raise Refused(f"{layer.name}: parts of a joined layer differ")
    return of_parts.pop()


def group_of(layer: Layer, config: dict[str, Any]) -> Group | None:
    """The group of a compressed-tensors configuration that a layer falls into: by name, by parts, by its class."""
    if layer.kind == "Router":  # built without a configuration
        return None
    if layer.kind == "RoutedExperts":  # asked for by the names of the first expert, which must agree
        first = [part for part in layer.parts if part.startswith(f"{layer.name}.0.")]
        found = [group_of(Layer("Linear", part, {}), config) for part in first]
        if any(each is not found[0] for each in found):
            raise Refused(f"{layer.name}: several schemes")
        return found[0]
    if ignored(layer, config["ignore"]):
        return None
    groups = [(target, group) for group in config["config_groups"].values() for target in group["targets"]]
    for target, group in groups:
        if matches(layer.name, [target]):
            return group
    of_parts = [next((g for t, g in groups if matches(part, [t])), None) for part in layer.parts if layer.joined]
    if of_parts and all(of_parts):
        return of_parts[0]
    return next((group for target, group in groups if target.lower() in layer.kind.lower()), None)


# --- what parameters they have ------------------------------------------------------------------------------------

Parameters = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def scheme(layer: Layer, group: Group) -> str:
    """What a layer is quantized as."""
    weights, inputs = group["weights"], group["input_activations"]
    kind = weights["num_bits"], weights["strategy"], weights.get("group_size")
    if kind == (4, "tensor_group", 16) and inputs is None:
        return "nvfp4"
    if kind == (8, "group", 32) and weights.get("scale_dtype") == "torch.uint8":
        return "mxfp8"
    if group["format"] != "float-quantized" or weights["strategy"] not in ("tensor", "channel", "block"):
        raise Refused(f"{layer.name}: no scheme for {kind}")
    pair = weights["strategy"], inputs["strategy"]
    if (
        layer.kind == "RoutedExperts"
        and pair[0] != "block"
        and pair not in (("channel", "token"), ("tensor", "tensor"))
    ):
        raise Refused(f"{layer.name}: no scheme of experts for {pair}")
    if weights["strategy"] == "block" and weights["block_structure"] != BLOCK:
        raise Refused(f"{layer.name}: no kernel for blocks of {weights['block_structure']}")
    return weights["strategy"]


def parameters(name: str, shape: tuple[int, int], kind: str, scale: str = "weight_scale") -> Parameters:
    """By their names in files."""
    rows, columns = shape
    codes = (torch.float8_e4m3fn, shape)
    found: dict[str, Parameters] = {
        "nvfp4": {
            "weight_packed": (torch.uint8, (rows, columns // 2)),
            "weight_scale": (torch.float8_e4m3fn, (rows, columns // 16)),
            "weight_global_scale": (torch.float32, (1,)),
        },
        "mxfp8": {"weight": codes, scale: (torch.uint8, (rows, columns // 32))},
        "channel": {"weight": codes, scale: (torch.float32, (rows, 1))},
        "tensor": {"weight": codes, scale: (torch.float32, (1,))},
        "block": {"weight": codes, scale: (torch.float32, (-(-rows // 128), -(-columns // 128)))},
        "plain": {"weight": (torch.bfloat16, shape)},
    }
    return {f"{name}.{key}": value for key, value in found[kind].items()}


def kind_in_fp8(layer: Layer, config: dict[str, Any]) -> str:
    """In the layout "fp8": linear layers and experts alone, and names are exact."""
    names = config["modules_to_not_convert"]
    if config["weight_block_size"] != BLOCK:
        raise Refused(f"no kernel for blocks of {config['weight_block_size']}")
    if layer.kind == "RoutedExperts":
        plain = any(layer.name in name for name in names if "experts" in name)
    else:
        plain = "Linear" not in layer.kind or ignored(layer, names)
    return "plain" if plain else "block"


def check(folder: Path) -> dict[str, str]:
    """Hold a folder to the rules: as what each layer is loaded. Raises Refused, or AssertionError by name."""
    config = json.loads((folder / "config.json").read_text())
    quantization = config["quantization_config"]
    files: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        files |= load_file(file)
    found, expected = {}, {}
    for layer in layers_of(config):
        if quantization["quant_method"] == "fp8":
            found[layer.name], scale = kind_in_fp8(layer, quantization), "weight_scale_inv"
        else:
            group, scale = group_of(layer, quantization), "weight_scale"
            found[layer.name] = "plain" if group is None else scheme(layer, group)
        for part, shape in layer.parts.items():
            expected |= parameters(part, shape, found[layer.name], scale)
        _check_joined(layer, found[layer.name], files)
    actual = {name: (value.dtype, tuple(value.shape)) for name, value in files.items() if not _is_vector(name)}
    assert actual == expected, {name: (actual.get(name), expected.get(name)) for name in actual.keys() | expected}
    return found


def _is_vector(name: str) -> bool:
    return "norm" in name


def _check_joined(layer: Layer, kind: str, files: dict[str, Tensor]) -> None:
    """One FP32 scale of NVFP4 is taken for all parts of a joined layer; blocks must not go over from part to part."""
    for parts in _joined_parts(layer):
        if kind == "nvfp4" and len({float(files[f"{part}.weight_global_scale"]) for part in parts}) > 1:
            raise Refused(f"{layer.name}: parts have several global scales")
        if kind == "block" and any(layer.parts[part][0] % 128 for part in parts[:-1]):
            raise Refused(f"{layer.name}: blocks go over parts")


def _joined_parts(layer: Layer) -> list[list[str]]:
    if layer.kind == "RoutedExperts":
        experts = {part.rpartition(".")[0] for part in layer.parts}
        return [[part for part in layer.parts if part.startswith(f"{e}.")][:2] for e in sorted(experts)]
    return [list(layer.parts)] if layer.joined else []
