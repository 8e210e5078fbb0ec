"""``offload_states``: states in host memory, moved chunk by chunk, give the bits that resident ones give.

Where there is no GPU, the CPU plays one: the states of parameters in host memory are offloaded, too.
"""

from __future__ import annotations

import copy
import io
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distributed
from cases import EACH_FORMAT_AND_MASTER, FORMAT, MASTER, SHAPES, Format, Master, values
from distributed import Part, assert_same, join_all, part, same_bits
from fused_optim import enable_gradient_release
from fused_optim.backends import offloaded
from fused_optim.checkpoint import PinnedStager
from fused_optim.memory.layout import MASTER as MASTER_PARAM
from fused_optim.options import checks
from fused_optim.quantized import Float8CurrentScaling, MXFP8BlockScaling, quantize_model_
from fused_optim.quantized.recipes import Recipe
from fused_optim.sharding.dtensor import Geometry, local_tensor
from fused_optim.state import host_states
from peers import FusedAdam, FusedAdamW

INT8 = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
# Cut into several parts in chunks of 32 kB, or put into one with others.
SIZES = [(40, 256), (7,), (130, 384), (5, 50), (9000,), (0, 128), (3, 96)]


@contextmanager
def offloading(chunk_bytes: int = 1 << 15) -> Iterator[None]:
    with (
        mock.patch.object(host_states, "OFFLOADED_FROM", ("cuda", "cpu")),
        mock.patch.object(offloaded, "CHUNK_BYTES", chunk_bytes),
    ):
        yield


@pytest.fixture(autouse=True)
def _offloading() -> Iterator[None]:
    with offloading():
        yield


def make(
    offload: bool, device: str, fmt: Format = FORMAT["int8"], master: Master = MASTER["bfloat16"], **options: Any
) -> FusedAdamW:
    shapes = [(shape, lambda x: x) for shape in SIZES] + [(shape.shape, shape.layout) for shape in SHAPES]
    params = [
        nn.Parameter(layout(values(shape, master.param_dtype, device, seed=i)))
        for i, (shape, layout) in enumerate(shapes)
    ]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.02, "weight_decay": 0.1}]
    formats = {"exp_avg_dtype": fmt.dtype, "exp_avg_sq_dtype": fmt.dtype}
    return FusedAdamW(groups, lr=0.01, **{**formats, **master.options, **options}, offload_states=offload)


def pair(device: str, *args: Any, **options: Any) -> tuple[FusedAdamW, FusedAdamW]:
    """Offloaded and resident."""
    return make(True, device, *args, **options), make(False, device, *args, **options)


def train(optimizer: FusedAdam, steps: range) -> None:
    for step in steps:
        for i, param in enumerate(optimizer.store.params):
            skipped = i == step  # whose states rest
            param.grad = None if skipped else values(tuple(param.shape), param.dtype, str(param.device), seed=step + i)
        optimizer.step()


def everything(optimizer: FusedAdam) -> list[Tensor]:
    found = [torch.tensor([group["step"] for group in optimizer.param_groups])]
    for param in optimizer.store.params:
        states = [local_tensor(state) for _, state in sorted(optimizer.state[param].items())]
        found += [local_tensor(param.detach()), *states, optimizer.store.layouts[param].scales]
    return [tensor.cpu() for tensor in found]


def assert_alike(ours: FusedAdam, theirs: FusedAdam) -> None:
    for a, b in zip(everything(ours), everything(theirs), strict=True):
        assert same_bits(a, b)


def homes(optimizer: FusedAdam) -> list[bool]:
    """Of each parameter, whether its states are offloaded, as they say themselves."""
    found = []
    for states in optimizer.store:
        home, names = local_tensor(states.param).device, states.layout.offloaded
        tensors = {name: local_tensor(states.tensors[name]) for name in states.layout.names if name in states.tensors}
        there = [tensors[name] for name in names if name in tensors] + [states.layout.scales] * bool(names)
        assert all(tensor.device.type == "cpu" for tensor in there)
        assert home.type == "cpu" or all(tensor.is_pinned() for tensor in there if tensor.numel())
        assert all(tensors[name].device == home for name in tensors.keys() - set(names))
        found.append(bool(names))
    return found


