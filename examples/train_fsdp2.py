"""Train a byte-level GPT sharded with FSDP2, using FusedAdamW or torch.optim.AdamW.

Save checkpoints while training goes on, and continue from the newest on any number of ranks:

    torchrun --nproc-per-node 2 examples/train_fsdp2.py --checkpoints checkpoints
    torchrun --nproc-per-node 1 examples/train_fsdp2.py --resume checkpoints
"""

import argparse
import math
import os
import statistics
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from byte_gpt import ByteGPT, evaluation_batches, load_corpus, training_batch
from fused_optim import FusedAdamW, FusedMuon, muon_param_groups
from fused_optim.checkpoint import Checkpointer
from fused_optim.quantized import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8DelayedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize_model_,
)
from run_record import RunRecord, clock

STATE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    "float8": Float8CurrentScaling(),
    "float8_delayed": Float8DelayedScaling(),
    "float8_block": Float8BlockScaling(block=(1, 128)),  # tiles of 128 x 128 cannot be cut for three ranks
    "nvfp4": NVFP4BlockScaling(),
}
BETAS = (0.9, 0.95)
FINAL_LR_FRACTION = 0.1
MUON_LR_FACTOR = 10  # 0.02, as usual, where AdamW has 0.002
EVALUATION_BATCHES = 8


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--optimizer", choices=("fused", "muon", "torch"), default="fused")
    parser.add_argument(
        "--state-dtype", choices=STATE_DTYPES, default="int8", help="moments of FusedAdamW and FusedMuon"
    )
    parser.add_argument("--quantize", choices=RECIPES, help="keep the weights of linear layers in this format")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes that a prediction can see")
    parser.add_argument("--batch", type=int, default=12, help="windows per step, over all ranks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--evaluate-every", type=int, default=50)
    parser.add_argument("--init-seed", type=int, default=0)
    parser.add_argument("--data-seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=Path, help="folder to write checkpoints to, while training goes on")
    parser.add_argument("--checkpoint-every", type=int, help="steps; by default half of them")
    parser.add_argument("--stop-after", type=int, help="steps; by default all of them")
    parser.add_argument("--resume", type=Path, help="folder of the checkpoints to continue from; not of torch's AdamW")
    parser.add_argument("--metrics", type=Path, help="JSON file to write losses, times and sizes to")
    return parser.parse_args()


def init_distributed() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group()
    return device


def build_model(args: argparse.Namespace, device: torch.device) -> nn.Module:
    # Drawn on the CPU, before sharding: the same weights on every kind of device and for every world size.
    torch.manual_seed(args.init_seed)
    model = ByteGPT(args.width, args.layers, args.heads).to(device)
    if args.optimizer != "torch":
        model.to(torch.bfloat16)  # FusedAdamW keeps FP32 masters itself; torch.optim.AdamW needs FP32 parameters
    if args.quantize:
        quantize_model_(model, RECIPES[args.quantize])
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Many CPUs have no BF16 arithmetic, and multiply BF16 matrices ten times slower than FP32 ones.
    compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # Not the root's default: an evaluation, which no backward pass follows, would leave its parameters gathered.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return model


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> AdamW | FusedAdamW | FusedMuon:
    common: dict[str, Any] = {"lr": args.lr, "betas": BETAS, "weight_decay": args.weight_decay}
    if args.optimizer == "torch":
        return AdamW(model.parameters(), **common)
    moments = STATE_DTYPES[args.state_dtype]
    formats: dict[str, Any] = {
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
    }
    if args.optimizer == "muon":  # an orthogonalized update is small in each of its elements
        groups = muon_param_groups(model, lr=MUON_LR_FACTOR * args.lr)
        return FusedMuon(groups, **common, **formats, momentum_dtype=moments)
    return FusedAdamW(model.parameters(), **common, **formats)


def build_scheduler(args: argparse.Namespace, optimizer: Optimizer) -> LambdaLR:
    warmup: int = args.warmup

    def warmup_then_cosine(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, args.steps - warmup)
        return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * (1 + math.cos(math.pi * progress)) / 2

    return LambdaLR(optimizer, warmup_then_cosine)


class AsyncSaver:
    """``dcp.async_save`` as it comes, of torch.optim.AdamW, to compare with."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, folder: Path, every: int) -> None:
        self.model, self.optimizer, self.folder, self.every = model, optimizer, folder, every
        # Of its own: training goes on in the other group, and both orders of collectives must be the same on all ranks.
        self.group = dist.new_group(backend="gloo")
        self.pending: Future[Any] | None = None

    def prepare(self) -> None:
        pass

    def save(self, step: int) -> None:
        if step % self.every == 0:
            self.close()
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state = {"model": model, "optimizer": optimizer}
            saving = dcp.async_save(state, checkpoint_id=self.folder / str(step), process_group=self.group)
            assert isinstance(saving, Future)  # it gives two where it copies in the background, too
            self.pending = saving

    def close(self) -> None:
        if self.pending is not None:
            self.pending.result()


def build_saver(
    args: argparse.Namespace, model: nn.Module, optimizer: AdamW | FusedAdamW | FusedMuon, scheduler: LambdaLR
) -> Checkpointer | AsyncSaver | None:
    every = args.checkpoint_every or args.steps // 2
    if args.checkpoints is None:
        return None
    if isinstance(optimizer, AdamW):
        return AsyncSaver(model, optimizer, args.checkpoints, every)
    return Checkpointer(model, optimizer, args.checkpoints, extra={"scheduler": scheduler}, every=every, sigterm=True)


def resume(folder: Path, model: nn.Module, optimizer: AdamW | FusedAdamW | FusedMuon, scheduler: LambdaLR) -> int:
    """Loads the newest checkpoint into freshly built objects and returns the step to continue with."""
    if isinstance(optimizer, AdamW):
        sys.exit("--resume needs --optimizer fused or muon: a Checkpointer does not save torch.optim.AdamW")
    with Checkpointer(model, optimizer, folder, extra={"scheduler": scheduler}) as checkpointer:
        step = checkpointer.load_latest()
    if step is None:
        sys.exit(f"--resume {folder}: there is no checkpoint")
    return step


def my_share(batch: Tensor, device: torch.device) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()].to(device)


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model: nn.Module, batches: list[Tensor], device: torch.device) -> float:
    return statistics.fmean(mean_over_ranks(model(my_share(batch, device))) for batch in batches)


def progress_bar(first_step: int, steps: int) -> "tqdm[int]":
    seconds_between_updates = 0.2 if sys.stderr.isatty() else 10  # a log file keeps every update
    return tqdm(
        range(first_step, steps),
        initial=first_step,
        total=steps,
        disable=dist.get_rank() != 0,
        mininterval=seconds_between_updates,
    )


def train(args: argparse.Namespace, device: torch.device) -> RunRecord:
    model = build_model(args, device)
    optimizer = build_optimizer(args, model)
    scheduler = build_scheduler(args, optimizer)
    first_step = resume(args.resume, model, optimizer, scheduler) if args.resume else 0
    saver = build_saver(args, model, optimizer, scheduler)
    last_step = args.stop_after or args.steps

    length = args.context + 1  # inputs and, shifted by one byte, targets
    corpus, held_out_bytes = load_corpus()
    held_out = evaluation_batches(held_out_bytes, EVALUATION_BATCHES, args.batch, length)
    record = RunRecord(device.type, dist.get_world_size())
    bar = progress_bar(first_step, last_step)
    for step in bar:
        started = clock(device)
        batch = training_batch(corpus, args.data_seed, step, args.batch, length)
        loss = model(my_share(batch, device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        before_optimizer = clock(device)
        optimizer.step()
        after_optimizer = clock(device)
        scheduler.step()
        optimizer.zero_grad()

        record.train_losses.append((step, mean_over_ranks(loss)))
        record.optimizer_times.append(after_optimizer - before_optimizer)
        record.step_times.append(clock(device) - started)
        bar.set_postfix(loss=f"{record.train_losses[-1][1]:.3f}", refresh=False)
        finished = step + 1
        if finished % args.evaluate_every == 0 or finished == last_step:
            record.held_out_losses.append((finished, evaluate(model, held_out, device)))
        if saver is not None:
            if step == first_step:
                saver.prepare()  # the memory that saves need, now that there are states
            before_save = time.perf_counter()
            saver.save(finished)
            record.save_calls.append(time.perf_counter() - before_save)
    if saver is not None:
        saver.close()
    record.measure_sizes(model, optimizer)
    return record


def main() -> None:
    args = parse_args()
    device = init_distributed()
    if args.quantize and args.optimizer == "torch":
        sys.exit("--quantize needs --optimizer fused or muon: torch.optim.AdamW cannot update quantized weights")
    if args.batch % dist.get_world_size():
        sys.exit(f"--batch {args.batch} is not a multiple of the {dist.get_world_size()} ranks")
    record = train(args, device)
    if args.metrics and dist.get_rank() == 0:
        record.save(args.metrics)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
