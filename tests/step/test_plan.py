"""The plan of a step is refreshed, not trusted: whatever changes between two steps is noticed.

Each case changes something in a trained optimizer and in its twin, whose plan is thrown away before every step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cases import FORMAT, MASTER, Format, Master, values
from fused_optim import adapters
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.state import host_states
from fused_optim.step.plan import Plan
from pairwise import pairwise
from peers import FusedAdam

SHAPES = [(4, 128), (5, 7), (0, 32), (300,)]
VARIANTS = [
    (FORMAT["float32"], MASTER["float32"], ""),
    (FORMAT["int8"], MASTER["bfloat16+rem16"], ""),
    (FORMAT["bfloat16"], MASTER["bfloat16+float32"], ""),
    (FORMAT["int8"], MASTER["bfloat16+float16"], "offloaded"),
]


@pytest.fixture(autouse=True)
def _cpu_plays_a_gpu() -> Iterator[None]:
    with mock.patch.object(host_states, "OFFLOADED_FROM", ("cuda", "cpu")):
        yield


class Trainer:
    """An optimizer whose gradients are new tensors at each step."""

    def __init__(
        self, place: Callable[[Tensor], Tensor], fmt: Format, master: Master, states: str = "", device: str = "cpu"
    ) -> None:
        self.place, self.dtype, self.device, self.steps = place, master.param_dtype, device, 0
        self.params = [self.param(shape, i) for i, shape in enumerate(SHAPES)]
        options = {"exp_avg_dtype": fmt.dtype, "exp_avg_sq_dtype": fmt.dtype, "offload_states": states == "offloaded"}
        groups = [{"params": self.params[:2]}, {"params": self.params[2:], "lr": 0.02}]
        self.optimizer = FusedAdam(
            groups, lr=0.01, weight_decay=0.1, **options, **master.options, decoupled_weight_decay=True
        )

    def param(self, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.nn.Parameter(self.place(values(shape, self.dtype, self.device, seed=seed)))

    def give_gradients(self) -> None:
        self.steps += 1
        for i, param in enumerate(self.params):
            param.grad = self.place(values(tuple(param.shape), self.dtype, self.device, seed=100 * self.steps + i))

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.give_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def everything(self) -> list[Tensor]:
        found = []
        for param in self.params:
            states = self.optimizer.state[param]
            found += [local_tensor(x).detach().clone() for x in (param, *states.values())]
            found += [self.optimizer.get_unscaled_state(param, name).clone() for name in states]
        return found


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


PLACES = ["plain", "sharded"]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Callable[[Tensor], Tensor]:
    """Keeps tensors plain, or makes them DTensors."""
    if request.param == "plain":
        return lambda x: x
    mesh = request.getfixturevalue("mesh")
    return lambda x: distribute_tensor(x, mesh, [Shard(0)])


def named(value: object) -> str:
    return "-".join(map(str, filter(None, value))) if type(value) is tuple else getattr(value, "__name__", str(value))


def every_two(names: str, *parameters: Sequence[object]) -> pytest.MarkDecorator:
    """Not the product of these with all variants and places: each two of them."""
    rows = pairwise(*parameters, VARIANTS, PLACES)
    return pytest.mark.parametrize(f"{names}, pair, place", rows, indirect=["pair", "place"], ids=named)


@pytest.fixture(params=VARIANTS, ids=named)
def pair(request: pytest.FixtureRequest, place: Callable[[Tensor], Tensor]) -> tuple[Trainer, Trainer]:
    pair = Trainer(place, *request.param), Trainer(place, *request.param)
    for trainer in pair:
        trainer.train()
    return pair


def new_local(x: Tensor, local: Tensor) -> None:
    """Replace the memory of a tensor, as FSDP2 and offloading do."""
    if isinstance(x, DTensor):
        x._local_tensor = local
    else:
        x.data = local


def moved_parameters(t: Trainer) -> None:
    for param in t.params:
        new_local(param, local_tensor(param).detach().clone())


def moved_parameter_data(t: Trainer) -> None:
    for param in t.params:
        local = local_tensor(param)
        local.data = local.detach().clone()


def moved_state_data(t: Trainer) -> None:
    for param in t.params:
        for state in t.optimizer.state[param].values():
            local = local_tensor(state)
            local.data = local.clone()


def replaced_state_tensors(t: Trainer) -> None:
    for param in t.params:
        t.optimizer.state[param] |= {key: state.clone() for key, state in t.optimizer.state[param].items()}


def replaced_state_dicts(t: Trainer) -> None:
    for param in t.params:
        t.optimizer.state[param] = {key: 2 * state for key, state in t.optimizer.state[param].items()}


def loaded_state_dict(t: Trainer) -> None:
    other = Trainer(t.place, FORMAT["float32"], MASTER["float32"])
    other.train(3)
    t.optimizer.load_state_dict(other.optimizer.state_dict())


def forgotten_states(t: Trainer) -> None:
    t.optimizer.state.clear()


def added_group(t: Trainer) -> None:
    t.params.append(t.param((3, 64), 9))
    t.optimizer.add_param_group({"params": [t.params[-1]], "lr": 0.5})


def removed_group(t: Trainer) -> None:
    t.optimizer.param_groups.pop()


def reordered_parameters(t: Trainer) -> None:
    """The rounding sequence depends on the position."""
    t.optimizer.param_groups[0]["params"].reverse()


def changed_hyperparameters(t: Trainer) -> None:
    t.optimizer.param_groups[0] |= {"lr": 0.5, "betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.3, "maximize": True}
    t.optimizer.param_groups[1] |= {"bias_correction": False, "step": 40}
    t.optimizer.rule.decoupled = False


def changed_seed(t: Trainer) -> None:
    t.optimizer.seed = 5


def read_missing_state(t: Trainer) -> None:
    """Makes an entry in optimizer.state."""
    assert not t.optimizer.state[torch.zeros(1)]


def non_contiguous_parameter(t: Trainer) -> None:
    wide = torch.zeros(4, 256, dtype=t.dtype)
    wide[:, ::2] = local_tensor(t.params[0]).detach()
    new_local(t.params[0], wide[:, ::2])


CHANGES = [
    moved_parameters,
    moved_parameter_data,
    moved_state_data,
    replaced_state_tensors,
    replaced_state_dicts,
    loaded_state_dict,
    forgotten_states,
    added_group,
    removed_group,
    reordered_parameters,
    changed_hyperparameters,
    changed_seed,
    read_missing_state,
    non_contiguous_parameter,
]


@every_two("change", CHANGES)
def test_changes_between_steps(change: Callable[[Trainer], None], pair: tuple[Trainer, Trainer]) -> None:
    planned, fresh = pair
    change(planned)
    change(fresh)
    for _ in range(2):
        planned.train(1)
        fresh.optimizer.stepper.leave_plan()
        fresh.train(1)
    for actual, expected in zip(planned.everything(), fresh.everything(), strict=True):
        assert torch.equal(actual, expected)


# --- gradients --------------------------------------------------------------------------------------------------------


def no_gradient(grad: Tensor) -> None:
    return None


def other_dtype(grad: Tensor) -> Tensor:
    return grad.float() if grad.dtype == torch.bfloat16 else grad.bfloat16()


def non_contiguous(grad: Tensor) -> Tensor:
    if isinstance(grad, DTensor):
        size = {"shape": grad.shape, "stride": grad.stride()}
        return DTensor.from_local(
            non_contiguous(grad._local_tensor), grad.device_mesh, grad.placements, run_check=False, **size
        )
    return torch.stack([grad, grad], dim=-1)[..., 0]


def other_placements(grad: Tensor) -> Tensor:
    return grad.redistribute(placements=[Replicate()]) if isinstance(grad, DTensor) else grad


def equal_spec(grad: Tensor) -> Tensor:
    """The same placements in another DTensorSpec, as autograd makes them."""
    if not isinstance(grad, DTensor):
        return grad
    return DTensor.from_local(grad._local_tensor.clone(), grad.device_mesh, [Shard(0)], run_check=False)


@every_two(
    "change, which",
    [no_gradient, other_dtype, non_contiguous, other_placements, equal_spec],
    [slice(0, 1), slice(1, None), slice(None)],
)
def test_unusual_gradients(
    change: Callable[[Tensor], Tensor | None], which: slice, pair: tuple[Trainer, Trainer]
) -> None:
    """They come, stay for a step, and go."""
    planned, fresh = pair
    for unusual in (False, True, True, False):
        for trainer in pair:
            trainer.give_gradients()
            for param in trainer.params[which] if unusual else []:
                grad, param.grad = param.grad, None
                param.grad_dtype = None
                param.grad = change(grad)
        fresh.optimizer.stepper.leave_plan()
        for trainer in pair:
            before = [param._version for param in trainer.params]
            updated = [param.grad is not None for param in trainer.params]
            trainer.optimizer.step()
            assert [p._version > b for p, b in zip(trainer.params, before, strict=True)] == updated
            trainer.optimizer.zero_grad()
    for actual, expected in zip(planned.everything(), fresh.everything(), strict=True):
        assert torch.equal(actual, expected)


def test_gradients_kept_in_place(pair: tuple[Trainer, Trainer]) -> None:
    """zero_grad(set_to_none=False): the same tensors again and again."""
    for trainer in pair:
        for _ in range(3):
            trainer.give_gradients()
            grads = [param.grad for param in trainer.params]
            if trainer is pair[1]:
                for param in trainer.params:
                    param.grad = param.grad.clone()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=False)
            assert trainer is pair[1] or all(p.grad is g for p, g in zip(trainer.params, grads, strict=True))
    for actual, expected in zip(pair[0].everything(), pair[1].everything(), strict=True):
        assert torch.equal(actual, expected)


# --- what is refused after the plan was made --------------------------------------------------------------------------


def wrong_state_dtype(t: Trainer) -> None:
    state = t.optimizer.state[t.params[1]]["exp_avg"]
    new_local(state, local_tensor(state).double())


def wrong_state_device(t: Trainer) -> None:
    t.optimizer.state[t.params[1]]["exp_avg_sq"] = torch.zeros(5, 7, device="meta")


def removed_state(t: Trainer) -> None:
    del t.optimizer.state[t.params[1]]["exp_avg_sq"]


def wrong_gradient_device(t: Trainer) -> None:
    t.params[1].decoupled_grad = torch.zeros(5, 7, device="meta")


def wrong_gradient_shape(t: Trainer) -> None:
    t.params[1].decoupled_grad = torch.zeros(7, 5)


def other_shape(t: Trainer) -> None:
    """Of the parameter and all of its states; their scales and geometry are another's."""
    param = t.params[1]
    param.grad = None
    param.data = torch.ones(6, 7)
    param.decoupled_grad = torch.ones(6, 7)
    t.optimizer.state[param] |= {name: torch.zeros(6, 7) for name in ("exp_avg", "exp_avg_sq")}


