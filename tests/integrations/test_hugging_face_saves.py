"""Models with quantized weights in Hugging Face's own saves: save_pretrained, Trainer's checkpoints, Accelerate."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distributed
from distributed import assert_same
from fused_optim import FusedAdamW
from fused_optim.quantized import (
    plain_state_dict,
    quantize_model_,
    save_pretrained_as,
    save_quantized_safetensors,
    write_plain_weights,
)
from quantized_cases import RECIPES, mesh_of, parameter_parts
from snippets import run_section

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from hugging_face_cases import TOKENS, every_linear, language_model, logits, quantized_language_model, weights_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
NAMES = pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral", "qwen3_moe-tied"])
OPTIONS = {"lr": 1e-2}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder to run in, with Accelerate on the CPU and its singletons made anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return tmp_path


def parts(model: nn.Module) -> dict[str, Tensor]:
    return distributed.join_all([parameter_parts(model)])


# --- save_pretrained ----------------------------------------------------------------------------------------------


@NAMES
def test_save_pretrained_says_what_to_call(name: str, tmp_path: Path) -> None:
    model = quantized_language_model(name, "mxfp8", train=False)
    with pytest.raises(TypeError, match=r"^[a-z_0-9.]*weight: safetensors cannot hold .* save_pretrained_as\(model\)"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises(TypeError, match=r"safetensors cannot hold .* plain_state_dict\(model\)"):
        accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@NAMES
@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_plain_values_are_saved(name: str, recipe: str, tmp_path: Path) -> None:
    """By an option, or as a state dict; tied weights once."""
    model = quantized_language_model(name, recipe)
    model.save_pretrained(tmp_path / "given", state_dict=plain_state_dict(model))
    save_pretrained_as(model)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each.save_pretrained(tmp_path / "saved")
        for folder in ("given", "saved"):
            found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
            assert_same(weights_of(found), weights_of(model))
            assert torch.equal(logits(found), logits(model))
            assert all(isinstance(weight, nn.Parameter) for weight in found.parameters())
    with torch.no_grad():
        model.model.norm.weight.fill_(2.0)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    copied.save_pretrained(tmp_path / "copied")  # writes itself
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copied")
    assert (found.model.norm.weight == 2.0).all()


@pytest.mark.parametrize("form", ["compressed-tensors", "fp8"])
def test_save_pretrained_writes_a_layout(form: Any, tmp_path: Path) -> None:
    model = quantized_language_model("qwen3-tied", "tiles")
    save_pretrained_as(model, form)
    model.save_pretrained(tmp_path / "saved")
    model.config.save_pretrained(tmp_path / "export")
    save_quantized_safetensors(model, tmp_path / "export", form)
    (saved,), (export,) = (list((tmp_path / folder).glob("*.safetensors")) for folder in ("saved", "export"))
    assert saved.read_bytes() == export.read_bytes()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    assert config.architectures == ["Qwen3ForCausalLM"] and config.quantization_config["quant_method"] == form
    assert (tmp_path / "saved" / "generation_config.json").exists()
    with pytest.raises(ValueError, match=rf"in layout '{form}' takes no state_dict, variant"):
        model.save_pretrained(tmp_path / "new", state_dict=plain_state_dict(model), variant="a")
    assert not (tmp_path / "new").exists()
    model.save_pretrained(tmp_path / "new", is_main_process=False)
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_saved_so_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a model of transformers, with save_pretrained, got a Linear"):
        save_pretrained_as(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="form: expected one of 'plain', 'compressed-tensors', 'fp8', got 'gguf'"):
        save_pretrained_as(language_model("llama"), "gguf")  # type: ignore[arg-type]


def save_on_ranks(folder: str) -> list[str]:
    from torch.distributed.fsdp import fully_shard

    model = quantized_language_model("llama", "mxfp8", train=False)
    save_pretrained_as(model, "fp8")
    errors = []
    with pytest.raises(RuntimeError) as error:
        model.save_pretrained(folder)
    errors.append(str(error.value))
    save_pretrained_as(model)
    fully_shard(model, mesh=mesh_of("fsdp"))
    with pytest.raises(RuntimeError) as error:
        model.save_pretrained(folder)
    return [*errors, str(error.value)]


def test_several_ranks_are_told_what_to_call(tmp_path: Path) -> None:
    for layout, sharded in distributed.run(2, save_on_ranks, str(tmp_path)):
        assert f"call save_quantized_safetensors(model, '{tmp_path}', 'fp8') on all" in layout
        assert "model.embed_tokens.weight" not in sharded and ".weight is sharded: get_model_state_dict" in sharded


# --- Trainer ------------------------------------------------------------------------------------------------------


def run_trainer(model: nn.Module, steps: int, resume: bool = False) -> Any:
    chosen = transformers.TrainingArguments(
        "out",
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (32, 16), generator=torch.Generator())]
    optimizer = (FusedAdamW, OPTIONS)
    trainer = transformers.Trainer(model, chosen, train_dataset=data, optimizer_cls_and_kwargs=optimizer)
    trainer.train(resume_from_checkpoint="out/checkpoint-2" if resume else None)
    return trainer


@pytest.mark.parametrize("name, recipe", [("llama-tied", "mxfp8"), ("mixtral", "current"), ("llama", "nvfp4")])
def test_trainer_resumes_from_plain_values(name: str, recipe: str, on_cpu: Path) -> None:
    """Bit for bit: the weights are written from the optimizer's masters."""
    straight = quantized_language_model(name, recipe, train=False).train()
    with pytest.raises(TypeError, match=r"save_pretrained_as\(model\)"):
        run_trainer(copy.deepcopy(straight), 2)
    save_pretrained_as(straight)
    run_trainer(straight, 4)
    resumed = quantized_language_model(name, recipe, train=False).train()
    with torch.no_grad():
        resumed.model.norm.weight.zero_()
    save_pretrained_as(resumed)
    run_trainer(resumed, 4, resume=True)
    assert_same(parts(resumed), parts(straight))
    saved = transformers.AutoModelForCausalLM.from_pretrained("out/checkpoint-4").eval()
    assert torch.equal(logits(saved), logits(straight.eval()))


