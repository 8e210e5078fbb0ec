"""Counts what a rank holds of parameters and their states, what checkpoints take, and how long that takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fused_optim.formats.masters import Master
from fused_optim.memory.layout import MASTER, StateLayout
from fused_optim.options.reading import CheckpointFormat
from fused_optim.sharding.dtensor import cut_by_rows, local_tensor
from fused_optim.state.param_state import offloadable
from fused_optim.tools.muon_plan import optimizer_of
from fused_optim.tools.peaks import Units, backward_peak, forward_peak, ranks_of

FORMS: tuple[CheckpointFormat, ...] = get_args(CheckpointFormat)
SAVED_FORMS = ("unscaled", "native")  # whose saves were measured
HELD = ("parameters", "gradients", "masters", "states", "scales")


@dataclass(frozen=True)
class Choice:
    """The format of all states, by name, and the bits of masters."""

    state_dtype: str
    master_bits: int

    @property
    def options(self) -> dict[str, Any]:
        return {"state_dtype": self.state_dtype, "master_bits": self.master_bits}


class Counted:
    """Parameters, those that are alike together. ``muon``: the names of those under Muon."""

    def __init__(self, params: Sequence[tuple[str, Tensor]], muon: Collection[str] = ()) -> None:
        alike: dict[Any, list[tuple[str, Tensor]]] = {}
        for name, param in params:
            placement = (param.placements, param.device_mesh) if isinstance(param, DTensor) else ()
            kind = param.dtype, param.requires_grad, type(local_tensor(param))
            alike.setdefault((name in muon, tuple(param.shape), *kind, *placement), []).append((name, param))
        self._examples, self._muon = [members[0] for members in alike.values()], muon
        self._alike = [(members[0][1], len(members)) for members in alike.values()]
        self._count = len(params)
        self._units, self._ranks = Units.of([_unit_sizes(*named) for named in params]), ranks_of([p for _, p in params])
        self._dtypes = {param.dtype for _, param in params}

    def row(self, choice: Choice, rates: dict[str, Any] | None, offload: float = 0.0) -> dict[str, Any]:
        """Bytes that this rank holds, and that a checkpoint of all ranks takes; seconds.

        ``offload``: the share of the states that lives in host memory.
        """
        held: Counter[str] = Counter(dict.fromkeys(HELD, 0))
        saved: Counter[str] = Counter(dict.fromkeys((*FORMS, "model"), 0))
        moved = host = 0
        for param, layout, count in self._layouts(choice):
            own = _held_bytes(param, layout)
            away = {key: int(offload * own[key]) for key in _offloaded(param, layout)}
            host += count * sum(away.values())
            held.update({key: count * (size - away.get(key, 0)) for key, size in own.items()})
            saved["model"] += count * _whole_bytes(param)
            if layout is not None:
                saved.update({form: count * _saved_bytes(param, layout, form) for form in FORMS})
                moved += count * _moved_bytes(own, layout)
        total = sum(held.values())
        row: dict[str, Any] = {**choice.options, "bytes": {**held, "total": total}, "host_bytes": host}
        row["bytes_per_parameter"] = total / max(1, self._elements)
        row |= {"gathered": self._gathered, "peaks": self._peaks(held)}
        row["checkpoint"] = dict(saved)
        measured = f"{self._master(choice.master_bits)}/{choice.state_dtype}"
        if rates is None:
            return row
        row |= _seconds(measured, moved, host, self._count, saved, self._share, rates)
        return row | ({"step_s": None, "step_bound": "products"} if self._muon else {})  # nobody has measured these

    def _master(self, bits: int) -> str:
        """What these masters are called in the results."""
        if not bits or self._dtypes == {torch.float32}:
            return "none"
        remainders = {32: "remainder16", 24: "remainder8"}
        return remainders[bits] if torch.bfloat16 in self._dtypes else "float32"

    @property
    def adamws(self) -> dict[str, Any]:
        """The same of ``torch.optim.AdamW``, whose states have the parameters' dtype, and which has no masters."""
        held: Counter[str] = Counter(dict.fromkeys(HELD, 0))
        for param, count in self._alike:
            plain = _plain_nbytes(param)
            held["parameters"] += count * _nbytes(param)
            if param.requires_grad:
                held.update({"gradients": count * plain, "states": 2 * count * plain})
        total = sum(held.values())
        per_parameter = total / max(1, self._elements)
        found = {"bytes": {**held, "total": total}, "bytes_per_parameter": per_parameter, "gathered": self._gathered}
        return found | {"peaks": self._peaks(held)}

    @property
    def _gathered(self) -> int | None:
        return forward_peak(self._units, self._ranks) if self._units.layers and self._ranks else None

    def _peaks(self, held: Mapping[str, int]) -> dict[str, int] | None:
        """Of this rank's memory in a training step under FSDP2, without activations. None where nothing is sharded."""
        if not self._units.layers or not self._ranks:
            return None
        total = sum(held.values())
        kept = total - held["gradients"]  # beside which the backward pass makes them
        forward, backward = (peak(self._units, self._ranks) for peak in (forward_peak, backward_peak))
        return {"forward": kept + forward, "backward": kept + backward, "step": total}

    def _layouts(self, choice: Choice) -> Iterator[tuple[Tensor, StateLayout | None, int]]:
        """What the optimizer would keep of each kind of parameter; nothing of frozen ones."""
        optimizer = optimizer_of(self._examples, self._muon, **choice.options)
        store = optimizer.store
        groups = {param: group for group in store.groups for param in group["params"]}
        for param, count in self._alike:
            yield param, None if store.is_frozen(param) else store.new_layout(param, groups[param]), count

    @property
    def _elements(self) -> int:
        return sum(count * local_tensor(param).numel() for param, count in self._alike)

    @property
    def _share(self) -> float:
        """This rank's part of the elements."""
        whole = sum(count * param.numel() for param, count in self._alike)
        return self._elements / max(1, whole)


