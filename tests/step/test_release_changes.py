"""Gradient release of models that change: parameters come and go, checkpoints are loaded, wrappers and GPUs."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import distributed
from cases import EACH_FORMAT_AND_MASTER, FORMATS, MASTER, Format, Master
from distributed import Part, assert_same, join_all, mesh, part, same_bits
from fused_optim import FusedAdamW, enable_gradient_release
from fused_optim.state.param_state import ParamState
from fused_optim.step.streams import _Lane
from release_cases import Layers, Pair, everything, gradients, loss_of, make, train

STEPS = 4
BUCKETS = pytest.mark.parametrize("bucket_bytes", [0, 3000, None], ids=["each", "some", "default"])


# --- parameters come and go -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["first.weight", "second.weight", "norm.bias", "third.bias"])
@BUCKETS
def test_unfrozen_and_frozen_parameters(name: str, bucket_bytes: int | None, device: str) -> None:
    pair = Pair(device=device)
    pair.each(lambda model, _: model.get_parameter(name).requires_grad_(False))
    enable_gradient_release(pair.model, pair.released, bucket_bytes=bucket_bytes)
    pair.train(range(2))
    pair.each(lambda model, _: model.get_parameter(name).requires_grad_(True))
    before = pair.model.get_parameter(name).detach().clone()
    pair.train(range(2, STEPS))
    pair.assert_same()
    assert not torch.equal(before, pair.model.get_parameter(name))
    loss_of(pair.model, STEPS).backward()
    if bucket_bytes == 0:
        assert not gradients(pair.model)
    pair.released.step()
    loss_of(pair.models[1], STEPS).backward()
    pair.usual.step()
    pair.usual.zero_grad()
    pair.each(lambda model, _: model.get_parameter(name).requires_grad_(False))
    pair.train(range(STEPS + 1, STEPS + 3))
    pair.assert_same()


def test_frozen_parameters_hold_no_bucket_up() -> None:
    model = Layers()
    optimizer = make(model, FORMATS[0], MASTER["float32"])
    enable_gradient_release(model, optimizer, bucket_bytes=1 << 30)
    model.unused.requires_grad_(False)
    loss_of(model, 0).backward()
    assert not gradients(model)


@EACH_FORMAT_AND_MASTER
def test_parameters_are_added_and_replaced(master: Master, fmt: Format) -> None:
    """Between two steps; gradients of new ones are released, too."""
    pair = Pair(fmt, master)
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    pair.train(range(1))

    def add(model: Any, optimizer: FusedAdamW) -> None:
        model.register_parameter("scale", nn.Parameter(torch.ones(128, dtype=master.param_dtype)))
        model.register_forward_hook(lambda module, _, output: output * module.scale)
        optimizer.add_param_group({"params": [("scale", model.scale)], "lr": 0.05})

    def replace(model: Any, optimizer: FusedAdamW) -> None:
        new = nn.Parameter(model.first.weight.detach().clone())
        optimizer.replace_parameters({model.first.weight: new})
        model.first.weight = new

    pair.each(add)
    pair.train(range(1, 2))
    pair.each(replace)
    pair.train(range(2, STEPS))
    pair.assert_same()
    loss_of(pair.model, STEPS).backward()
    assert not gradients(pair.model)


def test_other_buckets_mistake_no_update_for_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters follow what others have written, also where parameters are frozen at the same time, and nothing else."""
    pair = Pair(FORMATS[-1], MASTER["bfloat16+float32"])
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    pair.train(range(2))
    followed = []
    follow = ParamState.sync_master_from_param
    monkeypatch.setattr(
        ParamState, "sync_master_from_param", lambda states: (followed.append(states.param), follow(states))
    )
    pair.each(lambda model, _: model.norm.bias.requires_grad_(False))
    train(pair.model, pair.released, range(2, 3))
    assert not followed
    with torch.no_grad():
        pair.model.first.weight.clamp_(-0.01, 0.01)
    pair.model.norm.bias.requires_grad_(True)
    train(pair.model, pair.released, range(3, 4))
    assert len(followed) == 1 and followed[0] is pair.model.first.weight