# --- the same bits --------------------------------------------------------------------------------------------------


@EACH_FORMAT_AND_MASTER
def test_every_format(master: Master, fmt: Format, engine: str) -> None:
    ours, theirs = pair(engine, fmt, master)
    for optimizer in (ours, theirs):
        train(optimizer, range(3))
    assert_alike(ours, theirs)
    assert all(homes(ours)) and not any(homes(theirs))


@pytest.mark.parametrize("master", ["float32", "bfloat16+rem8", "bfloat16+float16"])
def test_the_reference_backend(master: str, device: str, use_backend: Callable[[str], None]) -> None:
    use_backend("torch")
    ours, theirs = pair(device, FORMAT["int8"], MASTER[master])
    for optimizer in (ours, theirs):
        train(optimizer, range(2))
    assert_alike(ours, theirs)


@pytest.mark.parametrize("chunk_bytes", [1 << 10, 1 << 20])
def test_any_size_of_chunks(chunk_bytes: int, engine: str) -> None:
    ours, theirs = pair(engine, FORMAT["float16"], MASTER["bfloat16+float16"])
    with offloading(chunk_bytes):
        train(ours, range(2))
    train(theirs, range(2))
    assert_alike(ours, theirs)


@pytest.mark.parametrize("inner", [(60, 60), (12, 30), (3, 7), (1, 4)])
@pytest.mark.parametrize("block", [0, 4])
def test_parts_of_a_shard(inner: tuple[int, int], block: int) -> None:
    """They have the elements of the whole, and whole blocks."""
    whole = Geometry(60, 5, *inner, block)
    with mock.patch("fused_optim.sharding.dtensor._CUT", 4):
        for most in (1, 4, 7, 13, 24, 60):
            cuts = whole.cuts(most)
            parts = [whole.part(a, b) for a, b in itertools.pairwise(cuts)]
            indices = torch.cat([each.global_indices(torch.device("cpu")) for each in parts])
            assert torch.equal(indices, whole.global_indices(torch.device("cpu")))
            assert not block or all(cut % block == 0 for cut in cuts)
            assert len(parts) > 1 or (most >= 12 and block and inner[0] % block) or most == 60


# --- what a step does -----------------------------------------------------------------------------------------------


def test_chunks_are_planned_while_others_are_under_way(engine: str) -> None:
    optimizer = make(True, engine)
    train(optimizer, range(1))
    events: list[str] = []

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (events.append(name), method(*args))[1]

    link = offloaded.HostTransfer
    with (
        offloading(1 << 10),
        mock.patch.object(offloaded, "_cut", noting("planned", offloaded._cut)),
        mock.patch.object(link, "moved", noting("moved", link.moved)),
    ):
        train(optimizer, range(1, 2))
    assert events.index("moved") <= 2 and events.count("planned") > 5


def test_gradients_are_not_kept(engine: str) -> None:
    optimizer = make(True, engine)
    for step in range(2):  # the first describes all shards, the second none
        train(optimizer, range(step, step + 1))
        grads = [weakref.ref(param.grad) for param in optimizer.store.params if param.grad is not None]
        optimizer.zero_grad()
        assert all(grad() is None for grad in grads)


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_with_a_scale(shared: bool, device: str) -> None:
    """Each is divided by it once, whoever has it, too."""
    ours, theirs = pair(device)
    for optimizer in (ours, theirs):
        for step in range(3):
            train_with_scale(optimizer, step, shared)
    assert_alike(ours, theirs)
    for a, b in zip(ours.store.params, theirs.store.params, strict=True):
        assert same_bits(a.grad.cpu(), b.grad.cpu())


