"""FusedAdam as a torch.optim.Optimizer: groups, hooks, copies, state dicts, synthetic steps, masters."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import fused_optim
from cases import EACH_FORMAT_AND_MASTER, FORMAT, FORMATS, MASTER, MASTERS, SHAPES, Format, Master, values
from peers import FusedAdam, FusedAdamW

ALL_MASTERS = pytest.mark.parametrize("master", MASTERS, ids=str)
ALL_FORMATS = pytest.mark.parametrize("fmt", FORMATS, ids=str)


class Model(torch.nn.Module):
    """Parameters with and without blocks."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        shapes = {"weight": (6, 128), "odd": (5, 7), "bias": (10,)}
        for i, (name, shape) in enumerate(shapes.items()):
            self.register_parameter(name, torch.nn.Parameter(values(shape, dtype, device, seed=10 * seed + i)))


def make(
    device: str, fmt: Format = FORMAT["float32"], master: Master = MASTER["float32"], *, seed: int = 0, **options: Any
) -> tuple[Model, FusedAdam]:
    model = Model(device, master.param_dtype, seed)
    formats = {"exp_avg_dtype": fmt.dtype, "exp_avg_sq_dtype": fmt.dtype}
    return model, FusedAdam(
        model.parameters(), **{"lr": 0.01, "decoupled_weight_decay": True, **formats, **master.options, **options}
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for i, param in enumerate(model.parameters()):
            param.grad = values(tuple(param.shape), param.dtype, str(param.device), seed=100 * step + i + 50)
        optimizer.step()


def everything(model: torch.nn.Module, optimizer: FusedAdam) -> dict[str, Tensor]:
    """Parameters, stored states and their values, by name."""
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        for key, state in optimizer.state[param].items():
            found[f"{name}.{key}"] = state.clone()
            found[f"{name}.{key}.value"] = optimizer.get_unscaled_state(param, key).clone()
    return found


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert torch.equal(actual[key], value), key


# --- param groups and options ---------------------------------------------------------------------------------------


def test_signature() -> None:
    """torch.optim.Adam's arguments, in its order and with its defaults, as far as both have them; others by name."""
    ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (fused_optim.FusedAdam, torch.optim.Adam))
    positional = [name for name, each in ours.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == list(theirs)[: len(positional)] and positional[-1] == "amsgrad"
    assert theirs.keys() - ours.keys() == set()
    assert ours["bias_correction"].default is True  # which torch has not
    for name in theirs.keys() - {"self", "decoupled_weight_decay"}:  # which has to be said where it matters
        assert ours[name].default == theirs[name].default, name


def test_adamw_is_adam_with_weight_decay(device: str) -> None:
    (first, adamw), (second, adam) = make(device), make(device, weight_decay=0.01)
    adamw = FusedAdamW(first.parameters(), lr=0.01)
    assert adamw.defaults["weight_decay"] == torch.optim.AdamW(first.parameters()).defaults["weight_decay"] == 0.01
    assert FusedAdamW(first.parameters(), 0.1, (0.5, 0.6), 1e-3, 0.2).defaults["weight_decay"] == 0.2
    train(first, adamw, range(2))
    train(second, adam, range(2))
    assert_same(everything(first, adamw), everything(second, adam))


def test_formats_per_group(device: str) -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 128, device=device)) for _ in range(3)]
    optimizer = FusedAdam(
        [
            {"params": weights[:1]},
            {"params": weights[1:2], "exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.float8_e4m3fn},
        ],
        exp_avg_sq_dtype=torch.bfloat16,
    )
    optimizer.add_param_group({"params": weights[2], "exp_avg_dtype": torch.uint8})
    optimizer.initialize_state()
    dtypes = [[state.dtype for state in optimizer.state[weight].values()] for weight in weights]
    assert dtypes == [[torch.float32, torch.bfloat16], [torch.int8, torch.uint8], [torch.uint8, torch.bfloat16]]


def test_add_param_group_starts_at_step_0(device: str) -> None:
    model, optimizer = make(device)
    train(model, optimizer, range(3))
    late = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    late.grad = torch.full_like(late, 2.0)
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [4, 1]
    torch.testing.assert_close(late, torch.full_like(late, 0.5))  # the first step's size is lr


def test_named_parameters(device: str) -> None:
    model = Model(device)
    optimizer = FusedAdam(model.named_parameters(), lr=0.01)
    train(model, optimizer, range(1))
    names = ["weight", "odd", "bias"]
    assert optimizer.param_groups[0]["param_names"] == names
    state_dict = optimizer.state_dict()
    assert state_dict["param_groups"][0]["param_names"] == names
    other = FusedAdam(Model(device).named_parameters())
    other.load_state_dict(state_dict)
    assert other.param_groups[0]["param_names"] == names


def test_generator_of_tensors(device: str) -> None:
    """Parameters may be plain tensors, as Megatron-LM's slices are."""
    tensor = torch.ones(8, device=device)
    optimizer = FusedAdam(iter([tensor]), lr=0.25)
    tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    torch.testing.assert_close(tensor, torch.full_like(tensor, 0.75))


# --- step -------------------------------------------------------------------------------------------------------------


def test_closure(device: str) -> None:
    param = torch.nn.Parameter(torch.tensor([2.0], device=device))
    optimizer = FusedAdam([param], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    torch.testing.assert_close(param.detach().cpu(), torch.tensor([1.5]))
    assert optimizer.step() is None


class Doubled(FusedAdam):
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        super().step(closure, **kwargs)
        return super().step(closure, **kwargs)


@pytest.mark.parametrize("of_all_optimizers", [False, True])
@pytest.mark.parametrize("kind", [FusedAdam, Doubled])
def test_hooks_run_once(kind: type[FusedAdam], of_all_optimizers: bool) -> None:
    """Also of a class with a step of its own, whether or not they are those of all optimizers."""
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = kind([param])
    calls: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(f"{name} {optimizer.param_groups[0]['step']}")

    hooks = [note("pre"), note("post")]
    register = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    if not of_all_optimizers:
        register = optimizer.register_step_pre_hook, optimizer.register_step_post_hook  # type: ignore[assignment]
    handles = [add(hook) for add, hook in zip(register, hooks, strict=True)]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    each = 1 if kind is FusedAdam else 2
    assert calls == ["pre 0", f"post {each}"] and optimizer.param_groups[0]["step"] == 2 * each


def test_profiles_show_steps() -> None:
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = FusedAdam([param])
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#FusedAdam.step" in {event.key for event in profile.key_averages()}


def test_version_counters_advance(device: str) -> None:
    """So autograd notices that a saved parameter was changed."""
    model, optimizer = make(device)
    train(model, optimizer, range(1))
    before = [param._version for param in model.parameters()]
    loss = (model.weight * model.weight).sum()
    optimizer.step()
    assert all(param._version > version for param, version in zip(model.parameters(), before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_without_gradients_stay(device: str) -> None:
    model, optimizer = make(device, weight_decay=0.1)
    train(model, optimizer, range(1))
    before = everything(model, optimizer)
    model.odd.grad = None
    optimizer.step()
    after = everything(model, optimizer)
    changed = {key.split(".")[0] for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"weight", "bias"}
    optimizer.zero_grad()
    optimizer.step()
    assert_same(everything(model, optimizer), after)


def test_states_of_parameters_without_gradients_exist(device: str) -> None:
    """All parameters have the same state keys, whichever had a gradient."""
    model, optimizer = make(device)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert {tuple(optimizer.state[param]) for param in model.parameters()} == {("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled_grad"])
def test_zero_grad(decoupled: bool, device: str) -> None:
    def fresh(**options: Any) -> tuple[Tensor, FusedAdam]:
        param = torch.nn.Parameter(torch.ones(3, device=device))
        param.grad = torch.ones_like(param)
        param.decoupled_grad = torch.ones_like(param)
        return param, FusedAdam([param], use_decoupled_grad=decoupled, **options)

    for options, argument, none in [
        ({}, {}, True),
        ({}, {"set_to_none": False}, False),
        ({"set_grad_none": False}, {}, False),
        ({"set_grad_none": False}, {"set_to_none": True}, True),
        ({"set_grad_none": True}, {}, True),
    ]:
        param, optimizer = fresh(**options)
        optimizer.zero_grad(**argument)
        cleared = [param.grad] + ([param.decoupled_grad] if decoupled else [])
        assert all((grad is None) if none else bool((grad == 0).all()) for grad in cleared)
        if not decoupled:
            assert bool((param.decoupled_grad == 1).all())  # not this optimizer's


def test_use_decoupled_grad_can_be_switched(device: str) -> None:
    param = torch.nn.Parameter(torch.zeros(3, device=device))
    param.grad, param.decoupled_grad = torch.ones_like(param), -torch.ones_like(param)
    optimizer = FusedAdam([param], lr=1.0)
    optimizer.use_decoupled_grad = True
    optimizer.step()
    assert bool((param > 0).all())


# --- synthetic first steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoupled_weight_decay", [True, False], ids=["decoupled", "coupled"])
@ALL_MASTERS
def test_first_step_with_zero_gradients_only_creates_states(
    master: Master, decoupled_weight_decay: bool, device: str
) -> None:
    """torch.distributed.checkpoint and Megatron-FSDP make optimizers create their states by such a step."""
    options = {"lr": 0.1, "weight_decay": 0.5, "decoupled_weight_decay": decoupled_weight_decay}
    (first, synthetic), (second, initialized) = (make(device, FORMAT["int8"], master, **options) for _ in range(2))
    for param in first.parameters():
        param.grad = torch.zeros_like(param)
    synthetic.param_groups[0]["lr"] = 0.0
    synthetic.step()
    synthetic.param_groups[0]["lr"] = 0.1
    initialized.initialize_state()
    assert synthetic.param_groups[0]["step"] == 0
    assert_same(everything(first, synthetic), everything(second, initialized))
    assert_same({n: p.detach() for n, p in first.named_parameters()}, dict(second.named_parameters()))
    train(first, synthetic, range(3))
    train(second, initialized, range(3))
    assert_same(everything(first, synthetic), everything(second, initialized))


# --- states -----------------------------------------------------------------------------------------------------------


@EACH_FORMAT_AND_MASTER
def test_state_bytes(fmt: Format, master: Master, device: str) -> None:
    """Elements times bytes, and 4 bytes per block and scaled state."""
    params = [torch.zeros(shape.shape, dtype=master.param_dtype, device=device) for shape in SHAPES]
    optimizer = FusedAdam(params, exp_avg_dtype=fmt.dtype, exp_avg_sq_dtype=fmt.dtype, **master.options)
    assert optimizer.state_bytes() == 0
    optimizer.initialize_state()
    expected = 0
    for shape, param in zip(SHAPES, params, strict=True):
        blocks = -(-param.numel() // shape.block) if shape.block else 0
        per_element = fmt.bytes if blocks or not fmt.scaled else 4
        expected += 2 * param.numel() * per_element + (2 * 4 * blocks if fmt.scaled else 0)
        stored = master.stored(has_blocks=shape.block > 0)
        expected += param.numel() * (stored.itemsize if stored else 0) + (4 * blocks if master.scaled else 0)
    assert optimizer.state_bytes() == expected


@ALL_MASTERS
def test_initialize_state(master: Master, device: str) -> None:
    """Zero moments, masters equal to the parameters; a second call changes nothing."""
    model, optimizer = make(device, FORMAT["int8"], master)
    optimizer.initialize_state(model.weight)
    assert set(optimizer.state) == {model.weight}
    optimizer.initialize_state()
    for param in model.parameters():
        states = optimizer.state[param]
        assert set(states) == {"exp_avg", "exp_avg_sq"} | ({"master_param"} if master.dtype else set())
        assert all(state.shape == param.shape and state.device == param.device for state in states.values())
        assert not optimizer.get_unscaled_state(param, "exp_avg").any()
        assert not optimizer.get_unscaled_state(param, "exp_avg_sq").any()
        if master.dtype:
            assert states["master_param"].dtype == master.stored(has_blocks=param is model.weight)
    assert_same(
        {name: value.float() for name, value in model.named_parameters()},
        dict(optimizer.master_state_dict(model).items()),
    )
    train(model, optimizer, range(2))
    before, states = everything(model, optimizer), [optimizer.state[param] for param in model.parameters()]
    optimizer.initialize_state()
    optimizer.initialize_state(model.weight, store_param_remainders=True)
    assert_same(everything(model, optimizer), before)
    assert all(optimizer.state[param] is state for param, state in zip(model.parameters(), states, strict=True))


def test_initialize_state_chooses_remainders(device: str) -> None:
    """As TransformerEngine's and Megatron-LM's callers pass it, by position."""
    model, optimizer = make(device, master=MASTER["bfloat16+float32"])
    optimizer.initialize_state(model.weight, True)
    optimizer.initialize_state(model.odd, False)
    assert optimizer.state[model.weight]["master_param"].dtype == torch.int16
    assert optimizer.state[model.odd]["master_param"].dtype == torch.float32


def test_master_weights_can_be_switched_off(device: str) -> None:
    model, optimizer = make(device, master=MASTER["bfloat16+float32"])
    optimizer.master_weights = False
    train(model, optimizer, range(1))
    assert "master_param" not in optimizer.state[model.weight]


@ALL_FORMATS
def test_unscaled_states(fmt: Format, device: str) -> None:
    model, optimizer = make(device, fmt)
    train(model, optimizer, range(3))
    for param in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            value = optimizer.get_unscaled_state(param, name)
            assert value.dtype == torch.float32 and value.shape == param.shape
            bits = optimizer.state[param][name].clone()
            optimizer.set_scaled_state(param, name, torch.zeros_like(value))
            assert not optimizer.get_unscaled_state(param, name).any()
            optimizer.set_scaled_state(param, name, value.clone() if value.any() else torch.zeros_like(value))
            if fmt.bytes < 4 and param is model.weight:
                assert torch.equal(optimizer.state[param][name], bits)
                assert torch.equal(optimizer.get_unscaled_state(param, name), value)


@pytest.mark.parametrize("master", [master for master in MASTERS if master.dtype], ids=str)
def test_masters_can_be_read_and_written(master: Master, device: str) -> None:
    """Remainders are spoken as they are; the parameter follows in ``sync_params_from_master``."""
    model, optimizer = make(device, master=master)
    train(model, optimizer, range(2))
    stored = optimizer.get_unscaled_state(model.weight, "master_param")
    assert stored.dtype == (torch.float32 if master.scaled else master.dtype)
    expected = optimizer.master_state_dict(model)["weight"].clone()
    kept, param = stored.clone(), model.weight.detach().clone()
    optimizer.set_scaled_state(model.weight, "master_param", torch.zeros_like(stored))
    optimizer.set_scaled_state(model.weight, "master_param", kept)
    assert torch.equal(optimizer.master_state_dict(model)["weight"], expected)
    optimizer.sync_params_from_master()
    assert torch.equal(model.weight, param)


def test_sync_params_from_master(device: str) -> None:
    model, optimizer = make(device, master=MASTER["bfloat16+float32"])
    optimizer.initialize_state()
    optimizer.state[model.weight]["master_param"].fill_(1.00390625)  # a tie in BF16: to even
    optimizer.sync_params_from_master()
    assert bool((model.weight == 1.0).all())


def test_master_state_dict(device: str) -> None:
    """FP32 values by the model's names, of this optimizer's parameters only."""
    model = Model(device, torch.bfloat16)
    optimizer = FusedAdam([model.bias, model.weight], lr=0.01)
    masters = optimizer.master_state_dict(model)
    assert sorted(masters) == ["bias", "weight"]
    assert all(torch.equal(masters[name], model.get_parameter(name).float()) for name in masters)
    assert {value.dtype for value in masters.values()} == {torch.float32}


# --- copies -----------------------------------------------------------------------------------------------------------


def deep_copied(model: Model, optimizer: FusedAdam) -> tuple[Model, FusedAdam]:
    return copy.deepcopy((model, optimizer))


def pickled(model: Model, optimizer: FusedAdam) -> tuple[Model, FusedAdam]:
    return pickle.loads(pickle.dumps((model, optimizer)))


def saved(model: Model, optimizer: FusedAdam) -> tuple[Model, FusedAdam]:
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copier", [deep_copied, pickled, saved])
@pytest.mark.parametrize(
    ("fmt", "master"),
    [
        (FORMAT["float32"], MASTER["float32"]),
        (FORMAT["int8"], MASTER["bfloat16+rem16"]),
        (FORMAT["float8_e4m3fn"], MASTER["bfloat16"]),
    ],
    ids=str,
)
def test_copies_continue_bitwise(copier: Callable[..., Any], fmt: Format, master: Master, device: str) -> None:
    model, optimizer = make(device, fmt, master, weight_decay=0.1, seed=3)
    train(model, optimizer, range(3))
    before = everything(model, optimizer)
    other, copied = copier(model, optimizer)
    assert type(copied) is FusedAdam and copied.defaults.items() >= optimizer.defaults.items()
    assert_same(everything(other, copied), before)
    train(other, copied, range(3, 6))
    assert_same(everything(model, optimizer), before)  # nothing is shared
    train(model, optimizer, range(3, 6))
    assert_same(everything(other, copied), everything(model, optimizer))
    assert_same(flat(copied.state_dict()), flat(optimizer.state_dict()))


# --- state dicts ------------------------------------------------------------------------------------------------------


def flat(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{i}.{key}": value for i, states in state_dict["state"].items() for key, value in states.items()}


@EACH_FORMAT_AND_MASTER
def test_state_dict_round_trip(fmt: Format, master: Master, device: str) -> None:
    """FP32 values of the parameters' shapes, through ``torch.save`` into a fresh model and optimizer of other values.

    Training goes on with the same bits, and what was loaded stays as it is.
    """
    model, optimizer = make(device, fmt, master, weight_decay=0.1)
    train(model, optimizer, range(3))
    state_dict = optimizer.state_dict()
    masters = optimizer.master_state_dict(model)
    for i, (name, param) in enumerate(model.named_parameters()):
        states = state_dict["state"][i]
        assert all(value.dtype == torch.float32 and value.shape == param.shape for value in states.values())
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[key], optimizer.get_unscaled_state(param, key))
        assert not master.dtype or torch.equal(states["master_param"], masters[name])
    assert state_dict["param_groups"][0]["params"] == [0, 1, 2]
    file = io.BytesIO()
    torch.save(state_dict, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True, map_location="cpu")
    kept = copy.deepcopy(loaded)
    other, fresh = make(device, fmt, master, seed=5, lr=7.0)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(loaded)
    group = fresh.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["step"]) == (0.01, 0.1, 3)
    assert_same(everything(other, fresh), everything(model, optimizer))
    train(model, optimizer, range(3, 6))
    train(other, fresh, range(3, 6))
    assert_same(everything(other, fresh), everything(model, optimizer))
    assert loaded["param_groups"] == kept["param_groups"]
    assert_same(flat(loaded), flat(kept))


@pytest.mark.parametrize("target", FORMATS, ids=str)
@pytest.mark.parametrize("source", FORMATS, ids=str)
def test_state_dict_loads_into_other_formats(source: Format, target: Format, device: str) -> None:
    model, optimizer = make(device, source)
    train(model, optimizer, range(3))
    other, fresh = make(device, target)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[0]["exp_avg_dtype"] == fresh.param_groups[0]["exp_avg_sq_dtype"] == target.dtype
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            moment = target.moment(name)
            assert fresh.state[ours][name].dtype == make_dtype(target, name, ours)
            actual, expected = (o.get_unscaled_state(p, name) for o, p in ((fresh, ours), (optimizer, theirs)))
            steepest = moment.code.steepest
            relative = 1.01 * steepest * (moment.relative + 2 * moment.absolute)
            bound = relative * expected.abs() + 2 * steepest * moment.absolute * expected.abs().amax()
            assert bool(((actual - expected).abs() <= bound + 1e-7 * expected.abs()).all())


def make_dtype(fmt: Format, name: str, param: Tensor) -> torch.dtype:
    """What a state of that format is stored as."""
    if fmt.scaled and param.shape != (6, 128):
        return torch.float32
    return torch.uint8 if fmt.bytes == 1 and (name == "exp_avg_sq" or fmt.dtype != torch.int8) else fmt.dtype


@pytest.mark.parametrize("target", MASTERS, ids=str)
@pytest.mark.parametrize("source", MASTERS, ids=str)
def test_state_dict_loads_into_other_masters(source: Master, target: Master, device: str) -> None:
    """A saved master is kept to the bits that the target has; without one the target's is its parameter."""
    model, optimizer = make(device, master=source)
    train(model, optimizer, range(3))
    masters = optimizer.master_state_dict(model)
    other, fresh = make(device, master=target, seed=5)
    own = {name: param.detach().float().clone() for name, param in other.named_parameters()}
    fresh.load_state_dict(optimizer.state_dict())
    for name, param in other.named_parameters():
        expected = masters[name] if source.dtype else own[name]
        actual = fresh.master_state_dict(other)[name]
        is_exact = source.dtype is not None and target.bits >= (24 if source.scaled else source.bits)
        torch.testing.assert_close(actual, expected, rtol=0.0 if is_exact else 2.0**-target.bits, atol=0.0)
        torch.testing.assert_close(param.float(), actual, rtol=torch.finfo(param.dtype).eps / 2, atol=0.0)


def test_loaded_lr_tensor_is_a_copy(device: str) -> None:
    model, optimizer = make(device, lr=torch.tensor(0.01))
    train(model, optimizer, range(1))
    _, fresh = make(device, lr=torch.tensor(1.0))
    fresh.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"].fill_(0.5)
    assert float(fresh.param_groups[0]["lr"]) == pytest.approx(0.01)


def test_state_dict_hooks(device: str) -> None:
    """They run in order of registration, and post hooks see what is saved."""
    model, optimizer = make(device, FORMAT["int8"])
    train(model, optimizer, range(1))
    calls: list[str] = []

    def saving(_: Any, state_dict: dict[str, Any]) -> None:
        calls.append(str(state_dict["state"][0]["exp_avg"].dtype))
        state_dict["note"] = 1

    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(saving)
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    state_dict = optimizer.state_dict()
    assert state_dict["note"] == 1
    assert calls == ["before saving", "torch.float32", "saved"]

    calls.clear()
    _, fresh = make(device, FORMAT["int8"])
    fresh.register_load_state_dict_pre_hook(lambda _, state_dict: calls.append(f"first {state_dict['note']}"))
    fresh.register_load_state_dict_pre_hook(lambda _, state_dict: {**state_dict, "note": 2})
    fresh.register_load_state_dict_pre_hook(lambda _, state_dict: calls.append(f"then {state_dict['note']}"))
    fresh.register_load_state_dict_post_hook(lambda o: calls.append(f"loaded {o.param_groups[0]['step']}"))
    fresh.load_state_dict(state_dict)
    assert calls == ["first 1", "then 2", "loaded 1"]


def test_torch_state_dict_loads(device: str) -> None:
    """torch.optim.AdamW keeps one step per parameter."""
    model, _ = make(device)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    train(model, theirs, range(5))
    other, ours = make(device, seed=5)
    other.load_state_dict(model.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["step"] == 5 and ours.param_groups[0]["weight_decay"] == 0.1
    for _ in range(2):
        train(model, theirs, range(5, 10))
        train(other, ours, range(5, 10))
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_state_dict_means_the_same_to_torch(device: str) -> None:
    """With a step per parameter, torch.optim.AdamW continues from our state dict."""
    model, ours = make(device, weight_decay=0.1)
    train(model, ours, range(5))
    state_dict = ours.state_dict()
    for states in state_dict["state"].values():
        states["step"] = torch.tensor(float(state_dict["param_groups"][0]["step"]))
    other, _ = make(device, seed=5)
    theirs = torch.optim.AdamW(other.parameters(), foreach=False)
    other.load_state_dict(model.state_dict())
    theirs.load_state_dict(copy.deepcopy(state_dict))
    train(model, ours, range(5, 10))
    train(other, theirs, range(5, 10))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_state_dict_before_the_first_step(device: str) -> None:
    model, optimizer = make(device)
    assert optimizer.state_dict()["state"] == {}
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["step"] == 0
    train(model, optimizer, range(1))


def test_loading_a_state_dict_without_states_forgets_them() -> None:
    model, optimizer = make("cpu")
    _, untrained = make("cpu")
    train(model, optimizer, range(3))
    optimizer.load_state_dict(untrained.state_dict())
    train(model, optimizer, range(1))
    exp_avg = optimizer.get_unscaled_state(model.weight, "exp_avg")
    torch.testing.assert_close(exp_avg, 0.1 * model.weight.grad)


def test_steps_that_differ_within_a_group_continue_from_the_latest() -> None:
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    theirs = torch.optim.AdamW(params)
    for used in (params, params[:1]):
        for param in params:
            param.grad = torch.ones(4) if any(param is p for p in used) else None
        theirs.step()
    ours = FusedAdamW([torch.nn.Parameter(torch.zeros(4)) for _ in range(3)])
    with pytest.warns(UserWarning, match="2 of 3 parameters"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["step"] == 2


def test_schedulers_may_end_below_zero(device: str) -> None:
    """LinearLR reaches its end by products: 0 becomes a tiny negative number here, which torch.optim takes."""
    (model, optimizer), (other, _) = make(device, lr=0.01), make(device)
    expected = torch.optim.AdamW(other.parameters(), lr=0.01, weight_decay=0.0)
    schedules = [torch.optim.lr_scheduler.LinearLR(each, 1 / 3, 0.0, total_iters=7) for each in (optimizer, expected)]
    for step in range(9):
        train(model, optimizer, [step])
        train(other, expected, [step])
        for schedule in schedules:
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"] < 0.0
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decoupled", [True, False])
def test_schedules_of_weight_decay_may_end_below_zero(decoupled: bool, device: str) -> None:
    """By rounding, or on purpose. States that are saved there load."""
    (model, actual), (other, _) = make(device, decoupled_weight_decay=decoupled), make(device)
    expected = (torch.optim.AdamW if decoupled else torch.optim.Adam)(other.parameters(), lr=0.01)
    for step, decay in enumerate((0.1, 0.05, -1e-18, -0.01)):
        actual.param_groups[0]["weight_decay"] = expected.param_groups[0]["weight_decay"] = decay
        if decay == -1e-18:
            actual.load_state_dict(actual.state_dict())
        train(model, actual, [step])
        train(other, expected, [step])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
