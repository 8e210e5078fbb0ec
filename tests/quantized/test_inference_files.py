"""Files for inference servers: written by any number of ranks, held to their definitions, and read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save, save_file, save_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distributed
from distributed import Part, assert_same, join_all, long, on_each_device, part
from fused_optim import FusedAdam
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Recipe,
    load_quantized_safetensors,
    quantize_model_,
    save_quantized_safetensors,
)
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.sharding.model_files import INDEX
from quantized_cases import (
    RECIPES,
    Perceptron,
    has_tiles,
    mesh_of,
    parameter_parts,
    recipe_of,
    same_components,
    tensor_parallel,
    values,
)

EACH = pytest.mark.parametrize("recipe", RECIPES)
BLOCKED = [recipe for recipe in RECIPES if recipe.startswith("mxfp8") or recipe in ("tiles", "rows")]
LAYOUTS = [
    *((recipe, "compressed-tensors") for recipe in RECIPES),
    *((recipe, "fp8") for recipe in BLOCKED),
]
ORDER = pytest.mark.parametrize("recipe, layout", LAYOUTS)


class Model(nn.Module):
    """Linear layers of which one stays plain, a norm, a buffer, tied weights; uneven in rows on 2, 3 and 4 ranks."""

    def __init__(self, recipe: str, seed: int = 0, width: int = 256) -> None:
        super().__init__()
        rows = 1535 if has_tiles(recipe) else 7
        self.embedding = nn.Embedding(9, width, dtype=torch.bfloat16)
        self.up = nn.Linear(width, rows, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(rows, dtype=torch.float32)
        self.router = nn.Linear(width, 3, bias=False, dtype=torch.float32)
        self.head = nn.Linear(width, 9, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.arange(3))
        for number, param in enumerate(self.parameters()):
            param.data.copy_(values(param.shape, seed, number))


def is_up(_: nn.Module, name: str) -> bool:
    return name == "up"


def quantized(recipe: str, how: str = "plain", seed: int = 0) -> nn.Module:
    if how == "tp":
        model = quantize_model_(tensor_parallel(layers()), RECIPES[recipe])
        return fully_shard(model, mesh=mesh_of(how)["dp"])
    model = quantize_model_(Model(recipe, seed).to(distributed.device()), RECIPES[recipe], is_up)
    return model if how == "plain" else fully_shard(model, mesh=mesh_of(how))


def layers() -> Perceptron:
    """What tensor parallelism cuts by rows, and what it cuts by columns."""
    return Perceptron(256, 512, 256, torch.bfloat16).to(distributed.device())


def read(folder: Path) -> dict[str, Tensor]:
    """As Hugging Face's loaders do: by the index."""
    index = json.loads((folder / INDEX).read_text())
    found = {key: load_file(folder / file)[key] for key, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert all(len(load_file(folder / file)) for file in set(index["weight_map"].values()))
    return found


# --- what is written ----------------------------------------------------------------------------------------------


def decoded(found: dict[str, Tensor], name: str, scale: str) -> np.ndarray:
    """By the definitions of the layouts, in NumPy."""
    if f"{name}_packed" in found:
        packed = found[f"{name}_packed"].numpy()
        levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
        elements = np.stack([levels[packed & 15], levels[packed >> 4]], -1).reshape(packed.shape[0], -1)
        steps = found[name + scale].float().numpy() / found[f"{name}_global_scale"].numpy()
        return elements * steps.repeat(16, 1)
    elements, scales = found[name].float().numpy().astype(np.float64), found[name + scale]
    steps = 2.0 ** (scales.numpy() - 127.0) if scales.dtype == torch.uint8 else scales.numpy().astype(np.float64)
    if steps.size == 1:
        return elements * steps
    rows, columns = (-(-size // count) for size, count in zip(elements.shape, steps.shape, strict=True))
    rows = 128 if rows > 1 else 1
    return elements * steps.repeat(rows, 0)[: len(elements)].repeat(columns, 1)[:, : elements.shape[1]]


@ORDER
def test_files_hold_what_the_model_computes_with(recipe: str, layout: str, tmp_path: Path) -> None:
    model = quantized(recipe)
    save_quantized_safetensors(model, tmp_path, layout)
    found = read(tmp_path)
    scale = "_scale" if layout == "compressed-tensors" else "_scale_inv"
    np.testing.assert_allclose(
        decoded(found, "up.weight", scale), model.up.weight.dequantize(torch.float32).numpy(), rtol=2**-22
    )
    weight = ("up.weight_packed", "up.weight_global_scale") if recipe == "nvfp4" else ("up.weight",)
    plain = {"embedding.weight", "up.bias", "norm.weight", "norm.bias", "router.weight", "steps"}
    assert set(found) == {*plain, *weight, f"up.weight{scale}"}
    state = model.state_dict()
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in plain)
    if recipe != "nvfp4":
        codes = model.up.weight.components["data"]
        assert found["up.weight"].dtype == torch.float8_e4m3fn and torch.equal(
            found["up.weight"].view(torch.uint8), codes
        )
    grid = {"tiles": (12, 2), "rows": (7, 2), "mxfp8": (7, 8), "mxfp8up": (7, 8), "nvfp4": (7, 16)}
    dtype = {"mxfp8": torch.uint8, "mxfp8up": torch.uint8, "nvfp4": torch.float8_e4m3fn}.get(recipe, torch.float32)
    assert found[f"up.weight{scale}"].shape == grid.get(recipe, (7, 1)) and found[f"up.weight{scale}"].dtype == dtype


def save_sharded(cases: list[tuple[str, str]], how: str, folder: str) -> None:
    for recipe, layout in cases:
        save_quantized_safetensors(quantized(recipe, how), f"{folder}/{recipe}-{layout}", layout)


@pytest.mark.parametrize(
    "ranks, how, on", on_each_device((1, "fsdp"), (2, "fsdp"), (3, "fsdp"), long(4, "fsdp"), (4, "hsdp"), (4, "tp"))
)
def test_ranks_change_no_bit_of_the_files(ranks: int, how: str, on: str, tmp_path: Path) -> None:
    cases = LAYOUTS if ranks == 3 else [(recipe, "compressed-tensors") for recipe in RECIPES]
    distributed.run(ranks, save_sharded, cases, how, str(tmp_path / "sharded"), on=on)
    for recipe, layout in cases:
        model = quantize_model_(layers(), RECIPES[recipe]) if how == "tp" else quantized(recipe)
        save_quantized_safetensors(model, tmp_path / "whole", layout)
        folder = tmp_path / "sharded" / f"{recipe}-{layout}"
        actual, expected = read(folder), read(tmp_path / "whole")
        assert {name: value.dtype for name, value in actual.items()} == {n: v.dtype for n, v in expected.items()}
        assert_same(dict(sorted(as_bytes(actual).items())), dict(sorted(as_bytes(expected).items())))
        written = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "whole")]
        assert written[0] == written[1]
        assert len(list(folder.glob("*.safetensors"))) == (2 if how == "tp" else ranks)


