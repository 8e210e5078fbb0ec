"""The states of the random number generators that training draws from, as an extra of a Checkpointer."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

RANDOM_STATES = "random_states"  # the extra's name


class RandomStates:
    """The random states of Python, NumPy (if imported) and torch: of the CPU and of all GPUs that this rank sees."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": []}
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        if (numpy := sys.modules.get("numpy")) is not None:
            kind, keys, *rest = numpy.random.get_state()
            state["numpy"] = [kind, torch.tensor(keys.tolist(), dtype=torch.int64), *rest]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the states. Those of GPUs are skipped if their number has changed, NumPy's if it is not imported."""
        version, numbers, gauss = state_dict["python"]
        random.setstate((version, tuple(numbers), gauss))
        torch.set_rng_state(state_dict["torch"])
        cuda: list[Tensor] = state_dict["cuda"]
        if cuda and len(cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(cuda)
        if "numpy" in state_dict and (numpy := sys.modules.get("numpy")) is not None:
            kind, keys, *rest = state_dict["numpy"]
            numpy.random.set_state((kind, numpy.array(keys.tolist(), dtype="uint32"), *rest))
