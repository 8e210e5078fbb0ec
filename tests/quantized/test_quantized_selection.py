"""Which parameters become quantized: by modules, by names, while models are built; what is refused, and how."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations, parametrize, prune

import distributed
from distributed import Part, assert_same, join_all, long, on_each_device, shard_like
from fused_optim import FusedAdam
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    GroupedLinear,
    MXFP8BlockScaling,
    QuantizedTensor,
    Recipe,
    UsualLayers,
    gains,
    quantize_model_,
    quantized_model_init,
    recipes,
)
from fused_optim.sharding.dtensor import local_tensor
from quantized_cases import RECIPES, parameter_parts, values

EACH = pytest.mark.parametrize("recipe", RECIPES)
CPU = torch.device("cpu")
MX = MXFP8BlockScaling()


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, param in model.named_parameters() if isinstance(param, QuantizedTensor)}


# --- what is refused --------------------------------------------------------------------------------------------


def refuses(model: nn.Module, error: type[Exception], text: str, recipe: Any = MX, **filters: Any) -> None:
    """And changes nothing."""
    before = list(model.named_parameters())
    with pytest.raises(error, match=text):
        quantize_model_(model, recipe, **filters)
    assert all(a is b for (_, a), (_, b) in zip(before, model.named_parameters(), strict=True))
    assert len(before) == len(list(model.named_parameters())) and not quantized_names(model)


@EACH
@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.uint8, torch.int8, torch.float64, torch.float8_e4m3fn], ids=str
)
def test_weights_of_other_dtypes_are_refused_by_name(recipe: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    model[1].weight = nn.Parameter(torch.ones(128, 128).to(dtype), requires_grad=False)
    text = rf"1\.weight, shape \(128, 128\): quantized weights are float32, bfloat16 or float16, got {dtype}"
    refuses(model, TypeError, text, RECIPES[recipe])
    for make in (QuantizedTensor.from_values, lambda x, r: QuantizedTensor.empty(r, x.shape, x.dtype, x.device)):
        with pytest.raises(TypeError, match=f"got {dtype}"):
            make(model[1].weight.detach(), RECIPES[recipe])


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized(layer: nn.Linear) -> None:
    parametrize.register_parametrization(layer, "weight", Double())


def old_weight_norm(layer: nn.Linear) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(layer)


def pruned(layer: nn.Linear) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.parametrize(
    "change",
    [parametrized, parametrizations.weight_norm, parametrizations.spectral_norm, old_weight_norm, pruned],
    ids=lambda change: change.__name__,
)
def test_computed_weights_are_refused_by_the_name_of_their_module(change: Callable[[nn.Linear], Any]) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32)))
    change(model[1][0])
    refuses(
        model, ValueError, r"1\.0, a \w*Linear: its weight is computed from other tensors.*leave it out by a filter"
    )
    quantize_model_(model, MX, lambda module, name: name == "0")
    assert quantized_names(model) == {"0.weight"}


def test_what_parametrizations_compute_from_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    parametrized(model[0])
    text = r"0\.parametrizations\.weight\.original is what torch.nn.utils.parametrize computes"
    refuses(model, ValueError, text, param_filter=lambda param, name: param.dim() == 2)
    parametrized_bias = nn.Linear(32, 32)
    parametrize.register_parametrization(parametrized_bias, "bias", Double())
    assert quantized_names(quantize_model_(parametrized_bias, MX)) == {"weight"}


@pytest.mark.parametrize("recipe, text", [
    (MXFP8BlockScaling, r"recipe: expected an instance, got the class MXFP8BlockScaling: write MXFP8BlockScaling\(\)"),
    (Recipe, "got the class Recipe"), (None, "got a NoneType"),
    ("mxfp8", r"recipe: expected a recipe such as MXFP8BlockScaling\(\), got 'mxfp8'"), (torch.ones(2), "got a Tensor"),
])  # fmt: skip
def test_what_is_no_recipe_is_refused(recipe: Any, text: str) -> None:
    refuses(nn.Linear(32, 32), TypeError, text, recipe)
    with pytest.raises(TypeError, match=text), quantized_model_init(recipe):
        raise AssertionError("was entered")
    with pytest.raises(TypeError, match=text):
        gains(recipe, 8192)
    for make in (QuantizedTensor.from_values, lambda x, recipe: QuantizedTensor.empty(recipe, x.shape, x.dtype, CPU)):
        with pytest.raises(TypeError, match=text):
            make(torch.ones(32, 32), recipe)


def test_all_recipes_are_named_to_those_who_have_none() -> None:
    named = r"got a MXFP8BlockScaling of .*; fused_optim\.quantized has "
    named += ", ".join(rf"{name}\(\)" for name in recipes.RECIPES)
    of_another_library = type("MXFP8BlockScaling", (), {})()
    refuses(nn.Linear(32, 32), TypeError, named, of_another_library)


def test_filters_are_refused_where_they_pick_what_has_no_weight() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(32, 32)), nn.ReLU(), nn.LayerNorm(32), nn.LayerNorm(4, bias=False))
    model[3].weight = None
    has_none = "filter_fn picks modules that have a parameter `weight`, and this has none"
    refuses(model, ValueError, "^the model, a Sequential: .*layers that it contains", filter_fn=lambda *_: True)
    for name, kind, more in (("0", "Sequential", "; pick the layers that"), ("1", "ReLU", ""), ("3", "LayerNorm", "")):
        text = f"^{name}, a {kind}: {has_none}{more}.*param_filter"
        refuses(model, ValueError, text, filter_fn=lambda _, other, name=name: other == name)
    refuses(model, ValueError, r"^2\.weight, shape \(32,\): .*two dims", filter_fn=lambda _, name: name == "2")
    for filters in ({"filter_fn": "0.0"}, {"param_filter": ["0.0.weight"]}):
        refuses(model, TypeError, f"{next(iter(filters))}: expected a function, got a", **filters)
    both = {"filter_fn": lambda *_: False, "param_filter": lambda *_: False}
    refuses(model, ValueError, "give one of them", **both)


def test_lazy_modules_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(32))
    with pytest.raises(ValueError, match=r"0\.weight is not initialised: run a lazy module once"):
        quantize_model_(model, MX)


# --- parameters of any name -------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Attention, then experts whose weights have three dims, and a router that stays plain."""

    def __init__(self, experts: int = 5, width: int = 64, hidden: int = 96) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.router = nn.Parameter(torch.empty(experts, width))
        self.w1, self.w3 = (nn.Parameter(torch.empty(experts, hidden, width)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(experts, width, hidden))
        self.b2 = nn.Parameter(torch.empty(experts, width))
        for number, param in enumerate(self.parameters()):
            param.data.copy_(values(param.shape, number) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0]
        share = torch.softmax(x @ self.router.t(), -1)
        up = torch.einsum("bsw,ehw->bseh", x, self.w1) * torch.sigmoid(torch.einsum("bsw,ehw->bseh", x, self.w3))
        return torch.einsum("bseh,ewh,bse->bsw", up, self.w2, share) + share @ self.b2


PICKED = {"w1", "w2", "w3", "attention.in_proj_weight"}


def picks(param: nn.Parameter, name: str) -> bool:
    return name in PICKED


def experts(recipe: str) -> Experts:
    return quantize_model_(Experts().to(distributed.device()), RECIPES[recipe], param_filter=picks)


def test_tiles_of_three_dims_are_refused_by_name() -> None:
    refuses(
        Experts(), ValueError, r"^w1, shape \(5, 96, 64\): .*multiples of 128", Float8BlockScaling(), param_filter=picks
    )
    model = quantize_model_(
        Experts(), Float8BlockScaling(), param_filter=lambda _, name: name.endswith("in_proj_weight")
    )
    assert quantized_names(model) == {"attention.in_proj_weight"}


THREE_DIMS = [recipe for recipe in RECIPES if recipe != "tiles"]  # whose blocks need larger experts


def train_experts(recipes: list[str], sharded: bool) -> dict[str, tuple[dict[str, Part], list[float], list[str]]]:
    """Two steps of a model and of a plain one that is given its decoded weights: where the gradients differ."""
    found = {}
    for recipe in recipes:
        model, plain = experts(recipe), Experts().to(distributed.device())
        assert quantized_names(model) == PICKED
        if sharded:
            for each in (model, plain):
                fully_shard(each, mesh=distributed.mesh())
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        losses, different = [], []
        for step in range(2):
            for name, param in plain.named_parameters():
                local = local_tensor(model.get_parameter(name).detach())
                given = local.dequantize() if isinstance(local, QuantizedTensor) else local
                local_tensor(param.detach()).copy_(given)
            x = values((2, 3, 64), 9, step)
            for each in (model, plain):
                each.zero_grad()
                loss = each(x).square().mean()
                loss.backward()
                losses.append(float(loss.detach()))
            for name, param in plain.named_parameters():
                grad = model.get_parameter(name).grad
                if not torch.equal(local_tensor(grad), local_tensor(param.grad)):
                    different.append(name)
            for index, param in enumerate(model.parameters()):  # the same on any number of ranks
                param.grad = shard_like(values(param.shape, 7, index, step), param)
            optimizer.step()
        found[recipe] = parameter_parts(model), losses, different
    return found


@pytest.mark.parametrize("ranks, on", on_each_device(long(1), (2,), long(3), (4,)))
def test_parameters_of_any_name_train_as_plain_ones(ranks: int, on: str) -> None:
    """Under FSDP2, which cuts experts apart, and with the same bits on any number of ranks."""
    (expected,) = distributed.run(1, train_experts, THREE_DIMS, False, on=on)
    results = distributed.run(ranks, train_experts, THREE_DIMS, True, on=on)
    for recipe in THREE_DIMS:
        for _, losses, different in (result[recipe] for result in results):
            assert not different and losses[0::2] == losses[1::2]
        assert_same(join_all([result[recipe][0] for result in results]), join_all([expected[recipe][0]]))


@EACH
def test_attention_in_evaluation_decodes(recipe: str) -> None:
    """torch has a path of its own for it."""
    model = nn.MultiheadAttention(64, 2, batch_first=True).eval()
    quantize_model_(model, RECIPES[recipe], param_filter=lambda param, name: param.dim() == 2)
    plain = copy.deepcopy(model)
    plain.in_proj_weight = nn.Parameter(model.in_proj_weight.dequantize())
    plain.out_proj.weight = nn.Parameter(model.out_proj.weight.dequantize())
    x = values((2, 3, 64), 1)
    with torch.no_grad():
        assert torch.equal(model(x, x, x)[0], plain(x, x, x)[0])


def train_in_tiles(sharded: bool) -> dict[str, Part]:
    torch.manual_seed(0)
    model = Experts(5, 128, 256).to(distributed.device())
    quantize_model_(model, Float8BlockScaling(), param_filter=lambda param, _: param.dim() == 3)
    assert quantized_names(model) == {"w1", "w2", "w3"}
    if sharded:
        fully_shard(model, mesh=distributed.mesh())
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    for step in range(3):
        model(values((2, 3, 128), 9, step).to(distributed.device())).square().mean().backward()
        for index, param in enumerate(model.parameters()):
            param.grad = shard_like(values(param.shape, 7, index, step), param)
        optimizer.step()
        optimizer.zero_grad()
    return parameter_parts(model)


@pytest.mark.parametrize("ranks, on", on_each_device(long(1), long(2), (3,), (4,)))
def test_tiles_of_experts_lie_within_them(ranks: int, on: str) -> None:
    """The bits of each expert alone, and of one rank, after steps on any number of ranks."""
    (expected,) = distributed.run(1, train_in_tiles, False, on=on)
    results = distributed.run(ranks, train_in_tiles, True, on=on)
    assert_same(join_all(results), join_all([expected]))
    weight = values((3, 256, 384), 5)
    together = QuantizedTensor.from_values(weight, Float8BlockScaling())
    for index, expert in enumerate(weight):
        alone = QuantizedTensor.from_values(expert, Float8BlockScaling())
        assert torch.equal(together.values()[index], alone.values())
        assert torch.equal(together.components["scale"][index], alone.components["scale"].flatten())


# --- recipes by patterns of names -------------------------------------------------------------------------------


class Routed(nn.Module):
    """A layer with attention and experts of three dims, an embedding, and a head that is tied or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 128)
        self.attn = nn.ModuleDict({name: nn.Linear(128, 128) for name in ("q", "k", "o")})
        self.mlp = nn.Module()
        self.mlp.experts = Experts(4, 128, 256)
        self.lm_head = nn.Linear(128, 64, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def recipes_of(model: nn.Module) -> dict[str, str]:
    found = {name: param for name, param in model.named_parameters() if isinstance(param, QuantizedTensor)}
    return {name: type(param.recipe).__name__ for name, param in found.items()}


def test_patterns_of_names_choose_recipes() -> None:
    by_name = {
        "attn.k": None,
        "attn.*": Float8CurrentScaling(),
        "*.experts.w2": MX,
        "*.experts.w*": Float8BlockScaling(),
    }
    attention = {f"attn.{name}.weight": "Float8CurrentScaling" for name in ("q", "o")}
    experts = {f"mlp.experts.w{i}": "Float8BlockScaling" for i in (1, 3)} | {"mlp.experts.w2": "MXFP8BlockScaling"}
    assert recipes_of(quantize_model_(Routed(), by_name)) == attention | experts
    with torch.device("meta"), quantized_model_init(by_name):
        built, _loss = Routed(), nn.CrossEntropyLoss()
    assert recipes_of(built) == attention | experts
    everything = recipes_of(quantize_model_(Routed(), {"*": MX}))
    assert {"lm_head.weight", "mlp.experts.attention.out_proj.weight", "mlp.experts.w1"} <= set(everything)
    assert recipes_of(quantize_model_(Routed(), {"lm_head.weight": MX})) == {"lm_head.weight": "MXFP8BlockScaling"}


@pytest.mark.parametrize("by_name, error, text", [
    ({"*.attention.*": MX, "attn.w*": MX}, ValueError, r"'attn\.w\*' matches no weight of the model, which has attn\."),
    ({"embed.weight": MX}, ValueError, "matches no weight"), ({"attn.*": "mxfp8"}, TypeError, "got 'mxfp8'"),
    ({3: MX}, TypeError, "patterns of names as keys, got 3"),
])  # fmt: skip
def test_patterns_that_pick_nothing_are_refused(by_name: Any, error: type[Exception], text: str) -> None:
    refuses(Routed(), error, text, by_name)
    refuses(Routed(), ValueError, "leave out filter_fn", {"attn.*": MX}, filter_fn=lambda *_: True)


def test_computed_weights_that_no_pattern_picks_stay_as_they_are() -> None:
    for by_name in ({"1": MX}, {"0": None, "*": MX}):
        model = nn.Sequential(parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32))
        assert set(recipes_of(quantize_model_(model, by_name))) == {"1.weight"}
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32))
    refuses(model, ValueError, r"^0, a ParametrizedLinear: its weight is computed", {"*": MX})
    refuses(parametrizations.weight_norm(nn.Linear(32, 32)), ValueError, "^the model, a Param", {"weight": MX})


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls, self.pos_embed = nn.Parameter(torch.ones(1, 1, 32)), nn.Parameter(torch.ones(1, 9, 32))
        self.time_embedding = nn.Parameter(torch.ones(4, 9, 32))
        self.conv, self.proj = nn.Conv1d(32, 32, 32), nn.Linear(32, 32)


def test_tokens_and_positions_are_no_experts() -> None:
    with warnings.catch_warnings(action="error"):
        assert quantized_names(quantize_model_(Vision(), MX)) == {"proj.weight"}
    assert quantized_names(quantize_model_(Vision(), {"*": MX})) == {"proj.weight"}
    refuses(Vision(), ValueError, "'pos_embed' matches no weight", {"pos_embed": MX})
    picked = quantize_model_(Vision(), MX, param_filter=lambda _, name: name == "pos_embed")
    assert quantized_names(picked) == {"pos_embed"}
    model = Vision()  # with one expert on each rank
    model.experts_w1, model.grouped = nn.Parameter(torch.ones(1, 32, 32)), GroupedLinear(1, 32, 32)
    names = {"proj.weight", "experts_w1", "grouped.weight"}
    assert quantized_names(quantize_model_(model, {"*": MX})) == names


def test_tied_weights_have_one_recipe() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    text = "1.weight is tied to 0.weight: expected one recipe for both"
    refuses(model, ValueError, text, {"0": MX, "1": Float8CurrentScaling()})
    assert len(recipes_of(quantize_model_(model, {"*": MX}))) == 1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("built", [False, True])
def test_heads_tied_weights_and_experts_stay_plain_by_default(built: bool, tied: bool) -> None:
    with pytest.warns(UserWarning, match=r"3 weights of experts.*stay plain \(mlp\.experts\.w1, mlp\.experts\.w3, "):
        if built:
            with quantized_model_init(MX):
                model = Routed(tied)
        else:
            model = quantize_model_(Routed(tied), MX)
    attention = {f"attn.{name}.weight" for name in ("q", "k", "o")}
    assert quantized_names(model) == attention | {"mlp.experts.attention.out_proj.weight"}
    with warnings.catch_warnings(action="error"):  # experts that are quantized already are not named
        quantize_model_(quantize_model_(Routed(), {"*.w?": MX}), MX)
    other = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    other[1].weight = other[0].weight
    assert quantized_names(quantize_model_(other, MX)) == {"2.weight"}


# --- filters ----------------------------------------------------------------------------------------------------


class RoutedExperts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])


class DecoderLayer(nn.Module):
    """``gate`` is that of SwiGLU in the first and a router in the second."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.gate, self.moe = nn.Linear(width, width), nn.Linear(width, 2 * width), RoutedExperts(width)
        self.router = nn.Sequential(nn.Linear(width, 4))


class Decoder(nn.Module):
    def __init__(self, width: int = 32, embedded: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width) if embedded else nn.Identity()
        self.patch_embed = nn.Linear(width, width)
        self.layer = DecoderLayer(width)
        self.lm_head = nn.Linear(width, 64)
        self.tied, self.last = nn.Linear(width, 64), nn.Linear(width, width)
        if embedded:
            self.tied.weight = self.tokens.weight


USUAL = {f"layer.{name}.weight" for name in ("query", "gate", "moe.experts.0", "moe.experts.1")}


def test_usual_exceptions_stay_plain() -> None:
    assert quantized_names(quantize_model_(Decoder(), MX, UsualLayers())) == USUAL
    with torch.device("meta"), quantized_model_init(MX, UsualLayers()):
        built = Decoder()
    assert quantized_names(built) == USUAL
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))  # the first one too, where nothing is embedded
    assert quantized_names(quantize_model_(layers, MX, UsualLayers())) == {"1.weight", "2.weight"}
    untied = Decoder(embedded=False)
    assert quantized_names(quantize_model_(untied, MX, UsualLayers())) == USUAL | {"tied.weight"}
    chosen = UsualLayers(also=lambda _, name: "experts" in name)
    assert quantized_names(quantize_model_(Decoder(), MX, chosen)) == {name for name in USUAL if "experts" in name}


