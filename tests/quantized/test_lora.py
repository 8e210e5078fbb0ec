"""Fine-tuning as QLoRA does it: a frozen quantized base under FSDP2 takes the bytes of its format, adapters train."""

from __future__ import annotations

import gc
import math
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distributed
from distributed import assert_same, join_all, long, on_each_device
from fused_optim import FusedAdamW
from fused_optim.quantized import (
    QuantizedTensor,
    dequantize_model_,
    load_quantized_safetensors,
    quantize_model_,
    save_quantized_safetensors,
)
from fused_optim.sharding.dtensor import local_tensor
from quantized_cases import RECIPES, mesh_of, parameter_parts, values

WIDTH, ROWS = 128, 1536  # whole tiles on 1 to 4 ranks
# Bytes per element that the formats promise.
BYTES = {
    **dict.fromkeys(("current", "delayed", "recent"), 1.0),
    **{"tiles": 1 + 4 / 128**2, "rows": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "mxfp8up": 1 + 1 / 32, "nvfp4": 9 / 16},
}


class Adapted(nn.Module):
    """A frozen layer and a product of two thin ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        like = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.base, self.a, self.b = (
            base,
            nn.Linear(base.in_features, 4, **like),
            nn.Linear(4, base.out_features, **like),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :WIDTH].relu()


def base_model(device: str | torch.device = "cpu") -> nn.Sequential:
    layers = [nn.Linear(WIDTH, ROWS, bias=False, dtype=torch.bfloat16, device=device) for _ in range(2)]
    for number, layer in enumerate(layers):
        layer.weight.data.copy_(values((ROWS, WIDTH), number).to(device) / 16)
    return nn.Sequential(layers[0], First(), layers[1]).requires_grad_(False)


def adapted(base: nn.Sequential, how: str) -> nn.Sequential:
    model = nn.Sequential(*(Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in base))
    for number, param in enumerate(adapters_of(model)):
        param.data.copy_(values(param.shape, 5, number).to(param.device) / 16)
    return model if how == "plain" else sharded(model, how)


def sharded(model: nn.Sequential, how: str) -> nn.Sequential:
    """In groups that free what they have gathered, as the root's does not."""
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh_of(how))
    return fully_shard(model, mesh=mesh_of(how))


