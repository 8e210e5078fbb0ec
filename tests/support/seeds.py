"""Seeds of torch's generators, in tests."""

from __future__ import annotations

import torch


def seed_what_is_there() -> None:
    """From now on ``torch.manual_seed`` leaves out the kinds of devices that are not there.

    It would note down for each what to do if one appeared, and the stack, which takes several ms where that is deep.
    """
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _seed_none  # type: ignore[attr-defined]


def _seed_none(seed: int) -> None:
    pass
