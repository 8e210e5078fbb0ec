"""Ranks that own different layers, as in pipeline parallelism, write one checkpoint, which loads onto other stages.

Every load goes into freshly built models and optimizers with other values.
"""

from __future__ import annotations

import json
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import distributed
from checkpoint_cases import values
from distributed import Part, assert_same, join, part, shard_like
from fused_optim import FusedAdamW, export_optimizer_checkpoint, load_optimizer_checkpoint, save_master_safetensors
from fused_optim.sharding.model_files import INDEX
from pairwise import each_once

LAYERS = 4
STEPS = 3
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
OPTIONS = {
    "exp_avg_dtype": torch.int8,
    "exp_avg_sq_dtype": torch.float8_e4m3fn,
    "stochastic_rounding": False,  # whose sequence counts the parameters of a stage
}
Layout = tuple[int, str]  # stages, and whether each one's ranks hold "plain" parameters or those of FSDP2


class Stage:
    """This rank's layers, under the names that they have in the whole model, and their optimizer."""

    def __init__(self, layout: Layout, form: str, *, fresh: bool = False) -> None:
        stages, how = layout
        ranks = dist.get_world_size() // stages
        mesh = distributed.mesh(stages, ranks, names=("stage", "shard"))
        own = range(LAYERS)[mesh.get_local_rank("stage") :: stages]
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(i): self._layer(i, fresh) for i in own})
        if how == "fsdp":
            for layer in self.model.layers.values():
                fully_shard(layer, mesh=mesh["shard"])
        decayed = [(name, param) for name, param in self.model.named_parameters() if name.endswith("weight")]
        others = [(name, param) for name, param in self.model.named_parameters() if not name.endswith("weight")]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = FusedAdamW(groups, lr=0.5 if fresh else 0.01, checkpoint_format=form, **OPTIONS)

    @staticmethod
    def _layer(index: int, fresh: bool) -> nn.Module:
        layer = nn.Linear(64, 5 + index, dtype=torch.bfloat16)
        for param in layer.parameters():
            param.data.copy_(values(param.shape, index, fresh))
        return layer

    def train(self, steps: range) -> None:
        """Steps with given gradients."""
        for step in steps:
            for name, param in self.model.named_parameters():
                param.grad = shard_like(values(param.shape, step, int(name.split(".")[1])).to(param.dtype), param)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def snapshot(self) -> dict[str, Part]:
        """Parameters, unscaled states and hyperparameters, by the names of parameters."""
        form, self.optimizer.checkpoint_format = self.optimizer.checkpoint_format, "unscaled"
        states = self.optimizer.state_dict()["state"]
        self.optimizer.checkpoint_format = form
        params = [(param, group) for group in self.optimizer.param_groups for param in group["params"]]
        names = {param: name for name, param in self.model.named_parameters()}
        found = {}
        for index, (param, group) in enumerate(params):
            found[f"{names[param]}: parameter"] = part(param)
            found |= {f"{names[param]}: {key}": part(value) for key, value in states[index].items()}
            settings = [group["lr"], group["weight_decay"], group["step"]]
            found[f"{names[param]}: settings"] = part(torch.tensor(settings, dtype=torch.float64))
        return found


def join_stages(results: list[dict[str, Part]]) -> dict[str, Tensor]:
    """As ``join_all``, where ranks hold different names."""
    names = sorted({name for result in results for name in result})
    return {name: join([result[name] for result in results if name in result]) for name in names}


def save(layout: Layout, form: str, path: str) -> dict[str, Part]:
    stage = Stage(layout, form)
    stage.train(range(STEPS))
    optimizer = get_optimizer_state_dict(stage.model, stage.optimizer, options=FLAT)
    dcp.save({"model": get_model_state_dict(stage.model), "optimizer": optimizer}, checkpoint_id=path)
    return stage.snapshot()


