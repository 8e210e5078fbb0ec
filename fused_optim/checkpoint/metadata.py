"""Reads files of others without running code that they might hold: ``.metadata``, objects of torch.save, and JSON.

``.metadata`` of torch.distributed.checkpoint is a pickle. It may name the classes that torch's own writers put into it,
and nothing else; what it says is then checked against the classes' fields and its own size. A file from elsewhere can
make a load fail, or take long, but it runs no code.

A newer torch may say more than is known here: name a class, or give an object a field. The bytes may then mean
something else, so the error says that a newer torch wrote them, not that they are damaged. Unknown fields pass where
they cannot change that: in a ``StorageMeta``, which says where a checkpoint was written to, and where they hold nothing
(None, False, an empty text or container), as fields do of what was not used.
"""

from __future__ import annotations

import functools
import io
import json
import math
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Container
from dataclasses import fields
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, NoReturn

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

from fused_optim import rebuild as _rebuild  # noqa: F401  such files may hold quantized weights
from fused_optim.checkpoint.folders import Damaged, Folder

FILE = ".metadata"
CHECKPOINT = re.compile(r"step-(\d{8,})(?:\.([0-9a-f]{8}))?")  # the name of one in the folder of a run

_VERSION = "1."  # of the format, as far as it matters: "1.0.0"
_MOST_BYTES = 1 << 33  # of the file; a checkpoint of a million shards takes 1 << 28
_MOST_DIMS = 64  # that torch computes with
_LARGEST = (1 << 63) - 1


class _Newer(ValueError):
    """Raised for contents that only a newer torch can have written."""


# --- what a pickle may name -----------------------------------------------------------------------------------------


class _Fixed(type):
    """Metaclass of the classes that a pickle may name: none can set their attributes, as it could torch's."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise ValueError(f"it sets {name} of {cls.__name__}")


class _Properties(metaclass=_Fixed):
    """A TensorProperties as it was pickled: releases of torch differ in the length of its state."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        vars(self)["state"] = state


class _Layout(metaclass=_Fixed):
    def __new__(cls, name: Any) -> Any:
        if name not in _LAYOUTS:
            raise _Newer(f"layout {str(name)[:100]} is unknown")
        return _LAYOUTS[name]


class _MemoryFormat(metaclass=_Fixed):
    def __new__(cls, code: Any) -> Any:
        if code not in _MEMORY_FORMATS:
            raise _Newer(f"memory format {str(code)[:100]} is unknown")
        return _MEMORY_FORMATS[code]


class _Attribute(metaclass=_Fixed):
    """``getattr``, by which Python 3.11.2 writes members of an Enum; others write their values."""

    def __new__(cls, holder: Any, name: Any) -> Any:
        if holder is not _MemoryFormat:
            raise ValueError("it reads an attribute")
        return _MemoryFormat(name)


class _Path(metaclass=_Fixed):
    """A path that the checkpoint was written to."""

    def __new__(cls, *parts: Any) -> Any:
        return None


def _made_of(kind: type) -> type:
    """A class in place of torch's, which makes objects of torch's without calling their constructor."""
    return _Fixed(kind.__name__, (), {"__new__": lambda cls: object.__new__(kind)})


_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_MEMORY_FORMATS = {  # as torch numbers and names them
    **{0: torch.contiguous_format, "TORCH_CONTIGUOUS_FORMAT": torch.contiguous_format},
    **{1: torch.channels_last, "TORCH_CHANNELS_LAST": torch.channels_last},
    **{2: torch.preserve_format, "TORCH_PRESERVE_FORMAT": torch.preserve_format},
}
_FIELDS: dict[type, frozenset[str]] = {
    kind: frozenset(field.name for field in fields(kind))
    for kind in (Metadata, BytesStorageMetadata, TensorStorageMetadata, ChunkStorageMetadata, MetadataIndex)
} | {_StorageInfo: frozenset(("relative_path", "offset", "length", "transform_descriptors"))}
_HAS_STRIDES = any(field.name == "strides" for field in fields(TensorProperties))  # torch 2.15
_METADATA = "torch.distributed.checkpoint.metadata"
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
_NAMES: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): _made_of(kind) for kind in (*_FIELDS, StorageMeta)},
    (_METADATA, "TensorProperties"): _Properties,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    ("torch", "Size"): torch.Size,  # whose attributes Python itself lets nobody set
    ("torch.serialization", "_get_layout"): _Layout,
    ("builtins", "getattr"): _Attribute,
    **{(module, name): _Path for module in ("pathlib", "pathlib._local") for name in _PATHS},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES:
            return _NAMES[module, name]
        own = f"{module}.".startswith("torch.distributed.checkpoint.")
        if name.isidentifier() and (own or (module == "torch" and not hasattr(torch, name))):
            raise _Newer(f"{module[:100]}.{name[:100]} is unknown")
        raise ValueError(f"it names {module}.{name}, which it has no use for")


