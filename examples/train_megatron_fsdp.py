"""Train a byte-level GPT sharded with Megatron-FSDP, using FusedAdamW. Needs GPUs and ``pip install '.[megatron]'``.

Save a checkpoint halfway and continue from it on any number of GPUs:

    torchrun --nproc-per-node 2 examples/train_megatron_fsdp.py --checkpoint checkpoint
    torchrun --nproc-per-node 1 examples/train_megatron_fsdp.py --resume checkpoint
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from byte_gpt import Block, ByteGPT, load_corpus, training_batch
from fused_optim import FusedAdamW


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--context", type=int, default=128, help="bytes that a prediction can see")
    parser.add_argument("--batch", type=int, default=12, help="windows per step, over all ranks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--checkpoint", type=Path, help="folder to write a checkpoint to, after half of the steps")
    parser.add_argument("--resume", type=Path, help="folder of the checkpoint to continue from")
    return parser.parse_args()


def build(lr: float, device: torch.device) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = fully_shard_model(
        ByteGPT(width=256, layers=3, heads=4).to(device, torch.bfloat16),
        fsdp_unit_modules=[Block],
        device_mesh=mesh,
        dp_shard_dim="dp",
    )
    # Megatron-FSDP keeps FP32 main weights, which these parameters are; the moments take a byte per element.
    formats = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
    optimizer = FusedAdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, **formats)
    return model, fully_shard_optimizer(optimizer)


def checkpoint_state(model: nn.Module, optimizer: Optimizer, next_step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "next_step": next_step}


def load_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Loads into freshly built objects and returns the step to continue with."""
    state = checkpoint_state(model, optimizer, next_step=0)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["next_step"]


def main() -> None:
    args = parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group()
    model, optimizer = build(args.lr, device)
    first_step = load_checkpoint(args.resume, model, optimizer) if args.resume else 0
    corpus, _ = load_corpus()
    for step in range(first_step, args.steps):
        batch = training_batch(corpus, 0, step, args.batch, args.context + 1)
        loss = model(batch.chunk(dist.get_world_size())[dist.get_rank()].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
        if args.checkpoint and step + 1 == args.steps // 2:
            dcp.save(checkpoint_state(model, optimizer, step + 1), checkpoint_id=args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
