"""Checkpoints in native form: the stored bits come back, on any number of ranks, or are refused.

Every load goes into a freshly built model and optimizer with other values, other hyperparameters and no states.
"""

from __future__ import annotations

import copy
import functools
import io
import re
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import cases
import distributed
from checkpoint_cases import FORMATS, WAYS, trained_states
from distributed import Part, assert_same, join_all, same_bits
from fused_optim.adam import MOMENTS
from fused_optim.sharding.dtensor import local_tensor
from native_cases import (
    EVERY_MASTER,
    IDS,
    PLAIN,
    REM8,
    REM16,
    SAVED_AT,
    SHAPES,
    NativeRun,
    build,
    stored,
    tensors_of,
    train,
    trained,
)
from pairwise import each_once
from peers import FusedAdam


@pytest.mark.parametrize("master, fmt", each_once(product(cases.MASTERS, FORMATS)), **IDS)
def test_every_bit_comes_back_and_training_goes_on_alike(master: cases.Master, fmt: torch.dtype, device: str) -> None:
    """The file is read to the CPU."""
    model, optimizer = trained(master, fmt, device)
    other, fresh = build(master, fmt, device, fresh=True)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    other.load_state_dict(model.state_dict())
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    assert_same(stored(other, fresh), stored(model, optimizer))
    assert fresh.checkpoint_format == "unscaled"
    for each in ((model, optimizer), (other, fresh)):
        train(*each, range(SAVED_AT, SAVED_AT + 2))
    assert_same(stored(other, fresh), stored(model, optimizer))


@pytest.mark.parametrize("fmt", FORMATS, **IDS)
def test_form_of_states(fmt: torch.dtype) -> None:
    _, optimizer = trained(REM16, fmt)
    state_dict = optimizer.state_dict()
    scaled = fmt in (torch.int8, torch.float8_e4m3fn, torch.float16)
    blocks = {"wide": 128, "narrow": 64, "conv": 64, "vacant": 128, "void": 128}
    for index, (name, shape) in enumerate(SHAPES.items()):
        if name == "wide":  # frozen
            assert index not in state_dict["state"]
            continue
        states = state_dict["state"][index]
        for moment in MOMENTS:
            value = states[moment]
            if not scaled or name not in blocks:
                expected = torch.bfloat16 if fmt == torch.bfloat16 else torch.float32
                assert (value.dtype, value.shape) == (expected, shape)
                continue
            assert [*value] == ["bits", "scale", "format", "block"]
            assert (value["bits"].shape, value["bits"].element_size()) == (shape, 2 if fmt == torch.float16 else 1)
            row = torch.Size(shape[1:]).numel()
            assert value["scale"].shape == (shape[0], row // blocks[name])
            assert (value["block"], type(value["format"])) == (blocks[name], int)
        if len(shape) == 1:
            assert states["master_param"].dtype == torch.float32
        else:
            assert {key: value.dtype for key, value in states["master_param"].items()} == {
                "rem16": torch.uint8,
                "check": torch.int32,
            }


@pytest.mark.parametrize("backend", ["torch", "own"])
@pytest.mark.parametrize("target", [torch.float16, torch.float32, torch.int8], **IDS)
def test_fp16_moments_of_older_checkpoints_keep_their_values(
    target: torch.dtype, backend: str, engine: str, use_backend: Callable[[str], None]
) -> None:
    """Their scales were the blocks' largest values, not powers of two."""
    use_backend(engine if backend == "own" else backend)
    model, optimizer = trained(PLAIN, torch.float16, engine)
    state_dict = copy.deepcopy(optimizer.state_dict())
    expected: list[dict[str, np.ndarray]] = []
    for states in state_dict["state"].values():
        expected.append({})
        for name in MOMENTS:
            if isinstance(states[name], Tensor):
                expected[-1][name] = states[name].cpu().numpy()
                continue
            bits, scale = states[name]["bits"], states[name]["scale"]
            x = np.random.default_rng(bits.numel()).standard_normal(bits.shape).astype(np.float32)
            blocks = (np.abs(x) if name == "exp_avg_sq" else x).reshape(-1, states[name]["block"])
            absmax = np.abs(blocks).max(1, keepdims=True, initial=0)
            codes = (blocks / np.maximum(absmax, 2.0**-120)).astype(np.float16)
            bits.copy_(torch.from_numpy(codes).view(bits.shape))
            scale.copy_(torch.from_numpy(absmax).view(scale.shape))
            expected[-1][name] = (codes.astype(np.float32) * absmax).reshape(bits.shape)
    other, fresh = build(PLAIN, target, engine, fresh=True)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(state_dict)
    moments = {torch.float16: 0.0, torch.float32: 0.0, torch.int8: 0.02}[target]
    trained_names = [key for key, param in other.items() if param in fresh.state]
    by_name = dict(zip(trained_names, expected, strict=True))
    for key, wanted in by_name.items():
        for name in MOMENTS:
            actual = fresh.get_unscaled_state(other[key], name).cpu().numpy()
            np.testing.assert_allclose(actual, wanted[name], rtol=0, atol=moments * np.abs(wanted[name]).max(initial=0))
    if target != torch.float16:
        return
    param, before = other["narrow"], by_name["narrow"]
    for key, each in other.items():
        each.grad = torch.zeros_like(each) if key == "narrow" else None
    fresh.step()  # reads the loaded scales, and writes new ones
    for name, beta in zip(MOMENTS, (0.9, 0.999), strict=True):
        actual = fresh.get_unscaled_state(param, name).cpu().numpy()
        blocks = np.abs(before[name]).reshape(-1, 64).max(1).repeat(64).reshape(before[name].shape)
        error = 2.0**-10 * np.abs(before[name]) + 2.0**-38 * blocks
        assert np.all(np.abs(actual - beta * before[name]) <= error)
    scale = fresh.store.layouts[param].scales
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))


