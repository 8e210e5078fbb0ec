"""Initial values of quantized weights: every way to make them, what masters start from, when they are freed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import distributed
from distributed import Part, assert_same, join_all, on_each_device, part
from fused_optim import FusedAdam
from fused_optim.quantized import (
    QuantizedTensor,
    discard_high_precision_init,
    finish_initialization,
    quantize_model_,
    quantized_model_init,
)
from fused_optim.quantized.tensor import INITIAL
from fused_optim.sharding.dtensor import local_tensor
from pairwise import each_once
from quantized_cases import RECIPES, component_parts, has_tiles, quantized_model, same_components, values
from recipe_checks import sharded
from weight_cases import MATRIX, Weight, check_values, pair, quantized, shapes_of

EACH = pytest.mark.parametrize("recipe", RECIPES)

# --- initialisers -----------------------------------------------------------------------------------------------


def normalized(weight: Tensor) -> None:
    with torch.no_grad():
        weight.normal_()
        weight.div_(weight.norm())


OF_ELEMENTS = ("sparse_", "dirac_")  # which write columns and single elements
INITIALISERS: dict[str, Callable[[Tensor], Any]] = {
    "normalized": normalized,
    "constant_": lambda weight: nn.init.constant_(weight, 3.0),
    "trunc_normal_ of tails": lambda weight: nn.init.trunc_normal_(weight, a=1.5, b=3.0),
    **{
        name: getattr(nn.init, name)
        for name in dir(nn.init)
        if name.endswith("_") and not name.startswith("_") and name not in ("constant_", *OF_ELEMENTS)
    },
}
OF_MATRICES = ("eye_",)
# torch can do none of the others to plain weights that are sharded.
OF_SHARDS = [name for name in INITIALISERS if name not in OF_MATRICES]


def initialised(name: str, weight: Tensor) -> Tensor:
    torch.manual_seed(5)
    INITIALISERS[name](weight)
    return weight


def test_initialisers_of_single_elements_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"weight: aten.* cannot change a quantized weight in place"):
        nn.init.sparse_(pair("mxfp8")[0].weight, 0.5)
    with pytest.raises(NotImplementedError, match=r"weight: aten.* cannot change a quantized weight in place"):
        nn.init.dirac_(pair("mxfp8", (4, 8, 64))[0].weight)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_initialisers_do_to_quantized_weights_what_they_do_to_plain_ones(
    recipe: str, dtype: torch.dtype, device: str
) -> None:
    for name in INITIALISERS:
        for shape in shapes_of(recipe):
            if len(shape) > 2 and name in OF_MATRICES:
                continue
            if name == "orthogonal_" and dtype == torch.bfloat16:  # torch decomposes only matrices of FP32
                continue
            model = quantized(Weight(shape, dtype).to("meta"), recipe)
            initialised(name, model.weight)  # which does nothing on the meta device
            model.to_empty(device=device)
            initialised(name, model.weight)
            check_values(model, initialised(name, torch.empty(shape, dtype=dtype, device=device)).float(), recipe)


class Linears(nn.Module):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.first = nn.Linear(64, 1535 if has_tiles(recipe) else 67, bias=False)
        self.frozen = nn.Linear(64, 1536 if has_tiles(recipe) else 72, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.frozen(x)], 1)


def initialise_sharded(recipes: list[str], name: str) -> dict[str, dict[str, Any]]:
    """What initialisers make of sharded quantized models, and of plain ones."""
    found: dict[str, dict[str, Any]] = {}
    for recipe in recipes:
        with torch.device("meta"):
            plain = Linears(recipe)
            with quantized_model_init(RECIPES[recipe]):
                model = Linears(recipe)
        for each in (model, plain):
            fully_shard(each, mesh=distributed.mesh())
            each.to_empty(device=distributed.device())
            for param in each.parameters():
                initialised(name, param)
        finish_initialization(model)
        assert not local_tensor(model.frozen.weight).has_initial
        optimizer = FusedAdam(model.parameters())
        masters = {f"{key}: master": part(value) for key, value in optimizer.master_state_dict(model).items()}
        expected = {f"{key}: master": part(param.float()) for key, param in plain.named_parameters()}
        masters.pop("frozen.weight: master"), expected.pop("frozen.weight: master")
        found[recipe] = {"masters": masters, "expected": expected}
        codes, whole = model.first.weight.full_tensor(), plain.first.weight.full_tensor()
        found[recipe]["same"] = torch.equal(codes, QuantizedTensor.from_values(whole, RECIPES[recipe]).dequantize())
    return found


@pytest.mark.filterwarnings("ignore:DTensor random operators")
@pytest.mark.parametrize(
    "ranks, name, on", on_each_device(*[(1 + index % 4, name) for index, name in enumerate(OF_SHARDS)], nccl=[])
)
def test_initialisers_do_to_shards_what_they_do_to_plain_ones(ranks: int, name: str, on: str) -> None:
    results = distributed.run(ranks, initialise_sharded, list(RECIPES), name, on=on)
    for recipe in RECIPES:
        masters, expected = (join_all([result[recipe][kind] for result in results]) for kind in ("masters", "expected"))
        assert_same(masters, expected)
        assert all(result[recipe]["same"] for result in results), recipe


# --- values that are loaded -------------------------------------------------------------------------------------

BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FULL = StateDictOptions(full_state_dict=True)


def load_into_meta(model: nn.Module, state: dict[str, Tensor]) -> None:
    """torch assigns what it loads into weights on the meta device."""
    set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=BROADCAST)


def assign_shards(model: nn.Module, state: dict[str, Tensor]) -> None:
    shards = {name: distributed.shard(value, distributed.mesh(), [Shard(0)]) for name, value in state.items()}
    model.load_state_dict(shards, assign=True)


def load_into_empty(model: nn.Module, state: dict[str, Tensor]) -> None:
    model.to_empty(device=distributed.device())
    set_model_state_dict(model, state, options=FULL)


LOADS = {"broadcast": load_into_meta, "assigned": assign_shards, "empty": load_into_empty}


def load_sharded(recipes: list[str], way: str, dtype: torch.dtype) -> dict[str, dict[str, Part]]:
    """The masters of models that were made of plain state dicts on the meta device."""
    found = {}
    for recipe in recipes:
        with torch.device("meta"):
            model = Linears(recipe).bfloat16()
        quantize_model_(model, RECIPES[recipe])
        fully_shard(model, mesh=distributed.mesh())
        state = {
            name: values(param.shape, 3, index).to(dtype)
            for index, (name, param) in enumerate(model.named_parameters())
        }
        LOADS[way](model, state)
        finish_initialization(model)
        assert not local_tensor(model.frozen.weight).has_initial
        optimizer = FusedAdam(model.parameters())
        masters = optimizer.master_state_dict(model)
        found[recipe] = {"master": part(masters["first.weight"])}
        model(torch.ones(2, 64, dtype=torch.bfloat16, device=distributed.device())).sum().backward()
        optimizer.initialize_state()  # FSDP2 has replaced the shards by then
        found[recipe]["after a pass"] = part(optimizer.master_state_dict(model)["first.weight"])
        assert not any(local_tensor(param).has_initial for param in model.parameters())
        found[recipe] |= {f"first: {name}": value for name, value in component_parts(model.first.weight).items()}
    return found


LOADED = [*((ranks, "broadcast") for ranks in (1, 2, 3, 4)), (2, "assigned"), (3, "assigned"), (3, "empty")]
# Not "broadcast": where a group has a CPU backend, too, torch assigns what it broadcasts there.
LOADED_ON_GPUS = [(1, "assigned"), (2, "assigned"), (2, "empty")]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    "ranks, way, dtype, on",
    on_each_device(
        *each_once((*case, dtype) for case, dtype in product(LOADED, DTYPES)),
        nccl=[(*case, dtype) for case, dtype in product(LOADED_ON_GPUS, DTYPES)],
    ),
    ids=str,
)
def test_masters_are_the_loaded_values(ranks: int, way: str, dtype: torch.dtype, on: str) -> None:
    results = distributed.run(ranks, load_sharded, list(RECIPES), way, dtype, on=on)
    for recipe in RECIPES:
        found = join_all([result[recipe] for result in results])
        rows = Linears(recipe).first.out_features
        loaded = values((rows, 64), 3, 0).to(dtype)
        if way == "empty":  # copied into weights that are BF16
            loaded = loaded.bfloat16()
        assert torch.equal(found["master"], loaded.float()) and torch.equal(found["after a pass"], loaded.float())
        expected = QuantizedTensor.from_values(loaded, RECIPES[recipe])
        for component in RECIPES[recipe].components:
            assert torch.equal(found[f"first: {component.name}"], expected.components[component.name]), recipe


@EACH
def test_masters_are_the_assigned_values(recipe: str) -> None:
    given = {
        **{str(dtype): values(MATRIX, 2).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)},
        "transposed": values(MATRIX[::-1], 2).t(),
        "of another recipe": pair("nvfp4" if recipe != "nvfp4" else "mxfp8")[0].weight.detach(),
        "bytes": QuantizedTensor.from_values(values(MATRIX, 4), RECIPES[recipe]),
    }
    for device in ("meta", "cpu"):
        for name, value in given.items():
            model = quantized(Weight(MATRIX).to(device), recipe)
            before = value.clone() if type(value) is Tensor else value.initial_values().clone()
            model.load_state_dict({"weight": value}, assign=True)
            expected = before.float()
            assert type(model.weight) is QuantizedTensor and model.weight.requires_grad
            assert model.weight.has_initial == (name != "bytes")
            optimizer = FusedAdam(model.parameters())
            optimizer.initialize_state()
            assert torch.equal(optimizer.state[model.weight]["master_param"], expected), (device, name)
            made = value if name == "bytes" else QuantizedTensor.from_values(expected, RECIPES[recipe])
            assert torch.equal(model.weight.values(), made.values())
    for discarded in (quantized(Weight(MATRIX), recipe, keep_initial=False), quantized(frozen(Weight(MATRIX)), recipe)):
        discarded.load_state_dict({"weight": values(MATRIX, 2)}, assign=True)
        assert not discarded.weight.has_initial


@EACH
def test_masters_go_on_from_values_that_are_loaded_later(recipe: str) -> None:
    """From the rows themselves, not from what was quantized of them. Whole weights: test_followed_weights.py."""
    model, plain = pair(recipe)
    optimizer = FusedAdam(model.parameters(), lr=0.0)
    model.weight.grad = torch.ones(MATRIX)
    optimizer.step()
    master = optimizer.state[model.weight]["master_param"]
    new = values(MATRIX, 9)
    for weight in (model.weight.detach(), plain):
        weight[:128].copy_(new[:128])
    model.weight.grad = torch.zeros(MATRIX)
    if model.weight.is_pending:  # which is not forgotten for it
        with pytest.raises(RuntimeError, match="finish_initialization"):
            optimizer.step()
    finish_initialization(model)
    optimizer.step()
    assert torch.equal(master, plain)
    assert not model.weight.has_initial


# --- when they are freed ----------------------------------------------------------------------------------------


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


USES: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda weight: nn.functional.linear(torch.ones(1, 256), weight),
    "matmul": lambda weight: torch.ones(1, 128) @ weight,
    "embedding": lambda weight: nn.functional.embedding(torch.tensor([1]), weight),
    "view": lambda weight: weight.view(2, 64, 256)[1].sum(),
    "autocast": lambda weight: nn.functional.linear(torch.ones(1, 256, dtype=torch.bfloat16), weight),
}


@EACH
@pytest.mark.parametrize("use", USES)
def test_frozen_weights_free_initial_values_when_they_are_used(recipe: str, use: str) -> None:
    for grad_mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        model, _ = pair(recipe)
        size = model.weight.numel()
        before = model.weight.stored_bytes
        with grad_mode(), torch.autocast("cpu", torch.bfloat16, enabled=use == "autocast"):
            USES[use](model.weight)
            assert model.weight.has_initial  # an optimizer may come yet
            frozen(model)
            USES[use](model.weight)
        assert not model.weight.has_initial and model.weight.stored_bytes == before - 4 * size


@EACH
def test_frozen_weights_free_initial_values_when_they_are_finished(recipe: str) -> None:
    model, _ = pair(recipe)
    frozen(model)
    nn.init.normal_(model.weight)
    new = model.weight.initial_values().clone()
    assert torch.equal(USES["linear"](model.weight), torch.ones(1, 256) @ new.t()) and model.weight.is_pending
    finish_initialization(model)
    assert not model.weight.has_initial
    assert same_components(model.weight, QuantizedTensor.from_values(new, RECIPES[recipe]))


@EACH
def test_initial_values_are_freed_by_hand(recipe: str) -> None:
    model, _ = pair(recipe)
    nn.init.normal_(model.weight)
    with pytest.raises(RuntimeError, match=r"weight: .*finish_initialization"):
        discard_high_precision_init(model)
    finish_initialization(model)
    discard_high_precision_init(nn.Sequential(nn.Linear(2, 2), model))
    assert not model.weight.has_initial
    expected = sum(part.nbytes for part in model.weight.components.values())
    assert model.weight.stored_bytes == expected < 1.1 * model.weight.numel()


def free_shards(recipes: list[str], how: str) -> dict[str, list[bool]]:
    """Whether shards have initial values: used while trained and while frozen, freed by hand, held though frozen."""
    found = {}
    for recipe in recipes:
        with_rows = []
        for by_hand in (False, True):
            model = sharded(quantized_model(recipe), "resharded", how)
            local = local_tensor(model.uneven.weight.detach())
            x = values((2, 144), 1).bfloat16()
            has = [local.has_initial]
            if by_hand:
                discard_high_precision_init(model)
            else:
                model(x).sum().backward()
                has.append(local_tensor(model.uneven.weight).has_initial)
                model.requires_grad_(False)
                model(x)
            local = local_tensor(model.uneven.weight)
            has += [local.has_initial, INITIAL in local.whole.components]
            with_rows.append(has)
        model = sharded(quantized_model(recipe), "resharded", how)
        optimizer = FusedAdam(model.parameters())  # whose parameters may be frozen for a while
        model.requires_grad_(False)
        model(x)
        has = [local_tensor(model.uneven.weight).has_initial]
        model.requires_grad_(True)
        optimizer.initialize_state()
        with_rows.append([*has, local_tensor(model.uneven.weight).has_initial])
        found[recipe] = [flag for has in with_rows for flag in has]
    return found


@pytest.mark.parametrize(
    "ranks, how, on",
    on_each_device((1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "hsdp"), nccl=[(1, "fsdp"), (2, "fsdp")]),
)
def test_shards_free_initial_values_as_whole_weights_do(ranks: int, how: str, on: str) -> None:
    for result in distributed.run(ranks, free_shards, list(RECIPES), how, on=on):
        for recipe in RECIPES:
            assert result[recipe] == [True, True, False, False, True, False, False, True, False], recipe
