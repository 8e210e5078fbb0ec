"""``skip_nonfinite=True``: a step whose gradients hold a NaN or an infinity, on any rank, changes nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import distributed
from cases import FORMATS, MASTER, MASTERS, Format, Master, values
from distributed import mesh, same_bits, shard, two_gpus
from fused_optim.quantized import Float8CurrentScaling, Float8DelayedScaling, MXFP8BlockScaling, quantize_model_
from fused_optim.step import clip
from pairwise import pairwise
from peers import FusedAdam, FusedAdamW

SHAPES = [(6, 128), (5, 7), (10,), (3, 4000), (0, 32)]
BAD = (1, 2, 5)  # steps with a bad gradient
STEPS = range(7)
NAN, INF = float("nan"), float("inf")
BACKENDS = pytest.mark.parametrize("backend", ["", "torch"], ids=["engine", "torch"])
# Not all masters x formats x backends: each two of them.
COMBINATIONS = pytest.mark.parametrize(
    "master, fmt, backend", pairwise(MASTERS, FORMATS, ["", "torch"]), ids=lambda value: str(value) or "engine"
)
CLIPPING: dict[str, Callable[[FusedAdam], Any]] = {
    "no clipping": lambda optimizer: None,
    "2-norm": lambda optimizer: optimizer.clip_grad_norm_(0.5),
    "largest": lambda optimizer: optimizer.clip_grad_norm_(0.1, float("inf")),
    "8-norm": lambda optimizer: optimizer.clip_grad_norm_(0.5, 8.0),  # whose powers may overflow
}


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(values(shape, dtype, device, seed=i)) for i, shape in enumerate(SHAPES)]


def make(params: list[nn.Parameter], fmt: Format, master: Master, **options: Any) -> FusedAdamW:
    formats = {"exp_avg_dtype": fmt.dtype, "exp_avg_sq_dtype": fmt.dtype}
    return FusedAdamW(params, lr=0.01, **formats, **master.options, **options)


def give_gradients(params: list[nn.Parameter], step: int, attribute: str = "grad") -> None:
    for i, param in enumerate(params):
        grad = values(tuple(param.shape), torch.float32, str(param.device), seed=100 * step + i)
        setattr(param, attribute, grad.to(param.dtype))


def spoil(param: Tensor, at: int, value: float, attribute: str = "grad") -> None:
    getattr(param, attribute).view(-1)[at] = value


def everything(optimizer: FusedAdam) -> list[Tensor]:
    found = []
    for param in optimizer.store.params:
        found += [param.detach().clone(), *(state.clone() for state in optimizer.state[param].values())]
        found.append(optimizer.store.layouts[param].scales.clone() if param in optimizer.store else torch.zeros(0))
    return found


def shown_step(optimizer: FusedAdam) -> int:
    return optimizer.state_dict()["param_groups"][0]["step"]


def train(optimizer: FusedAdam, steps: list[int] | range, clipping: str = "no clipping") -> None:
    params = optimizer.store.params
    for step in steps:
        give_gradients(params, step)
        if optimizer.skip_nonfinite and step in BAD:
            spoil(params[step % 4], (7 * step) % params[step % 4].numel(), (NAN, INF, -INF)[step % 3])
        CLIPPING[clipping](optimizer)
        optimizer.step()
        optimizer.zero_grad()


# --- what is skipped ------------------------------------------------------------------------------------------------


@COMBINATIONS
def test_bad_steps_change_nothing_and_others_nothing_else(
    master: Master, fmt: Format, backend: str, device: str, use_backend: Callable[[str], None]
) -> None:
    """Bit for bit the run without the bad steps, and without the option; also where the first step is bad."""
    use_backend(backend)
    first, second = parameters(device, master.param_dtype), parameters(device, master.param_dtype)
    skipping, usual = make(first, fmt, master, skip_nonfinite=True), make(second, fmt, master)
    train(skipping, [2, *STEPS])
    train(usual, [step for step in STEPS if step not in BAD])
    assert all(map(same_bits, everything(skipping), everything(usual)))
    assert skipping.skipped_steps == 1 + len(BAD) and shown_step(skipping) == shown_step(usual) == 4
    assert usual.skipped_steps == 0


@BACKENDS
@pytest.mark.parametrize("clipping", CLIPPING)
def test_with_clipping(clipping: str, backend: str, device: str, use_backend: Callable[[str], None]) -> None:
    use_backend(backend)
    fmt, master = FORMATS[-1], MASTER["bfloat16+rem16"]
    first, second = parameters(device, master.param_dtype), parameters(device, master.param_dtype)
    skipping, usual = make(first, fmt, master, skip_nonfinite=True), make(second, fmt, master)
    train(skipping, STEPS, clipping)
    train(usual, [step for step in STEPS if step not in BAD], clipping)
    assert all(map(same_bits, everything(skipping), everything(usual)))
    assert skipping.skipped_steps == len(BAD)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_element_is_looked_at(
    dtype: torch.dtype, backend: str, device: str, use_backend: Callable[[str], None]
) -> None:
    """The first and the last element of every parameter, and of gradients of any layout."""
    use_backend(backend)
    optimizer = FusedAdamW(parameters(device, dtype), skip_nonfinite=True)
    params = optimizer.store.params
    count = 0
    for param in params[:4]:
        for at, value in ((0, NAN), (-1, INF), (param.numel() // 2, -INF)):
            give_gradients(params, count)
            spoil(param, at, value)
            before = [p.detach().clone() for p in params]
            optimizer.step()
            count += 1
            assert optimizer.skipped_steps == count and all(map(same_bits, params, before))
    for grad in (torch.full((128, 6), NAN).t(), torch.tensor(INF).expand(6, 128), torch.full((6, 256), NAN)[:, ::2]):
        give_gradients(params, count)
        params[0].grad = grad.to(device, dtype)
        optimizer.step()
        count += 1
    assert optimizer.skipped_steps == count and shown_step(optimizer) == 0


def test_large_gradients_are_no_infinity(device: str) -> None:
    """Also where their FP32 norm is one."""
    largest = torch.finfo(torch.float32).max
    for clipping in CLIPPING:
        (param,) = params = [nn.Parameter(torch.ones(6, 128, device=device))]
        optimizer = FusedAdamW(params, skip_nonfinite=True)
        param.grad = torch.full_like(param, largest)
        CLIPPING[clipping](optimizer)
        optimizer.step()
        assert optimizer.skipped_steps == 0 and shown_step(optimizer) == 1


def test_decoupled_gradients(device: str) -> None:
    optimizer = FusedAdamW(parameters(device), skip_nonfinite=True, use_decoupled_grad=True)
    params = optimizer.store.params
    give_gradients(params, 0)
    give_gradients(params, 0, "decoupled_grad")
    spoil(params[0], 3, NAN)
    optimizer.step()
    assert optimizer.skipped_steps == 0
    spoil(params[0], 3, NAN, "decoupled_grad")
    optimizer.step()
    assert optimizer.skipped_steps == 1 and shown_step(optimizer) == 1


@pytest.mark.parametrize(
    "recipe", [Float8DelayedScaling(amax_history_len=3), Float8CurrentScaling(), MXFP8BlockScaling()], ids=str
)
def test_quantized_weights_and_their_histories_stay(recipe: Any, device: str) -> None:
    found = []
    for steps in ([0, 1, 3, 2], [0, 3]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 64, dtype=torch.bfloat16)).to(device)
        quantize_model_(model, recipe)
        optimizer = FusedAdamW(model.parameters(), lr=0.01, skip_nonfinite=len(steps) > 2)
        for step in steps:
            give_gradients(list(model.parameters()), step)
            if step in BAD:
                spoil(model[0].weight, 5, NAN)
            optimizer.step()
        found.append([*model[0].weight.components.values(), *optimizer.state[model[0].weight].values()])
    assert all(map(same_bits, *found))


def test_closures_and_gradient_scalers(device: str) -> None:
    """What a GradScaler has found counts as well; gradients are left as they are."""
    optimizer = FusedAdamW(parameters(device), skip_nonfinite=True)
    params = optimizer.store.params
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    for step, bad in enumerate([False, True, False]):
        scaler.scale(torch.ones((), device=device))
        give_gradients(params, step)
        if bad:
            spoil(params[1], 0, INF)
        kept, scale = params[0].grad.clone(), scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert same_bits(params[0].grad, kept if bad else kept / scale)
    assert optimizer.skipped_steps == 1 and shown_step(optimizer) == 2
    assert scaler.get_scale() == 128.0

    def closure() -> float:
        give_gradients(params, 9)
        spoil(params[0], 0, NAN)
        return 5.0

    assert optimizer.step(closure) == 5.0 and optimizer.skipped_steps == 2


# --- what it costs, and what is kept --------------------------------------------------------------------------------


def test_one_pass_over_the_gradients_and_none_after_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    original = clip.power_sums
    monkeypatch.setattr(clip, "power_sums", lambda *arguments: passes.append(1) or original(*arguments))
    optimizer = FusedAdamW(parameters("cpu"), skip_nonfinite=True)
    expected = {"no clipping": 1, "2-norm": 1, "largest": 1, "8-norm": 2}
    for clipping, count in expected.items():
        passes.clear()
        train(optimizer, [3], clipping)
        assert len(passes) == count, clipping
    give_gradients(optimizer.store.params, 0)
    optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    give_gradients(optimizer.store.params, 1)
    spoil(optimizer.store.params[0], 0, NAN)  # after the gradients that were clipped
    optimizer.step()
    assert optimizer.skipped_steps == 1
    give_gradients(optimizer.store.params, 2)
    optimizer.step()  # looks for itself again
    assert optimizer.skipped_steps == 1
    passes.clear()
    train(FusedAdamW(parameters("cpu")), [3])
    assert not passes


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_go_on_counting(copied: Callable[[FusedAdam], FusedAdam]) -> None:
    optimizer = FusedAdamW(parameters("cpu"), skip_nonfinite=True)
    train(optimizer, STEPS)
    twin = copied(optimizer)
    assert twin.skip_nonfinite and twin.skipped_steps == len(BAD)
    train(twin, [2])
    assert (twin.skipped_steps, optimizer.skipped_steps) == (len(BAD) + 1, len(BAD))


# --- on several ranks -----------------------------------------------------------------------------------------------


def bad_on_one_rank(how: str, clipped: bool) -> list[Any]:
    """Steps 1 and 2 have a bad gradient on the last rank. Whether parameters moved at each step, and the count."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    full = values((5, 128), torch.float32, "cpu", seed=1)
    if how == "sharded":
        params = [nn.Parameter(shard(full, mesh(), [Shard(0)]))]
    elif how == "hsdp":
        params = [nn.Parameter(shard(full, mesh(2, 2), [Replicate(), Shard(0)]))]
    elif how == "columns beside rows":
        params = [nn.Parameter(shard(full, mesh(), [Shard(dim)])) for dim in (0, 1)]
    else:  # each its own, as under ZeRO and on pipeline stages; the first rank has none
        params = [nn.Parameter(full.to(distributed.device()).clone())] if rank or how == "plain" else []
    optimizer = FusedAdamW([{"params": params}], lr=0.1, skip_nonfinite=True)
    found: list[Any] = []
    for step in range(4):
        for param in params:
            param.grad = torch.ones_like(param)
            local = param.grad._local_tensor if how not in ("plain", "ragged") else param.grad
            if step in BAD and rank == last and local.numel():
                local.view(-1)[0] = (NAN, INF)[step % 2]
        before = [param.detach().clone() for param in params]
        if clipped:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip(before, params, strict=True) if a.numel()]
        found.append(any(moved) if moved else None)
    return [*found, optimizer.skipped_steps, shown_step(optimizer)]


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(
    "ranks, how, on",
    distributed.on_each_device(
        (2, "sharded"), (3, "sharded"), (2, "plain"), (2, "columns beside rows"), (2, "ragged"), (4, "hsdp")
    ),
)
def test_all_ranks_skip_together(ranks: int, how: str, on: str, clipped: bool) -> None:
    for rank, (*moved, skipped, steps) in enumerate(distributed.run(ranks, bad_on_one_rank, how, clipped, on=on)):
        assert skipped == 2 and steps == 2
        assert moved == ([None] * 4 if how == "ragged" and rank == 0 else [True, False, False, True])