# Not all masters x formats x formats: each two formats, with the masters in turn.
@pytest.mark.parametrize(
    "master, source, target",
    [(cases.MASTERS[i % len(cases.MASTERS)], *formats) for i, formats in enumerate(product(FORMATS, FORMATS))],
    **IDS,
)
def test_other_formats_are_loaded_as_from_the_unscaled_form(
    master: cases.Master, source: torch.dtype, target: torch.dtype, device: str
) -> None:
    model, optimizer = trained(master, source, device)
    results = []
    for form in ("native", "unscaled"):
        optimizer.checkpoint_format = form
        other, fresh = build(master, target, device, fresh=True)
        other.load_state_dict(model.state_dict())
        fresh.load_state_dict(optimizer.state_dict())
        results.append(stored(other, fresh))
    assert_same(*results)


@pytest.mark.parametrize("source", [REM16, REM8], **IDS)
@EVERY_MASTER
def test_remainders_load_into_other_masters_and_precisions(source: cases.Master, master: cases.Master) -> None:
    model, optimizer = trained(source, torch.int8)
    expected = optimizer.master_state_dict(model)
    other, fresh = build(master, torch.int8, fresh=True)
    other.load_state_dict(model.state_dict())  # float32 holds the bits of bfloat16 as well
    if master.param_dtype == torch.float16:
        for name, param in other.items():  # which float16 does not
            param.data.mul_(2.0 ** (name != "vector"))
        fresh.load_state_dict(optimizer.state_dict())
        with pytest.raises(ValueError, match="low bits"):
            fresh.step()
        return
    fresh.load_state_dict(optimizer.state_dict())
    for name, value in fresh.master_state_dict(other).items():
        assert ((value - expected[name]).abs() <= 2.0 ** -min(master.bits, 24) * expected[name].abs()).all()
        assert master.bits < 24 or torch.equal(value, expected[name])