def train_with_scale(optimizer: FusedAdam, step: int, shared: bool) -> None:
    params = optimizer.store.params
    device = params[0].device
    flat = values((50000,), params[0].dtype, str(device), seed=step)
    for i, param in enumerate(params):
        begin = 5 * i if shared else 0
        grad = flat[begin : begin + param.numel()].view(param.shape)
        param.grad = grad if shared else grad.clone()
    optimizer.grad_scale = torch.tensor(64.0, device=device)
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.step()


# --- a share --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, "0.9", 1.0])
def test_a_share_stays(fraction: Any, engine: str) -> None:
    ours, theirs = make(True, engine, offload_fraction=fraction), make(False, engine)
    expected = ours.summary()
    for optimizer in (ours, theirs):
        train(optimizer, range(3))
    assert_alike(ours, theirs)
    sizes = [param.numel() for param in ours.store.params]
    moved = sum(size for size, offloads in zip(sizes, homes(ours), strict=True) if offloads)
    assert abs(moved - float(fraction) * sum(sizes)) <= max(sizes) / 2
    assert float(fraction) not in (0.0, 1.0) or moved == float(fraction) * sum(sizes)
    summary = ours.summary()
    assert summary == expected and summary["bytes"] == ours.state_bytes() == theirs.state_bytes()
    assert engine == "cpu" or ((summary["host_bytes"] > 0) == (moved > 0) and summary["device_bytes"] >= 0)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("backend", ["", "torch"], ids=["engine", "torch"])
def test_a_step_counts_once(fraction: float, backend: str, device: str, use_backend: Callable[[str], None]) -> None:
    """Where the device counts steps, and some are skipped."""
    use_backend(backend)
    ours, theirs = make(True, device, offload_fraction=fraction), make(False, device)
    for optimizer in (ours, theirs):
        for step, found_inf in enumerate((0.0, 1.0, 0.0, 0.0)):
            optimizer.grad_scale = torch.tensor(4.0, device=device)
            optimizer.found_inf = torch.tensor(found_inf, device=device)
            train(optimizer, range(step, step + 1))
        optimizer.state_dict()
    assert_alike(ours, theirs)
    assert [group["step"] for group in ours.param_groups] == [3, 3]


def test_a_step_of_resident_states_alone_counts(engine: str) -> None:
    optimizer = make(True, engine, offload_fraction=0.5)
    train(optimizer, range(1))
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device=engine), torch.zeros((), device=engine)
    for param, offloads in zip(optimizer.store.params, homes(optimizer), strict=True):
        param.grad = None if offloads else torch.ones_like(param)
    optimizer.step()
    expected = [1 + any(param.grad is not None for param in group["params"]) for group in optimizer.param_groups]
    assert [group["step"] for group in optimizer.state_dict()["param_groups"]] == expected != [1, 1]


# --- in training loops ----------------------------------------------------------------------------------------------


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    built = nn.Sequential(nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 250, bias=False), nn.Linear(250, 7)).to(dtype)
    with torch.no_grad():
        for i, param in enumerate(built.parameters()):
            param.copy_(values(tuple(param.shape), torch.float32, "cpu", seed=i) * 0.05)
    return built


def optimizer_of(model: nn.Module, offload: bool, **options: Any) -> FusedAdamW:
    return FusedAdamW(list(model.named_parameters()), lr=0.01, offload_states=offload, **INT8, **options)


