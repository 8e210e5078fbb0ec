"""``summary()`` says what each parameter really has; choices without effect warn once; ``repr()`` is short."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distributed
from cases import FORMATS, MASTERS, SHAPES, Format, Master, values
from distributed import mesh, shard
from fused_optim.compat import transformer_engine
from fused_optim.options.table import IMPLEMENTATIONS, OF_SETTINGS
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from peers import FusedAdam, FusedAdamW

INT8 = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}


def model(dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> nn.Module:
    """Matrices with blocks of 128 and without, vectors, and one that is frozen."""
    built = nn.Module()
    for i, (name, shape) in enumerate({"wide": (6, 256), "odd": (5, 50), "bias": (7,), "frozen": (4, 128)}.items()):
        param = nn.Parameter(values(shape, dtype, device, seed=i), requires_grad=name != "frozen")
        built.register_parameter(name, param)
    return built


def step(optimizer: torch.optim.Optimizer) -> None:
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()


def state_bytes(optimizer: FusedAdam) -> int:
    """Of all tensors that are kept for states."""
    tensors = [state for states in optimizer.state.values() for state in states.values()]
    tensors += [optimizer.store.layouts[param].scales for param in optimizer.state]
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def warned() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]


# --- the summary --------------------------------------------------------------------------------------------------


def test_the_summary_counts_what_is_there(device: str) -> None:
    optimizer = FusedAdamW(list(model(device=device).named_parameters()), store_param_remainders=True, **INT8)
    before = optimizer.summary()
    assert not optimizer.state, "a summary creates nothing"
    step(optimizer)
    summary = optimizer.summary()
    assert summary == before and json.loads(json.dumps(summary)) == summary
    assert summary["bytes"] == optimizer.state_bytes() == state_bytes(optimizer)
    wide, other = summary["formats"]
    master, backend = "16-bit remainder", "cuda" if device == "cuda" else "cpu"
    common = {
        "parameter": "bfloat16",
        "master": master,
        "backend": backend,
        "device": str(optimizer.store.params[0].device),
        "states": str(optimizer.store.params[0].device),
    }
    scales = 2 * 6 * 2 * 4
    assert wide == {
        **common,
        "exp_avg": "int8",
        "exp_avg_sq": "int8",
        "parameters": 1,
        "elements": 1536,
        "bytes": 4 * 1536 + scales,
    }
    assert other == {
        **common,
        "exp_avg": "float32",
        "exp_avg_sq": "float32",
        "parameters": 2,
        "elements": 257,
        "bytes": 10 * 257,
    }
    assert summary["frozen"] == {"parameters": 1, "elements": 512}
    assert (summary["parameters"], summary["elements"]) == (3, 1536 + 257)
    on_host = device == "cpu"
    assert (summary["host_bytes"], summary["device_bytes"]) == (
        (summary["bytes"], 0) if on_host else (0, summary["bytes"])
    )


def test_fallbacks_have_their_reasons() -> None:
    built = model()
    built.norm = nn.Parameter(torch.ones(8))
    optimizer = FusedAdamW(list(built.named_parameters()), store_param_remainders=True, exp_avg_dtype="int8")
    found = {(each["what"], *each["examples"]): each for each in optimizer.summary()["fallbacks"]}
    assert set(found) == {("exp_avg", "odd"), ("exp_avg", "bias", "norm"), ("master_param", "norm")}
    rows, vector, master = found["exp_avg", "odd"], found["exp_avg", "bias", "norm"], found["master_param", "norm"]
    assert rows["reason"] == "no block of 128, 64, 32 elements divides the rows of all shards"
    assert vector["reason"] == "it has one dim and fewer than 4096 elements" and vector["parameters"] == 2
    assert (master["asked"], master["actual"]) == ("16-bit remainder", "none")
    assert "FP32 parameter is its own master" in master["reason"]


@pytest.mark.parametrize("master", MASTERS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_format_and_master(fmt: Format, master: Master) -> None:
    """Bytes and dtypes of all shapes are those of the tensors that are there."""
    params = [nn.Parameter(values(shape.shape, master.param_dtype, "cpu", seed=1)) for shape in SHAPES]
    optimizer = FusedAdam(params, exp_avg_dtype=fmt.dtype, exp_avg_sq_dtype=fmt.dtype, **master.options)
    before = optimizer.summary()
    optimizer.initialize_state()
    summary = optimizer.summary()
    assert summary == before and summary["bytes"] == state_bytes(optimizer)
    blocked = [shape for shape in SHAPES if shape.block or not fmt.scaled]
    counted = sum(row["parameters"] for row in summary["formats"] if row["exp_avg"] == str(fmt))
    assert counted == len(blocked) and sum(row["parameters"] for row in summary["formats"]) == len(SHAPES)


def test_the_table_can_be_read() -> None:
    optimizer = FusedAdamW(list(model().named_parameters()), store_param_remainders=True, **INT8)
    lines = str(optimizer.summary()).splitlines()
    assert lines[0] == "FusedAdamW: 3 parameters of 1,793 elements on this rank, 8.81 kB of states"
    assert lines[1].split()[:5] == ["parameter", "exp_avg", "exp_avg_sq", "master", "backend"]
    assert " ".join(lines[2].split()) == "bfloat16 int8 int8 16-bit remainder cpu cpu 1 1,536 6.24 kB"
    assert any("exp_avg float32 instead of int8 for 1 parameter (odd): no block of 128" in line for line in lines)
    assert lines[-2:] == [
        "  no states for 1 parameter of 512 elements, which are frozen",
        "  0 B on devices, 8.81 kB in host memory",
    ]


def test_the_backend_and_why(use_backend: Any) -> None:
    use_backend("torch")
    summary = FusedAdamW(list(model().named_parameters())).summary()
    assert {row["backend"] for row in summary["formats"]} == {"torch"}
    (fallback,) = summary["fallbacks"]
    assert (fallback["what"], fallback["actual"], fallback["reason"]) == (
        "backend",
        "torch",
        "FUSED_OPTIM_BACKEND=torch",
    )


def test_quantized_parameters_are_named() -> None:
    layers = nn.Sequential(nn.Linear(128, 64, bias=False, dtype=torch.bfloat16))
    quantize_model_(layers, MXFP8BlockScaling())
    optimizer = FusedAdamW(layers.parameters(), store_param_remainders=True)
    (row,) = optimizer.summary()["formats"]
    assert (row["parameter"], row["master"], row["bytes"]) == ("QuantizedTensor", "float32", 12 * 128 * 64)
    assert "quantized" in optimizer.summary()["fallbacks"][0]["reason"]


def summary_of_shards() -> dict[str, Any]:
    full = values((5, 256), torch.bfloat16, "cpu", seed=1)
    param = nn.Parameter(shard(full, mesh(), [torch.distributed.tensor.Shard(0)]))
    return FusedAdamW([param], **INT8).summary()


def test_shards_are_counted_where_they_are() -> None:
    found = distributed.run(2, summary_of_shards)
    assert [summary["elements"] for summary in found] == [3 * 256, 2 * 256]
    assert [summary["bytes"] for summary in found] == [rows * (256 * 4 + 2 * 2 * 4) for rows in (3, 2)]


# --- choices without effect ---------------------------------------------------------------------------------------


def test_remainders_without_bf16_parameters_warn_once() -> None:
    with warned() as texts:
        optimizer = FusedAdamW(model(torch.float32).parameters(), store_param_remainders=True)
        for _ in range(2):
            step(optimizer)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        step(optimizer)
    assert len(texts) == 1
    assert "store_param_remainders=True has no effect: none of the 3 parameters" in texts[0]
    assert "float32" in texts[0] and "mixed_precision='no'" in texts[0]


@pytest.mark.parametrize(
    "options", [{"store_param_remainders": True}, {"master_weight_dtype": torch.float16}, {}], ids=str
)
def test_choices_with_effect_do_not_warn(options: dict[str, Any]) -> None:
    """Also where some parameters are others; and parameters may be replaced after the optimizer was built."""
    built = model(torch.float32)
    with warned() as texts:
        optimizer = FusedAdamW(built.parameters(), **options)
        wide = nn.Parameter(built.wide.detach().bfloat16())
        optimizer.param_groups[0]["params"][0] = wide
        step(optimizer)
    assert not texts


def test_formats_without_effect_warn() -> None:
    """In one warning with all others."""
    params = [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(7))]
    with warned() as texts:
        step(FusedAdamW(params, store_param_remainders=True, **INT8))
    assert len(texts) == 1 and "exp_avg_dtype and exp_avg_sq_dtype without effect: all of the 2 parameters" in texts[0]
    with warned() as texts:
        step(FusedAdamW([*params, nn.Parameter(torch.ones(3, 128))], **INT8))
        step(FusedAdamW([{"params": params[:1], "exp_avg_dtype": torch.float32}, {"params": params[1:]}], **INT8))
    assert [text.split()[0] for text in texts] == ["exp_avg_sq_dtype"]


def test_groups_that_ask_for_capture_warn() -> None:
    """The key that torch.compile writes to groups is dropped, a user's is not."""
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
    with warned() as texts:
        step(FusedAdamW([{"params": [param], "capturable": True} for param in params]))
    assert len(texts) == 1 and texts[0].startswith("param group 0: capturable has no effect there")