@pytest.mark.parametrize("fmt", FORMATS[:3], **IDS)
def test_poisoned_and_empty_blocks_come_back(fmt: torch.dtype) -> None:
    model, optimizer = trained(REM16, fmt)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        param.grad.view(-1)[3:4] = float("nan")
    optimizer.step()
    other, fresh = build(REM16, fmt, fresh=True)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    assert_same(stored(other, fresh), stored(model, optimizer))
    values = fresh.get_unscaled_state(other["narrow"], "exp_avg")
    assert values[0].isnan().all() and not values[1:].isnan().any()


def test_the_state_dict_is_a_copy_and_loading_keeps_nothing_of_it() -> None:
    model, optimizer = trained(REM16, torch.int8)
    state_dict = optimizer.state_dict()
    packed = {key: value for key, value in tensors_of(state_dict["state"]).items() if "avg." in key or "param." in key}
    kept = copy.deepcopy(packed)
    assert packed
    other, fresh = build(REM16, torch.int8, fresh=True)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(state_dict)
    train(model, optimizer, range(5, 7))
    train(other, fresh, range(5, 7))
    assert_same(packed, kept)


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_remainders_at_any_address(start: int) -> None:
    """Bytes of a file may lie where int16 may not begin."""
    model, optimizer = trained(REM16, torch.int8)
    state_dict = optimizer.state_dict()
    moved = 0
    for state in state_dict["state"].values():
        master = state.get("master_param")
        if isinstance(master, dict):
            low = master["rem16"]
            buffer = torch.zeros(low.numel() + 8, dtype=torch.uint8)
            master["rem16"] = buffer[start : start + low.numel()].view(low.shape).copy_(low)
            moved += 1
    other, fresh = build(REM16, torch.int8, fresh=True)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(state_dict)
    assert moved > 3
    assert_same(stored(other, fresh), stored(model, optimizer))


# --- description and bad input ----------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


def each_group(**changes: Any) -> Change:
    return lambda d: [group.update(changes) for group in d["param_groups"]]


def last_matrix(key: str, **changes: Any) -> Change:
    return lambda d: d["state"][3 if key == "master_param" else 2][key].update(changes)


BAD: dict[str, tuple[Change, type[Exception], str]] = {
    "newer": (each_group(fused_optim_version=2), ValueError, "version 2, .* up to 1"),
    "unscaled": (each_group(fused_optim_native=0), ValueError, "checkpoint_format = 'unscaled'"),
    "no bits": (lambda d: d["state"][2]["exp_avg"].pop("bits"), KeyError, "exp_avg: .*lacks bits"),
    "empty": (lambda d: d["state"][2].update(exp_avg={}), KeyError, "parameter 2 .*lacks exp_avg"),
    "format": (last_matrix("exp_avg", format=77), ValueError, "unknown state format 77"),
    "unscaled format": (last_matrix("exp_avg", format=1), ValueError, "unknown state format 1"),
    "block": (last_matrix("exp_avg", block=5), ValueError, "blocks of 5 .* rows of 64"),
    "other block": (last_matrix("exp_avg", block=32), ValueError, r"scale: expected shape \(5, 2\)"),
    "dtype": (
        last_matrix("exp_avg", bits=torch.zeros(5, 64)),
        TypeError,
        "expected torch.int8, got torch.float32",
    ),
    "shape": (last_matrix("exp_avg_sq", bits=torch.zeros(3, dtype=torch.uint8)), ValueError, r"expected shape \(5, 64"),
    "scale": (last_matrix("exp_avg", scale=1.0), TypeError, "scale: expected a tensor, got float"),
    "remainder": (last_matrix("master_param", rem16=torch.zeros(5, 50).short()), TypeError, "parameter 3 .*rem16"),
    "no check": (lambda d: d["state"][3]["master_param"].pop("check"), KeyError, "expected rem16 or rem8, and check"),
}


