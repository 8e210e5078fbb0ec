"""Clipping by the gradient norm: torch's meaning, on any layout, at once or deferred into the next step."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import distributed
from distributed import shard, two_gpus
from fused_optim import clip_grad_norm_
from fused_optim.backends import load_engine
from peers import FusedAdam, FusedAdamW

SHAPES = [(70, 300), (5,), (0, 4), (3, 5, 7), (40000,)]
NORMS = pytest.mark.parametrize("norm_type", [2.0, math.inf, 3.0, 1.0])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(params=["torch", "engine"])
def backend(request: pytest.FixtureRequest, device: str, use_backend: Callable[[str], None]) -> str:
    """The device's engine and the reference in turn."""
    name = device if request.param == "engine" else "torch"
    if name != "torch" and load_engine(name)[0] is None:
        pytest.skip(f"no {name} engine")
    use_backend(name)
    return name


def noise(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(device: str, dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    """Parameters with gradients, and one without."""
    params = [nn.Parameter(noise(shape, i).to(device, dtype)) for i, shape in enumerate([*shapes, (3,)])]
    for i, param in enumerate(params[:-1]):
        param.grad = noise(tuple(param.shape), 100 + i).to(device, dtype)
    return params


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    for twin, param in zip(twins, params):
        twin.grad = None if param.grad is None else param.grad.clone()
    return twins


def grads_of(params: list[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def exact_norm(grads: list[Tensor], norm_type: float) -> float:
    return float(torch.linalg.vector_norm(torch.cat([grad.flatten().double() for grad in grads]), norm_type))


def factor_of(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


# --- clip_grad_norm_ of parameters ------------------------------------------------------------------------------------


@NORMS
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_same_as_torch(device: str, backend: str, norm_type: float, max_norm: float) -> None:
    params = [param for param in make(device) if param.numel()]  # torch's inf norm refuses empty gradients
    twins = copies(params)
    expected = exact_norm(grads_of(params), norm_type)
    norm = clip_grad_norm_(params, max_norm, norm_type)
    torch_norm = nn.utils.clip_grad_norm_(twins, max_norm, norm_type)
    assert norm.shape == () and norm.dtype == torch.float32 and norm.device.type == device
    assert float(norm) == pytest.approx(expected, rel=1e-7)
    assert float(norm) == pytest.approx(float(torch_norm), rel=1e-5)  # torch sums in float32
    for grad, torch_grad in zip(grads_of(params), grads_of(twins), strict=True):
        torch.testing.assert_close(grad, torch_grad, rtol=1e-5, atol=0)


@DTYPES
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_gradients_are_multiplied_in_float32(device: str, backend: str, dtype: torch.dtype, norm_type: float) -> None:
    params = make(device, dtype)
    before = [grad.clone() for grad in grads_of(params)]
    norm = clip_grad_norm_(params, 1.0, norm_type)
    assert float(norm) == pytest.approx(exact_norm(before, norm_type), rel=1e-7)
    for grad, old in zip(grads_of(params), before, strict=True):
        assert torch.equal(grad, (old.float() * factor_of(norm, 1.0)).to(dtype))


@DTYPES
def test_alignments_and_lengths(device: str, backend: str, dtype: torch.dtype) -> None:
    """Gradients that begin and end anywhere; what lies between them is left alone."""
    lengths = [1, 3, 4, 7, 8, 9, 31, 1023, 1025, 4095, 4097, 33000, 70001]
    flat = noise((sum(lengths) + 5 * len(lengths) + 16,), 1).to(device, dtype)
    params, inside, start = [], torch.zeros(flat.numel(), dtype=torch.bool, device=device), 1
    for i, length in enumerate(lengths):
        params.append(nn.Parameter(torch.zeros(length, device=device, dtype=dtype)))
        params[-1].grad = flat[start : start + length]
        inside[start : start + length] = True
        start += length + i % 5 + 1
    before = flat.clone()
    norm = clip_grad_norm_(params, 1.0)
    assert float(norm) == pytest.approx(exact_norm([before[inside]], 2.0), rel=1e-7)
    scaled = (before.float() * factor_of(norm, 1.0)).to(dtype)
    assert torch.equal(flat, torch.where(inside, scaled, before))


def test_many_gradients(device: str, backend: str) -> None:
    """More than one launch's table holds; the norm spans them all."""
    params = make(device, shapes=[(3,)] * 4500)
    norm, largest = clip_grad_norm_(params, 1e9), clip_grad_norm_(params, 1e9, math.inf)
    assert float(norm) == pytest.approx(exact_norm(grads_of(params), 2.0), rel=1e-7)
    assert float(largest) == exact_norm(grads_of(params), math.inf)
    clip_grad_norm_(params, 1.0)
    assert exact_norm(grads_of(params), 2.0) == pytest.approx(1.0, rel=1e-6)


def test_mixed_dtypes(device: str, backend: str) -> None:
    params = [param for dtype in (torch.float32, torch.bfloat16, torch.float64) for param in make(device, dtype)]
    expected = exact_norm(grads_of(params), 2.0)
    assert float(clip_grad_norm_(params, 1.0)) == pytest.approx(expected, rel=1e-7)
    assert exact_norm(grads_of(params), 2.0) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_squares_neither_overflow_nor_vanish(device: str, backend: str, size: float) -> None:
    param = nn.Parameter(torch.zeros(1000, device=device))
    param.grad = torch.full_like(param, size)
    assert float(clip_grad_norm_(param, 1.0)) == pytest.approx(size * math.sqrt(1000), rel=1e-6)


def test_same_bits_each_time_and_on_any_threads(device: str, backend: str) -> None:
    params = make(device, shapes=[(300000,), (7,), (123456,)])
    norms = []
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        norms.append(float(clip_grad_norm_(params, 1e9)))
    if backend != "torch":
        assert len(set(norms)) == 1


def test_without_gradients(device: str, backend: str) -> None:
    param = nn.Parameter(torch.ones(3, device=device))
    assert float(clip_grad_norm_([param], 1.0)) == 0.0
    assert float(clip_grad_norm_([], 1.0)) == 0.0
    param.grad = torch.zeros_like(param)
    assert float(clip_grad_norm_(iter([param]), 1.0)) == 0.0
    assert not param.grad.any()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nonfinite(device: str, backend: str, norm_type: float, bad: float) -> None:
    params = make(device)
    params[0].grad[20, 30] = bad
    twins = copies(params)
    with pytest.raises(RuntimeError, match=f"The total norm of order {norm_type} .* non-finite"):
        clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
    for grad, twin in zip(grads_of(params), grads_of(twins)):
        torch.testing.assert_close(grad, twin, rtol=0, atol=0, equal_nan=True)
    norm = clip_grad_norm_(params, 1.0, norm_type)
    torch_norm = nn.utils.clip_grad_norm_([twin for twin in twins if twin.numel()], 1.0, norm_type)
    torch.testing.assert_close(norm, torch_norm, equal_nan=True)
    for grad, twin in zip(grads_of(params), grads_of(twins)):
        torch.testing.assert_close(grad, twin, rtol=0, atol=0, equal_nan=True)


def test_scaling_is_seen_by_autograd(device: str, backend: str) -> None:
    params = make(device)
    version = params[0].grad._version
    clip_grad_norm_(params, 1.0)
    assert params[0].grad._version > version


def test_refused_gradients() -> None:
    param = nn.Parameter(torch.ones(3, 4))
    param.grad = torch.ones(3, 4).to_sparse()
    with pytest.raises(RuntimeError, match=r"gradient 1 is sparse \(torch.sparse_coo\): use a dense gradient"):
        clip_grad_norm_([nn.Parameter(torch.ones(2)), param], 1.0)
    with pytest.raises(ValueError, match=r"norm_type: expected a positive number or inf, got -1\.0"):
        clip_grad_norm_([], 1.0, norm_type=-1)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_two_devices() -> None:
    params = [*make("cuda"), *make("cpu", torch.bfloat16)]
    expected = exact_norm([grad.cpu() for grad in grads_of(params)], 2.0)
    norm = clip_grad_norm_(params, 1.0)
    assert norm.device.type == "cuda"
    assert float(norm) == pytest.approx(expected, rel=1e-7)
    assert exact_norm([grad.cpu() for grad in grads_of(params)], 2.0) == pytest.approx(1.0, rel=1e-3)


# --- deferred into the optimizer's next step --------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"use_decoupled_grad": True}], ids=str)
def test_deferred_equals_clipped_gradients(
    device: str, backend: str, norm_type: float, max_norm: float, options: dict[str, Any]
) -> None:
    params, twins = make(device), make(device)
    optimizer = FusedAdamW(params, lr=0.1, eps=1e-3, **options)
    options = {**options, "use_decoupled_grad": False}
    expected = FusedAdamW(twins, lr=0.1, eps=1e-3, **options)
    for step in range(3):
        for i, (param, twin) in enumerate(zip(params, twins)):
            param.grad = noise(tuple(param.shape), 10 * step + i).to(device)
            twin.grad = param.grad.clone()
            if optimizer.use_decoupled_grad:
                param.decoupled_grad, param.grad = param.grad, None
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        assert float(norm) == float(clip_grad_norm_(twins, max_norm, norm_type))
        optimizer.step()
        expected.step()
    for param, twin in zip(params, twins):
        assert torch.equal(param, twin)


def test_deferred_as_torch(device: str, backend: str) -> None:
    params, twins = make(device), make(device)
    optimizer, expected = FusedAdamW(params, lr=0.1), torch.optim.AdamW(twins, lr=0.1)
    for step in range(3):
        for i, (param, twin) in enumerate(zip(params, twins)):
            param.grad = noise(tuple(param.shape), 10 * step + i).to(device)
            twin.grad = param.grad.clone()
        optimizer.clip_grad_norm_(0.1)
        nn.utils.clip_grad_norm_(twins, 0.1)
        optimizer.step()
        expected.step()
    for param, twin in zip(params, twins):
        torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-5)


def moments(optimizer: FusedAdam) -> list[Tensor]:
    return [optimizer.state[param]["exp_avg"] for group in optimizer.param_groups for param in group["params"]]


def test_factor_is_used_once() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], betas=(0.0, 0.5))
    param.grad = torch.full((4,), 5.0)
    optimizer.clip_grad_norm_(1.0)
    assert param.grad.tolist() == [5.0] * 4
    optimizer.step()
    assert moments(optimizer)[0].tolist() == pytest.approx([0.5] * 4)
    optimizer.step()
    assert moments(optimizer)[0].tolist() == [5.0] * 4


@pytest.mark.parametrize("calls", [[1.0, math.inf], [math.inf, 1.0], [1.0, 4.0], [4.0, 1.0], [1.0, 1.0, 0.5]])
@pytest.mark.parametrize("norm_types", [(2.0, 2.0, 2.0), (2.0, math.inf, 1.0)])
def test_several_calls_are_as_torchs(calls: list[float], norm_types: tuple[float, ...], device: str) -> None:
    """Each measures, and clips, what those before have clipped; one may be for the norm alone."""
    pairs = []
    for _ in range(2):
        params = [nn.Parameter(torch.ones(4, device=device)), nn.Parameter(torch.ones(3, device=device))]
        for i, param in enumerate(params):
            param.grad = torch.full_like(param, 5.0 + i)
        pairs.append(params)
    optimizer = FusedAdam(pairs[0], betas=(0.0, 0.5))
    for max_norm, norm_type in zip(calls, norm_types, strict=False):
        theirs = nn.utils.clip_grad_norm_(pairs[1], max_norm, norm_type)
        torch.testing.assert_close(optimizer.clip_grad_norm_(max_norm, norm_type), theirs)
    optimizer.step()
    torch.testing.assert_close(moments(optimizer)[:2], [param.grad for param in pairs[1]])


def replaced(param: nn.Parameter) -> None:
    param.grad = param.grad * 2


CHANGES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "all replaced": lambda params: [replaced(param) for param in params[:2]],
    "one replaced": lambda params: replaced(params[1]),
    "one written": lambda params: params[1].grad.add_(1.0),
    "all written": lambda params: torch._foreach_mul_([param.grad for param in params[:2]], 2.0),
    "accumulated": lambda params: params[0].sum().backward(),
    "appeared": lambda params: setattr(params[2], "grad", torch.ones(4)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("skips", [False, True])
def test_gradients_that_change_after_clipping_are_refused(change: str, skips: bool) -> None:
    """torch would have clipped before, and what is to be clipped later nobody says. Nothing is changed then."""
    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = FusedAdam(params, betas=(0.0, 0.5), skip_nonfinite=skips)
    for _ in range(2):
        for param in params[:2]:
            param.grad = torch.full((4,), 5.0)
        optimizer.clip_grad_norm_(1.0)
        CHANGES[change](params)
        number = {"accumulated": 0, "appeared": 2, "one replaced": 1, "one written": 1}.get(change, 0)
        with pytest.raises(RuntimeError, match=rf"written or replaced, of parameter {number} \(.*before backward"):
            optimizer.step()
        assert optimizer.param_groups[0]["step"] == 0 and all(param.eq(1).all() for param in params)
        optimizer.zero_grad()
    for param in params:
        param.grad = torch.full((4,), 5.0)
    optimizer.clip_grad_norm_(1.0)
    CHANGES[change](params)
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    for moment, param in zip(moments(optimizer), params, strict=False):
        torch.testing.assert_close(moment, param.grad / norm)


def refused(optimizer: FusedAdam, param: nn.Parameter) -> None:
    grad, param.grad = param.grad, param.grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    param.grad = grad


def skipped_by_a_scaler(optimizer: FusedAdam, param: nn.Parameter) -> None:
    """It does not call ``step()`` where it unscales gradients itself."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    param.grad[0] = math.inf
    scaler.step(optimizer)
    param.grad[0] = 5.0


LEFT = pytest.mark.parametrize("left", [refused, skipped_by_a_scaler, lambda *_: None])


@LEFT
@pytest.mark.parametrize("skips", [False, True])
def test_factor_goes_with_its_gradients(left: Callable[[FusedAdam, nn.Parameter], None], skips: bool) -> None:
    """The model's own ``zero_grad()`` tells the optimizer nothing: then it asks whose clipping it is."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = FusedAdam(model.parameters(), betas=(0.0, 0.5), skip_nonfinite=skips, unscales_gradients=False)
    model.weight.grad = torch.full((1, 4), 5.0)
    optimizer.clip_grad_norm_(1.0)
    left(optimizer, model.weight)
    model.zero_grad()
    model.weight.grad = torch.full((1, 4), 5.0)
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\) before backward"):
        optimizer.step()
    optimizer.zero_grad()
    model.weight.grad = torch.full((1, 4), 5.0)
    optimizer.step()
    assert moments(optimizer)[0].tolist() == [[5.0] * 4]
    model.zero_grad()
    model.weight.grad = torch.full((1, 4), math.nan)
    optimizer.step()
    assert optimizer.skipped_steps == int(skips)


def factor_on_ranks() -> list[float]:
    """One rank has lost its gradients' objects, the others have not: nobody waits."""
    param = nn.Parameter(shard(torch.ones(4, 4), distributed.mesh(), [Shard(0)]))
    optimizer = FusedAdam([param], betas=(0.0, 0.5))
    for clips in (True, False):
        param.grad = torch.ones_like(param) * 5.0
        if clips:
            optimizer.clip_grad_norm_(1.0)
            param.grad = None
            optimizer.step()
    optimizer.step()
    return optimizer.get_unscaled_state(param, "exp_avg").flatten().tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_factor_goes_with_its_gradients_on_ranks(ranks: int) -> None:
    assert [x for found in distributed.run(ranks, factor_on_ranks) for x in found] == [5.0] * 16


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_have_no_factor(duplicate: Callable[[FusedAdam], FusedAdam]) -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], betas=(0.0, 0.5))
    param.grad = torch.full((4,), 5.0)
    optimizer.clip_grad_norm_(1.0)
    twin = duplicate(optimizer)
    twin.param_groups[0]["params"][0].grad = param.grad
    twin.step()
    assert moments(twin)[0].tolist() == [5.0] * 4


