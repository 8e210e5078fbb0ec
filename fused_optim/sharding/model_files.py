"""Safetensors files, read and written by the library of that name, and Hugging Face's layout of sharded models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fused_optim.optional import optional
from fused_optim.sharding.collective import gather, on_all_ranks, shared_out, this_rank
from fused_optim.sharding.dtensor import has_own_chunks
from fused_optim.wire.safetensors import open_file

STEM = "model"
SUFFIX = ".safetensors"
INDEX_SUFFIX = f"{SUFFIX}.index.json"
INDEX, SINGLE = f"{STEM}{INDEX_SUFFIX}", f"{STEM}{SUFFIX}"


@dataclass(frozen=True)
class Entry:
    """Tensors that go into one file: their bytes by key, and the whole tensors.

    ``read``: a collective of the ranks that have the entry.
    """

    sizes: Mapping[str, int]
    read: Callable[[], Mapping[str, Tensor]]

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor], read: Callable[[], Mapping[str, Tensor]]) -> Entry:
        """An entry of the sizes of ``tensors``, which may lack memory."""
        return cls({key: tensor.nbytes for key, tensor in tensors.items()}, read)


def check_gathered(name: str, tensor: Tensor) -> None:
    """Raise TypeError for a tensor that cannot be gathered."""
    if has_own_chunks(tensor):  # gathering goes by placements, and would mix up rows
        raise TypeError(f"{name}: shards with chunk lists of their own are not gathered")


def write_model_files(folder: Path, entries: Mapping[str, Entry], doing: str) -> None:
    """Write the entries of all ranks, one file per rank, and an index of them into a folder that is there.

    Every entry is whole in one file, so the ranks that have it share them out by size. Entries are read one at a time:
    a device holds one, the host memory of a rank what goes into its file. The files appear at the end, the index last;
    no index means an export that was not finished. A collective, which raises on every rank if it fails on one:
    ValueError where a file lies that loaders prefer to an index.
    """
    with on_all_ranks(doing):
        if this_rank() == 0 and (folder / SINGLE).exists():
            raise ValueError(f"{folder / SINGLE} would be loaded in place of what is written: remove it")
    held = gather({name: dict(entry.sizes) for name, entry in entries.items()})
    sizes = {name: of_entry for of_rank in held for name, of_entry in of_rank.items()}
    names = sorted(sizes)
    holders = [[rank for rank, of_rank in enumerate(held) if name in of_rank] for name in names]
    owners = dict(zip(names, shared_out([sum(sizes[n].values()) for n in names], len(held), holders), strict=True))
    writers = sorted(set(owners.values()))
    files = dict(zip(writers, numbered_files(STEM, len(writers)), strict=True))  # by rank
    tensors: dict[str, Tensor] = {}
    held_at: set[int] = set()
    for entry_name, entry in entries.items():
        whole = entry.read()
        if owners[entry_name] == this_rank():
            for key, value in whole.items():
                kept = value.cpu().contiguous()
                tensors[key] = kept.clone() if kept.data_ptr() in held_at else kept  # a tied tensor has several names
                held_at.add(tensors[key].data_ptr())

    name = files.get(this_rank(), "")  # empty where there are more ranks than entries
    temporary = folder / f".{name}.tmp"
    try:
        with on_all_ranks(doing):
            if name:
                temporary.unlink(missing_ok=True)  # it might be a link, which is not followed
                safetensors_writer(doing)(tensors, temporary)
            if this_rank() == 0:  # an older export is not to be taken for this one
                (folder / INDEX).unlink(missing_ok=True)
        with on_all_ranks(doing):
            if name:
                temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    with on_all_ranks(doing):
        if this_rank() == 0:
            weight_map = {key: files[owners[name]] for name, of_entry in sizes.items() for key in of_entry}
            total = sum(sum(of_entry.values()) for of_entry in sizes.values())
            write_index(folder, STEM, weight_map, total)


def read_index(index: Path) -> dict[str, Path]:
    """The file of each key, by an index of safetensors files.

    Raises ValueError for what is no index, FileNotFoundError for files that it names and that are not beside it.
    """
    try:
        with open_file(index) as source:
            named = {str(key): str(name) for key, name in json.load(source)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error}") from error
    files = {key: index.parent / name for key, name in named.items()}
    for file in dict.fromkeys(files.values()):
        if file.parent != index.parent or not file.is_file():
            raise FileNotFoundError(f"{str(file)!r}: named by {index.name}, but not there")
    return files


def open_safetensors(file: Path, doing: str, extra: str = "safetensors") -> Any:
    """The library's open file, which has ``keys()`` and ``get_tensor(key)``.

    Raises ImportError, which names ``doing``, without safetensors, and ValueError for a file of another kind.
    """
    library = optional("safetensors", doing, extra)
    try:
        open_file(file).close()  # safetensors would wait for a pipe's writer
        return library.safe_open(file, framework="pt")
    except (library.SafetensorError, ValueError) as error:
        text = f"{file} cannot be read as safetensors ({error}); it is truncated or damaged"
        raise ValueError(text) from error


def safetensors_writer(doing: str, extra: str = "safetensors") -> Callable[..., None]:
    """A function ``(tensors, file, **metadata)`` that writes a safetensors file.

    Raises ImportError, which names ``doing``, without safetensors or without numpy, which safetensors needs to write.
    """
    save_file: Callable[..., None] = optional("safetensors.torch", doing, extra).save_file
    optional("numpy", doing, extra)

    def write(tensors: Mapping[str, Tensor], file: Path, **metadata: str) -> None:
        save_file(tensors, file, metadata={"format": "pt", **metadata})

    return write


def numbered_files(stem: str, count: int) -> list[str]:
    """The file names that an index refers to."""
    return [f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def write_index(folder: Path, stem: str, weight_map: Mapping[str, str], total: int) -> None:
    """Write the index: the file of each key, and the bytes of all."""
    write_json(folder / f"{stem}{INDEX_SUFFIX}", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a file that appears when it is complete."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # it might be a link, which is not followed
    with temporary.open("x") as file:
        file.write(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)
