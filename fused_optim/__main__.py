"""``python -m fused_optim``: see ``docs/tools.md``."""

from __future__ import annotations

import argparse
import sys
import warnings

import fused_optim
from fused_optim.tools.commands import add_commands

_DOCTOR = "doctor is gone: print(optimizer.summary()) names what falls back, and the command info what is missing"


def main() -> None:
    if sys.argv[1:2] == ["doctor"]:  # whatever its options were
        sys.exit(f"error: {_DOCTOR}")
    parser = argparse.ArgumentParser(prog="python -m fused_optim", description="Tools around the fused optimizer.")
    parser.add_argument("--version", action="version", version=f"fused_optim {fused_optim.__version__}")
    add_commands(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch says so where it is not installed
    try:
        status: int = args.run(args)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")  # one line, whoever wrote it
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