@pytest.mark.parametrize("change, error, message", BAD.values(), ids=BAD)
def test_bad_state_dicts_change_nothing(change: Change, error: type[Exception], message: str) -> None:
    model, optimizer = trained(REM16, torch.int8)
    state_dict = copy.deepcopy(optimizer.state_dict())
    change(state_dict)
    other, fresh = build(REM16, torch.int8, fresh=True)
    other.load_state_dict(model.state_dict())
    fresh.initialize_state()
    before, groups = stored(other, fresh), copy.deepcopy(fresh.param_groups[0]["lr"])
    with pytest.raises(error, match=message):
        fresh.load_state_dict(state_dict)
    assert_same(stored(other, fresh), before)
    assert fresh.param_groups[0]["lr"] == groups


# --- size -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [torch.int8, torch.float8_e4m3fn], **IDS)
@pytest.mark.parametrize("master, ratio", [(PLAIN, 3.5), (REM8, 3.5), (REM16, 2.8)], **IDS)
def test_files_are_several_times_smaller(master: cases.Master, ratio: float, fmt: torch.dtype, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).to(master.param_dtype)
    optimizer = FusedAdam(model.parameters(), exp_avg_dtype=fmt, exp_avg_sq_dtype=fmt, **master.options)
    optimizer.initialize_state()
    sizes = {}
    for form in ("unscaled", "native"):
        optimizer.checkpoint_format = form
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no process group
            dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=tmp_path / form)
        sizes[form] = sum(file.stat().st_size for file in (tmp_path / form).iterdir())
    assert sizes["unscaled"] >= ratio * sizes["native"], sizes


# --- several processes ------------------------------------------------------------------------------------------


def hop(
    how: str,
    master: str,
    way: str,
    source: str | None,
    target: str,
    steps: range,
    forms: tuple[str, str] = ("native",) * 2,
) -> list[dict[str, Part]]:
    """Load into a fresh run, train, save: what was loaded, and what was saved."""
    run = NativeRun(how, master, fresh=source is not None)
    loaded = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if source is not None:
            run.optimizer.checkpoint_format = forms[0]
            WAYS[way][1](run, source)
            loaded = run.snapshot()
        run.train(steps.start, steps.stop)
        run.optimizer.checkpoint_format = forms[1]
        WAYS[way][0](run, target)
    return [loaded, run.snapshot()]


def journey(
    worlds: Sequence[tuple[int, str]], master: str, way: str, folder: Path, forms: Sequence[str] | None = None
) -> None:
    """From ranks to ranks, one step on each, compared with a run that is never interrupted."""
    saved: dict[str, Tensor] = {}
    forms = forms or ["native"] * len(worlds)
    path = None
    for i, (world_size, how) in enumerate(worlds):
        target = str(folder / str(i))
        used = (forms[i - 1], forms[i])
        results = distributed.run(world_size, hop, how, master, way, path, target, range(i, i + 1), used)
        if path is not None:
            assert_same(trained_states(join_all([r[0] for r in results])), saved)
        saved, path = trained_states(join_all([r[1] for r in results])), target
    assert_same(saved, straight(master, len(worlds)))


def run_straight(master: str, steps: int) -> dict[str, Part]:
    run = NativeRun("plain", master)
    run.train(0, steps)
    return run.snapshot()


@functools.cache
def straight(master: str, steps: int) -> dict[str, Tensor]:
    return trained_states(join_all(distributed.run(1, run_straight, master, steps)))


ALL_WORLDS = [(4, "fsdp"), (2, "fsdp"), (3, "fsdp"), (1, "fsdp")]


@pytest.mark.parametrize(
    "master, way",
    [
        pytest.param("remainder16", "nested", marks=pytest.mark.long),  # on the ways of the next test
        ("remainder8", "flat"),
        pytest.param("bfloat16", "flat", marks=pytest.mark.long),
        ("float32", "plain"),
        ("float16", "nested"),
        pytest.param("float16", "flat", marks=pytest.mark.long),
    ],
)
def test_resharding_changes_no_bit(master: str, way: str, tmp_path: Path) -> None:
    journey(ALL_WORLDS, master, way, tmp_path)


