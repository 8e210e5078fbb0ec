"""Check that values can be loaded again without running code of the file."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fused_optim.checkpoint.storage.untrusted import load_object

_DEEPEST = 50  # that states are nested: readers of nested values call themselves


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def check_loadable(what: str, state: Any) -> None:
    """Raise ValueError for a value that could be saved, but not loaded again without running code of the file.

    What other packages have had torch admit is refused: the process that loads may not have imported them.
    ``what`` it is, for messages. Shards are not looked at, nor are other tensors of a model and an optimizer.
    """
    for path, value in _leaves(state, what):
        if _is_plain(value):
            continue
        try:
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError("it has no data")
            load_object(io.BytesIO(saved(value)), "it", admits_registered=False)
        except Exception as error:
            expected = "expected tensors and plain values (numbers, texts, lists, tuples, dicts, sets of these)"
            raise ValueError(f"{path}: {expected}, got {_kind(value)}, which could not be loaded again") from error


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        known = type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized
        return isinstance(value, DTensor) or (known and not value.is_meta)
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _leaves(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
        raise ValueError(f"{path[:100]}...: it is nested too deep to be loaded again: expected {depth - 1} at most")
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(key, f"{path}: the key {key!r}", depth + 1) if type(key) not in (str, int) else ()
            yield from _leaves(item, f"{path}.{key}", depth + 1)
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}.{i}", depth + 1)
    else:
        yield path, value