def read_metadata(folder: Folder) -> Metadata:
    """Read the metadata of a checkpoint: its entries and their places in files. Runs no code that it might hold.

    Raises Damaged, a ValueError, if it cannot be read; ValueError if only a newer torch can have written it; OSError.
    """
    if (size := folder.size(FILE)) is not None and size > _MOST_BYTES:
        raise Damaged(f"{folder}/{FILE} cannot be read: expected {_MOST_BYTES} bytes at most, found {size}")
    content = folder.read(FILE)
    try:
        return _checked(_Unpickler(io.BytesIO(content)).load(), len(content))
    except _Newer as error:
        text = f"{folder}/{FILE} was written by a newer torch: {error}: update torch and fused_optim"
        raise ValueError(text) from error
    except Exception as error:  # there are no limits to what damaged pickles raise
        raise Damaged(f"{folder}/{FILE} cannot be read ({error}); it is truncated or damaged") from error


# --- what it says ---------------------------------------------------------------------------------------------------


def _checked(found: Any, nbytes: int) -> Metadata:
    """The metadata in a file of ``nbytes`` bytes, all of which is as torch writes it. Raises ValueError otherwise."""
    _check_fields("it", found, Metadata)
    version = vars(found).get("version")
    if version is not None and not _of("its version", version, str).startswith(_VERSION):
        raise _Newer(f"expected version {_VERSION}x of its format, found {version[:100]}")
    sizes: dict[tuple[str, tuple[int, ...]], torch.Size] = {}
    chunks = 0
    for key, entry in _of("what it describes", vars(found).get("state_dict_metadata"), dict).items():
        _of("a key", key, str)
        if type(entry) is BytesStorageMetadata:
            _check_fields(key, entry, BytesStorageMetadata)
            continue
        _check_fields(key, entry, TensorStorageMetadata)
        entry.properties = _properties(key, vars(entry).get("properties"))
        entry.size = whole = _size(key, vars(entry).get("size"))
        chunks += len(_of(f"the parts of {key}", vars(entry).get("chunks"), list))
        if chunks > nbytes:
            raise ValueError(f"it says more than {nbytes} parts of tensors, by referring to some again and again")
        for chunk in entry.chunks:
            _check_fields(f"a part of {key}", chunk, ChunkStorageMetadata)
            chunk.offsets = at = _size(key, vars(chunk).get("offsets"))
            chunk.sizes = size = _size(key, vars(chunk).get("sizes"))
            if not len(at) == len(size) == len(whole):
                raise ValueError(f"{key}: a part has {len(size)} dims, the tensor has {len(whole)}")
            if any(first + length > end for first, length, end in zip(at, size, whole, strict=True)):
                raise ValueError(
                    f"{key}: a part of {tuple(size)} at {tuple(at)} is outside of the tensor of {tuple(whole)}"
                )
            sizes[key, tuple(at)] = size
    for key, path in _of("the planner's data", vars(found).get("planner_data") or {}, dict).items():
        if any(type(step) not in (str, int, bool, type(None)) for step in _of(f"the path of {key}", path, tuple)):
            raise ValueError(f"the path of {_of('a key', key, str)}: expected names and numbers")
    for index, info in _of("where it is stored", vars(found).get("storage_data"), dict).items():
        if type(index) is not MetadataIndex or type(info) is not _StorageInfo:
            raise ValueError("it describes a checkpoint of another kind of storage")
        _check_fields("an index", index, MetadataIndex)
        key = _of("a key", vars(index).get("fqn"), str)
        if key not in found.state_dict_metadata:
            raise ValueError(f"it says where {key} is stored, but not what it is")
        at = torch.Size() if index.offset is None else _size(key, index.offset)
        if index.index is not None:
            _number(f"the index of {key}", index.index)
        _check_fields(key, info, _StorageInfo)
        path = inner_path(_of(f"the file of {key}", vars(info).get("relative_path"), str))
        for name in ("offset", "length"):
            _number(f"the {name} of {key} in {path}", vars(info).get(name))
        if (transforms := vars(info).get("transform_descriptors")) is not None:
            transforms = [_of(f"a transform of {key}", each, str) for each in _of(key, transforms, tuple, list)]
        if transforms or type(found.state_dict_metadata[key]) is BytesStorageMetadata:
            continue
        if (key, at) not in sizes:
            raise ValueError(f"{key}: a part at {tuple(at)} is stored, but not described")
        # Before anybody reserves memory for it. The smallest elements that there are take half a byte.
        if math.prod([*sizes[key, at]]) > 2 * info.length:
            raise ValueError(f"{key}: {info.length} bytes of {path} cannot hold {tuple(sizes[key, at])}")
    found.storage_meta = None if vars(found).get("storage_meta") is None else StorageMeta()
    checked: Metadata = found
    return checked


