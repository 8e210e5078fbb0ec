"""Steps in buckets: gradient release updates some parameters before others have gradients; all of it is one step.

The first gradient of a backward pass begins a step, and ``step()`` ends it. Everything public asks in between:

    IDLE            nothing has been updated since the last step: everything is allowed
    IN_BACKWARD     a backward pass is running
    PARTLY_STEPPED  it is over: only ``step()`` is allowed, which updates what is left, and counts

A backward pass that fails ends its step: what it has updated counts, and other gradients stay, as torch leaves them.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.tensor import DTensor

from fused_optim.backends.compiled import SameTensors
from fused_optim.memory import copies
from fused_optim.memory.by_parameter import ByParameter, Reference, reference_to
from fused_optim.memory.layout import STEP
from fused_optim.options.checks import describe
from fused_optim.rules import Hyper
from fused_optim.sharding.dtensor import local_tensor, sharding_dims
from fused_optim.state.store import StateStore
from fused_optim.step.agreement import Agreement, CollectivesOfRank, is_misplaced
from fused_optim.step.plan import Plan, PlanKey, placed_as
from fused_optim.step.scalars import DeviceScalars, Hyperparameters
from fused_optim.step.signature import signature_of
from fused_optim.step.streams import SideStreams

LEAST_BYTES = 32 << 20  # of a bucket, and
MOST_BUCKETS = 8  # of a step: what they cost the host does not grow with the model
PATIENCE = 5.0  # seconds, with a backward pass that seems to run elsewhere

NO_SCALER = (
    "torch.amp.GradScaler looks for overflows in all gradients before a step; this one is made in buckets (gradient "
    "release), which use gradients as they come: train without a GradScaler"
)

# The parameters to be updated in the backward pass, in its order, and their names.
Choice = Callable[[], dict[Tensor, str]]


class Phase(Enum):
    """The stages of a step with gradient release."""

    IDLE = "between two steps"
    IN_BACKWARD = "during the backward pass"
    PARTLY_STEPPED = "between backward() and step()"


class OutOfPlace(Exception):
    """Raised for gradients whose placements differ from their parameters': a step has to redistribute them."""


class Stepping(Protocol):
    """The parts of :class:`Stepper` that steps in buckets use, too."""

    scalars: DeviceScalars
    agreement: Agreement

    hyperparameters: Hyperparameters

    def check_groups(self) -> None:
        """Raise for hyperparameters that cannot be used."""

    def renew_states(self) -> None:
        """Create missing states, before new plans are made."""

    def find_remote_groups(self, own: Collection[int]) -> None:
        """A collective, once: find the :meth:`remote_groups`."""

    def remote_groups(self) -> set[int]:
        """Param groups without elements on this rank, whose steps it counts because other ranks step them."""


