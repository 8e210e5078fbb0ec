"""``python -m fused_optim convert``: a checkpoint in another layout, parameter by parameter, in host memory.

What is written is planned first, as entries that know their shapes and how to get their values; these are read,
decoded, encoded and written one after the other. States are encoded as by an optimizer that loads them: rounded to
nearest.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fused_optim.adapters import adapter_of
from fused_optim.checkpoint.folders import PathLike
from fused_optim.checkpoint.open import TensorInfo, open_checked
from fused_optim.checkpoint.plan import NOT_SETTINGS, read_steps
from fused_optim.formats.dtypes import as_dtype
from fused_optim.formats.masters import Master
from fused_optim.formats.states import STATE_FORMATS
from fused_optim.memory.layout import MASTER, STEP
from fused_optim.muon import ALGORITHM
from fused_optim.options.reading import CheckpointFormat
from fused_optim.rules import ADAM, StateSpec, rule_of
from fused_optim.sharding.model_files import safetensors_writer
from fused_optim.state.groups import DESCRIPTION, KEYED_BY_NAMES, saved_group
from fused_optim.state.state_dict import Options, converted
from fused_optim.state.torch_form import torch_group, torch_states, without_adamws_keys
from fused_optim.tools.encoding import Encoded, Form, Place, forget, known_format
from fused_optim.tools.entries import Entry, write_folder, write_safetensors
from fused_optim.tools.names import LAYOUTS, STORED_MASTERS, Layout
from fused_optim.tools.progress import progress
from fused_optim.tools.saved_optimizer import SavedOptimizer, SavedState, read_optimizer
from fused_optim.tools.torch_muon import is_muons, muon_group, muon_states, our_group


@dataclass(frozen=True)
class _Wanted:
    """The requested target. ``formats``: dtypes by the states' options;

    None: as in the source; the same for ``master``.
    """

    layout: Layout
    formats: Mapping[str, torch.dtype | None]
    master: Master | None


def convert_checkpoint(
    source: PathLike,
    target: PathLike,
    layout: Layout,
    *,
    exp_avg_dtype: torch.dtype | str | None = None,
    exp_avg_sq_dtype: torch.dtype | str | None = None,
    momentum_dtype: torch.dtype | str | None = None,
    master: str | None = None,
    model: PathLike | None = None,
) -> None:
    """Write the checkpoint ``source`` again, in another layout, into the new folder ``target``.

    ``layout``: "unscaled" and "native" are the forms that optimizers here save, "torch" is torch.optim.AdamW's and, of
    parameters under Muon, torch.optim.Muon's, all of them folders of torch.distributed.checkpoint with checksums.
    "safetensors": the unscaled form as safetensors files, which this reads again. "masters": the masters alone under
    the model's names, as Hugging Face's sharded models.

    ``exp_avg_dtype``, ``exp_avg_sq_dtype``, ``momentum_dtype``, ``master`` ("float32", "float16", "remainder16",
    "remainder8"): of the native form; as in the source by default. ``model``: the model's checkpoint, where that is
    another one and remainders need the parameters. Whatever is in the source beside the optimizer's states goes with
    it.

    The memory that this takes is a few times that of the largest tensor. Raises FileExistsError where there is
    something in ``target``, ImportError where safetensors is needed and missing, and ValueError or OSError for what
    cannot be converted; then nothing is left behind.
    """
    formats = {
        "exp_avg_dtype": exp_avg_dtype,
        "exp_avg_sq_dtype": exp_avg_sq_dtype,
        "momentum_dtype": momentum_dtype,
    }
    wanted = _Wanted(layout, {name: _checked_dtype(name, value) for name, value in formats.items()}, _master(master))
    _check(wanted, target)
    optimizer = read_optimizer(open_checked(source), None if model is None else open_checked(model))
    if optimizer is None:
        raise ValueError(f"{source} holds no states of an optimizer, so there is nothing to convert")
    folder = Path(target)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        _Conversion(optimizer, wanted).write(unfinished)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        forget()


def _check(wanted: _Wanted, target: PathLike) -> None:
    if wanted.layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {wanted.layout!r}")
    if wanted.layout != "native" and (wanted.master is not None or any(wanted.formats.values())):
        raise ValueError(f"formats are chosen for the native form only, not for {wanted.layout!r}")
    folder = Path(target)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{target} is there already: give a new folder")
    if wanted.layout in ("safetensors", "masters"):
        safetensors_writer(f"convert --to {wanted.layout}", "tools")


def _checked_dtype(name: str, given: torch.dtype | str | None) -> torch.dtype | None:
    if given is not None:
        known_format(name, given)
    return as_dtype(given)


def _master(given: str | None) -> Master | None:
    if given is not None and given not in STORED_MASTERS:
        raise ValueError(f"master: expected one of {', '.join(STORED_MASTERS)}, got {given!r}")
    return None if given is None else Master[given.upper()]


class _Conversion:
    """Plans the entries of a target, and writes them."""

    def __init__(self, optimizer: SavedOptimizer, wanted: _Wanted) -> None:
        self._optimizer = optimizer
        self._source = optimizer.source
        self._contents = optimizer.contents
        self._wanted = wanted
        self._ids = {name: id_ for id_, name in optimizer.names.items()}
        self._steps = read_steps(self._source, self._contents)
        self._groups_prefix = f"{self._contents.prefix}param_groups."
        self._packs = False  # some state is in native form, which those in FP32, BF16 or FP16 are not

    def write(self, folder: Path) -> None:
        if self._wanted.layout == "masters":
            write_safetensors(_with_progress(self._masters()), folder, "model")
        elif self._wanted.layout == "safetensors":
            write_safetensors(_with_progress(self._entries()), folder, "checkpoint")
        else:
            write_folder(_with_progress(self._entries()), folder)

    def _masters(self) -> dict[str, Entry]:
        """Entries of the FP32 masters; for parameters without master, of the parameters in FP32."""
        entries: dict[str, Entry] = {}
        for name in self._optimizer.names.values():
            state = self._optimizer.states.get(name, {}).get(MASTER)
            weight = self._optimizer.weights.get(name)
            if state is not None:
                entries[name] = Entry((name,), state.values, TensorInfo(state.shape, torch.float32))
            elif weight is not None:
                entries[name] = Entry((name,), weight.values, TensorInfo(weight.info.shape, torch.float32))
            else:
                raise ValueError(f"{name}: neither its master nor itself is there; give the model's checkpoint, too")
        return entries

    def _entries(self) -> dict[str, Entry]:
        """All entries of the target, by flat key."""
        self._check_numbers()
        entries = self._others()
        for name, states in self._optimizer.states.items():
            self._check_states(name, states)
            encoded = Encoded(states, self._master(name, states), self._formats(name, states), self._form(name))
            for inner, entry in encoded.entries():
                self._packs |= self._wanted.layout == "native" and len(inner) > 1
                entries.update([self._placed(("state", self._ids[name], *inner), entry)])
            self._replace_weight(entries, name, encoded)
        for place, value in self._groups():
            entries.update([self._placed(place, Entry((), partial(_itself, value)))])
        return entries

    def _placed(self, place: Place, entry: Entry) -> tuple[str, Entry]:
        """An entry and its key."""
        before = tuple(self._contents.prefix.split(".")[:-1])
        is_number = place[0] == "param_groups" or self._contents.is_numbered
        id_ = int(place[1]) if is_number and self._contents.order else place[1]
        inner = (place[0], id_, *place[2:]) if self._contents.order else (".".join(place),)
        return self._contents.prefix + ".".join(place), replace(entry, place=(*before, *inner))

    def _others(self) -> dict[str, Entry]:
        """Entries of everything else in the source, which is copied."""
        own = self._contents.state_keys
        return {
            key: Entry(self._source.place(key), partial(self._source.value, key), info)
            for key, info in self._source.entries.items()
            if key not in own and not key.startswith(self._groups_prefix)
        }

    # --- states -------------------------------------------------------------------------------------------------

    def _form(self, name: str) -> Form:
        if self._wanted.layout == "torch" and is_muons(self._group_of(name)):
            return muon_states
        if self._wanted.layout == "torch":
            return partial(torch_states, step=self._steps[self._ids[name]], device=None)
        form: CheckpointFormat = "native" if self._wanted.layout == "native" else "unscaled"
        return partial(converted, options=Options(form, None, False))

    def _group_of(self, name: str) -> dict[str, Any]:
        """The settings of a parameter's group, as far as they are there."""
        return self._contents.settings.get(self._ids[name], {})

    def _check_states(self, name: str, states: Mapping[str, SavedState]) -> None:
        where, specs = self._source.path, rule_of(self._group_of(name)).states
        if lacking := [spec.name for spec in specs if spec.name not in states]:
            raise ValueError(f"{name}: {where} lacks its {' and '.join(lacking)}")
        is_muon = is_muons(self._group_of(name))
        if self._wanted.layout == "torch" and specs != ADAM.states and not is_muon:
            states_found = " and ".join(spec.name for spec in specs)
            raise ValueError(
                f"{name}: {where} has its {states_found}, and 'torch' is torch.optim.AdamW's and Muon's layout"
            )
        if self._wanted.layout == "torch" and is_muon and len(states[specs[0].name].shape) != 2:
            raise ValueError(
                f"{name}: torch.optim.Muon takes parameters with two dims only, so it cannot continue this run"
            )
        if self._ids[name] not in self._steps and not is_muon:
            raise ValueError(f"{name}: {where} has its states but no step, neither its own nor its param group's")

    def _check_numbers(self) -> None:
        """Raise ValueError for numbered parameters of Muon and AdamW, which share a state dict by names only."""
        kinds = {*map(is_muons, self._contents.settings.values())}
        if self._wanted.layout == "torch" and self._contents.is_numbered and len(kinds) > 1:
            raise ValueError(
                f"{self._source.path} numbers its parameters, and the layout 'torch' is of two optimizers, Muon and "
                "AdamW: save with torch.distributed.checkpoint.state_dict, which names them"
            )

    def _formats(self, name: str, states: Mapping[str, SavedState]) -> dict[StateSpec, torch.dtype]:
        """Formats of a parameter's states: the requested one, the run's option, or the stored one;

        FP32 in other layouts.
        """
        settings = self._group_of(name)
        formats = dict.fromkeys(rule_of(settings).states, torch.float32)
        for spec in formats if self._wanted.layout == "native" else ():
            chosen = self._wanted.formats[spec.option] or as_dtype(settings.get(spec.option))
            chosen = chosen or as_dtype(states[spec.name].format)
            formats[spec] = chosen if chosen in STATE_FORMATS else torch.float32
        return formats

    def _master(self, name: str, states: Mapping[str, SavedState]) -> Master:
        if MASTER not in states or self._wanted.layout == "torch":
            return Master.PARAMETER
        if self._wanted.layout != "native":
            return Master.FLOAT32
        stored = {kind.codec.name: kind for kind in Master}
        chosen = self._wanted.master or stored.get(states[MASTER].format, Master.FLOAT32)
        weight = self._optimizer.weights.get(name)
        if not chosen.is_remainder:
            return chosen
        if weight is None:
            text = (
                "remainders complete BF16 parameters, and the parameter is not there; give the model's checkpoint, too"
            )
            raise ValueError(f"{states[MASTER]}: {text}")
        plain = weight.info.dtype == torch.bfloat16 and adapter_of(weight.value()) is None
        return chosen if plain else Master.FLOAT32

    def _replace_weight(self, entries: dict[str, Entry], name: str, encoded: Encoded) -> None:
        """Write the parameter that new remainders were split from, even if the source's was rounded differently."""
        weight = self._optimizer.weights.get(name)
        if encoded.master.is_remainder and weight is not None and weight.source is self._source:
            entries[weight.key] = replace(entries[weight.key], read=encoded.parameter)

    # --- param groups -------------------------------------------------------------------------------------------

    def _groups(self) -> Iterator[tuple[Place, Any]]:
        """(place, value) of the settings, numbered or by parameter as in the source."""
        for number, ids in enumerate(self._contents.order):
            for key, value in self._settings(ids).items():
                yield ("param_groups", str(number), key), value
            params = [*map(int, ids)] if self._contents.is_numbered else ids
            yield ("param_groups", str(number), "params"), params
        first = f"{self._groups_prefix}{next(iter(self._contents.settings), '')}."
        is_flat = any(key.startswith(first) for key in self._source.entries)
        for id_ in self._contents.settings if is_flat else ():
            for key, value in self._settings([id_]).items():
                yield ("param_groups", id_, key), value

    def _settings(self, ids: list[str]) -> dict[str, Any]:
        saved = self._contents.settings.get(ids[0], {}) if ids else {}
        given = {key: value for key, value in saved.items() if key not in NOT_SETTINGS}
        names = {"param_names": saved["param_names"]} if "param_names" in saved else {}
        if self._wanted.layout == "torch" and is_muons(saved):
            return muon_group(given) | names
        if self._wanted.layout == "torch":
            group = {"bias_correction": True, **{key: value for key, value in given.items() if key != ALGORITHM}}
            return torch_group(group, bool(given.get("decoupled_weight_decay", True))) | names
        given = our_group(given) if is_muons(saved) else given
        older = {"bias_correction": True} if rule_of(saved) == ADAM else {}
        step = max((self._steps[id_] for id_ in ids if id_ in self._steps), default=0)
        kept = {**older, **without_adamws_keys(given), **names, STEP: step}
        flags = int(saved.get("fused_optim_native", 0))  # rounding goes on as it was
        keyed = bool(flags & KEYED_BY_NAMES)
        return saved_group(kept, self._dtypes(ids, given), DESCRIPTION, native=self._packs, keyed=keyed)

    def _dtypes(self, ids: list[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """The formats that a group asks for."""
        settings = self._contents.settings.get(ids[0], {}) if ids else {}
        with_states = [name for name in map(self._optimizer.names.__getitem__, ids) if name in self._optimizer.states]
        if with_states and self._wanted.layout == "native":
            chosen = self._formats(with_states[0], self._optimizer.states[with_states[0]])
            return {spec.option: dtype for spec, dtype in chosen.items()}
        return {spec.option: given.get(spec.option, torch.float32) for spec in rule_of(settings).states}


def _itself(value: Any) -> Any:
    return value


def _with_progress(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    left = progress(entries, "converting", lambda key: entries[key].nbytes)

    def read(entry: Entry) -> Any:
        next(left, None)
        return entry.read()

    return {key: replace(entry, read=partial(read, entry)) for key, entry in entries.items()}