@pytest.mark.parametrize("name", ["head", "lm_head", "output", "score", "classifier"])
@pytest.mark.parametrize("filter_fn", [None, UsualLayers()], ids=["default", "usual"])
def test_heads_stay_plain_by_their_names(name: str, filter_fn: UsualLayers | None) -> None:
    """Outside of numbered layers, where ``head`` may be any layer's name."""

    def build() -> nn.Module:
        layers = [nn.ModuleDict({key: nn.Linear(32, 32) for key in ("up", "head")}) for _ in range(2)]
        return nn.ModuleDict({"first": nn.Embedding(8, 32), "layers": nn.ModuleList(layers), name: nn.Linear(32, 8)})

    inner = {f"layers.{i}.{key}.weight" for i in range(2) for key in ("up", "head")}
    model = build()
    model.last = nn.Linear(32, 32)  # which UsualLayers leaves out, wherever the head is
    expected = inner | (set() if filter_fn else {"last.weight"})
    assert quantized_names(quantize_model_(model, MX, filter_fn)) == expected
    with quantized_model_init(MX, filter_fn):
        model = nn.ModuleDict({"model": build()})
    assert quantized_names(model) == {f"model.{each}" for each in inner}


def test_usual_exceptions_are_of_whole_models() -> None:
    with pytest.raises(TypeError, match="give it as filter_fn itself"):
        quantize_model_(Decoder(), MX, lambda module, name: UsualLayers()(module, name))
    with pytest.raises(TypeError, match="also: expected a filter"):
        UsualLayers("lm_head")  # type: ignore[arg-type]


