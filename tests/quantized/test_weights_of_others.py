"""Quantized tensors of other libraries: doubles of TransformerEngine's, and torchao's own where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import distributed
from distributed import shard, shard_like
from fused_optim import FusedAdamW, adapters
from fused_optim.compat import transformer_engine
from fused_optim.quantized.adapters import others
from fused_optim.sharding.dtensor import local_tensor, rewrap_like
from fused_optim.state.param_state import ParamState
from quantized_cases import gradient
from transformer_engine_doubles import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    HybridQuantizedTensor,
    HybridQuantizer,
    NVFP4Quantizer,
    OlderFloat8Tensor,
    QuantizedTensor,
)

aten = torch.ops.aten
SHAPE = (128, 128)
Make = Callable[[Tensor], QuantizedTensor]
KINDS: dict[str, Make] = {
    "delayed": lambda x: Float8Tensor(x, Float8Quantizer(x.device)),
    "current": lambda x: Float8Tensor(x, Float8CurrentScalingQuantizer()),
    "blocks": lambda x: Float8Tensor(x, Float8BlockQuantizer()),
    "nvfp4": lambda x: Float8Tensor(x, NVFP4Quantizer()),
    "hybrid": lambda x: HybridQuantizedTensor(x, HybridQuantizer(Float8BlockQuantizer(), NVFP4Quantizer())),
}
any_kind = pytest.mark.parametrize("kind", KINDS)


def random(seed: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(param: Tensor) -> Tensor:
    with torch.no_grad():
        return local_tensor(param).dequantize(dtype=torch.float32)


def step(param: Tensor, optimizer: FusedAdamW, number: int) -> None:
    param.grad = gradient(param.shape, 0, number).to(param.device, torch.bfloat16)
    optimizer.step()


def trained(kind: str) -> tuple[QuantizedTensor, FusedAdamW]:
    param = KINDS[kind](random(0)).requires_grad_()
    optimizer = FusedAdamW([param], lr=0.01)
    step(param, optimizer, 0)
    return param, optimizer


def master(param: Tensor, optimizer: FusedAdamW) -> Tensor:
    return optimizer.get_unscaled_state(param, "master_param").clone()


# --- steps ------------------------------------------------------------------------------------------------------

SHAPES = [(8, 64), (7, 13), (0, 64), (5, 3, 11)]
MAKERS: dict[str, Callable[..., FusedAdamW]] = {
    "FP32 states": FusedAdamW,
    "int8 states": lambda params, lr: FusedAdamW(params, lr=lr, state_dtype="int8"),
    "drop-in": lambda params, lr: transformer_engine.FusedAdam(params, lr=lr, weight_decay=0.01, master_weights=True),
}


@pytest.mark.parametrize("name", MAKERS)
@any_kind
def test_weights_are_their_masters_quantized_by_themselves(kind: str, name: str, engine: str) -> None:
    """With delayed scaling by the scale of now, which others change between steps; its amax is raised."""
    shapes = SHAPES if kind == "delayed" else SHAPES[:2]
    params = [KINDS[kind](random(i, shape).to(engine)).requires_grad_() for i, shape in enumerate(shapes)]
    plain = [nn.Parameter(decoded(param)) for param in params]
    optimizer, reference = MAKERS[name](params, lr=0.01), torch.optim.AdamW(plain, lr=0.01)
    optimizer.initialize_state()
    for number in range(4):
        for i, (param, theirs) in enumerate(zip(params, plain, strict=True)):
            param.grad = gradient(param.shape, i, number).to(engine, torch.bfloat16)
            theirs.grad = param.grad.float()
            move_on(param, number)
        optimizer.step()
        reference.step()
        for param in params:
            expected = KINDS[kind](master(param, optimizer))
            move_on(expected, number)
            expected.quantize_(master(param, optimizer))
            assert torch.equal(decoded(param), decoded(expected))
            if kind == "delayed":
                assert torch.equal(param._quantizer.amax, expected._quantizer.amax)
    for param, theirs in zip(params, plain, strict=True):
        if name != "int8 states":
            torch.testing.assert_close(master(param, optimizer), theirs.data, rtol=1e-5, atol=1e-6)
    assert [param.calls for param in params] == [1 + 4 * (param.numel() > 0) for param in params]


def move_on(param: QuantizedTensor, number: int) -> None:
    """What happens between steps of delayed scaling: a new scale, amaxes of other casts."""
    if isinstance(param._quantizer, Float8Quantizer):
        param._quantizer.scale.fill_(37.3 + 11.7 * number)
        param._quantizer.amax.fill_([0.0, 1000.0][number % 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@any_kind
def test_tensors_are_given_their_masters_and_not_written(
    kind: str, dtype: torch.dtype, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP16 masters before they are rounded, as by TransformerEngine's own optimizer."""
    param = KINDS[kind](random(0).to(engine)).requires_grad_()
    optimizer = transformer_engine.FusedAdam([param], lr=0.01, master_weights=True, master_weight_dtype=dtype)
    optimizer.initialize_state()
    given: list[Tensor] = []
    monkeypatch.setattr(QuantizedTensor, "quantize_", lambda self, tensor: given.append(tensor.clone()))
    own = [x for x in vars(param._quantizer).values() if torch.is_tensor(x)]
    parts = [x for x in (*param.get_data_tensors(), *own) if x is not None]
    before, values = [x.clone() for x in parts], decoded(param)
    step(param, optimizer, 0)
    assert all(map(torch.equal, parts, before)) and torch.equal(decoded(param), values)
    (new,) = given
    assert new.dtype == torch.float32
    torch.testing.assert_close(new, master(param, optimizer), rtol=0 if dtype == torch.float32 else 2**-10, atol=0)


