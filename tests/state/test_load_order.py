"""Remainders are loaded before or after the parameters that they belong to, and joined with no others.

Every load goes into freshly built objects with other values.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import cases
import distributed
from cases import values
from distributed import Part, assert_same, join_all, part, same_bits
from fused_optim.compat import transformer_engine
from fused_optim.sharding.dtensor import local_tensor
from pairwise import pairwise
from peers import FusedAdam

BF16 = torch.bfloat16
SHAPES = {"wide": (7, 256), "odd": (5, 50), "vector": (10,)}
ORDERS = pytest.mark.parametrize("order", ["optimizer first", "model first"])
REMAINDERS = pytest.mark.parametrize("bits", [16, 8])


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(values(shape, dtype, "cpu", seed=10 * seed + i)))


def build(dtype: torch.dtype = BF16, seed: int = 0, cut: str = "rows") -> Model:
    model = Model(dtype, seed).to(distributed.device())
    if dist.is_initialized() and cut == "rows":
        fully_shard(model, mesh=distributed.mesh())
    elif dist.is_initialized():  # as tensor parallelism cuts by columns
        for name, param in list(model.named_parameters()):
            placed = distributed.shard(param.detach(), distributed.mesh(), [Shard(param.dim() - 1)])
            model.register_parameter(name, nn.Parameter(placed))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for i, param in enumerate(model.parameters()):
            grad = values(tuple(param.shape), torch.float32, "cpu", seed=100 * step + i)
            param.grad = distributed.shard_like(grad.to(param.dtype), param)
        optimizer.step()
        optimizer.zero_grad()


def trained(bits: int = 16, cut: str = "rows", **options: Any) -> tuple[Model, FusedAdam]:
    model = build(cut=cut)
    remainders = {"store_param_remainders": True, "param_remainder_bits": bits}
    optimizer = FusedAdam(model.parameters(), lr=0.01, checkpoint_format="native", **remainders, **options)
    train(model, optimizer, range(3))
    return model, optimizer


def load(order: str, model: nn.Module, optimizer: FusedAdam, saved: tuple[nn.Module, FusedAdam]) -> None:
    """By the two libraries' own ``load_state_dict``."""
    parts = [
        lambda: optimizer.load_state_dict(saved[1].state_dict()),
        lambda: model.load_state_dict(saved[0].state_dict()),
    ]
    for load_part in parts if order == "optimizer first" else reversed(parts):
        load_part()


def contents(model: nn.Module, optimizer: FusedAdam) -> dict[str, Part]:
    masters = optimizer.master_state_dict(model)
    return {
        **{f"{name}: parameter": part(param) for name, param in model.named_parameters()},
        **{f"{name}: master": part(master) for name, master in masters.items()},
    }


def same(left: dict[str, Part], right: dict[str, Part]) -> None:
    assert_same({name: values for name, (*_, values) in left.items()}, {n: v for n, (*_, v) in right.items()})


# --- one process ------------------------------------------------------------------------------------------------


@ORDERS
@REMAINDERS
@pytest.mark.parametrize("master", [m for m in cases.MASTERS if m.param_dtype != torch.float16], ids=str)
def test_both_orders_give_the_same_run(master: cases.Master, bits: int, order: str, device: str) -> None:
    """Into every master and precision that holds the parameter's bits, compared with whole masters."""
    saved = trained(bits)
    results = []
    for form in ("native", "unscaled"):
        model = build(master.param_dtype, seed=5).to(device)
        optimizer = FusedAdam(model.parameters(), lr=0.5, exp_avg_dtype=torch.int8, **master.options)
        saved[1].checkpoint_format = form
        load(order if form == "native" else "model first", model, optimizer, saved)
        train(model, optimizer, range(3, 5))
        results.append(contents(model, optimizer))
    if master.param_dtype == torch.float32 and order == "optimizer first":
        for found in results:  # its master is whole in both forms, and the model's checkpoint replaces it
            del found["vector: parameter"], found["vector: master"]
    same(*results)


