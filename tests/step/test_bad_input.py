"""What cannot be used is refused before anything is changed, by a message that names it and prints no values."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from cases import values
from fused_optim import save_master_safetensors
from pairwise import each_once, pairwise
from peers import FusedAdam, FusedAdamW, FusedLion, FusedMuon

SECRET = 77777.0  # fills tensors: must not be seen in a message


# --- constructor and param groups -------------------------------------------------------------------------------------

OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lr": -0.1}, ValueError, "lr: expected a finite number >= 0, got -0.1"),
    ({"lr": float("nan")}, ValueError, "lr: expected a finite number >= 0, got nan"),
    ({"lr": float("inf")}, ValueError, "lr: expected a finite number >= 0, got inf"),
    ({"lr": "fast"}, TypeError, "lr: expected a number, got str"),
    ({"lr": None}, TypeError, "lr: expected a number, got NoneType"),
    ({"lr": True}, TypeError, "lr: expected a number, got bool"),
    ({"maximize": "yes"}, TypeError, "maximize: expected True or False, got 'yes'"),
    ({"bias_correction": torch.ones(2)}, TypeError, "bias_correction: expected True or False, got Tensor"),
    ({"amsgrad": 2}, TypeError, "amsgrad: expected True or False, got int"),
    ({"lr": torch.ones(2)}, ValueError, r"lr: expected a tensor of one element, got shape \(2,\)"),
    ({"lr": torch.tensor(-1.0)}, ValueError, "lr: expected a finite number >= 0"),
    ({"eps": -1e-8}, ValueError, "eps: expected a finite number >= 0"),
    ({"eps": "small"}, TypeError, "eps: expected a number, got str"),
    ({"weight_decay": -0.1}, ValueError, "weight_decay: expected a finite number >= 0"),
    ({"weight_decay": None}, TypeError, "weight_decay: expected a number, got NoneType"),
    ({"betas": 0.9}, TypeError, "betas: expected two numbers"),
    ({"betas": "0.9"}, TypeError, "betas: expected two numbers, got 1"),
    ({"betas": (0.9,)}, TypeError, "betas: expected two numbers, got 1"),
    ({"betas": ("high", 0.999)}, TypeError, r"betas\[0\]: expected a number, got str"),
    ({"betas": (1.0, 0.999)}, ValueError, r"betas\[0\]: expected a number in \[0, 1\), got 1.0"),
    ({"betas": (0.9, -0.1)}, ValueError, r"betas\[1\]: expected a number in \[0, 1\), got -0.1"),
    ({"betas": (0.9, float("nan"))}, ValueError, r"betas\[1\]"),
    ({"amsgrad": True}, ValueError, "amsgrad=True is not supported: use torch.optim.AdamW"),
    ({"exp_avg_dtype": torch.float64}, ValueError, "exp_avg_dtype: expected one of .*torch.int8.*, got torch.float64"),
    ({"exp_avg_sq_dtype": "int3"}, ValueError, "exp_avg_sq_dtype: expected one of .*, got 'int3'"),
    ({"exp_avg_dtype": ""}, ValueError, "exp_avg_dtype: expected one of .*, got ''"),
    ({"state_dtype": "int-8"}, ValueError, "state_dtype: expected one of .*, got 'int-8'"),
    ({"state_dtype": ""}, ValueError, "state_dtype: expected one of .*, got ''"),
    ({"exp_avg_dtype": "nn"}, ValueError, "exp_avg_dtype: expected one of .*, got 'nn'"),
]
GLOBAL_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"master_weight_dtype": "bfloat16"}, ValueError, "master_weight_dtype=bfloat16: .*torch.float32"),
    ({"master_weight_dtype": torch.bfloat16}, ValueError, "master_weight_dtype=torch.bfloat16: .*torch.float32"),
    ({"param_remainder_bits": 12}, ValueError, "param_remainder_bits: expected 16 or 8, got 12"),
    ({"store_param_remainders": True, "master_weights": False}, ValueError, "needs master_weights=True"),
    (
        {"checkpoint_format": "zip"},
        ValueError,
        "checkpoint_format: expected 'unscaled', 'native' or 'torch', got 'zip'",
    ),
    ({"checkpoint_device": "cuda"}, ValueError, "checkpoint_device: expected None, 'cpu' or 'stager', got 'cuda'"),
    ({"differentiable": True}, ValueError, r"differentiable=True is not supported: use torch.optim.AdamW"),
]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS + GLOBAL_OPTIONS)
@pytest.mark.parametrize("kind", [FusedAdam, FusedAdamW])
def test_option(kind: Callable[..., FusedAdam], options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kind([torch.ones(3)], **options)


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
def test_option_of_a_group(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Refused in the constructor, by add_param_group, which adds nothing, and by the next step, which does nothing.

    But a step takes a learning rate and weight decay below zero, as torch's do: schedules end there by rounding.
    """
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    with pytest.raises(error, match=message):
        FusedAdam([{"params": [first]}, {"params": [second], **options}])
    optimizer = FusedAdam([first])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [second], **options})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [second]})
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    optimizer.step()
    optimizer.param_groups[1].update(options)
    if re.match("(lr|weight_decay): expected a finite", message) and min(options.values()) < 0.0:
        optimizer.step()
        return
    with unchanged(optimizer), pytest.raises(error, match=f"^param group 1: {message}"):
        optimizer.step()


