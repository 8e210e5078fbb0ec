"""Skips steps whose gradients hold a NaN or an infinity on any rank, as those with an overflow under a GradScaler.

All of it stays on the device: whether a step is skipped is a scalar that the update reads, and so is their count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fused_optim.backends import is_capturing
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.step import clip


class Skips:
    """Decides, for each step, if all ranks skip it, and counts the skipped steps."""

    def __init__(self, count: int = 0) -> None:
        self._counts: dict[torch.device, Tensor] = {}  # int64 scalars, in the memory that captured graphs write to
        self._before = count  # in another process, or before the optimizer was copied
        self._known: Tensor | None = None  # what the last clipping has found, for the next step
        self._known_in_capture = False

    @property
    def count(self) -> int:
        """The number of steps that were skipped. Waits for the devices."""
        return self._before + sum(int(count) for count in self._counts.values())

    def prepare(self, device: torch.device) -> None:
        """Allocate what a capture cannot."""
        if device not in self._counts:
            self._counts[device] = torch.zeros((), dtype=torch.int64, device=device)

    def note(self, measured: clip.Clip | None) -> None:
        """Take over the clipping of the next step, which needs no pass of its own then. None: that is dropped."""
        finite = None if measured is None else measured.finite()
        self._known = None if finite is None else finite.logical_not()
        self._known_in_capture = is_capturing()

    def decide(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        found_inf: Tensor | None,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        """Not 0 where the step is to be skipped on all ranks of ``group`` (None: the default one): a float32 scalar.

        ``found_inf``: what a GradScaler has found on this rank. A collective over the group, if there is one.
        """
        known = self._known if self._known_in_capture == is_capturing() else None
        found = [known] if known is not None else clip.nonfinite(params, grads)
        home = _home(params, found_inf)
        flags = [flag.to(home) for flag in found] + ([] if found_inf is None else [found_inf.to(home) != 0])
        skip = (
            torch.stack([flag.reshape(()) for flag in flags]).any()
            if flags
            else torch.zeros((), dtype=torch.bool, device=home)
        )
        skip = _on_any_rank(skip.float(), group)
        self.prepare(home)
        self._counts[home].add_(skip != 0)
        self._known = None
        return skip

    @staticmethod
    def abandon(group: dist.ProcessGroup | None) -> None:
        """Let the others, who wait in :meth:`decide` for a rank that refuses its gradients, skip the step."""
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            skip = torch.ones((), dtype=torch.float32, device=_meeting_place(group))
            dist.all_reduce(skip, dist.ReduceOp.MAX, group=group, async_op=True)


def _home(params: Sequence[Tensor], found_inf: Tensor | None) -> torch.device:
    """The device that decides: a GPU if some parameter is on one."""
    devices = dict.fromkeys(local_tensor(param).device for param in params)
    gpus = (device for device in devices if device.type != "cpu")
    other = torch.device("cpu") if found_inf is None else found_inf.device
    return next(gpus, next(iter(devices), other))


def _on_any_rank(skip: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return skip
    shared = skip.to(_meeting_place(group))
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    return shared.to(skip.device)


def _meeting_place(group: dist.ProcessGroup | None) -> torch.device:
    """The device of the tensor that ranks reduce: a GPU, if the group's backend takes them and this machine has one.

    Ranks without parameters must find the same kind of device.
    """
    types = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    if "cuda" in types and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu" if "cpu" in types else types[0])
