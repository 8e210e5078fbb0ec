"""The interface of Apex's and TransformerEngine's FusedAdam: signatures, attributes, errors, checkpoints, parity."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import values as values_of
from distributed import same_bits
from fused_optim import FusedAdam
from fused_optim.compat import apex, transformer_engine

SHAPES = [(48, 96), (130,), (7, 3, 5)]


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    return values_of(shape, dtype, device, seed=seed)


FACES = [apex.FusedAdam, transformer_engine.FusedAdam]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

# From the other libraries' documentation: names in order, with defaults.
COMMON = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
APEX = {
    "lr": 1e-3,
    "bias_correction": True,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "adam_w_mode": True,
    "weight_decay": 0.0,
    "amsgrad": False,
    "set_grad_none": True,
    "capturable": False,
    "master_weights": False,
}
KEYWORDS_OF_TRANSFORMER_ENGINE = {
    "bias_correction": True,
    "adam_w_mode": True,
    "capturable": False,
    "master_weights": False,
    "master_weight_dtype": F32,
    "exp_avg_dtype": F32,
    "exp_avg_sq_dtype": F32,
    "use_decoupled_grad": False,
    "store_param_remainders": False,
    "set_grad_none": None,
}


def parameters(dtype: torch.dtype = F32, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(values(shape, dtype, device, seed=i)) for i, shape in enumerate(SHAPES)]


def step(
    optimizer: torch.optim.Optimizer, number: int, attribute: str = "grad", dtype: torch.dtype | None = None
) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for i, param in enumerate(params):
        grad = values(tuple(param.shape), F32, param.device.type, seed=1000 * number + i)
        setattr(param, attribute, grad.to(dtype or param.dtype))
    optimizer.step()


def arguments(face: type, kind: Any) -> dict[str, Any]:
    found = inspect.signature(face).parameters.values()
    return {p.name: p.default for p in found if p.kind is kind and p.name != "params"}


# --- signatures ---------------------------------------------------------------------------------------------------


def test_signature_of_apex() -> None:
    positional = arguments(apex.FusedAdam, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert list(positional.items()) == list(APEX.items())


def test_signature_of_transformer_engine() -> None:
    face = transformer_engine.FusedAdam
    assert list(arguments(face, inspect.Parameter.POSITIONAL_OR_KEYWORD).items()) == list(COMMON.items())
    assert arguments(face, inspect.Parameter.KEYWORD_ONLY) == KEYWORDS_OF_TRANSFORMER_ENGINE


def test_positional_arguments_of_apex() -> None:
    optimizer = apex.FusedAdam(parameters(BF16), 0.1, False, (0.8, 0.9), 1e-6, False, 0.3, False, False, False, True)
    expected = {"lr": 0.1, "bias_correction": False, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected
    assert (optimizer.adam_w_mode, optimizer.set_grad_none, optimizer.master_weights) == (0, False, True)


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("face", FACES)
def test_steps_are_those_of_torch(face: type[FusedAdam], adam_w_mode: bool) -> None:
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    ours, theirs = parameters(), parameters()
    actual = face(ours, lr=0.01, weight_decay=0.1, adam_w_mode=adam_w_mode)
    expected = kind(theirs, lr=0.01, weight_decay=0.1)
    for number in range(10):
        step(actual, number)
        step(expected, number)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("face", FACES)
def test_capturable_makes_rates_tensors(face: type[FusedAdam]) -> None:
    params = parameters()
    optimizer = face([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=0.25, capturable=True)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [(rate.dtype, rate.device, float(rate)) for rate in rates] == [
        (F32, params[0].device, 0.25),
        (F32, params[2].device, 0.5),
    ]


@pytest.mark.parametrize("face", FACES)
def test_copies_have_their_hooks_once(face: type[FusedAdam]) -> None:
    optimizer = face(parameters(BF16), master_weights=True)
    step(optimizer, 0)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.set_grad_none == optimizer.set_grad_none
        assert len(twin._optimizer_state_dict_post_hooks) == len(optimizer._optimizer_state_dict_post_hooks)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", FACES)
def test_amsgrad_is_refused_as_they_do(face: type[FusedAdam]) -> None:
    with pytest.raises(RuntimeError, match="amsgrad"):
        face(parameters(), amsgrad=True)


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_arguments_that_apex_has_given_up(name: str) -> None:
    with pytest.raises(RuntimeError, match=name):
        apex.FusedAdam(parameters()).step(**{name: []})


@pytest.mark.parametrize("name", ["master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"])
def test_dtypes_are_refused_as_transformer_engine_does(name: str) -> None:
    with pytest.raises(RuntimeError, match=name):
        transformer_engine.FusedAdam(parameters(), master_weights=True, **{name: torch.float64})


def test_options_of_masters_have_no_effect_without_them() -> None:
    options = {"master_weight_dtype": F16, "store_param_remainders": True}
    optimizer = transformer_engine.FusedAdam(parameters(BF16), master_weights=False, **options)
    assert optimizer.store_param_remainders is False
    step(optimizer, 0)


def test_fp16_masters_of_transformer_engine() -> None:
    """They take the place of remainders, and are read and written as FP32 values."""
    param = nn.Parameter(values((6, 256), seed=1).to(BF16))
    options = {"master_weight_dtype": F16, "store_param_remainders": True}
    optimizer = transformer_engine.FusedAdam([param], master_weights=True, **options)
    assert optimizer.store_param_remainders is False and optimizer.master_weight_dtype == F16
    assert optimizer.name_to_dtype_map["master_param"] == F16
    wanted = values((6, 256), seed=2) * torch.logspace(-8, 8, 6)[:, None]
    optimizer.set_scaled_state(param, "master_param", wanted)
    assert optimizer.state[param]["master_param"].dtype == F16
    found = optimizer.get_unscaled_state(param, "master_param")
    assert found.dtype == F32 and torch.allclose(found, wanted, rtol=2**-11, atol=0)
    saved = optimizer.state_dict()["state"][0]["master_param"]
    assert saved.dtype == F32 and torch.equal(saved, found)
    optimizer.sync_params_from_master()
    assert torch.equal(param, found.to(BF16))


def test_set_grad_none_of_transformer_engine() -> None:
    with pytest.warns(DeprecationWarning, match="set_grad_none"):
        optimizer = transformer_engine.FusedAdam(parameters(), set_grad_none=False)
    step(optimizer, 0)
    optimizer.zero_grad()
    assert all(not param.grad.any() for param in optimizer.param_groups[0]["params"])
    with pytest.raises(ValueError, match="set_to_none=True"):
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("given, gone", [(None, True), (True, True), (False, False)])
def test_zero_grad_of_transformer_engine(given: bool | None, gone: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = transformer_engine.FusedAdam(parameters(), use_decoupled_grad=True)
    step(optimizer, 0, "decoupled_grad", BF16)
    optimizer.zero_grad(given)
    for param in optimizer.param_groups[0]["params"]:
        assert (param.decoupled_grad is None) == gone and (gone or not param.decoupled_grad.any())


# --- attributes and methods ---------------------------------------------------------------------------------------


def test_attributes_of_transformer_engine() -> None:
    options = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": torch.uint8, "store_param_remainders": True}
    optimizer = transformer_engine.FusedAdam(parameters(BF16), master_weights=True, **options)
    assert optimizer.name_to_dtype_map == {"exp_avg": BF16, "exp_avg_sq": torch.uint8, "master_param": F32}
    assert (optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype) == (BF16, torch.uint8)
    assert optimizer.master_weight_dtype == F32 and optimizer.set_grad_none is None
    assert (optimizer.adam_w_mode, optimizer.capturable, optimizer.use_decoupled_grad) == (1, False, False)
    assert optimizer.master_weights and optimizer.store_param_remainders


def test_states_of_transformer_engine_by_name() -> None:
    optimizer = transformer_engine.FusedAdam(parameters(BF16), master_weights=True, exp_avg_dtype=BF16)
    param = optimizer.param_groups[0]["params"][0]
    wanted = values(tuple(param.shape), seed=3)
    optimizer.set_scaled_state(param, "exp_avg", wanted)  # creates the states
    assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq", "master_param"}
    kept = optimizer.get_unscaled_state(param, "exp_avg", skip_unscale=True)
    assert kept is optimizer.state[param]["exp_avg"] and torch.equal(kept, wanted.bfloat16())
    assert same_bits(optimizer.get_unscaled_state(param, "exp_avg"), wanted.bfloat16().float())


@pytest.mark.parametrize("dtype, options", [(BF16, {}), (F32, {}), (BF16, {"store_param_remainders": True})])
def test_masters_of_apex(dtype: torch.dtype, options: dict[str, Any]) -> None:
    params = parameters(dtype)
    optimizer = apex.FusedAdam(params, lr=0.01, master_weights=True, **options)
    (group,) = optimizer.param_groups_master
    assert all(same_bits(master, param.detach().float()) for master, param in zip(group["params"], params, strict=True))
    step(optimizer, 0)
    exact = [param.detach().float().requires_grad_() for param in parameters(dtype)]
    expected = torch.optim.AdamW(exact, lr=0.01, weight_decay=0.0)
    step(expected, 0, dtype=F32) if dtype == F32 else _step_rounded(expected, 0, dtype)
    for master, value in zip(optimizer.param_groups_master[0]["params"], exact, strict=True):
        torch.testing.assert_close(master, value.detach(), rtol=1e-6, atol=1e-7)


def _step_rounded(optimizer: torch.optim.Optimizer, number: int, dtype: torch.dtype) -> None:
    for i, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = values(tuple(param.shape), F32, seed=1000 * number + i).to(dtype).float()
    optimizer.step()


def test_without_masters_apex_lists_none() -> None:
    assert apex.FusedAdam(parameters(BF16)).param_groups_master == [{"params": [None] * len(SHAPES)}]


# --- checkpoints --------------------------------------------------------------------------------------------------


def with_remainders(**options: Any) -> transformer_engine.FusedAdam:
    return transformer_engine.FusedAdam(
        parameters(BF16), lr=0.01, master_weights=True, store_param_remainders=True, **options
    )


def masters(optimizer: FusedAdam) -> list[Tensor]:
    model = nn.ParameterList(optimizer.param_groups[0]["params"])
    return [master.clone() for master in optimizer.master_state_dict(model).values()]


def test_remainders_are_int16_in_state_dicts() -> None:
    """So TransformerEngine's own load_state_dict asks for them."""
    optimizer = with_remainders()
    for number in range(3):
        step(optimizer, number)
    state = optimizer.state_dict()["state"]
    assert all(state[i]["master_param"].dtype == torch.int16 for i in range(len(SHAPES)))
    for i, (param, master) in enumerate(zip(optimizer.param_groups[0]["params"], masters(optimizer), strict=True)):
        low = state[i]["master_param"].int()
        bits = (param.detach().view(torch.int16).int() << 16) + low  # the parameter is the master, rounded to nearest
        assert torch.equal(bits.view(F32), master)


