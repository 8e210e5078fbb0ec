"""What transformers and PEFT do to models with quantized weights: load, resize, adapt, merge. It works, or says how."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fused_optim import FusedAdamW
from fused_optim.quantized import (
    Float8CurrentScaling,
    KeptWeight,
    QuantizedTensor,
    UsualLayers,
    dequantize_model_,
    discard_high_precision_init,
    finish_initialization,
    quantize_model_,
    quantized_model_init,
)
from quantized_cases import RECIPES, has_tiles

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from hugging_face_cases import MODELS, TOKENS, every_linear, language_model, logits, weights_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
EACH = pytest.mark.parametrize("recipe", ["current", "tiles", "mxfp8", "nvfp4"])


def quantized_names(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, param in named if isinstance(param, QuantizedTensor)}


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# --- from_pretrained ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_what_is_loaded_is_quantized(name: str, recipe: str, tmp_path: Path) -> None:
    """As by quantize_model_ afterwards; masters start from what was loaded."""
    plain = language_model(name)
    plain.save_pretrained(tmp_path)
    with quantized_model_init(RECIPES[recipe]):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = quantize_model_(language_model(name), RECIPES[recipe]).eval()
    assert quantized_names(model) == quantized_names(expected) != set()
    check_same(weights_of(model), weights_of(expected))
    assert torch.equal(logits(model), logits(expected))
    optimizer = FusedAdamW(model.parameters())
    for key, master in optimizer.master_state_dict(model).items():
        assert torch.equal(master, plain.get_parameter(key).float()), key


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_filters_see_the_loaded_model(name: str, tmp_path: Path) -> None:
    language_model(name).save_pretrained(tmp_path)
    with quantized_model_init(RECIPES["mxfp8"], lambda module, path: path.endswith("q_proj")):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert quantized_names(model) == {f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)}


def test_missing_weights_are_initialised_and_quantized(tmp_path: Path) -> None:
    """A head that is in no file."""
    language_model("llama").model.save_pretrained(tmp_path)
    with quantized_model_init(RECIPES["mxfp8"], every_linear):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "lm_head.weight" in quantized_names(model) and not model.lm_head.weight.is_pending
    assert 0 < model.lm_head.weight.values().abs().max() < 1 and logits(model).isfinite().all()


# --- resize_token_embeddings --------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("tokens", [80, 48])
@pytest.mark.parametrize("mean", [True, False])
def test_heads_are_resized(recipe: str, tokens: int, mean: bool) -> None:
    """The embedding is plain; the head becomes a plain one, with the decoded values."""
    model = quantize_model_(language_model("llama"), RECIPES[recipe], every_linear)
    discard_high_precision_init(model)
    before = weights_of(model)
    model.resize_token_embeddings(tokens, mean_resizing=mean)
    after, kept = weights_of(model), min(64, tokens)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert type(model.get_parameter(name)) is nn.Parameter and len(after[name]) == tokens
        assert torch.equal(after[name][:kept], before[name][:kept])
        before.pop(name), after.pop(name)
    check_same(after, before)
    assert model(TOKENS % tokens).logits.shape[-1] == tokens == model.config.vocab_size
    quantize_model_(model, RECIPES[recipe], lambda _, name: name == "lm_head")


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("tokens", [80, 48])
def test_quantized_embeddings_say_what_to_call(tokens: int, mean: bool) -> None:
    model = quantize_model_(language_model("llama-tied"), RECIPES["mxfp8"], every_linear).eval()
    discard_high_precision_init(model)
    before, expected = weights_of(model), logits(model)
    with pytest.raises(TypeError, match=r"takes a whole one .* dequantize_model_\(model\) makes plain"):
        model.resize_token_embeddings(tokens, mean_resizing=mean)
    check_same(weights_of(model), before)
    assert torch.equal(logits(model), expected) and model.config.vocab_size == 64
    dequantize_model_(model).resize_token_embeddings(tokens)
    assert torch.equal(model.lm_head.weight[:48], before["lm_head.weight"][:48])


# --- PEFT ---------------------------------------------------------------------------------------------------------


def adapted(recipe: str | None, dora: bool = False, initial: bool = False) -> nn.Module:
    base = language_model("llama")
    if recipe is not None:
        quantize_model_(base, RECIPES[recipe], keep_initial=initial)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=dora, init_lora_weights=False)
    return peft.get_peft_model(base, config)


def decoded_base(model: nn.Module) -> nn.Module:
    return dequantize_model_(copy.deepcopy(model))


@EACH
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_train_beside_a_quantized_base(recipe: str, dora: bool) -> None:
    """As beside its decoded values."""
    model = adapted(recipe, dora)
    plain = decoded_base(model)
    found = []
    for each in (model, plain):
        optimizer = FusedAdamW([param for param in each.parameters() if param.requires_grad], lr=1e-2)
        for _ in range(2):
            loss = each(TOKENS, labels=TOKENS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((loss.detach(), [param.detach() for param in each.parameters() if param.requires_grad]))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert not any(param.grad is not None for name, param in model.named_parameters() if "lora" not in name)


MERGES: dict[str, Callable[[nn.Module], object]] = {
    "merge_and_unload": lambda model: model.merge_and_unload(),
    "safely": lambda model: model.merge_and_unload(safe_merge=True),
    "merge_adapter": lambda model: model.merge_adapter(),
}


@EACH
@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("dora", [False, True])
def test_merges_say_what_to_call_and_change_nothing(recipe: str, merge: str, dora: bool) -> None:
    model = adapted(recipe, dora).eval()
    before, expected, names = weights_of(model), logits(model), quantized_names(model)
    with pytest.raises((TypeError, RuntimeError), match=r"q_proj\.weight.*dequantize_model_"):
        MERGES[merge](model)
    check_same(weights_of(model), before)
    assert quantized_names(model) == names and torch.equal(logits(model), expected)

    plain = dequantize_model_(model)
    others = decoded_base(adapted(recipe, dora)).eval()
    MERGES[merge](plain), MERGES[merge](others)
    assert torch.equal(logits(plain), logits(others))
    assert (logits(plain) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not has_tiles(name)])
def test_initial_values_are_merged_and_unmerged(recipe: str) -> None:
    """As long as they are kept: they are those that are merged into, and quantized afterwards."""
    model, plain = adapted(recipe, initial=True), adapted(None)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    model.merge_adapter(), plain.merge_adapter()
    found, expected = (each.get_submodule(name).base_layer.weight for each in (model, plain))
    assert isinstance(found, QuantizedTensor) and torch.equal(found.initial_values(), expected.float())
    assert torch.equal(found.dequantize(), expected)
    model.unmerge_adapter(), plain.unmerge_adapter()
    assert torch.equal(found.initial_values(), expected.float())
    finish_initialization(model)
    assert torch.equal(found.dequantize(), QuantizedTensor.from_values(expected.detach(), RECIPES[recipe]).dequantize())


@EACH
def test_oft_trains_and_merges_by_quantizing_again(recipe: str) -> None:
    """It writes whole weights, so nothing is lost but the rounding; what it would write through ``.data`` raises."""
    torch.manual_seed(1)
    base = quantize_model_(language_model("llama"), RECIPES[recipe], keep_initial=False)
    model = peft.get_peft_model(base, peft.OFTConfig(r=0, oft_block_size=32, target_modules=["q_proj"]))
    plain = decoded_base(model)
    for each in (model, plain):
        optimizer = FusedAdamW([param for param in each.parameters() if param.requires_grad], lr=1e-2)
        each(TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    assert torch.equal(logits(model.eval()), logits(plain.eval()))
    with pytest.raises(TypeError, match=r"q_proj\.weight.*dequantize_model_"):
        copy.deepcopy(model).merge_adapter(safe_merge=True)

    merged, expected = (each.merge_and_unload().model.layers[0].self_attn.q_proj.weight for each in (model, plain))
    assert isinstance(merged, QuantizedTensor)
    quantized = QuantizedTensor.from_values(expected.detach(), RECIPES[recipe])
    errors = [(each.dequantize().float() - expected.float()).norm() for each in (merged, quantized)]
    assert 0 < errors[0] <= 1.05 * errors[1]  # it quantizes FP32 values


LINEAR = {f"model.layers.{i}.{name}" for i in range(2) for name in (
    *(f"self_attn.{each}_proj" for each in "qkvo"), *(f"mlp.{each}_proj" for each in ("gate", "up", "down")),
)}  # fmt: skip


@pytest.mark.parametrize("how", ["default", "patterns", "usual", "init"])
def test_adapters_stay_plain(how: str) -> None:
    """And a head that is wrapped, and copies of layers that are saved whole, where the base is quantized afterwards."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], modules_to_save=["up_proj"])
    if how == "init":
        with quantized_model_init(RECIPES["mxfp8"]):
            model = peft.get_peft_model(language_model("llama"), config)
    else:
        model = peft.get_peft_model(language_model("llama"), config)
        recipes = {"*.q_proj*": RECIPES["mxfp8"], "*.up_proj*": RECIPES["mxfp8"]}
        recipe = recipes if how == "patterns" else RECIPES["mxfp8"]
        quantize_model_(model, recipe, UsualLayers() if how == "usual" else None)
    picked = {name for name in LINEAR if how != "patterns" or name.endswith(("q_proj", "up_proj"))}
    inner = {
        name: ".base_layer" if name.endswith("q_proj") else ".original_module" * name.endswith("up_proj")
        for name in picked
    }
    assert quantized_names(model) == {f"base_model.model.{name}{inner[name]}.weight" for name in picked}