FP8: dict[str, Recipe] = {
    "tensor": Float8CurrentScaling(compute="fp8"),
    "row, weight gradients in BF16": Float8DelayedScaling(compute="fp8", activation_scaling="row"),
    "block": Float8BlockScaling(compute="fp8"),
}


@pytest.mark.parametrize("kind", FP8)
def test_sizes_that_gain_are_those_of_the_table(kind: str, tmp_path: Path) -> None:
    sizes = [(1024, 256, 256, 2.0), (1024, 512, 512, 0.5), (512, 512, 1024, 0.5)]  # the last: FP8's time, BF16's is 1
    rows = [{"rows": r, "inputs": i, "outputs": o, "BF16": 1.0, kind: ms} for r, i, o, ms in sizes]
    table = tmp_path / "sizes.json"
    table.write_text(json.dumps({"sizes": rows}))
    with torch.device("meta"):
        shapes = [(256, 256), (512, 512), (512, 1024), (1024, 512), (1024, 1024), (1024, 520), (513, 1024)]
        model = nn.Sequential(*(nn.Linear(*shape) for shape in shapes))
    expected = {512: {2, 3, 4}, 1024: {1, 2, 3, 4}, 256: set()}  # the fourth is the third, exchanged
    for count, picked in expected.items():
        quantized = quantize_model_(copy.deepcopy(model), FP8[kind], gains(FP8[kind], count, table))
        assert quantized_names(quantized) == {f"{i}.weight" for i in picked}