def test_documented_export_runs(on_cpu: Path) -> None:
    model = language_model("llama")
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    names = run_section("how_to/export.md", "From Hugging Face's Trainer", model=model, data=data)
    assert names["served"].config.architectures == ["LlamaForCausalLM"]


# --- Accelerate ---------------------------------------------------------------------------------------------------


@NAMES
@pytest.mark.parametrize("recipe", ["mxfp8", "current"])
def test_accelerate_saves_plain_values(name: str, recipe: str, on_cpu: Path) -> None:
    def step(accelerator: Any, model: nn.Module, optimizer: Any) -> None:
        accelerator.backward(model(TOKENS, labels=TOKENS).loss)
        optimizer.step()
        optimizer.zero_grad()

    accelerator = accelerate.Accelerator(cpu=True)
    model = quantized_language_model(name, recipe, train=False)
    model, optimizer = accelerator.prepare(model, FusedAdamW(model.parameters(), **OPTIONS))
    step(accelerator, model, optimizer)
    with pytest.raises(TypeError, match=r"safetensors cannot hold .* plain_state_dict\(model\)"):
        accelerator.save_state("refused")
    accelerator.register_save_state_pre_hook(write_plain_weights)
    accelerator.save_state("state")
    at_save, expected = parts(model), []
    for _ in range(2):
        step(accelerator, model, optimizer)
        expected.append(parts(model))
    accelerator.load_state("state")
    assert_same(parts(model), at_save)
    for after in expected:
        step(accelerator, model, optimizer)
        assert_same(parts(model), after)


def test_quantizing_after_a_plain_load_is_as_before(tmp_path: Path) -> None:
    """Decoded values keep their elements when they are quantized again."""
    model = quantized_language_model("llama", "mxfp8")
    save_pretrained_as(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    quantize_model_(again, RECIPES["mxfp8"], every_linear)
    assert_same(weights_of(again), weights_of(model))
