"""What quantized_model_init finds in what was built: copies, ties, contexts within; what it refuses, before changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fused_optim import FusedAdam, FusedAdamW, FusedLion, FusedMuon, enable_gradient_release, muon_param_groups
from fused_optim.quantized import (
    Float8CurrentScaling,
    KeptWeight,
    MXFP8BlockScaling,
    QuantizedTensor,
    UsualLayers,
    dequantize_model_,
    quantize_model_,
    quantized_model_init,
)

SCALED, KEPT, MX = Float8CurrentScaling(), Float8CurrentScaling(keep_weights=True), MXFP8BlockScaling()


def every_linear(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def quantized_names(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, param in named if isinstance(param, QuantizedTensor | KeptWeight)}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 2, 64)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


# --- what is found ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [SCALED, KEPT], ids=["codes", "kept"])
def test_copied_layers_are_built_too(recipe: Any) -> None:
    with quantized_model_init(recipe):
        model = encoder()
    layers = ("linear1", "linear2", "self_attn.out_proj")
    assert quantized_names(model) == {f"layers.{i}.{name}.weight" for i in (0, 1) for name in layers}


def test_layers_of_before_stay_plain() -> None:
    before = net()
    with quantized_model_init(SCALED):
        model = nn.Sequential(before, nn.Linear(32, 32), copy.deepcopy(before))
    assert quantized_names(model) == {"1.weight", "2.0.weight", "2.2.weight"}


@pytest.mark.parametrize("inner, outer", [(KEPT, SCALED), (SCALED, KEPT)], ids=["kept", "codes"])
def test_contexts_within_come_first(inner: Float8CurrentScaling, outer: Float8CurrentScaling) -> None:
    with quantized_model_init(outer):
        first = nn.Linear(32, 32)
        with quantized_model_init(inner):
            model = nn.Sequential(nn.Linear(32, 32))
        model.append(first)
    assert [layer.weight.recipe.keep_weights for layer in model] == [inner.keep_weights, outer.keep_weights]


@pytest.mark.parametrize("first", [SCALED, KEPT], ids=["codes", "kept"])
@pytest.mark.parametrize("second", [SCALED, KEPT], ids=["codes", "kept"])
def test_weights_are_quantized_once(first: Any, second: Any) -> None:
    model = quantize_model_(net(), first)
    weights = [param for param in model.parameters()]
    with pytest.raises(ValueError, match=r"^0\.weight is quantized already"):
        quantize_model_(model, second)
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize("filter_fn", [None, every_linear, UsualLayers()], ids=["default", "filter", "usual"])
def test_ties_across_models_stay(filter_fn: Any) -> None:
    with quantized_model_init(SCALED, filter_fn):
        embedding, head, others = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False), nn.ModuleList([net(), net()])
        head.weight = embedding.weight
    assert head.weight is embedding.weight
    assert quantized_names(head) == ({"weight"} if filter_fn is every_linear else set())
    assert "0.2.weight" in quantized_names(others)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_models_in_ddp_are_refused() -> None:
    model: nn.Module = nn.Sequential(DistributedDataParallel(net()))
    with pytest.raises(ValueError, match=r"after DistributedDataParallel.* the order is tensor parallelism"):
        quantize_model_(model, SCALED)
    assert not quantized_names(model)
    with pytest.raises(ValueError, match="after DistributedDataParallel"), quantized_model_init(SCALED):
        other, model = net(), DistributedDataParallel(net())
    assert not quantized_names(model) and not quantized_names(other)
    model = DistributedDataParallel(quantize_model_(net(), SCALED))
    model(torch.ones(2, 32)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("make", [torch.optim.AdamW, FusedAdam, FusedMuon, torch.optim.SGD])
def test_optimizers_of_what_is_replaced_are_refused(make: Any) -> None:
    message = rf"^0\.weight is held by a {make.__name__} .*: make optimizers after it"
    with pytest.raises(ValueError, match=message), quantized_model_init(SCALED):
        other, model = net(), net()
        optimizer = make([param for param in model.parameters() if param.dim() == 2], lr=1e-3)
    assert not quantized_names(model) and not quantized_names(other) and optimizer.param_groups


def test_optimizers_of_others_are_not_refused() -> None:
    before = net()
    earlier = torch.optim.SGD(before.parameters(), lr=1.0)
    method = torch.optim.Optimizer.add_param_group
    with quantized_model_init(SCALED):
        model = net()
        optimizer = torch.optim.SGD([model.get_parameter("0.bias"), *before.parameters()], lr=1.0)
        torch.optim.SGD(model.parameters(), lr=1.0)  # is gone at the end
    assert quantized_names(model) == {"0.weight", "2.weight"} and optimizer.param_groups
    assert torch.optim.Optimizer.add_param_group is method
    with pytest.raises(ValueError, match="held by a SGD"), quantized_model_init(SCALED):
        model = net()
        earlier.add_param_group({"params": model.parameters()})


def test_nothing_is_quantized_where_one_model_cannot_be() -> None:
    ways: list[tuple[Any, Any]] = [(SCALED, None), ({"*": SCALED}, None), (SCALED, every_linear)]
    for recipe, filter_fn in ways:
        with pytest.raises(TypeError, match="float64"), quantized_model_init(recipe, filter_fn):
            model, other = net(), nn.Sequential(nn.Linear(32, 32, dtype=torch.float64))
        assert not quantized_names(model) and not quantized_names(other)


# --- optimizers of before -------------------------------------------------------------------------------------------


MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW": lambda model: FusedAdamW(model.named_parameters()),
    "Lion": lambda model: FusedLion(model.named_parameters()),
    "Muon": lambda model: FusedMuon(muon_param_groups(model)),
    "skipping": lambda model: FusedAdamW(model.named_parameters(), skip_nonfinite=True),
}


def trained(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 32)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("stale", [False, True])
def test_optimizers_hold_no_weights_that_were_quantized_since(make: str, started: bool, stale: bool) -> None:
    """Only biases would be trained: the weights get no gradients any more, or keep those of before."""
    model = net()
    optimizer = MAKE[make](model)
    if started:
        trained(model, optimizer)
    if stale:
        model(torch.ones(2, 32)).sum().backward()
    quantize_model_(model, SCALED)
    biases = [param.detach().clone() for param in (model[0].bias, model[2].bias)]
    model(torch.ones(2, 32)).sum().backward()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"parameter 0 \('0.weight', .*: quantize_model_ has replaced it; make the"
        ):
            optimizer.step()
    assert all(map(torch.equal, biases, (model[0].bias, model[2].bias)))
    assert bool(optimizer.state) == started
    trained(model, MAKE[make](model))
    other = net()
    trained(other, MAKE[make](other))  # of a model that nobody has quantized


def test_gradient_release_of_weights_that_were_quantized_since() -> None:
    model = net()
    optimizer = FusedAdamW(model.named_parameters())
    trained(model, optimizer)
    release = enable_gradient_release(model, optimizer)
    quantize_model_(model, SCALED)
    with pytest.raises(RuntimeError, match="quantize_model_ has replaced it"):
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
    release.disable()


@pytest.mark.parametrize("recipe", [SCALED, KEPT])
def test_optimizers_hold_no_weights_that_were_made_plain_since(recipe: Float8CurrentScaling) -> None:
    for given in (True, False):
        model = quantize_model_(net(), recipe)
        optimizer, other = FusedAdamW(model.named_parameters()), FusedAdamW([model[2].weight, model[2].bias])
        trained(model, optimizer)
        dequantize_model_(model, *([optimizer] if given else []))
        if given:
            trained(model, optimizer)
            optimizer = other
        with pytest.raises(
            RuntimeError, match=r"parameter 0 .*: dequantize_model_ has replaced it; give it the optimizer"
        ):
            trained(model, optimizer)


def test_frozen_weights_may_be_quantized_later() -> None:
    """As the base of adapters: nobody trains them."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = FusedAdamW(model.named_parameters())
    quantize_model_(model, SCALED, lambda _, name: name == "0")
    before = model[2].weight.detach().clone()
    trained(model, optimizer)
    assert not torch.equal(before, model[2].weight)


@pytest.mark.usefixtures("one_rank")
def test_sharded_models_that_were_made_plain_since() -> None:
    model = quantize_model_(net(), SCALED)
    fully_shard(model)
    optimizer = FusedAdamW(model.named_parameters())
    trained(model, optimizer)
    dequantize_model_(model)
    with pytest.raises(RuntimeError, match=r"'0.weight', .*placements .*dequantize_model_ has replaced it"):
        trained(model, optimizer)
    optimizer = FusedAdamW(model.named_parameters())
    trained(model, optimizer)
