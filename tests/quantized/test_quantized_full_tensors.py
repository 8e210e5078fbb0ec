"""Full tensors and full state dicts of quantized weights are plain, on any number of ranks and of unsharded models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import distributed
from distributed import assert_same, long, on_each_device
from fused_optim.quantized import QuantizedTensor, finish_initialization
from fused_optim.sharding.dtensor import local_tensor
from pairwise import pairwise
from quantized_cases import RECIPES, Run, mesh_of, perceptron, quantized_model, values

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def kinds_of_full_tensors(recipes: list[str], how: str) -> dict[str, list[bool]]:
    """Of every parameter, with and without gradients being recorded: whether it is plain and the decoded weight."""
    found = {}
    for recipe in recipes:
        run = Run(recipe, how, build=perceptron)
        whole = Run(recipe, "plain", build=perceptron).model
        found[recipe] = []
        for name, param in run.model.named_parameters():
            expected = whole.get_parameter(name).detach().dequantize()
            with torch.no_grad():
                full = [param.full_tensor(), param.redistribute(placements=[Replicate()] * param.device_mesh.ndim)]
            full = [param.full_tensor().detach(), full[0], full[1].to_local(), param.data.full_tensor()]
            found[recipe] += [type(each) is Tensor and torch.equal(each, expected) for each in full]
            # What is not gathered stays as it is.
            same = param.detach().redistribute(placements=param.placements)
            found[recipe] += [type(local_tensor(each)) is QuantizedTensor for each in (same, param.detach())]
    return found


@pytest.mark.parametrize(
    "ranks, how, on",
    on_each_device(
        (1, "fsdp"), long(2, "fsdp"), (3, "fsdp"), long(2, "tp"), (4, "tp"), (2, "hsdp"), (2, "quantized-tp")
    ),
)
def test_full_tensors_are_plain_decoded_values(ranks: int, how: str, on: str) -> None:
    for result in distributed.run(ranks, kinds_of_full_tensors, list(RECIPES), how, on=on):
        for recipe in RECIPES:
            assert len(result[recipe]) == 12 and all(result[recipe]), recipe


def gradient_of_a_full_tensor() -> list[Tensor]:
    weight = QuantizedTensor.from_values(values((4, 32), 1), RECIPES["mxfp8"])
    param = distribute_tensor(weight, distributed.mesh(), [Shard(0)]).requires_grad_()
    (param.full_tensor() * 2).sum().backward()
    assert isinstance(param.grad, DTensor)
    return [local_tensor(param.grad).cpu(), torch.full((4, 32), 2.0)]


@pytest.mark.parametrize("ranks, on", on_each_device((1,)))
def test_full_tensors_pass_gradients_on(ranks: int, on: str) -> None:
    (result,) = distributed.run(ranks, gradient_of_a_full_tensor, on=on)
    assert torch.equal(*result)


# --- from one process to several --------------------------------------------------------------------------------


def save_full(recipes: list[str], folder: str) -> set[type]:
    """Full state dicts of unsharded and sharded models, whose types are returned, and unsharded models' own."""
    found = set()
    for recipe in recipes:
        model = quantized_model(recipe)
        torch.save(model.state_dict(), f"{folder}/{recipe}-own")
        for name, each in (("unsharded", model), ("sharded", fully_shard(quantized_model(recipe)))):
            state = get_model_state_dict(each, options=FULL)
            found |= {type(value) for value in state.values()}
            torch.save(state, f"{folder}/{recipe}-{name}")
    return found


Case = tuple[str, str, str]  # recipe, who saved, how it is loaded
PLACES = [(1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "hsdp")]
LOADS = {"broadcast": BROADCAST, "by every rank": FULL}
# Not all places x recipes x models x loads: each two of them.
LOADED = pairwise(PLACES, list(RECIPES), ["own", "unsharded", "sharded"], list(LOADS))


def load_full(cases: list[Case], how: str, folder: str) -> list[dict[str, Tensor]]:
    """Broadcast from the first rank, or loaded by every rank for itself."""
    found = []
    for recipe, name, load in cases:
        model = fully_shard(quantized_model(recipe, seed=1), mesh=mesh_of(how))
        state = torch.load(f"{folder}/{recipe}-{name}", weights_only=True)
        if load == "broadcast" and dist.get_rank() > 0:
            state = {}
        set_model_state_dict(model, state, options=LOADS[load])
        finish_initialization(model)
        found.append({key: param.full_tensor().detach().cpu() for key, param in model.named_parameters()})
    return found


@pytest.mark.parametrize("ranks, how, on", on_each_device(*PLACES))
def test_state_dicts_of_one_process_load_on_several(ranks: int, how: str, on: str, tmp_path: Path) -> None:
    assert distributed.run(1, save_full, list(RECIPES), str(tmp_path), on=on) == [{Tensor}]
    cases: list[Case] = [case[1:] for case in LOADED if case[0] == (ranks, how)]
    cases += [(recipe, "own", "by every rank") for recipe in RECIPES if (recipe, "own", "by every rank") not in cases]
    results = distributed.run(ranks, load_full, cases, how, str(tmp_path), on=on, timeout=120)
    for number, case in enumerate(cases):
        model = quantized_model(case[0])
        expected = {name: param.detach() for name, param in model.named_parameters()}
        expected |= {k: v.dequantize() for k, v in expected.items() if isinstance(v, QuantizedTensor)}
        for result in results:
            if case[1:] == ("own", "by every rank"):
                assert_same(result[number], expected)  # bytes
            for name, value in result[number].items():  # else the scale may differ by BF16's rounding
                assert torch.allclose(value.float(), expected[name].float(), rtol=2**-7, atol=0), (case, name)
