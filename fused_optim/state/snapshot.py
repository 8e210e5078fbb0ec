"""Copies of an optimizer's parameters as they were last published, and a bit for each element that has changed since.

A quantized weight has such a copy and such bits for each of its parts: codes and scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fused_optim.adapters import adapter_of
from fused_optim.backends.changed_bits import Compared, bit_bytes, compare, raw_bits, set_all
from fused_optim.memory.by_parameter import ByParameter
from fused_optim.memory.host_memory import host_zeros
from fused_optim.sharding.dtensor import local_tensor

Where = Literal["device", "host"]


def parts_of(param: Tensor) -> dict[str, Tensor]:
    """The local tensors, by name, that hold a parameter's values: "" of a plain one. No copies.

    Raises TypeError for weights that another package has quantized.
    """
    adapter = adapter_of(param)
    parts = {"": local_tensor(param)} if adapter is None else adapter.parts(param)
    if parts is None:
        kind = type(local_tensor(param)).__name__
        raise TypeError(f"changes of a {kind} of another package are not known: exclude it, or use plain weights")
    return parts


class _Kept(NamedTuple):
    """``copy``: flat, as integers. ``bits``: as in ``changed_bits.py``, on the device of the parameter."""

    copy: Tensor
    bits: Tensor
    shape: torch.Size
    dtype: torch.dtype

    def fits(self, values: Tensor) -> bool:
        return (self.shape, self.dtype, self.bits.device) == (values.shape, values.dtype, values.device)


class Snapshot:
    """Copies of parameters' local tensors, on their devices or in page-locked host memory. In no pickle or copy."""

    def __init__(self, params: Iterable[Tensor], where: Where) -> None:
        if where not in get_args(Where):
            raise ValueError(f"where: expected 'device' or 'host', got {where!r}")
        self._where = where
        self._kept: ByParameter[dict[str, _Kept]] = ByParameter()
        for param in params:
            self._kept[param] = {name: self._keep(part) for name, part in parts_of(param).items()}

    def _keep(self, values: Tensor) -> _Kept:
        if values.element_size() > 8:
            raise TypeError(f"changes of a parameter in {values.dtype} cannot be taken: exclude it")
        raw = raw_bits(values)
        bits = torch.zeros(bit_bytes(raw.numel()), dtype=torch.uint8, device=raw.device)
        on_device = self._where == "device" or raw.device.type == "cpu"
        copy = raw.clone() if on_device else host_zeros(raw.shape, raw.dtype).copy_(raw)
        return _Kept(copy, bits, values.shape, values.dtype)

    def keep(self, params: Iterable[Tensor]) -> None:
        """Let go of all others."""
        self._kept = ByParameter(self._kept.of(params))

    def mark(self, param: Tensor) -> None:
        """Mark all elements of a parameter as changed."""
        for kept in self._kept.get(param, {}).values():
            set_all(kept.bits, kept.copy.numel())

    def update(self, parts: Sequence[tuple[Tensor, str, Tensor]]) -> list[Tensor]:
        """Compare: a parameter, the name of a part, its values. Returns the bits of each.

        Of a parameter that came later, or has another local shape, dtype or device by now, all elements are marked.
        """
        rows = []
        for param, name, values in parts:
            kept = self._kept.get(param, {}).get(name)
            if kept is None or not kept.fits(values):
                kept = self._keep(values)
                set_all(kept.bits, values.numel())
                self._kept[param] = {**self._kept.get(param, {}), name: kept}
            rows.append(Compared(kept.bits, kept.copy, raw_bits(values)))
        compare(rows)
        return [row.bits for row in rows]
