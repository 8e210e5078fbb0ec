"""Reads ``.metadata`` of torch.distributed.checkpoint, which is a pickle, without running code that it might hold.

It may name the classes that torch's own writers put into it. What it says of them is noted, checked, and made into
torch's objects here.

A newer torch may say more than is known here: name a class, or give an object a field. The bytes may then mean
something else, so the error says that a newer torch wrote them, not that they are damaged. Unknown fields pass where
they cannot change that: in a ``StorageMeta``, which says where a checkpoint was written to, and where they hold nothing
(None, False, an empty text or container), as fields do of what was not used.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import fields
from itertools import chain
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fused_optim.checkpoint.storage.damage import Damaged
from fused_optim.checkpoint.storage.folders import Folder
from fused_optim.checkpoint.storage.garbage import without_collection
from fused_optim.checkpoint.storage.pickles import Given, UnknownName, items, read_pickle, stand_in

FILE = ".metadata"
CHECKPOINT = re.compile(r"step-(\d{8,})(?:\.([0-9a-f]{8}))?")  # the name of one in the folder of a run

# The fields of torch's classes, of all supported releases; in the order of a state that is a tuple.
_FIELDS = {
    "Metadata": ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    "BytesStorageMetadata": (),
    "TensorStorageMetadata": ("properties", "size", "chunks"),
    "TensorProperties": ("dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides"),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "MetadataIndex": ("fqn", "offset", "index"),
    "_StorageInfo": ("relative_path", "offset", "length", "transform_descriptors"),
    "StorageMeta": ("checkpoint_id", "save_id", "load_id", "modules"),
}
_VERSION = "1."  # of the format, as far as it matters: "1.0.0"

_CLASSES = {name: stand_in(name) for name in (*_FIELDS, "_MEM_FORMAT_ENCODING")}
_SIZE, _LAYOUT, _PATH, _ATTRIBUTE = map(stand_in, ("Size", "_get_layout", "Path", "getattr"))
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
_NAMES: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): value for name, value in _CLASSES.items()},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _CLASSES["_StorageInfo"],
    ("torch", "Size"): _SIZE,
    ("torch.serialization", "_get_layout"): _LAYOUT,
    ("builtins", "getattr"): _ATTRIBUTE,  # Python 3.11.2 writes members of an Enum so; others, their values
    **{(module, name): _PATH for module in ("pathlib", "pathlib._local") for name in _PATHS},  # where it was written to
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_MEMORY_FORMATS = {
    0: torch.contiguous_format,
    1: torch.channels_last,
    2: torch.preserve_format,
}  # as torch numbers them
_MEMORY_FORMAT_NAMES = {
    "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format,
    "TORCH_CHANNELS_LAST": torch.channels_last,
    "TORCH_PRESERVE_FORMAT": torch.preserve_format,
}
_HAS_STRIDES = any(field.name == "strides" for field in fields(TensorProperties))  # torch 2.15
_LARGEST = (1 << 63) - 1
_MOST_DIMS = 64  # that torch computes with


class _Newer(ValueError):
    """Raised for what only a newer torch can have written."""


def read_metadata(folder: Folder) -> Metadata:
    """Read the metadata of a checkpoint: its entries and their places in files. Runs no code that it might hold.

    Raises Damaged, a ValueError, if it cannot be read; ValueError if only a newer torch can have written it; OSError.
    """
    content = folder.read(FILE)
    try:
        with without_collection():
            return _metadata(_given(content))
    except _Newer as error:
        text = f"{folder}/{FILE} was written by a newer torch: {error}: update torch and fused_optim"
        raise ValueError(text) from error
    except Exception as error:
        raise Damaged(f"{folder}/{FILE} cannot be read ({error}); it is truncated or damaged") from error


def unfinished(folder: Folder) -> str:
    """Why there is no :data:`FILE` in it, for messages."""
    matches = [match for name in folder.names() if (match := CHECKPOINT.fullmatch(name)) is not None]
    if not matches:
        return "the save was not finished, or this is another folder"
    newest = max(matches, key=lambda match: int(match[1]))
    return f"this is the folder of a run: name one of its {len(matches)} checkpoints, such as {folder.child(newest[0])}"


def check_files(folder: Folder, described: Metadata, keys: Container[str] | None = None) -> None:
    """Compare the files with what the metadata says of some keys, or of all.

    Raises FileNotFoundError for one that is missing, Damaged for one that is too short, or whose bytes it gives to
    several tensors.
    """
    sizes: dict[str, int | None] = {}
    taken: Counter[str] = Counter()
    for index, info in described.storage_data.items():
        if keys is not None and index.fqn not in keys:
            continue
        name, end = info.relative_path, info.offset + info.length
        if name not in sizes:
            sizes[name] = folder.size(name)
        size = sizes[name]
        if size is None:
            raise FileNotFoundError(f"{index.fqn}: its file {name} is missing from {folder}")
        if size < end:
            expected = f"expected at least {end} bytes, found {size}"
            raise Damaged(f"{index.fqn}: its file {folder}/{name} is truncated: {expected}")
        taken[name] += info.length
        if taken[name] > size:
            raise Damaged(f"{index.fqn}: other tensors have the same bytes of its file {folder}/{name}")


def chunk_sizes(described: Metadata) -> dict[tuple[str, tuple[int, ...]], torch.Size]:
    """The sizes of the tensors' chunks, by key and offsets: none for a tensor of no dims."""
    return {
        (key, tuple(chunk.offsets)): chunk.sizes
        for key, entry in described.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    }