@any_kind
def test_skipped_steps_leave_values(kind: str, engine: str) -> None:
    param = KINDS[kind](random(0).to(engine)).requires_grad_()
    optimizer = FusedAdamW([param], lr=0.01)
    step(param, optimizer, 0)
    before = decoded(param)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor([1.0, 1.0], device=engine).split(1)
    step(param, optimizer, 1)
    assert torch.equal(decoded(param), before)
    optimizer.found_inf.zero_()
    step(param, optimizer, 1)
    assert not torch.equal(decoded(param), before)


@any_kind
def test_transformer_engine_weights_without_masters(kind: str) -> None:
    """Refused as by its own optimizer, since quantize_ rounds to nearest; which takes those of delayed scaling."""
    param = KINDS[kind](random(0)).requires_grad_()
    optimizer = FusedAdamW([param], lr=0.5, master_bits=0)
    if kind != "delayed":
        what = rf"master_bits=0: a {type(param).__name__} of shape \(128, 128\)"
        with pytest.raises(ValueError, match=what + " needs a master: .*; use master_bits=32"):
            optimizer.initialize_state()
        return
    with pytest.warns(UserWarning, match="without a master: its quantize_ rounds to nearest"):
        optimizer.initialize_state()
    values = nn.Parameter(decoded(param))
    reference = torch.optim.AdamW([values], lr=0.5)
    step(param, optimizer, 0)
    values.grad = param.grad.float()
    reference.step()
    expected = KINDS[kind](values.detach())
    expected.quantize_(values.detach())
    torch.testing.assert_close(decoded(param), decoded(expected), rtol=2**-3, atol=2**-9)


def test_high_precision_initial_values_of_transformer_engine_seed_the_master() -> None:
    values, cleared = random(0), []
    param = KINDS["blocks"](values).requires_grad_()
    param.get_high_precision_init_val = lambda: values.bfloat16()
    param.clear_high_precision_init_val = lambda: cleared.append(True)
    optimizer = FusedAdamW([param])
    optimizer.initialize_state()
    assert torch.equal(optimizer.state[param]["master_param"], values.bfloat16().float())
    assert cleared == [True]


# --- loads and writes -------------------------------------------------------------------------------------------


@any_kind
def test_loading_writes_transformer_engine_weights_from_their_masters(kind: str) -> None:
    (param, optimizer), other = trained(kind), KINDS[kind](random(3)).requires_grad_()
    fresh = FusedAdamW([other], lr=0.01)
    fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(decoded(other), decoded(param))
    other.quantize_(torch.zeros(SHAPE))
    fresh.sync_params_from_master()
    assert torch.equal(decoded(other), decoded(param))


