"""What BF16 parameters have by default, the short words for states and masters, and writes that nothing can notice."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peers
from cases import values
from distributed import same_bits
from fused_optim import FusedAdam, FusedAdamW
from fused_optim.compat import apex, transformer_engine
from fused_optim.formats.masters import join_remainder

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPE = (6, 128)


def param(dtype: torch.dtype = BF16, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(values(SHAPE, dtype, "cpu", seed=seed))


def step(optimizer: FusedAdam, seed: int) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = values(tuple(each.shape), each.dtype, "cpu", seed=seed)
    optimizer.step()


def master_dtype(optimizer: FusedAdam, each: nn.Parameter) -> torch.dtype | None:
    optimizer.initialize_state()
    master = optimizer.state[each].get("master_param")
    return None if master is None else master.dtype


# --- masters ----------------------------------------------------------------------------------------------------------

# Options, and the dtype of the masters of BF16, FP16 and FP32 parameters.
MASTERS: list[tuple[dict[str, Any], tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]]] = [
    ({}, (torch.int16, F32, None)),
    ({"store_param_remainders": None}, (torch.int16, F32, None)),
    ({"store_param_remainders": True}, (torch.int16, F32, None)),
    ({"store_param_remainders": False}, (F32, F32, None)),
    ({"param_remainder_bits": 8}, (torch.int8, F32, None)),
    ({"master_weight_dtype": "fp16"}, (F16, F16, None)),
    ({"master_weights": False}, (None, None, None)),
    ({"master_bits": 32}, (torch.int16, F32, None)),
    ({"master_bits": 24}, (torch.int8, F32, None)),
    ({"master_bits": "24"}, (torch.int8, F32, None)),
    ({"master_bits": 0}, (None, None, None)),
]


@pytest.mark.parametrize("options, expected", MASTERS, ids=str)
@pytest.mark.parametrize("copied", ["itself", "pickled", "from its defaults"])
def test_masters(options: dict[str, Any], expected: tuple[torch.dtype | None, ...], copied: str) -> None:
    """Without a warning: nothing was asked for that is not there."""
    kind = FusedAdamW if options.keys() <= {"master_bits"} else peers.FusedAdamW
    for dtype, master in zip((BF16, F16, F32), expected):
        optimizer = kind([param(dtype)], **options)
        if copied == "pickled":
            optimizer = pickle.loads(pickle.dumps(optimizer))
        elif copied == "from its defaults":
            optimizer = kind([param(dtype)], **optimizer.defaults)
        assert master_dtype(optimizer, optimizer.param_groups[0]["params"][0]) == master
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if options.get("store_param_remainders") is not True and "master_weight_dtype" not in options:
                step(optimizer, 1)


@pytest.mark.parametrize("kind", [apex.FusedAdam, transformer_engine.FusedAdam], ids=lambda kind: kind.__module__)
def test_drop_in_classes_keep_the_masters_of_their_originals(kind: Callable[..., FusedAdam]) -> None:
    each = param()
    assert master_dtype(kind([each], master_weights=True), each) == F32


@pytest.mark.parametrize(
    "options, message",
    [
        ({"master_bits": 16}, "master_bits: expected 32"),
        ({"master_bits": "exact"}, "master_bits: expected 32"),
        ({"master_bits": 24, "store_param_remainders": True}, "master_bits=24 and store_param_remainders"),
        ({"master_bits": 32, "master_weights": False}, "master_bits=32 and master_weights"),
        ({"master_bits": 24, "param_remainder_bits": 16}, "master_bits=24 and param_remainder_bits"),
        ({"master_bits": 32, "master_weight_dtype": "fp16"}, "master_bits=32 and master_weight_dtype"),
        ({"param_remainder_bits": 8, "store_param_remainders": False}, "param_remainder_bits=8 needs remainders"),
        ({"param_remainder_bits": 8, "master_weight_dtype": "fp16"}, "param_remainder_bits=8 needs remainders"),
    ],
)
def test_words_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peers.FusedAdamW([param()], **options)


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, (F32, F32)),
        ({"state_dtype": "int8"}, (torch.int8, torch.uint8)),
        ({"state_dtype": "8bit", "exp_avg_dtype": BF16}, (BF16, torch.uint8)),
        ({"state_dtype": BF16, "exp_avg_sq_dtype": "fp32"}, (BF16, F32)),
        ({"exp_avg_dtype": "bf16"}, (BF16, F32)),
    ],
)
@pytest.mark.parametrize("way", ["constructor", "group", "added group"])
def test_state_dtype(options: dict[str, Any], expected: tuple[torch.dtype, torch.dtype], way: str) -> None:
    each, other = param(), param(seed=1)
    if way == "constructor":
        optimizer = FusedAdamW([each], **options)
    elif way == "group":
        optimizer = FusedAdamW([{"params": [each], **options}, {"params": [other]}])
    else:
        optimizer = FusedAdamW([other])
        optimizer.add_param_group({"params": [each], **options})
    optimizer.initialize_state()
    assert tuple(optimizer.state[each][name].dtype for name in ("exp_avg", "exp_avg_sq")) == expected
    if way != "constructor":
        assert optimizer.state[other]["exp_avg"].dtype == F32
    assert "state_dtype" not in optimizer.state_dict()["param_groups"][0]


# --- writes that no counter shows -------------------------------------------------------------------------------------


def through_data(each: nn.Parameter, value: Tensor) -> None:
    each.data.copy_(value)


def through_numpy(each: nn.Parameter, value: Tensor) -> None:
    each.detach().view(torch.int16).numpy()[:] = value.view(torch.int16).numpy()


def by_new_data_twice(each: nn.Parameter, value: Tensor) -> None:
    """The allocator may give the first address back."""
    each.data = each.data * 2
    each.data = value.clone()


def in_place(each: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        each.copy_(value)


WRITES = [through_data, through_numpy, by_new_data_twice, in_place]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("when", ["first", "initialized", "stepped", "loaded", "copied", "without a gradient between"])
@pytest.mark.parametrize("bits", [32, 24])
def test_a_write_is_where_the_next_step_starts(write: Callable[..., None], when: str, bits: int) -> None:
    """By whatever way, and whatever came before it: the parameter has the upper bits of its master."""
    each, options = param(), {"lr": 0.0, "weight_decay": 0.0, "master_bits": bits, "state_dtype": "int8"}
    optimizer = FusedAdamW([each], **options)
    if when == "initialized":
        optimizer.initialize_state()
    elif when != "first":
        for seed in range(2):
            step(optimizer, seed)
    if when == "loaded":
        fresh = FusedAdamW([each], **options)
        fresh.load_state_dict(optimizer.state_dict())
        optimizer = fresh
    elif when == "copied":
        optimizer = copy.deepcopy(optimizer)
        each = optimizer.param_groups[0]["params"][0]
    written = values(SHAPE, BF16, "cpu", seed=9) * 3
    write(each, written)
    if when == "without a gradient between":
        each.grad = None
        optimizer.step()
    step(optimizer, 5)  # with a learning rate of 0: the parameter stays
    assert same_bits(each.detach(), written)
    optimizer.param_groups[0]["lr"] = 1e-2
    before = each.detach().float()
    step(optimizer, 6)
    master = join_remainder(each.detach(), optimizer.state[each]["master_param"])
    assert 0 < float((master - before).abs().max()) < 0.2  # one update away from what was written


# --- what is read and set ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [32, 24])
def test_masters_are_spoken_of_in_fp32(bits: int) -> None:
    """Remainders only where they were asked for by name, as TransformerEngine's users do."""
    each, optimizer = (first := param()), FusedAdamW([first], lr=1e-2, master_bits=bits)
    step(optimizer, 1)
    joined = join_remainder(each.detach(), optimizer.state[each]["master_param"])
    assert same_bits(optimizer.get_unscaled_state(each, "master_param"), joined)
    wanted = values(SHAPE, F32, "cpu", seed=4)
    optimizer.set_scaled_state(each, "master_param", wanted)
    found = optimizer.get_unscaled_state(each, "master_param")
    torch.testing.assert_close(found, wanted, rtol=0.0 if bits == 32 else 2.0**-16, atol=0.0)
    torch.testing.assert_close(each.detach().float(), wanted, rtol=2.0**-8, atol=0.0)
    asked = peers.FusedAdamW([param()], store_param_remainders=True)
    step(asked, 1)
    assert asked.get_unscaled_state(asked.param_groups[0]["params"][0], "master_param").dtype == torch.int16