@pytest.mark.parametrize("kind", [FusedAdam, FusedAdamW, FusedLion, FusedMuon])
def test_a_model_in_the_place_of_its_parameters(kind: Callable[..., Any]) -> None:
    for model in (
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2)),
        nn.ParameterDict({"a": nn.Parameter(torch.ones(3))}),
    ):
        with pytest.raises(TypeError, match=rf"got a {type(model).__name__}: pass model\.parameters\(\)"):
            kind(model)
    params = nn.ParameterList([nn.Parameter(torch.ones(3, 3))])  # torch's go through it
    assert kind(params).param_groups[0]["params"] == list(params)


@pytest.mark.parametrize("kind", [FusedAdam, FusedAdamW, FusedLion, FusedMuon])
def test_shallow_copies(kind: Callable[..., Any]) -> None:
    optimizer = kind([nn.Parameter(torch.ones(3, 3))])
    with pytest.raises(TypeError, match=r"use copy\.deepcopy\(\)"):
        copy.copy(optimizer)
    assert type(copy.deepcopy(optimizer)) is kind


class unchanged:
    """Asserts that parameters, states, scales and steps are the same bits at the end of the ``with`` block."""

    def __init__(self, optimizer: FusedAdam) -> None:
        self.optimizer = optimizer
        self.before = self._snapshot()

    def _snapshot(self) -> tuple[list[int], list[Tensor], list[Tensor]]:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        states = [value for param in params if param in self.optimizer.state for value in self._states(param)]
        steps = [group["step"] for group in self.optimizer.param_groups]
        copies = [[self._local(x) for x in tensors] for tensors in (params, states)]
        return steps, copies[0], copies[1]

    def _states(self, param: Tensor) -> list[Tensor]:
        decoded = [self.optimizer.get_unscaled_state(param, name) for name in ("exp_avg", "exp_avg_sq")]
        return [*self.optimizer.state[param].values(), *decoded]

    @staticmethod
    def _local(x: Tensor) -> Tensor:
        return (x.to_local() if isinstance(x, DTensor) else x).detach().clone()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        after = self._snapshot()
        assert after[0] == self.before[0]
        for old, new in zip(self.before[1:], after[1:], strict=True):
            assert len(old) == len(new) and all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


# What optimizers here do not update, as the base of QLoRA is: frozen, they may be held beside others.
FROZEN: dict[str, Callable[[], Tensor]] = {
    "uint8": lambda: torch.full((3, 4), 200, dtype=torch.uint8),
    "int8": lambda: torch.full((3, 4), -7, dtype=torch.int8),
    "int64": lambda: torch.full((3, 4), 77777),
    "bool": lambda: torch.ones(3, 4, dtype=torch.bool),
    "float8": lambda: torch.ones(3, 4).to(torch.float8_e4m3fn),
    "float64": lambda: secret(3, 4, dtype=torch.float64),
    "complex64": lambda: secret(3, 4, dtype=torch.complex64),
    "sparse": lambda: torch.eye(3, 4).to_sparse(),
    "wrapper": lambda: TwoTensor(secret(3, 4), secret(3, 4)),
}


