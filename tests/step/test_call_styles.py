"""How other libraries, their suites and their configs call Adam: each call works, and means what it means there.

Constructors and param groups take what configs say: names of dtypes, numbers as text, lists, switches of torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import peers
from cases import values
from distributed import same_bits
from fused_optim import FusedAdam, FusedAdamW, FusedLion, FusedMuon
from fused_optim.compat import apex, transformer_engine
from fused_optim.compat._common import PeersSettings
from fused_optim.integrations import megatron
from fused_optim.options.table import FLAGS, IMPLEMENTATIONS, OF_CONSTRUCTORS, REMOVED

BF16, F32 = torch.bfloat16, torch.float32
DROP_INS = [apex.FusedAdam, transformer_engine.FusedAdam]
EVERY_KIND = [FusedAdam, FusedAdamW, *DROP_INS, megatron.FusedAdam]
OF_EVERY_KIND = pytest.mark.parametrize("kind", EVERY_KIND, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")


def params(dtype: torch.dtype = BF16) -> list[nn.Parameter]:
    return [nn.Parameter(values((6, 128), dtype, "cpu", seed=i)) for i in range(2)]


def stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters and states after three steps, under a scheduler."""
    found = [param for group in optimizer.param_groups for param in group["params"]]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(3):
        for i, param in enumerate(found):
            param.grad = values(tuple(param.shape), param.dtype, "cpu", seed=10 * step + i)
        optimizer.step()
        scheduler.step()
    return [*found, *(state for param in found for state in optimizer.state[param].values())]


def masters() -> list[Tensor]:
    return [param.detach().float() for param in params()]


