"""What others write into weights of other libraries between steps, and what is no write.

With doubles of TransformerEngine's, and torchao's own where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fused_optim import FusedAdamW
from fused_optim.state.param_state import ParamState
from quantized_cases import gradient
from transformer_engine_doubles import (
    BlockQuantizer,
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

SHAPE = (128, 128)
Make = Callable[[Tensor], QuantizedTensor]
ONLY_THEIRS: dict[str, Make] = {  # how to round is known to the quantizer alone
    "fixed scale": lambda x: Float8Tensor(x, Float8BlockQuantizer()),
    "subclass": lambda x: Float8Tensor(x, OwnFloat8Quantizer(x.device)),
    "hybrid": lambda x: HybridQuantizedTensor(x, HybridQuantizer(Float8BlockQuantizer(), Float8BlockQuantizer())),
}
MAKES: dict[str, Make] = {
    "delayed": lambda x: Float8Tensor(x, Float8Quantizer(x.device)),
    "current": lambda x: Float8Tensor(x, Float8CurrentScalingQuantizer()),
    "tiles": lambda x: Float8BlockwiseQTensor(x, BlockQuantizer(2)),
    **ONLY_THEIRS,
}
any_kind = pytest.mark.parametrize("kind", MAKES)


def trained(kind: str) -> tuple[QuantizedTensor, FusedAdamW]:
    param = MAKES[kind](random(0)).requires_grad_()
    optimizer = FusedAdamW([param], lr=0.01)
    step(param, optimizer, 0)
    return param, optimizer


def random(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def step(param: QuantizedTensor, optimizer: FusedAdamW, number: int) -> None:
    param.grad = gradient(SHAPE, 0, number).bfloat16()
    optimizer.step()


def master(param: QuantizedTensor, optimizer: FusedAdamW) -> Tensor:
    return optimizer.get_unscaled_state(param, "master_param").clone()


def make_transposes(param: QuantizedTensor) -> None:
    """As layers do for their backward pass."""
    parts = [param._rowwise_storage, param._columnwise_storage] if isinstance(param, HybridQuantizedTensor) else [param]
    for part in parts:
        (part._create_columnwise if isinstance(part, Float8BlockwiseQTensor) else part._create_transpose)()


@any_kind
def test_without_a_write_nothing_is_compared(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tensors say that they have other memory each time they are asked."""
    param, optimizer = trained(kind)
    monkeypatch.setattr(ParamState, "sync_master_from_param", lambda self: pytest.fail("compared"))
    for number in range(1, 4):
        make_transposes(param)
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
            param.data = MAKES[kind](-random(0))
        else:
            param.copy_(-random(0))
        new = param.dequantize(dtype=torch.float32)
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


def test_torchaos_weights_are_compared_after_writes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    int8 = pytest.importorskip("torchao.prototype.quantized_training.int8").Int8QuantizedTrainingLinearWeight
    param = nn.Parameter(int8.from_float(random(0)))
    optimizer = FusedAdamW([param], lr=0.01)
    compared, sync = [], ParamState.sync_master_from_param
    monkeypatch.setattr(ParamState, "sync_master_from_param", lambda self: compared.append(self) or sync(self))
    for number in range(3):
        param.grad = gradient(SHAPE, 0, number)
        optimizer.step()
        optimizer.state_dict()
    assert not compared
    param.int_data = int8.from_float(-random(0)).int_data
    master = optimizer.get_unscaled_state(param, "master_param")
    assert float((master - param.detach().dequantize()).abs().max()) < 0.05