@pytest.mark.parametrize(
    "worlds, way",
    [  # every interface: test_checkpoint_matrix.py; in the background: test_async_saves.py
        ([(1, "plain"), (4, "hsdp"), (2, "fsdp")], "nested"),
        ([(4, "tp"), (4, "tp")], "nested"),
    ],
    **IDS,
)
def test_every_interface_and_placement_changes_no_bit(worlds: list[tuple[int, str]], way: str, tmp_path: Path) -> None:
    journey(worlds, "remainder16", way, tmp_path)


@pytest.mark.parametrize("way", ["nested", pytest.param("flat", marks=pytest.mark.long)])
def test_conversion_changes_no_bit(way: str, tmp_path: Path) -> None:
    """A checkpoint is loaded in its own form and saved in the other one."""
    journey([(2, "fsdp"), (3, "fsdp"), (2, "fsdp")], "remainder16", way, tmp_path, ["native", "unscaled", "native"])


def load_directly(how: str, source: str, master: str, shift: int) -> list[dict[str, Part]]:
    """From an optimizer with other placements and, with ``shift``, other formats; in both forms."""
    saved = NativeRun(source, master)
    saved.train(0, SAVED_AT)
    found = []
    for form in ("native", "unscaled"):
        saved.optimizer.checkpoint_format = form
        loaded = NativeRun(how, master, FORMATS[shift:] + FORMATS[:shift], fresh=True)
        for (_, param), (_, other) in zip(loaded.model.named_parameters(), saved.model.named_parameters(), strict=True):
            local_tensor(param.data).copy_(local_tensor(distributed.shard_like(whole(other), param)))
        loaded.optimizer.load_state_dict(saved.optimizer.state_dict())
        found.append(loaded.snapshot())
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if hasattr(tensor, "full_tensor") else tensor.detach()


@pytest.mark.parametrize(
    "placements, shift", each_once(product([("fsdp", "plain"), ("tp", "plain"), ("plain", "fsdp")], [2, 0])), **IDS
)
def test_other_placements_and_formats_are_loaded_as_from_the_unscaled_form(
    placements: tuple[str, str], shift: int
) -> None:
    target, source = placements
    results = distributed.run(4, load_directly, target, source, "remainder16", shift)
    native, unscaled = (join_all([result[i] for result in results]) for i in (0, 1))
    assert_same(native, unscaled)


def refuse(why: str, folder: str) -> str:
    """A load that fails; returns the error's text."""
    saved, run = NativeRun("fsdp", "remainder16"), NativeRun("fsdp", "remainder16", fresh=True)
    saved.train(0, 1)
    if why == "unscaled file":
        saved.optimizer.checkpoint_format = "unscaled"
    state = get_optimizer_state_dict(saved.model, saved.optimizer)
    if why == "newer":
        for group in state["param_groups"]:
            group["fused_optim_version"] = 2
    dcp.save(state, checkpoint_id=folder)
    run.optimizer.initialize_state()
    if why == "unscaled template":
        run.optimizer.checkpoint_format = "unscaled"
    elif why == "formats":
        run = NativeRun("fsdp", "remainder16", FORMATS[2:3] + FORMATS[1:], fresh=True)
        run.optimizer.initialize_state()
    before = {name: values for name, (_, _, values) in run.snapshot().items()}
    with pytest.raises((ValueError, TypeError, CheckpointException)) as error:
        template = get_optimizer_state_dict(run.model, run.optimizer)
        dcp.load(template, checkpoint_id=folder)
        set_optimizer_state_dict(run.model, run.optimizer, template)
    after = {name: values for name, (_, _, values) in run.snapshot().items()}
    packed = [name for name in before if "even" in name and ("int8" in name or "float8" in name)]
    assert packed and all(same_bits(after[name], before[name]) for name in packed)
    return str(error.value)


@pytest.mark.parametrize(
    "why, message",
    [
        ("newer", "version 2, this fused_optim reads versions up to 1"),
        ("formats", "exp_avg: bits of int8: expected torch.int8, got torch.float16; .*state formats"),
        ("unscaled file", "Missing key .*exp_avg"),
        ("unscaled template", "Missing key .*exp_avg"),
    ],
)
def test_what_cannot_be_loaded_is_refused_on_every_rank(why: str, message: str, tmp_path: Path) -> None:
    errors = distributed.run(2, refuse, why, str(tmp_path / "checkpoint"), timeout=20)
    assert all(re.search(message, error) for error in errors), errors


