"""The commands of ``python -m fused_optim``: their arguments, and what they print.

Each imports what it needs when it runs: ``--help`` does without torch, ``info`` without the optimizer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from fused_optim.tools.names import ALGORITHMS, LAYOUTS, MASTER_BITS, STATES, STORED_MASTERS

Arguments = argparse.Namespace
Commands = Any  # of argparse, which gives its type no name


def add_commands(commands: Commands) -> None:
    """Each parser has ``run``, which returns the exit status and raises OSError, ValueError or ImportError."""
    for add in (_add_info, _add_checksums, _add_inspect, _add_convert, _add_plan):
        add(commands)


def _add(commands: Commands, name: str, run: Callable[[Arguments], int], does: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=does, description=f"{does[0].upper()}{does[1:]}.")
    parser.set_defaults(run=run)
    return parser


def _show(found: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(found, indent=2) if as_json else found)


# --- what is installed ------------------------------------------------------------------------------------------------


def _add_info(commands: Commands) -> None:
    _add(commands, "info", _info, "which backends exist here, and why one does not")


def _info(_: Arguments) -> int:
    from fused_optim.tools.info import info

    print(info())
    return 0


# --- checksums --------------------------------------------------------------------------------------------------------


def _add_checksums(commands: Commands) -> None:
    _add(commands, "verify", _verify, "compare a checkpoint with its checksums").add_argument("path", metavar="PATH")
    _add(commands, "checksum", _checksum, "write a checkpoint's checksums").add_argument("path", metavar="PATH")


def _verify(args: Arguments) -> int:
    from fused_optim.checkpoint.verify import verify_checksums

    verify_checksums(args.path)
    print(f"{args.path}: all bytes as written")
    return 0


def _checksum(args: Arguments) -> int:
    from fused_optim.checkpoint.verify import write_checksums

    write_checksums(args.path)
    print(f"{args.path}: checksums written")
    return 0


# --- checkpoints ------------------------------------------------------------------------------------------------------

_MODEL = "the model's checkpoint, where that is another one: remainders are read together with the parameters"


def _add_inspect(commands: Commands) -> None:
    parser = _add(commands, "inspect", _inspect, "what a checkpoint holds; with --compare, how it differs from another")
    parser.add_argument("path", metavar="CHECKPOINT", help="folder, file of torch.save, or safetensors files")
    parser.add_argument("--compare", metavar="OTHER", help="exit status 1 if values or settings differ")
    parser.add_argument("--model", metavar="PATH", help=_MODEL)
    parser.add_argument("--no-values", action="store_true", help="read no more than what describes the tensors")
    parser.add_argument("--json", action="store_true")


def _inspect(args: Arguments) -> int:
    from fused_optim.tools.comparison import compare_checkpoints
    from fused_optim.tools.inspector import inspect_checkpoint

    if args.compare is None:
        _show(inspect_checkpoint(args.path, model=args.model, values=not args.no_values), args.json)
        return 0
    comparison = compare_checkpoints(args.path, args.compare, model=args.model)
    _show(comparison, args.json)
    return int(not comparison["same"])


def _add_convert(commands: Commands) -> None:
    parser = _add(commands, "convert", _convert, "write a checkpoint again in another layout")
    parser.add_argument("source", metavar="SOURCE", help="as for inspect")
    parser.add_argument("target", metavar="TARGET", help="a new folder")
    parser.add_argument("--to", required=True, choices=LAYOUTS, help="see docs/tools.md")
    for name in ("exp-avg", "exp-avg-sq", "momentum"):
        parser.add_argument(f"--{name}-dtype", metavar="DTYPE", help="of the native form; as in the source by default")
    parser.add_argument("--master", choices=STORED_MASTERS, help="of the native form; as in the source by default")
    parser.add_argument("--model", metavar="PATH", help=_MODEL)


def _convert(args: Arguments) -> int:
    from fused_optim.tools.conversion import convert_checkpoint

    formats = {name: getattr(args, name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "momentum_dtype", "master")}
    convert_checkpoint(args.source, args.target, args.to, model=args.model, **formats)
    print(f"{args.target}: {args.to}")
    return 0


# --- plans ------------------------------------------------------------------------------------------------------------


def _add_plan(commands: Commands) -> None:
    parser = _add(commands, "plan", _plan, "bytes that a rank holds, by format, beside torch.optim.AdamW's")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--params", metavar="NUMBER", help="such as 8B or 350M: matrices with whole blocks")
    source.add_argument("--hf-config", metavar="FILE", help="config.json of a Hugging Face model")
    parser.add_argument("--world-size", type=int, default=1, metavar="RANKS", help="that shard each parameter by rows")
    parser.add_argument("--param-dtype", default="bfloat16", metavar="DTYPE", help="or bf16, float16, float32")
    parser.add_argument("--state-dtype", default="int8", metavar="DTYPE", help=f"one of {', '.join(STATES)}")
    known = "adamw: FusedAdamW; muon: FusedMuon, with Muon for hidden matrices"
    parser.add_argument("--algorithm", default=ALGORITHMS[0], choices=ALGORITHMS, help=known)
    bits = "of masters: 32 (exact, in the smallest way), 24 or 0 (none)"
    parser.add_argument("--master-bits", type=int, default=32, choices=MASTER_BITS, help=bits)
    parser.add_argument("--json", action="store_true")


def _plan(args: Arguments) -> int:
    from fused_optim.tools.plan import number_of, plan, shapes_of_config, shapes_of_size

    if args.params is not None and args.algorithm == "muon":
        raise ValueError("params: which parameters are under Muon depends on their names: give --hf-config")
    shapes = shapes_of_size(number_of(args.params)) if args.params is not None else shapes_of_config(args.hf_config)
    names = ("world_size", "param_dtype", "state_dtype", "master_bits", "algorithm")
    _show(plan(shapes, **{name: getattr(args, name) for name in names}), args.json)
    return 0
