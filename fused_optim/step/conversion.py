"""Formats that are changed in mid-run: what is written into a running param group is what the next step has."""

from __future__ import annotations

from torch import Tensor

from fused_optim.backends import is_capturing
from fused_optim.state.groups import Group
from fused_optim.state.store import StateStore


def stale_formats(store: StateStore) -> dict[Tensor, Group]:
    """The parameters whose param groups ask for other formats by now than their states have, and these groups."""
    found: dict[Tensor, Group] = {}
    for group in store.groups:
        asked = [group[spec.option] for spec in store.rule.for_group(group).states]
        own = (param for param in group["params"] if param in store and not store.layouts[param].is_for(asked))
        found.update(dict.fromkeys(own, group))
    return found


def convert(store: StateStore, stale: dict[Tensor, Group]) -> None:
    """Encode their values anew. Masters stay."""
    if is_capturing():
        raise RuntimeError("CUDA graph capture: formats of states were changed since the last step; run one before")
    for param, group in stale.items():
        states = store[param]
        store.put(states.converted(store.new_layout(param, group, states.layout.master.is_remainder)))