def test_remainders_load_again() -> None:
    first, second = with_remainders(), with_remainders(exp_avg_dtype=BF16)
    for number in range(3):
        step(first, number)
    with torch.no_grad():
        for ours, theirs in zip(second.param_groups[0]["params"], first.param_groups[0]["params"], strict=True):
            ours.copy_(theirs)
    saved = first.state_dict()
    before = {id_: dict(state) for id_, state in saved["state"].items()}
    second.load_state_dict(saved)
    assert all(map(same_bits, masters(second), masters(first)))
    assert all(saved["state"][id_][key] is value for id_, state in before.items() for key, value in state.items())


def test_remainders_become_whole_masters_where_those_are_kept() -> None:
    """Not the remainders themselves, as in TransformerEngine."""
    first = with_remainders()
    step(first, 0)
    params = [nn.Parameter(param.detach().clone()) for param in first.param_groups[0]["params"]]
    second = transformer_engine.FusedAdam(params, master_weights=True)
    second.load_state_dict(first.state_dict())
    assert all(map(same_bits, masters(second), masters(first)))


def as_apex_saves() -> dict[str, Any]:
    """Apex's state dict after a step: FP32 moments, the step in the group, no masters."""
    state = {
        i: {"exp_avg": values(s, seed=i), "exp_avg_sq": values(s, seed=9 + i).square()} for i, s in enumerate(SHAPES)
    }
    group = {"lr": 0.5, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "step": 7}
    return {"state": state, "param_groups": [{**group, "params": list(range(len(SHAPES)))}]}


