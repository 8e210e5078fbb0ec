"""Reads ``.metadata`` of torch.distributed.checkpoint without running code that it might hold.

torch unpickles the file, which calls whatever it names. Here it may name the classes that torch's own writers put into
it, and nothing else.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fused_optim.checkpoint.folders import Folder

FILE = ".metadata"

_CLASSES = {
    **{name: getattr(metadata, name) for name in metadata.__all__},
    "_MEM_FORMAT_ENCODING": metadata._MEM_FORMAT_ENCODING,
}
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
_ADMITTED: dict[tuple[str, str], Any] = {
    **{("torch.distributed.checkpoint.metadata", name): value for name, value in _CLASSES.items()},
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    # Where it was written to. Paths of another system's kind cannot be made here.
    **{(module, name): pathlib.PurePath for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _ADMITTED.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which metadata has no use for")
        return found

    def persistent_load(self, key: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def read_metadata(folder: Folder) -> Metadata:
    """What a checkpoint holds and where. Runs no code of it. Raises ValueError if it cannot be read."""
    try:
        return _checked(_Unpickler(io.BytesIO(folder.read(FILE))).load())
    except Exception as error:
        raise ValueError(f"{folder}/{FILE} cannot be read ({error}); it is truncated or damaged") from error


def _checked(found: Any) -> Metadata:
    """Raise ValueError where it is something else, or names files outside of its folder."""
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError("it does not describe a checkpoint")
    for index, info in found.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, filesystem._StorageInfo):
            raise ValueError("it describes a checkpoint of another kind of storage")
        path = PurePosixPath(info.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"it refers to {path}, which is outside of its folder")
    return found
