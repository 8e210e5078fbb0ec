"""Checkpoints as they are written: saves during training, exports for others."""
