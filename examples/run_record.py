"""What one training run measured: filled in by train_fsdp2.py, read by demo.py."""

import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fused_optim import FusedAdamW
from fused_optim.quantized import QuantizedTensor

FINAL_STEPS = 20  # averaged, as the loss of one step depends on its text
UNTIMED_STEPS = 3  # the first steps allocate memory and choose kernels


@dataclasses.dataclass
class RunRecord:
    """Losses are pairs of (number of finished steps, nats per byte), times are seconds, sizes cover all ranks."""

    device: str
    world_size: int
    train_losses: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    held_out_losses: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    step_times: list[float] = dataclasses.field(default_factory=list)
    optimizer_times: list[float] = dataclasses.field(default_factory=list)
    save_calls: list[float] = dataclasses.field(default_factory=list)  # one per step, of which most save nothing
    parameters: int = 0
    parameter_bytes: int = 0
    state_bytes: int = 0

    @property
    def first_train_loss(self) -> float:
        return self.train_losses[0][1]

    @property
    def final_train_loss(self) -> float:
        return statistics.fmean(loss for _, loss in self.train_losses[-FINAL_STEPS:])

    @property
    def held_out_loss(self) -> float:
        return self.held_out_losses[-1][1]

    @property
    def bytes_of_parameter(self) -> float:
        return self.parameter_bytes / self.parameters

    @property
    def bytes_of_state(self) -> float:
        return self.state_bytes / self.parameters

    @property
    def bytes_of_both(self) -> float:
        return self.bytes_of_parameter + self.bytes_of_state

    @property
    def step_ms(self) -> float:
        return 1000 * statistics.median(self.step_times[UNTIMED_STEPS:])

    @property
    def optimizer_ms(self) -> float:
        return 1000 * statistics.median(self.optimizer_times[UNTIMED_STEPS:])

    @property
    def save_ms(self) -> float:
        """Until the call that saves returns: 0 where nothing was saved."""
        return 1000 * max(self.save_calls, default=0.0)

    def measure_sizes(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        parameters = list(model.parameters())
        self.parameters = sum(parameter.numel() for parameter in parameters)
        here = [sum(map(local_bytes, parameters)), state_bytes(optimizer)]
        sizes = torch.tensor(here, device=self.device)
        dist.all_reduce(sizes)
        self.parameter_bytes, self.state_bytes = sizes.tolist()

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "RunRecord":
        return cls(**json.loads(path.read_text()))


def local_bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.stored_bytes if isinstance(local, QuantizedTensor) else local.nbytes


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """What this rank's optimizer state takes."""
    if isinstance(optimizer, FusedAdamW):
        return optimizer.state_bytes()
    return sum(local_bytes(value) for state in optimizer.state.values() for value in state.values())


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels run after the call that queued them returned
    return time.perf_counter()
