"""Where state dicts are converted: beside the parameters or in host memory, with the same values."""

from __future__ import annotations

import copy
import pickle
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch

import cases
import distributed
from checkpoint_cases import END, FORMATS, SAVED_AT, WAYS, Run, straight, trained_states
from distributed import Part, assert_same, join_all
from native_cases import PLAIN, REM16, build, stored, tensors_of, trained
from pairwise import each_once, pairwise
from peers import FusedAdam

FORMS = ["unscaled", "native"]
EACH_FORM = pytest.mark.parametrize("form", FORMS)
one_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


# Not all masters x formats x forms: each two of them in the long run.
@pytest.mark.parametrize("master, fmt, form", each_once(pairwise(cases.MASTERS, FORMATS, FORMS)), ids=str)
def test_host_memory_holds_the_same_values(master: cases.Master, fmt: torch.dtype, form: str, device: str) -> None:
    model, optimizer = trained(master, fmt, device, form)
    here = tensors_of(optimizer.state_dict()["state"])
    optimizer.checkpoint_device = "cpu"
    there = tensors_of(optimizer.state_dict()["state"])
    kept = {value.data_ptr() for states in optimizer.state.values() for value in states.values() if value.numel()}
    for name, value in there.items():
        referred = value.data_ptr() in kept
        if not value.numel():
            continue
        assert referred == (here[name].data_ptr() in kept), name  # FP32 states, as torch.optim hands them over
        assert value.device.type == (device if referred else "cpu"), name
    assert_same({k: v.cpu() for k, v in there.items()}, {k: v.cpu() for k, v in here.items()})
    other, fresh = build(master, fmt, device, fresh=True)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    assert_same(stored(other, fresh), stored(model, optimizer))


def test_the_device_is_kept_and_checked() -> None:
    optimizer = FusedAdam([torch.ones(2)], checkpoint_device="cpu")
    assert copy.deepcopy(optimizer).checkpoint_device == "cpu"
    assert pickle.loads(pickle.dumps(optimizer)).checkpoint_device == "cpu"
    with pytest.raises(ValueError, match="checkpoint_device: expected None, 'cpu' or 'stager', got 'disk'"):
        optimizer.checkpoint_device = "disk"
    assert optimizer.checkpoint_device == "cpu"


@pytest.mark.parametrize("master, fmt", each_once(product(cases.MASTERS, FORMATS)), ids=str)
def test_decoding_in_pieces_changes_no_bit(
    master: cases.Master, fmt: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces end within rows and tensors, and the last one is shorter."""
    _, optimizer = trained(master, fmt, form="unscaled")
    whole = tensors_of(optimizer.state_dict()["state"])
    assert any(value.numel() > 1000 for value in whole.values())
    monkeypatch.setattr("fused_optim.state.values.PIECE", 384)
    assert_same(tensors_of(optimizer.state_dict()["state"]), whole)


@pytest.mark.cuda
@one_gpu
@EACH_FORM
@pytest.mark.parametrize("fmt", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("master", [REM16, PLAIN], ids=str)
def test_a_state_dict_takes_the_memory_of_one_parameter(master: cases.Master, fmt: torch.dtype, form: str) -> None:
    shape, count = (4096, 4096), 6
    params = [torch.randn(shape, device="cuda").to(master.param_dtype) for _ in range(count)]
    options = {"exp_avg_dtype": fmt, "exp_avg_sq_dtype": fmt, "checkpoint_format": form, **master.options}
    optimizer = FusedAdam(params, checkpoint_device="cpu", **options)
    optimizer.initialize_state()
    one = 4 * torch.Size(shape).numel() * (2 if master is PLAIN else 3)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    state_dict = optimizer.state_dict()
    assert torch.cuda.max_memory_allocated() - resident <= one
    assert torch.cuda.memory_allocated() == resident
    assert all(value.device.type == "cpu" for value in tensors_of(state_dict["state"]).values())
    optimizer.checkpoint_device = None
    state_dict = optimizer.state_dict()
    assert torch.cuda.memory_allocated() - resident >= (one if form == "unscaled" else one / 6) * count


# --- DTensors of a GPU mesh in host memory --------------------------------------------------------------------------


def offloaded(form: str, *, fresh: bool = False) -> Run:
    run = Run("fsdp", "remainder16", fresh=fresh)
    run.optimizer.checkpoint_format, run.optimizer.checkpoint_device = form, "cpu"
    return run


def resume_offloaded(form: str, way: str, path: str) -> list[dict[str, Part]]:
    saved, loaded = offloaded(form), offloaded(form, fresh=True)
    saved.train(0, SAVED_AT)
    WAYS[way][0](saved, path)
    if way in ("full", "broadcast"):  # torch wants all tensors of the state dict on one device when it loads these
        loaded.optimizer.checkpoint_device = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        WAYS[way][1](loaded, path)
    loaded.optimizer.checkpoint_format, loaded.optimizer.checkpoint_device = "unscaled", None
    at_load = loaded.snapshot()
    loaded.train(SAVED_AT, END)
    return [at_load, loaded.snapshot()]


@pytest.mark.cuda
@one_gpu
@EACH_FORM
@pytest.mark.parametrize("way", WAYS)
def test_offloaded_states_are_saved_and_loaded(way: str, form: str, tmp_path: Path) -> None:
    results = distributed.run(1, resume_offloaded, form, way, str(tmp_path / "checkpoint"), on="cuda")
    for at, expected in enumerate(straight("remainder16", "cuda")):
        assert_same(trained_states(join_all([result[at] for result in results])), trained_states(expected))