def range_of(key: str, info: _StorageInfo) -> tuple[str, int, int]:
    """File, start and length of what is stored under a key. Raises ValueError where its writer transformed it."""
    if info.transform_descriptors:
        raise ValueError(f"{key} was transformed as it was written ({info.transform_descriptors}): not supported")
    return info.relative_path, info.offset, info.length


# --- from what is given to torch's objects ------------------------------------------------------------------------


def _given(content: bytes) -> Any:
    try:
        return read_pickle(content, _NAMES)
    except UnknownName as error:
        own = f"{error.module}.".startswith("torch.distributed.checkpoint.")
        if error.name.isidentifier() and (own or (error.module == "torch" and not hasattr(torch, error.name))):
            raise _Newer(f"{error.module[:100]}.{error.name[:100]} is unknown") from error
        raise


def _metadata(given: Any) -> Metadata:
    if type(given) is not _CLASSES["Metadata"]:
        raise ValueError("it does not describe a checkpoint")
    fields = _fields("it", given, "Metadata")
    version = fields.get("version")
    if version is not None and not _text("its version", version).startswith(_VERSION):
        raise _Newer(f"expected version {_VERSION}x of its format, found {version[:100]}")
    described = _items("what it describes", fields.get("state_dict_metadata"))
    entries = {_text("a key", key): _entry(key, value) for key, value in described}
    metadata = Metadata(
        entries, _planner_data(fields.get("planner_data")), dict(_storage_items(fields.get("storage_data"), entries))
    )
    metadata.storage_meta = _storage_meta(fields.get("storage_meta"))
    metadata.version = version
    _check_chunks(metadata)
    return metadata


def _check_chunks(found: Metadata) -> None:
    """Raise ValueError for chunks larger than their bytes, before anybody reserves memory for them."""
    sizes = chunk_sizes(found)
    for index, info in found.storage_data.items():
        if info.transform_descriptors or isinstance(found.state_dict_metadata[index.fqn], BytesStorageMetadata):
            continue
        at = tuple(index.offset or ())
        size = sizes.get((index.fqn, at))
        if size is None:
            raise ValueError(f"{index.fqn}: a part at {at} is stored, but not described")
        if math.prod(size) > 2 * info.length:  # the smallest elements that there are take half a byte
            raise ValueError(f"{index.fqn}: {info.length} bytes of {info.relative_path} cannot hold {tuple(size)}")


