"""Train a byte-level GPT sharded with Megatron-FSDP, using FusedAdamW or torch.optim.AdamW.

Needs GPUs and ``pip install '.[megatron-fsdp]'``, without megatron-core 0.16.1 (docs/megatron.md says why).

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
from torch import Tensor, nn
from torch.optim import Optimizer

from byte_gpt import Block, ByteGPT, load_corpus, training_batch
from fused_optim import FusedAdamW

STRATEGIES = ("optim", "optim_grads", "optim_grads_params")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--optimizer", choices=("fused", "torch"), default="fused")
    parser.add_argument("--strategy", choices=STRATEGIES, default="optim_grads_params", help="what is sharded")
    parser.add_argument("--context", type=int, default=128, help="bytes that a prediction can see")
    parser.add_argument("--batch", type=int, default=12, help="windows per step, over all ranks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--report-every", type=int, default=20, help="steps between two printed losses")
    parser.add_argument("--checkpoint", type=Path, help="folder to write a checkpoint to, after half of the steps")
    parser.add_argument("--resume", type=Path, help="folder of the checkpoint to continue from")
    return parser.parse_args()


def build_model(strategy: str, device: torch.device) -> nn.Module:
    # Drawn on the CPU, before sharding: the same weights for every world size.
    torch.manual_seed(0)
    model = ByteGPT(width=256, layers=3, heads=4).to(device, torch.bfloat16)
    # Without a mesh it makes one of all ranks. One of ours would need a dim for tensor parallelism, too (tp_dim).
    sharded: nn.Module = fully_shard_model(model, fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
    return sharded


def build_optimizer(name: str, model: nn.Module, lr: float) -> Optimizer:
    """Its parameters are Megatron-FSDP's FP32 main weights, so FusedAdamW keeps no masters."""
    common: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer: Optimizer
    if name == "fused":
        moments: dict[str, Any] = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8}
        optimizer = fully_shard_optimizer(FusedAdamW(model.parameters(), lr=lr, **common, **moments))
        return optimizer
    # fully_shard_optimizer makes a step with zero gradients. FusedAdamW only creates its states then; AdamW would decay
    # the weights, were its learning rate not zero, and counts a step.
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.0, **common))
    for state in optimizer.state.values():
        state["step"].zero_()
    for group in optimizer.param_groups:
        group["lr"] = lr
    return optimizer


def checkpoint_state(model: nn.Module, optimizer: Optimizer, next_step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "next_step": next_step}


def load_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer) -> int:
    """Loads into freshly built objects and returns the step to continue with."""
    state = checkpoint_state(model, optimizer, next_step=0)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    next_step: int = state["next_step"]
    return next_step


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    args = parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group()
    model = build_model(args.strategy, device)
    optimizer = build_optimizer(args.optimizer, model, args.lr)
    first_step = load_checkpoint(args.resume, model, optimizer) if args.resume else 0
    corpus, _ = load_corpus()
    for step in range(first_step, args.steps):
        batch = training_batch(corpus, 0, step, args.batch, args.context + 1)
        loss = model(batch.chunk(dist.get_world_size())[dist.get_rank()].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % args.report_every == 0:
            mean = mean_over_ranks(loss)
            if dist.get_rank() == 0:
                print(f"step {step + 1}: loss {mean:.4f}", flush=True)
        if args.checkpoint and step + 1 == args.steps // 2:
            dcp.save(checkpoint_state(model, optimizer, step + 1), checkpoint_id=args.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