def _check_fields(what: str, found: Any, kind: type) -> None:
    """Raise ValueError for an object of another class, and for unknown attributes that hold something."""
    if type(found) is not kind:
        raise _unexpected(what, kind.__name__, found)
    if vars(found).keys() <= _FIELDS[kind]:
        return
    for name in vars(found).keys() - _FIELDS[kind]:
        if _holds(vars(found)[_of(f"{what}: the name of an attribute", name, str)]):
            raise _Newer(f"field {name[:100]} of {kind.__name__} is unknown")


def _holds(value: Any) -> bool:
    return not (
        value is None or value is False or (isinstance(value, (str, bytes, tuple, list, dict, set)) and not value)
    )


def _properties(key: str, given: Any) -> TensorProperties:
    if type(given) is TensorProperties:  # made here, of an entry that has several keys
        return given
    if type(given) is not _Properties or type(given.state) is not tuple or len(given.state) < 5:
        raise _unexpected(f"the properties of {key}", "TensorProperties", given)
    # Behind them, since torch 2.15, the tensor's strides when it was saved: the stored bytes have strides of their own.
    dtype, layout, requires_grad, memory_format, pinned, *more = given.state
    if not isinstance(dtype, torch.dtype):
        raise _unexpected(f"the dtype of {key}", "a torch.dtype", dtype)
    _of(f"the layout of {key}", layout, torch.layout)
    _of(f"the memory format of {key}", memory_format, torch.memory_format)
    _of(f"the properties of {key}", requires_grad, bool)
    _of(f"the properties of {key}", pinned, bool)
    for number, value in enumerate(more[1:], 7):
        if _holds(value):
            raise _Newer(f"field {number} of TensorProperties is unknown")
    strides = more[0] if more else None
    if strides is not None:
        strides = tuple(_number(f"a stride of {key}", step) for step in _of(f"the strides of {key}", strides, tuple))
    return TensorProperties(dtype, layout, requires_grad, memory_format, pinned, *([strides] if _HAS_STRIDES else []))


def _size(key: str, given: Any) -> torch.Size:
    numbers = _of(f"a size of {key}", given, torch.Size, tuple)  # Megatron-FSDP's are tuples
    if len(numbers) > _MOST_DIMS:
        raise ValueError(f"a size of {key}: expected {_MOST_DIMS} dims at most, found {len(numbers)}")
    for number in numbers:
        _number(f"a size of {key}", number)
    return numbers if type(numbers) is torch.Size else torch.Size(numbers)


def _number(what: str, given: Any) -> int:
    if type(given) is not int or not 0 <= given <= _LARGEST:
        raise _unexpected(what, "a number from 0 to 2**63 - 1", given)
    return given


def _of(what: str, given: Any, *kinds: type) -> Any:
    """The value itself. Raises ValueError unless its class is one of these; that says the class, not the value."""
    if type(given) not in kinds:
        raise _unexpected(what, " or ".join(kind.__name__ for kind in kinds), given)
    return given


def _unexpected(what: str, expected: str, found: Any) -> ValueError:
    return ValueError(f"{what}: expected {expected}, found {type(found).__name__}")


@functools.lru_cache(maxsize=4096)  # of few files, each of which holds many tensors
def inner_path(text: str) -> str:
    """Raises ValueError for files outside of the folder, on any system, and for names that files cannot have."""
    text.encode()  # fails for half of a surrogate pair, which pickles and JSON may hold
    posix, windows = PurePosixPath(text), PureWindowsPath(text)
    if posix.is_absolute() or windows.drive or windows.root or ".." in windows.parts or "\0" in text or not posix.parts:
        raise ValueError(f"it refers to {text[:200]!r}, which is outside of its folder")
    return text


# --- files and chunks -----------------------------------------------------------------------------------------------


