"""What others write into parameters is where the next step starts, for every kind of master and backend."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import distributed
from distributed import assert_same, join_all, part, shard
from fused_optim import save_master_safetensors
from fused_optim.formats.masters import Master, split_remainder
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize_model_,
)
from fused_optim.state.param_state import ParamState
from fused_optim.step.plan import Plan
from pairwise import pairwise
from peers import FusedAdamW

INT8 = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
SHAPE = (6, 128)
DTYPES = [torch.bfloat16, torch.float16]
MASTERS: list[dict[str, Any]] = [
    {},
    {"store_param_remainders": True},
    {"store_param_remainders": True, "param_remainder_bits": 8},
    {"master_weights": False, "stochastic_rounding": False},
    {"master_weight_dtype": torch.float16},
]


def values(seed: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def build(dtype: torch.dtype, device: str = "cpu", **options: Any) -> tuple[nn.Parameter, FusedAdamW]:
    param = nn.Parameter(values(0, dtype).to(device))
    return param, FusedAdamW([param], lr=1e-3, **{"weight_decay": 0.0, "store_param_remainders": False, **options})


def step(param: Tensor, optimizer: torch.optim.Optimizer, seed: int) -> None:
    param.grad = values(100 + seed, param.dtype).to(param.device)
    optimizer.step()


def from_state_dict(param: nn.Parameter, new: Tensor) -> None:
    module = nn.Module()
    module.weight = param
    module.load_state_dict({"weight": new})


def by_copy(param: nn.Parameter, new: Tensor) -> None:
    with torch.no_grad():
        param.copy_(new)


def by_new_memory(param: nn.Parameter, new: Tensor) -> None:
    """As torch's averagers of PostLocalSGD."""
    param.data = new.clone()


WRITES: list[Callable[[nn.Parameter, Tensor], None]] = [from_state_dict, by_copy, by_new_memory]


def check_follows(master: Tensor, written: Tensor) -> None:
    """It is what was written, except where that happened to be the rounded master."""
    assert torch.equal(master.to(written.dtype), written)
    assert float((master == written.float()).float().mean()) > 0.95


EVERY_BACKEND = pytest.mark.parametrize("any_backend", ["torch", "engine"], indirect=True)


@pytest.mark.parametrize(  # not the product: each two
    "dtype, master, write, any_backend",
    pairwise(DTYPES, MASTERS, WRITES, ["torch", "engine"]),
    indirect=["any_backend"],
)
def test_the_next_step_starts_there(
    dtype: torch.dtype, master: dict[str, Any], write: Callable[[nn.Parameter, Tensor], None], any_backend: str
) -> None:
    """As torch.optim with FP32 masters that were set to what was written; moments go on."""
    if dtype == torch.float16:
        master = {k: v for k, v in master.items() if "remainder" not in k}
    param, optimizer = build(dtype, any_backend, **master)
    reference = nn.Parameter(values(0, dtype).float().to(any_backend))
    expected = torch.optim.AdamW([reference], lr=1e-3, weight_decay=0.0)
    for seed in range(8):
        if seed == 4:
            new = values(1, dtype).to(any_backend)
            write(param, new)
            with torch.no_grad():
                reference.copy_(new)
        step(param, optimizer, seed)
        reference.grad = values(100 + seed, dtype).float().to(any_backend)
        expected.step()
    torch.testing.assert_close(param.float(), reference, rtol=2**-7, atol=2e-3)


