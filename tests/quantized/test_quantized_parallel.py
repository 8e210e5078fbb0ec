"""Quantized weights that are cut, or copied, between ranks: what torch sends of them arrives, or nothing is sent."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import distributed
from distributed import Part, assert_same, join_all, long, on_each_device, part, shard, shard_like
from fused_optim import FusedAdam
from fused_optim.quantized import QuantizedTensor, finish_initialization, quantize_model_
from fused_optim.sharding.dtensor import local_tensor
from pairwise import each_once, pairwise
from quantized_cases import (
    RECIPES,
    WHOLE,
    component_parts,
    gradient,
    mesh_of,
    parameter_parts,
    perceptron,
    tensor_parallel,
    values,
)
from recipe_checks import check_ranks

# --- one weight -------------------------------------------------------------------------------------------------

# Columns that 3 ranks cut between blocks; the last block is short.
COLUMNS = {"tiles": 383, "rows": 383, "mxfp8": 95, "mxfp8up": 95, "nvfp4": 46}


def weight_of(recipe: str, rows: int, columns: int, *seed: int) -> QuantizedTensor:
    given = values((rows, columns), 11, *seed).bfloat16()
    return QuantizedTensor.from_values(given, RECIPES[recipe], keep_initial=True)


def sent_parts(param: Tensor) -> dict[str, Part]:
    """This rank's components and initial values."""
    initial = local_tensor(param).initial_values()
    if isinstance(param, DTensor):
        options = {"shape": param.shape, "stride": param.stride(), "run_check": False}
        initial = DTensor.from_local(initial, param.device_mesh, param.placements, **options)
    return {**component_parts(param), "initial": part(initial)}


Cut = tuple[tuple[int, ...], list[Placement], int, int | None]  # mesh, placements, rows and columns


def distribute(recipes: list[str], cuts: list[Cut], from_first: bool) -> dict[str, list[list[dict[str, Part]]]]:
    """What ranks have of the first one's weight, then of plain values that were written into their parts."""
    found: dict[str, list[list[dict[str, Part]]]] = {}
    for recipe in recipes:
        for mesh, placements, rows, columns in cuts:
            on, columns = distributed.mesh(*mesh), columns or COLUMNS.get(recipe, 10)
            weight = weight_of(recipe, rows, columns, dist.get_rank() if from_first else 0)
            param = distribute_tensor(weight, on, placements, src_data_rank=0 if from_first else None)
            sent = sent_parts(param)
            local_tensor(param).copy_(local_tensor(shard(values((rows, columns), 12).bfloat16(), on, placements)))
            model = nn.Module()
            model.weight = nn.Parameter(param)
            finish_initialization(model)
            found.setdefault(recipe, []).append([sent, component_parts(param)])
    return found


@pytest.mark.parametrize("ranks, from_first, on", on_each_device(*each_once(product([2, 3, 4], [True, False]))))
def test_every_part_of_a_quantized_weight_arrives(ranks: int, from_first: bool, on: str) -> None:
    line = (ranks,)
    cuts: list[Cut] = [(line, [Shard(0)], rows, 40) for rows in (1, 3, 7, 300)]
    cuts += [(line, [Shard(1)], 150, 128 * ranks), (line, [Replicate()], 7, 40)]
    if ranks == 3:
        cuts.append((line, [Shard(1)], 150, None))
    if ranks == 4:
        cuts += [((2, 2), [Replicate(), Shard(1)], 7, 256), ((2, 2), [Shard(0), Shard(1)], 150, 256)]
        cuts += [((2, 2), [Shard(0), Shard(0)], rows, 40) for rows in (3, 301)]
    results = distributed.run(ranks, distribute, list(RECIPES), cuts, from_first, on=on)
    for recipe in RECIPES:
        for number, (_, _, rows, columns) in enumerate(cuts):
            columns = columns or COLUMNS.get(recipe, 10)
            sent, written = (join_all([result[recipe][number][at] for result in results]) for at in (0, 1))
            assert_same(sent, join_all([sent_parts(weight_of(recipe, rows, columns, 0))]))
            new = QuantizedTensor.from_values(values((rows, columns), 12).bfloat16(), RECIPES[recipe])
            assert_same(written, join_all([component_parts(new)]))


def broadcast(recipes: list[str]) -> dict[str, list[Any]]:
    """From the last rank: columns; weights of which only some ranks keep initial values; changed initial values."""
    found, root = {}, dist.get_world_size() - 1
    for recipe in recipes:
        weights = [weight_of(recipe, 130, 256, dist.get_rank()) for _ in range(4)]
        columns, kept, dropped, changed = weights
        (kept if dist.get_rank() != root else dropped).discard_high_precision_init()
        if dist.get_rank() == root:
            changed.mul_(3.0)
        dist.broadcast(columns[:, 128:], root)
        for weight in (kept, dropped, changed):
            dist.broadcast(weight, root)
        after = [weight.values().cpu() for weight in weights]
        found[recipe] = [after, [weight.has_initial for weight in weights], [weight.is_pending for weight in weights]]
    return found


