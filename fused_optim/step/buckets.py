"""A step in buckets: some parameters are updated before others have gradients, and all of it counts as one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fused_optim.state.store import StateStore
from fused_optim.step.plan import Plan


class Buckets:
    """A plan for each list of parameters, and one for all others.

    ``done``: the numbers of those that were run for the step to come; ``counting``: the param groups whose step it is.
    """

    def __init__(self, members: Sequence[Sequence[Tensor]], groups: list[dict[str, Any]], store: StateStore) -> None:
        self.members = members
        self._params, self._sizes = store.params, [len(group["params"]) for group in groups]
        listed = {param for bucket in members for param in bucket}
        others = [param for param in self._params if param not in listed]
        self.plans = [Plan(groups, store, bucket) for bucket in [*members, others]]
        self.done: set[int] = set()
        self.counting: set[int] = set()

    def fits(self, groups: list[dict[str, Any]], store: StateStore) -> bool:
        """Whether parameters, groups and states are those that the plans were built for."""
        params = store.params
        return (
            len(params) == len(self._params)
            and all(a is b for a, b in zip(params, self._params, strict=True))
            and [len(group["params"]) for group in groups] == self._sizes
            and all(plan.fits(groups, store) for plan in self.plans)
        )

    def forget(self) -> None:
        """A new step begins."""
        self.done.clear()
        self.counting.clear()
