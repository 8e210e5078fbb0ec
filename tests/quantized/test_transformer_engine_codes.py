"""TransformerEngine's weights without masters: decoded, updated in FP32, encoded again with rotating rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import distributed
from distributed import Part, join_all, part, shard, shard_like
from fused_optim import FusedAdamW, adapters
from fused_optim.formats.arithmetic import MASK32
from fused_optim.formats.rounding import GOLDEN_RATIO, rounding_bits, rounding_key
from fused_optim.quantized.adapters import transformer_engine, transformer_engine_codes
from fused_optim.sharding.dtensor import local_tensor, rewrap_like
from quantized_cases import gradient, values
from transformer_engine_doubles import (
    E4M3,
    BlockQuantizer,
    DType,
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    HybridQuantizedTensor,
    HybridQuantizer,
    OwnFloat8Quantizer,
    QuantizedTensor,
)

Make = Callable[[Tensor], QuantizedTensor]
KINDS: dict[str, Make] = {
    "delayed": lambda x: Float8Tensor(x, Float8Quantizer(x.device)),
    "current": lambda x: Float8Tensor(x, Float8CurrentScalingQuantizer()),
    "current, powers of two": lambda x: Float8Tensor(x, Float8CurrentScalingQuantizer(True)),
    "current, epsilon": lambda x: Float8Tensor(x, Float8CurrentScalingQuantizer(amax_epsilon=100.0)),
    "tiles": lambda x: Float8BlockwiseQTensor(x, BlockQuantizer(2)),
    "tiles, any scale": lambda x: Float8BlockwiseQTensor(x, BlockQuantizer(2, force_pow_2_scales=False)),
    "tiles, epsilon": lambda x: Float8BlockwiseQTensor(x, BlockQuantizer(2, amax_epsilon=100.0)),
    "rows": lambda x: Float8BlockwiseQTensor(x, BlockQuantizer(1)),
    "rows, any scale": lambda x: Float8BlockwiseQTensor(x, BlockQuantizer(1, force_pow_2_scales=False)),
}
SHAPES = [(8, 64), (7, 144), (130, 260)]
OPTIONS: dict[str, Any] = {"lr": 0.01, "master_bits": 0, "seed": 5}

kind_of = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=["cpu", "torch"])
def _backend(request: pytest.FixtureRequest, use_backend: Callable[[str], None]) -> Iterator[None]:
    if request.param == "torch":
        use_backend("torch")
    yield


def decoded(param: QuantizedTensor) -> Tensor:
    with torch.no_grad():
        return local_tensor(param).dequantize(dtype=torch.float32)


# --- what is expected -------------------------------------------------------------------------------------------

LEVELS = torch.arange(127, dtype=torch.uint8).view(E4M3).double().numpy()


def rotated(x: Tensor, decoding_scales: Tensor, u: Tensor) -> Tensor:
    """The code below or above ``x / scale``: the distance from the one below, plus ``u``, is rounded down."""
    quotient = x * (1 / decoding_scales)
    place = np.interp(quotient.abs().clamp_max(448).double().numpy(), LEVELS, np.arange(127))
    codes = np.minimum((np.rint(place * 2**20).astype(np.int64) + (u.numpy() >> 12)) >> 20, 126)
    return torch.from_numpy(codes).to(torch.uint8) | torch.where(quotient.signbit(), 0x80, 0).to(torch.uint8)


def tensor_scale(absmax: Tensor, quantizer: Any) -> Tensor:
    scale = torch.tensor(448.0) / absmax.clamp_min(quantizer.amax_epsilon)  # `448 / absmax` is no quotient
    return 1 / (torch.exp2(scale.log2().floor()) if quantizer.force_pow_2_scales else scale)


def spread(scales: Tensor, tile: tuple[int, int], shape: torch.Size) -> Tensor:
    return scales.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[: shape[0], : shape[1]]


def assert_blocks(codes: Tensor, laid_out: Tensor, x: Tensor, u: Tensor, quantizer: BlockQuantizer) -> None:
    tiles = quantizer.block_scaling_dim == 2
    _, scales = quantizer.by_rows(x)
    torch.testing.assert_close(laid_out, quantizer.laid_out(scales), rtol=2**-22, atol=0)
    if not quantizer.force_pow_2_scales:  # those that the tensor has: a quotient, or the inverse of another
        rows, columns = scales.shape
        scales = laid_out[:rows, :columns] if tiles else laid_out.t()[:rows, :columns]
    assert torch.equal(codes, rotated(x, spread(scales, (128, 128) if tiles else (1, 128), x.shape), u))


def assert_encoded(param: QuantizedTensor, x: Tensor, u: Tensor) -> None:
    """The parts of ``param`` are what FP32 values and rounding fractions give."""
    quantizer = param._quantizer
    if isinstance(param, Float8BlockwiseQTensor):
        assert_blocks(param._rowwise_data, param._rowwise_scale_inv, x, u, quantizer)
        if param._is_2D_scaled:
            assert torch.equal(param._columnwise_data, param._rowwise_data.t())
            expected = param.decoded(param._columnwise_data, param._columnwise_scale_inv).t()
            assert torch.equal(decoded(param), expected)
        else:
            u = u.view(x.shape[1], x.shape[0])
            assert_blocks(param._columnwise_data, param._columnwise_scale_inv, x.t().contiguous(), u, quantizer)
        return
    delayed = isinstance(quantizer, Float8Quantizer)
    scale = 1 / quantizer.scale if delayed else tensor_scale(x.abs().max(), quantizer)
    assert torch.equal(param._scale_inv, scale.reshape(1))
    assert torch.equal(param._data, rotated(x, scale, u))
    assert param._transpose_invalid


def fractions(index: int, step: int, shape: torch.Size) -> Tensor:
    key = rounding_key(OPTIONS["seed"], index)
    return rounding_bits(key, torch.arange(shape.numel()), step * GOLDEN_RATIO & MASK32).view(shape)


# --- beside masters ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_backend")
@kind_of
@pytest.mark.parametrize("factor", [1.0, 0.9, 1 / 30])
def test_masters_follow_smaller_values(kind: str, factor: float) -> None:
    """The same values leave them. Steps are 1/16 to 1/8 of an element, but for the smallest ones."""
    for shape in SHAPES:
        param = KINDS[kind](values(shape, 1)).requires_grad_()
        optimizer = FusedAdamW([param], lr=0.1)
        param.grad = -decoded(param).sign().bfloat16()
        optimizer.step()
        before = optimizer.get_unscaled_state(param, "master_param").clone()
        if kind == "delayed" and factor < 1.0:
            param._quantizer.scale.copy_(448.0 / (before * factor).abs().max())
            param._quantizer.amax.zero_()
        param.quantize_(before * factor)
        optimizer.sync_masters_from_params()
        master, written = optimizer.get_unscaled_state(param, "master_param"), decoded(param)
        if factor == 1.0:
            assert torch.equal(master, before)
        smallest = written.abs().max() * 2.0**-17
        assert ((master - written).abs() <= written.abs() / 16 * (1 + 1e-6) + smallest).all()
        assert ((master == before) | (master == written)).all()


# --- one rank ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_backend")
@kind_of
def test_weights_are_decoded_updated_and_rounded(kind: str) -> None:
    params = [KINDS[kind](values(shape, i)).requires_grad_() for i, shape in enumerate(SHAPES)]
    plain = [nn.Parameter(decoded(param)) for param in params]
    optimizer, reference = FusedAdamW(params, **OPTIONS), FusedAdamW(plain, lr=OPTIONS["lr"])
    quantized = [param.calls for param in params]
    for step in range(1, 5):
        amaxes = []
        for i, (param, theirs) in enumerate(zip(params, plain, strict=True)):
            param.grad = gradient(param.shape, i, step).bfloat16()
            theirs.data.copy_(decoded(param))
            theirs.grad = param.grad.float()
            if kind == "delayed":
                param._quantizer.scale.fill_(37.3 + step)
                param._quantizer.amax.fill_([0.0, 1000.0][step % 2])
                amaxes.append(param._quantizer.amax.clone())
        optimizer.step()
        reference.step()
        for i, (param, theirs) in enumerate(zip(params, plain, strict=True)):
            assert "master_param" not in optimizer.state[param]
            assert_encoded(param, theirs.data, fractions(i, step, param.shape))
            if kind == "delayed":
                assert torch.equal(param._quantizer.amax, torch.maximum(amaxes[i], theirs.data.abs().max().view(1)))
    assert [param.calls for param in params] == quantized


@kind_of
def test_small_updates_are_not_lost(kind: str) -> None:
    """Each is a hundredth of the distance of two codes: rounded to nearest, none would ever be seen."""
    x = 1.0 + torch.rand(128, 128)
    x[:, 0] = 4.0  # the scales stay
    ours = KINDS[kind](x).requires_grad_()
    before = decoded(ours).clone()
    optimizer = FusedAdamW([ours], **{**OPTIONS, "lr": 0.001, "weight_decay": 0.0})
    for _ in range(50):
        ours.grad = torch.ones_like(x).bfloat16()
        ours.grad[:, 0] = 0
        optimizer.step()
    moved = (before - decoded(ours))[:, 1:]
    assert 0.045 < moved.mean() < 0.055


@kind_of
@pytest.mark.parametrize("applies", [False, True])
def test_skipped_steps_change_nothing(kind: str, applies: bool) -> None:
    param = KINDS[kind](values((130, 260), 1)).requires_grad_()
    optimizer = FusedAdamW([param], **OPTIONS)
    param.grad = gradient(param.shape, 0, 0).bfloat16()
    optimizer.step()
    before = copy.deepcopy({k: v for k, v in parts(param).items() if k != "_transpose"})
    if kind == "delayed":
        param._quantizer.scale.fill_(11.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0 if applies else 1.0)
    optimizer.step()
    after = parts(param)
    assert all(torch.equal(after[name], value) for name, value in before.items()) != applies


def parts(param: QuantizedTensor) -> dict[str, Tensor]:
    found = {name: part for name, part in param.__dict__.items() if isinstance(part, Tensor) and name[1:2].isalpha()}
    return found | {"amax": param._quantizer.amax} if hasattr(param._quantizer, "amax") else found


@pytest.mark.parametrize("kind", ["delayed", "current", "tiles", "rows"])
def test_rounding_to_nearest_is_left_to_quantize_(kind: str) -> None:
    param = KINDS[kind](values((8, 64), 1)).requires_grad_()
    plain = nn.Parameter(decoded(param))
    optimizer, reference = FusedAdamW([param], **OPTIONS, stochastic_rounding=False), FusedAdamW([plain], lr=0.01)
    param.grad = gradient(param.shape, 0, 0).bfloat16()
    plain.grad = param.grad.float()
    calls = param.calls
    optimizer.step()
    reference.step()
    assert param.calls == calls + 1
    assert torch.equal(decoded(param), decoded(KINDS[kind](plain.data)))


@pytest.mark.parametrize("kind", ["delayed", "current"])
def test_captured_steps_fill_the_transposes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No replay could mark them as invalid."""
    param = KINDS[kind](values((8, 64), 1)).requires_grad_()
    optimizer = FusedAdamW([param], **OPTIONS)
    monkeypatch.setattr(transformer_engine_codes, "is_capturing", lambda: True)
    param.grad = gradient(param.shape, 0, 0).bfloat16()
    before = param._data.clone()
    optimizer.step()
    assert not torch.equal(param._data, before)
    assert torch.equal(param._transpose, param._data.t())
    assert not param._transpose_invalid


