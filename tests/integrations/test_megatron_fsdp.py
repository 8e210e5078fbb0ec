"""Megatron-FSDP's real optimizer wrapper, uneven shards and checkpoint hooks, over gloo.

The model's side needs CUDA: here its parameters are made as ``make_fsdp_dtensor`` makes them, of rows that its buffers
could hold on three ranks, and ``megatron_cases.Model`` stands for what the wrapped optimizer calls back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import distributed
from cases import normal
from distributed import assert_same
from fused_optim import export_optimizer_checkpoint, load_optimizer_checkpoint
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.sharding.uneven import locate_uneven_shards
from megatron_cases import (
    BF16,
    F32,
    FORMATS,
    MASTERS,
    SHAPES,
    build,
    build_muon,
    contents,
    joined,
    own_rows,
    settings,
    state_options,
    train,
)
from pairwise import pairwise

pytest.importorskip("megatron_fsdp")

# --- the synthetic step -------------------------------------------------------------------------------------------


def wrap(kind: str, decoupled: bool) -> None:
    model, optimizer = build(kind, use_decoupled_grad=decoupled)
    assert settings(optimizer) == [(0.01, 0.3, (0.9, 0.999), 0), (0.02, 0.1, (0.8, 0.9), 0)]
    for i, (name, param) in enumerate(model.items()):
        initial = normal(SHAPES[name], i).to(param.dtype)[own_rows(name)]
        assert torch.equal(param._local_tensor, initial)
        states = optimizer.state[param]
        assert not any(states[moment]._local_tensor.any() for moment in ("exp_avg", "exp_avg_sq"))
        assert torch.equal(optimizer.master_state_dict(model)[name]._local_tensor, initial.float())
    before = len(model["matrix"]._megatron_fsdp_model.called)
    train(model, optimizer, range(1))
    assert model["matrix"]._megatron_fsdp_model.called[before:] == ["install", "zero"]
    assert [group["step"] for group in optimizer.param_groups] == [1, 1]


@pytest.mark.parametrize("decoupled", [False, True], ids=["grad", "decoupled_grad"])
@pytest.mark.parametrize("kind", MASTERS)
def test_wrapping_creates_states_and_leaves_no_mark(kind: str, decoupled: bool) -> None:
    distributed.run(3, wrap, kind, decoupled)


# --- steps --------------------------------------------------------------------------------------------------------


def trained(kind: str, options: dict[str, Any], steps: int, grad_dtype: torch.dtype | None = None) -> Any:
    model, optimizer = build(kind, **options)
    train(model, optimizer, range(steps), grad_dtype)
    return contents(model, optimizer), settings(optimizer)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("kind", MASTERS)
def test_uneven_shards_give_the_bits_of_one_rank(kind: str, fmt: torch.dtype) -> None:
    """Rotating rounding included: it goes by where an element lies globally."""
    expected = joined(distributed.run(1, trained, kind, state_options(fmt), 3))
    for world_size in (2, 3):
        assert_same(joined(distributed.run(world_size, trained, kind, state_options(fmt), 3)), expected)


def trained_by_muon(kind: str, fmt: torch.dtype) -> Any:
    model, optimizer = build_muon(kind, state_dtype=fmt)
    train(model, optimizer, range(3))
    return contents(model, optimizer), None


@pytest.mark.parametrize("fmt", [F32, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["fp32", "masters", "remainders"])
def test_muon_puts_uneven_shards_together(kind: str, fmt: torch.dtype) -> None:
    """Wherever rows are cut, with ranks that have none; the second parameter's experts are moved to nobody."""
    expected = joined(distributed.run(1, trained_by_muon, kind, fmt))
    for world_size in (2, 3):
        assert_same(joined(distributed.run(world_size, trained_by_muon, kind, fmt)), expected)
    before = {name: normal(shape, i) for i, (name, shape) in enumerate(SHAPES.items())}
    assert all(not torch.equal(expected[f"{name} parameter"].float(), value) for name, value in before.items())


def muon_loads(folder: str, saves: bool) -> Any:
    model, optimizer = build_muon("fp32", state_dtype=torch.int8)
    if saves:
        train(model, optimizer, range(2))
        dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    else:
        load_optimizer_checkpoint(model, optimizer, folder)
    found = contents(model, optimizer)
    return {key: value for key, value in found.items() if "momentum" in key or "exp_avg" in key}, None


def test_muons_momenta_load_on_other_ranks(tmp_path: Path) -> None:
    expected = joined(distributed.run(3, muon_loads, str(tmp_path), True))
    assert_same(joined(distributed.run(2, muon_loads, str(tmp_path), False)), expected)


@pytest.mark.parametrize("grad_dtype", [F32, BF16])
def test_decoupled_gradients_of_another_dtype(grad_dtype: torch.dtype) -> None:
    options = {"use_decoupled_grad": True, **state_options(BF16)}
    ((expected, groups),) = distributed.run(1, trained, "masters", options, 3, grad_dtype)
    results = distributed.run(3, trained, "masters", options, 3, grad_dtype)
    assert_same(joined(results), expected)
    assert all(found == groups for _, found in results)


# --- where shards lie ---------------------------------------------------------------------------------------------

MESHES: dict[str, tuple[list[Placement], list[int] | None]] = {
    "hybrid": ([Replicate(), Shard(0)], None),
    "hybrid, outer too": ([Shard(0), Shard(0)], [1, 0]),
    "tensor parallel columns": ([Shard(0), Shard(1)], [1, 0]),
    "strided": ([_StridedShard(0, split_factor=2), Shard(0)], None),
}


