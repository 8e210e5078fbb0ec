"""FSDP2 and tensor parallelism with quantized weights: what is gathered, in how many bytes, and what is computed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import distributed
from distributed import Part, assert_same, join_all, long, on_each_device, part, shard_like
from fused_optim import FusedAdam
from fused_optim.quantized import (
    Float8BlockScaling,
    QuantizedTensor,
    finish_initialization,
    quantize_model_,
)
from fused_optim.sharding.dtensor import local_tensor
from pairwise import each_once
from quantized_cases import (
    RECIPES,
    Run,
    mesh_of,
    parameter_parts,
    perceptron,
    plain_model,
    tensor_parallel,
    values,
)
from recipe_checks import WAYS, check_gathered, check_training, sharded

# --- what is gathered -------------------------------------------------------------------------------------------


FSDP = [(1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp"), (4, "hsdp")]
FSDP_ON_GPUS = [(1, "fsdp"), (2, "fsdp"), (2, "hsdp")]


@pytest.mark.parametrize("ranks, how, on", on_each_device(*FSDP, nccl=FSDP_ON_GPUS))
def test_gathered_weights_are_the_shards_bit_for_bit(ranks: int, how: str, on: str) -> None:
    check_gathered(list(RECIPES), ranks, how, on)


def memory_of_gathered(recipes: list[str]) -> dict[str, list[int]]:
    """Bytes that a gathered weight's codes and scales take: gathered, given back, gathered again."""
    found = {}
    for recipe in recipes:
        model = sharded(quantize_model_(plain_model(recipe), RECIPES[recipe]), "resharded", "fsdp")
        found[recipe] = []
        for change in (model.uneven.unshard, model.uneven.reshard, model.uneven.unshard):
            change()
            if change == model.uneven.unshard:
                weight = model.uneven.weight
            parts = [weight.components[name] for name in weight.recipe.of_elements]
            found[recipe].append(sum(part.untyped_storage().size() for part in parts))
    return found


@pytest.mark.parametrize("ranks, on", on_each_device((1,), (2,)))
def test_memory_of_gathered_weights_is_given_back(ranks: int, on: str) -> None:
    for result in distributed.run(ranks, memory_of_gathered, list(RECIPES), on=on):
        for recipe in RECIPES:
            gathered, freed, again = result[recipe]
            assert gathered == again > 0 and freed == 0, recipe


class CountGathered(TorchDispatchMode):
    """Counts the bytes that this rank gives to all-gathers."""

    sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.sent += args[1].nbytes
        return func(*args, **(kwargs or {}))


def count_bytes(recipes: list[str]) -> dict[str, float]:
    """Bytes that are gathered per element of a weight."""
    found = {}
    for recipe in recipes:
        layer = nn.Linear(256, 1024, bias=False, dtype=torch.bfloat16, device=distributed.device())
        if recipe != "plain":
            quantize_model_(layer, RECIPES[recipe])
        fully_shard(layer, mesh=distributed.mesh())
        with CountGathered() as counter:
            layer(torch.ones(1, 256, dtype=torch.bfloat16, device=distributed.device()))
        found[recipe] = counter.sent * dist.get_world_size() / (256 * 1024)
    return found


@pytest.mark.parametrize("ranks, on", on_each_device((2,), long(4)))
def test_bytes_that_are_gathered(ranks: int, on: str) -> None:
    for counted in distributed.run(ranks, count_bytes, ["plain", *RECIPES], on=on):
        assert counted["plain"] == 2
        expected = {"mxfp8": 33 / 32, "mxfp8up": 33 / 32, "rows": 132 / 128, "nvfp4": 9 / 16}
        for recipe in RECIPES:
            assert 0 <= counted[recipe] - expected.get(recipe, 1.0) < 0.001, recipe


# --- what is computed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks, number, how, on",
    on_each_device(
        *[(1, 0, "fsdp"), (2, 1, "fsdp"), (3, 2, "fsdp"), (2, 3, "fsdp"), long(4, 3, "fsdp"), (4, 1, "hsdp")],
        nccl=[(ranks, number, how) for ranks, how in FSDP_ON_GPUS for number in range(len(WAYS))],
    ),
)
def test_losses_and_gradients_are_those_of_the_decoded_weights(ranks: int, number: int, how: str, on: str) -> None:
    ways = list(WAYS)  # each recipe meets each way on some number of ranks
    cases = [(recipe, ways[(index + number) % len(ways)]) for index, recipe in enumerate(RECIPES)]
    check_training(cases, ranks, how, on)