def test_zeros_stay_zeros() -> None:
    for make in KINDS.values():
        param = make(torch.zeros(3, 128)).requires_grad_()
        optimizer = FusedAdamW([param], **OPTIONS)
        optimizer.initialize_state()
        param.grad = torch.zeros(3, 128).bfloat16()
        optimizer.step()
        assert torch.equal(decoded(param), torch.zeros(3, 128))


@pytest.mark.parametrize("kind", ["delayed", "current", "tiles", "rows"])
def test_runs_go_on_from_checkpoints(kind: str) -> None:
    """The checkpoint of the model holds the codes, that of the optimizer no masters."""

    def steps(param: QuantizedTensor, optimizer: FusedAdamW, first: int) -> None:
        for step in range(first, first + 2):
            param.grad = gradient(param.shape, 0, step).bfloat16()
            optimizer.step()

    param = KINDS[kind](values((8, 64), 1)).requires_grad_()
    optimizer = FusedAdamW([param], **OPTIONS)
    steps(param, optimizer, 0)
    other = KINDS[kind](values((8, 64), 2)).requires_grad_()
    fresh = FusedAdamW([other], **OPTIONS)
    for name, value in parts(param).items():
        (other._quantizer.amax if name == "amax" else getattr(other, name)).copy_(value)
    fresh.load_state_dict(optimizer.state_dict())
    steps(param, optimizer, 2)
    steps(other, fresh, 2)
    assert torch.equal(decoded(other), decoded(param))