def train_model(model: nn.Module, optimizer: FusedAdam, steps: range, rank: int = 0) -> None:
    param = next(model.parameters())
    for step in steps:
        inputs = values((6, 128), torch.float32, "cpu", seed=10 * step + rank)
        model(inputs.to(param.device, param.dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_gradient_release(fraction: float, bucket_bytes: int, device: str) -> None:
    first, second = layers().to(device), layers().to(device)
    released, usual = optimizer_of(first, True, offload_fraction=fraction), optimizer_of(second, False)
    enable_gradient_release(first, released, bucket_bytes=bucket_bytes)
    train_model(first, released, range(4))
    train_model(second, usual, range(4))
    assert_alike(released, usual)
    assert any(homes(released))


def test_clipping_and_skipped_steps(device: str) -> None:
    found = []
    for offload in (True, False):
        optimizer = make(offload, device, skip_nonfinite=True)
        for step in range(3):
            for i, param in enumerate(optimizer.store.params):
                param.grad = values(tuple(param.shape), param.dtype, device, seed=step + i)
            if step == 1:
                optimizer.store.params[0].grad.view(-1)[3] = float("nan")
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        assert optimizer.skipped_steps == 1
        optimizer.state_dict()
        found.append(optimizer)
    assert_alike(*found)


def test_diagnostics(device: str) -> None:
    """Of offloaded states by the reference, so that engines add in another order, and on GPUs divide in another way."""
    found = []
    for optimizer in pair(device, FORMAT["int8"], MASTER["bfloat16+rem16"]):
        train(optimizer, range(2))
        found.append(optimizer.diagnostics())
    ours, theirs = (each.scalars(parameters=True) for each in found)
    assert ours == pytest.approx(theirs, rel=1e-9 if device == "cpu" else 1e-3)


# --- states that others read and write ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["unscaled", "native", "torch"])
@pytest.mark.parametrize("master", ["float32", "bfloat16+rem16", "bfloat16+float16"])
def test_state_dicts_go_both_ways(form: str, master: str, device: str) -> None:
    """From offloaded to resident states and back, and what is saved has no memory on a GPU."""
    options = {"checkpoint_format": form, "fmt": FORMAT["int8"], "master": MASTER[master]}
    ours, theirs = pair(device, **options)
    for optimizer in (ours, theirs):
        train(optimizer, range(2))
    saved, expected = ours.state_dict(), theirs.state_dict()
    for own, other in zip(tensors_in(saved), tensors_in(expected), strict=True):
        assert same_bits(own.cpu(), other.cpu())
        assert own.device.type == "cpu" or own.dtype == torch.int32  # checks of rows of the parameter
    for optimizer, state_dict in zip(pair(device, **options), (expected, saved), strict=True):
        for param, source in zip(optimizer.store.params, ours.store.params, strict=True):
            param.data.copy_(source)
        optimizer.load_state_dict(copy.deepcopy(state_dict))
        assert all(homes(optimizer)) == optimizer.offload_states
        if form != "torch":  # which has no masters, and FP32 moments
            assert_alike(optimizer, theirs)
            train(optimizer, range(2, 3))
            whole = copy.deepcopy(theirs)
            train(whole, range(2, 3))
            assert_alike(optimizer, whole)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


@pytest.mark.parametrize("pickled", [False, True])
def test_copies_go_on(pickled: bool, device: str) -> None:
    optimizer = make(True, device)
    train(optimizer, range(2))
    if pickled:
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    else:
        copied = copy.deepcopy(optimizer)
    assert all(homes(copied))
    for each in (optimizer, copied):
        train(each, range(2, 4))
    assert_alike(copied, optimizer)


def test_a_save_is_the_state_at_the_call(device: str) -> None:
    optimizer = make(True, device, FORMAT["float32"], checkpoint_format="native")
    train(optimizer, range(2))
    optimizer.checkpoint_device = "stager"
    expected = [tensor.cpu().clone() for tensor in tensors_in(optimizer.state_dict())]
    staging = PinnedStager(optimizer).stage(optimizer.state_dict())
    train(optimizer, range(2, 4))
    for actual, each in zip(tensors_in(staging.result()), expected, strict=True):
        assert same_bits(actual, each)


@pytest.mark.parametrize("master", ["bfloat16+float32", "bfloat16+float16", "bfloat16+rem16"])
def test_parameters_that_others_write(master: str, device: str) -> None:
    ours, theirs = pair(device, FORMAT["bfloat16"], MASTER[master])
    for optimizer in (ours, theirs):
        train(optimizer, range(2))
        with torch.no_grad():
            optimizer.store.params[0].mul_(0.5)
        train(optimizer, range(2, 3))
        optimizer.store.params[1].data.add_(1.0)
        optimizer.sync_masters_from_params()
        moment = values(SIZES[0], torch.float32, device, seed=9)
        optimizer.set_scaled_state(optimizer.store.params[0], "exp_avg", moment)
        train(optimizer, range(3, 4))
        optimizer.sync_params_from_master()
        with torch.no_grad():
            optimizer.store.params[0].mul_(0.5)
        optimizer.state_dict()  # reads masters, which follow
    assert_alike(ours, theirs)
    for a, b in zip(ours.store.params, theirs.store.params, strict=True):
        for name in ours.state[a]:
            assert same_bits(ours.get_unscaled_state(a, name).cpu(), theirs.get_unscaled_state(b, name).cpu())


def test_states_that_others_have_made_are_adopted(device: str) -> None:
    optimizer = make(True, device, FORMAT["float32"])
    moments = {}
    for i, param in enumerate(optimizer.store.params):
        moments[param] = values(tuple(param.shape), torch.float32, device, seed=i).abs()
        optimizer.state[param] = {"exp_avg": moments[param], "exp_avg_sq": moments[param].clone()}
    optimizer.initialize_state()
    optimizer.state_dict()
    assert all(homes(optimizer))
    for param, moment in moments.items():
        assert same_bits(optimizer.get_unscaled_state(param, "exp_avg").cpu(), moment.cpu())


# --- what is refused, and what has no effect ------------------------------------------------------------------------


def test_what_cannot_be_is_refused() -> None:
    params = [nn.Parameter(torch.ones(4, 128))]
    for options, error in (
        ({"capturable": True}, ValueError),
        ({"offload_fraction": 1.5}, ValueError),
        ({"offload_fraction": "half"}, TypeError),
        ({"offload_states": False, "offload_fraction": 0.5}, ValueError),
    ):
        with pytest.raises(error, match="offload"):
            FusedAdam(params, **{"offload_states": True, **options})


def test_memory_that_is_unlocked_is_noticed(device: str) -> None:
    """Under the same tensors, at the same addresses."""
    optimizer = make(True, device)
    train(optimizer, range(2))
    before = [tensor.clone() for tensor in everything(optimizer)]
    unlocked = optimizer.state[optimizer.store.params[-1]]["exp_avg_sq"]
    with ExitStack() as patches:
        for module in (offloaded, checks):
            patches.enter_context(mock.patch.object(module, "can_be_streamed", lambda state, _: state is not unlocked))
        with pytest.raises(TypeError, match=r"exp_avg_sq: expected page-locked memory"):
            train(optimizer, range(2, 3))
    assert all(map(same_bits, everything(optimizer), before))
    train(optimizer, range(2, 3))


def test_parameters_in_host_memory_have_their_states_there() -> None:
    with mock.patch.object(host_states, "OFFLOADED_FROM", ("cuda",)):
        optimizer = make(True, "cpu")
        with pytest.warns(UserWarning, match="offload_states=True has no effect: all of the .* are in host memory"):
            train(optimizer, range(1))
        assert not any(homes(optimizer))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpu_holds_no_states() -> None:
    params = [nn.Parameter(torch.ones(4096, 256, device="cuda")) for _ in range(8)]
    before = torch.cuda.memory_allocated()
    optimizer = FusedAdamW(params, offload_states=True)
    optimizer.initialize_state()
    assert torch.cuda.memory_allocated() == before and optimizer.state_bytes() == 8 * 8 * 2**20
    for param in params:
        param.grad = torch.ones_like(param)
    grads = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with offloading(1 << 20):
        optimizer.step()
    assert torch.cuda.max_memory_allocated() <= grads + 4 * 2**20
    assert all((state > 0).all() for states in optimizer.state.values() for state in states.values()), "at once"


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), Float8CurrentScaling()], ids=str)
@pytest.mark.parametrize("master", ["float32", "float16", "none"])
def test_masters_of_quantized_weights_stay(master: str, recipe: Recipe, device: str) -> None:
    options = {"float32": {}, "float16": {"master_weight_dtype": "float16"}, "none": {"master_weights": False}}[master]
    found = []
    for offload in (True, False):
        model = layers(torch.bfloat16).to(device)
        quantize_model_(model, recipe, filter_fn=lambda module, name: name == "0")
        optimizer = optimizer_of(model, offload, **options)
        train_model(model, optimizer, range(3))
        found.append(optimizer)
    assert_alike_quantized(*found)
    moved = [name != "0.weight" or master != "float16" for name in found[0].store.names]
    assert homes(found[0]) == moved
    assert found[0].store[found[0].store.params[0]].layout.offloaded == (("exp_avg", "exp_avg_sq") if moved[0] else ())
    summary = found[0].summary()
    (fallback,) = (each for each in summary["fallbacks"] if each["asked"] == "host memory")
    assert fallback["examples"] == ["0.weight"] and fallback["what"] == (MASTER_PARAM if moved[0] else "states")
    assert summary["host_bytes"] + summary["device_bytes"] == found[0].state_bytes() == found[1].state_bytes()
    if device == "cuda":
        assert summary["device_bytes"] == (96 * 128 * 4 if master == "float32" else 0) or master == "float16"