REFUSED = [
    other_shape,
    wrong_state_dtype,
    wrong_state_device,
    removed_state,
    wrong_gradient_device,
    wrong_gradient_shape,
]


@pytest.mark.parametrize("states", ["", "offloaded"])
@pytest.mark.parametrize("change", REFUSED)
def test_refused_before_anything_is_changed(states: str, change: Callable[[Trainer], None]) -> None:
    trainer = Trainer(lambda x: x, FORMAT["float32"], MASTER["float32"], states)
    trainer.train()
    trainer.optimizer.use_decoupled_grad = True
    for param in trainer.params:
        param.decoupled_grad = torch.ones_like(param)
    change(trainer)
    before = [param.detach().clone() for param in trainer.params]
    for _ in range(2):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=r"parameter 1 \(shape \([56], 7\)"):
            trainer.optimizer.step()
    assert trainer.optimizer.param_groups[0]["step"] == 2
    assert all(torch.equal(a, b) for a, b in zip(trainer.params, before, strict=True))


# --- what it costs and keeps ------------------------------------------------------------------------------------------


def test_usual_steps_check_nothing_again(pair: tuple[Trainer, Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the fast path is never taken, and nobody notices."""
    trainer = pair[0]
    trainer.train(1)
    set_again: list[int] = []
    monkeypatch.setattr(Plan, "_set", lambda self, part, shard, *_: set_again.append(shard))
    trainer.train(3)
    moved_parameters(trainer)
    moved_state_data(trainer)
    trainer.train(1)
    trainer.give_gradients()
    trainer.params[0].grad = None
    trainer.optimizer.step()
    trainer.train(1)
    assert set_again == []


def test_without_the_exchange_api(pair: tuple[Trainer, Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of older releases of torch: slower, and the same."""
    first, second = pair
    monkeypatch.delattr(Tensor, "__dlpack_c_exchange_api__")
    first.optimizer.stepper.leave_plan()
    for trainer in pair:
        trainer.train(2)
    for actual, expected in zip(first.everything(), second.everything(), strict=True):
        assert torch.equal(actual, expected)


def test_optimizers_are_collected() -> None:
    """The plan refers to parameters and states where the garbage collector sees it."""
    trainer = Trainer(lambda x: x, FORMAT["float32"], MASTER["float32"])
    optimizer = trainer.optimizer
    optimizer.state[trainer.params[0]]["optimizer"] = optimizer
    trainer.train(1)
    reference = weakref.ref(trainer.params[1])
    del trainer, optimizer
    gc.collect()
    assert reference() is None


def test_more_groups_than_tensors() -> None:
    """Groups without parameters count their steps."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([{"params": []}, {"params": [param]}, {"params": []}], lr=0.1)
    for _ in range(2):
        param.grad = torch.ones(3)
        optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [2, 2, 2]
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.8))


def test_plain_parameters_cost_nothing_for_quantized_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GradScaler that would be a kernel of its own at each step."""
    calls: list[int] = []
    batches = adapters.batches
    monkeypatch.setattr(adapters, "batches", lambda updates: calls.append(len(updates)) or batches(updates))
    plain = torch.nn.Parameter(torch.ones(4, 32))
    model = quantize_model_(torch.nn.Linear(32, 4, bias=False), MXFP8BlockScaling())
    for params in ([plain], [plain, model.weight]):
        for param in params:
            param.grad = torch.ones(4, 32)
        FusedAdam(params).step()
    assert calls == [1]