@pytest.mark.parametrize("kind, form", each_once(product(FROZEN, ["unscaled", "native", "torch"])))
def test_frozen_parameters_of_any_kind(kind: str, form: Any, tmp_path: Path) -> None:
    """As torch.optim has them: neither updated nor saved, nor masters."""
    found = []
    for make in (lambda params: FusedAdamW(params, lr=0.1, checkpoint_format=form), torch.optim.AdamW):
        params = {"base": FROZEN[kind](), "first": torch.ones(3, 4), "second": torch.ones(4)}
        model = nn.Module()
        for name, value in params.items():
            model.register_parameter(name, nn.Parameter(value, requires_grad=name != "base"))
        optimizer = make(model.parameters())
        optimizer.param_groups[0]["lr"] = 0.1
        for step in range(3):
            model.first.grad = values((3, 4), torch.float32, "cpu", seed=step)
            model.second.grad = values((4,), torch.float32, "cpu", seed=step) if step else None
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        assert sorted(optimizer.state_dict()["state"]) == [1, 2]
        found.append(model)
        if isinstance(optimizer, FusedAdamW):
            optimizer.initialize_state()
            assert optimizer.master_state_dict(model).keys() == {"first", "second"}
            save_master_safetensors(model, optimizer, tmp_path)
            assert optimizer.summary()["parameters"] and len(optimizer.diagnostics()["parameters"]) == 2
    torch.testing.assert_close(found[0].first, found[1].first)
    equal = found[0].base == FROZEN[kind]() if kind not in ("sparse", "wrapper") else torch.tensor(True)
    assert bool(equal.all())


@pytest.mark.parametrize("kind", ["float8", "float64", "complex64", "wrapper"])  # torch lets no others be thawed
@pytest.mark.parametrize("with_gradient", [False, True])
def test_frozen_parameters_that_are_thawed(kind: str, with_gradient: bool) -> None:
    good, base = nn.Parameter(torch.ones(3, 4)), nn.Parameter(FROZEN[kind](), requires_grad=False)
    optimizer = FusedAdamW([("good", good), ("base", base)])
    good.grad = torch.ones_like(good)
    optimizer.step()
    base.requires_grad_(True)
    if with_gradient:
        base.grad = torch.zeros_like(base)
    with unchanged(optimizer), pytest.raises(TypeError, match=r"parameter 1 \('base', shape \(3, 4\)"):
        optimizer.step()
    with unchanged(optimizer), pytest.raises(TypeError, match="parameter 1"):
        optimizer.initialize_state(base)
    assert base not in optimizer.state
    base.grad = None
    base.requires_grad_(False)
    optimizer.step()
    with pytest.raises(TypeError, match=r"parameter 0 \(shape \(3, 4\)"):
        FusedAdamW([base.requires_grad_(True)])


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.full((2, 3), SECRET, dtype=torch.float64), "torch.float64.*convert it to torch.float32"),
        (torch.full((2, 3), 77777, dtype=torch.int64), "torch.int64.*exclude it from the optimizer"),
        (torch.full((2, 3), SECRET, dtype=torch.complex64), "torch.complex64.*view_as_real"),
        (torch.full((2, 3), SECRET).to_sparse(), "got torch.sparse_coo; exclude it"),
        (torch.full((2, 3), 448.0).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
        (TwoTensor(torch.full((2, 3), SECRET), torch.full((2, 3), SECRET)), "a TwoTensor has no memory of its own"),
    ],
    ids=["float64", "int64", "complex64", "sparse", "float8", "wrapper"],
)
def test_parameter(param: Tensor, message: str) -> None:
    good = torch.ones(3)
    with pytest.raises(TypeError, match=rf"parameter 1 \('last', shape \(2, 3\), .*{message}") as raised:
        FusedAdam([("first", good), ("last", param)])
    assert "7777" not in str(raised.value)
    optimizer = FusedAdam([good])
    with pytest.raises(TypeError, match=rf"parameter 1 \(shape \(2, 3\), .*{message}"):
        optimizer.add_param_group({"params": param})
    assert len(optimizer.param_groups) == 1


# --- gradients --------------------------------------------------------------------------------------------------------


def names(rows: list[Any]) -> list[str]:
    return [row[0] for row in rows]


def secret(*shape: int, **options: Any) -> Tensor:
    return torch.full(shape, SECRET, **options)


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def nested(**options: Any) -> Tensor:
    return torch.nested.nested_tensor([secret(128)] * 4, **options)


