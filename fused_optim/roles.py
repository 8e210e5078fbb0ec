"""What modules of models are for, by their names and what lies beside them."""

from __future__ import annotations

from torch import nn

_HEADS = {"lm_head", "output_layer", "embed_out", "score", "classifier", "unembed"}
_HEADS_OUTSIDE_OF_LAYERS = {"output", "head"}


def is_head(path: str) -> bool:
    """Whether a module is an output head, by the name that these usually have.

    What is called ``output`` or ``head`` in a numbered layer is none: attention has one in some models.
    """
    *outer, last = path.split(".")
    return last in _HEADS or (last in _HEADS_OUTSIDE_OF_LAYERS and not any(part.isdigit() for part in outer))


def is_embedding(path: str) -> bool:
    return any("embed" in part for part in path.lower().split("."))


def is_expert(path: str) -> bool:
    return any("expert" in part for part in path.lower().split("."))


def is_router(model: nn.Module, path: str) -> bool:
    """Whether a module decides how much of which experts is used."""
    parent, _, last = path.rpartition(".")
    is_gate = last in ("gate", "shared_expert_gate") and hasattr(model.get_submodule(parent), "experts")
    return is_gate or any("router" in part for part in path.lower().split("."))
