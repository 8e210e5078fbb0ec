"""Checkpoints of quantized weights move between ranks byte for byte, and training goes on as if never stopped."""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

import distributed
from checkpoint_cases import STAGERS, WAYS, let_write, start_save
from distributed import Part, assert_same, join_all, long, on_each_device
from fused_optim import FusedAdamW, export_optimizer_checkpoint, load_optimizer_checkpoint, save_master_safetensors
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint import folders as threads
from fused_optim.checkpoint import read as reader
from fused_optim.checkpoint.folders import folder_at
from fused_optim.checkpoint.open import DcpFolder
from fused_optim.memory.layout import MASTER
from fused_optim.quantized import QuantizedTensor, finish_initialization, quantize_model_
from fused_optim.quantized.tensor import operations
from pairwise import each_once_with, pairwise
from quantized_cases import RECIPES, Run, parameter_parts, perceptron, plain_model, same_components
from recipe_checks import END, SAVED_AT, check_checkpoints, load, save, straight

ALL = tuple(RECIPES)


@pytest.mark.parametrize("ranks, on", on_each_device(((2, 3, 1),), long((4, 2, 3, 1)), nccl=[((2, 1, 2, 2),)]))
def test_training_goes_on_on_other_ranks_as_if_never_stopped(ranks: tuple[int, ...], on: str, tmp_path: Path) -> None:
    check_checkpoints(list(RECIPES), ranks, on, str(tmp_path))


# --- ways to save -----------------------------------------------------------------------------------------------

SAVED = ["current", "delayed", "nvfp4", "tiles"]


def save_each_way(recipes: list[str], ways: list[str], folder: str) -> None:
    for recipe in recipes:
        run = Run(recipe)
        run.train(0, SAVED_AT)
        for way in ways:
            WAYS[way][0](run, f"{folder}/{recipe}-{way}")


