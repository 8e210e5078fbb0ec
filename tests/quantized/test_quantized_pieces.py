"""Checkpoints in pieces of any size load into quantized weights, and those of quantized weights into anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import distributed
from distributed import Part, assert_same, join_all, long, on_each_device, part, shard
from fused_optim import FusedAdam
from fused_optim.quantized import QuantizedTensor, finish_initialization, quantize_model_
from fused_optim.quantized.tensor import coverage
from fused_optim.sharding.dtensor import local_tensor
from quantized_cases import RECIPES, WHOLE, component_parts, parameter_parts, values

ROWS, COLUMNS = 300, 160
ON_OTHERS = on_each_device((1,), long(2), (3,))


def layer_of(seed: int = 0) -> nn.Sequential:
    layer = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16, device=distributed.device())
    layer.weight.data.copy_(values((ROWS, COLUMNS), 16, seed))
    return nn.Sequential(layer)


def quantized(recipe: str, seed: int = 0) -> nn.Sequential:
    return quantize_model_(layer_of(seed), RECIPES[recipe])


def load(model: nn.Module, path: str) -> None:
    state = model.state_dict()
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state)


# --- plain pieces -----------------------------------------------------------------------------------------------

PIECES = {"rows": 0, "columns": 1}  # of 75 rows, of 40 columns


def save_plain(folder: str) -> None:
    for name, dim in PIECES.items():
        weight = shard(values((ROWS, COLUMNS), 16, 0).bfloat16(), distributed.mesh(), [Shard(dim)])
        dcp.save({"0.weight": weight}, checkpoint_id=f"{folder}/{name}")


def from_meta(recipe: str) -> nn.Module:
    model = fully_shard(quantize_model_(layer_of().to("meta"), RECIPES[recipe]))
    return model.to_empty(device=distributed.device())


def fresh(recipe: str) -> nn.Module:
    return fully_shard(quantized(recipe, 1))


def trained(recipe: str) -> nn.Module:
    """Whose initial values are freed, and whose optimizer is gone."""
    model = fresh(recipe)
    FusedAdam(model.parameters()).initialize_state()
    return model


MODELS: dict[str, Callable[[str], nn.Module]] = {"meta": from_meta, "fresh": fresh, "trained": trained}


def load_plain(folder: str) -> dict[tuple[str, str, str], dict[str, Part]]:
    found = {}
    for pieces in PIECES:
        for recipe in RECIPES:
            for how, build in MODELS.items():
                model = build(recipe)
                load(model, f"{folder}/{pieces}")
                finish_initialization(model)
                found[pieces, recipe, how] = parameter_parts(model)
    return found


@pytest.mark.parametrize("ranks, on", ON_OTHERS)
def test_plain_checkpoints_in_pieces_of_any_size_load(ranks: int, on: str, tmp_path: Path) -> None:
    distributed.run(4, save_plain, str(tmp_path))
    results = distributed.run(ranks, load_plain, str(tmp_path), on=on)
    assert len(results[0]) == len(PIECES) * len(RECIPES) * len(MODELS)
    for key in results[0]:
        expected = join_all([parameter_parts(quantized(key[1]))])
        assert_same(join_all([result[key] for result in results]), expected)


# --- pieces of quantized weights ----------------------------------------------------------------------------------


def save_quantized(folder: str) -> None:
    for recipe in RECIPES:
        dcp.save(fully_shard(quantized(recipe)).state_dict(), checkpoint_id=f"{folder}/{recipe}")


def load_decoded(folder: str) -> dict[tuple[str, int], dict[str, Part]]:
    """Into plain weights that are cut in other places."""
    found = {}
    for recipe in RECIPES:
        for dim in (0, 1):
            weight = shard(torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16), distributed.mesh(), [Shard(dim)])
            dcp.load({"0.weight": weight}, checkpoint_id=f"{folder}/{recipe}")
            found[recipe, dim] = {"weight": part(weight)}
    return found


def load_bytes(folder: str) -> dict[tuple[str, str], tuple[dict[str, Part], bool]]:
    """Into weights of the same recipe; and whether these are still to be quantized."""
    found = {}
    for recipe in RECIPES:
        for how, build in MODELS.items():
            model = build(recipe)
            load(model, f"{folder}/{recipe}")
            found[recipe, how] = parameter_parts(model), local_tensor(model[0].weight.detach()).is_pending
    return found


def load_anew(folder: str) -> dict[tuple[str, str], dict[str, Part]]:
    """Into weights of another recipe."""
    found = {}
    for source, target in OTHERS:
        model = fresh(target)
        load(model, f"{folder}/{source}")
        finish_initialization(model)
        found[source, target] = parameter_parts(model)
    return found


OTHERS = [("tiles", "mxfp8"), ("tiles", "current"), ("rows", "tiles"), ("nvfp4", "tiles"), ("delayed", "tiles")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Quantized models of two ranks, 150 rows each."""
    folder = str(tmp_path_factory.mktemp("saved"))
    distributed.run(2, save_quantized, folder)
    return folder