def assert_alike_quantized(*optimizers: FusedAdam) -> None:
    for a, b in zip(*([*each.store] for each in optimizers), strict=True):
        weights = [getattr(local_tensor(each.param), "components", {"": local_tensor(each.param)}) for each in (a, b)]
        assert_same(*({name: value.detach().cpu() for name, value in each.items()} for each in weights))
        for name in a.tensors:
            assert same_bits(local_tensor(a.tensors[name]).cpu(), local_tensor(b.tensors[name]).cpu())


# --- sharded ----------------------------------------------------------------------------------------------------------


def sharded(offload: bool, release: bool = False) -> tuple[nn.Module, FusedAdamW]:
    model = layers(torch.bfloat16).to(distributed.device())
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=distributed.mesh())
    fully_shard(model, mesh=distributed.mesh())
    optimizer = optimizer_of(model, offload, store_param_remainders=True)
    if release:
        enable_gradient_release(model, optimizer, bucket_bytes=0)
    return model, optimizer


def snapshot(optimizer: FusedAdam) -> dict[str, Part]:
    found = {}
    for name, param in zip(optimizer.store.names, optimizer.store.params, strict=True):
        found[str(name)] = part(param)
        found |= {f"{name} {key}": part(state) for key, state in optimizer.state[param].items()}
    return found


def train_sharded(offload: bool, release: bool, folder: str) -> dict[str, Part]:
    """In the middle of it the run is saved by torch.distributed.checkpoint, and goes on in new objects."""
    with offloading():
        model, optimizer = sharded(offload, release)
        rank = torch.distributed.get_rank()
        train_model(model, optimizer, range(2), rank)
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder)
        model, optimizer = sharded(offload, release)
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])
        train_model(model, optimizer, range(2, 4), rank)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = get_optimizer_state_dict(model, optimizer, options=whole)
        assert bool(full) == (rank == 0)
        assert all(homes(optimizer)) == offload
        for param in optimizer.store.params:
            assert all(isinstance(state, DTensor) for state in optimizer.state[param].values())
        return snapshot(optimizer)


@pytest.mark.parametrize("release", [False, True], ids=["", "released"])
@pytest.mark.parametrize(("world_size", "on"), distributed.on_each_device((1,), (2,)))
def test_fsdp(world_size: int, on: str, release: bool, tmp_path: Path) -> None:
    ours, theirs = (
        join_all(distributed.run(world_size, train_sharded, offload, release, str(tmp_path / str(offload)), on=on))
        for offload in (True, False)
    )
    assert_same(ours, theirs)
