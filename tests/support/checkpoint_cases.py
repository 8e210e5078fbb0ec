"""What the tests of checkpoints share: models on any placement, their optimizers, ways to save and load."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import distributed
from distributed import Part, Workers, join_all, part, shard, shard_like
from fused_optim.checkpoint import PinnedStager
from peers import FusedAdam

SAVED_AT, END = 2, 4
FORMATS = [torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32]
SHAPES: dict[str, tuple[int, ...]] = {
    "even": (12, 256),
    "uneven": (7, 64),
    "few": (2, 64),
    "unblocked": (5, 50),
    "vector": (10,),
    "never": (5, 32),  # gets no gradient
    "frozen": (3, 32),
}
WITHOUT_GRADIENT = ("never", "frozen")
# Not all formats x shapes. What gets no gradient has no state that depends on the format: one scaled, one plain.
# One that is scaled meets all ways to lie on ranks; the others have what is cut into blocks, and what is not.
SHAPES_OF: dict[torch.dtype, tuple[str, ...]] = {
    torch.int8: tuple(SHAPES),
    torch.float8_e4m3fn: ("even", "uneven", "unblocked", "vector"),
    torch.float16: ("even", "few", "unblocked", "vector"),
    torch.bfloat16: ("even", "unblocked", "vector", "never", "frozen"),
    torch.float32: ("even", "unblocked", "vector"),
}
MASTERS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {"store_param_remainders": False}),
    "remainder16": (torch.bfloat16, {"store_param_remainders": True}),
    "remainder8": (torch.bfloat16, {"store_param_remainders": True, "param_remainder_bits": 8}),
    "float16": (torch.bfloat16, {"master_weight_dtype": torch.float16}),
    "no master": (torch.bfloat16, {"master_weights": False}),
}


def values(shape: tuple[int, ...], *seed: int) -> Tensor:
    """Normal values over several magnitudes, the same on every rank."""
    generator = torch.Generator().manual_seed(hash(seed))
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-9, 2, shape, generator=generator))


# --- model and optimizer ----------------------------------------------------------------------------------------


def prefix_of(fmt: torch.dtype) -> str:
    return str(fmt).removeprefix("torch.")


def build_model(seed: int, dtype: torch.dtype) -> nn.Module:
    """Parameters of the shapes of every state format."""
    model = nn.Module()
    for group, fmt in enumerate(FORMATS):
        for index, (name, shape) in enumerate(SHAPES.items()):
            if name not in SHAPES_OF[fmt]:
                continue
            initial = values(shape, seed, group, index).to(distributed.device(), dtype)
            param = nn.Parameter(initial, requires_grad=name != "frozen")
            model.register_parameter(f"{prefix_of(fmt)}_{name}", param)
    return model


def parallelize(model: nn.Module, how: str) -> None:
    if how == "fsdp":
        fully_shard(model, mesh=distributed.mesh())
    elif how == "hsdp":
        fully_shard(model, mesh=distributed.mesh(2, 2, names=("replicate", "shard")))
    elif how == "tp":  # as FSDP2 places what tensor parallelism has cut by columns or by rows
        for name, param in list(model.named_parameters()):
            cut = [Shard(0), Shard(1)] if name.endswith("_even") else [_StridedShard(0, split_factor=2), Shard(0)]
            placed = shard(param.detach(), distributed.mesh(2, 2), cut)
            model.register_parameter(name, nn.Parameter(placed, requires_grad=param.requires_grad))


class Run:
    """A model, its optimizer and a schedule; ``fresh``: with other values and hyperparameters, to be loaded into."""

    def __init__(self, how: str, master: str, formats: Sequence[torch.dtype] = FORMATS, *, fresh: bool = False) -> None:
        dtype, options = MASTERS[master]
        self.model = build_model(1 if fresh else 0, dtype)
        parallelize(self.model, how)
        named = list(self.model.named_parameters())
        groups = []
        for index, fmt in enumerate(formats):
            params = [(name, param) for name, param in named if name.startswith(f"{prefix_of(FORMATS[index])}_")]
            decay = 0.7 if fresh else 0.1 * index
            groups.append({"params": params, "exp_avg_dtype": fmt, "exp_avg_sq_dtype": fmt, "weight_decay": decay})
        self.optimizer = FusedAdam(groups, lr=0.5 if fresh else 0.01, seed=3, decoupled_weight_decay=True, **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)

    def train(self, first: int, last: int) -> None:
        """Steps with given gradients."""
        for step in range(first, last):
            for index, (name, param) in enumerate(self.model.named_parameters()):
                if not name.endswith(WITHOUT_GRADIENT):
                    param.grad = shard_like(values(param.shape, index, step).to(param.dtype), param)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def snapshot(self) -> dict[str, Part]:
        """This rank's parts of parameters, unscaled states and masters, and the hyperparameters."""
        found = {}
        unscaled = self.optimizer.state_dict()["state"]
        for index, (name, param) in enumerate(self.model.named_parameters()):
            found[f"{name}: parameter"] = part(param)
            found |= {f"{name}: {key}": part(value) for key, value in sorted(unscaled.get(index, {}).items())}
        for index, group in enumerate(self.optimizer.param_groups):
            for key in ("step", "lr", "weight_decay"):
                found[f"group {index}: {key}"] = part(torch.tensor(group[key], dtype=torch.float64))
        return found


