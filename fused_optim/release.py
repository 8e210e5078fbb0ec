"""Gradient release: the backward pass updates parameters and frees their gradients as soon as these are reduced.

Hooks on the parameters, or DistributedDataParallel's communication hook, tell when a gradient is ready. What follows
from that, and what is allowed when, ``step/buckets.py`` knows. Updates are those of a whole step, bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from fused_optim.adam import FusedAdam
from fused_optim.decorators import between_graphs
from fused_optim.memory.by_parameter import ByParameter
from fused_optim.sharding.collective import parameter_names


def enable_gradient_release(
    model: nn.Module, optimizer: FusedAdam, *, bucket_bytes: int | None = None
) -> GradientRelease:
    """Update parameters in the backward pass and free their gradients; call ``optimizer.step()`` after each, as ever.

    Args:
        model: a plain module, DistributedDataParallel, or one that ``fully_shard`` (FSDP2) was applied to. Its
            parameters that the optimizer does not have are left alone; those of the optimizer that the model does not
            have are updated by ``step()``. Parameters may be frozen, unfrozen, added and replaced between two steps.
        optimizer: its states are created now.
        bucket_bytes: gradients are held until so many bytes of them, on the mean of a mesh's ranks, can be updated
            together. None: an eighth of them all, and no less than 32 MiB; 0: each parameter on its own.

    A collective over the parameters' meshes: all of their ranks call it.

    On GPUs updates run on a stream of their own, while the backward pass goes on. They are done when ``backward()`` has
    returned, as far as this stream is concerned.

    Hyperparameters are those at the first gradient of the backward pass. ``step()`` raises RuntimeError where they were
    changed since: set them before ``backward()``, or after ``step()``, where learning rate schedulers do.

    A backward pass that fails ends its step: what it has updated counts as updated, other gradients stay until
    ``zero_grad()``.

    Raises:
        TypeError: for flat parameters of FullyShardedDataParallel (FSDP1), and for DistributedDataParallel inside of
            ``model``.
        ValueError: if the optimizer has none of the model's parameters.
        RuntimeError: if it is enabled for this optimizer already, for ``skip_nonfinite``, ``capturable`` and
            ``use_decoupled_grad``, where DistributedDataParallel has a communication hook already, and on all ranks of
            a mesh that were given other options, where buckets decide what they send. Later on, for
            what needs all gradients at once: ``optimizer.clip_grad_norm_``, ``diagnostics``, a GradScaler, a second
            backward pass before ``step()`` (gradient accumulation); and for whatever else is called between
            ``backward()`` and ``step()``. Nothing has been changed then. Clipping by ``torch.nn.utils`` finds no
            gradients, or only some: do not use it.
    """
    if _holds(model, FullyShardedDataParallel):
        raise TypeError("FullyShardedDataParallel (FSDP1) has flat parameters without hooks: use fully_shard (FSDP2)")
    if not isinstance(model, DistributedDataParallel) and _holds(model, DistributedDataParallel):
        raise TypeError(
            "a submodule is DistributedDataParallel: its communication hook tells when gradients are reduced"
        )
    if any(rule.whole_matrices for rule in optimizer.store.rules().values()):
        raise RuntimeError("gradient release updates shards as their gradients come, and Muon whole matrices")
    optimizer.stepper.check_can_be_in_buckets()
    return GradientRelease(model, optimizer, bucket_bytes)


class GradientRelease:
    """A gradient release that :func:`enable_gradient_release` has set up; :meth:`disable` ends it."""

    def __init__(self, model: nn.Module, optimizer: FusedAdam, bucket_bytes: int | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._hooks: ByParameter[RemovableHandle] = ByParameter()
        if not self._chosen():
            raise ValueError("the optimizer has none of the model's parameters that require gradients")
        # The optimizer keeps this object. Hooks of the model must not: autograd and DistributedDataParallel hold them
        # where the garbage collector does not look, and the model and its states would never be freed.
        self._this = weakref.ref(self)
        self._reducing = _reducing(model) if isinstance(model, DistributedDataParallel) else None
        try:
            self.buckets = optimizer.stepper.start_release(self._choose, bucket_bytes)
        except BaseException:
            self._remove_hooks()
            raise
        if self._reducing is not None:
            self._reducing.release = self._this

    def disable(self) -> None:
        """Make whole steps again, from the next one on.

        Between a backward pass and ``step()`` it makes that step first, with the hyperparameters of the backward pass.
        Raises RuntimeError inside of a backward pass.
        """
        buckets, stepper = self.buckets, self._optimizer.stepper
        if stepper.buckets is not buckets:
            return
        buckets.check_backward_is_over("disable()")
        try:
            buckets.finish_begun()
        finally:
            stepper.stop_release()
            self._remove_hooks()
            if self._reducing is not None:
                self._reducing.release = None

    def _remove_hooks(self) -> None:
        for handle in self._hooks.values():
            handle.remove()

    def _chosen(self) -> dict[Tensor, str]:
        own = set(self._optimizer.store.params)
        names = {param: own_names[0] for param, own_names in parameter_names(self._model).items()}
        return {param: names[param] for param in reversed(names) if param in own and param.requires_grad}

    def _choose(self) -> dict[Tensor, str]:
        """The parameters to update in the backward pass, in its order. Hooks those that have no hook yet."""
        chosen = self._chosen()
        if self._reducing is None:
            self._hooks = ByParameter(self._hooks.of(self._optimizer.store.params))
            for param in chosen:
                if param not in self._hooks:
                    self._hooks[param] = _hook(param, self._this)
        return chosen

    def take(self, bucket: dist.GradBucket, work: dist.Work) -> None:
        """Update the parameters that a bucket of DistributedDataParallel completes, once its gradients are reduced."""
        with self.buckets.streams.waiting(bucket.parameters()):
            work.wait()
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                # What this rank has not used may be used by none: that is known at the end of the pass, and
                # updated by `step()`.
                if param in self.buckets and param.grad is not None:
                    param.grad = grad
                    self.buckets.on_gradient_ready(param)


def _hook(param: Tensor, this: weakref.ref[GradientRelease]) -> RemovableHandle:
    @between_graphs
    def on_gradient_ready(param: Tensor) -> None:
        if release := this():
            release.buckets.on_gradient_ready(param)

    handle: RemovableHandle = param.register_post_accumulate_grad_hook(on_gradient_ready)
    return handle


# --- DistributedDataParallel ----------------------------------------------------------------------------------------


@dataclass
class _Reducing:
    """The communication hook of a model, which takes only one, and the release that it serves now."""

    release: Callable[[], GradientRelease | None] | None = None

    @between_graphs
    def reduce(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The mean over ranks, as DistributedDataParallel computes it itself, and then the update."""
        buffer = bucket.buffer()
        buffer.mul_(1.0 / dist.get_world_size(group))
        work = dist.all_reduce(buffer, group=group, async_op=True)
        if self.release is not None and (release := self.release()):
            release.take(bucket, work)
        reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return reduced


_reducing_of: weakref.WeakKeyDictionary[DistributedDataParallel, _Reducing] = weakref.WeakKeyDictionary()


def _reducing(model: DistributedDataParallel) -> _Reducing:
    """The hook of a model. Raises RuntimeError if the model has another one."""
    if model not in _reducing_of:
        reducing = _Reducing()
        try:
            # A lambda, since annotations are read.
            model.register_comm_hook(model.process_group, lambda group, bucket: reducing.reduce(group, bucket))
        except RuntimeError as error:
            raise RuntimeError(
                "this DistributedDataParallel has a communication hook already, and takes one: gradient release needs "
                "its own to know when gradients are reduced. Wrap the model without register_comm_hook()"
            ) from error
        _reducing_of[model] = reducing
    return _reducing_of[model]


def _holds(model: nn.Module, kind: type) -> bool:
    return any(isinstance(module, kind) for module in model.modules())