@EVERY_BACKEND
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_that_were_not_written_keep_their_masters(dtype: torch.dtype, any_backend: str) -> None:
    """Bit for bit, so that a clamp which touches one element costs the others nothing."""
    (param, optimizer), (other, untouched) = build(dtype, any_backend), build(dtype, any_backend)
    for seed in range(5):
        step(param, optimizer, seed)
        step(other, untouched, seed)
    with torch.no_grad():
        param[2, 5] = 7.0
        param.mul_(1.0)
    masters = [
        each.get_unscaled_state(p, "master_param").clone() for p, each in ((param, optimizer), (other, untouched))
    ]
    changed = masters[0] != masters[1]
    assert int(changed.sum()) == 1 and masters[0][2, 5] == 7.0
    step(param, optimizer, 5)
    step(other, untouched, 5)
    same = torch.ones(SHAPE, dtype=torch.bool)
    same[2, 5] = False
    assert torch.equal(param.cpu()[same], other.cpu()[same]) and abs(float(param[2, 5]) - 7.0) < 0.1


def swap_averages(dtype: torch.dtype, options: dict[str, Any], middle: str) -> None:
    """As without the swap, bit for bit: documented in training_loops.md."""
    runs = []
    for swaps in (True, False):
        full = values(0, dtype)
        several = dist.is_initialized()
        param = nn.Parameter(shard(full, distributed.mesh(), [Shard(0)]) if several else full)
        optimizer = FusedAdamW([param], lr=1e-3, **{"store_param_remainders": False, **options})
        for seed in range(6):
            param.grad = distributed.shard_like(values(100 + seed, dtype), param)
            optimizer.step()
            if swaps and seed == 3:
                trained, kept = param.detach().clone(), {}
                if middle == "kept masters" and "master_param" in optimizer.state[param]:
                    kept = {"master_param": optimizer.get_unscaled_state(param, "master_param").clone()}
                with torch.no_grad():
                    param.mul_(0.99)
                    if middle:
                        optimizer.state_dict()
                    param.copy_(trained)
                for name, master in kept.items():
                    optimizer.set_scaled_state(param, name, master)
        runs.append({"param": part(param), "master": part(optimizer.store.master(param))})
    assert_same(*[{name: value for name, (_, _, value) in run.items()} for run in runs])


SWAPS = [("", master) for master in MASTERS] + [("kept masters", master) for master in MASTERS]
SWAPS += [("a state dict", {"store_param_remainders": True}), ("a state dict", {"master_weights": False})]


@pytest.mark.parametrize("middle, master", SWAPS, ids=str)
@pytest.mark.parametrize("ranks", [0, 2])
def test_averages_are_swapped_in_and_out(middle: str, master: dict[str, Any], ranks: int) -> None:
    for dtype in DTYPES if "store_param_remainders" not in master else DTYPES[:1]:
        if ranks:
            distributed.run(ranks, swap_averages, dtype, master, middle)
        else:
            swap_averages(dtype, master, middle)


