"""``diagnostics()`` against what the steps themselves do: masters before and after, stored codes, FP32 moments."""

from __future__ import annotations

import json
import math
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

import distributed
from cases import FORMATS, MASTERS, SHAPES, Format, Master, values
from distributed import assert_same, mesh, shard
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.step.plan import Plan
from pairwise import pairwise
from peers import FusedAdam, FusedAdamW, FusedLion
from quantized_cases import RECIPES
from snippets import run_section

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1, "seed": 4}
INT8 = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
TOP = {"exp_avg": {"int8": 127, "float8_e4m3fn": 0x7E}, "exp_avg_sq": {"int8": 255, "float8_e4m3fn": 0x7E}}


def set_grads(params: list[nn.Parameter], step: int) -> None:
    for i, param in enumerate(params):
        param.grad = values(tuple(param.shape), param.dtype, str(param.device), seed=50 * step + i, spread=2.0)


def built(
    fmt: Format, master: Master, device: str, kind: type[FusedAdam | FusedLion] = FusedAdamW
) -> tuple[list[nn.Parameter], FusedAdamW]:
    shapes = [
        shape for shape in SHAPES if shape.name in ("block128", "odd", "uneven_vector", "transposed", "empty_rows")
    ]
    tensors = [shape.layout(values(shape.shape, master.param_dtype, device, seed=i)) for i, shape in enumerate(shapes)]
    params = [nn.Parameter(tensor) for tensor in tensors]
    named = [(shape.name, param) for shape, param in zip(shapes, params, strict=True)]
    told = {"decoupled_weight_decay": True} if kind is FusedAdam else {}
    optimizer = kind(named, **SETTINGS, **told, state_dtype=fmt.dtype, **master.options)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    set_grads(params, 3)
    return params, optimizer


def snapshot(params: list[nn.Parameter], optimizer: FusedAdamW) -> dict[str, Tensor]:
    """All that a step changes, and the gradients."""
    found = {}
    for i, param in enumerate(params):
        states = {**optimizer.state[param], "scales": optimizer.store.layouts[param].scales}
        tensors = {"parameter": param.detach(), "gradient": param.grad, **states}
        found |= {f"{i} {name}": tensor.clone() for name, tensor in tensors.items()}
    return found


def best(optimizer: FusedAdamW, param: Tensor) -> Tensor:
    """The master, or the parameter itself."""
    return optimizer.store.master(param).double().clone()


def rms(x: Tensor) -> float:
    return math.sqrt(float(x.double().square().mean()))


def exact_moments(optimizer: FusedAdamW, param: Tensor) -> dict[str, Tensor]:
    """What the next step makes of the moments before they are rounded, in double precision."""
    beta1, beta2 = SETTINGS["betas"]
    grad = param.grad.double()
    m, v = (optimizer.get_unscaled_state(param, name).double() for name in ("exp_avg", "exp_avg_sq"))
    return {"exp_avg": beta1 * m + (1 - beta1) * grad, "exp_avg_sq": beta2 * v + (1 - beta2) * grad.square()}


def codes(optimizer: FusedAdamW, param: Tensor, name: str) -> Tensor:
    """Magnitudes of stored codes."""
    bits = local_tensor(optimizer.state[param][name])
    if bits.dtype == torch.float16:
        return bits.view(torch.int16).int() & 0x7FFF
    float8 = optimizer.store.layouts[param].format(name).name == "float8_e4m3fn"
    return bits.int() & 0x7F if float8 else bits.int().abs()


def close(found: float, expected: float, tolerance: float = 1e-3) -> bool:
    return math.isclose(found, expected, rel_tol=tolerance, abs_tol=1e-9)