def test_experts_of_sizes_that_gain_are_picked() -> None:
    """By the package's table: 8 large experts from 512 rows each on, 64 small ones never."""
    recipe = Float8CurrentScaling()
    with torch.device("meta"):
        model = nn.ModuleDict({"large": GroupedLinear(8, 4096, 14336), "small": GroupedLinear(64, 2048, 1408)})
    for rows, picked in ((8 * 256, set()), (8 * 512, {"large.weight"}), (64 * 2048, {"large.weight"})):
        assert quantized_names(quantize_model_(copy.deepcopy(model), recipe, gains(recipe, rows))) == picked


@pytest.mark.parametrize("recipe, message", [
    (Float8CurrentScaling(compute="decode"), 'compute="decode"'),
    (Float8CurrentScaling(compute="fp8", activation_scaling="row", weight_gradients="fp8"), "no times of .*'row'"),
])  # fmt: skip
def test_gains_that_are_not_known_are_refused(recipe: Recipe, message: str, tmp_path: Path) -> None:
    table = tmp_path / "sizes.json"
    table.write_text(json.dumps({"sizes": [{"rows": 1, "inputs": 1, "outputs": 1, "BF16": 1.0, "tensor": 0.5}]}))
    with pytest.raises(ValueError, match=message):
        gains(recipe, 8192, table)


