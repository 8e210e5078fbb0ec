"""Saving and loading models with their optimizers: :class:`Checkpointer` and the stager of asynchronous saves."""

from fused_optim.checkpoint.checkpointer import Checkpointer
from fused_optim.checkpoint.stage import PinnedStager, wait_for_copies

__all__ = ["Checkpointer", "PinnedStager", "wait_for_copies"]