@pytest.mark.parametrize("face", FACES)
def test_what_apex_saves_loads(face: type[FusedAdam]) -> None:
    optimizer = face(parameters(BF16))
    saved = as_apex_saves()
    optimizer.load_state_dict(saved)
    assert (optimizer.param_groups[0]["step"], optimizer.param_groups[0]["lr"]) == (7, 0.5)
    for i, param in enumerate(optimizer.param_groups[0]["params"]):
        assert same_bits(optimizer.state[param]["exp_avg_sq"], saved["state"][i]["exp_avg_sq"])


# --- parity with the real ones, on GPUs where they are installed ---------------------------------------------------

STEPS = 200


def real(package: str, module: str) -> type:
    """The other library's class; skips where it is not installed or there is no GPU."""
    pytest.importorskip(package)
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return importlib.import_module(module).FusedAdam


def after_steps(make: Callable[[list[nn.Parameter], bool], Any], dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Parameters after 200 steps of ours, of theirs, and in double precision on unrounded values; all as doubles."""
    optimizers = [make(parameters(dtype, "cuda"), ours) for ours in (True, False)]
    attribute = "decoupled_grad" if getattr(optimizers[0], "use_decoupled_grad", False) else "grad"
    (group,) = optimizers[0].param_groups
    reference = [nn.Parameter(param.detach().double()) for param in group["params"]]
    unrounded = ReferenceAdam(reference, group, bool(optimizers[0].adam_w_mode))
    for number in range(STEPS):
        for optimizer in optimizers:
            step(optimizer, number, attribute)
        unrounded.step([getattr(param, attribute).double() for param in group["params"]], number + 1)
    found = [*(optimizer.param_groups[0]["params"] for optimizer in optimizers), reference]
    return [tuple(param.detach().double() for param in params) for params in zip(*found, strict=True)]


def assert_parity(make: Callable[[list[nn.Parameter], bool], Any], dtype: torch.dtype, exact: bool) -> None:
    """``exact``: FP32 values that are never rounded. Else both round, at other elements where their FP32 arithmetic
    differs in its last bits: ours must be as close to the exact values as theirs, and closer to theirs than that.
    """
    for a, b, c in after_steps(make, dtype):
        if exact and dtype == F32:
            assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())
        else:
            assert float((a - c).norm()) <= 1.1 * float((b - c).norm())
            assert float((a - b).norm()) <= float((b - c).norm())


class ReferenceAdam:
    """Adam(W) in the precision of its parameters, with or without bias correction, from the papers' formulas."""

    def __init__(self, params: list[nn.Parameter], group: dict[str, Any], adam_w_mode: bool) -> None:
        self.params, self.group, self.adam_w_mode = params, group, adam_w_mode
        self.moments = [(torch.zeros_like(param), torch.zeros_like(param)) for param in params]

    @torch.no_grad()
    def step(self, grads: list[Tensor], number: int) -> None:
        (beta1, beta2), decay, lr = self.group["betas"], self.group["weight_decay"], float(self.group["lr"])
        corrected = self.group["bias_correction"]
        corrections = [1 - beta**number if corrected else 1.0 for beta in (beta1, beta2)]
        for param, grad, (m, v) in zip(self.params, grads, self.moments, strict=True):
            if not self.adam_w_mode:
                grad = grad + decay * param
            m.lerp_(grad, 1 - beta1)
            v.lerp_(grad.square(), 1 - beta2)
            update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + self.group["eps"])
            param.sub_(lr * (update + (decay * param if self.adam_w_mode else 0.0)))