@EVERY_BACKEND
def test_without_a_write_nothing_is_compared(any_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, state dicts, gradients, views, forward and backward passes move nothing that counts."""
    param, optimizer = build(torch.bfloat16, any_backend)
    step(param, optimizer, 0)
    monkeypatch.setattr(ParamState, "sync_master_from_param", lambda self: pytest.fail("compared"))
    for seed in range(1, 4):
        (param * 2).sum().backward()
        param.detach(), param.view(-1), param[1:].float(), list(param.unbind())
        step(param, optimizer, seed)
        optimizer.state_dict()
        optimizer.get_unscaled_state(param, "master_param")
        optimizer.zero_grad()


@EVERY_BACKEND
def test_slices_of_one_tensor_share_a_counter(any_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron-LM's, which are views of its buffers: the steps of the others are no writes."""
    whole = values(0, torch.bfloat16, (8, 512)).to(any_backend)
    slices = [row[:500].detach() for row in whole]
    optimizer = FusedAdamW(slices, lr=1e-3, store_param_remainders=False, **INT8)
    follow, compared = ParamState.sync_master_from_param, []
    monkeypatch.setattr(ParamState, "sync_master_from_param", lambda self: compared.append(self.param) or follow(self))
    for seed in range(4):
        for index, param in enumerate(slices):
            param.grad = values(10 * seed + index, torch.bfloat16, (500,)).to(any_backend)
        optimizer.step()
    optimizer.state_dict()
    assert not compared
    whole[3].fill_(2.0)
    assert torch.equal(
        optimizer.get_unscaled_state(slices[3], "master_param"), torch.full((500,), 2.0, device=any_backend)
    )
    assert len(compared) == 8


@EVERY_BACKEND
@pytest.mark.parametrize("master", [{}, {"master_weight_dtype": torch.float16}], ids=str)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("has_gradient", [True, False])
def test_parameters_that_are_not_contiguous(
    any_backend: str, master: dict[str, Any], write: Callable[[nn.Parameter, Tensor], None], has_gradient: bool
) -> None:
    param = nn.Parameter(values(0, torch.float16, SHAPE[::-1]).to(any_backend).t())
    optimizer = FusedAdamW([param], lr=1e-3, weight_decay=0.0, store_param_remainders=False, **master)
    for seed in range(3):
        step(param, optimizer, seed)
    new = values(1, torch.float16, SHAPE[::-1]).to(any_backend).t()
    write(param, new)
    if not has_gradient:
        optimizer.zero_grad()
        optimizer.step()
        check_follows(optimizer.get_unscaled_state(param, "master_param"), new)
    step(param, optimizer, 4)
    assert not param.is_contiguous() and float((param - new).abs().max()) < 0.05


@EVERY_BACKEND
def test_writes_through_data_are_said_by_hand(any_backend: str) -> None:
    param, optimizer = build(torch.bfloat16, any_backend)
    step(param, optimizer, 0)
    new = values(1, torch.bfloat16).to(any_backend)
    param.data.copy_(new)
    optimizer.sync_masters_from_params()
    check_follows(optimizer.get_unscaled_state(param, "master_param"), new)
    step(param, optimizer, 1)
    assert float((param - new).abs().max()) < 0.05


@pytest.mark.parametrize("master", MASTERS[:3], ids=str)
@pytest.mark.parametrize("fill", [nn.init.zeros_, nn.init.ones_, nn.init.normal_])
def test_initialised_parameters_have_finite_masters(fill: Callable[[Tensor], Tensor], master: dict[str, Any]) -> None:
    """Remainders complete whatever is there: to a finite value that rounds to it."""
    param, optimizer = build(torch.bfloat16, **master)
    for seed in range(3):
        step(param, optimizer, seed)
    fill(param)
    written = param.detach().clone()
    masters = optimizer.master_state_dict(nn.ParameterList([param]))["0"]
    half_up, _ = split_remainder(masters, Master.REMAINDER16)
    assert bool(masters.isfinite().all()) and torch.equal(half_up, written)
    for seed in range(3):
        step(param, optimizer, seed)
    assert bool(param.isfinite().all()) and float((param - written).abs().max()) < 0.1


@pytest.mark.parametrize("way", ["state_dict", "native", "copy", "pickle", "masters"])
def test_what_is_saved_right_after_a_write_is_right(way: str, tmp_path: Any) -> None:
    param, optimizer = build(torch.bfloat16, checkpoint_format="native" if way == "native" else "unscaled", **INT8)
    step(param, optimizer, 0)
    new = values(1, torch.bfloat16)
    by_copy(param, new)
    if way in ("state_dict", "native"):
        found = optimizer.state_dict()["state"][0]["master_param"]
    elif way == "masters":
        pytest.importorskip("safetensors")
        from safetensors.torch import load_file

        save_master_safetensors(nn.ParameterList([param]), optimizer, tmp_path)
        found = load_file(next(tmp_path.glob("*.safetensors")))["0"]
    else:
        other = copy.deepcopy(optimizer) if way == "copy" else pickle.loads(pickle.dumps(optimizer))
        (copied,) = other.param_groups[0]["params"]
        found = other.get_unscaled_state(copied, "master_param").clone()
        step(copied, other, 1)
        assert float((copied - new).abs().max()) < 0.05
    check_follows(found, new)


def test_a_write_that_another_thread_follows_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save in the background looks for writes, too, here in the midst of a step."""
    (param, optimizer), (other, expected) = build(torch.bfloat16), build(torch.bfloat16)
    for each, its in ((param, optimizer), (other, expected)):
        step(each, its, 0)
        with torch.no_grad():
            each.mul_(0.5)
    follow, threads = Plan._sync_shard, []

    def follow_twice(plan: Plan, *shard: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=optimizer.stepper.sync_written_masters))
            threads[0].start()
            threads[0].join()
        follow(plan, *shard)

    monkeypatch.setattr(Plan, "_sync_shard", follow_twice)
    step(param, optimizer, 1)
    monkeypatch.undo()
    step(other, expected, 1)
    assert threads and torch.equal(param, other)
    assert torch.equal(optimizer.state[param]["master_param"], expected.state[other]["master_param"])


def test_a_loaded_state_dict_is_not_undone_by_an_earlier_write() -> None:
    param, optimizer = build(torch.bfloat16)
    for seed in range(3):
        step(param, optimizer, seed)
    saved, weights = copy.deepcopy(optimizer.state_dict()), param.detach().clone()
    by_copy(param, values(1, torch.bfloat16))
    optimizer.load_state_dict(saved)
    assert torch.equal(param, weights)
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), saved["state"][0]["master_param"])


# --- quantized weights --------------------------------------------------------------------------------------------


RECIPES = [
    Float8CurrentScaling(),
    Float8DelayedScaling(),
    Float8BlockScaling(),
    Float8BlockScaling(block=(1, 128)),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
]


@EVERY_BACKEND
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.name}{getattr(recipe, 'block', '')}")
def test_quantized_weights(recipe: Any, any_backend: str) -> None:
    """Loaded plain values start the masters where they differ; a write of the same bytes changes no master."""
    layer = nn.Linear(128, 128, bias=False, device=any_backend).bfloat16()
    quantize_model_(layer, recipe)
    optimizer = FusedAdamW(layer.parameters(), lr=1e-3, store_param_remainders=False, **INT8)
    for seed in range(3):
        layer.weight.grad = values(seed, torch.bfloat16, (128, 128)).to(any_backend)
        optimizer.step()
    before = optimizer.get_unscaled_state(layer.weight, "master_param").clone()
    with torch.no_grad():
        layer.weight.copy_(layer.weight.detach().clone())
    assert torch.equal(optimizer.get_unscaled_state(layer.weight, "master_param"), before)
    new = values(50, torch.bfloat16, (128, 128)).to(any_backend)
    layer.load_state_dict({"weight": new})
    layer.weight.grad = torch.zeros(128, 128, dtype=torch.bfloat16, device=any_backend)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    decoded = layer.weight.dequantize().float()
    assert float((decoded - new.float()).norm() / new.float().norm()) < 0.15
    master = optimizer.get_unscaled_state(layer.weight, "master_param")
    assert float((master - new.float()).norm() / new.float().norm()) < 0.15


# --- several ranks ------------------------------------------------------------------------------------------------


def load_into_fsdp(write: str) -> dict[str, Any]:
    """``get_state_dict`` has made masters of random weights; then a model is loaded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 33, bias=False), nn.Linear(33, 64, bias=False)).bfloat16()
    for layer in model:
        fully_shard(layer, mesh=distributed.mesh())
    fully_shard(model, mesh=distributed.mesh())
    optimizer = FusedAdamW(model.parameters(), lr=1e-4, store_param_remainders=False, **INT8)
    get_optimizer_state_dict(model, optimizer)
    if write == "after a step":
        model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    new = {
        key: values(7 + i, torch.bfloat16, tuple(value.shape))
        for i, (key, value) in enumerate(get_model_state_dict(model).items())
    }
    if write == "clamp":
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.01, 0.01)
        new = {key: value.full_tensor() for key, value in model.state_dict().items()}
    elif write == "local":
        for key, param in model.named_parameters():
            assert isinstance(param, DTensor)
            with torch.no_grad():
                param._local_tensor.copy_(shard(new[key], distributed.mesh(), [Shard(0)])._local_tensor)
    else:
        set_model_state_dict(model, {key: shard(value, distributed.mesh(), [Shard(0)]) for key, value in new.items()})
    model(torch.ones(4, 64, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    found = {}
    for key, param in model.named_parameters():
        found[key] = part(param)
        found[f"{key} new"] = part(shard(new[key], distributed.mesh(), [Shard(0)]))
    return found


@pytest.mark.parametrize("write", ["before a step", "after a step", "clamp", "local"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_weights_loaded_into_fsdp2_are_trained(ranks: int, write: str) -> None:
    found = join_all(distributed.run(ranks, load_into_fsdp, write))
    for key in ("0.weight", "1.weight"):
        assert float((found[key].float() - found[f"{key} new"].float()).abs().max()) < 2e-2


def broadcast_by_ddp() -> Tensor:
    """Ranks begin with other weights, and states exist before DDP sends the first rank's."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(32, 32, bias=False).bfloat16()
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, store_param_remainders=False)
    optimizer.initialize_state()
    wrapped = DistributedDataParallel(model)
    for seed in range(3):
        wrapped(values(seed, torch.bfloat16, (4, 32))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.get_unscaled_state(model.weight, "master_param").clone()


def test_ranks_train_one_model_after_ddp_has_sent_it() -> None:
    first, second = distributed.run(2, broadcast_by_ddp)
    assert torch.equal(first, second)
    assert_same({"first": first}, {"first": second})


# --- parameters that came after the last step -------------------------------------------------------------------------


def moved(optimizer: FusedAdamW, old: nn.Parameter) -> nn.Parameter:
    """To a parameter of its own values, as those do who split and clone them."""
    new = nn.Parameter(old.detach().clone())
    states = {name: optimizer.get_unscaled_state(old, name).clone() for name in list(optimizer.state[old])}
    del optimizer.state[old]
    optimizer.param_groups[0]["params"] = [new]
    for name, value in states.items():
        optimizer.set_scaled_state(new, name, value)
    return new


def replaced(optimizer: FusedAdamW, old: nn.Parameter) -> nn.Parameter:
    new = nn.Parameter(old.detach().clone())
    optimizer.replace_parameters({old: new})
    return new


def added(optimizer: FusedAdamW, _: nn.Parameter) -> nn.Parameter:
    new = nn.Parameter(values(1, torch.bfloat16))
    optimizer.add_param_group({"params": [new]})
    optimizer.initialize_state()
    return new


def added_and_loaded(optimizer: FusedAdamW, old: nn.Parameter) -> nn.Parameter:
    new = added(optimizer, old)
    optimizer.load_state_dict(optimizer.state_dict())
    return new


@pytest.mark.parametrize("master", [{"store_param_remainders": False}, {"master_weight_dtype": torch.float16}])
@pytest.mark.parametrize("how", [moved, replaced, added, added_and_loaded])
@pytest.mark.parametrize("reads", [False, True])
def test_writes_into_parameters_that_came_after_the_last_step(
    reads: bool, how: Callable[[FusedAdamW, nn.Parameter], nn.Parameter], master: dict[str, Any]
) -> None:
    param, optimizer = build(torch.bfloat16, **master)
    param.grad = torch.ones_like(param)
    optimizer.step()
    new = how(optimizer, param)
    with torch.no_grad():
        new.fill_(3.0)
    if reads:
        assert (optimizer.get_unscaled_state(new, "master_param") == 3.0).all()
    new.grad = torch.zeros_like(new)
    for group in optimizer.param_groups:
        group["lr"] = 1e-9
    optimizer.step()
    assert (new == 3.0).all()