@pytest.mark.parametrize("ranks, on", on_each_device((3,), nccl=[(2,)]))
def test_cut_tiles_are_computed_with_and_trained_each_way(ranks: int, on: str) -> None:
    check_training([("tiles", way) for way in WAYS], ranks, "fsdp", on)


def compare_tensor_parallel(recipes: list[str]) -> dict[str, list[float]]:
    """How far outputs and gradients of quantized weights are from those of the plain decoded ones."""
    found = {}
    for recipe in recipes:
        run = Run(recipe, "tp", build=perceptron)
        plain = tensor_parallel(perceptron(recipe))
        for name, param in plain.named_parameters():  # cut as the quantized ones are before FSDP2
            whole = quantize_model_(perceptron(recipe), RECIPES[recipe]).get_parameter(name).dequantize()
            local_tensor(param.detach()).copy_(local_tensor(shard_like(whole, param)))
        fully_shard(plain, mesh=mesh_of("tp")["dp"])
        x = values((3, run.model.up.in_features), 9, mesh_of("tp")["dp"].get_local_rank()).bfloat16()
        outputs = []
        for model in (run.model, plain):
            outputs.append(model(x))
            outputs[-1].float().square().mean().backward()
        pairs = [outputs, *([run.model.get_parameter(n).grad, p.grad] for n, p in plain.named_parameters())]
        found[recipe] = [float((local_tensor(a) - local_tensor(b)).abs().sum()) for a, b in pairs]
    return found


@pytest.mark.parametrize("ranks, on", on_each_device((4,), nccl=[(2,)]))
def test_tensor_parallel_weights_compute_as_decoded_ones(ranks: int, on: str) -> None:
    for result in distributed.run(ranks, compare_tensor_parallel, list(RECIPES), on=on):
        assert list(result) == list(RECIPES)
        for recipe, differences in result.items():
            assert differences == [0.0, 0.0, 0.0], recipe


# --- what cannot be sharded -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WholeTiles(Float8BlockScaling):
    """A recipe whose blocks go over several rows, and which does not say how ranks could share them."""

    shares_blocks: ClassVar[bool] = False


def refuse() -> list[str]:
    device, errors = distributed.device(), []
    model = quantize_model_(nn.Sequential(nn.Linear(8, 384, device=device)), WholeTiles())
    with pytest.raises(ValueError) as error:
        fully_shard(model, mesh=distributed.mesh())
    errors.append(str(error.value))
    sharded_already = fully_shard(nn.Linear(256, 128, device=device), mesh=distributed.mesh())
    with pytest.raises(ValueError) as error:
        quantize_model_(sharded_already, RECIPES["mxfp8"])
    errors.append(str(error.value))
    by_columns = quantize_model_(nn.Sequential(nn.Linear(256, 128, device=device)), RECIPES["mxfp8"])
    with pytest.raises(RuntimeError) as error:
        fully_shard(by_columns, mesh=distributed.mesh(), shard_placement_fn=lambda param: Shard(param.dim() - 1))
    errors.append(str(error.value))
    weight = quantize_model_(nn.Linear(256, 128, device=device), RECIPES["mxfp8"]).weight.detach()
    with pytest.raises(RuntimeError) as error:
        dist.all_reduce(weight)
    errors.append(str(error.value))
    return errors


@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_what_cannot_be_sharded_is_named_on_every_rank(ranks: int, on: str) -> None:
    for cut, order, columns, reduced in distributed.run(ranks, refuse, on=on):
        assert cut.startswith("0.weight: WholeTiles cannot be cut to rows 0 to 192 of 384: its blocks have 128 rows")
        assert cut.endswith("It can be cut on 1, 3 ranks")
        assert "after fully_shard: the order is tensor parallelism, quantization, FSDP" in order
        assert columns == "0.weight: FSDP2 can shard quantized weights by rows only: placement Shard(0)"
        assert "c10d.allreduce_.default takes no quantized weights" in reduced


