"""Roles of a model's modules, by their names and neighbours."""

from __future__ import annotations

from torch import nn

_HEADS = {"lm_head", "output_layer", "embed_out", "score", "classifier", "unembed"}
_HEADS_OUTSIDE_OF_LAYERS = {"output", "head"}
_IN_WRAPPERS = {"base_layer", "original_module"}  # what PEFT calls a layer that it has put a module around


def is_head(path: str) -> bool:
    """True if a module is an output head, by its usual name.

    ``output`` or ``head`` in a numbered layer is none: attention has such modules in some models.
    """
    *outer, last = [part for part in path.split(".") if part not in _IN_WRAPPERS] or [""]
    return last in _HEADS or (last in _HEADS_OUTSIDE_OF_LAYERS and not any(part.isdigit() for part in outer))


def is_embedding(path: str) -> bool:
    return any("embed" in part for part in path.lower().split("."))


def is_expert(path: str) -> bool:
    return any("expert" in part for part in path.lower().split("."))


def is_router(model: nn.Module, path: str) -> bool:
    """True if a module decides how much of which experts is used."""
    parent, _, last = path.rpartition(".")
    is_gate = last in ("gate", "shared_expert_gate") and hasattr(model.get_submodule(parent), "experts")
    return is_gate or any("router" in part for part in path.lower().split("."))


def is_adapter(model: nn.Module, path: str) -> bool:
    """True if a module is part of a PEFT adapter, and not the layer that it adapts."""
    module: object = model
    for part in path.split("."):
        if part in getattr(module, "adapter_layer_names", ()):
            return True
        module = getattr(module, part, None)
    return False
