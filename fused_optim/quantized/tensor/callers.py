"""Who calls: parts of torch that make a weight's own shards and copies, or a user.

``w.new_zeros(rank, columns)`` may be FSDP2 that pads a shard, or a user who makes an adapter's weight, and
``w.chunk(2, 1)`` a cut between ranks, or between gates. No argument tells them apart, so the stack is looked at.
"""

from __future__ import annotations

import sys
from types import FrameType

# Who wants weights: shards, what checkpoints are staged in, what collectives write into, what ``to_empty`` puts in the
# places of parameters.
_MAKERS = (
    *("torch.distributed.fsdp.", "torch.distributed.checkpoint.", "torch.distributed._state_dict_utils."),
    *("torch.distributed.tensor.placement_types.", "torch.distributed.tensor._collective_utils."),
    "torch.nn.modules.module.",
)
# Those who pass on what others call: dispatchers of DTensors, modes and devices.
_MESSENGERS = ("fused_optim.quantized.", "torch.distributed.tensor.", "torch.utils.", "torch._", "torch.overrides.")


def wants_weight() -> bool:
    """Whether the function that torch calls now is to make a weight: see ``_MAKERS``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame).startswith(_MESSENGERS) and not _module(frame).startswith(_MAKERS):
        frame = frame.f_back
    return _module(frame).startswith(_MAKERS) or _replaces_parameters(frame)


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_globals.get('__name__')}."


def _replaces_parameters(frame: FrameType | None) -> bool:
    """Whether this is a function that ``nn.Module._apply`` was given, as ``to_empty`` gives it one."""
    caller = None if frame is None else frame.f_back
    return caller is not None and _module(caller) == "torch.nn.modules.module." and caller.f_code.co_name == "_apply"
