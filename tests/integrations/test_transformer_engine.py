"""TransformerEngine's own modules and tensors, updated by FusedAdamW. Runs where it is installed.

Two ranks train under FSDP2, one without it: on one rank torch's FSDP2 gathers the first tensor of a weight only, and
TransformerEngine's weights with scales of blocks consist of two.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import distributed
from distributed import Part, assert_same, join_all, needs_gpus, part, shard_like, two_gpus
from fused_optim import FusedAdamW, adapters
from fused_optim.sharding.dtensor import local_tensor, rewrap_like
from fused_optim.state.param_state import ParamState
from quantized_cases import gradient

missing = importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(missing, reason="no TransformerEngine or no GPU")]

RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling")
WIDTH, SAVED_AT, END = 256, 5, 7
STARTING = 240  # seconds that a run may take: the first one imports the library


# --- modules ----------------------------------------------------------------------------------------------------


def recipe_of(name: str) -> Any:
    from transformer_engine.common import recipe

    return getattr(recipe, name)()


def build(name: str, seed: int) -> nn.Module:
    """Built on the meta device, sharded, then initialised: as TransformerEngine documents it."""
    import transformer_engine.pytorch as te

    context = te.quantized_model_init(enabled=True, recipe=recipe_of(name), preserve_high_precision_init_val=True)
    with context:
        layers = [te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device="meta") for _ in range(2)]
    model = nn.Sequential(*layers)
    if dist.get_world_size() > 1:
        for layer in model:
            fully_shard(layer, mesh=distributed.mesh())
        fully_shard(model, mesh=distributed.mesh())
    torch.cuda.manual_seed(100 * seed + dist.get_rank())  # every shard has values of its own
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def is_quantized(param: Tensor) -> bool:
    return adapters.adapter_of(param) is not None


def train(name: str, model: nn.Module, optimizer: FusedAdamW, first: int, last: int) -> list[dict[str, Tensor]]:
    """Forward and backward passes of the library; the local gradients of each step."""
    import transformer_engine.pytorch as te

    seen = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, WIDTH, generator=generator).to(distributed.device(), torch.bfloat16)
        with te.autocast(enabled=True, recipe=recipe_of(name)):
            out = model(x)
        (out.float() - x.float()).square().mean().backward()
        seen.append({key: local_tensor(p.grad).float().clone() for key, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return seen


def masters(model: nn.Module, optimizer: FusedAdamW) -> dict[str, Tensor]:
    """Of BF16 biases, too, whose states have remainders."""
    return {key: local_tensor(optimizer.store.master(p)).clone() for key, p in model.named_parameters()}


@torch.no_grad()
def decoded(param: Tensor) -> Tensor:
    """This rank's FP32 values."""
    local = local_tensor(param)
    return local.dequantize(dtype=torch.float32) if is_quantized(param) else local.float()


def train_beside_adamw(name: str) -> None:
    model = build(name, seed=0)
    initial = {
        key: local_tensor(p).get_high_precision_init_val().float().to(distributed.device())
        for key, p in model.named_parameters()
        if is_quantized(p)
    }
    assert len(initial) == 2
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    optimizer.initialize_state()
    start = masters(model, optimizer)
    for key, value in initial.items():
        assert torch.equal(start[key], value), key
        assert local_tensor(model.get_parameter(key)).get_high_precision_init_val() is None, key
    plain = {key: nn.Parameter(value) for key, value in start.items()}
    reference = torch.optim.AdamW(plain.values(), lr=0.01)
    for grads in train(name, model, optimizer, 0, SAVED_AT):
        for key, grad in grads.items():
            plain[key].grad = grad
        reference.step()
    for key, value in masters(model, optimizer).items():
        torch.testing.assert_close(value, plain[key].data, rtol=1e-5, atol=1e-6)
    for key in initial:
        param = model.get_parameter(key)
        error = (decoded(param) - plain[key]).norm() / plain[key].norm()
        assert error < 0.05, (key, float(error))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_gpus(2))])
@pytest.mark.parametrize("name", RECIPES)
def test_modules_train_as_with_adamw(name: str, ranks: int) -> None:
    distributed.run(ranks, train_beside_adamw, name, on="cuda", timeout=STARTING)