@pytest.mark.parametrize("master", MASTERS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_it_says_what_the_step_does(fmt: Format, master: Master, device: str) -> None:
    params, optimizer = built(fmt, master, device)
    before = [best(optimizer, param) for param in params]
    exact = [exact_moments(optimizer, param) for param in params]
    kept = snapshot(params, optimizer)
    found = optimizer.diagnostics()
    assert_same(snapshot(params, optimizer), kept)
    assert found == optimizer.diagnostics() and json.loads(json.dumps(found)) == found
    optimizer.step()
    names = optimizer.param_groups[0]["param_names"]
    for param, name, old, moments in zip(params, names, before, exact, strict=True):
        if not param.numel():
            assert name not in found["parameters"]
            continue
        values_of = found["parameters"][name]
        check_update(values_of, param, old, best(optimizer, param), master)
        for moment, value in moments.items():
            check_moment(values_of, optimizer, param, moment, value)
    assert found["groups"][0]["step"] == 4


def check_update(found: dict[str, float], param: Tensor, old: Tensor, new: Tensor, master: Master) -> None:
    assert close(found["weight_rms"], rms(old)) and close(found["gradient_rms"], rms(param.grad))
    assert close(found["update_to_weight"], found["update_rms"] / found["weight_rms"])
    if master.bits == 24:
        assert close(found["update_rms"], rms(new - old))
        assert found["lost_updates"] < 0.01
    else:
        assert found["update_rms"] < 2.0 * rms(new - old) + 1e-9
        assert close(found["lost_updates"], float((new == old).double().mean()))


def check_moment(found: dict[str, float], optimizer: FusedAdamW, param: Tensor, name: str, exact: Tensor) -> None:
    kept = optimizer.get_unscaled_state(param, name).double()
    error = rms(kept - exact) / rms(exact)
    assert close(found[f"{name}_error"], error, 0.01) or max(found[f"{name}_error"], error) < 1e-6
    fmt, scales = optimizer.store.layouts[param].format(name), optimizer.store.layouts[param].scale(name)
    assert (f"{name}_saturated" in found) == fmt.scaled
    if scales is None:
        return
    assert close(found[f"{name}_scale_min"], float(scales[scales > 0].min()), 1e-6)
    assert close(found[f"{name}_scale_max"], float(scales.max()), 1e-6)
    stored = codes(optimizer, param, name)
    assert close(found[f"{name}_lowest"], float(((stored <= 1) & (exact != 0)).double().mean()))
    if fmt.name in TOP[name]:
        assert close(found[f"{name}_saturated"], float((stored == TOP[name][fmt.name]).double().mean()))


@pytest.mark.parametrize(
    "fmt, master, kind", pairwise(FORMATS, MASTERS, [FusedAdamW, FusedLion, FusedAdam]), ids=lambda each: str(each)
)
def test_engines_find_what_the_reference_does(
    fmt: Format, master: Master, kind: type[FusedAdam | FusedLion], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of usual gradients, none, tiny and large ones, and of blocks that hold what is not finite.

    On a CPU sums differ by their order alone. A GPU's quotients differ in their last places, so a weight whose update
    is lost here may move by one place there.
    """
    params, optimizer = built(fmt, master, device, kind)
    flat = params[0].grad.view(-1)
    flat[:128], flat[128:256] = 0.0, flat[128:256] * 1e-6
    flat[256:384] *= 1e3
    optimizer.clip_grad_norm_(0.5)
    compare_backends(optimizer, device, monkeypatch)
    flat[400], flat[600] = math.inf, math.nan
    optimizer.zero_grad(set_to_none=False)  # drops the clipping
    set_grads(params, 4)
    params[0].grad.view(-1)[400], params[0].grad.view(-1)[600] = math.inf, math.nan
    compare_backends(optimizer, device, monkeypatch)


def compare_backends(optimizer: FusedAdamW | FusedLion, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = optimizer.diagnostics().scalars(parameters=True)
    with monkeypatch.context() as patch:
        patch.setenv("FUSED_OPTIM_BACKEND", "torch")
        reference = optimizer.diagnostics().scalars(parameters=True)
    tolerance = {"rel": 1e-9, "abs": 0.0} if device == "cpu" else {"rel": 1e-3, "abs": 1e-3}
    assert len(reference) > 20 and engines == pytest.approx(reference, **tolerance, nan_ok=True)


def test_many_shards_in_many_groups(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More shards and groups than go into one launch; slices that begin anywhere; several formats."""
    memory = values((1 << 20,), torch.bfloat16, device, seed=1)
    sizes = [(3, 128), (1, 40), (2, 4096), (5, 64), (1, 1)]
    groups, first = [], 0
    for number in range(20):
        params = []
        for i in range(20):
            rows, row = sizes[(number + i) % len(sizes)]
            params.append(nn.Parameter(memory[first : first + rows * row].view(rows, row)))
            first += rows * row + i % 3
        fmt = [*FORMATS][number % len(FORMATS)]
        groups.append({"params": params, "lr": 1e-3 * (1 + number % 3), "exp_avg_dtype": fmt.dtype})
    optimizer = FusedAdamW(groups, **{**SETTINGS, "state_dtype": "int8"})
    for step in range(2):
        set_grads(optimizer.store.params, step)
        optimizer.step()
    set_grads(optimizer.store.params, 2)
    compare_backends(optimizer, device, monkeypatch)


@pytest.mark.parametrize("state_dtype", ["fp32", "int8"])
def test_one_large_shard(state_dtype: str, device: str) -> None:
    """Of many thread blocks, against double precision; FP32 sums of as many elements would err."""
    rows = 4099 if device == "cuda" else 259
    param = nn.Parameter(values((rows, 2048), torch.float32, device, seed=1))
    optimizer = FusedAdamW([("w", param)], **SETTINGS, state_dtype=state_dtype)
    for step in range(2):
        set_grads([param], step)
        optimizer.step()
    set_grads([param], 2)
    exact, before = exact_moments(optimizer, param), param.detach().double().clone()
    found = optimizer.diagnostics()["parameters"]["w"]
    optimizer.step()
    assert close(found["weight_rms"], rms(before), 1e-6) and close(found["gradient_rms"], rms(param.grad), 1e-6)
    assert close(found["update_rms"], rms(param.detach().double() - before), 1e-4)
    for name, value in exact.items():
        error = rms(optimizer.get_unscaled_state(param, name).double() - value) / rms(value)
        assert math.isclose(found[f"{name}_error"], error, rel_tol=1e-4, abs_tol=1e-6)


def test_lost_updates_of_weights_without_masters(device: str) -> None:
    """Rounded to nearest, BF16 weights lose what is below half their last place; rotating rounding moves a share."""
    shares = {}
    for rotating in (True, False):
        param = nn.Parameter(torch.ones(64, 128, dtype=torch.bfloat16, device=device))
        optimizer = FusedAdamW(
            [("w", param)], lr=2.0**-10, weight_decay=0.0, master_bits=0, stochastic_rounding=rotating
        )
        optimizer.initialize_state()
        param.grad = torch.ones_like(param)
        shares[rotating] = optimizer.diagnostics()["parameters"]["w"]["lost_updates"]
        optimizer.step()
        assert close(shares[rotating], float((param == 1.0).double().mean()))
    assert shares[False] == 1.0 and 0.6 < shares[True] < 0.9


def test_clipping_counts_as_in_the_step(device: str) -> None:
    param = nn.Parameter(torch.ones(8, 128, device=device))
    optimizer = FusedAdamW([("w", param)])
    optimizer.initialize_state()
    param.grad = torch.full_like(param, 2.0)
    optimizer.clip_grad_norm_(1.0)
    assert close(optimizer.diagnostics()["parameters"]["w"]["gradient_rms"], 1.0 / math.sqrt(param.numel()))
    assert optimizer.diagnostics() == optimizer.diagnostics(), "looking does not use it up"


@pytest.mark.parametrize("bits", [24, 32])
def test_the_plan_of_steps_is_used(bits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is as it was is not checked again: not for a look, nor for the step after it."""
    params = [nn.Parameter(values((4, 128), torch.bfloat16, device, seed=i)) for i in range(3)]
    optimizer = FusedAdamW(params, **SETTINGS, state_dtype="int8", master_bits=bits)
    for step in range(3):
        set_grads(params, step)
        optimizer.step()
    checked: list[int] = []
    check = Plan._check
    monkeypatch.setattr(Plan, "_check", lambda *args: (checked.append(args[2]), check(*args))[1])
    set_grads(params, 3)
    optimizer.diagnostics()
    assert checked == []
    params[1].grad = params[1].grad.t().contiguous().t()  # not dense: read from a copy
    optimizer.diagnostics()
    optimizer.step()
    assert checked == [1, 1]
    params.append(nn.Parameter(torch.ones(4, 128, dtype=torch.bfloat16, device=device)))
    optimizer.add_param_group({"params": params[3:]})
    set_grads(params, 4)
    found = optimizer.diagnostics()
    assert len(found["parameters"]) == 3 and params[3] not in optimizer.state, "a look creates no states"


@pytest.mark.parametrize("fmt, master", pairwise(FORMATS, MASTERS), ids=str)
def test_steps_are_the_same_with_looks_between(fmt: Format, master: Master, device: str) -> None:
    """Also where others have written a parameter, and where states were taken away."""
    kept = []
    for looks in (False, True):
        params, optimizer = built(fmt, master, device)
        for step in range(3, 7):
            set_grads(params, step)
            if step == 4:
                with torch.no_grad():
                    params[0].mul_(0.5)
            if step == 5:
                optimizer.state.pop(params[1])
            if looks:
                optimizer.diagnostics()
            optimizer.step()
        kept.append(snapshot(params, optimizer))
    assert_same(*kept)


def test_a_look_keeps_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not dense is read from a copy."""
    param = nn.Parameter(torch.ones(64, 128))
    optimizer = FusedAdamW([param])
    optimizer.initialize_state()
    param.grad = torch.ones(128, 64).t()
    optimizer.step()
    read: list[weakref.ref[Tensor]] = []
    refresh = Plan.refresh

    def refreshed(plan: Plan, *args: Any) -> bool:
        done = refresh(plan, *args)
        read.extend(weakref.ref(work.grad) for part in plan.parts for work in part.shards.works.values())
        return done

    monkeypatch.setattr(Plan, "refresh", refreshed)
    optimizer.diagnostics()
    assert len(read) == 1 and read[0]() is None


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("options", [{}, {"master_weight_dtype": torch.float16}, {"master_bits": 0}], ids=str)
def test_quantized_weights_are_as_the_reference_says(
    recipe: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the update pass writes of them stays as it is, and no changed bits are marked."""
    layer = nn.Sequential(nn.Linear(256, 128, bias=False, dtype=torch.bfloat16))
    quantize_model_(layer, RECIPES[recipe])
    optimizer = FusedAdamW(layer.named_parameters(), **SETTINGS, **INT8, **options)
    for step in range(3):
        layer[0].weight.grad = values((128, 256), torch.bfloat16, "cpu", seed=step)
        if step < 2:
            optimizer.step()
    before = {name: tensor.clone() for name, tensor in layer[0].weight.components.items()}
    compare_backends(optimizer, "cpu", monkeypatch)
    assert_same(layer[0].weight.components, before)


def test_quantized_weights() -> None:
    layer = nn.Sequential(nn.Linear(128, 64, bias=False, dtype=torch.bfloat16))
    quantize_model_(layer, MXFP8BlockScaling())
    for options in ({}, {"master_bits": 0}):
        optimizer = FusedAdamW(layer.named_parameters(), **INT8, **options)
        layer[0].weight.grad = torch.ones(64, 128, dtype=torch.bfloat16)
        optimizer.step()
        found = optimizer.diagnostics()["parameters"]["0.weight"]
        assert found["update_rms"] > 0 and ("lost_updates" in found) == (not options)


def test_groups_are_all_their_parameters() -> None:
    first, second, idle = (nn.Parameter(values((4, 128), torch.float32, "cpu", seed=i)) for i in range(3))
    groups = [{"params": [("a", first), ("b", second)]}, {"params": [("c", idle)], "lr": 0.1}]
    optimizer = FusedAdamW(groups, **INT8)
    with pytest.raises(RuntimeError, match=r"existing states: call step\(\) or initialize_state\(\)"):
        optimizer.diagnostics()
    optimizer.initialize_state()
    first.grad, second.grad = torch.ones_like(first), torch.zeros_like(second)
    found = optimizer.diagnostics()
    one, other = (found["parameters"][name] for name in "ab")
    assert close(found["groups"][0]["gradient_rms"], math.sqrt(0.5)) and other["gradient_rms"] == 0.0
    assert close(found["groups"][0]["update_rms"] ** 2, (one["update_rms"] ** 2 + other["update_rms"] ** 2) / 2)
    assert found["groups"][1] == {"step": 1} and "c" not in found["parameters"], "without a gradient there is nothing"
    scalars = found.scalars("opt")
    assert scalars["opt/group0/update_rms"] == found["groups"][0]["update_rms"]
    assert set(scalars) == {f"opt/group0/{key}" for key in found["groups"][0] if key != "step"}
    assert found.scalars(parameters=True)["optimizer/a/weight_rms"] == one["weight_rms"]


def sharded(ranks: int, replicated: bool) -> dict[str, Any]:
    tensors = [values(shape, torch.bfloat16, "cpu", seed=i) for i, shape in enumerate([(5, 256), (4, 64), (4133,)])]
    on = mesh(2, ranks // 2) if replicated else mesh()
    placements = [torch.distributed.tensor.Replicate(), Shard(0)] if replicated else [Shard(0)]
    params = [nn.Parameter(shard(tensor, on, placements)) for tensor in tensors]
    optimizer = FusedAdamW([(str(i), param) for i, param in enumerate(params)], **INT8)
    for step in range(2):
        for i, param in enumerate(params):
            param.grad = shard(values(tuple(param.shape), torch.bfloat16, "cpu", seed=10 + i + step), on, placements)
        if step == 0:
            optimizer.step()
    return dict(optimizer.diagnostics())


def test_shards_are_counted_together() -> None:
    """On any number of ranks, replicas once; but for the blocks of vectors, which begin with the shard."""
    (alone,) = distributed.run(1, sharded, 1, False)
    for ranks, replicated in ((2, False), (3, False), (4, True)):
        everyone = distributed.run(ranks, sharded, ranks, replicated)
        assert all(of_rank == everyone[0] for of_rank in everyone)
        for name in ("0", "1"):
            for key, value in alone["parameters"][name].items():
                assert close(everyone[0]["parameters"][name][key], value, 1e-9), (name, key)
        weight = everyone[0]["parameters"]["2"]["weight_rms"]
        assert close(weight, alone["parameters"]["2"]["weight_rms"], 1e-9)


def refused_by_one(kind: str, is_sent: bool) -> str:
    """What each rank raises where the second one alone cannot look. ``is_sent``: a gradient has to be, before that."""
    params = [
        nn.Parameter(shard(values((5, 256), torch.bfloat16, "cpu", seed=i), mesh(), [Shard(0)])) for i in range(2)
    ]
    optimizer = FusedAdamW(params, **INT8)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    if torch.distributed.get_rank() == 1:
        local = local_tensor(params[0].grad)
        if kind == "freed gradient":
            local.untyped_storage().resize_(0)
        else:
            del optimizer.state[params[0]]["exp_avg"]
    if is_sent:
        params[1].grad = DTensor.from_local(torch.ones(5, 256, dtype=torch.bfloat16), mesh(), [Partial()])
    try:
        optimizer.diagnostics()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize(
    "kind, expected", [("freed gradient", "gradient has no memory"), ("lost state", "exp_avg was removed")]
)
def test_what_one_rank_refuses_raises_on_all(kind: str, expected: str, is_sent: bool) -> None:
    """They do not wait for one that has left."""
    for ranks in (2, 3):
        raised = distributed.run(ranks, refused_by_one, kind, is_sent)
        assert expected in raised[1]
        for rank in {*range(ranks)} - {1}:
            assert "another rank cannot look at its parameters" in raised[rank], raised


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the documentation, with TensorBoard where it is installed."""
    monkeypatch.chdir(tmp_path)
    written: dict[str, list[float]] = {}
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        module = ModuleType("torch.utils.tensorboard")
        add = lambda name, value, step: written.setdefault(name, []).append(value)  # noqa: E731
        module.SummaryWriter = lambda folder: SimpleNamespace(add_scalar=add, close=lambda: None)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    run_section("tools.md", "Diagnostics of a running optimizer")
    if "tensorboard" in sys.modules:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator("runs").Reload()
        written = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert len(written["optimizer/group0/update_to_weight"]) == 3
    assert all(0 < value < 1 for value in written["optimizer/group0/exp_avg_sq_error"])