@kind_of
def test_masters_of_a_checkpoint_are_written_into_weights_without(kind: str) -> None:
    param, other = (KINDS[kind](values((8, 64), seed)).requires_grad_() for seed in (1, 2))
    optimizer, fresh = FusedAdamW([param], lr=0.01), FusedAdamW([other], **OPTIONS)
    param.grad = gradient(param.shape, 0, 0).bfloat16()
    optimizer.step()
    fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(decoded(other), decoded(KINDS[kind](optimizer.state[param]["master_param"])))


# --- what is refused --------------------------------------------------------------------------------------------


class MXFP8Quantizer:
    def update_quantized(self, values: Tensor, out: QuantizedTensor) -> None:
        Float8BlockQuantizer().update_quantized(values, out)


def e5m2() -> QuantizedTensor:
    param = KINDS["delayed"](torch.ones(8, 64))
    param._quantizer.dtype = param._fp8_dtype = DType.kFloat8E5M2
    return param


def columns_only() -> QuantizedTensor:
    param = KINDS["rows"](torch.ones(8, 64))
    param._rowwise_data = None
    return param


REFUSED = {
    "MXFP8Quantizer": lambda: Float8Tensor(torch.ones(8, 64), MXFP8Quantizer()),
    "OwnFloat8Quantizer": lambda: Float8Tensor(torch.ones(8, 64), OwnFloat8Quantizer("cpu")),
    "HybridQuantizer": lambda: HybridQuantizedTensor(
        torch.ones(8, 64), HybridQuantizer(Float8CurrentScalingQuantizer(), Float8CurrentScalingQuantizer())
    ),
    "expected Float8Quantizer to make E4M3 codes, got kFloat8E5M2": e5m2,
    "no codes by rows": columns_only,
}


