"""What optimizers are saved to and loaded from: above the optimizer."""

from fused_optim.checkpoint.checkpointer import Checkpointer
from fused_optim.checkpoint.writing.staging import PinnedStager, wait_for_copies

__all__ = ["Checkpointer", "PinnedStager", "wait_for_copies"]