def adapters_of(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def weights_of(model: nn.Module) -> list[Tensor]:
    """This rank's frozen weights."""
    return [local_tensor(param.detach()) for param in model.parameters() if not param.requires_grad]


ELEMENTS = 2 * WIDTH * ROWS
TOLERANCE = 2**14  # bytes: of batches, of what modules keep


def share(how: str, ranks: int | None = None) -> float:
    """How many of the base's elements one of ``ranks`` holds."""
    ranks = ranks or (dist.get_world_size() if dist.is_initialized() else 1)
    return ELEMENTS / (ranks // 2 if how == "hsdp" else ranks)


def live_bytes(at_most: float = math.inf, seconds: float = 10) -> int:
    """The memory of all tensors that Python knows; quantized ones and DTensors have none of their own.

    The threads of a process group hold a collective's tensors for a moment after it: they may take ``seconds`` to
    let go of what is above ``at_most``.
    """
    end = time.monotonic() + seconds
    while (found := _live_bytes()) > at_most and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _live_bytes() -> int:
    gc.collect()
    found = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and not each.is_meta]
    found = [each for each in found if each.layout == torch.strided]  # workers may still hold others' sparse ones
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


def train(model: nn.Module, optimizer: FusedAdamW, steps: int) -> list[Tensor]:
    """Outputs and the adapters' gradients of each step."""
    found = []
    for step in range(steps):
        output = model(values((3, WIDTH), 9, step).bfloat16())
        output.float().square().mean().backward()
        found += [output.detach(), *(local_tensor(p.grad).clone() for p in optimizer.param_groups[0]["params"])]
        optimizer.step()
        optimizer.zero_grad()
    return found


def base_bytes(model: nn.Module, optimizer: FusedAdamW, before: int, promised: float) -> float:
    """What has been allocated and is there still, but for the adapters and their states."""
    adapters = sum(local_tensor(param).numel() * param.element_size() for param in adapters_of(model))
    others = before + adapters + optimizer.state_bytes()
    return live_bytes(others + promised + TOLERANCE) - others


def fine_tune(recipes: list[str], how: str) -> dict[str, tuple[float, list[int]]]:
    """The bytes of each base, and which results differ from those of plain weights with its decoded values."""
    found, before = {}, live_bytes()
    for recipe in recipes:
        model = adapted(quantize_model_(base_model(distributed.device()), RECIPES[recipe]), how)
        codes = [weight.components["data"].clone() for weight in weights_of(model)]
        optimizer = FusedAdamW(adapters_of(model), lr=0.01)
        results = train(model, optimizer, 2)
        assert len(optimizer.state) == 4
        assert all(torch.equal(w.components["data"], c) for w, c in zip(weights_of(model), codes, strict=True))
        plain = quantize_model_(base_model(distributed.device()), RECIPES[recipe], keep_initial=False)
        plain = adapted(dequantize_model_(plain), how)
        expected = train(plain, FusedAdamW(adapters_of(plain), lr=0.01), 2)
        different = [i for i, pair in enumerate(zip(results, expected, strict=True)) if not torch.equal(*pair)]
        del plain, expected, results, codes
        found[recipe] = base_bytes(model, optimizer, before, share(how) * BYTES[recipe]), different
        del model, optimizer
    return found


CASES = [(1, "plain"), long(1, "fsdp"), (2, "fsdp"), (3, "fsdp"), long(4, "fsdp"), (4, "hsdp")]


def check_bytes(recipe: str, found: float, share: float) -> None:
    assert abs(found - BYTES[recipe] * share) < TOLERANCE, f"{recipe}: {found / share} bytes per element"


@pytest.mark.parametrize("ranks, how, on", on_each_device(*CASES))
def test_a_frozen_base_takes_the_bytes_of_its_format(ranks: int, how: str, on: str) -> None:
    """On every rank its share of them, after training, too; adapters train as with its decoded weights."""
    recipes = list(RECIPES) if ranks == 2 else ["current", "tiles", "nvfp4"]
    for result in distributed.run(ranks, fine_tune, recipes, how, on=on, timeout=120):
        for recipe, (found, different) in result.items():
            assert not different, recipe
            check_bytes(recipe, found, share(how, ranks))


# --- a base that is in files --------------------------------------------------------------------------------------


def load_base(folders: dict[str, str], how: str) -> dict[str, tuple[float, dict[str, distributed.Part]]]:
    """Built on the meta device: whole weights are never there, but one at a time in host memory."""
    found = {}
    for recipe, folder in folders.items():
        before = live_bytes()
        model = sharded(quantize_model_(base_model("meta"), RECIPES[recipe]), how)
        model.to_empty(device=distributed.device())
        load_quantized_safetensors(model, folder)
        model(values((3, WIDTH), 1).bfloat16())
        at_most = before + share(how) * BYTES[recipe] + TOLERANCE
        found[recipe] = live_bytes(at_most) - before, parameter_parts(model)
        del model
    return found


@pytest.mark.parametrize("ranks, how, on", on_each_device(long(1, "fsdp"), long(2, "fsdp"), (3, "fsdp")))
def test_a_base_from_files_takes_the_bytes_of_its_format(ranks: int, how: str, on: str, tmp_path: Path) -> None:
    recipes = [recipe for recipe in RECIPES if recipe not in ("delayed", "recent")]  # the files hold no histories
    models = {recipe: quantize_model_(base_model(), RECIPES[recipe]) for recipe in recipes}
    for recipe, model in models.items():
        save_quantized_safetensors(model, tmp_path / recipe)
    folders = {recipe: str(tmp_path / recipe) for recipe in recipes}
    results = distributed.run(ranks, load_base, folders, how, on=on, timeout=120)
    for recipe, model in models.items():
        expected, actual = (
            {name: value for name, value in join_all(parts).items() if "tensor_scale" not in name}
            for parts in ([parameter_parts(model)], [result[recipe][1] for result in results])
        )
        assert_same(actual, expected)
        for result in results:
            check_bytes(recipe, result[recipe][0], share(how, ranks))


@pytest.mark.parametrize("recipe", RECIPES)
def test_adapters_are_merged_into_the_decoded_base(recipe: str) -> None:
    model = adapted(quantize_model_(base_model(), RECIPES[recipe]), "plain")
    optimizer = FusedAdamW(adapters_of(model), lr=0.01)
    train(model, optimizer, 1)
    x = values((3, WIDTH), 1).bfloat16()
    expected = model(x)
    dequantize_model_(model, optimizer)
    assert optimizer.param_groups[0]["params"] == adapters_of(model)
    assert not any(isinstance(param, QuantizedTensor) for param in model.parameters())
    assert torch.equal(model(x), expected)
    train(model, optimizer, 1)
