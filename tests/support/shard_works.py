"""What an engine is told of a shard, from addresses and numbers: a stand-in for ``backends.ShardWork``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fused_optim.formats.elements import ELEMENT_TYPES

# torch's dtypes as the engines number them; and others, by numbers that no engine knows.
ELEMENT_NUMBERS: dict[torch.dtype, int] = {
    **{dtype: int(element) for dtype, element in ELEMENT_TYPES.items()},
    **{torch.int8: -1, torch.int16: 3, torch.int32: 256},
}


def tensor_at(address: int, element: int = 0) -> SimpleNamespace:
    dtype = next(dtype for dtype, number in ELEMENT_NUMBERS.items() if number == element)
    return SimpleNamespace(data_ptr=lambda: address, dtype=dtype)


def shard_work(**numbers: Any) -> Any:
    """``numbers``: fields of ``Shard`` in ``table.h``; an address 0 is that of a tensor without memory."""
    formats = tuple(SimpleNamespace(code=code) for code in numbers["state_formats"])
    geometry = {name: numbers[name] for name in ("numel", "offset", "inner_local", "inner_global")}
    layout = SimpleNamespace(
        scales=tensor_at(numbers["scales"]),
        geometry=SimpleNamespace(block=1 << numbers["block_log2"], **geometry),
        master=numbers["master_kind"],
        formats=formats,
    )
    target = None
    if "weight_format" in numbers:
        target = SimpleNamespace(
            format=numbers["weight_format"],
            round_up=numbers.get("round_up", False),
            data=tensor_at(numbers["param"]),
            scale=tensor_at(numbers.get("weight_scales", 0)),
        )
    return SimpleNamespace(
        grad=tensor_at(numbers["grad"], numbers["grad_type"]),
        param=tensor_at(numbers["param"], numbers["param_type"]),
        master=tensor_at(numbers["master"]),
        states=tuple(map(tensor_at, numbers["states"])),
        layout=layout,
        key=numbers["key"],
        target=target,
        absmax=tensor_at(numbers.get("absmax", 0)),
    )