@any_kind
def test_without_a_write_nothing_is_compared(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tensors say that they have other memory each time they are asked."""
    param, optimizer = trained(kind)
    monkeypatch.setattr(ParamState, "sync_master_from_param", lambda self: pytest.fail("compared"))
    for number in range(1, 4):
        param.detach(), param.dequantize()
        optimizer.state_dict()
        step(param, optimizer, number)


@any_kind
@pytest.mark.parametrize("write", ["copy_", "data"])
def test_writes_are_the_start_of_the_next_step(kind: str, write: str) -> None:
    """``param.data = weight`` exchanges what a weight consists of, and moves no counter."""
    param, optimizer = trained(kind)
    with torch.no_grad():
        if write == "data":
            param.data = KINDS[kind](-random(0))
        else:
            param.copy_(-random(0))
    new = decoded(param)
    step(param, optimizer, 1)
    assert float((master(param, optimizer) - new).abs().max()) < 0.05


@any_kind
def test_what_was_loaded_leaves_masters_that_it_is_the_rounding_of(kind: str) -> None:
    """Also of elements that are small beside their scale, which are rounded by more than a sixteenth of themselves."""
    param, optimizer = trained(kind)
    before = random(1) * torch.logspace(-7, 0, SHAPE[1])
    optimizer.set_scaled_state(param, "master_param", before)
    with torch.no_grad():
        param.copy_(before)
    optimizer.sync_masters_from_params()
    assert torch.equal(master(param, optimizer), before)


@pytest.mark.parametrize("scale", [64.0, 48.0, 100.0, 33.0])
def test_masters_of_delayed_scaling_stay_when_their_weights_are_loaded_after_them(scale: float) -> None:
    """As torch's ``set_state_dict`` does: the model comes last, and another scale rounds its weights once more."""
    saved, optimizer = trained("delayed")
    fresh = Float8Tensor(random(2), Float8Quantizer("cpu", scale)).requires_grad_()
    other = FusedAdamW([fresh], lr=0.01)
    other.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        fresh.copy_(decoded(saved))
    assert torch.equal(other.state_dict()["state"][0]["master_param"], optimizer.state[saved]["master_param"])


@pytest.mark.parametrize("scale", [48.0, 100.0])
def test_weights_of_delayed_scaling_that_were_loaded_before_their_masters_stay(scale: float) -> None:
    """Also where another scale has rounded them once more; all of them or none."""
    saved, optimizer = trained("delayed")
    for change in (1.0, 0.0, 2.0, -1.0, float("nan")):
        fresh = Float8Tensor(random(2), Float8Quantizer("cpu", scale)).requires_grad_()
        values = decoded(saved)
        values[3, 5] *= change
        fresh.quantize_(values)
        before, other = decoded(fresh), FusedAdamW([fresh], lr=0.01)
        other.load_state_dict(optimizer.state_dict())
        expected = Float8Tensor(master(fresh, other), Float8Quantizer("cpu", scale))
        assert torch.equal(decoded(fresh), before if change == 1.0 else decoded(expected))
        assert not torch.equal(before, decoded(expected))


@pytest.mark.parametrize("kind", ["delayed", "current", "blocks"])
@pytest.mark.parametrize("factor", [1.05, 1.1, 2.0, -1.0])
def test_masters_follow_what_others_write(kind: str, factor: float) -> None:
    """But for elements that stay within about a sixteenth, which is what three bits of mantissa tell."""
    param, optimizer = trained(kind)
    before = master(param, optimizer)
    with torch.no_grad():
        param.copy_(decoded(param) * factor)
    written, after = decoded(param), optimizer.state_dict()["state"][0]["master_param"]
    follows = after == written
    assert (follows | (after == before)).all() and follows.float().mean() > 0.1
    assert ((after - written).abs() <= after.abs() * (2.0**-4 + 2.0**-8) + 2.0**-10 / 64).all()


# --- scales of shards -------------------------------------------------------------------------------------------


def sharded(values: Tensor, kind: type[QuantizedTensor], quantizer: Any) -> Tensor:
    plain = shard(values, distributed.mesh(), [Shard(0)])
    return rewrap_like(kind(local_tensor(plain), quantizer), plain).requires_grad_()


CURRENT: dict[str, Callable[[], tuple[type[QuantizedTensor], Any]]] = {
    "current": lambda: (Float8Tensor, Float8CurrentScalingQuantizer()),
    "older": lambda: (OlderFloat8Tensor, Float8CurrentScalingQuantizer()),
    "hybrid": lambda: (
        HybridQuantizedTensor,
        HybridQuantizer(Float8CurrentScalingQuantizer(), Float8CurrentScalingQuantizer()),
    ),
    "half": lambda: (HybridQuantizedTensor, HybridQuantizer(Float8CurrentScalingQuantizer(), Float8BlockQuantizer())),
}


def one_scale_for_all_shards(name: str) -> None:
    """Also before TransformerEngine has gathered a weight, which is when checkpoints are loaded.

    Many elements are small beside the scale, which are rounded by more than a sixteenth of themselves.
    """
    values = random(0, (9, 16)) * torch.logspace(-7, 0, 16)
    param, other = (sharded(sign * values, *CURRENT[name]()) for sign in (1, -1))
    assert adapters.needs_collective(param) == (dist.get_world_size() > 1)
    optimizer, loaded = FusedAdamW([param], lr=1e-6), FusedAdamW([other], lr=0.01)
    for number in range(2):
        param.grad = shard_like(gradient(param.shape, 0, number).bfloat16(), param)
        optimizer.step()
    loaded.load_state_dict(optimizer.state_dict())
    expected = KINDS["current"](optimizer.state[param]["master_param"].full_tensor())
    for each in (param, other):
        assert torch.equal(decoded(each), local_tensor(shard_like(decoded(expected), param)))
    with torch.no_grad():  # as a model that is loaded last; files have BF16 values
        local_tensor(other).copy_(decoded(other).bfloat16())
    loaded.sync_masters_from_params()
    assert torch.equal(
        local_tensor(loaded.state[other]["master_param"]), local_tensor(optimizer.state[param]["master_param"])
    )
    if dist.get_rank():
        param.grad = None  # this rank still takes part in the reduction
    optimizer.step()
    assert decoded(param).isfinite().all()


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CURRENT)
def test_scales_of_current_scaling_are_those_of_whole_weights(name: str, ranks: int) -> None:
    distributed.run(ranks, one_scale_for_all_shards, name)