def start_replicas(recipe: str) -> list[Tensor]:
    """DistributedDataParallel takes over the first rank's weights."""
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    model[0].weight.data = values((8, 64), dist.get_rank())
    quantize_model_(model, RECIPES[recipe])
    nn.parallel.DistributedDataParallel(model)
    return [model[0].weight.values().cpu(), model[0].weight.initial_values().cpu()]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_replicas_start_from_the_first_ranks_bytes(recipe: str, ranks: int, on: str) -> None:
    first, *others = distributed.run(ranks, start_replicas, recipe, on=on)
    assert torch.equal(first[1], values((8, 64), 0))
    for other in others:
        assert all(map(torch.equal, first, other))


def who_keeps_initial_values() -> list[bool]:
    run = Run("current")
    state = run.model._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    kept = [param._sharded_param_data for group in groups for param in group.fsdp_params]
    kept = [data for data in kept if isinstance(data, QuantizedTensor)]
    before = any(data.has_initial for data in kept)
    run.optimizer.initialize_state()
    return [before, any(data.has_initial for data in kept)]


@pytest.mark.parametrize("ranks, on", on_each_device((2,)))
def test_initial_values_are_freed_in_what_fsdp_keeps(ranks: int, on: str) -> None:
    assert distributed.run(ranks, who_keeps_initial_values, on=on) == [[True, False]] * ranks


# --- initial values ---------------------------------------------------------------------------------------------


def is_quantized(param: Tensor) -> bool:
    return isinstance(local_tensor(param), QuantizedTensor)


def masters_of(model: nn.Module) -> dict[str, Part]:
    """What the optimizer starts from; the initial values are freed with that."""
    optimizer = FusedAdam(model.parameters())
    masters = {f"{name}: master": part(value) for name, value in optimizer.master_state_dict(model).items()}
    optimizer.initialize_state()
    assert not any(local_tensor(param).has_initial for param in model.parameters() if is_quantized(param))
    return masters


# --- tied weights and state dicts -------------------------------------------------------------------------------


def train_tied(recipe: str) -> list[Any]:
    """Two models, quantized and plain with the decoded weight; the embedding and the head have one weight."""
    models = []
    for _ in range(2):
        model = nn.Sequential(nn.Embedding(7, 64), nn.Linear(64, 7, bias=False))
        model[0].weight.data = values((7, 64), 1)
        model[1].weight = model[0].weight
        models.append(model)
    quantize_model_(models[0], RECIPES[recipe], lambda module, _: isinstance(module, nn.Linear))
    assert isinstance(models[0][0].weight, QuantizedTensor)
    models[1][0].weight.data.copy_(models[0][0].weight.dequantize())
    x, found = torch.tensor([[0, 3, 3], [6, 1, dist.get_rank()]], device=distributed.device()), []
    for model in models:
        fully_shard(model, mesh=distributed.mesh())
        assert model[0].weight is model[1].weight
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        found += [loss.item(), local_tensor(model[0].weight.grad).cpu()]
    return found


@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
@pytest.mark.parametrize("ranks, on", on_each_device((3,), nccl=[(2,)]))
def test_tied_weights_train_as_plain_ones(recipe: str, ranks: int, on: str) -> None:
    for loss, grad, expected_loss, expected_grad in distributed.run(ranks, train_tied, recipe, on=on):
        assert loss == expected_loss and torch.equal(grad, expected_grad)


FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def load_plain(recipes: list[str], how: str, way: str, forward_first: bool) -> dict[str, dict[str, Part]]:
    """A plain full state dict, loaded into a sharded quantized model with other values."""
    found = {}
    for recipe in recipes:
        model = plain_model(recipe, seed=1)
        if way == "meta":
            model.to("meta")
        fully_shard(quantize_model_(model, RECIPES[recipe]), mesh=mesh_of(how))
        x = values((2, 144), dist.get_rank()).bfloat16()
        if forward_first:
            model(x).sum().backward()
            masters_of(model)
        state = plain_model(recipe).state_dict()
        if way in ("broadcast", "meta"):  # torch assigns what it loads into weights on the meta device
            set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=BROADCAST)
        elif way == "full":
            set_model_state_dict(model, state, options=FULL)
        else:
            sharded = {name: shard_like(value, model.get_parameter(name)) for name, value in state.items()}
            model.load_state_dict(sharded, assign=way == "assign")
        if RECIPES[recipe].scales_whole_tensor:
            with pytest.raises(RuntimeError, match="finish_initialization"):
                for layer in (model.even, model.uneven):
                    local_tensor(layer.weight).fsdp_pre_all_gather(mesh_of(how))
        finish_initialization(model)
        model(x).sum().backward()
        found[recipe] = parameter_parts(model)
        assert all(is_quantized(param) for name, param in model.named_parameters() if "weight" in name)
    return found


@pytest.mark.parametrize(
    "ranks, how, forward_first, way, on",
    on_each_device(
        *[(3, "fsdp", True, way) for way in ("full", "broadcast", "sharded", "assign", "meta")],
        *[(2, "fsdp", False, "broadcast"), (4, "hsdp", False, "broadcast")],
        # Not "meta": where a group has a CPU backend, too, torch assigns what it broadcasts there.
        nccl=[(2, "fsdp", way != "full", way) for way in ("full", "broadcast", "sharded", "assign")],
    ),
)
def test_plain_state_dicts_are_quantized_as_whole_weights(
    ranks: int, how: str, forward_first: bool, way: str, on: str
) -> None:
    results = distributed.run(ranks, load_plain, list(RECIPES), how, way, forward_first and way != "meta", on=on)
    for recipe in RECIPES:
        expected = parameter_parts(quantize_model_(plain_model(recipe), RECIPES[recipe]))
        assert_same(join_all([result[recipe] for result in results]), join_all([expected]))


def load_quantized(recipes: list[str], assign: bool, forward_first: bool) -> dict[str, dict[str, Part]]:
    """The sharded state dict of another model."""
    found = {}
    for recipe in recipes:
        source, model = (Run(recipe, fresh=fresh).model for fresh in (False, True))
        x = values((2, 144), dist.get_rank()).bfloat16()
        if forward_first:
            model(x).sum().backward()
        model.load_state_dict(source.state_dict(), assign=assign)
        model(x).sum().backward()
        found[recipe] = parameter_parts(model)
        assert all(param.grad is not None for name, param in model.named_parameters() if name.startswith("uneven"))
    return found


BOTH = [False, True]


@pytest.mark.parametrize(
    "ranks, assign, forward_first, on",
    on_each_device(*each_once(product([3], BOTH, BOTH)), nccl=[*product([2], BOTH, BOTH)]),
)
def test_sharded_state_dicts_load_bytes(ranks: int, assign: bool, forward_first: bool, on: str) -> None:
    results = distributed.run(ranks, load_quantized, list(RECIPES), assign, forward_first, on=on)
    for recipe in RECIPES:
        expected = parameter_parts(quantize_model_(plain_model(recipe), RECIPES[recipe]))
        assert_same(join_all([result[recipe] for result in results]), join_all([expected]))


def read_full(recipes: list[str], how: str) -> dict[str, dict[str, Tensor]]:
    """Full state dicts of sharded models. Full tensors, and loads: test_quantized_full_tensors.py."""
    return {recipe: get_model_state_dict(Run(recipe, how).model, options=FULL) for recipe in recipes}


@pytest.mark.parametrize("ranks, how, on", on_each_device((1, "fsdp"), (3, "fsdp"), (4, "hsdp"), nccl=FSDP_ON_GPUS))
def test_full_state_dicts_are_plain_decoded_values(ranks: int, how: str, on: str) -> None:
    results = distributed.run(ranks, read_full, list(RECIPES), how, on=on)
    for recipe in RECIPES:
        model = quantize_model_(plain_model(recipe), RECIPES[recipe])
        expected = {name: param.detach() for name, param in model.named_parameters()}
        expected |= {name: value.dequantize() for name, value in expected.items() if is_quantized(value)}
        for rank, state in enumerate(result[recipe] for result in results):
            assert {type(value) for value in state.values()} <= {Tensor}
            assert_same(state, expected if rank == 0 else {})
