"""Megatron-LM's way to load states, without Megatron-LM: memory that nobody has written, then values one by one.

Its distributed optimizer allocates ``torch.empty`` of a slice's length, in its config's dtypes, for one without states;
and loads the state dict of one that has some.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import same_bits
from fused_optim.compat import transformer_engine
from fused_optim.integrations.megatron import FusedAdam, FusedAdamInt16
from pairwise import pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8]
SIZES = [640, 700, 5, 0]
# The parameter's dtype, options, and the dtype of the placeholders of masters: the config's, not always our own.
MASTERS: list[tuple[torch.dtype, dict[str, Any], torch.dtype | None]] = [
    (torch.bfloat16, {"store_param_remainders": True}, torch.int16),
    (torch.bfloat16, {"store_param_remainders": True, "param_remainder_bits": 8}, torch.int16),
    (torch.bfloat16, {"store_param_remainders": True, "param_remainder_bits": 8}, torch.int8),
    (torch.bfloat16, {"store_param_remainders": False}, torch.float32),
    (torch.bfloat16, {"master_weight_dtype": torch.float16, "store_param_remainders": True}, torch.float16),
    (torch.bfloat16, {"master_weights": False}, None),
    (torch.float32, {}, None),
]


def build(size: int, dtype: torch.dtype, kind: type[Any], options: dict[str, Any]) -> tuple[Tensor, Any]:
    slice_ = normal(size, 0).to(dtype)
    return slice_, kind([slice_], lr=0.01, **{"master_weights": True, **options})


def normal(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def step(param: Tensor, optimizer: FusedAdam, seed: int) -> None:
    param.grad = normal(param.numel(), seed).to(param.dtype)
    optimizer.step()


@pytest.mark.parametrize("kind", [FusedAdam, FusedAdamInt16, transformer_engine.FusedAdam])
@pytest.mark.parametrize(
    "master, moment, square, size, has_states",
    pairwise(MASTERS, DTYPES, DTYPES, SIZES, [False, True]),
    ids=str,
)
def test_every_combination_continues_bit_for_bit(
    master: tuple[torch.dtype, dict[str, Any], torch.dtype | None],
    moment: torch.dtype,
    square: torch.dtype,
    size: int,
    has_states: bool,
    kind: type[Any],
) -> None:
    dtype, options, master_dtype = master
    options = {**options, "exp_avg_dtype": moment, "exp_avg_sq_dtype": square}
    param, optimizer = build(size, dtype, kind, options)
    for seed in range(1, 3):
        step(param, optimizer, seed)
    other, loaded = build(size, dtype, kind, options)
    if has_states:
        loaded.initialize_state()
        state_dict = loaded.state_dict()
    else:
        dtypes = {"exp_avg": moment, "exp_avg_sq": square, "master_param": master_dtype}
        state = {name: torch.full((size,), 77, dtype=each) for name, each in dtypes.items() if each is not None}
        state_dict = {"state": {0: state}, "param_groups": loaded.state_dict()["param_groups"]}
    state_dict["param_groups"][0]["step"] = 2
    loaded.load_state_dict(state_dict)
    other.copy_(param)
    for name in optimizer.state[param]:
        loaded.set_scaled_state(other, name, optimizer.get_unscaled_state(param, name))
    for seed in range(3, 5):
        step(param, optimizer, seed)
        step(other, loaded, seed)
    assert same_bits(other, param) and loaded.param_groups[0]["step"] == 4
    for name, state in optimizer.state[param].items():
        assert same_bits(loaded.state[other][name], state)


@pytest.mark.parametrize(
    "name, dtype", [("exp_avg", torch.uint8), ("exp_avg_sq", torch.int8), ("master_param", torch.int8)]
)
def test_codes_alone_are_placeholders_of_whole_parameters_too(name: str, dtype: torch.dtype) -> None:
    """Nobody saves codes without their scales, or the 8 bits that a master has beside its parameter."""
    param = nn.Parameter(normal(640, 0).bfloat16())
    optimizer = FusedAdam([param], master_weights=True, store_param_remainders=True, param_remainder_bits=8)
    step(param, optimizer, 1)
    before = [
        param.detach().clone(),
        *(optimizer.get_unscaled_state(param, each).clone() for each in optimizer.state[param]),
    ]
    saved = optimizer.state_dict()
    saved["state"][0][name] = torch.full((640,), 77, dtype=dtype)
    optimizer.load_state_dict(saved)
    after = [param.detach(), *(optimizer.get_unscaled_state(param, each) for each in optimizer.state[param])]
    assert all(map(same_bits, after, before))


def test_codes_alone_are_refused_where_nobody_sets_values() -> None:
    """TransformerEngine's class outside of Megatron-LM: a load that left states out would say nothing."""
    param = nn.Parameter(normal(640, 0).bfloat16())
    optimizer = transformer_engine.FusedAdam([param], master_weights=True, exp_avg_dtype=torch.uint8)
    step(param, optimizer, 1)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.full((640,), 77, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"exp_avg: expected an unscaled floating-point tensor, got torch\.uint8"):
        optimizer.load_state_dict(saved)
