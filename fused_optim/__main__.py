"""``python -m fused_optim``: what is installed, and the checksums of checkpoints."""

from __future__ import annotations

import argparse
import sys

import torch

import fused_optim
from fused_optim.backends import build_info, forced_backend, load_engine
from fused_optim.checkpoint.checksums import verify_checksums, write_checksums


def info() -> str:
    """Which backends exist here, and why one does not."""
    lines = [f"fused_optim {fused_optim.__version__}, torch {torch.__version__}"]
    lines.append("torch  available: the reference, and the fallback on any device")
    for name in ("cpu", "cuda"):
        engine, reason = load_engine(name)
        built = build_info().get(name, {})
        shown = {key: built[key] for key in ("compiler", "isas", "archs") if built.get(key)}
        details = ", ".join(f"{key} {value}" for key, value in shown.items())
        lines.append(f"{name:<6} " + (f"available ({details})" if engine else f"not available: {reason}"))
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    lines.append(f"GPUs   {', '.join(devices) or 'none visible'}")
    if forced_backend():
        lines.append(f"FUSED_OPTIM_BACKEND={forced_backend()} forces that backend")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fused_optim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="which backends exist here, and why one does not")
    for command, does in {"verify": "compare a checkpoint with its", "checksum": "write a checkpoint's"}.items():
        commands.add_parser(command, help=f"{does} checksums").add_argument("path", metavar="PATH")
    args = parser.parse_args()
    if args.command == "info":
        print(info())
        return
    act = verify_checksums if args.command == "verify" else write_checksums
    try:
        act(args.path)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{args.path}: {'all bytes as written' if args.command == 'verify' else 'checksums written'}")


if __name__ == "__main__":
    main()
