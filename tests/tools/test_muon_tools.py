"""Tools for checkpoints of FusedMuon and torch.optim.Muon, and plans for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import distributed
from distributed import same_bits
from fused_optim import FusedLion, FusedMuon, load_optimizer_checkpoint, muon_param_groups
from fused_optim.__main__ import main
from fused_optim.tools.comparison import compare_checkpoints
from fused_optim.tools.conversion import convert_checkpoint
from fused_optim.tools.doctor import diagnose_target
from fused_optim.tools.inspector import inspect_checkpoint
from fused_optim.tools.planner import plan_parameters, plan_shapes

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


# --- plans ------------------------------------------------------------------------------------------------------------


def planned_and_real(state_dtype: str, width: int) -> tuple[dict[str, Any], dict[str, int], list[int]]:
    """This rank's plan; what it holds after a step; the bytes of its send buffers in that step."""
    torch.manual_seed(0)
    model = fully_shard(Model(width).to(torch.bfloat16), mesh=distributed.mesh())
    optimizer = FusedMuon(muon_param_groups(model), state_dtype=state_dtype)
    sent: list[int] = []
    send = dist.all_to_all_single

    def counted(target: Tensor, source: Tensor, *args: Any, **options: Any) -> Any:
        sent.append(source.nbytes)
        return send(target, source, *args, **options)

    model(torch.arange(32)).float().square().mean().backward()
    with mock.patch.object(dist, "all_to_all_single", counted):
        optimizer.step()
    held = dict.fromkeys(("masters", "states", "scales"), 0)
    for param in optimizer.store.params:
        for name, state in optimizer.state[param].items():
            held["masters" if name == "master_param" else "states"] += state.to_local().nbytes
        held["scales"] += optimizer.store.layouts[param].scales.nbytes
    plan = plan_parameters(model.named_parameters(), state_dtype=state_dtype, algorithm="muon", machine=None)
    return dict(plan), held, sent


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("state_dtype", ["int8", "float32"])
def test_what_fsdp2_allocates_and_sends(ranks: int, state_dtype: str) -> None:
    found = distributed.run(ranks, planned_and_real, state_dtype, 66 if ranks == 3 else 64)
    shapes = [(name, tuple(param.shape)) for name, param in Model(66 if ranks == 3 else 64).named_parameters()]
    whole = plan_shapes(shapes, world_size=ranks, state_dtype=state_dtype, algorithm="muon")
    assert whole["muon"] == found[0][0]["muon"] and whole["chosen"]["step_s"] is None
    for plan, held, sent in found:
        assert {kind: plan["chosen"]["bytes"][kind] for kind in held} == held
        assert (plan["muon"]["sent_bytes"], plan["muon"]["buffer_bytes"]) == (sum(sent), max(sent)) and sum(sent)
    numel = sum(4 * size * size for size in (plan_width(shapes),) * 2)
    moved = 2 * 2 * numel  # BF16, there and back
    assert sum(sum(sent) for _, _, sent in found) == moved


def plan_width(shapes: list[tuple[str, tuple[int, ...]]]) -> int:
    return dict(shapes)["embed_tokens.weight"][1]


def test_plans_have_one_moment_under_muon() -> None:
    shapes = [("layers.0.up.weight", (1024, 256)), ("lm_head.weight", (512, 256))]
    muon, adamw = (plan_shapes(shapes, algorithm=name, state_dtype="fp32") for name in ("muon", "adamw"))
    elements = 1024 * 256
    assert adamw["chosen"]["bytes"]["states"] - muon["chosen"]["bytes"]["states"] == 4 * elements
    for form in ("unscaled", "native", "torch"):
        fewer = adamw["chosen"]["checkpoint"][form] - muon["chosen"]["checkpoint"][form]
        assert fewer == 4 * elements + 4 * (form == "torch")
    assert muon["muon"]["flops"] == muon["muon"]["most_flops"] == 5 * (4 * 256**2 * 1024 + 2 * 256**3)
    assert (muon["muon"]["sent_bytes"], muon["muon"]["buckets"], adamw["muon"]) == (0, 1, None)


