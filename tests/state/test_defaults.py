"""``optimizer.defaults`` builds the same optimizer again, as other libraries do when they wrap or replace one."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cases import values
from distributed import same_bits
from fused_optim import FusedAdam, FusedAdamW
from fused_optim.compat import apex, transformer_engine
from fused_optim.compat._common import PeersSettings
from fused_optim.integrations import megatron
from fused_optim.options.table import OF_DROP_INS
from pairwise import pairwise

KINDS = [FusedAdam, FusedAdamW, apex.FusedAdam, transformer_engine.FusedAdam, megatron.FusedAdam]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
OPTIONS: list[dict[str, Any]] = [
    {},
    {
        "lr": 0.3,
        "betas": (0.5, 0.6),
        "eps": 1e-4,
        "weight_decay": 0.2,
        "maximize": True,
        "decoupled_weight_decay": True,
    },
    {"master_weights": True, "store_param_remainders": True, "param_remainder_bits": 8, "seed": 5},
    {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.float16, "stochastic_rounding": False},
    {"decoupled_weight_decay": False, "bias_correction": False, "master_weights": True},
    {"capturable": True, "use_decoupled_grad": True},
    {"checkpoint_format": "native", "checkpoint_device": "cpu", "master_weights": False},
    {"master_weights": True, "master_weight_dtype": torch.float16},
]
COPIES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda optimizer: optimizer,
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


def known_to(kind: type[FusedAdam], options: dict[str, Any]) -> dict[str, Any]:
    """Native classes have ``master_bits`` alone."""
    if issubclass(kind, PeersSettings):
        return options
    own = {key: value for key, value in options.items() if key not in OF_DROP_INS}
    masters = (options.get("master_weights", True), options.get("param_remainder_bits"))
    return own | ({} if masters == (True, None) else {"master_bits": 24 if masters[0] else 0})


def params() -> list[nn.Parameter]:
    return [nn.Parameter(values((6, 128), torch.bfloat16, "cpu", seed=1)), nn.Parameter(torch.ones(5))]


def stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for i, param in enumerate(optimizer.param_groups[0]["params"]):
        grad = values(tuple(param.shape), param.dtype, "cpu", seed=9 + i)
        param.grad = param.decoupled_grad = grad
    for _ in range(2):
        optimizer.step()
    return optimizer.param_groups[0]["params"]


@pytest.mark.parametrize("kind, options, copied", pairwise(KINDS, OPTIONS, list(COPIES)))  # not the product: each two
def test_the_same_optimizer_is_built_again(kind: type[FusedAdam], options: dict[str, Any], copied: str) -> None:
    original = kind(params(), **known_to(kind, options))
    again = kind(params(), **COPIES[copied](original).defaults)
    assert again.param_groups[0].keys() == original.param_groups[0].keys()
    assert again.defaults == original.defaults and again.settings.as_dict() == original.settings.as_dict()
    assert all(map(same_bits, stepped(again), stepped(original)))


@EVERY_KIND
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_groups_are_handed_to_a_new_optimizer(kind: type[FusedAdam], options: dict[str, Any]) -> None:
    options = known_to(kind, {"decoupled_weight_decay": True, **options})
    original = kind([{"params": params(), "weight_decay": 0.7}], **options)
    again = type(original)(original.param_groups, **original.defaults)
    assert again.param_groups[0]["weight_decay"] == 0.7 and again.param_groups[0]["step"] == 0
    assert again.state_dict()["param_groups"] == original.state_dict()["param_groups"]


@EVERY_KIND
@pytest.mark.parametrize("copied", COPIES)
def test_all_groups_have_the_same_keys(kind: type[FusedAdam], copied: str) -> None:
    """Options of the whole optimizer are in none, nor is what torch adds to the defaults of a copy."""
    optimizer = COPIES[copied](kind(params(), capturable=False))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    first, second = optimizer.param_groups
    assert first.keys() == second.keys()
    assert (second["step"], second["fused_optim_version"]) == (0, 1)
    assert not {"capturable", "seed", "master_weights", "differentiable", "set_grad_none"} & second.keys()


@EVERY_KIND
def test_defaults_are_the_constructors_arguments(kind: type[FusedAdam]) -> None:
    optimizer = kind(params())
    accepted = inspect.signature(FusedAdam.__init__).parameters.keys() - {"self", "params"}
    assert set(optimizer.defaults) == accepted | {*(OF_DROP_INS if issubclass(kind, PeersSettings) else ())}


def test_keys_that_are_given_stay() -> None:
    group = {"params": params(), "seed": "a name of the user's", "tag": 1}
    assert FusedAdam([group]).param_groups[0].items() >= {"seed": "a name of the user's", "tag": 1}.items()