class ReleasedStep:
    """The steps of an optimizer with gradient release. Made by all ranks of the parameters' meshes together.

    Args:
        choose: called where the parameters that require gradients are others than before.
        bucket_bytes: of gradients that are updated together; None: an eighth of all, and no less than 32 MiB.
    """

    def __init__(self, store: StateStore, stepping: Stepping, choose: Choice, bucket_bytes: int | None) -> None:
        self._store, self._stepping, self._choose, self._bucket_bytes = store, stepping, choose, bucket_bytes
        self.streams = SideStreams()
        self.plans: list[Plan] = []  # one for each bucket, and one for all other parameters
        self._names: ByParameter[str] = ByParameter()
        self._trainable = SameTensors()  # of all parameters of the optimizer, when buckets were chosen
        self._members: list[list[Reference]] = []
        self._number: ByParameter[int] = ByParameter()  # a parameter's bucket
        self._numbers: dict[int, int] = {}  # the same by `id()`, as long as the parameters are those of `_trainable`
        self._key: PlanKey | None = None  # of the plans; None: new ones are due
        self._others: list[Reference] = []  # parameters in no bucket
        # Of which `step()` takes care: it can ask other ranks whether they have the like.
        self._out_of_place: ByParameter[bool] = ByParameter()
        self._reset()
        self._choose_buckets()
        Agreement(lambda: store.params).check_alike(CollectivesOfRank(facts=signature_of(store, self._number.get)))

    def _reset(self) -> None:
        self._is_begun = False
        self._running: weakref.ref[Callable[[], None]] | None = None  # the backward pass, as long as it is not over
        self._expect_all()
        self._arrived: set[int] = set()  # of parameters in no bucket
        self._done: set[int] = set()  # buckets
        self._counting: set[int] = set()  # param groups whose step this is
        self._hypers: dict[torch.device, list[Hyper]] = {}
        self._begun_with: list[dict[str, Any]] = []

    def _expect_all(self) -> None:
        self._expected = self._numbers.copy()  # without those whose gradients are there
        self._waiting = [len(bucket) for bucket in self._members]

    # --- where a step is --------------------------------------------------------------------------------------------

    def phase(self) -> Phase:
        """The stage of the step. A step whose backward pass has failed is ended here."""
        if self._has_failed():
            self._end()
        if not self._is_begun:
            return Phase.IDLE
        return Phase.PARTLY_STEPPED if self._running is None else Phase.IN_BACKWARD

    def _has_failed(self) -> bool:
        """True if the backward pass has ended without its callback, which is to say that it failed.

        On GPUs it has a thread of autograd's, which may let go of it only a moment after ``backward()`` has raised: who
        asks from outside of a pass waits for that.
        """
        deadline = time.monotonic() + PATIENCE
        while (running := self._running) is not None and running() is not None:
            if torch._C._current_graph_task_id() != -1 or time.monotonic() > deadline:
                return False
            time.sleep(1e-4)
        return running is not None

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError where some parameters are a step ahead of the others."""
        phase = self.phase()
        if phase is not Phase.IDLE:
            raise RuntimeError(
                f"{what} {phase.value}: with gradient release some parameters were updated in the backward pass and "
                "others were not: call step() first"
            )

    def check_backward_is_over(self, what: str) -> None:
        """Raise RuntimeError for ``step()`` inside of the backward pass."""
        if self.phase() is Phase.IN_BACKWARD:
            raise RuntimeError(
                f"{what} during the backward pass, in which gradient release updates: call it afterwards"
            )

    def drop_gradients(self) -> None:
        """Before ``zero_grad()``. Raises RuntimeError where some have been used."""
        if self.phase() is Phase.IN_BACKWARD or self._done:
            raise RuntimeError(
                f"zero_grad() {self.phase().value}: gradient release has updated parameters in the backward pass, "
                "which cannot be taken back: call step() first"
            )
        self._reset()

    def _watch_pass(self) -> None:
        """Have autograd call ``_pass_is_over`` at the end of the pass. A pass that fails frees the callback instead."""
        at_end = self._pass_is_over
        self._running = weakref.ref(at_end)
        Variable._execution_engine.queue_callback(at_end)

    def _pass_is_over(self) -> None:
        self._running = None
        self.streams.join()

    def __contains__(self, param: Tensor) -> bool:
        """True if a bucket updates this parameter in the backward pass."""
        return param in self._number

    # --- a step -----------------------------------------------------------------------------------------------------

    def on_gradient_ready(self, param: Tensor) -> None:
        """A parameter's gradient is ready. Updates its bucket if it is the last one there.

        Of each parameter in each backward pass: what is not rare costs the host time here.
        """
        if self._running is None or self._running() is None:
            self._enter_pass(param)
        number = self._expected.pop(id(param), None)
        if number is None:
            self._note_other(param)
            return
        self._waiting[number] -= 1
        if not self._waiting[number]:
            self._update_bucket(number)

    def _update_bucket(self, number: int) -> None:
        members = _alive(self._members[number])
        with self.streams.beside(members):
            copies.wait_for_saves()
            try:
                self._update([number], in_backward=True)
            except OutOfPlace:
                self._leave_to_step(members)
                return
        _free(members)

    def _leave_to_step(self, members: list[Tensor]) -> None:
        """Leave a bucket with misplaced gradients to ``step()``. These have no bucket from the next step on."""
        for param in members:
            if is_misplaced(param, param.grad):
                self._out_of_place[param] = True
        self._trainable = SameTensors()  # buckets are chosen anew before the next step

    def _enter_pass(self, param: Tensor) -> None:
        """Begin a step: ``param`` has the first gradient of a backward pass."""
        self.phase()
        self._check_first(param)
        self._watch_pass()
        if not self._is_begun:
            self._begin()

    def _note_other(self, param: Tensor) -> None:
        """Leave a gradient to ``step()``: its parameter has no bucket, or has had a gradient in this step."""
        self._check_first(param)
        self._arrived.add(id(param))

    def _check_first(self, param: Tensor) -> None:
        key = id(param)
        if key in self._arrived or (key in self._numbers and key not in self._expected):
            index = next(i for i, each in enumerate(self._store.params) if each is param)
            raise RuntimeError(
                f"{describe(param, index, self._names.get(param))}: it has a second gradient before optimizer.step(). "
                "Gradient release updates parameters as gradients come: call step() after each backward pass, without "
                "accumulation over several of them"
            )

    def _begin(self) -> None:
        """Prepare a step, once for all its updates. Raises before anything is changed."""
        self._stepping.check_groups()
        self._store.resolve_pending()
        if not self._trainable.are(self._now_trainable()):
            self._choose_buckets()
        if not self._plans_fit(self.plans):
            self._make_plans()
        for device in {device for plan in self.plans for device in plan.backends}:
            self._hypers_on(device)
        self._begun_with = self._hyperparameters()
        self._is_begun = True

    def finish(self) -> None:
        """``step()``: update what is left, and count. Raises RuntimeError if hyperparameters have changed."""
        if self._is_begun:
            self._check_hyperparameters()
        else:
            self._begin()
        self._complete()

    def finish_begun(self) -> None:
        """Finish a step that a backward pass has begun, with its hyperparameters. It ends also if this raises."""
        if self.phase() is not Phase.IDLE:
            try:
                self._complete()
            finally:
                self._end()

    def _complete(self) -> None:
        self.streams.join()
        for number in self._done:
            _free(_alive(self._members[number]))  # DistributedDataParallel, or a refused pass, has put them back
        left = [number for number in range(len(self.plans)) if number not in self._done]
        if not self._plans_fit([self.plans[number] for number in left]):
            self._make_plans()
        agreement = self._stepping.agreement
        agreement.is_open = True
        try:
            self._place_gradients([*chain.from_iterable(self._members[number] for number in left[:-1]), *self._others])
            self._update(left)
        except Exception:
            agreement.abort()
            if not self._done:  # nothing has been changed
                self._reset()
            raise
        for number in left[:-1]:
            _free(_alive(self._members[number]))
        self._stepping.find_remote_groups(self._counting)
        self._end()

    def _place_gradients(self, references: Sequence[Reference]) -> None:
        """Redistribute gradients to their parameters' placements, if all ranks have such gradients.

        In the optimizer's order: in buckets, ranks may have other ones together. A collective of the first step.
        """
        params = self._store.params
        out = {param for param in _alive(references) if is_misplaced(param, param.grad)}
        grads = [param.grad if param in out else None for param in params] if out else [None] * len(params)
        facts = None if self._key is None else self._key.facts
        self._stepping.agreement.check_alike(CollectivesOfRank.of(params, grads, self._store.names, facts))
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                param.grad = placed_as(grad, param)

    def _update(self, numbers: list[int], in_backward: bool = False) -> None:
        """Raises before anything is changed for gradients that do not fit their parameters.

        Raises OutOfPlace for misplaced gradients in the backward pass, where other ranks may not join in moving them.
        """
        attribute, scalars = self._store.grad_attribute, self._stepping.scalars
        plans = [self.plans[number] for number in numbers]
        stale = [plan.refresh(attribute) for plan in plans]
        if None in stale:  # a parameter has left its device
            self._make_plans()
            plans = [self.plans[number] for number in numbers]
            stale = [plan.refresh(attribute) for plan in plans]
        for plan, changed in zip(plans, stale, strict=True):
            if in_backward and any(is_misplaced(param, getattr(param, attribute)) for _, _, param in changed or ()):
                raise OutOfPlace
            plan.take(changed or ())
        for number, plan in zip(numbers, plans, strict=True):
            counting = plan.groups_with_gradients()
            plan.run(self._hypers_on, scalars.workspaces(plan.backends, self._store.groups), None)
            self._counting |= counting
            self._done.add(number)

    def _end(self) -> None:
        """Count the step if anything was updated. The next one may begin."""
        self.streams.join()
        for number in self._counting | self._stepping.remote_groups() if self._done else ():
            group = self._store.groups[number]
            group[STEP] = int(group[STEP]) + 1
        self._reset()

    # --- hyperparameters --------------------------------------------------------------------------------------------

    def _hypers_on(self, device: torch.device) -> list[Hyper]:
        if device not in self._hypers:
            self._hypers[device] = self._stepping.hyperparameters.on(device)
        return self._hypers[device]

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """The hyperparameters of all param groups, in a form that can be compared."""
        own = {*self._store.defaults, STEP}
        return [{key: _comparable(group[key]) for key in group if key in own} for group in self._store.groups]

    def _check_hyperparameters(self) -> None:
        self._stepping.check_groups()
        for number, (before, now) in enumerate(zip(self._begun_with, self._hyperparameters(), strict=False)):
            for key in before.keys() & now.keys():
                if before[key] != now[key]:
                    raise RuntimeError(
                        f"param group {number}: {key!r} was changed between backward() and step(), when gradient "
                        "release had updated parameters with its former value in the backward pass. Set it before "
                        "backward(), or after step()"
                    )

    # --- buckets and plans ------------------------------------------------------------------------------------------

    def _now_trainable(self) -> list[Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            return [param for param in self._store.params if param.requires_grad]

    def _choose_buckets(self) -> None:
        names = self._choose()
        self._trainable, self._names = SameTensors(self._now_trainable()), ByParameter(names)
        chosen = [param for param in names if param not in self._out_of_place]
        size = self._bucket_bytes
        if size is None:
            size = max(LEAST_BYTES, sum(map(_bytes_of_a_rank, chosen)) // MOST_BUCKETS)
        buckets = list(_cut(chosen, size))
        self._members = [list(map(reference_to, bucket)) for bucket in buckets]
        self._key = None  # plans are left where new ones are made: they know what others have written
        self._number = ByParameter({param: number for number, bucket in enumerate(buckets) for param in bucket})
        self._numbers = {id(param): number for number, bucket in enumerate(buckets) for param in bucket}
        self._expect_all()

    def _plans_fit(self, plans: list[Plan]) -> bool:
        """True if ``plans`` still describe the optimizer, and all their parameters have states."""
        store = self._store
        attribute = store.grad_attribute
        return (
            bool(plans)
            and self._key is not None
            and all(plan.is_whole(attribute) for plan in plans)
            and self._key.matches()
        )

    def _make_plans(self) -> None:
        store = self._store
        steps = [group[STEP] for group in store.groups]
        self._stepping.renew_states()
        if [group[STEP] for group in store.groups] != steps:  # new states begin with step 1
            self._hypers.clear()
        others = [param for param in store.params if param not in self]
        self._others = list(map(reference_to, others))
        self._key = key = PlanKey(store, self._number.get)
        self.plans = [Plan(store, bucket, key) for bucket in [*map(_alive, self._members), others]]


def _bytes_of_a_rank(param: Tensor) -> int:
    """The average bytes of a shard, the same on all ranks: weights with one scale reduce it bucket by bucket."""
    ranks = 1
    if isinstance(param, DTensor):
        ranks = math.prod(param.device_mesh.size(dim) for dim in sharding_dims(param))
    return -(-param.numel() // ranks) * local_tensor(param).element_size()


def _cut(params: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Lists of parameters on one device whose gradients reach ``size`` bytes on a rank."""
    bucket: list[Tensor] = []
    filled = 0
    for param in params:
        if bucket and local_tensor(bucket[0]).device != local_tensor(param).device:
            yield bucket
            bucket, filled = [], 0
        bucket.append(param)
        filled += _bytes_of_a_rank(param)
        if filled >= size:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


def _alive(bucket: Iterable[Reference]) -> list[Tensor]:
    return [param for reference in bucket if (param := reference()) is not None]


def _free(params: Iterable[Tensor]) -> None:
    with torch._C.DisableTorchFunctionSubclass():  # of a DTensor, `.grad` is slow where torch looks for it
        for param in params:
            param.grad = None


def _comparable(value: Any) -> Any:
    """A value to compare hyperparameters by: of tensors identity and version, so that no device is read."""
    if not isinstance(value, Tensor):
        return value
    return value.tolist() if value.device.type == "cpu" else (id(value), value._version)