NO_MEMORY = "its gradient has no memory to be read"
GRADIENTS: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("sparse", lambda: secret(4, 128).to_sparse(), RuntimeError, "sparse gradients are not supported .*sparse_coo"),
    ("float64", lambda: secret(4, 128, dtype=torch.float64), TypeError, "expected a gradient of .*, got torch.float64"),
    ("int32", lambda: secret(4, 128, dtype=torch.int32), TypeError, "expected a gradient of .*, got torch.int32"),
    ("complex", lambda: secret(4, 128, dtype=torch.complex64), TypeError, "got torch.complex64"),
    ("shape", lambda: secret(128, 4), ValueError, r"expected a gradient of the same shape, got \(128, 4\)"),
    ("numel", lambda: secret(4, 127), ValueError, r"expected a gradient of the same shape, got \(4, 127\)"),
    ("device", lambda: secret(4, 128, device="meta"), ValueError, "its gradient is on meta, not cpu"),
    ("number", lambda: SECRET, TypeError, "expected a tensor as its gradient, got float"),
    ("mkldnn", lambda: secret(4, 128).to_mkldnn(), RuntimeError, "such gradients are not supported .*_mkldnn"),
    ("nested", nested, RuntimeError, "nested gradients are not supported .*; use a dense gradient"),
    ("jagged", lambda: nested(layout=torch.jagged), RuntimeError, "nested gradients are not supported .*jagged"),
    ("qint8", lambda: torch.quantize_per_tensor(secret(4, 128), 1e3, 0, torch.qint8), TypeError, "got torch.qint8"),
    ("wrapper", lambda: TwoTensor(secret(4, 128), secret(4, 128)), TypeError, "its gradient is a TwoTensor"),
    ("freed", lambda: freed(secret(4, 128)), RuntimeError, NO_MEMORY),
    ("functional", lambda: torch._to_functional_tensor(secret(4, 128)), RuntimeError, NO_MEMORY),
]


@pytest.mark.parametrize(
    "row, trained, backend",
    pairwise(GRADIENTS, [True, False], ["", "torch"]),
    ids=lambda value: value[0] if type(value) is tuple else value or "engine",
)
def test_gradient(row: Any, trained: bool, backend: str, use_backend: Callable[[str], None]) -> None:
    """Even if only the last of several is bad."""
    _, grad, error, message = row
    use_backend(backend)
    params = [torch.nn.Parameter(values((4, 128), torch.bfloat16, "cpu", seed=i)) for i in range(4)]
    options = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.float8_e4m3fn, "store_param_remainders": True}
    named = [(f"layer{i}.weight", param) for i, param in enumerate(params)]
    optimizer = FusedAdam(
        [{"params": named[:2]}, {"params": named[2:]}],
        weight_decay=0.1,
        use_decoupled_grad=True,
        **options,
        decoupled_weight_decay=True,
    )
    for param in params:
        param.decoupled_grad = values((4, 128), torch.float32, "cpu", seed=9)
    if trained:
        optimizer.step()
    params[-1].decoupled_grad = grad()
    what = r"parameter 3 \('layer3.weight', shape \(4, 128\), torch.bfloat16\): "
    with unchanged(optimizer), pytest.raises(error, match=what + ".*" + message) as raised:
        optimizer.step()
    assert "7777" not in str(raised.value)
    assert bool(optimizer.state) == trained


def zeros_without_memory() -> Tensor:
    return torch._efficientzerotensor((4, 128))


def made_in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return secret(4, 128)


UNWRITABLE: list[tuple[str, Callable[[], Tensor], str]] = [
    ("expanded", lambda: secret(1, 128).expand(4, 128), r"several of its elements share memory \(strides \(0, 1\)\)"),
    ("zero", zeros_without_memory, "a zero tensor has no memory of its own"),
    ("inference", made_in_inference_mode, "made in inference mode"),
    ("freed", lambda: freed(secret(4, 128)), "its storage was freed"),
]


