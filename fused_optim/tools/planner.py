"""``python -m fused_optim plan``: what a rank will hold, what a checkpoint takes, how long a step takes, by format.

Parameters are made on the meta device, sharded as FSDP2 does, and given to the optimizer itself: what it would allocate
for them is what is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fused_optim.formats.dtypes import as_dtype
from fused_optim.optional import optional
from fused_optim.state.summary import aligned, shown_bytes
from fused_optim.tools.counting import FORMS, HELD, Choice, Counted
from fused_optim.tools.encoding import known_format
from fused_optim.tools.models import Named
from fused_optim.tools.muon_plan import algorithm_counts, known_names, muon_facts, muon_names, optimizer_of
from fused_optim.tools.names import MASTER_BITS, STATES, rates_of
from fused_optim.tools.simulation import sharded_parameter, simulated


class Plan(dict[str, Any]):
    """Numbers, texts, and lists and dicts of these; ``str()`` of it is for people.

    ``choices``: a row for each mix of states and masters, the smallest first, with the bytes that rank 0 holds (no rank
    holds more), those of offloaded states apart as ``host_bytes``, what is gathered of layers at most, and as ``peaks``
    the most that a rank has of all this in the forward and backward pass under FSDP2, and in the step; seconds of a
    step, of ``Checkpointer``'s saves and lost to them; ``adamw``: the bytes of torch.optim.AdamW; ``chosen``: the row
    that was asked for; ``fallbacks``: of that, as in ``optimizer.summary()``; ``muon``: what orthogonalization takes,
    as ``muon_plan.muon_facts`` says; None without Muon.
    """

    def __str__(self) -> str:
        return "\n".join(_text(self))


def plan_shapes(
    shapes: Named,
    *,
    world_size: int = 1,
    param_dtype: torch.dtype | str = torch.bfloat16,
    state_dtype: torch.dtype | str = "int8",
    master_bits: int = 32,
    machine: str | None = "h200",
    offload: float = 0.0,
    algorithm: str = "adamw",
) -> Plan:
    """Plan for a model of these shapes, each parameter sharded by rows over ``world_size`` ranks, as FSDP2 does.

    ``state_dtype``, ``master_bits``: the optimizer's. ``machine``: "h200", "h100", "a100", or a JSON file with
    ``memory_bytes_per_s``, from which times are predicted; None: no times. ``offload``: the share of the states that
    lives in host memory, the optimizer's ``offload_fraction``. ``algorithm``: "adamw"; "muon": FusedMuon, with Muon for
    hidden matrices, as far as names tell them.

    Raises ValueError for what is not known, RuntimeError where a process group is there already.
    """
    dtype = as_dtype(param_dtype)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"param_dtype: expected float32, bfloat16 or float16, got {param_dtype}")
    with simulated(world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        named = [(name, sharded_parameter(shape, dtype, mesh, [Shard(0)])) for name, shape in shapes]
        return plan_parameters(
            named,
            state_dtype=state_dtype,
            master_bits=master_bits,
            machine=machine,
            world_size=world_size,
            offload=offload,
            algorithm=algorithm,
        )


def plan_parameters(
    named: Iterable[tuple[str, Tensor]],
    *,
    state_dtype: torch.dtype | str = "int8",
    master_bits: int = 32,
    machine: str | None = "h200",
    world_size: int | None = None,
    offload: float = 0.0,
    algorithm: str = "adamw",
    muon: Collection[str] | None = None,
) -> Plan:
    """Plan for parameters as they are, such as ``model.named_parameters()``, on whatever device, sharded or not.

    This rank's shards are counted. ``muon``: the names of parameters under Muon, where names do not tell them.
    Otherwise arguments and errors as of :func:`plan_shapes`.
    """
    params = list(named)
    chosen = Choice(known_format("state_dtype", state_dtype).name, _known_bits(master_bits))
    rates = None if machine is None else rates_of(machine)
    if not 0.0 <= offload <= 1.0:
        raise ValueError(f"offload: expected a number in [0, 1], got {offload}")
    if not params:
        raise ValueError("there are no parameters to plan for")
    under_muon = muon_names(params, algorithm) if muon is None else known_names(params, muon)
    counted = Counted(params, under_muon)
    rows = [counted.row(choice, rates, offload) for choice in _choices(params, chosen)]
    rows.sort(key=lambda row: row["bytes"]["total"])
    optimizer = optimizer_of(params, under_muon, **chosen.options)
    return Plan(
        parameters=len(params),
        elements=sum(param.numel() for _, param in params),
        world_size=world_size,
        offload=offload,
        param_dtypes=sorted({str(param.dtype).removeprefix("torch.") for _, param in params}),
        chosen=next(row for row in rows if Choice(row["state_dtype"], row["master_bits"]) == chosen),
        choices=rows,
        muon=muon_facts(params, under_muon) if under_muon else None,
        adamw=counted.adamws,
        fallbacks=[each for each in optimizer.summary()["fallbacks"] if each["what"] != "backend"],
        machine=None if rates is None else {"name": rates["name"], "sources": rates["sources"]},
    )


def _known_bits(given: int) -> int:
    if given not in MASTER_BITS:
        raise ValueError(f"master_bits: expected 32 (exact FP32 masters), 24 or 0 (none), got {given!r}")
    return given


def _choices(params: Sequence[tuple[str, Tensor]], chosen: Choice) -> list[Choice]:
    """Those that differ for these parameters, and the one that was asked for."""
    dtypes = {param.dtype for _, param in params}
    bits = [32, *([24] if torch.bfloat16 in dtypes else []), *([0] if dtypes != {torch.float32} else [])]
    found = [Choice(states, each) for each in bits for states in STATES]
    return found if chosen in found else [*found, chosen]


# --- for people -------------------------------------------------------------------------------------------------------


def _text(plan: Plan) -> Iterator[str]:
    ranks = "" if plan["world_size"] is None else f" on {plan['world_size']:,} ranks"
    dtypes = ", ".join(plan["param_dtypes"])
    yield f"{plan['parameters']:,} parameters of {plan['elements']:,} elements, {dtypes}{ranks}"
    yield "Bytes of rank 0, which holds most; * the choice that was asked for:"
    extras = [("on host", "host_bytes")] if plan["offload"] else []
    extras += [("gathered", "gathered")] if plan["chosen"]["gathered"] is not None else []
    timed = plan["machine"] is not None
    titles = [title for title, _ in extras] + (["step"] if timed else [])
    table = [("", "state_dtype", "master_bits", *HELD, "total", "B/param", *titles)]
    for row in (plan["adamw"], *plan["choices"]):
        mark = "*" if row is plan["chosen"] else ""
        names = (row["state_dtype"], str(row["master_bits"])) if "state_dtype" in row else ("torch AdamW", "")
        cells = [shown_bytes(row["bytes"][key]) for key in (*HELD, "total")] + [f"{row['bytes_per_parameter']:.2f}"]
        cells += [shown_bytes(row[key]) if key in row else "" for _, key in extras]
        table.append((mark, *names, *cells, *([_time(row.get("step_s"))] if timed else [])))
    yield from aligned(table)
    chosen = plan["chosen"]
    sizes = ", ".join(f"{form} {shown_bytes(chosen['checkpoint'][form])}" for form in FORMS)
    if chosen["peaks"] is not None:
        peaks = ", ".join(f"{name} {shown_bytes(size)}" for name, size in chosen["peaks"].items())
        yield f"Peaks under FSDP2, without activations: {peaks}"
    yield f"A checkpoint of all ranks: model {shown_bytes(chosen['checkpoint']['model'])}; optimizer: {sizes}"
    if plan["muon"] is not None:
        yield from _muon_text(plan["muon"])
    if timed:
        yield from _saves(chosen)
        not_known = ", whose time is not predicted" * (chosen["step_bound"] == "products")
        yield f"A step is bound by the {chosen['step_bound']}{not_known}"
        yield f"(predicted for {plan['machine']['name']} from {', '.join(plan['machine']['sources'])})"
    for each in plan["fallbacks"]:
        names = ", ".join(each["examples"]) + ", ..." * (each["parameters"] > len(each["examples"]))
        what = f"{each['what']} {each['actual']} instead of {each['asked']}"
        yield f"{what} for {each['parameters']:,} parameters ({names}): {each['reason']}"


def _muon_text(facts: dict[str, Any]) -> Iterator[str]:
    yield algorithm_counts(facts)
    if facts["sent_bytes"]:
        largest, sent = (shown_bytes(facts[key]) for key in ("buffer_bytes", "sent_bytes"))
        yield f"A step sends {sent} of updates in {facts['buckets']:,} buckets, in send buffers of up to {largest}"
    share = f"{facts['most_work_to_mean']:.2f} times the mean"
    yield f"Five Newton-Schulz steps are {facts['most_flops'] / 1e12:.3g} TFLOP on the rank with most, {share}"


def _saves(row: dict[str, Any]) -> Iterator[str]:
    saves = [f"{form} {_time(row['lost_s'][form])} ({_time(seconds)})" for form, seconds in row["save_s"].items()]
    if saves:
        yield f"A save by Checkpointer stops training for {', '.join(saves)} until it is written to host memory"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in {"s": 1.0, "ms": 1e-3}.items():
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.0f} us"


def _label(row: dict[str, Any]) -> str:
    return f"{row['state_dtype']}, {row['master_bits']}-bit masters" if "state_dtype" in row else "torch AdamW"


def check_picture(path: str) -> None:
    """Raises ValueError where no picture can be written: no such folder, or no format of this name."""
    known = sorted(optional("matplotlib.figure", f"drawing {path}", "tools").Figure().canvas.get_supported_filetypes())
    suffix = Path(path).suffix[1:].lower()
    if not Path(path).parent.is_dir():
        raise ValueError(f"{path}: there is no folder {Path(path).parent}")
    if suffix and suffix not in known:
        raise ValueError(f"{path}: expected a file named .{', .'.join(known)}")


def draw(plan: Plan, path: str) -> None:
    """A picture of the bytes by choice. Raises ImportError without matplotlib."""
    figure_class = optional("matplotlib.figure", f"drawing {path}", "tools").Figure
    rows = [*reversed(plan["choices"]), plan["adamw"]]
    figure = figure_class(figsize=(8, 0.8 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    labels = [_label(row) + " *" * (row is plan["chosen"]) for row in rows]
    left = [0.0] * len(rows)
    for key in HELD:
        sizes = [row["bytes"][key] / 1e9 for row in rows]
        axes.barh(labels, sizes, left=left, label=key)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_xlabel("GB on rank 0, between two steps")
    axes.legend(loc="lower right")
    figure.savefig(path)