def follow_amaxes() -> None:
    name, column = "DelayedScaling", 1  # of a linear layer's input, weight and output
    model = build(name, seed=0)
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    train(name, model, optimizer, 0, SAVED_AT)
    largest = []
    for layer in model:
        own = local_tensor(optimizer.state[layer.weight]["master_param"]).abs().max()
        quantizer = local_tensor(layer.weight)._quantizer
        assert quantizer.amax == own
        assert quantizer.amax == layer.fp8_meta["scaling_fwd"].amax_history[0, column]
        dist.all_reduce(own, dist.ReduceOp.MAX)
        largest.append(own)
    train(name, model, optimizer, SAVED_AT, SAVED_AT + 1)
    for layer, amax in zip(model, largest, strict=True):
        of_layer, local = layer.fp8_meta["scaling_fwd"], local_tensor(layer.weight)
        assert of_layer.amax_history[-1, column] == amax  # the forward pass has reduced it over ranks, and moved it on
        scale = 448 / of_layer.amax_history[1:, column].max()
        torch.testing.assert_close(of_layer.scale[column], scale, rtol=1e-6, atol=0)
        assert local._quantizer.scale == of_layer.scale[column]
        assert_rounded_with_own_scale(local, local_tensor(optimizer.state[layer.weight]["master_param"]))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_gpus(2))])
def test_modules_follow_the_amaxes_of_steps(ranks: int) -> None:
    distributed.run(ranks, follow_amaxes, on="cuda", timeout=STARTING)


def keep_groups_off_quantizers() -> None:
    model = build("Float8CurrentScaling", seed=0)
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    train("Float8CurrentScaling", model, optimizer, 0, 2)
    for layer in model:
        local = local_tensor(layer.weight)
        assert local.amax_reduction_group is not None
        assert not local._quantizer.with_amax_reduction
        assert hash(local._quantizer) == hash(copy.deepcopy(local._quantizer))  # raises where it holds a group
        largest = local_tensor(optimizer.state[layer.weight]["master_param"]).abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        codes = decoded(local) * (448 / largest)  # of the scale that all shards have
        torch.testing.assert_close(codes, codes.to(torch.float8_e4m3fn).float(), rtol=1e-5, atol=1e-6)


@two_gpus
def test_groups_of_current_scaling_are_the_tensors() -> None:
    distributed.run(2, keep_groups_off_quantizers, on="cuda", timeout=STARTING)


# --- checkpoints ------------------------------------------------------------------------------------------------


