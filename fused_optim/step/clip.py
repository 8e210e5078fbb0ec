"""Clipping by the total gradient norm, for plain parameters and DTensors of any meshes, devices and placements.

Every rank accumulates its local shards in one pass. DTensors are grouped by the process groups over which they are
sharded, and one all-reduce per process group serves all of its parameters; replicas are counted once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fused_optim.backends.gradients import NormRequest, power_sums, scale_
from fused_optim.decorators import between_graphs
from fused_optim.options.checks import describe, some_of
from fused_optim.sharding.dtensor import finished_local, local_tensor, sharding_dims
from fused_optim.state.store import StateStore
from fused_optim.step.agreement import Agreement, CollectivesOfRank
from fused_optim.step.scalars import DeviceScalars, is_capturable_on
from fused_optim.step.signature import signature_of


class Ranks(NamedTuple):
    """The ranks over which a mesh dim shards, and the type of device on which they communicate."""

    group: dist.ProcessGroup
    device_type: str


Sharding = tuple[Ranks, ...]


@between_graphs
@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale ``.grad`` in place so that the norm over all of them is at most ``max_norm``, and return the norm before.

    Signature and meaning of ``torch.nn.utils.clip_grad_norm_``: gradients are multiplied by
    ``min(1, max_norm / (norm + 1e-6))``. Other than torch's, it takes plain tensors and DTensors of several meshes
    together, and returns a plain float32 scalar, on the first gradient's device: the norm over the shards of all ranks,
    accumulated in float64 and the same on each of them. It is a collective over the DTensors' meshes. Infinite and
    2-norms take two kernel launches per device, and nothing is read back.

    Args:
        parameters: tensors whose gradients are clipped; float32, bfloat16 and float16 gradients by the engines, other
            floating types by torch. Gradients may be missing, and local shards empty.
        max_norm: largest norm of the result.
        norm_type: any positive number, or ``inf``.
        error_if_nonfinite: raise where the norm is infinite or NaN. Reads it back from the device.
        foreach: has no effect.

    Raises:
        RuntimeError: for sparse gradients, as above, and for gradients that only some ranks have as partial sums; the
            gradients are unchanged then.
        TypeError: for gradients that are not of a floating type.
        ValueError: for another norm_type.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(dict.fromkeys(parameters))
    grads = [param.grad for param in params]
    Agreement(lambda: params, is_first=False).check_alike(CollectivesOfRank.of(params, grads))
    clip = measure(params, grads, max_norm, norm_type, error_if_nonfinite)
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        if grad is not None and local_tensor(grad).numel():
            by_device.setdefault(local_tensor(grad).device, []).append(finished_local(grad))
    for device, tensors in by_device.items():
        scale_(tensors, clip.factors[device])
    return clip.norm


@dataclass
class Clip:
    """A total norm and the factor that clips it: float32 scalars; ``factors``: it on each device that has gradients.

    ``total``: what the norm was computed of, in float64: sums of powers, or the largest magnitudes. ``grads``: the
    gradients, which it does not keep, with their version counters.
    """

    norm: Tensor
    factor: Tensor
    factors: dict[torch.device, Tensor]
    total: Tensor
    norm_type: float
    grads: list[tuple[weakref.ref[Tensor], int] | None]

    def after(self, former: Clip, max_norm: float) -> Clip:
        """The same of gradients that are clipped already, but for the clipping that is still to be done."""
        norm = self.norm * former.factor.to(self.norm.device)
        factor = former.factor.to(norm.device) * (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return replace(self, norm=norm, factor=factor, factors={device: factor.to(device) for device in self.factors})

    def changed(self, grads: Sequence[Tensor | None]) -> list[int]:
        """The positions of gradients that are not None and were replaced or written to since they were measured."""
        found = []
        for i, grad in enumerate(grads):
            own = self.grads[i] if i < len(self.grads) else None
            if grad is not None and (own is None or own[0]() is not grad or own[1] != _version(grad)):
                found.append(i)
        return found

    def finite(self) -> Tensor | None:
        """A boolean scalar on the norm's device, True if all gradients are finite.

        None for norms whose powers of finite gradients may overflow, which cannot tell.
        """
        exact = self.norm_type <= _LARGEST_EXACT or self.norm_type == math.inf
        return self.total.isfinite().all() if exact else None


def _version(grad: Tensor) -> int:
    """The gradient's version counter, with its shard's: in-place operations increase it."""
    local = grad if type(grad) is Tensor else local_tensor(grad)
    own = 0 if local.is_inference() else local._version
    return own if local is grad else own + grad._version


_LARGEST_EXACT = 4.0  # the norm whose powers of any number of float32 gradients are finite in float64


@dataclass
class Locals:
    """The local gradients of one device that are not empty, each with the number of its sharding."""

    tensors: list[Tensor] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)


@torch.no_grad()
def measure(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Clip:
    """The norm of ``grads`` over all ranks; arguments, errors and collectives of :func:`clip_grad_norm_`."""
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not norm_type > 0.0:
        raise ValueError(f"norm_type: expected a positive number or inf, got {norm_type}")
    for index, grad in enumerate(grads):
        if grad is not None:
            _check(grad, index)
    shardings, by_device = _gather(params, [None if grad is None else _without_partial(grad) for grad in grads])
    home = next((local_tensor(t).device for t in (*grads, *params) if t is not None), torch.device("cpu"))
    norm, factor, total = _norm_and_factor(by_device, list(shardings) or [()], max_norm, norm_type, home)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is non-finite, so it cannot be clipped. "
            "To clip by the non-finite norm anyway, set error_if_nonfinite=False"
        )
    measured = [None if grad is None else (weakref.ref(grad), _version(grad)) for grad in grads]
    return Clip(norm, factor, {device: factor.to(device) for device in by_device}, total, norm_type, measured)


@torch.no_grad()
def nonfinite(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Boolean scalars, one per device that has gradients: True if a local gradient there has NaN or infinity.

    One pass over the gradients; no communication unless some of them are partial sums.
    """
    _, by_device = _gather(params, [None if grad is None else _without_partial(grad) for grad in grads])
    request = NormRequest(math.inf, 1, 1.0)
    held = [own.tensors for own in by_device.values() if own.tensors]
    return [power_sums(tensors, [0] * len(tensors), request)[0].isfinite().all().logical_not() for tensors in held]


