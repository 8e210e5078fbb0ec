"""What a tensor holds is more than its bytes: lazily negated ones, zeros without memory, elements that share memory.

Every way into an engine gives what the same values in an ordinary tensor give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cases import FORMAT, MASTER, Format, Master, misaligned, transposed, values
from fused_optim import clip_grad_norm_
from fused_optim.backends import load_engine
from pairwise import pairwise
from peers import FusedAdam

SHAPES = [(4, 128), (5, 7), (1,), (300,)]
VARIANTS = [
    (FORMAT["float32"], MASTER["float32"]),
    (FORMAT["int8"], MASTER["bfloat16+rem16"]),
    (FORMAT["float8_e4m3fn"], MASTER["bfloat16+float32"]),
]
PLACES, BACKENDS = ["plain", "sharded"], ["engine", "torch"]


def named(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else getattr(value, "__name__", str(value))


def every_pair(names: str, *parameters: Sequence[object]) -> pytest.MarkDecorator:
    """Not the product of these with all places and backends: each two of them, on the variants in turn."""
    rows = pairwise(*parameters, PLACES, BACKENDS)
    rows = [(*row, VARIANTS[i % len(VARIANTS)]) for i, row in enumerate(rows)]
    return pytest.mark.parametrize(f"{names}, place, backend, variant", rows, indirect=["place", "backend"], ids=named)


# --- properties: each keeps a tensor's values ------------------------------------------------------------------------


def negated(x: Tensor) -> Tensor:
    return torch._neg_view(-x)


def imaginary(x: Tensor) -> Tensor:
    """The imaginary part of a conjugate: also negated, and strided except where there is one element."""
    x = x.float()
    return torch.complex(torch.zeros_like(x), -x).conj().imag


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], dim=-1)[..., 0]


def column_major(x: Tensor) -> Tensor:
    return transposed(x) if x.dim() == 2 else x


def differentiable(x: Tensor) -> Tensor:
    """As ``backward(create_graph=True)`` leaves it."""
    return x.clone().requires_grad_() * 1


PROPERTIES = [
    negated,
    imaginary,
    strided,
    column_major,
    misaligned,
    differentiable,
]
Property = Callable[[Tensor], Tensor]


class Trainer:
    """An optimizer, and how its gradients are made."""

    def __init__(self, place: Property, fmt: Format, master: Master, device: str) -> None:
        self.place, self.dtype, self.device, self.steps = place, master.param_dtype, device, 0
        self.params = [
            torch.nn.Parameter(place(values(shape, self.dtype, device, seed=i))) for i, shape in enumerate(SHAPES)
        ]
        formats = {"exp_avg_dtype": fmt.dtype, "exp_avg_sq_dtype": fmt.dtype}
        self.optimizer = FusedAdam(
            self.params, lr=0.01, weight_decay=0.1, **formats, **master.options, decoupled_weight_decay=True
        )

    def give_gradients(self, change: Property | None = None) -> None:
        self.steps += 1
        for i, param in enumerate(self.params):
            local = values(tuple(param.shape), torch.float32, self.device, seed=100 * self.steps + i)
            grad = self.place(local if change is None else change(local))
            param.grad = None
            param.grad_dtype = None
            param.grad = grad

    def everything(self) -> list[Tensor]:
        found = []
        for param in self.params:
            states = self.optimizer.state[param]
            found += [_local(x).detach().clone() for x in (param, *states.values())]
            found += [self.optimizer.get_unscaled_state(param, name).clone() for name in states]
        return found


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def assert_same(actual: Trainer, expected: Trainer) -> None:
    for a, b in zip(actual.everything(), expected.everything(), strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def mesh(device: str) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Property:
    """Keeps tensors plain, or makes them the local tensors of DTensors, as they are."""
    if request.param == "plain":
        return lambda x: x
    mesh = request.getfixturevalue("mesh")
    return lambda x: DTensor.from_local(x, mesh, [Shard(0)], run_check=False)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, device: str, use_backend: Callable[[str], None]) -> str:
    if request.param == "torch":
        use_backend("torch")
    elif load_engine(device)[0] is None:
        pytest.skip(f"no {device} engine")
    return request.param


@pytest.fixture
def pair(place: Property, variant: tuple[Format, Master], backend: str, device: str) -> tuple[Trainer, Trainer]:
    return Trainer(place, *variant, device), Trainer(place, *variant, device)


# --- gradients --------------------------------------------------------------------------------------------------------


@every_pair("change", PROPERTIES)
def test_gradients(change: Property, pair: tuple[Trainer, Trainer]) -> None:
    """They come, stay for a step, and go."""
    unusual, usual = pair
    for changes in (None, change, change, None):
        unusual.give_gradients(changes)
        usual.give_gradients()
        for trainer in pair:
            trainer.optimizer.step()
    assert_same(unusual, usual)


@every_pair("change", PROPERTIES)
def test_clipping_in_place(change: Property, pair: tuple[Trainer, Trainer]) -> None:
    """The gradients themselves are scaled, and have the right sign then."""
    pair[0].give_gradients(change)
    pair[1].give_gradients()
    norms = [clip_grad_norm_(trainer.params, 0.5) for trainer in pair]
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)
    for actual, expected in zip(pair[0].params, pair[1].params, strict=True):
        torch.testing.assert_close(_local(actual.grad), _local(expected.grad), check_dtype=False)


@every_pair("change", PROPERTIES)
def test_unscaling(change: Property, pair: tuple[Trainer, Trainer]) -> None:
    """What a step with a gradient scale leaves in the gradients."""
    for trainer, changes in zip(pair, (change, None), strict=True):
        trainer.give_gradients(changes)
        kept = [param.grad for param in trainer.params]
        trainer.optimizer.grad_scale = torch.tensor(7.0, device=trainer.device)
        trainer.optimizer.found_inf = torch.zeros((), device=trainer.device)
        trainer.optimizer.step()
        assert all(param.grad is grad for param, grad in zip(trainer.params, kept, strict=True))
    assert_same(*pair)
    for i, param in enumerate(pair[0].params):
        given = values(tuple(param.shape), torch.float32, pair[0].device, seed=100 + i)
        assert torch.equal(_local(param.grad), given / torch.tensor(7.0, device=given.device))


def test_gradients_of_complex_views(backend: str, device: str) -> None:
    """Autograd leaves a negated gradient where a parameter is one imaginary part."""

    def descend(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> list[Tensor]:
        parts = [torch.nn.Parameter(torch.ones(1, device=device)) for _ in range(2)]
        optimizer = make(parts)
        for _ in range(5):
            optimizer.zero_grad()
            torch.view_as_real(torch.complex(*parts).conj().resolve_conj()).pow(2).sum().backward()
            assert parts[1].grad.is_neg()
            optimizer.step()
        return parts

    ours = descend(lambda parts: FusedAdam(parts, lr=0.1))
    theirs = descend(lambda parts: torch.optim.Adam(parts, lr=0.1))
    for actual, expected in zip(ours, theirs, strict=True):
        assert actual < 0.6
        torch.testing.assert_close(actual, expected)


def expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


def zero(x: Tensor) -> Tensor:
    return torch._efficientzerotensor(tuple(x.shape), device=x.device)


@pytest.mark.parametrize("change", [expanded, zero])
def test_gradients_with_less_memory_than_elements(change: Property, backend: str, device: str) -> None:
    """They are read, clipped and unscaled as their contiguous copies are."""
    params = [torch.nn.Parameter(values((4, 128), torch.float32, device, seed=1)) for _ in range(2)]
    optimizers = [FusedAdam([param], lr=0.01) for param in params]
    for step in range(3):
        grad = change(values((4, 128), torch.float32, device, seed=10 + step))
        params[0].grad, params[1].grad = grad, grad.clone(memory_format=torch.contiguous_format)
        norms = [clip_grad_norm_([param], 0.5) for param in params]
        assert torch.equal(norms[0], norms[1]) and torch.equal(params[0].grad, params[1].grad)
        for optimizer in optimizers:
            if step:
                optimizer.grad_scale = torch.tensor(64.0, device=device)
                optimizer.found_inf = torch.zeros((), device=device)
            optimizer.step()
        assert params[0].grad is grad and torch.equal(params[0].grad, params[1].grad)
    assert torch.equal(params[0], params[1])


# --- parameters, states, scalars -------------------------------------------------------------------------------------


@every_pair("change, later", [negated, strided, misaligned], [True, False])
def test_parameters(change: Property, later: bool, pair: tuple[Trainer, Trainer]) -> None:
    """Updated, and their states saved, as if their values were in an ordinary tensor."""
    unusual, usual = pair

    def step() -> None:
        for trainer in pair:
            trainer.give_gradients()
            trainer.optimizer.step()

    if later:
        step()
    others = []
    for param in unusual.params:
        local = param._local_tensor if isinstance(param, DTensor) else param
        others.append((local.detach().clone(), local.data))
        local.data = change(local.detach().clone())
        assert local.is_neg() == (change is negated)
    for _ in range(2):
        step()
    assert_same(unusual, usual)
    saved, expected = (trainer.optimizer.state_dict()["state"] for trainer in pair)
    for i in saved:
        for name, state in saved[i].items():
            assert torch.equal(_local(state), _local(expected[i][name]))
    unusual.optimizer.sync_params_from_master()
    usual.optimizer.sync_params_from_master()
    assert_same(unusual, usual)
    for before, old in others:
        assert torch.equal(before, old)


# --- memory that several have in common ------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [None, 64.0])
def test_gradients_that_share_memory(scale: float | None, backend: str, device: str) -> None:
    """A pass that writes unscaled gradients must read each before: one tensor for two, parts of one, a row for all."""

    def gradients(step: int, fresh: Property) -> list[Tensor]:
        flat = values((1024,), torch.float32, device, seed=step)
        whole, half, row = flat[:512].view(4, 128), flat[256:768].view(4, 128), flat[:128].expand(4, 128)
        return [fresh(grad) for grad in (whole, whole, half, row, flat[768:].view(2, 128))]

    results = []
    for fresh in (lambda x: x, lambda x: x.clone(memory_format=torch.contiguous_format)):
        params = [torch.nn.Parameter(torch.ones(rows, 128, device=device)) for rows in (4, 4, 4, 4, 2)]
        optimizer = FusedAdam(params, lr=0.01)
        for step in range(3):
            for param, grad in zip(params, gradients(step, fresh), strict=True):
                param.grad = grad
            if scale is not None:
                optimizer.grad_scale = torch.tensor(scale, device=device)
                optimizer.found_inf = torch.zeros((), device=device)
            optimizer.step()
        results.append([*params, *(param.grad for param in params)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
