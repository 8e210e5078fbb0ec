"""FusedMuon: Muon for the hidden matrices of a model, wherever they are sharded, and AdamW for everything else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_optim.adam import EXP_AVG, EXP_AVG_SQ, Adam
from fused_optim.decorators import between_graphs, entry
from fused_optim.formats.dtypes import as_dtype
from fused_optim.formats.elements import ELEMENT_TYPES
from fused_optim.matrices.newton_schulz import SCALES, coefficients_of
from fused_optim.matrices.passes import MOMENTUM_BUFFER, MomentumPass
from fused_optim.optimizer import ShardedOptimizer
from fused_optim.options.checks import check_number, whole_number
from fused_optim.options.reading import MuonOptions
from fused_optim.options.table import OPTIONS, documents_options, flag_of, takes_options
from fused_optim.rules import MUON, Orthogonalization, Rule

ALGORITHM = "algorithm"  # of a param group: a key of `MuonWithAdamW.rules`
# Hyperparameters of param groups that one of the two algorithms has alone.
_OF_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "ns_dtype", "adjust_lr_fn", "splits", "experts")
_HOW = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
_OF_ADAM = ("betas", "bias_correction")
_ADAMS_EPS = 1e-8


@dataclass
class Muon(MomentumPass):
    """The update rule of Muon (Jordan et al., 2024), as torch.optim.Muon has it."""

    repr_keys = ("momentum", "nesterov", "ns_steps")
    whole_matrices = True
    needs_step = False  # torch.optim.Muon counts none
    collective_keys = ("splits", "ns_dtype")
    rank_uniform_keys = (*_HOW, MOMENTUM_BUFFER.option)

    def problem_of(self, param: Tensor, group: Mapping[str, Any]) -> str:
        if param.dim() not in (2, 3):
            return "Muon updates matrices: expected two dims, or three of experts; use algorithm='adamw' for others"
        if param.dim() == 3 and not flag_of("experts", group["experts"] or False):
            hint = "say experts=True if each entry of the first is a matrix; use algorithm='adamw' for convolutions"
            return f"Muon updates matrices, and this has three dims: {hint}"
        splits = group["splits"]
        if splits and sum(splits) != param.shape[-2]:
            return f"splits: expected {param.shape[-2]} rows together, got {sum(splits)}"
        return ""

    def check(self, group: Mapping[str, Any]) -> None:
        check_number("momentum", group["momentum"])
        if not group["momentum"] < 1.0:
            raise ValueError(f"momentum: expected a number in [0, 1), got {group['momentum']}")
        check_number("eps", group["eps"])
        flag_of("nesterov", group["nesterov"])
        if not whole_number("ns_steps", group["ns_steps"], 0) < 100:
            raise ValueError(f"ns_steps: expected less than 100, got {group['ns_steps']}")
        coefficients_of(group["ns_coefficients"], group["ns_steps"])
        if group["adjust_lr_fn"] not in SCALES:
            raise ValueError(f"adjust_lr_fn: expected 'original' or 'match_rms_adamw', got {group['adjust_lr_fn']!r}")
        if as_dtype(group["ns_dtype"]) not in ELEMENT_TYPES:
            raise ValueError(f"ns_dtype: expected 'bfloat16', 'float16' or 'float32', got {group['ns_dtype']}")
        for rows in group["splits"] or ():
            whole_number("splits", rows, 1)

    def hyperparameters(self, group: Mapping[str, Any]) -> dict[str, float]:
        return super().hyperparameters({**group, "nesterov": flag_of("nesterov", group["nesterov"])})

    def orthogonalization(self, group: Mapping[str, Any]) -> Orthogonalization:
        dtype = as_dtype(group["ns_dtype"])
        assert dtype is not None
        return Orthogonalization(
            coefficients=coefficients_of(group["ns_coefficients"], group["ns_steps"]),
            eps=float(group["eps"]),
            dtype=dtype,
            scale=SCALES[group["adjust_lr_fn"]],
            splits=tuple(group["splits"] or ()),
            rotates=as_dtype(group[MOMENTUM_BUFFER.option]) != torch.float32,
        )


@dataclass
class MuonWithAdamW:
    """Muon or AdamW, by the ``algorithm`` of a param group.

    ``betas``: of AdamW's groups that say none. They are no default of all groups: torch's schedulers cycle ``momentum``
    then, as with torch.optim.Muon.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    muon: Muon = field(default_factory=Muon)
    adamw: Adam = field(default_factory=Adam)

    name = MUON.name
    states = (MOMENTUM_BUFFER, EXP_AVG, EXP_AVG_SQ)
    repr_keys = ("momentum", "nesterov", "ns_steps", "betas", "eps")
    has_torch_form = False

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def for_group(self, group: Mapping[str, Any]) -> Rule:
        rules: dict[str, Rule] = {"muon": self.muon, "adamw": self.adamw}
        algorithm = group.get(ALGORITHM, "muon")
        if algorithm not in rules:
            raise ValueError(f"algorithm: expected 'muon' or 'adamw', got {algorithm!r}")
        return rules[algorithm]

    def foreign_keys(self, group: Mapping[str, Any]) -> Collection[str]:
        is_muon = self.for_group(group) is self.muon
        return (*_OF_ADAM, EXP_AVG.option, EXP_AVG_SQ.option) if is_muon else (*_OF_MUON, MOMENTUM_BUFFER.option)