def maker(face: type, theirs: type, options: dict[str, Any]) -> Callable[[list[nn.Parameter], bool], Any]:
    """Makes ours, rounding as theirs does, or theirs."""

    def make(params: list[nn.Parameter], ours: bool) -> Any:
        kind = functools.partial(face, stochastic_rounding=False) if ours else theirs
        return kind(params, lr=1e-3, **options)

    return make


APEX_OPTIONS = [
    (dtype, {"adam_w_mode": adam_w, "bias_correction": corrected, "weight_decay": 0.1, **extra})
    for dtype, adam_w, corrected in itertools.product([F32, F16, BF16], [True, False], [True, False])
    for extra in ({}, {"capturable": True}, {"capturable": True, "master_weights": True})
    if not (dtype is BF16 and "master_weights" in extra)  # Apex keeps no masters of BF16 parameters
]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype, options", APEX_OPTIONS, ids=str)
def test_parity_with_apex(dtype: torch.dtype, options: dict[str, Any]) -> None:
    make = maker(apex.FusedAdam, real("apex", "apex.optimizers"), options)
    assert_parity(make, dtype, exact=dtype is F32 or options.get("master_weights", False))


@pytest.mark.cuda
def test_signature_is_that_of_the_real_apex() -> None:
    theirs = arguments(real("apex", "apex.optimizers"), inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert list(theirs.items()) == list(APEX.items())


MASTERS = ({}, {"master_weights": True}, {"master_weights": True, "store_param_remainders": True})
TRANSFORMER_ENGINE_OPTIONS = [
    (dtype, {"adam_w_mode": adam_w, "weight_decay": 0.1, "bias_correction": corrected, **moments, **extra})
    for dtype, adam_w, corrected in itertools.product([F32, F16, BF16], [True, False], [True, False])
    for moments in ({}, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16})
    for extra in (*MASTERS, {"use_decoupled_grad": True}, {"capturable": True}, {"capturable": True, **MASTERS[1]})
    if dtype is BF16 or "store_param_remainders" not in extra
]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype, options", TRANSFORMER_ENGINE_OPTIONS, ids=str)
def test_parity_with_transformer_engine(dtype: torch.dtype, options: dict[str, Any]) -> None:
    theirs = real("transformer_engine", "transformer_engine.pytorch.optimizers")
    make = maker(transformer_engine.FusedAdam, theirs, options)
    whole = "exp_avg_dtype" not in options and (dtype is F32 or options.get("master_weights", False))
    assert_parity(make, F32 if whole and dtype is F32 else dtype, exact=whole)