def _nbytes(param: Tensor) -> int:
    """Of this rank's shard; of a wrapper, such as a quantized one, all tensors in it."""
    local: Any = local_tensor(param.detach())
    is_wrapper = is_traceable_wrapper_subclass(local)
    parts = [getattr(local, name) for name in local.__tensor_flatten__()[0]] if is_wrapper else [local]
    return sum(part.numel() * part.element_size() for part in parts)


def _plain_nbytes(param: Tensor) -> int:
    """Of a plain tensor like this rank's shard, such as its gradient."""
    return local_tensor(param).numel() * param.element_size()


def _whole_bytes(param: Tensor) -> int:
    local = local_tensor(param).numel()
    return math.ceil(_nbytes(param) / local * param.numel()) if local else param.numel() * param.element_size()


def _held_bytes(param: Tensor, layout: StateLayout | None) -> dict[str, int]:
    """By what they are for; gradients have the parameter's dtype."""
    held = dict.fromkeys(HELD, 0) | {"parameters": _nbytes(param)}
    if layout is not None:
        sizes = layout.nbytes
        held["gradients"] = _plain_nbytes(param)
        held["masters"] = sizes.get(MASTER, 0)
        held["states"] = sum(sizes[spec.name] for spec in layout.specs)
        held["scales"] = sizes["scales"]
    return held


def _offloaded(param: Tensor, layout: StateLayout | None) -> Iterator[str]:
    """What of these may live in host memory."""
    states = () if layout is None else offloadable(param, layout.specs, layout.master)
    yield from (["masters"] if MASTER in states else []) + (["states", "scales"] if states else [])


def _unit_sizes(name: str, param: Tensor) -> tuple[str, int, int]:
    """A parameter's name, and the bytes of its whole values and gradient."""
    return name, _whole_bytes(param), param.numel() * param.element_size() if param.requires_grad else 0


def _moved_bytes(own: dict[str, int], layout: StateLayout) -> int:
    """What a step reads and writes. Parameters are written, and read where they are the master or a part of it."""
    is_read = layout.master is Master.PARAMETER or layout.master.is_remainder
    states = own["masters"] + own["states"] + own["scales"]
    return own["gradients"] + 2 * states + own["parameters"] * (2 if is_read else 1)


def _saved_bytes(param: Tensor, layout: StateLayout, form: str) -> int:
    """Of a parameter's states in a checkpoint of all ranks; see ``state_dict.converted``."""
    count, rows = param.numel(), param.shape[0] if param.dim() else 1
    if form == "torch":
        return sum(4 * count for _ in layout.specs) + (4 if len(layout.specs) > 1 else 0)  # Muon has no step
    packed = form == "native" and cut_by_rows(param)
    scales = 4 * count // layout.geometry.block if layout.geometry.block else 0
    total = 0
    for spec, fmt in zip(layout.specs, layout.formats, strict=True):
        size = fmt.dtype(spec.kind).itemsize
        if fmt.scaled:
            total += size * count + scales if packed else 4 * count
        else:
            total += (size if form == "native" else 4) * count
    if layout.master.is_remainder and packed:
        return total + layout.master.dtype.itemsize * count + 4 * rows
    return total + (0 if layout.master is Master.PARAMETER else 4 * count)


def _seconds(
    measured: str, moved: int, away: int, count: int, saved: Counter[str], share: float, rates: dict[str, Any]
) -> dict[str, Any]:
    """Of a step, and of a save of this rank's share of the model and the optimizer.

    ``measured``: the name of the choice in the results. A step is bound by memory, by the host or, where ``away`` bytes
    of states live in its memory, by the link to it. What nobody has measured is None.
    """
    known = rates["share_of_copy"]
    alike = [value for key, value in known.items() if key.partition("/")[2] == measured.partition("/")[2]]
    bounds = {
        "memory": moved / (rates["copy_bytes_per_s"] * known.get(measured, min(alike))),
        "host": count * rates["host_s_per_parameter"],
        "link": away / rates.get("link_bytes_per_s", math.inf),
    }
    slowest = max(bounds, key=bounds.__getitem__)
    known_link = not away or "link_bytes_per_s" in rates
    sizes = {form: share * (saved["model"] + saved[form]) for form in SAVED_FORMS}
    times = {"save_s": rates.get("save_bytes_per_s", {}), "lost_s": rates.get("lost_bytes_per_s", {})}
    return {
        "step_s": bounds[slowest] if known_link else None,
        "step_bound": slowest if known_link else "link",
        **{key: {form: sizes[form] / rate for form, rate in by_form.items()} for key, by_form in times.items()},
    }
