"""FP32 masters as safetensors files: whole tensors, shared out over the ranks, readable by other tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distributed
from cases import MASTERS, Master, values
from distributed import assert_same, two_gpus
from fused_optim import save_master_safetensors
from fused_optim.sharding.model_files import INDEX
from peers import FusedAdam

SHAPES = {"even": (8, 64), "uneven": (7, 9), "row": (1, 128), "bias": (10,), "scalar": (1,)}


class Model(nn.Module):
    """Two tied parameters and one that the optimizer does not have."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, nn.Parameter(values(shape, dtype, "cpu", seed=i)))
        self.tied = self.even
        self.other = nn.Parameter(values((3, 5), dtype, "cpu", seed=99))


def trained(master: Master) -> tuple[Model, FusedAdam]:
    model = Model(master.param_dtype).to(distributed.device())
    if dist.is_initialized():
        fully_shard(model, mesh=distributed.mesh())
    params = [param for name, param in model.named_parameters() if name != "other"]
    optimizer = FusedAdam(params, lr=0.01, **master.options)
    for i, param in enumerate(params):
        grad = values(tuple(param.shape), torch.float32, "cpu", seed=i + 50)
        param.grad = distributed.shard_like(grad.to(param.dtype), param)
    optimizer.step()
    return model, optimizer


def expected_masters(master: Master) -> dict[str, Tensor]:
    model, optimizer = trained(master)
    return {name: value.detach().cpu().clone() for name, value in optimizer.master_state_dict(model).items()}


def save(master: Master, folder: str) -> None:
    save_master_safetensors(*trained(master), folder)


def load(folder: Path) -> dict[str, Tensor]:
    """As Hugging Face's loaders do: by the index."""
    index = json.loads((folder / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert sorted(file.name for file in folder.iterdir()) == [*files, INDEX]
    loaded = {}
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        tensors = load_file(folder / file)
        assert all(index["weight_map"][name] == file for name in tensors)
        loaded |= tensors
    assert set(loaded) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in loaded.values())
    return {name: loaded[name] for name in SHAPES}


@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_every_kind_of_master_is_written_exactly(master: Master, tmp_path: Path) -> None:
    save(master, str(tmp_path / "out"))
    assert_same(load(tmp_path / "out"), {name: value.float() for name, value in expected_masters(master).items()})


@pytest.mark.parametrize("ranks", [2, 3])
def test_files_of_several_ranks_hold_whole_tensors(ranks: int, tmp_path: Path) -> None:
    remainders = next(master for master in MASTERS if master.dtype == torch.int16)
    distributed.run(ranks, save, remainders, str(tmp_path))
    assert_same(load(tmp_path), expected_masters(remainders))
    names = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert names == [f"model-{i + 1:05d}-of-{ranks:05d}.safetensors" for i in range(ranks)]
    sizes = {name: sum(tensor.numel() for tensor in load_file(tmp_path / name).values()) for name in names}
    assert max(sizes.values()) == 8 * 64  # the largest tensor alone, the others elsewhere
    distributed.run(ranks, save, remainders, str(tmp_path))  # over an older export
    assert_same(load(tmp_path), expected_masters(remainders))


@two_gpus
def test_masters_are_gathered_on_gpus(tmp_path: Path) -> None:
    remainders = next(master for master in MASTERS if master.dtype == torch.int16)
    distributed.run(2, save, remainders, str(tmp_path), on="cuda")
    torch.testing.assert_close(load(tmp_path), expected_masters(remainders))  # of another engine


def save_where_one_rank_cannot(folder: str) -> str:
    if dist.get_rank() == 1:
        folder += "/file/below"
    with pytest.raises((OSError, RuntimeError)) as error:
        save(MASTERS[0], folder)
    return str(error.value)


def test_a_failure_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    errors = distributed.run(2, save_where_one_rank_cannot, str(tmp_path), timeout=30)
    assert "rank 1 failed: " in errors[0]
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def fail_to_write(folder: str) -> str:
    """Rank 1's file cannot be written once all has been gathered."""
    if dist.get_rank() == 1:
        Path(folder, ".model-00002-of-00002.safetensors.tmp").mkdir()
    dist.barrier()
    with pytest.raises(Exception) as error:
        save(MASTERS[0], folder)
    return str(error.value)


def test_a_failed_export_leaves_no_index(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("{}")
    errors = distributed.run(2, fail_to_write, str(tmp_path), timeout=30)
    assert "rank 1 failed: " in errors[0]
    assert not list(tmp_path.glob("model*"))