def load(layout: Layout, form: str, path: str, how: str) -> list[dict[str, Part]]:
    stage = Stage(layout, form, fresh=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        state = {"model": get_model_state_dict(stage.model)}
        if how == "set_state_dict":
            state["optimizer"] = get_optimizer_state_dict(stage.model, stage.optimizer, options=FLAT)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(stage.model, state["model"])
        if how == "set_state_dict":
            set_optimizer_state_dict(stage.model, stage.optimizer, state["optimizer"], options=FLAT)
        else:
            report = load_optimizer_checkpoint(stage.model, stage.optimizer, path)
            assert report.source == "fused_optim" and report.steps == (STEPS, STEPS)
    loaded = stage.snapshot()
    stage.train(range(STEPS, 2 * STEPS))
    return [loaded, stage.snapshot()]


def train_whole(form: str) -> dict[str, Part]:
    stage = Stage((1, "plain"), form)
    stage.train(range(2 * STEPS))
    return stage.snapshot()


PLACES: list[tuple[int, Layout]] = [
    (1, (1, "plain")),
    (2, (2, "plain")),
    (2, (2, "fsdp")),
    (4, (2, "fsdp")),
    (3, (1, "fsdp")),
]


MOVES = [
    (PLACES[1], PLACES[0]),
    (PLACES[0], PLACES[1]),
    (PLACES[2], PLACES[0]),
    (PLACES[0], PLACES[2]),
    (PLACES[3], PLACES[1]),
    (PLACES[4], PLACES[3]),
]


@pytest.mark.parametrize("move, form", each_once(product(MOVES, ["unscaled", "native"])), ids=str)
def test_stages_load_onto_other_stages(
    move: tuple[tuple[int, Layout], tuple[int, Layout]], form: str, tmp_path: Path
) -> None:
    source, target = move
    path = str(tmp_path / "checkpoint")
    saved = join_stages(distributed.run(source[0], save, source[1], form, path))
    end = join_stages(distributed.run(1, train_whole, form))
    assert len({name.split(":")[0] for name in saved}) == 2 * LAYERS
    for how in ("set_state_dict", "load_optimizer_checkpoint"):
        results = distributed.run(target[0], load, target[1], form, path, how)
        assert_same(join_stages([result[0] for result in results]), saved)
        assert_same(join_stages([result[1] for result in results]), end)


def first_step_of_one_stage() -> int:
    """A first step asks the other ranks whether all gradients are zero: those of its stage."""
    stage = Stage((2, "fsdp"), "unscaled")
    if dist.get_rank() < 2:
        stage.train(range(1))
    return stage.optimizer.param_groups[0]["step"]


def test_stages_do_not_wait_for_each_other() -> None:
    assert distributed.run(4, first_step_of_one_stage, timeout=20) == [1, 1, 0, 0]


# --- other files ----------------------------------------------------------------------------------------------------


def trained(layout: Layout) -> Stage:
    stage = Stage(layout, "unscaled")
    stage.train(range(STEPS))
    return stage


def save_masters(layout: Layout, path: str) -> dict[str, Part]:
    stage = trained(layout)
    save_master_safetensors(stage.model, stage.optimizer, path)
    return {name: part(value) for name, value in stage.optimizer.master_state_dict(stage.model).items()}


@pytest.mark.parametrize("ranks, layout", [(2, (2, "plain")), (4, (2, "fsdp"))], ids=str)
def test_masters_of_all_stages_are_written(ranks: int, layout: Layout, tmp_path: Path) -> None:
    expected = join_stages(distributed.run(ranks, save_masters, layout, str(tmp_path)))
    index = json.loads((tmp_path / INDEX).read_text())
    files = set(index["weight_map"].values())
    assert len(files) == ranks
    found = {name: value for file in files for name, value in load_file(tmp_path / file).items()}
    assert set(index["weight_map"]) == set(found)
    assert_same(dict(sorted(found.items())), expected)
    assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in found.values())


def export(layout: Layout, path: str) -> dict[str, Part]:
    stage = trained(layout)
    export_optimizer_checkpoint(stage.model, stage.optimizer, path)
    return stage.snapshot()


def load_exported(path: str) -> dict[str, Part]:
    stage = Stage((1, "plain"), "unscaled", fresh=True)
    adamw = torch.optim.AdamW([{"params": group["params"]} for group in stage.optimizer.param_groups], lr=0.5)
    state = {"optimizer": get_optimizer_state_dict(stage.model, adamw, options=FLAT)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(stage.model, adamw, state["optimizer"], options=FLAT)
    return {
        f"{name}: {key}": part(adamw.state[param][key].float())
        for name, param in stage.model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }


def test_exported_stages_load_into_one_torch_optimizer(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = join_stages(distributed.run(2, export, (2, "plain"), path))
    loaded = join_stages(distributed.run(1, load_exported, path))
    assert len(loaded) == 2 * 2 * LAYERS
    for name, value in loaded.items():  # torch.optim keeps moments in the parameters' dtype
        assert torch.equal(value, saved[name].bfloat16().float()), name


def refuse_export(path: str) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        export((2, "plain"), path)
    return str(error.value)


def test_a_file_that_would_lack_other_stages_is_refused(tmp_path: Path) -> None:
    errors = distributed.run(2, refuse_export, str(tmp_path / "checkpoint.pt"))
    assert all("this rank lacks layers." in error and "export to a folder" in error for error in errors)
    assert not list(tmp_path.iterdir())


def refuse_nested(path: str) -> str:
    """torch saves the param groups of one rank only."""
    stage = trained((2, "plain"))
    dcp.save({"optimizer": get_optimizer_state_dict(stage.model, stage.optimizer)}, checkpoint_id=path)
    before = {name: value for name, (_, _, value) in stage.snapshot().items()}
    with pytest.raises((ValueError, RuntimeError)) as error:
        load_optimizer_checkpoint(stage.model, stage.optimizer, path)
    assert_same({name: value for name, (_, _, value) in stage.snapshot().items()}, before)
    return str(error.value)


def test_nested_checkpoints_of_stages_are_refused(tmp_path: Path) -> None:
    errors = distributed.run(2, refuse_nested, str(tmp_path / "checkpoint"))
    assert all("in no param group; " in error and "flatten_optimizer_state_dict=True" in error for error in errors)
