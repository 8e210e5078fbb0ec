"""torch.amp.GradScaler: through ``scaler.step(optimizer)`` and through ``optimizer.step(grad_scaler=scaler)``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import FLOAT_DTYPES, FORMAT, FORMATS, MASTER, MASTERS, SHAPES, Format, Master, values
from distributed import two_gpus
from pairwise import pairwise
from peers import FusedAdam, FusedAdamW

PARAMETERS = [(4, 128), (5, 7), (10,)]
VARIANTS = [
    (FORMAT["float32"], MASTER["float32"]),
    (FORMAT["int8"], MASTER["bfloat16+rem16"]),
    (FORMAT["float8_e4m3fn"], MASTER["bfloat16"]),
]
Step = Callable[[torch.amp.GradScaler, torch.optim.Optimizer], Any]


def by_scaler(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)


def by_optimizer(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """As TransformerEngine's and Apex's FusedAdam are used."""
    optimizer.step(grad_scaler=scaler)


def unscaled_first(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def unscaled_first_by_optimizer(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    optimizer.step(grad_scaler=scaler)


STEPS = pytest.mark.parametrize("step", [by_scaler, by_optimizer, unscaled_first, unscaled_first_by_optimizer])


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    params = [torch.nn.Parameter(values(shape, dtype, device, seed=i)) for i, shape in enumerate(PARAMETERS)]
    if device == "cuda" and dtype == torch.bfloat16:
        for param in params:
            param.grad_dtype = torch.float32  # torch's GradScaler does not know BF16 gradients on GPUs
    return params


def give_gradients(params: list[Tensor], number: int, scale: float = 1.0, overflow: bool = False) -> None:
    for i, param in enumerate(params):
        grad = values(tuple(param.shape), torch.float32, str(param.device), seed=10 * number + i)
        param.grad = grad.to(param.grad_dtype) * scale
    if overflow:
        params[1].grad[0, 0] = float("inf")


def make(params: list[Tensor], fmt: Format, master: Master, **options: Any) -> FusedAdam:
    formats = {"exp_avg_dtype": fmt.dtype, "exp_avg_sq_dtype": fmt.dtype}
    return FusedAdamW(params, lr=0.01, **formats, **master.options, **options)


def shown_step(optimizer: FusedAdam) -> int:
    return optimizer.state_dict()["param_groups"][0]["step"]


def train(
    params: list[Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    step: Step,
    overflows: tuple[int, ...],
    steps: range = range(6),
) -> None:
    for number in steps:
        scaler.scale(torch.ones((), device=params[0].device))  # the scaler makes its scale
        give_gradients(params, number, scaler.get_scale(), number in overflows)
        step(scaler, optimizer)
        scaler.update()
        optimizer.zero_grad()


@STEPS
@pytest.mark.parametrize("overflows", [(), (2, 3), (0,), (5,)], ids=str)
def test_equals_torch(step: Step, overflows: tuple[int, ...], device: str) -> None:
    ours, theirs = parameters(device), parameters(device)
    reference = torch.optim.AdamW(theirs, lr=0.01, foreach=False)
    scalers = [torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2) for _ in range(2)]
    optimizer = FusedAdamW(ours, lr=0.01)
    train(ours, optimizer, scalers[0], step, overflows)
    train(theirs, reference, scalers[1], by_scaler, overflows)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert shown_step(optimizer) == int(reference.state[theirs[0]]["step"]) == 6 - len(overflows)


@STEPS
def test_the_scaler_unscales_where_it_is_asked_to(step: Step, device: str) -> None:
    """Before it calls ``step()``, or skips that, as for optimizers that do not know of it."""
    ours, theirs = parameters(device), parameters(device)
    reference = torch.optim.AdamW(theirs, lr=0.01, foreach=False)
    scalers = [torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2) for _ in range(2)]
    optimizer = FusedAdamW(ours, lr=0.01, unscales_gradients=False)
    seen: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(float(ours[0].grad.abs().max())))
    train(ours, optimizer, scalers[0], step, (2, 3))
    train(theirs, reference, scalers[1], by_scaler, (2, 3))
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert scalers[0].get_scale() == scalers[1].get_scale() and shown_step(optimizer) == 4
    if step in (by_scaler, unscaled_first):
        assert len(seen) == 4 and max(seen) < 50.0


@STEPS
@pytest.mark.parametrize("backend", ["engine", "torch"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant)))
def test_equals_the_same_steps_without_scaler(
    variant: tuple[Format, Master], backend: str, step: Step, device: str, use_backend: Callable[[str], None]
) -> None:
    """Bitwise, with the skipped steps left out: scales are powers of two."""
    if backend == "torch":
        use_backend("torch")
    scaled, plain = (parameters(device, variant[1].param_dtype) for _ in range(2))
    first, second = make(scaled, *variant), make(plain, *variant)
    scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2)
    train(scaled, first, scaler, step, overflows=(1, 4))
    for number in (0, 2, 3, 5):
        give_gradients(plain, number)
        second.step()
    for a, b in zip(scaled, plain, strict=True):
        assert torch.equal(a, b)
        for name in first.state[a]:
            assert torch.equal(first.get_unscaled_state(a, name), second.get_unscaled_state(b, name))
    assert shown_step(first) == shown_step(second) == 4


# --- what is left in the gradients -----------------------------------------------------------------------------------


def scaled_step(optimizer: torch.optim.Optimizer, scale: float, found_inf: float, device: str) -> None:
    """As GradScaler calls it."""
    optimizer.grad_scale = torch.tensor(scale, device=device)
    optimizer.found_inf = torch.tensor(found_inf, device=device)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


# Not all masters x formats x backends: each two of them.
COMBINATIONS = pytest.mark.parametrize(
    "master, fmt, backend", pairwise(MASTERS, FORMATS, ["", "torch"]), ids=lambda value: str(value) or "engine"
)


@pytest.mark.parametrize(  # not the product: each two
    "dtype, scale, backend",
    pairwise(FLOAT_DTYPES, [65536.0, 1.0, 0.5, 1000.0, 0.7], ["", "torch"]),
    ids=lambda value: str(value) or "engine",
)
def test_gradients_are_left_as_torch_leaves_them(
    dtype: torch.dtype, scale: float, backend: str, device: str, use_backend: Callable[[str], None]
) -> None:
    """Bitwise; with ``maximize`` they keep their sign, and clipping is none of their business."""
    use_backend(backend)
    shapes = [(33, 128), (4, 8, 4, 4), (777,), (5, 7), (0, 32), ()]
    ours, theirs = ([torch.nn.Parameter(torch.ones(s, dtype=dtype, device=device)) for s in shapes] for _ in range(2))
    optimizer, reference = FusedAdamW(ours, maximize=True), torch.optim.AdamW(theirs, maximize=True, fused=True)
    for number in range(3):
        for params in (ours, theirs):
            for i, param in enumerate(params):
                param.grad = values(shapes[i], dtype, device, seed=10 * number + i, spread=2.0)
        grads = [param.grad for param in ours]
        versions = [grad._version for grad in grads]
        optimizer.clip_grad_norm_(0.1)
        for each in (optimizer, reference):
            scaled_step(each, scale, 0.0, device)
        for param, other, grad, version in zip(ours, theirs, grads, versions, strict=True):
            assert param.grad is grad and grad._version > version
            assert torch.equal(grad, other.grad)


@COMBINATIONS
def test_every_pass_leaves_unscaled_gradients(
    master: Master, fmt: Format, backend: str, device: str, use_backend: Callable[[str], None]
) -> None:
    """In every format, wherever the gradients lie in memory; a skipped step leaves them and everything else alone."""
    use_backend(backend)
    dtype = master.param_dtype
    params = [torch.nn.Parameter(values(shape.shape, dtype, device, seed=i)) for i, shape in enumerate(SHAPES)]
    formats = {"exp_avg_dtype": fmt.dtype, "exp_avg_sq_dtype": fmt.dtype}
    optimizer = FusedAdamW(params, lr=0.5, **formats, **master.options)
    for number, found_inf in enumerate([0.0, 1.0, 0.0]):
        seeds = range(50 * number, 50 * number + len(SHAPES))
        grads = [s.layout(values(s.shape, dtype, device, seed=seed)) for s, seed in zip(SHAPES, seeds, strict=True)]
        expected = [grad.clone() if found_inf else (grad.float() / 64.0).to(dtype) for grad in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        before = [param.detach().clone() for param in params]
        scaled_step(optimizer, 64.0, found_inf, device)
        for param, kept, grad, unscaled in zip(params, before, grads, expected, strict=True):
            assert param.grad is grad and torch.equal(grad, unscaled)
            assert torch.equal(param, kept) == (bool(found_inf) or not param.numel())
    assert shown_step(optimizer) == 2


def test_decoupled_gradients_are_left_unscaled(device: str) -> None:
    params = parameters(device)
    optimizer = make(params, *VARIANTS[0], use_decoupled_grad=True)
    for i, param in enumerate(params):
        param.grad = torch.ones_like(param)
        param.decoupled_grad = values(tuple(param.shape), torch.bfloat16, device, seed=i)
    given = [param.decoupled_grad.clone() for param in params]
    scaled_step(optimizer, 64.0, 0.0, device)
    for param, grad in zip(params, given, strict=True):
        assert torch.equal(param.decoupled_grad, grad / 64) and torch.equal(param.grad, torch.ones_like(param))


# --- skipped steps ----------------------------------------------------------------------------------------------------


def loaded(optimizer: FusedAdam) -> FusedAdam:
    other = FusedAdamW(parameters(str(optimizer.store.params[0].device)))
    other.load_state_dict(optimizer.state_dict())
    return other


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), loaded], ids=["deepcopy", "pickle", "load"]
)
def test_copies_have_the_true_count(copier: Callable[[FusedAdam], FusedAdam], device: str) -> None:
    params = parameters(device)
    optimizer, scaler = make(params, *VARIANTS[0]), torch.amp.GradScaler(device)
    train(params, optimizer, scaler, by_scaler, (1, 2))
    other = copier(optimizer)
    group = other.param_groups[0]
    assert group["step"] == 4 and type(group["step"]) is int
    assert all(set(states) == {"exp_avg", "exp_avg_sq"} for states in other.state_dict()["state"].values())
    give_gradients(other.store.params, 9)
    other.step()
    assert shown_step(other) == 5


def test_a_step_written_from_outside_is_obeyed(device: str) -> None:
    params, others = parameters(device), parameters(device)
    optimizer, expected = make(params, *VARIANTS[0]), make(others, *VARIANTS[0])
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    train(params, optimizer, scaler, by_scaler, (1,), range(3))
    for number in (0, 2):
        give_gradients(others, number)
        expected.step()
    optimizer.param_groups[0]["step"] = expected.param_groups[0]["step"] = 40
    assert shown_step(optimizer) == 40
    train(params, optimizer, scaler, by_scaler, (), range(3, 4))
    give_gradients(others, 3)
    expected.step()
    assert shown_step(optimizer) == 41
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_steps_with_and_without_scaler_alternate(device: str) -> None:
    params, others = parameters(device), parameters(device)
    optimizer, expected = make(params, *VARIANTS[0]), make(others, *VARIANTS[0])
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    for number in range(6):
        if number % 2:
            give_gradients(params, number)
            optimizer.step()
        else:
            train(params, optimizer, scaler, by_scaler, (2,), range(number, number + 1))
        if number != 2:
            give_gradients(others, number)
            expected.step()
    assert shown_step(optimizer) == 5
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_disabled_scaler(device: str) -> None:
    params, others = parameters(device), parameters(device)
    scaler = torch.amp.GradScaler(device, enabled=False)
    optimizer, expected = FusedAdamW(params), FusedAdamW(others)
    give_gradients(params, 0)
    give_gradients(others, 0)
    optimizer.step(grad_scaler=scaler)
    expected.step()
    give_gradients(params, 1)
    give_gradients(others, 1)
    scaler.step(optimizer)
    expected.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_no_gradients_at_all(device: str) -> None:
    """No step for the group; a rank whose gradients are empty, which owns nothing, counts it."""
    for grads, step in ((None, 0), (torch.ones(0, device=device), 1)):
        params = parameters(device) if grads is None else [torch.nn.Parameter(torch.ones(0, device=device))]
        optimizer, scaler = FusedAdamW(params), torch.amp.GradScaler(device)
        optimizer.initialize_state()
        scaler.scale(torch.ones((), device=device))
        params[0].grad = grads
        scaler.step(optimizer)
        assert shown_step(optimizer) == step


def test_no_parameters_at_all(device: str) -> None:
    optimizer = FusedAdamW([{"params": []}])
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.step()
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["params"] == []


def test_scale_and_factor_go_together(device: str) -> None:
    params, others = parameters(device), parameters(device)
    optimizer, expected = FusedAdamW(params, maximize=True), FusedAdamW(others, maximize=True)
    scaler = torch.amp.GradScaler(device, init_scale=256.0)
    scaler.scale(torch.ones((), device=device))
    give_gradients(params, 0, 256.0)
    give_gradients(others, 0, 0.5)
    optimizer.clip_grad_norm_(1.0)
    optimizer.stepper.clipping.due.factors[params[0].device] = torch.tensor(0.5, device=device)
    scaler.step(optimizer)
    expected.step()
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


@two_gpus
def test_two_devices() -> None:
    """Scale and overflow reach the second device."""
    params = [torch.nn.Parameter(values((4, 128), torch.float32, f"cuda:{i}", seed=i)) for i in range(2)]
    others = [torch.nn.Parameter(values((4, 128), torch.float32, f"cuda:{i}", seed=i)) for i in range(2)]
    optimizer, expected = FusedAdamW(params, lr=0.01), FusedAdamW(others, lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=256.0)
    for number in range(4):
        scaler.scale(torch.ones((), device="cuda:0"))
        for i, (param, other) in enumerate(zip(params, others, strict=True)):
            grad = values((4, 128), torch.float32, f"cuda:{i}", seed=10 * number + i)
            param.grad, other.grad = grad * scaler.get_scale(), grad
        if number == 2:
            params[1].grad[0, 0] = float("nan")
        else:
            expected.step()
        scaler.step(optimizer)
        scaler.update()
    assert shown_step(optimizer) == 3
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    with torch.cuda.device(1):
        assert [counter.tolist() for counter in (s.steps for s in optimizer.stepper.scalars._devices.values())] == [
            [3],
            [3],
        ]


def test_one_step_between_updates() -> None:
    params = parameters("cpu")
    optimizer, scaler = make(params, *VARIANTS[0]), torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    give_gradients(params, 0, scaler.get_scale())
    optimizer.step(grad_scaler=scaler)
    with pytest.raises(RuntimeError, match="since the last update"):
        optimizer.step(grad_scaler=scaler)


@pytest.mark.parametrize("step", [by_scaler, by_optimizer])
def test_decoupled_gradients_are_not_checked_by_the_scaler(step: Step) -> None:
    params = parameters("cpu")
    optimizer = make(params, *VARIANTS[0], use_decoupled_grad=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    before = copy.deepcopy(params)
    for param in params:
        param.decoupled_grad = torch.full_like(param, float("inf"))
    with pytest.raises((RuntimeError, AssertionError), match=r"p\.grad only|No inf checks"):
        step(scaler, optimizer)
    for param, kept in zip(params, before, strict=True):
        assert torch.equal(param, kept)
