"""torch's flattened and full state dicts under ``checkpoint_format="torch"``: AdamW's and ours, as each other's.

Flattened ones torch loads by the keys of running param groups, which are our own: torch.optim.AdamW loads ours.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import distributed
from cases import values
from distributed import part, same_bits, shard_like
from fused_optim import FusedAdamW

FLAGS = ("full_state_dict", "flatten_optimizer_state_dict", "cpu_offload")
SAVED = [dict(zip(FLAGS, flags, strict=True)) for flags in itertools.product((False, True), repeat=3)]
LOADED = [{"broadcast_from_rank0": broadcast} for broadcast in (False, True)]
TORCHS_ERROR = "KeyError: 'param_groups.0.params.0'"  # of a flattened one, where it is also full


def build(kind: type, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 6), nn.Linear(6, 64))
    if dist.is_initialized():
        fully_shard(model, mesh=distributed.mesh())
    options: dict[str, Any] = {"checkpoint_format": "torch"} if kind is FusedAdamW else {}
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "weight_decay": 0.3}]
    return model, kind(groups, **options)


Source = tuple[nn.Module, torch.optim.Optimizer]


def trained(kind: type) -> Source:
    model, optimizer = build(kind, 0)
    for step in range(2):
        for i, param in enumerate(model.parameters()):
            param.grad = shard_like(values(tuple(param.shape), torch.float32, "cpu", seed=10 * step + i), param)
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def outcome(source: Source, loader: type, saved: dict[str, bool], loaded: dict[str, bool], flattens: bool) -> Any:
    """The states that a fresh optimizer has loaded, or the error."""
    state_dict = get_optimizer_state_dict(*source, options=StateDictOptions(**saved))
    model, fresh = build(loader, 1)
    options = {**saved, **loaded, "flatten_optimizer_state_dict": flattens and saved["flatten_optimizer_state_dict"]}
    if options["broadcast_from_rank0"] and dist.get_rank():
        state_dict = {}
    try:
        set_optimizer_state_dict(model, fresh, state_dict, options=StateDictOptions(**options))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    states = fresh.state_dict()["state"].values()
    found = [part(own[name])[2] for own in states for name in ("step", "exp_avg", "exp_avg_sq")]
    return [*found, torch.tensor([group["lr"] for group in fresh.param_groups])]


def compare() -> list[str]:
    """What does not load as AdamW's; and what torch refuses."""
    refused, kinds = [], (torch.optim.AdamW, FusedAdamW)
    sources = [trained(kind) for kind in kinds]
    for saved, loaded, flattens in itertools.product(SAVED, LOADED, (False, True)):
        on_first_rank = saved["full_state_dict"] and saved["cpu_offload"] and dist.is_initialized()
        fails_on_some = on_first_rank and flattens and saved["flatten_optimizer_state_dict"]  # and others wait
        if loaded["broadcast_from_rank0"] != on_first_rank or fails_on_some:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pairs = itertools.product(sources, kinds[:1] if saved["flatten_optimizer_state_dict"] else kinds)
            expected, *found = [outcome(*pair, saved, loaded, flattens) for pair in pairs]
        for each in found:
            if isinstance(expected, str):
                assert each == expected, (saved, loaded, flattens)
            else:
                assert not isinstance(each, str), (saved, loaded, flattens, each)
                torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-7)
                assert same_bits(each[0], expected[0])
        if isinstance(expected, str):
            assert flattens and saved["full_state_dict"] and saved["flatten_optimizer_state_dict"]
            refused.append(expected)
    return refused


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_they_load_as_those_of_adamw(ranks: int) -> None:
    """What torch flattens of a full state dict it loads if the options of the load do not say so; else it raises."""
    refused = set(distributed.run(ranks, compare)[0] if ranks else compare())
    assert TORCHS_ERROR in refused
