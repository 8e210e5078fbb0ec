"""Who calls: torch, which makes a weight's own shards and copies, safetensors, or a user. The only place that looks.

``w.new_zeros(rows, columns)`` may be FSDP2 that pads a shard, or a user who makes an adapter's weight.
``w.chunk(2, 1)`` may be a cut between ranks, which has to be possible, or between gates, which may be any view.
``torch.empty_like(w)`` may be memory that a collective scatters into, or anything. FSDP2, DTensor and the stagers of
checkpoints have no hook there, and pass the same arguments, in the same modes, as users do. To be told by a flag, about
ten private functions of torch would have to be replaced, others in each version. So the stack is read, which changes
nothing.
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


def is_safetensors() -> bool:
    """Whether it is safetensors that calls the function which asks this, for an error that says what to do.

    It takes an address for the data, and refuses 0 itself, without a name. To torch's stagers 0 says that a tensor has
    no memory of its own, and that they are to copy what it consists of.
    """
    return _module(sys._getframe(2)).startswith("safetensors.")


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else f"{frame.f_globals.get('__name__')}."


def _replaces_parameters(frame: FrameType | None) -> bool:
    """Whether this is a function that ``nn.Module._apply`` was given, as ``to_empty`` gives it one."""
    caller = None if frame is None else frame.f_back
    return caller is not None and _module(caller) == "torch.nn.modules.module." and caller.f_code.co_name == "_apply"
