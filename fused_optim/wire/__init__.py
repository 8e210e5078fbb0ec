"""Transport of changed weights: the form of the files, and functions that apply them. Needs only torch."""

from fused_optim.wire.apply import Box, apply_changes, fused_rows
from fused_optim.wire.form import Changes, ChangesFile, read_changes, write_changes

__all__ = ["Box", "Changes", "ChangesFile", "apply_changes", "fused_rows", "read_changes", "write_changes"]