def refuse_on_one_rank(default: torch.dtype) -> str:
    """One rank has a gradient that cannot be used: the other one skips instead of waiting for it."""
    param = nn.Parameter(torch.ones(4))
    torch.set_default_dtype(default)
    optimizer = FusedAdamW([param], skip_nonfinite=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.grad = torch.ones_like(param).to_sparse() if dist.get_rank() else torch.ones_like(param)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.set_default_dtype(torch.float32)
    return f"skipped {optimizer.skipped_steps}"


@pytest.mark.parametrize("default", [torch.float32, torch.float64], ids=str)
def test_a_rank_that_refuses_its_gradients_leaves_none_waiting(default: torch.dtype) -> None:
    other, refused = distributed.run(2, refuse_on_one_rank, default)
    assert other == "skipped 1" and "sparse" in refused


def decide_in_a_group() -> int:
    """Ranks 0 and 1 step, rank 2 does something else."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return 0
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedAdamW([param], skip_nonfinite=True)
    optimizer.skip_nonfinite_group = group
    param.grad = torch.full((4,), NAN if dist.get_rank() else 1.0)
    optimizer.step()
    return optimizer.skipped_steps


def test_another_group_may_decide() -> None:
    assert distributed.run(3, decide_in_a_group) == [1, 1, 0]


# --- on GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("clipping", ["no clipping", "2-norm"])
def test_nothing_is_read_back(clipping: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    optimizer = FusedAdamW(parameters("cuda"), skip_nonfinite=True)
    train(optimizer, range(2), clipping)
    params = optimizer.store.params
    bad = torch.full((), NAN, device="cuda")
    for step in range(3):
        give_gradients(params, step)
        params[0].grad.view(-1)[0:1].copy_(bad)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            CLIPPING[clipping](optimizer)
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.skipped_steps == 1 + 3 and shown_step(optimizer) == 1


@pytest.mark.cuda
@pytest.mark.parametrize("clipping", ["no clipping", "2-norm"])
def test_replays_skip(clipping: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    first, second = parameters("cuda", torch.bfloat16), parameters("cuda", torch.bfloat16)
    options = {"lr": 0.01, "exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8"}
    replayed = FusedAdamW(first, skip_nonfinite=True, capturable=True, **options)
    usual = FusedAdamW(second, capturable=True, **options)
    give_gradients(first, 0)
    static = [param.grad for param in first]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        CLIPPING[clipping](replayed)
        replayed.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        CLIPPING[clipping](replayed)
        replayed.step()
    for step in STEPS:
        give_gradients(second, step)
        for grad, param in zip(static, second, strict=True):
            grad.copy_(param.grad)
        if step in BAD:
            static[step % 4].view(-1)[step] = (NAN, INF, -INF)[step % 3]
        if step:
            graph.replay()
        if step not in BAD:
            CLIPPING[clipping](usual)
            usual.step()
    torch.cuda.synchronize()
    assert all(map(same_bits, everything(replayed), everything(usual)))
    assert replayed.skipped_steps == len(BAD) and shown_step(replayed) == shown_step(usual) == 4


def captured_with_a_group() -> tuple[int, bool]:
    param = nn.Parameter(torch.ones(6, 128, device=distributed.device()))
    optimizer = FusedAdamW([param], skip_nonfinite=True, capturable=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    before = param.detach().clone()
    if dist.get_rank():
        param.grad[0, 0] = NAN
    graph.replay()
    return optimizer.skipped_steps, torch.equal(param, before)


@two_gpus
def test_replays_skip_on_all_ranks() -> None:
    assert distributed.run(2, captured_with_a_group, on="cuda") == [(1, True)] * 2
