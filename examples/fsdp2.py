"""Train a small language model with FSDP2 and FusedAdamW: everything in one file, saved and resumed.

torchrun --nproc-per-node 2 examples/fsdp2.py --steps 40     # on GPUs where there are some, else on CPUs
torchrun --nproc-per-node 3 examples/fsdp2.py --steps 60     # goes on from step 40, on another number of ranks
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fused_optim import FusedAdamW
from fused_optim.checkpoint import Checkpointer

WIDTH, LAYERS, LENGTH, BATCH = 128, 2, 128, 12  # BATCH: sequences per step, over all ranks


class Model(nn.Module):
    """Predicts each byte of a text from those before it: the sum of their cross-entropies."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=x.device, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten(), reduction="sum")


def load_text() -> Tensor:
    """The bytes of Python's own modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch_of(text: Tensor, step: int) -> Tensor:
    """This rank's part, of any size, of the step's batch, which is the same for every number of ranks."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    windows = text[starts + torch.arange(LENGTH + 1)].long()
    return windows.tensor_split(dist.get_world_size())[dist.get_rank()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoints", default="checkpoints")
    args = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()

    torch.manual_seed(0)  # the same weights on all ranks
    model = Model().to(device, torch.bfloat16)
    # CPUs multiply FP32 matrices much faster than BF16 ones.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, reduce_dtype=torch.float32
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    # 8-bit states; the BF16 parameters have exact FP32 masters, which take 2 more bytes per parameter.
    optimizer = FusedAdamW(model.named_parameters(), lr=2e-3, weight_decay=0.1, state_dtype="int8")
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    text = load_text()
    with Checkpointer(
        model, optimizer, args.checkpoints, extra={"scheduler": scheduler}, every=20, sigterm=True
    ) as checkpointer:
        first = checkpointer.load_latest() or 0
        for step in range(first, args.steps):
            # FSDP2 takes the mean over ranks, which makes this the mean over all bytes of the batch.
            loss = model(batch_of(text, step).to(device)) * (dist.get_world_size() / (BATCH * LENGTH))
            loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            checkpointer.save(step + 1)  # every 20 steps; returns at once
            if step == first or (step + 1) % 10 == 0:
                dist.all_reduce(loss)
                if dist.get_rank() == 0:
                    print(f"step {step + 1}: loss {loss.item() / dist.get_world_size():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
