"""Changes of weights as a file: which elements, and what they are now. Version 1.

A safetensors file. Of each changed tensor it has ``NAME``, the values in order, in their own dtype (of FP8 weights the
codes, and the scales beside them), and, unless all elements are there, ``NAME::ENCODING``, their flat indices in the
whole tensor in the encoding that takes fewest bytes:

    runs    I32 [2, n]   of each run of neighbours: how many unchanged elements come before it, and its length
    gaps8   U8           of each element, how many unchanged come before it, in base 255: digits of 255 go on
    gaps16  I16          the same in base 65535, unsigned
    bits    U8           a bit for each element of the tensor: bit e % 8 of byte e // 8

The metadata have ``format``, ``version``, ``base`` and ``step`` (the step that the values belong to, and the one that
they are to be applied to), ``tensors`` (JSON: name -> shape and encoding) and ``checksum``, the SHA-256 of all other
metadata and of each tensor: its name, dtype, shape and bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from fused_optim.wire import safetensors
from fused_optim.wire.safetensors import DamagedFile, sizes_of

FORMAT, VERSION = "fused_optim.changes", 1
_ALL = "all"
_GAPS = {"gaps8": (torch.uint8, 255), "gaps16": (torch.int16, 65535)}
_DTYPES = {"runs": torch.int32, "bits": torch.uint8, **{name: dtype for name, (dtype, _) in _GAPS.items()}}


class Changes(NamedTuple):
    """The changed elements of a tensor.

    ``indices``: of the elements in the whole tensor, flat, ascending and distinct: int64. ``values``: their new values,
    in the tensor's dtype; codes of quantized weights as bytes. ``shape``: of the whole tensor.
    """

    indices: Tensor
    values: Tensor
    shape: tuple[int, ...]


class PackedChanges(NamedTuple):
    """Changes of many tensors in host memory, for other processes: a tensor of all indices, one per dtype of values.

    ``tensors``: of each its name, dtype, number of elements and whole shape. Those of which all elements are there have
    no indices.
    """

    tensors: list[tuple[str, torch.dtype, int, tuple[int, ...]]]
    indices: Tensor
    values: dict[torch.dtype, Tensor]

    @staticmethod
    def pack(changes: Mapping[str, Changes]) -> PackedChanges:
        tensors, indices = [], [torch.empty(0, dtype=torch.int64)]
        values: dict[torch.dtype, list[Tensor]] = {}
        for name, of_tensor in changes.items():
            tensors.append((name, of_tensor.values.dtype, of_tensor.values.numel(), of_tensor.shape))
            values.setdefault(of_tensor.values.dtype, []).append(of_tensor.values)
            if of_tensor.indices.numel() < math.prod(of_tensor.shape):
                indices.append(of_tensor.indices)
        joined = _in_host_memory(indices[1:] or indices)
        return PackedChanges(tensors, joined, {dtype: _in_host_memory(of_dtype) for dtype, of_dtype in values.items()})

    def unpacked(self) -> dict[str, Changes]:
        """The changes by name, as views of this memory."""
        changes: dict[str, Changes] = {}
        at, starts = 0, dict.fromkeys(self.values, 0)
        for name, dtype, count, shape in self.tensors:
            some = count < math.prod(shape)
            indices = self.indices[at : at + count] if some else torch.arange(count)
            changes[name] = Changes(indices, self.values[dtype][starts[dtype] : starts[dtype] + count], shape)
            at, starts[dtype] = at + count * some, starts[dtype] + count
        return changes


def _in_host_memory(tensors: list[Tensor]) -> Tensor:
    """The tensors concatenated in host memory; each device sends its neighbours at once."""
    pieces = [torch.cat([*own]).cpu() for _, own in groupby(tensors, key=lambda each: each.device)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True)
class ChangesFile:
    """Contents of a file: changes that take weights of step ``base`` to those of ``step``."""

    base: int
    step: int
    changes: dict[str, Changes]


# --- indices ------------------------------------------------------------------------------------------------------


def encode_indices(indices: Tensor, numel: int) -> tuple[str, Tensor | None]:
    """The encoding with fewest bytes. ``indices``: ascending, of a tensor with ``numel`` elements."""
    count = indices.numel()
    if count == numel:
        return _ALL, None
    gaps = torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1
    starts = gaps != 0
    starts[:1] = True
    largest = int(gaps.max())
    sizes = {"bits": -(-numel // 8)}
    for name, (dtype, base) in _GAPS.items():
        sizes[name] = dtype.itemsize * (count + int((gaps // base).sum()))
    if max(largest, count) < 2**31:
        sizes["runs"] = 8 * int(starts.sum())
    chosen = min(sizes, key=lambda name: (sizes[name], name))
    if chosen == "bits":
        return chosen, _as_bits(indices, numel)
    if chosen == "runs":
        first = starts.nonzero().view(-1)
        lengths = torch.diff(first, append=first.new_full((1,), count))
        return chosen, torch.stack([gaps[first], lengths]).to(torch.int32)
    return chosen, _in_digits(gaps, *_GAPS[chosen])


def decode_indices(encoding: str, encoded: Tensor | None, numel: int, count: int) -> Tensor:
    """The inverse of :func:`encode_indices`: ``count`` indices.

    Raises ValueError for what that never gives, before it takes memory for another number of indices.
    """
    if encoding == _ALL:
        _check_count(numel, count)
        return torch.arange(numel)
    if encoded is None or encoding not in _DTYPES:
        raise ValueError(f"unknown encoding {encoding!r}, or one without its tensor")
    if encoded.dtype != _DTYPES[encoding] or encoded.dim() != (2 if encoding == "runs" else 1):
        raise ValueError(f"{encoding} of {encoded.dtype} and shape {tuple(encoded.shape)}")
    if encoding == "bits":
        if encoded.numel() != -(-numel // 8):
            raise ValueError(f"{encoded.numel()} bytes of bits for {numel} elements")
        flags = (encoded.view(-1, 1) >> torch.arange(8, dtype=torch.uint8) & 1).view(-1)
        _check_count(int(flags.sum()), count)
        indices = flags.nonzero().view(-1)
    elif encoding == "runs":
        gaps, lengths = encoded.long().unbind(0)
        if encoded.numel() and (int(gaps.min()) < 0 or int(lengths.min()) < 1):
            raise ValueError("a run without elements")
        _check_count(int(lengths.sum()), count)
        ends = (gaps + lengths).cumsum(0)
        before = lengths.cumsum(0) - lengths
        indices = (ends - lengths - before).repeat_interleave(lengths) + torch.arange(count)
    else:
        base = _GAPS[encoding][1]
        digits = encoded.long() & (0xFF if encoding == "gaps8" else 0xFFFF)
        last = digits != base
        if digits.numel() and not bool(last[-1]):
            raise ValueError("it ends within a gap")
        indices = digits.cumsum(0)[last]
        _check_count(indices.numel(), count)
        indices += torch.arange(count)
    if count and int(indices[-1]) >= numel:
        raise ValueError(f"element {int(indices[-1])} of {numel}")
    return indices


def _check_count(indices: int, values: int) -> None:
    if indices != values:
        raise ValueError(f"{indices} indices and {values} values")


def _as_bits(indices: Tensor, numel: int) -> Tensor:
    flags = torch.zeros(-(-numel // 8) * 8, dtype=torch.uint8, device=indices.device)
    flags[indices] = 1
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=indices.device)
    return (flags.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _in_digits(gaps: Tensor, dtype: torch.dtype, base: int) -> Tensor:
    """The gaps as digits: the number ``base`` for each time it fits, then the rest. 600 in base 255 is 255, 255, 90."""
    ends = (gaps // base + 1).cumsum(0) - 1
    digits = gaps.new_full((int(ends[-1]) + 1 if gaps.numel() else 0,), base)
    digits[ends] = gaps % base
    return digits.to(dtype)


# --- files --------------------------------------------------------------------------------------------------------


def write_changes(changes: Mapping[str, Changes], file: str | os.PathLike[str], *, base: int, step: int) -> int:
    """Write changes by tensor name to a file, which appears when it is complete. Returns its bytes.

    Args:
        base: the step, or any integer that names a publication, whose weights the changes are to be applied to.
        step: the one whose weights they give.

    Raises TypeError for a base or step that is no integer, and ValueError for names and indices that cannot be written.
    """
    numbers = {"base": str(integer("base", base)), "step": str(integer("step", step))}
    tensors: dict[str, Tensor] = {}
    described: dict[str, dict[str, object]] = {}
    for name, (indices, values, shape) in changes.items():
        if "::" in name:
            raise ValueError(f"{name!r}: names of tensors have no '::'")
        if indices.numel() != values.numel():
            raise ValueError(f"{name!r}: {indices.numel()} indices and {values.numel()} values")
        if not indices.numel():
            continue
        numel = math.prod(shape)
        if int(indices[0]) < 0 or int(indices[-1]) >= numel or bool((torch.diff(indices) <= 0).any()):
            raise ValueError(f"{name!r}: expected ascending and distinct indices of {numel} elements")
        encoding, encoded = encode_indices(indices, numel)
        tensors[name] = values.reshape(-1)
        if encoded is not None:
            tensors[f"{name}::{encoding}"] = encoded
        described[name] = {"shape": list(shape), "encoding": encoding}
    # Each tensor begins at a multiple of its elements' size.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    metadata = {"format": FORMAT, "version": str(VERSION), **numbers}
    metadata["tensors"] = json.dumps(described)
    metadata["checksum"] = _checksum(metadata, tensors)
    safetensors.write(file, tensors, metadata)
    return os.path.getsize(file)


def read_changes(file: str | os.PathLike[str]) -> ChangesFile:
    """Read and check a file that :func:`write_changes` has written.

    Raises ValueError: :class:`~fused_optim.wire.safetensors.DamagedFile` where it is not as it was written, else for
    another format or a newer version.
    """
    tensors, metadata = safetensors.read(file)
    where = os.fspath(file)
    if metadata.get("format") != FORMAT:
        format = metadata.get("format")
        raise ValueError(f"{where} has no changes of weights: expected format {FORMAT!r}, got {format!r}")
    if metadata.get("version") != str(VERSION):
        raise ValueError(f"{where} has version {metadata.get('version')!r} of the form, and {VERSION} is known: update")
    checksum = metadata.pop("checksum", "")
    if _checksum(metadata, tensors) != checksum:
        raise DamagedFile(f"{where}: its checksum is another: it was not written whole, or changed since")
    part = "its metadata"
    try:
        base, step = (integer(key, json.loads(metadata[key])) for key in ("base", "step"))
        changes: dict[str, Changes] = {}
        for name, entry in json.loads(metadata["tensors"]).items():
            part = repr(name)
            changes[name] = _changes(tensors, name, entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise DamagedFile(f"{where}: {part}: {type(error).__name__}: {error}") from error
    return ChangesFile(base, step, changes)


def _changes(tensors: Mapping[str, Tensor], name: str, entry: Mapping[str, object]) -> Changes:
    encoding, shape, values = str(entry["encoding"]), sizes_of(entry["shape"]), tensors[name].view(-1)
    indices = decode_indices(encoding, tensors.get(f"{name}::{encoding}"), math.prod(shape), values.numel())
    return Changes(indices, values, shape)


def integer(name: str, value: object) -> int:
    """Raises TypeError for a number that only looks like one: 1.0, True."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    return operator.index(value)


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(safetensors.raw(tensor))
    return digest.hexdigest()