def load_each_way(recipes: list[str], ways: list[str], folder: str) -> dict[str, list[dict[str, Part]]]:
    found = {}
    for recipe in recipes:
        for way in ways:
            run = Run(recipe, fresh=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                WAYS[way][1](run, f"{folder}/{recipe}-{way}")
            loaded = run.snapshot()
            run.train(SAVED_AT, END)
            found[f"{recipe}-{way}"] = [loaded, run.snapshot()]
    return found


INTERFACES = ["nested", "flat", "plain", "cpu"]
OTHER_RANKS = pytest.mark.parametrize("ranks, on", on_each_device(((2, 3),), nccl=[((2, 1),), ((1, 2),)]))


@pytest.mark.parametrize("way, recipes", each_once_with([(way,) for way in INTERFACES], SAVED), ids=str)
@OTHER_RANKS
def test_every_interface_resumes_training(
    way: str, recipes: list[str], ranks: tuple[int, int], on: str, tmp_path: Path
) -> None:
    distributed.run(ranks[0], save_each_way, recipes, [way], str(tmp_path), on=on)
    results = distributed.run(ranks[1], load_each_way, recipes, [way], str(tmp_path), on=on)
    for name in results[0]:
        for at in (0, 1):
            joined = join_all([result[name][at] for result in results])
            assert_same(joined, straight(ALL, on)[name.split("-")[0]][at])


def save_in_background(
    recipes: list[str], stager: str, folder: str, kind: AsyncCheckpointerType = AsyncCheckpointerType.THREAD
) -> None:
    """Trains on before anything is written; in a group of its own, since steps reduce scales in the default one."""
    group = dist.new_group(backend="gloo")
    for recipe in recipes:
        run = Run(recipe)
        run.train(0, SAVED_AT)
        path, made = f"{folder}/{recipe}-nested", STAGERS[stager]()
        pending = start_save(run, path, kind, made, group)
        run.train(SAVED_AT, END)
        assert not pending.done()
        let_write(path)
        pending.result(timeout=60)
        made.close()


IN_BACKGROUND = ["delayed", "nvfp4", "tiles"]


@pytest.mark.parametrize("stager, recipes", each_once_with([(name,) for name in STAGERS], IN_BACKGROUND), ids=str)
@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_background_saves_hold_the_bytes_of_the_save(
    stager: str, recipes: list[str], ranks: int, on: str, tmp_path: Path
) -> None:
    distributed.run(ranks, save_in_background, recipes, stager, str(tmp_path), on=on, timeout=120)
    (found,) = distributed.run(1, load_each_way, recipes, ["nested"], str(tmp_path), on=on)
    for recipe in recipes:
        assert_same(join_all([found[f"{recipe}-nested"][0]]), straight(ALL, on)[recipe][0])


def serve_saves(rank: int, ranks: int, recipes: list[str], folder: str) -> None:
    """The workers of ``distributed`` are daemons, which may have no children."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")  # of the writing processes
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
        save_in_background(recipes, "shared memory", folder, AsyncCheckpointerType.PROCESS)
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])  # each starts one that imports torch
def test_background_saves_in_a_process_hold_the_bytes_of_the_save(ranks: int, tmp_path: Path) -> None:
    arguments = ranks, IN_BACKGROUND, str(tmp_path)
    mp.start_processes(serve_saves, arguments, nprocs=ranks, start_method="forkserver")
    (found,) = distributed.run(1, load_each_way, IN_BACKGROUND, ["nested"], str(tmp_path))
    for recipe in IN_BACKGROUND:
        assert_same(join_all([found[f"{recipe}-nested"][0]]), straight(ALL, "cpu")[recipe][0])


# --- tensor parallelism -----------------------------------------------------------------------------------------


def save_perceptrons(recipes: list[str], how: str, folder: str) -> None:
    for recipe in recipes:
        run = Run(recipe, how, build=perceptron)
        run.train(0, SAVED_AT)
        save(run, f"{folder}/{recipe}")


def load_perceptrons(recipes: list[str], how: str, folder: str) -> dict[str, list[dict[str, Part]]]:
    found = {}
    for recipe in recipes:
        run = Run(recipe, how, build=perceptron, fresh=True)
        load(run, f"{folder}/{recipe}")
        loaded = run.snapshot()
        run.train(SAVED_AT, END)
        found[recipe] = [loaded, run.snapshot()]
    return found


@pytest.mark.parametrize(
    "ranks, source, target, on",
    on_each_device(
        *[((4, 2), "tp", "fsdp"), ((2, 4), "fsdp", "tp")],
        nccl=[((2, 2), "tp", "fsdp"), ((2, 2), "fsdp", "tp"), ((2, 1), "tp", "fsdp")],
    ),
)
def test_training_moves_between_tensor_parallelism_and_fsdp(
    ranks: tuple[int, int], source: str, target: str, on: str, tmp_path: Path
) -> None:
    recipes = list(RECIPES)
    distributed.run(ranks[0], save_perceptrons, recipes, source, str(tmp_path), on=on)
    results = distributed.run(ranks[1], load_perceptrons, recipes, target, str(tmp_path), on=on)
    for recipe in recipes:
        for at in (0, 1):
            joined = join_all([result[recipe][at] for result in results])
            assert_same(joined, straight(ALL, on, perceptron)[recipe][at])


# --- other recipes ----------------------------------------------------------------------------------------------


def save_models(recipes: list[str], folder: str) -> None:
    for recipe in recipes:
        model = plain_model("mxfp8") if recipe == "plain" else Run(recipe).model
        if recipe == "plain":
            fully_shard(model, mesh=distributed.mesh())
        dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{recipe}")


def load_other(pairs: list[tuple[str, str]], trained: bool, folder: str) -> dict[tuple[str, str], dict[str, Part]]:
    found = {}
    for source, target in pairs:
        run = Run(target, fresh=True)
        if trained:  # the initial values are freed
            run.train(0, 2)
        state = run.model.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{source}")
        run.model.load_state_dict(state)
        finish_initialization(run.model)
        found[source, target] = parameter_parts(run.model)
    return found


@pytest.mark.parametrize("trained", [False, True])
@OTHER_RANKS
def test_checkpoints_of_other_recipes_are_quantized_anew(
    trained: bool, ranks: tuple[int, int], on: str, tmp_path: Path
) -> None:
    pairs = [("current", "mxfp8"), ("mxfp8", "nvfp4"), ("nvfp4", "delayed"), ("plain", "current"), ("plain", "rows")]
    distributed.run(ranks[0], save_models, ["current", "mxfp8", "nvfp4", "plain"], str(tmp_path), on=on)
    results = distributed.run(ranks[1], load_other, pairs, trained, str(tmp_path), on=on)
    for source, target in pairs:
        expected = plain_model("mxfp8")
        if source != "plain":
            quantize_model_(expected, RECIPES[source])
            kept = trained or not RECIPES[target].scales_whole_tensor  # else in the BF16 that initial values are in
            for layer in expected.children():
                layer.weight = nn.Parameter(layer.weight.dequantize(torch.float32 if kept else None))
        quantize_model_(expected, RECIPES[target])
        assert_same(join_all([result[source, target] for result in results]), join_all([parameter_parts(expected)]))


# --- files ------------------------------------------------------------------------------------------------------


def write_files(recipes: list[str], folder: str) -> None:
    for recipe in recipes:
        run = Run(recipe)
        run.train(0, SAVED_AT)
        dcp.save({"model": run.model.state_dict()}, checkpoint_id=f"{folder}/{recipe}-model")
        save_master_safetensors(run.model, run.optimizer, f"{folder}/{recipe}-masters")
        export_optimizer_checkpoint(run.model, run.optimizer, f"{folder}/{recipe}-exported")
        save(run, f"{folder}/{recipe}")


def read_files(recipes: list[str], folder: str) -> dict[str, list[dict[str, Part]]]:
    found = {}
    for recipe in recipes:
        snapshots = []
        for source in (recipe, f"{recipe}-exported"):
            run = Run(recipe, fresh=True)
            state = {"model": run.model.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/{recipe}-model")
            run.model.load_state_dict(state["model"])
            load_optimizer_checkpoint(run.model, run.optimizer, f"{folder}/{source}")
            snapshots.append(run.snapshot())
        # Ranks without rows take over scales with the next update.
        snapshots[1] = {name: v for name, v in snapshots[1].items() if not name.endswith(("tensor_scale", "history"))}
        found[recipe] = snapshots
    return found


@OTHER_RANKS
def test_optimizer_checkpoint_files_hold_quantized_models(ranks: tuple[int, int], on: str, tmp_path: Path) -> None:
    distributed.run(ranks[0], write_files, SAVED, str(tmp_path), on=on)
    results = distributed.run(ranks[1], read_files, SAVED, str(tmp_path), on=on)
    for recipe in SAVED:
        whole = straight(ALL, on)[recipe][0]
        own, exported = (join_all([result[recipe][at] for result in results]) for at in (0, 1))
        assert_same(own, whole)
        for name, value in exported.items():
            if name.endswith(MASTER):  # torch.optim has none: they start from the decoded weights
                weight = name.removesuffix(f": {MASTER}")
                plain = whole.get(f"{weight}: parameter")
                assert (plain is None) or torch.equal(value, plain.float())
            else:
                assert torch.equal(value, whole[name]), name
        masters = {}
        for file in Path(tmp_path, f"{recipe}-masters").glob("*.safetensors"):
            masters |= load_file(file)
        assert len(masters) >= 3
        for name, value in masters.items():
            assert torch.equal(value, whole[f"{name}: {MASTER}"]), name


# --- before the first step --------------------------------------------------------------------------------------


def save_before_the_first_step(recipes: list[str], folder: str) -> dict[str, dict[str, Part]]:
    """And go on."""
    found = {}
    for recipe in recipes:
        run = Run(recipe)
        run.optimizer.initialize_state()
        with Checkpointer(run.model, run.optimizer, f"{folder}/{recipe}") as checkpointer, warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            checkpointer.save(0)
        run.train(0, END)
        found[recipe] = parameter_parts(run.model)
    return found


def load_before_the_first_step(recipes: list[str], folder: str) -> dict[str, dict[str, Part]]:
    found = {}
    for recipe in recipes:
        run = Run(recipe, fresh=True)
        with Checkpointer(run.model, run.optimizer, f"{folder}/{recipe}", readonly=True) as checkpointer:
            assert checkpointer.load_latest() == 0
        run.train(0, END)
        found[recipe] = parameter_parts(run.model)
    return found


@pytest.mark.parametrize("ranks, on", on_each_device(((1, 2),), ((2, 3),), nccl=[((2, 1),)]))
def test_saves_before_the_first_step_hold_the_initial_values(ranks: tuple[int, int], on: str, tmp_path: Path) -> None:
    """In masters, which else would start from codes and scales."""
    for count, run in zip(ranks, (save_before_the_first_step, load_before_the_first_step), strict=True):
        results = distributed.run(count, run, SAVED, str(tmp_path), on=on)
        for recipe in SAVED:
            _, expected = straight(ALL, on)[recipe]
            joined = join_all([result[recipe] for result in results])
            assert_same(joined, {name: expected[name] for name in joined})


def save_weight(recipe: str, folder: str) -> None:
    """Of many rows, so that ranks cut each recipe's blocks nowhere."""
    layer = nn.Linear(128, 512, bias=False, dtype=torch.bfloat16)
    model = quantize_model_(nn.Sequential(layer), RECIPES[recipe])
    fully_shard(model, mesh=distributed.mesh())
    dcp.save(model.state_dict(), checkpoint_id=folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("recipe", ["current", "delayed", "nvfp4"])  # with scales of whole weights
def test_threads_that_read_parts_of_one_weight(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them have looked at the weight before one has written into it, as waits for a GPU let them."""
    distributed.run(4, save_weight, recipe, str(tmp_path))
    rescales = operations._rescales

    def rescales_late(*weights: QuantizedTensor) -> bool:
        found = rescales(*weights)
        time.sleep(0.1)
        return found

    monkeypatch.setattr(operations, "_rescales", rescales_late)
    monkeypatch.setattr(threads, "threads_to_read", lambda: 4)
    monkeypatch.setattr(reader, "threads_to_read", lambda: 4)
    model = nn.Sequential(nn.Linear(128, 512, bias=False, dtype=torch.bfloat16))
    nn.init.ones_(model[0].weight)  # other scales
    quantize_model_(model, RECIPES[recipe])
    DcpFolder(folder_at(tmp_path)).load(model.state_dict())
    weight = model[0].weight
    assert not weight.is_pending and weight.shared.loaded == ()
    whole = {"0.weight": QuantizedTensor.empty(weight.recipe, weight.shape, weight.dtype, weight.device)}
    dcp.load(whole, checkpoint_id=str(tmp_path), no_dist=True)
    assert same_components(weight.detach(), whole["0.weight"])


# Not all recipes x thaws x saves: each two of them.
@pytest.mark.parametrize("recipe, thaw, saved", pairwise(SAVED, [0, 2], [[0], [0, 2], [3]]), ids=str)
def test_saves_change_nothing_that_a_run_computes(recipe: str, thaw: int, saved: list[int], tmp_path: Path) -> None:
    """Those that would lose initial values warn: the first step, not a save, makes states and frees values."""
    found = []
    for steps in ([], saved):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Linear(256, 128, bias=False))
        quantize_model_(model, RECIPES[recipe], lambda module, _: isinstance(module, nn.Linear))
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)
        model[0].requires_grad_(False)
        with Checkpointer(model, optimizer, tmp_path / str(len(steps))) as checkpointer:
            for step in range(4):
                if step in steps:
                    with pytest.warns(UserWarning, match="no masters") if step == 0 else nullcontext():
                        checkpointer.save(step)
                if step == thaw:
                    model[0].requires_grad_(True)
                model(torch.ones(8, 128) * step).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([*optimizer.master_state_dict(model).values(), *(layer.weight.dequantize() for layer in model)])
    assert len(found[0]) == 4 and all(map(torch.equal, *found))


@pytest.mark.parametrize("recipe", SAVED)
def test_saves_that_lose_nothing_do_not_warn(recipe: str, tmp_path: Path) -> None:
    model = quantize_model_(plain_model(recipe, torch.bfloat16, seed=0), RECIPES[recipe], keep_initial=False)
    optimizer = FusedAdamW(model.parameters())
    with Checkpointer(model, optimizer, tmp_path) as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        checkpointer.save(0)
