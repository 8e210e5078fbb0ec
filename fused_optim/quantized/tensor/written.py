"""Plain values that are written into a quantized weight: they become its initial values, which masters start from.

Beside an optimizer's masters, the codes of before the first write are kept until the masters have followed: what comes
back as these show it was not written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fused_optim.quantized.recipes import Components, as_matrix, tiles
from fused_optim.quantized.tensor.weight import INITIAL, Weight


def ensure_initial(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The initial values; where there are none, the decoded ones in ``dtype`` become them.

    These are freed once they are quantized or, where there is an optimizer, when its masters have followed them.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{weight.prefix}compiled code cannot change a quantized weight: its graphs decode it only")
    whole, shared = weight.whole, weight.shared
    if INITIAL not in whole.components:
        if shared.has_optimizer:
            dtype = torch.float32  # which masters can be compared with
            shared.before = _codes(whole)
        whole.components[INITIAL] = whole.values().to(dtype).view(as_matrix(tuple(whole.weight_shape)))
        shared.discard = not shared.has_optimizer
    initial = weight.initial
    assert initial is not None
    return initial


def write_initial(weight: Weight, values: Tensor) -> Tensor:
    """Store plain values of this tensor's shape as its initial values. Returns the values to be quantized."""
    values = values.detach().reshape(weight.weight_shape)
    dtype, shown = values.dtype if values.is_floating_point() else torch.float32, is_shown(weight, values)
    initial = ensure_initial(weight, dtype)
    if shown is not None:
        values = torch.where(shown, initial.view(shown.shape), values)
    initial.copy_(values.reshape(initial.shape))
    return values


def is_shown(weight: Weight, values: Tensor, of: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor | None:
    """Mask of written values that are only the weight's own decoded values of earlier writes; these elements stay.

    None if no such writes are known. ``of``: the part of the weight's values that they are written into.
    """
    if weight.before is None or weight.is_pending:
        return None
    old = tiles.decode(weight.recipe, weight.before, weight.weight_shape, torch.float32, weight.rows_before)
    return _equals(values, of(weight.values()), weight.dtype) & ~_equals(values, of(old), weight.dtype)


def _equals(values: Tensor, decoded: Tensor, dtype: torch.dtype) -> Tensor:
    return (values == decoded) | (values == decoded.to(dtype))


def keep_plain(weight: Weight, values: Tensor) -> None:
    """Store plain values as initial values, to be quantized by ``finish_initialization``.

    If the tensor had none, they are freed then.
    """
    write_initial(weight, values)
    weight.mark_pending()
    weight.forget_scales()


def take_before(weight: Weight, source: Weight) -> None:
    """Copy ``before`` from the source of a copy, into FSDP2's new memory."""
    known = source.before
    if known is not None and weight.shared.before is None:
        weight.shared.before = _codes(weight.whole)
        for name, part in (weight.before or {}).items():
            part.copy_(known[name])


def _codes(weight: Weight) -> Components:
    return {x.name: weight.components[x.name].clone() for x in weight.recipe.components}