def unfinished(folder: Folder) -> str:
    """Why there is no :data:`FILE` in it, for messages."""
    matches = [match for name in folder.names() if (match := CHECKPOINT.fullmatch(name)) is not None]
    if not matches:
        return "the save was not finished, or this is another folder"
    newest = max(matches, key=lambda match: int(match[1]))
    return f"this is the folder of a run: name one of its {len(matches)} checkpoints, such as {folder.child(newest[0])}"


def check_files(folder: Folder, described: Metadata, keys: Container[str] | None = None) -> None:
    """Compare the files with the metadata of some keys, or of all.

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
    """File, start and length of the value of a key. Raises ValueError for one that its writer transformed."""
    if info.transform_descriptors:
        raise ValueError(f"{key} was transformed as it was written ({info.transform_descriptors}): not supported")
    return info.relative_path, info.offset, info.length


# --- objects of torch.save, and JSON ---------------------------------------------------------------------------------


_DEEPEST = 32  # JSON that is nested


class Refused(ValueError):
    """Raised for a file that might run code if it were read."""


def load_object(file: Path | IO[bytes], what: str, admits_registered: bool = True) -> Any:
    """``torch.load(weights_only=True)`` into host memory, of a path mapped into it.

    ``what`` it is, for messages. ``admits_registered``: also classes that torch admits only because a package that this
    process has imported told it to. Raises :class:`Refused` for classes that torch does not admit, Damaged, a
    ValueError, for a file that cannot be read.
    """
    try:
        if not zipfile.is_zipfile(file):
            raise ValueError("it is no archive; files of torch.save before 1.6 have to be saved again")
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.file_size > member.compress_size:  # it may hold a thousand times its size
                    raise ValueError(f"{member.filename} in it is compressed, which torch.save does not do")
                if not admits_registered and member.filename.endswith("/data.pkl"):
                    content = io.BytesIO(archive.read(member))
                    names = torch._weights_only_unpickler.get_globals_in_pkl(content)
                    if others := names & _registered_by_others():
                        raise Refused(f"{what} names {min(others)}, which other processes may not admit")
        if not isinstance(file, Path):
            file.seek(0)
        return torch.load(file, map_location="cpu", mmap=isinstance(file, Path), weights_only=True)
    except Refused:
        raise
    except Exception as error:
        named = re.search(r"\bGLOBAL ([\w.]+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if named:
            hint = "if you trust it, admit it by torch.serialization.add_safe_globals"
            raise Refused(f"{what} names {named[1]}, which might run code, and is not read; {hint}") from error
        reason = str(error).partition("\n")[0]
        raise Damaged(f"{what} cannot be read by torch.load ({reason}); it is truncated or damaged") from error


def _registered_by_others() -> set[str]:
    """Names that other packages have passed to ``torch.serialization.add_safe_globals``, beside torch's own."""
    names: set[str] = set()
    for entry in torch.serialization.get_safe_globals():
        try:
            name = entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
        except AttributeError:  # a functools.partial has no name by which a pickle could ask for it
            continue
        if name.partition(".")[0] not in ("torch", "fused_optim"):
            names.add(name)
    return names.difference(torch._weights_only_unpickler._get_allowed_globals())


def load_json(content: bytes, what: str) -> dict[str, Any]:
    """An object of JSON. Raises Damaged, a ValueError, for other text, and for numbers beyond 64 bits."""
    try:
        parsed = json.loads(content, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except json.JSONDecodeError as error:
        raise Damaged(f"{what} cannot be read (JSONDecodeError); it is truncated or damaged") from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{what} cannot be read ({error}); it is truncated or damaged") from error
    if not isinstance(parsed, dict):
        raise Damaged(f"{what} cannot be read (found a {type(parsed).__name__}); it is truncated or damaged")
    level: list[Any] = [parsed]
    for _ in range(_DEEPEST):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
    if level:
        raise Damaged(f"{what} cannot be read (it is nested more than {_DEEPEST} deep); it is damaged")
    return parsed


def number_in(content: dict[str, Any], field: str, what: str) -> int:
    """A whole number of an object of JSON. Raises Damaged for another value."""
    found = content.get(field)
    if type(found) is not int or found < 0:
        raise Damaged(f"{what} is damaged: {field}: expected a number of at least 0, found {type(found).__name__}")
    return found


def _whole(text: str) -> int:
    if abs(found := int(text)) > _LARGEST:
        raise ValueError(f"{text[:100]}: expected a number of 64 bits")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError(f"{text[:100]}: expected a finite number")
    return found