def trained_states(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the states of frozen parameters, which torch.distributed.checkpoint does not load."""
    return {k: v for k, v in found.items() if "frozen" not in k or "parameter" in k}


def run_straight(master: str) -> list[dict[str, Part]]:
    run = Run("plain", master)
    run.train(0, SAVED_AT)
    half_way = run.snapshot()
    run.train(SAVED_AT, END)
    return [half_way, run.snapshot()]


@functools.cache
def straight(master: str, on: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The run that is never interrupted, on one process: when the others save, and at its end."""
    half_way, end = distributed.run(1, run_straight, master, on=on)[0]
    return join_all([half_way]), join_all([end])


# --- ways to save and load --------------------------------------------------------------------------------------

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ON_CPU = StateDictOptions(cpu_offload=True)


def save_nested(run: Run, path: str) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def load_nested(run: Run, path: str) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save_flat(run: Run, path: str) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer, options=FLAT)
    assert not any(isinstance(value, dict) for value in optimizer.values())
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def load_flat(run: Run, path: str) -> None:
    state = {
        "model": get_model_state_dict(run.model),
        "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=FLAT),
    }
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"], options=FLAT)


def save_on_cpu(run: Run, path: str) -> None:
    model, optimizer = get_state_dict(run.model, run.optimizer, options=ON_CPU)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def save_plain(run: Run, path: str) -> None:
    dcp.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, checkpoint_id=path)


def load_plain(run: Run, path: str) -> None:
    run.optimizer.initialize_state()
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])


def save_full(run: Run, path: str) -> None:
    states = get_state_dict(run.model, run.optimizer, options=FULL)
    if torch.distributed.get_rank() == 0:
        torch.save(states, f"{path}.pt")
    torch.distributed.barrier()


def load_full(run: Run, path: str) -> None:
    model, optimizer = torch.load(f"{path}.pt", weights_only=True)
    set_model_state_dict(run.model, model, options=FULL)
    set_optimizer_state_dict(run.model, run.optimizer, optimizer, options=FULL)


def load_broadcast(run: Run, path: str) -> None:
    first = torch.distributed.get_rank() == 0
    model, optimizer = torch.load(f"{path}.pt", weights_only=True) if first else ({}, {})
    set_model_state_dict(run.model, model, options=BROADCAST)
    set_optimizer_state_dict(run.model, run.optimizer, optimizer, options=BROADCAST)


WAYS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "nested": (save_nested, load_nested),
    "flat": (save_flat, load_flat),
    "plain": (save_plain, load_plain),
    "cpu": (save_on_cpu, load_nested),
    "full": (save_full, load_full),
    "broadcast": (save_full, load_broadcast),
}


# --- saves in the background, which wait to be let write ---------------------------------------------------------

GO = "go"  # appended to a checkpoint's path, with a rank's number: the files that let it be written


class WaitingWriter(dcp.FileSystemWriter):
    """Writes once every rank's file exists; files, since the writer may be in another process."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.go = [Path(f"{path}.{GO}{rank}") for rank in range(dist.get_world_size())]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        deadline = time.monotonic() + 60
        while not all(go.exists() for go in self.go):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of {self.go} appeared")
            time.sleep(0.01)
        return super().write_data(plan, planner)


def let_write(path: str) -> None:
    """This rank has seen that nothing was written yet."""
    Path(f"{path}.{GO}{dist.get_rank()}").touch()


# Options in order: pinned memory, shared memory, in the background, without blocking.
STAGERS: dict[str, Callable[[], AsyncStager]] = {
    "default": lambda: DefaultStager(StagingOptions(False, False, False, False)),
    "shared memory": lambda: DefaultStager(StagingOptions(False, True, False, False)),
    "in background": lambda: DefaultStager(StagingOptions(False, False, True, False)),
    "blocking": BlockingAsyncStager,
    "ours": PinnedStager,
    "ours, shared memory": lambda: PinnedStager(shared=True),
}


def start_save(
    run: Any, path: str, kind: AsyncCheckpointerType, stager: AsyncStager, group: dist.ProcessGroup | None = None
) -> Future[Any]:
    """Returns when the state dict may change."""
    model, optimizer = get_state_dict(run.model, run.optimizer)
    if distributed.device().type == "cuda":
        torch.cuda.synchronize()  # a stager that copies in the background does not wait for kernels
    pending = dcp.async_save(
        {"model": model, "optimizer": optimizer},
        storage_writer=WaitingWriter(path),
        async_checkpointer_type=kind,
        async_stager=stager,
        process_group=group,
    )
    if not isinstance(pending, AsyncSaveResponse):
        return pending
    pending.staging_completion.result()
    return pending.upload_completion


def wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name} in {seconds} s"
        time.sleep(0.005)


def kill_one_rank(
    body: Callable[..., Any],
    args: tuple[Any, ...],
    ready: Path,
    chance: random.Random,
    ranks: int = 2,
    within: float = 0.3,
) -> None:
    """At any moment of so many seconds after ``ready`` is there; the others are left alone for a moment, then ended."""
    workers = Workers(ranks, "cpu")
    try:
        workers.start(body, args, 60)
        wait_for(ready)
        time.sleep(chance.uniform(0.0, within))
        victim = workers.processes[chance.randrange(ranks)]
        victim.kill()
        victim.join()
        time.sleep(chance.choice([0.0, 0.2]) if ranks > 1 else 0.0)
    finally:
        workers.stop()