# By what calls so: the class, what is given, and the same in plain Python objects.
STYLES: dict[str, tuple[type[FusedAdam], dict[str, Any], dict[str, Any]]] = {
    "torch: lr as a tensor, switches": (
        FusedAdamW,
        {"lr": torch.tensor(1e-2), "fused": True, "foreach": False, "capturable": False, "differentiable": False},
        {"lr": 1e-2},
    ),
    "torch: betas, eps and weight decay as tensors": (
        FusedAdam,
        {
            "betas": (torch.tensor(0.5), torch.tensor([0.75])),
            "eps": torch.tensor(0.125),
            "weight_decay": torch.tensor(0.25),
            "decoupled_weight_decay": True,
        },
        {"betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.25, "decoupled_weight_decay": True},
    ),
    "torch: betas as one tensor": (FusedAdam, {"betas": torch.tensor([0.5, 0.75])}, {"betas": (0.5, 0.75)}),
    "torch: a flag as a number": (FusedAdam, {"decoupled_weight_decay": 0}, {"decoupled_weight_decay": False}),
    "Apex: by position": (
        apex.FusedAdam,
        {"bias_correction": False, "set_grad_none": True, "weight_decay": 0.1, "master_weights": True},
        {"bias_correction": False, "weight_decay": 0.1, "master_weights": True},
    ),
    "Apex: flags as numbers": (
        apex.FusedAdam,
        {"bias_correction": 1, "adam_w_mode": 0, "master_weights": 2},
        {"bias_correction": True, "adam_w_mode": False, "master_weights": True},
    ),
    "TransformerEngine: the masters themselves": (
        transformer_engine.FusedAdam,
        {"master_weights": masters(), "capturable": True},
        {"master_weights": True, "capturable": True},
    ),
    "TransformerEngine: None goes by its truth": (
        transformer_engine.FusedAdam,
        {"master_weights": None, "adam_w_mode": None, "capturable": None, "store_param_remainders": []},
        {"master_weights": False, "adam_w_mode": False, "capturable": False},
    ),
    "Megatron-LM's get_megatron_optimizer": (
        megatron.FusedAdam,
        {
            "lr": 1e-2,
            "weight_decay": 0.1,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "adam_w_mode": True,
            "use_decoupled_grad": None,
            "master_weights": np.bool_(True),
            "store_param_remainders": np.array(True),
            "exp_avg_dtype": torch.uint8,
        },
        {
            "lr": 1e-2,
            "weight_decay": 0.1,
            "betas": (0.9, 0.95),
            "master_weights": True,
            "store_param_remainders": True,
            "exp_avg_dtype": torch.float8_e4m3fn,
        },
    ),
    "None means the default": (
        FusedAdamW,
        {
            "decoupled_weight_decay": None,
            "maximize": None,
            "amsgrad": None,
            "capturable": None,
            "bias_correction": None,
            "stochastic_rounding": None,
        },
        {},
    ),
    "flags of one element": (
        FusedAdamW,
        {"maximize": torch.tensor(True), "bias_correction": np.array([False]), "capturable": torch.tensor(True)},
        {"maximize": True, "bias_correction": False, "capturable": True},
    ),
    "DeepSpeed's config": (
        FusedAdam,
        {"lr": "3e-3", "betas": [0.8, 0.999], "eps": "1e-8", "weight_decay": "3e-7", "decoupled_weight_decay": "true"},
        {"lr": 3e-3, "betas": (0.8, 0.999), "weight_decay": 3e-7, "decoupled_weight_decay": True},
    ),
    "Trainer's adam_kwargs with fused": (
        FusedAdamW,
        {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "fused": True},
        {"lr": 5e-5},
    ),
    "Trainer's optim_args": (
        FusedAdamW,
        {"exp_avg_dtype": "8bit", "exp_avg_sq_dtype": "8bit", "maximize": "False", "weight_decay": "0.1"},
        {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8, "weight_decay": 0.1},
    ),
    "Accelerate's DummyOptim": (FusedAdamW, {"lr": 1e-3, "weight_decay": 0}, {"weight_decay": 0.0}),
    "bitsandbytes: betas as text": (FusedAdamW, {"betas": "(0.9, 0.95)"}, {"betas": (0.9, 0.95)}),
    "bitsandbytes: betas as text without brackets": (FusedAdamW, {"betas": "0.9,0.95"}, {"betas": (0.9, 0.95)}),
    "NumPy's numbers": (
        FusedAdamW,
        {"lr": np.float32(0.5), "betas": np.array([0.5, 0.75]).tolist(), "eps": np.array([0.125]), "seed": np.int64(3)},
        {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.125, "seed": 3},
    ),
    "short names of dtypes": (
        FusedAdamW,
        {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8"},
        {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float8_e4m3fn},
    ),
    "TransformerEngine: short names of dtypes": (
        transformer_engine.FusedAdam,
        {"master_weights": True, "master_weight_dtype": "fp16", "exp_avg_dtype": "uint8"},
        {"master_weights": True, "master_weight_dtype": torch.float16, "exp_avg_dtype": torch.float8_e4m3fn},
    ),
}
# Hyperparameters and options of one param group, which AdamW's own groups or saved ones may be.
GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "torch's AdamW": (torch.optim.AdamW([torch.zeros(1)], lr=1e-2).defaults, {"lr": 1e-2, "weight_decay": 1e-2}),
    "flags that are None": ({"maximize": None, "amsgrad": None, "bias_correction": None}, {}),
    "flags of one element": (
        {"maximize": torch.tensor(True), "bias_correction": np.bool_(False)},
        {"maximize": True, "bias_correction": False},
    ),
    "numbers of one element": (
        {"betas": (torch.tensor(0.5), 0.75), "eps": torch.tensor(0.125), "weight_decay": np.float32(0.25)},
        {"betas": (0.5, 0.75), "eps": 0.125, "weight_decay": 0.25},
    ),
    "Megatron-LM's extra keys": (
        {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "max_lr": 1.0, "min_lr": 0.0},
        {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "max_lr": 1.0, "min_lr": 0.0},
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_style(style: str) -> None:
    kind, given, plain = STYLES[style]
    called, expected = kind(params(), **given), kind(params(), **plain)
    assert all(map(same_bits, stepped(called), stepped(expected)))
    group = called.param_groups[0]
    assert all(type(group[key]) is bool for key in FLAGS if key in group)
    assert all(type(number) is float for number in group["betas"]) and type(group["eps"]) is float
    assert group.keys() == expected.param_groups[0].keys()


@pytest.mark.parametrize("style", GROUPS)
@pytest.mark.parametrize("way", ["constructor", "added", "written"])
def test_style_of_a_group(style: str, way: str) -> None:
    """The keys of groups, which checkpoints must have, do not depend on it."""

    def built(given: dict[str, Any]) -> FusedAdamW:
        if way == "constructor":
            return FusedAdamW([{"params": params(), **given}])
        if way == "added":
            optimizer = FusedAdamW(params()[:1])
            optimizer.add_param_group({"params": params()[1:], **given})
            return optimizer
        optimizer = FusedAdamW(params())
        own = {
            key: value for key, value in given.items() if key not in (*IMPLEMENTATIONS, *OF_CONSTRUCTORS, "capturable")
        }
        optimizer.param_groups[0].update(own)
        return optimizer

    given, plain = GROUPS[style]
    called, expected = built(given), built(plain)
    assert all(map(same_bits, stepped(called), stepped(expected)))
    assert [group.keys() for group in called.param_groups] == [group.keys() for group in expected.param_groups]
    fresh = FusedAdamW(params()) if way != "added" else built(plain)
    saved = called.state_dict()
    fresh.load_state_dict(saved)
    assert saved["param_groups"] == expected.state_dict()["param_groups"]


@pytest.mark.parametrize("saved", [None, torch.tensor(False), np.bool_(False), "false", 0])
def test_saved_groups_of_others(saved: Any) -> None:
    """A state dict whose groups have flags in another style; None leaves the optimizer's own."""
    source = FusedAdamW(params())
    stepped(source)
    state_dict = source.state_dict()
    state_dict["param_groups"][0].update(maximize=saved, amsgrad=saved, weight_decay=torch.tensor(0.25))
    loaded = FusedAdamW(params(), maximize=True)
    loaded.load_state_dict(state_dict)
    group = loaded.param_groups[0]
    assert (group["maximize"], group["amsgrad"], group["weight_decay"]) == (saved is None, False, 0.25)


@OF_EVERY_KIND
@pytest.mark.parametrize(
    "wrong, hint",
    [
        ("exp_avg_dtyp", "; did you mean exp_avg_dtype?"),
        ("master_bit", "; did you mean master_bits?"),
        ("optim_bits", ""),
    ],
)
def test_an_unknown_argument(kind: Callable[..., FusedAdam], wrong: str, hint: str) -> None:
    with pytest.raises(TypeError) as raised:
        kind(params(), **{wrong: 1})
    assert str(raised.value).startswith(f"{kind.__name__}() got an unexpected argument '{wrong}'{hint}")


@pytest.mark.parametrize("given, decoupled", [(False, True), (True, False)])
def test_a_group_cannot_mean_another_optimizer(given: bool, decoupled: bool) -> None:
    with pytest.raises(
        ValueError, match=f"decoupled_weight_decay={given} in a param group: .* decoupled_weight_decay={decoupled}"
    ):
        FusedAdam([{"params": params(), "decoupled_weight_decay": given}], decoupled_weight_decay=decoupled)
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        FusedAdam([{"params": params(), "differentiable": True}])


@pytest.mark.parametrize("decay", [0.1, 3, "3e-7", torch.tensor(0.1)], ids=str)
def test_a_weight_decay_asks_whose_it_is(decay: Any) -> None:
    """torch.optim.Adam's goes into the gradient; that of other libraries' FusedAdam does not."""
    optimizer = FusedAdam(params())
    builds: list[Callable[[], Any]] = [
        lambda: FusedAdam(params(), weight_decay=decay),
        lambda: FusedAdam(params(), weight_decay=decay, decoupled_weight_decay=None),
        lambda: FusedAdam([{"params": params()}, {"params": params(), "weight_decay": decay}]),
        lambda: optimizer.add_param_group({"params": params(), "weight_decay": decay}),
    ]
    for build in builds:
        with pytest.raises(
            ValueError, match=r"=False .*torch.optim.Adam.*=True .*AdamW, .*TransformerEngine.*FusedAdamW"
        ):
            build()
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params(), "weight_decay": decay, "decoupled_weight_decay": True})
    for kind in (FusedAdamW, apex.FusedAdam, transformer_engine.FusedAdam, megatron.FusedAdam):
        assert kind(params(), weight_decay=decay).rule.decoupled


@pytest.mark.parametrize(
    "theirs, ours, own",
    [
        (torch.optim.AdamW, FusedAdam, {}),
        (torch.optim.AdamW, FusedAdamW, {}),
        (torch.optim.AdamW, FusedAdamW, {"weight_decay": 0.5}),
        (torch.optim.Adam, FusedAdam, {}),
        (torch.optim.Adam, FusedAdam, {"weight_decay": 0.5}),
        (torch.optim.Adam, FusedAdam, {"decoupled_weight_decay": True, "maximize": True, "foreach": True}),
    ],
)
def test_torchs_defaults_are_arguments(theirs: Any, ours: type[FusedAdam], own: dict[str, Any]) -> None:
    """Of Adam, too, whose weight decay is another; with torch's own result."""
    reference = theirs(params(F32), lr=1e-2, **own)
    optimizer = ours(params(F32), **reference.defaults)
    for mine, expected in zip(stepped(optimizer)[:2], stepped(reference)[:2], strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("word", REMOVED)
@pytest.mark.parametrize("kind", [FusedAdam, FusedAdamW, FusedLion, FusedMuon])
def test_words_of_earlier_releases(kind: Callable[..., Any], word: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__}.. takes no {word} any more: "):
        kind(params(), **{word: True})


@pytest.mark.parametrize("given", [torch.uint8, "uint8", "torch.uint8"], ids=str)
@pytest.mark.parametrize(
    "kind, option",
    [
        *((FusedAdamW, option) for option in ("state_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
        *((FusedLion, option) for option in ("state_dtype", "exp_avg_dtype")),
        *((FusedMuon, option) for option in ("state_dtype", "momentum_dtype", "exp_avg_dtype")),
    ],
)
def test_bytes_are_no_format(kind: Callable[..., Any], option: str, given: Any) -> None:
    """Of the constructor, and of groups then and later."""
    with pytest.raises(ValueError, match=f'^{option}: write "float8_e4m3fn"'):
        kind(params(), **{option: given})
    optimizer = kind(params())
    with pytest.raises(ValueError, match=f'^{option}: write "float8_e4m3fn"'):
        optimizer.add_param_group({"params": params(), option: given})
    assert len(optimizer.param_groups) == 1


# --- configs ----------------------------------------------------------------------------------------------------------

# What a config has, and what Python has for it. The numbers without a point are what YAML leaves as text.
CONFIG: dict[str, tuple[Any, Any]] = {
    "lr": ("1e-2", 1e-2),
    "betas": (["9e-1", 0.95], (0.9, 0.95)),
    "eps": ("1e-7", 1e-7),
    "weight_decay": ("1e-1", 0.1),
    "decoupled_weight_decay": ("true", True),
    "exp_avg_dtype": ("int8", torch.int8),
    "exp_avg_sq_dtype": ("torch.float8_e4m3fn", torch.float8_e4m3fn),
    "seed": ("3", 3),
}
OF_PEERS: dict[str, tuple[Any, Any]] = {
    "master_weight_dtype": ("float32", torch.float32),
    "store_param_remainders": (True, True),
    "param_remainder_bits": ("8", 8),
    "master_weights": (True, True),
}


@OF_EVERY_KIND
def test_text_means_what_objects_mean(kind: type[FusedAdam]) -> None:
    config = CONFIG | (OF_PEERS if issubclass(kind, PeersSettings) else {"master_bits": ("24", 24)})
    texts, objects = ({key: pair[i] for key, pair in config.items()} for i in (0, 1))
    from_text, expected = kind(params(), **texts), kind(params(), **objects)
    assert from_text.state_dict()["param_groups"] == expected.state_dict()["param_groups"]
    assert from_text.settings.master_weight_dtype is torch.float32 and from_text.settings.param_remainder_bits == 8
    assert all(map(same_bits, stepped(from_text), stepped(expected)))


@OF_EVERY_KIND
def test_what_was_given_as_text_can_be_written_as_json(kind: type[FusedAdam]) -> None:
    optimizer = kind([{"params": params()[:1], "exp_avg_dtype": "bfloat16"}], exp_avg_sq_dtype="int8", betas=[0.9, 0.9])
    optimizer.add_param_group({"params": params()[:1]})
    stepped(optimizer)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    read = json.loads(json.dumps(groups))
    assert [group["exp_avg_dtype"] for group in read] == ["bfloat16", "float32"]
    again = kind(params(), **json.loads(json.dumps(optimizer.defaults)))
    assert again.param_groups[0]["exp_avg_sq_dtype"] == "int8"
    assert json.loads(json.dumps(optimizer.state_dict()["param_groups"]))[0]["exp_avg_dtype"] == "torch.bfloat16"


CONFIG_FLAGS = [
    "master_weights",
    "stochastic_rounding",
    "bias_correction",
    "maximize",
    "store_param_remainders",
]


@pytest.mark.parametrize("flag", [*CONFIG_FLAGS, "use_decoupled_grad", "skip_nonfinite", "unscales_gradients"])
@pytest.mark.parametrize("text, value", [("False", False), ("true", True), (0, False), (1.0, True)])
def test_flags_as_text(flag: str, text: Any, value: bool) -> None:
    optimizer = peers.FusedAdamW(params(), **{flag: text})
    found = optimizer.param_groups[0][flag] if flag in optimizer.param_groups[0] else getattr(optimizer, flag)
    assert found is value
    assert all(map(same_bits, stepped(optimizer), stepped(peers.FusedAdamW(params(), **{flag: value}))))


@pytest.mark.parametrize("seed", [1.5, "x", "1.5", None, float("inf"), float("nan")])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(TypeError, match="seed: expected a whole number"):
        FusedAdamW(params(), seed=seed)
