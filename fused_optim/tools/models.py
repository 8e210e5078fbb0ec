"""The parameters of models that are not there: names and shapes from configs and from safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fused_optim.checkpoint.reading.opening import open_source

Named = list[tuple[str, tuple[int, ...]]]
_ROW = 4096


_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST = 1e15  # parameters
_LARGEST = 1 << 24  # of a config's sizes


def number_of(text: str) -> float:
    """A number of parameters: "8B", "350m", "8e9". Raises ValueError."""
    unit = _UNITS.get(text[-1:].upper())
    try:
        count = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        count = 0.0
    if not 1.0 <= count <= _MOST:
        raise ValueError(
            f"params: expected a number of parameters up to {_MOST:g}, such as 8B, 350M or 8e9, got {text}"
        )
    return count


def of_number(count: float) -> Named:
    """One matrix of so many elements, up to a row of 4096."""
    rows = max(1, round(count / _ROW))
    return [("all", (rows, _ROW))]


def of_safetensors(path: str) -> Named:
    """Of safetensors files or their index, from the files' headers."""
    found = open_source(path)
    if found.kind != "safetensors":
        raise ValueError(f"{path}: expected safetensors files or their index, found {found.kind}")
    return [(key, info.shape) for key, info in found.entries.items() if info is not None]


def of_config(path: str) -> Named:
    """Of Hugging Face's ``config.json``: decoders like Llama here, whatever else by transformers where it is installed.

    Raises ValueError for a model that neither knows.
    """
    try:
        config = json.loads(Path(path).read_bytes())
        kind = str(config["model_type"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no config of a model ({type(error).__name__}: {error})") from error
    if kind in _DECODERS:
        try:
            return list(_decoder(config))
        except KeyError as error:
            raise ValueError(f"{path} lacks {error}, which a {kind} model has") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if find_spec("transformers") is None:
        known = ", ".join(_DECODERS)
        raise ValueError(f"{path}: known without transformers are {known}, not {kind}: install transformers")
    return _by_transformers(path)


def _by_transformers(path: str) -> Named:
    import transformers

    where = Path(path).parent if Path(path).name == "config.json" else path
    try:
        config = transformers.AutoConfig.from_pretrained(where)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ValueError(f"{path}: transformers makes no model of it ({type(error).__name__}: {error})") from error
    return [(name, tuple(param.shape)) for name, param in model.named_parameters()]


# Biases of the projections of queries, keys and values by default; norms of queries and keys.
_DECODERS: dict[str, tuple[bool, bool]] = {
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}


def _size(config: dict[str, Any], key: str) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        raise ValueError(f"{key}: expected a whole number from 1 to {_LARGEST:,}, got {value!r}")
    return value


def _decoder(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    biased, normed = _DECODERS[config["model_type"]]
    width, inner, vocabulary = (_size(config, key) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, layers = _size(config, "num_attention_heads"), _size(config, "num_hidden_layers")
    keys = heads if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads")
    size = width // heads if config.get("head_dim") is None else _size(config, "head_dim")
    if not size:
        raise ValueError(f"num_attention_heads: expected at most hidden_size, {width}, got {heads}")
    biased = config.get("attention_bias", biased) if config["model_type"] != "qwen2" else biased
    yield "model.embed_tokens.weight", (vocabulary, width)
    for layer in range(layers):
        first = f"model.layers.{layer}"
        for name, rows in {"q": heads * size, "k": keys * size, "v": keys * size}.items():
            yield f"{first}.self_attn.{name}_proj.weight", (rows, width)
            if biased:
                yield f"{first}.self_attn.{name}_proj.bias", (rows,)
        yield f"{first}.self_attn.o_proj.weight", (width, heads * size)
        if config.get("attention_bias"):
            yield f"{first}.self_attn.o_proj.bias", (width,)
        for name in ("q_norm", "k_norm") if normed else ():
            yield f"{first}.self_attn.{name}.weight", (size,)
        for name, shape in {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}.items():
            yield f"{first}.mlp.{name}_proj.weight", shape
            if config.get("mlp_bias"):
                yield f"{first}.mlp.{name}_proj.bias", shape[:1]
        yield f"{first}.input_layernorm.weight", (width,)
        yield f"{first}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (vocabulary, width)