@pytest.mark.parametrize("ranks, on", on_each_device((2,), (3,)))
def test_broadcasts_leave_all_ranks_as_the_root_is(ranks: int, on: str) -> None:
    results = distributed.run(ranks, broadcast, list(RECIPES), on=on)
    for recipe in RECIPES:
        root = weight_of(recipe, 130, 256, ranks - 1)
        for rank, (after, initial, pending) in enumerate(result[recipe] for result in results):
            columns, kept, dropped, changed = after
            assert torch.equal(columns[:, 128:], root.values()[:, 128:])
            if recipe not in WHOLE:  # whose other columns are decoded with the scale that came
                assert torch.equal(columns[:, :128], weight_of(recipe, 130, 256, rank).values()[:, :128])
            assert torch.equal(kept, root.values()) and torch.equal(dropped, root.values())
            assert torch.equal(changed, (root.initial_values().bfloat16() * 3).float())
            assert initial == [True, True, False, True] and pending == [False, False, False, True]


def send_unlike(recipe: str, other: str) -> list[tuple[str, list[str], bool]]:
    """What is wrong, what is raised, and whether nothing changed."""
    found, first = [], dist.get_rank() == 0
    unlike = {
        "recipe": weight_of(recipe if first else other, 8, 256, 1),
        "shape": weight_of(recipe, 8 if first else 16, 256, 1),
        "freed": weight_of(recipe, 8, 256, 1),
    }
    for what, weight in unlike.items():
        if what == "freed" and not first:
            weight.components["data"].untyped_storage().resize_(0)
        before = {name: value.clone() for name, value in weight.components.items() if not weight.is_freed}
        errors = []
        for send in (dist.broadcast, scatter):
            with pytest.raises(RuntimeError) as error:
                send(weight, 0)
            errors.append(str(error.value))
        found.append((what, errors, all(torch.equal(weight.components[name], value) for name, value in before.items())))
    return found


def scatter(weight: QuantizedTensor, source: int) -> None:
    given = [weight.clone() for _ in range(dist.get_world_size())] if dist.get_rank() == source else None
    dist.scatter(weight, given, source)


@pytest.mark.parametrize("recipe, other", [("mxfp8", "nvfp4"), ("delayed", "current")])
@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_what_ranks_do_not_agree_on_raises_on_all_of_them(recipe: str, other: str, ranks: int, on: str) -> None:
    for result in distributed.run(ranks, send_unlike, recipe, other, on=on):
        assert [what for what, _, _ in result] == ["recipe", "shape", "freed"]
        for what, (of_broadcast, of_scatter), unchanged in result:
            assert "c10d.broadcast_" in of_broadcast and "c10d.scatter_" in of_scatter and unchanged, what
            assert all("of one recipe, shape and dtype" in text for text in (of_broadcast, of_scatter)), what


# --- models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master_weights", [True, False])
@pytest.mark.parametrize("ranks, on", on_each_device((2,), (4,)))
def test_tensor_parallelism_of_quantized_models_trains_as_one_rank(master_weights: bool, ranks: int, on: str) -> None:
    check_ranks(list(RECIPES), ranks, "quantized-tp", master_weights, on)


def refuse_cuts(recipe: str) -> list[str]:
    """Tensor parallelism through blocks of columns, after and before the model is quantized."""
    found = []
    for quantized_first in (True, False):
        model = nn.Sequential(nn.Linear(96, 64, bias=False, device=distributed.device()))
        if quantized_first:
            quantize_model_(model, RECIPES[recipe])
        weight = model[0].weight
        with pytest.raises(ValueError) as error:
            param = nn.Parameter(distribute_tensor(weight.detach(), distributed.mesh(), [Shard(1)]))
            model[0].weight = param
            quantize_model_(model, RECIPES[recipe])
        found.append(str(error.value))
        assert quantized_first == (model[0].weight is weight)
    return found


@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_cut_blocks_of_columns_raise_on_all_ranks_and_name_what_fits(ranks: int, on: str) -> None:
    for result in distributed.run(ranks, refuse_cuts, "mxfp8", on=on):
        for text in result:
            assert text.startswith("0.weight") and "to columns 0 to 48 of 96: its blocks have 32 columns" in text
            assert text.endswith("It can be cut on 1, 3 ranks")


def build_on_meta(recipes: list[str]) -> dict[str, dict[str, Part]]:
    """A quantized model without values, tensor parallelism, FSDP2, then values."""
    found = {}
    for recipe in recipes:
        model = tensor_parallel(quantize_model_(perceptron(recipe).to("meta"), RECIPES[recipe]))
        fully_shard(model, mesh=mesh_of("tp")["dp"])
        model.to_empty(device=distributed.device())
        for name, param in model.named_parameters():
            given = shard_like(perceptron(recipe).get_parameter(name).detach(), param)
            local_tensor(param.detach()).copy_(local_tensor(given))
        finish_initialization(model)
        found[recipe] = parameter_parts(model)
    return found