def test_deferred_nonfinite() -> None:
    params = make("cpu")
    optimizer = FusedAdam(params)
    params[1].grad[2] = math.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert math.isnan(optimizer.clip_grad_norm_(1.0))


# --- over ranks -------------------------------------------------------------------------------------------------------


@contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """The sizes of the all-reduces inside."""
    original, sizes = dist.all_reduce, []

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    yield sizes
    dist.all_reduce = original


def square(ranks: int) -> tuple[int, int]:
    return (2, ranks // 2) if ranks == 4 else (1, ranks)


def place(full: Tensor, on: DeviceMesh | None, placements: tuple[Placement, ...]) -> Tensor:
    """A copy of a global tensor that every rank has, plain where there is no mesh."""
    return full.clone().to(distributed.device()) if on is None else shard(full.clone(), on, placements)


def sharded_params() -> tuple[list[nn.Parameter], list[Tensor], list[Tensor]]:
    """Plain and sharded parameters with gradients; their global values, and those of their gradients."""
    line, grid = distributed.mesh(), distributed.mesh(*square(dist.get_world_size()))
    layouts = [
        ((6, 40), None, ()),
        ((7, 64), line, (Shard(0),)),
        ((1, 33), line, (Shard(0),)),  # empty on most ranks
        ((0, 8), line, (Shard(0),)),
        ((9,), line, (Replicate(),)),
        ((7, 30), grid, (Replicate(), Shard(0))),
        ((5, 32), grid, (Shard(0), Replicate())),
        ((9, 50), grid, (Shard(0), Shard(1))),
        ((8, 20), grid, (_StridedShard(0, split_factor=square(dist.get_world_size())[1]), Shard(0))),
    ]
    params, values, gradients = [], [], []
    for i, (shape, on, placements) in enumerate(layouts):
        value, gradient = noise(shape, i), noise(shape, 50 + i)
        values.append(value)
        gradients.append(gradient)
        params.append(nn.Parameter(place(value, on, placements)))
        params[-1].grad = place(gradient, on, placements)
    return params, values, gradients


def check_norms() -> None:
    for norm_type in (2.0, math.inf, 3.0):
        params, _, gradients = sharded_params()
        expected = exact_norm(gradients, norm_type)
        with counted_all_reduces() as sizes:
            norm = clip_grad_norm_(params, 0.5, norm_type)
        assert len(sizes) <= 3, sizes  # all ranks, rows of the grid, columns of the grid
        assert not isinstance(norm, DTensor) and norm.device == distributed.device()
        assert float(norm) == pytest.approx(expected, rel=1e-6)
        for param, gradient in zip(params, gradients):
            grad = param.grad.full_tensor() if isinstance(param, DTensor) else param.grad
            torch.testing.assert_close(grad.cpu(), gradient * (0.5 / (expected + 1e-6)), rtol=1e-6, atol=0)


def check_deferred_step() -> None:
    params, values, gradients = sharded_params()
    alone = [nn.Parameter(value) for value in values]
    for param, gradient in zip(alone, gradients):
        param.grad = gradient.clone()
    optimizer, expected = FusedAdamW(params, lr=0.1), FusedAdamW(alone, lr=0.1)
    for _ in range(2):
        norm = optimizer.clip_grad_norm_(0.5)
        torch_norm = nn.utils.clip_grad_norm_(alone, 0.5)
        assert float(norm) == pytest.approx(float(torch_norm), rel=1e-6)
        optimizer.step()
        expected.step()
        for param, gradient in zip(alone, gradients):
            param.grad = gradient.clone()
    for param, reference, gradient in zip(params, alone, gradients):
        value, grad = (t.full_tensor() if isinstance(t, DTensor) else t for t in (param.detach(), param.grad))
        torch.testing.assert_close(value.cpu(), reference.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(grad.cpu(), gradient)


def check_nonfinite_on_one_rank() -> None:
    for bad, norm_type in ((math.nan, 2.0), (math.nan, math.inf), (math.inf, 2.0)):
        params, _, _ = sharded_params()
        if dist.get_rank() == 0:
            params[2].grad._local_tensor[0, 0] = bad  # only this rank has elements of it
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
        norm = float(clip_grad_norm_(params, 1.0, norm_type))
        assert math.isnan(norm) if math.isnan(bad) else math.isinf(norm)


def check_missing_and_partial_gradients() -> None:
    param = nn.Parameter(shard(torch.zeros(12, 4), distributed.mesh(), [Shard(0)]))
    whole = nn.Parameter(shard(torch.zeros(3), distributed.mesh(), [Replicate()]))
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if rank == 0:  # an unused expert elsewhere, say
        param.grad = DTensor.from_local(torch.ones_like(param._local_tensor), param.device_mesh, [Shard(0)])
    own = torch.full((3,), rank + 1.0, device=distributed.device())
    whole.grad = DTensor.from_local(own, whole.device_mesh, [Partial()])
    summed = ranks * (ranks + 1) / 2
    expected = math.sqrt(param._local_tensor.numel() + 3 * summed**2)
    for call in (FusedAdam([param, whole]).clip_grad_norm_, lambda limit: clip_grad_norm_([param, whole], limit)):
        norms = [torch.zeros((), device=distributed.device()) for _ in range(ranks)]
        dist.all_gather(norms, call(1.0))
        assert [float(norm) for norm in norms] == pytest.approx([float(norms[0])] * ranks)
    if rank == 0:
        assert float(norms[0]) == pytest.approx(expected)
    assert whole.grad.full_tensor().tolist() == pytest.approx([summed / float(norms[0])] * 3)


CHECKS = pytest.mark.parametrize(
    "check", [check_norms, check_deferred_step, check_nonfinite_on_one_rank, check_missing_and_partial_gradients]
)


@CHECKS
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_over_ranks(check: Callable[[], None], ranks: int) -> None:
    distributed.run(ranks, check)


@two_gpus
@CHECKS
def test_over_gpus(check: Callable[[], None]) -> None:
    distributed.run(2, check, on="cuda")