@pytest.mark.parametrize("ranks, on", [*ON_OTHERS, *on_each_device((4,))])
def test_quantized_checkpoints_load_into_plain_weights_cut_anywhere(ranks: int, on: str, saved: str) -> None:
    results = distributed.run(ranks, load_decoded, saved, on=on)
    for recipe, dim in results[0]:
        expected = quantized(recipe)[0].weight.detach().dequantize()
        joined = join_all([result[recipe, dim] for result in results])
        assert torch.equal(joined["weight"], expected), (recipe, dim)


@pytest.mark.parametrize("ranks, on", [*ON_OTHERS, *on_each_device((4,))])
def test_bytes_load_wherever_rows_are_cut_and_are_not_quantized_again(ranks: int, on: str, saved: str) -> None:
    results = distributed.run(ranks, load_bytes, saved, on=on)
    for recipe, how in results[0]:
        assert not any(result[recipe, how][1] for result in results), (recipe, how)
        expected = join_all([parameter_parts(quantized(recipe))])
        assert_same(join_all([result[recipe, how][0] for result in results]), expected)


@pytest.mark.parametrize("ranks, on", ON_OTHERS)
def test_other_recipes_quantize_what_the_pieces_decode_to(ranks: int, on: str, saved: str) -> None:
    results = distributed.run(ranks, load_anew, saved, on=on)
    for source, target in OTHERS:
        decoded = quantized(source)[0].weight.detach()
        # What cannot be quantized piece by piece is kept until then, in BF16 as the initial values are.
        decoded = decoded.dequantize(None if target in (*WHOLE, "tiles") else torch.float32)
        expected = QuantizedTensor.from_values(decoded.float(), RECIPES[target])
        joined = join_all([result[source, target] for result in results])
        for name, value in join_all([component_parts(expected)]).items():
            assert torch.equal(joined[f"0.weight: {name}"], value), (source, target, name)


# --- what is loaded and what is not -----------------------------------------------------------------------------


def unfinished(recipe: str) -> QuantizedTensor:
    model = nn.Sequential(nn.Linear(256, 384, bias=False, dtype=torch.bfloat16, device="meta"))
    return quantize_model_(model, RECIPES[recipe]).to_empty(device="cpu")[0].weight.detach()


Piece = tuple[slice, slice]
EVERYWHERE = slice(None)
HALVES: list[list[Piece]] = [
    [(slice(0, 128), EVERYWHERE), (slice(128, 384), EVERYWHERE)],
    [(EVERYWHERE, slice(128, 256)), (EVERYWHERE, slice(0, 128))],
    [(slice(200, 384), EVERYWHERE), (slice(0, 200), slice(0, 128)), (slice(0, 200), slice(128, 256))],
    [(slice(0, 300), EVERYWHERE), (slice(100, 384), EVERYWHERE)],
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("pieces", HALVES)
def test_weights_are_initialised_once_all_of_them_was_loaded(recipe: str, pieces: list[Piece]) -> None:
    source = QuantizedTensor.from_values(values((384, 256), 17).bfloat16(), RECIPES[recipe])
    target = unfinished(recipe)
    for at in pieces:
        assert target.is_pending
        with pytest.raises(RuntimeError, match="of a quantized weight was written since"):
            target.check_quantized()
        target[at].copy_(source[at])
    assert not target.is_pending and torch.equal(target.values(), source.values())
    assert torch.equal(target.initial_values(), source.dequantize().float())


def test_pieces_of_a_grid_become_one_in_any_order() -> None:
    cells = [coverage.Region((r, r + 2), (c, c + 3)) for r in range(0, 8, 2) for c in range(0, 9, 3)]
    for seed in range(50):
        order = random.Random(seed).sample(cells, len(cells))
        found: tuple[coverage.Region, ...] = ()
        for number, cell in enumerate(order):
            assert found != (coverage.Region((0, 8), (0, 9)),)
            found = coverage.joined(found, cell)
            assert sum(_area(each) for each in found) == 6 * (number + 1)
        assert found == (coverage.Region((0, 8), (0, 9)),)


def _area(part: coverage.Region) -> int:
    return (part.rows[1] - part.rows[0]) * (part.columns[1] - part.columns[0])