@pytest.mark.parametrize("ranks, on", on_each_device(long(2), (4,)))
def test_models_quantized_on_meta_can_be_parallelized(ranks: int, on: str) -> None:
    results = distributed.run(ranks, build_on_meta, list(RECIPES), on=on)
    for recipe in RECIPES:
        expected = quantize_model_(perceptron(recipe), RECIPES[recipe])
        assert_same(join_all([result[recipe] for result in results]), join_all([parameter_parts(expected)]))


# --- weights of three dims --------------------------------------------------------------------------------------

STACKED = [recipe for recipe in RECIPES if recipe != "tiles"]  # which are of two dims


class Experts(nn.Module):
    """Four experts' matrices in one weight."""

    def __init__(self, *seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(values((4, 64, 32), 15, *seed).bfloat16())


def are_experts(module: nn.Module, _: str) -> bool:
    return isinstance(module, Experts)


def train_experts(recipes: list[str], dim: int | None, first: bool, folder: str) -> dict[str, dict[str, Part]]:
    """Cut in a dim, before or after the model is quantized; not at all without one."""
    found = {}
    for recipe in recipes:
        model = nn.Sequential(Experts())
        if first:
            quantize_model_(model, RECIPES[recipe], are_experts)
        if dim is not None:
            weight = model[0].weight.detach()
            model[0].weight = nn.Parameter(distribute_tensor(weight, distributed.mesh(), [Shard(dim)]))
        if not first:
            quantize_model_(model, RECIPES[recipe], are_experts)
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        for step in range(2):
            model[0].weight.grad = shard_like(gradient((4, 64, 32), 0, step).bfloat16(), model[0].weight)
            optimizer.step()
        if dim is not None:
            dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{recipe}")
        found[recipe] = parameter_parts(model)
    return found


def load_experts(recipes: list[str], folder: str) -> dict[str, dict[str, Part]]:
    """Under FSDP2, which cuts between the experts."""
    found = {}
    for recipe in recipes:
        model = fully_shard(quantize_model_(nn.Sequential(Experts(1)), RECIPES[recipe], are_experts))
        state = model.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{recipe}")
        model.load_state_dict(state)
        found[recipe] = parameter_parts(model)
    return found


CUT_BETWEEN_AND_WITHIN = on_each_device(
    *pairwise([(2, 4), (4, 2)], [0, 1], [True, False]), nccl=[*product([(2, 1)], [0, 1], [True, False])]
)


@pytest.mark.parametrize("worlds, dim, first, on", CUT_BETWEEN_AND_WITHIN)
def test_matrices_in_one_weight_are_cut_between_and_within_them(
    worlds: tuple[int, int], dim: int, first: bool, on: str, tmp_path: Path
) -> None:
    ranks, others = worlds
    (whole,) = distributed.run(1, train_experts, STACKED, None, True, str(tmp_path), on=on)
    results = distributed.run(ranks, train_experts, STACKED, dim, first, str(tmp_path), on=on)
    loaded = distributed.run(others, load_experts, STACKED, str(tmp_path), on=on)
    for recipe in STACKED:
        expected = join_all([whole[recipe]])
        assert_same(join_all([result[recipe] for result in results]), expected)
        assert_same(join_all([result[recipe] for result in loaded]), expected)


def refuse_experts(recipe: str) -> list[str]:
    found = []
    for dim in (1, 2):
        model = quantize_model_(nn.Sequential(Experts()), RECIPES[recipe], are_experts)
        with pytest.raises(RuntimeError) as error:
            fully_shard(model, mesh=distributed.mesh(), shard_placement_fn=lambda _, dim=dim: Shard(dim))
        found.append(str(error.value))
    quantized, plain = quantize_model_(nn.Sequential(Experts()), RECIPES[recipe], are_experts), nn.Sequential(Experts())
    with pytest.raises(RuntimeError) as error:
        distribute_tensor(quantized[0].weight.detach(), distributed.mesh(), [Shard(2)])
    found.append(str(error.value))
    plain[0].weight = nn.Parameter(distribute_tensor(plain[0].weight.detach(), distributed.mesh(), [Shard(2)]))
    with pytest.raises(ValueError) as other:
        quantize_model_(plain, RECIPES[recipe], are_experts)
    return [*found, str(other.value)]


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_other_cuts_of_three_dims_raise_and_name_the_weight(recipe: str, ranks: int, on: str) -> None:
    for result in distributed.run(ranks, refuse_experts, recipe, on=on):
        assert all(text.startswith("0.weight") for text in result)
        by_columns, *others = result
        assert "FSDP2 can shard quantized weights by rows only: placement Shard(0)" in by_columns
        assert all("can be cut in dims 0 and 1 only" in text for text in others)
