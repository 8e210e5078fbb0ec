"""Quantized tensors of other libraries: a double with TransformerEngine's attributes, and torchao's own where it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused_optim import FusedAdamW
from fused_optim.quantized import protocol

aten = torch.ops.aten
TE_MODULE = "transformer_engine.pytorch.quantized_tensor"


class QuantizedTensor(torch.Tensor):
    """As TransformerEngine's: a wrapper with ``quantize_``, ``dequantize``, a quantizer and a cached transpose."""

    @staticmethod
    def __new__(cls, values: Tensor) -> QuantizedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16, device=values.device)

    def __init__(self, values: Tensor) -> None:
        self._quantizer: Any = object()
        self.calls = 0
        self.quantize_(values)

    def quantize_(self, values: Tensor) -> None:
        self._data = (values * 64).round().clamp(-127, 127).to(torch.int8)
        self._transpose = None
        self.calls += 1

    def dequantize(self, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (self._data.float() / 64).to(dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            alias = cls.__new__(cls, args[0])
            alias.__dict__ = args[0].__dict__
            return alias
        decode = lambda tree: torch.utils._pytree.tree_map_only(cls, lambda t: t.dequantize(), tree)  # noqa: E731
        return func(*decode(args), **decode(kwargs or {}))


QuantizedTensor.__module__ = TE_MODULE


class Float8Tensor(QuantizedTensor):
    """Found by its base."""


Float8Tensor.__module__ = "transformer_engine.pytorch.tensor.float8_tensor"


def parameter(values: Tensor) -> Float8Tensor:
    return Float8Tensor(values).requires_grad_()


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
        param._transpose = object()
        optimizer.step()
        reference.step()
        assert param._transpose is None
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
    optimizer = FusedAdamW([parameter(torch.randn(8, 64))], master_weights=False)
    with pytest.raises(ValueError, match=r"master_weights=False: a Float8Tensor of shape \(8, 64\)"):
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
    assert protocol.adapter_of(marked) is None
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
    optimizer = FusedAdamW([param], lr=0.01, master_weights=master_weights)
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