def _entry(key: str, given: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(given) is _CLASSES["BytesStorageMetadata"]:
        _fields(key, given, "BytesStorageMetadata")
        return BytesStorageMetadata()
    fields = _fields(key, given, "TensorStorageMetadata")
    properties, size = _properties(key, fields.get("properties")), _size(key, fields.get("size"))
    if type(fields.get("chunks")) is not list:
        raise _unexpected(f"the parts of {key}", "a list", fields.get("chunks"))
    return TensorStorageMetadata(properties, size, [_chunk(key, chunk, size) for chunk in fields["chunks"]])


def _properties(key: str, given: Any) -> TensorProperties:
    what = f"the properties of {key}"
    given_fields = _fields(what, given, "TensorProperties")
    dtype, requires_grad, pinned = (given_fields.get(name) for name in ("dtype", "requires_grad", "pin_memory"))
    if not isinstance(dtype, torch.dtype):
        raise _unexpected(f"the dtype of {key}", "a torch.dtype", dtype)
    if not isinstance(requires_grad, bool) or not isinstance(pinned, bool):
        raise _unexpected(what, "bools", requires_grad)
    layout = _choice(what, given_fields.get("layout"), _LAYOUT, _LAYOUTS)
    memory_format = _memory_format(what, given_fields.get("memory_format"))
    strides = _strides(key, given_fields.get("strides"))
    known: dict[str, Any] = {"strides": strides} if _HAS_STRIDES else {}
    return TensorProperties(dtype, layout, requires_grad, memory_format, pinned, **known)


def _strides(key: str, given: Any) -> tuple[int, ...] | None:
    """The tensor's strides when it was saved. The stored bytes have strides of their own beside them."""
    if given is not None and not isinstance(given, tuple):
        raise _unexpected(f"the strides of {key}", "a tuple", given)
    return None if given is None else tuple(_number(f"a stride of {key}", each) for each in given)


def _memory_format(what: str, given: Any) -> torch.memory_format:
    encoding = _CLASSES["_MEM_FORMAT_ENCODING"]
    choices: Mapping[Any, torch.memory_format] = _MEMORY_FORMATS
    if type(given) is _ATTRIBUTE and len(given.args) == 2 and given.args[0] is encoding:
        given, choices = encoding(given.args[1]), _MEMORY_FORMAT_NAMES
    found: torch.memory_format = _choice(what, given, encoding, choices)
    return found


def _choice(what: str, given: Any, kind: type[Given], choices: Mapping[Any, Any]) -> Any:
    if type(given) is not kind or len(given.args) != 1 or type(given.args[0]) is not type(next(iter(choices))):
        raise _unexpected(what, kind.__name__, given)
    if given.args[0] not in choices:
        raise _Newer(f"{what}: {kind.__name__} knows no such value")
    return choices[given.args[0]]


def _chunk(key: str, given: Any, whole: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(f"a part of {key}", given, "ChunkStorageMetadata")
    at, size = _size(key, fields.get("offsets")), _size(key, fields.get("sizes"))
    if not len(at) == len(size) == len(whole):
        raise ValueError(f"{key}: a part has {len(size)} dims, the tensor has {len(whole)}")
    for first, length, end in zip(at, size, whole, strict=True):
        if first + length > end:
            raise ValueError(
                f"{key}: a part of {tuple(size)} at {tuple(at)} is outside of the tensor of {tuple(whole)}"
            )
    return ChunkStorageMetadata(at, size)


def _size(key: str, given: Any) -> torch.Size:
    numbers = given.args[0] if type(given) is _SIZE and len(given.args) == 1 else given  # Megatron-FSDP's are tuples
    if type(numbers) is not tuple:
        raise _unexpected(f"a size of {key}", "torch.Size", given)
    if len(numbers) > _MOST_DIMS:
        raise ValueError(f"a size of {key}: expected {_MOST_DIMS} dims at most, found {len(numbers)}")
    for number in numbers:
        if type(number) is not int or not 0 <= number <= _LARGEST:
            raise _unexpected(f"a size of {key}", "numbers from 0 to 2**63 - 1", number)
    return torch.Size(numbers)


def _planner_data(given: Any) -> dict[str, tuple[Any, ...]] | None:
    """Each key's path in the nested state dict."""
    if given is None:
        return None
    paths = {}
    for key, path in _items("the planner's data", given):
        if not isinstance(path, tuple) or not all(type(step) in (str, int, bool, type(None)) for step in path):
            raise _unexpected(f"the path of {_text('a key', key)}", "a tuple of names and numbers", path)
        paths[_text("a key", key)] = path
    return paths


def _storage_items(given: Any, entries: Container[str]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    for index, info in _items("where it is stored", given):
        if type(index) is not _CLASSES["MetadataIndex"] or type(info) is not _CLASSES["_StorageInfo"]:
            raise ValueError("it describes a checkpoint of another kind of storage")
        fields = _fields("an index", index, "MetadataIndex")
        key, offset, hint = _text("a key", fields.get("fqn")), fields.get("offset"), fields.get("index")
        if key not in entries:
            raise ValueError(f"it says where {key} is stored, but not what it is")
        if hint is not None:
            _number(f"the index of {key}", hint)
        yield MetadataIndex(key, None if offset is None else _size(key, offset), hint), _storage_info(key, info)


def _storage_info(key: str, given: Given) -> _StorageInfo:
    fields = _fields(key, given, "_StorageInfo")
    path = inner_path(_text(f"the file of {key}", fields.get("relative_path")))
    offset, length = (_number(f"the {name} of {key} in {path}", fields.get(name)) for name in ("offset", "length"))
    stored = _StorageInfo(path, offset, length)
    if (transforms := fields.get("transform_descriptors")) is not None:
        if type(transforms) not in (list, tuple):
            raise _unexpected(f"what was done to {key}", "a list", transforms)
        stored.transform_descriptors = [_text(f"what was done to {key}", each) for each in transforms]
    return stored


@functools.lru_cache(maxsize=4096)  # of few files, each of which holds many tensors
def inner_path(text: str) -> str:
    """Raises ValueError for files outside of the folder, on any system, and for names that files cannot have."""
    text.encode()  # fails for half of a surrogate pair, which pickles and JSON may hold
    posix, windows = PurePosixPath(text), PureWindowsPath(text)
    if posix.is_absolute() or windows.drive or windows.root or ".." in windows.parts or "\0" in text or not posix.parts:
        raise ValueError(f"it refers to {text[:200]!r}, which is outside of its folder")
    return text


def _storage_meta(given: Any) -> StorageMeta | None:
    if given is None:
        return None
    fields: dict[str, Any] = {}
    for name, value in _fields("where it was written to", given, "StorageMeta").items():
        if type(value) is _PATH:
            value = str(PurePosixPath(*(_text("a path", part) for part in value.args)))
        if name in ("checkpoint_id", "save_id", "load_id") and value is not None:
            fields[name] = _text(name, value)
    return StorageMeta(**fields)


def _fields(what: str, given: Any, kind: str) -> dict[str, Any]:
    """The attributes that an object of a class is given, all of them known or without a meaning."""
    if type(given) is not _CLASSES[kind] or given.args or len(given) > 2:
        raise _unexpected(what, kind, given)
    state = given[1] if len(given) > 1 and given[1] is not None else []
    if isinstance(state, tuple):
        further = map(str, range(len(_FIELDS[kind]) + 1, len(state) + 1))
        state = list(chain.from_iterable(zip((*_FIELDS[kind], *further), state)))
    values = {}
    for name, value in _items(f"{what}: the attributes of a {kind}", state):
        unknown = _text(f"{what}: the name of an attribute", name) not in _FIELDS[kind]
        if unknown and kind != "StorageMeta" and not _holds_nothing(value):
            raise _Newer(f"field {name[:100]} of {kind} is unknown")
        values[name] = value
    return values


def _items(what: str, given: Any) -> Iterator[tuple[Any, Any]]:
    if type(given) is not list:
        raise _unexpected(what, "a dict", given)
    return items(given)


def _holds_nothing(given: Any) -> bool:
    return given is None or given is False or (type(given) in (str, bytes, tuple, list) and not given)


def _text(what: str, given: Any) -> str:
    if type(given) is not str:
        raise _unexpected(what, "a text", given)
    return given


def _number(what: str, given: Any) -> int:
    if type(given) is not int or not 0 <= given <= _LARGEST:
        raise _unexpected(what, "a number from 0 to 2**63 - 1", given)
    return given


def _unexpected(what: str, expected: str, found: Any) -> ValueError:
    """Says of what kind it is, not what: that may be as long as the file."""
    return ValueError(f"{what}: expected {expected}, found {type(found).__name__}")