def locate(kind: str, rows: list[int]) -> tuple[Any, Any]:
    """Ours and the real package's offsets of this rank's shard of a tensor of 12 rows."""
    from megatron_fsdp.uneven_dtensor import gather_and_compute_chunk_metadata

    placements, order = MESHES[kind]
    mesh = init_device_mesh("cpu", (2, 2))
    if order is not None:
        mesh._shard_order = order
    columns = 4 if Shard(1) in placements else 8
    local = torch.ones(rows[dist.get_rank()], columns)
    options = {"run_check": False, "shape": torch.Size((12, 8)), "stride": (8, 1)}
    param = DTensor.from_local(local, mesh, placements, **options)
    locate_uneven_shards([param])
    (chunk,) = local_tensor(param).__create_chunk_list__()
    expected = gather_and_compute_chunk_metadata(param)
    return (tuple(chunk.offsets), tuple(chunk.sizes)), (tuple(expected.offsets), tuple(expected.sizes))


@pytest.mark.parametrize("kind", MESHES)
def test_shards_on_two_mesh_dims_lie_where_the_real_package_says(kind: str) -> None:
    cuts = {
        "hybrid": [[5, 7, 5, 7]],
        "hybrid, outer too": [[3, 3, 3, 3], [5, 1, 0, 6]],  # even ones do not lie where torch would have them
        "tensor parallel columns": [[1, 1, 11, 11]],
        "strided": [[5, 1, 0, 6]],
    }
    for rows in cuts[kind]:
        found = distributed.run(4, locate, kind, rows)
        assert all(ours == theirs for ours, theirs in found), found
        assert len({ours for ours, _ in found}) == (2 if kind == "hybrid" else 4)


def test_shards_that_make_up_no_whole_tensor_are_refused() -> None:
    with pytest.raises(distributed.RemoteError, match=r"make up shape \(11, 8\), expected \(12, 8\)"):
        distributed.run(4, locate, "hybrid", [5, 6, 5, 6])


# --- checkpoints --------------------------------------------------------------------------------------------------


def save(kind: str, options: dict[str, Any], form: str, path: str) -> None:
    model, optimizer = build(kind, checkpoint_format=form, **options)
    train(model, optimizer, range(3))
    dcp.save({"model": with_chunks(model), "optimizer": optimizer.state_dict()}, checkpoint_id=path)


def with_chunks(model: nn.ParameterDict) -> dict[str, Any]:
    from megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    return preprocess_state_dict_for_uneven_dtensor({name: param.detach() for name, param in model.items()})


def load(kind: str, options: dict[str, Any], form: str, path: str, steps: range) -> Any:
    """The flow of Megatron-FSDP's documentation, and further steps."""
    model, optimizer = build(kind, fresh=True, checkpoint_format=form, **options)
    parts = {"model": with_chunks(model), "optimizer": optimizer.state_dict()}
    dcp.load(parts, checkpoint_id=path)
    with torch.no_grad():
        for name, param in model.items():
            param._local_tensor.copy_(parts["model"][name]._local_tensor)
    optimizer.load_state_dict(parts["optimizer"])
    train(model, optimizer, steps)
    return contents(model, optimizer), settings(optimizer)


@pytest.mark.parametrize(  # not the product: each two
    "fmt, kind, form", pairwise(FORMATS, ["masters", "remainders"], ["unscaled", "native"]), ids=str
)
def test_checkpoints_reshard_and_continue(kind: str, fmt: torch.dtype, form: str, tmp_path: Path) -> None:
    options, path = state_options(fmt), str(tmp_path)
    expected = distributed.run(1, trained, kind, options, 5)
    distributed.run(3, save, kind, options, form, path)
    for world_size in (1, 2, 3):
        results = distributed.run(world_size, load, kind, options, form, path, range(3, 5))
        assert_same(joined(results), joined(expected))
        assert all(found == expected[0][1] for _, found in results)


def test_checkpoints_of_one_form_load_into_other_formats(tmp_path: Path) -> None:
    path = str(tmp_path)
    distributed.run(3, save, "masters", state_options(F32), "unscaled", path)
    expected = joined(distributed.run(1, trained, "masters", state_options(F32), 3))
    found = joined(distributed.run(2, load, "remainders", state_options(torch.int8), "unscaled", path, range(0)))
    assert_same({k: v for k, v in found.items() if "master" in k}, {k: v for k, v in expected.items() if "master" in k})
    for key in found:
        scale = float(expected[key].float().abs().max())
        assert float((found[key].float() - expected[key].float()).abs().max()) <= 0.02 * scale, key


# --- other ways in and out ----------------------------------------------------------------------------------------


def export(kind: str, options: dict[str, Any], path: str) -> None:
    model, optimizer = build(kind, **options)
    train(model, optimizer, range(3))
    export_optimizer_checkpoint(model, optimizer, path)


def load_exported(kind: str, options: dict[str, Any], path: str) -> Any:
    model, optimizer = build(kind, fresh=True, **options)
    load_optimizer_checkpoint(model, optimizer, path)
    found = contents(model, optimizer)
    return {key: value for key, value in found.items() if "exp_avg" in key}, settings(optimizer)


def test_exports_and_loads_by_name(tmp_path: Path) -> None:
    path = str(tmp_path / "exported")
    expected = joined(distributed.run(1, trained, "fp32", state_options(F32), 3))
    distributed.run(3, export, "fp32", state_options(F32), path)
    for world_size in (1, 2, 3):
        results = distributed.run(world_size, load_exported, "fp32", state_options(F32), path)
        assert_same(joined(results), {key: value for key, value in expected.items() if "exp_avg" in key})
