"""MXFP8's scales are rounded up by default; weights that were saved with the specification's are loaded as they are."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import distributed
from checkpoint_cases import WAYS
from distributed import assert_same, join_all, on_each_device
from fused_optim.memory.layout import MASTER
from fused_optim.quantized import Float8BlockScaling, MXFP8BlockScaling, QuantizedTensor, quantize_model_
from quantized_cases import Run, parameter_parts, plain_model, quantized_model, saved

OLD, NEW = MXFP8BlockScaling(round_up=False), MXFP8BlockScaling()
WRITTEN = Path(__file__).with_name("weights_0.1.pt")  # by version 0.1, whose default was OLD
# Recipes of one format that round in different ways.
PAIRS = [
    (OLD, NEW),
    (NEW, OLD),
    *((Float8BlockScaling(b), Float8BlockScaling(b, True)) for b in ((1, 128), (128, 128))),
]


def relative_error(recipe: MXFP8BlockScaling, values: Tensor) -> float:
    decoded = QuantizedTensor.from_values(values, recipe).values()
    return float((decoded - values).norm() / values.norm())


def test_default_rounding_saturates_nothing() -> None:
    """Of nn.Linear's default initialisation, which is uniform, the specification's scales saturate the largest."""
    weight = nn.Linear(256, 256).weight.detach()
    assert relative_error(NEW, weight) < 0.024 and relative_error(OLD, weight) > 0.045
    scale = QuantizedTensor.from_values(weight, NEW).components["scale"].int()
    assert (weight.view(256, 8, 32).abs().amax(2) <= 448 * torch.exp2(scale - 127.0)).all()


def test_roundings_are_told_apart_and_formats_are_not() -> None:
    assert MXFP8BlockScaling() == MXFP8BlockScaling(round_up=True) != OLD
    assert len({OLD, NEW, MXFP8BlockScaling(True)}) == 2
    for recipe in (OLD, NEW):
        assert pickle.loads(pickle.dumps(recipe)) == recipe
        weight = quantized_model(recipe).even.weight
        for loaded in (pickle.loads(pickle.dumps(weight)), torch.load(saved(weight), weights_only=True)):
            assert loaded.recipe == recipe and loaded.recipe.kernel.round_up == recipe.round_up
    assert OLD.same_format(NEW) and not NEW.same_format(Float8BlockScaling())
    assert not Float8BlockScaling().same_format(Float8BlockScaling((1, 128)))


def test_weights_of_version_0_1_keep_their_rounding() -> None:
    weight = next(w for w in torch.load(WRITTEN, weights_only=True)["weights"] if w.recipe.name == OLD.name)
    assert weight.recipe == OLD
    target = QuantizedTensor.from_values(torch.zeros(weight.shape, dtype=weight.dtype), NEW)
    target.copy_(weight.detach())
    assert all(torch.equal(target.components[name], weight.components[name]) for name in ("data", "scale"))
    assert target.recipe == NEW and torch.equal(target.dequantize(), weight.dequantize())


def bytes_of(model: nn.Module) -> dict[str, Tensor]:
    return join_all([parameter_parts(model)])


@pytest.mark.parametrize("old, new", PAIRS, ids=str)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_another_rounding_load_bytes(
    old: MXFP8BlockScaling, new: MXFP8BlockScaling, assign: bool
) -> None:
    source, model = quantized_model(old), quantized_model(new, seed=1)
    model.load_state_dict(source.state_dict(), assign=assign)
    assert model.uneven.weight.recipe == new
    assert_same(bytes_of(model), bytes_of(source))
    assert not same_bytes(model, quantize_model_(plain_model(new), new))


def same_bytes(model: nn.Module, other: nn.Module) -> bool:
    others = bytes_of(other)
    return all(torch.equal(value, others[name]) for name, value in bytes_of(model).items())


# --- checkpoints ------------------------------------------------------------------------------------------------


def save_old(folder: str) -> dict[str, tuple[torch.Size, Tensor, Tensor]]:
    run = Run(OLD)
    run.train(0, 3)
    WAYS["nested"][0](run, folder)
    return run.snapshot()


def load_new(folder: str) -> list[dict[str, tuple[torch.Size, Tensor, Tensor]]]:
    """The weights alone, in a new model; weights into a model whose masters were loaded before."""
    alone = Run(NEW, fresh=True)
    state = alone.model.state_dict()
    torch.distributed.checkpoint.load({"model": state}, checkpoint_id=folder)
    found = [parameter_parts(alone.model)]
    run = Run(OLD, fresh=True)
    WAYS["nested"][1](run, folder)
    model, optimizer = run.model.state_dict(), run.optimizer.state_dict()
    other = Run(NEW, fresh=True)
    other.optimizer.load_state_dict(optimizer)
    other.model.load_state_dict(model)
    found.append(parameter_parts(other.model))
    return [*found, other.snapshot()]


@pytest.mark.parametrize("ranks, on", on_each_device(((2, 3),), nccl=[((2, 1),)]))
def test_checkpoints_of_the_other_rounding(ranks: tuple[int, int], on: str, tmp_path: Path) -> None:
    """Bytes are kept, whichever of weights and masters is loaded first, and so are masters."""
    expected = join_all(distributed.run(ranks[0], save_old, str(tmp_path / "saved"), on=on))
    results = distributed.run(ranks[1], load_new, str(tmp_path / "saved"), on=on)
    weights = {name: value for name, value in expected.items() if MASTER not in name and "exp_avg" not in name}
    for at in (0, 1):
        assert_same(join_all([result[at] for result in results]), weights)
    masters = join_all([result[2] for result in results])
    masters = {name: value for name, value in masters.items() if MASTER in name}
    assert masters
    assert_same(masters, {name: expected[name] for name in masters})
