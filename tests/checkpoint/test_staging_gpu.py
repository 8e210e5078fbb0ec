"""PinnedStager during training on a GPU: copies that are late, and everything that must wait for them, or does not.

The copying stream is kept busy first, so that copies surely lie behind the next steps unless these wait.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
from distributed import assert_same
from fused_optim import FusedAdam, FusedLion, enable_gradient_release
from fused_optim.checkpoint import PinnedStager, wait_for_copies
from fused_optim.memory import copies, host_memory
from fused_optim.memory.host_memory import empty_host
from fused_optim.quantized import quantize_model_
from native_cases import tensors_of, trained
from quantized_cases import RECIPES
from quantized_cases import values as quantized_values

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

BUSY = 2_400_000_000  # cycles: more than a second, since other processes may hold up a step
FORMS = ("unscaled", "native")
REM16 = cases.MASTER["bfloat16+rem16"]
DEVICE = torch.device("cuda", 0)


class SlowStager(PinnedStager):
    """Its copies begin more than a second later."""

    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        side = self._streams.setdefault(DEVICE, torch.cuda.Stream(DEVICE))
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY)
        return super().stage(state_dict)


def values_of(tree: Any) -> dict[str, Tensor]:
    """In host memory."""
    return {path: tensor.detach().cpu().clone() for path, tensor in tensors_of(tree).items()}


def build(form: str, fmt: torch.dtype = torch.int8, master: cases.Master = REM16) -> tuple[nn.ParameterDict, FusedAdam]:
    return trained(master, fmt, "cuda", form)


def state_of(model: nn.Module, optimizer: FusedAdam, device: str | None = "stager") -> dict[str, Any]:
    optimizer.checkpoint_device = device
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def expected_of(model: nn.Module, optimizer: FusedAdam) -> dict[str, Tensor]:
    expected = values_of(state_of(model, optimizer, None))
    torch.cuda.synchronize()
    return expected


def grads_of(model: nn.ParameterDict, steps: range) -> list[list[Tensor | None]]:
    """On the GPU before anything is queued: moving them there would make the host wait."""
    given = [
        [
            None if name in ("wide", "narrow") else cases.values(param.shape, param.dtype, "cuda", seed=100 * step + i)
            for i, (name, param) in enumerate(model.items())
        ]
        for step in steps
    ]
    torch.cuda.synchronize()
    return given


def train(model: nn.ParameterDict, optimizer: FusedAdam, grads: list[list[Tensor | None]]) -> None:
    for step in grads:
        for param, grad in zip(model.parameters(), step, strict=True):
            param.grad = grad
        optimizer.step()


CASES = [
    *((master, torch.int8, "stager") for master in cases.MASTERS),
    *((REM16, fmt, "stager") for fmt in (torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32)),
    *((REM16, torch.int8, device) for device in (None, "cpu")),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("master, fmt, device", CASES, ids=str)
def test_steps_wait_for_the_copies(master: cases.Master, fmt: torch.dtype, device: str | None, form: str) -> None:
    """Several, at once, and another save in between."""
    model, optimizer = build(form, fmt, master)
    first, second = grads_of(model, range(2, 4)), grads_of(model, range(4, 7))
    stager = SlowStager(optimizer)
    expected = expected_of(model, optimizer)
    staged = [stager.stage(state_of(model, optimizer, device))]
    train(model, optimizer, first)
    if device != "cpu":
        assert not staged[0].done()  # the host has not waited
    staged.append(stager.stage(state_of(model, optimizer, device)))
    train(model, optimizer, second)
    if device == "stager":
        assert not staged[1].done()
    assert_same(values_of(staged[0].result()), expected)
    other, other_optimizer = build(form, fmt, master)
    train(other, other_optimizer, first)
    assert_same(values_of(staged[1].result()), expected_of(other, other_optimizer))
    train(other, other_optimizer, second)
    assert_same(expected_of(model, optimizer), expected_of(other, other_optimizer))


def test_without_waiting_copies_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests of this file rely on."""
    monkeypatch.setattr("fused_optim.memory.copies.wait_for_saves", lambda: None)
    model, optimizer = build("native")
    grads = grads_of(model, range(2, 4))
    staged = SlowStager(optimizer).stage(state_of(model, optimizer))
    train(model, optimizer, grads)
    with pytest.raises(RuntimeError, match="was written while it was copied"):
        staged.result()


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed", "tiles", "nvfp4"])
def test_quantized_weights(recipe: str) -> None:
    def build() -> tuple[nn.Module, FusedAdam]:
        layer = nn.Linear(256, 128, bias=False, device=DEVICE, dtype=torch.bfloat16)
        layer.weight.data.copy_(quantized_values((128, 256), 1))
        quantize_model_(layer, RECIPES[recipe])
        return layer, FusedAdam(layer.parameters(), lr=0.1, exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.int8)

    grad = quantized_values((128, 256), 2).to(DEVICE, torch.bfloat16)
    layer, optimizer = build()
    layer.weight.grad = grad
    optimizer.step()
    expected = {k: v.cpu().clone() for k, v in layer.weight.components.items()}
    staged = SlowStager(optimizer).stage(state_of(layer, optimizer))
    for _ in range(3):
        optimizer.step()
    copied = staged.result()["model"]["weight"].components
    assert_same({name: copied[name] for name in expected}, expected)
    assert any(not torch.equal(layer.weight.components[name].cpu(), value) for name, value in expected.items())


