"""Train a small Llama with Hugging Face's Trainer and FusedAdamW, and resume it.

    python examples/hugging_face_trainer.py --steps 20
    python examples/hugging_face_trainer.py --steps 40     # goes on from step 20

Needs transformers and accelerate. Nothing is downloaded: the model has random weights and reads Python's own modules.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from fused_optim import FusedAdamW

LENGTH = 128


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The bytes of Python's own modules, a sequence of them each."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        content = bytearray(b"".join(file.read_bytes() for file in files))
        self.tokens = torch.frombuffer(content, dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.tokens) // LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="trainer_output")
    args = parser.parse_args()

    set_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes)).bfloat16()
    arguments = TrainingArguments(
        args.output,
        max_steps=args.steps,
        per_device_train_batch_size=12,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_steps=20,
        report_to=[],
        disable_tqdm=True,
    )
    # The only lines that differ from a run with AdamW. The model is BF16; its FP32 masters are the optimizer's.
    options = {"lr": 2e-3, "weight_decay": 0.1, "state_dtype": "int8"}
    trainer = Trainer(model, arguments, train_dataset=Text(), optimizer_cls_and_kwargs=(FusedAdamW, options))
    saved = Path(args.output).exists() and get_last_checkpoint(args.output)
    trainer.train(resume_from_checkpoint=saved or None)
    print(trainer.optimizer.optimizer.summary())  # Accelerate has wrapped the optimizer


if __name__ == "__main__":
    main()
