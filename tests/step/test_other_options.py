"""Ranks that were built with other options, param groups or parameters raise instead of waiting for each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import distributed
from distributed import mesh, shard
from fused_optim import FusedAdamW, FusedLion, FusedMuon, enable_gradient_release
from fused_optim.quantized import Float8CurrentScaling, quantize_model_
from fused_optim.state import host_states
from fused_optim.step import agreement
from fused_optim.step.skip import Skips
from pairwise import pairwise

Named = list[tuple[str, nn.Parameter]]
Groups = Callable[[Named], Any]
SHAPES = [(8, 64), (8, 64), (16, 32)]


def is_other() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def made(shapes: list[tuple[int, ...]] = SHAPES) -> Named:
    torch.manual_seed(0)
    wholes = [torch.randn(shape) for shape in shapes]
    return [(f"layers.{i}", nn.Parameter(shard(whole, mesh(), [Shard(0)]))) for i, whole in enumerate(wholes)]


def give(named: Named, but: str = "", seed: int = 1) -> None:
    torch.manual_seed(seed)
    for name, param in named:
        whole = torch.randn(param.shape)
        grad = shard(whole, param.device_mesh, param.placements) if isinstance(param, DTensor) else whole
        param.grad = None if name == but else grad


def raised_by(optimizer: Any, named: Named) -> str:
    """The error's text. No parameter has been changed where there is one."""
    before = [param.to_local().clone() for _, param in named]
    try:
        optimizer.step()
    except Exception as error:
        assert all(map(torch.equal, before, [param.to_local() for _, param in named]))
        assert not optimizer.state
        return f"{type(error).__name__}: {error}"
    return ""


PREFIX = "RuntimeError: ranks have other options, param groups or parameters than others: "
HINT = "; give all ranks of a mesh the same ones, in one order"


def check_raised(texts: list[str], *expected: str) -> None:
    for text in texts:
        assert text.startswith(PREFIX) and text.endswith(HINT), text
        for each in expected:
            assert each in text, text


# --- options ----------------------------------------------------------------------------------------------------------


def with_other_options(usual: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    named = made()
    with mock.patch.object(host_states, "OFFLOADED_FROM", ("cuda", "cpu")):
        optimizer = FusedMuon([{"params": named, **(other if is_other() else usual)}], lr=0.1)
        give(named)
        return raised_by(optimizer, named)


def offloaded(fractions: tuple[float, float]) -> str:
    named = made()
    fraction = fractions[is_other()]
    with mock.patch.object(host_states, "OFFLOADED_FROM", ("cuda", "cpu")):
        optimizer = FusedMuon(named, lr=0.1, offload_states=True, offload_fraction=fraction)
        give(named)
        return raised_by(optimizer, named)


POLAR = {"ns_coefficients": "polar_express"}
# What param groups of the last rank have, and of the others; in messages.
OPTIONS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"ns_steps": 6}, {}, "ns_steps: 5", "6"),
    (POLAR, {}, "ns_coefficients: (3.4445, -4.775, 2.0315)", "'polar_express'"),
    ({"ns_dtype": "float32"}, {}, "ns_dtype: 'bfloat16'", "'float32'"),
    ({"adjust_lr_fn": "match_rms_adamw"}, {}, "adjust_lr_fn: None", "'match_rms_adamw'"),
    ({"eps": 1e-3}, {}, "eps: 1e-07", "0.001"),
    ({"momentum": 0.9}, {}, "momentum: 0.95", "0.9"),
    ({"nesterov": False}, {}, "nesterov: True", "False"),
    ({"momentum_dtype": "int8"}, {}, "momentum_dtype: torch.float32", "'int8'"),
]


@pytest.mark.parametrize(
    "world_size, case",
    pairwise([2, 3], OPTIONS),
    ids=lambda value: next(iter(value[0]), "") if type(value) is tuple else value,
)
def test_other_hyperparameters_of_matrices_raise_on_all_ranks(world_size: int, case: Any) -> None:
    other, usual, first, second = case
    texts = distributed.run(world_size, with_other_options, usual, other, timeout=20)
    ranks = "rank 0" if world_size == 2 else "ranks 0, 1"
    check_raised(texts, f"{first} on {ranks}, {second} on rank {world_size - 1} (parameter 0 ('layers.0'", "'layers.2'")


def test_another_offload_fraction_raises_on_all_ranks() -> None:
    """Where matrices have their states on other sides; what else has them may differ: see test_agreement.py."""
    texts = distributed.run(2, offloaded, (0.3, 0.6), timeout=20)
    check_raised(
        texts, "in host memory: False on rank 0, True on rank 1", "offload_fraction: 0.3 on rank 0, 0.6 on rank 1"
    )
    assert distributed.run(2, offloaded, (0.3, 0.31), timeout=20) == ["", ""]