# --- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master", ["bfloat16+rem16", "bfloat16+rem8"])
@BUCKETS
def test_native_remainders_are_loaded_before_the_model(master: str, bucket_bytes: int | None) -> None:
    pair = Pair(FORMATS[-1], MASTER[master])
    pair.each(lambda _, optimizer: setattr(optimizer, "checkpoint_format", "native"))
    train(pair.models[1], pair.usual, range(2))
    saved = copy.deepcopy((pair.usual.state_dict(), pair.models[1].state_dict()))
    enable_gradient_release(pair.model, pair.released, bucket_bytes=bucket_bytes)
    train(pair.model, pair.released, range(1))
    pair.released.load_state_dict(saved[0])
    pair.model.load_state_dict(saved[1])
    pair.train(range(2, STEPS))
    pair.assert_same()


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_copies_make_whole_steps(way: str) -> None:
    """Between two steps; the original goes on releasing."""
    pair = Pair()
    enable_gradient_release(pair.model, pair.released, bucket_bytes=0)
    pair.train(range(2))
    if way == "state_dict":
        model = copy.deepcopy(pair.model)
        optimizer = make(model, FORMATS[-1], MASTER["float32"])
        optimizer.load_state_dict(pair.released.state_dict())
    else:
        both = (pair.model, pair.released)
        model, optimizer = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    train(model, optimizer, range(2, STEPS))
    pair.train(range(2, STEPS))
    pair.assert_same()
    assert all(map(same_bits, everything(optimizer), everything(pair.usual)))


# --- on several ranks -------------------------------------------------------------------------------------------------


def ddp(release: bool, refused: bool) -> tuple[dict[str, Part], list[str]]:
    """Enabled, disabled and enabled again; or refused, after which steps are whole."""
    model, errors = Layers().to(distributed.device()), []
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02, find_unused_parameters=True)
    optimizer = FusedAdamW(list(model.named_parameters()), lr=0.01, state_dtype="int8")
    if refused and release:
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        try:
            enable_gradient_release(wrapped, optimizer)
        except RuntimeError as error:
            errors.append(str(error))
    for step in range(STEPS):
        handle = enable_gradient_release(wrapped, optimizer, bucket_bytes=0) if release and not refused else None
        loss_of(wrapped, step, dist.get_rank()).backward()
        if handle is not None and step % 2:
            handle.disable()
        if refused:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if handle is not None:
            handle.disable()
    return {name: part(param) for name, param in model.named_parameters()}, errors


@pytest.mark.parametrize("ranks, refused, on", distributed.on_each_device((2, False), (2, True)))
def test_ddp_is_enabled_again_and_refused_as_a_whole(ranks: int, refused: bool, on: str) -> None:
    found = distributed.run(ranks, ddp, True, refused, on=on)
    expected = distributed.run(ranks, ddp, False, refused, on=on)
    assert_same(join_all([parts for parts, _ in found]), join_all([parts for parts, _ in expected]))
    assert all(len(errors) == refused and all("communication hook already" in e for e in errors) for _, errors in found)