def no_collective() -> None:
    hybrid = HybridQuantizedTensor, HybridQuantizer(Float8BlockQuantizer(), Float8BlockQuantizer())
    assert not adapters.needs_collective(sharded(random(0), *hybrid))
    assert not adapters.needs_collective(sharded(random(0), Float8Tensor, Float8Quantizer("cpu")))
    assert not adapters.needs_collective(sharded(random(0), Float8Tensor, Float8BlockQuantizer()))


def test_other_scales_need_no_collective() -> None:
    distributed.run(2, no_collective)


def refuse_empty_shards(rows: int) -> None:
    plain = shard(torch.randn(rows, 16), distributed.mesh(), [Shard(0)])
    local = local_tensor(plain) if local_tensor(plain).numel() else torch.ones(1, 16)
    param = rewrap_like(KINDS["current"](local), plain).requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"shape \({rows}, 16\).* some of its 4 ranks hold nothing"):
        FusedAdamW([param]).initialize_state()


@pytest.mark.parametrize("rows", [3, 5])
def test_current_scaling_with_empty_shards_is_refused_on_all_ranks(rows: int) -> None:
    distributed.run(4, refuse_empty_shards, rows)


def delayed_shards() -> None:
    """Each rank notes its own shard's largest magnitude; it is TransformerEngine that reduces."""
    param = sharded(random(0, (3, 16)), Float8Tensor, Float8Quantizer("cpu"))
    local = local_tensor(param)
    local._quantizer.amax.zero_()
    optimizer = FusedAdamW([param], lr=0.01)
    param.grad = shard_like(gradient(param.shape, 0, 0).bfloat16(), param)
    optimizer.step()
    own = local_tensor(optimizer.state[param]["master_param"])
    assert torch.equal(decoded(param), decoded(KINDS["delayed"](own)))
    assert local._quantizer.amax == (own.abs().max() if own.numel() else 0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_delayed_scaling_of_shards(ranks: int) -> None:
    distributed.run(ranks, delayed_shards)


# --- torchao ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _fake_torchao(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """torchao's marker of weights that are cast when they are gathered."""

    class WeightWithDynamicFloat8CastTensor(torch.Tensor):
        @staticmethod
        def __new__(cls, tensor: Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device)

        def __init__(self, tensor: Tensor) -> None:
            self._tensor = tensor

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*torch.utils._pytree.tree_map_only(cls, lambda t: t._tensor, args), **(kwargs or {}))
            return cls(out) if func is aten.detach.default else out

    kind = WeightWithDynamicFloat8CastTensor
    kind.__module__, kind.__qualname__ = "torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor"
    monkeypatch.setitem(sys.modules, kind.__module__, ModuleType(kind.__module__))
    yield kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_marked_weights_are_updated_as_the_plain_tensors_that_they_are(_fake_torchao: type, dtype: torch.dtype) -> None:
    values = torch.randn(8, 64, dtype=dtype)
    marked, plain = _fake_torchao(values.clone()).requires_grad_(), nn.Parameter(values.clone())
    optimizers = [FusedAdamW([param], lr=0.01, exp_avg_dtype=torch.int8) for param in (marked, plain)]
    assert adapters.adapter_of(marked) is None
    for seed in range(3):
        grad = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for param, optimizer in zip((marked, plain), optimizers, strict=True):
            param.grad = grad
            optimizer.step()
    assert not torch.equal(plain, values)
    assert torch.equal(marked._tensor, plain)


