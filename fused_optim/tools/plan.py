"""``python -m fused_optim plan``: bytes that a rank holds of a model, by format, beside torch.optim.AdamW's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_optim.adam import FusedAdamW
from fused_optim.formats.dtypes import as_dtype
from fused_optim.memory.layout import MASTER
from fused_optim.muon import ALGORITHM, FusedMuon
from fused_optim.muon_groups import is_muons_by_name
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import some_of
from fused_optim.state.summary import aligned, shown_bytes
from fused_optim.tools.encoding import known_format
from fused_optim.tools.names import ALGORITHMS, MASTER_BITS, STATES

Named = list[tuple[str, tuple[int, ...]]]
PARTS = ("parameters", "gradients", "masters", "states")
_ROW = 4096
_MOST_RANKS = 1 << 20


class Plan(dict[str, Any]):
    """Numbers, texts, and lists and dicts of these; ``str()`` of it is a table.

    ``rows``: torch.optim.AdamW with parameters of this dtype and with FP32 ones, then our formats, the smallest first.
    Each has a ``name``, the ``bytes`` of rank 0 by part and in ``total``, and ``bytes_per_parameter``; ours also
    ``state_dtype`` and ``master_bits``. ``chosen``: the row that was asked for. ``fallbacks``: of that row, as in
    ``optimizer.summary()``.
    """

    def __str__(self) -> str:
        ranks = f"{self['world_size']:,} rank{'s' * (self['world_size'] > 1)}"
        table = [("", "", *PARTS, "total", "B/param")]
        for row in self["rows"]:
            sizes = [shown_bytes(row["bytes"][part]) for part in (*PARTS, "total")]
            mark = "*" if row["name"] == self["chosen"]["name"] else ""
            table.append((mark, row["name"], *sizes, f"{row['bytes_per_parameter']:.2f}"))
        counts = f"{self['parameters']:,} parameters of {self['elements']:,} elements"
        lines = [
            f"{counts}, {self['param_dtype']}, on {ranks}",
            "Bytes of rank 0 without activations; * the choice that was asked for:",
        ]
        lines += aligned(table)
        for fallback in self["fallbacks"]:
            names = ", ".join(fallback["examples"]) + ", ..." * (fallback["parameters"] > len(fallback["examples"]))
            choice = f"{fallback['what']} {fallback['actual']} instead of {fallback['asked']}"
            lines.append(f"{choice} for {fallback['parameters']:,} parameters ({names}): {fallback['reason']}")
        return "\n".join(lines)


def plan(
    shapes: Iterable[tuple[str, Sequence[int]]],
    *,
    world_size: int = 1,
    param_dtype: torch.dtype | str = torch.bfloat16,
    state_dtype: torch.dtype | str = "int8",
    master_bits: int = 32,
    algorithm: str = "adamw",
) -> Plan:
    """Plan for parameters of these names and shapes, cut by rows over ``world_size`` ranks, as FSDP2 cuts them.

    The first rank's shards, which are the largest, are made on the meta device and given to the optimizer itself: what
    it would allocate is what is counted. Gradients have the parameters' dtype. ``state_dtype``, ``master_bits``: the
    optimizer's. ``algorithm``: "adamw"; "muon": FusedMuon, with Muon for hidden matrices, as far as names tell them.

    Raises ValueError for what is not known.
    """
    dtype, states = as_dtype(param_dtype), known_format("state_dtype", state_dtype).name
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"param_dtype: expected float32, bfloat16 or float16, got {param_dtype}")
    if master_bits not in MASTER_BITS:
        raise ValueError(f"master_bits: expected 32 (exact FP32 masters), 24 or 0 (none), got {master_bits!r}")
    if type(world_size) is not int or not 1 <= world_size <= _MOST_RANKS:
        raise ValueError(f"world_size: expected a number from 1 to {_MOST_RANKS:,}, got {world_size!r}")
    whole = [(name, tuple(shape)) for name, shape in shapes]
    if not whole:
        raise ValueError("there are no parameters to plan for")
    params = [(name, _shard_of_rank_0(shape, world_size, dtype)) for name, shape in whole]
    muon = _names_under_muon(params, algorithm)
    bits = [32, *([24] if dtype == torch.bfloat16 else []), *([0] if dtype != torch.float32 else [])]
    choices = {(fmt, each): None for each in bits for fmt in (*STATES, states)} | {(states, master_bits): None}
    rows = [_row(_optimizer(params, muon, state_dtype=fmt, master_bits=each), fmt, each) for fmt, each in choices]
    rows.sort(key=lambda row: row["bytes"]["total"])
    optimizer = _optimizer(params, muon, state_dtype=states, master_bits=master_bits)
    return Plan(
        parameters=len(whole),
        elements=sum(torch.Size(shape).numel() for _, shape in whole),
        world_size=world_size,
        param_dtype=str(dtype).removeprefix("torch."),
        rows=[*(_torchs_row(params, each) for each in dict.fromkeys((dtype, torch.float32))), *rows],
        chosen=next(row for row in rows if (row["state_dtype"], row["master_bits"]) == (states, master_bits)),
        fallbacks=[each for each in optimizer.summary()["fallbacks"] if each["what"] != "backend"],
    )


def _shard_of_rank_0(shape: tuple[int, ...], world_size: int, dtype: torch.dtype) -> nn.Parameter:
    rows = [-(-size // world_size) for size in shape[:1]]
    return nn.Parameter(torch.empty((*rows, *shape[1:]), dtype=dtype, device="meta"))


def _names_under_muon(named: Sequence[tuple[str, Tensor]], algorithm: str) -> set[str]:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected {' or '.join(ALGORITHMS)}, got {algorithm!r}")
    if algorithm == "adamw":
        return set()
    names = [name for name, _ in named]
    choices = {name: is_muons_by_name(name, param.dim(), names) for name, param in named}
    if unknown := [name for name, is_muons in choices.items() if is_muons is None]:
        raise ValueError(f"cannot tell by name whether Muon or AdamW is for {some_of(unknown)}")
    return {name for name, is_muons in choices.items() if is_muons}


def _optimizer(named: Sequence[tuple[str, Tensor]], muon: set[str], **options: Any) -> ShardedOptimizer:
    if not muon:
        return FusedAdamW(named, **options)
    sorted_: dict[str, list[tuple[str, Tensor]]] = {"muon": [], "adamw": []}
    for name, param in named:
        sorted_["muon" if name in muon else "adamw"].append((name, param))
    groups = [{"params": own, ALGORITHM: kind} for kind, own in sorted_.items() if own]
    return FusedMuon(groups, experts=True, **options)


def _row(optimizer: ShardedOptimizer, state_dtype: str, master_bits: int) -> dict[str, Any]:
    held: Counter[str] = Counter()
    elements = 0
    for group in optimizer.store.groups:
        for param in group["params"]:
            sizes = optimizer.store.new_layout(param, group).nbytes
            masters = sizes.get(MASTER, 0)
            states = sum(sizes.values()) - masters
            held.update(parameters=param.nbytes, gradients=param.nbytes, masters=masters, states=states)
            elements += param.numel()
    name = f"{state_dtype}, {master_bits}-bit masters" if master_bits else f"{state_dtype}, no masters"
    return _counted(name, held, elements) | {"state_dtype": state_dtype, "master_bits": master_bits}


def _torchs_row(named: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> dict[str, Any]:
    """The row of torch.optim.AdamW, whose states have the parameters' dtype and which has no masters."""
    elements = sum(param.numel() for _, param in named)
    size = dtype.itemsize * elements
    name = f"torch AdamW, {str(dtype).removeprefix('torch.')} parameters"
    return _counted(name, {"parameters": size, "gradients": size, "states": 2 * size}, elements)


def _counted(name: str, held: dict[str, int], elements: int) -> dict[str, Any]:
    sizes = {part: held.get(part, 0) for part in PARTS}
    total = sum(sizes.values())
    return {"name": name, "bytes": sizes | {"total": total}, "bytes_per_parameter": total / max(1, elements)}


# --- shapes of models that are not there ------------------------------------------------------------------------------

_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST = 1e15  # parameters
_LARGEST = 1 << 24  # of a config's sizes


def number_of(text: str) -> float:
    """A number of parameters from text: "8B", "350m", "8e9". Raises ValueError."""
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


def shapes_of_size(count: float) -> Named:
    """The shape of one matrix with about ``count`` elements, in rows of 4096."""
    rows = max(1, round(count / _ROW))
    return [("all", (rows, _ROW))]


def shapes_of_config(path: str) -> Named:
    """Parameter shapes of Hugging Face's ``config.json``: decoders like Llama here, other models by transformers.

    Raises ValueError for a model that is unknown here if transformers is not installed or does not know it either.
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