@documents_options
class FusedMuon(ShardedOptimizer):
    """Muon (Jordan et al., 2024) for hidden matrices, whole wherever they are sharded; AdamW for all else.

    On plain parameters it follows ``torch.optim.Muon``, whose arguments and defaults it has. The update of a sharded
    matrix is put together on one rank, made orthogonal there and sent back: neither the result nor its bits depend on
    the sharding, as long as blocks of the formats are the same. ``optimizer.state[p]`` has ``momentum_buffer``, shaped,
    sharded and placed as ``p``.

    Param groups choose by ``algorithm``: ``"muon"``, for parameters with two dims, or three of ``experts``; or
    ``"adamw"``, with :class:`fused_optim.FusedAdamW`'s hyperparameters and states. Both are updated in one step, and
    are in one checkpoint. :func:`fused_optim.muon_param_groups` sorts a model's parameters.

    Args:
        params: parameters, named parameters or param groups; FP32, BF16 or FP16, plain tensors or DTensors.
        lr: learning rate, a number or a tensor of one element; of both algorithms unless a param group has its own.
        weight_decay: decoupled: the parameter is multiplied by ``1 - lr * weight_decay``; of both, too.
        momentum: how much of the momentum a step keeps, in [0, 1); the gradient's share is ``1 - momentum``.
        nesterov: orthogonalize ``momentum * momentum_buffer + (1 - momentum) * grad``, not ``momentum_buffer``.
        ns_coefficients: (a, b, c) of the Newton-Schulz steps ``X <- a X + (b A + c A A) X`` with ``A = X X^T``; or
            three for each step, of which the last is repeated; or a name: ``"original"``, the default's;
            ``"polar_express"`` (Amsel et al., 2025), which comes closer to singular values of 1; ``"deepseek_v4"``,
            whose 10 steps end with two that do.
        eps: the least Frobenius norm that an update is divided by.
        ns_steps: how many steps, less than 100.
        adjust_lr_fn: what updates are multiplied by: ``"original"`` or None, ``sqrt(max(1, rows / columns))``;
            ``"match_rms_adamw"``, ``0.2 * sqrt(max(rows, columns))``, for AdamW's learning rates.
        splits: of param groups: the rows of the matrices that each parameter joins, such as those of queries, keys and
            values; they are orthogonalized apart.
        betas: of AdamW's moments, in param groups with ``algorithm="adamw"``, whose ``eps`` is 1e-8.
        bias_correction: of AdamW's moments.
        checkpoint_format: "unscaled" or "native", as of :class:`fused_optim.FusedAdam`.
        capturable: as of :class:`fused_optim.FusedAdam`, on one GPU.

    Raises:
        ValueError, TypeError: for hyperparameters or parameters that cannot be used; nothing has been changed then.
    """

    rule: MuonWithAdamW

    @between_graphs
    @takes_options(MuonOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence[float] | Sequence[Sequence[float]] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Unpack[MuonOptions],
    ) -> None:
        rules = MuonWithAdamW(betas=OPTIONS["betas"].value_of(options.pop("betas")))
        own: dict[str, Any] = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
        }
        own |= {"adjust_lr_fn": adjust_lr_fn, "splits": None, ALGORITHM: "muon"}
        super().__init__(params, rules, lr=lr, weight_decay=weight_decay, eps=eps, **own, **options)

    @entry
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as torch.optim does. Raises before the group is added if it cannot be used."""
        if self.rule.for_group(param_group) is self.rule.adamw:
            param_group.setdefault("eps", _ADAMS_EPS)
            param_group.setdefault("betas", self.rule.betas)
        super().add_param_group(param_group)
