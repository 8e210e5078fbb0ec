"""Constructors and param groups take what configs say: names of dtypes, numbers as text, lists, switches of torch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import peers
from cases import values
from distributed import same_bits
from fused_optim import FusedAdam, FusedAdamW
from fused_optim.compat import apex, transformer_engine
from fused_optim.compat._common import PeersSettings
from fused_optim.integrations import megatron

KINDS = [FusedAdam, FusedAdamW, apex.FusedAdam, transformer_engine.FusedAdam, megatron.FusedAdam]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
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


def params() -> list[nn.Parameter]:
    return [nn.Parameter(values((6, 128), torch.bfloat16, "cpu", seed=i)) for i in range(2)]


def stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters and states after three steps."""
    found = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(3):
        for i, param in enumerate(found):
            param.grad = values(tuple(param.shape), param.dtype, "cpu", seed=10 * step + i)
        optimizer.step()
    return [*found, *(state for param in found for state in optimizer.state[param].values())]


@EVERY_KIND
def test_text_means_what_objects_mean(kind: type[FusedAdam]) -> None:
    config = CONFIG | (OF_PEERS if issubclass(kind, PeersSettings) else {"master_bits": ("24", 24)})
    texts, objects = ({key: pair[i] for key, pair in config.items()} for i in (0, 1))
    from_text, expected = kind(params(), **texts), kind(params(), **objects)
    assert from_text.state_dict()["param_groups"] == expected.state_dict()["param_groups"]
    assert from_text.settings.master_weight_dtype is torch.float32 and from_text.settings.param_remainder_bits == 8
    assert all(map(same_bits, stepped(from_text), stepped(expected)))


@EVERY_KIND
def test_text_in_param_groups(kind: type[FusedAdam]) -> None:
    """In the constructor and added later; the running group has numbers, which schedulers multiply."""
    texts = {"lr": "5e-3", "eps": "1e-6", "betas": ["8e-1", "9e-1"], "weight_decay": "0", "exp_avg_sq_dtype": "int8"}
    objects = {"lr": 5e-3, "eps": 1e-6, "betas": (0.8, 0.9), "weight_decay": 0.0, "exp_avg_sq_dtype": torch.int8}
    built = []
    for options in (texts, objects):
        first, second = params()
        optimizer = kind([{"params": [first], **options}])
        optimizer.add_param_group({"params": [second], **options})
        built.append(optimizer)
    groups = built[0].param_groups
    assert [(type(group["lr"]), group["betas"]) for group in groups] == [(float, (0.8, 0.9))] * 2
    torch.optim.lr_scheduler.LambdaLR(built[0], lambda step: 1.0)
    torch.optim.lr_scheduler.LambdaLR(built[1], lambda step: 1.0)
    assert all(map(same_bits, stepped(built[0]), stepped(built[1])))


@EVERY_KIND
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


@EVERY_KIND
@pytest.mark.parametrize("switch", ["fused", "foreach"])
@pytest.mark.parametrize("value", [True, False, None])
def test_switches_of_torchs_optimizers_change_nothing(kind: type[FusedAdam], switch: str, value: bool | None) -> None:
    """Nor do they become keys of param groups, which another checkpoint would have to have."""
    plain = kind(params(), lr=0.01)
    chosen = kind(params(), lr=0.01, **{switch: value})
    grouped = kind([{"params": params(), switch: value}], lr=0.01)
    keys = plain.state_dict()["param_groups"][0].keys()
    assert all(other.state_dict()["param_groups"][0].keys() == keys for other in (chosen, grouped))
    expected = stepped(plain)
    assert all(map(same_bits, stepped(chosen), expected)) and all(map(same_bits, stepped(grouped), expected))


FLAGS = [
    "master_weights",
    "stochastic_rounding",
    "bias_correction",
    "maximize",
    "store_param_remainders",
]


@pytest.mark.parametrize("flag", [*FLAGS, "use_decoupled_grad", "skip_nonfinite", "unscales_gradients"])
@pytest.mark.parametrize("text, value", [("False", False), ("true", True), (0, False), (1.0, True)])
def test_flags_as_text(flag: str, text: Any, value: bool) -> None:
    optimizer = peers.FusedAdamW(params(), **{flag: text})
    found = optimizer.param_groups[0][flag] if flag in optimizer.param_groups[0] else getattr(optimizer, flag)
    assert found is value
    assert all(map(same_bits, stepped(optimizer), stepped(peers.FusedAdamW(params(), **{flag: value}))))


@pytest.mark.parametrize(
    "flag", [*FLAGS, "capturable", "offload_states", "use_decoupled_grad", "amsgrad", "set_grad_none"]
)
@pytest.mark.parametrize("wrong", ["no", "", 2, [True]], ids=repr)
def test_what_is_no_flag_is_refused(flag: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"^{flag}: expected True or False, got"):
        peers.FusedAdamW(params(), **{flag: wrong})


def test_flags_of_param_groups() -> None:
    first, second = params()
    optimizer = FusedAdamW([{"params": [first], "maximize": "true", "bias_correction": "False"}, {"params": [second]}])
    shown = [(group["maximize"], group["bias_correction"]) for group in optimizer.param_groups]
    assert shown == [(True, False), (False, True)]
    with pytest.raises(TypeError, match="maximize: expected True or False, got 'yes'"):
        optimizer.add_param_group({"params": params(), "maximize": "yes"})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("seed, expected", [(3.0, 3), ("12345678901234567", 12345678901234567), (torch.tensor(4), 4)])
def test_seeds_that_are_whole_numbers(seed: Any, expected: int) -> None:
    assert FusedAdamW(params(), seed=seed).seed == expected


@pytest.mark.parametrize("seed", [1.5, "x", "1.5", None, float("inf"), float("nan")])
def test_a_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(TypeError, match="seed: expected a whole number"):
        FusedAdamW(params(), seed=seed)