def checkpoint_of(model: nn.Module, optimizer: FusedAdamW) -> dict[str, Any]:
    """Without the modules' own extra states, whose size changes with the first forward."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    of_model = {key: value for key, value in of_model.items() if not key.endswith("_extra_state")}
    return {"model": of_model, "optimizer": of_optimizer}


def start_save(way: str, model: nn.Module, optimizer: FusedAdamW, path: str) -> Callable[[], Any]:
    """Returns when training may go on; what it returns waits for the files."""
    states = checkpoint_of(model, optimizer)
    if way == "sync":
        dcp.save(states, checkpoint_id=path)
        return lambda: None
    return dcp.async_save(states, checkpoint_id=path, process_group=dist.new_group(backend="gloo")).result


def load(model: nn.Module, optimizer: FusedAdamW, path: str) -> None:
    states = checkpoint_of(model, optimizer)
    dcp.load(states, checkpoint_id=path)
    options = StateDictOptions(strict=False)  # the extra states are missing
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"], options=options
    )


def follow_given_gradients(model: nn.Module, optimizer: FusedAdamW) -> None:
    """Steps whose gradients do not depend on the ranks."""
    for step in range(SAVED_AT, END):
        for index, param in enumerate(model.parameters()):
            param.grad = shard_like(gradient(param.shape, index, step).to(param.dtype), param)
        optimizer.step()
        optimizer.zero_grad()


def snapshot(name: str, model: nn.Module, optimizer: FusedAdamW, is_loaded: bool = False) -> dict[str, Part]:
    """Masters, moments and decoded weights.

    Delayed scaling rounds with the scale of the module's extra state, which the checkpoints lack. Its weights are
    compared with their masters under the scale that the module has. ``is_loaded``: no step was made since. Then they
    are rounded twice, by the scale with which they were saved and by this one, and stay so until the next step.
    """
    named = list(model.named_parameters())
    found = {}
    for index, states in optimizer.state_dict()["state"].items():
        found |= {f"{named[index][0]}: {key}": part(value) for key, value in sorted(states.items())}
    for key, param in named:
        if name != "DelayedScaling" or not is_quantized(param):
            found[f"{key}: weight"] = part(rewrap_like(decoded(param), param))
        else:
            check = assert_rounded_twice if is_loaded else assert_rounded_with_own_scale
            check(local_tensor(param), local_tensor(optimizer.state[param]["master_param"]))
    return found


def assert_rounded_with_own_scale(local: Tensor, master: Tensor) -> None:
    scale = local._quantizer.scale
    expected = (master * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
    torch.testing.assert_close(decoded(local), expected, rtol=1e-6, atol=0)


def assert_rounded_twice(local: Tensor, master: Tensor) -> None:
    """Half a step of E4M3 off by each scale, the smaller of which may be twice as coarse for denormals."""
    off = (decoded(local) - master).abs()
    assert (off <= master.abs() * 2.0**-3 + 2.0**-8 / local._quantizer.scale).all()
    assert 0 < off.max() < master.abs().max()


def train_and_save(name: str, way: str, path: str) -> list[dict[str, Part]]:
    """What is saved, and what steps on from there give, which go on during a save in the background."""
    model = build(name, seed=0)
    optimizer = FusedAdamW(model.parameters(), lr=0.01)
    train(name, model, optimizer, 0, SAVED_AT)
    return go_on(name, way, model, optimizer, path)


def load_and_save(name: str, way: str, source: str, path: str) -> list[dict[str, Part]]:
    model = build(name, seed=1)
    optimizer = FusedAdamW(model.parameters(), lr=0.5)
    load(model, optimizer, source)
    found = go_on(name, way, model, optimizer, path, is_loaded=True)
    train(name, model, optimizer, END, END + 1)
    assert all(value.isfinite().all() for value in masters(model, optimizer).values())
    return found


def go_on(
    name: str, way: str, model: nn.Module, optimizer: FusedAdamW, path: str, is_loaded: bool = False
) -> list[dict[str, Part]]:
    before = snapshot(name, model, optimizer, is_loaded)
    wait = start_save(way, model, optimizer, path)
    follow_given_gradients(model, optimizer)
    wait()
    return [before, snapshot(name, model, optimizer)]


@two_gpus
@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("name", RECIPES)
def test_checkpoints_move_between_ranks(name: str, way: str, tmp_path: Path) -> None:
    """Each load is into other values, and what it loaded is saved for the next.

    TransformerEngine cannot cut weights with scales of blocks when a checkpoint is loaded on other ranks: what DCP
    reads of them is lost, and it is the masters that the weights come from.
    """
    saved = distributed.run(2, train_and_save, name, way, f"{tmp_path}/0", on="cuda", timeout=STARTING)
    expected = [join_all([result[at] for result in saved]) for at in (0, 1)]
    for number, ranks in enumerate([2, 1, 2]):
        paths = f"{tmp_path}/{number}", f"{tmp_path}/{number + 1}"
        loaded = distributed.run(ranks, load_and_save, name, way, *paths, on="cuda", timeout=STARTING)
        for at in (0, 1):
            assert_same(join_all([result[at] for result in loaded]), expected[at])


# --- tensors ----------------------------------------------------------------------------------------------------

SHAPE = (256, 128)
GPU = "cuda:0"  # with its number: gradients must be where a tensor says that it is
# Of the nearest value, relative to the master and to the weight's largest magnitude: half the distance of two codes,
# and half the smallest one, with twice the scale where it is rounded to a power of two.
E4M3 = (2**-4, 2**-17)
ERRORS = {
    "Float8": E4M3,
    "Float8CurrentScaling": E4M3,
    "Float8Block": E4M3,
    "MXFP8": E4M3,
    "NVFP4": (2**-2, 2**-4),
}


def delayed_scaling(scale: float) -> Any:
    import transformer_engine.pytorch as te

    return te.Float8Quantizer(*torch.tensor([[scale], [0.0]], device=GPU), te.DType.kFloat8E4M3)


def quantizer_of(kind: str) -> Any:
    import transformer_engine.pytorch as te

    e4m3 = te.DType.kFloat8E4M3
    if kind == "Float8":
        return delayed_scaling(64.0)
    if kind == "Float8CurrentScaling":
        return te.Float8CurrentScalingQuantizer(e4m3, torch.device(GPU))
    if kind.startswith("Float8Block"):
        dims = 1 if kind.endswith("rows") else 2
        return te.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True, block_scaling_dim=dims)
    return te.MXFP8Quantizer(e4m3, columnwise=False) if kind == "MXFP8" else te.NVFP4Quantizer(columnwise=False)


def kernels_missing(kind: str) -> str:
    """Why the library cannot quantize so on this GPU; empty if it can.

    To be asked first: where they are not compiled, its kernels write nothing, or end all work on the GPU.
    """
    import transformer_engine.pytorch as te

    asked = {"MXFP8": te.is_mxfp8_available, "NVFP4": te.is_nvfp4_available}
    return asked[kind](return_reason=True)[1] if kind in asked else ""


def quantized(kind: str, values: Tensor) -> Tensor:
    return quantized_by(quantizer_of(kind), values)


def quantized_by(quantizer: Any, values: Tensor) -> Tensor:
    tensor = quantizer.make_empty(values.shape, dtype=torch.bfloat16, device=GPU)
    tensor.quantize_(values)
    return tensor


def initial_values() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16().float().to(GPU)


def assert_follows_adamw(param: Tensor, optimizer: FusedAdamW, initial: Tensor) -> Tensor:
    """The master after some steps, which is torch's."""
    plain = nn.Parameter(initial.clone())
    reference = torch.optim.AdamW([plain], lr=0.01)
    for step in range(SAVED_AT):
        param.grad = gradient(SHAPE, 0, step).to(GPU, torch.bfloat16)
        plain.grad = param.grad.float()
        optimizer.step()
        reference.step()
    master = optimizer.state[param]["master_param"]
    torch.testing.assert_close(master, plain.data, rtol=1e-5, atol=1e-6)
    assert not torch.equal(master, initial)
    return master


