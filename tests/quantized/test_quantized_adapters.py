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
from torch.utils._python_dispatch import TorchDispatchMode

import distributed
from distributed import shard, shard_like
from fused_optim import FusedAdamW, adapters
from fused_optim.quantized.adapters import transformer_engine
from fused_optim.sharding.dtensor import local_tensor, rewrap_like
from quantized_cases import gradient
from transformer_engine_doubles import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    HybridQuantizedTensor,
    HybridQuantizer,
    OlderFloat8Tensor,
    OwnFloat8Quantizer,
    QuantizedTensor,
    encode,
)

aten = torch.ops.aten


def parameter(values: Tensor) -> Float8Tensor:
    return Float8Tensor(values, Float8BlockQuantizer()).requires_grad_()


def delayed(values: Tensor, kind: type[Float8Quantizer] = Float8Quantizer) -> Float8Tensor:
    return Float8Tensor(values, kind(values.device)).requires_grad_()


def step(optimizer: FusedAdamW, reference: torch.optim.Optimizer, seed: int) -> None:
    for mine, theirs in zip(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True):
        grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        mine.grad, theirs.grad = grad, grad.float()
    optimizer.step()
    reference.step()


def test_transformer_engine_weights_are_written_by_themselves(device: str) -> None:
    values = torch.randn(8, 64, device=device)
    param, theirs = parameter(values), nn.Parameter(values.clone())
    theirs.data = param.dequantize(dtype=torch.float32)
    optimizer, reference = FusedAdamW([param], lr=0.01), torch.optim.AdamW([theirs], lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        grad = torch.randn(8, 64, generator=generator).to(device).bfloat16()
        param.grad, theirs.grad = grad, grad.float()
        optimizer.step()
        reference.step()
        assert torch.equal(param._transpose, param._data.t())
    torch.testing.assert_close(optimizer.state[param]["master_param"], theirs.data, rtol=1e-6, atol=1e-7)
    expected = parameter(optimizer.state[param]["master_param"])
    assert torch.equal(param._data, expected._data)
    assert param.calls == 1 + 5


def test_high_precision_initial_values_of_transformer_engine_seed_the_master() -> None:
    values = torch.randn(8, 64)
    param = parameter(values)
    param.get_high_precision_init_val = lambda: values.bfloat16()
    cleared = []
    param.clear_high_precision_init_val = lambda: cleared.append(True)
    optimizer = FusedAdamW([param])
    optimizer.initialize_state()
    assert torch.equal(optimizer.state[param]["master_param"], values.bfloat16().float())
    assert cleared == [True]


def test_transformer_engine_weights_without_masters_are_refused() -> None:
    """quantize_ rounds to nearest: a step would silently change nothing."""
    optimizer = FusedAdamW([parameter(torch.randn(8, 64))], master_bits=0)
    with pytest.raises(ValueError, match=r"master_bits=0: a Float8Tensor of shape \(8, 64\)"):
        optimizer.initialize_state()


def test_loading_writes_transformer_engine_weights_from_their_masters() -> None:
    param, other = parameter(torch.randn(8, 64)), parameter(torch.randn(8, 64))
    optimizer, fresh = FusedAdamW([param], lr=0.01), FusedAdamW([other], lr=0.01)
    param.grad = torch.randn(8, 64).bfloat16()
    optimizer.step()
    fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(other._data, param._data)
    other.quantize_(torch.zeros(8, 64))
    fresh.sync_params_from_master()
    assert torch.equal(other._data, param._data)


# --- delayed scaling --------------------------------------------------------------------------------------------

SHAPES = [(8, 64), (7, 13), (0, 64), (5, 3, 11)]


def delayed_training(device: str, shapes: list[tuple[int, ...]] = SHAPES) -> FusedAdamW:
    params = [delayed(torch.randn(shape, device=device)) for shape in shapes]
    optimizer = FusedAdamW(params, lr=0.1)
    optimizer.initialize_state()
    return optimizer


def params_of(optimizer: FusedAdamW) -> list[Float8Tensor]:
    return optimizer.param_groups[0]["params"]


def calls(optimizer: FusedAdamW) -> list[int]:
    return [param.calls for param in params_of(optimizer)]


def move_on(optimizer: FusedAdamW, number: int) -> None:
    """New gradients, and what happens between steps: new scales, amaxes of other casts, transposes."""
    for i, param in enumerate(params_of(optimizer)):
        param.grad = gradient(param.shape, i, number).to(param.device, torch.bfloat16)
        param._quantizer.scale.fill_(37.3 + 11.7 * number + i)
        param._quantizer.amax.fill_([0.0, 1000.0][number % 2])
        param._transpose_invalid = False


def assert_written(param: Float8Tensor, master: Tensor) -> None:
    inverse = 1 / param._quantizer.scale.cpu()
    assert torch.equal(param._scale_inv.cpu(), inverse.reshape(1))
    assert torch.equal(param._data.cpu(), encode(master.cpu(), 1 / inverse))


def test_delayed_scaling_is_written_by_the_pass(engine: str) -> None:
    optimizer = delayed_training(engine)
    quantized, start = calls(optimizer), [p._data.clone() for p in params_of(optimizer)]
    versions = [p._data._version for p in params_of(optimizer)]
    for number in range(4):
        move_on(optimizer, number)
        amaxes = [p._quantizer.amax.clone() for p in params_of(optimizer)]
        optimizer.step()
        for param, amax in zip(params_of(optimizer), amaxes, strict=True):
            master = optimizer.state[param]["master_param"]
            assert_written(param, master)
            largest = master.abs().flatten().max(0, keepdim=True)[0] if master.numel() else torch.zeros_like(amax)
            assert torch.equal(param._quantizer.amax, torch.maximum(amax, largest))
            assert param._transpose_invalid
    assert calls(optimizer) == quantized
    for param, data, version in zip(params_of(optimizer), start, versions, strict=True):
        assert not torch.equal(param._data, data) or not data.numel()
        assert param._data._version > version


def trained_delayed(scale: float) -> tuple[Float8Tensor, FusedAdamW]:
    param = delayed(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
    param._quantizer.scale.fill_(scale)
    optimizer = FusedAdamW([param], lr=0.01)
    for seed in range(3):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("scale", [64.0, 48.0, 100.0])
def test_weights_of_delayed_scaling_that_were_loaded_before_their_masters_stay(scale: float) -> None:
    """DCP saves what they decode to, and another scale rounds it once more."""
    saved, optimizer = trained_delayed(64.0)
    fresh, other = trained_delayed(scale)
    with torch.no_grad():
        fresh.quantize_(saved.dequantize(dtype=torch.float32))
    codes = fresh._data.clone()
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(fresh._data, codes)
    master = other.state[fresh]["master_param"]
    assert torch.equal(master, optimizer.state[saved]["master_param"])
    if scale != 64.0:  # so that it makes a difference
        assert not torch.equal(codes, encode(master, torch.tensor(scale)))


@pytest.mark.parametrize("scale", [64.0, 48.0, 100.0, 33.0])
def test_masters_of_delayed_scaling_stay_when_their_weights_are_loaded_after_them(scale: float) -> None:
    """As torch's ``set_state_dict`` does: the model comes last."""
    saved, optimizer = trained_delayed(64.0)
    fresh, other = trained_delayed(scale)
    other.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        fresh.copy_(saved.dequantize(dtype=torch.float32))
    assert torch.equal(other.state_dict()["state"][0]["master_param"], optimizer.state[saved]["master_param"])


@pytest.mark.parametrize("factor", [1.05, 1.1, 2.0, -1.0])
def test_masters_of_delayed_scaling_follow_what_others_write(factor: float) -> None:
    """Every element whose codes change, though most of them change by a step at most."""
    param, optimizer = trained_delayed(64.0)
    master, codes = optimizer.state[param]["master_param"].clone(), param._data.clone()
    with torch.no_grad():
        param.copy_(param.dequantize(dtype=torch.float32) * factor)
    expected = torch.where(param._data == codes, master, param.dequantize(dtype=torch.float32))
    assert torch.equal(optimizer.state_dict()["state"][0]["master_param"], expected)
    assert not torch.equal(expected, master)


@pytest.mark.parametrize("of_master", [float("inf"), float("nan")])
def test_masters_of_delayed_scaling_that_are_not_finite_follow_their_weights(of_master: float) -> None:
    param, optimizer = trained_delayed(64.0)
    optimizer.state[param]["master_param"][3, 5] = of_master
    values = param.dequantize(dtype=torch.float32)
    with torch.no_grad():
        param.copy_(values)
    assert optimizer.state_dict()["state"][0]["master_param"][3, 5] == values[3, 5]


@pytest.mark.parametrize("change", [0.0, 2.0, -1.0, float("nan")])
def test_weights_of_delayed_scaling_that_are_not_their_masters_are_written(change: float) -> None:
    """Of one element of all."""
    saved, optimizer = trained_delayed(64.0)
    fresh, other = trained_delayed(48.0)
    values = saved.dequantize(dtype=torch.float32)
    values[3, 5] = values[3, 5] * change
    with torch.no_grad():
        fresh.quantize_(values)
    other.load_state_dict(optimizer.state_dict())
    assert torch.equal(fresh._data, encode(other.state[fresh]["master_param"], torch.tensor(48.0)))


def test_skipped_steps_leave_delayed_scaling(engine: str) -> None:
    optimizer = delayed_training(engine)
    move_on(optimizer, 0)
    optimizer.step()
    move_on(optimizer, 1)
    parts = [part for p in params_of(optimizer) for part in (p._data, p._scale_inv, p._quantizer.amax)]
    before = [part.clone() for part in parts]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor([1.0, 1.0], device=engine).split(1)
    optimizer.step()
    assert all(map(torch.equal, parts, before))
    optimizer.found_inf.zero_()
    optimizer.step()
    for param in params_of(optimizer):
        assert_written(param, optimizer.state[param]["master_param"])


def test_scales_of_tiny_values_give_no_nans(engine: str) -> None:
    """TransformerEngine's largest scale, whose inverse is a number without an inverse."""
    optimizer = delayed_training(engine, [(2, 64)])
    (param,) = params_of(optimizer)
    optimizer.state[param]["master_param"].fill_(2**-122)
    param.grad = torch.zeros(2, 64, device=engine).bfloat16()
    param._quantizer.scale.fill_(torch.finfo(torch.float32).max)
    optimizer.step()
    torch.testing.assert_close(param.dequantize(dtype=torch.float32), optimizer.state[param]["master_param"])


def e5m2(param: Float8Tensor) -> None:
    param._quantizer.dtype = param._fp8_dtype = DType.kFloat8E5M2


def e5m2_before(param: Float8Tensor) -> None:
    param._fp8_dtype = DType.kFloat8E5M2


def columns_only(param: Float8Tensor) -> None:
    param._quantizer.rowwise_usage = False


def strided(param: Float8Tensor) -> None:
    param._data = param._data.repeat(1, 2)[:, ::2]


def own_quantizer(param: Float8Tensor) -> None:
    param._quantizer.__class__ = OwnFloat8Quantizer


@pytest.mark.parametrize("change", [e5m2, e5m2_before, columns_only, strided, own_quantizer])
def test_delayed_scaling_that_the_pass_cannot_write(change: Callable[[Float8Tensor], None], engine: str) -> None:
    optimizer = delayed_training(engine, [(8, 64), (8, 32)])
    changed, other = params_of(optimizer)
    change(changed)
    quantized = calls(optimizer)
    move_on(optimizer, 0)
    optimizer.step()
    assert calls(optimizer) == [quantized[0] + 1, quantized[1]]
    master = optimizer.state[changed]["master_param"]
    assert torch.equal(changed._data, encode(master, changed._quantizer.scale))
    assert torch.equal(changed._quantizer.amax, master.abs().max().reshape(1))
    assert_written(other, optimizer.state[other]["master_param"])


@pytest.mark.parametrize("data", [None, torch.empty(0, dtype=torch.uint8)], ids=["none", "freed"])
def test_the_pass_writes_no_codes_where_there_is_no_memory(data: Tensor | None) -> None:
    param = delayed(torch.randn(8, 64))
    assert transformer_engine.target(param).data is param._data
    param._data = data
    assert transformer_engine.target(param) is None


def test_captured_steps_give_delayed_scaling_to_quantize_(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transposes are filled, as no replay could mark them as invalid."""
    optimizer = delayed_training(engine, [(8, 64)])
    (param,) = params_of(optimizer)
    quantized = param.calls
    monkeypatch.setattr(transformer_engine, "is_capturing", lambda: True)
    move_on(optimizer, 0)
    optimizer.step()
    assert param.calls == quantized + 1
    assert torch.equal(param._transpose, param._data.t())
    assert not param._transpose_invalid


def test_delayed_scaling_without_an_engine(device: str, use_backend: Callable[[str], None]) -> None:
    use_backend("torch")
    optimizer = delayed_training(device)
    quantized = calls(optimizer)
    move_on(optimizer, 0)
    optimizer.step()
    assert calls(optimizer) == [count + 1 for count in quantized]


class Launches(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func not in (aten.view.default, aten.unbind.int)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("skippable", [True, False])
def test_delayed_scaling_of_many_weights_takes_as_few_launches_as_of_one(skippable: bool) -> None:
    def launches(count: int) -> int:
        params = [delayed(torch.randn(4, 8)) for _ in range(count)]
        updates = [adapters.Update(p, torch.ones(4, 8), absmax=torch.ones(1), written=True) for p in params]
        applies = torch.tensor(True) if skippable else None
        with Launches() as mode:
            transformer_engine.prepare(updates, applies)
            transformer_engine.write(updates, applies)
        assert all(p._quantizer.amax >= 1 for p in params)
        return mode.count

    assert launches(1) == launches(5) <= 8


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
    "half": lambda: (HybridQuantizedTensor, HybridQuantizer(Float8BlockQuantizer(), Float8CurrentScalingQuantizer())),
}


def quantized_parts(local: Any) -> list[Any]:
    return [local._rowwise_storage, local._columnwise_storage] if isinstance(local, HybridQuantizedTensor) else [local]


def one_scale_for_all_shards(name: str) -> None:
    param = sharded(torch.randn(9, 16), *CURRENT[name]())
    local = local_tensor(param)
    assert adapters.needs_collective(param) == (dist.get_world_size() > 1)
    optimizer = FusedAdamW([param], lr=0.01)
    for number in range(2):
        full = gradient(param.shape, 0, number).bfloat16()
        param.grad = shard_like(full, param)
        optimizer.step()
        master = local_tensor(optimizer.state[param]["master_param"])
        amax = master.abs().max()
        dist.all_reduce(amax, dist.ReduceOp.MAX)
        for part in quantized_parts(local):
            current = isinstance(part._quantizer, Float8CurrentScalingQuantizer)
            scale = 448 / amax if current else torch.tensor(64.0)
            assert torch.equal(part._data, encode(master, scale))
            assert part._scale_inv == 1 / scale
            held = current and name == "older" and dist.get_world_size() > 1
            assert getattr(part._quantizer, "with_amax_reduction", False) == held
            assert (getattr(part._quantizer, "amax_reduction_group", None) is not None) == held


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CURRENT)
def test_scales_of_current_scaling_are_those_of_whole_weights(name: str, ranks: int) -> None:
    """The group is the tensor's: where the quantizer holds one, copies of it would reduce over all ranks."""
    distributed.run(ranks, one_scale_for_all_shards, name)


def test_hybrids_whose_parts_do_not_reduce_need_no_collective() -> None:
    distributed.run(2, no_collective)


def no_collective() -> None:
    hybrid = sharded(
        torch.randn(4, 16), HybridQuantizedTensor, HybridQuantizer(Float8BlockQuantizer(), Float8BlockQuantizer())
    )
    assert not adapters.needs_collective(hybrid)
    assert not adapters.needs_collective(sharded(torch.randn(4, 16), Float8Tensor, Float8Quantizer("cpu")))


def refuse_empty_shards(rows: int) -> None:
    plain = shard(torch.randn(rows, 16), distributed.mesh(), [Shard(0)])
    local = local_tensor(plain) if local_tensor(plain).numel() else torch.ones(1, 16)
    double = Float8Tensor(local, Float8CurrentScalingQuantizer())
    param = rewrap_like(double, plain).requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"shape \({rows}, 16\).* some of its 4 ranks hold nothing"):
        FusedAdamW([param]).initialize_state()


@pytest.mark.parametrize("rows", [3, 5])
def test_current_scaling_with_empty_shards_is_refused_on_all_ranks(rows: int) -> None:
    distributed.run(4, refuse_empty_shards, rows)


def delayed_shards() -> None:
    """Each rank notes its own shard's largest magnitude; it is TransformerEngine that reduces."""
    param = sharded(torch.randn(3, 16), Float8Tensor, Float8Quantizer("cpu"))
    local = local_tensor(param)
    local._quantizer.amax.zero_()
    quantized = local.calls
    optimizer = FusedAdamW([param], lr=0.01)
    param.grad = shard_like(gradient(param.shape, 0, 0).bfloat16(), param)
    optimizer.step()
    master = local_tensor(optimizer.state[param]["master_param"])
    assert_written(local, master)
    assert local._quantizer.amax == (master.abs().max() if master.numel() else 0)
    assert local.calls == quantized


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


@pytest.mark.parametrize("master_weights", [True, False])
def test_int8_training_weights_of_torchao(master_weights: bool) -> None:
    int8 = pytest.importorskip("torchao.prototype.quantized_training.int8")
    values = torch.randn(64, 128)
    kind = int8.Int8QuantizedTrainingLinearWeight
    param = nn.Parameter(kind.from_float(values.bfloat16()))
    plain = nn.Parameter(param.detach().dequantize().float())
    optimizer = FusedAdamW([param], lr=0.01, master_bits=32 if master_weights else 0)
    reference = torch.optim.AdamW([plain], lr=0.01)
    for seed in range(20):
        step(optimizer, reference, seed)
    scale = param.detach().scale.float()[:, None]
    distance = (param.detach().dequantize().float() - plain).abs() / scale
    moved = (plain - values).abs() / scale
    if master_weights:
        assert distance.max() <= 2  # codes: stochastic rounding, and scales of half their precision
    else:  # roundings add up, but have no direction
        assert (param.detach().dequantize().float() - plain).mean().abs() < (plain - values).abs().mean() / 20
    assert distance.mean() < moved.mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masters_follow_int8_training_weights(dtype: torch.dtype) -> None:
    """Those of the same codes stay, though they were rounded up or down; loaded ones are within a step."""
    int8 = pytest.importorskip("torchao.prototype.quantized_training.int8")
    param = nn.Parameter(int8.Int8QuantizedTrainingLinearWeight.from_float(torch.randn(64, 128).to(dtype)))
    optimizer = FusedAdamW([param], lr=0.01)
    for seed in range(3):
        param.grad = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)).to(dtype)
        optimizer.step()
    before = optimizer.get_unscaled_state(param, "master_param").clone()
    optimizer.sync_masters_from_params()
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), before)
    with torch.no_grad():
        param.copy_((before / 30).to(dtype))
    optimizer.sync_masters_from_params()
    master, written = optimizer.get_unscaled_state(param, "master_param"), param.detach().dequantize().float()
    assert ((master - written).abs() <= 1.01 * param.detach().scale.float()[:, None]).all()
    assert master.abs().max() < before.abs().max() / 25