def test_work_of_the_owners() -> None:
    """Three matrices alike, of two ranks: one has two thirds of the work."""
    shapes = [(f"layers.{i}.weight", (64, 64)) for i in range(3)]
    muon = plan_shapes(shapes, algorithm="muon", world_size=2)["muon"]
    assert muon["most_work_to_mean"] == pytest.approx(4 / 3)
    assert muon["most_flops"] == pytest.approx(muon["flops"] * 2 / 3, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "algorithm"),
    [
        ("model.layers.0.mlp.gate_proj.weight", (8, 8), "muon"),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 8, 8), "muon"),
        ("model.layers.0.mlp.gate.weight", (8, 8), "adamw"),  # beside experts: a router
        ("transformer.wte.weight", (8, 8), "adamw"),
        ("lm_head.weight", (8, 8), "adamw"),
        ("model.layers.0.attention.output.weight", (8, 8), "muon"),
        ("model.layers.0.q_norm.weight", (8, 8), "adamw"),
        ("model.layers.0.mlp.up_proj.bias", (8,), "adamw"),
    ],
)
def test_what_names_tell(name: str, shape: tuple[int, ...], algorithm: str) -> None:
    others = [("model.layers.0.mlp.experts.0.up.weight", (8, 8))]
    plan = plan_shapes([*others, (name, shape)], algorithm="muon")
    assert plan["muon"]["parameters"] == 1 + (algorithm == "muon")


def test_plans_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot tell by name whether Muon or AdamW is for conv\.weight"):
        plan_shapes([("conv.weight", (4, 4, 3))], algorithm="muon")
    with pytest.raises(ValueError, match="algorithm: expected adamw or muon, got 'sgd'"):
        plan_shapes([("weight", (4, 4))], algorithm="sgd")


MODEL = """
from torch import nn

def build():
    return nn.ModuleDict({"embed": nn.Embedding(64, 128), "up": nn.Linear(128, 256), "odd": nn.Linear(33, 64)})

def unknown():
    return nn.Conv2d(4, 4, 3)
"""


def test_the_doctor_says_what_is_under_muon(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    found = diagnose_target(f"{tmp_path}/model.py:build", algorithm="muon", world_size=2)
    assert found["algorithms"]["muon"] == ["up.weight", "odd.weight"] and found["plan"]["muon"]["parameters"] == 2
    assert set(found["algorithms"]["adamw"]) == {"embed.weight", "up.bias", "odd.bias"}
    assert "muon: up.weight, odd.weight" in str(found) and "FusedMuon(state_dtype=int8" in str(found)
    (unblocked,) = (each for each in found["findings"] if "no block of 32" in each["what"])
    # Momentum alone: FP32 instead of int8, on rank 0 of two.
    assert "odd.weight" in unblocked["what"] and unblocked["costs"] == f"{33 * 32 * 3 / 1e3:.2f} kB more on rank 0"
    with pytest.raises(ValueError, match=r"unknown: cannot tell whether Muon or AdamW is for weight of shape"):
        diagnose_target(f"{tmp_path}/model.py:unknown", algorithm="muon")


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*command: str) -> str:
        monkeypatch.setattr(sys, "argv", ["fused_optim", *command])
        main()
        return capsys.readouterr().out

    (tmp_path / "model.py").write_text(MODEL)
    assert "2 parameters of 34,880 elements under Muon" in run(
        "doctor", f"{tmp_path}/model.py:build", "--algorithm", "muon"
    )
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 100, "num_attention_heads": 4}
    config = {"model_type": "llama", "num_hidden_layers": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = run("plan", "--hf-config", f"{tmp_path}/config.json", "--algorithm", "muon", "--world-size", "4")
    assert "14 parameters of 81,920 elements under Muon, the others under AdamW" in shown
    assert "A step is bound by the products, whose time is not predicted" in shown and "A step sends " in shown
    with pytest.raises(SystemExit, match="params: Muon's work depends on the shapes"):
        run("plan", "--params", "8B", "--algorithm", "muon")


@pytest.mark.parametrize("muon, match", [(["nope"], "no parameters nope"), ("weight", "a collection of names")])
def test_names_under_muon_that_cannot_be(muon: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"muon: .*{match}"):
        plan_parameters([("weight", nn.Parameter(torch.zeros(4, 4, device="meta")))], muon=muon)
