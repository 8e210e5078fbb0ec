"""``python -m fused_optim plan``: what a rank will hold, what a checkpoint takes, how long a step takes, by format.

Parameters are made on the meta device, sharded as FSDP2 does, and given to the optimizer itself: what it would allocate
for them is what is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fused_optim.adam import FusedAdamW
from fused_optim.formats.dtypes import as_dtype
from fused_optim.optional import optional
from fused_optim.state.summary import aligned, shown_bytes
from fused_optim.tools.counting import FORMS, HELD, Choice, Counted
from fused_optim.tools.models import Named
from fused_optim.tools.names import ALIASES, MASTERS, STATES, machines
from fused_optim.tools.simulation import sharded_parameter, simulated


class Plan(dict[str, Any]):
    """Numbers, texts, and lists and dicts of these; ``str()`` of it is for people.

    ``choices``: a row for each mix of states and masters, with the bytes that rank 0 holds (no rank holds more), those
    of offloaded states apart as ``host_bytes``, and seconds; ``chosen``: the row that was asked for; ``fallbacks``: of
    that, as in ``optimizer.summary()``.
    """

    def __str__(self) -> str:
        return "\n".join(_text(self))


def plan_shapes(
    shapes: Named,
    *,
    world_size: int = 1,
    param_dtype: torch.dtype | str = torch.bfloat16,
    states: str = "int8",
    master: str = "remainder16",
    machine: str | None = "h200",
    offload: float = 0.0,
) -> Plan:
    """Plan for a model of these shapes, each parameter sharded by rows over ``world_size`` ranks, as FSDP2 does.

    ``states``: "float32", "bfloat16", "float16", "float8_e4m3fn" or "int8"; ``master``: "float32", "remainder16",
    "remainder8" (24-bit masters), "float16" or "none". ``machine``: whose measured bandwidths times are predicted from;
    None: no times. ``offload``: the share of the states that lives in host memory, the optimizer's
    ``offload_fraction``.

    Raises ValueError for what is not known, RuntimeError where a process group is there already.
    """
    dtype = as_dtype(param_dtype)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"param_dtype: expected float32, bfloat16 or float16, got {param_dtype}")
    if world_size < 1:
        raise ValueError(f"world_size: expected 1 or more, got {world_size}")
    with simulated(world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        named = [(name, sharded_parameter(shape, dtype, mesh, [Shard(0)])) for name, shape in shapes]
        return plan_parameters(
            named, states=states, master=master, machine=machine, world_size=world_size, offload=offload
        )


def plan_parameters(
    named: Iterable[tuple[str, Tensor]],
    *,
    states: str = "int8",
    master: str = "remainder16",
    machine: str | None = "h200",
    world_size: int | None = None,
    offload: float = 0.0,
) -> Plan:
    """Plan for parameters as they are, such as ``model.named_parameters()``, on whatever device, sharded or not.

    This rank's shards are counted. Arguments and errors as of :func:`plan_shapes`.
    """
    params = list(named)
    chosen = Choice(_known("states", states, STATES), _known("master", ALIASES.get(master, master), tuple(MASTERS)))
    rates = None if machine is None else _rates(machine)
    if not 0.0 <= offload <= 1.0:
        raise ValueError(f"offload: expected a number in [0, 1], got {offload}")
    if not params:
        raise ValueError("there are no parameters to plan for")
    counted = Counted(params)
    rows = [counted.row(choice, rates, offload) for choice in _choices(params, chosen)]
    optimizer = FusedAdamW(params, **chosen.options)
    return Plan(
        parameters=len(params),
        elements=sum(param.numel() for _, param in params),
        world_size=world_size,
        offload=offload,
        param_dtypes=sorted({str(param.dtype).removeprefix("torch.") for _, param in params}),
        chosen=next(row for row in rows if (row["states"], row["master"]) == (chosen.states, chosen.master)),
        choices=rows,
        fallbacks=[each for each in optimizer.summary()["fallbacks"] if each["what"] != "backend"],
        machine=None if rates is None else {"name": rates["name"], "sources": rates["sources"]},
    )


def _known(what: str, given: str, known: Sequence[str]) -> str:
    if given not in known:
        raise ValueError(f"{what}: expected one of {', '.join(known)}, got {given!r}")
    return given


def _choices(params: Sequence[tuple[str, Tensor]], chosen: Choice) -> list[Choice]:
    """Those that differ for these parameters, and the one that was asked for."""
    dtypes = {param.dtype for _, param in params}
    masters = ["none"] if dtypes == {torch.float32} else ["float32", "remainder16", "remainder8", "none"]
    if torch.bfloat16 not in dtypes:
        masters = [master for master in masters if not master.startswith("remainder")]
    found = [Choice(states, master) for master in masters for states in STATES]
    return found if chosen in found else [*found, chosen]


def _rates(machine: str) -> dict[str, Any]:
    found: dict[str, Any] = machines()[_known("machine", machine, tuple(machines()))]
    return found


# --- for people -------------------------------------------------------------------------------------------------------


def _text(plan: Plan) -> Iterator[str]:
    ranks = "" if plan["world_size"] is None else f" on {plan['world_size']:,} ranks"
    dtypes = ", ".join(plan["param_dtypes"])
    yield f"{plan['parameters']:,} parameters of {plan['elements']:,} elements, {dtypes}{ranks}"
    yield "Bytes of rank 0, which holds most; a line for each choice, * the one that was asked for:"
    offloads = bool(plan["offload"])
    titles = ("", "states", "masters", *HELD, "total", "B/param", *(("on host",) if offloads else ()), "gathered")
    timed = plan["machine"] is not None
    table = [(*titles, *(("step",) if timed else ()))]
    for row in plan["choices"]:
        cells = [shown_bytes(row["bytes"][key]) for key in (*HELD, "total")]
        gathered = "-" if row["gathered"] is None else shown_bytes(row["gathered"])
        on_host = [shown_bytes(row["host_bytes"])] if offloads else []
        cells += [f"{row['bytes_per_parameter']:.2f}", *on_host, gathered]
        mark = "*" if row is plan["chosen"] else ""
        table.append((mark, row["states"], row["master"], *cells, *((_time(row["step_s"]),) if timed else ())))
    yield from aligned(table)
    chosen = plan["chosen"]
    sizes = ", ".join(f"{form} {shown_bytes(chosen['checkpoint'][form])}" for form in FORMS)
    yield f"A checkpoint of all ranks: model {shown_bytes(chosen['checkpoint']['model'])}; optimizer: {sizes}"
    if timed:
        saves = ", ".join(f"{form} {_time(seconds)}" for form, seconds in chosen["save_s"].items())
        yield f"A save takes {saves}; a step is bound by the {chosen['step_bound']}"
        yield f"(predicted from measurements on {plan['machine']['name']}: {', '.join(plan['machine']['sources'])})"
    for each in plan["fallbacks"]:
        names = ", ".join(each["examples"]) + ", ..." * (each["parameters"] > len(each["examples"]))
        what = f"{each['what']} {each['actual']} instead of {each['asked']}"
        yield f"{what} for {each['parameters']:,} parameters ({names}): {each['reason']}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, size in {"s": 1.0, "ms": 1e-3}.items():
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds / 1e-6:.0f} us"


def draw(plan: Plan, path: str) -> None:
    """A picture of the bytes by choice. Raises ImportError without matplotlib."""
    figure_class = optional("matplotlib.figure", f"drawing {path}", "tools").Figure
    rows = list(reversed(plan["choices"]))
    figure = figure_class(figsize=(8, 0.8 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{row['states']}, masters {row['master']}{' *' * (row is plan['chosen'])}" for row in rows]
    left = [0.0] * len(rows)
    for key in HELD:
        sizes = [row["bytes"][key] / 1e9 for row in rows]
        axes.barh(labels, sizes, left=left, label=key)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_xlabel("GB on rank 0, between two steps")
    axes.legend(loc="lower right")
    figure.savefig(path)
