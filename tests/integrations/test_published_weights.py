"""A Llama that another process serves follows training by files of changes, bit for bit: BF16 and FP8."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fused_optim import FusedAdamW
from fused_optim.quantized import Float8BlockScaling, quantize_model_, save_quantized_safetensors
from fused_optim.wire import write_changes

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # without which transformers reads no FP8

STEPS = 50
SMALL = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}

# The server: loads the first publication, applies one file after the other, and says what it has in the end.
SERVER = """
import sys
from pathlib import Path
import torch, transformers
from safetensors.torch import load_file
from fused_optim.wire import apply_changes

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
if sys.argv[3] == "True":  # codes and scales as files have them: transformers decodes FP8 where there is no GPU
    files = (folder / "model").glob("*.safetensors")
    model = {name: value for file in files for name, value in load_file(file).items()}
else:
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
for step in range(1, steps + 1):
    assert apply_changes(model, folder / f"{step}.safetensors", base=step - 1) == step
assert not [name for name in sys.modules if name.startswith("fused_optim._engine")]
weights = model if isinstance(model, dict) else model.state_dict()
torch.save({name: value.clone() for name, value in weights.items()}, folder / "served")
"""


def _llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, dtype="bfloat16")
    return transformers.LlamaForCausalLM(config).bfloat16()


@pytest.mark.parametrize("quantized, lr", [(False, 1e-6), (True, 1e-3)])
def test_a_served_llama_follows(tmp_path: Path, quantized: bool, lr: float) -> None:
    model = _llama()
    if quantized:
        kept = ("lm_head",)
        quantize_model_(model, Float8BlockScaling(), lambda m, name: isinstance(m, nn.Linear) and name not in kept)
        model.config.save_pretrained(tmp_path / "model")
        save_quantized_safetensors(model, tmp_path / "model", layout="fp8", readers="transformers")
    else:
        model.save_pretrained(tmp_path / "model")
    optimizer = FusedAdamW(model.parameters(), lr=lr, state_dtype="int8")
    optimizer.track_changes()
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(step))
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        write_changes(optimizer.take_changes(model), tmp_path / f"{step}.safetensors", base=step - 1, step=step)
    subprocess.run([sys.executable, "-c", SERVER, str(tmp_path), str(STEPS), str(quantized)], check=True, timeout=280)
    served = torch.load(tmp_path / "served")
    for name, param in model.named_parameters():
        parts = getattr(param, "components", {"data": param.detach()})
        for key, part in ((name, parts["data"]), (f"{name}_scale_inv", parts.get("scale"))):
            if part is not None:
                found = served[key].contiguous().view(torch.uint8)
                assert torch.equal(found, part.contiguous().view(torch.uint8)), key
