"""``python -m fused_optim inspect --compare``: how two checkpoints differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fused_optim.checkpoint.folders import PathLike
from fused_optim.checkpoint.open import Source, open_checked
from fused_optim.state.groups import DESCRIPTION
from fused_optim.tools.inspector import PARAMETER, groups_of, other_tensors, steps_of
from fused_optim.tools.progress import progress
from fused_optim.tools.saved_optimizer import SavedOptimizer, read_optimizer
from fused_optim.tools.values import Difference

_Readable = tuple[tuple[int, ...], Callable[[], Iterator[Tensor]]]  # shape, how to read its pieces

_EXAMPLES = 10


class Comparison(dict[str, Any]):
    """Differences of two checkpoints; ``str()`` of it is for people.

    ``same``; ``only_first``, ``only_second``: names the other lacks; ``different``: text by tensor; ``settings``.
    """

    def __str__(self) -> str:
        lines = [f"{self['first']} and {self['second']}:"]
        for which, side in (("only_first", "first"), ("only_second", "second")):
            lines += [f"  only in {self[side]}: {name}" for name in self[which][:_EXAMPLES]]
            lines += [f"  ... and {len(self[which]) - _EXAMPLES:,} more"] * (len(self[which]) > _EXAMPLES)
        lines += [f"  {key}: {one} and {other}" for key, (one, other) in self["settings"].items()]
        lines += [f"  {name}: {text}" for name, text in self["different"].items()]
        lines.append(f"  {self['equal']:,} of {self['tensors']:,} tensors have the same values")
        return "\n".join(lines)


def compare_checkpoints(first: PathLike, second: PathLike, *, model: PathLike | None = None) -> Comparison:
    """Compare the values of two checkpoints, whatever their layouts and formats; two tensors are in memory at a time.

    States are compared in FP32, as they decode. Raises as :func:`inspect_checkpoint` does.
    """
    sources = [open_checked(path) for path in (first, second)]
    weights = None if model is None else open_checked(model)
    optimizers = [read_optimizer(source, weights) for source in sources]
    tensors = [dict(_tensors(*pair)) for pair in zip(sources, optimizers, strict=True)]
    shared = [name for name in tensors[0] if name in tensors[1]]
    different: dict[str, str] = {}
    for name in progress(shared, "comparing", lambda name: 1):
        one, other = (side[name] for side in tensors)
        if one[0] != other[0]:
            different[name] = f"shapes {one[0]} and {other[0]}"
        elif (difference := Difference.between(one[1](), other[1]())).different:
            different[name] = str(difference)
    settings = _different_settings(*optimizers)
    only = [[name for name in tensors[i] if name not in tensors[1 - i]] for i in (0, 1)]
    return Comparison(
        first=str(first),
        second=str(second),
        same=not (different or settings or any(only)),
        only_first=only[0],
        only_second=only[1],
        settings=settings,
        different=different,
        equal=len(shared) - len(different),
        tensors=len(shared),
    )


def _tensors(source: Source, optimizer: SavedOptimizer | None) -> Iterator[tuple[str, _Readable]]:
    """(name, how to read it) of all tensors: parameters and states by the parameters' names, others by key."""
    if optimizer is not None:
        positions = {name for id_, name in optimizer.names.items() if optimizer.contents.is_numbered and name == id_}
        for name, states in optimizer.states.items():
            who = f"parameter {name}" if name in positions else name  # which the other may have as a name
            yield from ((f"{key} of {who}", (state.shape, state.pieces)) for key, state in states.items())
        for name, weight in optimizer.weights.items():
            if weight.source is source:
                yield f"{PARAMETER} of {name}", (weight.info.shape, weight.pieces)
    for tensor in other_tensors(source, optimizer):
        if not tensor.info.dtype.is_complex:
            yield tensor.key, (tensor.info.shape, tensor.pieces)


def _different_settings(first: SavedOptimizer | None, second: SavedOptimizer | None) -> dict[str, tuple[str, str]]:
    if first is None or second is None:
        return {}
    one, other = (_settings(optimizer) for optimizer in (first, second))
    return {key: (one[key], other[key]) for key in one if key in other and one[key] != other[key]}


def _settings(optimizer: SavedOptimizer) -> dict[str, str]:
    """The settings of all param groups, as text."""
    groups = groups_of(optimizer)
    keys = {key: None for group in groups for key in group if key not in ("parameters", *DESCRIPTION)}
    settings = {key: ", ".join(dict.fromkeys(str(group.get(key)) for group in groups)) for key in keys}
    return {**settings, "step": ", ".join(map(str, steps_of(optimizer)))}
