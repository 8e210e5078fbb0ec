"""Loads of a checkpoint on other world sizes than it was saved on, compared with loads on the same.

``python benchmarks/resharded_loads.py --output F``: a model with the shapes of Llama 3.2 1B under FSDP2, with int8
states and 16-bit remainders, is saved natively on each world size and loaded on each. A load on another one should
take at most twice as long as one on the same. ``--device cpu --small`` is a trial.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoint import Training, empty_folder, free, roomy_folder
from fused_optim.checkpoint import Checkpointer
from step import machine, synchronize, write

WORLDS = (1, 2)
REPEATS = 2


def save(args: argparse.Namespace, device: torch.device) -> None:
    training = Training(args, device)
    training.seconds(2)
    with Checkpointer(
        training.model, training.optimizer, args.folder / str(dist.get_world_size()), sigterm=False
    ) as to:
        to.save(1)
    free(device)


def load(args: argparse.Namespace, device: torch.device, saved: int) -> float:
    """Seconds until the last rank has loaded."""
    training = Training(args, device, seed=1)
    training.optimizer.initialize_state()
    free(device)
    dist.barrier()
    synchronize(device)
    started = time.perf_counter()
    where = Checkpointer(training.model, training.optimizer, args.folder / str(saved), sigterm=False)
    assert where.load_latest(verify=False) is not None
    synchronize(device)
    taken = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def on_rank(args: argparse.Namespace) -> None:
    """Save, then load whatever is there; the first rank adds lines of JSON to a file."""
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    if not (args.folder / str(world)).is_dir():
        save(args, device)
    for saved in sorted(int(path.name) for path in args.folder.iterdir() if path.is_dir()):
        seconds = [load(args, device, saved) for _ in range(REPEATS)]
        if not rank:
            with (args.folder / "loads").open("a") as log:
                facts = {"saved_on": saved, "loaded_on": world, "seconds": seconds, "best_s": min(seconds)}
                log.write(json.dumps(facts) + "\n")
    dist.destroy_process_group()


def launch(world: int, args: argparse.Namespace, folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--master-port=29631"]
    passed = [f"--device={args.device}", *(["--small"] if args.small else []), "--on-rank", f"--folder={folder}"]
    subprocess.run([*launcher, __file__, *passed], check=True)


def table(loads: list[dict[str, Any]]) -> str:
    same: dict[int, float] = {}
    for each in loads:
        if each["saved_on"] == each["loaded_on"]:
            same[each["loaded_on"]] = min(each["best_s"], same.get(each["loaded_on"], float("inf")))
    lines = [f"{'saved on':>9}{'loaded on':>11}{'seconds':>20}{'of the same world':>19}"]
    for each in loads:
        seconds = ", ".join(f"{second:.2f}" for second in each["seconds"])
        ratio = each["best_s"] / same[each["loaded_on"]]
        lines.append(f"{each['saved_on']:>9}{each['loaded_on']:>11}{seconds:>20}{ratio:>18.2f}x")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a model of 3 M parameters")
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="to write into; default: memory, if it has room")
    parser.add_argument("--commit", default="", help="what the results are of, where the tree is no git checkout")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.fsdp, args.batch = True, 1
    if args.on_rank:
        return on_rank(args)
    device = torch.device(args.device)
    with empty_folder(args.folder or roomy_folder(needed=20 * 2**30)) as folder:
        for world in (*WORLDS, WORLDS[0]):  # again on the first: the second's checkpoint is there then
            launch(world, args, folder)
        loads = [json.loads(line) for line in (folder / "loads").read_text().splitlines()]
    # the first world size loaded its own twice
    report = {"machine": machine(device, args.commit), "folder": str(args.folder or folder.parent), "loads": loads}
    write(report, args.output)
    print(table(loads))


if __name__ == "__main__":
    main()
