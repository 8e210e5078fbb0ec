"""Checkpoints move between numbers of ranks, placements and state formats; resuming changes no bit.

Every load goes into a freshly built model and optimizer with other values, other hyperparameters and no states.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

import distributed
from cases import FORMAT
from checkpoint_cases import (
    END,
    FORMATS,
    MASTERS,
    SAVED_AT,
    WAYS,
    Run,
    load_nested,
    save_nested,
    straight,
    trained_states,
    values,
)
from distributed import Part, assert_same, join_all, part, same_bits, shard, shard_like, two_gpus
from fused_optim import FusedAdam
from pairwise import each_once


def train_and_save(how: str, master: str, way: str, path: str) -> dict[str, Part]:
    run = Run(how, master)
    run.train(0, SAVED_AT)
    WAYS[way][0](run, path)
    return run.snapshot()


def load_fresh(how: str, master: str, way: str, path: str, formats: Sequence[torch.dtype] = FORMATS) -> Run:
    run = Run(how, master, formats, fresh=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        WAYS[way][1](run, path)
    assert [group["exp_avg_dtype"] for group in run.optimizer.param_groups] == list(formats)
    return run


def load_and_train(how: str, master: str, way: str, path: str) -> list[dict[str, Part]]:
    run = load_fresh(how, master, way, path)
    loaded = run.snapshot()
    run.train(SAVED_AT, END)
    return [loaded, run.snapshot()]


@pytest.fixture(scope="module")
def checkpoints() -> Iterator[Callable[..., str]]:
    """Checkpoints of the half-way run by world size, placement, master and way; each is written once."""
    with tempfile.TemporaryDirectory() as folder:

        @functools.cache
        def saved(world_size: int, how: str, master: str, way: str = "nested", on: str = "cpu") -> str:
            path = str(Path(folder, f"{on}-{world_size}-{how}-{master}-{way}"))
            results = distributed.run(world_size, train_and_save, how, master, way, path, on=on)
            assert_same(join_all(results), straight(master, on)[0])
            return path

        yield saved


def check_resumed(world_size: int, how: str, master: str, way: str, path: str, on: str = "cpu") -> None:
    results = distributed.run(world_size, load_and_train, how, master, way, path, on=on)
    expected = straight(master, on)
    for at in (0, 1):
        joined = trained_states(join_all([result[at] for result in results]))
        assert_same(joined, trained_states(expected[at]))


USUAL_MASTERS = ["float32", "bfloat16", "remainder16"]
MOVES = [
    ((1, "fsdp"), (2, "fsdp")),
    ((2, "fsdp"), (1, "fsdp")),
    ((2, "fsdp"), (3, "fsdp")),
    ((3, "fsdp"), (4, "fsdp")),
    ((4, "fsdp"), (2, "fsdp")),
    ((4, "fsdp"), (4, "hsdp")),
    ((4, "hsdp"), (4, "tp")),
    ((4, "tp"), (3, "fsdp")),
]


@pytest.mark.parametrize("move, master", each_once(product(MOVES, USUAL_MASTERS)), ids=str)
def test_resuming_on_other_ranks_changes_no_bit(
    checkpoints: Callable[..., str], move: tuple[tuple[int, str], tuple[int, str]], master: str
) -> None:
    source, target = move
    check_resumed(*target, master, "nested", checkpoints(*source, master))


@pytest.mark.parametrize("master", ["remainder8", "float16", "no master"])
def test_resuming_with_other_masters_changes_no_bit(checkpoints: Callable[..., str], master: str) -> None:
    check_resumed(3, "fsdp", master, "nested", checkpoints(2, "fsdp", master))


@pytest.mark.parametrize(
    "way, master", each_once(product(["flat", "plain", "cpu", "full", "broadcast"], USUAL_MASTERS))
)
def test_resuming_through_every_interface_changes_no_bit(
    checkpoints: Callable[..., str], way: str, master: str
) -> None:
    check_resumed(3, "fsdp", master, way, checkpoints(2, "fsdp", master, way))


@two_gpus
@pytest.mark.parametrize("way", ["nested", "flat", "plain"])
@pytest.mark.parametrize("source, target", [(1, 2), (2, 1)])
def test_resuming_on_gpus_changes_no_bit(checkpoints: Callable[..., str], source: int, target: int, way: str) -> None:
    path = checkpoints(source, "fsdp", "remainder16", way, on="cuda")
    check_resumed(target, "fsdp", "remainder16", way, path, on="cuda")


# --- other formats ----------------------------------------------------------------------------------------------


def block_of(x: Tensor) -> int:
    """The block that scaled formats cut ``x`` into; 0 where they leave it in FP32."""
    return next((block for block in (128, 64, 32) if x.dim() > 1 and x.shape[1] % block == 0), 0)


def rounding_bound(fmt: torch.dtype, state: str, x: Tensor, block: int) -> Tensor:
    """How far from ``x`` the nearest value of a format may lie."""
    if fmt == torch.bfloat16:
        return x.double().abs() * 2**-8
    if fmt == torch.float32 or not block:
        return torch.zeros_like(x, dtype=torch.float64)
    blocks = x.double().reshape(-1, block)
    top = blocks.abs().amax(1, keepdim=True)
    relative = torch.where(top > 0, blocks.abs() / top, 0)
    if fmt == torch.float16:
        bound = relative * 2**-11 + 2**-38
    elif fmt == torch.float8_e4m3fn and state == "exp_avg":
        bound = relative * 2**-4 + 2**-10 / 448
    elif fmt == torch.float8_e4m3fn:  # of the square root, never rounded to zero
        bound = (relative.sqrt() * (1 + 2**-4) + 2**-9 / 448) ** 2 - relative
    else:  # half a step, of squares never rounded to zero, and the nudge to the top code
        code = FORMAT["int8"].moment(state).code
        largest = top.clamp_min(2.0**-100).numpy()
        coded = code.coded(blocks.abs().numpy(), largest)
        steps = np.where((state == "exp_avg_sq") & (coded < 1), 1.0, 0.5 + 2**-12)
        return torch.from_numpy(code.value(coded + steps, largest) - blocks.abs().numpy()).view_as(x)
    return (bound * top + blocks.abs() * 2**-20).view_as(x)


def load_into_formats(how: str, path: str, formats: list[torch.dtype]) -> dict[str, Part]:
    return load_fresh(how, "bfloat16", "nested", path, formats).snapshot()


@pytest.mark.parametrize("shift", range(1, len(FORMATS)))
def test_states_load_into_other_formats_within_their_rounding(checkpoints: Callable[..., str], shift: int) -> None:
    formats = FORMATS[shift:] + FORMATS[:shift]
    path = checkpoints(2, "fsdp", "bfloat16")
    loaded = trained_states(join_all(distributed.run(3, load_into_formats, "fsdp", path, formats)))
    saved = trained_states(straight("bfloat16")[0])
    assert list(loaded) == list(saved)
    for name, value in loaded.items():
        state = name.split(": ")[1]
        group = next((i for i, fmt in enumerate(FORMATS) if name.startswith(str(fmt).removeprefix("torch."))), None)
        if state not in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(value, saved[name]), name
            continue
        assert group is not None
        error = (value.double() - saved[name].double()).abs()
        assert (error <= rounding_bound(formats[group], state, saved[name], block_of(saved[name]))).all(), name
        assert state == "exp_avg" or (value[saved[name] > 2**-120] > 0).all(), name


# --- direct loads -----------------------------------------------------------------------------------------------


def load_directly(how: str, master: str, source: str) -> list[dict[str, Part]]:
    """The state dict of an optimizer with other placements, handed over without a checkpoint."""
    saved, loaded = Run(source, master), Run(how, master, fresh=True)
    saved.train(0, SAVED_AT)
    loaded.optimizer.load_state_dict(saved.optimizer.state_dict())
    return [loaded.snapshot(), saved.snapshot()]


EXCHANGED = [(3, "fsdp", "plain"), (4, "hsdp", "plain"), (4, "tp", "plain"), (3, "plain", "fsdp")]


@pytest.mark.parametrize("ways, master", each_once(product(EXCHANGED, USUAL_MASTERS)), ids=str)
def test_state_dicts_of_whole_and_sharded_parameters_are_exchangeable(ways: tuple[int, str, str], master: str) -> None:
    world_size, target, source = ways
    results = distributed.run(world_size, load_directly, target, master, source)
    loaded, saved = (join_all([result[i] for result in results]) for i in (0, 1))
    if master == "float32":  # parameters are their own masters, and the model's to save
        loaded, saved = ({k: v for k, v in each.items() if "parameter" not in k} for each in (loaded, saved))
    trained = [{k: v for k, v in each.items() if "frozen" not in k} for each in (loaded, saved)]
    assert_same(*trained)


def load_with_gradients(way: str, path: str) -> dict[str, Part]:
    """Gradients are there already, from which torch.distributed.checkpoint concludes that there are no states."""
    run = Run("fsdp", "bfloat16", fresh=True)
    for param in run.model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    run.optimizer.initialize_state()
    WAYS[way][1](run, path)
    return run.snapshot()


@pytest.mark.parametrize("way", ["nested", "flat"])
def test_initialized_states_are_loaded_whatever_the_gradients(checkpoints: Callable[..., str], way: str) -> None:
    loaded = join_all(distributed.run(3, load_with_gradients, way, checkpoints(2, "fsdp", "bfloat16", way)))
    assert_same(trained_states(loaded), trained_states(straight("bfloat16")[0]))


def long_vectors(seed: int) -> tuple[nn.ParameterList, FusedAdam]:
    """One for every state format."""
    placed = [shard(values((5001,), seed, i), distributed.mesh(), [Shard(0)]) for i in range(len(FORMATS))]
    model = nn.ParameterList([nn.Parameter(vector) for vector in placed])
    pairs = zip(FORMATS, model, strict=True)
    groups = [{"params": [param], "exp_avg_dtype": fmt, "exp_avg_sq_dtype": fmt} for fmt, param in pairs]
    return model, FusedAdam(groups, lr=0.01)


def long_vector_states(optimizer: FusedAdam) -> dict[str, Part]:
    states = optimizer.state_dict()["state"].items()
    return {f"{index} {name}": part(value) for index, state in states for name, value in state.items()}


def save_long_vectors(path: str) -> dict[str, Part]:
    model, optimizer = long_vectors(0)
    for index, param in enumerate(model.parameters()):
        param.grad = shard_like(values(param.shape, index), param)
    optimizer.step()
    optimizer.zero_grad()
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=path)
    return long_vector_states(optimizer)


def load_long_vectors(path: str) -> dict[str, Part]:
    model, optimizer = long_vectors(1)
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state)
    return long_vector_states(optimizer)


def test_long_vectors_load_within_rounding_where_blocks_move(tmp_path: Path) -> None:
    """Blocks of vectors are counted from the start of the shard, so other ranks cut them elsewhere."""
    path = str(tmp_path / "checkpoint")
    saved = join_all(distributed.run(2, save_long_vectors, path))
    loaded = join_all(distributed.run(3, load_long_vectors, path))
    assert list(loaded) == list(saved)
    for name, value in loaded.items():
        index, state = name.split()
        error = (value.double() - saved[name].double()).abs()
        assert saved[name].any()
        # Beside the largest of its own block a value may lie just above a power of two, where int8 is half as fine.
        bound = 2.0 * rounding_bound(FORMATS[int(index)], state, saved[name], block=5001)
        assert (error <= bound).all(), name


# --- forms and special values -----------------------------------------------------------------------------------


def check_saved_forms(how: str) -> None:
    for master in MASTERS:
        check_saved_form(how, master)


def check_saved_form(how: str, master: str) -> None:
    run = Run(how, master)
    run.train(0, 1)
    params = [p for group in run.optimizer.param_groups for p in group["params"] if p.requires_grad]
    for states in (run.optimizer.state_dict()["state"], dict(enumerate(by_name(run)))):
        assert len(states) == len(params)
        for param, saved in zip(params, states.values(), strict=True):
            own_master = param.dtype == torch.float32 or master == "no master"
            assert set(saved) == {"exp_avg", "exp_avg_sq"} | (set() if own_master else {"master_param"})
            for value in saved.values():
                assert isinstance(value, DTensor) and value.dtype == torch.float32
                assert (value.shape, value.stride()) == (param.shape, param.stride())
                assert (value.device_mesh, value.placements) == (param.device_mesh, param.placements)
                assert value._local_tensor.shape == param._local_tensor.shape


def by_name(run: Run) -> list[dict[str, Any]]:
    states = get_optimizer_state_dict(run.model, run.optimizer)["state"]
    return [states[name] for name, param in run.model.named_parameters() if param.requires_grad]


@pytest.mark.parametrize("world_size, how", [(3, "fsdp"), (4, "hsdp"), (4, "tp")])
def test_states_are_saved_as_float32_placed_like_their_parameters(world_size: int, how: str) -> None:
    distributed.run(world_size, check_saved_forms, how)


def save_tensor_lr(path: str) -> None:
    run = Run("fsdp", "bfloat16")
    run.train(0, 1)
    for index, group in enumerate(run.optimizer.param_groups):
        group["lr"] = torch.tensor(0.25 + index)
    save_nested(run, path)


def load_tensor_lr(path: str) -> list[Any]:
    run = Run("fsdp", "bfloat16", fresh=True)
    for group in run.optimizer.param_groups:
        group["lr"] = torch.tensor(0.5)
    load_nested(run, path)
    run.train(1, 2)
    return [group["lr"] for group in run.optimizer.param_groups]


def test_learning_rates_kept_as_tensors_are_loaded(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    distributed.run(1, save_tensor_lr, path)
    for rates in distributed.run(2, load_tensor_lr, path):
        assert all(isinstance(lr, Tensor) for lr in rates)
        assert [float(lr) for lr in rates] == pytest.approx([0.9 * (0.25 + index) for index in range(len(FORMATS))])


def resume_with_frozen_group(way: str, path: str) -> tuple[list[int], bool]:
    """A group of frozen parameters only, as while fine-tuning. Returns the steps, and whether moments were loaded."""
    saved, loaded = Run("fsdp", "bfloat16"), Run("fsdp", "bfloat16", fresh=True)
    for run in (saved, loaded):
        for param in run.optimizer.param_groups[1]["params"]:
            param.requires_grad_(False)
    for _ in range(SAVED_AT):
        for group in (saved.optimizer.param_groups[0], *saved.optimizer.param_groups[2:]):
            for param in group["params"]:
                param.grad = torch.ones_like(param) if param.requires_grad else None
        saved.optimizer.step()
        saved.optimizer.zero_grad()
    WAYS[way][0](saved, path)
    WAYS[way][1](loaded, path)
    first = [
        run.optimizer.get_unscaled_state(run.optimizer.param_groups[0]["params"][0], "exp_avg")
        for run in (saved, loaded)
    ]
    return [group["step"] for group in loaded.optimizer.param_groups], same_bits(*first)


@pytest.mark.parametrize("way", ["nested", "flat", "plain"])
def test_groups_of_frozen_parameters_resume(way: str, tmp_path: Path) -> None:
    results = distributed.run(2, resume_with_frozen_group, way, str(tmp_path / "checkpoint"))
    assert results == [([SAVED_AT, 0, *[SAVED_AT] * (len(FORMATS) - 2)], True)] * 2