def load_other_form(form: str, way: str, path: str) -> None:
    """A state dict of the other form is what torch loads into."""
    run = NativeRun("fsdp", "remainder16", fresh=True)
    run.optimizer.initialize_state()
    run.optimizer.checkpoint_format = form
    if way == "partial":
        state = get_optimizer_state_dict(run.model, run.optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
        set_optimizer_state_dict(run.model, run.optimizer, state)
    else:
        WAYS[way][1](run, path)


def load_either_form(path: str) -> list[dict[str, Part]]:
    """A full state dict in the unscaled form, loaded while that is the optimizer's form and while it is not."""
    found = []
    for form in ("unscaled", "native"):
        run = NativeRun("fsdp", "remainder16", fresh=True)
        run.optimizer.initialize_state()
        run.optimizer.checkpoint_format = form
        WAYS["full"][1](run, path)
        run.optimizer.checkpoint_format = "unscaled"
        found.append(run.snapshot())
    return found


def test_full_unscaled_states_load_whatever_the_form(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    distributed.run(2, hop, "fsdp", "remainder16", "full", None, path, range(1), (None, "unscaled"))
    results = distributed.run(2, load_either_form, path)
    assert_same(*(join_all([result[i] for result in results]) for i in (0, 1)))


@pytest.mark.parametrize(
    ("forms", "way"),
    [(("native", "unscaled"), way) for way in ("partial", "full", "broadcast")]
    + [(("unscaled", "native"), way) for way in ("partial", "broadcast")],
    **IDS,
)
def test_another_form_is_never_half_loaded(forms: tuple[str, str], way: str, tmp_path: Path) -> None:
    """Where torch itself does not fail."""
    path = str(tmp_path / "checkpoint")
    saved_as = "nested" if way == "partial" else "full"
    distributed.run(2, hop, "fsdp", "remainder16", saved_as, None, path, range(1), (None, forms[0]))
    with pytest.raises(distributed.RemoteError) as error:
        distributed.run(2, load_other_form, forms[1], way, path)
    reports = str(error.value).split("rank 1 raised")
    assert len(reports) == 2
    told = f"set optimizer.checkpoint_format = '{forms[0]}'"
    for report in reports:
        in_torch = way != "partial" and "_unflatten_state_dict(" in report
        assert in_torch or told in report or "another rank cannot load" in report
    assert any(told in report or "_unflatten_state_dict(" in report for report in reports)


def eight_bit(to: torch.dtype, folder: str) -> list[dict[str, Part]]:
    """Through torch.distributed.checkpoint from int8 to another format, whose tensors are what is loaded into."""
    saved, run = (NativeRun("fsdp", "bfloat16", [fmt] * 5, fresh=fmt == to) for fmt in (torch.int8, to))
    saved.train(0, SAVED_AT)
    WAYS["nested"][0](saved, folder)
    WAYS["nested"][1](run, folder)
    saved.optimizer.checkpoint_format = "unscaled"
    run.model.load_state_dict(saved.model.state_dict())  # frozen parameters, which the optimizer has no masters of
    direct = NativeRun("fsdp", "bfloat16", [to] * 5, fresh=True)
    direct.model.load_state_dict(saved.model.state_dict())
    direct.optimizer.load_state_dict(saved.optimizer.state_dict())
    return [run.snapshot(), direct.snapshot()]


def test_eight_bit_formats_load_into_each_other(tmp_path: Path) -> None:
    results = distributed.run(2, eight_bit, torch.float8_e4m3fn, str(tmp_path / "checkpoint"))
    loaded, direct = (trained_states(join_all([result[i] for result in results])) for i in (0, 1))
    assert_same(loaded, direct)
