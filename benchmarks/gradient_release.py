"""Peak memory and time of training steps that update parameters in the backward pass, compared with steps that do not.

The model has the shapes of Llama 3.2 1B, in BF16. On one GPU, plain and under FSDP2 with one rank: ``python
benchmarks/gradient_release.py --models plain fsdp2 --bits --output FILE``; on several: ``torchrun --nproc-per-node 2
benchmarks/gradient_release.py --models fsdp2 --output FILE``. FlashOptim's release is measured where that package is
installed. ``--bits`` tells whether steps with and without have the same bits, and if not, what differs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from contenders import HYPER, INT8, SEPARATE, SPLIT16, states
from fused_optim import FusedAdamW, enable_gradient_release
from llama import Llama, llama_1b, small_llama
from step import machine, timed, version_of, write

WARMUP = 2
Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """``release``: attaches the optimizer to the backward pass; None for a normal step."""

    name: str
    build: Callable[[list[nn.Parameter]], Any]
    release: Callable[[nn.Module, Any], Any] | None = None
    needs: str = field(default="torch")


def ours(**options: Any) -> Callable[[list[nn.Parameter]], FusedAdamW]:
    return lambda params: FusedAdamW(params, **HYPER, **states(INT8), **options)


def flash(params: list[nn.Parameter]) -> Any:
    return importlib.import_module("flashoptim").FlashAdamW(params, **HYPER, master_weight_bits=32)


def flash_release(model: nn.Module, optimizer: Any) -> Any:
    return importlib.import_module("flashoptim").enable_gradient_release(model, optimizer)


def each_alone(model: nn.Module, optimizer: FusedAdamW) -> Any:
    return enable_gradient_release(model, optimizer, bucket_bytes=0)


def in_small_buckets(model: nn.Module, optimizer: FusedAdamW) -> Any:
    return enable_gradient_release(model, optimizer, bucket_bytes=32 << 20)


CASES = [
    Case("FP32 master, int8 states", ours(**SEPARATE)),
    Case("FP32 master, int8 states, release", ours(**SEPARATE), enable_gradient_release),
    Case("FP32 master, int8 states, release of each parameter", ours(**SEPARATE), each_alone),
    Case("FP32 master, int8 states, release of 32 MB", ours(**SEPARATE), in_small_buckets),
    Case("16-bit remainder, int8 states", ours(**SPLIT16)),
    Case("16-bit remainder, int8 states, release", ours(**SPLIT16), enable_gradient_release),
    Case("16-bit remainder, int8 states, release of each parameter", ours(**SPLIT16), each_alone),
    Case("FlashAdamW 32-bit master", flash, needs="flashoptim"),
    Case("FlashAdamW 32-bit master, release", flash, flash_release, needs="flashoptim"),
]


# --- measuring ------------------------------------------------------------------------------------------------------


def build_model(args: argparse.Namespace, kind: str, device: torch.device) -> Llama:
    """In BF16. ``kind``: plain, or fsdp2."""
    torch.manual_seed(0)
    with device:
        model = (small_llama() if args.small else llama_1b()).to(torch.bfloat16)
    for block in model.blocks if args.checkpointing else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if kind == "fsdp2":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def training_step(model: nn.Module, optimizer: Any, tokens: Tensor) -> Step:
    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def held_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def measure(case: Case, args: argparse.Namespace, kind: str, device: torch.device) -> dict[int, dict[str, Any]]:
    """By length: milliseconds of steps on the device, bytes held between steps and at the peak of one, on this rank."""
    model = build_model(args, kind, device)
    optimizer = case.build(list(model.parameters()))
    handle = case.release(model, optimizer) if case.release else None
    found = {length: measure_steps(model, optimizer, length, args.repeats, device) for length in args.lengths}
    if handle is not None:  # else FlashOptim's hooks keep the parameters
        (handle.disable if isinstance(optimizer, FusedAdamW) else handle.remove)()
    return found


def tokens_of(model: nn.Module, length: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(1 + int(os.environ.get("RANK", "0")))
    vocabulary = model.embedding.weight.shape[0]
    return torch.randint(vocabulary, (1, length + 1), device=device, generator=generator)


def measure_steps(model: nn.Module, optimizer: Any, length: int, repeats: int, device: torch.device) -> dict[str, Any]:
    tokens = tokens_of(model, length, device)
    step = training_step(model, optimizer, tokens)
    for _ in range(WARMUP):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    held = held_bytes(device)
    times, host = timed(step, device, repeats)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"ms": times, "host_ms": host, "held_bytes": held, "peak_bytes": peak, "loss": model(tokens).item()}


def measured(case: Case, args: argparse.Namespace, kind: str, device: torch.device) -> dict[int, dict[str, Any]]:
    """:func:`measure`, or the error, after which everything that it held is given back."""
    try:
        found = measure(case, args, kind, device)
    except Exception as error:  # a peer that fails must not hide the others' results
        found = {length: {"error": f"{type(error).__name__}: {error}"[:300]} for length in args.lengths}
    give_back(device)
    return found


def give_back(device: torch.device) -> None:
    """What nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- bits -----------------------------------------------------------------------------------------------------------

BITS_STEPS = 3


def local_bits(tensor: Tensor) -> Tensor:
    local = tensor.detach()
    return (local.to_local() if isinstance(local, DTensor) else local).clone()


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> int:
    return sum(not torch.equal(first[name], second[name]) for name in first)


def note(grads: dict[str, Tensor], name: str, param: Tensor) -> None:
    """A hook, which autograd holds: it keeps no model."""
    assert param.grad is not None
    grads[name] = local_bits(param.grad)