@pytest.mark.parametrize("text", REFUSED)
def test_weights_that_only_quantize_could_write_need_masters(text: str) -> None:
    param = REFUSED[text]().requires_grad_()
    expected = rf"master_bits=0: a \w+ of shape \(8, 64\) needs a master: .*{text}.*; use master_bits=32"
    with pytest.raises(ValueError, match=expected):
        FusedAdamW([param], master_bits=0).initialize_state()


# --- shards -----------------------------------------------------------------------------------------------------


def sharded(kind: str, full: Tensor) -> DTensor:
    plain = shard(full, distributed.mesh(), [Shard(0)])
    param = rewrap_like(KINDS[kind](local_tensor(plain)), plain).requires_grad_()
    if kind.startswith("current"):  # it was quantized with scales of shards
        adapters.write([adapters.Update(param, local_tensor(plain))])
    return param


def step_shards(kind: str, rows: int, without: int | None) -> dict[str, Part]:
    """``without``: this rank has no gradient in the second step."""
    param = sharded(kind, values((rows, 256), 1))
    optimizer = FusedAdamW([param], **OPTIONS)
    for step in range(3):
        full = gradient(param.shape, 0, step).bfloat16()
        param.grad = None if step == 1 and without == distributed.dist.get_rank() else shard_like(full, param)
        optimizer.step()
    local = local_tensor(param)
    codes = local._rowwise_data if isinstance(local, Float8BlockwiseQTensor) else local._data
    found = {"codes": part(rewrap_like(codes, param)), "values": part(rewrap_like(decoded(param), param))}
    if not isinstance(local, Float8BlockwiseQTensor):  # the same on every rank
        scale = DTensor.from_local(local._scale_inv, param.device_mesh, [Replicate()])
        found["scale"] = part(scale)
    return found


@pytest.mark.parametrize("kind", ["delayed", "current", "current, powers of two", "tiles", "rows"])
def test_shards_get_the_codes_of_whole_weights(kind: str) -> None:
    rows = 768 if kind == "tiles" else 9
    (alone,) = distributed.run(1, step_shards, kind, rows, None)
    expected = join_all([alone])
    for ranks in (2, 3):
        distributed.assert_same(join_all(distributed.run(ranks, step_shards, kind, rows, None)), expected)


def test_ranks_without_a_gradient_take_part_in_reductions() -> None:
    found = join_all(distributed.run(2, step_shards, "current", 9, 1))
    assert found["values"].isfinite().all()


def refuse_empty_shards() -> None:
    plain = shard(torch.randn(3, 16), distributed.mesh(), [Shard(0)])
    local = local_tensor(plain) if local_tensor(plain).numel() else torch.ones(1, 16)
    param = rewrap_like(KINDS["current"](local), plain).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"shape \(3, 16\).* some of its 4 ranks hold nothing"):
        FusedAdamW([param], master_bits=0).initialize_state()


def test_current_scaling_with_empty_shards_is_refused_on_all_ranks() -> None:
    distributed.run(4, refuse_empty_shards)


def test_the_adapter_is_the_one_of_the_doubles() -> None:
    assert {adapters.adapter_of(make(torch.ones(8, 64))) for make in KINDS.values()} == {transformer_engine}
