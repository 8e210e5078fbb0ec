"""Options of a whole optimizer: one object has them, and the optimizer's attributes show them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, overload

import torch

from fused_optim.formats.dtypes import as_dtype
from fused_optim.formats.masters import Master
from fused_optim.options.checks import check_checkpoint_device, check_offloading
from fused_optim.options.reading import CheckpointDevice, CheckpointFormat, flag_of, number_of, whole_number_of

T = TypeVar("T")


@dataclass
class Settings:
    """Arguments of the constructor that are no keys of param groups, as they were read and checked."""

    capturable: bool = False
    master_weights: bool = True
    master_weight_dtype: torch.dtype = torch.float32
    store_param_remainders: bool | None = None
    param_remainder_bits: int = 16
    stochastic_rounding: bool = True
    seed: int = 0
    use_decoupled_grad: bool = False
    skip_nonfinite: bool = False
    unscales_gradients: bool = True
    offload_states: bool = False
    offload_fraction: float = 1.0
    checkpoint_format: CheckpointFormat = "unscaled"
    checkpoint_device: CheckpointDevice = None
    set_grad_none: bool | None = None
    fused: bool | None = None
    foreach: bool | None = None

    @staticmethod
    def read(*, master_bits: Any = None, **given: Any) -> Settings:
        """What is not given has its default. Raises ValueError or TypeError for what makes no sense."""
        defaults = {each.name: each.default for each in fields(Settings)} | {"param_remainder_bits": None}
        given = defaults | given
        flags = {key: default for key, default in defaults.items() if isinstance(default, bool)}
        given |= {key: flag_of(key, default if given[key] is None else given[key]) for key, default in flags.items()}
        given |= _masters_of_bits(master_bits, given)
        remainders = given["store_param_remainders"]
        given["store_param_remainders"] = remainders = _flag_or_none("store_param_remainders", remainders)
        asked_dtype, asked_bits = given["master_weight_dtype"], given["param_remainder_bits"]
        given["master_weight_dtype"] = as_dtype(asked_dtype)
        bits = 16 if asked_bits is None else number_of(asked_bits)
        _check_masters(given, asked_dtype, asked_bits, bits)
        given |= {"param_remainder_bits": int(bits), "seed": whole_number_of("seed", given["seed"])}
        fraction = number_of(given["offload_fraction"])
        check_offloading(given["offload_states"], fraction, given["capturable"])
        given["offload_fraction"] = float(fraction)
        check_checkpoint_device(given["checkpoint_device"])
        given["set_grad_none"] = _flag_or_none("set_grad_none", given["set_grad_none"])
        return Settings(**given)

    def as_dict(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def master_bits(self) -> int:
        """What the word of the optimizers of this package would be; 32 for masters that it cannot say, too."""
        return 0 if not self.master_weights else 24 if self.param_remainder_bits == 8 else 32

    @property
    def of_whole_optimizer(self) -> dict[str, Any]:
        """What no param group has of its own, the short word ``master_bits`` included."""
        return {**self.as_dict(), "master_bits": self.master_bits}

    @property
    def keeps_remainders(self) -> bool:
        """Whether BF16 parameters have remainders in place of masters."""
        if self.store_param_remainders is None:
            return self.master_weights and self.master_weight_dtype == torch.float32
        return self.master_weights and self.store_param_remainders

    @property
    def asked_master(self) -> Master | None:
        """The kind of master that was asked for by name; None where the smallest exact way is meant, or none."""
        if not self.master_weights:
            return None
        if self.store_param_remainders:
            return Master.REMAINDER16 if self.param_remainder_bits == 16 else Master.REMAINDER8
        return Master.FLOAT16 if self.master_weight_dtype == torch.float16 else None


class Setting(Generic[T]):
    """An attribute of an optimizer that shows one of its settings; it may be set between any two steps."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> Setting[T]: ...
    @overload
    def __get__(self, owner: object, kind: type) -> T: ...
    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else getattr(owner.settings, self._name)

    def __set__(self, owner: Any, value: T) -> None:
        owner.stepper.check_option(self._name, value)
        setattr(owner.settings, self._name, value)


def _flag_or_none(name: str, value: Any) -> bool | None:
    return None if value is None else flag_of(name, value)


def _masters_of_bits(bits: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The long options that ``master_bits`` stands for."""
    if bits is None:
        return {}
    count = number_of(bits)
    if count not in (0, 24, 32):
        raise ValueError(f"master_bits: expected 32 (exact FP32 masters), 24 or 0 (none), got {bits}")
    others = {"store_param_remainders": None, "param_remainder_bits": None, "master_weights": True}
    twice = [name for name, default in others.items() if given[name] is not default]
    if as_dtype(given["master_weight_dtype"]) != torch.float32:
        twice.append("master_weight_dtype")
    if twice:
        raise ValueError(f"master_bits={bits} and {', '.join(twice)} say the same thing twice: give one of them")
    return {"master_weights": count != 0, "param_remainder_bits": 8 if count == 24 else 16}


def _check_masters(given: dict[str, Any], asked_dtype: Any, asked_bits: Any, bits: Any) -> None:
    dtype, remainders = given["master_weight_dtype"], given["store_param_remainders"]
    if dtype not in (torch.float32, torch.float16):
        raise ValueError(
            f"master_weight_dtype={asked_dtype}: expected torch.float32 or torch.float16; "
            "store_param_remainders=True keeps FP32 masters in 2 bytes per element without loss"
        )
    if remainders and dtype != torch.float32:
        raise ValueError(
            "store_param_remainders=True keeps FP32 masters in 2 bytes per element without loss: it needs "
            f"master_weight_dtype=torch.float32, got {asked_dtype}"
        )
    if bits not in (8, 16):
        raise ValueError(f"param_remainder_bits: expected 16 or 8, got {asked_bits}")
    if remainders and not given["master_weights"]:
        raise ValueError("store_param_remainders=True needs master_weights=True")
    if bits == 8 and given["master_weights"] and (remainders is False or dtype != torch.float32):
        hint = "store_param_remainders=True, or None with FP32 masters"
        raise ValueError(f"param_remainder_bits=8 needs remainders: {hint}")