# An option, its value in one param group, the same as the optimizer's spelled otherwise, and another's.
OF_THE_WHOLE: dict[str, tuple[Any, Any]] = {
    "capturable": ("false", True),
    "master_weights": ("true", False),
    "master_weight_dtype": ("fp32", "fp16"),
    "store_param_remainders": (None, True),
    "param_remainder_bits": ("16", 8),
    "master_bits": ("32", 24),
    "stochastic_rounding": (1, False),
    "seed": ("0", 1),
    "use_decoupled_grad": ("False", True),
    "decoupled_lr": (0, True),
    "skip_nonfinite": (0, True),
    "unscales_gradients": ("True", False),
    "offload_states": (False, True),
    "offload_fraction": ("1.0", 0.5),
    "checkpoint_format": ("unscaled", "native"),
    "checkpoint_device": (None, "cpu"),
    "set_grad_none": (None, True),
}


def test_each_option_of_the_whole_optimizer_in_a_group_warns() -> None:
    assert OF_THE_WHOLE.keys() == OF_SETTINGS.keys() - IMPLEMENTATIONS | {"master_bits"}
    for option, (same, other) in OF_THE_WHOLE.items():
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
        with warned() as texts:
            step(FusedAdamW([{"params": params[:1], option: same}, {"params": params[1:], option: other}]))
        assert len(texts) == 1 and texts[0].startswith(f"param group 1: {option} has no effect there"), (option, texts)
    with warned() as texts:
        step(FusedAdamW([{"params": params, "master_bits": 24}], master_bits=24))
        step(FusedAdamW([{"params": params, "master_bits": 0}], master_bits=0))
    assert not texts


