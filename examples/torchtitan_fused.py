"""torchtitan's llama3 debug model, trained by FusedAdamW with 8-bit states.

    python examples/torchtitan_fused.py titan                       # writes a text and a tokenizer into titan/
    PYTHONPATH=examples torchrun --nproc-per-node 2 -m torchtitan.train --module torchtitan_fused --config llama3_fused

For another model take its configuration in place of ``llama3_debugmodel_ce_loss``, and its tokenizer and data set.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer

FOLDER = Path("titan")
END = "<|end|>"


def llama3_fused() -> Trainer.Config:
    """What ``--config llama3_fused`` asks for."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel_ce_loss

    from fused_optim.integrations.torchtitan import default_fused_adamw

    config = llama3_debugmodel_ce_loss()
    config.optimizer = default_fused_adamw(lr=8e-4, state_dtype="int8")  # this line is all
    config.hf_assets_path = str(FOLDER / "tokenizer")
    config.dataloader.dataset_path = str(FOLDER / "text")
    config.dump_folder = str(FOLDER / "outputs")
    config.training.seq_len, config.training.local_batch_size, config.training.steps = 128, 4, 10
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.checkpoint.enable = True
    return config


def write_data(folder: Path) -> None:
    """Python's own modules as text, and a tokenizer of single bytes, since torchtitan's wheel brings neither."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([END, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    special = {"bos_token": END, "eos_token": END}
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(special))
    (folder / "text").mkdir(exist_ok=True)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:50]
    lines = [json.dumps({"text": file.read_text(errors="replace")}) for file in files]
    (folder / "text/data.json").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write_data(Path(sys.argv[1]))