def test_gradient_release_waits() -> None:
    """Its updates are in the backward pass, on a stream of their own."""
    layer = nn.Linear(256, 128, device=DEVICE, dtype=torch.bfloat16)
    optimizer = FusedAdam(layer.parameters(), lr=0.1, exp_avg_dtype=torch.int8)
    enable_gradient_release(layer, optimizer, bucket_bytes=0)
    inputs = cases.values((8, 256), torch.bfloat16, "cuda", seed=1)

    def step() -> None:
        layer(inputs).square().sum().backward()
        optimizer.step()

    step()
    expected = expected_of(layer, optimizer)
    staged = SlowStager(optimizer).stage(state_of(layer, optimizer))
    step()
    assert not staged.done()
    assert_same(values_of(staged.result()), expected)


def load(model: nn.Module, optimizer: FusedAdam) -> Callable[[], None]:
    other, trained_on = build("unscaled")
    train(other, trained_on, grads_of(other, range(5, 9)))
    state = trained_on.state_dict()
    return lambda: optimizer.load_state_dict(state)


def set_states(model: nn.Module, optimizer: FusedAdam) -> Callable[[], None]:
    ones = {param: torch.ones_like(param, dtype=torch.float32) for param in optimizer.state}
    return lambda: [optimizer.set_scaled_state(param, "exp_avg", one) for param, one in ones.items()]


def write_masters(model: nn.Module, optimizer: FusedAdam) -> Callable[[], None]:
    ones = {param: torch.ones_like(param, dtype=torch.float32) for param in optimizer.state}
    return lambda: [optimizer.store[param].write_master(one) for param, one in ones.items()]


def overwrite_after_waiting(model: nn.Module, optimizer: FusedAdam) -> Callable[[], None]:
    @torch.no_grad()
    def write() -> None:
        wait_for_copies()
        for param in model.parameters():
            param.zero_()
            param.data.add_(1)

    return write


WRITES = [load, set_states, write_masters, overwrite_after_waiting]


@pytest.mark.parametrize("prepare", WRITES)
@pytest.mark.parametrize("form", FORMS)
def test_other_writes_wait_too(form: str, prepare: Callable[[nn.Module, FusedAdam], Callable[[], None]]) -> None:
    model, optimizer = build(form)
    write = prepare(model, optimizer)
    expected = expected_of(model, optimizer)
    staged = SlowStager(optimizer).stage(state_of(model, optimizer))
    write()
    assert_same(values_of(staged.result()), expected)
    assert any(not torch.equal(value, expected[name]) for name, value in expected_of(model, optimizer).items())


def test_writes_that_do_not_wait_are_noticed() -> None:
    model, optimizer = build("native")
    staged = SlowStager(optimizer).stage(state_of(model, optimizer))
    with torch.no_grad():
        model["conv"].zero_()
    with pytest.raises(RuntimeError, match=r"parameter \d of shape .* was written while it was copied"):
        staged.result()
    train(model, optimizer, grads_of(model, range(2, 4)))  # nothing is left behind
    assert SlowStager(optimizer).stage(state_of(model, optimizer)).result()


