"""No component of a quantized weight is lost by FSDP2, tensor parallelism and distributed checkpoints."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import distributed
from distributed import Part, assert_same, join_all, long, on_each_device
from fused_optim.quantized import QuantizedTensor, quantize_model_
from fused_optim.sharding.dtensor import local_tensor
from quantized_cases import RECIPES, Layers, Run, parameter_parts, perceptron, plain_model, values
from recipe_checks import check_slices_share_memory


def uneven_model(recipe: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Layers:
    """Shards of 2 to 4 ranks are of different sizes, single rows, or empty; some are cut within tiles, some not."""
    rows = (391, 511, 3, 1) if recipe == "tiles" else (97, 3, 1)
    return Layers({f"of{count}": (count, 48) for count in rows}, dtype, seed).to(distributed.device())


def gathered(model: nn.Module) -> dict[str, Part]:
    """The weights that FSDP2 gives to the layers. It gathers no histories."""
    model.unshard()
    return without_histories(parameter_parts(model))


def whole(model: nn.Module) -> dict[str, Tensor]:
    """What :func:`gathered` should find."""
    return join_all([without_histories(parameter_parts(model))])


def without_histories(parts: dict[str, Part]) -> dict[str, Part]:
    return {name: value for name, value in parts.items() if not name.endswith("amax_history")}


def quantized(recipe: str, build: Callable[..., nn.Module]) -> nn.Module:
    return quantize_model_(build(recipe), RECIPES[recipe])


# --- what is sent -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_send_what_they_are_now(recipe: str) -> None:
    """The views that are kept for the next gather are of the shard's memory, whatever became of it."""
    two = SimpleNamespace(size=lambda: 2)
    shard, other = (QuantizedTensor.from_values(torch.randn(128, 128).bfloat16(), RECIPES[recipe]) for _ in range(2))

    def sent(tensor: QuantizedTensor) -> list[Tensor]:
        return [part.clone() for part in tensor.fsdp_pre_all_gather(two)[0]]

    expected = sent(other)
    assert not all(map(torch.equal, sent(shard), expected))
    copied = copy.deepcopy(shard)  # after it has sent something
    shard.copy_(other)
    assert all(map(torch.equal, sent(shard), expected))
    copied.copy_(other)
    assert all(map(torch.equal, sent(copied), expected))
    assert all(map(torch.equal, sent(pickle.loads(pickle.dumps(shard))), expected))
    before = weakref.ref(shard.components["data"])
    shard.data = QuantizedTensor.from_values(torch.zeros(128, 128).bfloat16(), RECIPES[recipe])
    assert before() is None  # as where a model moves to another device
    assert not any(part.any() for part in sent(shard)[:1])
    first, second = (shard.fsdp_pre_all_gather(two)[0] for _ in range(2))
    assert all(a is b for a, b in zip(first, second, strict=True))  # no new views


# --- what is gathered -------------------------------------------------------------------------------------------


def gather_alone(recipes: list[str], replicas: int) -> dict[str, tuple[list[int], dict[str, Part]]]:
    """How many tensors each weight gives to the all-gather of a group of one rank, and what comes of it."""
    found = {}
    for recipe in recipes:
        mesh = distributed.mesh(replicas, 1, names=("replicate", "shard")) if replicas > 1 else distributed.mesh()
        model = fully_shard(quantized(recipe, plain_model), mesh=mesh)
        shards = [local_tensor(param.detach()) for param in model.parameters()]
        group = mesh["shard"] if replicas > 1 else mesh
        inputs = [len(s.fsdp_pre_all_gather(group)[0]) for s in shards if isinstance(s, QuantizedTensor)]
        found[recipe] = inputs, gathered(model)
    return found


@pytest.mark.parametrize("ranks, on", on_each_device((1,), (2,)))
def test_scales_are_gathered_within_the_one_tensor_of_groups_of_one_rank(ranks: int, on: str) -> None:
    for result in distributed.run(ranks, gather_alone, list(RECIPES), ranks, on=on):
        for recipe, (inputs, parts) in result.items():
            assert set(inputs) == {1}, recipe
            assert_same(join_all([parts]), whole(quantized(recipe, plain_model)))


def forward_uneven(recipes: list[str]) -> dict[str, tuple[bool, dict[str, Part]]]:
    """Whether the outputs are those of unsharded weights, and what was gathered for them."""
    found = {}
    for recipe in recipes:
        models = [quantized(recipe, uneven_model) for _ in range(2)]
        fully_shard(models[0], mesh=distributed.mesh())
        x = values((2, 48), 1).bfloat16()
        outputs = [model(x) for model in models]
        found[recipe] = torch.equal(*outputs), gathered(models[0])
    return found


@pytest.mark.parametrize("ranks, on", on_each_device(long(2), (3,), (4,)))
def test_padding_of_uneven_rows_is_trimmed_from_data_and_scales(ranks: int, on: str) -> None:
    for result in distributed.run(ranks, forward_uneven, list(RECIPES), on=on):
        assert list(result) == list(RECIPES)
        for recipe, (same_outputs, parts) in result.items():
            assert same_outputs, recipe
            assert_same(join_all([parts]), whole(quantized(recipe, uneven_model)))