def skipping(kind: type[FusedAdamW]) -> str:
    named = made()
    optimizer = kind(named, lr=0.1, skip_nonfinite=is_other())
    give(named)
    text = raised_by(optimizer, named)
    if not is_other():
        Skips.abandon(None)  # meets the rank that would have skipped: it has told all that it refuses
    return text


@pytest.mark.parametrize("kind", [FusedAdamW, FusedLion, FusedMuon])
def test_skipping_on_one_rank_alone_raises_on_all(kind: type[FusedAdamW]) -> None:
    check_raised(distributed.run(2, skipping, kind, timeout=20), "skip_nonfinite: False on rank 0, True on rank 1")


# --- parameters -------------------------------------------------------------------------------------------------------


def one_group(named: Named) -> Any:
    return named


def reversed_(named: Named) -> Any:
    return named[::-1]


def swapped(named: Named) -> Any:
    """Two of one shape: nobody would notice by sizes."""
    return [named[1], named[0], named[2]]


def without_last(named: Named) -> Any:
    return named[:2]


def two_groups(named: Named) -> Any:
    return [{"params": named[:1]}, {"params": named[1:]}]


def last_by_adamw(named: Named) -> Any:
    return [{"params": named[:2]}, {"params": named[2:], "algorithm": "adamw"}]


def second_by_adamw(named: Named) -> Any:
    return [{"params": [named[0], named[2]]}, {"params": named[1:2], "algorithm": "adamw"}]


def without_names(named: Named) -> Any:
    return [param for _, param in named]


def grouped(usual: Groups, other: Groups) -> str:
    named = made()
    optimizer = FusedMuon((other if is_other() else usual)(named), lr=0.1)
    give(named)
    return raised_by(optimizer, named)


def renamed(usual: int, other: int) -> str:
    return f"name: layers.{usual} on rank 0, layers.{other} on rank 1"


PARAMETERS: list[tuple[Groups, Groups, list[str]]] = [
    (
        one_group,
        swapped,
        ["name: layers.0 on rank 0, layers.1 on rank 1", "name: layers.1 on rank 0, layers.0 on rank 1"],
    ),
    (
        one_group,
        reversed_,
        ["name: layers.0 on rank 0, layers.2 on rank 1", "shape: (8, 64) on rank 0, (16, 32) on rank 1"],
    ),
    (one_group, without_last, ["not on rank 1 (parameter 2 ('layers.2'"]),
    (one_group, two_groups, ["param groups: 1 on rank 0, 2 on rank 1 (the optimizer)"]),
    (last_by_adamw, second_by_adamw, [renamed(1, 2)]),
    (one_group, without_names, ["name: layers.0 on rank 0, None on rank 1"]),
]


@pytest.mark.parametrize("usual, other, expected", PARAMETERS, ids=lambda value: getattr(value, "__name__", ""))
def test_other_matrices_raise_on_all_ranks(usual: Groups, other: Groups, expected: list[str]) -> None:
    check_raised(distributed.run(2, grouped, usual, other, timeout=20), *expected)


def frozen(has_gradients: bool) -> str:
    """One of four matrices, on the last rank."""
    named = made([*SHAPES, (8, 64)])
    named[1][1].requires_grad_(not is_other())
    optimizer = FusedMuon(named, lr=0.1)
    give(named, "" if has_gradients and not is_other() else "layers.1")
    return raised_by(optimizer, named)


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_frozen_matrix_on_one_rank_raises_on_all(world_size: int, has_gradients: bool) -> None:
    ranks = "rank 0" if world_size == 2 else "ranks 0, 1, 2"
    expected = f"trained: True on {ranks}, False on rank {world_size - 1}"
    check_raised(distributed.run(world_size, frozen, has_gradients, timeout=20), expected, "(parameter 1 ('layers.1'")


# --- meshes -----------------------------------------------------------------------------------------------------------


def on_two_meshes(kind: type[FusedAdamW], differently: bool) -> list[distributed.Part]:
    """Ranks 1 and 2 have their parameters in another order: with the others they would wait in a circle."""
    both = mesh(2, 2, names=("a", "b"))
    torch.manual_seed(0)
    placed = [
        (both["a"], [Shard(0)]),
        (both["b"], [Shard(0)]),
        (both, [Shard(0), Shard(1)]),
        (both, [Shard(0), Replicate()]),
    ]
    named = [(f"on {i}", nn.Parameter(shard(torch.randn(8, 64), on, how))) for i, (on, how) in enumerate(placed)]
    turned = [*named[1::-1], *named[2:]] if differently and dist.get_rank() in (1, 2) else named
    optimizer = kind(turned, lr=0.1)
    for step in range(2):
        give(named, seed=step)
        optimizer.clip_grad_norm_(0.01)
        optimizer.step()
    return [distributed.part(param) for _, param in named]


