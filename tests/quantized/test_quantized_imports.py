"""Code for quantized weights is imported when it is asked for, or when a file holds some. Each in a new process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fresh
from distributed import assert_same
from fused_optim.quantized import QuantizedTensor
from fused_optim.torch_versions import REPLACED
from quantized_cases import RECIPES, plain_model, quantize_model_

# Several weights of each recipe, one of them as a parameter, and what they decode to; written by version 0.1.
WRITTEN = Path(__file__).with_name("weights_0.1.pt")
# A pickled model with layers of two classes, what its weights decode to, recipes and a filter; written by version 0.2.
MODEL = Path(__file__).with_name("model_0.2.pt")
LOADED = "any(name.startswith('fused_optim.quantized') for name in sys.modules)"


def run(code: str, *arguments: object) -> str:
    done = fresh.run(f"import sys, torch\n{code}", *arguments, imported=fresh.TORCH)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_optimizers_of_plain_parameters_import_none() -> None:
    run(f"""
import io, pickle
from fused_optim import *
assert not {LOADED}
model = torch.nn.Linear(32, 4).bfloat16()
optimizer = FusedAdamW(model.parameters(), exp_avg_dtype=torch.int8)
for param in model.parameters():
    param.grad = torch.ones_like(param)
clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
file = io.BytesIO()
torch.save(optimizer.state_dict(), file)
file.seek(0)
optimizer.load_state_dict(torch.load(file, weights_only=True))
pickle.loads(pickle.dumps(optimizer)).sync_params_from_master()
assert not {LOADED}
""")


# --- what is replaced in torch ----------------------------------------------------------------------------------

# attributes(): of torch's modules and of the classes in them, by qualified names; how many hooks there are, too.
ATTRIBUTES = """
import types, warnings
warnings.simplefilter("ignore")  # some of torch's attributes are deprecated
def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and type(module) is types.ModuleType:
            owners = {name: module}
            for value in vars(module).values():
                if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
                    owners[f"{value.__module__}.{value.__qualname__}"] = value
            for owner, of in owners.items():
                for key, value in vars(of).items():
                    if not isinstance(value, types.ModuleType):  # submodules that are imported
                        hooks = len(value) if "hooks" in key and isinstance(value, dict) else 0
                        found[f"{owner}.{key}"] = value, hooks
    return found
def changed(before, after):
    missing = None, 0
    pairs = {key: (before.get(key, missing), after.get(key, missing)) for key in {*before, *after}}
    return sorted(key for key, (a, b) in pairs.items() if a[0] is not b[0] or a[1] != b[1])
"""


def test_it_changes_nothing_in_torch_until_a_weight_is_made() -> None:
    """Then what the documents list, once. The modules that it imports are imported before, for comparison."""
    modules = run("import fused_optim.quantized\nprint(*(name for name in sys.modules if name.startswith('torch.')))")
    found = run(
        f"""{ATTRIBUTES}
import contextlib, importlib
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):  # not all are files
        importlib.import_module(name)
import fused_optim  # which lets torch.load read quantized weights
found = [attributes()]
from fused_optim.quantized import Float8CurrentScaling, MXFP8BlockScaling, QuantizedTensor
found.append(attributes())
for recipe in (Float8CurrentScaling(), MXFP8BlockScaling()):
    QuantizedTensor.from_values(torch.ones(32, 32), recipe)
    found.append(attributes())
for before, after in zip(found, found[1:]):
    print(*changed(before, after))
""",
        *modules.split(),
    )
    on_import, first, second, _ = found.split("\n")
    assert on_import == second == ""
    assert set(first.split()) == REPLACED.keys()


# --- files ------------------------------------------------------------------------------------------------------


def test_files_of_weights_are_read_after_import_fused_optim(tmp_path: Path) -> None:
    """Several weights in one file: torch looks its function up once."""
    expected = {}
    for recipe in RECIPES:
        model = plain_model(recipe)
        quantize_model_(model, RECIPES[recipe])
        torch.save(model.state_dict(), tmp_path / recipe)
        for name, weight in model.state_dict().items():
            if isinstance(weight, QuantizedTensor):
                kept = {key: part for key, part in weight.components.items() if key != "initial"}
                expected |= {f"{recipe} {name} {key}": part for key, part in kept.items()}
    run(
        f"""
import fused_optim
assert not {LOADED}
folder, *recipes = sys.argv[1:]
parts = {{}}
for recipe in recipes:
    for name, weight in torch.load(f"{{folder}}/{{recipe}}", weights_only=True).items():
        if isinstance(weight, fused_optim.quantized.QuantizedTensor):
            parts |= {{f"{{recipe}} {{name}} {{key}}": part for key, part in weight.components.items()}}
torch.save(parts, f"{{folder}}/parts")
""",
        *(tmp_path, *RECIPES),
    )
    assert_same(torch.load(tmp_path / "parts", weights_only=True), expected)


def test_files_of_earlier_versions_are_read() -> None:
    run(
        f"""
import fused_optim
assert not {LOADED}
found = torch.load(sys.argv[1], weights_only=True)
assert [type(weight.recipe).__name__ for weight in found["weights"]] == [
    *("Float8CurrentScaling", "Float8DelayedScaling", "Float8BlockScaling", "Float8BlockScaling"),
    *("MXFP8BlockScaling", "NVFP4BlockScaling"),
]
for weight, values in zip(found["weights"], found["values"], strict=True):
    assert values.any() and torch.equal(weight.dequantize(), values)
assert [isinstance(weight, torch.nn.Parameter) for weight in found["weights"][:3]] == [True, True, False]
assert [weight.requires_grad for weight in found["weights"][:3]] == [False, True, False]
""",
        WRITTEN,
    )


def test_pickled_models_of_earlier_versions_are_read() -> None:
    """Which name functions and classes by the modules that these were in."""
    run(
        """
found = torch.load(sys.argv[1], weights_only=False)
import fused_optim
from fused_optim import quantized
model, values = found["model"], found["values"]
assert {name: type(module).__name__ for name, module in model.items()} == {
    "layer": "QuantizedLinear", "experts": "GroupedLinear"
}
assert type(model["experts"]) is quantized.GroupedLinear and type(found["filter"]) is quantized.UsualLayers
for name, weight in model.named_parameters():
    if name in values:
        assert type(weight) is quantized.QuantizedTensor and torch.equal(weight.dequantize(), values[name])
assert len(values) == 2 and all(each.any() for each in values.values())
assert found["recipes"] == [
    quantized.Float8CurrentScaling(), quantized.Float8DelayedScaling(margin=1),
    quantized.Float8BlockScaling(power_of_two=True), quantized.MXFP8BlockScaling(), quantized.NVFP4BlockScaling(),
]
# The hook that loads plain values into quantized weights came along.
plain = {name: torch.full_like(each, 2.0) for name, each in values.items()}
model.load_state_dict(plain, strict=False, assign=True)
assert all(type(model.get_parameter(name)) is quantized.QuantizedTensor for name in plain)
assert (model["experts"].weight.dequantize() == 2.0).all()
""",
        MODEL,
    )


@pytest.mark.parametrize(
    ("name", "instead"), [("rms_norm_linear", r"layer\(y\)"), ("swiglu_mlp", r"silu\(gate\(y\)\)")]
)
def test_removed_functions_say_what_to_write_instead(name: str, instead: str) -> None:
    with pytest.raises(ImportError, match=rf"quantized\.{name} was removed: write .*{instead}"):
        exec(f"from fused_optim.quantized import {name}")
