"""Summary of an optimizer: the actual formats of its states, fallbacks with their reasons, and bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_optim.adapters import adapter_of
from fused_optim.backends import backend_of, why_reference
from fused_optim.formats.masters import Master
from fused_optim.formats.states import BLOCKS, state_format
from fused_optim.memory.layout import MASTER, STEP, StateLayout
from fused_optim.rules import RuleSpec, StateSpec
from fused_optim.sharding.dtensor import SMALLEST_BLOCKED_VECTOR, has_values, local_tensor
from fused_optim.state.groups import Group
from fused_optim.state.host_states import may_be_offloaded
from fused_optim.state.param_state import ParamState
from fused_optim.state.store import StateStore

_EXAMPLES = 3  # names of parameters under each fallback


class Summary(dict[str, Any]):
    """Numbers, texts and lists of these, which can be written as JSON; ``str()`` of it is a table.

    ``formats``: a row for each mix of formats and backend, with its parameters, elements and bytes; ``states``: where
    these are, which is shown if it is not where the parameters are. ``fallbacks``: what was asked for, what there is
    instead, why, for how many parameters. ``products``: for weights that FP8 products are for, how many of each product
    run in FP8 and how many decode, and why. ``frozen``: parameters that have no states. ``host_bytes``,
    ``device_bytes``: of moments, masters and scales. All of it counts this rank's shards.
    """

    def __str__(self) -> str:
        lines = [f"{self['optimizer']}: {_amount(self)} on this rank, {shown_bytes(self['bytes'])} of states"]
        offloaded = any(row["states"] != row["device"] for row in self["formats"])
        columns = ("parameter", *self["state_names"], "master", "backend", "device", *["states"] * offloaded)
        table = [(*columns, "parameters", "elements", "bytes")]
        for row in self["formats"]:
            numbers = (f"{row['parameters']:,}", f"{row['elements']:,}", shown_bytes(row["bytes"]))
            table.append((*(row.get(key, "") for key in columns), *numbers))
        lines += ["  " + line for line in aligned(table)]
        for each in self["fallbacks"]:
            what = f"{each['what']} {each['actual']} instead of {each['asked']}"
            lines.append(f"  {what} for {_shown_examples(each)}: {each['reason']}")
        for each in self["products"]:
            total = each["fp8"] + each["decoded"]
            lines.append(f"  {each['product']} in FP8 for {each['fp8']:,} of {_plural(total)}" + _shown_reasons(each))
        if self["frozen"]["parameters"]:
            lines.append(f"  no states for {_amount(self['frozen'])}, which are frozen")
        lines.append(
            f"  {shown_bytes(self['device_bytes'])} on devices, {shown_bytes(self['host_bytes'])} in host memory"
        )
        return "\n".join(lines)


def _amount(counted: dict[str, Any]) -> str:
    return f"{_plural(counted['parameters'])} of {counted['elements']:,} elements"


def _shown_examples(counted: dict[str, Any]) -> str:
    names = ", ".join(counted["examples"]) + ", ..." * (counted["parameters"] > len(counted["examples"]))
    return f"{_plural(counted['parameters'])} ({names})"


def _shown_reasons(product: dict[str, Any]) -> str:
    reasons = [f"{_shown_examples(each)}: {each['reason']}" for each in product["reasons"]]
    return "; decoded for " + ", ".join(reasons) if reasons else ""


def _plural(count: int) -> str:
    return f"{count:,} parameter" + "s" * (count != 1)


def shown_bytes(count: float) -> str:
    """A number of bytes for people: "1.25 GB"."""
    for unit, size in {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}.items():
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, whose columns begin below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


@dataclass(frozen=True)
class _Described:
    """A parameter that has states, or will have them."""

    param: Tensor
    name: str
    layout: StateLayout
    rule: RuleSpec
    asked: dict[str, str]  # names of the formats that its param group asks for

    @property
    def bytes_on_host(self) -> int:
        all_there = local_tensor(self.param).device.type == "cpu"
        there = (*self.layout.offloaded, "scales") if self.layout.offloaded else ()
        return sum(size for name, size in self.layout.nbytes.items() if all_there or name in there)

    @property
    def row(self) -> dict[str, str]:
        local = local_tensor(self.param)
        quantized = adapter_of(self.param) is not None
        return {
            "parameter": type(local).__name__ if quantized else _name(self.param.dtype),
            **{spec.name: fmt.name for spec, fmt in zip(self.layout.specs, self.layout.formats, strict=True)},
            "master": self.layout.master.codec.name,
            "backend": backend_of(local, self.rule),
            "device": str(local.device),
            "states": str(self.layout.scales.device),
        }


def summarize(name: str, store: StateStore, rows: int | None = None) -> Summary:
    """The summary of an optimizer of the class ``name``. Of parameters without states: what they will have.

    ``rows``: of activations.
    """
    described, frozen = list(_described(store)), [param for param in store.params if _is_stateless(store, param)]
    formats: dict[tuple[str, ...], dict[str, Any]] = {}
    host = device = 0
    for entry in described:
        row = entry.row
        counted = formats.setdefault(tuple(row.values()), {**row, "parameters": 0, "elements": 0, "bytes": 0})
        away = entry.bytes_on_host
        size = sum(entry.layout.nbytes.values())
        counted["parameters"] += 1
        counted["elements"] += local_tensor(entry.param).numel()
        counted["bytes"] += size
        host, device = host + away, device + size - away
    return Summary(
        optimizer=name,
        state_names=[spec.name for spec in store.rule.states],
        **_count(entry.param for entry in described),
        bytes=host + device,
        formats=sorted(formats.values(), key=lambda row: -row["elements"]),
        fallbacks=_fallbacks(store, described),
        products=_products(store, rows),
        frozen=_count(frozen),
        host_bytes=host,
        device_bytes=device,
    )


def _is_stateless(store: StateStore, param: Tensor) -> bool:
    return param not in store and store.is_frozen(param)


def _named(store: StateStore) -> Iterator[tuple[Tensor, str, Group]]:
    """All parameters with their names and param groups."""
    names = iter(store.names)
    for group in store.groups:
        for i, (param, name) in enumerate(zip(group["params"], names, strict=False)):
            yield param, name or f"{i} of shape {tuple(param.shape)}", group


def _described(store: StateStore) -> Iterator[_Described]:
    for param, name, group in _named(store):
        if not _is_stateless(store, param):
            layout = store.layouts[param] if param in store else store.new_layout(param, group)
            asked = {spec.name: state_format(group[spec.option]).name for spec in layout.specs}
            yield _Described(param, name, layout, store.rule.for_group(group).spec, asked)


def _count(params: Iterable[Tensor]) -> dict[str, int]:
    sizes = [local_tensor(param).numel() for param in params]
    return {"parameters": len(sizes), "elements": sum(sizes)}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- fallbacks --------------------------------------------------------------------------------------------------------


def _fallbacks(store: StateStore, described: Iterable[_Described]) -> list[dict[str, Any]]:
    fallbacks: dict[tuple[str, ...], dict[str, Any]] = {}
    for param in described:
        for what, asked, actual, reason in _fallbacks_of(store, param):
            entry = {"what": what, "asked": asked, "actual": actual, "reason": reason, "parameters": 0, "examples": []}
            _count_one(fallbacks.setdefault((what, asked, actual, reason), entry), param.name)
    return list(fallbacks.values())


def _fallbacks_of(store: StateStore, described: _Described) -> Iterator[tuple[str, str, str, str]]:
    """(what, asked, actual, reason) of one parameter."""
    for name, wanted in described.asked.items():
        actual = described.layout.format(name).name
        if actual != wanted:
            yield name, wanted, actual, _why_unblocked(described.param)
    asked = store.settings.asked_master
    if asked is not None and described.layout.master is not asked:
        yield MASTER, asked.codec.name, described.layout.master.codec.name, _why_other_master(described.param, asked)
    device = local_tensor(described.param).device
    if store.offloading.is_on and adapter_of(described.param) is not None and may_be_offloaded(described.param):
        what = MASTER if described.layout.offloaded else "states"
        yield what, "host memory", str(device), "it is quantized, and encoded from its master"
    device_type = device.type
    if has_values(described.param) and backend_of(local_tensor(described.param), described.rule) == "torch":
        yield "backend", device_type, "torch", why_reference(device_type, described.rule)


def _products(store: StateStore, rows: int | None) -> list[dict[str, Any]]:
    """By product: for how many weights, frozen ones too, it runs in FP8, and for which it does not, and why."""
    if "fused_optim.quantized" not in sys.modules:  # which takes a while to import: then there are no such weights
        return []
    from fused_optim.quantized.fp8.usage import unsupported_reasons

    products: dict[str, dict[str, Any]] = {}
    for param, name, _ in _named(store):
        for product, why in unsupported_reasons(param, rows).items():
            counted = products.setdefault(product, {"product": product, "fp8": 0, "decoded": 0, "reasons": {}})
            counted["fp8" if why is None else "decoded"] += 1
            if why is not None:
                entry = {"reason": why, "parameters": 0, "examples": []}
                _count_one(counted["reasons"].setdefault(why, entry), name)
    return [{**row, "reasons": list(row["reasons"].values())} for row in products.values()]


def _count_one(counted: dict[str, Any], name: str) -> None:
    counted["parameters"] += 1
    counted["examples"] += [name] if len(counted["examples"]) < _EXAMPLES else []


def _why_unblocked(param: Tensor) -> str:
    if param.dim() < 2:
        return f"it has one dim and fewer than {SMALLEST_BLOCKED_VECTOR} elements"
    return f"no block of {', '.join(map(str, BLOCKS))} elements divides the rows of all shards"


def _why_other_master(param: Tensor, asked: Master) -> str:
    if adapter_of(param) is not None:
        return "it is quantized, and remainders complete BF16 parameters only"
    if param.dtype == torch.float32:
        return "an FP32 parameter is its own master"
    if asked.is_remainder:
        return "remainders complete BF16 parameters only"
    return _why_unblocked(param)


# --- in one line ------------------------------------------------------------------------------------------------------


def short_description(name: str, store: StateStore) -> str:
    """``FusedAdamW(291 parameters, lr=0.001, exp_avg_dtype=int8, ...)``: settings, with all groups' where they differ.

    Nothing is read from a device.
    """
    parts = [_plural(len(store.params)) + f" in {len(store.groups)} groups" * (len(store.groups) > 1)]
    for key in ("lr", *store.rule.repr_keys, "weight_decay", *store.format_options, STEP):
        values = list(dict.fromkeys(_short(group[key]) for group in store.groups if key in group))
        if not values:
            continue
        shown = values if len(values) <= _EXAMPLES else [*values[:_EXAMPLES], "..."]
        parts.append(f"{key}={' | '.join(shown)}")
    if (asked := store.settings.asked_master) is not None:
        parts.append(f"masters={asked.codec.name}")
    return f"{name}({', '.join(parts)})"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{float(value):g}" if value.device.type == "cpu" else f"tensor on {value.device}"
    return f"{value:g}" if isinstance(value, float) else str(value).removeprefix("torch.")


# --- choices without effect -------------------------------------------------------------------------------------------


def choices_without_effect(store: StateStore, ignored: Mapping[int, Sequence[str]]) -> list[str]:
    """Options that no parameter follows, each with a remedy. States must exist.

    ``ignored``: options of the whole optimizer that param groups were given, by their numbers.
    """
    states = list(store)
    asked = store.settings.asked_master
    texts = [
        f"param group {number}: {', '.join(others)} has no effect there: it is an option of the whole optimizer, an "
        "argument of its constructor"
        for number, others in ignored.items()
        if others
    ]
    if states and asked is not None and not any(_may_have(state.param, asked) for state in states):
        option = "store_param_remainders=True" if asked.is_remainder else "master_weight_dtype=torch.float16"
        dtypes = ", ".join(sorted({_name(state.param.dtype) for state in states}))
        texts.append(
            f"{option} has no effect: none of the {_plural(len(states))} has such a master (they are {dtypes}). FP32 "
            "parameters are their own masters, and remainders complete BF16 parameters only. Train BF16 parameters to "
            "use it (under Accelerate with mixed_precision='no', since 'bf16' makes them FP32 first), or leave it out"
        )
    on_host = all(local_tensor(state.param).device.type == "cpu" and not state.layout.offloaded for state in states)
    if states and store.offloading.is_on and on_host:
        texts.append(
            f"offload_states=True has no effect: all of the {_plural(len(states))} are in host memory, where their "
            "states are anyway"
        )
    lost = [spec for spec in store.rule.states if states and _is_lost(spec, store, states)]
    if lost:
        texts.append(
            f"{' and '.join(spec.option for spec in lost)} without effect: all of the {_plural(len(states))} keep "
            f"FP32 moments. No block of {', '.join(map(str, BLOCKS))} elements divides their rows, or they have one "
            f"dim and fewer than {SMALLEST_BLOCKED_VECTOR} elements; optimizer.summary() lists them"
        )
    return texts


def _is_lost(spec: StateSpec, store: StateStore, states: list[ParamState]) -> bool:
    """True if all groups ask for formats with blocks and no parameter has one, small vectors apart."""
    states = [state for state in states if spec in state.layout.specs]
    asked = [state_format(group[spec.option]) for group in store.groups if group["params"] and spec.option in group]
    has_matrices = any(state.param.dim() > 1 for state in states)
    is_any_scaled = any(state.layout.format(spec.name).scaled for state in states)
    return has_matrices and all(fmt.scaled for fmt in asked) and not is_any_scaled


def _may_have(param: Tensor, master: Master) -> bool:
    """True if a parameter of this dtype may have such a master, whatever its shape."""
    if adapter_of(param) is not None:
        return not master.is_remainder
    return param.dtype == torch.bfloat16 if master.is_remainder else param.dtype != torch.float32
