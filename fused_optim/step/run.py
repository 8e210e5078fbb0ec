"""Makes an optimizer's steps: whole, in buckets, captured; knows its plan and all scalars that steps share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fused_optim import adapters
from fused_optim.backends import is_capturing
from fused_optim.backends.compiled import load_kernels
from fused_optim.decorators import callers_level
from fused_optim.memory import copies, replaced
from fused_optim.options.checks import check_update, describe
from fused_optim.options.table import OF_SETTINGS, OfOptimizers, Option
from fused_optim.rules import Hyper
from fused_optim.sharding.collective import announce_failure, any_rank, each_on_any_rank
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.state.groups import Group
from fused_optim.state.store import StateStore
from fused_optim.state.summary import choices_without_effect
from fused_optim.step.agreement import Agreement, CollectivesOfRank, agree_on_params
from fused_optim.step.amp import amp_scalars, mark_stepped
from fused_optim.step.buckets import NO_SCALER, Choice, ReleasedStep
from fused_optim.step.clip import DeferredClip
from fused_optim.step.conversion import convert, stale_formats
from fused_optim.step.plan import Plan, check_capturable
from fused_optim.step.scalars import DeviceScalars, Hyperparameters
from fused_optim.step.skip import Skips
from fused_optim.step.synthetic import any_nonzero, may_be_synthetic

Scaling = tuple[Tensor | None, Tensor | None]  # what gradients are divided by, whether to skip the step


class Stepper:
    """The steps of one optimizer. Copies and pickles of the optimizer have only the number of skipped steps."""

    def __init__(self, store: StateStore, skipped: int = 0, synthetic_of_plain: bool = True) -> None:
        self._store = store
        self._synthetic_of_plain = synthetic_of_plain  # whether steps of plain tensors may be synthetic
        self.skips = Skips(skipped)
        self.skip_group: ProcessGroup | None = None  # whose ranks skip together; None: the default one
        self.scalars = DeviceScalars()
        self.hyperparameters = Hyperparameters(store, self.scalars)
        self._plan: Plan | None = None
        self._planned_changes = 0  # of hyperparameters, when the plan was made
        self.buckets: ReleasedStep | None = None  # of its steps; None: they are made at once
        self.agreement = Agreement(lambda: store.params)
        self.clipping = DeferredClip(store, self.scalars, self.agreement, self.skips.note)
        self._knows_offsets = False  # what `StateStore.exchange_offsets` finds
        self._left_out: set[int] | None = None  # what `_exchange_gradients` finds
        self._has_warned = False  # of choices without effect
        self._times_replaced = 0  # when parameters were last compared with those that others have replaced
        self.ignored: dict[int, list[str]] = {}  # by param group: options of the whole optimizer that it was given

    @property
    def is_captured(self) -> bool:
        """True if a CUDA graph holds a step: its replays write parameters at any time."""
        return self.scalars.captured

    @property
    def _groups(self) -> Sequence[Group]:
        return self._store.groups

    # --- masters and parameters ------------------------------------------------------------------------------------

    def sync_written_masters(self) -> list[Tensor]:
        """Copy parameters that were written (by their version counters) into their masters; return them."""
        self.check_idle("reading masters")
        return self._sync_written(self._plans())

    def _sync_written(self, plans: list[Plan]) -> list[Tensor]:
        """Sync masters by the plan for its parameters, and by the store for parameters that came later."""
        followed = [param for plan in plans for param in plan.sync_written_masters()]
        known = {param for plan in plans for param in plan.params}
        return followed + self._store.sync_masters_from_params(exclude=known)

    def leave_plan(self) -> None:
        """Drop the plan. The store remembers the parameters' versions from then on."""
        if plans := self._plans():
            self._sync_written(plans)
            for plan in plans:
                self.scalars.retire(plan.measured)
            self._plan = None
            if self.buckets is not None:
                self.buckets.plans = []
            self._store.record_versions()

    def _plans(self) -> list[Plan]:
        if self.buckets is not None:
            return self.buckets.plans
        return [] if self._plan is None else [self._plan]

    def drop_gradients(self) -> None:
        """Before ``zero_grad()``: forget the norm and the gradients that were clipped."""
        if self.buckets is not None:
            self.buckets.drop_gradients()
        self.clipping.drop()

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Update every parameter that has a gradient. Raises before anything is changed."""
        if self.buckets is not None:
            self.buckets.check_backward_is_over("step()")
        copies.wait_for_saves()
        capturing = is_capturing()
        if capturing:
            self._check_capture()
        if self._plan is None:  # what is loaded leaves the plan
            self._store.resolve_pending()
        scaling = amp_scalars(optimizer, scaler)
        if self.buckets is not None:
            if scaling != (None, None):
                raise RuntimeError(NO_SCALER)
            self.buckets.finish()
        elif self._plan is None and not capturing and self._is_synthetic():
            self._store.create()
            self.prepare_capture()
            self.clipping.drop()
        else:
            self._update(self._refreshed_plan(scaled=scaling[0] is not None), scaling, capturing)
        if self._store.offloading.links:
            self._store.offloading.synchronize()
        if scaler is not None:
            mark_stepped(optimizer, scaler)

    def prepare_capture(self) -> None:
        """Upload learning rates and count steps for captured steps; nothing without ``capturable``."""
        if not self._store.settings.capturable or is_capturing():
            return
        devices = {local_tensor(param).device for param in self._store.params}
        gpus = [device for device in devices if device.type == "cuda"]
        if gpus:
            self.scalars.prepare(devices, self._groups, capturing=False)
            self.scalars.workspaces(devices, self._groups)
        for device in gpus:
            self.scalars.factor(device)
            self.skips.prepare(device)
            load_kernels({rule.spec for rule in self._store.rules().values()}, device)

    def _check_capture(self) -> None:
        store = self._store
        if not store.settings.capturable:
            raise RuntimeError("CUDA graph capture of step() needs capturable=True")
        if store.settings.offload_states:
            raise RuntimeError(
                "CUDA graph capture: offload_states=True has states in host memory; no graph waits for it"
            )
        if store.pending:
            raise RuntimeError("CUDA graph capture: remainders were loaded since the last step; run one before capture")
        for index, (param, name) in enumerate(zip(store.params, store.names, strict=True)):
            if param not in store and not store.is_frozen(param):
                hint = "run one warm-up step or initialize_state() before capture"
                raise RuntimeError(f"CUDA graph capture: {describe(param, index, name)} has no states yet; {hint}")

    def _is_synthetic(self) -> bool:
        """True if this first step is to create states only.

        What only all ranks together know is asked before the first step, by all of them whatever they did before: where
        uneven shards lie and, if every learning rate is 0, whether there is a gradient. Where a rank refuses its
        gradients, it tells the others.
        """
        resting = may_be_synthetic(self._groups)
        if self._left_out is not None and self._knows_offsets and not resting:
            return False
        params = self._store.params
        if not (self._synthetic_of_plain or any(isinstance(param, DTensor) for param in params)):
            return False
        if not params:  # a rank that owns none has nobody to ask
            return resting
        try:
            return self._agreed_before_first(params, resting)
        except Exception:
            if not resting:  # ranks of other meshes make a step
                self._abandon_skips()
            raise

    def _agreed_before_first(self, params: Sequence[Tensor], resting: bool) -> bool:
        try:
            grads = self._checked_grads()
        except Exception:
            announce_failure(params)
            raise
        is_real = resting and (not self._store.is_empty or any_nonzero(grads))
        is_real, failed = any_rank(params, is_real, False)
        if failed:
            raise RuntimeError("another rank refused its gradients before the first step; its error says why")
        self.agreement.check_alike(CollectivesOfRank.of_all(self._store), is_first=True)
        self._exchange_offsets()
        is_synthetic = resting and not is_real
        if not is_synthetic:
            self.find_remote_groups(
                {n for n, group in enumerate(self._groups) if any(map(self._store.has_gradient, group["params"]))}
            )
        return is_synthetic

    def find_remote_groups(self, own: Collection[int]) -> None:
        """Find the param groups without elements on this rank that have gradients on others only; ``own``: with some.

        So FSDP may leave it. A collective of the first step.
        """
        if self._left_out is None and self._store.params:
            anywhere = each_on_any_rank(self._store.params, [n in own for n in range(len(self._groups))])
            self._left_out = {n for n in self._store.groups_without_elements() if anywhere[n] and n not in own}

    def _exchange_offsets(self) -> None:
        if not self._knows_offsets:
            self._store.exchange_offsets()
            self._knows_offsets = True

    def sync_params(self) -> None:
        agree_on_params(self._store)
        self._store.sync_params()

    def check_groups(self) -> None:
        """Read and check values that were written into running param groups. Raises ValueError or TypeError.

        RuntimeError where the model has other parameters in the places of some.
        """
        if self._times_replaced != replaced.times:
            self._check_replaced()
        self.hyperparameters.check()
        if self._planned_changes != self.hyperparameters.planned_changes:
            self._planned_changes = self.hyperparameters.planned_changes
            self.leave_plan()

    def _check_replaced(self) -> None:
        now = replaced.times
        for index, (param, name) in enumerate(zip(self._store.params, self._store.names, strict=True)):
            by = replaced.replaced_by(param)
            if by is not None and not self._store.is_frozen(param):
                raise RuntimeError(f"{describe(param, index, name)} is not the model's any more: {by}")
        self._times_replaced = now

    def _checked_grads(self) -> list[Tensor]:
        """All gradients by parameter. Raises for unusable gradients and hyperparameters."""
        self.check_groups()
        grads = []
        for index, (param, name) in enumerate(zip(self._store.params, self._store.names, strict=True)):
            grad = self._store.gradient(param)
            if grad is not None:
                check_update(param, grad, index, name)
                grads.append(grad)
        return grads

    # --- steps in buckets ---------------------------------------------------------------------------------------------

    def start_release(self, choose: Choice, bucket_bytes: int | None) -> ReleasedStep:
        """From now on steps are made in buckets, as gradient release does. Creates the states.

        A collective over the parameters' meshes. Raises RuntimeError on all ranks that were given other options.
        """
        self.leave_plan()
        self.scalars.pull(self._groups)
        self.restart_counters()
        self._store.create()
        self._exchange_offsets()
        self._warn_once()
        self.buckets = ReleasedStep(self._store, self, choose, bucket_bytes)
        return self.buckets

    def stop_release(self) -> None:
        """From now on steps are whole again."""
        self.leave_plan()
        self.buckets = None
        self._store.offloading.synchronize()

    def check_can_be_in_buckets(self) -> None:
        """Raise RuntimeError if an option needs all gradients at once, or gradient release is enabled already."""
        if self.buckets is not None:
            raise RuntimeError("gradient release is enabled for this optimizer already: call disable() of that first")
        for name, option in OF_SETTINGS.items():
            option.check_release(getattr(self._store.settings, name))
        self.clipping.check()
        if self.clipping.due is not None:
            raise RuntimeError(
                "clip_grad_norm_() was called for the next step, which gradient release would not clip: enable it "
                "after step()"
            )

    def check_idle(self, what: str) -> None:
        """Raise RuntimeError where some parameters are a step ahead of the others, by gradient release."""
        if self.buckets is not None:
            self.buckets.check_idle(what)

    def check_option(self, option: Option[Any], value: object) -> None:
        """Before an option of the optimizer is set. Raises RuntimeError if it cannot be set now."""
        if self.buckets is not None:
            self.buckets.check_idle(option.name)
            option.check_release(value)
        if option in (OfOptimizers.seed, OfOptimizers.skip_nonfinite):  # which plans are made with
            self.leave_plan()

    @staticmethod
    def needs_all_gradients(what: str) -> RuntimeError:
        """The error for a call that steps in buckets cannot serve."""
        return RuntimeError(
            f"{what} needs all gradients at once, and this optimizer makes its steps in buckets (gradient "
            "release), which free gradients as they come: do without one of the two"
        )

    def renew_states(self) -> None:
        """Create missing states before a step in buckets; parameters' versions stay those of their masters."""
        store = self._store
        if not all(param in store or store.is_frozen(param) for param in store.params):
            self.restart_counters()
            store.create()
        store.import_external()
        self.leave_plan()
        self._convert_formats()

    # --- a whole step -----------------------------------------------------------------------------------------------

    def _refreshed_plan(self, scaled: bool) -> Plan:
        """The plan, with this step's gradients. Raises before anything is changed, on all ranks that would wait."""
        attribute, agreement = self._store.grad_attribute, self.agreement
        agreement.is_open = True  # others may ask this rank
        try:
            if self.clipping.due is not None:
                self.clipping.check()
            self.check_groups()
            plan = self._plan
            if plan is None or not (plan.is_whole(attribute) and plan.key.matches()):
                plan = self._new_plan()
            stale = plan.refresh(attribute, scaled)
            if stale is None:
                plan = self._new_plan()
                stale = plan.refresh(attribute, scaled) or ()
            if stale or plan.is_new or plan.has_matrices or agreement.asks_in_each_step:
                agreement.check_alike(plan.collectives(stale))
            plan.take(stale)
        except Exception:
            agreement.abort()
            self._abandon_skips()
            raise
        return plan

    def _abandon_skips(self) -> None:
        """Join the collective that decides on skips, since this rank raises an error: the other ranks skip the step."""
        if self._store.settings.skip_nonfinite:
            self.skips.abandon(self.skip_group)

    def _new_plan(self) -> Plan:
        store = self._store
        if not all(param in store or store.is_frozen(param) for param in store.params):
            self._checked_grads()  # states are created only for a step that will be made
            self.restart_counters()
            store.create()
            self.prepare_capture()
        self._warn_once()
        store.import_external()
        self.leave_plan()
        self._convert_formats()
        self._plan = Plan(store)
        return self._plan

    def _convert_formats(self) -> None:
        if stale := stale_formats(self._store):
            self._checked_grads()  # only for a step that will be made
            convert(self._store, stale)

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            if choices := choices_without_effect(self._store, self.ignored):
                warnings.warn("\n".join(choices), stacklevel=callers_level())

    def restart_counters(self) -> None:
        """Set a group's step to 0 if all of its states are new: bias correction starts at step 1."""
        for group in self._groups:
            if group["params"] and not any(map(self._store.has_own_states, group["params"])):
                group["step"] = 0

    def _update(self, plan: Plan, scaling: Scaling, capturing: bool) -> None:
        grad_scale, found_inf = scaling
        groups, settings, devices = self._groups, self._store.settings, plan.backends
        counting = plan.groups_with_gradients()  # the param groups that this step advances
        if len(counting) < len(groups):
            counting |= self.remote_groups()
        if capturing:
            check_capturable(devices)
            self._check_no_collective()
        if settings.skip_nonfinite:
            params = self._store.params
            found_inf = self.skips.decide(params, self._store.gradients(), found_inf, self.skip_group)
        # Without parameters there is no device to count.
        counted_there = bool(devices) and (
            found_inf is not None or self.scalars.ahead or (settings.capturable and plan.is_on_gpu)
        )
        if counted_there:
            self.scalars.prepare(devices, groups, capturing)
        elif found_inf is not None and bool(found_inf):
            counting = set()
        clips = self.clipping.due is not None or settings.capturable

        def hypers(device: torch.device) -> list[Hyper]:
            factor = self.clipping.factor(device) if clips else None
            return self.hyperparameters.on(device, grad_scale, factor, found_inf, counting if counted_there else ())

        plan.run(hypers, self.scalars.workspaces(devices, groups) if plan.is_on_gpu else {}, found_inf)
        if clips:
            self.clipping.serve(devices)
        if not capturing:
            for number in counting:
                groups[number]["step"] = int(groups[number]["step"]) + 1
        if counted_there:
            self.scalars.count(groups, capturing)
            if not plan.is_on_gpu:  # reading costs nothing
                self.scalars.pull(groups)

    def remote_groups(self) -> set[int]:
        """Param groups with empty local shards whose step must still advance, because other ranks step them.

        Of plain tensors, such as FSDP1's, nothing tells whether the others have gradients: they are taken to.
        """
        empty, left_out = self._store.groups_without_elements(), self._left_out or ()
        return {n for n in empty if n in left_out or not any(isinstance(p, DTensor) for p in self._groups[n]["params"])}

    def _check_no_collective(self) -> None:
        for index, (param, name) in enumerate(zip(self._store.params, self._store.names, strict=True)):
            if adapters.needs_collective(param):
                raise RuntimeError(
                    f"CUDA graph capture: {describe(param, index, name)} is quantized with scales that its "
                    "shards share, which each step reduces over ranks; recipes with blocks within rows can be captured"
                )

    def next_hypers(self) -> Callable[[torch.device], list[Hyper]]:
        """The scalars of a step made now, without a GradScaler's scale, for ``diagnostics()``."""
        if self.buckets is not None:
            raise self.needs_all_gradients("diagnostics()")
        self.clipping.check()
        return lambda device: self.hyperparameters.on(device, factor=self.clipping.factor(device))