@pytest.mark.cuda
@pytest.mark.parametrize("moments", [F16, torch.uint8], ids=str)
@pytest.mark.parametrize("options", MASTERS[:2], ids=str)
def test_scaled_moments_are_as_exact_as_transformer_engines(options: dict[str, Any], moments: torch.dtype) -> None:
    """Theirs have one scale per tensor, ours have one per block: the two may differ by more than theirs from exact."""
    theirs = real("transformer_engine", "transformer_engine.pytorch.optimizers")
    make = maker(
        transformer_engine.FusedAdam, theirs, {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments, **options}
    )
    for ours, other, exact in after_steps(make, BF16):
        assert float((ours - exact).norm()) <= 1.1 * float((other - exact).norm())


@pytest.mark.cuda
def test_checkpoints_go_both_ways_with_apex() -> None:
    theirs = real("apex", "apex.optimizers")
    for first, second in ((theirs, apex.FusedAdam), (apex.FusedAdam, theirs)):
        for ours, other in continued(first, second, F32, {}):
            torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-7)


def continued(first: type, second: type, dtype: torch.dtype, options: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Parameters after 6 steps of the first class, and where the second has loaded after 5 what the first had saved."""
    source = first(parameters(dtype, "cuda"), lr=1e-3, **options)
    for number in range(5):
        step(source, number)
    params = [nn.Parameter(param.detach().clone()) for param in source.param_groups[0]["params"]]
    target = second(params, lr=1e-3, **options)
    target.load_state_dict(copy.deepcopy(source.state_dict()))  # Apex takes the tensors themselves
    for optimizer in (source, target):
        step(optimizer, 5)
    return list(zip(source.param_groups[0]["params"], params, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("options", MASTERS[1:], ids=str)
def test_checkpoints_go_both_ways_with_transformer_engine(options: dict[str, Any]) -> None:
    theirs = real("transformer_engine", "transformer_engine.pytorch.optimizers")
    for first, second in ((theirs, transformer_engine.FusedAdam), (transformer_engine.FusedAdam, theirs)):
        for a, b in continued(first, second, BF16, options):
            assert float((a != b).double().mean()) <= 0.01
