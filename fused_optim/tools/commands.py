"""The commands of ``python -m fused_optim``: their arguments, and what they print.

Each imports what it needs when it runs: ``--help`` does without torch, ``info`` without the optimizer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from fused_optim.optional import optional
from fused_optim.tools.names import ALGORITHMS, LAYOUTS, MASTER_BITS, STATES, STORED_MASTERS, machine_names

Arguments = argparse.Namespace
Commands = Any  # of argparse, which gives its type no name


def add_commands(commands: Commands) -> None:
    """Each parser has ``run``, which returns the exit status and raises OSError, ValueError or ImportError."""
    for add in (_add_info, _add_checksums, _add_inspect, _add_convert, _add_plan, _add_doctor):
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
    from fused_optim.checkpoint.storage.checksums import verify_checksums

    verify_checksums(args.path)
    print(f"{args.path}: all bytes as written")
    return 0


def _checksum(args: Arguments) -> int:
    from fused_optim.checkpoint.storage.checksums import write_checksums

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


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", type=int, default=1, metavar="RANKS", help="that shard each parameter by rows")
    parser.add_argument("--param-dtype", default="bfloat16", metavar="DTYPE", help="or bf16, float16, float32")
    parser.add_argument("--state-dtype", default="int8", metavar="DTYPE", help=f"one of {', '.join(STATES)}")
    known = "adamw: FusedAdamW; muon: FusedMuon, with Muon for hidden matrices"
    parser.add_argument("--algorithm", default=ALGORITHMS[0], choices=ALGORITHMS, help=known)
    bits = "of masters: 32 (exact, in the smallest way), 24 or 0 (none)"
    parser.add_argument("--master-bits", type=int, default=32, choices=MASTER_BITS, help=bits)


def _add_plan(commands: Commands) -> None:
    parser = _add(
        commands, "plan", _plan, "what ranks and checkpoints will hold by format, and how long steps will take"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--params", metavar="NUMBER", help="such as 8B or 350M: matrices with whole blocks")
    source.add_argument("--hf-config", metavar="FILE", help="config.json of a Hugging Face model")
    source.add_argument("--safetensors", metavar="PATH", help="safetensors files of a model, or their index")
    _add_choice(parser)
    offload = "share of the states that lives in host memory (offload_fraction)"
    parser.add_argument("--offload", type=float, default=0.0, metavar="SHARE", help=offload)
    known = f"{', '.join(machine_names())}, none, or a JSON file with memory_bytes_per_s of another one"
    parser.add_argument("--machine", default="h200", help=f"whose times are predicted: {known}")
    parser.add_argument("--picture", metavar="FILE", help="draw it, such as plan.svg")
    parser.add_argument("--json", action="store_true")


def _plan(args: Arguments) -> int:
    from fused_optim.tools.models import number_of, of_config, of_number, of_safetensors
    from fused_optim.tools.planner import check_picture, draw, plan_shapes

    if args.picture is not None:  # before the work, not after it
        optional("matplotlib", "plan --picture", "tools")
        check_picture(args.picture)
    if args.params is not None and args.algorithm == "muon":
        raise ValueError("params: Muon's work depends on the shapes of matrices: give --hf-config or --safetensors")
    if args.params is not None:
        shapes = of_number(number_of(args.params))
    else:
        shapes = of_config(args.hf_config) if args.hf_config is not None else of_safetensors(args.safetensors)
    plan = plan_shapes(
        shapes,
        world_size=args.world_size,
        param_dtype=args.param_dtype,
        state_dtype=args.state_dtype,
        master_bits=args.master_bits,
        machine=None if args.machine == "none" else args.machine,
        offload=args.offload,
        algorithm=args.algorithm,
    )
    _show(plan, args.json)
    if args.picture is not None:
        draw(plan, args.picture)
    return 0


# --- doctor -----------------------------------------------------------------------------------------------------------


def _add_doctor(commands: Commands) -> None:
    does = "what falls back for a model or a checkpoint, what it costs, and what to change"
    parser = _add(commands, "doctor", _doctor, does)
    model = "MODULE:FUNCTION or FILE.py:FUNCTION that returns the model, or a checkpoint, as for inspect"
    parser.add_argument("target", metavar="TARGET", help=model)
    _add_choice(parser)
    parser.set_defaults(param_dtype=None)  # a model has its own
    parser.add_argument("--json", action="store_true")


def _doctor(args: Arguments) -> int:
    from fused_optim.tools.doctor import diagnose_target

    names = ("world_size", "param_dtype", "state_dtype", "master_bits", "algorithm")
    choice = {key: getattr(args, key) for key in names}
    _show(diagnose_target(args.target, **choice), args.json)
    return 0
