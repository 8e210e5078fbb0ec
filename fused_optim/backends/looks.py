"""Whether others have written parameters, or their masters: version counters and addresses, and what they were before.

An engine looks at hundreds of parameters in the time that Python takes for a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from fused_optim.backends import Compiled, load_engine
from fused_optim.backends.compiled import any_engine, tensor_reader
from fused_optim.backends.engine import CachedShard, EngineLook, EngineLooker
from fused_optim.sharding.dtensor import held_attribute, local_tensor

_Numbers = tuple[int, ...]


class _Look:
    """What a parameter and its master were when they were last looked at: see :class:`EngineLook`."""

    def __init__(self, inner: str, names: Sequence[str]) -> None:
        self.names = names
        self.param: tuple[_Numbers, _Numbers] = (), ()
        self.master: tuple[_Numbers, _Numbers] = (), ()

    def forget(self) -> None:
        self.param = (), ()


class _Looker:
    """Where no engine can look: see :class:`EngineLooker`."""

    def find_written(self, cached: list[CachedShard], looks: list[Any]) -> tuple[list[int], list[int]]:
        pairs = list(_now(cached, looks))
        params = [i for i, param, _ in pairs if looks[i].param != param]
        return params, [i for i, _, master in pairs if looks[i].master != master]

    def remember(self, cached: list[CachedShard], looks: list[Any]) -> list[int]:
        moved = []
        for i, param, master in _now(cached, looks):
            if looks[i].param[1] != param[1]:
                moved.append(i)
            looks[i].param, looks[i].master = param, master
        return moved


def _now(
    cached: Sequence[CachedShard], looks: Sequence[_Look]
) -> Iterator[tuple[int, tuple[_Numbers, _Numbers], tuple[_Numbers, _Numbers]]]:
    for i, (shard, look) in enumerate(zip(cached, looks, strict=True)):
        param = shard.param_ref()
        if param is None:
            continue
        local = local_tensor(param)
        parts = [local.components[name] for name in look.names] if look.names else [local]  # type: ignore[attr-defined]
        versions = (_version(param), _version(local), *map(_version, parts))
        master = () if shard.master is None else (local_tensor(shard.master),)
        yield i, (versions, tuple(map(_address, parts))), (tuple(map(_version, master)), tuple(map(_address, master)))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _address(tensor: Tensor) -> int:
    return 0 if type(tensor) is FakeTensor or tensor.is_meta else tensor.data_ptr()


def _engines_look(device: torch.device) -> bool:
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available())


def new_look(param: Tensor, names: Sequence[str]) -> EngineLook:
    """Nothing has been seen of ``param``. ``names``: the components of a quantized one that count; else none."""
    engine = any_engine() if _engines_look(local_tensor(param).device) else None
    held = param._local_tensor if isinstance(param, DTensor) else param
    inner = held_attribute(type(held)) or ""
    return _Look(inner, names) if engine is None else engine.Look(inner, list(names))


def looker_on(device: torch.device) -> EngineLooker:
    """What looks at the parameters of a device. Ask it where torch functions of subclasses are disabled."""
    engine = any_engine() if _engines_look(device) else None
    if engine is None:
        return _Looker()
    backend: Compiled = "cpu" if load_engine("cpu")[0] is not None else "cuda"
    return engine.Looker(tensor_reader(device, backend), DTensor)
