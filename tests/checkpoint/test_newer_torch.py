"""``.metadata`` of a torch that is newer than what is known: read where its bytes can only mean what they did before.

Otherwise the error says so. The checkpoints are made with today's torch, whose classes are given what none of them has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)

import cases
from distributed import assert_same
from fused_optim import FusedAdam, load_optimizer_checkpoint, write_checksums
from fused_optim.checkpoint import Checkpointer
from fused_optim.tools.conversion import convert_checkpoint
from fused_optim.tools.inspector import inspect_checkpoint
from native_cases import SAVED_AT, build, stored, trained

REM16 = cases.MASTER["bfloat16+rem16"]
Change = Callable[[Any], Any]  # of what an object is pickled as


class Later:
    """A class of a newer torch."""


class LaterDtype:
    """``torch.later``."""

    def __reduce__(self) -> str:
        return "later"


LATER = LaterDtype()


def further(**fields: Any) -> Change:
    return lambda state: {**(state or {}), **fields}


def behind_the_strides(*values: Any) -> Change:
    return lambda state: (*[*state, None][:6], *values)  # torch before 2.15 has no strides


@pytest.fixture
def saved_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[type, Change], tuple[Path, Any, Any]]:
    """A checkpoint in whose metadata objects of a class are pickled otherwise; its model and optimizer."""

    def save(kind: type, change: Change) -> tuple[Path, nn.Module, FusedAdam]:
        model, optimizer = trained(REM16, torch.int8)
        usual = kind.__getstate__
        with monkeypatch.context() as patch, Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
            patch.setattr(kind, "__getstate__", lambda self: change(usual(self)))
            if kind is TensorProperties:
                read = kind.__setstate__
                patch.setattr(kind, "__setstate__", lambda self, state: read(self, state[:5]))
            for module, name, value in ((of_torch, "Later", Later), (torch, "later", LATER)):
                patch.setattr(type(value) if value is LATER else value, "__module__", module.__name__)
                patch.setattr(module, name, value, raising=False)
            checkpointer.save(SAVED_AT)
            checkpointer.wait()
        return tmp_path / f"step-{SAVED_AT:08}", model, optimizer

    return save


# --- what is read --------------------------------------------------------------------------------------------------

HARMLESS: dict[str, tuple[type, Change]] = {
    "nothing": (Metadata, further(encoding=None)),
    "False": (_StorageInfo, further(is_encrypted=False)),
    "empty containers": (ChunkStorageMetadata, further(holes=[], scales=(), names={}, more=set())),
    "nothing of an index": (MetadataIndex, further(replica=None)),
    "strides": (TensorProperties, lambda state: (*state[:5], (7, 5, 3, 1))),
    "nothing behind the strides": (TensorProperties, behind_the_strides(None, False)),
    "where it was written to": (StorageMeta, further(host="node-5", started=1.5, digest=b"\0\xff", ranks={1, 2})),
}


@pytest.mark.parametrize("kind, change", HARMLESS.values(), ids=HARMLESS)
def test_what_does_not_change_the_bytes_passes(kind: type, change: Change, saved_with: Any, tmp_path: Path) -> None:
    path, model, optimizer = saved_with(kind, change)
    expected = stored(model, optimizer)
    with Checkpointer(*(ours := build(REM16, torch.int8, fresh=True)), tmp_path, sigterm=False) as checkpointer:
        assert checkpointer.load_latest() == SAVED_AT
    assert_same(stored(*ours), expected)
    ours = build(REM16, torch.int8, fresh=True)
    ours[0].load_state_dict(model.state_dict())
    load_optimizer_checkpoint(*ours, path)
    assert_same(stored(*ours), expected)
    assert inspect_checkpoint(path)["steps"] == [SAVED_AT]


# --- what is refused ----------------------------------------------------------------------------------------------


UNKNOWN: dict[str, tuple[type, Change, str]] = {
    "a text": (Metadata, further(encoding="zstd"), "field encoding of Metadata is unknown"),
    "a number": (_StorageInfo, further(stripes=2), "field stripes of _StorageInfo is unknown"),
    "a set": (MetadataIndex, further(replicas={1, 2}), "field replicas of MetadataIndex is unknown"),
    "behind the strides": (
        TensorProperties,
        behind_the_strides(None, "columns"),
        "field 8 of TensorProperties is unknown",
    ),
    "a class": (Metadata, further(more=Later()), "torch.distributed.checkpoint.metadata.Later is unknown"),
    "a class in what passes": (StorageMeta, further(more=Later()), "checkpoint.metadata.Later is unknown"),
    "a dtype": (TensorProperties, lambda state: (LATER, *state[1:]), "torch.later is unknown"),
    "another format": (Metadata, further(version="2.0.0"), "expected version 1.x of its format, found 2.0.0"),
}


@pytest.mark.parametrize("kind, change, message", UNKNOWN.values(), ids=UNKNOWN)
def test_what_may_is_called_newer(kind: type, change: Change, message: str, saved_with: Any, tmp_path: Path) -> None:
    path, _, _ = saved_with(kind, change)
    model, optimizer = build(REM16, torch.int8, fresh=True)
    before = stored(model, optimizer)
    with Checkpointer(model, optimizer, tmp_path, sigterm=False) as checkpointer:
        ways: list[Callable[[], Any]] = [
            lambda: load_optimizer_checkpoint(model, optimizer, path),
            lambda: checkpointer.load(SAVED_AT),
            lambda: checkpointer.load_latest(),
            lambda: inspect_checkpoint(path),
            lambda: convert_checkpoint(path, tmp_path / "other", "unscaled"),
            lambda: write_checksums(path),
        ]
        for way in ways:
            with pytest.raises(ValueError, match=rf"\.metadata was written by a newer torch: .*{message}") as caught:
                way()
            assert "damaged" not in str(caught.value)
    assert_same(stored(model, optimizer), before)
