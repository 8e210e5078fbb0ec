"""``python -m fused_optim plan``: bytes by format, beside what FSDP2 allocates."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import distributed
from fused_optim import FusedAdamW, FusedMuon, muon_param_groups
from fused_optim.__main__ import main
from fused_optim.tools.plan import PARTS, number_of, plan, shapes_of_config, shapes_of_size


class Model(nn.Module):
    """Hidden matrices, an embedding, biases that fewer elements than ranks have, rows that no block divides."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(96, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)
        self.odd = nn.Linear(width, 33)
        self.lm_head = nn.Linear(33, 2, bias=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.odd(self.down(self.up(self.embed_tokens(tokens)).relu())))  # type: ignore[no-any-return]


def shapes_of(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(param.shape)) for name, param in model.named_parameters()]


CHOICES = [("int8", 24), ("int8", 32), ("float32", 32), ("bfloat16", 0), ("float8_e4m3fn", 24), ("float16", 32)]


def nbytes(tensors: list[Tensor]) -> int:
    """FSDP2's gradients share memory."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def allocated(algorithm: str) -> list[dict[str, int]]:
    """By part, for each choice, after a step under FSDP2."""
    found = []
    for state_dtype, bits in CHOICES:
        torch.manual_seed(0)
        model = fully_shard(Model().bfloat16(), mesh=distributed.mesh())
        options: dict[str, Any] = {"state_dtype": state_dtype, "master_bits": bits}
        if algorithm == "muon":
            optimizer: Any = FusedMuon(muon_param_groups(model), **options)
        else:
            optimizer = FusedAdamW(model.named_parameters(), **options)
        model(torch.arange(64)).float().square().mean().backward()
        optimizer.step()
        params, layouts = list(model.parameters()), optimizer.store.layouts
        states = {param: optimizer.state[param] for param in params}
        moments = [t for of in states.values() for name, t in of.items() if name not in ("master_param", "step")]
        found.append(
            {
                "parameters": nbytes([param.detach() for param in params]),
                "gradients": nbytes([param.grad for param in params if param.grad is not None]),
                "masters": nbytes([of["master_param"] for of in states.values() if "master_param" in of]),
                "states": nbytes(moments) + nbytes([layouts[param].scales for param in params]),
            }
        )
    return found


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_fsdp2_allocates(ranks: int, algorithm: str) -> None:
    """By part. No rank holds more than rank 0."""
    everyone = distributed.run(ranks, allocated, algorithm)
    for number, (state_dtype, bits) in enumerate(CHOICES):
        options: dict[str, Any] = {"state_dtype": state_dtype, "master_bits": bits, "algorithm": algorithm}
        planned = plan(shapes_of(Model()), world_size=ranks, **options)["chosen"]["bytes"]
        for part in PARTS:
            assert planned[part] == pytest.approx(everyone[0][number][part], rel=0.01), (state_dtype, bits, part)
        totals = [sum(of_rank[number].values()) for of_rank in everyone]
        assert totals[0] == max(totals) and planned["total"] == sum(planned[part] for part in PARTS)


def test_rows() -> None:
    """Bytes per parameter by hand: FP32 masters and moments are 12 more, gradients and parameters 2 each."""
    found = plan(shapes_of_size(8e9), world_size=8, master_bits=24)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["torch AdamW, bfloat16 parameters"]["bytes_per_parameter"] == 8.0
    assert rows["torch AdamW, float32 parameters"]["bytes_per_parameter"] == 16.0
    assert rows["float32, 32-bit masters"]["bytes_per_parameter"] == 2 + 2 + 2 + 8
    assert rows["int8, 24-bit masters"]["bytes_per_parameter"] == 2 + 2 + 1 + 2 + 2 * 4 / 128
    assert rows["bfloat16, no masters"]["bytes"]["masters"] == 0 and found["chosen"] is rows["int8, 24-bit masters"]
    assert found["chosen"]["bytes"]["parameters"] == pytest.approx(2 * 8e9 / 8, rel=1e-5)
    totals = [row["bytes"]["total"] for row in found["rows"][2:]]
    assert totals == sorted(totals) and found["fallbacks"] == []
    whole = plan(shapes_of_size(1e6), param_dtype="fp32")["rows"]
    assert [row["name"] for row in whole if "torch" in row["name"]] == ["torch AdamW, float32 parameters"]
    assert all("no masters" in row["name"] or "32-bit" in row["name"] for row in whole[1:])


def test_fallbacks_are_the_optimizers() -> None:
    found = plan([("odd.weight", (64, 33)), ("even.weight", (64, 128))])
    assert [each["examples"] for each in found["fallbacks"] if each["what"] == "exp_avg"] == [["odd.weight"]]
    assert "exp_avg float32 instead of int8 for 1 parameters (odd.weight)" in str(found)


CONFIGS: dict[int, dict[str, Any]] = {
    8_030_261_248: {  # Llama 3 8B
        "model_type": "llama",
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
    1_235_814_400: {  # Llama 3.2 1B
        "model_type": "llama",
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    },
    8_190_735_360: {  # Qwen3 8B
        "model_type": "qwen3",
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    },
}


def test_numbers_of_parameters() -> None:
    assert [number_of(text) for text in ("8B", "8b", "350m", "1.5T", "8e9", "12K")] == [
        8e9,
        8e9,
        3.5e8,
        1.5e12,
        8e9,
        12e3,
    ]


@pytest.mark.parametrize("elements", CONFIGS)
def test_configs_give_the_published_sizes(elements: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[elements]))
    shapes = shapes_of_config(str(tmp_path / "config.json"))
    assert sum(torch.empty(shape, device="meta").numel() for _, shape in shapes) == elements
    assert len({name for name, _ in shapes}) == len(shapes)


def run(*command: str | Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fused_optim", "plan", *map(str, command)])
        main()


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--world-size", "64", "--param-dtype", "bf16", "--state-dtype", "8bit", "--master-bits", "24"]
    run("--params", "8B", *common)
    text = capsys.readouterr().out
    assert "1 parameters of 8,000,000,000 elements, bfloat16, on 64 ranks" in text
    assert next(line for line in text.splitlines() if line.startswith("*")).split()[1:3] == ["int8,", "24-bit"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS[1_235_814_400]))
    for algorithm in ("adamw", "muon"):
        run("--hf-config", config, *common, "--json", "--algorithm", algorithm)
        printed = json.loads(capsys.readouterr().out)
        wanted = plan(shapes_of_config(str(config)), world_size=64, master_bits=24, algorithm=algorithm)
        assert printed == json.loads(json.dumps(wanted)) and printed["elements"] == 1_235_814_400


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mystery"}))
    (tmp_path / "lacking.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    (tmp_path / "no.json").write_text("[")
    (tmp_path / "kind.json").write_text(json.dumps({"model_type": ["llama"]}))
    for command, message in {
        ("--hf-config", tmp_path / "config.json"): "not mystery|mystery",
        ("--hf-config", tmp_path / "lacking.json"): "lacks 'intermediate_size', which a llama model has",
        ("--hf-config", tmp_path / "kind.json"): r"not \['llama'\]|transformers makes no model",
        ("--hf-config", tmp_path / "no.json"): "is no config of a model",
        ("--hf-config", tmp_path / "nothing.json"): "No such file",
        ("--params", "1e6", "--world-size", "0"): "world_size: expected a number from 1 to 1,048,576, got 0",
        ("--params", "1e6", "--world-size", "-2"): "world_size: expected a number from 1",
        ("--params", "1e6", "--world-size", "1000000000"): "world_size: expected a number from 1",
        **{("--params", wrong): "params: expected a number" for wrong in ("0", "-1", "1e30", "nan", "inf", "B", "")},
        ("--params", "1e6", "--state-dtype", "int3"): "state_dtype: expected one of",
        ("--params", "1e6", "--param-dtype", "int8"): "param_dtype: expected float32, bfloat16 or float16, got int8",
        ("--params", "8B", "--algorithm", "muon"): "params: which parameters are under Muon depends on their names",
    }.items():
        with pytest.raises(SystemExit, match=message):
            run(*command)
    wrong_options: list[tuple[dict[str, Any], str]] = [
        ({"master_bits": 12}, "master_bits: expected 32"),
        ({"algorithm": "sgd"}, "algorithm: expected adamw or muon, got 'sgd'"),
    ]
    for options, message in wrong_options:
        with pytest.raises(ValueError, match=message):
            plan([("w", (8, 8))], **options)
    with pytest.raises(ValueError, match="no parameters"):
        plan([])
    with pytest.raises(ValueError, match=r"cannot tell by name whether Muon or AdamW is for conv\.weight"):
        plan([("conv.weight", (4, 4, 3))], algorithm="muon")


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "head_dim"]
)
def test_sizes_that_are_none(key: str, tmp_path: Path) -> None:
    config = CONFIGS[8_190_735_360]
    for wrong in (0, -1, "4096", 1.5, True, [8], 1 << 62):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: wrong}))
        with pytest.raises(SystemExit, match=rf"^error: .*config\.json: {key}: expected a whole number from 1"):
            run("--hf-config", tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": None, "num_attention_heads": 4097}))
    with pytest.raises(SystemExit, match="num_attention_heads: expected at most hidden_size, 4096"):
        run("--hf-config", tmp_path / "config.json")


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
    """Muon has one FP32 average, AdamW two."""
    others = [("model.layers.0.mlp.experts.0.up.weight", (8, 8))]
    found = plan([*others, (name, shape)], algorithm="muon", state_dtype="fp32")["chosen"]["bytes"]["states"]
    assert found == 4 * 64 + 4 * torch.Size(shape).numel() * (1 if algorithm == "muon" else 2)


@pytest.mark.parametrize("options", ["", "model.py:build --world-size 8", "--json model.py:build", "--help"])
def test_what_is_gone_says_so(options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fused_optim", "doctor", *options.split()])
    with pytest.raises(SystemExit, match=r"^error: doctor is gone: print\(optimizer.summary\(\)\).* command info .*$"):
        main()
