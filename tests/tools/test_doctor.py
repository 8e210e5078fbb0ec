"""``doctor``: what falls back of models and of checkpoints, and one line for whatever is no target."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import distributed
from fused_optim import FusedAdamW
from fused_optim.__main__ import main
from fused_optim.checkpoint.reading.saved_optimizer import SavedTensor
from fused_optim.quantized import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, quantize_model_
from fused_optim.tools import doctor
from fused_optim.tools.doctor import Diagnosis, diagnose_target
from fused_optim.tools.planner import plan_parameters

MODEL = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

def even():
    return nn.Linear(256, 64, bias=False, dtype=torch.bfloat16)

def odd():
    model = nn.Sequential(nn.Linear(256, 50, bias=False), nn.LayerNorm(50), nn.Linear(50, 256, bias=False))
    return model.bfloat16()

def by_columns():
    model, mesh = even(), init_device_mesh("cpu", (8,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.new_empty(64, 96), mesh, [Shard(1)]))
    return model

def raises():
    raise KeyError("layers")

def in_lines():
    raise ValueError("one\\nanother")

def float64():
    return nn.Linear(4, 4, dtype=torch.float64)

def lazy():
    return nn.LazyLinear(4)

def empty():
    return nn.Module()

def number():
    return 3

value = 3
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


def findings(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """What was found of parameters: the installation is any."""
    return [(each["what"], each["costs"]) for each in diagnosis["findings"] if "parameters" in each["what"]]


def test_nothing_falls_back(model: str) -> None:
    diagnosis = diagnose_target(f"{model}:even", world_size=4)
    assert findings(diagnosis) == [] and diagnosis["plan"]["chosen"]["bytes"]["states"] == 2 * 64 * 256 // 4


def test_what_falls_back_and_what_it_costs(model: str) -> None:
    """The bytes are those by which FP32 states are larger."""
    for ranks in (1, 2):
        small, odd = findings(diagnose_target(f"{model}:odd", world_size=ranks))
        assert small == (
            "2 parameters (1.weight, 1.bias) with one dim keep FP32 states",
            f"{2 * 50 * 6 // ranks} B more on rank 0",
        )
        assert odd[0].startswith("1 parameters (2.weight) keep FP32 states: no block of 32 divides their rows")
        assert odd[1] == f"{256 * 50 * 6 / ranks / 1e3:.2f} kB more on rank 0"
    assert findings(diagnose_target(f"{model}:odd", state_dtype="bf16")) == []


# --- quantized models -------------------------------------------------------------------------------------------------

RECIPES = {
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),  # of 128 rows, which shards cut
    "mxfp8": MXFP8BlockScaling(),
    "kept": MXFP8BlockScaling(keep_weights=True),
}


def quantized(recipe: str) -> nn.Module:
    linears = [nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(2)]
    linears[0].bias.requires_grad_(False)
    return quantize_model_(nn.Sequential(*linears), RECIPES[recipe])


def held_of(recipe: str, state_dtype: str) -> tuple[int, int]:
    """Bytes of states and masters, and of parameters, after a step of FSDP2 training."""
    model = fully_shard(quantized(recipe), mesh=distributed.mesh())
    optimizer = FusedAdamW(model.parameters(), state_dtype=state_dtype)
    model(torch.ones(4, 256, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    model.reshard()
    return optimizer.state_bytes(), sum(bytes_of(param.to_local()) for param in model.parameters())


def bytes_of(local: Tensor) -> int:
    components = getattr(local, "components", None)
    return local.nbytes if components is None else sum(part.nbytes for part in components.values())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_quantized_models_are_sharded_as_fsdp2_does(recipe: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have FP32 masters, the smaller weights of their recipe, and their frozen parameters have no states."""
    monkeypatch.setattr(doctor, "_of_factory", lambda _: on_meta(recipe))
    plan = diagnose_target("any:model", world_size=ranks, state_dtype="int8")["plan"]
    states, weights = distributed.run(ranks, held_of, recipe, "int8")[0]
    held = plan["chosen"]["bytes"]
    assert held["masters"] + held["states"] + held["scales"] == states
    assert held["parameters"] == weights
    gradients = sum(-(-256 // ranks) * numel for numel in (256, 256, 1)) * 2  # of two weights and a bias
    assert held["gradients"] == plan["adamw"]["bytes"]["gradients"] == gradients
    assert plan["adamw"]["bytes"]["states"] == 2 * gradients


def on_meta(recipe: str) -> nn.Module:
    with torch.device("meta"):
        return quantized(recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_summaries_of_quantized_models_without_values(recipe: str) -> None:
    model = on_meta(recipe)
    rows = FusedAdamW(model.named_parameters()).summary()["formats"]
    assert sum(row["parameters"] for row in rows) == 3
    assert plan_parameters(model.named_parameters())["chosen"]["bytes"]["masters"] >= 2 * 256 * 256 * 2


def test_sharding_that_cuts_blocks(model: str) -> None:
    """96 columns have blocks; the 12 of each of 8 ranks have none."""
    ((what, _),) = findings(diagnose_target(f"{model}:by_columns", world_size=8))
    assert "their shards cut rows into pieces that no block of 32 divides" in what


def test_masters(model: str) -> None:
    ((what, _),) = findings(diagnose_target(f"{model}:even", master_bits=0))
    assert what.startswith("16-bit parameters have no masters")
    Path(model).write_text(MODEL.replace("bfloat16", "float32"))
    ((what, _),) = findings(diagnose_target(f"{model}:even", master_bits=24))
    assert what.startswith("1 parameters are not BF16: FP32 ones are their own masters")


def test_the_installation(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "RELEASES", ("1.9", "1.10"))
    monkeypatch.setattr(doctor, "why_reference", lambda kind: f"no {kind} engine")
    find = doctor.importlib.util.find_spec
    missing = ("numpy", "safetensors")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    text = str(diagnose_target(f"{model}:even"))
    for expected in ("known are 1.9 to 1.10", "no cpu engine", "numpy is missing", "safetensors is missing"):
        assert expected in text


def saved(folder: Path, form: str, keys: tuple[str, ...]) -> str:
    net = nn.Sequential(nn.Linear(256, 64, dtype=torch.bfloat16), nn.Linear(64, 50, dtype=torch.bfloat16))
    optimizer = FusedAdamW(net.named_parameters(), state_dtype="int8", checkpoint_format=form)
    net(torch.ones(256, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    states = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    dcp.save({key: states[key] for key in keys}, checkpoint_id=folder / form)
    return str(folder / form)


@pytest.mark.parametrize("form", ["native", "unscaled"])
def test_checkpoints(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parameters are planned for; values are not read."""
    path = saved(tmp_path, form, ("model", "optimizer"))
    monkeypatch.delattr(SavedTensor, "value")
    elements = 256 * 64 + 64 + 64 * 50 + 50
    for ranks in (1, 2):
        adamw = diagnose_target(path, world_size=ranks)["plan"]["adamw"]["bytes"]  # all of it BF16
        assert adamw == {
            "parameters": 2 * elements // ranks,
            "gradients": 2 * elements // ranks,
            "masters": 0,
            "states": 4 * elements // ranks,
            "scales": 0,
            "total": 8 * elements // ranks,
        }
    diagnosis = diagnose_target(path, state_dtype="float8_e4m3fn")
    assert diagnosis["plan"]["elements"] == elements
    ((what, _),) = findings(diagnosis)
    assert what == "2 parameters (0.bias, 1.bias) with one dim keep FP32 states"


def test_parts_of_checkpoints(tmp_path: Path) -> None:
    lonely = str(diagnose_target(saved(tmp_path / "optimizer", "native", ("optimizer",))))
    assert "2 remainders without the BF16 parameters that they complete" in lonely
    assert "there are no states" in str(diagnose_target(saved(tmp_path / "model", "native", ("model",))))


def run(*command: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fused_optim", "doctor", *command])
        main()


def test_the_command(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"{model}:odd", "--world-size", "2", "--state-dtype", "8bit", "--master-bits", "24")
    text = capsys.readouterr().out
    assert "FusedAdamW(state_dtype=int8, master_bits=24): rank 0 holds" in text and "change: make the rows'" in text
    run(f"{model}:odd", "--json")
    assert json.loads(capsys.readouterr().out)["plan"]["parameters"] == 4
    for command, message in {
        (f"{model}:raises",): r"raises\(\) raised KeyError: 'layers'",
        (f"{model}:in_lines",): "raised ValueError: one another",
        (f"{model}:float64",): r"float64: .*'weight'.* got torch.float64",
        (f"{model}:float64", "--world-size", "2"): r"float64: .*'weight'.* got torch.float64",
        (f"{model}:lazy",): "lazy: weight is not initialised",
        (f"{model}:empty",): "no parameters",
        (f"{model}:even", "--param-dtype", "foo"): "param_dtype is for checkpoints",
        (f"{model}:even", "--param-dtype", "bf16"): "param_dtype is for checkpoints",
        (f"{model}:number",): "expected a torch.nn.Module, got int",
        (f"{model}:value",): "no function 'value'",
        (f"{model}:nothing",): "no function 'nothing'",
        ("no_such_module:make",): "cannot be imported: ModuleNotFoundError",
        (f"{model}x.py:even",): "cannot be imported: FileNotFoundError",
        ("no_such_checkpoint",): "found nothing",
        (model,): "cannot be read",
        (f"{model}:even", "--world-size", "0"): "world_size: expected a number from 1",
        (f"{model}:even", "--state-dtype", "int3"): "state_dtype: expected one of",
    }.items():
        with pytest.raises(SystemExit, match=f"^error: .*{message}") as raised:
            run(*command)
        assert "\n" not in str(raised.value)


def test_the_page(model: str) -> None:
    """Its example is the model of these tests, and what it shows is what is found."""
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    diagnosis = diagnose_target(f"{model}:odd", world_size=8)
    diagnosis["findings"] = [each for each in diagnosis["findings"] if "parameters (" in each["what"]]
    assert str(diagnosis).partition("\n")[2] in page
