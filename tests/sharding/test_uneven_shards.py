"""DTensors that say themselves where their shards lie, since their placements do not, as Megatron-FSDP makes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard

import distributed
from checkpoint_cases import values
from distributed import assert_same
from fused_optim import FusedAdam, export_optimizer_checkpoint, load_optimizer_checkpoint, save_master_safetensors
from fused_optim.adam import MOMENTS

SHAPES = {"matrix": (9, 64), "vector": (11,), "few": (3, 32)}
ROWS = {"matrix": (7, 2), "vector": (1, 10), "few": (3, 0)}  # of two ranks; FSDP2 would cut them otherwise
OPTIONS = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8, "stochastic_rounding": False}


def uneven(name: str, full: Tensor) -> DTensor:
    """This rank's rows of ``full``, with the chunk lists that Megatron-FSDP gives its parameters."""
    first = sum(ROWS[name][: dist.get_rank()])
    local = full[own_rows(name)].clone()
    dtensor = DTensor.from_local(
        local, distributed.mesh(), [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
    )
    chunk = ChunkStorageMetadata(torch.Size((first, *[0] * (full.dim() - 1))), local.shape)

    def write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(tensor.to_local())
        data = TensorWriteData(chunk=chunk, properties=properties, size=tensor.size())
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    dtensor._local_tensor.__create_chunk_list__ = lambda: [chunk]
    dtensor._local_tensor.__create_write_items__ = write_items
    return dtensor


def own_rows(name: str) -> slice:
    first = sum(ROWS[name][: dist.get_rank()])
    return slice(first, first + ROWS[name][dist.get_rank()])


def build(sharded: bool, *, fresh: bool = False) -> tuple[nn.ParameterDict, FusedAdam]:
    model = nn.ParameterDict()
    for i, (name, shape) in enumerate(SHAPES.items()):
        full = values(shape, i, fresh)
        model[name] = nn.Parameter(uneven(name, full) if sharded else full)
        if sharded:  # a parameter has a local tensor of its own
            model[name]._local_tensor.__dict__.update(uneven(name, full)._local_tensor.__dict__)
    return model, FusedAdam(model.parameters(), lr=0.5 if fresh else 0.01, **OPTIONS)


def trained_whole(form: str = "unscaled") -> tuple[nn.ParameterDict, FusedAdam]:
    model, optimizer = build(sharded=False)
    optimizer.checkpoint_format = form
    for i, param in enumerate(model.parameters()):
        param.grad = values(param.shape, 10 + i)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def moments(model: nn.ParameterDict, optimizer: FusedAdam) -> dict[str, Tensor]:
    """This rank's parts."""
    return {
        f"{name} {moment}": optimizer.get_unscaled_state(param, moment)
        for name, param in model.items()
        for moment in MOMENTS
    }


def expected_here() -> dict[str, Tensor]:
    return {key: value[own_rows(key.split()[0])] for key, value in moments(*trained_whole()).items()}


def save_whole(form: str, path: str) -> None:
    model, optimizer = trained_whole(form)
    state = get_optimizer_state_dict(model, optimizer)
    torch.save(state, path) if path.endswith(".pt") else dcp.save({"optimizer": state}, checkpoint_id=path)


def load_uneven(path: str) -> None:
    model, optimizer = build(sharded=True, fresh=True)
    load_optimizer_checkpoint(model, optimizer, path)
    assert_same(moments(model, optimizer), expected_here())


@pytest.mark.parametrize("name", ["folder", "file.pt"])
def test_checkpoints_load_into_the_true_rows(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    distributed.run(1, save_whole, "unscaled", path)
    distributed.run(2, load_uneven, path)


def export_uneven(source: str, path: str) -> None:
    model, optimizer = build(sharded=True, fresh=True)
    load_optimizer_checkpoint(model, optimizer, source)
    export_optimizer_checkpoint(model, optimizer, path)


def load_whole(path: str) -> None:
    model, optimizer = build(sharded=False, fresh=True)
    load_optimizer_checkpoint(model, optimizer, path)
    assert_same(moments(model, optimizer), moments(*trained_whole()))


def test_exports_hold_the_true_rows(tmp_path: Path) -> None:
    source, path = str(tmp_path / "source"), str(tmp_path / "exported")
    distributed.run(1, save_whole, "unscaled", source)
    distributed.run(2, export_uneven, source, path)
    distributed.run(1, load_whole, path)


def refuse(source: str, path: str) -> list[str]:
    model, optimizer = build(sharded=True)
    errors = []
    for act in (
        lambda: load_optimizer_checkpoint(model, optimizer, source),
        lambda: export_optimizer_checkpoint(model, optimizer, path),
        lambda: save_master_safetensors(model, optimizer, path),
    ):
        with pytest.raises(TypeError, match=r"(parameter 0 |matrix).*chunk lists of their own") as error:
            act()
        errors.append(str(error.value))
    return errors


def test_what_goes_by_placements_is_refused(tmp_path: Path) -> None:
    source = str(tmp_path / "source")
    distributed.run(1, save_whole, "native", source)
    for errors in distributed.run(2, refuse, source, str(tmp_path / "exported.pt")):
        assert "checkpoint_format='unscaled'" in errors[0] and "export to a folder" in errors[1]
