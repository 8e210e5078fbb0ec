"""The signature of an optimizer's steps on each mesh: all that decides their collectives, the order and the sizes.

All ranks of a mesh must have it alike. Else they would wait for each other, or take the pieces of one matrix for those
of another. :class:`fused_optim.step.agreement.Agreement` compares it when steps are planned.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from fused_optim.adapters import needs_collective
from fused_optim.matrices.shards import cut
from fused_optim.options.checks import describe
from fused_optim.sharding.collective import bare_name, digest_of, meshes_of
from fused_optim.sharding.dtensor import local_tensor
from fused_optim.state.groups import Group
from fused_optim.state.store import StateStore


@dataclass(frozen=True)
class Entry:
    """The settings of the optimizer, or of one parameter, that decide collectives: texts by name.

    ``who``: its name in messages, which may differ from rank to rank. ``always``: texts that decide collectives,
    compared with each plan. ``others``: settings by which one rank computes another's part of an update; they may
    change from step to step, and are compared before the first one.
    """

    who: str
    always: Mapping[str, str]
    others: Mapping[str, str] = field(default_factory=dict)

    def texts(self, is_first: bool) -> Mapping[str, str]:
        return {**self.always, **self.others} if is_first else self.always


@dataclass(frozen=True)
class CollectiveSignature:
    """The signature of one mesh. ``options``: those of the whole optimizer by name, for messages on differences."""

    entries: Sequence[Entry]
    options: Mapping[str, str]

    @cached_property
    def always(self) -> int:
        """A hash of all entries that decide collectives."""
        return digest_of([entry.texts(False) for entry in self.entries])

    def digest(self, is_first: bool) -> int:
        """The hash, computed once; with the entries that only the first step compares if ``is_first``."""
        return digest_of([entry.texts(True) for entry in self.entries]) if is_first else self.always


def signature_of(
    store: StateStore,
    release: Callable[[Tensor], int | None] | None = None,
    asked: Mapping[str, object] | None = None,
    every: bool = False,
) -> dict[DeviceMesh, CollectiveSignature]:
    """The signature of the next step of an optimizer, by mesh; local, nothing is sent.

    ``release``: the bucket of gradient release that a parameter is in. ``asked``: arguments of what is called.
    ``every``: of all parameters, as for what sends something of each; not only of those whose updates are sent.
    """
    shared: dict[DeviceMesh, list[Entry]] = {mesh: [] for mesh in meshes_of(store.params)}
    if not shared:
        return {}
    options = {name: repr(value) for name, value in store.settings.as_dict().items()}
    buckets, names, rules = _buckets_of_matrices(store), store.names, store.rules()
    for index, (param, group) in enumerate(_with_groups(store)):
        if not isinstance(param, DTensor) or param.device_mesh not in shared:
            continue
        rule, name = rules[param], names[index]
        own = {"name": str(name and bare_name(name)), "trained": str(is_trained(store, param))}
        if rule.whole_matrices:
            own |= {key: _spelled(group.get(key)) for key in rule.collective_keys}
            own |= {"in host memory": str(_is_offloaded(store, param, group)), "bucket": str(buckets.get(param))}
        elif not (every or needs_collective(param)):
            continue
        if release is not None:
            own["bucket of gradient release"] = str(release(param))
        own |= {"shape": str(tuple(param.shape)), "placements": _placed(param.placements)}
        others = {key: _spelled(group.get(key)) for key in rule.rank_uniform_keys}
        who = f"parameter {index} ({name!r})" if name else describe(param, index)
        shared[param.device_mesh].append(Entry(who, own, others))
    arguments = {name: _spelled(value) for name, value in (asked or {}).items()}
    whole = {"skip_nonfinite": str(store.settings.skip_nonfinite)}
    if not every:  # of param groups the first step alone sends something
        arguments["param groups"] = str(len(store.groups))
    return {
        mesh: CollectiveSignature([Entry("the optimizer", whole, arguments), *own], options)
        for mesh, own in shared.items()
    }


@functools.lru_cache(maxsize=64)
def _placed(placements: tuple[Placement, ...]) -> str:
    return str(tuple(placements))


def _with_groups(store: StateStore) -> Iterator[tuple[Tensor, Group]]:
    return ((param, group) for group in store.groups for param in group["params"])


def is_trained(store: StateStore, param: Tensor) -> bool:
    """True if steps count this parameter, with a gradient or without."""
    return param in store or not store.is_frozen(param)


def _is_offloaded(store: StateStore, param: Tensor, group: Group) -> bool:
    if not store.settings.offload_states and param not in store:
        return False
    layout = store.layouts[param] if param in store else store.new_layout(param, group)
    return bool(layout.offloaded)


def _buckets_of_matrices(store: StateStore) -> dict[Tensor, int]:
    """The number of the bucket, on its mesh, of each parameter that is updated as a whole matrix."""
    rules, parts = store.rules(), dict[tuple[torch.device, bool], dict[int, Tensor]]()
    for index, (param, group) in enumerate(_with_groups(store)):
        if rules[param].whole_matrices and is_trained(store, param):
            key = local_tensor(param).device, _is_offloaded(store, param, group)
            parts.setdefault(key, {})[index] = param
    counts: Counter[DeviceMesh | None] = Counter()
    found: dict[Tensor, int] = {}
    for key in sorted(parts, key=str):  # as plans have them
        for mesh, bucket in cut(parts[key]):
            found |= dict.fromkeys(bucket.values(), counts[mesh])
            counts[mesh] += 1
    return found


def _spelled(value: Any) -> str:
    """The text of a param group's value: equal texts for equal meanings (1 and 1.0, lists and tuples)."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Real) and not isinstance(value, bool | int):
        return repr(float(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"({', '.join(map(_spelled, value))})"
    return repr(value)
