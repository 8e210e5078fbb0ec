"""The base of all optimizers here: param groups, states, steps and state dicts, whatever the update rule is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, ParamsT

from fused_optim import adapters
from fused_optim.decorators import between_graphs, declared_without, entry, observed, ungraded
from fused_optim.memory.layout import INITIAL_LR, MASTER, STEP
from fused_optim.options.checks import (
    can_be_updated,
    check_belongs,
    check_decoupled_lr,
    check_decoupling,
    check_hyperparameters,
    check_iterable,
    check_native_formats,
    check_params,
    check_whole,
    without_repeats,
)
from fused_optim.options.reading import CheckpointDevice, CheckpointFormat
from fused_optim.options.table import (
    OF_CONSTRUCTORS,
    OfDropIns,
    OfOptimizers,
    Option,
    Settings,
    asks_for_another,
    read_group,
    spelled_alike,
)
from fused_optim.rules import Rules
from fused_optim.sharding.collective import failing_together, parameter_names
from fused_optim.state.groups import description
from fused_optim.state.published import Snapshot, Where, changes, tracked
from fused_optim.state.state_dict import (
    CANNOT_LOAD_ELSEWHERE,
    Options,
    check_state_dict,
    load_checked,
    make_state_dict,
    run_pre_hooks,
)
from fused_optim.state.store import StateStore
from fused_optim.state.summary import Summary, short_description, summarize
from fused_optim.state.torch_form import torch_state_dict
from fused_optim.step.diagnostics import Diagnostics, diagnose
from fused_optim.step.run import Stepper
from fused_optim.step.scalars import keep_rates
from fused_optim.wire.form import Changes


class ShardedOptimizer(Optimizer, OfOptimizers):
    """Base class of all optimizers of this package. It knows no update rule: subclasses give it one.

    Each fact has one owner. ``param_groups`` have the hyperparameters and the ``step``; ``settings`` the options of the
    whole optimizer, which attributes show; ``state`` the tensors and ``store`` how they are laid out; ``stepper`` what
    steps share: the plan, scalars on devices, clipping.

    Args:
        params: as of torch's optimizers.
        rule: the update rule, or rules.
        given: the other arguments of the subclass's constructor, as its users gave them: options, see
            ``options/table.py``, and the rule's hyperparameters, which are the defaults of param groups.
    """

    settings: Settings

    use_decoupled_grad = OfDropIns.use_decoupled_grad
    unscales_gradients = OfDropIns.unscales_gradients

    _saves_int16_remainders = False  # in the unscaled form, instead of FP32 masters
    _synthetic_of_plain = True  # whether first steps of plain tensors may be synthetic

    def __init__(self, params: ParamsT, rule: Rules, **given: Any) -> None:
        check_iterable(params)
        self.rule = rule
        self.settings = Settings(given)
        self._check_form(self.settings.checkpoint_format)
        self.store = StateStore(self)
        self.stepper = Stepper(self.store, 0, self._synthetic_of_plain)
        given.setdefault("state_dtype", None)
        given.setdefault("maximize", False)
        usual = torch.float32 if given["state_dtype"] is None else given["state_dtype"]
        dtypes = {key: usual if given.get(key) is None else given[key] for key in self.store.format_options}
        if is_drop_in := isinstance(self, OfDropIns):
            dtypes["master_weight_dtype"] = given.get("master_weight_dtype", torch.float32)
        whole = self.settings.arguments(is_drop_in)
        defaults = {"decoupled_weight_decay": None, **given, **whole, **spelled_alike(dtypes)}
        defaults |= read_group(defaults, defaults)
        self._check_formats(defaults)
        check_hyperparameters(defaults, rule)
        super().__init__(params, defaults)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch.amp.GradScaler. If True, it leaves gradients scaled, sets ``grad_scale`` and ``found_inf``."""
        return self.settings.unscales_gradients

    @property
    def skip_nonfinite_group(self) -> ProcessGroup | None:
        """The ranks that skip steps together; None: those of the default process group."""
        return self.stepper.skip_group

    @skip_nonfinite_group.setter
    @entry
    def skip_nonfinite_group(self, group: ProcessGroup | None) -> None:
        self.stepper.skip_group = group

    def _reconcile(self, collective: bool = True) -> list[Tensor]:
        """Take in what others may have changed since this was last asked, before anything is read.

        In this order: steps that a device has counted, which groups show; remainders that were loaded before their
        parameters, which then have their masters again (a collective where some are pending, left out without
        ``collective``); then parameters that others have written, since these are compared with whole masters. What
        others have put into ``state`` is noticed by ``store`` whenever asked. Returns what was written.
        """
        if collective:
            self.stepper.scalars.pull(self.store.groups)
            self.store.import_external()
            self.store.resolve_pending()
        return self.stepper.sync_written_masters()

    # --- param groups and pickling ------------------------------------------------------------------------------

    @entry
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch.optim does. Raises before the group is added if it cannot be used."""
        read = read_group(param_group, self.defaults)
        if param_group.get("state_dtype") is not None:
            read |= {key: param_group["state_dtype"] for key in self.store.format_options if key not in param_group}
        self._check_formats({**param_group, **read})
        check_hyperparameters({**self.defaults, **param_group, **read}, self.rule)
        check_decoupling({**param_group, **read}, self.defaults, self.rule)
        settings = self.settings
        whole = {**self.rule.options, **settings.as_dict(), "master_bits": settings.master_bits}
        ignored = [key for key in whole if asks_for_another(key, param_group.get(key), whole[key])]
        self.stepper.ignored[len(self.param_groups)] = ignored
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            group.update({**without_repeats(group), **read})
        except ValueError:
            self.param_groups.pop()
            raise
        rule = self.rule.for_group(group)
        group.update(spelled_alike({spec.option: group[spec.option] for spec in rule.states}))
        foreign = self.rule.foreign_keys(group)
        for key in {*whole, *OF_CONSTRUCTORS, *foreign} - {*ignored}:  # torch puts all defaults there
            group.pop(key, None)
        for key, value in {STEP: 0, **description(rule)}.items():
            group.setdefault(key, value)
        first = sum(len(g["params"]) for g in self.param_groups[:-1])
        try:
            if self.settings.decoupled_lr:
                group.setdefault(INITIAL_LR, float(group["lr"]))  # before a warmup changes it
                check_decoupled_lr(group, rule)
            check_params(group, first, rule)
            if tuple(rule.hyperparameters(group)) != rule.spec.hyperparameters:  # engines take them by order
                expected = ", ".join(rule.spec.hyperparameters)
                raise TypeError(f"{type(rule).__name__}.hyperparameters(): expected {expected}, in this order")
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        adapters.retain_initial_values(group["params"])
        self._forget_compilers_key()

    @entry
    def replace_parameters(self, replacements: Mapping[Tensor, Tensor]) -> None:
        """Let other parameters take the places of some, with their states, and write them from the masters.

        ``replacements``: old -> new, which has the same shape, mesh and placements. Masters are kept as the constructor
        would for the new ones. A collective where a new one has a scale for all of its shards.

        Raises KeyError for a parameter that the optimizer does not hold, ValueError for one placed differently,
        TypeError for one that cannot be used. Nothing has been changed then.
        """
        for old, new in replacements.items():
            self.store.check_replacement(old, new)
        self._reconcile()
        self.stepper.leave_plan()
        adapters.write([update for pair in replacements.items() for update in self.store.replace(*pair)], advance=False)
        adapters.retain_initial_values(replacements.values())
        self.store.record_versions()

    def __copy__(self) -> Any:
        raise TypeError(
            "copy.copy() would make two optimizers of the same states, of which each counts its own steps: "
            "use copy.deepcopy(), or a new optimizer and load_state_dict()"
        )

    def __getstate__(self) -> dict[str, Any]:
        self.stepper.check_idle("a copy, or pickling,")
        self.stepper.scalars.pull(self.store.groups)
        self.stepper.sync_written_masters()
        return {
            **super().__getstate__(),
            "param_groups": [*map(dict, self.store.groups)],
            "rule": self.rule,
            "settings": copy(self.settings),
            "layouts": self.store.layouts.of(self.state),
            "pending": self.store.pending.of(self.store.params),
            "skipped": self.skipped_steps,
            "rounds_by_names": self.store.rounds_by_names,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        layouts, pending, by_names, skipped = map(state.pop, ("layouts", "pending", "rounds_by_names", "skipped"))
        super().__setstate__(state)
        self.store = StateStore(self, layouts, pending, by_names)
        self.store.take_copies()
        adapters.retain_initial_values(self.store.params)
        self.stepper = Stepper(self.store, skipped, self._synthetic_of_plain)

    def check_option(self, option: Option[Any], value: Any) -> None:
        """Raise RuntimeError or ValueError where an option of the whole optimizer cannot be set to this value."""
        self.stepper.check_option(option, value)
        if option is OfOptimizers.checkpoint_format:
            self._check_form(value)
        if option is OfOptimizers.decoupled_lr and value and not self.decoupled_lr:
            raise ValueError("decoupled_lr=True: param groups know no first learning rate; say it to the constructor")

    def _check_formats(self, group: Mapping[str, Any]) -> None:
        check_native_formats(group, self.store.format_options)

    def _check_form(self, form: str) -> None:
        if form == "torch" and not self.rule.has_torch_form:
            raise ValueError("checkpoint_format='torch' is torch.optim.AdamW's layout, which this update rule has not")

    def _forget_compilers_key(self) -> None:
        """Remove the ``capturable=True`` that torch.compile adds to param groups.

        It adds the key when a compiled function writes to a param group. Here ``capturable`` is an option of the whole
        optimizer, and a load compares the keys of param groups, so the key must not get into checkpoints.
        """
        for number, group in enumerate(self.param_groups):
            if "capturable" not in self.stepper.ignored.get(number, ()):
                group.pop("capturable", None)

    # --- states -------------------------------------------------------------------------------------------------

    @entry
    def initialize_state(self, param: Tensor | None = None) -> None:
        """Create the states of ``param``, or of all: zero moments, masters equal to the parameters. Idempotent."""
        self._initialize(param)

    def _initialize(self, param: Tensor | None, store_param_remainders: bool | None = None) -> None:
        if param is None:
            self.stepper.restart_counters()
        self.store.create(param, store_param_remainders)
        if param is None:
            self.stepper.prepare_capture()

    @entry
    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """A state's local values: FP32, shaped as the parameter's local shard.

        With ``store_param_remainders=True`` a drop-in class gives the stored remainders (int16 or int8) as
        ``master_param``, as TransformerEngine does. FP32 states are returned themselves, others as a copy. Raises
        KeyError for a state that the parameter does not have.
        """
        if state_name == MASTER:
            self._reconcile(collective=False)
        return self.store.read(param, state_name)

    @entry
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Encode local FP32 values (the parameter's local shape) into a state; remainders are taken as they are.

        A master whose upper bits are the parameter is written into both. The states of a parameter that has none are
        created first. Raises KeyError for an unknown state, ValueError for a wrong shape, TypeError for remainders of
        another dtype.
        """
        if state_name == MASTER:
            self._reconcile(collective=False)
        self.store.write(param, state_name, unscaled_state)

    @entry
    def master_state_dict(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """The masters by the model's parameter names: FP32, with the parameters' shapes, meshes and placements.

        The names are those that torch.distributed.checkpoint writes: without ``torch.compile``'s and other wrappers'.
        Frozen parameters of dtypes that no optimizer here updates are left out.
        Raises TypeError for flat shards of FSDP1, KeyError if the model has none of the optimizer's parameters.
        """
        check_whole(model, self.store.params)
        check_belongs(model, self.store.params)
        self._reconcile()
        names = parameter_names(model)
        params = [param for param in self.store.params if param in names and can_be_updated(param)]
        return {names[param][0]: self.store.master(param) for param in params}

    @entry
    def sync_params_from_master(self) -> None:
        """Write every parameter again from its master, rounded to nearest. Histories of scales stay as they are.

        A collective where quantized parameters have one scale for all shards, whose names ranks must have in one order.
        """
        self.stepper.sync_params()

    @entry
    def sync_masters_from_params(self) -> None:
        """Let every master follow its parameter: what was written into parameters is where the next step starts.

        Elementwise: where a parameter is its rounded master, the master stays as it is. Writes that move a parameter's
        version counter (``load_state_dict``, ``torch.nn.init``, in-place operations, broadcasts) are noticed by
        ``step()`` and ``state_dict()`` themselves. Those through ``.data``, and those between replays of a CUDA graph,
        are not: call this after them. Remainders complete whatever the parameter is.
        """
        followed = {*self._reconcile()}  # once: a quantized weight's codes need not be its rounded master then
        self.store.sync_masters_from_params(written_only=False, exclude=followed)

    @entry(idle=False)
    def state_bytes(self) -> int:
        """Bytes that this rank holds for moments, masters and scales, those in host memory included.

        Parameters and gradients are not counted. ``summary()`` tells the bytes on the host and on devices apart.
        """
        return self.store.nbytes

    @entry(idle=False)
    def summary(self, rows: int | None = None) -> Summary:
        """The optimizer's memory on this rank: parameters and bytes by format, master and backend; fallbacks, and why.

        A dict, see :class:`fused_optim.state.summary.Summary`, that prints as a table. No communication.
        Parameters without states are counted with the states that their first step will make.

        Args:
            rows: of activations that layers with quantized weights are called with (batch times sequence): for some
                numbers products decode their weights instead of running in FP8. None: a number that suits all.
        """
        return summarize(type(self).__name__, self.store, rows)

    @entry(idle=False)
    def diagnostics(self) -> Diagnostics:
        """Sizes of the next step's updates and of its rounding errors, by parameter and by param group.

        Call it between ``backward()`` (and clipping; under a GradScaler, ``unscale_``) and ``step()``. It is an extra
        pass, which changes nothing; a step without it does nothing for it. Of a parameter it reads up to 2^20 elements,
        spread evenly. A dict that can be written as JSON, see :class:`fused_optim.step.diagnostics.Diagnostics`; its
        ``scalars()`` are for TensorBoard.

        A collective over the meshes that cut parameters. Waits for the device. Raises RuntimeError before states exist.
        """
        self._reconcile()
        self.stepper.check_groups()
        self.stepper.prepare_capture()
        return diagnose(self.store, self.stepper.next_hypers())

    def __repr__(self) -> str:
        return short_description(type(self).__name__, self.store)

    @property
    def skipped_steps(self) -> int:
        """How many steps ``skip_nonfinite`` has skipped, those included that a GradScaler had. Waits for the device."""
        return self.stepper.skips.count

    # --- step ---------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients, ``decoupled_grad`` included where it is used, and drop the clipping of the next step."""
        self.stepper.drop_gradients()
        asked = self.settings.set_grad_none if set_to_none is None else set_to_none
        set_to_none = True if asked is None else asked
        super().zero_grad(set_to_none=set_to_none)
        for param in self.store.params if self.use_decoupled_grad else ():
            grad = getattr(param, "decoupled_grad", None)
            if grad is not None and set_to_none:
                setattr(param, self.store.grad_attribute, None)
            elif grad is not None:
                grad.zero_()

    @entry(idle=False)
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the next step's gradients by their total norm over all shards, and return that norm.

        As :func:`fused_optim.clip_grad_norm_` for all parameters of the optimizer, except that the gradients stay as
        they are: the next ``step()`` multiplies them by ``min(1, max_norm / (norm + 1e-6))`` as it reads them, once. A
        second call measures, and clips, what the first has clipped; ``zero_grad()`` drops it. Call it after all that
        changes gradients: ``step()`` raises RuntimeError where they were written or replaced since. With a GradScaler,
        call ``scaler.unscale_`` first: the norm is that of the gradients as they are. Without host synchronisation
        unless ``error_if_nonfinite``.
        """
        if self.stepper.buckets is not None:
            raise self.stepper.needs_all_gradients("clip_grad_norm_()")
        return self.stepper.clipping.measure(max_norm, norm_type, error_if_nonfinite)

    @observed
    @declared_without("kwargs")
    @ungraded
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update every parameter that has a gradient. Returns the closure's value.

        ``step(grad_scaler=scaler)`` is the same as ``scaler.step(optimizer)``, as in TransformerEngine and Apex.

        A first step whose gradients are all zero, on every rank, creates the states and changes nothing else if every
        learning rate is 0 or the parameters are Megatron-FSDP's. Raises before anything is changed for gradients that
        do not fit their parameters, and RuntimeError for what a CUDA graph that is being captured cannot hold.
        """
        scaler = kwargs.pop("grad_scaler", None)
        if kwargs:
            raise TypeError(f"step() got unexpected arguments: {', '.join(kwargs)}")
        if closure is None:
            self.stepper.step(self, scaler)
            return None
        with torch.enable_grad():
            loss = closure()
        self._update(scaler)
        return loss

    @between_graphs
    def _update(self, scaler: torch.amp.GradScaler | None) -> None:
        """After a closure, which may be traced; all else of a step is not."""
        self.stepper.step(self, scaler)

    # --- published changes --------------------------------------------------------------------------------------

    @entry
    def track_changes(self, enabled: bool = True, where: Where = "device") -> None:
        """Track from now on which elements of the parameters change. Nothing counts as changed so far.

        Keeps a copy of this rank's shards: 2 bytes for a BF16 element, 1 for a code, and a bit. The copy lies
        on the parameters' device, or with ``where="host"`` in page-locked memory, to which and from which every take
        moves all of it. Steps cost nothing. Called again, it starts from the current values. Copies are in no state
        dict and no pickle.

        Raises TypeError for weights that another package has quantized and for complex128, ValueError for another
        ``where``.
        """
        self.store.snapshot = Snapshot(self.store.params, where) if enabled else None

    @entry
    def mark_changed(self, param: Tensor | None = None) -> None:
        """Count all elements of ``param``, or of all parameters, as changed: the next take returns them all."""
        snapshot = tracked(self.store.snapshot)
        if param is not None:
            self.store.describe(param)
        for each in self.store.params if param is None else [param]:
            snapshot.mark(each)

    @entry(idle=False)
    def take_changes(self, model: torch.nn.Module, gather: bool = False) -> dict[str, Changes]:
        """Elements that changed since the last call, or since :meth:`track_changes`: by name, indices in the whole
        tensor and values. Nothing of the model counts as changed afterwards; parameters of the optimizer's other models
        still do.

        Names are those of :meth:`master_state_dict`; a tied parameter has its first one. The codes of a quantized
        weight have its name (uint8), its scales ``NAME_scale`` and ``NAME_tensor_scale``. Tensors without changes are
        absent.

        A rank gives what it holds; of replicas (HSDP, or whole parameters on a mesh) the first gives it. Plain
        parameters, DistributedDataParallel's for one, are given on every rank. ``gather``: everything on every rank, a
        collective of all of them. Waits for the device.

        Raises RuntimeError without :meth:`track_changes`, KeyError and TypeError as :meth:`master_state_dict` does;
        with ``gather`` on every rank where one of them raises.
        """
        return self._changes("take_changes()", model, gather, taken=True)

    @entry(idle=False)
    def peek_changes(self, model: torch.nn.Module, gather: bool = False) -> dict[str, Changes]:
        """Return the same as :meth:`take_changes`, and keep the elements marked as changed."""
        return self._changes("peek_changes()", model, gather, taken=False)

    def _changes(self, asked: str, model: torch.nn.Module, gather: bool, taken: bool) -> dict[str, Changes]:
        def prepare() -> None:
            self.stepper.check_idle(asked)
            self.store.offloading.synchronize()

        return changes(self.store.snapshot, model, self.store.params, gather, taken, prepare)

    # --- state dict ---------------------------------------------------------------------------------------------

    @entry(idle=False)
    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's, with states in the form of ``checkpoint_format``; see ``fused_optim.state.state_dict``.

        Entries of ``optimizer.state`` whose keys are no tensors are users', and saved as they are. States of
        parameters that are in no param group any more are left out. Hooks run as in torch.optim.
        """
        return state_dict_as(self, self.settings.checkpoint_format, self.settings.checkpoint_device)

    @entry
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states saved from any format into this optimizer's formats; see ``fused_optim.state.state_dict``.

        torch's own loader is not used because it casts every state to the parameter's dtype. Hooks run as there, and
        ``state_dict`` is not changed. Masters are loaded where both sides have them; parameters are written from them.
        Remainders may be loaded before or after the parameters that they belong to: what needs a master next, such as
        ``step()`` or ``state_dict()``, raises ValueError where these are others.

        A collective where parameters are DTensors: all ranks of their meshes call it. Raises on every rank if it fails
        on one; nothing has been changed then. Raises KeyError, TypeError, ValueError or RuntimeError, by the fault.
        """
        with failing_together(self.store.params, CANNOT_LOAD_ELSEWHERE):
            state_dict = run_pre_hooks(self._optimizer_load_state_dict_pre_hooks.values(), self, state_dict)
            checked = check_state_dict(self.store, state_dict, self._keeping(state_dict))
        self.stepper.leave_plan()
        rates = [group["lr"] for group in self.param_groups]
        load_checked(self.store, checked)
        if self.capturable:
            keep_rates(self.param_groups, rates)
        self.stepper.scalars.write(self.store.groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _keeping(self, state_dict: dict[str, Any]) -> Collection[Tensor]:
        """Parameters whose states stay as they are."""
        return ()


@between_graphs
@ungraded
def state_dict_as(optimizer: ShardedOptimizer, form: CheckpointFormat, device: CheckpointDevice) -> dict[str, Any]:
    """``optimizer.state_dict()`` in this form and for this device, whatever the options are: saves ask so.

    Options stay as they are, and hooks see them so.
    """
    optimizer.stepper.check_idle("state_dict()")
    optimizer._forget_compilers_key()
    optimizer._reconcile()
    optimizer.stepper.restart_counters()
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    if form == "torch":
        state_dict = torch_state_dict(optimizer.store, device)
    else:
        state_dict = make_state_dict(optimizer.store, Options(form, device, optimizer._saves_int16_remainders))
    for post_hook in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = post_hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    return state_dict
