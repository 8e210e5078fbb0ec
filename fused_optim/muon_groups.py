"""Param groups of a model for FusedMuon: matrices for Muon, all other parameters for AdamW."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fused_optim.options.checks import some_of
from fused_optim.roles import is_embedding, is_head, is_router
from fused_optim.sharding.collective import bare_name

_EMBEDDINGS = re.compile(r"(?:^|\.)(?:wte|wpe)$")  # that are called otherwise
_EXPERTS = re.compile(r"(?:^|[._])experts?(?:[._]|$)")


def muon_param_groups(
    model: nn.Module, muon: Sequence[str] = (), adamw: Sequence[str] = (), **options: Any
) -> list[dict[str, Any]]:
    """Two param groups for :class:`fused_optim.FusedMuon`, sorted by what a model's parameters are.

    To Muon: weights of linear layers, and experts with three dims, for which the group says ``experts=True``. To AdamW:
    embeddings and heads, also tied ones, norms, biases and other vectors, and routers. Frozen parameters are left out.

    Args:
        model: its modules' types and names decide.
        muon: patterns of names, such as ``"*.mixing"``, that are for Muon whatever they are, but for convolutions.
        adamw: the same for AdamW.
        options: hyperparameters of the first group, such as ``lr`` and ``splits``.

    Returns: the groups, with names. A group without parameters is left out.

    Raises ValueError for parameters that it cannot place, with their names: nothing is guessed; and for convolutions'
    weights in ``muon``, which are no matrices.
    """
    placed: dict[str, list[tuple[str, Tensor]]] = {"muon": [], "adamw": []}
    ends, convolutions = _ends_of(model), _convolutions(model)
    unknown = []
    for name, param, modules in _parameters(model):
        convolves = param.dim() > 2 and any(f"{path}.".startswith(convolutions) for path, _ in modules)
        asked = _asked(name, muon, adamw)
        if asked == "muon" and convolves:
            raise ValueError(f"{name} of shape {tuple(param.shape)}: a convolution's weight is no matrix for Muon")
        found = _algorithm(model, name, param, modules, ends)
        algorithm = asked or (None if found == "muon" and convolves else found)
        if algorithm is None:
            unknown.append(f"{name} of shape {tuple(param.shape)}")
        else:
            placed[algorithm].append((name, param))
    if unknown:
        raise ValueError(
            f"cannot tell whether Muon or AdamW is for {some_of(unknown)}: name them in muon= or adamw=, as patterns"
        )
    groups: list[dict[str, Any]] = [{"params": own, "algorithm": algorithm} for algorithm, own in placed.items() if own]
    if any(param.dim() == 3 for _, param in placed["muon"]):
        groups[0]["experts"] = True
    return [{**group, **(options if group["algorithm"] == "muon" else {})} for group in groups]


def is_muons_by_name(name: str, dims: int, names: Collection[str]) -> bool | None:
    """True if a parameter would be under Muon, as far as its name says, where no module tells; None: it cannot be told.

    ``names``: of all parameters of the model.
    """
    path, _, _ = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    is_gate = last in ("gate", "shared_expert_gate") and any(other.startswith(f"{parent}.experts") for other in names)
    is_end = is_embedding(path) or is_head(path) or bool(_EMBEDDINGS.search(path))
    if dims < 2 or is_end or is_gate or "router" in path.lower() or "norm" in last.lower():
        return False
    return True if dims == 2 or (dims == 3 and _EXPERTS.search(name)) else None


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, list[tuple[str, nn.Module]]]]:
    """Each parameter that is trained, once: its first name, and all modules that have it, with their names."""
    owners: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    names: dict[Tensor, str] = {}
    for prefix, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False):
            owners.setdefault(param, []).append((prefix, module))
            names.setdefault(param, bare_name(f"{prefix}.{own}".removeprefix(".")))
    return ((names[param], param, modules) for param, modules in owners.items() if param.requires_grad)


def _asked(name: str, muon: Sequence[str], adamw: Sequence[str]) -> str | None:
    found = [
        algorithm
        for algorithm, patterns in (("muon", muon), ("adamw", adamw))
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if len(found) > 1:
        raise ValueError(f"{name}: both muon= and adamw= have a pattern for it")
    return found[0] if found else None


def _ends_of(model: nn.Module) -> set[nn.Module]:
    """The modules that the model itself, as those of transformers do, calls its embeddings and its head."""
    asked: Iterable[Any] = (getattr(model, f"get_{side}_embeddings", None) for side in ("input", "output"))
    return {module for ask in asked if ask is not None and (module := _answer(ask)) is not None}


def _convolutions(model: nn.Module) -> tuple[str, ...]:
    """The prefixes of names in convolutions: of their parameters, and of modules that parametrize these."""
    return tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, _ConvNd))


def _answer(ask: Any) -> Any:
    try:
        return ask()
    except NotImplementedError:
        return None


def _algorithm(
    model: nn.Module, name: str, param: Tensor, modules: list[tuple[str, nn.Module]], ends: set[nn.Module]
) -> str | None:
    """None: it cannot be told."""
    if param.dim() < 2 or any(module in ends or _is_for_adamw(model, path, module) for path, module in modules):
        return "adamw"
    if param.dim() == 2 and all(hasattr(module, "in_features") for _, module in modules):
        return "muon"
    return "muon" if param.dim() == 3 and _EXPERTS.search(name) else None


def _is_for_adamw(model: nn.Module, path: str, module: nn.Module) -> bool:
    is_norm, named = type(module).__name__.endswith("Norm"), bare_name(path)
    is_end = isinstance(module, nn.Embedding | nn.EmbeddingBag) or is_embedding(named) or is_head(named)
    return is_norm or is_end or is_router(model, path)
