"""Optimizers for Hugging Face's Trainer that need the model: FusedMuon, and FusedAdamW with options for some modules.

The trainer has such options of its own for GaLore and others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fused_optim.adam import FusedAdamW
from fused_optim.muon import FusedMuon
from fused_optim.muon_groups import muon_param_groups

ALL_LINEAR = "all-linear"


class TargetedAdamW:
    """Factory for ``Trainer(optimizer_cls_and_kwargs=(TargetedAdamW, {...}))``, which calls the class, then this.

    The trainer's own ``learning_rate``, ``weight_decay`` and betas are not seen here: give them as options.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        target_modules: str | Sequence[str],
        target_options: Mapping[str, Any],
        **options: Any,
    ) -> FusedAdamW:
        """FusedAdamW with ``options`` over the groups of :func:`param_groups`."""
        return FusedAdamW(param_groups(model, target_modules, target_options), **options)


class ModelsMuon:
    """Factory for ``Trainer(optimizer_cls_and_kwargs=(ModelsMuon, {...}))``, which calls the class, then this.

    The trainer's own ``learning_rate`` and ``weight_decay`` are not seen here: give them as options.
    """

    def __call__(
        self,
        model: nn.Module,
        *,
        muon: Sequence[str] = (),
        adamw: Sequence[str] = (),
        adamw_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> FusedMuon:
        """FusedMuon with ``options`` over the groups of :func:`fused_optim.muon_param_groups`.

        ``muon``, ``adamw``: its patterns. ``adamw_options``: of AdamW's group, such as ``lr``.
        """
        groups = muon_param_groups(model, muon, adamw)
        for group in groups:
            group |= adamw_options or {} if group["algorithm"] == "adamw" else {}
        return FusedMuon(groups, **options)


def param_groups(
    model: nn.Module, target_modules: str | Sequence[str], target_options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Param groups with names: the parameters of target modules have ``target_options``; vectors have no weight decay.

    Args:
        model: its parameters that require gradients are taken, tied ones once.
        target_modules: as ``optim_target_modules`` of transformers' TrainingArguments: a regular expression that the
            module's whole name matches; several of them, of which one does, or that are parts of the name; or
            "all-linear".
        target_options: options of param groups, such as ``exp_avg_dtype`` and ``lr``.

    Raises:
        ValueError: if no parameter that requires gradients is in a target module.
    """
    targets = set(_target_names(model, target_modules))
    groups: dict[tuple[bool, bool], list[tuple[str, Tensor]]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            groups.setdefault((name in targets, param.dim() >= 2), []).append((name, param))
    if not any(is_target for is_target, _ in groups):
        raise ValueError(f"target_modules={target_modules!r}: no module of that name has a parameter to be trained")
    return [
        {"params": params, **({} if decays else {"weight_decay": 0.0}), **(target_options if is_target else {})}
        for (is_target, decays), params in groups.items()
    ]


def _target_names(model: nn.Module, target_modules: str | Sequence[str]) -> Iterator[str]:
    """Names of the parameters that target modules hold themselves."""
    for module_name, module in model.named_modules():
        if _is_target(module_name, module, target_modules):
            yield from (name for name, _ in module.named_parameters(module_name, recurse=False))


def _is_target(name: str, module: nn.Module, target_modules: str | Sequence[str]) -> bool:
    if isinstance(target_modules, str):
        if target_modules.replace("_", "-") == ALL_LINEAR:
            return isinstance(module, nn.Linear)
        return re.fullmatch(target_modules, name) is not None
    return any(target in name or re.fullmatch(target, name) for target in target_modules)
