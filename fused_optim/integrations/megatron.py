"""Makes Megatron-LM use FusedAdam where it would import TransformerEngine's or Apex's; see ``docs/megatron.md``."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fused_optim.adam import MOMENTS
from fused_optim.compat import transformer_engine
from fused_optim.formats.masters import Master
from fused_optim.memory.layout import MASTER
from fused_optim.sharding.dtensor import local_tensor

_IMPORTED_FROM = "transformer_engine.pytorch.optimizers"


class FusedAdam(transformer_engine.FusedAdam):
    """The drop-in class for TransformerEngine's, as Megatron-LM's optimizers use it.

    Masters go out and come in as FP32 values, also those that are kept as remainders: Megatron-LM gathers states in
    FP32 buffers. A first step whose gradients are zero is a step: a rank may own slices that have no others.
    """

    _saves_int16_remainders = False
    _synthetic_of_plain = False  # only Megatron-FSDP, whose parameters are DTensors, makes synthetic steps

    @torch.no_grad()
    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """A state's local values: FP32, masters included, shaped as the parameter's local shard."""
        states = self.store[param]
        if state_name == MASTER and MASTER in states.tensors:
            return local_tensor(self.store.master(param))
        return super().get_unscaled_state(param, state_name, skip_unscale)

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Set a state as TransformerEngine's class does; FP32 masters are split if the optimizer keeps remainders."""
        self.initialize_state(param)
        states = self.store[param]
        if state_name == MASTER and states.layout.master.is_remainder and unscaled_state.is_floating_point():
            if unscaled_state.shape != param.shape:
                expected = f"expected shape {tuple(param.shape)}, got {tuple(unscaled_state.shape)}"
                raise ValueError(f"{MASTER} of a parameter: {expected}")
            states.write_master(unscaled_state)
            self.store.drop_pending(param)
        else:
            super().set_scaled_state(param, state_name, unscaled_state)

    @staticmethod
    def _are_placeholders(param: Tensor, states: Mapping[str, Any]) -> bool:
        """True for loaded placeholders, even if all are floating-point: Megatron's slices are no ``nn.Parameter``."""
        is_slice = not isinstance(param, nn.Parameter)
        return transformer_engine.has_bytes(states) or (MASTER in states and is_slice)


class FusedAdamInt16(FusedAdam):
    """:class:`FusedAdam` with remainders as TransformerEngine's are in ``dp_reshardable`` checkpoints: int16.

    They go with the parameters of the same step. Other forms gather in FP32 and are refused when they are loaded.
    """

    _saves_int16_remainders = True
    get_unscaled_state = transformer_engine.FusedAdam.get_unscaled_state
    set_scaled_state = transformer_engine.FusedAdam.set_scaled_state


# --- installation -------------------------------------------------------------------------------------------------


def install(adam: type[FusedAdam] = FusedAdam) -> None:
    """Let Megatron-LM build ``adam`` wherever it would build TransformerEngine's or Apex's FusedAdam.

    Call it before the optimizer or its config is made, on every rank; a second call replaces the class of the first.
    ``adam``: a subclass of :class:`FusedAdam`, such as one with other defaults. Neither of the others need be there.

    Raises:
        ImportError: without the package ``megatron-core``.
        RuntimeError: if it lacks one of the names that are replaced; nothing has been changed then.
        TypeError: if ``adam`` is no subclass of :class:`FusedAdam`.
    """
    if not (isinstance(adam, type) and issubclass(adam, FusedAdam)):
        raise TypeError("adam: expected a subclass of fused_optim.integrations.megatron.FusedAdam")
    package = importlib.import_module("megatron.core.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    config = importlib.import_module("megatron.core.optimizer.optimizer_config")
    optimizer, options = distributed.DistributedOptimizer, config.OptimizerConfig
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (package, {"Adam": adam, "USING_PYTORCH_OPTIMIZER": False, "is_te_min_version": _is_recent}),
        (
            distributed,
            {"Adam": adam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True, "USING_APEX_OPTIMIZER": False},
        ),
        (config, {"is_te_min_version": _is_recent}),
        (options, {"__post_init__": _finding(adam, _original(options, "__post_init__"))}),
        (optimizer, {name: make(_original(optimizer, name)) for name, make in _METHODS.items()}),
    ]
    lacking = [f"{owner.__name__}.{name}" for owner, names in replaced for name in names if not hasattr(owner, name)]
    if lacking:
        raise RuntimeError(
            f"this megatron-core lacks {', '.join(lacking)}: docs/megatron.md lists versions that have it"
        )
    for owner, names in replaced:
        for name, value in names.items():
            setattr(owner, name, value)