USES: dict[str, Callable[[nn.Module, FusedAdam], Any]] = {
    "step": lambda model, optimizer: optimizer.step(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "sync": lambda model, optimizer: optimizer.sync_params_from_master(),
    "masters": lambda model, optimizer: optimizer.master_state_dict(model),
    "one master": lambda model, optimizer: optimizer.get_unscaled_state(model.odd, "master_param"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("copied", [None, copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("options", [{"store_param_remainders": True}, {}], ids=["remainders", "masters"])
def test_what_needs_a_master_looks_at_the_parameter(use: str, copied: Any, options: dict[str, Any]) -> None:
    """Also in a copy. A wrong one is found as long as it is there, and the right one is accepted after all."""
    saved, model = trained(), build(seed=5)
    optimizer = FusedAdam(model.parameters(), **options)
    optimizer.load_state_dict(saved[1].state_dict())
    if copied is not None:
        model, optimizer = copied((model, optimizer))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"parameter \d .*shape .*low bits of its master.* Load the model's"):
            USES[use](model, optimizer)
        assert optimizer.param_groups[0]["step"] == 3
        assert_same(dict(model.named_parameters()), before)
    model.load_state_dict(saved[0].state_dict())
    USES[use](model, optimizer)
    if use != "step":
        same(contents(model, optimizer), contents(*saved))


def test_a_single_bit_of_another_parameter_is_found() -> None:
    saved, model = trained(), build(seed=5)
    optimizer = FusedAdam(model.parameters(), store_param_remainders=True)
    load("optimizer first", model, optimizer, saved)
    with torch.no_grad():
        model.odd.view(torch.int16)[3, 7] ^= 1
    with pytest.raises(ValueError, match=r"parameter 1 \(shape \(5, 50\)"):
        optimizer.step()


def test_the_state_dict_may_change_while_they_wait() -> None:
    saved, model = trained(), build(seed=5)
    optimizer = FusedAdam(model.parameters())
    state_dict = copy.deepcopy(saved[1].state_dict())
    optimizer.load_state_dict(state_dict)
    for states in state_dict["state"].values():
        if isinstance(states["master_param"], dict):
            for value in states["master_param"].values():
                value.zero_()
    model.load_state_dict(saved[0].state_dict())
    same(contents(model, optimizer), contents(*saved))


# --- TransformerEngine's int16 remainders, which nothing tells whose they are -----------------------------------------


def theirs(**options: Any) -> tuple[Model, FusedAdam]:
    model = build()
    optimizer = transformer_engine.FusedAdam(
        model.parameters(), lr=0.01, master_weights=True, store_param_remainders=True, **options
    )
    train(model, optimizer, range(3))
    return model, optimizer


@ORDERS
@pytest.mark.parametrize(
    "options", [{"store_param_remainders": True}, {}, {"store_param_remainders": True, "param_remainder_bits": 8}]
)
@pytest.mark.parametrize("face", [FusedAdam, transformer_engine.FusedAdam])
def test_int16_remainders_load_in_both_orders(face: type[FusedAdam], options: dict[str, Any], order: str) -> None:
    saved, model = theirs(), build(seed=5)
    optimizer = face(model.parameters(), **{"master_weights": True, **options})
    assert saved[1].state_dict()["state"][0]["master_param"].dtype == torch.int16
    load(order, model, optimizer, saved)
    found, expected = optimizer.master_state_dict(model), saved[1].master_state_dict(saved[0])
    for name, master in expected.items():
        exact = options.get("param_remainder_bits") != 8
        assert torch.equal(found[name], master) if exact else torch.allclose(found[name], master, rtol=2**-16, atol=0)
    if options == {"store_param_remainders": True}:
        assert all(map(same_bits, model.parameters(), saved[0].parameters()))


def test_uninitialised_int16_remainders_leave_the_parameters_alone() -> None:
    """As Megatron-LM loads them, to have states whose values it sets afterwards."""
    params = [torch.ones(100, dtype=BF16), torch.ones(5000, dtype=BF16)]
    optimizer = FusedAdam(params, store_param_remainders=True)
    dummies = {
        i: {
            "exp_avg": torch.empty(param.shape),
            "exp_avg_sq": torch.empty(param.shape),
            "master_param": torch.full(param.shape, 77, dtype=torch.int16),
        }
        for i, param in enumerate(params)
    }
    groups = [{**group, "step": 4} for group in optimizer.state_dict()["param_groups"]]
    optimizer.load_state_dict({"state": dummies, "param_groups": groups})
    assert all((param == 1).all() for param in params)
    assert all((optimizer.get_unscaled_state(param, "master_param") == 77).all() for param in params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_int16_remainders_need_bfloat16_parameters(dtype: torch.dtype) -> None:
    model = build(dtype, seed=5)
    optimizer = FusedAdam(model.parameters())
    with pytest.raises(TypeError, match=r"parameter 0 .*master_param: int16 remainders belong to a torch.bfloat16"):
        optimizer.load_state_dict(theirs()[1].state_dict())
    assert not optimizer.state


# --- several ranks ----------------------------------------------------------------------------------------------


def save_on_ranks(bits: int, path: str) -> dict[str, Part]:
    model, optimizer = trained(bits)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
    train(model, optimizer, range(3, 5))
    return contents(model, optimizer)


def load_on_ranks(bits: int, path: str) -> dict[str, Part]:
    """``set_state_dict`` loads the optimizer first in some releases of torch, the model in others."""
    model = build(seed=5)
    remainders = {"store_param_remainders": True, "param_remainder_bits": bits}
    optimizer = FusedAdam(model.parameters(), checkpoint_format="native", **remainders)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(model, optimizer, range(3, 5))
    return contents(model, optimizer)


@REMAINDERS
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_set_state_dict_resumes_bit_for_bit(ranks: int, bits: int, tmp_path: Path) -> None:
    expected = join_all(distributed.run(2, save_on_ranks, bits, str(tmp_path)))
    found = distributed.run(ranks, load_on_ranks, bits, str(tmp_path))
    assert_same(join_all(found), expected)


def load_directly(order: str, bits: int, cut: str, options: dict[str, Any]) -> list[dict[str, Part]]:
    """From a plain run into shards, perhaps of columns, whose rows' numbers no rank can compare alone."""
    saved = Model(BF16, 0)
    optimizer = FusedAdam(saved.parameters(), lr=0.01, store_param_remainders=True, param_remainder_bits=bits)
    optimizer.checkpoint_format = "native"
    for step in range(3):
        for i, param in enumerate(saved.parameters()):
            param.grad = values(tuple(param.shape), BF16, "cpu", seed=100 * step + i)
        optimizer.step()
    model = build(seed=5, cut=cut)
    fresh = FusedAdam(model.parameters(), **options)
    if order == "model first":
        copy_model(saved, model)
    fresh.load_state_dict(optimizer.state_dict())
    if order == "optimizer first":
        copy_model(saved, model)
    expected = {f"{n}: master": distributed.shard_like(m, model.get_parameter(n)) for n, m in masters(saved, optimizer)}
    found = contents(model, fresh)
    return [{name: found[name] for name in expected}, {name: part(value) for name, value in expected.items()}]


def masters(model: nn.Module, optimizer: FusedAdam) -> list[tuple[str, Tensor]]:
    return [*optimizer.master_state_dict(model).items()]


def copy_model(source: nn.Module, target: nn.Module) -> None:
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        local_tensor(ours.data).copy_(local_tensor(distributed.shard_like(theirs.detach(), ours)))


@pytest.mark.parametrize(  # not the product: each two
    "ranks, cut, order, options",
    pairwise(
        [1, 2, 3], ["rows", "columns"], ["optimizer first", "model first"], [{"store_param_remainders": True}, {}]
    ),
    ids=str,
)
def test_shards_of_any_cut_load_in_both_orders(ranks: int, cut: str, order: str, options: dict[str, Any]) -> None:
    for results in distributed.run(ranks, load_directly, order, 16, cut, options, timeout=30):
        same(*results)


def wrong_on_one_rank(use: str, wrong: int) -> tuple[str, str]:
    """A rank whose part of the model is another one; all of them call what needs masters."""
    saved, model = trained(), build(seed=5)
    optimizer = FusedAdam(model.parameters(), store_param_remainders=True)
    optimizer.load_state_dict(saved[1].state_dict())
    if dist.get_rank() != wrong:
        copy_model_parts(saved[0], model)
    before = {name: local_tensor(param.detach()).clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(ValueError) as error:
        USES[use](model, optimizer)
    assert_same({name: local_tensor(param.detach()) for name, param in model.named_parameters()}, before)
    assert optimizer.param_groups[0]["step"] == 3
    copy_model_parts(saved[0], model)
    assert use == "one master" or not optimizer.store.resolve_pending()
    same(contents(model, optimizer), contents(*saved))
    train(model, optimizer, range(3, 4))
    return type(error.value).__name__, str(error.value)


def copy_model_parts(source: nn.Module, target: nn.Module) -> None:
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        local_tensor(ours.data).copy_(local_tensor(theirs.data))


@pytest.mark.parametrize("use", ["step", "state_dict", "sync", "masters"])
@pytest.mark.parametrize("ranks, wrong", [(1, 0), (2, 1), (3, 0)])
def test_a_wrong_parameter_is_refused_on_all_ranks(use: str, ranks: int, wrong: int) -> None:
    errors = distributed.run(ranks, wrong_on_one_rank, use, wrong, timeout=20)
    assert all("low bits of its master" in text for _, text in errors), errors
    assert [kind for kind, _ in errors].count("ValueError") == 1 and "parameter 0 " in errors[wrong][1]


def read_on_one_rank() -> None:
    """No other rank has to take part, and none waits for this one afterwards."""
    saved, model = trained(), build(seed=5)
    optimizer = FusedAdam(model.parameters(), store_param_remainders=False)
    optimizer.load_state_dict(saved[1].state_dict())
    copy_model_parts(saved[0], model)
    if dist.get_rank() == 0:
        expected = local_tensor(saved[1].store.master(saved[0].wide))
        assert torch.equal(optimizer.get_unscaled_state(model.wide, "master_param"), expected)
    train(model, optimizer, range(3, 4))


def test_one_rank_may_read_a_master() -> None:
    distributed.run(2, read_on_one_rank, timeout=20)


def count_collectives() -> list[int]:
    """Of steps while nothing waits."""
    saved, model = trained(), build(seed=5)
    optimizer = FusedAdam(model.parameters(), store_param_remainders=True)
    train(model, optimizer, range(1))  # the first step of an optimizer asks, too
    optimizer.load_state_dict(saved[1].state_dict())
    copy_model_parts(saved[0], model)
    counts = []
    for step in range(3, 6):
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            train(model, optimizer, range(step, step + 1))
        counts.append(all_reduce.call_count)
    return counts


def test_only_the_step_after_a_load_asks_the_others() -> None:
    assert distributed.run(2, count_collectives) == [[1, 0, 0]] * 2
