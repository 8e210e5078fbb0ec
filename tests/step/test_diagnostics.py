"""``diagnostics()`` against what the steps themselves do: masters before and after, stored codes, FP32 moments."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

import distributed
from cases import EACH_FORMAT_AND_MASTER, FORMATS, MASTERS, SHAPES, Format, Master, normal, values
from distributed import assert_same, mesh, shard
from fused_optim.quantized import MXFP8BlockScaling, quantize_model_
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.step import diagnostics
from peers import FusedAdam, FusedAdamW, FusedLion
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


def estimated(options: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Numbers of a parameter whose columns and rows differ, and what a quarter of it says; a small one counts whole."""
    scales = torch.tensor([0.1, 3.0, 1.0, 30.0]).repeat_interleave(128) * torch.linspace(1.0, 2.0, 1024)[:, None]
    large, small = ([(normal((1024, 512), i) * scales).bfloat16() for i in range(first, first + 4)] for first in (0, 4))
    large, small = ([shard(x, mesh(), [Shard(0)]) for x in each] for each in (large, [x[:256] * 0.01 for x in small]))
    params = [("large", nn.Parameter(large.pop())), ("small", nn.Parameter(small.pop()))]
    optimizer = FusedAdamW(params, **SETTINGS, **options)
    for step, grads in enumerate(zip(large, small, strict=True)):
        for (_, param), grad in zip(params, grads, strict=True):
            param.grad = grad
        if step < 2:
            optimizer.step()
    whole = optimizer.diagnostics()
    with mock.patch.object(diagnostics, "LIMIT", 256 * 512):
        some = optimizer.diagnostics()
        assert some == optimizer.diagnostics()
    assert some["parameters"]["small"] == whole["parameters"]["small"]
    return whole.scalars(parameters=True), some.scalars(parameters=True)


@pytest.mark.parametrize(
    "options",
    [
        {"state_dtype": "bf16", "master_bits": 0},
        {"state_dtype": "fp8", "master_weight_dtype": torch.float16},
    ],
    ids=str,
)
def test_larger_parameters_are_estimated(options: dict[str, Any]) -> None:
    """Within a tenth, on any number of ranks. Rows are a few runs, whose columns differ: even steps would not do."""
    for ranks in (1, 2, 3):
        everyone = distributed.run(ranks, estimated, options)
        assert all(of_rank == everyone[0] for of_rank in everyone)
        whole, some = everyone[0]
        assert whole != some and whole.keys() == some.keys()
        for key, value in whole.items():
            if "_scale_" in key:  # of some blocks only
                assert some[key] >= value if key.endswith("min") else some[key] <= value
            else:
                assert math.isclose(some[key], value, rel_tol=0.1, abs_tol=1e-3), (ranks, key, some[key], value)


def test_clipping_counts_as_in_the_step(device: str) -> None:
    param = nn.Parameter(torch.ones(8, 128, device=device))
    optimizer = FusedAdamW([("w", param)])
    optimizer.initialize_state()
    param.grad = torch.full_like(param, 2.0)
    optimizer.clip_grad_norm_(1.0)
    assert close(optimizer.diagnostics()["parameters"]["w"]["gradient_rms"], 1.0 / math.sqrt(param.numel()))
    assert optimizer.diagnostics() == optimizer.diagnostics(), "looking does not use it up"


def test_a_look_creates_no_states(device: str) -> None:
    params = [nn.Parameter(values((4, 128), torch.bfloat16, device, seed=i)) for i in range(2)]
    optimizer = FusedAdamW(params[:1], **SETTINGS)
    set_grads(params, 0)
    optimizer.step()
    optimizer.add_param_group({"params": params[1:]})
    found = optimizer.diagnostics()
    assert len(found["parameters"]) == 1 and params[1] not in optimizer.state


@EACH_FORMAT_AND_MASTER
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


def test_quantized_weights() -> None:
    layer = nn.Sequential(nn.Linear(128, 64, bias=False, dtype=torch.bfloat16))
    quantize_model_(layer, MXFP8BlockScaling())
    for options in ({}, {"master_bits": 0}):
        optimizer = FusedAdamW(layer.named_parameters(), **INT8, **options)
        layer[0].weight.grad = torch.ones(64, 128, dtype=torch.bfloat16)
        optimizer.step()
        before = {name: tensor.clone() for name, tensor in layer[0].weight.components.items()}
        found = optimizer.diagnostics()["parameters"]["0.weight"]
        assert_same(layer[0].weight.components, before)
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