def _original(owner: type, name: str) -> Any:
    """The attribute before an earlier installation wrapped it."""
    return getattr(getattr(owner, name, None), "__wrapped__", getattr(owner, name, None))


def _is_recent(version: str, check_equality: bool = True) -> bool:
    """True: answers two modules that ask for TransformerEngine's version only because of its FusedAdam."""
    return True


def _finding(adam: type, check: Callable[[Any], None]) -> Callable[[Any], None]:
    """The config's check imports the class to look at its arguments."""

    @functools.wraps(check)
    def wrapped(config: Any) -> None:
        with _importable(adam):
            check(config)

    return wrapped


@contextmanager
def _importable(adam: type) -> Iterator[None]:
    module = ModuleType(_IMPORTED_FROM)
    module.__dict__["FusedAdam"] = adam
    present = sys.modules.get(_IMPORTED_FROM)
    sys.modules[_IMPORTED_FROM] = module
    try:
        yield
    finally:
        if present is None:
            del sys.modules[_IMPORTED_FROM]
        else:
            sys.modules[_IMPORTED_FROM] = present


# --- DistributedOptimizer's ways to read and write states -----------------------------------------------------------


def _ours(optimizer: Any) -> bool:
    return isinstance(optimizer.optimizer, FusedAdam)


def _inner_param(optimizer: Any, model_param: Tensor) -> Tensor:
    group, order = optimizer.model_param_group_index_map[model_param]
    param: Tensor = optimizer.optimizer.param_groups[group]["params"][order]
    return param


def _reading(original: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """Read values: the original reads ``optimizer.state`` raw, and FP32 parameters have no master."""

    @functools.wraps(original)
    def read(self: Any, model_param: Tensor) -> dict[str, Tensor]:
        if not _ours(self):
            return original(self, model_param)
        adam, param = self.optimizer, _inner_param(self, model_param)
        adam.initialize_state(param)
        main = adam.get_unscaled_state(param, MASTER) if MASTER in adam.state[param] else param
        return {"param": main, **{name: adam.get_unscaled_state(param, name) for name in MOMENTS}}

    return read


def _writing(original: Callable[..., None]) -> Callable[..., None]:
    """Set the master and the states from values: the inverse of ``_reading``."""

    @functools.wraps(original)
    @torch.no_grad()
    def write(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        if not _ours(self):
            return original(self, model_param, tensors)
        adam, param = self.optimizer, _inner_param(self, model_param)
        adam.initialize_state(param)
        for name in MOMENTS:
            adam.set_scaled_state(param, name, tensors[name])
        if MASTER in adam.state[param]:
            adam.set_scaled_state(param, MASTER, tensors["param"])
        else:
            param.copy_(tensors["param"])

    return write


def _packing(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Pack Megatron-FSDP's states by name, as values, for ``load_state_dict``."""

    @functools.wraps(original)
    def pack(self: Any, is_loading: bool = False) -> dict[str, Any]:
        packed = original(self, is_loading)
        if _ours(self):
            states = self.optimizer.state_dict()["state"]
            params = enumerate(self.optimizer.store.params)
            packed["state"] = {self._param_name(param): states[i] for i, param in params if i in states}
        return packed

    return pack


def _refusing(original: Callable[..., None]) -> Callable[..., None]:
    """Refuse states that are not plain FP32 or BF16, which the loader of checkpoints before February 2024 assumes."""

    @functools.wraps(original)
    def load(self: Any, state_dict: dict[str, Any]) -> None:
        adam = self.optimizer
        if _ours(self) and any(_needs_encoding(adam, param) for param in adam.store.params):
            raise RuntimeError(
                "checkpoints in Megatron-LM's legacy format load into FP32 and BF16 states without masters only: "
                "convert them, or load without use_precision_aware_optimizer"
            )
        original(self, state_dict)

    return load


def _needs_encoding(adam: FusedAdam, param: Tensor) -> bool:
    layout = adam.store[param].layout
    return layout.master is not Master.PARAMETER or any(layout.format(name).scaled for name in MOMENTS)


_METHODS: dict[str, Callable[[Any], Any]] = {
    "_get_main_param_and_optimizer_states": _reading,
    "_set_main_param_and_optimizer_states": _writing,
    "sharded_param_state_fsdp_dtensor": _packing,
    "load_parameter_state_from_dp_zero_legacy": _refusing,
}