def mixed_model() -> Layers:
    """A layer of every recipe, and a plain one."""
    shapes = {recipe: (300, 20) if recipe == "tiles" else (7 + i, 48) for i, recipe in enumerate(RECIPES)}
    model = Layers({**shapes, "plain": (5, 48)}, torch.bfloat16).to(distributed.device())
    for recipe in RECIPES:
        quantize_model_(model.get_submodule(recipe), RECIPES[recipe])
    return model


def gather_mixed() -> dict[str, Part]:
    model = fully_shard(mixed_model(), mesh=distributed.mesh())
    model(values((2, 48), 1).bfloat16())
    return gathered(model)


@pytest.mark.parametrize("ranks, on", on_each_device(long(1), long(2), (3,)))
def test_recipes_and_plain_parameters_share_an_all_gather(ranks: int, on: str) -> None:
    expected = whole(mixed_model())
    assert {torch.uint8, torch.float32, torch.bfloat16} <= {value.dtype for value in expected.values()}
    for parts in distributed.run(ranks, gather_mixed, on=on):
        assert_same(join_all([parts]), expected)


Gathers = list[tuple[dict[str, Part], dict[str, Part]]]


def gather_between_steps(recipes: list[str], reshard: bool) -> dict[str, Gathers]:
    """Shards and what the layers computed with, at several steps."""
    found = {}
    for recipe in recipes:
        run = Run(recipe, "tp", build=perceptron, lr=4.0, weight_decay=0.0)
        run.model.set_reshard_after_forward(reshard)
        found[recipe] = []
        for step in (1, 2, 3):
            shards = without_histories(parameter_parts(run.model))
            output = run.model(values((3, run.model.up.in_features), 9).bfloat16())
            found[recipe].append((shards, gathered(run.model)))
            output.float().sum().backward()
            run.set_gradients(step)
            run.optimizer.step()
    return found


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("ranks, on", on_each_device((4,), nccl=[(2,)]))
def test_every_component_is_gathered_anew_over_tensor_parallel_shards(reshard: bool, ranks: int, on: str) -> None:
    results = distributed.run(ranks, gather_between_steps, list(RECIPES), reshard, on=on)
    for recipe in RECIPES:
        found = []
        for at in range(3):
            shards, parts = (join_all([result[recipe][at][kind] for result in results]) for kind in (0, 1))
            assert_same(parts, shards)
            found.append(parts)
        for name, value in found[-1].items():
            assert not torch.equal(value, found[0][name]), (recipe, name)


# --- what checkpoints are loaded into ---------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_slices_share_the_memory_of_every_component(recipe: str) -> None:
    check_slices_share_memory(recipe)


def load_and_save(
    recipes: list[str], build: Callable[..., nn.Module], how: str, source: str | None, target: str
) -> dict[str, dict[str, Part]]:
    """What is loaded in place, by torch.distributed.checkpoint alone, into a model with other values."""
    found = {}
    for recipe in recipes:
        model = Run(recipe, how, build=build, fresh=source is not None).model
        if source is not None:
            dcp.load(model.state_dict(), checkpoint_id=f"{source}/{recipe}")
        dcp.save(model.state_dict(), checkpoint_id=f"{target}/{recipe}")
        found[recipe] = gathered(model)
    return found


Stage = tuple[int, str]  # ranks, and how they shard


def check_moves(build: Callable[..., nn.Module], stages: list[Stage], folder: Path, on: str) -> None:
    """Every stage loads what the one before it saved."""
    source = None
    for number, (ranks, how) in enumerate(stages):
        target = f"{folder}/{number}"
        results = distributed.run(ranks, load_and_save, list(RECIPES), build, how, source, target, on=on)
        source = target
        for recipe in RECIPES:
            assert_same(join_all([result[recipe] for result in results]), whole(quantized(recipe, build)))


@pytest.mark.parametrize("ranks, on", on_each_device(((2, 3),), nccl=[((2, 1),), ((1, 2),)]))
def test_checkpoints_are_read_into_the_shards_themselves(ranks: tuple[int, int], on: str, tmp_path: Path) -> None:
    check_moves(uneven_model, [(count, "fsdp") for count in ranks], tmp_path, on)


@pytest.mark.parametrize("ranks, on", on_each_device(((4, 2, 4),), nccl=[((2, 2, 1),)]))
def test_strided_shards_of_tensor_parallelism_reshard_byte_for_byte(
    ranks: tuple[int, int, int], on: str, tmp_path: Path
) -> None:
    first, *others = ranks
    assert any(distributed.run(first, has_strided_shards, on=on))
    check_moves(perceptron, [(first, "tp"), *((count, "fsdp") for count in others)], tmp_path, on)


def has_strided_shards() -> bool:
    return type(Run("mxfp8", "tp", build=perceptron).model.up.weight.placements[0]) is not Shard
