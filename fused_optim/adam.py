"""FusedAdam: Adam and AdamW for sharded parameters, with low-precision states and FP32 master weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, ParamsT

from fused_optim import adapters, clip, copies
from fused_optim.backends import Hyper, is_capturing
from fused_optim.backends.compiled import load_kernels
from fused_optim.decorators import between_graphs, callers_level, declared_without, observed, ungraded
from fused_optim.formats import as_dtype
from fused_optim.options import (
    IMPLEMENTATIONS,
    TORCHS_OPTIONS,
    CheckpointDevice,
    CheckpointFormat,
    Options,
    flag_of,
    number_of,
    read_group,
    reads_arguments,
    shows_options_of,
    spelled_alike,
    whole_number_of,
)
from fused_optim.sharding.collective import announce_failure, any_rank, parameter_names
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.skip import Skips
from fused_optim.slots import MASTER
from fused_optim.state import state_dict as forms
from fused_optim.state import torch_form
from fused_optim.state.groups import DESCRIPTION, TorchGroup, usual_group
from fused_optim.state.store import StateStore
from fused_optim.state.summary import Summary, choices_without_effect, short_description, summarize
from fused_optim.step.amp import amp_scalars, mark_stepped
from fused_optim.step.diagnostics import Diagnostics, diagnose
from fused_optim.step.parts import Parts
from fused_optim.step.plan import Plan, check_capturable, placed_as
from fused_optim.step.scalars import DeviceScalars, host_lr, on_device
from fused_optim.step.synthetic import any_nonzero, may_be_synthetic
from fused_optim.validate import (
    check_belongs,
    check_checkpoint_device,
    check_checkpoint_format,
    check_differentiable,
    check_hyperparameters,
    check_offloading,
    check_param,
    check_update,
    check_whole,
    describe,
)

# Of the whole optimizer: attributes, arguments of the constructor, and no keys of param groups.
_OPTIONS = (
    "capturable",
    "master_weights",
    "master_weight_dtype",
    "store_param_remainders",
    "param_remainder_bits",
    "adam_w_mode",
    "stochastic_rounding",
    "seed",
    "use_decoupled_grad",
    "skip_nonfinite",
    "unscales_gradients",
    "offload_states",
    "offload_fraction",
    "checkpoint_format",
    "checkpoint_device",
    "set_grad_none",
    *IMPLEMENTATIONS,
)


def _placed(scalar: Tensor | None, device: torch.device) -> Tensor | None:
    return None if scalar is None else on_device(scalar, device)


def _bring_up_to_date(optimizer: Optimizer) -> None:
    """A hook before ``state_dict()``: ``param_group["step"]`` and the states."""
    assert isinstance(optimizer, FusedAdam)
    optimizer.check_between_steps()
    optimizer._forget_compilers_key()
    optimizer.pull_steps()
    optimizer.store.adopt()
    optimizer.store.settle()
    optimizer.store.show_steps()
    optimizer.follow_parameters()


def _convert(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook after ``state_dict()``: the states in the form that was chosen."""
    assert isinstance(optimizer, FusedAdam)
    options = optimizer.checkpoint_options
    if options.form == "torch":
        return torch_form.convert(optimizer.store, state_dict, optimizer.adam_w_mode, options.device)
    return forms.convert(optimizer.store, state_dict, options)