def test_what_changes_in_the_forward_pass() -> None:
    """Buffers of modules, frozen parameters and everything that no optimizer owns."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(DEVICE)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    x = torch.randn(32, 8, device=DEVICE)

    def step() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for own, param in zip(average.parameters(), model.parameters(), strict=True):
                own.lerp_(param, 0.5)

    step()
    state = {**state_of(model, optimizer), "average": average.state_dict()}
    expected = values_of(state)
    staged = SlowStager(optimizer).stage(state)
    for _ in range(3):
        step()
    assert_same(values_of(staged.result()), expected)
    assert not torch.equal(model[1].running_mean.cpu(), expected[".model.1.running_mean"])


def test_other_optimizers() -> None:
    layer = nn.Linear(64, 64).to(DEVICE)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    layer(torch.ones(64, device=DEVICE)).sum().backward()
    optimizer.step()
    state = {"model": layer.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    expected = values_of(state)
    staged = SlowStager(optimizer).stage(state)
    for _ in range(3):
        optimizer.step()
    assert not staged.done()
    assert_same(values_of(staged.result()), expected)


@pytest.mark.parametrize("kind", [FusedAdam, FusedLion])
@pytest.mark.parametrize("form", FORMS)
def test_replays_of_captured_steps(form: str, kind: type[FusedAdam] | type[FusedLion]) -> None:
    """They ask nobody: what is queued next waits for the copies at once."""
    param = nn.Parameter(torch.randn(64, 256, device=DEVICE).bfloat16())
    options: Any = {"state_dtype": torch.int8}
    optimizer = kind([param], lr=0.1, capturable=True, checkpoint_format=form, **options)
    param.grad = torch.randn_like(param)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()

    def state(device: str | None) -> dict[str, Any]:
        optimizer.checkpoint_device = device
        return {"param": param.detach(), "optimizer": optimizer.state_dict()}

    expected = values_of(state(None))
    staged = SlowStager(optimizer).stage(state("stager"))
    for _ in range(3):
        graph.replay()
    assert_same(values_of(staged.result()), expected)
    assert not torch.equal(param.detach().cpu(), expected[".param"])


def test_no_capture_while_copies_are_under_way() -> None:
    param = nn.Parameter(torch.randn(64, 256, device=DEVICE))
    optimizer = FusedAdam([param], lr=0.1, capturable=True)
    param.grad = torch.randn_like(param)
    optimizer.step()
    pending = copies.Copy(DEVICE, torch.cuda.Event(), [])  # whose end nobody has seen yet
    pending.done.record()
    copies.register_save(pending)
    with pytest.raises(RuntimeError, match="a save is still copying"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    copies.finish(pending)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.parametrize("form", FORMS)
def test_saves_take_no_gpu_memory(form: str) -> None:
    """Nothing is converted or copied there."""
    param = nn.Parameter(torch.randn(4096, 4096, device=DEVICE).bfloat16())
    options = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
    optimizer = FusedAdam([param], lr=0.1, checkpoint_format=form, checkpoint_device="stager", **options)
    param.grad = torch.randn_like(param)
    optimizer.step()
    stager = PinnedStager(optimizer)
    torch.cuda.synchronize()
    resident = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    staged = stager.stage({"param": param.detach(), "optimizer": optimizer.state_dict()})
    optimizer.step()
    staged.result()
    assert torch.cuda.max_memory_allocated() - resident < 1 << 20


def test_the_memory_is_page_locked_and_kept() -> None:
    model, optimizer = build("native")
    stager = PinnedStager(optimizer)
    addresses = []
    for _ in range(3):
        staged = stager.stage(state_of(model, optimizer)).result()
        assert all(tensor.is_pinned() for tensor in tensors_of(staged["model"]).values() if tensor.numel())
        addresses.append(staged["model"]["conv"].data_ptr())
        del staged
    assert len(set(addresses)) <= 2


def test_memory_that_is_locked_already_leaves_no_error_behind() -> None:
    """For the next kernel that torch launches."""
    tensor = empty_host((1 << 20,), torch.float32).fill_(1.0)
    host_memory._lock(tensor)
    with pytest.raises(RuntimeError, match="cannot be page-locked"):
        host_memory._lock(tensor)
    assert (torch.arange(3, device=DEVICE) + 1).tolist() == [1, 2, 3] and tensor.is_pinned()
    host_memory._unlock(tensor.data_ptr())
    assert not tensor.is_pinned()


@pytest.mark.parametrize("shared", [False, True])
def test_memory_of_both_kinds(shared: bool) -> None:
    tensors = {str(i): torch.arange(n, device=DEVICE, dtype=torch.float32) for i, n in enumerate((1, 1000, 1 << 20))}
    stager = PinnedStager(shared=shared)
    stager.prepare(tensors).result()
    assert_same(stager.stage(tensors).result(), {name: tensor.cpu() for name, tensor in tensors.items()})