# --- while models are built -------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 32), 2, enable_nested_tensor=False)
        self.experts = nn.Parameter(torch.randn(3, 4, 32))
        self.head = nn.Linear(32, 32)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_filters_of_what_is_built_see_whole_names(device: str) -> None:
    seen = set()

    def is_wanted(module: nn.Module, name: str) -> bool:
        seen.add(name)
        return isinstance(module, nn.Linear) and name != "head" and "out_proj" not in name

    with torch.device(device), quantized_model_init(MX, is_wanted):
        model, other = Model(), nn.Linear(32, 4)
    assert {"head", "layers.layers.1.linear2", ""} <= seen
    assert quantized_names(model) == {f"layers.layers.{i}.linear{j}.weight" for i in (0, 1) for j in (1, 2)}
    assert isinstance(other.weight, QuantizedTensor)
    assert all(param.device.type == device for param in model.parameters())
    after = nn.Sequential(nn.Linear(32, 32))
    assert not quantized_names(after) and "__wrapped__" not in nn.Module.__init__.__dict__


def test_parameters_of_what_is_built_are_picked_by_name() -> None:
    torch.manual_seed(3)
    plain = Model()
    torch.manual_seed(3)
    with quantized_model_init(RECIPES["nvfp4"], param_filter=lambda _, name: name in ("experts", "head.weight")):
        model = Model()
    assert quantized_names(model) == {"experts", "head.weight"}
    for name in quantized_names(model):
        assert torch.equal(model.get_parameter(name).initial_values(), plain.get_parameter(name))


def test_nothing_is_quantized_after_an_error() -> None:
    with pytest.raises(KeyError), quantized_model_init(MX, lambda module, _: isinstance(module, nn.Linear)):
        layer = nn.Linear(32, 4)
        raise KeyError
    assert not quantized_names(layer) and not quantized_names(nn.Sequential(nn.Linear(32, 4)))
