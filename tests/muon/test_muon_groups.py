"""Which parameters go to Muon."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fused_optim import FusedAdamW, FusedMuon, muon_param_groups
from fused_optim.quantized import Float8CurrentScaling, quantize_model_


class Block(nn.Module):
    def __init__(self, moe: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.q_proj, self.o_proj = nn.Linear(16, 24), nn.Linear(24, 16, bias=False)
        self.gate_proj = nn.Linear(16, 32, bias=False)
        if moe:
            self.gate = nn.Linear(16, 4, bias=False)
            self.experts = Experts()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.zeros(4, 16, 32))


class Model(nn.Module):
    def __init__(self, tied: bool = False, moe: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(Block(moe) for _ in range(2))
        self.lm_head = nn.Linear(16, 50, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight


def sorted_names(model: nn.Module, **options: object) -> dict[str, set[str]]:
    return {group["algorithm"]: {name for name, _ in group["params"]} for group in muon_param_groups(model, **options)}  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_by_what_they_are(tied: bool, moe: bool, compiled: bool) -> None:
    model = Model(tied, moe)
    found = sorted_names(torch.compile(model) if compiled else model)
    hidden = {f"layers.{i}.{name}.weight" for i in range(2) for name in ("q_proj", "o_proj", "gate_proj")}
    assert found["muon"] == hidden | ({f"layers.{i}.experts.down" for i in range(2)} if moe else set())
    assert found["adamw"] == {name for name, _ in model.named_parameters()} - found["muon"]


def test_quantized_weights_and_frozen_ones() -> None:
    model = Model()
    quantize_model_(model.layers, Float8CurrentScaling())
    model.layers[0].q_proj.weight.requires_grad_(False)
    found = sorted_names(model)
    assert "layers.1.q_proj.weight" in found["muon"]
    assert "layers.0.q_proj.weight" not in found["muon"] | found["adamw"]


def test_what_cannot_be_told() -> None:
    model = Model()
    model.layers[0].conv = nn.Conv2d(3, 4, 5)
    model.layers[0].mixing = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError) as caught:
        muon_param_groups(model)
    for name in ("layers.0.conv.weight of shape (4, 3, 5, 5)", "layers.0.mixing"):
        assert name in str(caught.value)
    found = sorted_names(model, muon=["*.mixing"], adamw=["*.conv.*"])
    assert "layers.0.mixing" in found["muon"]
    assert {"layers.0.conv.weight", "layers.0.conv.bias"} <= found["adamw"]
    with pytest.raises(ValueError, match="both"):
        muon_param_groups(model, muon=["*.conv.weight"], adamw=["*.conv.*"])


def test_gates_and_outputs() -> None:
    """A gate is a router beside experts alone, an output or a head is the model's outside of the layers alone."""
    model = Model()
    inside = {"gate": 4, "output": 16, "head": 16}
    for name, rows in inside.items():
        setattr(model.layers[0], name, nn.Linear(16, rows))
    model.output, model.head = nn.Linear(16, 50), nn.Linear(16, 50)
    found = sorted_names(model)
    assert {f"layers.0.{name}.weight" for name in inside} <= found["muon"]
    assert {"output.weight", "head.weight"} <= found["adamw"]
    model.layers[0].experts = Experts()
    assert "layers.0.gate.weight" in sorted_names(model)["adamw"]


def test_heads_that_models_name() -> None:
    """As models of transformers do, whatever they call it."""
    model = Model()
    model.projection = nn.Linear(16, 50, bias=False)
    assert "projection.weight" in sorted_names(model)["muon"]
    model.get_output_embeddings = lambda: model.projection  # type: ignore[assignment]
    assert "projection.weight" in sorted_names(model)["adamw"]


def test_options_and_the_optimizer() -> None:
    groups = muon_param_groups(Model(moe=True), lr=0.5, momentum=0.8)
    assert [group.get("lr") for group in groups] == [0.5, None]
    optimizer = FusedMuon(groups, lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert optimizer.param_groups[0]["param_names"][0] == "layers.0.q_proj.weight"
    assert [group.get("experts") for group in groups] == [True, None]
    assert not any("experts" in group for group in muon_param_groups(Model()))
    assert FusedMuon(groups).param_groups[0] is groups[0]  # again


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("normed", [False, True])
def test_convolutions_are_no_experts(kind: type[nn.Conv1d], normed: bool) -> None:
    """Whatever they are called, and inside of other modules: of three dims, they would pass for experts."""
    model = Model(moe=True)
    layer = kind(4, 8, 3)  # type: ignore[arg-type]
    model.layers[0].experts.conv = nn.utils.parametrizations.weight_norm(layer) if normed else layer
    weights = {name for name, param in model.named_parameters() if ".conv." in name and param.dim() > 1}
    with pytest.raises(ValueError, match=r"cannot tell .* layers\.0\.experts\.conv\..*weight"):
        muon_param_groups(model)
    with pytest.raises(ValueError, match="a convolution's weight is no matrix for Muon"):
        muon_param_groups(model, muon=["*.conv.*"])
    found = sorted_names(model, adamw=["*.conv.*"])
    assert weights <= found["adamw"] and "layers.0.experts.down" in found["muon"]
    model.patch_embed, model.layers[0].experts.conv = layer, nn.Identity()
    assert "patch_embed.weight" in sorted_names(model)["adamw"] or normed  # embeddings are AdamW's, as before


@pytest.mark.parametrize("asked", [None, False, True, "true"])
def test_three_dims_are_asked_for(asked: bool | str | None) -> None:
    conv, linear, vector = nn.Conv1d(4, 4, 3).weight, nn.Linear(4, 4).weight, nn.Linear(4, 4).bias
    words = {} if asked is None else {"experts": asked}
    for group in ({"params": [linear, conv], **words}, {"params": [("linear", linear), ("conv", conv)], **words}):
        if asked in (None, False):
            with pytest.raises(ValueError, match=r"parameter 1 \(.*shape \(4, 4, 3\).*three dims: say experts=True"):
                FusedMuon([group])
            with pytest.raises(ValueError, match="three dims"):
                FusedMuon(group["params"], **words)  # type: ignore[arg-type]
        else:
            FusedMuon(group["params"], **words)  # type: ignore[arg-type]
            FusedMuon(FusedMuon([group]).param_groups)
    FusedMuon([{"params": [linear]}, {"params": [vector, conv], "algorithm": "adamw"}])
    FusedAdamW([{"params": [conv], "experts": "a user's own key"}])
