"""Gradient release: the backward pass updates parameters and frees their gradients as soon as these are reduced.

Hooks on the parameters, or DistributedDataParallel's communication hook, tell when a gradient is ready. Parameters are
updated in buckets, in the order of the backward pass; ``optimizer.step()`` updates what is left and counts the step. A
parameter's update is that of a whole step, bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fused_optim.adam import FusedAdam
from fused_optim.decorators import between_graphs
from fused_optim.options.checks import describe
from fused_optim.sharding.collective import parameter_names
from fused_optim.sharding.dtensor import local_tensor

BUCKET_BYTES = 32 << 20


def enable_gradient_release(
    model: nn.Module, optimizer: FusedAdam, *, bucket_bytes: int = BUCKET_BYTES
) -> GradientRelease:
    """Update parameters in the backward pass and free their gradients; call ``optimizer.step()`` after each, as ever.

    Args:
        model: a plain module, DistributedDataParallel, or one that ``fully_shard`` (FSDP2) was applied to. Its
            parameters that the optimizer does not have are left alone; those of the optimizer that the model does not
            have are updated by ``step()``.
        optimizer: its states are created now.
        bucket_bytes: gradients are held until so many bytes of them, on this rank, can be updated together; 0: each
            parameter on its own.

    Under FSDP2 updates run on the stream that has reduced the gradients, otherwise and with ``offload_states`` on a
    stream of their own, while the backward pass goes on. A model's parameters are its own again when ``step()`` has
    returned, as far as this stream is concerned.

    Raises:
        TypeError: for flat parameters of FullyShardedDataParallel (FSDP1), and for DistributedDataParallel inside of
            ``model``.
        ValueError: if the optimizer has none of the model's parameters.
        RuntimeError: for ``skip_nonfinite``, ``capturable`` and ``use_decoupled_grad``. Later on, for what needs all
            gradients at once: ``optimizer.clip_grad_norm_``, a GradScaler, a second backward pass before ``step()``
            (gradient accumulation), and ``state_dict()`` between a backward pass and ``step()``. Clipping by
            ``torch.nn.utils`` finds no gradients, and does nothing.
    """
    if _holds(model, FullyShardedDataParallel):
        raise TypeError("FullyShardedDataParallel (FSDP1) has flat parameters without hooks: use fully_shard (FSDP2)")
    if not isinstance(model, DistributedDataParallel) and _holds(model, DistributedDataParallel):
        raise TypeError(
            "a submodule is DistributedDataParallel: its communication hook tells when gradients are reduced"
        )
    if optimizer.use_decoupled_grad:
        raise RuntimeError("use_decoupled_grad=True: gradients that are not in p.grad do not tell when they are ready")
    return GradientRelease(model, optimizer, bucket_bytes)


class GradientRelease:
    """What :func:`enable_gradient_release` has set up; :meth:`disable` ends it."""

    def __init__(self, model: nn.Module, optimizer: FusedAdam, bucket_bytes: int) -> None:
        self._optimizer = optimizer
        own = set(optimizer.store.params)
        self._names = {param: names[0] for param, names in parameter_names(model).items()}
        params = [param for param in dict.fromkeys(model.parameters()) if param in own and param.requires_grad]
        if not params:
            raise ValueError("the optimizer has none of the model's parameters that require gradients")
        self._buckets = list(_buckets(reversed(params), bucket_bytes))
        self._bucket_of = {param: number for number, bucket in enumerate(self._buckets) for param in bucket}
        self._waiting: list[int] = []
        self._arrived: set[Tensor] = set()
        self._sharded = _holds(model, FSDPModule)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        optimizer.stepper.in_buckets(self._buckets)
        self._begin()
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(lambda *_: self._finish()),
            optimizer.register_step_post_hook(lambda *_: self._begin()),
        ]
        self._is_enabled = True
        # The optimizer's hooks keep this object. Those of the model must not: autograd and DistributedDataParallel hold
        # them where the garbage collector does not look, and the model and its states would never be freed.
        this = weakref.ref(self)
        if isinstance(model, DistributedDataParallel):
            # A lambda, since annotations are read.
            model.register_comm_hook(model.process_group, lambda group, bucket: _reduce(this, group, bucket))
        else:
            arrive = _arriving(this)
            self._handles += [param.register_post_accumulate_grad_hook(arrive) for param in params]

    def disable(self) -> None:
        """Make whole steps again, from the next one on. Raises RuntimeError between a backward pass and ``step()``."""
        self._optimizer.stepper.check_between_steps()
        self._optimizer.stepper.in_buckets(None)
        for handle in self._handles:
            handle.remove()
        self._is_enabled = False

    # --- a step -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """After ``step()``, which has used all gradients."""
        for bucket in self._buckets:
            _free(bucket)
        self._waiting = [len(bucket) for bucket in self._buckets]
        self._arrived.clear()

    def _finish(self) -> None:
        """Before ``step()``: it comes after all updates, and updated parameters have no gradients for it."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        for number, waiting in enumerate(self._waiting):
            if not waiting:
                _free(self._buckets[number])  # DistributedDataParallel has put them back

    def _arrive(self, param: Tensor) -> None:
        """A parameter's gradient is ready."""
        if param in self._arrived:
            index = next(i for i, each in enumerate(self._optimizer.store.params) if each is param)
            raise RuntimeError(
                f"{describe(param, index, self._names.get(param))}: it has a second gradient before optimizer.step(). "
                "Gradient release updates parameters as gradients come: call step() after each backward pass, without "
                "accumulation over several of them"
            )
        self._arrived.add(param)
        number = self._bucket_of[param]
        self._waiting[number] -= 1
        if not self._waiting[number]:
            self._update(number)

    def _update(self, number: int) -> None:
        self._await_offloaded(self._buckets[number])
        with self._on_own_stream(self._buckets[number]):
            self._optimizer.stepper.update_bucket(number)
        _free(self._buckets[number])

    def _await_offloaded(self, params: Sequence[Tensor]) -> None:
        """FSDP2 of torch before 2.13 calls hooks while gradients are still on their way from a GPU to host memory."""
        if self._sharded and torch.cuda.is_initialized() and local_tensor(params[0]).device.type == "cpu":
            torch.cuda.current_stream().synchronize()

    def _on_own_stream(self, params: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """A stream that comes after what is enqueued now. The caching allocator is told of gradients that it reads."""
        device = local_tensor(params[0]).device
        waits_for_states = self._optimizer.store.offloads  # which the next gradients' reduction should not do, too
        if device.type != "cuda" or (self._sharded and not waits_for_states):
            return nullcontext()
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        for param in params:
            if param.grad is not None:
                local_tensor(param.grad).record_stream(stream)
        return torch.cuda.stream(stream)

    # --- DistributedDataParallel ------------------------------------------------------------------------------------

    def _take(self, bucket: dist.GradBucket, work: dist.Work) -> None:
        """Updates what a bucket of gradients completes, once they are reduced."""
        if not self._is_enabled:
            return
        with self._on_own_stream(bucket.parameters()):
            work.wait()
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                # What this rank has not used may be used by none: that is known at the end of the pass, and
                # updated by `step()`.
                if param in self._bucket_of and param.grad is not None:
                    param.grad = grad
                    self._arrive(param)


@between_graphs
def _reduce(
    this: weakref.ref[GradientRelease], group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """A communication hook: the mean over ranks, as DistributedDataParallel computes it itself, and then the update."""
    buffer = bucket.buffer()
    buffer.mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(buffer, group=group, async_op=True)
    if release := this():
        release._take(bucket, work)
    reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return reduced


def _arriving(this: weakref.ref[GradientRelease]) -> Callable[[Tensor], None]:
    """A hook of parameters whose gradient is ready."""

    @between_graphs
    def arrive(param: Tensor) -> None:
        if release := this():
            release._arrive(param)

    return arrive


def _buckets(params: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Lists of parameters on one device whose local gradients reach ``size`` bytes."""
    bucket: list[Tensor] = []
    filled = 0
    for param in params:
        local = local_tensor(param)
        if bucket and local_tensor(bucket[0]).device != local.device:
            yield bucket
            bucket, filled = [], 0
        bucket.append(param)
        filled += local.numel() * local.element_size()
        if filled >= size:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def _holds(model: nn.Module, kind: type) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


def _free(params: Iterable[Tensor]) -> None:
    for param in params:
        param.grad = None
