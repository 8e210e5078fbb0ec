"""What each supported torch has written is read under the torch that runs, whichever of them is newer."""

from __future__ import annotations

import pickle
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import cases
import distributed
import written_cases as written
from distributed import Part, join_all, part, same_bits
from fused_optim import FusedAdam, load_optimizer_checkpoint, verify_checksums
from fused_optim.checkpoint import Checkpointer
from fused_optim.checkpoint.folders import folder_at
from fused_optim.checkpoint.metadata import read_metadata
from fused_optim.checkpoint.read import load
from fused_optim.tools.conversion import convert_checkpoint
from fused_optim.tools.inspector import inspect_checkpoint

INT8 = next(fmt for fmt in cases.FORMATS if fmt.dtype is torch.int8)


@pytest.fixture(scope="module", params=written.VERSIONS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    with tarfile.open(written.FOLDER / f"{request.param}.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(path)
    return path


def test_there_is_one_of_each_torch() -> None:
    """Of each minor release that the README names."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (major, first, last), *_ = re.findall(r"torch (\d+)\.(\d+) to \1\.(\d+)", readme)
    expected = [f"{major}.{minor}" for minor in range(int(first), int(last) + 1)]
    assert [version.rpartition(".")[0] for version in written.VERSIONS] == expected


@pytest.mark.parametrize("member", _MEM_FORMAT_ENCODING)
def test_names_of_enum_members(member: _MEM_FORMAT_ENCODING, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Python 3.11.2 pickles them, and therefore what ``dcp.save`` wrote under it: by names, not by values."""
    model = nn.Linear(3, 2)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    file = tmp_path / ".metadata"
    written = pickle.loads(file.read_bytes())
    formats = dict(zip(_MEM_FORMAT_ENCODING, (torch.contiguous_format, torch.channels_last, torch.preserve_format)))
    written.state_dict_metadata["weight"].properties.memory_format = formats[member]
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    file.write_bytes(pickle.dumps(written))
    assert b"getattr" in file.read_bytes() and member.name.encode() in file.read_bytes()
    found = read_metadata(folder_at(tmp_path))
    assert found.state_dict_metadata == pickle.loads(file.read_bytes()).state_dict_metadata
    assert found.state_dict_metadata["weight"].properties.memory_format is formats[member]


# --- ways to load -------------------------------------------------------------------------------------------------


def load_folder(model: nn.Module, optimizer: FusedAdam, folder: str) -> None:
    with torch.no_grad():
        load({"model": dict(model.named_parameters())}, folder_at(folder), read_metadata(folder_at(folder)))
    load_optimizer_checkpoint(model, optimizer, folder)


def load_newest(model: nn.Module, optimizer: FusedAdam, folder: str) -> None:
    with Checkpointer(model, optimizer, folder, sigterm=False) as checkpointer:
        assert checkpointer.load_latest() == 1


WAYS: dict[str, Callable[[nn.Module, FusedAdam, str], None]] = {
    **dict.fromkeys(written.FORMS, load_folder),
    written.CHECKPOINTER: load_newest,
}


def masters_and_moments(model: nn.Module, optimizer: FusedAdam) -> dict[str, Part]:
    found = {f"{name}: parameter": part(param) for name, param in model.named_parameters()}
    found |= {f"{name}: master": part(value) for name, value in optimizer.master_state_dict(model).items()}
    states = optimizer.state_dict()["state"]
    for index, name in enumerate(written.SHAPES):
        found |= {f"{name}: {moment}": part(states[index][moment]) for moment in ("exp_avg", "exp_avg_sq")}
    return found


def load_and_step(way: str, folder: str) -> list[dict[str, Part]]:
    model, optimizer = written.build(fresh=True)
    WAYS[way](model, optimizer, folder)
    (group,) = optimizer.param_groups
    assert (group["step"], group["lr"], tuple(group["betas"])) == (1, written.LR, written.BETAS)
    loaded = masters_and_moments(model, optimizer)
    group["eps"] = 1e-16  # of 0 in older checkpoints, which steps refuse by now
    written.step(model, optimizer)
    return [loaded, masters_and_moments(model, optimizer)]


def check_moments(found: dict[str, Tensor]) -> None:
    """FP32 ones exactly; int8 ones as closely as that format is, whose blocks are within a row."""
    for name in written.SHAPES:
        for moment, expected in written.moments(name).items():
            actual = found[f"{name}: {moment}"]
            if name == "vector":
                assert same_bits(actual, expected)
                continue
            kind = INT8.moment(moment)
            largest = expected.abs().amax(1, keepdim=True).numpy()
            roots = [torch.from_numpy(kind.code.coded(value.abs().numpy(), largest)) for value in (actual, expected)]
            bound = 2 * kind.absolute * roots[1].amax(1, keepdim=True)
            assert ((roots[0] - roots[1]).abs() <= bound).all() and torch.equal(actual.sign(), expected.sign())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_loaded(saved: Path, way: str, ranks: int) -> None:
    loaded, stepped = map(join_all, zip(*distributed.run(ranks, load_and_step, way, str(saved / way))))
    check_moments(loaded)
    for name in written.SHAPES:
        assert same_bits(loaded[f"{name}: master"], written.master(name))
        assert same_bits(loaded[f"{name}: parameter"], written.master(name).bfloat16())
    assert same_bits(stepped["vector: master"], written.master("vector", steps=2))


@pytest.mark.parametrize("form", written.FORMS)
def test_it_is_inspected_and_converted(saved: Path, form: str, tmp_path: Path) -> None:
    (other,) = set(written.FORMS) - {form}
    convert_checkpoint(saved / form, tmp_path / other, other)
    report = inspect_checkpoint(saved / form)
    assert report["steps"] == [1] and set(report["parameters"]) == set(written.SHAPES)
    converted = load_and_step(other, str(tmp_path / other))[0]
    check_moments(join_all([converted]))


def test_its_checksums_are_right(saved: Path) -> None:
    verify_checksums(saved / written.CHECKPOINTER / "step-00000001")