class FusedAdam(Optimizer):
    """Adam (Kingma & Ba, 2015) and AdamW (Loshchilov & Hutter, 2019), one pass per step over all local shards.

    Behaves as ``torch.optim.Adam``/``AdamW``: param groups, closures, schedulers, hooks, ``state_dict``. All
    arithmetic is FP32. ``optimizer.state[p]`` holds ``exp_avg``, ``exp_avg_sq`` and, for parameters that are not FP32,
    ``master_param``: tensors shaped, sharded and placed as ``p``. The step counter is ``param_group["step"]``.

    Configs may give dtypes by name ("int8", "torch.bfloat16", "fp32", "bf16", "fp16", "fp8", "8bit") and numbers, betas
    and flags as text ("1e-4", "(0.9, 0.95)", "false"). Param groups keep the names of dtypes that they were given, so
    that they can be written as JSON. Numbers and flags may be tensors or NumPy arrays of one element, which are read
    once, except ``lr``. A flag that is None has its default.

    Args:
        params: parameters, named parameters or param groups; FP32, BF16 or FP16, plain tensors or DTensors.
        lr: learning rate, a number or a tensor of one element.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the denominator, outside of the square root.
        weight_decay: decoupled (AdamW) or, with ``adam_w_mode=False``, added to the gradient (L2).
        amsgrad: not supported, must be False.
        bias_correction: divide the moments by ``1 - beta ** step``.
        adam_w_mode: True for AdamW, False for torch.optim.Adam's L2 penalty.
        maximize: ascend instead of descend.
        capturable: ``step()`` can be captured into a CUDA graph, after one warm-up step or ``initialize_state()``. The
            step counters are on the devices then. A replay uses the learning rate that a tensor ``lr`` on the GPU has
            at that time; a float ``lr`` is copied to the GPU by ``step()`` and ``initialize_state()`` outside of
            captures, so replays use the value of the last one of these. All other hyperparameters, and which
            parameters have gradients, are those of the capture. No effect on parameters on the CPU.
        master_weights: keep a master of parameters that are not FP32.
        master_weight_dtype: ``torch.float32`` or ``torch.float16``: with one FP32 scale per block, as FP16 moments, and
            FP32 where no block fits. It rounds in the rotating way, and the parameter is its rounded value. Remainders
            take as much memory with BF16 parameters and lose nothing.
        store_param_remainders: keep only the bits that a BF16 parameter lacks instead of a whole FP32 master.
        param_remainder_bits: 16 for lossless FP32 masters, 8 for 24-bit masters rounded to nearest.
        exp_avg_dtype: how the first moment is kept: ``torch.float32``, ``bfloat16``, ``float16``, ``float8_e4m3fn``
            (or ``uint8``, TransformerEngine's spelling) or ``int8``; the last three with one FP32 scale per 128, 64 or
            32 elements of a row, and FP32 where no such block divides the rows of all shards or a one-dimensional
            parameter has fewer than 4096 elements. Also as a param-group option.
        exp_avg_sq_dtype: the same of the second moment.
        stochastic_rounding: rotating rounding of ``exp_avg_sq``, of FP16 masters and of parameters without master, not
            nearest.
        seed: of the rounding sequence, a function of (seed, step, parameter, global element index). A parameter counts
            by its name where ``params`` has names, so that optimizers of parts of a model round as one of all of it
            does; else by its position.
        use_decoupled_grad: read gradients from ``p.decoupled_grad`` instead of ``p.grad``.
        skip_nonfinite: a step whose gradients hold a NaN or an infinity, on any rank, changes nothing and does not
            count; nothing is read back. It costs one pass over the gradients, none where the optimizer's own
            ``clip_grad_norm_`` was called for the step, and a reduction over the default process group, which makes
            ``step()`` a collective; ``skip_nonfinite_group`` may be set to another one. ``skipped_steps`` counts.
        unscales_gradients: who divides the gradients by the scale of a ``torch.amp.GradScaler``. True: ``step()``, in
            its one pass. False: the scaler before it calls ``step()``, in a pass of its own, and it reads back whether
            to skip the step, as for optimizers that know nothing of it. Loops that clip only such gradients ask for
            that: Lightning's with ``gradient_clip_val``.
        offload_states: moments, masters beside the parameters, and scales live in page-locked host memory. ``step()``
            brings them to the GPU in chunks, through 96 MB of buffers, and back; it returns when they are in host
            memory again. The same bits as without. No effect on parameters in host memory, whose states are there
            anyway; masters of quantized weights stay on the GPU. Not with ``capturable``.
        offload_fraction: the share of the parameters' elements whose states are offloaded, in [0, 1]; parameters are
            chosen as wholes, evenly over the model.
        checkpoint_format: the form of ``state_dict()``. ``"unscaled"``: FP32 tensors; ``"native"``: the stored bits
            and scales, several times smaller; ``"torch"``: what torch.optim.AdamW has, for going over from it and back
            to it: FP32 moments without masters, a ``step`` per parameter, and the running param groups show AdamW's
            keys. All of them load whatever this is; it may be changed at any time.
        checkpoint_device: where ``state_dict()`` puts the states that it converts. None: where the parameters are;
            "cpu": in host memory, one state after the other, so that a save takes no more of a GPU's memory than the
            unscaled states of one parameter do (or 64 MB). What it hands over by reference (FP32 states; in the native
            form BF16 ones, too) stays where it is. "stager": all is handed over by reference, or made when it is read,
            to be copied by ``fused_optim.checkpoint.PinnedStager``. It may be changed at any time.
        set_grad_none: what ``zero_grad()`` does by default; None means True, as in torch.
        fused: which of its implementations torch.optim.AdamW is to take; without effect here.
        foreach: the same.
        differentiable: not supported, must be False.
        decoupled_weight_decay: torch's name for ``adam_w_mode``, which it replaces where it is given. So the
            ``defaults`` of torch.optim.Adam and AdamW are arguments.

    Raises:
        ValueError, TypeError: for hyperparameters or parameters that cannot be used; nothing has been changed then.

    Works with ``torch.amp.GradScaler``: the update divides the gradients by the scale, and leaves them so in ``.grad``
    (without clipping, the sign of ``maximize`` or the L2 penalty), as torch's fused optimizers do. On GPUs a step
    with an overflow is skipped without the host knowing. So ``param_group["step"]`` counts skipped steps too, and
    replays of a CUDA graph not at all, until ``state_dict()`` brings it up to date. A value written to it that differs
    from the one it shows is obeyed by the next step that is called.
    """

    _saves_int16_remainders = False  # in the unscaled form, instead of FP32 masters

    @between_graphs
    @reads_arguments
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        maximize: bool = False,
        capturable: bool = False,
        master_weights: bool = True,
        master_weight_dtype: torch.dtype | str = torch.float32,
        store_param_remainders: bool = False,
        param_remainder_bits: int = 16,
        exp_avg_dtype: torch.dtype | str = torch.float32,
        exp_avg_sq_dtype: torch.dtype | str = torch.float32,
        stochastic_rounding: bool = True,
        seed: int = 0,
        use_decoupled_grad: bool = False,
        skip_nonfinite: bool = False,
        unscales_gradients: bool = True,
        offload_states: bool = False,
        offload_fraction: float = 1.0,
        checkpoint_format: CheckpointFormat = "unscaled",
        checkpoint_device: CheckpointDevice = None,
        set_grad_none: bool | None = None,
        fused: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool = False,
        decoupled_weight_decay: bool | None = None,
    ) -> None:
        check_differentiable(differentiable)
        if decoupled_weight_decay is not None:
            adam_w_mode = flag_of("decoupled_weight_decay", decoupled_weight_decay)
        master_dtype, remainder_bits = as_dtype(master_weight_dtype), number_of(param_remainder_bits)
        if master_dtype not in (torch.float32, torch.float16):
            raise ValueError(
                f"master_weight_dtype={master_weight_dtype}: expected torch.float32 or torch.float16; "
                "store_param_remainders=True keeps FP32 masters in 2 bytes per element without loss"
            )
        if store_param_remainders and master_dtype != torch.float32:
            raise ValueError(
                "store_param_remainders=True keeps FP32 masters in 2 bytes per element without loss: it needs "
                f"master_weight_dtype=torch.float32, got {master_weight_dtype}"
            )
        if remainder_bits not in (8, 16):
            raise ValueError(f"param_remainder_bits: expected 16 or 8, got {param_remainder_bits}")
        if store_param_remainders and not master_weights:
            raise ValueError("store_param_remainders=True needs master_weights=True")
        check_offloading(offload_states, number_of(offload_fraction), capturable)
        check_checkpoint_format(checkpoint_format)
        check_checkpoint_device(checkpoint_device)
        self.master_weights = master_weights
        self.master_weight_dtype = master_dtype
        self.store_param_remainders = store_param_remainders
        self.param_remainder_bits = int(remainder_bits)
        self.adam_w_mode = adam_w_mode
        self.stochastic_rounding = stochastic_rounding
        self.capturable = capturable
        self.seed = whole_number_of("seed", seed)
        self.use_decoupled_grad = use_decoupled_grad
        self.skip_nonfinite = skip_nonfinite
        self.unscales_gradients = unscales_gradients
        self.offload_states, self.offload_fraction = offload_states, float(number_of(offload_fraction))
        self.checkpoint_device = checkpoint_device
        if set_grad_none is not None:
            set_grad_none = flag_of("set_grad_none", set_grad_none)
        self.set_grad_none: bool | None = True if set_grad_none is None else set_grad_none
        self.fused, self.foreach = fused, foreach
        self.store = StateStore(self, form=checkpoint_format)
        self._start_anew()
        dtypes = {
            "exp_avg_dtype": exp_avg_dtype,
            "exp_avg_sq_dtype": exp_avg_sq_dtype,
            "master_weight_dtype": master_weight_dtype,
        }
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "bias_correction": bias_correction,
            "maximize": maximize,
        }
        options = {key: getattr(self, key) for key in _OPTIONS}
        defaults |= {**options, "set_grad_none": set_grad_none, **spelled_alike(dtypes)}
        defaults |= {"differentiable": False, "decoupled_weight_decay": None}
        defaults.update(read_group(defaults, {}))
        check_hyperparameters(defaults)
        super().__init__(params, defaults)
        self._register_hooks()

    def _register_hooks(self) -> None:
        """Once, also in an optimizer that was copied together with its hooks."""
        if _bring_up_to_date not in self._optimizer_state_dict_pre_hooks.values():
            self.register_state_dict_pre_hook(_bring_up_to_date)
        if _convert not in self._optimizer_state_dict_post_hooks.values():
            self.register_state_dict_post_hook(_convert)

    def _start_anew(self, skipped: int = 0) -> None:
        """What is not copied with the optimizer."""
        self._skips = Skips(skipped)
        self.skip_nonfinite_group: ProcessGroup | None = None  # the default one
        self._plan: Plan | None = None
        self._members: Sequence[Sequence[Tensor]] | None = None  # of the parts of a step; None: it is made at once
        self._parts: Parts | None = None
        self._scalars = DeviceScalars()
        # FP32 scalars that the gradients are multiplied by in the next step: deferred clipping.
        self._grad_factors: dict[torch.device, Tensor] = {}
        self._is_located = False  # what `StateStore.locate` finds
        self._has_warned = False  # of choices without effect
        self._groups_ask_for_capture = False  # in vain: a warning says so

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Where True, torch.amp.GradScaler leaves the gradients scaled, and sets ``grad_scale`` and ``found_inf``."""
        return self.unscales_gradients

    # --- param groups and pickling ------------------------------------------------------------------------------

    @between_graphs
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch.optim does. Raises before the group is added if it cannot be used."""
        read = read_group(param_group, self.defaults)
        check_hyperparameters({**self.defaults, **param_group, **read})
        self._check_torchs_options(param_group)
        ignored = {key for key in _OPTIONS if self._is_another_option(param_group, key)}
        self._groups_ask_for_capture |= "capturable" in ignored
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.update(read)
        group.update(spelled_alike({key: group[key] for key in ("exp_avg_dtype", "exp_avg_sq_dtype")}))
        for key in {*_OPTIONS, *TORCHS_OPTIONS} - ignored:  # torch puts all defaults there
            group.pop(key, None)
        for key, value in {"step": 0, **DESCRIPTION}.items():
            group.setdefault(key, value)
        first = sum(len(g["params"]) for g in self.param_groups[:-1])
        names = group.get("param_names", [None] * len(group["params"]))
        try:
            for i, (param, name) in enumerate(zip(group["params"], names, strict=True)):
                check_param(param, first + i, name)
        except TypeError:
            self.param_groups.pop()
            raise
        adapters.hold(group["params"])
        self._show_groups()

    def _check_torchs_options(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError for options of torch.optim.AdamW's in a param group that mean another optimizer."""
        check_differentiable(given.get("differentiable"))
        decoupled = given.get("decoupled_weight_decay")
        if decoupled is not None and flag_of("decoupled_weight_decay", decoupled) != self.adam_w_mode:
            raise ValueError(
                f"decoupled_weight_decay={decoupled} in a param group: it is an option of the whole optimizer here, "
                f"which has adam_w_mode={self.adam_w_mode}; use an optimizer for each"
            )

    def _is_another_option(self, given: Mapping[str, Any], key: str) -> bool:
        """Whether a param group asks for another value of an option of the whole optimizer, in vain."""
        if key in IMPLEMENTATIONS or given.get(key) is None:
            return False
        own = getattr(self, key)
        return bool((flag_of(key, given[key]) if isinstance(own, bool) else given[key]) != own)

    @between_graphs
    @torch.no_grad()
    def replace_parameters(self, replacements: Mapping[Tensor, Tensor]) -> None:
        """Let other parameters take the places of some, with their states, and write them from the masters.

        ``replacements``: old -> new, which has the same shape, mesh and placements. Masters are kept as the constructor
        would for the new ones. A collective where a new one has a scale for all of its shards.

        Raises KeyError for a parameter that the optimizer does not hold, ValueError for one placed differently,
        TypeError for one that cannot be used. Nothing has been changed then.
        """
        for old, new in replacements.items():
            self.store.check_replacement(old, new)
        self.store.settle()
        self.follow_parameters()
        self._leave_plan()
        adapters.write([update for pair in replacements.items() for update in self.store.replace(*pair)], advance=False)
        adapters.hold(replacements.values())
        self.store.mark()

    def __getstate__(self) -> dict[str, Any]:
        self._scalars.pull(self.param_groups)
        self.follow_parameters()
        return {
            **super().__getstate__(),
            **{key: getattr(self, key) for key in _OPTIONS},
            "slots": self.store.slots,
            "pending": self.store.pending,
            "skipped": self.skipped_steps,
            "rounds_by_names": self.store.rounds_by_names,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        slots, pending = state.pop("slots"), state.pop("pending", None)
        form, skipped = state.pop("checkpoint_format"), state.pop("skipped", 0)
        by_names = state.pop("rounds_by_names", False)
        super().__setstate__({"offload_states": False, "offload_fraction": 1.0, **state})
        self.store = StateStore(self, slots, pending, form, by_names)
        self.store.settle_in()
        adapters.hold(self.store.params)
        self._start_anew(skipped)
        self._register_hooks()

    @property
    def checkpoint_format(self) -> CheckpointFormat:
        """The form of ``state_dict()``; with "torch" the running param groups and states show AdamW's keys, too."""
        return self.store.form

    @checkpoint_format.setter
    def checkpoint_format(self, form: CheckpointFormat) -> None:
        self.store.form = form
        self._show_groups()
        self.store.show_steps()

    def _show_groups(self) -> None:
        """Let param groups have torch.optim.AdamW's keys or our own, by the form of state dicts."""
        self._forget_compilers_key()
        switches = {"fused": self.fused, "foreach": self.foreach}
        for number, group in enumerate(self.param_groups):
            if self.checkpoint_format != "torch":
                self.param_groups[number] = usual_group(group)
            elif not isinstance(group, TorchGroup):
                self.param_groups[number] = TorchGroup({**switches, **group})

    def _forget_compilers_key(self) -> None:
        """Where a compiled function writes to a param group, torch.compile gives all of them ``capturable=True``, too.

        It would be in checkpoints, whose loads compare keys, and is an option of the whole optimizer here.
        """
        for group in self.param_groups:
            if not (self._groups_ask_for_capture or isinstance(group, TorchGroup)):
                group.pop("capturable", None)

    @property
    def checkpoint_options(self) -> forms.Options:
        """How ``state_dict()`` converts the states."""
        return forms.Options(self.checkpoint_format, self.checkpoint_device, self._saves_int16_remainders)

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph holds a step: a replay asks nobody whether it may write."""
        return self._scalars.captured

    # --- states -------------------------------------------------------------------------------------------------

    @between_graphs
    @torch.no_grad()
    def initialize_state(self, param: Tensor | None = None, store_param_remainders: bool | None = None) -> None:
        """Create the states of ``param``, or of all: zero moments, masters equal to the parameters. Idempotent.

        ``store_param_remainders`` overrides the optimizer's option for states that this call creates.
        """
        self.store.create(param, store_param_remainders)
        if param is None and self.capturable and not is_capturing():
            self._prepare_capture()

    def _prepare_capture(self) -> None:
        """What a captured step cannot do itself."""
        devices = {local_tensor(param).device for param in self.store.params}
        gpus = [device for device in devices if device.type == "cuda"]
        if gpus:
            self._scalars.prepare(devices, self.param_groups, capturing=False)
            self._scalars.workspaces(devices, self.param_groups)
        for device in gpus:
            self._scalars.factor(device)
            self._skips.prepare(device)
            load_kernels(device)

    @torch.no_grad()
    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """A state's local values: FP32, shaped as the parameter's local shard.

        ``master_param`` with remainders gives the stored remainders (int16 or int8), as in TransformerEngine. FP32
        states are returned themselves, others as a copy. Raises KeyError for a state that the parameter does not have.
        """
        if state_name == MASTER:
            self.follow_parameters()
        return self.store.read(param, state_name)

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Encode local FP32 values (the parameter's local shape) into a state; remainders are taken as they are.

        The states of a parameter that has none are created first. Raises KeyError for an unknown state, ValueError for
        a wrong shape, TypeError for remainders of another dtype.
        """
        if state_name == MASTER:
            self.follow_parameters()
        self.store.write(param, state_name, unscaled_state)

    @between_graphs
    @torch.no_grad()
    def master_state_dict(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """The masters by the model's parameter names: FP32, with the parameters' shapes, meshes and placements.

        The names are those that torch.distributed.checkpoint writes: without ``torch.compile``'s and other wrappers'.
        Raises TypeError for flat shards of FSDP1, KeyError if the model has none of the optimizer's parameters.
        """
        check_whole(model, self.store.params)
        check_belongs(model, self.store.params)
        self.store.settle()
        self.follow_parameters()
        names = parameter_names(model)
        return {names[param][0]: self.store.master(param) for param in self.store.params if param in names}

    @between_graphs
    @torch.no_grad()
    def sync_params_from_master(self) -> None:
        """Write every parameter again from its master, rounded to nearest. Histories of scales stay as they are.

        A collective where quantized parameters have a scale for all of their shards.
        """
        self.store.sync_params()

    @between_graphs
    @torch.no_grad()
    def sync_masters_from_params(self) -> None:
        """Let every master follow its parameter: what was written into parameters is where the next step starts.

        Elementwise: where a parameter is its rounded master, the master stays as it is. Writes that move a parameter's
        version counter (``load_state_dict``, ``torch.nn.init``, in-place operations, broadcasts) are noticed by
        ``step()`` and ``state_dict()`` themselves. Those through ``.data``, and those between replays of a CUDA graph,
        are not: call this after them. Remainders complete whatever the parameter is.
        """
        self.follow_parameters()
        self.store.follow_params(written_only=False)

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Let masters follow the parameters whose version counters say that someone has written them."""
        plans = self._plans()
        for plan in plans:
            plan.follow_parameters()
        if not plans:
            self.store.follow_params()

    @between_graphs
    def state_bytes(self) -> int:
        """Bytes that this rank holds for moments, masters and scales, those in host memory included.

        Parameters and gradients are not counted. ``summary()`` tells the bytes on the host and on devices apart.
        """
        return self.store.nbytes

    @between_graphs
    def summary(self, rows: int | None = None) -> Summary:
        """What this rank really has: parameters and bytes by actual format, master and backend, fallbacks, and why.

        A dict, see :class:`fused_optim.state.summary.Summary`, that prints as a table. No communication; of parameters
        that have no states yet: what they will have.

        Args:
            rows: of activations that layers with quantized weights are called with (batch times sequence): for some
                numbers products decode their weights instead of running in FP8. None: a number that suits all.
        """
        return summarize(type(self).__name__, self.store, rows)

    @between_graphs
    @torch.no_grad()
    def diagnostics(self) -> Diagnostics:
        """What the next step will do, and what rounding makes of it, by parameter and by param group.

        Call it between ``backward()`` (and clipping; under a GradScaler, ``unscale_``) and ``step()``. It is an extra
        pass by the reference backend, in PyTorch, and changes nothing; a step without it does nothing for it. A dict
        that can be written as JSON, see :class:`fused_optim.step.diagnostics.Diagnostics`; its ``scalars()`` are for
        TensorBoard.

        A collective over the meshes that cut parameters. Waits for the device. Raises RuntimeError before states exist.
        """
        self.store.settle()
        self._check_groups()
        self.pull_steps()
        self.follow_parameters()
        if self.capturable:
            self._prepare_capture()

        def hypers(device: torch.device) -> list[Hyper]:
            factor = _placed(self._clipping_factor(device), device)
            return [self._hyper(number, device, grad_factor=factor) for number in range(len(self.param_groups))]

        return diagnose(self.store, hypers, self.seed)

    def __repr__(self) -> str:
        return short_description(type(self).__name__, self.store)

    @property
    def skipped_steps(self) -> int:
        """How many steps ``skip_nonfinite`` has skipped, those included that a GradScaler had. Waits for the device."""
        return self._skips.count

    def pull_steps(self) -> None:
        """Bring ``param_group["step"]`` up to date where the device counts the steps. Waits for it then."""
        self._scalars.pull(self.param_groups)

    # --- step ---------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients, ``decoupled_grad`` included where it is used, and drop the clipping of the next step."""
        asked = self.set_grad_none if set_to_none is None else set_to_none
        set_to_none = True if asked is None else asked
        super().zero_grad(set_to_none=set_to_none)
        self._drop_clipping()
        if not self.use_decoupled_grad:
            return
        for param in self.store.params:
            grad = getattr(param, "decoupled_grad", None)
            if grad is not None and set_to_none:
                setattr(param, self.store.grad_attribute, None)
            elif grad is not None:
                grad.zero_()

    @between_graphs
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the next step's gradients by their total norm over all shards, and return that norm.

        As :func:`fused_optim.clip_grad_norm_` for all parameters of the optimizer, except that the gradients stay as
        they are: the next ``step()`` multiplies them by ``min(1, max_norm / (norm + 1e-6))`` as it reads them, once. A
        second call replaces the factor and ``zero_grad()`` drops it. With a GradScaler, call ``scaler.unscale_`` first:
        the norm is that of the gradients as they are. Without host synchronisation unless ``error_if_nonfinite``.
        """
        self._refuse_in_parts("clip_grad_norm_()", "the norm of all gradients")
        params = self.store.params
        grads = [getattr(param, self.store.grad_attribute, None) for param in params]
        measured = clip.measure(params, grads, max_norm, norm_type, error_if_nonfinite)
        self._grad_factors.clear()  # and not another dict: frameworks' wrappers call this with copies of attributes
        self._grad_factors.update(measured.factors)
        if self.skip_nonfinite:
            self._skips.note(measured)
        for device, factor in measured.factors.items():
            if self._is_capturable_on(device):
                self._scalars.factor(device).copy_(factor)
        return measured.norm

    def _is_capturable_on(self, device: torch.device) -> bool:
        return self.capturable and device.type == "cuda"

    def _clipping_factor(self, device: torch.device) -> Tensor | None:
        """A graph reads the optimizer's own scalar, into which every call of ``clip_grad_norm_`` writes."""
        return self._scalars.factor(device) if self._is_capturable_on(device) else self._grad_factors.get(device)

    def _drop_clipping(self) -> None:
        for device in self._grad_factors:
            if self._is_capturable_on(device):
                self._scalars.factor(device).fill_(1.0)
        self._grad_factors.clear()
        self._skips.forget()

    @observed
    @declared_without("kwargs")
    @ungraded
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update every parameter that has a gradient. Returns the closure's value.

        ``step(grad_scaler=scaler)`` is the same as ``scaler.step(optimizer)``, as in TransformerEngine and Apex.

        A first step whose gradients are all zero, on every rank, creates the states and changes nothing else if every
        learning rate is 0 or the parameters are Megatron-FSDP's.
        Raises before anything is changed for gradients that do not fit their parameters, and RuntimeError for what a
        CUDA graph that is being captured cannot hold.
        """
        scaler = kwargs.pop("grad_scaler", None)
        if kwargs:
            raise TypeError(f"step() got unexpected arguments: {', '.join(kwargs)}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        copies.wait()
        capturing = is_capturing()
        if capturing:
            self._check_capture()
        self.store.settle()
        scaling = amp_scalars(self, scaler)
        if self._members is not None:
            self._finish_parts(scaling)
        elif not capturing and self._is_synthetic():
            self.initialize_state()
            self._drop_clipping()
        else:
            self._update(self._checked_plan(scaling[0] is not None), scaling, capturing)
        self.store.synchronize()
        mark_stepped(self, scaler)
        return loss

    def _check_capture(self) -> None:
        if not self.capturable:
            raise RuntimeError("CUDA graph capture of step() needs FusedAdam(..., capturable=True)")
        if self.offload_states:
            raise RuntimeError(
                "CUDA graph capture: offload_states=True has states in host memory; no graph waits for it"
            )
        if self.store.pending:
            raise RuntimeError("CUDA graph capture: remainders were loaded since the last step; run one before capture")
        for index, (param, name) in enumerate(zip(self.store.params, self.store.names, strict=True)):
            if param not in self.store and not self.store.is_frozen(param):
                hint = "run one warm-up step or initialize_state() before capture"
                raise RuntimeError(f"CUDA graph capture: {describe(param, index, name)} has no states yet; {hint}")

    def _is_synthetic(self) -> bool:
        """Whether this first step is to create states only.

        What only all ranks together know is asked before the first step, by all of them whatever they did before: where
        uneven shards lie and, if every learning rate is 0, whether there is a gradient. Where a rank refuses its
        gradients, it tells the others.
        """
        resting = may_be_synthetic(self.param_groups)
        if self._is_located and not resting:
            return False
        params = self.store.params
        if not params:  # a rank that owns none has nobody to ask
            return resting
        try:
            grads = self._checked_grads()
        except Exception:
            announce_failure(params)
            raise
        is_real = resting and (not self.store.is_empty or any_nonzero(grads))
        is_real, failed = any_rank(params, is_real, False)
        if failed:
            raise RuntimeError("another rank refused its gradients before the first step; its error says why")
        self._locate()
        return resting and not is_real

    def _locate(self) -> None:
        if not self._is_located:
            self.store.locate()
            self._is_located = True

    def _check_groups(self) -> None:
        for number, group in enumerate(self.param_groups):
            try:
                read = read_group(group, self.defaults)
                check_hyperparameters({**group, **read} if read else group, running=True)
                group.update(read)
            except (TypeError, ValueError) as error:
                raise type(error)(f"param group {number}: {error}") from error

    def _checked_grads(self) -> list[Tensor]:
        """All gradients, placed as their parameters are."""
        self._check_groups()
        grads = []
        for index, (param, name) in enumerate(zip(self.store.params, self.store.names, strict=True)):
            grad = getattr(param, self.store.grad_attribute, None)
            if grad is not None:
                check_update(param, grad, index, name)
                grads.append((param, grad))
        return [placed_as(grad, param) for param, grad in grads]

    # --- steps in parts -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def step_in_parts(self, members: Sequence[Sequence[Tensor]] | None) -> None:
        """From now on, :meth:`update_part` updates the parameters of one list, and ``step()`` all others, and counts.

        None: whole steps again. Creates the states: a collective where shards have chunk lists of their own. Raises
        RuntimeError for options that need all gradients at once.
        """
        self._leave_plan()
        self._members = None
        if members is None:
            return
        for option in ("skip_nonfinite", "capturable"):
            if getattr(self, option):
                raise RuntimeError(f"{option}=True needs all gradients at once; a step in parts has them one by one")
        self.pull_steps()
        self.initialize_state()
        self._locate()
        self._warn_once()
        self._members = members

    @torch.no_grad()
    def update_part(self, number: int) -> None:
        """Update those parameters of a part that have gradients, as ``step()`` would; it is still to be called.

        Raises before anything is changed for gradients that do not fit their parameters.
        """
        copies.wait()
        parts = self._fitting_parts()
        plan = parts.plans[number]
        if not plan.refresh(self.store.grad_attribute):  # a parameter was moved to another device
            parts = self._new_parts()
            plan = parts.plans[number]
            plan.refresh(self.store.grad_attribute)
        counting = plan.groups_with_gradients
        plan.run(
            lambda device: [self._hyper(i, device) for i in range(len(self.param_groups))],
            self._scalars.workspaces(plan.backends, self.param_groups),
            None,
        )
        parts.done.add(number)
        parts.counting |= counting

    def _finish_parts(self, scaling: tuple[Tensor | None, Tensor | None]) -> None:
        if scaling != (None, None):
            raise RuntimeError(
                "torch.amp.GradScaler looks for overflows in all gradients before a step; this one is made in parts "
                "(gradient release), which use gradients as they come: train without a GradScaler"
            )
        parts = self._fitting_parts()
        for number in set(range(len(parts.plans))) - parts.done:
            self.update_part(number)
        parts = self._fitting_parts()
        for number, group in enumerate(self.param_groups):
            if number in parts.counting or not group["params"]:
                group["step"] = int(group["step"]) + 1
        parts.forget()

    def _fitting_parts(self) -> Parts:
        parts = self._parts
        if parts is None or not parts.done:
            self._check_groups()
            if parts is None or not parts.fits(self.param_groups, self.store, self.seed):
                return self._new_parts()
        return parts

    def _new_parts(self) -> Parts:
        former = self._parts
        self.initialize_state()
        self.store.prune()
        self._leave_plan()
        assert self._members is not None
        parts = self._parts = Parts(self._members, self.param_groups, self.store, self.seed)
        if former is not None:
            parts.done, parts.counting = former.done, former.counting
        return parts

    def check_between_steps(self) -> None:
        """Raise RuntimeError where some parameters are a step ahead of the others."""
        if self._parts is not None and self._parts.done:
            raise RuntimeError(
                "some parameters were updated in the backward pass and others were not: call step() first"
            )

    def _refuse_in_parts(self, what: str, need: str) -> None:
        if self._members is not None:
            raise RuntimeError(
                f"{what} needs {need}, and this optimizer makes its steps in parts (gradient release), which free "
                "gradients as they come: do without one of the two"
            )

    # --- a whole step -------------------------------------------------------------------------------------------

    def _checked_plan(self, scaled: bool) -> Plan:
        try:
            return self._refreshed_plan(scaled)
        except Exception:
            if self.skip_nonfinite:
                self._skips.abandon(self.skip_nonfinite_group)
            raise

    def _refreshed_plan(self, scaled: bool) -> Plan:
        self._check_groups()
        plan = self._plan
        if plan is None or not plan.fits(self.param_groups, self.store, self.seed):
            plan = self._new_plan()
        if not plan.refresh(self.store.grad_attribute, scaled):  # a parameter was moved to another device
            plan = self._new_plan()
            plan.refresh(self.store.grad_attribute, scaled)
        return plan

    def _new_plan(self) -> Plan:
        if not all(param in self.store or self.store.is_frozen(param) for param in self.store.params):
            self._checked_grads()  # states are created only for a step that will be made
            self._restart_counters()
            self.initialize_state()
        self._warn_once()
        if self._plan is not None:
            self._scalars.retire(self._plan.measured)
        self.store.prune()
        self._leave_plan()
        self._plan = Plan(self.param_groups, self.store, self.seed)
        return self._plan

    def _warn_once(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._forget_compilers_key()
            options = {key: getattr(self, key) for key in _OPTIONS if key not in IMPLEMENTATIONS}
            if choices := choices_without_effect(self.store, options):
                warnings.warn("\n".join(choices), stacklevel=callers_level())

    def _leave_plan(self) -> None:
        """Without a plan, the store knows which versions of the parameters belong to the masters."""
        plans = self._plans()
        for plan in plans:
            plan.follow_parameters()
        if plans:
            self._plan = self._parts = None
            self.store.mark()

    def _plans(self) -> list[Plan]:
        if self._parts is not None:
            return self._parts.plans
        return [] if self._plan is None else [self._plan]

    def _restart_counters(self) -> None:
        """Moments that start at zero are corrected from step 1 on, whatever was counted for others before."""
        for group in self.param_groups:
            if group["params"] and not any("exp_avg" in self.state.get(param, ()) for param in group["params"]):
                group["step"] = 0

    def _update(self, plan: Plan, scaling: tuple[Tensor | None, Tensor | None], capturing: bool) -> None:
        grad_scale, found_inf = scaling
        devices = plan.backends
        counting = self._counting(plan)
        if capturing:
            check_capturable(devices)
            self._check_no_collective()
        if self.skip_nonfinite:
            params = self.store.params
            grads = [getattr(param, self.store.grad_attribute, None) for param in params]
            found_inf = self._skips.decide(params, grads, found_inf, self.skip_nonfinite_group)
        on_gpu = any(device.type == "cuda" for device in devices)
        counted_there = found_inf is not None or self._scalars.ahead or (self.capturable and on_gpu)
        if counted_there:
            self._scalars.prepare(devices, self.param_groups, capturing)

        def hypers(device: torch.device) -> list[Hyper]:
            scale, skip = _placed(grad_scale, device), _placed(found_inf, device)
            factor = _placed(self._clipping_factor(device), device)
            return [
                self._hyper(number, device, counted_there and number in counting, scale, factor, skip)
                for number in range(len(self.param_groups))
            ]

        plan.run(hypers, self._scalars.workspaces(devices, self.param_groups), found_inf)
        for device in devices:
            if self._is_capturable_on(device):
                self._scalars.factor(device).fill_(1.0)  # in a graph too: each clipping serves one step
        self._grad_factors.clear()
        if not capturing:
            for number in counting:
                self.param_groups[number]["step"] = int(self.param_groups[number]["step"]) + 1
        if counted_there:
            self._scalars.count(self.param_groups, capturing)
            if not on_gpu:  # reading costs nothing
                self._scalars.pull(self.param_groups)

    def _counting(self, plan: Plan) -> set[int]:
        """The param groups whose step this is: with a gradient, or without parameters on this rank only."""
        return plan.groups_with_gradients | {n for n, group in enumerate(self.param_groups) if not group["params"]}

    def _check_no_collective(self) -> None:
        for index, (param, name) in enumerate(zip(self.store.params, self.store.names, strict=True)):
            if adapters.needs_collective(param):
                raise RuntimeError(
                    f"CUDA graph capture: {describe(param, index, name)} is quantized with scales that its "
                    "shards share, which each step reduces over ranks; recipes with blocks within rows can be captured"
                )

    def _hyper(
        self,
        number: int,
        device: torch.device,
        counted_there: bool = False,
        grad_scale: Tensor | None = None,
        grad_factor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Hyper:
        group = self.param_groups[number]
        on_host = host_lr(group)
        lr: float | Tensor
        if on_host is None:
            lr = on_device(group["lr"], device)
        elif self._is_capturable_on(device):
            lr = self._scalars.lr(device, number)
        else:
            lr = on_host
        return Hyper(
            lr=lr,
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=int(group["step"]) + 1,
            adam_w=self.adam_w_mode,
            bias_correction=group["bias_correction"],
            maximize=group["maximize"],
            stochastic_rounding=self.stochastic_rounding,
            grad_scale=grad_scale,
            grad_factor=grad_factor,
            found_inf=found_inf,
            steps_done=self._scalars.step(device, number) if counted_there else None,
        )

    # --- state dict ---------------------------------------------------------------------------------------------

    @between_graphs
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states saved from any format into this optimizer's formats; see ``fused_optim.state.state_dict``.

        torch's own loader is not used because it casts every state to the parameter's dtype. Hooks run as there, and
        ``state_dict`` is not changed. Masters are loaded where both sides have them; parameters are written from them.
        Remainders may be loaded before or after the parameters that they belong to: what needs a master next, such as
        ``step()`` or ``state_dict()``, raises ValueError where these are others.

        A collective where parameters are DTensors: all ranks of their meshes call it. Raises on every rank if it fails
        on one; nothing has been changed then. Raises KeyError, TypeError, ValueError or RuntimeError, by the fault.
        """
        with forms.failing_together(self.store.params):
            state_dict = self._passed_through_hooks(state_dict.copy())
            checked = forms.check(self.param_groups, state_dict, self._keeping(state_dict))
        self._leave_plan()
        rates = [group["lr"] for group in self.param_groups]
        forms.load(self.store, self.param_groups, checked)
        if self.capturable:
            self._keep_lr_tensors(rates)
        self._scalars.write(self.param_groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _passed_through_hooks(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        return state_dict

    def _keeping(self, state_dict: dict[str, Any]) -> Collection[Tensor]:
        """Parameters whose states stay as they are."""
        return ()

    def _keep_lr_tensors(self, rates: list[float | Tensor]) -> None:
        """Captured graphs read these tensors: loaded values go into them."""
        for group, rate in zip(self.param_groups, rates, strict=True):
            if isinstance(rate, Tensor):
                group["lr"] = rate.copy_(torch.as_tensor(group["lr"]).reshape(rate.shape))


class FusedAdamW(FusedAdam):
    """:class:`FusedAdam` with torch.optim.AdamW's default ``weight_decay`` of 0.01."""

    @shows_options_of(FusedAdam.__init__)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