@pytest.mark.parametrize("kind", ERRORS)
def test_tensors_are_their_masters_quantized(kind: str) -> None:
    if reason := kernels_missing(kind):
        pytest.skip(reason)
    param = nn.Parameter(quantized(kind, initial_values()))
    optimizer = FusedAdamW([param], lr=0.01)
    master = assert_follows_adamw(param, optimizer, decoded(param))
    assert torch.equal(decoded(param), decoded(quantized(kind, master)))
    relative, absolute = ERRORS[kind]
    assert ((decoded(param) - master).abs() <= relative * master.abs() + absolute * master.abs().max()).all()


KINDS = ("Float8", "Float8CurrentScaling", "Float8Block", "Float8Block of rows")


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_steps_leave_values(kind: str) -> None:
    param = nn.Parameter(quantized(kind, initial_values()))
    optimizer = FusedAdamW([param], lr=0.01)
    before = decoded(param).clone()
    for skipped in (1.0, 0.0):
        param.grad = gradient(SHAPE, 0, 0).to(GPU, torch.bfloat16)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor([1.0, skipped], device=GPU).split(1)
        optimizer.step()
        assert torch.allclose(decoded(param), before, rtol=1e-6, atol=0) == bool(skipped)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps(kind: str) -> None:
    """Replays continue as eager steps do. Products of backward passes read the same values by columns."""
    captured, eager = (nn.Parameter(quantized(kind, initial_values())) for _ in range(2))
    optimizer, other = (FusedAdamW([param], lr=0.01, capturable=True) for param in (captured, eager))
    for param in (captured, eager):
        param.grad = gradient(SHAPE, 0, 0).to(GPU, torch.bfloat16)
    optimizer.step()
    other.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, 4):
        for param in (captured, eager):
            param.grad.copy_(gradient(SHAPE, 0, step))
        graph.replay()
        other.step()
        assert torch.equal(decoded(captured), decoded(eager))
        for ours, theirs in zip(captured.get_data_tensors(), eager.get_data_tensors(), strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs)


def others_quantizer(kind: str) -> Any:
    """Of weights that this package does not round itself."""
    import transformer_engine.pytorch as te

    if kind == "E5M2":
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2, torch.device(GPU))
    rows, columns = quantizer_of("Float8CurrentScaling"), quantizer_of("Float8Block")
    return te.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns)


OTHERS = ("E5M2", "hybrid")


@pytest.mark.parametrize("kind", KINDS + OTHERS)
def test_masters_follow_writes_and_nothing_else(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(values: Tensor) -> Tensor:
        return quantized_by(others_quantizer(kind) if kind in OTHERS else quantizer_of(kind), values)

    param = nn.Parameter(made(initial_values()))
    optimizer = FusedAdamW([param], lr=0.01)
    with monkeypatch.context() as patch:
        patch.setattr(ParamState, "sync_master_from_param", lambda self: pytest.fail("compared"))
        for step in range(3):
            param.grad = gradient(SHAPE, 0, step).to(GPU, torch.bfloat16)
            optimizer.step()
            optimizer.state_dict()
    before = optimizer.get_unscaled_state(param, "master_param").clone()
    with torch.no_grad():
        param.copy_(before)
    moved = optimizer.get_unscaled_state(param, "master_param") != before
    assert not moved.any()
    if kind == "hybrid":
        return  # in whose ``data`` TransformerEngine lets nothing be set
    param.data = made(-before)
    optimizer.state_dict()
    master = optimizer.get_unscaled_state(param, "master_param")
    assert float((master - decoded(param)).abs().max()) < 0.02 and float((master - before).abs().max()) > 4
