"""``enable_gradient_release``: updates in the backward pass are those of whole steps, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import distributed
from cases import FORMATS, MASTER, MASTERS, Format, Master
from distributed import Part, assert_same, join_all, mesh, part, same_bits, two_gpus
from fused_optim import enable_gradient_release
from fused_optim.quantized import Float8CurrentScaling, MXFP8BlockScaling, quantize_model_
from pairwise import pairwise
from peers import FusedAdamW
from release_cases import Layers, everything, loss_of, make, train

STEPS = 4
BUCKETS = pytest.mark.parametrize("bucket_bytes", [0, 3000, 1 << 20], ids=["each", "some", "all"])
# Not all masters x formats x backends: each two of them.
COMBINATIONS = pytest.mark.parametrize(
    "master, fmt, backend", pairwise(MASTERS, FORMATS, ["", "torch"]), ids=lambda value: str(value) or "engine"
)


# --- the same bits --------------------------------------------------------------------------------------------------


@COMBINATIONS
def test_equals_whole_steps(
    master: Master, fmt: Format, backend: str, device: str, use_backend: Callable[[str], None]
) -> None:
    """In every format; also when it begins in the middle of a run, and ends there."""
    use_backend(backend)
    first, second = (Layers(master.param_dtype).to(device) for _ in range(2))
    released, usual = make(first, fmt, master), make(second, fmt, master)
    train(first, released, range(1))
    release = enable_gradient_release(first, released, bucket_bytes=3000)
    train(first, released, range(1, STEPS))
    release.disable()
    train(first, released, range(STEPS, STEPS + 1))
    train(second, usual, range(STEPS + 1))
    assert all(map(same_bits, everything(released), everything(usual)))


@BUCKETS
def test_from_the_first_step_on(bucket_bytes: int, device: str) -> None:
    first, second = Layers().to(device), Layers().to(device)
    released, usual = (make(model, FORMATS[-1], MASTER["float32"]) for model in (first, second))
    enable_gradient_release(first, released, bucket_bytes=bucket_bytes)
    train(first, released, range(STEPS))
    train(second, usual, range(STEPS))
    assert all(map(same_bits, everything(released), everything(usual)))
    assert [group["step"] for group in released.param_groups] == [STEPS, STEPS]


def test_updates_wait_for_copies_that_a_save_is_making(monkeypatch: pytest.MonkeyPatch) -> None:
    model, waits = Layers(), []
    optimizer = make(model, FORMATS[-1], MASTER["float32"])
    enable_gradient_release(model, optimizer, bucket_bytes=0)

    def state() -> list[Tensor]:
        return [param.detach().clone() for param in model.parameters()]

    monkeypatch.setattr("fused_optim.memory.copies.wait_for_saves", lambda: waits.append(state()))
    before = state()
    loss_of(model, 0).backward()
    assert waits and all(map(torch.equal, waits[0], before))


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), Float8CurrentScaling()], ids=str)
@pytest.mark.parametrize("masters", [True, False])
def test_quantized_weights(recipe: Any, masters: bool, device: str) -> None:
    found = []
    for release in (True, False):
        torch.manual_seed(0)
        model = Layers(torch.bfloat16).to(device)
        quantize_model_(
            model, recipe, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "unused"
        )
        optimizer = FusedAdamW(model.parameters(), lr=0.01, master_weights=masters, exp_avg_dtype="int8")
        if release:
            enable_gradient_release(model, optimizer, bucket_bytes=0)
        train(model, optimizer, range(STEPS))
        weights = [tensor for p in model.parameters() for tensor in getattr(p, "components", {"": p.detach()}).values()]
        found.append([*weights, *(state for p in model.parameters() for state in optimizer.state[p].values())])
    assert all(map(same_bits, *found))


def test_schedulers_checkpoints_and_copies_go_on(device: str) -> None:
    """State dicts between steps are those of whole steps; loading leaves the release as it is."""
    first, second = Layers().to(device), Layers().to(device)
    released, usual = (make(model, FORMATS[-1], MASTER["float32"]) for model in (first, second))
    enable_gradient_release(first, released, bucket_bytes=0)
    for step in range(STEPS):
        for model, optimizer in ((first, released), (second, usual)):
            train(model, optimizer, range(step, step + 1))
            optimizer.param_groups[0]["lr"] *= 0.5
        if step == 1:
            released.load_state_dict(released.state_dict())
            released.add_param_group({"params": [("late", nn.Parameter(torch.ones(3, device=device)))]})
            usual.add_param_group({"params": [("late", nn.Parameter(torch.ones(3, device=device)))]})
        if step > 1:
            for optimizer in (released, usual):
                optimizer.param_groups[2]["params"][0].grad = torch.ones(3, device=device)
    assert all(map(same_bits, everything(released), everything(usual)))


# --- gradients are freed --------------------------------------------------------------------------------------------


@BUCKETS
def test_gradients_do_not_outlive_their_bucket(bucket_bytes: int, device: str) -> None:
    """What is alive at each moment of the backward pass, by weak references to the gradients."""
    model = Layers().to(device)
    optimizer = make(model, FORMATS[0], MASTER["float32"])
    enable_gradient_release(model, optimizer, bucket_bytes=bucket_bytes)
    alive: list[weakref.ref[Tensor]] = []
    held: list[int] = []

    def note(param: nn.Parameter) -> None:
        if param.grad is not None:
            alive.append(weakref.ref(param.grad))
        held.append(sum(grad().nbytes for grad in alive if grad() is not None))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(note)  # after the hook that frees
    loss_of(model, 0).backward()
    gc.collect()
    total = sum(param.numel() * 4 for name, param in model.named_parameters() if "unused" not in name)
    largest = max(param.numel() * 4 for param in model.parameters())
    beside = largest if device == "cuda" else 0  # an update that others wait for when the next one is enqueued
    assert len(held) == 7
    if bucket_bytes == 0:
        assert max(held) <= beside and all(param.grad is None for param in model.parameters())
    elif bucket_bytes == 3000:
        assert max(held) <= bucket_bytes + largest + beside and held[-1] < total / 2 + beside
    else:
        assert held[-1] == total
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())


def test_model_and_states_are_freed() -> None:
    """Hooks of autograd are held where the garbage collector does not look."""
    model = Layers()
    optimizer = FusedAdamW(model.parameters())
    enable_gradient_release(model, optimizer)
    train(model, optimizer, range(2))
    kept = [weakref.ref(each) for each in (optimizer, model.first.weight, model.unused.weight)]
    del model, optimizer
    gc.collect()
    assert [each() for each in kept] == [None] * 3


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"skip_nonfinite": True}, RuntimeError, "skip_nonfinite=True needs all gradients"),
        ({"capturable": True}, RuntimeError, "capturable=True needs all gradients"),
        ({"use_decoupled_grad": True}, RuntimeError, "use_decoupled_grad"),
    ],
    ids=str,
)
def test_options_that_need_all_gradients(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = Layers()
    optimizer = FusedAdamW(model.parameters(), **options)
    with pytest.raises(error, match=message):
        enable_gradient_release(model, optimizer)
    for param in model.parameters():
        param.grad = param.decoupled_grad = torch.zeros_like(param)
    optimizer.step()  # as ever


def test_other_models_are_refused() -> None:
    optimizer = make(Layers(), FORMATS[0], MASTER["float32"])
    with pytest.raises(ValueError, match="none of the model's parameters"):
        enable_gradient_release(Layers(), optimizer)


def wrapped_elsewhere() -> list[str]:
    model = Layers()
    inner = nn.Sequential(DistributedDataParallel(model))
    flat = FullyShardedDataParallel(Layers(), device_id=torch.device("cpu"))
    errors = []
    for wrapper, params in ((inner, model.parameters()), (flat, flat.parameters())):
        try:
            enable_gradient_release(wrapper, FusedAdamW(params))
        except TypeError as error:
            errors.append(str(error))
    return errors


def test_other_wrappers_are_refused() -> None:
    for inside, flat in distributed.run(2, wrapped_elsewhere):
        assert "submodule is DistributedDataParallel" in inside and "FSDP1" in flat


# --- on several ranks -----------------------------------------------------------------------------------------------


def parallel(how: str, model: nn.Module) -> nn.Module:
    if how.startswith("ddp"):
        view = how == "ddp, views"
        return DistributedDataParallel(
            model, bucket_cap_mb=0.02, gradient_as_bucket_view=view, find_unused_parameters=True
        )
    options: dict[str, Any] = {"mesh": mesh(2, 2, names=("replicas", "shards")) if how == "hsdp" else mesh()}
    if how == "fsdp, mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if how == "fsdp, offloaded":
        options["offload_policy"] = CPUOffloadPolicy()
    for module in (model.first, model.second, model.third):
        fully_shard(module, **options)
    return fully_shard(model, **options)


def on_ranks(how: str, bucket_bytes: int | None, quantized: bool) -> dict[str, Part]:
    model = Layers(torch.bfloat16 if quantized else torch.float32).to(distributed.device())
    if quantized:
        torch.manual_seed(0)
        quantize_model_(model, Float8CurrentScaling(), filter_fn=lambda module, name: name in ("first", "third"))
    wrapped = parallel(how, model)
    options = {"exp_avg_dtype": "int8", "exp_avg_sq_dtype": "int8", "lr": 0.01}
    optimizer = FusedAdamW(list(model.named_parameters()), **options)
    release = None if bucket_bytes is None else enable_gradient_release(wrapped, optimizer, bucket_bytes=bucket_bytes)
    for step in range(STEPS):
        if step == STEPS - 1 and release is not None:
            release.disable()
        loss_of(wrapped, step, dist.get_rank()).backward()
        if release is not None and step < STEPS - 1 and how.startswith("fsdp") and bucket_bytes == 0:
            assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return {name: part(param) for name, param in _parts_of(model, optimizer)}


def _parts_of(model: nn.Module, optimizer: FusedAdamW) -> Iterator[tuple[str, Tensor]]:
    state = optimizer.state_dict()["state"]
    for i, (name, param) in enumerate(model.named_parameters()):
        local = getattr(param, "_local_tensor", param)
        if not hasattr(local, "components"):
            yield name, param
        if i in state:
            yield from ((f"{name}: {key}", value) for key, value in state[i].items())


WAYS = [(2, "ddp"), (2, "ddp, views"), (2, "fsdp"), (3, "fsdp"), (2, "fsdp, mixed"), (4, "hsdp")]
ON_GPUS = [(2, "ddp"), (2, "ddp, views"), (2, "fsdp"), (2, "fsdp, mixed"), (2, "fsdp, offloaded")]


@pytest.mark.parametrize("ranks, how, on", distributed.on_each_device(*WAYS, nccl=ON_GPUS))
def test_equals_whole_steps_on_several_ranks(ranks: int, how: str, on: str) -> None:
    expected = join_all(distributed.run(ranks, on_ranks, how, None, False, on=on))
    for bucket_bytes in (0, 3000):
        assert_same(join_all(distributed.run(ranks, on_ranks, how, bucket_bytes, False, on=on)), expected)


@pytest.mark.parametrize("ranks, on", distributed.on_each_device((2,)))
def test_scales_of_whole_weights_are_reduced_in_the_backward_pass(ranks: int, on: str) -> None:
    expected = join_all(distributed.run(ranks, on_ranks, "fsdp", None, True, on=on))
    assert_same(join_all(distributed.run(ranks, on_ranks, "fsdp", 0, True, on=on)), expected)


def accumulate(release: bool) -> dict[str, Part]:
    """Under ``no_sync`` gradients are reduced in the last backward pass, and only then ready."""
    model = Layers()
    wrapped = parallel("ddp", model)
    optimizer = FusedAdamW(list(model.named_parameters()), lr=0.01)
    if release:
        enable_gradient_release(wrapped, optimizer, bucket_bytes=0)
    for step in range(STEPS):
        for micro in range(2):
            with wrapped.no_sync() if micro == 0 else nullcontext():
                loss_of(wrapped, 2 * step + micro, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: part(param) for name, param in model.named_parameters()}


def test_ddp_may_accumulate_without_reducing() -> None:
    found = [join_all(distributed.run(2, accumulate, release)) for release in (True, False)]
    assert_same(*found)


@two_gpus
def test_updates_wait_for_the_backward_pass_on_other_streams() -> None:
    """Many steps without a synchronisation in between."""
    expected = join_all(distributed.run(2, many_steps, False, on="cuda"))
    assert_same(join_all(distributed.run(2, many_steps, True, on="cuda")), expected)


def many_steps(release: bool) -> dict[str, Part]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(distributed.device())
    for layer in model:
        fully_shard(layer, mesh=mesh())
    fully_shard(model, mesh=mesh())
    optimizer = FusedAdamW(list(model.named_parameters()), lr=1e-3, exp_avg_dtype="int8", exp_avg_sq_dtype="int8")
    if release:
        enable_gradient_release(model, optimizer, bucket_bytes=1 << 20)
    inputs = torch.ones(256, 1024, device=distributed.device())
    for _ in range(50):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: part(param) for name, param in model.named_parameters()}