class Twin:
    """One of several models that are trained alike; with its gradients of the last backward pass."""

    def __init__(self, args: argparse.Namespace, kind: str, device: torch.device, release: bool = False) -> None:
        self.model = build_model(args, kind, device)
        self.named = dict(self.model.named_parameters())
        self.optimizer = ours()(list(self.model.parameters()))
        self.grads: dict[str, Tensor] = {}
        for name, param in self.named.items():  # before gradient release's hooks, which free gradients
            param.register_post_accumulate_grad_hook(partial(note, self.grads, name))
        if release:
            enable_gradient_release(self.model, self.optimizer)

    def step(self, tokens: Tensor) -> None:
        self.model(tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_with(self, grads: dict[str, Tensor]) -> None:
        """The update alone."""
        for name, param in self.named.items():
            param.grad = grads[name] if not isinstance(param, DTensor) else as_gradient(grads[name], param)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name: local_bits(param) for name, param in self.named.items()}


def as_gradient(local: Tensor, param: DTensor) -> DTensor:
    shape = {"shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(local, param.device_mesh, param.placements, **shape)


def compare_bits(args: argparse.Namespace, kind: str, length: int, device: torch.device) -> list[dict[str, int]]:
    """By step: how many parameters differ, of how many.

    ``gradients, twice``: of two normal backward passes; ``gradients``: of a normal one and one with release. Where they
    differ in the first step, weights are equal in that one only. ``updates``: weights that release has updated, and
    those that a normal step makes of the same gradients.
    """
    usual, again, replayed = (Twin(args, kind, device) for _ in range(3))
    released = Twin(args, kind, device, release=True)
    tokens = tokens_of(usual.model, length, device)
    rows = []
    for _ in range(BITS_STEPS):
        for twin in (usual, again, released):
            twin.step(tokens)
        replayed.step_with(released.grads)
        rows.append(
            {
                "parameters": len(usual.named),
                "gradients, twice": differing(usual.grads, again.grads),
                "gradients": differing(usual.grads, released.grads),
                "updates": differing(replayed.weights(), released.weights()),
            }
        )
    return rows


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one length in all rounds."""
    errors = [each["error"] for each in found if "error" in each]
    if errors:
        return {"error": errors[0]}
    rows = {key: statistics.median(time for each in found for time in each[key]) for key in ("ms", "host_ms")}
    rounds = [statistics.median(each["ms"]) for each in found]
    return {**rows, "ms_of_rounds": rounds, **{key: found[-1][key] for key in ("held_bytes", "peak_bytes", "loss")}}


def show(name: str, row: dict[str, Any]) -> None:
    if "error" in row:
        print(f"{name:<60} {row['error']}")
    else:
        print(
            f"{name:<60} {row['ms']:8.2f} ms {row['held_bytes'] / 1e9:7.2f} GB, peak {row['peak_bytes'] / 1e9:7.2f} GB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model of 3 M parameters, for a trial")
    parser.add_argument("--models", nargs="*", choices=["plain", "fsdp2"], default=["plain"])
    parser.add_argument("--checkpointing", action="store_true", help="recompute the activations of each layer")
    parser.add_argument("--bits", action="store_true", help="compare gradients and updates bit for bit, too")
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 512, 4096], help="tokens of a step on a rank")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=6, help="steps timed in each round")
    parser.add_argument("--only", default="", help="cases whose name this regular expression matches")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    join(args, device)
    facts = machine(device, args.commit)
    facts["packages"] |= {"flashoptim": version_of("flashoptim")}
    report: dict[str, Any] = {"machine": facts, "ranks": int(os.environ.get("WORLD_SIZE", "1"))}
    report["checkpointing"] = args.checkpointing
    for kind in args.models:
        report[kind] = {"lengths": {}}
        for _ in measure_cases(args, kind, device, report[kind]):
            if rank == 0:
                write(report, args.output)
        for length in args.lengths if args.bits else ():
            report[kind].setdefault("bits", {})[str(length)] = compare_bits(args, kind, length, device)
            give_back(device)
            if rank == 0:
                write(report, args.output)
        if rank == 0:
            show_all(kind, report)
    if dist.is_initialized():
        dist.destroy_process_group()


def join(args: argparse.Namespace, device: torch.device) -> None:
    """The process group of torchrun's ranks, or one of this rank alone."""
    if "fsdp2" not in args.models:
        return
    alone: dict[str, Any] = {}
    if "WORLD_SIZE" not in os.environ:
        store = dist.FileStore(f"{tempfile.mkdtemp()}/store", 1)
        alone = {"store": store, "rank": 0, "world_size": 1}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)


def measure_cases(args: argparse.Namespace, kind: str, device: torch.device, report: dict[str, Any]) -> Iterator[None]:
    """Puts the rows of all cases into the report, one more each time."""
    there = [case for case in CASES if importlib.util.find_spec(case.needs) is not None]
    cases = [case for case in there if re.search(args.only, case.name)]
    found: dict[str, list[dict[int, dict[str, Any]]]] = {case.name: [] for case in cases}
    for number in range(args.rounds):
        for case in cases[:: 1 - 2 * (number % 2)]:  # so that drifts of the machine hit all alike
            found[case.name].append(measured(case, args, kind, device))
            for length in args.lengths:
                each = {name: [of[length] for of in rounds] for name, rounds in found.items() if rounds}
                report["lengths"][str(length)] = {name: summary(rounds) for name, rounds in each.items()}
            yield


def show_all(kind: str, report: dict[str, Any]) -> None:
    for length, rows in report[kind]["lengths"].items():
        print(f"{kind}, {length} tokens on each of {report['ranks']} ranks")
        for name, row in rows.items():
            show(name, row)
        for number, row in enumerate(report[kind].get("bits", {}).get(length, ())):
            print(f"bits, step {number + 1}: {', '.join(f'{key} {count}' for key, count in row.items())}")


if __name__ == "__main__":
    main()