@pytest.mark.parametrize("kind", [FusedAdamW, FusedMuon])
def test_ranks_meet_on_several_meshes_in_one_order(kind: type[FusedAdamW]) -> None:
    found = distributed.run(4, on_two_meshes, kind, True, timeout=20)
    expected = distributed.run(4, on_two_meshes, kind, False, timeout=20)
    for own, usual in zip(found, expected, strict=True):
        for (_, _, values), (_, _, others) in zip(own, usual, strict=True):
            assert torch.equal(values, others)


def clipped_otherwise(norm_types: tuple[float, float]) -> str:
    named = made()
    optimizer = FusedAdamW(named, lr=0.1)
    give(named)
    try:
        optimizer.clip_grad_norm_(1.0, norm_types[is_other()])
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_the_first_clipping_by_another_norm_raises_on_all_ranks() -> None:
    check_raised(distributed.run(2, clipped_otherwise, (2.0, float("inf"))), "norm_type: 2.0 on rank 0, inf on rank 1")


# --- quantized weights whose shards share a scale ---------------------------------------------------------------------


def quantized(**options: Any) -> nn.Sequential:
    """Rows that do not divide two ranks: shards of other sizes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, rows, bias=False) for rows in (64, 64, 3)))
    quantize_model_(model, Float8CurrentScaling())
    for layer in model:
        fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def quantized_otherwise(how: str) -> str:
    model = quantized()
    named = list(model.named_parameters())
    if is_other() and how == "frozen":
        named[1][1].requires_grad_(False)
    optimizer = FusedAdamW(named[::-1] if is_other() and how == "order" else named, lr=0.01)
    give(named, "1.weight" if how == "frozen" else "")
    try:
        optimizer.step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "how, expected",
    [("frozen", "trained: True on rank 0, False on rank 1"), ("order", "name: 0.weight on rank 0, 2.weight on rank 1")],
)
def test_other_quantized_weights_raise_on_all_ranks(how: str, expected: str) -> None:
    check_raised(distributed.run(2, quantized_otherwise, how, timeout=20), expected)


def released(bucket_bytes: tuple[int, int], release: bool = True) -> list[Tensor] | str:
    model = quantized()
    optimizer = FusedAdamW(model.named_parameters(), lr=0.01)
    try:
        if release:
            enable_gradient_release(model, optimizer, bucket_bytes=bucket_bytes[is_other()])
        for step in range(2):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return [param.full_tensor().detach().clone() for param in model.parameters()]


def test_other_buckets_of_gradient_release_raise_on_all_ranks() -> None:
    expected = "bucket of gradient release: 2 on rank 0, 0 on rank 1 (parameter 0"
    check_raised(distributed.run(2, released, (0, 1 << 20), timeout=20), expected)


def whole() -> list[Tensor]:
    model = quantized()
    optimizer = FusedAdamW(model.named_parameters(), lr=0.01)
    model(torch.ones(4, 64)).square().sum().backward()
    optimizer.step()
    return [param.full_tensor().detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_shards_are_released_in_the_same_buckets(world_size: int) -> None:
    """By bytes of a rank's own shard the third weight would be a bucket of its own on the first rank alone."""
    size = 4 * 64 * (64 // world_size) + 300  # a layer and more
    found = distributed.run(world_size, released, (size, size), timeout=20)
    usual = distributed.run(world_size, released, (size, size), False)
    for own, expected in zip(found, usual, strict=True):
        assert all(map(torch.equal, own, expected))


# --- later on ---------------------------------------------------------------------------------------------------------


def changed_later(key: str, value: Any, by: str) -> list[distributed.Part]:
    named = made([(8, 64)] * 2)
    optimizer = FusedMuon(named, lr=0.1, ns_dtype="float32")
    give(named)
    optimizer.step()
    if by == "all" or is_other():
        optimizer.param_groups[0][key] = value
    give(named, seed=2)
    with mock.patch.object(agreement, "LIMIT", timedelta(seconds=1)):
        if by == "all":
            optimizer.step()
            return [distributed.part(param) for _, param in named]
        if is_other():
            optimizer.step()
    raise RuntimeError("went on")


LATER = [("ns_dtype", "bfloat16"), ("splits", [3, 5])]


@pytest.mark.parametrize("key, value", LATER)
def test_what_all_ranks_change_later_is_planned_anew(key: str, value: Any) -> None:
    alone, both = (distributed.run(ranks, changed_later, key, value, "all", timeout=20) for ranks in (1, 2))
    for own, expected in zip(zip(*both, strict=True), zip(*alone, strict=True), strict=True):
        assert torch.equal(distributed.join(own), distributed.join(expected))


@pytest.mark.parametrize("key, value", LATER)
def test_what_one_rank_alone_changes_later_raises_there(key: str, value: Any) -> None:
    with pytest.raises(distributed.RemoteError) as raised:  # the processes are not used again
        distributed.run(2, changed_later, key, value, "one", timeout=20)
    assert "were changed since the step before, and other ranks have not said the same within 1 s" in str(raised.value)