@pytest.mark.parametrize(("make", "message"), [row[1:] for row in UNWRITABLE], ids=names(UNWRITABLE))
@pytest.mark.parametrize("later", [True, False], ids=["later", "first"])
@pytest.mark.parametrize("backend", ["", "torch"], ids=["engine", "torch"])
def test_parameter_that_cannot_be_written(
    backend: str, later: bool, make: Callable[[], Tensor], message: str, use_backend: Callable[[str], None]
) -> None:
    use_backend(backend)
    good, bad = torch.nn.Parameter(torch.ones(4, 128)), torch.nn.Parameter(torch.ones(4, 128))
    optimizer = FusedAdam([good, bad])
    good.grad, bad.grad = torch.ones(4, 128), torch.ones(4, 128)
    if later:
        optimizer.step()
    bad.data = make()
    kept = good.detach().clone()
    with pytest.raises(RuntimeError, match=rf"parameter 1 \(shape \(4, 128\).*{message}") as raised:
        optimizer.step()
    assert "7777" not in str(raised.value)
    assert torch.equal(good, kept) and optimizer.param_groups[0]["step"] == int(later)


def test_parameter_dtype_changed_later() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param])
    param.data = param.data.double()
    param.grad = torch.ones(3, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"parameter 0 .*torch.float64"):
        optimizer.step()


def test_parameter_shape_changed_later() -> None:
    param, memory = torch.nn.Parameter(torch.ones(64)), torch.zeros(64)
    optimizer = FusedAdam([param])
    param.grad = torch.ones(64)
    optimizer.step()
    param.data, param.grad = memory[:8], torch.ones(64)[:8]
    with pytest.raises(ValueError, match="parameter 0"):
        optimizer.step()
    assert not memory.any()


def test_step_arguments() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = FusedAdam([param])
    with unchanged(optimizer), pytest.raises(TypeError, match="unexpected arguments: scale"):
        optimizer.step(scale=2.0)