def as_bytes(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.contiguous().view(torch.uint8) for name, value in found.items()}


def test_a_configuration_that_is_there_keeps_what_else_it_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 256, "quantization_config": {"old": 1}}))
    save_quantized_safetensors(quantized("tiles"), tmp_path, "fp8")
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "hidden_size": 256,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["embedding", "head", "router"],
        },
    }


def test_mixed_recipes_are_told_apart_by_names(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    for number, recipe in enumerate((MXFP8BlockScaling(), NVFP4BlockScaling(), MXFP8BlockScaling())):
        quantize_model_(model, recipe, lambda _, name, number=number: name == str(number))
    save_quantized_safetensors(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    groups = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert groups == {"mxfp8-quantized": ["0", "2"], "nvfp4-pack-quantized": ["1"]}
    assert config["format"] == "mixed-precision" and config["ignore"] == ["3"]
    with pytest.raises(ValueError, match="'fp8' has FP8 with scales of blocks, not NVFP4BlockScaling"):
        save_quantized_safetensors(model, tmp_path, "fp8")


@pytest.mark.parametrize("name", ["head", "lm_head"])
def test_heads_are_named_to_servers(name: str, tmp_path: Path) -> None:
    """Which do not take them for linear layers; and cannot cut blocks of their rows."""
    everything = {"filter_fn": lambda module, _: isinstance(module, nn.Linear)}

    def build() -> nn.ModuleDict:
        layers = {"up": nn.Linear(128, 128), name: nn.Linear(128, 128, bias=False)}
        return nn.ModuleDict(layers).bfloat16()

    save_quantized_safetensors(quantize_model_(build(), MXFP8BlockScaling(), **everything), tmp_path / "rows")
    config = json.loads((tmp_path / "rows" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["targets"] == [name, "Linear"] and config["ignore"] == []
    save_quantized_safetensors(quantize_model_(build(), Float8BlockScaling(), **everything), tmp_path / "tiles", "fp8")
    config = json.loads((tmp_path / "tiles" / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == [name]


class Experts(nn.Module):
    """Weights with an expert per entry of dim 0, one of them within a layer, and a router."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, 5, 256, dtype=torch.bfloat16))
        self.w2 = GroupedLinear(experts, 128, 7, dtype=torch.bfloat16)
        self.router = nn.Linear(256, experts, dtype=torch.bfloat16)
        for number, param in enumerate(self.parameters()):
            param.data.copy_(values(param.shape, number))


def with_experts(recipe: str) -> nn.Module:
    model = nn.Module()
    model.experts = Experts().to(distributed.device())
    return quantize_model_(model, RECIPES[recipe], param_filter=lambda _, name: name.startswith("experts.w"))


EXPERT_LAYOUTS = [case for case in LAYOUTS if not has_tiles(case[0])]


@pytest.mark.parametrize("recipe, layout", EXPERT_LAYOUTS)
@pytest.mark.filterwarnings("ignore:.*transformers 5.23.0 decodes experts in NVFP4")
def test_experts_are_written_one_by_one(recipe: str, layout: Any, tmp_path: Path) -> None:
    """As modules, which servers read; and are read again into experts, by bytes and as plain values."""
    model = with_experts(recipe)
    save_quantized_safetensors(model, tmp_path, layout)
    found, scale = read(tmp_path), "_scale" if layout == "compressed-tensors" else "_scale_inv"
    assert {name for name in found if "weight" not in name} == {"experts.router.bias"}
    for key, weight in (("w1", model.experts.w1), ("w2", model.experts.w2.weight)):
        for expert in range(3):
            name = f"experts.{expert}.{key}.weight"
            assert {n for n in found if n.startswith(name)} >= {f"{name}{scale}"}
            np.testing.assert_allclose(
                decoded(found, name, scale), weight.dequantize(torch.float32)[expert].numpy(), rtol=2**-22
            )
    again = with_experts(recipe)
    plain = nn.Module()
    plain.experts = Experts()
    for each in (again, plain):
        with torch.no_grad():
            for param in each.parameters():
                param.zero_()
        load_quantized_safetensors(each, tmp_path)
    assert torch.equal(plain.experts.w1, model.experts.w1.dequantize())
    if recipe in ("delayed", "recent"):  # the files hold no history
        torch.testing.assert_close(again.experts.w1.values(), model.experts.w1.values(), rtol=2**-22, atol=0)
    else:
        assert_same(join_all([parameter_parts(again)]), join_all([parameter_parts(model)]))


def test_experts_of_which_only_some_are_quantized_are_plain(tmp_path: Path) -> None:
    """Servers know one recipe for all weights of a module of experts."""
    model = with_experts("rows")
    model.experts.w3 = nn.Parameter(values((3, 5, 256), 3).bfloat16())
    save_quantized_safetensors(model, tmp_path)
    found = read(tmp_path)
    assert torch.equal(found["experts.w3"], model.experts.w3)
    assert torch.equal(found["experts.w1"], model.experts.w1.dequantize())
    assert all(found[f"experts.{expert}.w2.weight"].dtype == torch.float8_e4m3fn for expert in range(3))
    again = with_experts("rows")
    load_quantized_safetensors(again, tmp_path, strict=False)
    assert torch.equal(again.experts.w1.initial_values(), model.experts.w1.dequantize().float())


def save_experts(recipes: list[str], folder: str) -> None:
    mesh = mesh_of("fsdp")
    for recipe in recipes:
        model = with_experts(recipe)
        save_quantized_safetensors(fully_shard(model, mesh=mesh), f"{folder}/{recipe}")
        load_quantized_safetensors(model, f"{folder}/{recipe}")
        save_quantized_safetensors(model, f"{folder}/{recipe}-again")


@pytest.mark.parametrize("ranks, on", on_each_device(long(2), (4,)))
@pytest.mark.filterwarnings("ignore:.*transformers 5.23.0 decodes experts in NVFP4")
def test_sharded_experts_are_written_as_whole_ones(ranks: int, on: str, tmp_path: Path) -> None:
    """Three experts, so that ranks have one, two or none."""
    recipes = [recipe for recipe in RECIPES if not has_tiles(recipe)]
    distributed.run(ranks, save_experts, recipes, str(tmp_path), on=on)
    for recipe in recipes:
        save_quantized_safetensors(with_experts(recipe), tmp_path / "whole")
        expected = as_bytes(read(tmp_path / "whole"))
        for folder in (recipe, f"{recipe}-again"):
            assert_same(dict(sorted(as_bytes(read(tmp_path / folder)).items())), dict(sorted(expected.items())))


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe, shape, layout, text", [
    (Float8CurrentScaling(), (4, 64), "fp8", "^weight: layout 'fp8' has FP8 with scales of blocks, not Float8Current"),
    (MXFP8BlockScaling(), (4, 80), "fp8", r"^weight: groups of 32 must divide the last dim of shape \(4, 80\)"),
    (NVFP4BlockScaling(), (4, 24), "compressed-tensors", r"^weight: groups of 16 must divide .* \(4, 24\)"),
    (MXFP8BlockScaling(), (4, 64), "gguf", "layout: expected one of 'compressed-tensors', 'fp8', got 'gguf'"),
])  # fmt: skip
def test_what_a_layout_has_not_is_refused(
    recipe: Recipe, shape: tuple[int, int], layout: Any, text: str, tmp_path: Path
) -> None:
    model = quantize_model_(nn.Linear(shape[1], shape[0], bias=False), recipe)
    with pytest.raises(ValueError, match=text):
        save_quantized_safetensors(model, tmp_path / "new", layout)
    assert not (tmp_path / "new").exists()


def save_unfinished(folder: str) -> str:
    model = quantized("mxfp8", "fsdp")
    if dist.get_rank() == 1:
        nn.init.normal_(local_tensor(model.up.weight))
    with pytest.raises(RuntimeError) as error:
        save_quantized_safetensors(model, folder)
    return str(error.value)


def test_a_failure_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = distributed.run(2, save_unfinished, str(tmp_path / "new"))
    assert (
        "up.weight: plain values were written" in second and "rank 1 failed" in first and second.split(":")[0] in first
    )
    assert not (tmp_path / "new").exists()


def test_safetensors_and_its_users_say_what_to_do_instead(tmp_path: Path) -> None:
    model = quantize_model_(layers(), RECIPES["mxfp8"])
    text = "up.weight: safetensors cannot hold a quantized weight as one tensor: save_quantized_safetensors"
    for way in (
        lambda: save_file(model.state_dict(), tmp_path / "a"),
        lambda: save(model.state_dict()),
        lambda: save_model(model, str(tmp_path / "a")),
    ):
        with pytest.raises(TypeError, match=text):
            way()
    writer = torch.distributed.checkpoint.HuggingFaceStorageWriter(str(tmp_path / "b"))
    with pytest.raises(torch.distributed.checkpoint.api.CheckpointException, match=text):
        torch.distributed.checkpoint.save(model.state_dict(), storage_writer=writer)


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], str]]:
    """What models of seed 0 wrote."""
    folder = tmp_path_factory.mktemp("files")
    with distributed.one_thread():
        for recipe, layout in LAYOUTS:
            save_quantized_safetensors(quantized(recipe), folder / f"{recipe}-{layout}", layout)
    yield {case: str(folder / "-".join(case)) for case in LAYOUTS}


def load_each(found: dict[tuple[str, str], str], how: str, meta: bool) -> dict[tuple[str, str], list[dict[str, Part]]]:
    """Into the same recipe and into a plain model: parameters, and what masters start from."""
    result = {}
    for (recipe, layout), folder in found.items():
        model, plain = quantized(recipe, "plain", 1), Model(recipe, 1).to(distributed.device())
        if meta:
            model, plain = model.to("meta"), plain.to("meta")
        if how != "plain":
            model, plain = (fully_shard(each, mesh=mesh_of(how)) for each in (model, plain))
        if meta:
            for each in (model, plain):
                with pytest.raises(RuntimeError, match="to_empty"):
                    load_quantized_safetensors(each, folder)
                each.to_empty(device=distributed.device())
                each.head.weight = each.embedding.weight  # torch unties them
        for each in (model, plain):
            load_quantized_safetensors(each, folder)
        masters = FusedAdam(model.parameters()).master_state_dict(model)
        parts = {name: part(value) for name, value in masters.items()}
        result[recipe, layout] = [parameter_parts(model), parameter_parts(plain), parts]
    return result


@pytest.mark.parametrize(
    "ranks, how, meta, on",
    on_each_device((1, "plain", False), (1, "fsdp", False), (2, "fsdp", True), (3, "fsdp", False), (4, "hsdp", False)),
)
def test_files_are_read_as_initial_weights(
    files: dict[tuple[str, str], str], ranks: int, how: str, meta: bool, on: str
) -> None:
    """Bytes into the same format, values into plain weights, and masters start from what the bytes decode to."""
    results = distributed.run(ranks, load_each, files, how, meta, on=on)
    for recipe, layout in files:
        model, plain = quantized(recipe), Model(recipe)
        actual, in_plain, masters = (join_all([result[recipe, layout][at] for result in results]) for at in range(3))
        expected = join_all([parameter_parts(model)])
        if recipe in ("delayed", "recent"):  # the files hold no history, so the values are quantized anew
            weight = QuantizedTensor.from_values(model.up.weight.values(), RECIPES[recipe])
            expected |= {f"up.weight: {name}": part for name, part in weight.components.items()}
        if recipe == "nvfp4":  # the inverse of the global scale is in the file
            scale = "up.weight: tensor_scale"
            torch.testing.assert_close(actual[scale], expected[scale], rtol=2**-22, atol=0)
            actual[scale] = expected[scale]
        assert_same(actual, expected)
        values = model.up.weight.dequantize(torch.float32)
        torch.testing.assert_close(in_plain["up.weight: parameter"], values.bfloat16(), rtol=2**-7, atol=0)
        others = {
            f"{name}: parameter": param.detach() for name, param in plain.named_parameters() if name != "up.weight"
        }
        assert_same({name: in_plain[name] for name in others}, others)
        rtol = 2**-8 if recipe in ("delayed", "recent") else 2**-22  # of BF16, or none
        torch.testing.assert_close(masters["up.weight"], values, rtol=rtol, atol=0)


def foreign(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Files that others write, of a weight of 256 x 160, and what it decodes to."""
    codes = values((256, 160), 3).clamp(-448, 448).to(torch.float8_e4m3fn)
    if kind == "rows":
        scale = values((256, 1), 4).abs()
        return {"weight": codes, "weight_scale": scale.bfloat16()}, codes.float() * scale.bfloat16().float()
    scale = values((2, 2), 4).abs()
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :160]
    if kind == "E8M0":  # 128 x 128 with one byte for a scale
        scale = scale.to(torch.float8_e8m0fnu)
        spread = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :160]
        return {"weight": codes, "weight_scale_inv": scale.view(torch.uint8)}, codes.float() * spread
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


@pytest.mark.parametrize("kind", ["tiles", "rows", "E8M0"])
@EACH
def test_files_of_others_are_read(kind: str, recipe: str, tmp_path: Path) -> None:
    stored, expected = foreign(kind)
    save_file(stored, tmp_path / "model.safetensors")
    plain = nn.Linear(160, 256, bias=False)
    load_quantized_safetensors(plain, tmp_path)
    assert torch.equal(plain.weight, expected)
    model = quantize_model_(nn.Linear(160, 256, bias=False), RECIPES[recipe])
    load_quantized_safetensors(model, tmp_path / "model.safetensors")
    assert torch.equal(model.weight.initial_values(), expected)
    if kind in ("tiles", "E8M0") and recipe == "tiles":
        assert torch.equal(model.weight.components["data"], stored["weight"].view(torch.uint8))
        assert torch.equal(model.weight.values(), expected)
    else:
        assert same_components(model.weight, QuantizedTensor.from_values(expected, recipe_of(recipe)))


@pytest.mark.parametrize("change, error, text", [
    (lambda f: f.pop("weight_scale_inv"), ValueError, "^weight: expected a scale beside FP8"),
    (lambda f: f.update(weight_scale_inv=torch.ones(3, 2)), ValueError, r"\(3, 2\) fit no blocks .* \(256, 160\)"),
    (lambda f: f.update(weight_scale_inv=torch.ones(256)), ValueError, r"^weight: scales of shape \(256,\) fit no"),
    (lambda f: f.update(weight=torch.zeros(256, 161)), ValueError, r"expected shape \(256, 160\), .* \(256, 161\)"),
    (lambda f: f.update(other=torch.ones(1)), KeyError, r"the model has no 'other' \(0 and 1 names\); strict=False"),
    (lambda f: f.clear() or f.update(other=torch.ones(1)), KeyError, "files lack weight and the model has no 'other'"),
])  # fmt: skip
def test_files_that_do_not_fit_are_refused(change: Any, error: type[Exception], text: str, tmp_path: Path) -> None:
    stored, _ = foreign("tiles")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    model = nn.Linear(160, 256, bias=False)
    before = model.weight.detach().clone()
    with pytest.raises(error, match=text):
        load_quantized_safetensors(model, tmp_path)
    assert torch.equal(model.weight, before)
    if error is KeyError and "weight" in stored:
        load_quantized_safetensors(model, tmp_path, strict=False)
        assert not torch.equal(model.weight, before)