@pytest.mark.parametrize("dora", [False, True])
def test_kept_weights_are_merged_as_plain_ones(dora: bool) -> None:
    """In all orders: they are plain for all but products."""
    models = []
    for recipe in (None, Float8CurrentScaling(compute="fp8", keep_weights=True)):
        base = language_model("llama") if recipe is None else quantize_model_(language_model("llama"), recipe)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], use_dora=dora, init_lora_weights=False)
        models.append(peft.get_peft_model(base, config).eval())
    steps: list[Callable[[nn.Module], object]] = [
        *(lambda model: model.merge_adapter(), lambda model: model.unmerge_adapter()),
        *(lambda model: model.merge_adapter(safe_merge=True), lambda model: model.unmerge_adapter()),
        lambda model: model.merge_and_unload(),
    ]
    for step in steps:
        for model in models:
            step(model)
        check_same(models[1].state_dict(), models[0].state_dict())
        assert sum(type(param) is KeptWeight for param in models[1].parameters()) == 14


@EACH
@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_saved_and_loaded(recipe: str, dora: bool, tmp_path: Path) -> None:
    """Beside a quantized base, and beside its decoded values."""
    model = adapted(recipe, dora).eval()
    model.save_pretrained(tmp_path)
    base = quantize_model_(language_model("llama"), RECIPES[recipe], keep_initial=False)
    for each in (base, dequantize_model_(copy.deepcopy(base))):
        assert torch.equal(logits(peft.PeftModel.from_pretrained(each, tmp_path).eval()), logits(model))