def test_drop_in_classes_that_drop_remainders_do_not_warn() -> None:
    """TransformerEngine's takes them to have no effect without masters."""
    with warned() as texts:
        step(transformer_engine.FusedAdam(model().parameters(), store_param_remainders=True))
    assert not texts


# --- print(optimizer) -----------------------------------------------------------------------------------------------


def test_print_is_one_line(device: str) -> None:
    params: list[Tensor] = [nn.Parameter(torch.ones(2, 128, device=device)) for _ in range(40)]
    groups = [{"params": [param], "lr": 0.01 * i} for i, param in enumerate(params)]
    optimizer = FusedAdamW(groups, exp_avg_dtype="int8", store_param_remainders=True, weight_decay=0.1)
    text = repr(optimizer)
    assert str(optimizer) == text and len(text) < 300 and "\n" not in text and "tensor(" not in text
    assert text.startswith("FusedAdamW(40 parameters in 40 groups, lr=0 | 0.01 | 0.02 | ..., betas=(0.9, 0.999)")
    assert "weight_decay=0.1" in text and "exp_avg_dtype=int8" in text and "masters=16-bit remainder" in text
    rate = torch.tensor(0.25, device=device)
    assert f"lr={'0.25' if device == 'cpu' else 'tensor on cuda:0'}," in repr(FusedAdamW(params, lr=rate))
