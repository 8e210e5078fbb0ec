"""Tools for checkpoints of FusedMuon and torch.optim.Muon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict

from distributed import same_bits
from fused_optim import FusedLion, FusedMuon, load_optimizer_checkpoint, muon_param_groups
from fused_optim.tools.comparison import compare_checkpoints
from fused_optim.tools.conversion import convert_checkpoint
from fused_optim.tools.inspector import inspect_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp.save in one process


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.lm_head = nn.Linear(width, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.down(self.up(self.embed_tokens(tokens)).relu()))
        return logits


MATRICES, OTHERS = {"up.weight", "down.weight"}, {"embed_tokens.weight", "up.bias", "lm_head.weight"}


def built(seed: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Model, FusedMuon]:
    torch.manual_seed(seed)
    model = Model().to(dtype)
    return model, FusedMuon(muon_param_groups(model), lr=0.02, **options)


def train(model: Model, *optimizers: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.arange(32)).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def save(path: Path, model: Model, optimizer: torch.optim.Optimizer) -> Path:
    states, own = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": own}, checkpoint_id=path)
    return path


def moments(optimizer: FusedMuon) -> list[Tensor]:
    names = [spec.name for spec in optimizer.rule.states]
    return [
        optimizer.get_unscaled_state(param, name)
        for param in optimizer.store.params
        for name in names
        if name in optimizer.state[param]
    ]


def test_what_a_checkpoint_of_both_algorithms_holds(tmp_path: Path) -> None:
    model, optimizer = built(0, torch.bfloat16, state_dtype="int8", checkpoint_format="native")
    train(model, optimizer)
    report = inspect_checkpoint(save(tmp_path / "native", model, optimizer))
    assert report["layout"] == "fused_optim, native form" and not report["not_finite"]
    assert {name for name, row in report["parameters"].items() if "momentum_buffer" in row} == MATRICES
    assert {name for name, row in report["parameters"].items() if "exp_avg_sq" in row} == OTHERS
    assert {row["momentum_buffer"]["format"] for row in report["parameters"].values() if "momentum_buffer" in row} == {
        "int8"
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_between_our_forms(dtype: torch.dtype, tmp_path: Path) -> None:
    model, optimizer = built(0, dtype, state_dtype="int8", checkpoint_format="native")
    train(model, optimizer)
    native = save(tmp_path / "native", model, optimizer)
    convert_checkpoint(native, tmp_path / "unscaled", "unscaled")
    convert_checkpoint(tmp_path / "unscaled", tmp_path / "again", "native")
    assert compare_checkpoints(native, tmp_path / "again")["same"]
    for form in ("unscaled", "again"):
        other, loaded = built(1, dtype, state_dtype="int8")
        other.load_state_dict(model.state_dict())
        load_optimizer_checkpoint(other, loaded, tmp_path / form)
        assert all(map(same_bits, moments(loaded), moments(optimizer)))


def test_torchs_two_optimizers_and_back(tmp_path: Path) -> None:
    """The layout "torch" is what torch.optim.Muon and AdamW of one model save together."""
    model, optimizer = built(0)
    train(model, optimizer)
    convert_checkpoint(save(tmp_path / "ours", model, optimizer), tmp_path / "torch", "torch")
    assert inspect_checkpoint(tmp_path / "torch")["layout"] == "torch.optim.AdamW and torch.optim.Muon"

    theirs = Model()
    theirs.load_state_dict(model.state_dict())
    params = dict(theirs.named_parameters())
    muon = torch.optim.Muon([params[name] for name in sorted(MATRICES)], lr=1.0)
    adamw = torch.optim.AdamW([params[name] for name in sorted(OTHERS)], lr=1.0)
    train(theirs, muon, adamw)
    state = get_optimizer_state_dict(theirs, (muon, adamw))
    dcp.load({"optimizer": state}, checkpoint_id=tmp_path / "torch")
    set_optimizer_state_dict(theirs, (muon, adamw), state)
    assert (muon.param_groups[0]["lr"], muon.param_groups[0]["weight_decay"], adamw.param_groups[0]["eps"]) == (
        0.02,
        0.1,
        1e-8,
    )
    own = dict(model.named_parameters())
    for name in MATRICES:
        assert same_bits(muon.state[params[name]]["momentum_buffer"], optimizer.state[own[name]]["momentum_buffer"])
    for name in OTHERS:
        assert same_bits(adamw.state[params[name]]["exp_avg_sq"], optimizer.state[own[name]]["exp_avg_sq"])
        assert adamw.state[params[name]]["step"] == 2

    other, loaded = built(1)
    other.load_state_dict(model.state_dict())
    load_optimizer_checkpoint(other, loaded, tmp_path / "torch")
    assert all(map(same_bits, moments(loaded), moments(optimizer)))
    convert_checkpoint(tmp_path / "torch", tmp_path / "again", "unscaled")
    again, loaded = built(2)
    again.load_state_dict(model.state_dict())
    load_optimizer_checkpoint(again, loaded, tmp_path / "again")
    assert all(map(same_bits, moments(loaded), moments(optimizer)))


def test_torchs_muon_alone(tmp_path: Path) -> None:
    model = Model()
    muon = torch.optim.Muon([model.up.weight, model.down.weight], lr=0.02, momentum=0.9)
    train(model, muon)
    torch.save({"optimizer": muon.state_dict()}, tmp_path / "muon.pt")
    report = inspect_checkpoint(tmp_path / "muon.pt")
    assert report["layout"] == "torch.optim.Muon" and set(report["parameters"]["0"]) == {"shape", "momentum_buffer"}
    for layout in ("unscaled", "torch"):
        convert_checkpoint(tmp_path / "muon.pt", tmp_path / layout, layout)
        optimizer = FusedMuon([model.up.weight, model.down.weight], state_dtype="float32")
        load_optimizer_checkpoint(model, optimizer, tmp_path / layout)
        assert optimizer.param_groups[0]["momentum"] == 0.9
        for param in (model.up.weight, model.down.weight):
            assert same_bits(optimizer.state[param]["momentum_buffer"], muon.state[param]["momentum_buffer"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_coefficients": "polar_express"}, "three numbers for all steps"),
        ({"maximize": True}, "maximize"),
        ({"splits": (128, 128)}, "splits"),
    ],
)
def test_what_torchs_muon_cannot_continue(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = Model()
    optimizer = FusedMuon([{"params": [("up.weight", model.up.weight)], **options}])
    train(model, optimizer)
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "ours")
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "ours", tmp_path / "torch", "torch")
    assert not (tmp_path / "torch").exists()


def test_parameters_that_torchs_muon_does_not_take(tmp_path: Path) -> None:
    experts = nn.ParameterDict({"experts": nn.Parameter(torch.ones(2, 8, 16))})
    optimizer = FusedMuon([*experts.values()], experts=True)
    experts["experts"].grad = torch.ones(2, 8, 16)
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "experts.pt")
    with pytest.raises(ValueError, match="two dims only"):
        convert_checkpoint(tmp_path / "experts.pt", tmp_path / "torch", "torch")


def test_lions_states_have_no_layout_of_torchs(tmp_path: Path) -> None:
    model = Model()
    optimizer = FusedLion(model.named_parameters())
    model(torch.arange(32)).square().mean().backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "lion.pt")
    with pytest.raises(ValueError, match=r"has its exp_avg, and 'torch' is torch\.optim\.AdamW's and Muon's layout"):
        convert_checkpoint(tmp_path / "lion.pt", tmp_path / "torch", "torch")


def test_numbered_parameters_of_two_optimizers(tmp_path: Path) -> None:
    model, optimizer = built(0)
    train(model, optimizer)
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    with pytest.raises(ValueError, match=r"numbers its parameters, and the layout 'torch' is of two optimizers"):
        convert_checkpoint(tmp_path / "both.pt", tmp_path / "torch", "torch")