def _norm_and_factor(
    by_device: dict[torch.device, Locals],
    shardings: list[Sharding],
    max_norm: float,
    norm_type: float,
    home: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm over all ranks and the factor that clips it: float32 scalars on ``home``. And what they come from."""
    request = NormRequest(norm_type, len(shardings), max_norm)
    results = [power_sums(own.tensors, own.groups, request) for own in by_device.values() if own.tensors]
    if len(results) == 1 and results[0][1] is not None and not any(shardings):
        norm, factor = results[0][1].to(home).unbind()
        return norm, factor, results[0][0].to(home)
    sums = [sums.to(home) for sums, _ in results]
    if not sums:
        sums = [torch.zeros(len(shardings), dtype=torch.float64, device=home)]
    values = _reduce(list(_combine(sums, norm_type).unbind()), shardings, norm_type)
    total = _combine(values, norm_type)
    norm = _norm(total, norm_type)
    return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0), total


def _check(grad: Tensor, index: int) -> None:
    if grad.layout != torch.strided:
        raise RuntimeError(f"gradient {index} is sparse ({grad.layout}): use a dense gradient")
    if not grad.is_floating_point():
        raise TypeError(f"gradient {index}: expected a floating type, got {grad.dtype}")


def _without_partial(grad: Tensor) -> Tensor:
    """The norm of a sum is not that of its parts: they are summed first."""
    if not isinstance(grad, DTensor) or not any(placement.is_partial() for placement in grad.placements):
        return grad
    return grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])


def _gather(
    params: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[dict[Sharding, int], dict[torch.device, Locals]]:
    """The shardings, numbered, and the local gradients by device.

    A parameter without a gradient still counts as a sharding, so that ranks where it has one do not wait for this one.
    """
    by_device: dict[torch.device, Locals] = {}
    known: dict[object, Sharding] = {}
    own_shardings: list[Sharding] = []
    names: dict[Sharding, list[tuple[str, str]]] = {}
    for param, grad in zip(params, grads, strict=True):
        placed = param if grad is None else grad
        sharding: Sharding = ()
        if isinstance(placed, DTensor):
            key = (placed.device_mesh, placed.placements)
            if key not in known:
                known[key] = _sharding(placed)
                names.setdefault(known[key], _names(placed))
            sharding = known[key]
        own_shardings.append(sharding)
    # In one order on all ranks, whichever they have their parameters in.
    used = sorted(dict.fromkeys(own_shardings), key=lambda sharding: names.get(sharding, []))
    shardings = {sharding: number for number, sharding in enumerate(used)}
    for sharding, grad in zip(own_shardings, grads, strict=True):
        if grad is None:
            continue
        local = finished_local(grad)
        device = local.device
        own = by_device.get(device)
        if own is None:
            own = by_device[device] = Locals()
        if local.numel():
            own.tensors.append(local)
            own.groups.append(shardings[sharding])
    return shardings, by_device


def _sharding(tensor: DTensor) -> Sharding:
    mesh = tensor.device_mesh
    return tuple(Ranks(mesh.get_group(dim), mesh.device_type) for dim in sharding_dims(tensor))


def _names(tensor: DTensor) -> list[tuple[str, str]]:
    """The names of mesh dims that shard the tensor, if the mesh has names, and of their groups: equal on all ranks."""
    mesh, names = tensor.device_mesh, tensor.device_mesh.mesh_dim_names
    return [(names[dim] if names else "", mesh.get_group(dim).group_name) for dim in sharding_dims(tensor)]


def _reduce(values: list[Tensor], shardings: list[Sharding], norm_type: float) -> list[Tensor]:
    """Every sharding's sum, or maximum, over its ranks: one all-reduce per process group. Replaces the values."""
    for ranks in dict.fromkeys(ranks for sharding in shardings for ranks in sharding):
        members = [i for i, sharding in enumerate(shardings) if ranks in sharding]
        home = values[members[0]].device
        part = torch.stack([values[i] for i in members])
        if home.type != ranks.device_type:  # offloaded gradients
            part = part.to(ranks.device_type)
        if norm_type == math.inf:
            # As integers the bits of magnitudes compare as the magnitudes do, and NaN, which a maximum of floats may
            # drop, exceeds all.
            dist.all_reduce(part.abs_().view(torch.int64), dist.ReduceOp.MAX, group=ranks.group)
        else:
            dist.all_reduce(part, group=ranks.group)
        for i, value in zip(members, part.to(home).unbind(), strict=True):
            values[i] = value
    return values


def _combine(values: list[Tensor], norm_type: float) -> Tensor:
    if len(values) == 1:
        return values[0]
    return torch.stack(values).amax(0) if norm_type == math.inf else torch.stack(values).sum(0)


def _norm(total: Tensor, norm_type: float) -> Tensor:
    """The norm in float32 of a sum of powers, or of a maximum."""
    if norm_type == math.inf:
        return total.float()
    return (total.sqrt() if norm_type == 2.0 else total.pow(1.0 / norm_type)).float()


class DeferredClip:
    """The clipping of one optimizer's next step. The step uses it once; gradients that are dropped take it with them.

    A CUDA graph reads the optimizer's own scalar, into which every call of :meth:`measure` writes. ``note``: is told of
    each clipping with ``skip_nonfinite``, and None where the next step has none any more.
    """

    def __init__(
        self, store: StateStore, scalars: DeviceScalars, agreement: Agreement, note: Callable[[Clip | None], None]
    ) -> None:
        self._store, self._scalars, self._agreement, self._note = store, scalars, agreement, note
        self.due: Clip | None = None

    def measure(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip the next step's gradients; see ``ShardedOptimizer.clip_grad_norm_``."""
        store = self._store
        grads = store.gradients()
        asked = {"max_norm": max_norm, "norm_type": norm_type}
        params, agreement = store.params, self._agreement
        if agreement.asks_in_each_step or any(isinstance(grad, DTensor) for grad in grads):
            facts = signature_of(store, asked=asked) if agreement.is_first else None
            agreement.check_alike(CollectivesOfRank.of(params, grads, store.names, facts))
        measured = measure(params, grads, max_norm, norm_type, error_if_nonfinite)
        if self.due is not None and not self.due.changed(grads):
            measured = measured.after(self.due, float(max_norm))
        self.due = measured
        if store.settings.skip_nonfinite:
            self._note(measured)
        for device, factor in measured.factors.items() if store.settings.capturable else ():
            if is_capturable_on(device, store.settings):
                self._scalars.factor(device).copy_(factor)
        return measured.norm

    def drop(self) -> None:
        if self.due is not None:
            self.serve(self.due.factors)
        self._note(None)

    def check(self) -> None:
        """Raise RuntimeError for gradients that are not as they were measured: these the next step cannot clip."""
        if self.due is None:
            return
        grads, names = self._store.gradients(), self._store.names
        if all(grad is None for grad in grads):
            self.drop()
        elif changed := self.due.changed(grads):
            who = [describe(self._store.params[i], i, names[i]) for i in changed]
            raise RuntimeError(
                f"clip_grad_norm_() was called for this step, which clips what was measured, and since then gradients "
                f"were written or replaced, of {some_of(who)}: call it after all that changes gradients, or use "
                "fused_optim.clip_grad_norm_, which clips at once; if these are new ones, after a step that was not "
                "made, call optimizer.zero_grad() before backward"
            )

    def factor(self, device: torch.device) -> Tensor | None:
        """The factor of gradients on a device: a float32 scalar, which may be on another one."""
        if is_capturable_on(device, self._store.settings):
            return self._scalars.factor(device)
        return None if self.due is None else self.due.factors.get(device)

    def serve(self, devices: Iterable[torch.device]) -> None:
        """After a step, also in a graph: each clipping serves one."""
        for device in devices:
            if is_capturable_on(device, self._store.settings):
                self._scalars.factor(device).fill_(1.0)
        self.due = None
