"""The optimizer compared with torch.optim.Adam(W) and formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cases import FORMAT, FORMATS, OPTIONS, Format, Shape, contiguous, values
from cases import SHAPES as LAYOUTS
from peers import FusedAdam, FusedAdamW
from reference import Adam

STEPS = 40
SHAPES = [(48, 96), (130,), (7, 3, 5), ()]


@pytest.fixture(params=["engine", "reference"])
def backend(request: pytest.FixtureRequest, device: str, use_backend: Callable[[str], None]) -> str:
    """The device's own backend, and the PyTorch reference."""
    if request.param == "reference":
        use_backend("torch")
    return request.param


def parameters(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.nn.Parameter(values(shape, dtype, device, seed=i)) for i, shape in enumerate(SHAPES)]


def gradients(device: str, dtype: torch.dtype = torch.float32, steps: int = STEPS) -> Iterator[list[Tensor]]:
    """Per step, one gradient per parameter; their sizes differ by orders of magnitude."""
    for step in range(steps):
        yield [
            values(shape, dtype, device, seed=1000 * step + i) * 10.0 ** (step % 3 - 2)
            for i, shape in enumerate(SHAPES)
        ]


def set_gradients(params: list[Tensor], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()


def assert_close(actual: Tensor, expected: Tensor, relative: float, what: str = "") -> None:
    """Relative to the largest magnitude of the tensor."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert float((actual - expected).abs().max()) <= relative * float(expected.abs().max()), what


def torch_adam(params: list[Any], options: dict[str, Any]) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if options.get("decoupled_weight_decay", True) else torch.optim.Adam
    options = {"weight_decay": 0.0, **{key: value for key, value in options.items() if key != "decoupled_weight_decay"}}
    return kind(params, foreach=False, **options)


def run_both(device: str, options: dict[str, Any], make_lr: Callable[[], Any] | None = None) -> None:
    """Steps of both optimizers; parameters and moments stay within 1e-6."""
    ours, theirs = parameters(device), parameters(device)
    lr = {} if make_lr is None else {"lr": make_lr()}
    expected = torch_adam(theirs, {**options, **lr})
    actual = FusedAdam(ours, **{"decoupled_weight_decay": True, **options, **lr})
    for grads in gradients(device):
        for optimizer, params in ((expected, theirs), (actual, ours)):
            set_gradients(params, grads)
            optimizer.step()
    assert_equal_optimizers(actual, ours, expected, theirs)


def assert_equal_optimizers(
    actual: FusedAdam, ours: list[Tensor], expected: torch.optim.Optimizer, theirs: list[Tensor]
) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, 1e-6, "param")
        for name in ("exp_avg", "exp_avg_sq"):
            assert_close(actual.state[a][name], expected.state[b][name], 1e-6, name)
        moments = actual.state[a]["exp_avg_sq"], expected.state[b]["exp_avg_sq"]
        torch.testing.assert_close(*moments, rtol=1e-6, atol=0.0)  # sums of positive numbers: elementwise


@pytest.mark.parametrize("name", OPTIONS)
def test_option(name: str, device: str, backend: str) -> None:
    run_both(device, OPTIONS[name])


@pytest.mark.parametrize(
    "options", [{}, *({"weight_decay": 0.1, "decoupled_weight_decay": each} for each in (True, False))], ids=str
)
def test_lr_tensor(options: dict[str, Any], device: str) -> None:
    """A tensor of one element, on the host."""
    run_both(device, options, make_lr=lambda: torch.tensor(0.01))


@pytest.mark.cuda
def test_lr_tensor_on_device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    ours, theirs = parameters("cuda"), parameters("cuda")
    lr = torch.tensor(0.01, device="cuda")
    actual, expected = (
        FusedAdam(ours, lr=lr, weight_decay=0.1, decoupled_weight_decay=True),
        torch_adam(theirs, {"lr": 0.01, "weight_decay": 0.1}),
    )
    for step, grads in enumerate(gradients("cuda")):
        if step == STEPS // 2:
            lr.fill_(0.002)
            expected.param_groups[0]["lr"] = 0.002
        for optimizer, params in ((expected, theirs), (actual, ours)):
            set_gradients(params, grads)
            optimizer.step()
    assert_equal_optimizers(actual, ours, expected, theirs)


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_lr_scheduler(lr: Any, device: str) -> None:
    ours, theirs = parameters(device), parameters(device)
    actual = FusedAdam(ours, lr=lr if isinstance(lr, float) else lr.clone())
    expected = torch_adam(theirs, {"lr": 0.01})
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) for optimizer in (actual, expected)]
    for grads in gradients(device):
        for optimizer, params, schedule in ((actual, ours, schedules[0]), (expected, theirs, schedules[1])):
            set_gradients(params, grads)
            optimizer.step()
            schedule.step()
    assert isinstance(actual.param_groups[0]["lr"], type(lr))
    assert_equal_optimizers(actual, ours, expected, theirs)


def test_groups(device: str, backend: str) -> None:
    def groups(params: list[Tensor]) -> list[dict[str, Any]]:
        return [
            {"params": params[:2], "lr": 0.01, "weight_decay": 0.1},
            {"params": params[2:3], "betas": (0.5, 0.9), "eps": 1e-4},
            {"params": params[3:], "lr": 0.1, "maximize": True},
        ]

    ours, theirs = parameters(device), parameters(device)
    actual, expected = FusedAdam(groups(ours), decoupled_weight_decay=True), torch_adam(groups(theirs), {})
    for grads in gradients(device):
        for optimizer, params in ((expected, theirs), (actual, ours)):
            set_gradients(params, grads)
            optimizer.step()
    assert_equal_optimizers(actual, ours, expected, theirs)


@pytest.mark.parametrize("shape", [shape for shape in LAYOUTS if shape.layout is not contiguous], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_memory_layout_does_not_matter(shape: Shape, dtype: torch.dtype, device: str, backend: str) -> None:
    """Transposed, channels-last and misaligned parameters get the same bits as contiguous ones."""
    start = values(shape.shape, torch.bfloat16, device, seed=0)
    pair = [torch.nn.Parameter(layout(start.clone())) for layout in (contiguous, shape.layout)]
    for param in pair:
        optimizer = FusedAdam([param], lr=0.1, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
        for step in range(3):
            param.grad = values(shape.shape, torch.bfloat16, device, seed=step + 1)
            optimizer.step()
    assert pair[1].stride() == shape.layout(start).stride()
    assert torch.equal(pair[0], pair[1]) and not torch.equal(pair[0], start)


@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "uncorrected"])
@pytest.mark.parametrize("decoupled_weight_decay", [True, False], ids=["decoupled", "coupled"])
def test_formula(corrected: bool, decoupled_weight_decay: bool, device: str, backend: str) -> None:
    """Beside float64: torch.optim has no bias_correction=False."""
    options = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.05}
    options |= {"bias_correction": corrected, "decoupled_weight_decay": decoupled_weight_decay}
    params = parameters(device)
    optimizer = FusedAdam(params, **options)
    expected = [Adam(param.detach().cpu().numpy(), **options) for param in params]
    for grads in gradients(device):
        set_gradients(params, grads)
        optimizer.step()
        for adam, grad in zip(expected, grads, strict=True):
            adam.step(grad.cpu().numpy())
    for param, adam in zip(params, expected, strict=True):
        states = optimizer.state[param]
        assert_close(param.detach().cpu(), torch.as_tensor(adam.param), 5e-6, "param")  # 1 - lr * decay is FP32
        assert_close(states["exp_avg"].cpu(), torch.as_tensor(adam.exp_avg), 1e-6, "exp_avg")
        assert_close(states["exp_avg_sq"].cpu(), torch.as_tensor(adam.exp_avg_sq), 1e-6, "exp_avg_sq")


@pytest.mark.parametrize("grad_dtype", [torch.float32, None], ids=["float32", "param_dtype"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_follow_float32_training(dtype: torch.dtype, grad_dtype: torch.dtype | None, device: str) -> None:
    params, copies = parameters(device, dtype), [param.detach().float() for param in parameters(device, dtype)]
    actual = FusedAdamW(params, lr=0.01, use_decoupled_grad=True, store_param_remainders=False)
    expected = torch.optim.AdamW(copies, lr=0.01, foreach=False)
    for grads in gradients(device, grad_dtype or dtype):
        set_gradients(copies, [grad.float() for grad in grads])
        for param, grad in zip(params, grads, strict=True):
            param.decoupled_grad = grad
        actual.step()
        expected.step()
    for param, copy in zip(params, copies, strict=True):
        master = actual.state[param]["master_param"]
        assert_close(master, copy, 1e-6)
        assert torch.equal(param, master.to(dtype))


@pytest.mark.parametrize("bits", [16, 8])
def test_split_masters_follow_float32_training(bits: int, device: str) -> None:
    """16 bits: as exact as an FP32 master. 8 bits: to the 24 bits that are kept."""
    params, copies = (parameters(device, torch.bfloat16) for _ in range(2))
    options = {"lr": 0.01, "param_remainder_bits": bits}
    split, whole = FusedAdamW(params, **options), FusedAdamW(copies, lr=0.01, store_param_remainders=False)
    for grads in gradients(device, torch.bfloat16):
        set_gradients(params, grads)
        set_gradients(copies, grads)
        split.step()
        whole.step()
    model = torch.nn.Module()
    for i, param in enumerate(params):
        model.register_parameter(f"p{i}", param)
    masters = list(split.master_state_dict(model).values())
    for param, copy, master in zip(params, copies, masters, strict=True):
        if bits == 16:
            assert torch.equal(master, whole.state[copy]["master_param"])
        assert_close(master, whole.state[copy]["master_param"], 0.0 if bits == 16 else 2.0**-11)
        assert_close(param.float(), master, 2.0**-8)


@pytest.mark.parametrize("poison", [float("inf"), -float("inf"), float("nan"), 1e30])
def test_infinity_and_nan_propagate_as_in_torch(poison: float, device: str, backend: str) -> None:
    ours, theirs = parameters(device), parameters(device)
    actual, expected = FusedAdamW(ours), torch.optim.AdamW(theirs, foreach=False)
    for step, grads in enumerate(gradients(device, steps=4)):
        if step == 1:
            for grad in grads:
                grad.reshape(-1)[0] = poison
        for optimizer, params in ((expected, theirs), (actual, ours)):
            set_gradients(params, grads)
            optimizer.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-5, atol=1e-6)
            for name in ("exp_avg", "exp_avg_sq"):  # torch's exp_avg turns from infinite into NaN, ours stays infinite
                pair = actual.state[a][name], expected.state[b][name]
                torch.testing.assert_close(*(x.nan_to_num(7.0, 7.0, 7.0) for x in pair), rtol=1e-5, atol=1e-6)


# --- low-precision moments on a stream of gradients -----------------------------------------------------------------


def gradient_stream(rows: int, device: str, steps: int = 300) -> Iterator[Tensor]:
    """Smooth in time: noise with a memory of 10 steps, around a drifting mean; rows and elements differ in size."""
    rng = np.random.default_rng(0)
    size = np.exp(rng.standard_normal((rows, 1)) * 2 + rng.standard_normal((rows, 256)) * 0.5)
    noise, phase = rng.standard_normal((rows, 256)), rng.uniform(0, 6.28, (rows, 256))
    for step in range(steps):
        noise = 0.9 * noise + np.sqrt(1 - 0.9**2) * rng.standard_normal((rows, 256))
        grad = size * (noise + 0.3 * np.sin(phase + step / 50))
        yield torch.from_numpy(grad.astype(np.float32)).to(device)


def update_error(fmt: Format, beta2: float, device: str, **options: Any) -> float:
    """The relative RMS difference of the updates from those with FP32 moments, averaged over the last 200 steps."""
    params = [torch.nn.Parameter(torch.zeros(16, 256, device=device)) for _ in range(2)]
    options = {"lr": 1.0, "betas": (0.9, beta2), **options}
    exact = FusedAdam(params[:1], **options)
    coarse = FusedAdam(params[1:], exp_avg_dtype=fmt.dtype, exp_avg_sq_dtype=fmt.dtype, **options)
    errors = []
    for grad in gradient_stream(16, device):
        for optimizer, param in ((exact, params[0]), (coarse, params[1])):
            with torch.no_grad():
                param.zero_()  # so that the parameter becomes the update
            param.grad = grad
            optimizer.step()
        errors.append(float((params[1] - params[0]).detach().norm() / params[0].detach().norm()))
    return float(np.mean(errors[100:]))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("beta2", [0.999, 0.95])
def test_update_error(fmt: Format, beta2: float, device: str) -> None:
    error = update_error(fmt, beta2, device)
    bound = fmt.update_error[0 if beta2 == 0.999 else 1]
    assert error <= bound
    assert error >= bound / 3  # else the bound says little


def test_rotating_rounding_beats_nearest(device: str) -> None:
    """At beta2 = 0.999 a second moment moves by less than half a code per step, so nearest rounding stalls it."""
    float8 = FORMAT["float8_e4m3fn"]
    nearest = update_error(float8, 0.999, device, stochastic_rounding=False)
    assert nearest > 1.5 * update_error(float8, 0.999, device)


# --- the least eps ----------------------------------------------------------------------------------------------------

GRADIENTS: dict[str, Callable[[int], float]] = {  # by step
    "constant": lambda step: 1.0,
    "once": lambda step: float(step == 0),
    "three": lambda step: float(step < 3),
    "falling": lambda step: 10.0**-step,
    "of both signs": lambda step: (-1.0) ** step,
}


EXPONENTS = range(-30, -9)


def largest_steps(optimizer: torch.optim.Optimizer, param: Tensor) -> Tensor:
    """Of ten steps: the largest element of each row, which has gradients of one size and course."""
    scales = values((1, 128), torch.float64, "cpu", seed=1).expand(len(EXPONENTS), 128)
    sizes = torch.tensor([[10.0**exponent] for exponent in EXPONENTS], dtype=torch.float64)
    found = []
    for step in range(10):
        before = param.detach().clone()
        grad = torch.cat([scales * sizes * course(step) for course in GRADIENTS.values()])
        param.grad = grad.to(param.dtype).to(param.device)
        optimizer.step()
        found.append((param.detach() - before).abs().amax(1).cpu().double())
    return torch.stack(found).amax(0)


@pytest.mark.parametrize("fmt", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.999, 0.9999])
def test_tiny_gradients_beside_the_least_eps(beta2: float, fmt: str, device: str, backend: str) -> None:
    """Second moments that are kept as 0 make steps at most twice as large; formats of 8 bits have their own error."""
    least = 2.0**-60 / (1.0 - beta2) ** 0.5
    options: dict[str, Any] = {"lr": 1.0, "betas": (0.0 if beta2 == 0.0 else 0.9, beta2), "weight_decay": 0.0}
    options["eps"] = 1.001 * least
    shape = len(EXPONENTS) * len(GRADIENTS), 128
    ours = torch.nn.Parameter(torch.zeros(shape, device=device))
    exact = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    actual = largest_steps(FusedAdam([ours], state_dtype=fmt, **options), ours)
    expected = largest_steps(torch.optim.AdamW([exact], **options), exact)
    lost = 2.0**-3 if fmt in ("float32", "bfloat16") else 1.0  # roots of 2^-126 and 2^-120
    bound = (1.0 + lost) * (1.5 if fmt in ("float8_e4m3fn", "int8") else 1.02)
    assert actual.isfinite().all() and bool((actual <= bound * expected).all()), (actual / expected).max()
    for eps in (0.999 * least, 1e-20, 1e-40, 0.0):
        with pytest.raises(ValueError, match=rf"^eps: expected at least .* where betas\[1\] is {beta2}, got"):
            FusedAdam([torch.zeros(1)], betas=(0.9, beta2), eps=eps)
