"""Weights that stay plain for optimizers and checkpoints, and are quantized where they are gathered or multiplied."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distributed
from distributed import on_each_device
from fused_optim import FusedAdamW
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    GroupedLinear,
    KeptWeight,
    MXFP8BlockScaling,
    Recipe,
    dequantize_model_,
    quantize_model_,
    save_quantized_safetensors,
)
from fused_optim.quantized.fp8.kept import plain_values
from fused_optim.quantized.fp8.linear import QuantizedLinear
from fused_optim.sharding.dtensor import local_tensor
from pairwise import pairwise

RECIPES: dict[str, tuple[Recipe, Recipe]] = {
    name: (kind(compute="fp8", keep_weights=True, **options), kind(compute="fp8", **options))
    for name, kind, options in (
        ("one scale", Float8CurrentScaling, {}),
        ("rows", Float8CurrentScaling, {"activation_scaling": "row", "weight_gradients": "fp8"}),
        ("blocks (1, 128)", Float8BlockScaling, {"block": (1, 128)}),
        ("tiles", Float8BlockScaling, {}),
        ("mxfp8", MXFP8BlockScaling, {}),
    )
}
EACH = pytest.mark.parametrize("name", RECIPES)


def model(rows: int = 208) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, rows), nn.ReLU(), nn.Linear(rows, 128, bias=False)).bfloat16()


def batch(step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(128, 128, generator=generator).bfloat16()


def gradients(layers: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    out = layers(x)
    out.float().square().mean().backward()
    return out.detach(), {name: param.grad for name, param in layers.named_parameters()}


@EACH
def test_they_compute_as_quantized_ones_and_are_plain(name: str, device: str) -> None:
    kept_recipe, recipe = RECIPES[name]
    if device == "cuda" and name == "mxfp8":
        pytest.skip("no GPU with these products")
    plain = model().to(device)
    kept = quantize_model_(copy.deepcopy(plain), kept_recipe)
    expected, found = (gradients(each, batch().to(device)) for each in (
        quantize_model_(copy.deepcopy(plain), recipe), kept,
    ))  # fmt: skip
    assert torch.equal(found[0], expected[0])
    for key, gradient in found[1].items():
        assert type(gradient) is Tensor and torch.equal(gradient, expected[1][key]), key
    assert type(kept[0]) is QuantizedLinear and type(kept[0].weight) is KeptWeight
    assert isinstance(kept[0].weight, nn.Parameter) and kept[0].weight.is_leaf
    for key, value in kept.state_dict().items():
        assert type(value) is Tensor and torch.equal(value, plain.state_dict()[key])
        assert value.data_ptr() == local_tensor(kept.get_parameter(key)).data_ptr()
    with torch.no_grad():
        assert torch.equal(kept(batch().to(device)), expected[0])


@pytest.mark.parametrize("make", [lambda p: FusedAdamW(p, lr=0.01), lambda p: torch.optim.AdamW(p, lr=0.01)])
def test_optimizers_see_plain_parameters(make: Any) -> None:
    kept, plain = model(), model()
    quantize_model_(kept, RECIPES["one scale"][0])
    optimizers = [make(each.parameters()) for each in (kept, plain)]
    for step in range(3):
        _, found = gradients(kept, batch(step))
        for key, param in plain.named_parameters():
            param.grad = found[key].clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for key, param in plain.named_parameters():
        assert torch.equal(kept.state_dict()[key], param), key


def test_copies_loads_and_moves() -> None:
    kept = quantize_model_(model(), RECIPES["tiles"][0])
    copied = copy.deepcopy(kept)
    assert type(copied[0].weight) is KeptWeight and copied[0].weight.plain is not kept[0].weight.plain
    file = io.BytesIO()
    torch.save(kept.state_dict(), file)
    torch.save(dict(kept.named_parameters()), file_of_parameters := io.BytesIO())
    for each in (file, file_of_parameters):
        each.seek(0)
        loaded = torch.load(each, weights_only=True)
        assert type(loaded["0.weight"]) in (Tensor, nn.Parameter)
    for options in ({}, {"assign": True}):
        with torch.no_grad():
            copied[0].weight.zero_()
        assert not copied[0].weight.plain.any()
        copied.load_state_dict(model().state_dict(), **options)
        assert type(copied[0].weight) is KeptWeight and torch.equal(copied[0].weight.plain, model()[0].weight)
        assert torch.equal(copied(batch()), kept(batch()))
    copied.float()
    assert type(copied[0].weight) is KeptWeight and copied[0].weight.plain.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(copied(batch().float()), kept(batch()))
    copied[0].weight.data = torch.zeros(208, 128)
    assert not copied[0].weight.plain.any()
    with pytest.raises(TypeError, match="takes tensors of its shape"):
        copied[0].weight.data = torch.zeros(1)
    with torch.device("meta"):
        built = quantize_model_(model(), RECIPES["one scale"][0])
    built.to_empty(device="cpu").load_state_dict(model().state_dict())
    assert type(built[0].weight) is KeptWeight and torch.equal(built[0].weight.plain, model()[0].weight)


def test_exports_hold_plain_tensors(tmp_path: Path) -> None:
    """Also of layers that share such a weight, and of one that is saved without the model."""
    layers = model(128)
    head = nn.Linear(128, 128, bias=False, dtype=layers[0].weight.dtype)
    head.weight = layers[0].weight
    layers.append(head)
    quantize_model_(layers, RECIPES["one scale"][0], filter_fn=lambda module, _: isinstance(module, nn.Linear))
    expected = {name: plain_values(param).detach() for name, param in layers.named_parameters(remove_duplicate=False)}
    assert set(expected) == {"0.weight", "0.bias", "2.weight", "3.weight"}
    for found in (layers.state_dict(), {f"3.{name}": value for name, value in head.state_dict().items()}):
        for name, value in found.items():
            assert type(value) is Tensor and torch.equal(value, expected[name])
            assert value.data_ptr() == expected[name].data_ptr()
    assert layers.state_dict(keep_vars=True)["3.weight"] is layers[0].weight
    save_quantized_safetensors(layers, tmp_path / "quantized")
    save_file({"w": layers[0].weight.detach(), "b": layers[0].bias.detach()}, tmp_path / "own.safetensors")
    save_model(layers, str(tmp_path / "model.safetensors"))
    own = load_file(tmp_path / "own.safetensors")
    assert torch.equal(own["w"], expected["0.weight"])
    (file,) = (tmp_path / "quantized").glob("*.safetensors")
    for each in (load_file(file), load_file(tmp_path / "model.safetensors")):
        assert {"2.weight", "0.bias"} < set(each) and len(each) == 3
        assert all(torch.equal(value, expected[name]) for name, value in each.items())


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_the_way_out(with_optimizer: bool) -> None:
    kept = quantize_model_(model(), RECIPES["one scale"][0])
    optimizer = FusedAdamW(kept.parameters(), lr=0.01)
    gradients(kept, batch())
    optimizer.step()
    before = {name: value.clone() for name, value in kept.state_dict().items()}
    dequantize_model_(kept, optimizer if with_optimizer else None)
    assert all(type(param) is nn.Parameter for param in kept.parameters())
    assert all(torch.equal(value, before[name]) for name, value in kept.state_dict().items())
    if with_optimizer:
        optimizer.step()
        assert not torch.equal(kept[0].weight, before["0.weight"])


def test_compiled() -> None:
    kept = quantize_model_(model(), RECIPES["rows"][0])
    expected = gradients(copy.deepcopy(kept), batch())
    compiled = copy.deepcopy(kept)
    compiled.compile(backend="aot_eager", fullgraph=True)
    found = gradients(compiled, batch())
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(value, expected[1][key]) for key, value in found[1].items())


def test_experts() -> None:
    for name in ("one scale", "tiles"):
        found = []
        for recipe in RECIPES[name]:
            torch.manual_seed(1)
            layer = quantize_model_(GroupedLinear(2, 128, 128, dtype=torch.bfloat16), recipe, lambda *_: True)
            out = layer(batch(), torch.tensor([30, 128], dtype=torch.int32))
            out.backward(batch(2))
            found.append((out, layer.weight.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_weights=True with compute='decode'"):
        Float8CurrentScaling(compute="decode", keep_weights=True)
    for kind in (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling):
        with pytest.raises(TypeError, match="keep_weights: expected True or False, got 'yes'"):
            kind(keep_weights="yes")
    with pytest.raises(ValueError, match="no history"):
        Float8DelayedScaling(keep_weights=True)


# --- sharded ----------------------------------------------------------------------------------------------------------


def train(name: str, rows: int, kind: str, folder: str) -> dict[str, Any]:
    """Two steps under FSDP2, of kept weights or of quantized ones that are made of the same values before each."""
    device = distributed.device()
    kept = quantize_model_(model(rows).to(device), RECIPES[name][0])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if kind == "mixed" else MixedPrecisionPolicy()
    kept = kept.float() if kind == "mixed" else kept
    for layer in (kept[0], kept[2], kept):
        fully_shard(layer, mesh=distributed.mesh(), mp_policy=policy)
    optimizer = FusedAdamW(kept.parameters(), lr=0.01)
    found: dict[str, Any] = {"same": []}
    for step in range(2):
        whole = model(rows).to(device, torch.float32 if kind == "mixed" else torch.bfloat16)
        whole.load_state_dict({key: value.full_tensor() for key, value in kept.state_dict().items()})
        quantize_model_(whole, RECIPES[name][1])
        with torch.autocast(device.type, torch.bfloat16, enabled=kind == "mixed"):
            expected, of_whole = gradients(whole, batch(step).to(device))
        out, own = gradients(kept, batch(step).to(device))
        found["same"].append(torch.equal(out, expected))
        for key, gradient in own.items():
            # Each rank has the same batch; FSDP2 adds up the same numbers and divides them by their count.
            difference = (gradient.full_tensor().float() - of_whole[key].float()).abs().max()
            found["same"].append(bool(difference <= 2.0**-7 * of_whole[key].float().abs().max()))
        optimizer.step()
        optimizer.zero_grad()
    state = kept.state_dict()
    found["types"] = {type(value._local_tensor) for value in state.values() if isinstance(value, DTensor)}
    dcp.save(state, checkpoint_id=folder)
    before = {key: value.full_tensor().clone() for key, value in state.items()}
    with torch.no_grad():
        for param in kept.parameters():
            param.zero_()
    loaded = kept.state_dict()
    dcp.load(loaded, checkpoint_id=folder)
    kept.load_state_dict(loaded)
    found["same"] += [torch.equal(kept.state_dict()[key].full_tensor(), value) for key, value in before.items()]
    found["same"].append(isinstance(kept[0].weight._local_tensor, KeptWeight))
    return found


# Not all ranks x kinds x recipes x rows: each two of them.
GATHERED = pairwise([1, 2, 3, 4], ["BF16", "mixed"], list(RECIPES), [208, 256, 16])


@pytest.mark.parametrize(
    "ranks, kind, name, rows, on",
    on_each_device(*GATHERED, nccl=[case for case in GATHERED if case[0] <= 2 and case[2] != "mxfp8"]),
)
def test_gathered_weights_are_the_quantized_ones(
    ranks: int, kind: str, name: str, rows: int, on: str, tmp_path: Path
) -> None:
    """Whatever ranks share: even, uneven and empty shards, rows in shared tiles."""
    folder = str(tmp_path / "checkpoint")
    for result in distributed.run(ranks, train, name, rows, kind, folder, on=on):
        assert all(result["same"]), result["same"]
        assert result["types"] == {Tensor}


def load_on_meta() -> list[bool]:
    """Built on the meta device, sharded, and loaded from a full state dict; then moved, as offloading does."""
    with torch.device("meta"):
        kept = quantize_model_(model(208), RECIPES["one scale"][0])
    fully_shard(kept, mesh=distributed.mesh())
    kept.to_empty(device=distributed.device())
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(kept, {key: value.detach() for key, value in model(208).state_dict().items()}, options=options)
    whole = quantize_model_(model(208), RECIPES["one scale"][1]).to(distributed.device())
    x = batch().to(distributed.device())
    with torch.no_grad():
        same = [torch.equal(kept(x), whole(x))]
    kept.reshard()
    moved = kept[0].weight._local_tensor.to(torch.float32)
    full = get_model_state_dict(kept, options=options)
    same += [
        type(value) is Tensor and torch.equal(value, model(208).state_dict()[key].to(value.device))
        for key, value in full.items()
    ]
    return [*same, moved.padded_rows == kept[0].weight._local_tensor.padded_rows]


@pytest.mark.parametrize("ranks, on", on_each_device((1,), (3,), (4,), nccl=[]))
def test_models_built_on_meta(ranks: int, on: str) -> None:
    assert all(all(same) for same in distributed.run(ranks, load_on_meta, on=on))


def tensor_parallel() -> list[bool]:
    mesh = distributed.mesh()
    plain = model(256).to(distributed.device())
    same = []
    for name in ("rows", "mxfp8"):  # whose scales do not depend on the cuts of rows and columns
        kept = quantize_model_(copy.deepcopy(plain), RECIPES[name][1])
        expected, _ = gradients(kept, batch())
        parallel = parallelize_module(
            copy.deepcopy(plain), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Replicate())}
        )
        quantize_model_(parallel, RECIPES[name][0])
        out, found = gradients(parallel, batch())
        error = (out - expected).float().norm() / expected.float().norm()
        same += [bool(error < 0.05), type(parallel[0].weight._local_tensor) is KeptWeight]
        same.append(found["0.weight"].full_tensor().shape == (256, 128))
    return same


@pytest.mark.parametrize("ranks, on", on_each_device((2,), (4,), nccl=[]))
def test_tensor_parallelism(ranks: int, on: str) -> None:
    assert all(all(same) for same in distributed.run(ranks, tensor_parallel, on=on))
