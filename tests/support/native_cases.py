"""What the tests of the native form share: models with every kind of stored state, and what they store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
from checkpoint_cases import FORMATS, Run
from distributed import Part, part
from peers import FusedAdam

# In the order of nn.ParameterDict.
SHAPES = {
    "conv": (3, 8, 2, 4),
    "long": (5000,),
    "narrow": (5, 64),
    "odd": (5, 50),
    "vacant": (0, 128),
    "vector": (10,),
    "void": (3, 0),
    "wide": (6, 256),
}
SAVED_AT = 2
IDS = {"ids": str}


# --- one process ------------------------------------------------------------------------------------------------


def build(
    master: cases.Master, fmt: torch.dtype, device: str = "cpu", *, fresh: bool = False
) -> tuple[nn.ParameterDict, FusedAdam]:
    tensors = {
        name: cases.values(shape, master.param_dtype, device, seed=10 * fresh + i)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    model = nn.ParameterDict(tensors)
    model["wide"].requires_grad_(False)  # frozen
    options = {"exp_avg_dtype": fmt, "exp_avg_sq_dtype": fmt, "lr": 0.5 if fresh else 0.01, **master.options}
    return model, FusedAdam(model.parameters(), **options)


def train(model: nn.ParameterDict, optimizer: FusedAdam, steps: range) -> None:
    for step in steps:
        for i, (name, param) in enumerate(model.items()):
            if name not in ("wide", "narrow"):  # frozen, or without gradient
                param.grad = cases.values(param.shape, param.dtype, str(param.device), seed=100 * step + i, spread=3.0)
        optimizer.step()
        optimizer.zero_grad()


def trained(
    master: cases.Master, fmt: torch.dtype, device: str = "cpu", form: str = "native"
) -> tuple[nn.ParameterDict, FusedAdam]:
    model, optimizer = build(master, fmt, device)
    optimizer.checkpoint_format = form
    train(model, optimizer, range(SAVED_AT))
    return model, optimizer


def stored(model: nn.ParameterDict, optimizer: FusedAdam) -> dict[str, Tensor]:
    """Parameters, and states and scales as they are kept."""
    found = {}
    for name, param in model.items():
        found[f"{name}: parameter"] = param.detach().clone()
        for key, value in optimizer.state.get(param, {}).items():
            found[f"{name}: {key}"] = value.clone()
        if optimizer.state.get(param):
            found[f"{name}: scales"] = optimizer.store.layouts[param].scales.clone()
    return found


def tensors_of(tree: Any, path: str = "") -> dict[str, Tensor]:
    if not isinstance(tree, dict):
        return {path: tree} if isinstance(tree, Tensor) else {}
    return {k: v for key, value in tree.items() for k, v in tensors_of(value, f"{path}.{key}").items()}


EVERY_MASTER = pytest.mark.parametrize("master", cases.MASTERS, **IDS)
EVERY_FORMAT = pytest.mark.parametrize("fmt", FORMATS, **IDS)
REM16, REM8, PLAIN = cases.MASTER["bfloat16+rem16"], cases.MASTER["bfloat16+rem8"], cases.MASTER["float32"]


# --- several processes ------------------------------------------------------------------------------------------


class NativeRun(Run):
    """Saves in native form; its snapshots also hold the stored bits."""

    def __init__(self, how: str, master: str, formats: Sequence[torch.dtype] = FORMATS, *, fresh: bool = False) -> None:
        super().__init__(how, master, formats, fresh=fresh)
        self.optimizer.checkpoint_format = "native"

    def snapshot(self) -> dict[str, Part]:
        form, self.optimizer.checkpoint_format = self.optimizer.checkpoint_format, "unscaled"
        found = super().snapshot()
        self.optimizer.checkpoint_format = form
        for name, param in self.model.named_parameters():
            found |= {f"{name}: stored {key}": part(value) for key, value in self.optimizer.state[param].items()}
        return found