# --- DTensors ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def single_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_dtensor_gradients(single_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shards",))
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    params = [torch.nn.Parameter(distribute_tensor(secret(4, 128), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = FusedAdam(params, use_decoupled_grad=True)
    for param in params:
        param.decoupled_grad = torch.ones_like(param)
    optimizer.step()
    what = r"parameter 1 \(shape \(4, 128\), torch.float32, placements \(Shard\(dim=0\),\)\): "
    size = {"shape": (4, 128), "stride": (128, 1)}
    wrong_part = DTensor.from_local(torch.ones(3, 128), mesh, [Shard(0)], run_check=False, **size)
    for grad, error, message in [
        (torch.ones(4, 128), TypeError, "the parameter is a DTensor but its gradient is a plain tensor"),
        (distribute_tensor(torch.ones(4, 128), other, [Replicate(), Shard(0)]), ValueError, "another device mesh"),
        (distribute_tensor(torch.ones(4, 64), mesh, [Shard(0)]), ValueError, "same shape"),
        (wrong_part, ValueError, r"local shard has shape \(4, 128\), its gradient's \(3, 128\)"),
    ]:
        params[1].decoupled_grad = grad
        with unchanged(optimizer), pytest.raises(error, match=what + ".*" + message) as raised:
            optimizer.step()
        assert "7777" not in str(raised.value)

    plain = torch.nn.Parameter(torch.ones(4, 128))
    plain.decoupled_grad = distribute_tensor(torch.ones(4, 128), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="the parameter is a plain tensor but its gradient is a DTensor"):
        FusedAdam([plain], use_decoupled_grad=True).step()


# --- states and state dicts -------------------------------------------------------------------------------------------


def trained() -> tuple[list[Tensor], FusedAdam]:
    params = [torch.nn.Parameter(values((4, 128), torch.bfloat16, "cpu", seed=i)) for i in range(2)]
    optimizer = FusedAdam(
        [("first", params[0]), ("last", params[1])], exp_avg_dtype=torch.int8, store_param_remainders=True
    )
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return params, optimizer


def test_states() -> None:
    params, optimizer = trained()
    stranger = torch.nn.Parameter(secret(3))
    fresh = FusedAdam([("only", params[0])])
    what = r"parameter 1 \('last', shape \(4, 128\), torch.bfloat16\): "
    with unchanged(optimizer):
        with pytest.raises(KeyError, match=r"parameter 0 \('only', .* has no states yet: call initialize_state"):
            fresh.get_unscaled_state(params[0], "exp_avg")
        with pytest.raises(KeyError, match=r"does not hold this parameter of shape \(3,\)") as raised:
            optimizer.get_unscaled_state(stranger, "exp_avg")
        assert "7777" not in str(raised.value)
        with pytest.raises(KeyError, match="expected one of exp_avg, exp_avg_sq, master_param, got 'momentum'"):
            optimizer.get_unscaled_state(params[1], "momentum")
        with pytest.raises(KeyError, match=r"expected one of exp_avg, .*, got 'step'"):
            optimizer.set_scaled_state(params[1], "step", torch.ones(4, 128))
        with pytest.raises(ValueError, match=what + r"exp_avg: expected local shape \(4, 128\), got \(128, 4\)"):
            optimizer.set_scaled_state(params[1], "exp_avg", secret(128, 4))
        with pytest.raises(TypeError, match=what + "master_param: expected torch.int16, got torch.float32"):
            optimizer.set_scaled_state(params[1], "master_param", secret(4, 128))


STATE_DICTS: list[tuple[str, Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    ("groups", lambda d: d["param_groups"].append({}), ValueError, "has 2 param groups, the optimizer 1"),
    ("params", lambda d: d["param_groups"][0]["params"].pop(), ValueError, "has 1 parameters, the optimizer 2"),
    ("no_step", lambda d: d["param_groups"][0].pop("step"), ValueError, "states but no step"),
    ("no_states", lambda d: d["state"].clear(), RuntimeError, "at step 1 but holds no states"),
    ("no_moment", lambda d: d["state"][1].pop("exp_avg_sq"), KeyError, r"parameter 1 \('last', .*lacks exp_avg_sq"),
    ("shape", lambda d: d["state"][1].update(exp_avg=secret(3)), ValueError, r"\(4, 128\), the state dict has \(3,\)"),
    ("type", lambda d: d["state"][1].update(exp_avg=1.0), TypeError, "expected an unscaled .* tensor, got float"),
    ("master", lambda d: d["state"][1].update(master_param=secret(5)), ValueError, "master_param: expected shape"),
]


@pytest.mark.parametrize(("change", "error", "message"), [row[1:] for row in STATE_DICTS], ids=names(STATE_DICTS))
def test_state_dict(change: Callable[[dict[str, Any]], Any], error: type[Exception], message: str) -> None:
    """Even if only the last parameter's states are bad."""
    _, optimizer = trained()
    state_dict = copy.deepcopy(optimizer.state_dict())
    for states in state_dict["state"].values():
        states["exp_avg"].fill_(SECRET)
    change(state_dict)
    with unchanged(optimizer), pytest.raises(error, match=message) as raised:
        optimizer.load_state_dict(state_dict)
    assert "7777" not in str(raised.value)


def test_stored_bits_are_not_taken_for_values() -> None:
    """A state dict of raw codes, as ``optimizer.state`` holds them, is no state dict."""
    params, optimizer = trained()
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][1]["exp_avg"] = optimizer.state[params[1]]["exp_avg"]
    with unchanged(optimizer), pytest.raises(TypeError, match=r"'last'.*exp_avg: .*unscaled.*, got torch.int8"):
        optimizer.load_state_dict(state_dict)


def test_amsgrad_is_not_loaded() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    theirs, ours = torch.optim.AdamW([param], amsgrad=True), FusedAdam([param])
    theirs.step()
    with unchanged(ours), pytest.raises(ValueError, match="amsgrad"):
        ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    "key, replaced",
    [
        ("exp_avg", torch.zeros(1, 128)),
        ("exp_avg_sq", torch.zeros(1, 256, dtype=torch.uint8)[:, ::2]),
        ("master_param", torch.zeros(1, 64)),
        ("master_param", torch._neg_view(torch.zeros(1, 128))),
        ("master_param", freed(torch.zeros(1, 128))),
    ],
)
def test_replaced_states_are_refused(key: str, replaced: Tensor) -> None:
    param = torch.nn.Parameter(torch.ones(1, 128, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.int8)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = param.detach().clone()
    optimizer.state[param][key] = replaced
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"parameter 0 .*{key}"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1 and torch.equal(param, before)


def test_a_parameter_of_another_dtype_is_refused_by_its_remainders() -> None:
    param = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = FusedAdam([param], store_param_remainders=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.grad = None
    param.data = param.data.float()
    param.grad = torch.ones(64)
    with pytest.raises(TypeError, match=r"parameter 0 .*bfloat16"):
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
