"""Checkpoints as they are read: ours and other optimizers', of any kind of file."""