def int8_weight(values: Tensor) -> nn.Parameter:
    int8 = pytest.importorskip("torchao.prototype.quantized_training.int8")
    param = nn.Parameter(int8.Int8QuantizedTrainingLinearWeight.from_float(values))
    assert adapters.adapter_of(param) is others
    return param


@pytest.mark.parametrize("master_weights", [True, False])
def test_int8_training_weights_of_torchao(master_weights: bool) -> None:
    values = random(0, (64, 128))
    param = int8_weight(values.bfloat16())
    plain = nn.Parameter(param.detach().dequantize().float())
    optimizer = FusedAdamW([param], lr=0.01, master_bits=32 if master_weights else 0)
    reference = torch.optim.AdamW([plain], lr=0.01)
    for number in range(20):
        step(param, optimizer, number)
        plain.grad = param.grad.float()
        reference.step()
    found = param.detach().dequantize().float()
    steps = found.abs().amax(1, keepdim=True) / 127
    distance, moved = (found - plain).abs() / steps, (plain - values).abs() / steps
    if master_weights:
        assert distance.max() <= 2  # codes: stochastic rounding, and scales of half their precision
    else:  # roundings add up, but have no direction
        assert (found - plain).mean().abs() < (plain - values).abs().mean() / 20
    assert distance.mean() < moved.mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masters_follow_int8_training_weights(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the same codes stay, though they were rounded up or down; loaded ones are within a step."""
    param = int8_weight(random(0, (64, 128)).to(dtype))
    optimizer = FusedAdamW([param], lr=0.01)
    with monkeypatch.context() as patch:
        patch.setattr(ParamState, "sync_master_from_param", lambda self: pytest.fail("compared"))
        for number in range(3):
            param.grad = gradient(param.shape, 0, number).to(dtype)
            optimizer.step()
            optimizer.state_dict()
    before = master(param, optimizer)
    optimizer.sync_masters_from_params()
    assert torch.equal(master(param, optimizer), before)
    with torch.no_grad():
        param.copy_((before / 30).to(dtype))
    after, written = master(param, optimizer), param.detach().dequantize().float()
    assert ((after - written).abs() <= 1.02 * written.abs().amax(1, keepdim=True) / 127).all()
    assert after.abs().max() < before.abs().max() / 25


@pytest.mark.parametrize("options", [{}, {"master_bits": 0}], ids=["master", "none"])
def test_skipped_steps_round_no_int8_training_weights_again(options: dict[str, Any]) -> None:
    """torchao rounds stochastically: codes of BF16 weights would move though their values do not."""
    param = int8_weight(random(0, (64, 96)).bfloat16())
    optimizer = FusedAdamW([param], lr=1e-3, skip_nonfinite=True, **options)
    param.grad = gradient(param.shape, 0, 0).bfloat16()
    optimizer.step()
    before = param.detach().int_data.clone(), param.detach().scale.clone()
    for _ in range(3):
        param.grad = torch.full(param.shape, torch.inf, dtype=torch.bfloat16)
        optimizer.step()
    assert optimizer.skipped_steps == 3
    assert torch.equal(param.detach().int_data, before[0]) and torch.equal(param.detach().scale, before[1])
    param.grad = gradient(param.shape, 0, 1).bfloat16()
    optimizer.step()
    assert not torch.equal(param.detach().int_data, before[0])