def sharded(release: bool, change: str) -> dict[str, Part]:
    """FSDP2: a layer that is unfrozen, native remainders before the model, a pass that fails on all ranks."""
    model = Layers(torch.bfloat16).to(distributed.device())
    model.first.requires_grad_(change != "unfrozen")
    for module in (model.first, model.second, model.third):
        fully_shard(module, mesh=mesh())
    fully_shard(model, mesh=mesh())
    options = {"lr": 0.01, "state_dtype": "int8", "checkpoint_format": "native"}
    optimizer = FusedAdamW(list(model.named_parameters()), **options)
    handle = enable_gradient_release(model, optimizer, bucket_bytes=0) if release else None
    for step in range(STEPS):
        if step == 2 and change == "unfrozen":
            model.first.requires_grad_(True)
        if step == 2 and change == "loaded":
            saved = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.5)
            optimizer.load_state_dict(saved[0])
            model.load_state_dict(saved[1])
        if step == 2 and change == "failed" and handle is not None:
            hook = model.second.register_full_backward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(model, step, dist.get_rank()).backward()
            hook.remove()
            handle.disable()
            optimizer.zero_grad()
            assert optimizer.state_dict()
            return {}
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: part(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("ranks, on", distributed.on_each_device((1,), (2,), (3,)))
def test_fsdp2(ranks: int, on: str) -> None:
    for change in ("unfrozen", "loaded"):
        expected = join_all(distributed.run(ranks, sharded, False, change, on=on))
        assert_same(join_all(distributed.run(ranks, sharded, True, change, on=on)), expected)
    distributed.run(ranks, sharded, True, "failed", on=on)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.cuda(pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")(test))


def wide(release: bool, bucket_bytes: int | None = 8 << 20) -> tuple[nn.Module, FusedAdamW]:
    """Gradients of 64 MB, and hardly an activation."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).cuda()
    optimizer = FusedAdamW(model.parameters(), lr=1e-3, state_dtype="int8")
    if release:
        enable_gradient_release(model, optimizer, bucket_bytes=bucket_bytes)
    return model, optimizer


@a_gpu
def test_updates_beside_the_backward_pass_have_the_same_bits() -> None:
    """Many steps without a synchronisation; parameters are read right after the backward pass, too."""
    found = []
    for release in (True, False):
        model, optimizer = wide(release)
        inputs, sums = torch.ones(256, 1024, device="cuda"), []
        for _ in range(50):
            model(inputs).square().mean().backward()
            if release:
                sums.append(torch.stack([param.detach().double().sum() for param in model.parameters()]))
            optimizer.step()
            if not release:
                sums.append(torch.stack([param.detach().double().sum() for param in model.parameters()]))
            optimizer.zero_grad()
        found.append([*sums, *model.parameters()])
    assert all(map(same_bits, *found))


@a_gpu
@pytest.mark.parametrize("busy", [False, True], ids=["host waits", "host is ahead"])
def test_memory_is_given_back_however_far_the_host_is_ahead(busy: bool) -> None:
    """Without a wait for the GPU: what ``record_stream`` holds back would count here."""
    peaks = []
    for release in (True, False):
        model, optimizer = wide(release)
        inputs = torch.ones(8, 1024, device="cuda")
        for _ in range(3):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if busy:
            torch.cuda._sleep(1 << 30)
        model(inputs).square().mean().backward()
        optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        torch.cuda.synchronize()
    total = 16 * (1024 * 1024 + 1024) * 4
    assert peaks[1] >= total and peaks[0] <= total / 2


class FakeStream:
    """A stream that notes what is done with it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log, self.done = name, log, 0

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self._log.append(f"{self.name} waits for {event.recorded}")


class FakeEvent:
    """What has been enqueued when it was recorded last."""

    recorded = "nothing"

    def record(self, stream: FakeStream) -> None:
        self.recorded = f"update {stream.done}" if stream.name == "side" else stream.name


@pytest.mark.parametrize("reducing", [False, True], ids=["plain", "fsdp2"])
def test_order_of_streams(monkeypatch: pytest.MonkeyPatch, reducing: bool) -> None:
    """Without a GPU: an update waits for its gradients, and memory of gradients goes back to those who wait for it."""
    log: list[str] = []
    computing, side, reduces = (FakeStream(name, log) for name in ("computing", "side", "reducing"))
    current = reduces if reducing else computing
    monkeypatch.setattr("torch.cuda.Stream", lambda device: side)
    monkeypatch.setattr("torch.cuda.default_stream", lambda device: computing)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: current)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: nullcontext())
    monkeypatch.setattr("torch.cuda.Event", FakeEvent)
    lane, alive = _Lane(torch.device("cuda", 0)), []
    for number in (1, 2, 3):
        grad = torch.ones(3)
        alive.append(weakref.ref(grad))
        grads: list[Tensor | None] = [grad, None]
        with lane.beside(grads):
            log.append(f"update {number}")
            side.done = number
        del grad, grads
        assert [each() is not None for each in alive] == [False] * (number - 1) + [True]
    current = computing
    lane.join()
    assert alive[-1]() is None
    others = ["reducing", "computing"] if reducing else ["computing"]
    expected = []
    for number in (1, 2, 3):
        expected += [f"side waits for {others[0]}", f"update {number}"]
        expected += [f"{other} waits for update {number - 1}" for other in others if number > 1]
    assert sorted(log[:-1]) == sorted(expected) and log[-1] == "computing waits for side"
    assert log.index("update 2") < log.index("computing waits for update 1") < log.index("update 3")
